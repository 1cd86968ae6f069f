"""Metric values that say how they are reduced over micro-batches, ranks and the logging window. Pure."""

from dataclasses import dataclass

from torch import Tensor


Number = float | Tensor


@dataclass(frozen=True)
class Last:
    """Logs the last value of the window. The value must be the same on all ranks. A plain number means this."""

    value: Number


@dataclass(frozen=True)
class Max:
    """Logs the largest value of the window. The value must be the same on all ranks."""

    value: Number


@dataclass(frozen=True)
class Sum:
    """Logs the sum over micro-batches, ranks and the window: a count."""

    value: Number


@dataclass(frozen=True)
class Mean:
    """Logs sum of numerators / sum of denominators over micro-batches, ranks and the window.

    A ratio of sums is not a mean of ratios: micro-batches differ in size. An empty denominator logs nothing.
    """

    numerator: Number
    denominator: Number


def add(metric: Sum | Mean, other: Sum | Mean) -> Sum | Mean:
    """The metric of both sets of tokens together."""
    return type(metric)(*(a + b for a, b in zip(vars(metric).values(), vars(other).values(), strict=True)))


Metric = Number | Last | Max | Sum | Mean
