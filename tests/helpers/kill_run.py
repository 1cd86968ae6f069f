"""A run of the tiny task that kills itself with SIGKILL at a chosen point. Launched by `test_kill.py`.

`kill_run.py <output_dir> <point> <result>`; a point is `none` or `<where>:<n>`: in the n-th generation, after the n-th
optimizer step, in the n-th recalibration, or after the n-th file that is written while checkpoints are saved. Resumes
from the last whole checkpoint where there is one. A run that ends writes its log and weights to `<result>`.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from builders import build_trainer

from trl_fp8.checkpoints import last_whole_checkpoint
from trl_fp8.clipping import calibrated


SETTINGS = {
    "calibration_interval": 2,
    "max_steps": 16,  # four generation batches; recalibration at the end of the second and the fourth
    "save_strategy": "steps",
    "save_steps": 4,
    "save_total_limit": 1,
    "learning_rate": 5e-3,
}


def kill_at(count: int, function):
    """`function` that ends the process the `count`-th time, half-way: after its work and before anyone knows."""
    calls = []

    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


def main(output_dir: str, point: str, result: str) -> None:
    trainer = build_trainer(output_dir, **SETTINGS)
    where, _, count = point.partition(":")
    if where == "generation":
        trainer._generate_single_turn = kill_at(int(count), trainer._generate_single_turn)
    elif where == "step":
        trainer.training_step = kill_at(int(count), trainer.training_step)
    elif where == "recalibration":
        calibrated.decide = kill_at(int(count), calibrated.decide)
    elif where == "saving":
        torch.save = kill_at(int(count), torch.save)  # arguments, optimizer, schedule and RNG of each checkpoint
    whole = list(Path(output_dir).glob("checkpoint-*")) and last_whole_checkpoint(output_dir)
    trainer.train(resume_from_checkpoint=whole or None)
    torch.save(
        {
            "log": trainer.state.log_history,
            "weights": trainer.model.state_dict(),
            "bounds": trainer.clip_bounds,
            "resumed_from": str(whole or ""),
        },
        result,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
