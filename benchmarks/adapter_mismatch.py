"""How far a LoRA policy and vLLM are apart as the adapter grows: the engine quantises W + BA, the trainer only W.

    make venv-vllm
    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/adapter_mismatch.py --model /tmp/smollm2

Random B of a given size ||BA|| / ||W|| in every linear; after a weight sync the same text is scored on both sides, in
pieces of 128 tokens. Mean |log pi_trainer - log pi_engine|, nats. Random B: the directions are not those of training.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from common import versions
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.rollout._upstream import tuner_layers


# (fp8_recipe, vllm_quantization)
PAIRS = [("rowwise", "fp8_per_channel"), ("none", "fp8_per_channel"), ("rowwise", "none"), ("none", "none")]
SIZES = [0.0, 1e-3, 3e-3, 1e-2, 3e-2]
LENGTH = 128
TEXT = Path(__file__).parents[1] / "docs" / "method.md"
_ALIVE = []  # an engine that is collected takes the process groups of the next one with it


def build(model: str, recipe: str, quantization: str, rank: int, output_dir: str) -> FP8GRPOTrainer:
    args = FP8GRPOConfig(
        output_dir,
        fp8_recipe=recipe,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_quantization=quantization,
        vllm_max_model_length=LENGTH + 1,
        vllm_gpu_memory_utilization=0.1,
        vllm_engine_kwargs={"enforce_eager": True, "kv_cache_memory_bytes": 2**27},
        vllm_sync_check_interval=0,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = FP8GRPOTrainer(
        model,
        lambda completions, **kwargs: [0.0] * len(completions),
        args,
        train_dataset=Dataset.from_dict({"prompt": ["unused"] * 8}),
        peft_config=LoraConfig(r=rank, target_modules="all-linear", lora_dropout=0.0),
    )
    _ALIVE.append(trainer)
    return trainer


@torch.no_grad()
def set_size(trainer: FP8GRPOTrainer, size: float) -> None:
    torch.manual_seed(0)
    for _, layer in tuner_layers(trainer.model):
        b = layer.lora_B["default"].weight
        b.normal_()
        b.mul_(size * layer.get_base_layer().weight.norm() / layer.get_delta_weight("default").norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--pieces", type=int, default=16, help=f"of {LENGTH} tokens")
    options = parser.parse_args()
    ids = AutoTokenizer.from_pretrained(options.model)(TEXT.read_text())["input_ids"]
    pieces = [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(min(options.pieces, len(ids) // LENGTH))]
    print(f"{versions()}\n{len(pieces)} pieces\n", flush=True)
    print(
        "| training | rollout | "
        + " | ".join(f"{size:g}" for size in SIZES)
        + " |\n"
        + "|---" * (2 + len(SIZES))
        + "|"
    )
    with tempfile.TemporaryDirectory() as output_dir:
        for recipe, quantization in PAIRS:
            trainer = build(options.model, recipe, quantization, options.rank, output_dir)
            engine, cells = trainer.vllm_generation, []
            for size in SIZES:
                set_size(trainer, size)
                engine.sync_weights()
                values = []
                for piece in pieces:
                    engine.sync_check.token_ids = piece
                    values.append(engine.sync_check.logp_difference(trainer.model, engine.score, trainer.accelerator))
                cells.append(f"{sum(values) / len(values):.4f}")
            print(f"| {recipe} | {quantization} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
