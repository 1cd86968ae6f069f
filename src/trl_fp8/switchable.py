"""The layer every recipe builds on: FP8 or, at the flip of a flag, the plain linear layer on the same parameters."""

import torch
from torch import Tensor, nn


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
