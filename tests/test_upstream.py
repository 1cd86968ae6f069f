"""Contract of every private or non-public upstream name we import or override: it exists, with these parameters."""

import dataclasses
import inspect

import pytest
import torch
from builders import build_trainer
from torch import nn
from transformers import Trainer
from transformers.trainer_callback import ExportableState, TrainerState
from trl import GRPOConfig, GRPOTrainer

from trl_fp8 import FP8GRPOTrainer, _upstream


@pytest.mark.parametrize("name", _upstream.TRL_OVERRIDES)
def test_trl_methods_have_the_parameters_we_rely_on(name):
    parameters = inspect.signature(getattr(GRPOTrainer, name)).parameters
    assert set(_upstream.TRL_OVERRIDES[name]) <= set(parameters)


@pytest.mark.parametrize("name", _upstream.HF_OVERRIDES)
def test_transformers_methods_have_the_parameters_we_rely_on(name):
    assert tuple(inspect.signature(getattr(Trainer, name)).parameters) == _upstream.HF_OVERRIDES[name]


def test_every_override_of_a_parent_method_is_listed():
    parts = FP8GRPOTrainer.__mro__[: FP8GRPOTrainer.__mro__.index(GRPOTrainer)]
    own = {name for part in parts for name, member in vars(part).items() if inspect.isfunction(member)}
    overridden = {name for name in own if hasattr(GRPOTrainer, name)} - {"__init__"}
    overridden.add("get_off_policy_mask")  # on the instance, since it is static
    assert overridden == {*_upstream.TRL_OVERRIDES, *_upstream.HF_OVERRIDES}


def test_scoring_arguments_we_repeat_are_passed_by_keyword():
    # the shadow pass repeats a call with compute_entropy and compute_aux_loss replaced
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "compute_entropy=True" in source
    assert "compute_aux_loss=self.aux_loss_enabled" in source


def test_trl_reads_the_bounds_afresh_at_every_loss():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "1 - self.epsilon_low" in source
    assert "1 + self.epsilon_high" in source


def test_trl_calls_the_masks_through_self():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "self.get_off_policy_mask(" in source
    assert "self.get_high_entropy_mask(" in source


def test_trl_attributes_we_read(tmp_path):
    trainer = build_trainer(tmp_path, cls=GRPOTrainer, config=GRPOConfig)
    for name in ("_step", "epsilon_low", "epsilon_high", "use_vllm", "reward_func_names", "accelerator"):
        assert hasattr(trainer, name), name
    for name in ("importance_sampling_correction", "importance_sampling_mode", "importance_sampling_clip_min"):
        assert hasattr(trainer, f"vllm_{name}"), name
    assert hasattr(trainer.accelerator, "sync_gradients")


def test_trl_resolves_pad_to_multiple_of_auto(tmp_path):
    fields = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    assert fields["pad_to_multiple_of"] == "auto"


def test_hf_keeps_callback_states_by_class_name():
    class Stateful(ExportableState):
        def state(self):
            return {"args": {}, "attributes": {"n": 1}}

    assert TrainerState(stateful_callbacks=[Stateful()]).stateful_callbacks == {"Stateful": Stateful().state()}


def test_transformers_saves_checkpoints_where_we_mark_them():
    source = inspect.getsource(Trainer._save_checkpoint)
    assert 'f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"' in source
    assert "self._get_output_dir(trial=trial)" in source
    assert "save_total_limit=self.args.save_total_limit" in source
    assert list(inspect.signature(_upstream.rotate_checkpoints).parameters)[:1] == ["output_dir"]
    assert {"save_total_limit", "best_model_checkpoint", "use_mtime"} <= set(
        inspect.signature(_upstream.rotate_checkpoints).parameters
    )


def test_trl_assigns_the_reference_before_it_shards_it():
    source = inspect.getsource(GRPOTrainer.__init__)
    built, sharded = "self.ref_model = create_model_from_path(", "self.ref_model = prepare_deepspeed(self.ref_model"
    assert source.index(built) < source.index(sharded)


def test_parent_attributes_are_there_without_us(tmp_path):
    parents = {cls.__name__: cls for cls in GRPOTrainer.__mro__}
    trainer = build_trainer(tmp_path, cls=GRPOTrainer, config=GRPOConfig)
    for name, owner in _upstream.PARENT_ATTRIBUTES.items():
        assert hasattr(trainer, name), name
        assert hasattr(parents[owner], name) or f"self.{name} = " in inspect.getsource(parents[owner]), name


