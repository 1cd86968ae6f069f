"""Pairs of training recipe and rollout quantisation: which are equal, and what the warning of the others says."""

import re

import pytest

from trl_fp8 import FP8GRPOConfig
from trl_fp8.config_checks import VLLM_QUANTIZATIONS
from trl_fp8.float8 import RECIPES
from trl_fp8.rollout.pairing import (
    LONG_RESPONSE,
    pair_warning,
    rollout_warnings,
    scale_rule_warning,
)


def resolved(tmp_path, **settings):
    args = [FP8GRPOConfig(str(tmp_path), fp8_recipe=name, use_cpu=True, **settings) for name in ("none", *RECIPES)]
    return [arg.rollout_quantization for arg in args]


def test_every_recipe_has_a_pair_that_the_config_accepts(tmp_path):
    expected = ["none", "fp8_per_tensor", "fp8_per_channel", "fp8_per_channel", "fp8_per_block"]
    assert resolved(tmp_path, use_vllm=True) == expected
    assert set(expected) <= set(VLLM_QUANTIZATIONS)
    assert resolved(tmp_path, use_vllm=True, vllm_quantization="fp8") == ["fp8"] * 5
    assert resolved(tmp_path) == ["none"] * 5


@pytest.mark.parametrize(
    ("recipe", "rounding", "quantization"),
    [
        ("none", "none", "none"),
        ("rowwise", "none", "fp8_per_channel"),
        ("rowwise_with_gw_hp", "none", "fp8_per_channel"),
        ("blockwise", "none", "fp8_per_block"),
        ("blockwise", "power_of_2", "fp8_per_block"),
    ],
)
def test_an_equal_pair_does_not_warn(recipe, rounding, quantization):
    assert pair_warning(recipe, rounding, quantization) is None


@pytest.mark.parametrize(
    ("recipe", "rounding", "quantization", "reason"),
    [
        ("none", "none", "fp8_per_channel", "the engine quantises and the trainer does not"),
        ("rowwise", "none", "none", "the trainer quantises and the engine does not"),
        ("rowwise", "none", "fp8_per_tensor", "different granularity (fp8_per_channel is the pair)"),
        ("rowwise_with_gw_hp", "none", "fp8_per_tensor", "different granularity"),
        ("rowwise", "power_of_2", "fp8_per_channel", "powers of two"),
        ("tensorwise", "none", "fp8_per_tensor", "q, k and v"),
        ("tensorwise", "power_of_2", "fp8", "q, k and v"),
        ("tensorwise", "none", "fp8_per_channel", "different granularity"),
        ("blockwise", "power_of_2", "fp8_per_channel", "different granularity"),
        ("blockwise", "none", "fp8_per_channel", "different granularity"),
        ("rowwise", "none", "mxfp8", "different granularity"),
    ],
)
def test_an_unequal_pair_names_its_reason_and_what_to_do(recipe, rounding, quantization, reason):
    warning = pair_warning(recipe, rounding, quantization)
    setting = f"fp8_recipe={recipe!r}"
    if rounding == "power_of_2" and recipe != "tensorwise":  # which has one rule
        setting += ", fp8_scale_rounding='power_of_2'"
    assert warning.startswith(f"{setting} with vLLM in {quantization!r}: ")
    assert reason in warning
    assert "(docs/numerics.md)" in warning
    assert "watch mismatch/*" in warning
    assert not re.search(r"\d\.\d", warning)  # measured numbers are in docs/numerics.md


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"vllm_importance_sampling_correction": False}, ["correction=False with a rollout in 'fp8_per_channel'"]),
        ({"vllm_importance_sampling_mode": "sequence_mask", "max_completion_length": LONG_RESPONSE}, []),
        (
            {"vllm_importance_sampling_mode": "sequence_mask", "max_completion_length": LONG_RESPONSE + 1},
            ["'sequence_mask' with max_completion_length=65"],
        ),
        ({"vllm_importance_sampling_mode": "sequence_truncate", "max_completion_length": 4096}, []),
        ({"bf16": False}, ["the trainer computes in FP32"]),
        ({"vllm_quantization": "none", "vllm_importance_sampling_correction": False}, ["the engine does not"]),
        ({"fp8_recipe": "none", "vllm_importance_sampling_correction": False}, []),
        (
            {"fp8_recipe": "none", "vllm_quantization": "fp8", "vllm_importance_sampling_correction": False},
            ["the trainer does not", "correction=False"],
        ),
    ],
)
def test_what_a_run_is_told(tmp_path, settings, expected):
    args = FP8GRPOConfig(str(tmp_path), use_cpu=True, report_to=[], **{"use_vllm": True, "bf16": True, **settings})
    warnings = rollout_warnings(args)
    assert len(warnings) == len(expected)
    for warning, part in zip(warnings, expected, strict=True):
        assert part in warning


@pytest.mark.parametrize(
    ("recipe", "rounding", "engine_rounds", "fitting"),
    [
        ("blockwise", "none", False, None),
        ("blockwise", "power_of_2", True, None),
        ("blockwise", "none", True, "power_of_2"),
        ("blockwise", "power_of_2", False, "none"),
        ("rowwise", "none", True, None),
    ],
)
def test_a_blockwise_pair_is_told_the_scale_rule_of_its_engine(recipe, rounding, engine_rounds, fitting, tmp_path):
    args = FP8GRPOConfig(
        str(tmp_path), use_cpu=True, report_to=[], use_vllm=True, fp8_recipe=recipe, fp8_scale_rounding=rounding
    )
    warning = scale_rule_warning(args, engine_rounds)
    if fitting is None:
        assert warning is None
    else:
        assert warning.startswith(f"fp8_scale_rounding={rounding!r} with vLLM in 'fp8_per_block'")
        assert warning.endswith(f"Set fp8_scale_rounding={fitting!r}.")
