"""One generation batch of training: what is asked of it, what passes through the trainer's methods, what is measured.

Shapes: B sequences, T completion tokens.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..clipping.batch import MicroBatch
from ..clipping.importance import importance_ratio, importance_weight
from ..clipping.statistics import ClipStatistics
from ..reductions import Last, Mean, Metric, Sum, add
from . import tokens
from .train_rollout import mismatch, raw_log_ratio


@dataclass
class Capture:
    """What passes through the trainer's methods in one scope (generation, or one loss)."""

    shadow: bool = False
    """Whether to run the first forward once more in high precision."""
    inputs: Mapping[str, Any] | None = None
    """Of the loss; `None` in the generation."""
    weighted: bool = False
    """Whether the loss multiplies by the mismatch weight."""
    per_token_logps: Tensor | None = None
    """`(B, T)`, nats, of the first forward."""
    entropies: Tensor | None = None
    """`(B, T)`, nats, of the first forward."""
    shadow_per_token_logps: Tensor | None = None
    """`(B, T)`, nats, of the shadow pass."""
    masks: list[Tensor] = field(default_factory=list)
    """What the loss drops beyond completion and tool masks is 0 here, each `(B, T)` or `(B, 1)`."""
    bounds: tuple[float, float] | None = None
    """`(L, H)` that the loss clips at."""

    @property
    def batch(self) -> MicroBatch:
        """The micro-batch of the loss, detached."""
        assert self.inputs is not None  # a loss is in hand
        assert self.per_token_logps is not None  # every loss scores its completions first
        advantages = self.inputs["advantages"]
        return MicroBatch(
            log_probs=self.per_token_logps,
            # TRL's loss does the same when the batch carries none: its only update is on-policy
            old_log_probs=self.inputs.get("old_per_token_logps", self.per_token_logps),
            sampler_log_probs=self.inputs.get("sampling_per_token_logps"),
            advantages=advantages.unsqueeze(1) if advantages.dim() == 1 else advantages,
            mask=model_tokens(self.inputs),
            weights=self.inputs["importance_sampling_ratio"] if self.weighted else None,
        )


@dataclass
class BatchRecord:
    """The generation batch in hand, from the begin of its generation to its last micro-batch."""

    begun: bool = False
    """Whether the batch was generated in this run. The rest of a batch from before a resume was not."""
    beginning: bool = False
    """Whether statistics may still be asked for."""
    policy: Any = None
    """The clip policy whose `on_generation_begin` was called."""
    statistics: ClipStatistics | None = None
    """What the policy asked for, so far."""
    shadow: bool = False
    """Whether the batch is scored in BF16 as well."""
    shadow_seconds: float = 0.0
    weights_moved: bool = False
    """Whether an optimizer step has followed since the batch was generated."""
    capture: Capture | None = None
    """Of the scope that is open."""
    unmeasured: Capture | None = None
    """Of the last loss, until its backward pass is through."""

    held: dict[str, Sum | Mean] = field(default_factory=dict)
    """Metrics that are logged once for the whole batch, at its end."""

    def hold(self, metrics: Mapping[str, Sum | Mean]) -> None:
        """Add metrics of a micro-batch to those of the whole batch."""
        for key, metric in metrics.items():
            self.held[key] = add(self.held[key], metric) if key in self.held else metric

    @contextlib.contextmanager
    def capturing(self, **settings: Any) -> Iterator[Capture]:
        """Scope of a generation or of a loss."""
        self.capture = capture = Capture(**settings)
        try:
            yield capture
        finally:
            self.capture = None


@dataclass(frozen=True)
class Ratios:
    """Importance ratios of a micro-batch as the loss sees them, and the BF16 side of a batch with a shadow pass."""

    fp8: Tensor
    bf16: Tensor | None = None
    bf16_log_probs: Tensor | None = None
    bf16_weight: Tensor | None = None


