"""The precision of the reference model (`beta` > 0): its own, or the policy's FP8.

The KL penalty compares the policy's FP8 log-probs with the reference's. A reference in its own precision is the model
the run started from, and the KL at step 0 is the distance FP8 makes (it does not shrink with training); a reference in
FP8 starts at KL 0, and everything the KL then grows by is training.
"""

import contextlib
from typing import Any

from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from trl import GRPOTrainer

from .config import FP8GRPOConfig
from .float8.convert import convert_model
from .float8.linear import SwitchableLinear
from .float8.shadow import high_precision


class ReferencePrecision(GRPOTrainer):
    """Part of the trainer: puts `ref_model` into `args.ref_model_precision`."""

    args: FP8GRPOConfig
    _emulated: bool
    _ref_model: Any = None

    @property
    def ref_model(self) -> Any:
        """The frozen reference, `None` where the policy without its adapter is the reference or none is needed."""
        return self._ref_model

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        # TRL builds the reference and shards it inside its constructor. The assignment is the one moment between
        # that is ours: a sharded layer can no longer be replaced
        args = self.args
        wanted = args.fp8_recipe != "none" and args.ref_model_precision == "fp8"
        raw = isinstance(model, PreTrainedModel) and not any(isinstance(m, SwitchableLinear) for m in model.modules())
        if raw and wanted and model is not self._ref_model:
            convert_model(model, emulate=self._emulated, **args.conversion)
        self._ref_model = model


def own_precision_of_reference(model: Any, args: FP8GRPOConfig) -> contextlib.AbstractContextManager:
    """Context in which a PEFT policy that stands for the reference now runs in the reference's own precision."""
    if args.beta != 0 and args.ref_model_precision == "own" and without_adapter(model):
        return high_precision(model)
    return contextlib.nullcontext()


def without_adapter(model: Any) -> bool:
    """Whether a PEFT model computes as TRL's reference does: adapters off, or the frozen copy `"ref"`."""
    if not is_peft_model(model):
        return False
    if model.active_peft_config.is_prompt_learning:  # it has no layers; PEFT turns it off by taking its forward away
        return model.forward == model.base_model.forward
    status = model.get_model_status()
    return status.enabled is False or "ref" in status.active_adapters
