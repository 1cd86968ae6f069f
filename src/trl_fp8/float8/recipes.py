"""All that is known of each recipe: one record, which the other modules ask instead of comparing names.

A linear layer runs three matmuls: output = x W^T, grad_x = g W, grad_W = g^T x. A recipe says at which granularity the
six operands are scaled before they are cast to FP8 (S_X = max|X| / F_max over the whole tensor, or over each row), in
which format (e4m3, F_max = 448; e5m2, F_max = 57344), and which matmuls stay in high precision.

A new recipe is a record here and its name in `FP8GRPOConfig.fp8_recipe`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .._upstream import Float8LinearConfig
from .all_gather import GatheredFloat8Linear
from .blockwise import BLOCK, BlockwiseConfig, BlockwiseLinear
from .engine_weights import per_block, per_channel, per_tensor
from .linear import SwitchableFloat8Linear, SwitchableLinear


Builder = Callable[[nn.Linear, bool, bool, bool], SwitchableLinear]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What trainer, engine and export have to know of a recipe; what most have in common is the default."""

    name: str  # `fp8_recipe`
    description: str  # granularity and format of the operands, in a line
    build: Builder  # (linear, power_of_2, emulate, fsdp_all_gather) -> the FP8 layer around its parameters

    # Kernels
    min_capability: tuple[int, int] = (9, 0)  # compute capability of the first GPUs that multiply by it: Hopper
    feature_multiple: int = 16  # what divides the feature dimensions of a layer
    token_multiple: int | None = None  # and the tokens of a micro-batch, the reduced dimension of an FP8 grad_W
    writes_bf16_only: bool = True
    takes_scale_rounding: bool = True  # whether `fp8_scale_rounding` is for it
    # A weight has one scale, which can be known before the weight is whole (FP8 all-gather), and which the parts of a
    # layer that vLLM fuses share (q, k and v)
    one_weight_scale: bool = False
    recomputes_compiled: bool = False  # may be compiled together with activation checkpointing

    # Its pair in vLLM: the quantisation of the same granularity, the FP8 weight and scales it makes of a BF16 weight,
    # and how compressed-tensors describes weights and activations
    engine_quantization: str
    quantize_weight: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    weight_scheme: Mapping[str, Any]
    activation_scheme: Mapping[str, Any]
    engine_rounds_somewhere: bool = False  # its scales are powers of two on some GPUs


def float8_config(recipe: str, power_of_2: bool, emulate: bool) -> Float8LinearConfig:
    """TorchAO's configuration of its own `recipe`, with our scale rule and emulation and everything else untouched."""
    stock = Float8LinearConfig.from_recipe_name(recipe)
    return dataclasses.replace(stock, emulate=emulate, round_scales_to_power_of_2=power_of_2)


def _torchao(recipe: str) -> Builder:
    def build(linear: nn.Linear, power_of_2: bool, emulate: bool, fsdp_all_gather: bool) -> SwitchableLinear:
        kind = GatheredFloat8Linear if fsdp_all_gather else SwitchableFloat8Linear
        return kind.from_float(linear, config=float8_config(recipe, power_of_2, emulate))

    return build


_TENSORWISE = Recipe(
    name="tensorwise",
    description="one scale per tensor; gradients in e5m2",
    build=_torchao("tensorwise"),
    min_capability=(8, 9),  # Ada
    token_multiple=16,
    writes_bf16_only=False,
    takes_scale_rounding=False,
    one_weight_scale=True,
    recomputes_compiled=True,
    engine_quantization="fp8_per_tensor",
    quantize_weight=per_tensor,
    weight_scheme={"strategy": "tensor"},
    activation_scheme={"strategy": "token"},
)
_ROWWISE = Recipe(
    name="rowwise",
    description="one scale per row of the reduced dimension; e4m3 everywhere",
    build=_torchao("rowwise"),
    token_multiple=16,
    engine_quantization="fp8_per_channel",
    quantize_weight=per_channel,
    weight_scheme={"strategy": "channel"},
    activation_scheme={"strategy": "token"},
)
_ROWWISE_WITH_GW_HP = dataclasses.replace(  # the forward, all that an engine sees of it, is that of rowwise
    _ROWWISE,
    name="rowwise_with_gw_hp",
    description="rowwise output, grad_x with a tensorwise weight, grad_W in high precision",
    build=_torchao("rowwise_with_gw_hp"),
    token_multiple=None,
)
_BLOCKWISE = Recipe(
    name="blockwise",
    description="one scale per 128 neighbours, per 128x128 block of a weight; e4m3 everywhere",
    build=lambda linear, power_of_2, emulate, _: BlockwiseLinear.from_float(
        linear, BlockwiseConfig(emulate, power_of_2)
    ),
    feature_multiple=1,  # the layer pads its operands itself
    engine_quantization="fp8_per_block",
    engine_rounds_somewhere=True,
    quantize_weight=per_block,
    weight_scheme={"strategy": "block", "block_structure": [BLOCK, BLOCK]},
    activation_scheme={"strategy": "group", "group_size": BLOCK},
)
RECIPES = {recipe.name: recipe for recipe in (_TENSORWISE, _ROWWISE, _ROWWISE_WITH_GW_HP, _BLOCKWISE)}


def layer_factory(
    recipe: str, scale_rounding: str, emulate: bool, fsdp_all_gather: bool = False
) -> Callable[[nn.Linear], nn.Linear]:
    """What turns a linear layer into the FP8 layer of `recipe`, in the same training mode."""
    build = RECIPES[recipe].build

    def from_float(linear: nn.Linear) -> nn.Linear:
        layer = build(linear, scale_rounding == "power_of_2", emulate, fsdp_all_gather)
        # On the instance from the start: a graph that was compiled while only the class had it is compiled again
        layer.high_precision = False
        return layer.train(linear.training)

    return from_float
