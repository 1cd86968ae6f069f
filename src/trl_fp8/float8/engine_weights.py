"""FP8 weights as vLLM's engine makes them while it loads (vLLM 0.31, `quantization/online/fp8.py`), for the export.

Each function takes a BF16 weight `(N, K)` and returns its values `(N, K)` in e4m3, and the FP32 scales S they have to
be multiplied by. `amax` is the largest magnitude of the fused layer the weight is part of (q, k and v), which only a
scale for the whole weight depends on; `None`: of the weight itself.
"""

import torch
from torch import Tensor

from .blockwise import FORMAT, FORMAT_MAX, whole_blocks


def per_tensor(weight: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S `(1,)` = max|w| / 448 of the fused layer."""
    amax = (weight.abs().amax() if amax is None else amax).float().reshape(1)
    return _divided(weight, torch.where(amax > 0, amax, FORMAT_MAX) / FORMAT_MAX)  # zeros stay zeros at any scale


def per_channel(weight: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S `(N, 1)` = max|w| / 448 of each row."""
    scale = weight.abs().amax(dim=-1, keepdim=True).float() / FORMAT_MAX
    return _divided(weight, scale.clamp_min(1.0 / (FORMAT_MAX * 512)))


def per_block(weight: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S `(ceil(N / 128), ceil(K / 128))` = max|w| / 448 of 128x128 blocks; values are w * (1/S)."""
    blocks = whole_blocks(weight)
    scale = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / FORMAT_MAX
    values = (blocks * (1.0 / scale)).to(FORMAT).flatten(2).flatten(0, 1)
    return values[: weight.shape[0], : weight.shape[1]].contiguous(), scale.view(scale.shape[0], scale.shape[2])


def _divided(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (weight / scale).clamp(-FORMAT_MAX, FORMAT_MAX).to(FORMAT), scale
