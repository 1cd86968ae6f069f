"""The engine: its arguments, what is refused before it starts, and its FP8 linears against ours."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


pytest.importorskip("vllm")

from builders import RUN, build_dataset, build_tokenizer, digits_reward
from vllm_helpers import ENGINE_KWARGS, PROMPTS, build_policy, save_policy, score, start_engine

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.config_checks import ENGINE_OWNERS
from trl_fp8.float8 import layer_factory
from trl_fp8.rollout import _upstream


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def policy(folder):
    model = build_policy(tie_word_embeddings=False)
    save_policy(model, folder / "policy")
    return model


@pytest.fixture(scope="module")
def engine(policy, folder):
    return start_engine(policy, folder)


# -- arguments


def test_auto_quantises_the_engine_of_the_default_recipe(engine):
    config = engine.llm.llm_engine.vllm_config

    def dtypes(model):
        linears = {n: m for n, m in model.named_modules() if n.endswith("_proj")}
        return {linear.weight.dtype for linear in linears.values()}, len(linears)

    assert engine.llm.apply_model(dtypes)[0] == ({torch.float8_e4m3fn}, 8)
    assert config.model_config.logprobs_mode == "processed_logprobs"
    assert config.scheduler_config.max_num_batched_tokens == ENGINE_KWARGS["max_num_batched_tokens"]
    assert config.cache_config.cache_dtype == "auto"


def test_the_engine_computes_in_the_trainers_dtype(folder):
    model = build_policy()
    save_policy(model, folder / "fp16", torch.float16)
    config = start_engine(model, folder, bf16=True).llm.llm_engine.model_config
    assert config.dtype == torch.bfloat16


def test_every_engine_argument_of_trl_has_an_owner(policy, folder, monkeypatch):
    seen = {}

    class Stop(Exception):
        pass

    def build(self, **kwargs):
        seen.update(kwargs)
        raise Stop

    monkeypatch.setattr("trl_fp8.rollout.colocate.RolloutEngine._build", build)
    with pytest.raises(Stop):
        start_engine(policy, folder)
    assert seen.keys() - {"max_num_batched_tokens"} == ENGINE_OWNERS.keys() - {"kv_cache_dtype"}
    assert seen["quantization"] is None


# -- refusals, before anything is started


def no_engine(self, **kwargs):
    raise AssertionError("the engine was started")


@pytest.fixture
def never_started(monkeypatch):
    monkeypatch.setattr("trl_fp8.rollout.colocate.RolloutEngine._build", no_engine)


def build_vllm_trainer(model, output_dir, peft_config=None, **settings):
    settings = {**RUN, "use_vllm": True, "vllm_engine_kwargs": ENGINE_KWARGS, "bf16": True, **settings}
    return FP8GRPOTrainer(
        model,
        digits_reward,
        FP8GRPOConfig(str(output_dir), vllm_max_model_length=64, vllm_gpu_memory_utilization=0.1, **settings),
        build_dataset(),
        processing_class=build_tokenizer(),
        peft_config=peft_config,
    )


def test_a_policy_without_a_path_is_refused(tmp_path, never_started):
    with pytest.raises(ValueError, match="Qwen3ForCausalLM that was built in memory.*save_pretrained"):
        build_vllm_trainer(build_policy(), tmp_path)


def test_a_policy_from_a_path_that_is_gone_is_refused(tmp_path, never_started):
    model = build_policy()
    model.name_or_path = str(tmp_path / "gone")
    with pytest.raises(ValueError, match="gone.*which holds no configuration.*save_pretrained"):
        build_vllm_trainer(model, tmp_path)


def test_a_policy_that_outgrew_its_checkpoint_is_refused(tmp_path, never_started):
    model = build_policy()
    save_policy(model, tmp_path / "small")
    model.resize_token_embeddings(40)
    with pytest.raises(
        ValueError, match="The checkpoint .* has vocab_size=25, and the policy .* has 40: it cannot .* save_pretrained"
    ):
        build_vllm_trainer(model, tmp_path)


def test_a_policy_that_lacks_a_layer_is_refused(tmp_path, never_started):
    model = build_policy()
    save_policy(model, tmp_path / "policy")
    model.model.layers[1].self_attn.k_norm = nn.Identity()
    with pytest.raises(ValueError, match=r"The checkpoint .*k_norm.weight=\(32,\), and the policy .* has absent"):
        build_vllm_trainer(model, tmp_path)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True. and a tied layer is part")  # PEFT's own
def test_an_adapter_on_a_tied_embedding_is_refused(tmp_path, never_started):
    from peft import LoraConfig

    model = build_policy()
    save_policy(model, tmp_path / "policy")
    with pytest.raises(ValueError, match="The adapter on model.embed_tokens changes one of two layers"):
        build_vllm_trainer(model, tmp_path, peft_config=LoraConfig(target_modules=["embed_tokens"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_engine_kwargs": {"enforce_eagre": True}}, "does not take. Did you mean enforce_eagre: enforce_eager"),
        ({"vllm_engine_kwargs": {"zzz": True}}, "has zzz, .* does not take. Names are those of vllm.EngineArgs"),
        ({"vllm_kv_cache_dtype": "fp9"}, "vllm_kv_cache_dtype='fp9' is not a type of cache .* fp8_e4m3"),
    ],
)
def test_what_vllm_does_not_know_is_refused_before_a_policy_is_loaded(tmp_path, settings, message):
    build_policy().config.save_pretrained(tmp_path / "no_weights")
    with pytest.raises(ValueError, match=message):
        build_vllm_trainer(str(tmp_path / "no_weights"), tmp_path, **settings)


def test_an_engine_that_runs_another_model_is_refused(tmp_path):
    model = build_policy()
    save_policy(model, tmp_path / "policy")
    changed = {**ENGINE_KWARGS, "hf_overrides": {"rms_norm_eps": 0.1}}
    with pytest.raises(ValueError, match="engine has rms_norm_eps=0.1, and the policy .* has 1e-06: .* hf_overrides"):
        build_vllm_trainer(model, tmp_path, vllm_engine_kwargs=changed)


def test_what_vllm_refuses_names_the_settings(tmp_path):
    model = build_policy()
    save_policy(model, tmp_path / "policy")
    with pytest.raises(RuntimeError, match="vLLM could not start .*: correct vllm_quantization='torchao'"):
        build_vllm_trainer(model, tmp_path, vllm_quantization="torchao")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8_exclude_modules": ["q_porj"]}, "'q_porj' matches no linear layer"),
        ({"per_device_train_batch_size": 512}, "train_dataset has 64 prompts"),
    ],
)
def test_errors_of_model_and_data_come_before_the_engine(policy, tmp_path, never_started, settings, message):
    model = build_policy()
    save_policy(model, tmp_path / "policy")
    with pytest.raises(ValueError, match=message):
        build_vllm_trainer(model, tmp_path, **settings)


# -- numerics


def ties(x: torch.Tensor) -> torch.Tensor:
    """Rows in which some value of x `(R, K)`, scaled exactly, lies halfway between two e4m3 numbers."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # 0 to 448, ascending
    scaled = (x.double() * 448 / x.double().abs().amax(dim=-1, keepdim=True)).abs()
    return torch.isin(scaled, (grid[1:] + grid[:-1]) / 2).any(dim=-1)


