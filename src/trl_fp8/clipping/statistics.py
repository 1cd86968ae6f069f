"""Additive clip statistics: a batch as histograms of its ratios over sorted points. Pure, on tensors.

Everything calibration needs (symbols: `clipping.py`) is a sum over tokens, so histograms add up over micro-batches and
ranks, and a sum over any range between points is read off them exactly.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


class ClipStatistics:
    """Additive clip statistics of a batch, for the FP8 policy and (optionally) the BF16 reference.

    Args:
        lower_points (`list[float]`): sorted points c at which the A < 0 side is counted and summed.
        upper_points (`list[float]`): sorted points h at which the A > 0 side is counted and summed.
        delta (`float`, *optional*): TRL's two-sided clip. An A < 0 token with r > delta has no gradient either, so it
            is left out of N.

    `flat` is one float64 tensor that holds everything; sum it over ranks (an all-reduce in place is fine) and every
    query answers for the world.
    """

    def __init__(self, lower_points: list[float], upper_points: list[float], delta: float | None = None):
        for name, points in (("lower_points", lower_points), ("upper_points", upper_points)):
            if not points or sorted(points) != list(points) or not all(map(math.isfinite, points)):
                raise ValueError(f"{name}={points} cannot be searched. Pass at least one finite point, ascending.")
        self.lower_points = list(lower_points)
        self.upper_points = list(upper_points)
        self.delta = delta
        self.flat: Tensor | None = None

    def update(
        self,
        ratio: Tensor,
        ref_ratio: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        is_weight: Tensor | None = None,
        ref_is_weight: Tensor | None = None,
    ) -> None:
        """Add the tokens of one micro-batch.

        Args:
            ratio (`Tensor` of shape `(B, T)`): r under FP8, in the precision of the loss (float32).
            ref_ratio (`Tensor` of shape `(B, T)`, *optional*): r under BF16. `None` counts the policy only.
            advantages (`Tensor` of shape `(B,)`, `(B, 1)` or `(B, T)`): A.
            mask (`Tensor` of shape `(B, T)`): nonzero where the loss keeps the token.
            is_weight (`Tensor` of shape `(B, T)` or `(B, 1)`, *optional*): w of the loss. A token with w = 0 is
                dropped by the loss and counts nowhere, on neither side.
            ref_is_weight (same, *optional*): w with the BF16 pi_old.
        """
        shape = mask.shape
        _check_shapes(shape, ratio, ref_ratio, advantages, is_weight, ref_is_weight)
        advantages = (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages).double().expand(shape)
        keep = mask.bool() & (advantages != 0)
        weight = _weight(is_weight, ratio)
        if is_weight is not None:
            keep = keep & (weight != 0)
        sides = [(ratio.double(), weight)]
        if ref_ratio is not None:
            sides.append((ref_ratio.double(), _weight(ref_is_weight, ref_ratio)))

        finite = torch.isfinite(advantages)
        for side_ratio, side_weight in sides:
            finite = finite & torch.isfinite(side_ratio) & torch.isfinite(side_weight)
        counted = keep & finite
        parts = [self._histograms(side_ratio, side_weight, advantages, counted) for side_ratio, side_weight in sides]
        if ref_ratio is None:
            parts.append(torch.zeros_like(parts[0]))
        flat = torch.cat([*parts, (keep & ~finite).sum(dtype=torch.float64).unsqueeze(0)])
        self.flat = flat if self.flat is None else self.flat + flat

    def _histograms(self, ratio: Tensor, weight: Tensor, advantages: Tensor, counted: Tensor) -> Tensor:
        """Counts and sums of w r |A| per bin between points: `(2 (n_lower + 1) + 2 (n_upper + 1),)`, float64."""
        zero = ratio.new_zeros(())
        # `where`, never a product with the mask: NaN * 0 is NaN
        ratio = torch.where(counted, ratio, zero).flatten()
        mass = torch.where(counted, weight.expand(counted.shape), zero).flatten() * ratio
        mass = mass * torch.where(counted, advantages, zero).abs().flatten()
        negative = (counted & (advantages < 0)).flatten()
        positive = (counted & (advantages > 0)).flatten()
        unclipped = negative if self.delta is None else negative & (ratio <= self.delta)
        parts = []
        # r <= c is clipped on the lower side and r >= h on the upper one, so a ratio on a point belongs to the bin
        # left of a lower point and right of an upper point
        for points, right, count, summed in (
            (self.lower_points, False, negative, unclipped),
            (self.upper_points, True, positive, positive),
        ):
            bins = torch.bucketize(ratio, ratio.new_tensor(points), right=right)
            empty = ratio.new_zeros(len(points) + 1)
            parts.append(empty.index_add(0, bins, count.double()))
            parts.append(empty.index_add(0, bins, torch.where(summed, mass, zero)))
        return torch.cat(parts)

    def numbers(self) -> "ClipNumbers":
        """The statistics on the host, as plain numbers (one device synchronisation)."""
        size = 2 * (len(self.lower_points) + 1) + 2 * (len(self.upper_points) + 1)
        values = [0.0] * (2 * size + 1) if self.flat is None else self.flat.tolist()
        policy = SideNumbers.from_bins(values[:size], self.lower_points, self.upper_points)
        reference = SideNumbers.from_bins(values[size : 2 * size], self.lower_points, self.upper_points)
        return ClipNumbers(policy, reference, num_nonfinite=int(values[-1]))


def _check_shapes(shape, ratio, ref_ratio, advantages, is_weight, ref_is_weight) -> None:
    """Broadcasting would give a wrong decision and no error: every tensor has the shape its docstring says."""
    rows = (*shape[:1], 1)
    for name, tensor, allowed in (
        ("ratio", ratio, (shape,)),
        ("ref_ratio", ref_ratio, (shape,)),
        ("advantages", advantages, (shape[:1], rows, shape)),
        ("is_weight", is_weight, (rows, shape)),
        ("ref_is_weight", ref_is_weight, (rows, shape)),
    ):
        if tensor is not None and (len(shape) != 2 or tensor.shape not in allowed):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and mask {tuple(shape)}, so they do not belong to the same "
                f"tokens. Pass mask as (B, T) and {name} as one of {[tuple(s) for s in allowed]}."
            )


def _weight(weight: Tensor | None, ratio: Tensor) -> Tensor:
    return torch.ones((1, 1), dtype=torch.float64, device=ratio.device) if weight is None else weight.double()


def _sums_above(points: list[float], bins: list[float]) -> dict[float, float]:
    """Sum of the bins right of each point."""
    return dict(zip(points, list(accumulate(reversed(bins)))[-2::-1], strict=True))


@dataclass(frozen=True)
class SideNumbers:
    """Cumulative statistics of one forward (FP8 or BF16), keyed by point."""

    num_negative: int
    num_positive: int
    lower_clipped: dict[float, int]  # c -> #{A<0, r <= c}
    negative_sum: dict[float, float]  # c -> N(c)
    upper_clipped: dict[float, int]  # h -> #{A>0, r >= h}
    positive_sum: dict[float, float]  # h -> P(h)

    @classmethod
    def from_bins(cls, bins: list[float], lower_points: list[float], upper_points: list[float]) -> "SideNumbers":
        n_lower, n_upper = len(lower_points) + 1, len(upper_points) + 1
        negative_count, negative_mass = bins[:n_lower], bins[n_lower : 2 * n_lower]
        positive_count, positive_mass = bins[2 * n_lower : 2 * n_lower + n_upper], bins[2 * n_lower + n_upper :]
        # Each sum is taken over the bins it covers, never as a difference: a sum over no token is exactly 0
        return cls(
            num_negative=int(sum(negative_count)),
            num_positive=int(sum(positive_count)),
            lower_clipped=dict(zip(lower_points, map(int, accumulate(negative_count)), strict=False)),
            negative_sum=_sums_above(lower_points, negative_mass),
            upper_clipped={h: int(n) for h, n in _sums_above(upper_points, positive_count).items()},
            positive_sum=dict(zip(upper_points, accumulate(positive_mass), strict=False)),
        )


@dataclass(frozen=True)
class ClipNumbers:
    """[`ClipStatistics`] of a whole batch as plain numbers: `policy` (FP8), `reference` (BF16), `num_nonfinite`."""

    policy: SideNumbers
    reference: SideNumbers
    num_nonfinite: int
