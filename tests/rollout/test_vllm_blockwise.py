"""Blockwise quantisation as vLLM's `fp8_per_block` does it, by vLLM's own functions in plain PyTorch.

The engine's blockwise matmul needs a GPU (or a CPU with AMX); what it multiplies does not.
"""

import pytest
import torch


pytest.importorskip("vllm")

from trl_fp8.float8 import blockwise
from trl_fp8.rollout import _upstream


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def operands():
    torch.manual_seed(0)
    spread = torch.exp(torch.randn(1, 512))  # neighbouring channels of different size, as in real layers
    return (torch.randn(64, 512) * spread).bfloat16(), (0.02 * torch.randn(256, 512) * spread).bfloat16()


def engine_groups(x, power_of_2):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    with set_current_vllm_config(VllmConfig()):
        quantize = QuantFP8(static=False, group_shape=GroupShape(1, 128), use_ue8m0=power_of_2)
        return quantize.forward_native(x)


def engine_blocks(weight, power_of_2):
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    return per_block_cast_to_fp8(weight, [128, 128], use_ue8m0=power_of_2)


def ours(x, weight, power_of_2):
    groups, group_scales = blockwise.quantize_groups(x, power_of_2)
    blocks, block_scales = blockwise.quantize_blocks(weight, power_of_2)
    rows, _, columns, _ = blocks.shape
    return (
        (groups.flatten(1), group_scales.squeeze(-1)),
        (blocks.reshape(rows * 128, columns * 128), block_scales.view(rows, columns)),
    )


def test_power_of_two_scales_are_the_engines_to_the_last_bit(operands):
    """Engines with UE8M0 scales (Blackwell): `fp8_scale_rounding="power_of_2"`."""
    x, weight = operands
    for mine, theirs in zip(ours(x, weight, True), (engine_groups(x, True), engine_blocks(weight, True)), strict=True):
        assert torch.equal(mine[1], theirs[1])
        assert torch.equal(mine[0].float(), theirs[0].float())


def test_fp32_scales_are_the_engines_but_for_the_last_bit(operands):
    """Engines with FP32 scales (Hopper): `fp8_scale_rounding="none"`. The engine divides, torchao multiplies."""
    x, weight = operands
    for mine, theirs in zip(
        ours(x, weight, False), (engine_groups(x, False), engine_blocks(weight, False)), strict=True
    ):
        assert torch.allclose(mine[1], theirs[1], rtol=2e-7, atol=0)
        different = mine[0].float() != theirs[0].float()
        assert different.double().mean() < 2e-3  # values half-way between two FP8 numbers; measured below
        steps = mine[0].view(torch.uint8).int() - theirs[0].view(torch.uint8).int()
        assert steps.abs().max() <= 1


def test_the_wrong_scale_rule_is_another_quantisation(operands):
    x, weight = operands
    mine = ours(x, weight, False)
    for (values, _), (theirs, _) in zip(mine, (engine_groups(x, True), engine_blocks(weight, True)), strict=True):
        assert (values.float() != theirs.float()).double().mean() > 0.5


def test_the_engine_says_which_rule_it_follows():
    assert _upstream.engine_rounds_block_scales() is False  # DeepGEMM, which has the other one, needs a GPU
