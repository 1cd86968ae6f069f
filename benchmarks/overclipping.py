"""The mechanism, measured: how much more FP8 clips than BF16 on the same tokens, and what calibration makes of it.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/overclipping.py       # every recipe, 1.5 hours on one free core
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/overclipping.py --recipes rowwise --runs calibrated --mini_batch 256

Small mini-batches are quick and noisy: the targets come from the tokens BF16 clips, about 1 in 250.

For each recipe two GRPO runs on the embedded task from the same start: *vanilla* (bounds fixed at the BF16 reference)
and *calibrated*. Every `--interval` generation batches both score the batch in BF16 as well; the vanilla run only to
look. Numbers pool the tokens of the recalibration batches of the second half of a run (sums over sums):

    BF16       share of negative-advantage tokens BF16 clips at the reference bounds
    FP8@ref    share FP8 clips at the reference bounds, same tokens: what vanilla FP8 does
    in force   share FP8 clips at the bounds that were in force, calibrated on earlier batches
    rho        positive-to-negative update ratio: BF16 at the reference, FP8 at the bounds in force
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, embedded_task, versions
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_fp8 import CalibratedClippingCallback, FP8GRPOConfig, FP8GRPOTrainer


@dataclass
class Row:
    """Sums of one recalibration batch."""

    negative: int
    bf16: int
    fp8_at_reference: int
    fp8_in_force: int
    positive: int
    bf16_upper: int
    fp8_upper_at_reference: int
    fp8_upper_in_force: int
    rho_ref: tuple[float, float]
    rho: tuple[float, float]
    lower: float
    upper: float


class Recorder(CalibratedClippingCallback):
    """Calibrated Clipping that keeps the numbers of each recalibration; `frozen` measures and leaves the bounds."""

    def __init__(self, *args, frozen: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.frozen, self.rows = frozen, []

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if self.frozen:
            self.clip_lower, self.clip_upper = args.reference_bounds

    def on_generation_end(self, host):
        if host.clip_statistics is not None:
            numbers = host.clip_statistics.numbers()
            (lower, upper), (ref_lower, ref_upper) = (self.clip_lower, self.clip_upper), host.args.reference_bounds
            fp8, bf16 = numbers.fp8, numbers.bf16
            self.rows.append(
                Row(
                    negative=fp8.num_negative,
                    bf16=bf16.lower_clipped[ref_lower],
                    fp8_at_reference=fp8.lower_clipped[ref_lower],
                    fp8_in_force=fp8.lower_clipped[lower],
                    positive=fp8.num_positive,
                    bf16_upper=bf16.upper_clipped[ref_upper],
                    fp8_upper_at_reference=fp8.upper_clipped[ref_upper],
                    fp8_upper_in_force=fp8.upper_clipped[upper],
                    rho_ref=(bf16.positive_sum[ref_upper], bf16.negative_sum[ref_lower]),
                    rho=(fp8.positive_sum[upper], fp8.negative_sum[lower]),
                    lower=lower,
                    upper=upper,
                )
            )
        bounds = self.clip_lower, self.clip_upper
        super().on_generation_end(host)
        if self.frozen:
            self.clip_lower, self.clip_upper = bounds


def run(recipe: str, frozen: bool, model_path: str, options: argparse.Namespace, output_dir: str) -> dict:
    """One GRPO run; pooled numbers of its second half."""
    policy = Recorder(calibration_interval=options.interval, frozen=frozen)
    args = FP8GRPOConfig(
        output_dir,
        fp8_recipe=recipe,
        fp8_scale_rounding=options.scale_rounding,
        max_steps=4 * options.batches,
        per_device_train_batch_size=options.mini_batch,
        num_generations=8,
        steps_per_generation=4,
        max_completion_length=embedded_task.MAX_COMPLETION_LENGTH,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        loss_type=options.loss_type,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        gradient_checkpointing=False,
        seed=options.seed,
    )
    train, held_out = embedded_task.datasets()
    trainer = FP8GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model_path),
        embedded_task.exact_answer_reward,
        args,
        train_dataset=train,
        processing_class=AutoTokenizer.from_pretrained(model_path),
        callbacks=[policy],
    )
    trainer.train()
    rows = policy.rows[len(policy.rows) // 2 :]

    def pooled(name, count="negative"):
        return sum(getattr(row, name) for row in rows) / sum(getattr(row, count) for row in rows)

    def rho(name):
        return sum(getattr(row, name)[0] for row in rows) / sum(getattr(row, name)[1] for row in rows)

    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    last = logs[-max(len(logs) // 4, 1) :]
    result = {
        "recipe": recipe,
        "run": "vanilla" if frozen else "calibrated",
        "recalibrations": len(rows),
        "bf16_clipped_tokens_min": min(row.bf16 for row in rows),
        "bf16_clipped_tokens_mean": sum(row.bf16 for row in rows) / len(rows),
        "bf16": pooled("bf16"),
        "fp8_at_reference": pooled("fp8_at_reference"),
        "fp8_in_force": pooled("fp8_in_force"),
        "bf16_upper": pooled("bf16_upper", "positive"),
        "fp8_upper_at_reference": pooled("fp8_upper_at_reference", "positive"),
        "fp8_upper_in_force": pooled("fp8_upper_in_force", "positive"),
        "rho_ref": rho("rho_ref"),
        "rho": rho("rho"),
        "lower": [round(row.lower, 4) for row in rows],
        "upper": [round(row.upper, 4) for row in rows],
        "reward": sum(entry["reward"] for entry in last) / len(last),
        "entropy": sum(entry["entropy"] for entry in last) / len(last),
        "ratio_nmae": sum(e.get("fp8/ratio_nmae", 0) for e in logs) / max(sum("fp8/ratio_nmae" in e for e in logs), 1),
        "prob_nmae": sum(e.get("fp8/prob_nmae", 0) for e in logs) / max(sum("fp8/prob_nmae" in e for e in logs), 1),
        "seconds": trainer.state.log_history[-1]["train_runtime"],
    }
    result["fp8_over_bf16"] = result["fp8_at_reference"] / result["bf16"] if result["bf16"] else float("inf")
    result["in_force_over_bf16"] = result["fp8_in_force"] / result["bf16"] if result["bf16"] else float("inf")
    result["rho_over_rho_ref"] = result["rho"] / result["rho_ref"]
    return result


def table(results: list[dict]) -> str:
    """Markdown table, one row per run."""
    lines = [
        "| recipe | run | BF16 | FP8@ref | ratio | in force | of BF16 | rho_ref | rho | of ref | L | H "
        "| BF16 clipped/batch | reward | entropy |",
        "|" + "---|" * 15,
    ]
    for r in results:
        span = [f"{min(r[k]):.2f}-{max(r[k]):.2f}" for k in ("lower", "upper")]
        lines.append(
            f"| {r['recipe']} | {r['run']} | {r['bf16']:.2%} | {r['fp8_at_reference']:.2%} "
            f"| {r['fp8_over_bf16']:.2f} | "
            f"{r['fp8_in_force']:.2%} | {r['in_force_over_bf16']:.2f} | {r['rho_ref']:.3f} | {r['rho']:.3f} | "
            f"{r['rho_over_rho_ref']:.3f} | {span[0]} | {span[1]} | {r['bf16_clipped_tokens_mean']:.0f} | "
            f"{r['reward']:.2f} | {r['entropy']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
    parser.add_argument("--runs", nargs="+", default=["vanilla", "calibrated"], choices=["vanilla", "calibrated"])
    parser.add_argument("--scale_rounding", default="none", choices=["none", "power_of_2"])
    parser.add_argument("--batches", type=int, default=16, help="generation batches per run")
    parser.add_argument("--interval", type=int, default=1, help="generation batches between recalibrations")
    parser.add_argument(
        "--mini_batch", type=int, default=2560, help="completions per mini-batch, 4 mini-batches per batch"
    )
    parser.add_argument("--learning_rate", type=float, default=3.3e-5)
    parser.add_argument("--loss_type", default="dapo")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "outputs" / "overclipping.jsonl", help="one line per run"
    )
    options = parser.parse_args()
    model_path = str(embedded_task.build_or_load())
    options.output.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for recipe in options.recipes:
        for name in options.runs:
            with tempfile.TemporaryDirectory() as folder:
                results.append(run(recipe, name == "vanilla", model_path, options, folder))
            # written as soon as known: a stopped benchmark keeps what it has measured
            with options.output.open("a") as file:
                file.write(json.dumps({**vars(options), "output": None, **results[-1]}) + "\n")
            print(table(results), flush=True)
    print(versions())


if __name__ == "__main__":
    main()
