"""Additive clip statistics: a batch as histograms of its ratios over sorted points. Pure, on tensors.

Everything a clip policy needs (symbols: `decide.py`) is a sum over tokens, so histograms add up over micro-batches and
ranks, and a sum over any range between points is read off them exactly.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


# Blocks of one side, one number per bin between points. Lower bins hold A < 0 tokens, upper bins A > 0 tokens
_LOWER = ("lower_count", "lower_update", "lower_weight")
_UPPER = ("upper_count", "upper_update", "upper_weight")


class ClipStatistics:
    """Additive clip statistics of a batch, under FP8 and (optionally) under BF16.

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
        bf16_ratio: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        is_weight: Tensor | None = None,
        bf16_is_weight: Tensor | None = None,
    ) -> None:
        """Add the tokens of one micro-batch.

        Args:
            ratio (`Tensor` of shape `(B, T)`): r under FP8, in the precision of the loss (float32).
            bf16_ratio (`Tensor` of shape `(B, T)`, *optional*): r under BF16. `None` counts the FP8 side only.
            advantages (`Tensor` of shape `(B,)`, `(B, 1)` or `(B, T)`): A.
            mask (`Tensor` of shape `(B, T)`): nonzero where the loss keeps the token.
            is_weight (`Tensor` of shape `(B, T)` or `(B, 1)`, *optional*): w of the loss. A token with w = 0 is
                dropped by the loss and counts nowhere, on neither side.
            bf16_is_weight (same, *optional*): w with the BF16 pi_old.
        """
        shape = mask.shape
        check_shapes(
            shape, ratio=ratio, bf16_ratio=bf16_ratio, advantages=advantages, is_weight=is_weight,
            bf16_is_weight=bf16_is_weight,
        )  # fmt: skip
        advantages = (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages).double().expand(shape)
        keep = mask.bool() & (advantages != 0)
        weight = _weight(is_weight, ratio)
        if is_weight is not None:
            keep = keep & (weight != 0)
        sides = [(ratio.double(), weight)]
        if bf16_ratio is not None:
            sides.append((bf16_ratio.double(), _weight(bf16_is_weight, bf16_ratio)))

        finite = torch.isfinite(advantages)
        for side_ratio, side_weight in sides:
            finite = finite & torch.isfinite(side_ratio) & torch.isfinite(side_weight)
        counted = keep & finite
        parts = [self._histograms(side_ratio, side_weight, advantages, counted) for side_ratio, side_weight in sides]
        if bf16_ratio is None:
            parts.append(torch.zeros_like(parts[0]))
        flat = torch.cat([*parts, (keep & ~finite).sum(dtype=torch.float64).unsqueeze(0)])
        self.flat = flat if self.flat is None else self.flat + flat

    def _histograms(self, ratio: Tensor, weight: Tensor, advantages: Tensor, counted: Tensor) -> Tensor:
        """The blocks of one side in a row, float64."""
        zero = ratio.new_zeros(())
        # `where`, never a product with the mask: NaN * 0 is NaN
        ratio = torch.where(counted, ratio, zero).flatten()
        weight = torch.where(counted, weight.expand(counted.shape), zero).flatten()
        magnitude = torch.where(counted, advantages, zero).abs().flatten()
        update, weight = weight * ratio * magnitude, weight * magnitude
        negative = (counted & (advantages < 0)).flatten()
        positive = (counted & (advantages > 0)).flatten()
        unclipped = negative if self.delta is None else negative & (ratio <= self.delta)
        blocks = []
        # r <= c is clipped on the lower side and r >= h on the upper one, so a ratio on a point belongs to the bin
        # left of a lower point and right of an upper point
        for points, right, side, summed in (
            (self.lower_points, False, negative, unclipped),
            (self.upper_points, True, positive, positive),
        ):
            bins = torch.bucketize(ratio, ratio.new_tensor(points), right=right)
            empty = ratio.new_zeros(len(points) + 1)
            for values in (side.double(), torch.where(summed, update, zero), torch.where(side, weight, zero)):
                blocks.append(empty.index_add(0, bins, values))
        return torch.cat(blocks)

    def numbers(self) -> "ClipNumbers":
        """The statistics on the host, as plain numbers (one device synchronisation)."""
        sizes = [len(self.lower_points) + 1] * len(_LOWER) + [len(self.upper_points) + 1] * len(_UPPER)
        flat = torch.zeros(2 * sum(sizes) + 1) if self.flat is None else self.flat.cpu()
        *blocks, nonfinite = (part.tolist() for part in flat.split([*sizes, *sizes, 1]))
        names = (*_LOWER, *_UPPER)
        sides = [
            SideNumbers.from_bins(self.lower_points, self.upper_points, **dict(zip(names, part, strict=True)))
            for part in (blocks[: len(names)], blocks[len(names) :])
        ]
        return ClipNumbers(fp8=sides[0], bf16=sides[1], num_nonfinite=int(nonfinite[0]))


