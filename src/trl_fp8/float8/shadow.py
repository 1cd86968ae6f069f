"""The shadow pass: a forward of the unconverted model on the same weights, which changes nothing."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .._upstream import disable_gradient_checkpointing
from .compile import eagerly
from .linear import SwitchableLinear


class Stopwatch:
    """Seconds a pass took, once it is over."""

    def __init__(self):
        self.seconds = 0.0


@contextlib.contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """Run the FP8 linears of `model` as plain `nn.Linear` on the same parameters: the BF16 shadow switch.

    Under autocast the result is bit-equal to the unconverted model under autocast. The previous state comes back on
    exit, also after an exception and when nested. A model without FP8 linears is left alone.
    """
    switched = [(m, m.high_precision) for m in model.modules() if isinstance(m, SwitchableLinear)]
    try:
        for module, _ in switched:
            module.high_precision = True
        yield
    finally:
        for module, previous in switched:
            module.high_precision = previous


@contextlib.contextmanager
def shadow_pass(
    model: PreTrainedModel,
    device: torch.device,
    checkpointing: dict[str, Any] | None,
    compiled: bool = False,
) -> Iterator[Stopwatch]:
    """Forward passes of `model` inside are the unconverted model's, and leave gradients and RNG state alone.

    Args:
        model: with FP8 linears.
        device: it runs on.
        checkpointing: `gradient_checkpointing_kwargs` of the run.
        compiled: whether layers are compiled; the pass runs them eagerly.
    """
    on_accelerator = device.type != "cpu"
    with contextlib.ExitStack() as stack:
        if checkpointing and checkpointing.get("use_reentrant"):
            # Reentrant checkpointing warns in a pass without gradients
            stack.enter_context(disable_gradient_checkpointing(model, checkpointing))
        stack.enter_context(torch.no_grad())
        devices = [device] if on_accelerator else []
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type))
        stack.enter_context(high_precision(model))
        stack.enter_context(eagerly(compiled))
        if on_accelerator:
            torch.accelerator.synchronize()
        watch, start = Stopwatch(), time.perf_counter()
        yield watch
        if on_accelerator:
            torch.accelerator.synchronize()
        watch.seconds = time.perf_counter() - start
