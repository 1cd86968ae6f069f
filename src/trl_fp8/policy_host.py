"""What a clipping policy may use of the trainer, and which policies there are."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from transformers.trainer_callback import ExportableState

from . import checks
from .clipping.calibrated import CalibratedClippingCallback
from .clipping.policy import ClippingPolicy
from .clipping.statistics import ClipStatistics
from .config import FP8GRPOConfig
from .diagnostics.window import Metric, MetricWindow
from .resume import SettingsRecord


if TYPE_CHECKING:
    from trl import GRPOTrainer as _Base
else:
    _Base = object  # the parent is TRL's trainer by the order of bases


class PolicyHost(_Base):
    """Part of the trainer: its clip bounds, and the statistics and metrics of policies."""

    args: FP8GRPOConfig
    _window: MetricWindow
    _clip_bounds: tuple[float, float]
    _collected: ClipStatistics | None = None
    _collect_shadow = False
    _beginning = False  # inside `on_generation_begin`
    _adopted: ClippingPolicy | None = None  # whose initial bounds are in force, or were

    def _policies(self) -> list[ClippingPolicy]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, ClippingPolicy)]

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """`(L, H)`: lower and upper clip bound on the importance ratio in force."""
        return self._clip_bounds

    @clip_bounds.setter
    def clip_bounds(self, bounds: tuple[float, float]) -> None:
        lower, upper = map(float, bounds)
        checks.check_bounds(lower, upper, self.args.delta)
        self._clip_bounds = (lower, upper)
        self.epsilon_low, self.epsilon_high = 1 - lower, upper - 1

    def collect_clip_statistics(self, lower_points: list[float], upper_points: list[float], shadow: bool) -> None:
        """Collect [`~trl_fp8.clipping.ClipStatistics`] over the generation batch that begins.

        Args:
            lower_points, upper_points: ascending points to count at, both sides.
            shadow: whether to score the batch in BF16 as well (the reference side of the statistics).

        Raises:
            RuntimeError: outside `on_generation_begin`, where part of a batch would be missed.
            ValueError: a shadow pass is asked for where every ratio is 1 by construction.
        """
        checks.check_collection(self.args, self._beginning, shadow)
        self._collected = ClipStatistics(lower_points, upper_points, delta=self.args.delta)
        self._collect_shadow = shadow

    def record_metrics(self, metrics: Mapping[str, Metric]) -> None:
        """Log metrics with the next log, see [`~trl_fp8.metrics.MetricWindow`] for numbers and pairs."""
        self._window.record(metrics, self.accelerator.device)

    def _add_policy(self) -> None:
        if not self._policies() and self.args.use_calibrated_clipping:
            settings = {name: getattr(self.args, name) for name in checks.POLICY_SETTINGS}
            self.add_callback(CalibratedClippingCallback(**settings))
        self._adopt_policies()
        self.add_callback(SettingsRecord(self.args, lambda: [type(policy).__name__ for policy in self._policies()]))

    def _adopt_policies(self) -> None:
        """Put the bounds a policy starts from in force, also of one that was added later."""
        for policy in self._policies():
            if policy is not self._adopted and policy.initial_bounds is not None:
                self.clip_bounds = policy.initial_bounds
            if policy is not self._adopted and isinstance(policy, ExportableState):
                # HF updates the entry at each save, and makes it only before the first step
                cast(dict, self.state.stateful_callbacks).setdefault(type(policy).__name__, policy.state())
            self._adopted = policy

    def _load_callback_state(self) -> None:
        ours = [c for c in self.callback_handler.callbacks if isinstance(c, (ClippingPolicy, SettingsRecord))]
        super()._load_callback_state()
        # HF put callbacks built from the checkpoint's arguments in place of those this run was given; ours restore
        # their own state in `on_train_begin`
        for callback in ours:
            self.callback_handler.remove_callback(type(callback))
            self.callback_handler.add_callback(callback)
