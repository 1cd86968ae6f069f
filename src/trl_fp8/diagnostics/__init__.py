"""What is measured and logged: pure functions on tensors."""

from .mismatch import mismatch, raw_log_ratio, upper_tail
from .tokens import clip_shares, entropy_bins, nmae, noise_floor, over_clipping, quantization_error, signs


__all__ = [
    "clip_shares",
    "entropy_bins",
    "mismatch",
    "nmae",
    "noise_floor",
    "over_clipping",
    "quantization_error",
    "raw_log_ratio",
    "signs",
    "upper_tail",
]