def torchaos_bits(x: torch.Tensor) -> torch.Tensor:
    """x `(R, K)` as the rowwise recipe casts it: its e4m3 bits."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    granularity = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1}
    return hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, LinearMMConfig(), **granularity)._data.view(torch.uint8)


@pytest.mark.parametrize(("fused", "parts"), [("qkv_proj", "qkv"), ("o_proj", "o")])
def test_both_sides_cast_the_same_values_to_the_same_bits(policy, engine, fused, parts):
    """Weights and activations; a value halfway between two FP8 numbers may go either way."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    attention = policy.model.layers[1].self_attn
    weight = torch.cat([getattr(attention, f"{part}_proj").weight.detach() for part in parts]).to(torch.bfloat16)
    (stored,) = engine.llm.apply_model(lambda model: model.get_submodule(f"model.layers.1.self_attn.{fused}").weight)
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    with set_current_vllm_config(engine.llm.llm_engine.vllm_config):
        cast, _ = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN).forward_native(x)
    for values, theirs in ((weight, stored.t()), (x, cast)):
        exact = ~ties(values)
        assert exact.float().mean() > 0.4
        assert torch.equal(theirs.view(torch.uint8)[exact], torchaos_bits(values)[exact])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("fused", "parts"), [("qkv_proj", "qkv"), ("o_proj", "o"), ("down_proj", None)])
