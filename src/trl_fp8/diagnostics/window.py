"""Metrics of one logging window, reduced so that a logged number means what its name says.

TRL averages every key over the window, maxima included, and averages ratios of unequal batches. Here each value says
how it is reduced (`reductions.py`).
"""

from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from ..reductions import Last, Max, Mean, Metric, Sum


class MetricWindow:
    """Collects metrics between two logs."""

    def __init__(self):
        self._pending: dict[str, Tensor] = {}  # on the device, this rank only: numerator and denominator, float64
        self._reduced: dict[str, Tensor] = {}  # over all ranks
        self._sums: set[str] = set()  # keys of which the numerator is logged
        self._plain: dict[str, float] = {}

    def record(self, metrics: Mapping[str, Metric], device: torch.device | str = "cpu") -> None:
        """Add metrics of this rank. Every rank must record the same `Sum` and `Mean` keys in the same step.

        Raises:
            TypeError: a value is not a number.
        """
        for key, metric in metrics.items():
            metric = metric if isinstance(metric, (Last, Max, Sum, Mean)) else Last(metric)
            parts = [_number(key, part) for part in vars(metric).values()]
            if isinstance(metric, Last):
                self._plain[key] = float(parts[0])
            elif isinstance(metric, Max):
                self._plain[key] = max(float(parts[0]), self._plain.get(key, float(parts[0])))
            else:
                if isinstance(metric, Sum):
                    self._sums.add(key)
                    parts.append(1.0)
                pair = torch.stack([torch.as_tensor(part, dtype=torch.float64, device=device) for part in parts])
                self._pending[key] = self._pending[key] + pair if key in self._pending else pair

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
            for key, (n, d) in zip(self._reduced, pairs, strict=True):
                if key in self._sums:
                    logs[key] = n
                elif d != 0:
                    logs[key] = n / d
        self._reduced.clear()
        self._plain.clear()
        if logs.get("fp8/prob_nmae") and "fp8/ratio_nmae" in logs:
            logs["fp8/nmae_amplification"] = logs["fp8/ratio_nmae"] / logs["fp8/prob_nmae"]
        if "mismatch/chi2_token" in logs and "mismatch/ratio_raw_mean" in logs:
            # 1 / mean((w / mean w)^2), as verl and ms-swift define the effective sample size
            logs["mismatch/ess"] = logs["mismatch/ratio_raw_mean"] ** 2 / (logs["mismatch/chi2_token"] + 1)
        return logs


def _number(key: str, value: Any) -> Any:
    value = value.detach() if isinstance(value, Tensor) else value
    if not (isinstance(value, Number) or (isinstance(value, Tensor) and value.dim() == 0)):
        raise TypeError(
            f"Metric {key!r} has the value {value!r}, which can be neither averaged nor logged. Record a number, or "
            "Last, Max, Sum or Mean of numbers or scalar tensors."
        )
    return value
