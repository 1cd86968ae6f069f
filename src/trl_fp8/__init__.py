"""FP8 GRPO for TRL with Calibrated Clipping."""

from .callbacks import CalibratedClippingCallback, ClippingPolicy
from .config import FP8GRPOConfig
from .trainer import FP8GRPOTrainer


__all__ = ["CalibratedClippingCallback", "ClippingPolicy", "FP8GRPOConfig", "FP8GRPOTrainer"]
