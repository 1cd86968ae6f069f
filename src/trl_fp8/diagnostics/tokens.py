"""Pure diagnosis: how far the FP8 forward is from the BF16 one and from the rollout engine, and what the bounds clip.

Every function but `upper_tail` returns `{name: (numerator, denominator)}` of float64 scalars on the device, so that
sums can be added over micro-batches, ranks and the logging window before they are divided (a ratio of sums, never a
mean of ratios).
Shapes: B sequences, T completion tokens. `docs/metrics.md` has one row per name.
"""

import torch
from torch import Tensor


Fractions = dict[str, tuple[Tensor, Tensor]]

ENTROPY_BINS = {"0_02": (0.0, 0.2), "02_05": (0.2, 0.5), "05_1": (0.5, 1.0), "1_inf": (1.0, float("inf"))}


def count(selected: Tensor) -> Tensor:
    return selected.sum(dtype=torch.float64)


def total(values: Tensor, selected: Tensor) -> Tensor:
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
    n_negative, n_positive = count(negative), count(positive)
    ratio = ratio.double()
    return {
        "clip_ratio/negative": (count(negative & (ratio <= bounds[0])), n_negative),
        "clip_ratio/positive": (count(positive & (ratio >= bounds[1])), n_positive),
        "clip_ratio/negative_at_reference": (count(negative & (ratio <= ref_bounds[0])), n_negative),
        "clip_ratio/positive_at_reference": (count(positive & (ratio >= ref_bounds[1])), n_positive),
    }


def over_clipping(
    ratio: Tensor, ref_ratio: Tensor, negative: Tensor, positive: Tensor, ref_bounds: tuple[float, float]
) -> Fractions:
    """Share of tokens FP8 clips at the reference bounds and BF16 does not (arXiv 2609.22870 section 2)."""
    ratio, ref_ratio = ratio.double(), ref_ratio.double()
    lower = negative & (ref_ratio > ref_bounds[0]) & (ratio <= ref_bounds[0])
    upper = positive & (ref_ratio < ref_bounds[1]) & (ratio >= ref_bounds[1])
    return {
        "overclip/lower": (count(lower), count(negative)),
        "overclip/upper": (count(upper), count(positive)),
    }


def nmae(values: Tensor, ref_values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised mean absolute error: sum |x_fp8 - x_bf16| over sum |x_bf16|, over the tokens of `mask`."""
    mask = mask.bool()
    return total((values.double() - ref_values.double()).abs(), mask), total(ref_values.abs(), mask)


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
    return {"fp8/noise_floor": (total(log_ratio.abs(), mask.bool()), count(mask.bool()))}


def entropy_bins(entropies: Tensor, mask: Tensor) -> Fractions:
    """Share of responses per bin of mean token entropy (nats; the paper's bins). Empty responses are left out."""
    mask = mask.bool()
    tokens = mask.sum(dim=1)
    mean = torch.where(mask, entropies.double(), 0.0).sum(dim=1) / tokens.clamp(min=1)
    # an entropy below 0 is rounding around 0
    mean, valid = mean.clamp(min=0.0), tokens > 0
    total = count(valid)
    return {
        f"entropy_bins/{name}": (count(valid & (mean >= low) & (mean < high)), total)
        for name, (low, high) in ENTROPY_BINS.items()
    }
