"""Whether FP8 matmuls run on a device, or are emulated there."""

import logging

import torch

from .recipes import RECIPES


logger = logging.getLogger(__name__)


def resolve_emulation(recipe: str, emulate: bool | None, device: torch.device) -> bool:
    """Whether FP8 matmuls are emulated on `device`: `None` uses real kernels where the device has them.

    Raises:
        ValueError: real kernels were asked for (`emulate=False`) where there are none.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    needed = RECIPES[recipe].min_capability
    if capability is not None and capability >= needed:
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
