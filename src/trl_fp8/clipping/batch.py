"""One micro-batch of the loss, as a clip policy sees it. Pure."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Detached tensors of one micro-batch on this rank. B sequences, T completion tokens.

    Args:
        log_probs (`Tensor` of shape `(B, T)`): log pi_theta under the training forward, nats.
        old_log_probs (`Tensor` of shape `(B, T)`): log pi_old, nats; `log_probs` itself where TRL computes none,
            because the only update on the batch is on-policy.
        sampler_log_probs (`Tensor` of shape `(B, T)`, *optional*): of the rollout engine, nats; NaN where it gave
            none.
        advantages (`Tensor` of shape `(B, 1)` or `(B, T)`): A.
        mask (`Tensor` of shape `(B, T)`): true for completion tokens of the model itself.
        weights (`Tensor` of shape `(B, T)` or `(B, 1)`, *optional*): importance weight of the mismatch in the loss.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    sampler_log_probs: Tensor | None
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None = None
