"""Importance ratios pi_theta / pi_old, and the truncated weight pi_old / pi_sampler. Pure, on tensors."""

import math
from typing import Literal

import torch
from torch import Tensor


def importance_ratio(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, level: Literal["token", "sequence"] = "token"
) -> Tensor:
    """Importance ratio pi_theta / pi_old as TRL's loss forms it.

    Args:
        log_probs, old_log_probs (`Tensor` of shape `(B, T)`): log-probs of the sampled tokens, nats.
        mask (`Tensor` of shape `(B, T)`): nonzero for completion tokens.
        level: TRL's `importance_sampling_level`.

    Returns:
        `Tensor` of shape `(B, T)`, or `(B, 1)` at level `"sequence"`: exp of the mean log-ratio (GSPO).
    """
    log_ratio = log_probs - old_log_probs
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    return torch.exp(log_ratio)


def importance_weight(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    mask: Tensor,
    *,
    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate",
    clip_min: float | None = None,
    clip_max: float | None = 2.0,
) -> Tensor:
    """Truncated importance weight w of the old policy against the sampler, as TRL's `importance_sampling_ratio`.

    Args:
        old_per_token_logps (`Tensor` of shape `(B, T)`): log pi_old, nats.
        sampling_per_token_logps (`Tensor` of shape `(B, T)`): log pi_sampler, nats. NaN marks a token the engine could
            not score; it gets w = 0 (TRL gives it 1).
        mask (`Tensor` of shape `(B, T)`): nonzero for the tokens the loss keeps.
        mode: TRL's `vllm_importance_sampling_mode`.
        clip_min, clip_max: C_min and C (TIS: C = 2, arXiv 2609.22870 section 2).

    Returns:
        `Tensor` of shape `(B, T)`; in the sequence modes all kept tokens of a row carry the same number.
    """
    unscored = torch.isnan(sampling_per_token_logps)
    log_weight = torch.nan_to_num((old_per_token_logps - sampling_per_token_logps) * mask, nan=0.0)
    if mode in ("sequence_truncate", "sequence_mask"):
        log_weight = log_weight.sum(dim=-1, keepdim=True)
    elif mode not in ("token_truncate", "token_mask"):
        raise ValueError(
            f"mode={mode!r} is not an importance sampling mode of TRL. Use 'token_truncate', 'token_mask', "
            "'sequence_truncate' or 'sequence_mask'."
        )
    weight = torch.exp(log_weight)
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    if mode in ("token_truncate", "sequence_truncate"):
        weight = torch.clamp(weight, min=low, max=high)
    else:
        weight = weight.masked_fill((weight < low) | (weight > high), 0.0)
    return torch.where(unscored, 0.0, weight.expand(unscored.shape))
