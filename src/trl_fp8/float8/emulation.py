"""What emulated FP8 matmuls spend their time on: reading FP8 values back as FP32. A look-up, several times faster."""

import torch
from torch import Tensor


# FP32 value of each FP8 bit pattern: torch's cast is scalar on CPUs
_VALUES = {
    dtype: torch.arange(256, dtype=torch.uint8).view(dtype).float()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
}


def decode(quantized: Tensor) -> Tensor:
    """FP8 values as FP32, in the same shape and, for matrices, the same order in memory; equal to `.float()`."""
    # The tensors of a graph that is being traced stand for others and cannot be looked up
    if quantized.device.type != "cpu" or type(quantized) is not Tensor:
        return quantized.float()
    if quantized.dim() == 2 and not quantized.is_contiguous() and quantized.t().is_contiguous():
        return decode(quantized.t()).t()
    patterns = quantized.view(torch.uint8).flatten().int()
    return _VALUES[quantized.dtype].index_select(0, patterns).view(quantized.shape)
