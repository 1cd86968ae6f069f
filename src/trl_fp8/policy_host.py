"""The trainer as a clip policy sees it ([`~trl_fp8.clipping.policy.ClipHost`]), and when a policy is asked."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn
from trl import GRPOTrainer

from . import checks, clip_checks
from .checkpoints import RunRecord
from .clipping.policy import ClippingPolicy
from .clipping.statistics import ClipStatistics
from .config import FP8GRPOConfig
from .diagnostics.record import BatchRecord, Capture
from .diagnostics.window import MetricWindow
from .reductions import Mean, Metric


def with_clip_policy(callbacks: list | None, args: FP8GRPOConfig) -> list:
    """The callbacks of a run and, unless they hold a clip policy, the one that `args` names.

    Raises:
        ValueError: both name one, or a policy requires another value of a field than was set.
    """
    # transformers takes a class for an instance without arguments
    callbacks = [c() if isinstance(c, type) and issubclass(c, ClippingPolicy) else c for c in callbacks or ()]
    given = [callback for callback in callbacks if isinstance(callback, ClippingPolicy)]
    clip_checks.give_way_to_callbacks(args, given)
    own = [] if given or args.resolved_clip_policy == "fixed" else [clip_checks.clip_policy_of(args)]
    return [*callbacks, *own]


class PolicyHost(GRPOTrainer):
    """Part of the trainer: its clip bounds, and the events, statistics and metrics of its clip policy."""

    args: FP8GRPOConfig
    _window: MetricWindow
    _batch: BatchRecord
    _run: RunRecord
    _clip_bounds: tuple[float, float]
    _adopted: ClippingPolicy | None = None  # whose bounds are in force, or were

    # -- what a policy may use ----------------------------------------------------------------------------------------

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """`(L, H)`: lower and upper clip bound on the importance ratio in force."""
        return self._clip_bounds

    @clip_bounds.setter
    def clip_bounds(self, bounds: tuple[float, float]) -> None:
        lower, upper = map(float, bounds)
        clip_checks.check_bounds(lower, upper, self.args.delta)
        self._clip_bounds = (lower, upper)
        # TRL reads `epsilon_high` of cispo as the cap itself
        self.epsilon_low, self.epsilon_high = 1 - lower, upper if self.loss_type == "cispo" else upper - 1

    @property
    def clip_statistics(self) -> ClipStatistics | None:
        """Of the generation batch in hand, as far as its policy asked for any; summed over ranks at its end."""
        return self._batch.statistics

    def collect_clip_statistics(self, lower_points: list[float], upper_points: list[float], shadow: bool) -> None:
        """Collect [`~trl_fp8.clipping.ClipStatistics`] over the generation batch that begins.

        Args:
            lower_points, upper_points: ascending points to count at, both sides.
            shadow: whether to score the batch in BF16 as well (the BF16 side of the statistics).

        Raises:
            RuntimeError: outside `on_generation_begin`, where part of a batch would be missed.
            ValueError: a shadow pass is asked for where every ratio is 1 by construction, or is noise.
        """
        clip_checks.check_collection(self.args, self._batch.beginning, shadow)
        if shadow and not self._batch.shadow:
            checks.refuse_noise(cast(nn.Module, self.model))
        self._batch.statistics = ClipStatistics(lower_points, upper_points, delta=self.args.delta)
        self._batch.shadow = self._batch.shadow or shadow

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum of `tensor` over all ranks; a collective."""
        return cast(Tensor, self.accelerator.reduce(tensor, reduction="sum"))

    def record_metrics(self, metrics: Mapping[str, Metric]) -> None:
        """Log metrics with the next log, see `trl_fp8.reductions`."""
        self._window.record(metrics, self.accelerator.device)

    # -- which policy -------------------------------------------------------------------------------------------------

    def _policies(self) -> list[ClippingPolicy]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, ClippingPolicy)]

    def _policy(self) -> ClippingPolicy | None:
        """Looked up each time: callbacks come and go."""
        return next(iter(self._policies()), None)

    def _start_policy(self) -> None:
        self._adopt_policy()
        if self._policy() is None:
            clip_checks.warn_ignored_settings(None, self.args)
        self._run = RunRecord(self.args, lambda: [type(policy).__name__ for policy in self._policies()])
        self.add_callback(self._run)

    def _adopt_policy(self) -> None:
        """Check the policy, also one that was added later, and put the bounds it wants in force."""
        policies = self._policies()
        clip_checks.check_policies(policies, self.args)
        for policy in policies:
            if policy is not self._adopted:
                clip_checks.warn_ignored_settings(policy, self.args)
                # transformers updates the entry at each save, and makes it only before the first step
                cast(dict, self.state.stateful_callbacks).setdefault(type(policy).__name__, policy.state())
            self._adopted = policy
        self._put_bounds_in_force()

    def _put_bounds_in_force(self) -> None:
        policy = self._policy()
        if policy is None or policy.bounds is None:
            return
        try:
            self.clip_bounds = policy.bounds
        except ValueError as error:
            raise ValueError(f"bounds={policy.bounds} of {type(policy).__name__}: {error}") from error

    def _load_callback_state(self) -> None:
        ours = [c for c in self.callback_handler.callbacks if isinstance(c, (ClippingPolicy, RunRecord))]
        super()._load_callback_state()
        # transformers put callbacks built from the checkpoint's arguments in place of those this run was given; ours
        # restore their own state in `on_train_begin`
        for callback in ours:
            self.callback_handler.remove_callback(type(callback))
            self.callback_handler.add_callback(callback)

    # -- events -------------------------------------------------------------------------------------------------------

    def _begin_batch(self) -> BatchRecord:
        self._batch = batch = BatchRecord(begun=True, beginning=True)
        self._adopt_policy()
        interval, number = self.args.shadow_interval, self._run.num_completed_generation_batches + 1
        batch.shadow = interval is not None and number % interval == 0 and not self.args.ratios_are_one
        batch.policy = self._policy()
        if batch.policy is not None:
            batch.policy.on_generation_begin(self)
        batch.beginning = False
        return batch

    def _end_batch(self) -> None:
        batch = self._batch
        if not batch.begun:
            return  # it began before the run was resumed: what is known of it is partial
        if batch.shadow:
            self.record_metrics({"fp8/shadow_time": Mean(batch.shadow_seconds, 1.0), **batch.held})
        if batch.statistics is not None and batch.statistics.flat is not None:
            batch.statistics.flat = self.sum_over_ranks(batch.statistics.flat)
        policy = self._policy()
        if policy is not None and policy is batch.policy:
            policy.on_generation_end(self)
            self._put_bounds_in_force()
        self._run.num_completed_generation_batches += 1

    def _policy_in_loss(self, event: str) -> ClippingPolicy | None:
        """The policy, inside a loss of training, if it has something to do in `event`."""
        policy, capture = self._policy(), self._batch.capture
        if policy is None or capture is None or capture.inputs is None:
            return None
        return policy if getattr(type(policy), event) is not getattr(ClippingPolicy, event) else None

    @contextlib.contextmanager
    def _clipping_by_policy(self) -> Iterator[None]:
        """What a policy changes for one loss is changed back after it."""
        before = self._clip_bounds, self.epsilon_low, self.epsilon_high, self.off_policy_mask_threshold
        if self.off_policy_mask_threshold is None and self._policy_in_loss("token_weights") is not None:
            self.off_policy_mask_threshold = math.inf  # TRL asks for the mask only where there is a threshold
        try:
            yield
        finally:
            self._clip_bounds, self.epsilon_low, self.epsilon_high, self.off_policy_mask_threshold = before

    def _ask_for_bounds(self, capture: Capture) -> None:
        """Between the log-probs and the clip of the loss: `micro_batch_bounds`."""
        policy = self._policy_in_loss("micro_batch_bounds")
        bounds = None if policy is None else policy.micro_batch_bounds(self, capture.batch)
        if bounds is not None:
            self.clip_bounds = bounds
            capture.bounds = self.clip_bounds

    def _with_token_weights(self, off_policy_mask: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """TRL's static `get_off_policy_mask`, times the policy's `token_weights`."""

        def mask_and_weights(*args: Any, **kwargs: Any) -> Tensor:
            mask, capture = off_policy_mask(*args, **kwargs), self._batch.capture
            if capture is None:
                return mask
            capture.masks.append(mask.detach())
            policy = self._policy_in_loss("token_weights")
            weights = None if policy is None else policy.token_weights(self, capture.batch)
            if weights is None:
                return mask
            clip_checks.check_token_weights(weights, capture.batch.mask.shape, type(policy).__name__)
            capture.masks.append(weights.detach() != 0)
            return mask * weights.detach()

        return mask_and_weights
