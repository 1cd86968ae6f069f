"""From one micro-batch to metrics and clip statistics, out of what the loss computed anyway.

Shapes: B sequences, T completion tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import diagnostics
from ..clipping.importance import importance_weight
from ..clipping.statistics import ClipStatistics
from .window import Metric


@dataclass
class Capture:
    """What passes through the trainer's methods in one scope (generation, or one loss): first forward and masks."""

    shadow: bool = False
    """Whether to run the first forward once more in high precision."""
    per_token_logps: Tensor | None = None
    """`(B, T)`, nats, of the first forward."""
    entropies: Tensor | None = None
    """`(B, T)`, nats, of the first forward."""
    shadow_per_token_logps: Tensor | None = None
    """`(B, T)`, nats, of the shadow pass."""
    masks: list[Tensor] = field(default_factory=list)
    """Masks the loss applies beyond completion and tool masks, each `(B, T)` or `(B, 1)`."""


@dataclass
class MicroBatch:
    """One micro-batch of the loss, on the device.

    Args:
        mask (`Tensor` of shape `(B, T)`): completion tokens of the model itself.
        kept (`Tensor` of shape `(B, T)`): those the loss keeps (`mask`, off-policy and entropy masks, w != 0).
        per_token_logps, old_per_token_logps (`Tensor` of shape `(B, T)`): FP8, nats.
        shadow, shadow_old (`Tensor` of shape `(B, T)`, *optional*): BF16, nats; both or none.
        advantages (`Tensor` of shape `(B,)` or `(B, T)`): A.
        entropies (`Tensor` of shape `(B, T)`, *optional*): nats.
        is_weight (`Tensor` of shape `(B, T)` or `(B, 1)`, *optional*): w of the loss.
        moved: whether the weights have moved since generation.
    """

    mask: Tensor
    kept: Tensor
    per_token_logps: Tensor
    old_per_token_logps: Tensor
    advantages: Tensor
    entropies: Tensor | None
    is_weight: Tensor | None
    moved: bool
    shadow: Tensor | None = None
    shadow_old: Tensor | None = None

    @classmethod
    def from_loss(cls, inputs: Mapping[str, Any], capture: Capture, weighted: bool, moved: bool) -> "MicroBatch":
        """Gather what the loss read (`inputs`) and computed (`capture`); `weighted`: whether w is in the loss."""
        assert capture.per_token_logps is not None  # every loss scores its completions first
        mask = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            mask = mask & inputs["tool_mask"].bool()
        kept = mask
        for loss_mask in capture.masks:
            kept = kept & loss_mask.bool()
        is_weight = inputs["importance_sampling_ratio"] if weighted else None
        if is_weight is not None:
            kept = kept & (is_weight != 0)
        shadow_old = inputs.get("shadow_old_per_token_logps")
        return cls(
            mask=mask,
            kept=kept,
            per_token_logps=capture.per_token_logps,
            # TRL's loss does the same when the batch carries none: its only update is on-policy
            old_per_token_logps=inputs.get("old_per_token_logps", capture.per_token_logps),
            advantages=inputs["advantages"],
            entropies=capture.entropies,
            is_weight=is_weight,
            moved=moved,
            # Before the first optimizer step the weights are those of the first shadow pass
            shadow=capture.shadow_per_token_logps if moved else shadow_old,
            shadow_old=shadow_old,
        )


def drop_unscored(rollout: dict[str, Any]) -> None:
    """Weight 0 for tokens the engine could not score, where TRL says 1: nothing is known of their sampler.

    Args:
        rollout: TRL's generation batch; its `importance_sampling_ratio`, if any, has shape `(B, T)` or `(B, 1)`.
    """
    if "importance_sampling_ratio" not in rollout:
        return
    unscored = torch.isnan(rollout["sampling_per_token_logps"])
    if bool((unscored & rollout["completion_mask"].bool()).any()):
        weight = rollout["importance_sampling_ratio"].expand(unscored.shape)
        rollout["importance_sampling_ratio"] = torch.where(unscored, 0.0, weight)


def measure_rollout(rollout: Mapping[str, Any], mode: Any) -> tuple[dict[str, Metric], Tensor]:
    """Mismatch of a generation batch, and the raw ratios `(B * T,)` with NaN in the place of other tokens.

    Args:
        rollout: what TRL's generation returns, with `old_per_token_logps` and `sampling_per_token_logps`.
        mode: TRL's `vllm_importance_sampling_mode`; `None` without a correction.
    """
    old, sampling = rollout["old_per_token_logps"], rollout["sampling_per_token_logps"]
    mask = rollout["completion_mask"].bool()
    if "tool_mask" in rollout:
        mask = mask & rollout["tool_mask"].bool()
    truncated = None
    if mode is not None:
        weight = importance_weight(old, sampling, mask, mode=mode, clip_max=None)
        truncated = weight != rollout["importance_sampling_ratio"]
    ratios = torch.where(mask, diagnostics.raw_log_ratio(old, sampling).exp(), float("nan"))
    return {**diagnostics.mismatch(old, sampling, mask, truncated)}, ratios.flatten()


def measure(
    batch: MicroBatch,
    bounds: tuple[float, float] | None,
    ref_bounds: tuple[float, float],
    statistics: ClipStatistics | None = None,
    ref_is_weight: Tensor | None = None,
) -> dict[str, Metric]:
    """Metrics of one micro-batch; adds it to `statistics` where a policy collects some.

    Args:
        batch: the micro-batch.
        bounds: `(L, H)` in force; `None` for a loss that does not clip token ratios at both, whose clip metrics would
            lie.
        ref_bounds: `(1 - epsilon, 1 + epsilon_high)`.
        statistics: to be updated in place.
        ref_is_weight (`Tensor` of shape `(B, T)`, *optional*): w with the BF16 old policy.
    """
    log_ratio = batch.per_token_logps - batch.old_per_token_logps
    ratio, ref_ratio = torch.exp(log_ratio), None
    negative, positive = diagnostics.signs(batch.advantages, batch.kept)
    metrics: dict[str, Metric] = {}
    if bounds is not None:
        metrics |= {"clip_bounds/lower": bounds[0], "clip_bounds/upper": bounds[1]}
        metrics |= diagnostics.clip_shares(ratio, negative, positive, bounds, ref_bounds)
    if batch.entropies is not None:
        metrics |= diagnostics.entropy_bins(batch.entropies, batch.mask)
    if batch.old_per_token_logps is not batch.per_token_logps and not batch.moved:
        metrics |= diagnostics.noise_floor(log_ratio, batch.mask)
    if batch.shadow is not None and batch.shadow_old is not None:
        ref_ratio = torch.exp(batch.shadow - batch.shadow_old)
        metrics |= diagnostics.quantization_error(batch.per_token_logps, batch.shadow, ratio, ref_ratio, batch.mask)
        metrics |= diagnostics.over_clipping(ratio, ref_ratio, negative, positive, ref_bounds)
    if statistics is not None:
        statistics.update(ratio, ref_ratio, batch.advantages, batch.kept, batch.is_weight, ref_is_weight)
    return metrics
