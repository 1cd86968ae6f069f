"""What the clip does to tokens, and how far the FP8 forward is from the BF16 one. Pure, on tensors.

Every function returns `{name: Mean or Sum}` of float64 scalars on the device, so that sums can be added over
micro-batches, ranks and the logging window before they are divided.
Shapes: B sequences, T completion tokens. `docs/metrics.md` has one row per name.
"""

import torch
from torch import Tensor

from ..reductions import Mean, Metric, Sum


ENTROPY_BINS = {
    "below_0.2": (0.0, 0.2),
    "0.2_to_0.5": (0.2, 0.5),
    "0.5_to_1": (0.5, 1.0),
    "above_1": (1.0, float("inf")),
}
_GARBLED = 1.0
"""Mean token entropy in nats from which the paper calls a response garbled."""


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
) -> dict[str, Metric]:
    """Clipped share within A < 0 (r <= lower) and within A > 0 (r >= upper) tokens, in force and at the reference."""
    return {
        "clip_count/negative": Sum(count(negative)),
        "clip_count/positive": Sum(count(positive)),
        **_clipped(ratio, negative, positive, bounds, ""),
        **_clipped(ratio, negative, positive, ref_bounds, "_at_reference"),
    }


def bf16_clip_shares(
    bf16_ratio: Tensor, negative: Tensor, positive: Tensor, ref_bounds: tuple[float, float]
) -> dict[str, Sum | Mean]:
    """What BF16 clips at the reference bounds, within the same tokens."""
    return _clipped(bf16_ratio, negative, positive, ref_bounds, "_bf16")


def _clipped(
    ratio: Tensor, negative: Tensor, positive: Tensor, bounds: tuple[float, float], suffix: str
) -> dict[str, Sum | Mean]:
    ratio = ratio.double()
    lower, upper = count(negative & (ratio <= bounds[0])), count(positive & (ratio >= bounds[1]))
    return {
        f"clip_count/lower{suffix}": Sum(lower),
        f"clip_share/lower{suffix}": Mean(lower, count(negative)),
        f"clip_share/upper{suffix}": Mean(upper, count(positive)),
    }


def update_ratio(
    ratio: Tensor,
    weight: Tensor | None,
    advantages: Tensor,
    negative: Tensor,
    positive: Tensor,
    bounds: tuple[float, float],
    delta: float | None = None,
) -> Mean:
    """Positive-to-negative update ratio P(H) / N(L) of `clipping/decide.py`, without what is not finite.

    Args:
        weight (`Tensor` of shape `(B, T)` or `(B, 1)`, *optional*): w, 1 if absent.
        delta: TRL's two-sided clip.
    """
    ratio = ratio.double()
    update = ratio * advantages.double().abs()
    update = update if weight is None else update * weight.double()
    finite = torch.isfinite(update)
    unclipped = negative & (ratio > bounds[0])
    if delta is not None:
        unclipped = unclipped & (ratio <= delta)
    return Mean(total(update, finite & positive & (ratio < bounds[1])), total(update, finite & unclipped))


def over_clipping(
    ratio: Tensor,
    bf16_ratio: Tensor,
    negative: Tensor,
    positive: Tensor,
    ref_bounds: tuple[float, float],
    entropy: Tensor | None = None,
) -> dict[str, Metric]:
    """Share of tokens FP8 clips at the reference bounds and BF16 does not (arXiv 2609.22870 section 2).

    Args:
        entropy (`Tensor` of shape `(B,)`, *optional*): mean token entropy of each response, nats.
    """
    ratio, bf16_ratio = ratio.double(), bf16_ratio.double()
    lower = negative & (bf16_ratio > ref_bounds[0]) & (ratio <= ref_bounds[0])
    upper = positive & (bf16_ratio < ref_bounds[1]) & (ratio >= ref_bounds[1])
    metrics: dict[str, Metric] = {
        "overclip/lower": Mean(count(lower), count(negative)),
        "overclip/upper": Mean(count(upper), count(positive)),
    }
    if entropy is not None:
        garbled = (entropy >= _GARBLED).unsqueeze(1)
        metrics["overclip/lower_from_high_entropy"] = Mean(count(lower & garbled), count(lower))
    return metrics


def nmae(values: Tensor, bf16_values: Tensor, mask: Tensor) -> Mean:
    """Normalised mean absolute error: sum |x_fp8 - x_bf16| over sum |x_bf16|, over the tokens of `mask`."""
    mask = mask.bool()
    return Mean(total((values.double() - bf16_values.double()).abs(), mask), total(bf16_values.abs(), mask))


def quantization_error(
    log_probs: Tensor, bf16_log_probs: Tensor, ratio: Tensor, bf16_ratio: Tensor, mask: Tensor
) -> dict[str, Metric]:
    """NMAE of the token probabilities and of the importance ratios, both `(B, T)`, FP8 against BF16."""
    return {
        "fp8/prob_nmae": nmae(log_probs.double().exp(), bf16_log_probs.double().exp(), mask),
        "fp8/ratio_nmae": nmae(ratio, bf16_ratio, mask),
    }


def noise_floor(log_ratio: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Mean |log r| of tokens whose weights have not moved since generation: the true value is 0."""
    return {"fp8/noise_floor": Mean(total(log_ratio.abs(), mask.bool()), count(mask.bool()))}


def response_entropy(entropies: Tensor, mask: Tensor) -> Tensor:
    """Mean token entropy `(B,)` of each response, nats; NaN for an empty one."""
    mask = mask.bool()
    tokens = mask.sum(dim=1)
    mean = torch.where(mask, entropies.double(), 0.0).sum(dim=1) / tokens.clamp(min=1)
    # an entropy below 0 is rounding around 0
    return torch.where(tokens > 0, mean.clamp(min=0.0), float("nan"))


def entropy_shares(entropy: Tensor, advantages: Tensor) -> dict[str, Metric]:
    """Share of responses per bin of mean token entropy (the paper's bins), and of garbled ones with A > 0.

    Args:
        entropy (`Tensor` of shape `(B,)`): of [`response_entropy`].
        advantages (`Tensor` of shape `(B,)`, `(B, 1)` or `(B, T)`): A; of a row with several, the first.
    """
    everything = count(~torch.isnan(entropy))
    metrics: dict[str, Metric] = {
        f"entropy_share/{name}": Mean(count((entropy >= low) & (entropy < high)), everything)
        for name, (low, high) in ENTROPY_BINS.items()
    }
    garbled = entropy >= _GARBLED
    positive = advantages.reshape(advantages.shape[0], -1)[:, 0] > 0
    metrics["entropy_share/above_1_positive"] = Mean(count(garbled & positive), count(garbled))
    return metrics
