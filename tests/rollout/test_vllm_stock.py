"""Every quantisation a CPU runs: TRL's own sync, one parameter at a time, fails; ours equals a fresh engine."""

import json

import pytest
import torch


pytest.importorskip("vllm")

from vllm_helpers import build_policy, fp8_per_tensor_on_cpu, save_policy, score, start_engine

from trl_fp8.rollout import _upstream


pytestmark = pytest.mark.vllm


def torchao_settings(granularity: str) -> dict:
    from torchao.core.config import config_to_dict
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor

    config = Float8DynamicActivationFloat8WeightConfig(granularity={"row": PerRow, "tensor": PerTensor}[granularity]())
    overrides = {"quantization_config_dict_json": json.dumps(config_to_dict(config))}
    return {"vllm_quantization": "torchao", "vllm_engine_kwargs": {"hf_overrides": overrides}}


@pytest.fixture
def torchao_on_cpu(monkeypatch):
    """Two hardware gates are opened; the arithmetic is torchao's own."""
    import torchao.quantization.quant_api
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "supports_fp8", classmethod(lambda cls: True))
    monkeypatch.setattr(torchao.quantization.quant_api, "_check_hardware_support", lambda granularity: None)


# What TRL's loop does to each: raises at the first parameter of a fused layer, or goes through and leaves garbage
STOCK = {
    "none": AttributeError,  # where vLLM packs BF16 weights for oneDNN: CPUs with AVX-512
    "fp8": AssertionError,
    "fp8_per_tensor": AssertionError,
    "fp8_per_channel": AssertionError,
    "torchao_row": None,
    "torchao_tensor": None,
}


@pytest.mark.parametrize("quantization", STOCK)
def test_trls_sync_fails_and_ours_is_exact(quantization, tmp_path, monkeypatch, torchao_on_cpu):
    fp8_per_tensor_on_cpu(monkeypatch)
    name, _, granularity = quantization.partition("_")
    settings = torchao_settings(granularity) if name == "torchao" else {"vllm_quantization": quantization}
    start, new = build_policy(), build_policy(seed=1)
    save_policy(start, tmp_path / "start")
    save_policy(new, tmp_path / "new")
    ours, stock = (start_engine(start, tmp_path, **settings) for _ in range(2))
    before = score(ours.llm)
    expected = score(start_engine(new, tmp_path, **settings).llm)
    assert (expected - before).abs().mean() > 0.3

    start.load_state_dict(new.state_dict())
    ours.sync_weights()
    assert torch.equal(score(ours.llm), expected)
    ours.sync_weights()
    assert torch.equal(score(ours.llm), expected)

    if quantization == "none" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM leaves BF16 weights alone on this CPU, and TRL's sync works")
    if STOCK[quantization] is None:
        _upstream.VLLMGeneration.sync_weights(stock)
        garbage = score(stock.llm)
        assert garbage.isnan().any() or (garbage - expected).abs().mean() > 0.3
    else:
        with pytest.raises(STOCK[quantization]):
            _upstream.VLLMGeneration.sync_weights(stock)
