"""The records of recipes: what they say, and that nothing but a record is needed for another one."""

import dataclasses
import json
from typing import get_args, get_type_hints

import pytest
import torch
from builders import build_model, build_tokenizer
from torch import nn

from trl_fp8 import FP8GRPOConfig
from trl_fp8.checks import padding_for_kernels
from trl_fp8.export import export_fp8
from trl_fp8.float8 import RECIPES, convert_model
from trl_fp8.float8.linear import SwitchableLinear
from trl_fp8.rollout.pairing import pair_warning


def test_the_config_offers_every_recipe_and_no_other():
    assert set(get_args(get_type_hints(FP8GRPOConfig)["fp8_recipe"])) == {"none", *RECIPES}


@pytest.mark.parametrize(
    ("recipe", "capability", "features", "tokens", "bf16_only", "rounds", "one_scale", "recomputes"),
    [
        ("tensorwise", (8, 9), 16, 16, False, False, True, True),
        ("rowwise", (9, 0), 16, 16, True, True, False, False),
        ("rowwise_with_gw_hp", (9, 0), 16, None, True, True, False, False),
        ("blockwise", (9, 0), 1, None, True, True, False, False),
    ],
)
def test_what_is_known_of_a_recipe(recipe, capability, features, tokens, bf16_only, rounds, one_scale, recomputes):
    record = RECIPES[recipe]
    assert record.name == recipe
    assert (record.min_capability, record.feature_multiple, record.token_multiple) == (capability, features, tokens)
    assert (record.writes_bf16_only, record.takes_scale_rounding) == (bf16_only, rounds)
    assert (record.one_weight_scale, record.recomputes_compiled) == (one_scale, recomputes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_multiple_of_features_is_enough_and_less_is_kept(recipe):
    multiple = RECIPES[recipe].feature_multiple
    model = nn.Sequential(nn.Linear(3 * multiple, 5 * multiple), nn.Linear(16, 8))
    report = convert_model(model, recipe)
    assert report.converted[0] == "0"
    assert ("1" in report.kept) == (multiple == 16)


@pytest.mark.parametrize(
    ("recipe", "asked", "automatic", "expected"),
    [
        ("rowwise", None, True, 16),
        ("rowwise", 32, False, 32),
        ("rowwise_with_gw_hp", None, True, None),
        ("blockwise", 3, False, 3),
    ],
)
def test_padding_follows_the_tokens_that_kernels_take(recipe, asked, automatic, expected):
    assert padding_for_kernels(recipe, True, asked, automatic) == expected


@pytest.mark.parametrize("asked", [None, 8, 24])
def test_padding_that_kernels_cannot_take_is_refused(asked):
    with pytest.raises(ValueError, match=f"pad_to_multiple_of={asked} lets.*needs a multiple of 16"):
        padding_for_kernels("tensorwise", False, asked, False)


def test_only_tensorwise_kernels_write_what_is_not_bf16():
    refused = []
    for recipe in RECIPES:
        try:
            padding_for_kernels(recipe, False, 16, False)
        except ValueError as error:
            assert str(error).startswith(f"bf16=False with fp8_recipe={recipe!r}")  # noqa: PT017
            refused.append(recipe)
    assert "tensorwise" not in refused
    assert {"rowwise", "rowwise_with_gw_hp", "blockwise"} <= set(refused)


def test_another_recipe_is_a_record(tmp_path, monkeypatch):
    """It converts, finds its engine, and is exported by what its record says."""
    scheme = {"strategy": "dummy"}
    build = RECIPES["blockwise"].build
    dummy = dataclasses.replace(RECIPES["rowwise"], name="dummy", build=build, weight_scheme=scheme)
    monkeypatch.setitem(RECIPES, "dummy", dummy)
    model = nn.Sequential(nn.Linear(32, 16))
    assert convert_model(model, "dummy").converted == ("0",)
    assert isinstance(model[0], SwitchableLinear)
    assert model[0](torch.ones(2, 32)).shape == (2, 16)
    assert "different granularity (fp8_per_channel is the pair)" in pair_warning("dummy", "none", "fp8_per_tensor")
    build_model(tie_word_embeddings=False).save_pretrained(tmp_path / "plain")
    build_tokenizer().save_pretrained(tmp_path / "plain")
    assert export_fp8(tmp_path / "plain", tmp_path / "fp8", "dummy") == 14
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] == "dummy"


def test_an_unknown_recipe_is_refused_with_those_there_are(tiny_model):
    with pytest.raises(ValueError, match="'nonsense' is not a recipe.*'tensorwise': one scale per tensor"):
        convert_model(tiny_model, "nonsense")
