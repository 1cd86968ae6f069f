"""What is known of each recipe, and the layer that computes by it."""

import dataclasses
from collections.abc import Callable

from torch import nn

from .._upstream import Float8LinearConfig
from .all_gather import GatheredFloat8Linear
from .blockwise import BlockwiseConfig, BlockwiseLinear
from .emulation import speed_up_emulated_matmuls
from .linear import SwitchableFloat8Linear


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")


# FP8 matmuls take feature dimensions that are multiples of this
FEATURE_MULTIPLE = 16


def layer_factory(
    recipe: str, scale_rounding: str, emulate: bool, fsdp_all_gather: bool = False
) -> Callable[[nn.Linear], nn.Linear]:
    """What turns a linear layer into the FP8 layer of `recipe`, in the same training mode."""
    kind = GatheredFloat8Linear if fsdp_all_gather else SwitchableFloat8Linear
    if emulate:
        speed_up_emulated_matmuls()

    def from_float(linear: nn.Linear) -> nn.Linear:
        if recipe == "blockwise":
            layer = BlockwiseLinear.from_float(linear, BlockwiseConfig(emulate, scale_rounding == "power_of_2"))
        else:
            layer = kind.from_float(linear, config=float8_config(recipe, scale_rounding, emulate))
        # On the instance from the start: a graph that was compiled while only the class had it is compiled again
        layer.high_precision = False
        return layer.train(linear.training)

    return from_float


def float8_config(recipe: str, scale_rounding: str, emulate: bool) -> Float8LinearConfig:
    """TorchAO's configuration of `recipe`, with our scale rule and emulation and everything else untouched."""
    return dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=emulate,
        round_scales_to_power_of_2=scale_rounding == "power_of_2",
    )