def ratios(record: BatchRecord, capture: Capture, args: Any) -> Ratios:
    """Form the ratios `(B, T)` (`(B, 1)` at sequence level) of both sides and the BF16 mismatch weight `(B, T)`."""
    batch, inputs, level = capture.batch, capture.inputs, args.importance_sampling_level
    assert inputs is not None  # a loss is in hand
    fp8 = importance_ratio(batch.log_probs, batch.old_log_probs, batch.mask, level)
    bf16_old = inputs.get("shadow_old_per_token_logps")
    # Before the first optimizer step the weights are those of the first shadow pass
    bf16 = capture.shadow_per_token_logps if record.weights_moved else bf16_old
    if bf16 is None or bf16_old is None:
        return Ratios(fp8)
    weight = None
    if batch.weights is not None and batch.sampler_log_probs is not None:
        weight = importance_weight(
            bf16_old,
            batch.sampler_log_probs,
            batch.mask,
            mode=args.vllm_importance_sampling_mode,
            clip_min=args.vllm_importance_sampling_clip_min,
            clip_max=args.vllm_importance_sampling_clip_max,
        )
    return Ratios(fp8, importance_ratio(bf16, bf16_old, batch.mask, level), bf16, weight)


def measure_micro_batch(record: BatchRecord, capture: Capture, args: Any) -> dict[str, Metric]:
    """Metrics of one micro-batch, out of what the loss computed anyway; adds it to the statistics asked for.

    Args:
        record: of its generation batch.
        capture: of its loss.
        args: the run's `FP8GRPOConfig`.
    """
    batch, inputs, ref_bounds = capture.batch, capture.inputs, args.reference_bounds
    assert inputs is not None  # a loss is in hand
    found = ratios(record, capture, args)
    kept = batch.mask
    for dropped in capture.masks:
        kept = kept & dropped.bool()
    if batch.weights is not None:
        kept = kept & (batch.weights != 0)
    negative, positive = tokens.signs(batch.advantages, kept)
    entropy = None
    metrics: dict[str, Metric] = {}
    if capture.entropies is not None:
        entropy = tokens.response_entropy(capture.entropies, batch.mask)
        metrics |= tokens.entropy_shares(entropy, inputs["advantages"])
    if "old_per_token_logps" in inputs and not record.weights_moved:
        metrics |= tokens.noise_floor(batch.log_probs - batch.old_log_probs, batch.mask)
    if args.reads_both_bounds:  # otherwise clip metrics would lie
        assert capture.bounds is not None  # set with the capture of a loss
        lower, upper = capture.bounds
        metrics |= {"clip_bounds/lower": Last(lower), "clip_bounds/upper": Last(upper)}
        metrics |= tokens.clip_shares(found.fp8, negative, positive, capture.bounds, ref_bounds)
    if found.bf16 is not None and found.bf16_log_probs is not None and args.importance_sampling_level == "token":
        metrics |= tokens.quantization_error(batch.log_probs, found.bf16_log_probs, found.fp8, found.bf16, batch.mask)
        metrics |= tokens.over_clipping(found.fp8, found.bf16, negative, positive, ref_bounds, entropy)
        if args.reads_both_bounds:
            metrics |= tokens.bf16_clip_shares(found.bf16, negative, positive, ref_bounds)
            record.hold(_update_ratios(found, batch, negative, positive, capture.bounds, args))
    if record.statistics is not None:
        fp8, bf16 = found.fp8.expand(kept.shape), None if found.bf16 is None else found.bf16.expand(kept.shape)
        record.statistics.update(fp8, bf16, inputs["advantages"], kept, batch.weights, found.bf16_weight)
    return metrics


def _update_ratios(
    found: Ratios, batch: MicroBatch, negative: Tensor, positive: Tensor, bounds: Any, args: Any
) -> dict[str, Sum | Mean]:
    """The update ratios of both sides, which a decision brings together over a whole batch."""
    assert found.bf16 is not None
    fp8, bf16 = (found.fp8, batch.weights), (found.bf16, found.bf16_weight)
    signed, ref_bounds = (batch.advantages, negative, positive), args.reference_bounds
    return {
        "update_ratio/fp8": tokens.update_ratio(*fp8, *signed, bounds, args.delta),
        "update_ratio/bf16": tokens.update_ratio(*bf16, *signed, ref_bounds, args.delta),
    }


def model_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """`(B, T)`, true for completion tokens of the model itself: no padding, no tokens of tools."""
    mask = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask


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
    mask, truncated = model_tokens(rollout), None
    if mode is not None:
        weight = importance_weight(old, sampling, mask, mode=mode, clip_max=None)
        truncated = weight != rollout["importance_sampling_ratio"]
    raw = torch.where(mask, raw_log_ratio(old, sampling).exp(), float("nan"))
    return mismatch(old, sampling, mask, truncated), raw.flatten()
