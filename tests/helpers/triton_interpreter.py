"""torchao's blockwise Triton kernels under Triton's interpreter, beside our emulation; prints one JSON line.

Run by `test_blockwise.py` in a process of its own (TRITON_INTERPRET=1 must be set before triton is imported).
Autotuning needs a GPU, so the first configuration of each kernel is taken. What the interpreter of triton 3.9 cannot
do is left out: two of the five quantisation kernels (`..._transposed_...`) fail in it, and its cast to e4m3 is wrong
(124.3 becomes 64), so scales are compared bit for bit, and the matmuls on operands quantised by us.
"""

import json

import torch
from torch import nn
from torchao.prototype.blockwise_fp8_training import kernels

from trl_fp8.float8 import blockwise


class FirstConfiguration:
    """A kernel with its first autotuning configuration, launched without a benchmark."""

    def __init__(self, autotuner):
        self.kernel, self.settings = autotuner.fn, autotuner.configs[0].kwargs

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            settings = {**self.settings, **kwargs}
            return self.kernel[grid(settings)](*args, **settings)

        return launch


def power_of_two_errors(tokens, rows, columns, error):
    """Output, grad_x and grad_W of a layer with power-of-two scales: torchao's matmuls against the emulation."""
    linear = nn.Linear(columns, rows, bias=False)
    x = torch.randn(tokens, columns, requires_grad=True)
    gradient = torch.randn(tokens, rows)
    found = []
    for emulate in (False, True):
        layer = blockwise.BlockwiseLinear.from_float(linear, blockwise.BlockwiseConfig(emulate, power_of_2=True))
        output = layer(x)
        found.append((output, *torch.autograd.grad(output, (x, layer.weight), gradient)))
    return [error(real.detach(), emulated.detach()) for real, emulated in zip(*found, strict=True)]


def main() -> None:
    for name in dir(kernels):
        if name.startswith("triton") and name.endswith("_kernel"):
            setattr(kernels, name, FirstConfiguration(getattr(kernels, name)))
    kernels.wrap_triton = lambda kernel: kernel

    torch.manual_seed(0)
    x = torch.randn(256, 256, dtype=torch.bfloat16)
    weight = torch.randn(384, 256, dtype=torch.bfloat16) * 0.02
    x[3] = 0
    groups, group_scales = blockwise.quantize_groups(x)
    columns, column_scales = blockwise.quantize_groups(x.t())
    blocks, block_scales = blockwise.quantize_blocks(weight)
    groups, blocks = groups.reshape(256, 256).contiguous(), blocks.reshape(384, 256).contiguous()
    result = {
        "activation scales": torch.equal(
            kernels.triton_fp8_blockwise_act_quant_lhs(x, 128)[1], group_scales.squeeze(-1)
        ),
        "activation scales over tokens": torch.equal(
            kernels.triton_fp8_blockwise_act_quant_rhs(x, 128)[1], column_scales.squeeze(-1).t()
        ),
        "weight scales": torch.equal(
            kernels.triton_fp8_blockwise_weight_quant_rhs(weight, 128)[1], block_scales.reshape(3, 2)
        ),
    }

    def error(value, ours):
        return ((value.double() - ours.double()).abs().max() / ours.double().abs().max()).item()

    output = kernels.triton_fp8_gemm_1x128_128x128(
        groups,
        blocks.t(),
        group_scales.squeeze(-1).t().contiguous().t(),
        block_scales.reshape(3, 2).t(),
        out_dtype=torch.float32,
    )
    ours = blockwise.dequantized_groups(x) @ blockwise.dequantized_blocks(weight).t()
    result["output error"] = error(output, ours)

    gradient = torch.randn(256, 384, dtype=torch.bfloat16) * 1e-3
    rows, row_scales = blockwise.quantize_groups(gradient.t())
    grad_weight = kernels.triton_fp8_gemm_1x128_128x1(
        rows.reshape(384, 256).contiguous(),
        columns.reshape(256, 256).contiguous().t(),
        row_scales.squeeze(-1).t().contiguous().t(),
        column_scales.squeeze(-1).t().contiguous(),
        out_dtype=torch.float32,
    )
    ours = blockwise.dequantized_groups(gradient.t()) @ blockwise.dequantized_groups(x.t()).t()
    result["grad_W error"] = error(grad_weight, ours)
    result["power of two errors"] = [
        number
        for tokens, rows, columns in ((256, 384, 256), (100, 72, 200))
        for number in power_of_two_errors(tokens, rows, columns, error)
    ]
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
