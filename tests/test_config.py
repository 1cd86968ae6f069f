"""FP8GRPOConfig: defaults, what each check refuses through Python, the command line and YAML, and round trips."""

import dataclasses
import math
import re
import sys
from types import MappingProxyType, ModuleType

import pytest
from trl import GRPOConfig, TrlParser

from trl_fp8 import ClippingPolicy, FP8GRPOConfig
from trl_fp8.clip_checks import clip_policy_of
from trl_fp8.clipping import ClipSearch


def build(tmp_path, **settings) -> FP8GRPOConfig:
    return FP8GRPOConfig(str(tmp_path), **{"use_cpu": True, "report_to": [], **settings})


def parse(tmp_path, *flags, yaml: str | None = None) -> FP8GRPOConfig:
    arguments = ["--output_dir", str(tmp_path / "out"), "--use_cpu", "true", "--report_to", "none", *flags]
    if yaml is not None:
        path = tmp_path / "config.yaml"
        path.write_text(yaml)
        arguments += ["--config", str(path)]
    return TrlParser((FP8GRPOConfig,)).parse_args_and_config(arguments)[0]


def test_defaults_are_the_papers(tmp_path):
    args = build(tmp_path)
    assert args.fp8_recipe == "rowwise"
    assert (args.clip_policy, args.resolved_clip_policy, args.auto_reason) == ("auto", "calibrated", None)
    assert args.calibration_interval == 20
    assert (args.clip_lower_init, args.clip_upper_init) == (0.6, 1.8)
    assert args.clip_search == ClipSearch()
    assert args.reference_bounds == (0.8, 1.24)
    assert (args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_max) == ("token_truncate", 2.0)


def test_every_other_field_keeps_trls_default():
    ours = {f.name: (f.default, f.default_factory) for f in dataclasses.fields(FP8GRPOConfig)}
    theirs = {f.name: (f.default, f.default_factory) for f in dataclasses.fields(GRPOConfig)}
    changed = {name for name in theirs if ours[name] != theirs[name]}
    assert changed == {"epsilon_high", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"}


def test_epsilon_high_none_means_epsilon(tmp_path):
    assert build(tmp_path, epsilon=0.3, epsilon_high=None).reference_bounds == (0.7, 1.3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 4),
        ({"gradient_accumulation_steps": 2}, 8),
        ({"steps_per_generation": 3}, 3),
        ({"generation_batch_size": 16}, 2),
        ({"clip_policy": "fixed"}, 1),
        ({"clip_policy": "fixed", "gradient_accumulation_steps": 2}, 2),
    ],
)
def test_steps_per_generation_default_gives_four_mini_batches_where_calibration_needs_them(
    tmp_path, settings, expected
):
    args = build(tmp_path, **settings)
    assert args.steps_per_generation == expected


@pytest.mark.parametrize(
    ("accumulation", "steps_per_generation", "num_iterations", "expected"),
    [(1, 1, 1, True), (4, 4, 1, True), (8, 4, 1, True), (4, 4, 2, False), (1, 4, 1, False), (6, 4, 1, False)],
)
def test_ratios_are_one_is_trls_condition(tmp_path, accumulation, steps_per_generation, num_iterations, expected):
    args = build(
        tmp_path,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
        num_iterations=num_iterations,
    )
    assert args.ratios_are_one is expected
    assert args.micro_batches_per_generation == steps_per_generation * num_iterations


@pytest.mark.parametrize("value", [None, "none", "None", "null"])
def test_none_is_the_word_none(tmp_path, value):
    args = build(tmp_path, fp8_recipe=value, fp8_scale_rounding=value, vllm_quantization=value)
    assert (args.fp8_recipe, args.fp8_scale_rounding, args.vllm_quantization) == ("none", "none", "none")


def test_yaml_null_is_the_word_none(tmp_path):
    args = parse(tmp_path, yaml="fp8_recipe: null\nvllm_quantization: null\nvllm_kv_cache_dtype: null\n")
    assert (args.fp8_recipe, args.vllm_quantization, args.vllm_kv_cache_dtype) == ("none", "none", None)


