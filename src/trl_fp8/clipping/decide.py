"""The mathematics of clip bounds: pure functions and records on tensors, no trainer, no logging.

Shapes: B sequences, T completion tokens. Symbols of the paper (arXiv 2609.22870, and `docs/method.md`):
    r      importance ratio pi_theta / pi_old of a token, under the FP8 or the BF16 forward
    w      truncated importance weight min(pi_old / pi_sampler, C), 1 where the sampler is the policy itself
    A      advantage
    L, H   lower and upper clip bound on r
    F(c)   share of A < 0 tokens with r <= c
    P(h)   sum over A > 0 with r < h of w r A
    N(c)   sum over A < 0 with r > c of w r |A|
    rho    P(H) / N(L), the positive-to-negative update ratio
A batch is reduced to additive histograms over sorted points ([`ClipStatistics`]). The points include every bound
SmoothUpdate could produce, so the decision ([`decide`]) is exact although smoothed bounds lie off the search grid.
"""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .search import ClipSearch, smooth_update
from .statistics import ClipNumbers, ClipStatistics, check_shapes


# Sums taken in another order agree to about 1e-12. Candidates whose distances differ by less than this share of the
# target are a tie, so that a decision never hangs on rounding.
_TIE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Calibration:
    """One decision.

    `lower`, `upper` are the new bounds; in the `degenerate` case the old ones, with the `reason` in words, and the
    other numbers are `None` where they are not defined. `saturated`: a target lies on the end of its search interval.
    """

    lower: float
    upper: float
    lower_target: float | None
    upper_target: float | None
    alpha_low: float | None
    clip_share_before: float | None
    rho_ref: float | None
    rho_before: float | None
    rho_after: float | None
    saturated: bool
    reason: str | None = None

    @property
    def degenerate(self) -> bool:
        """Whether the batch allows no decision, so that both old bounds stay."""
        return self.reason is not None


def decide(
    numbers: ClipNumbers, search: ClipSearch, bounds: tuple[float, float], ref_bounds: tuple[float, float]
) -> Calibration:
    """Decide the next bounds from the statistics of a batch (paper section 3, Algorithm 1; `docs/method.md` 4-6).

    Args:
        numbers: statistics taken at `search.lower_points(bounds[0], ref_bounds[0])` and `search.upper_points(...)`.
        search: ranges, step, limits.
        bounds: `(L, H)` in force for the batch.
        ref_bounds: `(c_low, c_high)`, the trust region one would use in BF16.
    """
    fp8, bf16 = numbers.fp8, numbers.bf16
    (lower, upper), (ref_lower, ref_upper) = bounds, ref_bounds
    n_negative = fp8.num_negative
    alpha_low = bf16.lower_clipped[ref_lower] / n_negative if n_negative else None
    clip_share_before = fp8.lower_clipped[lower] / n_negative if n_negative else None
    rho_ref = _divide(bf16.positive_sum[ref_upper], bf16.negative_sum[ref_lower])
    rho_before = _divide(fp8.positive_sum[upper], fp8.negative_sum[lower])

    def keep(reason: str) -> Calibration:
        shares = (alpha_low, clip_share_before, rho_ref, rho_before, rho_before)
        return Calibration(lower, upper, None, None, *shares, saturated=False, reason=reason)

    if numbers.num_nonfinite:
        return keep(f"{numbers.num_nonfinite} tokens have a ratio, weight or advantage that is not finite")
    if not n_negative or not fp8.num_positive:
        return keep(f"the batch has {n_negative} tokens of negative and {fp8.num_positive} of positive advantage")
    if rho_ref is None:
        return keep("every negative-advantage token is clipped in BF16, so the update ratio has no denominator")

    # Stage 1 compares counts, not shares: integers have no rounding
    target_count = bf16.lower_clipped[ref_lower]
    lower_target = _nearest(
        search.lower_grid, lambda c: abs(fp8.lower_clipped[c] - target_count), ref_lower, tolerance=0.0
    )
    new_lower = smooth_update(lower, lower_target, search.clip_lower_max_change)

    denominator = fp8.negative_sum[new_lower if search.rebalance_with == "smoothed" else lower_target]
    if not denominator > 0 or not fp8.negative_sum[new_lower] > 0:
        return keep("every negative-advantage token is clipped, so the update ratio has no denominator")
    upper_target = _nearest(
        search.upper_grid,
        lambda h: abs(fp8.positive_sum[h] / denominator - rho_ref),
        ref_upper,
        tolerance=_TIE_TOLERANCE * rho_ref,
    )
    new_upper = smooth_update(upper, upper_target, search.clip_upper_max_change)
    return Calibration(
        lower=new_lower,
        upper=new_upper,
        lower_target=lower_target,
        upper_target=upper_target,
        alpha_low=alpha_low,
        clip_share_before=clip_share_before,
        rho_ref=rho_ref,
        rho_before=rho_before,
        rho_after=fp8.positive_sum[new_upper] / fp8.negative_sum[new_lower],
        saturated=lower_target in (search.lower_grid[0], search.lower_grid[-1])
        or upper_target in (search.upper_grid[0], search.upper_grid[-1]),
    )


