"""One rank of a run of the tiny task; writes what it saw to `<folder>/rank<r>.pt`. Launched by `test_sharding.py`."""

import json
import os
import sys
from pathlib import Path

import torch
from conftest import build_model, build_trainer


def main(folder: Path, request: dict) -> None:
    settings = {
        "use_cpu": os.environ.get("ACCELERATE_TORCH_DEVICE") != "cpu",
        "calibration_interval": 1,
        "max_steps": 8,
        "learning_rate": 5e-3,
        "logging_steps": 4,
        "bf16": False,
        **request["settings"],
    }
    extra = {}
    if request.get("lora"):
        from peft import LoraConfig

        extra["peft_config"] = LoraConfig(**request["lora"])
    trainer = build_trainer(folder / "run", model=build_model(**request.get("model", {})), trainer=extra, **settings)
    bounds = []
    end = trainer._end_generation
    trainer._end_generation = lambda: (end(), bounds.append(trainer.clip_bounds))
    trainer.train()
    trainer.save_model(str(folder / "final"))
    torch.save(
        {"bounds": bounds, "log": trainer.state.log_history, "type": str(trainer.accelerator.distributed_type)},
        folder / f"rank{os.environ.get('RANK', 0)}.pt",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