# (settings, part of the message). Every one is checked through Python and through YAML.
BAD_VALUES = [
    ({"fp8_recipe": "rowise"}, "fp8_recipe='rowise' is not one of"),
    ({"fp8_recipe": True}, "fp8_recipe=True is not one of"),
    ({"fp8_recipe": 8}, "fp8_recipe=8 is not one of"),
    ({"fp8_scale_rounding": "floor"}, "fp8_scale_rounding='floor' is not one of"),
    ({"rebalance_with": "raw"}, "rebalance_with='raw' is not one of"),
    ({"vllm_quantization": "fp9"}, "vllm_quantization='fp9' is not one of"),
    ({"vllm_importance_sampling_mode": "token"}, "vllm_importance_sampling_mode='token' is not one of"),
    ({"vllm_quantization": "fp8_per_channel"}, "use_vllm=False starts none"),
    ({"vllm_kv_cache_dtype": "fp8"}, "use_vllm=False starts none"),
    ({"vllm_engine_kwargs": {"seed": 1}}, "use_vllm=False starts none"),
    (
        {"use_vllm": True, "vllm_mode": "server", "vllm_engine_kwargs": {"enforce_eager": True}},
        "{'enforce_eager': True} with vllm_mode='server'.*Pass them to `vllm serve`",
    ),
    ({"use_vllm": True, "vllm_engine_kwargs": {"seed": 1}}, "{'seed': 1} sets what TRL sets already.*drop it"),
    ({"use_vllm": True, "vllm_engine_kwargs": {"logprobs_mode": "raw_logprobs"}}, "need 'processed_logprobs'"),
    ({"use_vllm": True, "vllm_engine_kwargs": {"max_model_len": 64}}, "Use vllm_max_model_length"),
    ({"use_vllm": True, "vllm_engine_kwargs": {"quantization": "fp8"}}, "Use vllm_quantization"),
    (
        {"use_vllm": True, "vllm_engine_kwargs": '{"seed":'},
        "is not a mapping .* JSON object such as .*Expecting value",
    ),
    ({"use_vllm": True, "vllm_mode": "foo"}, "vllm_mode='foo' is not one of .* colocate, server"),
    ({"use_vllm": True, "vllm_quantization": "compressed-tensors"}, "checkpoints quantised beforehand"),
    ({"vllm_sync_check_interval": -1}, "vllm_sync_check_interval=-1"),
    ({"vllm_sync_check_max_ratio": 1.0}, "vllm_sync_check_max_ratio=1.0"),
    (
        {"use_vllm": True, "vllm_kv_cache_dtype": "fp8", "vllm_enable_sleep_mode": True},
        "vllm_kv_cache_dtype='fp8' with vllm_enable_sleep_mode=True",
    ),
    ({"fp8_fsdp_all_gather": True}, "fp8_recipe='rowwise': FP8 is gathered with one scale.*Set fp8_recipe"),
    ({"fp8_fsdp_all_gather": True, "fp8_recipe": "none"}, "this recipe has none or others"),
    ({"calibration_interval": 0}, "calibration_interval=0 never comes round"),
    ({"calibration_interval": -5}, "calibration_interval=-5 never comes round"),
    ({"calibration_interval": 2.5}, "calibration_interval=2.5 has the wrong type"),
    ({"calibration_interval": True}, "calibration_interval=True has the wrong type"),
    ({"clip_lower_init": float("nan")}, "clip_lower_init=nan is not finite"),
    ({"clip_upper_max": float("inf")}, "clip_upper_max=inf is not finite"),
    ({"clip_grid_step": 0.0}, "clip_grid_step=0.0 .*finite number > 0"),
    ({"clip_grid_step": -0.02}, "clip_grid_step=-0.02"),
    ({"clip_grid_step": 0.5}, "clip_grid_step=0.5 leaves one candidate"),
    ({"clip_lower_max_change": 0.0}, "clip_lower_max_change=0.0"),
    ({"clip_upper_max_change": -1.0}, "clip_upper_max_change=-1.0"),
    ({"clip_lower_min": 0.9, "clip_lower_max": 0.5}, "clip_lower_min=0.9 and clip_lower_max=0.5"),
    ({"clip_upper_min": 1.5, "clip_upper_max": 1.5}, "clip_upper_min=1.5 and clip_upper_max=1.5"),
    ({"clip_lower_min": -0.5}, "clip_lower_min=-0.5 is not a clip bound"),
    ({"clip_lower_max": 1.1}, "clip_lower_max < 1 < clip_upper_min"),
    ({"clip_lower_init": 0.4}, r"clip_lower_init=0.4 lies outside its search interval \[0.5, 0.9\]"),
    ({"clip_upper_init": 2.5}, "clip_upper_init=2.5 lies outside"),
    ({"clip_lower_init": "0.6x"}, "clip_lower_init='0.6x' has the wrong type"),
    ({"epsilon": float("nan")}, "epsilon=nan is not finite"),
    ({"epsilon": "x"}, "epsilon='x' has the wrong type"),
    ({"delta": float("nan")}, "delta=nan is not finite"),
    ({"num_iterations": 0}, "num_iterations=0 is not a number"),
    ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps=-1 is not a number"),
    ({"vllm_importance_sampling_clip_max": -1.0}, "clip_max=-1.0 drops every token"),
    ({"clip_grid_step": 1e-6}, "more than 10,000"),
    ({"clip_upper_max": 1e308}, "more than 10,000"),
    ({"clip_policy": "calibrated", "epsilon": 1.0}, "epsilon=1.0 puts the lower reference bound"),
    ({"epsilon_high": -0.1}, "epsilon_high=-0.1 is not a trust region"),
    ({"clip_policy": "calibrated", "loss_type": "cispo"}, "loss_type='cispo' does not read both clip bounds"),
    ({"clip_policy": "calibrated", "loss_type": "sapo"}, "loss_type='sapo' does not read"),
    ({"clip_policy": "calibrated", "loss_type": "vespo"}, "loss_type='vespo' does not read"),
    ({"clip_policy": "calibrated", "loss_type": "luspo"}, "loss_type='luspo' does not read"),
    ({"clip_policy": "calibrated", "importance_sampling_level": "sequence"}, "clips one ratio per sequence"),
    ({"clip_policy": "calibrated", "delta": 1.21}, r"delta=1.21 leaves no room .* \[1.2, 2.0\].*Raise delta"),
    ({"clip_policy": "calibrated", "neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 adds noise"),
    ({"clip_policy": "calibratd"}, "clip_policy='calibratd' is not a policy .*Did you mean 'calibrated'"),
    ({"clip_policy": "nowhere.Policy"}, "clip_policy='nowhere.Policy' cannot be imported .*PYTHONPATH"),
    ({"clip_policy": "json.JSONDecoder"}, "clip_policy='json.JSONDecoder' is a type, not a subclass"),
    ({"clip_policy": None}, "clip_policy=None has the wrong type"),
    ({"clip_policy": "fixed", "clip_policy_kwargs": {"a": 1}}, "clip_policy='fixed', which takes no arguments"),
    (
        {"clip_policy_kwargs": {"share": 1}},
        "clip_policy_kwargs=.* 1} with clip_policy='.*argument 'share'",
    ),
    ({"clip_policy_kwargs": {"clip_lower_init": 0.1}}, "clip_lower_init=0.1 lies outside"),
    ({"clip_policy_kwargs": "[1]"}, "clip_policy_kwargs='\\[1\\]' is not a mapping"),
    ({"shadow_interval": 0}, "shadow_interval=0 never comes round"),
    ({"shadow_interval": 2, "steps_per_generation": 1}, "shadow_interval=2 .* there is nothing to measure"),
    ({"shadow_interval": 2, "neftune_noise_alpha": 5.0}, "FP8's own noise could not be seen"),
    ({"use_liger_kernel": True}, "use_liger_kernel=True"),
    ({"use_transformers_continuous_batching": True}, "casts the FP32 master weights"),
    ({"use_vllm": True, "vllm_quantization": "none", "top_p": 0.9}, "top_p=0.9 truncates sampling"),
    ({"use_vllm": True, "vllm_quantization": "none", "top_k": 20, "min_p": 0.1}, "top_k=20, min_p=0.1 truncates"),
    ({"fp8_exclude_modules": [1, 2]}, "fp8_exclude_modules=.* has the wrong type"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_VALUES)
def test_bad_values_are_refused_through_python(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **settings)


@pytest.mark.parametrize(("settings", "message"), BAD_VALUES)
def test_bad_values_are_refused_through_yaml(tmp_path, settings, message, capsys):
    import yaml

    # argparse converts YAML's strings before our check; its own refusal is a SystemExit with a message
    with pytest.raises((ValueError, SystemExit)) as error:
        parse(tmp_path, yaml=yaml.safe_dump(settings))
    if error.type is SystemExit:
        printed = capsys.readouterr().err
        assert any(f"--{name}" in printed for name in settings), printed
    else:
        assert re.search(message, str(error.value), re.S)


@pytest.mark.parametrize("flags", [("--fp8_recipe", "rowise"), ("--calibration_interval", "often")])
def test_bad_values_are_refused_on_the_command_line(tmp_path, flags, capsys):
    with pytest.raises(SystemExit):
        parse(tmp_path, *flags)
    assert flags[0] in capsys.readouterr().err


def test_settings_without_calibration_are_left_to_trl(tmp_path):
    for settings in (
        {"loss_type": "cispo"},
        {"importance_sampling_level": "sequence"},
        {"delta": 1.5},
        {"epsilon": 10.0},
    ):
        build(tmp_path, clip_policy="fixed", **settings)


def test_accelerates_own_fp8_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ValueError, match="mixed_precision='fp8'.*fp8_recipe"):
        build(tmp_path)


def test_command_line_flags_reach_the_config(tmp_path):
    args = parse(
        tmp_path,
        *("--fp8_recipe", "tensorwise", "--fp8_exclude_modules", "q_proj", "layers.0.*", "--fp8_emulate", "true"),
        *("--clip_lower_init", "0.7", "--rebalance_with", "target", "--clip_policy", "fixed"),
    )
    assert args.fp8_recipe == "tensorwise"
    assert args.fp8_exclude_modules == ["q_proj", "layers.0.*"]
    assert args.fp8_emulate is True
    assert args.clip_lower_init == 0.7
    assert args.clip_search.rebalance_with == "target"
    assert args.clip_policy == args.resolved_clip_policy == "fixed"


def test_one_pattern_as_a_string_is_one_pattern(tmp_path):
    assert build(tmp_path, fp8_exclude_modules="q_proj").fp8_exclude_modules == ["q_proj"]


def test_help_renders_and_names_every_field(capsys):
    with pytest.raises(SystemExit):
        TrlParser((FP8GRPOConfig,)).parse_args_and_config(["--help"])
    text = capsys.readouterr().out
    own = FP8GRPOConfig.__annotations__.keys() - GRPOConfig.__annotations__.keys()
    assert {"fp8_recipe", "calibration_interval", "vllm_quantization"} <= own
    assert all(f"--{name}" in text for name in own)


def test_docstring_and_help_cover_every_own_field():
    for field in dataclasses.fields(FP8GRPOConfig):
        if field.name in FP8GRPOConfig.__annotations__:
            assert field.metadata.get("help"), field.name
            assert field.name in FP8GRPOConfig.__doc__, field.name


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"fp8_recipe": "none"}, "none"),
        ({"fp8_recipe": "tensorwise"}, "fp8_per_tensor"),
        ({"fp8_recipe": "rowwise"}, "fp8_per_channel"),
        ({"fp8_recipe": "rowwise_with_gw_hp"}, "fp8_per_channel"),
        ({"fp8_recipe": "blockwise"}, "fp8_per_block"),
        ({"fp8_recipe": "rowwise", "vllm_quantization": "none"}, "none"),
        ({"fp8_recipe": "none", "vllm_quantization": "fp8_per_block"}, "fp8_per_block"),
        ({"fp8_recipe": "rowwise", "use_vllm": False}, "none"),
    ],
)
def test_auto_is_the_pair_of_the_recipe(tmp_path, settings, expected):
    assert build(tmp_path, **{"use_vllm": True, **settings}).rollout_quantization == expected


