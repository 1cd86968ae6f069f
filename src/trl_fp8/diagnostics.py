"""Pure diagnosis: how far the FP8 forward is from the BF16 one and from the rollout engine, and what the bounds clip.

Every function but `upper_tail` returns `{name: (numerator, denominator)}` of float64 scalars on the device, so that
sums can be added over micro-batches, ranks and the logging window before they are divided (a ratio of sums, never a
mean of ratios).
Shapes: B sequences, T completion tokens. `docs/metrics.md` has one row per name.
"""

import math

import torch
from torch import Tensor


Fractions = dict[str, tuple[Tensor, Tensor]]

ENTROPY_BINS = {"0_02": (0.0, 0.2), "02_05": (0.2, 0.5), "05_1": (0.5, 1.0), "1_inf": (1.0, float("inf"))}


def _count(selected: Tensor) -> Tensor:
    return selected.sum(dtype=torch.float64)


def _sum(values: Tensor, selected: Tensor) -> Tensor:
    # `where`, never a product with the mask: NaN * 0 is NaN
    return torch.where(selected, values.double(), 0.0).sum()


def signs(advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Boolean `(B, T)` masks of the A < 0 and the A > 0 tokens; A = 0 is in neither."""
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    return mask.bool() & (advantages < 0), mask.bool() & (advantages > 0)


def clip_shares(
    ratio: Tensor,
    negative: Tensor,
    positive: Tensor,
    bounds: tuple[float, float],
    ref_bounds: tuple[float, float],
) -> Fractions:
    """Clipped share within A < 0 (r <= lower) and within A > 0 (r >= upper) tokens, in force and at the reference."""
    n_negative, n_positive = _count(negative), _count(positive)
    ratio = ratio.double()
    return {
        "clip_ratio/negative": (_count(negative & (ratio <= bounds[0])), n_negative),
        "clip_ratio/positive": (_count(positive & (ratio >= bounds[1])), n_positive),
        "clip_ratio/negative_at_reference": (_count(negative & (ratio <= ref_bounds[0])), n_negative),
        "clip_ratio/positive_at_reference": (_count(positive & (ratio >= ref_bounds[1])), n_positive),
    }


def over_clipping(
    ratio: Tensor, ref_ratio: Tensor, negative: Tensor, positive: Tensor, ref_bounds: tuple[float, float]
) -> Fractions:
    """Share of tokens FP8 clips at the reference bounds and BF16 does not (arXiv 2609.22870 section 2)."""
    ratio, ref_ratio = ratio.double(), ref_ratio.double()
    lower = negative & (ref_ratio > ref_bounds[0]) & (ratio <= ref_bounds[0])
    upper = positive & (ref_ratio < ref_bounds[1]) & (ratio >= ref_bounds[1])
    return {
        "overclip/lower": (_count(lower), _count(negative)),
        "overclip/upper": (_count(upper), _count(positive)),
    }


def nmae(values: Tensor, ref_values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised mean absolute error: sum |x_fp8 - x_bf16| over sum |x_bf16|, over the tokens of `mask`."""
    mask = mask.bool()
    return _sum((values.double() - ref_values.double()).abs(), mask), _sum(ref_values.abs(), mask)


def quantization_error(
    per_token_logps: Tensor, ref_per_token_logps: Tensor, ratio: Tensor, ref_ratio: Tensor, mask: Tensor
) -> Fractions:
    """NMAE of the token probabilities and of the importance ratios, both `(B, T)`, FP8 against BF16."""
    return {
        "fp8/prob_nmae": nmae(per_token_logps.double().exp(), ref_per_token_logps.double().exp(), mask),
        "fp8/ratio_nmae": nmae(ratio, ref_ratio, mask),
    }


def noise_floor(log_ratio: Tensor, mask: Tensor) -> Fractions:
    """Mean |log r| of tokens whose weights have not moved since generation: the true value is 0."""
    return {"fp8/noise_floor": (_sum(log_ratio.abs(), mask.bool()), _count(mask.bool()))}


# A log-ratio beyond this is a broken token, and its square would drown the others (verl: 20)
_MAX_LOG_RATIO = 20.0


def raw_log_ratio(per_token_logps: Tensor, sampling_per_token_logps: Tensor) -> Tensor:
    """`(B, T)` log w = log pi_trainer - log pi_engine before any truncation, within +-20; NaN where the engine gave
    none."""
    return (per_token_logps.double() - sampling_per_token_logps.double()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def mismatch(
    per_token_logps: Tensor, sampling_per_token_logps: Tensor, mask: Tensor, truncated: Tensor | None = None
) -> Fractions:
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
    ratio, n = log_ratio.exp(), _count(scored)
    probabilities = per_token_logps.double().exp(), sampling_per_token_logps.double().exp()
    metrics = {
        "mismatch/kl": (_sum(-log_ratio, scored), n),
        "mismatch/k3_kl": (_sum(ratio - 1 - log_ratio, scored), n),
        "mismatch/chi2_token": (_sum(ratio.square() - 1, scored), n),
        "mismatch/ratio_raw_mean": (_sum(ratio, scored), n),
        "mismatch/prob_abs_diff": (_sum((probabilities[0] - probabilities[1]).abs(), scored), n),
        "mismatch/first_token": (_sum(log_ratio.abs(), scored & first), _count(scored & first)),
        "mismatch/other_tokens": (_sum(log_ratio.abs(), scored & ~first), _count(scored & ~first)),
        "mismatch/unscored": (_count(mask & unscored), _count(mask)),
    }
    if truncated is not None:
        metrics["mismatch/frac_truncated"] = (_count(scored & truncated), n)
    return metrics


def upper_tail(ratios: Tensor) -> dict[str, float]:
    """Largest and 99th percentile (nearest rank) of w over all ranks, `(N,)`; NaN entries are no tokens."""
    ratios = ratios[~torch.isnan(ratios)].sort().values
    if not ratios.numel():
        return {}
    rank = math.ceil(0.99 * ratios.numel()) - 1
    return {"mismatch/ratio_raw_max": ratios[-1].item(), "mismatch/ratio_raw_p99": ratios[rank].item()}


def entropy_bins(entropies: Tensor, mask: Tensor) -> Fractions:
    """Share of responses per bin of mean token entropy (nats; the paper's bins). Empty responses are left out."""
    mask = mask.bool()
    tokens = mask.sum(dim=1)
    mean = torch.where(mask, entropies.double(), 0.0).sum(dim=1) / tokens.clamp(min=1)
    # an entropy below 0 is rounding around 0
    mean, valid = mean.clamp(min=0.0), tokens > 0
    total = _count(valid)
    return {
        f"entropy_bins/{name}": (_count(valid & (mean >= low) & (mean < high)), total)
        for name, (low, high) in ENTROPY_BINS.items()
    }
