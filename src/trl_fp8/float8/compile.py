"""`fp8_compile`: each decoder layer compiled, which is what makes FP8 faster than BF16 on a GPU (fused casts).

One graph serves all layers and all lengths: the sequence length is a symbol from the start, so that a run compiles
once for passes with gradients and once for those without, however its batches vary. What runs eagerly all the same:

    shadow passes   so that the BF16 side is bit for bit the unconverted model; they are rare
    generation      a cache that grows by a token would be a graph of its own, and pays for nothing
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from torchao.float8 import convert_to_float8_training

from .._upstream import compile_up_to


# With and without gradients, mask (transformers drops one without padding), adapter and reference: more than torch's 8
_MAX_GRAPHS = 32


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers of a causal language model, or of a PEFT model around one.

    Raises:
        ValueError: the model does not say which they are.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    layers = getattr(base.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        raise ValueError(
            f"fp8_compile=True with {type(base).__name__}: its decoder has no list of layers to compile one by one. "
            "Set fp8_compile=False."
        )
    return list(layers)


def compile_layers(model: Any, backend: str | Callable = "inductor") -> int:
    """Compile each decoder layer in place, before anything wraps it; names stay. Returns their number."""
    # torchao works around a miscompiled cast (triton-lang/triton#11111) in its public entry point, which we do not
    # convert with. On a module without linears that is all it does
    convert_to_float8_training(nn.Sequential())
    compile_up_to(_MAX_GRAPHS)
    layers = decoder_layers(model)
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)
    return len(layers)


def eagerly(compiled: bool) -> contextlib.AbstractContextManager:
    """Context in which compiled layers run as they are written; nothing where nothing is compiled."""
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
