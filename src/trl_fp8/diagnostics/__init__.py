"""What is measured and logged: pure functions on tensors, and values that say how they are reduced."""

from ..reductions import Last, Max, Mean, Metric, Sum
from .tokens import (
    bf16_clip_shares,
    clip_shares,
    entropy_shares,
    nmae,
    noise_floor,
    over_clipping,
    quantization_error,
    response_entropy,
    signs,
    update_ratio,
)
from .train_rollout import mismatch, raw_log_ratio, upper_tail


__all__ = [
    "Last",
    "Max",
    "Mean",
    "Metric",
    "Sum",
    "bf16_clip_shares",
    "clip_shares",
    "entropy_shares",
    "mismatch",
    "nmae",
    "noise_floor",
    "over_clipping",
    "quantization_error",
    "raw_log_ratio",
    "response_entropy",
    "signs",
    "update_ratio",
    "upper_tail",
]
