"""Where clip bounds are searched and how fast they may move. Pure."""

import math
from dataclasses import dataclass
from typing import Literal


def smooth_update(bound: float, target: float, max_change: float) -> float:
    """SmoothUpdate of the paper (section 3.3): move `bound` half-way to `target`, by `max_change` at most."""
    return bound + min(max((target - bound) / 2, -max_change), max_change)


@dataclass(frozen=True)
class ClipSearch:
    """Where bounds are searched and how fast they may move; all are ratios.

    Args:
        clip_lower_min, clip_lower_max, clip_upper_min, clip_upper_max: search intervals of the two bounds.
        clip_grid_step: distance of neighbouring candidates.
        clip_lower_max_change, clip_upper_max_change: SmoothUpdate limits per recalibration.
        rebalance_with: lower bound stage 2 balances against, `"smoothed"` (our reading) or the raw `"target"`.

    Raises:
        ValueError: an interval is empty or inverted, a step or a limit is not positive, or a number is not finite.
    """

    clip_lower_min: float = 0.5
    clip_lower_max: float = 0.9
    clip_upper_min: float = 1.2
    clip_upper_max: float = 2.0
    clip_grid_step: float = 0.02
    clip_lower_max_change: float = 0.05
    clip_upper_max_change: float = 0.1
    rebalance_with: Literal["smoothed", "target"] = "smoothed"

    def __post_init__(self):
        for name in ("clip_lower_min", "clip_lower_max", "clip_upper_min", "clip_upper_max"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"{name}={value} is not a clip bound: a ratio is positive and finite. Set a number > 0."
                )
        for name in ("clip_grid_step", "clip_lower_max_change", "clip_upper_max_change"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} leaves the bounds where they are. Set a finite number > 0.")
        for side in ("lower", "upper"):
            low, high = getattr(self, f"clip_{side}_min"), getattr(self, f"clip_{side}_max")
            if not low < high:
                raise ValueError(
                    f"clip_{side}_min={low} and clip_{side}_max={high} leave nothing to search. "
                    f"Set clip_{side}_min < clip_{side}_max."
                )
            if not 1 <= (high - low) * (1 + 1e-9) / self.clip_grid_step <= 10_000:
                raise ValueError(
                    f"clip_grid_step={self.clip_grid_step} leaves one candidate in [{low}, {high}], or more than "
                    "10,000. Set it between a 10,000th of the interval and the whole of it."
                )
        if not (self.clip_lower_max < 1 < self.clip_upper_min):
            raise ValueError(
                f"clip_lower_max={self.clip_lower_max} and clip_upper_min={self.clip_upper_min} do not enclose the "
                "ratio 1 of an unchanged policy, so every such token would be clipped. Set clip_lower_max < 1 < "
                "clip_upper_min."
            )
        if self.rebalance_with not in ("smoothed", "target"):
            raise ValueError(
                f"rebalance_with={self.rebalance_with!r} is not a lower bound stage 2 knows. Use 'smoothed' or "
                "'target'."
            )

    def check_start(self, clip_lower_init: float, clip_upper_init: float) -> None:
        """Refuse (`ValueError`) bounds to start from outside their search interval."""
        for side, value in (("lower", clip_lower_init), ("upper", clip_upper_init)):
            low, high = getattr(self, f"clip_{side}_min"), getattr(self, f"clip_{side}_max")
            if not low <= value <= high:
                raise ValueError(
                    f"clip_{side}_init={value} lies outside its search interval [{low}, {high}], so calibration could "
                    f"never choose it. Choose a value inside, or widen it with clip_{side}_min and clip_{side}_max."
                )

    @property
    def lower_grid(self) -> list[float]:
        """Candidates of the lower bound, ascending (21 with the defaults)."""
        return _grid(self.clip_lower_min, self.clip_lower_max, self.clip_grid_step)

    @property
    def upper_grid(self) -> list[float]:
        """Candidates of the upper bound, ascending (41 with the defaults)."""
        return _grid(self.clip_upper_min, self.clip_upper_max, self.clip_grid_step)

    def lower_points(self, bound: float, reference: float) -> list[float]:
        """Points at which the lower side must be counted: grid, every smoothed candidate, in force, reference."""
        grid = self.lower_grid
        return sorted({*grid, *(smooth_update(bound, c, self.clip_lower_max_change) for c in grid), bound, reference})

    def upper_points(self, bound: float, reference: float) -> list[float]:
        """Points at which the upper side must be summed: grid, every smoothed candidate, in force, reference."""
        grid = self.upper_grid
        return sorted({*grid, *(smooth_update(bound, h, self.clip_upper_max_change) for h in grid), bound, reference})


def _grid(low: float, high: float, step: float) -> list[float]:
    # `arange` would put 0.7000000000000001 on the grid and lose or gain the last point
    return [round(low + k * step, 10) for k in range(int((high - low) / step + 1e-9) + 1)]
