"""FP8 GRPO for TRL with Calibrated Clipping."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .clipping.calibrated import CalibratedClippingCallback
    from .clipping.policy import ClippingPolicy
    from .config import FP8GRPOConfig
    from .trainer import FP8GRPOTrainer

__all__ = ["CalibratedClippingCallback", "ClippingPolicy", "FP8GRPOConfig", "FP8GRPOTrainer"]

_HOMES = {
    "CalibratedClippingCallback": "clipping.calibrated",
    "ClippingPolicy": "clipping.policy",
    "FP8GRPOConfig": "config",
    "FP8GRPOTrainer": "trainer",
}


def __getattr__(name: str) -> Any:
    # PEP 562: `from trl_fp8.clipping import calibrate_bounds` needs neither trl nor transformers
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
