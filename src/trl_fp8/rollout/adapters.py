"""Adapters on their way to an engine: merged in a copy of their layer, so that the policy keeps every bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from . import _upstream


@contextmanager
def merging_into_copies(model: Any) -> Iterator[None]:
    """Context in which `model.merge_adapter()` of a PEFT model leaves it as it is (peft 0.21).

    Until `model.unmerge_adapter()`, `model.named_parameters()` gives what each parameter of a layer with adapters
    would be after merging; one layer at a time is copied. TRL merges in place and unmerges afterwards, which leaves
    rounding errors in the base weights at every sync, and loses what is merged by assignment under FSDP2 (DoRA, IA3).
    Delete when TRL reads merged copies.
    """
    layers: dict[int, tuple[str, nn.Module]] = {}
    original = model.named_parameters

    def merge_adapter(*args: Any, **kwargs: Any) -> None:
        for _, layer in _upstream.tuner_layers(model):  # outermost first, and layers of several adapters may be nested
            for name, parameter in layer.named_parameters():
                layers.setdefault(id(parameter), (name, layer))

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        source = copied = None
        for name, parameter in original(*args, **kwargs):
            inside, layer = layers.get(id(parameter), ("", None))
            if layer is None or model.prefix in name:  # TRL leaves out the adapters' own
                yield name, parameter
                continue
            if layer is not source:
                source, copied = layer, _merged_copy(layer)
            assert copied is not None
            yield name, _sharded_as(parameter, copied.get_parameter(inside).detach())

    model.merge_adapter, model.unmerge_adapter = merge_adapter, lambda *args, **kwargs: layers.clear()
    model.named_parameters = named_parameters
    try:
        yield
    finally:
        del model.merge_adapter, model.unmerge_adapter, model.named_parameters


@torch.no_grad()
def _merged_copy(layer: nn.Module) -> nn.Module:
    """A copy of a PEFT layer, whole on each rank and without hooks, merged."""
    whole = {id(p): nn.Parameter(_whole(p), requires_grad=False) for p in layer.parameters()}
    copied = _upstream.copy_without_hooks(layer, whole)
    for _, part in _upstream.tuner_layers(copied):
        if not part.merged:
            part.merge()
    return copied


def _whole(parameter: Tensor) -> Tensor:
    """A copy of `parameter`, gathered if FSDP2 has sharded it; a collective then."""
    if isinstance(parameter, DTensor):
        on_device: Any = parameter.detach().to(parameter.device_mesh.device_type)
        return on_device.full_tensor().clone()
    return parameter.detach().clone()


def _sharded_as(parameter: Tensor, whole: Tensor) -> Tensor:
    """`whole` as TRL asks for it: under FSDP2 something that can be gathered, which costs nothing here."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole
