"""Checkpoints a killed run leaves behind: whole ones are resumed from, half-written ones never.

transformers writes a checkpoint in place, file by file and rank by rank, and resumes from the directory with the
highest number, whole or not. Here a marker lies in the directory while it is written, and in old ones while some are
deleted. What `save_total_limit` wants gone is deleted last, so at every moment one whole checkpoint exists.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from trl import GRPOTrainer

from ._upstream import rotate_checkpoints
from .config import FP8GRPOConfig
from .diagnostics.record import BatchRecord
from .distributed import World


logger = logging.getLogger(__name__)

MARKER = "incomplete"
# Fields of FP8GRPOConfig that change what a step computes. The generation batch follows the number of processes
_RECORDED = ("fp8_recipe", "fp8_scale_rounding", "resolved_clip_policy", "optim", "generation_batch_size")


class WholeCheckpoints(GRPOTrainer):
    """Part of the trainer: marks a checkpoint while it is written and skips marked ones when resuming."""

    args: FP8GRPOConfig
    _batch: BatchRecord

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
            if limit:
                with _marked(marker.parent, self.state.best_model_checkpoint):
                    rotate_checkpoints(
                        output_dir=run_dir,
                        save_total_limit=limit,
                        best_model_checkpoint=self.state.best_model_checkpoint,
                        use_mtime=True,
                    )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers; `resume_from_checkpoint=True` is the last whole checkpoint in `output_dir`.

        Raises:
            ValueError: the checkpoint is none or was only half written, its optimizer was saved by another way of
                sharding, its run has finished, or none is whole.
        """
        output_dir = self.args.output_dir or "."
        if str(resume_from_checkpoint).lower() in ("", "false"):  # what a command line makes of it
            resume_from_checkpoint = None
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(output_dir)
        elif resume_from_checkpoint and Path(resume_from_checkpoint, MARKER).exists():
            raise ValueError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r} was only half written when its run was "
                f"stopped (it holds a file {MARKER!r}). Use resume_from_checkpoint=True for the last whole one."
            )
        elif resume_from_checkpoint and not _is_whole(Path(resume_from_checkpoint)):
            there = ", ".join(path.name for path in _checkpoints(output_dir)) or "none"
            raise ValueError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r} is not a checkpoint, a directory with "
                f"a readable trainer_state.json. Checkpoints in {output_dir}: {there}. Name one, or True for the last."
            )
        elif not resume_from_checkpoint and self.args.should_save and _checkpoints(output_dir):
            logger.warning(
                f"{output_dir} holds checkpoints of another run (up to {_checkpoints(output_dir)[-1].name}), and "
                "resume_from_checkpoint=True takes the one of the highest step, whichever run saved it. Move them."
            )
        if isinstance(resume_from_checkpoint, (str, os.PathLike)):
            check_optimizer(Path(resume_from_checkpoint), World.of(self.accelerator))
            check_unfinished(Path(resume_from_checkpoint), self.args.max_steps)
            # A trainer resumed in the process that was interrupted first trains on what is left of its old batch
            self._batch = BatchRecord(weights_moved=True)
        return super().train(resume_from_checkpoint, *args, **kwargs)


@contextlib.contextmanager
def _marked(newest: Path, best: str | None) -> Iterator[None]:
    """Old checkpoints are marked while some are deleted: what is left of a half-deleted one would look whole."""
    kept = {newest, Path(best)} if best else {newest}
    old = [path for path in _checkpoints(newest.parent) if path not in kept and not (path / MARKER).exists()]
    for path in old:
        with _unchanged_time(path):
            (path / MARKER).touch()
    yield
    for path in old:
        if path.exists():
            with _unchanged_time(path):
                (path / MARKER).unlink(missing_ok=True)


@contextlib.contextmanager
def _unchanged_time(folder: Path) -> Iterator[None]:
    """The age of a checkpoint, by which transformers chooses what goes, is not that of its marker."""
    before = folder.stat()
    yield
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))


