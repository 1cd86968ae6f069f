"""Checkpoints a killed run leaves behind: whole ones are resumed from, half-written ones never.

transformers writes a checkpoint in place, file by file and rank by rank, and resumes from the directory with the
highest number, whole or not. Here a marker lies in the directory while it is written. The old checkpoints that
`save_total_limit` wants gone are deleted after the marker, so at every moment one whole checkpoint exists.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._upstream import rotate_checkpoints
from .config import FP8GRPOConfig


if TYPE_CHECKING:
    from trl import GRPOTrainer as _Base
else:
    _Base = object  # the parent is TRL's trainer by the order of bases

MARKER = "incomplete"


class WholeCheckpoints(_Base):
    """Part of the trainer: marks a checkpoint while it is written and skips marked ones when resuming."""

    args: FP8GRPOConfig

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir = self._get_output_dir(trial=trial)
        marker = Path(run_dir, f"checkpoint-{self.state.global_step}", MARKER)
        if self.args.should_save:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            marker.unlink()
            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers; `resume_from_checkpoint=True` is the last whole checkpoint in `output_dir`.

        Raises:
            ValueError: the checkpoint was only half written, or none is whole.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir or ".")
        elif resume_from_checkpoint and Path(resume_from_checkpoint, MARKER).exists():
            raise ValueError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r} was only half written when its run was "
                f"stopped (it holds a file {MARKER!r}). Use resume_from_checkpoint=True for the last whole one."
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)


def last_whole_checkpoint(output_dir: str | os.PathLike) -> str | bool:
    """The checkpoint of the highest step that is whole; `True`, which transformers refuses, where there is none.

    Raises:
        ValueError: there are checkpoints, and all of them are half written.
    """
    folder = Path(output_dir)
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    whole = [path for path in found if not (path / MARKER).exists()]
    if found and not whole:
        raise ValueError(
            f"resume_from_checkpoint=True: {', '.join(sorted(path.name for path in found))} in {str(folder)!r} was "
            "only half written when its run was stopped, and there is no other. Start without resume_from_checkpoint."
        )
    return str(max(whole, key=lambda path: int(path.name.split("-")[1]))) if whole else True
