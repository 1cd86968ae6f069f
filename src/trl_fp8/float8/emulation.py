"""What emulated FP8 matmuls spend their time on: reading FP8 values back as FP32. A look-up, several times faster."""

from typing import Any

import torch
from torch import Tensor

from .._upstream import FLOAT8_OPS_TABLE, choose_scaled_mm_config


# FP32 value of each FP8 bit pattern: torch's cast is scalar on CPUs
_VALUES = {
    dtype: torch.arange(256, dtype=torch.uint8).view(dtype).float()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
}
_torchao_matmul = FLOAT8_OPS_TABLE[torch.ops.aten.mm.default]


def decode(quantized: Tensor) -> Tensor:
    """FP8 values as FP32, in the same shape and, for matrices, the same order in memory; equal to `.float()`."""
    # The tensors of a graph that is being traced stand for others and cannot be looked up
    if quantized.device.type != "cpu" or type(quantized) is not Tensor:
        return quantized.float()
    if quantized.dim() == 2 and not quantized.is_contiguous() and quantized.t().is_contiguous():
        return decode(quantized.t()).t()
    patterns = quantized.view(torch.uint8).flatten().int()
    return _VALUES[quantized.dtype].index_select(0, patterns).view(quantized.shape)


def _matmul(op: Any, args: tuple, kwargs: dict | None = None) -> Tensor:
    a, b = args
    config = choose_scaled_mm_config(a._gemm_input_role, a._linear_mm_config, b._gemm_input_role, b._linear_mm_config)
    if not config.emulate or a.device.type != "cpu":
        return _torchao_matmul(op, args, kwargs)
    return torch.mm(decode(a._data) / a._scale, decode(b._data) / b._scale).to(a._orig_dtype)


def speed_up_emulated_matmuls() -> None:
    """Let torchao's emulated matmuls on CPUs read FP8 by look-up, for this process. Results stay equal bit for bit."""
    FLOAT8_OPS_TABLE[torch.ops.aten.mm.default] = _matmul
