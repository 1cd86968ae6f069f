"""Calibrated Clipping: the clip bounds move so that FP8 clips what BF16 would clip (arXiv 2609.22870)."""

import logging
import math
from dataclasses import fields
from typing import Any, Literal

from ..reductions import Last, Max, Mean, Metric
from .decide import Calibration, decide
from .policy import ClipHost, ClippingPolicy
from .search import ClipSearch
from .statistics import ClipNumbers


logger = logging.getLogger(__name__)


class CalibratedClippingCallback(ClippingPolicy):
    """Calibrated Clipping (arXiv 2609.22870, section 3): keep FP8's clipping equal to BF16's.

    Every `calibration_interval` generation batches the batch is scored once more in BF16. The lower bound moves so
    that FP8 clips as many negative-advantage tokens as BF16 clips at the reference bounds, the upper bound so that the
    positive-to-negative update ratio equals BF16's, both through SmoothUpdate.

    Its state is the bounds and the number of completed generation batches.

    Args:
        calibration_interval: generation batches between two recalibrations.
        clip_lower_init, clip_upper_init: bounds before the first one.
        clip_lower_min, clip_lower_max, clip_upper_min, clip_upper_max, clip_grid_step, clip_lower_max_change,
            clip_upper_max_change, rebalance_with: see [`~trl_fp8.clipping.ClipSearch`].

    Raises:
        ValueError: a number is outside its range (same rules as [`FP8GRPOConfig`]).
    """

    name = "calibrated"
    state_attributes = ("clip_lower", "clip_upper", "num_completed_generation_batches")
    needs_shadow = True

    def __init__(
        self,
        calibration_interval: int = 20,
        clip_lower_init: float = 0.6,
        clip_upper_init: float = 1.8,
        clip_lower_min: float = 0.5,
        clip_lower_max: float = 0.9,
        clip_upper_min: float = 1.2,
        clip_upper_max: float = 2.0,
        clip_grid_step: float = 0.02,
        clip_lower_max_change: float = 0.05,
        clip_upper_max_change: float = 0.1,
        rebalance_with: Literal["smoothed", "target"] = "smoothed",
    ):
        if isinstance(calibration_interval, bool) or not (calibration_interval == int(calibration_interval) >= 1):
            raise ValueError(
                f"calibration_interval={calibration_interval} is not a whole number of generation batches. Set one "
                ">= 1."
            )
        self.calibration_interval = int(calibration_interval)
        self.clip_lower_init = float(clip_lower_init)
        self.clip_upper_init = float(clip_upper_init)
        self.search = ClipSearch(
            clip_lower_min,
            clip_lower_max,
            clip_upper_min,
            clip_upper_max,
            clip_grid_step,
            clip_lower_max_change,
            clip_upper_max_change,
            rebalance_with,
        )
        self.search.check_start(clip_lower_init, clip_upper_init)
        self.clip_lower = self.clip_lower_init
        self.clip_upper = self.clip_upper_init
        self.num_completed_generation_batches = 0
        # Search, bounds and reference bounds its statistics were asked for, whatever is set meanwhile
        self._asked: tuple[ClipSearch, tuple[float, float], tuple[float, float]] | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """`(L, H)` in force: the initial ones, or the restored ones after a resume."""
        return self.clip_lower, self.clip_upper

    def announcement(self, args: Any) -> str:
        """When the first recalibration falls, in generation batches and optimizer steps."""
        if args.ratios_are_one:
            return "nothing to recalibrate, every ratio is 1"
        step = math.ceil(
            self.calibration_interval * args.micro_batches_per_generation / args.gradient_accumulation_steps
        )
        return (
            f"first recalibration after generation batch {self.calibration_interval} (optimizer step {step}), then "
            f"every {self.calibration_interval}"
        )

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), **{f.name: getattr(self.search, f.name) for f in fields(ClipSearch)}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._warn_if_idle(args, state)

    def _warn_if_idle(self, args: Any, state: Any) -> None:
        if args.ratios_are_one:
            logger.warning(
                f"Calibrated Clipping has nothing to calibrate: gradient_accumulation_steps="
                f"{args.gradient_accumulation_steps} is a multiple of steps_per_generation * num_iterations="
                f"{args.micro_batches_per_generation}, so each generation batch gets one update and every ratio is 1. "
                "The bounds stay where they are. Raise steps_per_generation or num_iterations."
            )
            return
        steps = state.max_steps * args.gradient_accumulation_steps / args.micro_batches_per_generation
        if steps < self.calibration_interval:
            logger.warning(
                f"The run ends after {steps:g} generation batches, before the first of the recalibrations every "
                f"calibration_interval={self.calibration_interval}: the bounds stay at [{self.clip_lower}, "
                f"{self.clip_upper}]. Lower calibration_interval or train longer."
            )

    def on_generation_begin(self, host: ClipHost) -> None:
        self._asked = None
        number = self.num_completed_generation_batches + 1
        if number % self.calibration_interval == 0 and not host.args.ratios_are_one:
            ref_bounds = host.args.reference_bounds
            self._asked = self.search, host.clip_bounds, ref_bounds
            host.collect_clip_statistics(
                self.search.lower_points(self.clip_lower, ref_bounds[0]),
                self.search.upper_points(self.clip_upper, ref_bounds[1]),
                shadow=True,
            )

    def on_generation_end(self, host: ClipHost) -> None:
        if self._asked is not None:
            search, bounds, ref_bounds = self._asked
            assert host.clip_statistics is not None  # asked for at the begin of the batch
            numbers = host.clip_statistics.numbers()
            calibration = decide(numbers, search, bounds, ref_bounds)
            host.record_metrics(calibration_metrics(numbers, calibration))
            self.clip_lower, self.clip_upper = calibration.lower, calibration.upper
            if calibration.degenerate:
                logger.warning(
                    f"Recalibration at generation batch {self.num_completed_generation_batches + 1} kept the clip "
                    f"bounds [{self.clip_lower:.4f}, {self.clip_upper:.4f}]: {calibration.reason}."
                )
        self.num_completed_generation_batches += 1


def calibration_metrics(numbers: ClipNumbers, calibration: Calibration) -> dict[str, Metric]:
    """Metrics of one decision; what both sides clipped is logged by the trainer."""
    metrics: dict[str, Metric] = {
        "calibration/saturated": Max(float(calibration.saturated)),
        "calibration/degenerate": Max(float(calibration.degenerate)),
    }
    if calibration.lower_target is not None and calibration.upper_target is not None:
        sums = numbers.fp8.positive_sum[calibration.upper], numbers.fp8.negative_sum[calibration.lower]
        metrics["update_ratio/after"] = Mean(*sums)
        metrics["clip_bounds/lower_target"] = Last(calibration.lower_target)
        metrics["clip_bounds/upper_target"] = Last(calibration.upper_target)
    return metrics
