"""What a checkpoint remembers of the precision it was trained in, so that a resume in another one is no surprise."""

import logging
import math
from collections.abc import Mapping
from typing import Any, cast

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


logger = logging.getLogger(__name__)

# Fields of FP8GRPOConfig that change what a step computes, and what may follow from a change
_FIELDS = ("fp8_recipe", "fp8_scale_rounding", "use_calibrated_clipping")


class SettingsRecord(TrainerCallback, ExportableState):
    """Saves the precision settings of a run with its checkpoints, and names each that differs on resuming."""

    def __init__(self, args: Any = None):
        self.settings = {name: getattr(args, name) for name in _FIELDS if args is not None}

    def state(self) -> dict:
        """Nothing to restore: the settings of the new run hold."""
        return {"args": {}, "attributes": {"settings": dict(self.settings)}}

    def on_train_begin(self, args, state, control, **kwargs):
        # setdefault: HF updates an entry at each save and fails if the checkpoint it resumed from had none
        saved = cast(dict[str, Any], state.stateful_callbacks).setdefault(type(self).__name__, self.state())
        before = saved["attributes"]["settings"]
        changed = [f"{k}: {before[k]!r} -> {v!r}" for k, v in self.settings.items() if before.get(k, v) != v]
        if changed and state.is_world_process_zero:
            logger.warning(
                f"The run resumes in another precision than its checkpoint was trained in ({', '.join(changed)}). "
                "The new settings hold; the clip bounds and the optimizer state come from the old ones."
            )


def checked_state(name: str, saved: Any, expected: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes in what a checkpoint holds of the clipping policy `name`.

    Args:
        saved: its entry of `trainer_state.json`.
        expected: a state of the same policy, for the names and kinds of its attributes.

    Raises:
        ValueError: the entry is damaged, or written by another class of the same name.
    """
    wrong = [part for part in expected if not (isinstance(saved, dict) and isinstance(saved.get(part), dict))]
    for key, value in expected["attributes"].items() if not wrong else ():
        found = saved["attributes"].get(key)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found) or found < 0:
            wrong.append(f"{key}={found!r}")
        elif isinstance(value, int) and found != int(found):
            wrong.append(f"{key}={found!r}")
    if wrong:
        raise ValueError(
            f"The checkpoint's trainer_state.json holds a damaged state of {name} ({', '.join(wrong)}), so the clip "
            "bounds to go on with are unknown. Resume from another checkpoint, or remove the entry from "
            "stateful_callbacks to begin with the initial bounds."
        )
    return saved["attributes"]
