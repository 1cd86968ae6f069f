"""What every policy of the clip bounds has in common: its events, and what it may use of the trainer."""

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback


if TYPE_CHECKING:
    from ..trainer import FP8GRPOTrainer


class ClippingPolicy(TrainerCallback):
    """Base of every policy of the clip bounds. A trainer takes one at most.

    Inside the two events a policy may use `trainer.clip_bounds` (get and set), `trainer.record_metrics({...})`, at the
    begin `trainer.collect_clip_statistics(lower_points, upper_points, shadow=...)`, and at the end
    `trainer.clip_statistics`, which then holds what the call at the begin asked for, summed over all ranks
    ([`~trl_fp8.clip_statistics.ClipStatistics`]; `.numbers()` gives counts and sums by point, see
    [`~trl_fp8.clip_statistics.SideNumbers`]). State is saved with checkpoints by inheriting from transformers'
    `ExportableState` too, and restored in `on_train_begin`; [`CalibratedClippingCallback`] shows how.
    """

    @property
    def initial_bounds(self) -> tuple[float, float] | None:
        """`(L, H)` to put in force when the trainer is built; `None` leaves the reference bounds."""
        return None

    def announcement(self, args: Any) -> str:
        """What the trainer's start-up line says of this policy."""
        return f"policy {type(self).__name__}"

    def on_generation_begin(self, trainer: "FP8GRPOTrainer") -> None:
        """Before a generation batch is generated, in training only."""

    def on_generation_end(self, trainer: "FP8GRPOTrainer") -> None:
        """After the last micro-batch of a generation batch has been trained on, before HF logs and saves."""
