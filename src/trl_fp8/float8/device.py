"""Which FP8 matmuls run on a device, real or emulated, and what the real ones ask of a run."""

import logging

import torch

from ..config import FP8GRPOConfig


logger = logging.getLogger(__name__)

# Tensorwise scaled matmuls start with Ada (8.9), rowwise and blockwise ones with Hopper (9.0)
_MIN_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0), "blockwise": (9, 0)}
# The reduced dimension of an FP8 weight gradient is the number of tokens, and kernels want a multiple of 16 (blockwise
# pads inside the layer)
_PADDED_RECIPES = ("tensorwise", "rowwise")
TOKEN_MULTIPLE = 16


def prepare(args: FP8GRPOConfig) -> bool:
    """Whether FP8 matmuls are emulated; sets `pad_to_multiple_of` where it is `"auto"` and real kernels need it.

    Raises:
        ValueError: the run asks for something the kernels of its device do not do.
    """
    emulated = resolve_emulation(args.fp8_recipe, args.fp8_emulate, args.device)
    if not emulated:
        _check_dtype(args)
        if args.fp8_recipe in _PADDED_RECIPES:
            if args._pad_to_multiple_of_is_auto:
                args.pad_to_multiple_of = TOKEN_MULTIPLE
            _check_padding(args, TOKEN_MULTIPLE)
    return emulated


def resolve_emulation(recipe: str, emulate: bool | None, device: torch.device) -> bool:
    """Whether FP8 matmuls are emulated on `device`: `None` uses real kernels where the device has them.

    Raises:
        ValueError: real kernels were asked for (`emulate=False`) where there are none.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    needed = _MIN_CAPABILITY[recipe]
    available = capability is not None and capability >= needed
    if available:
        return bool(emulate)
    have = f"compute capability {capability[0]}.{capability[1]}" if capability else f"a {device.type} device"
    need = f"fp8_recipe={recipe!r} needs compute capability {needed[0]}.{needed[1]} or newer"
    if emulate is False:
        raise ValueError(
            f"fp8_emulate=False cannot run on {have}: {need}. Leave fp8_emulate unset to emulate FP8 here (slow, same "
            "numerics), or use a device that has FP8 kernels."
        )
    if emulate is None and device.type != "cpu":
        logger.warning(f"FP8 matmuls are emulated, slower than BF16, on {have}: {need}.")
    return True


def _check_dtype(args: FP8GRPOConfig) -> None:
    """Rowwise FP8 kernels write BF16 only."""
    if args.fp8_recipe != "tensorwise" and not args.bf16:
        raise ValueError(
            f"bf16={args.bf16} with fp8_recipe={args.fp8_recipe!r}: rowwise FP8 kernels write BF16 only. Set "
            "bf16=True, fp8_recipe='tensorwise', or fp8_emulate=True."
        )


def _check_padding(args: FP8GRPOConfig, multiple: int) -> None:
    """The token count of a micro-batch is the reduced dimension of the FP8 weight gradient."""
    if args.pad_to_multiple_of is None or args.pad_to_multiple_of % multiple:
        raise ValueError(
            f"pad_to_multiple_of={args.pad_to_multiple_of} lets a micro-batch have a token count the FP8 weight "
            f"gradient kernel of fp8_recipe={args.fp8_recipe!r} cannot take (it needs a multiple of {multiple}). "
            f"Leave it 'auto', set a multiple of {multiple}, or use fp8_recipe='rowwise_with_gw_hp'."
        )
