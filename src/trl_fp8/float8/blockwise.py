"""Blockwise FP8 linears: the paper's best recipe, in all three matmuls of a layer, e4m3 throughout.

    output = x W^T     x in groups of 1x128 along its features,    W in blocks of 128x128
    grad_x = g W       g in groups of 1x128 along its features,    W in the same blocks
    grad_W = g^T x     both in groups of 128 tokens (the reduced dimension)

Each group or block has a scale 448 / max|X|, rounded once to FP32 (`scale_rounding="none"`) or down to a power of two;
products are accumulated in FP32. A dimension that 128 does not divide gets a smaller last block: padding with zeros
changes no maximum and adds nothing to a sum, so kernels that want full blocks see padded operands and the result is
the same.

On SM90 and newer the matmuls are torchao's blockwise training kernels (`torchao.prototype.blockwise_fp8_training`);
elsewhere the same quantisation in plain PyTorch, multiplied in FP32. torchao's own layer takes no bias, no frozen
weight without its gradient's work, and only multiples of 128. Its quantisation kernels know FP32 scales only: with
power-of-two scales PyTorch quantises, and its Triton matmuls multiply.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _upstream
from .emulation import decode
from .linear import SwitchableLinear


BLOCK = 128
FORMAT = torch.float8_e4m3fn
FORMAT_MAX = torch.finfo(FORMAT).max  # 448
_SMALLEST_MAX = 1e-12  # as torchao: an all-zero block is scaled by a finite number and stays 0


@dataclass(frozen=True)
class BlockwiseConfig:
    """How a blockwise layer multiplies: `emulate` in plain PyTorch, scales rounded down to a `power_of_2`."""

    emulate: bool
    power_of_2: bool = False


def quantize_groups(x: Tensor, power_of_2: bool = False) -> tuple[Tensor, Tensor]:
    """Cast to FP8 with one scale per 128 neighbours of a row.

    Args:
        x (`Tensor` of shape `(M, K)`): any floating dtype.
        power_of_2: round the scales down to a power of two.

    Returns:
        `Tensor` of shape `(M, G, 128)`, e4m3, zero-padded, and `Tensor` of shape `(M, G, 1)`, FP32: what a value has
        to be multiplied by to get back. G = ceil(K / 128).
    """
    rows, columns = x.shape
    groups = F.pad(x, (0, -columns % BLOCK)).reshape(rows, -1, BLOCK)
    return _quantize(groups, groups.abs().amax(dim=-1, keepdim=True), power_of_2)


def quantize_blocks(weight: Tensor, power_of_2: bool = False) -> tuple[Tensor, Tensor]:
    """Cast to FP8 with one scale per 128x128 block.

    Args:
        weight (`Tensor` of shape `(N, K)`): any floating dtype.
        power_of_2: round the scales down to a power of two.

    Returns:
        `Tensor` of shape `(R, 128, C, 128)`, e4m3, zero-padded, and `Tensor` of shape `(R, 1, C, 1)`, FP32: what a
        value has to be multiplied by to get back. R = ceil(N / 128), C = ceil(K / 128).
    """
    blocks = whole_blocks(weight)
    return _quantize(blocks, blocks.abs().amax(dim=(1, 3), keepdim=True), power_of_2)


def whole_blocks(weight: Tensor) -> Tensor:
    """`weight` `(N, K)`, zero-padded, as `(R, 128, C, 128)`: R x C blocks of 128x128."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def _quantize(x: Tensor, amax: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    # float64: one correctly rounded division, as torchao's kernels do it
    scale = (FORMAT_MAX / amax.double().clamp(min=_SMALLEST_MAX)).float()
    if power_of_2:
        # exactly the power of two below; a rounded logarithm can reach the one above
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
    quantized = (x * scale).clamp(-FORMAT_MAX, FORMAT_MAX).to(FORMAT)
    return quantized, 1.0 / scale


def dequantized_groups(x: Tensor, power_of_2: bool = False) -> Tensor:
    """`x` `(M, K)` as FP8 in groups of 1x128 sees it, FP32."""
    quantized, inverse = quantize_groups(x, power_of_2)
    return (decode(quantized) * inverse).view(x.shape[0], -1)[:, : x.shape[1]]


def dequantized_blocks(weight: Tensor, power_of_2: bool = False) -> Tensor:
    """`weight` `(N, K)` as FP8 in blocks of 128x128 sees it, FP32."""
    quantized, inverse = quantize_blocks(weight, power_of_2)
    rows, _, columns, _ = quantized.shape
    return (decode(quantized) * inverse).view(rows * BLOCK, columns * BLOCK)[: weight.shape[0], : weight.shape[1]]


