"""The FP8 checkpoint: its bytes are what the trainer's layers multiply by, and it is complete or not there."""

import json

import pytest
import torch
from builders import build_model, build_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trl_fp8.export import export_fp8, main
from trl_fp8.float8 import RECIPES, engine_weights
from trl_fp8.float8.blockwise import dequantized_blocks


@pytest.fixture
def checkpoint(tmp_path):
    build_model(tie_word_embeddings=False).save_pretrained(tmp_path / "plain")
    build_tokenizer().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def read(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
    return tensors


def dequantized(weight, scale, recipe):
    if recipe == "blockwise":
        rows, columns = weight.shape
        scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return weight.float() * scale


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_converted_layer_is_in_fp8_and_the_rest_in_bf16(recipe, checkpoint, tmp_path):
    assert export_fp8(checkpoint, tmp_path / "fp8", recipe) == 14
    plain, exported = read(checkpoint), read(tmp_path / "fp8")
    scales = {name for name in exported if name.endswith("_scale")}
    assert set(exported) - scales == set(plain)
    assert len(scales) == 14
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    for name, tensor in plain.items():
        scale = exported.get(name + "_scale")
        if scale is None:
            assert torch.equal(exported[name], tensor.to(torch.bfloat16))
        else:
            assert exported[name].dtype == torch.float8_e4m3fn
            assert scale.dtype == torch.float32
            error = dequantized(exported[name], scale, recipe) - tensor.to(torch.bfloat16).float()
            # half a step of e4m3 (2^-4 relative) where a value is normal, half the smallest step elsewhere
            assert bool((error.abs() <= tensor.abs() * 2**-4 + scale.max() * 2**-10 + 1e-7).all())
    assert (tmp_path / "fp8" / "tokenizer.json").exists()
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(exported)


def test_a_row_by_hand():
    weight = torch.tensor([[448.0, 1.0, -0.5], [2.0, -7.0, 0.0]], dtype=torch.bfloat16)
    values, scale = engine_weights.per_channel(weight)
    assert scale.tolist() == [[1.0], [7.0 / 448]]
    # 2 / (7/448) = 128
    assert values.float().tolist() == [[448.0, 1.0, -0.5], [128.0, -448.0, 0.0]]


def test_parts_of_a_fused_layer_share_the_tensorwise_scale(checkpoint, tmp_path):
    export_fp8(checkpoint, tmp_path / "fp8", "tensorwise")
    plain, exported = read(checkpoint), read(tmp_path / "fp8")
    stem = "model.layers.1.self_attn"
    parts = [f"{stem}.{part}_proj.weight" for part in "qkv"]
    largest = max(plain[name].to(torch.bfloat16).abs().max().item() for name in parts)
    assert [exported[name + "_scale"].item() for name in parts] == pytest.approx([largest / 448] * 3, rel=1e-7)
    assert len({plain[name].abs().max().item() for name in parts}) == 3


def test_blockwise_bytes_are_those_of_the_training_layer():
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    values, scale = engine_weights.per_block(weight)
    assert scale.shape == (2, 3)
    ours = dequantized_blocks(weight)
    close = (dequantized(values, scale, "blockwise") - ours).abs() <= ours.abs() * 2**-3 * 1.01
    assert bool(close.all())
    # the two round once more or less; a value on the border between two FP8 numbers may fall on the other side
    equal = torch.isclose(dequantized(values, scale, "blockwise"), ours, rtol=1e-6)
    assert equal.float().mean() > 0.999


def test_rowwise_values_are_those_of_the_training_layer():
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    trained = hp_tensor_to_float8_dynamic(
        weight, torch.float8_e4m3fn, LinearMMConfig(), scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1
    )
    values, scale = engine_weights.per_channel(weight)
    assert torch.allclose((1 / trained._scale.double()).float(), scale, rtol=2**-23, atol=0)  # one rounding apart
    share = (trained._data.float() == values.float()).float().mean().item()
    assert share > 0.999  # a value on the border between two FP8 numbers may fall on the other side


def test_the_plain_checkpoint_loads_without_this_package(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}


def test_a_failed_export_leaves_nothing_that_looks_whole(checkpoint, tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("trl_fp8.export.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        export_fp8(checkpoint, tmp_path / "fp8")
    assert not (tmp_path / "fp8").exists()


def test_what_cannot_be_exported_is_refused_with_what_to_do(checkpoint, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="Name a new one"):
        export_fp8(checkpoint, tmp_path / "there")
    with pytest.raises(ValueError, match="Use one of"):
        export_fp8(checkpoint, tmp_path / "fp8", "none")
    with pytest.raises(ValueError, match=r"trainer\.save_model"):
        export_fp8(tmp_path, tmp_path / "fp8")
    export_fp8(checkpoint, tmp_path / "fp8")
    with pytest.raises(ValueError, match="quantised already"):
        export_fp8(tmp_path / "fp8", tmp_path / "again")
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="merge_and_unload"):
        export_fp8(checkpoint, tmp_path / "adapter")


def rewrite(checkpoint, change):
    """The checkpoint with other weights."""
    (file,) = checkpoint.glob("*.safetensors")
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {k: v for k, v in w.items() if "layers.1.mlp" not in k}, "lacks 3 of the .*layers.1.mlp.down_proj"),
        (lambda w: {f"_orig_mod.{k}": v for k, v in w.items()}, "the names are those of a wrapped model"),
        (lambda w: {k: v * float("nan") if "o_proj" in k else v for k, v in w.items()}, "o_proj.weight .* holds NaN"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(checkpoint, tmp_path, change, message):
    rewrite(checkpoint, change)
    with pytest.raises(ValueError, match=message):
        export_fp8(checkpoint, tmp_path / "fp8")
    assert not (tmp_path / "fp8").exists()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_layer_of_zeros_stays_zeros(checkpoint, tmp_path, recipe):
    rewrite(checkpoint, lambda w: {k: v * 0 if "layers.0.self_attn" in k else v for k, v in w.items()})
    export_fp8(checkpoint, tmp_path / "fp8", recipe)
    exported = read(tmp_path / "fp8")
    name = "model.layers.0.self_attn.o_proj.weight"
    assert not dequantized(exported[name], exported[f"{name}_scale"], recipe).any()
    assert torch.isfinite(exported[f"{name}_scale"]).all()


def test_half_a_checkpoint_is_refused(checkpoint, tmp_path, capsys):
    (checkpoint / "incomplete").touch()
    with pytest.raises(ValueError, match="only half written .*Export another"):
        export_fp8(checkpoint, tmp_path / "fp8")
    (checkpoint / "incomplete").unlink()
    (file,) = checkpoint.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SystemExit):  # the command says it without a traceback
        main([str(checkpoint), str(tmp_path / "fp8")])
    assert "damaged or cut short. Copy it again" in capsys.readouterr().err


def test_another_recipe_than_the_runs_is_refused(checkpoint, tmp_path):
    settings = {"settings": {"fp8_recipe": "rowwise_with_gw_hp"}}
    record = {"stateful_callbacks": {"RunRecord": {"attributes": settings}}}
    (checkpoint / "trainer_state.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="whose run trained with 'rowwise_with_gw_hp'.* Pass 'rowwise_with_gw_hp'"):
        export_fp8(checkpoint, tmp_path / "fp8", "tensorwise")
    export_fp8(checkpoint, tmp_path / "fp8", "rowwise")  # the same bytes


def test_a_model_of_another_kind_is_refused(tmp_path):
    from transformers import CLIPConfig

    CLIPConfig().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="holds a clip, which is not a text model"):
        export_fp8(tmp_path, tmp_path / "fp8")


def test_the_command_says_what_it_wrote(checkpoint, tmp_path):
    said = []
    main([str(checkpoint), str(tmp_path / "fp8"), "--fp8_exclude_modules", "q_proj", "k_proj", "v_proj"], said.append)
    assert said[0].startswith("8 layers in FP8 (rowwise)")
    ignored = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["ignore"]
    assert len(ignored) == 7
