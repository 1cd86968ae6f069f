"""Seconds per optimizer step of each emulated recipe, against BF16 training, all taking turns step by step.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/emulation.py

The embedded task, sampling included, medians. On a GPU with FP8 kernels this says nothing: see scripts/gpu_check.sh.
"""

import argparse
import json
import statistics
import tempfile

from common import embedded_task, interleave, median_ratio, versions
from overhead import build

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.float8 import RECIPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--recipes", nargs="+", default=["none", *RECIPES])
    options = parser.parse_args()
    model_path = str(embedded_task.build_or_load())
    with tempfile.TemporaryDirectory() as folder:
        trainers = [
            build(
                FP8GRPOTrainer,
                FP8GRPOConfig,
                model_path,
                f"{folder}/{recipe}",
                options.steps,
                fp8_recipe=recipe,
                use_calibrated_clipping=False,
            )
            for recipe in options.recipes
        ]
        seconds = dict(zip(options.recipes, interleave(trainers, warm_up=4), strict=True))
    base = "tensorwise" if "tensorwise" in seconds else options.recipes[0]
    print(f"| recipe | seconds per step | over {base} |\n|---|---|---|")
    for recipe, values in seconds.items():
        print(f"| {recipe} | {statistics.median(values):.3f} | {median_ratio(values, seconds[base]):.2f} |")
    print(versions())
    print(json.dumps({recipe: round(statistics.median(values), 4) for recipe, values in seconds.items()}))


if __name__ == "__main__":
    main()
