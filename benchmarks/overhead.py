"""What our code costs, measured side by side in one process.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/overhead.py

1. off/stock: FP8GRPOTrainer with everything off against GRPOTrainer, whole steps (target: at most +2 %).
2. calibration: the extra time of a recalibration batch (two shadow passes and the decision), spread over an interval
   of 20 generation batches, against training time without generation (target: at most 4 %).
3. metrics: statistics and metrics of every step against training time without generation (target: at most 2 %).

Trainers take turns step by step on the embedded task, with completions of a fixed length; numbers are medians.
"""

import argparse
import json
import statistics
import tempfile
import time

from common import embedded_task, interleave, median_ratio, versions
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer


INTERVAL = 20  # the paper's


class TimedTrainer(FP8GRPOTrainer):
    """Seconds of sampling and of measuring, and of each generation batch without sampling."""

    def __init__(self, *args, **kwargs):
        self.sampling = self.measuring = 0.0
        self.batches: list[dict] = []
        super().__init__(*args, **kwargs)

    def _generate(self, prompts):
        start = time.perf_counter()
        output = super()._generate(prompts)
        self.sampling += time.perf_counter() - start
        return output

    def _measure(self, *args):
        start = time.perf_counter()
        super()._measure(*args)
        self.measuring += time.perf_counter() - start

    def sum_over_ranks(self, tensor):
        start = time.perf_counter()
        output = super().sum_over_ranks(tensor)
        self.measuring += time.perf_counter() - start
        return output

    def training_step(self, model, inputs, num_items_in_batch):
        if self._step % self.args.micro_batches_per_generation == 0:
            self.batches.append({"seconds": 0.0, "measuring": 0.0})
        self.sampling = self.measuring = 0.0
        start = time.perf_counter()
        output = super().training_step(model, inputs, num_items_in_batch)
        self.batches[-1]["seconds"] += time.perf_counter() - start - self.sampling
        self.batches[-1]["measuring"] += self.measuring
        self.batches[-1]["shadow"] = self._batch.shadow
        return output


def coin(completion_ids, **kwargs) -> list[float]:
    """Rewards of both signs whatever the model says: completions of a forced length are never right."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def build(cls, config, model_path, output_dir, steps, **settings):
    """A trainer on the embedded task, completions of a fixed length so that steps compare."""
    args = config(
        f"{output_dir}/{cls.__name__}-{len(settings)}",
        max_steps=steps,
        per_device_train_batch_size=64,
        num_generations=8,
        steps_per_generation=4,
        max_completion_length=20,
        generation_kwargs={"min_new_tokens": 20},
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        gradient_checkpointing=False,
        log_level="error",
        **settings,
    )
    train, _ = embedded_task.datasets()
    return cls(
        AutoModelForCausalLM.from_pretrained(model_path),
        coin,
        args,
        train_dataset=train,
        processing_class=AutoTokenizer.from_pretrained(model_path),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each trainer (4 per batch)")
    parser.add_argument("--recipe", default="rowwise")
    options = parser.parse_args()
    model_path = str(embedded_task.build_or_load())
    off = {"fp8_recipe": "none", "clip_policy": "fixed"}
    equal = {
        "epsilon_high": 0.24,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
    }
    with tempfile.TemporaryDirectory() as folder:
        stock = build(GRPOTrainer, GRPOConfig, model_path, folder, options.steps, **equal)
        ours = build(FP8GRPOTrainer, FP8GRPOConfig, model_path, folder, options.steps, **off, epsilon_high=0.24)
        stock_seconds, our_seconds = interleave([stock, ours], warm_up=4)

        calibrated = build(
            TimedTrainer,
            FP8GRPOConfig,
            model_path,
            folder,
            2 * options.steps,
            fp8_recipe=options.recipe,
            calibration_interval=2,
        )
        calibrated.train()
    batches = calibrated.batches[2:]
    shadowed = [b["seconds"] for b in batches if b["shadow"]]
    plain = [b["seconds"] for b in batches if not b["shadow"]]
    plain_measuring = [b["measuring"] / b["seconds"] for b in batches if not b["shadow"]]
    all_measuring = [b["measuring"] / b["seconds"] for b in batches]
    extra = statistics.median(shadowed) / statistics.median(plain) - 1
    result = {
        "off_over_stock": median_ratio(our_seconds, stock_seconds),
        "recalibration_batch_extra": extra,
        "calibration_at_interval_20": extra / INTERVAL,
        "metrics_share": statistics.median(plain_measuring),
        "metrics_share_worst_batch": max(all_measuring),
        "step_seconds_stock": statistics.median(stock_seconds),
        "batch_seconds_training": statistics.median(plain),
    }
    print(versions())
    print(f"off / stock, whole step             {result['off_over_stock']:.4f}  (target <= 1.02)")
    print(f"calibration at interval {INTERVAL}, training {result['calibration_at_interval_20']:+.2%}  (target <= 4 %)")
    print(f"metrics and statistics, training    {result['metrics_share']:.2%}  (target <= 2 %)")
    print(json.dumps({key: round(value, 5) for key, value in result.items()}))


if __name__ == "__main__":
    main()
