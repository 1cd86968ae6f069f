"""Metrics of one logging window, reduced so that a logged number means what its name says.

TRL averages every key over the window, maxima included, and averages ratios of unequal batches. Here fractions keep
numerator and denominator apart until they are logged, bounds log their last value and flags their maximum.
"""

from collections.abc import Callable, Mapping
from numbers import Number

import torch
from torch import Tensor


Metric = float | tuple[float | Tensor, float | Tensor]
# Keys that log the largest value of the window instead of the last
_MAXIMUM = ("/saturated", "/degenerate", "_max")


class MetricWindow:
    """Collects metrics between two logs.

    A pair `(numerator, denominator)` is summed over micro-batches, ranks and the window and divided when flushed; an
    empty denominator logs nothing. A plain number is the same on all ranks: the last one is logged, or the largest for
    `saturated`, `degenerate` and `..._max`.
    """

    def __init__(self):
        self._pending: dict[str, Tensor] = {}  # on the device, this rank only: (2,) float64
        self._reduced: dict[str, Tensor] = {}  # over all ranks
        self._plain: dict[str, float] = {}

    def record(self, metrics: Mapping[str, Metric], device: torch.device | str = "cpu") -> None:
        """Add metrics of this rank. Pairs must be recorded by every rank, with the same keys in the same step."""
        for key, value in metrics.items():
            value = value.detach() if isinstance(value, Tensor) else value
            parts = value if isinstance(value, tuple) and len(value) == 2 else (value,)
            if not all(isinstance(part, Number) or (isinstance(part, Tensor) and part.dim() == 0) for part in parts):
                raise TypeError(
                    f"Metric {key!r} is {value!r}, which can be neither averaged nor logged. Record a number, or a "
                    "pair (numerator, denominator) of numbers or scalar tensors."
                )
            if isinstance(value, tuple):
                parts = [part.detach() if isinstance(part, Tensor) else part for part in value]
                pair = torch.stack([torch.as_tensor(part, dtype=torch.float64, device=device) for part in parts])
                self._pending[key] = self._pending[key] + pair if key in self._pending else pair
            elif key.endswith(_MAXIMUM):
                self._plain[key] = max(float(value), self._plain.get(key, float(value)))
            else:
                self._plain[key] = float(value)

    def reduce(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Sum what is pending over all ranks, in one collective. Called by every rank at the optimizer step."""
        if not self._pending:
            return
        keys = sorted(self._pending)
        summed = all_reduce(torch.stack([self._pending[key] for key in keys]))
        for key, pair in zip(keys, summed, strict=True):
            self._reduced[key] = self._reduced[key] + pair if key in self._reduced else pair
        self._pending.clear()

    def flush(self) -> dict[str, float]:
        """The metrics of the window, which starts afresh. What is not reduced yet stays for the next one."""
        logs = dict(self._plain)
        if self._reduced:
            pairs = torch.stack(list(self._reduced.values())).tolist()
            logs |= {key: n / d for key, (n, d) in zip(self._reduced, pairs, strict=True) if d != 0}
        self._reduced.clear()
        self._plain.clear()
        if logs.get("fp8/prob_nmae") and "fp8/ratio_nmae" in logs:
            logs["fp8/nmae_amplification"] = logs["fp8/ratio_nmae"] / logs["fp8/prob_nmae"]
        if "mismatch/chi2_token" in logs and "mismatch/ratio_raw_mean" in logs:
            # 1 / mean((w / mean w)^2), as verl and ms-swift define the effective sample size
            logs["mismatch/ess"] = logs["mismatch/ratio_raw_mean"] ** 2 / (logs["mismatch/chi2_token"] + 1)
        return logs
