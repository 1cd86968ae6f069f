"""Reading FP8 by look-up: the same bits as torch's cast, in torchao's emulated matmuls too."""

import pytest
import torch
from torch import nn

from trl_fp8 import _upstream
from trl_fp8.float8 import convert_model, emulation, layer_factory


MATMUL = torch.ops.aten.mm.default


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
    monkeypatch.setitem(_upstream.FLOAT8_OPS_TABLE, MATMUL, _upstream._torchao_matmul)
    theirs = run()
    _upstream.decode_emulated_matmuls_by(lambda quantized: calls.append(1) or emulation.decode(quantized))
    assert all(torch.equal(a, b) for a, b in zip(run(), theirs, strict=True))
    assert calls


def test_torchaos_table_is_changed_by_a_conversion_that_emulates_on_a_cpu_and_by_nothing_else(tiny_model, monkeypatch):
    monkeypatch.setitem(_upstream.FLOAT8_OPS_TABLE, MATMUL, _upstream._torchao_matmul)
    layer_factory("rowwise", "none", True)(nn.Linear(96, 64))
    with torch.device("meta"):
        convert_model(nn.Sequential(nn.Linear(32, 32)), "rowwise")
    convert_model(nn.Sequential(nn.Linear(32, 32)), "rowwise", emulate=False)
    assert _upstream.FLOAT8_OPS_TABLE[MATMUL] is _upstream._torchao_matmul
    convert_model(tiny_model, "rowwise")
    assert _upstream.FLOAT8_OPS_TABLE[MATMUL] is not _upstream._torchao_matmul


def test_what_is_not_emulated_stays_torchaos(monkeypatch):
    """Also after the table was changed twice: a wrapper around a wrapper would decode by both."""
    calls = {"first": 0, "second": 0}

    def counting(name):
        def decode(quantized):
            calls[name] += 1
            return quantized.float()

        return decode

    monkeypatch.setitem(_upstream.FLOAT8_OPS_TABLE, MATMUL, _upstream._torchao_matmul)
    _upstream.decode_emulated_matmuls_by(counting("first"))
    _upstream.decode_emulated_matmuls_by(counting("second"))
    layer_factory("rowwise", "none", True)(nn.Linear(32, 16))(torch.randn(4, 32))
    assert calls == {"first": 0, "second": 2}
    layer_factory("tensorwise", "none", False)(nn.Linear(32, 16, dtype=torch.bfloat16))(
        torch.randn(16, 32, dtype=torch.bfloat16)
    )
    assert calls == {"first": 0, "second": 2}


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