def _checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """Checkpoint directories by step, ascending."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((path for path in found if path.is_dir()), key=lambda path: int(path.name.split("-")[1]))


def check_optimizer(checkpoint: Path, world: World) -> None:
    """Refuse a checkpoint whose optimizer another way of sharding has saved; tell of one that has none.

    Raises:
        ValueError: transformers would fail on it, or go on with a fresh optimizer and without a word.
    """
    kinds = {
        "DeepSpeed ZeRO": any(checkpoint.glob("global_step*")),
        "FSDP": (checkpoint / "optimizer_0").exists() or (checkpoint / "optimizer.bin").exists(),
        "one process or DDP": (checkpoint / "optimizer.pt").exists(),
    }
    ours = "DeepSpeed ZeRO" if world.zero_stage else "FSDP" if world.fsdp_version else "one process or DDP"
    theirs = [name for name, found in kinds.items() if found]
    if not theirs and ours != "one process or DDP":
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} holds no optimizer state (save_only_model?), without which "
            f"{ours} loads nothing. Start a new run from its weights (pass the directory of a saved model as model)."
        )
    if not theirs:
        logger.warning(
            f"{checkpoint} holds no optimizer state (save_only_model?): Adam's averages start at zero and the "
            "learning-rate schedule at its beginning, while steps and clip bounds go on."
        )
    elif theirs and ours not in theirs:
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} was saved under {theirs[0]}, and this run is under {ours}, "
            "which cannot read its optimizer. Resume as it was launched, or start a new run from its weights (pass "
            "the directory of a saved model as model)."
        )


def check_unfinished(checkpoint: Path, max_steps: int) -> None:
    """Refuse to go on with a finished run: transformers would take one more step and save it (5.24)."""
    step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
    if 0 < max_steps <= step:
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} is of step {step} and max_steps={max_steps}: nothing is left "
            "to train. Raise max_steps to go on."
        )


def last_whole_checkpoint(output_dir: str | os.PathLike) -> str | bool:
    """The checkpoint of the highest step that is whole; `True`, which transformers refuses, where there is none.

    Raises:
        ValueError: there are checkpoints, and all of them are half written.
    """
    found = _checkpoints(output_dir)
    whole = [path for path in found if _is_whole(path)]
    if found and not whole:
        raise ValueError(
            f"resume_from_checkpoint=True: {', '.join(path.name for path in found)} in {str(output_dir)!r} was only "
            "half written or half deleted when its run was stopped, and there is no other. Start without "
            "resume_from_checkpoint."
        )
    if whole and whole[-1] != found[-1]:
        logger.warning(f"{found[-1]} is not whole and is passed over: the run resumes from {whole[-1].name}.")
    return str(whole[-1]) if whole else True


def _is_whole(checkpoint: Path) -> bool:
    if (checkpoint / MARKER).exists():
        return False
    try:
        return "global_step" in dict(json.loads((checkpoint / "trainer_state.json").read_text()))
    except (OSError, TypeError, ValueError):
        return False


class RunRecord(TrainerCallback, ExportableState):
    """What a checkpoint remembers of its run: settings, generation batches, and whose clip policy's state it holds.

    Names each setting that differs on resuming, and drops the state of a clip policy that the resumed run does not
    have: it would be out of date in the checkpoints to come, and restored from them.

    Args:
        args: of the run.
        policies: gives the class names of the run's clip policies.
    """

    def __init__(self, args: Any = None, policies: Callable[[], list[str]] = list):
        self.settings = {name.removeprefix("resolved_"): getattr(args, name) for name in _RECORDED if args is not None}
        self.num_completed_generation_batches = 0
        self._policies = policies

    def state(self) -> dict:
        """Settings are not restored: those of the new run hold."""
        attributes = {
            "settings": dict(self.settings),
            "policies": self._policies(),
            "num_completed_generation_batches": self.num_completed_generation_batches,
        }
        return {"args": {}, "attributes": attributes}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        all_saved = cast(dict[str, Any], state.stateful_callbacks)
        saved = _part(all_saved.get(type(self).__name__), "attributes")
        if state.global_step > 0:
            count = saved.get("num_completed_generation_batches")
            self.num_completed_generation_batches = count if isinstance(count, int) and count > 0 else 0
        policies = saved.get("policies")
        for name in policies if isinstance(policies, list) else ():
            if name not in self._policies():
                all_saved.pop(name, None)
        # transformers updates an entry at each save and fails if the checkpoint it resumed from had none
        all_saved[type(self).__name__] = self.state()
        before = _part(saved, "settings")
        changed = [f"{k}: {before[k]!r} -> {v!r}" for k, v in self.settings.items() if before.get(k, v) != v]
        if changed and state.is_world_process_zero:
            logger.warning(
                f"The run resumes with other settings than its checkpoint was trained with ({', '.join(changed)}). "
                "The new settings hold; weights and optimizer state come from the old ones."
            )


def _part(saved: Any, name: str) -> dict[str, Any]:
    """What an entry of a checkpoint holds under `name`; nothing where it is damaged."""
    part = saved.get(name) if isinstance(saved, dict) else None
    return part if isinstance(part, dict) else {}
