"""FP8 all-gather: under FSDP2 the weight of an FP8 layer travels as FP8, half the bytes of BF16.

FSDP2 asks a shard what to send and what to make of what arrives; [`Float8Shard`] is a tensor with these two answers,
and both are its layer's. Every rank casts its rows to the dtype the run computes in, scales them by the scale of the
whole weight and sends FP8, so that a layer gets bit for bit what it would have made of the gathered BF16 weight.

    optimizer step -> refresh_scales: max |W| of all layers in one all-reduce
    forward        -> FP8 is gathered, `self.weight` is an FP8 tensor
    shadow pass    -> the layer gathers its BF16 weight itself, one layer at a time, and drops it after its matmul

Only one scale per weight can be known before the weight is whole, so the recipe is tensorwise.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import TrainerCallback

from .._upstream import (
    FSDP2_OPERATIONS,
    Float8LinearConfig,
    Float8TrainingTensor,
    amax_to_scale,
    disabled_torch_function,
    gathered_weight,
    quantize_shard,
    version,
)
from .linear import SwitchableFloat8Linear


class Float8Shard(Tensor):
    """Weight `(N, K)` of a [`GatheredFloat8Linear`], or the rows of it that a rank holds, in the master's dtype.

    Has memory of its own (no wrapper), so optimizers, checkpoints and `data_ptr()` find an ordinary tensor.
    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (extensions); torchao/float8/fsdp_utils.py does the same
    without rounding first.
    """

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        output = cast(Any, super()).__torch_dispatch__(func, types, args, kwargs or {})
        if func not in FSDP2_OPERATIONS:  # optimizer states, views and what is saved are ordinary tensors
            return output
        if isinstance(output, Sequence):
            return [part.as_subclass(cls) for part in output]
        return output.as_subclass(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.view_as(self).__reduce_ex__(protocol)  # a file holds an ordinary tensor

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor, Any]]:
        """What FSDP2 sends `(N / ranks, K)` in FP8, and what the other side needs to read it."""
        assert isinstance(module, GatheredFloat8Linear)
        return module.quantize_shard(self, mp_policy.param_dtype or self.dtype)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """The gathered weight `(N, K)`. `out` is the one of the last gather, whose memory has been filled again."""
        return gathered_weight(all_gather_outputs, metadata, param_dtype, out)


class GatheredFloat8Linear(SwitchableFloat8Linear):
    """A tensorwise FP8 layer whose weight FSDP2 gathers in FP8; not sharded yet, it is its parent."""

    _amax: Tensor | None = None
    _amax_versions: tuple[int, int] | None = None  # of the weight that had this maximum
    # Kept until the weight changes: FSDP2 gathers on a stream of its own, on which the memory of a scale that was
    # dropped after each gather could be written to while a matmul still reads it
    _scale: Tensor | None = None
    _sharded: tuple[Any, ...] = ()  # in a tuple, so that it is not a second parameter

    @classmethod
    def from_float(cls, mod: nn.Linear, config: Float8LinearConfig | None = None) -> "GatheredFloat8Linear":
        layer = super().from_float(mod, config=config)
        shard = layer.weight.detach().as_subclass(Float8Shard)
        layer.weight = nn.Parameter(shard, requires_grad=layer.weight.requires_grad)
        return layer

    def remember_amax(self, amax: Tensor) -> None:
        """`amax` `()`, FP32, is max |W| over all ranks of the weight as it is now."""
        self._amax, self._amax_versions, self._scale = amax, _versions(self.weight), None

    def quantize_shard(self, shard: Tensor, dtype: torch.dtype) -> tuple[tuple[Tensor], tuple[Tensor, Any]]:
        """Rows of the weight in FP8, and (scale `()`, matmul configuration). Collective where the weight has changed.

        Args:
            shard: rows of this rank.
            dtype: in which the layer computes. Rounding keeps order, so max |round(W)| = round(max |W|).
        """
        weight = self.weight
        assert isinstance(weight, DTensor)  # FSDP2 gathers sharded parameters
        self._sharded = (weight,)
        if self._amax is None or self._amax_versions != _versions(weight):
            refresh_scales([self])
        assert self._amax is not None
        target = self.config.cast_config_weight.target_dtype
        if self._scale is None:
            self._scale = amax_to_scale(self._amax.to(dtype), target, self.config.round_scales_to_power_of_2)
        rows = shard.view_as(shard).to(dtype)
        return quantize_shard(rows, self._scale, target, self.linear_mm_config)

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self.weight, Float8TrainingTensor):
            return super().forward(input)
        weight = self.weight
        if self.high_precision:
            if torch.is_grad_enabled() and weight.requires_grad:
                raise RuntimeError(
                    "high_precision(model) with fp8_fsdp_all_gather=True and gradients enabled: the BF16 weight is "
                    "gathered for one matmul, and its gradient would reach no parameter. Run the pass under "
                    "torch.no_grad(), or set fp8_fsdp_all_gather=False."
                )
            master = self._sharded[0].detach().to(weight.dtype).full_tensor()
            return F.linear(input, master, self.bias)
        device = input.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != weight.dtype:
            raise RuntimeError(
                f"fp8_fsdp_all_gather=True: the layer computes in {torch.get_autocast_dtype(device)} (autocast), but "
                f"FSDP2 gathered weights rounded to {weight.dtype} (its mixed_precision_policy). Leave the policy to "
                "accelerate, which follows bf16 and fp16, or set fp8_fsdp_all_gather=False."
            )
        return super().forward(input)

    def unquantized_matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rows @ (weight.to_original_precision() if isinstance(weight, Float8TrainingTensor) else weight).t()


def _versions(weight: Tensor) -> tuple[int, int]:
    """Counts the in-place changes of a sharded weight, as a parameter and as this rank's rows.

    Sees `load_state_dict`, `copy_` and optimizers in Python. Fused optimizers and `.data` change weights uncounted.
    """
    with torch.no_grad():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
    return version(weight), version(local)


@torch.no_grad()
def refresh_scales(modules: Iterable[nn.Module]) -> int:
    """Find max |W| of the sharded layers among `modules` in one all-reduce. Collective. Returns their number.

    To be called after an optimizer step; a change that `_versions` counts is found at the next gather without it.
    """
    layers = [m for m in modules if isinstance(m, GatheredFloat8Linear) and isinstance(m.weight, DTensor)]
    if layers:
        norms: Any = torch.stack(
            [torch.linalg.vector_norm(layer.weight, ord=math.inf, dtype=torch.float32) for layer in layers]
        )
        for layer, amax in zip(layers, norms.full_tensor(), strict=True):
            layer.remember_amax(amax)
    return len(layers)


class Float8ScaleCallback(TrainerCallback):
    """Refreshes scales where weights change: when a run starts or was loaded, and after each optimizer step.

    Args:
        follower: a second model, whose weights follow (`sync_ref_model`) at the end of a step, if there is one.
    """

    def __init__(self, follower: nn.Module | None = None):
        self.follower = follower

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        refresh_scales(model.modules())

    on_optimizer_step = on_train_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.follower is not None and args.sync_ref_model:
            refresh_scales(self.follower.modules())


def check_shards(model: nn.Module, num_shards: int) -> None:
    """Refuse layers whose weight is not cut evenly, or is two layers' at once.

    Raises:
        ValueError: naming the layer.
    """
    uses = Counter(p.data_ptr() for _, p in model.named_parameters(remove_duplicate=False))
    for name, layer in model.named_modules():
        if not isinstance(layer, GatheredFloat8Linear):
            continue
        if layer.out_features % num_shards:
            raise ValueError(
                f"fp8_fsdp_all_gather=True with {num_shards} shards: the {layer.out_features} rows of {name} cannot "
                "be cut evenly, and FSDP2 would pad them, which torchao's FP8 all-gather does not support. Change "
                "the number of processes, name the layer in fp8_exclude_modules, or set fp8_fsdp_all_gather=False."
            )
        if uses[layer.weight.data_ptr()] > 1:
            raise ValueError(
                f"fp8_fsdp_all_gather=True: the weight of {name} is tied to another parameter, and it would become a "
                "parameter of its own. Name the layer in fp8_exclude_modules, or set fp8_fsdp_all_gather=False."
            )
