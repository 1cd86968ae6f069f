"""Reading FP8 by look-up: the same bits as torch's cast, in torchao's emulated matmuls too."""

import pytest
import torch
from torch import nn

from trl_fp8 import _upstream
from trl_fp8.float8 import emulation, layer_factory


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_decoding_equals_the_cast_for_every_bit_pattern(dtype):
    patterns = torch.arange(256, dtype=torch.uint8).view(dtype)
    for quantized in (patterns, patterns.reshape(16, 16), patterns.reshape(16, 16).t(), patterns.reshape(4, 8, 8)):
        decoded, cast = emulation.decode(quantized), quantized.float()
        assert torch.equal(decoded.isnan(), cast.isnan())
        assert torch.equal(decoded.nan_to_num(1e6, 1e7, -1e7), cast.nan_to_num(1e6, 1e7, -1e7))


def test_decoding_keeps_the_order_in_memory():
    # else the matmul that follows would take another path and round differently
    transposed = torch.randn(8, 16).to(torch.float8_e4m3fn).t()
    assert emulation.decode(transposed).stride() == transposed.stride()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("tokens", [1, 7, 256])
def test_the_faster_matmul_equals_torchaos_own(recipe, tokens, monkeypatch):
    torch.manual_seed(0)
    layer = layer_factory(recipe, "none", True)(nn.Linear(96, 64))
    x, gradient = torch.randn(tokens, 96, requires_grad=True), torch.randn(tokens, 64)

    def run():
        output = layer(x)
        return output, *torch.autograd.grad(output, (x, layer.weight), gradient)

    calls = []
    decode = emulation.decode
    monkeypatch.setattr(emulation, "decode", lambda quantized: calls.append(1) or decode(quantized))
    ours = run()
    assert calls
    calls.clear()
    mm = torch.ops.aten.mm.default
    monkeypatch.setitem(_upstream.FLOAT8_OPS_TABLE, mm, emulation._torchao_matmul)
    assert all(torch.equal(a, b) for a, b in zip(ours, run(), strict=True))
    assert not calls


# dynamo instantiates the autograd functions it traces into
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_an_emulated_layer_compiles(recipe):
    # while a graph is traced there are no values to look up
    torch.manual_seed(0)
    layer, x = layer_factory(recipe, "none", True)(nn.Linear(64, 48)), torch.randn(4, 64)
    expected = layer(x)
    output = torch.compile(layer, backend="aot_eager")(x)
    output.sum().backward()
    assert torch.equal(output, expected)
    assert layer.weight.grad.isfinite().all()