def _divide(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def _nearest(grid: list[float], distance, reference: float, tolerance: float) -> float:
    """Grid point of the smallest distance; ties go to the point nearest `reference`, then to the smaller one."""
    distances = [distance(point) for point in grid]
    best = min(distances)
    tied = [point for point, d in zip(grid, distances, strict=True) if d - best <= tolerance]
    # rounding: 0.8 - 0.78 and 0.82 - 0.8 are equally near, yet differ in the last bit
    return min(tied, key=lambda point: (round(abs(point - reference), 10), point))


def calibrate_bounds(
    ratio: Tensor,
    ref_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    is_weight: Tensor | None = None,
    ref_is_weight: Tensor | None = None,
    bounds: tuple[float, float] = (0.6, 1.8),
    ref_bounds: tuple[float, float] = (0.8, 1.24),
    search: ClipSearch = ClipSearch(),
    rebalance_with: Literal["smoothed", "target"] | None = None,
) -> Calibration:
    """Calibrated Clipping in one call over plain tensors; the trainer's streamed form decides identically.

    Args:
        ratio (`Tensor` of shape `(B, T)`): importance ratios of the FP8 forward.
        ref_ratio (`Tensor` of shape `(B, T)`): importance ratios of the BF16 forward of the same weights.
        advantages (`Tensor` of shape `(B,)` or `(B, T)`): A. Tokens with A = 0 are in neither set.
        mask (`Tensor` of shape `(B, T)`): nonzero for the tokens the loss keeps.
        is_weight, ref_is_weight (`Tensor` of shape `(B, T)` or `(B, 1)`, *optional*): truncated importance weights of
            the FP8 and of the BF16 old policy against the sampler; 1 when absent.
        bounds: `(L, H)` in force.
        ref_bounds: `(1 - epsilon, 1 + epsilon_high)`, the BF16 trust region.
        search: ranges, step and limits.
        rebalance_with: overrides `search.rebalance_with`.

    Returns: [`Calibration`], the new bounds and how they came about. Source: arXiv 2609.22870, section 3.
    """
    bounds, ref_bounds = (float(bounds[0]), float(bounds[1])), (float(ref_bounds[0]), float(ref_bounds[1]))
    for name, (lower, upper) in (("bounds", bounds), ("ref_bounds", ref_bounds)):
        if not 0 < lower < 1 < upper < math.inf:
            raise ValueError(f"{name}=({lower}, {upper}) do not enclose the ratio 1. Pass 0 < lower < 1 < upper.")
    given = {"ratio": ratio, "ref_ratio": ref_ratio, "advantages": advantages, "mask": mask}
    for name, values in given.items():
        if not isinstance(values, Tensor):
            raise TypeError(f"{name} is a {type(values).__name__}, and sums run over tensors. Pass a torch.Tensor.")
    check_shapes(
        mask.shape, ratio=ratio, ref_ratio=ref_ratio, advantages=advantages, is_weight=is_weight,
        ref_is_weight=ref_is_weight,
    )  # fmt: skip
    for name, values in (("ratio", ratio), ("ref_ratio", ref_ratio)):
        if bool(((values < 0) & mask.bool()).any()):
            raise ValueError(
                f"{name} holds negative numbers, and a ratio of probabilities is positive. Pass exp(log-ratio)."
            )
    if rebalance_with is not None:
        search = ClipSearch(**{**vars(search), "rebalance_with": rebalance_with})
    statistics = ClipStatistics(
        search.lower_points(bounds[0], ref_bounds[0]), search.upper_points(bounds[1], ref_bounds[1])
    )
    statistics.update(ratio, ref_ratio, advantages, mask, is_weight, ref_is_weight)
    return decide(statistics.numbers(), search, bounds, ref_bounds)
