"""How far trainer and rollout engine are apart on the tokens that the engine sampled. Pure, on tensors."""

import math

import torch
from torch import Tensor

from ..reductions import Last, Max, Mean, Metric
from .tokens import count, total


# A log-ratio beyond this is a broken token, and its square would drown the others (verl: 20)
_MAX_LOG_RATIO = 20.0


def raw_log_ratio(per_token_logps: Tensor, sampling_per_token_logps: Tensor) -> Tensor:
    """`(B, T)` log w = log pi_trainer - log pi_engine before any truncation, within +-20; NaN where the engine gave
    none."""
    return (per_token_logps.double() - sampling_per_token_logps.double()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def mismatch(
    per_token_logps: Tensor, sampling_per_token_logps: Tensor, mask: Tensor, truncated: Tensor | None = None
) -> dict[str, Metric]:
    """How far trainer and rollout engine are apart on the tokens the engine sampled, by the field's formulas.

    With w = pi_trainer / pi_engine: kl = mean -log w, k3_kl = mean w - 1 - log w, chi2_token = mean w^2 - 1 (verl,
    `rollout_corr_helper.py`). The effective sample size follows from two of them when they are logged.

    Args:
        per_token_logps (`Tensor` of shape `(B, T)`): of the trainer at the weights of the rollout, nats.
        sampling_per_token_logps (`Tensor` of shape `(B, T)`): of the engine, nats; NaN where it gave none.
        mask (`Tensor` of shape `(B, T)`): completion tokens of the model itself.
        truncated (`Tensor` of shape `(B, T)`, *optional*): whether the weight in the loss is not w.
    """
    mask = mask.bool()
    unscored = torch.isnan(sampling_per_token_logps)
    scored = mask & ~unscored
    first = torch.zeros_like(scored)
    first[:, :1] = True
    log_ratio = raw_log_ratio(per_token_logps, sampling_per_token_logps)
    ratio, n = log_ratio.exp(), count(scored)
    probabilities = per_token_logps.double().exp(), sampling_per_token_logps.double().exp()
    metrics: dict[str, Metric] = {
        "mismatch/kl": Mean(total(-log_ratio, scored), n),
        "mismatch/k3_kl": Mean(total(ratio - 1 - log_ratio, scored), n),
        "mismatch/chi2_token": Mean(total(ratio.square() - 1, scored), n),
        "mismatch/ratio_raw_mean": Mean(total(ratio, scored), n),
        "mismatch/prob_abs_diff": Mean(total((probabilities[0] - probabilities[1]).abs(), scored), n),
        "mismatch/logp_diff_first_token": Mean(total(log_ratio.abs(), scored & first), count(scored & first)),
        "mismatch/logp_diff_other_tokens": Mean(total(log_ratio.abs(), scored & ~first), count(scored & ~first)),
        "mismatch/unscored": Mean(count(mask & unscored), count(mask)),
    }
    if truncated is not None:
        metrics["mismatch/frac_truncated"] = Mean(count(scored & truncated), n)
    return metrics


def upper_tail(ratios: Tensor) -> dict[str, Metric]:
    """Largest and 99th percentile (nearest rank) of w over all ranks, `(N,)`; NaN entries are left out."""
    ratios = ratios[~torch.isnan(ratios)].sort().values
    if not ratios.numel():
        return {}
    rank = math.ceil(0.99 * ratios.numel()) - 1
    return {"mismatch/ratio_raw_max": Max(ratios[-1].item()), "mismatch/ratio_raw_p99": Last(ratios[rank].item())}
