"""Conversion: what is swapped, what is kept and why, numerics per recipe, and the BF16 shadow switch."""

import contextlib
import copy

import pytest
import torch
from builders import RECIPES, TORCHAO_RECIPES, VOCABULARY, build_model
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trl_fp8.float8 import convert_model, high_precision, layer_factory
from trl_fp8.float8.device import resolve_emulation
from trl_fp8.float8.linear import SwitchableLinear
from trl_fp8.float8.recipes import float8_config


def autocast(enabled: bool):
    return torch.autocast("cpu", dtype=torch.bfloat16) if enabled else contextlib.nullcontext()


def sqnr(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Signal-to-quantisation-noise ratio in dB."""
    return (20 * torch.log10(reference.norm() / (reference - value).norm())).item()


# -- what is converted


def test_conversion_takes_every_linear_but_the_tied_output_embedding(tiny_model):
    parameters = dict(tiny_model.named_parameters())
    report = convert_model(tiny_model, "rowwise")
    assert len(report.converted) == 14  # 2 layers x (q k v o, gate up down)
    assert report.kept == {"lm_head": "output embedding"}
    assert all(isinstance(tiny_model.get_submodule(name), SwitchableLinear) for name in report.converted)
    after = dict(tiny_model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameters[name] for name in parameters)
    assert "14/15 linear layers train in FP8 (rowwise)" in str(report)


def test_output_embedding_is_recognised_by_identity_whatever_its_name():
    model = build_model(tie_word_embeddings=False)
    head = model.lm_head
    del model.lm_head
    model.score_out = head
    model.get_output_embeddings = lambda: head
    report = convert_model(model, "tensorwise")
    assert report.kept == {"score_out": "output embedding"}


@pytest.mark.parametrize(
    ("pattern", "num_kept"),
    [("q_proj", 2), ("model.layers.0.*", 7), ("layers.1.mlp.up_proj", 1), ("self_attn.*", 8), ("*_proj", 14)],
)
def test_exclude_patterns_match_full_names_or_dotted_suffixes(tiny_model, pattern, num_kept):
    if num_kept == 14:
        with pytest.raises(ValueError, match="converts no layer.*14 kept: excluded by the user.*fp8_exclude_modules"):
            convert_model(tiny_model, "rowwise", exclude=[pattern])
        return
    report = convert_model(tiny_model, "rowwise", exclude=[pattern])
    assert sum(reason == "excluded by the user" for reason in report.kept.values()) == num_kept


def test_a_pattern_never_swallows_a_sibling():
    model = build_model()
    model.model.layers[0].mlp.gate = nn.Linear(64, 16, bias=False)
    report = convert_model(model, "rowwise", exclude=["mlp.gate"])
    assert report.kept["model.layers.0.mlp.gate"] == "excluded by the user"
    assert "model.layers.0.mlp.gate_proj" in report.converted


@pytest.mark.parametrize("pattern", ["q_pro", "layers.7.*", "lm_hea", ""])
def test_a_pattern_that_matches_nothing_is_an_error(tiny_model, pattern):
    with pytest.raises(ValueError, match="matches no linear layer.*dotted suffix"):
        convert_model(tiny_model, "rowwise", exclude=[pattern])


def test_a_pattern_that_names_a_container_is_told_what_to_write(tiny_model):
    with pytest.raises(ValueError, match=r"write 'layers\.0\.\*'"):
        convert_model(tiny_model, "rowwise", exclude=["layers.0"])


def test_shapes_kernels_cannot_take_are_kept():
    report = convert_model(build_model(intermediate_size=120), "rowwise")
    kept = [name for name, reason in report.kept.items() if reason == "shape not divisible by 16"]
    assert len(kept) == 6
    assert all("mlp" in name for name in kept)


def test_a_model_without_convertible_layers_is_an_error():
    model = build_model(hidden_size=60, head_dim=10, intermediate_size=40)
    with pytest.raises(ValueError, match="converts no layer"):
        convert_model(model, "rowwise")
    with pytest.raises(ValueError, match="it has no linear layer"):
        convert_model(nn.Sequential(nn.Embedding(4, 16), nn.LayerNorm(16)), "rowwise")


def test_routers_are_kept_and_fused_experts_are_counted():
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config)
    model.model.layers[0].mlp.shared_expert_gate = nn.Linear(64, 16, bias=False)
    report = convert_model(model, "rowwise")
    assert report.kept["model.layers.0.mlp.shared_expert_gate"] == "router"
    assert not any("mlp" in name for name in report.converted)
    # per layer: gate_up (4, 2 * 32, 64) and down (4, 64, 32)
    assert report.num_fused_expert_parameters == 2 * (4 * 64 * 64 + 4 * 64 * 32)
    assert "49,152 parameters of fused experts" in str(report)


def test_adapter_layers_are_kept_and_their_base_is_converted(tiny_model):
    model = get_peft_model(tiny_model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    report = convert_model(model, "rowwise")
    assert sum(reason == "adapter" for reason in report.kept.values()) == 8
    assert sum(name.endswith("base_layer") for name in report.converted) == 4
    ids = torch.tensor([[3, 4, 5]])
    assert torch.isfinite(model(ids).logits).all()  # lora_B is 0: an amax of 0 must not divide


@pytest.mark.parametrize("name", ["router", "router_gate", "gate"])
def test_routers_of_other_names_and_inner_layers_are_kept(name):
    model = build_model()
    setattr(model.model.layers[0].mlp, name, nn.Sequential(nn.Linear(64, 16)))
    assert convert_model(model, "rowwise").kept[f"model.layers.0.mlp.{name}.0"] == "router"


def test_a_layer_of_several_names_and_a_model_that_is_one_are_refused(tiny_model):
    tiny_model.model.layers[1].mlp.up_proj = tiny_model.model.layers[0].mlp.up_proj
    with pytest.raises(ValueError, match="has several names"):
        convert_model(tiny_model, "rowwise")
    with pytest.raises(ValueError, match="is the model itself"):
        convert_model(nn.Linear(64, 64), "rowwise")


def test_converting_twice_is_refused(tiny_model):
    convert_model(tiny_model, "rowwise")
    with pytest.raises(ValueError, match="already has FP8 linear layers"):
        convert_model(tiny_model, "tensorwise")


def test_a_model_spread_over_devices_is_refused(tiny_model):
    tiny_model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(ValueError, match="spread over devices.*FSDP or DeepSpeed"):
        convert_model(tiny_model, "rowwise")


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "backward_hook", "accelerate", "forward"])
def test_a_hooked_linear_is_refused_and_nothing_is_swapped(tiny_model, kind):
    linear = tiny_model.model.layers[1].mlp.up_proj
    if kind == "accelerate":
        from accelerate.hooks import CpuOffload, add_hook_to_module

        add_hook_to_module(linear, CpuOffload("cpu"))
    elif kind == "forward":
        linear.forward = lambda x: x
    else:
        register = {
            "forward_hook": linear.register_forward_hook,
            "forward_pre_hook": linear.register_forward_pre_hook,
            "backward_hook": linear.register_full_backward_hook,
        }[kind]
        register(lambda *_: None)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj carries.*would lose"):
        convert_model(tiny_model, "rowwise")
    assert not any(isinstance(module, SwitchableLinear) for module in tiny_model.modules())


def test_training_mode_of_each_layer_survives(tiny_model):
    tiny_model.eval()
    tiny_model.model.layers[0].mlp.up_proj.train()
    convert_model(tiny_model, "rowwise")
    assert tiny_model.model.layers[0].mlp.up_proj.training
    assert not tiny_model.model.layers[0].mlp.down_proj.training


# -- recipes and kernels


@pytest.mark.parametrize("recipe", TORCHAO_RECIPES)
@pytest.mark.parametrize("rounding", ["none", "power_of_2"])
def test_emulation_keeps_the_recipe(recipe, rounding):
    from torchao.float8.config import Float8LinearConfig

    stock = Float8LinearConfig.from_recipe_name(recipe)
    ours = float8_config(recipe, rounding == "power_of_2", emulate=True)
    assert ours.emulate
    assert ours.round_scales_to_power_of_2 == (rounding == "power_of_2")
    for name in ("input", "weight", "grad_output", "input_for_grad_weight", "weight_for_grad_input"):
        assert getattr(ours, f"cast_config_{name}") == getattr(stock, f"cast_config_{name}")


def test_power_of_two_rounding_changes_the_scales():
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 32, bias=False), torch.randn(8, 64)
    outputs = [layer_factory("rowwise", rounding, True)(linear)(x) for rounding in ("none", "power_of_2")]
    assert not torch.equal(*outputs)
    assert sqnr(*outputs) > 20  # measured 26.3 dB


@pytest.mark.parametrize("recipe", TORCHAO_RECIPES)
def test_forward_equals_the_hand_written_quantisation(recipe):
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 32, bias=False), torch.randn(8, 64)
    layer = layer_factory(recipe, "none", True)(linear)

    def quantised(values: torch.Tensor) -> torch.Tensor:
        amax = values.abs().max() if recipe == "tensorwise" else values.abs().amax(dim=1, keepdim=True)
        scale = (448 / amax.double()).float()
        return (values * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale

    expected = quantised(x) @ quantised(linear.weight.detach()).t()
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layer_accuracy_in_db(recipe):
    torch.manual_seed(0)
    linear, x = nn.Linear(256, 256, bias=False), torch.randn(256, 256, requires_grad=True)
    layer = layer_factory(recipe, "none", True)(copy.deepcopy(linear))
    gradient = torch.randn(256, 256)
    reference = linear(x)
    ref_grads = torch.autograd.grad(reference, (x, linear.weight), gradient)
    output = layer(x)
    grads = torch.autograd.grad(output, (x, layer.weight), gradient)
    # measured: output 28.7 dB; gradients 24.6 dB (tensorwise, e5m2), 28.7 dB (rowwise), exact grad_W (gw_hp)
    assert sqnr(reference, output) > 27
    assert sqnr(ref_grads[0], grads[0]) > 23
    assert sqnr(ref_grads[1], grads[1]) > 23


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bf16", [False, True])
def test_both_operands_are_quantised_from_the_autocast_dtype(recipe, bf16):
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 32), torch.randn(8, 64)
    layer = layer_factory(recipe, "none", True)(linear)
    with autocast(bf16):
        output = layer(x)
    if bf16:
        rounded = layer_factory(recipe, "none", True)(copy.deepcopy(linear).to(torch.bfloat16))
        assert output.dtype == torch.bfloat16
        assert torch.equal(output, rounded(x.to(torch.bfloat16)))
    else:
        assert output.dtype == torch.float32


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bf16", [False, True])
def test_zero_rows_and_zero_weights_give_no_nan(recipe, bf16):
    linear = nn.Linear(64, 32)
    layer = layer_factory(recipe, "none", True)(linear)
    x = torch.randn(4, 64)
    x[1:3] = 0
    x.requires_grad_()
    with autocast(bf16):
        output = layer(x)
    output.float().sum().backward()
    assert torch.isfinite(output).all()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(layer.weight.grad).all()
    bias = linear.bias.to(output.dtype)
    assert torch.equal(output[1:3], bias.expand(2, -1))
    with torch.no_grad():
        layer.weight.zero_()
        assert torch.equal(layer(x.detach()), linear.bias.expand(4, -1))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bf16", [False, True])
def test_no_token_gives_no_output_and_zero_gradients(recipe, bf16):
    layer = layer_factory(recipe, "none", True)(nn.Linear(64, 32))
    x = torch.randn(2, 0, 64, requires_grad=True)
    with autocast(bf16):
        output = layer(x)
    assert output.shape == (2, 0, 32)
    output.float().sum().backward()
    assert x.grad.shape == x.shape
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_need_not_be_contiguous_nor_two_dimensional(recipe):
    torch.manual_seed(0)
    layer = layer_factory(recipe, "none", True)(nn.Linear(64, 32))
    for x in (
        torch.randn(3, 64, 5).transpose(1, 2),
        torch.randn(64, 4).t(),
        torch.randn(64),
        torch.randn(2, 3, 4, 64),
    ):
        view = x.detach().requires_grad_()
        plain = x.contiguous().detach().requires_grad_()
        outputs = [layer(each) for each in (view, plain)]
        assert torch.equal(*outputs)
        assert outputs[0].shape == (*x.shape[:-1], 32)
        gradient = torch.randn(outputs[0].transpose(0, -1).shape).transpose(0, -1)  # not contiguous either
        outputs[0].backward(gradient)
        outputs[1].backward(gradient.contiguous())
        assert torch.equal(view.grad, plain.grad)


def test_emulation_is_resolved_by_device(monkeypatch, caplog):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert resolve_emulation("rowwise", None, cpu)
    assert not caplog.records
    with pytest.raises(ValueError, match="fp8_emulate=False cannot run on a cpu device.*9.0.*emulate FP8"):
        resolve_emulation("rowwise", False, cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert not resolve_emulation("tensorwise", None, cuda)
    assert resolve_emulation("rowwise", None, cuda)
    assert "emulated, slower than BF16" in caplog.text
    assert resolve_emulation("tensorwise", True, cuda)
    with pytest.raises(ValueError, match="compute capability 8.9"):
        resolve_emulation("rowwise_with_gw_hp", False, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not resolve_emulation("rowwise", None, cuda)


# -- the shadow switch


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_shadow_is_bit_equal_to_the_unconverted_model(recipe, bf16, checkpointing, batch):
    model = build_model()
    unconverted = copy.deepcopy(model)
    convert_model(model, recipe)
    for each in (model, unconverted):
        each.train()
        if checkpointing:
            each.activation_checkpointing_enable()
    with autocast(bf16), torch.no_grad():
        expected = unconverted(**batch).logits
        fp8 = model(**batch).logits
        with high_precision(model):
            shadow = model(**batch).logits
        again = model(**batch).logits
    assert torch.equal(shadow, expected)
    assert not torch.equal(fp8, expected)
    assert torch.equal(again, fp8)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_shadow_pass_between_forward_and_backward_changes_no_gradient(recipe, bf16, checkpointing, batch):
    gradients = []
    for shadowed in (False, True):
        model = build_model()
        convert_model(model, recipe)
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable()
        state = torch.get_rng_state()
        with autocast(bf16):
            loss = model(**batch, labels=batch["input_ids"]).loss
        if shadowed:
            with autocast(bf16), torch.no_grad(), high_precision(model):
                model(**batch)
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(gradient is not None for gradient in gradients[0].values())
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_the_switch_restores_after_exceptions_and_when_nested(tiny_model):
    convert_model(tiny_model, "rowwise")
    layers = [module for module in tiny_model.modules() if isinstance(module, SwitchableLinear)]

    def fail_inside():
        with high_precision(tiny_model):
            assert all(layer.high_precision for layer in layers)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert not any(layer.high_precision for layer in layers)
    with high_precision(tiny_model):
        with high_precision(tiny_model):
            pass
        assert all(layer.high_precision for layer in layers)
    assert not any(layer.high_precision for layer in layers)


def test_the_switch_leaves_an_unconverted_model_alone(tiny_model, batch):
    with torch.no_grad(), high_precision(tiny_model):
        inside = tiny_model(**batch).logits
    with torch.no_grad():
        assert torch.equal(inside, tiny_model(**batch).logits)


@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_weights_are_plain_and_load_without_this_package(recipe, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    expected = {name: value.clone() for name, value in tiny_model.state_dict().items()}
    convert_model(tiny_model, recipe)
    tiny_model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(isinstance(module, SwitchableLinear) for module in loaded.modules())
    assert {type(p) for p in loaded.parameters()} == {nn.Parameter}
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in expected.items())


def test_a_model_in_pieces_of_zero3_is_converted_as_the_whole_one():
    """DeepSpeed leaves an empty tensor in the place of a parameter, with the shape of the whole beside it."""
    model = build_model(vocab_size=32, tie_word_embeddings=False)
    whole = convert_model(build_model(vocab_size=32, tie_word_embeddings=False), "rowwise")
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    report = convert_model(model, "rowwise")
    assert report.kept == whole.kept == {"lm_head": "output embedding"}
    assert report.converted == whole.converted


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_comes_out_of_a_layer_may_be_changed_in_place(recipe):
    """OLMo clamps q, k and v in place, AdaLoRA adds in place; autograd forbids both on a view made in a function."""
    layer = layer_factory(recipe, "none", True)(nn.Linear(32, 48, bias=False))
    x = torch.randn(2, 5, 32, requires_grad=True)
    layer(x).clamp_(-0.1, 0.1).sum().backward()
    assert x.grad is not None
