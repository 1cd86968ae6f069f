"""When a token is clipped: the mathematics on plain tensors. Policies of the bounds are in `trl_fp8` itself."""

from .decide import Calibration, calibrate_bounds, solve
from .importance import importance_weight
from .search import ClipSearch, smooth_update
from .statistics import ClipStatistics


__all__ = [
    "Calibration",
    "ClipSearch",
    "ClipStatistics",
    "calibrate_bounds",
    "importance_weight",
    "smooth_update",
    "solve",
]
