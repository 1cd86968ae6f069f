"""What a checkpoint remembers of the settings it was trained with, so that a resume with others is no surprise."""

import logging
import math
from collections.abc import Callable
from typing import Any, cast

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


logger = logging.getLogger(__name__)

# Fields of FP8GRPOConfig that change what a step computes. The generation batch follows the number of processes
_FIELDS = ("fp8_recipe", "fp8_scale_rounding", "use_calibrated_clipping", "optim", "generation_batch_size")

# What a calibrating policy saves, and the range [low, high) of each
_POLICY_ATTRIBUTES = {
    "clip_lower": (math.ulp(0.0), 1.0),
    "clip_upper": (math.nextafter(1.0, 2.0), math.inf),
    "num_completed_generation_batches": (0, 2**53),
}


class SettingsRecord(TrainerCallback, ExportableState):
    """Saves precision, optimizer and batch of a run with its checkpoints, and names each that differs on resuming.

    Also drops the state of a clipping policy that the resumed run has not: it would be out of date in the checkpoints
    to come, and restored from them.

    Args:
        args: of the run.
        policies: gives the class names of the run's policies.
    """

    def __init__(self, args: Any = None, policies: Callable[[], list[str]] = list):
        self.settings = {name: getattr(args, name) for name in _FIELDS if args is not None}
        self._policies = policies

    def state(self) -> dict:
        """Nothing to restore: the settings of the new run hold."""
        return {"args": {}, "attributes": {"settings": dict(self.settings)}}

    def on_train_begin(self, args, state, control, **kwargs):
        all_saved = cast(dict[str, Any], state.stateful_callbacks)
        active = self._policies()
        for stale in [name for name, saved in all_saved.items() if name not in active and _is_policy_state(saved)]:
            del all_saved[stale]
        # HF updates an entry at each save and fails if the checkpoint it resumed from had none
        saved, all_saved[type(self).__name__] = all_saved.get(type(self).__name__), self.state()
        before = _part(_part(saved, "attributes"), "settings")
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


def _is_policy_state(saved: Any) -> bool:
    return _POLICY_ATTRIBUTES.keys() <= _part(saved, "attributes").keys()


def checked_state(name: str, saved: Any) -> None:
    """Refuse a damaged state of the clipping policy `name`.

    Args:
        saved: its entry of the checkpoint's `trainer_state.json`.

    Raises:
        ValueError: the entry is damaged, or written by another class of the same name.
    """
    wrong = [part for part in ("args", "attributes") if not (isinstance(saved, dict) and _part(saved, part))]
    for key, (low, high) in _POLICY_ATTRIBUTES.items() if not wrong else ():
        found = saved["attributes"].get(key)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not low <= found < high:
            wrong.append(f"{key}={found!r}")
        elif key.startswith("num_") and found != int(found):
            wrong.append(f"{key}={found!r}")
    if wrong:
        raise ValueError(
            f"The checkpoint's trainer_state.json holds a damaged state of {name} ({', '.join(wrong)}), so the clip "
            "bounds to go on with are unknown. Resume from another checkpoint, or remove the entry from "
            "stateful_callbacks to begin with the initial bounds."
        )
