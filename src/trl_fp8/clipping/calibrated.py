"""When the clip bounds change and to what: policies of the bounds as `TrainerCallback`s.

The trainer measures (statistics, log-probs), the policy decides. A policy gets two events that transformers does not
have, around each generation batch of training, and acts on the trainer it is handed; neither keeps a reference to the
other.
"""

import logging
import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, cast

from transformers.trainer_callback import ExportableState

from ..resume import checked_state
from .decide import Calibration, solve
from .policy import ClippingPolicy
from .search import ClipSearch
from .statistics import ClipNumbers


if TYPE_CHECKING:
    from ..trainer import FP8GRPOTrainer

logger = logging.getLogger(__name__)


class CalibratedClippingCallback(ClippingPolicy, ExportableState):
    """Calibrated Clipping (arXiv 2609.22870, section 3): keep FP8's clipping equal to BF16's.

    Every `calibration_interval` generation batches the batch is scored once more in BF16. The lower bound moves so
    that FP8 clips as many negative-advantage tokens as BF16 clips at the reference bounds, the upper bound so that the
    positive-to-negative update ratio equals BF16's, both through SmoothUpdate.

    The state, the bounds and the number of completed generation batches, is saved with each checkpoint and restored
    without any setting.

    Args:
        calibration_interval: generation batches between two recalibrations.
        clip_lower_init, clip_upper_init: bounds before the first one.
        clip_lower_min, clip_lower_max, clip_upper_min, clip_upper_max, clip_grid_step, clip_lower_max_change,
            clip_upper_max_change, rebalance_with: see [`~trl_fp8.clipping.ClipSearch`].

    Raises:
        ValueError: a number is outside its range (same rules as [`FP8GRPOConfig`]).
    """

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
                f"calibration_interval={calibration_interval} is no whole number of generation batches. Set one >= 1."
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
        self._begun: int | None = None  # number of the generation batch in hand
        # Search, bounds and reference bounds its statistics were asked for, whatever is set meanwhile
        self._asked: tuple[ClipSearch, tuple[float, float], tuple[float, float]] | None = None

    @property
    def initial_bounds(self) -> tuple[float, float]:
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

    def state(self) -> dict:
        """Arguments and state as plain numbers (and one word), for the checkpoint's `trainer_state.json`."""
        return {
            "args": {
                "calibration_interval": self.calibration_interval,
                "clip_lower_init": self.clip_lower_init,
                "clip_upper_init": self.clip_upper_init,
                **{f.name: getattr(self.search, f.name) for f in fields(ClipSearch)},
            },
            "attributes": {
                "clip_lower": self.clip_lower,
                "clip_upper": self.clip_upper,
                "num_completed_generation_batches": self.num_completed_generation_batches,
            },
        }

    def on_train_begin(self, args, state, control, **kwargs):
        name, all_saved = type(self).__name__, cast(dict[str, Any], state.stateful_callbacks)
        restored = state.global_step > 0 and name in all_saved
        if state.global_step > 0 and not restored:
            logger.warning(
                f"The checkpoint holds no state of {name}: the clip bounds start at [{self.clip_lower}, "
                f"{self.clip_upper}] and generation batches are counted from {self.num_completed_generation_batches}."
            )
        # setdefault: HF updates an entry at each save and fails if the checkpoint it resumed from had none
        saved = all_saved.setdefault(name, self.state())
        if restored:
            checked_state(name, saved)
            for attribute in self.state()["attributes"]:
                setattr(self, attribute, saved["attributes"].get(attribute, getattr(self, attribute)))
        if state.global_step > 0:
            # A trainer resumed in the process that was interrupted first trains on what is left of its old batch
            self._begun = None
            if restored and state.is_world_process_zero:
                print(  # noqa: T201 - the start-up line said where a fresh run would begin
                    f"\n{name}: resumed with clip bounds [{self.clip_lower:.4g}, {self.clip_upper:.4g}] after "
                    f"{self.num_completed_generation_batches} generation batches."
                )
        arguments = self.state()["args"]
        changed = [
            f"{key}: {old} -> {arguments[key]}"
            for key, old in saved["args"].items()
            if key in arguments and arguments[key] != old and not key.endswith("_init")  # only where a run begins
        ]
        if changed:
            logger.warning(f"{name}: settings differ from the checkpoint's, the new ones hold ({', '.join(changed)}).")
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

    def _recalibrates(self, trainer: "FP8GRPOTrainer") -> bool:
        number = self.num_completed_generation_batches + 1
        return number % self.calibration_interval == 0 and not trainer.args.ratios_are_one

    def on_generation_begin(self, trainer: "FP8GRPOTrainer") -> None:
        self._begun = self.num_completed_generation_batches + 1
        trainer.clip_bounds = (self.clip_lower, self.clip_upper)
        self._asked = None
        if self._recalibrates(trainer):
            ref_lower, ref_upper = trainer.args.reference_bounds
            self._asked = self.search, trainer.clip_bounds, (ref_lower, ref_upper)
            trainer.collect_clip_statistics(
                self.search.lower_points(self.clip_lower, ref_lower),
                self.search.upper_points(self.clip_upper, ref_upper),
                shadow=True,
            )

    def on_generation_end(self, trainer: "FP8GRPOTrainer") -> None:
        if self._begun is None:
            return  # the batch began before this policy was (re)started: its statistics are partial
        self._begun = None
        if self._asked is not None:
            search, bounds, ref_bounds = self._asked
            assert trainer.clip_statistics is not None  # asked for at the begin of the batch
            numbers = trainer.clip_statistics.numbers()
            calibration = solve(numbers, search, bounds, ref_bounds)
            trainer.record_metrics(_metrics(numbers, calibration, bounds, ref_bounds))
            self.clip_lower, self.clip_upper = calibration.lower, calibration.upper
            trainer.clip_bounds = (self.clip_lower, self.clip_upper)
            if calibration.degenerate:
                logger.warning(
                    f"Recalibration at generation batch {self.num_completed_generation_batches + 1} kept the clip "
                    f"bounds [{self.clip_lower:.4f}, {self.clip_upper:.4f}]: {calibration.reason}."
                )
        self.num_completed_generation_batches += 1


def _metrics(
    numbers: ClipNumbers, calibration: Calibration, bounds: tuple[float, float], ref_bounds: tuple[float, float]
) -> dict[str, float | tuple[float, float]]:
    """Metrics of one recalibration; pairs are (numerator, denominator)."""
    policy, reference = numbers.policy, numbers.reference
    metrics: dict[str, float | tuple[float, float]] = {
        "calibration/alpha_low": (reference.lower_clipped[ref_bounds[0]], policy.num_negative),
        "calibration/alpha_high": (reference.upper_clipped[ref_bounds[1]], policy.num_positive),
        "calibration/rho_ref": (reference.positive_sum[ref_bounds[1]], reference.negative_sum[ref_bounds[0]]),
        "calibration/rho": (policy.positive_sum[bounds[1]], policy.negative_sum[bounds[0]]),
        "calibration/saturated": float(calibration.saturated),
        "calibration/degenerate": float(calibration.degenerate),
    }
    if calibration.lower_target is not None and calibration.upper_target is not None:
        metrics["calibration/rho_after"] = (
            policy.positive_sum[calibration.upper],
            policy.negative_sum[calibration.lower],
        )
        metrics["clip_bounds/lower_target"] = calibration.lower_target
        metrics["clip_bounds/upper_target"] = calibration.upper_target
    return metrics