def test_a_server_may_roll_out_in_high_precision(tmp_path):
    args = build(tmp_path, use_vllm=True, vllm_mode="server", vllm_quantization="none")
    assert args.rollout_quantization == "none"


def test_to_dict_round_trip(tmp_path):
    args = build(tmp_path, clip_lower_init=0.55, fp8_exclude_modules=["q_proj"])
    settings = {name: value for name, value in args.to_dict().items() if name in FP8GRPOConfig.__annotations__}
    again = build(tmp_path, **settings)
    assert all(getattr(again, name) == value for name, value in settings.items())


@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_the_lower_bound_of_importance_weights_is_a_positive_number(value, tmp_path):
    with pytest.raises(ValueError, match=f"vllm_importance_sampling_clip_min={value} .*Set a number"):
        FP8GRPOConfig(str(tmp_path), use_cpu=True, report_to=[], vllm_importance_sampling_clip_min=value)


@pytest.mark.parametrize("value", ["[1]", "3", "null", "not json", {1: 2}])
def test_engine_arguments_that_are_no_mapping_are_refused(value, tmp_path):
    with pytest.raises(ValueError, match="vllm_engine_kwargs=.* is not a mapping"):
        FP8GRPOConfig(str(tmp_path), use_cpu=True, report_to=[], use_vllm=True, vllm_engine_kwargs=value)


