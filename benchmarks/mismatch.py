"""How far trainer and vLLM are apart for every pair of training recipe and rollout quantisation, on the same seeds.

    make venv-vllm
    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/mismatch.py --seeds 0 1 2

Each run is GRPO with Calibrated Clipping on the embedded task: one process, one engine per run, TIS with C = 2. Means
over all generation batches but the first, in which the weights have not moved:

    |dlogp|   mean |log pi_trainer - log pi_engine| over sampled tokens, nats (TRL's sampling_logp_difference/mean)
    k3, chi2, ESS, p99, max, truncated   `mismatch/*` of docs/metrics.md

The pair of high precision on both sides is the floor that kernels alone make. On a CPU, fp8_per_tensor needs the one
operator that vLLM 0.31 registers without a schema; it is replaced in this process (`--no-shim` on a GPU).
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from common import embedded_task, versions
from peft import LoraConfig
from transformers import AutoTokenizer

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer


# (fp8_recipe, fp8_scale_rounding, vllm_quantization)
PAIRS = [
    ("none", "none", "none"),
    ("none", "none", "fp8_per_channel"),
    ("rowwise", "none", "fp8_per_channel"),
    ("rowwise_with_gw_hp", "none", "fp8_per_channel"),
    ("rowwise", "power_of_2", "fp8_per_channel"),
    ("rowwise", "none", "none"),
    ("tensorwise", "none", "fp8_per_channel"),
    ("blockwise", "none", "fp8_per_channel"),
    ("none", "none", "fp8_per_tensor"),
    ("tensorwise", "none", "fp8_per_tensor"),
    ("rowwise", "none", "fp8_per_tensor"),
]
COLUMNS = {
    "|dlogp|": "sampling/sampling_logp_difference/mean",
    "k3": "mismatch/k3_kl",
    "chi2": "mismatch/chi2_token",
    "ESS": "mismatch/ess",
    "p99": "mismatch/ratio_raw_p99",
    "max": "mismatch/ratio_raw_max",
    "truncated": "mismatch/frac_truncated",
    "reward": "reward",
}
_ALIVE = []  # an engine that is collected takes the process groups of the next one with it


def replace_scaled_fp8_quant() -> None:
    import vllm._custom_ops

    def scaled_fp8_quant(x, scale=None, *args, **kwargs):
        return (x.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    vllm._custom_ops.scaled_fp8_quant = scaled_fp8_quant


def run(pair: tuple[str, str, str], seed: int, options: argparse.Namespace, output_dir: str) -> dict[str, float]:
    """Metrics of one run, averaged over its generation batches but the first."""
    recipe, rounding, quantization = pair
    args = FP8GRPOConfig(
        output_dir,
        fp8_recipe=recipe,
        fp8_scale_rounding=rounding,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_quantization=quantization,
        vllm_max_model_length=64,
        vllm_gpu_memory_utilization=0.1,
        vllm_engine_kwargs={"enforce_eager": True, "kv_cache_memory_bytes": 2**27},
        calibration_interval=5,
        max_steps=4 * options.batches,
        per_device_train_batch_size=options.mini_batch,
        num_generations=8,
        steps_per_generation=4,
        max_completion_length=embedded_task.MAX_COMPLETION_LENGTH,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        seed=seed,
    )
    train, _ = embedded_task.datasets()
    trainer = FP8GRPOTrainer(
        options.model,
        embedded_task.exact_answer_reward,
        args,
        train_dataset=train,
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=options.lora, target_modules="all-linear", lora_dropout=0.0)
        if options.lora
        else None,
    )
    _ALIVE.append(trainer)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "mismatch/k3_kl" in entry][1:]
    return {name: statistics.mean(entry[key] for entry in logs) for name, key in COLUMNS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory; the embedded model by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=12, help="generation batches of a run")
    parser.add_argument("--mini_batch", type=int, default=64, help="completions of a mini-batch, a quarter of a batch")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank only")
    parser.add_argument("--pairs", type=int, nargs="+", default=range(len(PAIRS)), help="indices into the table")
    parser.add_argument("--no-shim", dest="shim", action="store_false")
    parser.add_argument("--output", type=Path, help="JSON of every run")
    options = parser.parse_args()
    options.model = options.model or str(embedded_task.build_or_load())
    if options.shim:
        replace_scaled_fp8_quant()
    print(versions(), flush=True)
    print("\n| training | rollout | " + " | ".join(COLUMNS) + " |")
    print("|---" * (2 + len(COLUMNS)) + "|", flush=True)
    results = []
    with tempfile.TemporaryDirectory() as output_dir:
        for index in options.pairs:
            runs = [run(PAIRS[index], seed, options, output_dir) for seed in options.seeds]
            results.append({"pair": PAIRS[index], "runs": runs})
            recipe, rounding, quantization = PAIRS[index]
            cells = []
            for name in COLUMNS:
                values = [result[name] for result in runs]
                spread = f" ± {statistics.stdev(values):.1g}" if name == "|dlogp|" and len(values) > 1 else ""
                cells.append(f"{statistics.mean(values):.3g}{spread}")
            training = recipe + (", power of 2" if rounding == "power_of_2" else "")
            print(f"| {training} | {quantization} | " + " | ".join(cells) + " |", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
