"""One rank of runs with vLLM as the rollout engine; writes what it saw to `<folder>/rank<r>.pt`.

    python vllm_shard_run.py FOLDER JSON

`FOLDER/policy` holds the policy. Launched by `test_vllm_sharding.py`.
"""

import json
import os
import sys
from pathlib import Path

import torch
from builders import RUN, build_dataset, build_tokenizer, digits_reward, logged
from vllm_helpers import ENGINE_KWARGS, keep_alive, score

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer


def run(folder: Path, name: str, request: dict) -> dict:
    settings = {
        **RUN,
        "use_cpu": os.environ.get("ACCELERATE_TORCH_DEVICE") != "cpu",
        "bf16": True,
        "max_steps": 6,  # three generation batches
        "steps_per_generation": 2,
        "learning_rate": 1e-2,
        "calibration_interval": 1,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 64,
        "model_init_kwargs": {"dtype": "float32"},
        **request.get("settings", {}),
    }
    if settings["vllm_mode"] == "colocate":
        settings["vllm_engine_kwargs"] = ENGINE_KWARGS
    peft_config = None
    if request.get("lora"):
        from peft import LoraConfig

        peft_config = LoraConfig(**request["lora"])
    trainer = FP8GRPOTrainer(
        str(folder / "policy"),
        digits_reward,
        FP8GRPOConfig(str(folder / name), **settings),
        build_dataset(),
        processing_class=build_tokenizer(),
        peft_config=peft_config,
    )
    keep_alive(trainer)
    trainer.train(resume_from_checkpoint=str(folder / request["resume"]) if "resume" in request else None)
    trainer.vllm_generation.sync_weights()
    scores = score(trainer.vllm_generation.llm) if settings["vllm_mode"] == "colocate" else None
    trainer.save_model(str(folder / name / "final"))
    return {
        "scores": scores,
        "sync_logp_diff": logged(trainer, "rollout/sync_logp_diff"),
        "k3": logged(trainer, "mismatch/k3_kl"),
        "bytes": logged(trainer, "rollout/sync_bytes"),
        "rho": logged(trainer, "update_ratio/fp8"),
        "bounds": trainer.clip_bounds,
        "type": str(trainer.accelerator.distributed_type),
    }


def main(folder: Path, requests: dict[str, dict]) -> None:
    results = {name: run(folder, name, request) for name, request in requests.items()}
    torch.save(results, folder / f"rank{os.environ.get('RANK', 0)}.pt")


if __name__ == "__main__":
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
