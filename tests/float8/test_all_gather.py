"""FP8 all-gather on one process: the shard as a tensor, the layer before and after a gather, and what is refused.

What two processes gather is in `test_sharding.py`.
"""

import copy
import pickle

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from builders import build_model, build_trainer
from torch import nn

from trl_fp8 import FP8GRPOConfig, _upstream
from trl_fp8.distributed import World, check_strategy
from trl_fp8.float8 import convert_model, high_precision, layer_factory
from trl_fp8.float8.all_gather import Float8Shard, GatheredFloat8Linear, check_shards, refresh_scales


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(32, 16)


def convert(linear, **kwargs):
    return layer_factory("tensorwise", "none", True, **kwargs)(copy.deepcopy(linear))


def gather(layer, dtype):
    """Give `layer` its whole weight as FSDP2 would, on one process."""
    master = layer.weight.detach().view(16, 32).to(dtype)
    target = layer.config.cast_config_weight.target_dtype
    scale = _upstream.amax_to_scale(master.abs().max(), target)
    sent, metadata = _upstream.quantize_shard(master, scale, target, layer.linear_mm_config)
    weight, _ = layer.weight.fsdp_post_all_gather(sent, metadata, dtype)
    layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)


def test_a_shard_is_an_ordinary_tensor_with_memory_of_its_own(linear):
    weight = nn.Parameter(linear.weight.detach().as_subclass(Float8Shard))
    assert weight.data_ptr() == linear.weight.data_ptr()
    for kept in (weight.detach(), weight.clone(), weight.to(torch.bfloat16), weight[:4], *weight.split(8)):
        assert type(kept) is Float8Shard
    assert type(copy.deepcopy(weight)) is Float8Shard
    assert isinstance(copy.deepcopy(weight), nn.Parameter)
    for plain in (weight + 1, torch.zeros_like(weight), weight.view_as(weight), weight.t(), weight.abs().max()):
        assert type(plain) is torch.Tensor
    assert type(pickle.loads(pickle.dumps(weight.detach()))) is torch.Tensor
    assert torch.equal(weight, linear.weight)
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(weight, linear.weight)


def test_before_it_is_sharded_the_layer_is_the_tensorwise_one(linear):
    ours, stock, x = convert(linear, fsdp_all_gather=True), convert(linear), torch.randn(4, 32)
    outputs = [layer(x) for layer in (ours, stock)]
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(*outputs)
    assert type(ours.weight.grad) is torch.Tensor
    assert torch.equal(ours.weight.grad, stock.weight.grad)
    assert refresh_scales([ours]) == 0
    with high_precision(ours):
        assert torch.equal(ours(x), linear(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathered_weight_computes_as_the_weight_it_was_made_of(linear, dtype):
    ours, stock, x = convert(linear, fsdp_all_gather=True), convert(linear), torch.randn(4, 32)
    gather(ours, dtype)
    assert type(ours.weight.detach()) is _upstream.Float8TrainingTensor
    for rows in (x, x[:0]):
        inputs = [rows.clone().requires_grad_() for _ in range(2)]
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            outputs = [layer(value) for layer, value in zip((ours, stock), inputs, strict=True)]
        for layer, output in zip((ours, stock), outputs, strict=True):
            layer.zero_grad()
            output.float().square().sum().backward()
        assert torch.equal(*outputs)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        assert torch.equal(ours.weight.grad.float(), stock.weight.grad)


def test_a_weight_gathered_in_another_precision_than_autocasts_is_refused(linear):
    layer = convert(linear, fsdp_all_gather=True)
    gather(layer, torch.float32)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="mixed_precision_policy"):
        layer(torch.randn(4, 32))


def test_converting_keeps_names_memory_and_what_is_frozen():
    model = build_model()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    names = [(name, p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()]
    report = convert_model(model, "tensorwise", fsdp_all_gather=True)
    assert [(name, p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()] == names
    gathered = [name for name, module in model.named_modules() if isinstance(module, GatheredFloat8Linear)]
    assert tuple(gathered) == report.converted
    check_shards(model, 2)


def test_uneven_shards_and_tied_weights_are_refused():
    model = build_model()
    convert_model(model, "tensorwise", fsdp_all_gather=True)
    with pytest.raises(ValueError, match=r"with 3 shards: the 64 rows of model.layers.0.self_attn.q_proj cannot"):
        check_shards(model, 3)
    tied = build_model()
    tied.model.layers[1].mlp.up_proj.weight = tied.model.layers[0].mlp.up_proj.weight
    convert_model(tied, "tensorwise", fsdp_all_gather=True)
    with pytest.raises(ValueError, match=r"layers.0.mlp.up_proj is tied to another.*fp8_exclude_modules"):
        check_shards(tied, 2)


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (World(), "with no FSDP, where nothing asks.*Launch with FSDP2"),
        (World(fsdp_version=1), "with FSDP1, where"),
        (World(zero_stage=3), "with ZeRO-3, where"),
        (World(fsdp_version=2, cpu_offload=True), "offload_params"),
        (World(fsdp_version=2, loads_after_sharding=True), "cpu_ram_efficient_loading"),
    ],
)
def test_worlds_that_cannot_gather_in_fp8_are_refused(world, message, tmp_path):
    settings = {"fp8_recipe": "tensorwise", "fp8_fsdp_all_gather": True, "use_cpu": True}
    with pytest.raises(ValueError, match=message):
        check_strategy(FP8GRPOConfig(str(tmp_path), **settings), world)


def test_fsdp2_with_fp8_gathers_is_let_through_and_one_process_is_not(tmp_path):
    settings = {"fp8_recipe": "tensorwise", "fp8_fsdp_all_gather": True}
    for compiled in (False, True):
        args = FP8GRPOConfig(str(tmp_path), use_cpu=True, fp8_compile=compiled, **settings)
        check_strategy(args, World(fsdp_version=2, num_shards=2))
    with pytest.raises(ValueError, match="with no FSDP"):
        build_trainer(tmp_path, **settings)


@pytest.mark.parametrize("offload", [False, True])
def test_the_world_knows_what_fsdp2_does_with_weights(offload):
    class Accelerator:
        num_processes, parallelism_config, distributed_type = 6, None, DistributedType.FSDP

        class state:
            deepspeed_plugin = None
            fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, cpu_offload=offload, cpu_ram_efficient_loading=offload
            )

    expected = World(2, kind="FSDP", num_processes=6, num_shards=6, cpu_offload=offload, loads_after_sharding=offload)
    assert World.of(Accelerator()) == expected
    Accelerator.parallelism_config = type("Sizes", (), {"dp_replicate_size": 3, "dp_shard_size": 2})()
    assert World.of(Accelerator()).num_shards == 2
