"""One rank of a two-process CPU run; writes what it saw to `<folder>/rank<r>.pt`. Launched by `test_ranks.py`."""

import os
import sys
from pathlib import Path

import torch
from builders import build_trainer

from trl_fp8.clipping.statistics import ClipStatistics


def main(folder: Path) -> None:
    batches = []
    update = ClipStatistics.update

    def spy(statistics, *tensors):
        batches.append(tensors)
        update(statistics, *tensors)

    ClipStatistics.update = spy
    trainer = build_trainer(
        folder / "run", calibration_interval=1, max_steps=8, learning_rate=5e-3, logging_steps=4, bf16=False
    )
    bounds = []
    end = trainer._end_batch
    trainer._end_batch = lambda: (end(), bounds.append(trainer.clip_bounds))
    trainer.train()
    torch.save(
        {"batches": batches, "bounds": bounds, "log": trainer.state.log_history},
        folder / f"rank{os.environ['RANK']}.pt",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