def check_shapes(shape: torch.Size, **tensors: Tensor | None) -> None:
    """Refuse tensors that would be broadcast, to a wrong decision and no error, against a mask of `shape`."""
    rows = (*shape[:1], 1)
    for name, tensor in tensors.items():
        allowed = [tuple(shape)]
        if name == "advantages":
            allowed += [tuple(shape[:1]), rows]
        elif name.endswith("is_weight"):
            allowed.append(rows)
        if tensor is not None and (len(shape) != 2 or tuple(tensor.shape) not in allowed):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and mask {tuple(shape)}, so they do not belong to the same "
                f"tokens. Pass mask as (B, T) and {name} as one of {allowed}."
            )


def _weight(weight: Tensor | None, ratio: Tensor) -> Tensor:
    return torch.ones((1, 1), dtype=torch.float64, device=ratio.device) if weight is None else weight.double()


def _below(points: list[float], bins: list[float]) -> dict[float, float]:
    """Sum of the bins left of each point."""
    return dict(zip(points, accumulate(bins), strict=False))


def _above(points: list[float], bins: list[float]) -> dict[float, float]:
    """Sum of the bins right of each point."""
    return dict(zip(points, list(accumulate(reversed(bins)))[-2::-1], strict=True))


def _whole(sums: dict[float, float]) -> dict[float, int]:
    return {point: int(value) for point, value in sums.items()}


@dataclass(frozen=True)
class SideNumbers:
    """Cumulative statistics of one forward (FP8 or BF16), by point. Symbols: `decide.py`."""

    num_negative: int
    num_positive: int
    lower_clipped: dict[float, int]
    """c -> #{A<0, r <= c}"""
    negative_sum: dict[float, float]
    """c -> N(c)"""
    lower_clipped_weight: dict[float, float]
    """c -> sum of w |A| over A<0, r <= c"""
    upper_clipped: dict[float, int]
    """h -> #{A>0, r >= h}"""
    positive_sum: dict[float, float]
    """h -> P(h)"""
    upper_clipped_weight: dict[float, float]
    """h -> sum of w |A| over A>0, r >= h"""

    @classmethod
    def from_bins(
        cls,
        lower_points: list[float],
        upper_points: list[float],
        *,
        lower_count: list[float],
        lower_update: list[float],
        lower_weight: list[float],
        upper_count: list[float],
        upper_update: list[float],
        upper_weight: list[float],
    ) -> "SideNumbers":
        # Each sum is taken over the bins it covers, never as a difference: a sum over no token is exactly 0
        return cls(
            num_negative=int(sum(lower_count)),
            num_positive=int(sum(upper_count)),
            lower_clipped=_whole(_below(lower_points, lower_count)),
            negative_sum=_above(lower_points, lower_update),
            lower_clipped_weight=_below(lower_points, lower_weight),
            upper_clipped=_whole(_above(upper_points, upper_count)),
            positive_sum=_below(upper_points, upper_update),
            upper_clipped_weight=_above(upper_points, upper_weight),
        )


@dataclass(frozen=True)
class ClipNumbers:
    """[`ClipStatistics`] of a whole batch as plain numbers."""

    fp8: SideNumbers
    bf16: SideNumbers
    num_nonfinite: int
