"""The precision of the reference model (`beta` > 0): its own, or the policy's FP8.

The KL penalty compares the policy's FP8 log-probs with the reference's. A reference in BF16 is the model the run
started from, and the KL at step 0 is the distance FP8 makes (it does not shrink with training); a reference in FP8
(`"same"`) starts at KL 0, and everything the KL then grows by is training.
"""

from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers import PreTrainedModel

from .config import FP8GRPOConfig
from .float8.convert import convert_model
from .float8.linear import SwitchableLinear
from .float8.shadow import high_precision


if TYPE_CHECKING:
    # The parent is TRL's trainer by the order of bases; naming it here as well would build its hierarchy twice
    from trl import GRPOTrainer as _Base
else:
    _Base = object


class ReferencePrecision(_Base):
    """Part of the trainer: puts `ref_model`, or a PEFT policy without its adapter, into `args.ref_precision`."""

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
        raw = isinstance(model, PreTrainedModel) and not any(isinstance(m, SwitchableLinear) for m in model.modules())
        if raw and args.fp8_recipe != "none" and args.ref_precision == "same" and model is not self._ref_model:
            convert_model(
                model,
                args.fp8_recipe,
                exclude=args.fp8_exclude_modules or (),
                scale_rounding=args.fp8_scale_rounding,
                emulate=self._emulated,
                fsdp_all_gather=args.fp8_fsdp_all_gather,
            )
        self._ref_model = model

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.beta != 0 and self.args.ref_precision == "bf16" and without_adapter(self.model):
            with high_precision(cast(nn.Module, self.model)):
                return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)


def without_adapter(model: Any) -> bool:
    """Whether a PEFT model computes as TRL's reference does: adapters off, or the frozen copy `"ref"`."""
    if not hasattr(model, "get_model_status"):
        return False
    if model.active_peft_config.is_prompt_learning:  # it has no layers; PEFT turns it off by taking its forward away
        return model.forward == model.base_model.forward
    status = model.get_model_status()
    return status.enabled is False or "ref" in status.active_adapters