def test_a_rowwise_layer_is_the_engines_to_the_last_bit_but_one(policy, engine, layer, fused, parts):
    """The same FP8 operands, multiplied in FP32: scales come before the product here and after it there.

    A value exactly halfway between two FP8 numbers may go either way, since the scales are 448 / amax here and
    1 / (amax / 448) there.
    """
    name = f"model.layers.{layer}.{'mlp' if parts is None else 'self_attn'}"
    ours = policy.get_submodule(name)
    linears = [ours.down_proj] if parts is None else [getattr(ours, f"{part}_proj") for part in parts]
    generator = torch.Generator().manual_seed(layer)
    x = torch.randn(256, linears[0].in_features, generator=generator).to(torch.bfloat16)
    x[3] *= 100

    factory = layer_factory("rowwise", "none", emulate=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.cat([factory(linear)(x) for linear in linears], dim=-1)
        plain = torch.cat([linear(x) for linear in linears], dim=-1)
    output = engine.llm.apply_model(lambda model: model.get_submodule(f"{name}.{fused}")(x)[0])[0]

    weight = torch.cat([linear.weight.detach() for linear in linears]).to(torch.bfloat16)
    exact = ~ties(x).unsqueeze(1) & ~ties(weight).unsqueeze(0)
    assert exact.float().mean() > 0.4  # 0.48 to 0.70
    assert output.dtype == torch.bfloat16
    steps = (output[exact].view(torch.int16).int() - expected[exact].view(torch.int16).int()).abs()
    assert steps.max() <= 1  # of BF16; one FP8 operand more or less is several
    assert (steps != 0).float().mean() < 2e-3  # at most 5e-4
    assert (output - expected).abs().float().mean() < 0.02 * (output - plain).abs().float().mean()  # at most 0.009


class FakeQuantLinear(nn.Linear):
    """W8A8 in plain torch: one e4m3 scale per output channel and one per token."""

    @staticmethod
    def quantized(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True) / 448
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    def forward(self, input):
        return F.linear(self.quantized(input), self.quantized(self.weight))


def test_fp32_end_to_end_equals_a_plain_fake_quant_model(folder, monkeypatch):
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    monkeypatch.setattr(OnlineQuantizationConfig, "get_supported_act_dtypes", classmethod(lambda cls: [torch.float32]))
    start, model = build_policy(seed=2), build_policy(seed=3)
    save_policy(start, folder / "fp32", torch.float32)
    engine = start_engine(start, folder, vllm_engine_kwargs={"dtype": "float32"})
    start.load_state_dict(model.state_dict())
    engine.sync_weights()

    def reference(model):
        rows = []
        with torch.no_grad():
            for prompt in PROMPTS:
                logps = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
                rows.append(logps.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1))
        return torch.cat(rows)

    high_precision = reference(model)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.__class__ = FakeQuantLinear
    synced = score(engine.llm)
    assert (synced - reference(model)).abs().max() < 1e-4
    assert (synced - high_precision).abs().mean() > 0.005


# -- what TRL's own sync does to a quantised engine


def test_trls_own_sync_dies_half_way_where_ours_works(policy, folder):
    engine = start_engine(policy, folder)
    before = score(engine.llm)
    with pytest.raises((AssertionError, AttributeError)):
        _upstream.VLLMGeneration.sync_weights(engine)
    engine = start_engine(policy, folder)
    engine.sync_weights()
    assert torch.equal(score(engine.llm), before)
