"""Adapters merged into copies: what PEFT merges, and the policy keeps every bit."""

import copy

import pytest
import torch
from builders import build_model, build_moe
from torch import nn

from trl_fp8.rollout import _upstream, adapters


def lora_model(dtype: torch.dtype) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(dtype)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["0"], init_lora_weights=False))


def test_merged_copies_leave_every_bit_of_the_base():
    model = lora_model(torch.bfloat16)
    layer = model.base_model.model[0]
    objects = dict(model.named_parameters())
    base = {name: parameter.clone() for name, parameter in objects.items()}
    with adapters.merging_into_copies(model):
        model.merge_adapter()
        merged = dict(model.named_parameters())
        model.unmerge_adapter()
        assert dict(model.named_parameters()) == objects
    weight = "base_model.model.0.base_layer.weight"
    sum_of_both = base[weight] + layer.get_delta_weight("default")  # float32
    assert torch.equal(merged[weight], sum_of_both.to(torch.bfloat16))
    assert all(torch.equal(merged[name], value) for name, value in base.items() if name != weight)
    assert not any(tensor.requires_grad for name, tensor in merged.items() if "base_layer" in name)
    assert dict(model.named_parameters()) == objects  # the very same ones
    assert all(torch.equal(parameter, base[name]) for name, parameter in objects.items())
    assert not layer.merged
    # What TRL does instead, in place
    layer.merge()
    layer.unmerge()
    assert not torch.equal(layer.base_layer.weight, base[weight])


def peft_configs() -> dict:
    import peft

    targets = {"target_modules": ["q_proj", "down_proj"]}
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return {
        "lora": peft.LoraConfig(r=4, init_lora_weights=False, bias="all", **targets),
        "dora": peft.LoraConfig(r=4, init_lora_weights=False, use_dora=True, **targets),
        "lora of experts, two wrappers": peft.LoraConfig(
            r=4, init_lora_weights=False, target_modules=["q_proj"], target_parameters=experts
        ),
        "ia3": peft.IA3Config(feedforward_modules=["down_proj"], init_ia3_weights=False, **targets),
        "oft": peft.OFTConfig(r=0, oft_block_size=8, init_weights=False, **targets),
        "norms, swapped by merging": peft.LNTuningConfig(target_modules=["input_layernorm"]),
    }


@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # PEFT of the norms that LNTuning is made for
@pytest.mark.parametrize("before", ["apart", "merged"])
@pytest.mark.parametrize("kind", peft_configs())
def test_merged_copies_are_what_peft_merges(kind, before):
    from peft import get_peft_model

    model = get_peft_model(build_moe() if "experts" in kind else build_model(), peft_configs()[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    expected = copy.deepcopy(model)
    expected.merge_adapter()
    expected = dict(expected.named_parameters())
    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert any(not torch.equal(expected[name], value) for name, value in start.items())
    if before == "merged":
        model.merge_adapter()
    flags = [layer.merged for _, layer in _upstream.tuner_layers(model)]
    objects = dict(model.named_parameters())
    values = {name: parameter.clone() for name, parameter in objects.items()}
    with adapters.merging_into_copies(model):
        model.merge_adapter()
        for name, tensor in model.named_parameters():
            assert model.prefix in name or torch.equal(tensor, expected[name]), name
        model.unmerge_adapter()
    assert dict(model.named_parameters()) == objects
    assert all(torch.equal(parameter, values[name]) for name, parameter in objects.items())
    assert [layer.merged for _, layer in _upstream.tuner_layers(model)] == flags


def test_hooks_are_not_copied_with_a_layer():
    """Those of ZeRO hold its engine, which would be copied with them."""
    model = lora_model(torch.float32)
    layer = model.base_model.model[0]
    calls = []
    handle = layer.base_layer.register_forward_hook(lambda *args: calls.append(args))
    copied = adapters._merged_copy(layer)
    copied(torch.ones(1, 16))
    assert calls == []
    layer(torch.ones(1, 16))
    assert len(calls) == 1
    handle.remove()


def test_what_is_gathered_before_merging_is_the_parameters():
    model = lora_model(torch.float32)
    with adapters.merging_into_copies(model):  # ZeRO-3 gathers `model.parameters()`, then TRL merges
        assert list(map(id, model.parameters())) == [id(p) for p in nn.Module.parameters(model)]


def test_merging_into_copies_ends_after_an_exception():
    model = lora_model(torch.float32)

    def fails():
        with adapters.merging_into_copies(model):
            model.merge_adapter()
            assert not model.base_model.model[0].merged
            raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"):
        fails()
    assert not {"merge_adapter", "unmerge_adapter", "named_parameters"} & vars(model).keys()
    model.merge_adapter()
    assert model.base_model.model[0].merged