# -- the clip policy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "loss_type='cispo' does not read both clip bounds"),
        ({"loss_type": "sapo"}, "loss_type='sapo'"),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, "importance_sampling_level='sequence'"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"epsilon": 1.0}, "epsilon=1.0"),
        ({"delta": 1.1}, "delta=1.1"),
    ],
)
def test_auto_is_fixed_where_calibration_would_be_refused_and_says_why(settings, reason, tmp_path):
    args = build(tmp_path, **settings)
    assert args.resolved_clip_policy == "fixed"
    assert reason in args.auto_reason
    assert args.steps_per_generation == args.gradient_accumulation_steps  # TRL's default, as vanilla FP8 has it


def test_delta_above_the_start_of_the_upper_interval_ends_it(tmp_path):
    args = build(tmp_path, delta=1.5)
    assert args.resolved_clip_policy == "calibrated"
    assert args.clip_search.clip_upper_max == 1.5
    assert clip_policy_of(args).bounds == (0.6, 1.5)  # the default 1.8 lies beyond
    assert build(tmp_path, delta=3.0).clip_search == ClipSearch()


class NeedsCispo(ClippingPolicy):
    reads_both_bounds = False
    requires = MappingProxyType({"loss_type": "cispo"})

    def __init__(self, cap: float = 5.0):
        self.cap = cap


