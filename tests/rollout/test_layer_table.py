"""Layers of trainer and engine side by side: names to ignore, what is on one side only, and what is refused."""

import pytest
from builders import build_model

from trl_fp8.float8 import ConversionReport, convert_model
from trl_fp8.rollout.layer_table import FUSED, build_layer_table, check_one_sided, engine_name, ignored_by_engine


def report(converted, kept) -> ConversionReport:
    return ConversionReport("rowwise", True, tuple(converted), kept)


def test_names_of_a_peft_model_are_the_engines():
    assert engine_name("base_model.model.model.layers.3.mlp.down_proj.base_layer") == "model.layers.3.mlp.down_proj"
    assert engine_name("model.layers.3.mlp.down_proj") == "model.layers.3.mlp.down_proj"


def test_what_a_real_conversion_keeps_is_ignored_but_for_the_head():
    model = build_model(tie_word_embeddings=False)
    converted = convert_model(model, "rowwise", exclude=["layers.0.mlp.*"])
    assert converted.kept["lm_head"] == "output embedding"
    assert ignored_by_engine(converted) == [f"model.layers.0.mlp.{name}_proj" for name in ("down", "gate", "up")]


def test_layers_vllm_does_not_have_are_not_ignored():
    kept = {"base_model.model.m.o_proj.lora_A.default": "adapter", "base_model.model.m.o_proj.base_layer": "router"}
    assert ignored_by_engine(report(["base_model.model.m.q_proj.base_layer"], kept)) == ["m.o_proj"]
    assert ignored_by_engine(None) == []


@pytest.mark.parametrize(("kept", "others"), [("k_proj", "q_proj, v_proj"), ("gate_proj", "up_proj")])
def test_a_fused_layer_in_fp8_in_part_is_refused(kept, others):
    names = {"m.q_proj", "m.k_proj", "m.v_proj", "m.gate_proj", "m.up_proj"} - {f"m.{kept}"}
    with pytest.raises(ValueError, match=rf"m.{kept} trains in high precision \(x\) and {others} beside it in FP8"):
        ignored_by_engine(report(sorted(names), {f"m.{kept}": "x"}))


LAYERS = {"m.0.qkv_proj": "Fp8", "m.0.down_proj": "Fp8", "m.1.down_proj": "Fp8", "lm_head": None}
CONVERTED = ["m.0.q_proj", "m.0.k_proj", "m.0.v_proj", "m.0.down_proj", "m.1.down_proj"]


def test_equal_sides_have_nothing_one_sided():
    table = build_layer_table(report(CONVERTED, {"lm_head": "output embedding"}), "none", LAYERS, FUSED)
    assert table.one_sided == []
    assert check_one_sided(table, "rowwise", "fp8_per_channel", asked_for=False) is None
    assert str(table).splitlines() == [
        "layers of the engine: trainer | vLLM",
        "     1 m.qkv_proj: rowwise, FP32 scales | Fp8",
        "     2 m.down_proj: rowwise, FP32 scales | Fp8",
        "     1 lm_head: high precision | high precision",
    ]


@pytest.mark.parametrize(
    ("layers", "converted", "one_sided"),
    [
        ({**LAYERS, "lm_head": "Fp8"}, CONVERTED, ["lm_head"]),
        ({**LAYERS, "m.1.experts": "Fp8MoE"}, CONVERTED, ["m.1.experts"]),
        ({**LAYERS, "m.0.qkv_proj": None}, CONVERTED, ["m.0.qkv_proj"]),
        (LAYERS, CONVERTED[:-1], ["m.1.down_proj"]),
    ],
)
def test_a_layer_on_one_side_only_is_refused_unless_asked_for(layers, converted, one_sided):
    table = build_layer_table(report(converted, {}), "power_of_2", layers, FUSED)
    assert table.one_sided == one_sided
    assert str(table).count("<- one side only") == 1
    with pytest.raises(ValueError, match=rf"1 layers are quantised on one side only .*\({one_sided[0]}\).*ignore"):
        check_one_sided(table, "rowwise", "fp8_per_channel", asked_for=False)
    assert one_sided[0] in check_one_sided(table, "rowwise", "fp8_per_channel", asked_for=True)


@pytest.mark.parametrize(("recipe", "quantization"), [("none", "fp8"), ("rowwise", "none")])
def test_one_side_in_high_precision_as_a_whole_is_what_was_asked_for(recipe, quantization):
    layers = LAYERS if quantization == "fp8" else dict.fromkeys(LAYERS)
    conversion = report(CONVERTED, {}) if recipe == "rowwise" else None
    assert (
        check_one_sided(build_layer_table(conversion, "none", layers, FUSED), recipe, quantization, asked_for=False)
        is None
    )


def test_an_engine_that_quantises_nothing_is_refused():
    table = build_layer_table(report(CONVERTED, {}), "none", dict.fromkeys(LAYERS), FUSED)
    with pytest.raises(ValueError, match="'nvfp4_per_token' quantises no layer"):
        check_one_sided(table, "rowwise", "nvfp4_per_token", asked_for=True)
