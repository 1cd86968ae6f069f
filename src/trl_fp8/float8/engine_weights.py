"""FP8 weights as vLLM's engine makes them while it loads (vLLM 0.31, `quantization/online/fp8.py`), for the export.

Each function takes a BF16 weight `(N, K)` and returns its values `(N, K)` in e4m3, and the FP32 scales S they have to
be multiplied by. `amax` is the largest magnitude of the fused layer the weight is part of (q, k and v), which only a
scale for the whole weight depends on; `None`: of the weight itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .blockwise import BLOCK, FORMAT, FORMAT_MAX


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
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / FORMAT_MAX
    values = (blocks * (1.0 / scale)).to(FORMAT).view(padded.shape)
    return values[:rows, :columns].contiguous(), scale.view(scale.shape[0], scale.shape[2])


def _divided(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (weight / scale).clamp(-FORMAT_MAX, FORMAT_MAX).to(FORMAT), scale
