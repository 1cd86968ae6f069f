"""TorchAO's FP8 matmul, holding the weight for the backward pass the way sharded training needs it.

torchao saves the transposed weight, a view. ZeRO-3 frees a gathered weight by giving the parameter other memory, and
the view keeps the old memory alive: after a forward pass each rank would hold all weights of the model. The parameter
itself is what has to be saved; DeepSpeed gathers it again before the backward pass of its layer.

torchao also computes the gradient of a frozen weight (the base of an adapter) and saves its input for it. A few
columns of the input are enough there: what comes out is thrown away.
"""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._upstream import Float8Linear, matmul_with_hp_or_float8_args, without_view


class SwitchableLinear(nn.Linear):
    """A linear layer that quantises weight and input as autocast would cast them, and can be switched to `nn.Linear`.

    Casting the weight as well keeps trainer and rollout on the same values: both quantise the BF16-rounded weight.
    """

    high_precision = False
    """Set by [`~trl_fp8.float8.high_precision`]."""

    def quantized_matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        """`rows` `(M, K)`, M > 0, times `weight` `(N, K)` through FP8, both in the dtype to compute in: `(M, N)`."""
        raise NotImplementedError

    def unquantized_matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        """The same without a token, which leaves nothing to scale; all gradients are zeros."""
        return rows @ weight.t()

    def forward(self, input: Tensor) -> Tensor:
        if self.high_precision:
            return nn.Linear.forward(self, input)
        weight = self.weight
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input, weight = input.to(dtype), weight.to(dtype)
        rows = input.reshape(-1, input.shape[-1])
        matmul = self.quantized_matmul if rows.shape[0] else self.unquantized_matmul
        output = matmul(rows, weight).reshape(*input.shape[:-1], weight.shape[0])
        return output if self.bias is None else output + self.bias.to(output.dtype)


# Columns of the input that stand for all of it where the weight is frozen: as few as a kernel takes
_FROZEN_COLUMNS = 16


@torch.compiler.allow_in_graph  # as torchao's own function, whose forward this one calls
class Float8Matmul(torch.autograd.Function):
    """rows `(M, K)`, weight `(N, K)` -> rows W^T `(M, N)`, with the numerics of torchao's function."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, linear_mm_config: Any, config: Any) -> Tensor:
        output = matmul_with_hp_or_float8_args.forward(ctx, rows, weight.t(), linear_mm_config, config)
        needed = rows if ctx.needs_input_grad[1] else rows[:, :_FROZEN_COLUMNS].contiguous()
        ctx.save_for_backward(needed, weight)  # in place of the view
        return without_view(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        rows, weight = ctx.saved_tensors
        saved = SimpleNamespace(
            saved_tensors=(rows, weight.t()), linear_mm_config=ctx.linear_mm_config, config=ctx.config
        )
        grad_rows, grad_weight_t, *_ = matmul_with_hp_or_float8_args.backward(cast(Any, saved), *grad_outputs)
        return grad_rows, grad_weight_t.t() if ctx.needs_input_grad[1] else None, None, None


class SwitchableFloat8Linear(SwitchableLinear, Float8Linear):
    """TorchAO's `Float8Linear`; its own forward quantises the FP32 master and reads one autocast dtype everywhere."""

    def quantized_matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        return Float8Matmul.apply(rows, weight, self.linear_mm_config, self.config)
