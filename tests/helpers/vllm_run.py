"""A small run with a colocated engine in a process of its own, which kills itself where it is told to.

    python vllm_run.py FOLDER {none,generation,mini-batch} [resume]

Trains to step 16, four steps per generation batch, with a checkpoint after each. `generation`: killed inside the
engine, the tokens of generation batch 3 half-way. `mini-batch`: killed after step 10, in the middle of that batch.
"""

import json
import os
import signal
import sys

from builders import logged
from transformers import TrainerCallback
from vllm_helpers import build_vllm_trainer


class KillAfterStep(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_in_generation(trainer, batch):
    """Count calls of the rollout, and kill between two decoding steps of the given one."""
    engine = trainer.vllm_generation
    generate, step = engine.generate, engine.llm.llm_engine.step
    calls = {"generate": 0, "step": 0}

    def counted_generate(*args, **kwargs):
        calls["generate"] += 1
        calls["step"] = 0
        return generate(*args, **kwargs)

    def deadly_step():
        calls["step"] += 1
        if calls["generate"] == batch and calls["step"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return step()

    engine.generate, engine.llm.llm_engine.step = counted_generate, deadly_step


def main(folder, where, resume):
    from pathlib import Path

    settings = {"save_strategy": "steps", "save_steps": 4, "calibration_interval": 2, "learning_rate": 1e-2}
    trainer = build_vllm_trainer(Path(folder), max_steps=16, **settings)
    print("port", os.environ["MASTER_PORT"], flush=True)  # noqa: T201 - for the test that started this
    if where == "generation":
        kill_in_generation(trainer, batch=3)
    if where == "mini-batch":
        trainer.add_callback(KillAfterStep(10))
    trainer.train(resume_from_checkpoint=resume)
    result = {
        "step": trainer.state.global_step,
        "steps": [entry["step"] for entry in trainer.state.log_history if "loss" in entry],
        "recalibrated_at": [entry["step"] for entry in trainer.state.log_history if "update_ratio/fp8" in entry],
        "k3": logged(trainer, "mismatch/k3_kl"),
        "sync_logp_diff": logged(trainer, "rollout/sync_logp_diff"),
        "bounds": trainer.clip_bounds,
    }
    (Path(folder) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "resume" in sys.argv)