def test_a_policy_by_dotted_path_gets_its_arguments_and_sets_what_it_requires(tmp_path, monkeypatch):
    module = ModuleType("my_policies")
    module.NeedsCispo = NeedsCispo
    monkeypatch.setitem(sys.modules, "my_policies", module)
    path = "my_policies.NeedsCispo"
    for args in (
        build(tmp_path, clip_policy=path, clip_policy_kwargs={"cap": 3.0}),
        parse(tmp_path, "--clip_policy", path, "--clip_policy_kwargs", '{"cap": 3.0}'),
        parse(tmp_path, yaml=f"clip_policy: {path}\nclip_policy_kwargs:\n  cap: 3.0\n"),
    ):
        assert args.resolved_clip_policy == path
        assert clip_policy_of(args).cap == 3.0
        assert args.loss_type == "cispo"
        assert args.steps_per_generation == 4
    with pytest.raises(ValueError, match="loss_type='grpo' with NeedsCispo, which needs loss_type='cispo'"):
        build(tmp_path, clip_policy=path, loss_type="grpo")


def test_measuring_only_has_the_mini_batches_of_a_calibrated_run(tmp_path):
    assert build(tmp_path, clip_policy="fixed", shadow_interval=20).steps_per_generation == 4
    assert build(tmp_path, clip_policy="fixed").steps_per_generation == 1
