"""The policy beside the model its engine would start from: anything a weight sync could not carry over is found."""

import pytest
import torch
from builders import VOCABULARY, build_model, build_moe
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trl_fp8.rollout import same_model


# PEFT's own warning about what is refused here
pytestmark = pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True. and a tied layer is part")
HEAD = (len(VOCABULARY), 64)


def adapted(model, name="default", **settings):
    return get_peft_model(model, LoraConfig(r=2, **{"target_modules": ["q_proj"], **settings}), adapter_name=name)


@pytest.mark.parametrize(
    "policy",
    [
        build_model(),
        build_model(tie_word_embeddings=False),
        build_moe(),
        adapted(build_model()),
        adapted(build_model(), "other"),
        adapted(build_model(), target_modules="all-linear", modules_to_save=["q_norm"]),
        adapted(build_model(tie_word_embeddings=False), target_modules=["lm_head"]),
        adapted(build_model(tie_word_embeddings=False), modules_to_save=["embed_tokens", "lm_head"]),
        adapted(build_model(), modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ],
    ids=["tied", "untied", "moe", "lora", "lora_named", "lora_norms", "lora_head", "lora_embeddings", "lora_tied"],
)
def test_a_policy_is_the_model_of_its_checkpoint(policy):
    same_model.check_adapters(policy)
    assert same_model.difference(policy.config, policy) is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "phi3", "mistral", "qwen2", "olmo2"])
def test_a_policy_of_any_family_is_the_model_of_its_checkpoint(kind, tied, tmp_path):
    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=tied,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert same_model.difference(AutoConfig.from_pretrained(tmp_path), policy) is None


def without(layer):
    def change(model):
        parent, _, last = layer.rpartition(".")
        setattr(model.get_submodule(parent), last, nn.Identity())
        return model

    return change


def own_head(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def shared_head(model):
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def wider(model):
    model.model.layers[1].mlp.down_proj = nn.Linear(128, 64, bias=True)
    return model


def resized(model):
    model.resize_token_embeddings(model.config.vocab_size + 8)
    return model


def configured(**settings):
    """Another computation with the same parameters, which no weight sync would notice."""

    def change(model):
        model.config.update(settings)
        return model

    return change


UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("change", "overrides", "found"),
    [
        (
            without("model.layers.1.self_attn.o_proj"),
            {},
            ("model.layers.1.self_attn.o_proj.weight", (64, 64), "absent"),
        ),
        (without("model.norm"), {}, ("model.norm.weight", (64,), "absent")),
        (own_head, {}, ("lm_head.weight", "absent", HEAD)),
        (shared_head, UNTIED, ("lm_head.weight", HEAD, "absent")),
        (wider, {}, ("model.layers.1.mlp.down_proj.bias", "absent", (64,))),
        (resized, {}, ("vocab_size", len(VOCABULARY), len(VOCABULARY) + 8)),
        (lambda model: adapted(model, modules_to_save=["lm_head"]), {}, ("lm_head.weight", "absent", HEAD)),
        (
            lambda model: adapted(model, modules_to_save=["embed_tokens"]),
            {},
            ("list of tied weights", [["lm_head.weight", "model.embed_tokens.weight"]], []),
        ),
        (
            lambda model: adapted(model, "mine", modules_to_save=["q_norm"]),
            {},
            ("model.layers.0.self_attn.q_norm.weight", (16,), "absent"),
        ),
        (configured(rms_norm_eps=0.1), {}, ("rms_norm_eps", 1e-6, 0.1)),
        (configured(hidden_act="gelu"), {}, ("hidden_act", "silu", "gelu")),
        (
            configured(layer_types=["sliding_attention"] * 2),
            {},
            ("layer_types", ["full_attention"] * 2, ["sliding_attention"] * 2),
        ),
    ],
    ids=[
        "up_proj",
        "norm",
        "untied",
        "tied",
        "bias",
        "resized",
        "saved_head",
        "saved_embedding",
        "adapter_name",
        "eps",
        "activation",
        "attention",
    ],
)
def test_what_a_sync_could_not_carry_over_is_found(change, overrides, found):
    config = build_model(**overrides).config
    assert same_model.difference(config, change(build_model(**overrides))) == found


@pytest.mark.parametrize(
    "settings",
    [
        {"use_cache": False, "pad_token_id": 1, "dtype": torch.bfloat16, "architectures": ["Mine"]},
        {"attention_dropout": 0.1, "initializer_range": 0.1, "max_position_embeddings": 128, "_name_or_path": "x"},
    ],
)
def test_what_does_not_change_the_computation_is_not_another_model(settings):
    model = configured(**settings)(build_model())
    assert same_model.difference(build_model().config, model) is None


def test_tied_parameters_have_the_names_of_the_engine():
    assert same_model.tied_parameters(build_model(**UNTIED)) == []
    tied = [["lm_head.weight", "model.embed_tokens.weight"]]
    assert same_model.tied_parameters(build_model()) == tied
    assert same_model.tied_parameters(adapted(build_model())) == tied
    assert same_model.tied_parameters(adapted(build_model(), modules_to_save=["embed_tokens"])) == []
    with torch.device("meta"):
        assert same_model.tied_parameters(build_model()) == tied


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")  # PEFT says it, too, as a warning
def test_an_adapter_on_one_of_two_tied_layers_is_refused(target):
    policy = adapted(build_model(), target_modules=[target])
    with pytest.raises(ValueError, match=f"The adapter on (model.)?{target} changes one of two .* untie"):
        same_model.check_adapters(policy)


def test_nothing_is_built_or_changed(monkeypatch):
    """On the meta device: comparing must not cost the memory of a second model, nor touch the random generator."""
    policy = build_model()
    before = torch.random.get_rng_state()
    config = policy.config.to_dict()
    looked_at, parameters = [], same_model.engine_parameters

    def recorded(model):
        looked_at.append({parameter.device.type for parameter in model.parameters()})
        return parameters(model)

    monkeypatch.setattr(same_model, "engine_parameters", recorded)
    same_model.difference(policy.config, policy)
    assert looked_at == [{"meta"}, {"cpu"}]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert policy.config.to_dict() == config


def test_fused_experts_are_refused_on_a_cpu():
    with pytest.raises(
        ValueError, match=r"use_vllm=True on a CPU with fused experts .*experts.*Use a GPU, or set use_"
    ):
        same_model.check_experts(build_moe(), "cpu")
    same_model.check_experts(build_moe(), "cuda")
    same_model.check_experts(build_model(), "cpu")
