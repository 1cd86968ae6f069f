"""Seconds per optimizer step of each emulated recipe, against BF16 training, all taking turns step by step.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/emulation.py
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/emulation.py --profile blockwise --steps 4

The embedded task, sampling included, medians; or the operators of one recipe in the profiler. On a GPU with FP8
kernels this says nothing: see scripts/gpu_check.sh.
"""

import argparse
import json
import statistics
import tempfile

import torch
from common import embedded_task, interleave, median_ratio, versions
from overhead import build

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.float8 import RECIPES


def trainer_of(recipe: str, model_path: str, folder: str, steps: int) -> FP8GRPOTrainer:
    settings = {"fp8_recipe": recipe, "clip_policy": "fixed"}
    return build(FP8GRPOTrainer, FP8GRPOConfig, model_path, f"{folder}/{recipe}", steps, **settings)


def profile(recipe: str, model_path: str, steps: int) -> None:
    """Print where a run of `recipe` spends its time, by operator."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(recipe, model_path, folder, steps)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            trainer.train()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=48))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--recipes", nargs="+", default=["none", *RECIPES])
    parser.add_argument("--profile", choices=["none", *RECIPES], help="profile this recipe instead")
    options = parser.parse_args()
    model_path = str(embedded_task.build_or_load())
    if options.profile:
        profile(options.profile, model_path, options.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        trainers = [trainer_of(recipe, model_path, folder, options.steps) for recipe in options.recipes]
        seconds = dict(zip(options.recipes, interleave(trainers, warm_up=4), strict=True))
    base = "tensorwise" if "tensorwise" in seconds else options.recipes[0]
    print(f"| recipe | seconds per step | over {base} |\n|---|---|---|")
    for recipe, values in seconds.items():
        print(f"| {recipe} | {statistics.median(values):.3f} | {median_ratio(values, seconds[base]):.2f} |")
    print(versions())
    print(json.dumps({recipe: round(statistics.median(values), 4) for recipe, values in seconds.items()}))


if __name__ == "__main__":
    main()
