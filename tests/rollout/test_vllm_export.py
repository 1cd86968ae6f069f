"""vLLM loads the exported FP8 checkpoint and scores as the rollout engine did that quantised the same weights."""

import pytest
import torch
from vllm_helpers import ENGINE_KWARGS, build_policy, keep_alive, save_policy, score, start_engine

from trl_fp8.export import export_fp8


pytestmark = pytest.mark.vllm


def load(path):
    from vllm import LLM

    return keep_alive(LLM(str(path), gpu_memory_utilization=0.1, max_model_len=64, max_num_seqs=8, **ENGINE_KWARGS))


def test_the_export_scores_as_the_rollout_bit_for_bit(tmp_path):
    model = build_policy(tie_word_embeddings=False)
    plain = save_policy(model, tmp_path / "plain", torch.float32)
    rollout = start_engine(model, tmp_path, fp8_recipe="rowwise", vllm_quantization="fp8_per_channel")
    expected = score(rollout.llm)
    export_fp8(plain, tmp_path / "fp8", "rowwise")
    exported = load(tmp_path / "fp8")
    assert torch.equal(score(exported), expected)
    # and FP8 it is: the same weights in BF16 score otherwise
    unquantised = score(load(save_policy(model, tmp_path / "bf16")))
    assert (unquantised - expected).abs().max() > 1e-3


def test_excluded_layers_are_bf16_in_both(tmp_path):
    model = build_policy(tie_word_embeddings=False)
    plain = save_policy(model, tmp_path / "plain", torch.float32)
    export_fp8(plain, tmp_path / "fp8", "rowwise", exclude=["model.layers.0.*"])
    kinds = load(tmp_path / "fp8").apply_model(layer_kinds)[0]
    assert {name for name, quantised in kinds.items() if quantised} == {
        f"model.layers.1.{name}"
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }


def has_weight(module):
    return isinstance(getattr(module, "weight", None), torch.Tensor)


def layer_kinds(model):
    return {name: module.weight.dtype.itemsize == 1 for name, module in model.named_modules() if has_weight(module)}