def test_torch_counts_changes_in_place():
    tensor = torch.zeros(2)
    before = _upstream.version(tensor)
    tensor.detach().add_(1)
    assert _upstream.version(tensor) == before + 1


def test_a_view_of_the_whole_is_replaced_by_the_whole():
    whole = torch.zeros(2, 3)
    assert _upstream.without_view(whole) is whole
    assert _upstream.without_view(whole.view(2, 3)) is whole
    other = whole.view(3, 2)
    assert _upstream.without_view(other) is other


def test_torchao_s_matmul_still_returns_a_view():
    """When this fails, drop `without_view`."""
    config = dataclasses.replace(_upstream.Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    layer = _upstream.Float8Linear.from_float(nn.Linear(16, 16), config=config)
    arguments = torch.randn(4, 16), layer.weight.t(), layer.linear_mm_config, config
    assert _upstream.matmul_with_hp_or_float8_args.apply(*arguments)._base is not None


def test_subclasses_without_a_torch_function_see_aten_operations_only():
    class Ours(torch.Tensor):
        __torch_function__ = _upstream.disabled_torch_function

    assert type(torch.zeros(2).as_subclass(Ours) + 1) is torch.Tensor  # with torch's own it would be `Ours`
    assert type(torch.zeros(2).as_subclass(type("Stock", (torch.Tensor,), {})) + 1) is not torch.Tensor


def test_every_operation_of_fsdp2_is_an_aten_operation():
    assert {type(operation) for operation in _upstream.FSDP2_OPERATIONS} == {torch._ops.OpOverload}
    names = {str(operation) for operation in _upstream.FSDP2_OPERATIONS}
    assert {"aten._to_copy.default", "aten._pin_memory.default", "aten.split.Tensor"} <= names


def test_dynamo_has_the_settings_of_compiling(monkeypatch):
    config = torch._dynamo.config
    monkeypatch.setattr(config, "optimize_ddp", True)
    monkeypatch.setattr(config, "recompile_limit", 8)
    _upstream.compile_up_to(20)
    assert (config.optimize_ddp, config.recompile_limit) == (False, 20)
    _upstream.compile_up_to(10)
    assert config.recompile_limit == 20


def test_torchao_tensors_have_what_an_emulated_matmul_reads():
    mm_config = _upstream.Float8Linear.from_float(
        nn.Linear(16, 16), config=_upstream.Float8LinearConfig.from_recipe_name("tensorwise")
    ).linear_mm_config
    quantized = _upstream.hp_tensor_and_scale_to_float8(
        torch.randn(16, 16), torch.tensor(2.0), torch.float8_e4m3fn, mm_config, _upstream.GemmInputRole.WEIGHT
    )
    assert quantized._data.dtype == torch.float8_e4m3fn
    assert quantized._scale.item() == 2.0
    assert quantized._orig_dtype == torch.float32
    assert quantized._linear_mm_config is mm_config
    assert quantized._gemm_input_role is _upstream.GemmInputRole.WEIGHT
    assert list(inspect.signature(_upstream.choose_scaled_mm_config).parameters) == [
        *("a_role", "a_linear_mm_config", "b_role", "b_linear_mm_config"),
    ]
    assert torch.ops.aten.mm.default in _upstream.FLOAT8_OPS_TABLE


def test_torchao_names():
    parameters = inspect.signature(_upstream.matmul_with_hp_or_float8_args.forward).parameters
    assert list(parameters) == ["ctx", "input_hp", "weight_hp_t", "linear_mm_config", "config"]
    assert issubclass(_upstream.Float8Linear, nn.Linear)
    assert list(inspect.signature(_upstream.Float8Linear.from_float).parameters) == ["mod", "config"]
    assert "module_filter_fn" in inspect.signature(_upstream.swap_linear_layers).parameters
    config = _upstream.Float8LinearConfig.from_recipe_name("rowwise")
    assert {"emulate", "round_scales_to_power_of_2"} <= {f.name for f in dataclasses.fields(config)}
    layer = _upstream.Float8Linear.from_float(nn.Linear(16, 16), config=dataclasses.replace(config, emulate=True))
    assert hasattr(layer, "linear_mm_config")


def test_torchao_names_of_the_fp8_gather():
    assert list(inspect.signature(_upstream.amax_to_scale).parameters) == [
        *("amax", "float8_dtype", "round_scales_to_power_of_2"),
    ]
    layer = _upstream.Float8Linear.from_float(
        nn.Linear(16, 16), config=_upstream.Float8LinearConfig.from_recipe_name("tensorwise")
    )
    weight = torch.randn(16, 16)
    scale = _upstream.amax_to_scale(weight.abs().max(), torch.float8_e4m3fn)
    sent, metadata = _upstream.quantize_shard(weight, scale, torch.float8_e4m3fn, layer.linear_mm_config)
    assert [tensor.dtype for tensor in sent] == [torch.float8_e4m3fn]
    gathered, inner = _upstream.gathered_weight(sent, metadata, torch.bfloat16, None)
    assert type(gathered) is _upstream.Float8TrainingTensor
    assert gathered.dtype == torch.bfloat16
    assert [tensor.data_ptr() for tensor in inner] == [sent[0].data_ptr()]
    assert _upstream.gathered_weight(sent, (scale * 2, metadata[1]), torch.bfloat16, gathered) is None
    assert torch.equal(gathered.to_original_precision(), (sent[0].float() / (scale * 2)).to(torch.bfloat16))


def test_torchao_s_own_shards_still_have_no_subclass_and_fsdp2_asks_as_ours_answer():
    """When the first fails, torchao may round and scale as we need: drop `Float8Shard`."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torchao.float8 import fsdp_utils

    from trl_fp8.float8.all_gather import Float8Shard

    source = inspect.getsource(fsdp_utils.WeightWithDynamicFloat8CastTensor)
    assert "lambda x: WeightWithDynamicFloat8CastTensor(x, mm_config, dtype)" in source
    assert "round_scales_to_power_of_2" not in inspect.getsource(fsdp_utils)
    asked = inspect.getsource(FSDPParam)
    for name in ("mesh", "outer_size", "outer_stride", "module", "mp_policy"):
        assert name in inspect.signature(Float8Shard.fsdp_pre_all_gather).parameters
    assert "num_fn_params not in (1, 5)" in asked
    assert "self._module_info.module," in asked
    assert "out=self._unsharded_param" in asked


def test_stock_float8_linear_still_needs_our_forward():
    """When this fails, torchao casts the weight as autocast does: drop the cast in `SwitchableFloat8Linear`."""
    config = dataclasses.replace(_upstream.Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True)
    layer = _upstream.Float8Linear.from_float(nn.Linear(16, 16), config=config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(torch.randn(4, 16))
    with pytest.raises(RuntimeError, match="dtype"):
        output.float().sum().backward()


def test_torchao_blockwise_names():
    pytest.importorskip("triton")
    kernels = _upstream.blockwise_kernels()
    for name, first in (
        ("triton_fp8_blockwise_act_quant_lhs", "x"),
        ("triton_fp8_blockwise_weight_quant_rhs", "x"),
        ("triton_fp8_gemm_1x128_128x128", "a"),
    ):
        schema = getattr(torch.ops.torchao, name).default._schema
        assert schema.arguments[0].name == first
        assert hasattr(kernels, name)
    assert hasattr(kernels, "BLOCKWISE_1X128_SCALING_TYPE")
    assert hasattr(kernels, "BLOCKWISE_128X128_SCALING_TYPE")
    function = _upstream._blockwise_function()
    parent = function.__mro__[1]
    assert list(inspect.signature(parent.forward).parameters) == [
        *("ctx", "x", "weight", "block_size", "out_dtype", "use_triton"),
    ]
    for saved in ("block_size", "out_dtype", "use_triton", "save_for_backward(x, weight)"):
        assert f"ctx.{saved}" in inspect.getsource(parent.forward)


def test_peft_adapters_are_found():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(nn.Sequential(nn.Linear(16, 16)), LoraConfig(r=4, target_modules=["0"]))
    names = {name for name, module in model.named_modules() if id(module) in _upstream.adapter_modules(model)}
    assert "base_model.model.0.lora_A.default" in names
    assert "base_model.model.0.base_layer" not in names
    assert _upstream.adapter_modules(nn.Linear(2, 2)) == set()


def test_module_hooks_are_found():
    linear = nn.Linear(2, 2)
    assert _upstream.module_hooks(linear) == []
    linear.register_forward_hook(lambda *_: None)
    linear.register_state_dict_post_hook(lambda *_: None)
    assert _upstream.module_hooks(linear) == ["forward hooks", "state dict hooks"]
