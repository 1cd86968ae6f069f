"""When a token is clipped: the mathematics on plain tensors. Policies of the bounds are in `trl_fp8` itself."""

from .batch import MicroBatch
from .decide import Calibration, calibrate_bounds, decide
from .importance import importance_ratio, importance_weight
from .search import ClipSearch, smooth_update
from .statistics import ClipStatistics


__all__ = [
    "Calibration",
    "ClipSearch",
    "ClipStatistics",
    "MicroBatch",
    "calibrate_bounds",
    "decide",
    "importance_ratio",
    "importance_weight",
    "smooth_update",
]
