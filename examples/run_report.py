"""What a run did to its clip bounds, from `trainer.state.log_history`: a short table and a figure."""

from pathlib import Path
from typing import Any


LOWER, UPPER = "clip_bounds/lower", "clip_bounds/upper"
BF16_SHARE = "clip_share/lower_bf16"
FP8_SHARE_AT_REFERENCE = "clip_share/lower_at_reference"
FP8_SHARE = "clip_share/lower"
SYNC_DIFF, SYNC_DIFF_FIRST = "rollout/sync_logp_diff", "rollout/sync_logp_diff_first"
RHO_REF, RHO_AFTER = "update_ratio/bf16", "update_ratio/after"


def recalibrations(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of the log that hold a recalibration."""
    return [entry for entry in history if entry.get(BF16_SHARE) is not None]


def mean(entries: list[dict[str, Any]], key: str) -> float | None:
    values = [entry[key] for entry in entries if entry.get(key) is not None]
    return sum(values) / len(values) if values else None


def table(
    history: list[dict[str, Any]],
    reference_bounds: tuple[float, float],
    final_bounds: tuple[float, float],
    reward_before: float | None = None,
    reward_after: float | None = None,
    precision: str = "FP8",
) -> str:
    """
    The closing table.

    Shares and ratios are means over the second half of the recalibrations, when the bounds have moved away from where
    they began; in a run with fixed bounds, over the second half of the log. `precision` names the one trained in.
    """
    entries = [entry for entry in history if entry.get(FP8_SHARE) is not None]
    calibrated = recalibrations(history)
    source = calibrated or entries
    window = source[len(source) // 2 :]
    rows: list[tuple[str, str]] = []
    if reward_before is not None and reward_after is not None:
        rows.append(("reward on held-out prompts, before -> after", f"{reward_before:.3f} -> {reward_after:.3f}"))
    in_force = [entry for entry in history if LOWER in entry]
    if in_force:
        first = (in_force[0][LOWER], in_force[0][UPPER])
        rows.append(("clip bounds [L, H], first -> last", f"{_interval(first)} -> {_interval(final_bounds)}"))
    clipped = "clipped A<0 tokens"
    if calibrated:
        bf16, at_reference = mean(window, BF16_SHARE), mean(window, FP8_SHARE_AT_REFERENCE)
        times_bf16 = f" ({at_reference / bf16:.1f}x)" if bf16 and at_reference else ""
        rows += [
            (f"{clipped}: BF16 at {reference_bounds[0]:.2f}", _percent(bf16)),
            (f"{clipped}: {precision} at {reference_bounds[0]:.2f}", _percent(at_reference) + times_bf16),
        ]
    rows += [
        (f"{clipped}: {precision} at the L in force", _percent(mean(window, FP8_SHARE))),
        ("update ratio rho: BF16 at the reference bounds", _number(mean(window, RHO_REF))),
        (f"update ratio rho: {precision} at the calibrated bounds", _number(mean(window, RHO_AFTER))),
    ]
    rows += _rollout_rows(history)
    rows = [(name, value) for name, value in rows if value]
    if calibrated:
        means = f"means over the last {len(window)}" if len(window) > 1 else "those of the last"
        title = f"{len(calibrated)} recalibration{'s' * (len(calibrated) > 1)}; shares and ratios are {means}"
    elif not entries:
        title = "No token with a negative advantage in the log: no group of completions had unequal rewards"
    else:
        means = f"means over the last {len(window)} log entries" if len(window) > 1 else "those of the last log entry"
        title = f"No recalibration; shares are {means}"
    width = max((len(name) for name, _ in rows), default=0) + 2
    lines = [title, *(f"{name:<{width}}{value}" for name, value in rows)]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def _rollout_rows(history: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """How far the engine that generated was from the trainer, over the second half of its log; none without one."""
    entries = [entry for entry in history if "mismatch/ess" in entry]
    window = entries[len(entries) // 2 :]
    rows = [
        ("rollout: KL of trainer and engine (k3), nats per token", _number(mean(window, "mismatch/k3_kl"), 4)),
        ("rollout: effective share of the samples (1: no mismatch)", _number(mean(window, "mismatch/ess"))),
    ]
    compared = [entry for entry in history if SYNC_DIFF in entry]
    if compared:
        last, first = compared[-1][SYNC_DIFF], compared[-1][SYNC_DIFF_FIRST]
        rows.append(("rollout: |dlogp| after the last sync (after the first)", f"{last:.3f} ({first:.3f})"))
    return rows


def _interval(bounds: tuple[float, float]) -> str:
    return f"[{bounds[0]:.2f}, {bounds[1]:.2f}]"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def figure(
    history: list[dict[str, Any]], reference_bounds: tuple[float, float], path: Path, precision: str = "FP8"
) -> bool:
    """Draw bounds, clip shares and reward over the run into `path`; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    entries = [entry for entry in history if entry.get(FP8_SHARE) is not None]
    calibrated = recalibrations(history)

    def series(key: str, source: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
        points = [(entry["step"], entry[key]) for entry in source if entry.get(key) is not None]
        return [step for step, _ in points], [value for _, value in points]

    drawing = Figure(figsize=(8, 8), layout="constrained")
    bounds, shares, reward = drawing.subplots(3, 1, sharex=True)
    for key, reference, color in ((UPPER, reference_bounds[1], "C3"), (LOWER, reference_bounds[0], "C0")):
        name = "H" if key == UPPER else "L"
        bounds.step(*series(key, entries), where="post", color=color, label=f"{name} in force")
        bounds.plot(*series(key + "_target", calibrated), "x", color=color, label=f"{name}* solved")
        bounds.axhline(reference, color=color, linestyle=":", linewidth=1, label=f"{name} of BF16")
    bounds.set_ylabel("clip bounds")
    steps, values = series(FP8_SHARE_AT_REFERENCE, entries)
    shares.plot(
        steps, [100 * value for value in values], color="C1", label=f"{precision} at {reference_bounds[0]:.2f}"
    )
    steps, values = series(FP8_SHARE, entries)
    shares.plot(steps, [100 * value for value in values], color="C0", label=f"{precision} at L in force")
    steps, values = series(BF16_SHARE, calibrated)
    shares.plot(
        steps, [100 * value for value in values], "ko", markersize=4, label=f"BF16 at {reference_bounds[0]:.2f}"
    )
    shares.set_ylabel("clipped A<0 tokens, %")
    reward.plot(*series("reward", entries), color="C2", label="training reward")
    reward.set_ylabel("reward")
    reward.set_xlabel("optimizer step")
    bounds.set_ylim(top=1.1 * bounds.get_ylim()[1])  # room for the legend
    bounds.legend(loc="upper center", fontsize="small", ncols=6)
    shares.legend(loc="upper center", fontsize="small", ncols=3)
    reward.legend(loc="lower right", fontsize="small")
    for panel in (bounds, shares, reward):
        panel.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)
    return True