def _times_weight(x: Tensor, weight: Tensor, config: BlockwiseConfig, transposed: bool) -> Tensor:
    """x W^T (`transposed`) or x W, with x in groups along its columns and W in blocks, in the dtype of x."""
    if config.emulate:
        blocks = dequantized_blocks(weight, config.power_of_2)
        return (dequantized_groups(x, config.power_of_2) @ (blocks.t() if transposed else blocks)).to(x.dtype)
    groups, scales = quantize_groups(_whole_blocks(x), config.power_of_2)
    blocks, block_scales = quantize_blocks(weight, config.power_of_2)
    rows, _, columns, _ = blocks.shape
    matrix, block_scales = blocks.view(rows * BLOCK, columns * BLOCK), block_scales.view(rows, columns)
    if transposed:
        matrix, block_scales = matrix.t(), block_scales.t()
    product = _upstream.blockwise_kernels().triton_fp8_gemm_1x128_128x128(
        groups.flatten(1),
        _column_major(matrix),
        _column_major(scales.squeeze(-1)),
        _column_major(block_scales),
        out_dtype=x.dtype,
    )
    return product[: x.shape[0], : weight.shape[0 if transposed else 1]]


def _over_tokens(gradient: Tensor, x: Tensor, config: BlockwiseConfig) -> Tensor:
    """g^T x, both in groups of 128 tokens, in the dtype of x."""
    if config.emulate:
        rows = dequantized_groups(gradient.t(), config.power_of_2)
        return (rows @ dequantized_groups(x.t(), config.power_of_2).t()).to(x.dtype)
    rows, row_scales = quantize_groups(_whole_blocks(gradient.t()), config.power_of_2)
    columns, column_scales = quantize_groups(_whole_blocks(x.t()), config.power_of_2)
    product = _upstream.blockwise_kernels().triton_fp8_gemm_1x128_128x1(
        rows.flatten(1),
        columns.flatten(1).t(),
        _column_major(row_scales.squeeze(-1)),
        column_scales.squeeze(-1).t().contiguous(),
        out_dtype=x.dtype,
    )
    return product[: gradient.shape[1], : x.shape[1]]


def _whole_blocks(matrix: Tensor) -> Tensor:
    """In row-major order, with zero rows added until 128 divides their number."""
    return F.pad(matrix, (0, 0, 0, -matrix.shape[0] % BLOCK)).contiguous()


def _column_major(matrix: Tensor) -> Tensor:
    # `contiguous` leaves the strides of a single row or column as they are, and the kernels read strides
    return matrix if matrix.stride(0) == 1 else matrix.t().clone(memory_format=torch.contiguous_format).t()


@torch.compiler.allow_in_graph  # dynamo fails inside, with layers that recompute or not
class _Matmul(torch.autograd.Function):
    """x `(M, K)`, weight `(N, K)` -> x W^T `(M, N)`, in the dtype of x, quantised in plain PyTorch."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, config: BlockwiseConfig) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.config = config
        return _times_weight(x, weight, config, transposed=True)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (grad,) = grad_outputs
        x, weight = ctx.saved_tensors
        grad_x = _times_weight(grad, weight, ctx.config, transposed=False) if ctx.needs_input_grad[0] else None
        grad_weight = _over_tokens(grad, x, ctx.config).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _torchao_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x `(M, K)`, weight `(N, K)` -> x W^T `(M, N)` by torchao kernels, which take multiples of 128. Not run here."""
    tokens, rows = x.shape[0], weight.shape[0]
    columns = -x.shape[1] % BLOCK
    if columns or tokens % BLOCK:
        x = F.pad(x, (0, columns, 0, -tokens % BLOCK))
    if columns or rows % BLOCK:
        weight = F.pad(weight, (0, columns, 0, -rows % BLOCK))
    output = _upstream.blockwise_matmul(x.contiguous(), weight.contiguous(), x.dtype)
    return output[:tokens, :rows]


class BlockwiseLinear(SwitchableLinear):
    """A linear layer whose three matmuls run in blockwise FP8."""

    config: BlockwiseConfig

    @classmethod
    def from_float(cls, linear: nn.Linear, config: BlockwiseConfig) -> "BlockwiseLinear":
        """The blockwise layer around the parameters of `linear`, which keep their identity."""
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features, bias=False)
        layer.weight, layer.bias, layer.config = linear.weight, linear.bias, config
        return layer

    def quantized_matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        if not self.config.emulate and not self.config.power_of_2:
            return _torchao_matmul(rows, weight)
        # Autocast would multiply dequantised operands in BF16
        with torch.autocast(rows.device.type, enabled=False):
            return _Matmul.apply(rows, weight, self.config)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, blockwise 1x{BLOCK}/{BLOCK}x{BLOCK}"
