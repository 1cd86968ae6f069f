"""What every clip policy has in common: its events, what it may use of the trainer, and its state in checkpoints.

The trainer measures (log-probs, statistics) and fires the events; the policy decides. Neither keeps a reference to the
other. transformers has no event for a generation batch and hands no callback its trainer, so these events are our own.
"""

import inspect
import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..reductions import Metric
from .batch import MicroBatch
from .statistics import ClipStatistics


logger = logging.getLogger(__name__)


class ClipHost(Protocol):
    """What a policy may use of the trainer inside its events."""

    @property
    def args(self) -> Any:
        """The run's [`FP8GRPOConfig`]."""
        ...

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """`(L, H)` in force: lower and upper clip bound on the importance ratio. A policy may set it."""
        ...

    @clip_bounds.setter
    def clip_bounds(self, bounds: tuple[float, float]) -> None: ...

    def collect_clip_statistics(self, lower_points: list[float], upper_points: list[float], shadow: bool) -> None:
        """Ask for statistics of the generation batch that begins; `shadow`: under BF16 as well."""
        ...

    @property
    def clip_statistics(self) -> ClipStatistics | None:
        """What was asked for, summed over all ranks, in `on_generation_end`."""
        ...

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum of `tensor` over all ranks; every rank must call it."""
        ...

    def record_metrics(self, metrics: Mapping[str, Metric]) -> None:
        """Log values with the next log; each says how it is reduced (`trl_fp8.diagnostics`: `Last`, `Mean`, ...)."""
        ...


class ClippingPolicy(TrainerCallback, ExportableState):
    """Base of every clip policy. A trainer takes one at most.

    A subclass sets `bounds`, or overrides the events it needs, and names in `state_attributes` the numbers that a
    checkpoint must hold; saving and restoring them is done here.
    """

    name: ClassVar[str | None] = None
    """Name for `clip_policy`; for the policies of this package."""
    state_attributes: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes (ints and floats) that are saved with each checkpoint and restored on resuming."""
    reads_both_bounds: ClassVar[bool] = True
    """Whether the policy needs a loss that clips token ratios at both bounds."""
    needs_shadow: ClassVar[bool] = False
    """Whether the policy asks for BF16 passes, which a model with dropout makes noise of."""
    requires: ClassVar[Mapping[str, Any]] = {}
    """TRL fields the policy sets. A value equal to the field's default counts as unset, another one is an error."""
    bounds: tuple[float, float] | None = None
    """`(L, H)` to put in force at the start, before each generation batch and after `on_generation_end`; `None` leaves
    them as they are."""

    def announcement(self, args: Any) -> str:
        """What the trainer's start-up line says of this policy."""
        return ", ".join(f"{name}={value}" for name, value in self.arguments().items()) or "no arguments"

    # -- events, in training only -------------------------------------------------------------------------------------

    def on_generation_begin(self, host: ClipHost) -> None:
        """Before a generation batch is generated. The only place to ask for statistics."""

    def on_generation_end(self, host: ClipHost) -> None:
        """After the last micro-batch of a generation batch has been trained on, before transformers logs and saves."""

    def micro_batch_bounds(self, host: ClipHost, batch: MicroBatch) -> tuple[float, float] | None:
        """`(L, H)` for this micro-batch only, or `None`. Called inside the loss, when the log-probs are known."""

    def token_weights(self, host: ClipHost, batch: MicroBatch) -> Tensor | None:
        """Weights `(B, T)` or `(B, 1)` of the clipped per-token loss, or `None`.

        Applied for every loss type, before the mismatch weight, the KL term and the normalisation, whose denominators
        keep the tokens of weight 0. What gets weight 0 leaves the clip statistics.
        """

    # -- state --------------------------------------------------------------------------------------------------------

    def arguments(self) -> dict[str, Any]:
        """Constructor arguments, as far as they are attributes and plain: a resumed run names those that differ."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if hasattr(self, name)]
        return {name: getattr(self, name) for name in names if isinstance(getattr(self, name), (int, float, str))}

    def state(self) -> dict:
        """Arguments and state as plain values, for `trainer_state.json`.

        Raises:
            TypeError: an attribute of the state is not a number.
        """
        attributes = {name: getattr(self, name, None) for name in self.state_attributes}
        wrong = {name: value for name, value in attributes.items() if not isinstance(value, (int, float))}
        if wrong:
            raise TypeError(
                f"state_attributes of {type(self).__name__} names {wrong}, and a checkpoint keeps ints and floats "
                "only. Set these attributes to numbers in the constructor."
            )
        return {"args": self.arguments(), "attributes": attributes}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the state of a resumed run, and name the settings that differ from its checkpoint's."""
        name, all_saved = type(self).__name__, cast(dict[str, Any], state.stateful_callbacks)
        own = self.state()
        resumed = state.global_step > 0 and bool(own["attributes"])
        restored = resumed and name in all_saved
        if resumed and not restored:
            logger.warning(
                f"The checkpoint holds no state of {name}: the policy starts with {_listing(own['attributes'])}."
            )
        # setdefault: transformers updates an entry at each save, and fails if the checkpoint it resumed from had none
        saved = all_saved.setdefault(name, own)
        if not restored:
            return
        self._restore(saved)
        if state.is_world_process_zero:
            print(  # noqa: T201 - the start-up line said where a fresh run would begin
                f"\n{name}: resumed with {_listing(self.state()['attributes'])}."
            )
        changed = [
            f"{key}: {old} -> {own['args'][key]}"
            for key, old in saved["args"].items()
            if key in own["args"] and own["args"][key] != old and not key.endswith("_init")  # only where a run begins
        ]
        if changed:
            logger.warning(f"{name}: settings differ from the checkpoint's, the new ones hold ({', '.join(changed)}).")

    def _restore(self, saved: Any) -> None:
        """Take the attributes of a checkpoint's entry.

        Raises:
            ValueError: the entry is damaged, or written by another class of the same name.
        """
        wrong = [part for part in ("args", "attributes") if not isinstance(_part(saved, part), dict)]
        current = self.state()["attributes"]
        values = {} if wrong else {key: saved["attributes"].get(key) for key in current}
        wrong += [f"{key}={value!r}" for key, value in values.items() if not _is_like(value, current[key], key)]
        if not wrong:
            for key, value in values.items():
                setattr(self, key, type(current[key])(value))
            if self.bounds is not None and not 0 < self.bounds[0] < 1 < self.bounds[1] < math.inf:
                wrong = [f"{key}={value!r}" for key, value in values.items()]
        if wrong:
            for key, value in current.items():
                setattr(self, key, value)
            raise ValueError(
                f"The checkpoint's trainer_state.json holds a damaged state of {type(self).__name__} "
                f"({', '.join(wrong)}), so the policy cannot go on from it. Resume from another checkpoint, or remove "
                "the entry from stateful_callbacks to begin anew."
            )


def _part(saved: Any, name: str) -> Any:
    return saved.get(name) if isinstance(saved, dict) else None


def _is_like(value: Any, current: int | float, key: str) -> bool:
    """Whether `value` can stand for the number `current`; a count is whole and not negative."""
    if isinstance(value, bool) != isinstance(current, bool) or not isinstance(value, (int, float)):
        return False
    whole = not isinstance(current, int) or value == int(value)
    return math.isfinite(value) and whole and not (key.startswith("num_") and value < 0)


def _listing(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
