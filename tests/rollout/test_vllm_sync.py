"""Weight sync into a real vLLM engine in FP8: exact, repeatable, complete or refused."""

import copy
import gc
import resource
from pathlib import Path

import pytest
import torch


pytest.importorskip("vllm")

from vllm_helpers import build_policy, save_policy, score, start_engine

from trl_fp8.diagnostics import Mean
from trl_fp8.rollout import _upstream


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sync")


@pytest.fixture(scope="module")
def policy(folder):
    """FP32 masters, as in training; the checkpoint is their BF16 rounding."""
    model = build_policy(tie_word_embeddings=False)
    save_policy(model, folder / "first")
    return model


@pytest.fixture(scope="module")
def records():
    return []


@pytest.fixture(scope="module")
def engine(policy, folder, records):
    return start_engine(policy, folder, records=records)


@pytest.fixture(scope="module")
def fresh(folder):
    """Log-probs of an engine that starts from other weights, and those weights."""
    model = build_policy(seed=1, tie_word_embeddings=False)
    save_policy(model, folder / "second")
    return model, score(start_engine(model, folder).llm)


def load(policy, model):
    policy.load_state_dict(model.state_dict())


@pytest.fixture
def first_weights(policy, engine):
    """The engine as it started, before and after."""
    first = copy.deepcopy(policy.state_dict())
    yield first
    policy.load_state_dict(first)
    engine.sync_weights()


def test_a_sync_gives_what_a_fresh_engine_on_the_new_checkpoint_gives(policy, engine, fresh, first_weights):
    start = score(engine.llm)
    load(policy, fresh[0])
    engine.sync_weights()
    synced = score(engine.llm)
    assert (synced - start).abs().mean() > 0.3  # the weights did change
    assert torch.equal(synced, fresh[1])
    engine.sync_weights()
    assert torch.equal(score(engine.llm), synced)
    policy.load_state_dict(first_weights)
    engine.sync_weights()
    assert torch.equal(score(engine.llm), start)


def test_a_sync_keeps_the_storage_of_the_engine(policy, engine):
    def storage(model):
        return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}

    before = engine.llm.apply_model(storage)[0]
    engine.sync_weights()
    assert engine.llm.apply_model(storage)[0] == before


def test_a_sync_is_timed_and_its_bytes_are_counted(policy, engine, records):
    records.clear()
    engine.sync_weights()
    (metrics,) = records
    assert metrics["rollout/sync_bytes"] == Mean(sum(p.numel() * 4 for p in policy.parameters()), 1.0)
    assert metrics["rollout/sync_time"].numerator > 0


def test_a_lost_parameter_is_refused_before_anything_is_loaded(policy, engine, first_weights):
    engine.sync_weights()
    before = score(engine.llm)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    attention = policy.model.layers[0].self_attn
    weight = attention.k_proj.weight
    del attention.k_proj.weight
    try:
        with pytest.raises(ValueError, match=r"missing: \['model.layers.0.self_attn.k_proj.weight'\].*before the"):
            engine.sync_weights()
        assert torch.equal(score(engine.llm), before)
    finally:
        attention.k_proj.weight = weight
    engine.generate([[3, 4, 5]], None, 1)


def test_a_new_parameter_is_refused_before_anything_is_loaded(policy, engine):
    engine.sync_weights()
    policy.extra = torch.nn.Parameter(torch.zeros(1))
    try:
        with pytest.raises(ValueError, match=r"new: \['extra'\]"):
            engine.sync_weights()
    finally:
        del policy.extra
    engine.sync_weights()


def test_tensors_that_die_after_they_were_yielded_arrive_whole(policy, engine, fresh, monkeypatch, first_weights):
    # What ZeRO-3 and FSDP do when the next parameter is gathered
    load(policy, fresh[0])
    original = type(engine)._iter_named_params

    def dying(self):
        for name, parameter in original(self):
            gathered = parameter.clone()
            yield name, gathered
            gathered.fill_(float("nan"))

    monkeypatch.setattr(type(engine), "_iter_named_params", dying)
    engine.sync_weights()
    assert torch.equal(score(engine.llm), fresh[1])


def test_the_prefix_cache_forgets_the_old_weights(policy, engine, fresh, first_weights, monkeypatch):
    def distribution():
        _, _, logps, ids = engine.generate([[3, 4, 5, 6] * 10], None, 1)  # 40 tokens: one block of 32 to be cached
        return logps[0][0], ids[0][0]

    monkeypatch.setattr(engine, "logprobs", 20)
    monkeypatch.setattr(engine, "generation_kwargs", {"seed": 0})
    first = distribution()
    load(policy, fresh[0])
    engine.sync_weights()
    second = distribution()
    policy.load_state_dict(first_weights)
    engine.sync_weights()
    assert distribution() == first
    assert second != first
    # The check can fail: without the reset, old keys and values meet new weights
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
    load(policy, fresh[0])
    engine.sync_weights()
    assert distribution() != second


def resident_bytes() -> int:
    """Of this process now; `ru_maxrss` is its peak, and never falls back to where growth could be seen."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def syncs_do_not_grow(engine, num_syncs):
    for _ in range(5):
        engine.sync_weights()
    gc.collect()
    before = resident_bytes()
    for _ in range(num_syncs):
        engine.sync_weights()
    gc.collect()
    grown = resident_bytes() - before
    assert grown < 8 * 2**20, f"{grown} bytes in {num_syncs} syncs"


def test_memory_is_flat_over_50_syncs(engine):
    syncs_do_not_grow(engine, 50)


@pytest.mark.slow
def test_memory_is_flat_over_200_syncs(engine):
    syncs_do_not_grow(engine, 200)


def test_a_tied_head_follows_the_embedding(folder):
    model, other = build_policy(), build_policy(seed=1)
    save_policy(model, folder / "tied")
    save_policy(other, folder / "tied_other")
    engine = start_engine(model, folder)
    expected = score(start_engine(other, folder).llm)
    load(model, other)
    engine.sync_weights()
    assert torch.equal(score(engine.llm), expected)


def test_adapters_are_merged_into_copies(folder):
    from peft import LoraConfig, get_peft_model

    base = build_policy(tie_word_embeddings=False).to(torch.bfloat16)
    path = save_policy(base, folder / "base")
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.name_or_path = path
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    engine = start_engine(model, folder)
    engine.sync_weights()
    engine.sync_weights()
    synced = score(engine.llm)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert not any(layer.merged for _, layer in _upstream.tuner_layers(model))
    assert (synced - score(start_engine(build_policy_from(path), folder).llm)).abs().mean() > 0.01
    merged = copy.deepcopy(model).merge_and_unload()
    save_policy(merged, folder / "merged")
    assert torch.equal(synced, score(start_engine(merged, folder).llm))


def build_policy_from(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def failing(pairs):
    for i, pair in enumerate(pairs):
        if i == 3:
            raise OSError("the network is gone")
        yield pair


def lacking(pairs):
    yield from ((name, parameter) for name, parameter in pairs if "k_proj" not in name)


def adding(pairs):
    for name, parameter in pairs:
        yield name, parameter
        yield name.replace("weight", "weight_too"), parameter


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (failing, OSError, "the network is gone"),
        (lacking, ValueError, r"lacks \['model.layers.0.self_attn.k_norm|lacks \['model.layers.0.self_attn.k_proj"),
        (adding, ValueError, "meets model.embed_tokens.weight_too"),
    ],
)
def test_a_sync_that_fails_half_way_makes_the_engine_refuse(policy, folder, monkeypatch, change, error, message):
    engine = start_engine(policy, folder)
    engine.sync_weights()
    original = type(engine)._iter_named_params
    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "_iter_named_params", lambda self: change(original(self)))
        with pytest.raises(error, match=message):
            engine.sync_weights()
    for use in (engine.sync_weights, lambda: engine.generate([[3, 4]], None, 1)):
        with pytest.raises(RuntimeError, match=f"{error.__name__}: .*start the run again"):
            use()


def test_half_a_fused_layer_is_refused_at_the_first_sync(policy, folder):
    """The engine loaded the checkpoint; a policy that lost k_proj since would fill a third of qkv with nothing."""
    engine = start_engine(policy, folder)
    before = score(engine.llm)
    attention = policy.model.layers[1].self_attn
    weight = attention.k_proj.weight
    del attention.k_proj.weight
    try:
        with pytest.raises(ValueError, match="first weight sync lacks .*k_proj.weight.*before the trainer"):
            engine.sync_weights()
    finally:
        attention.k_proj.weight = weight
    assert torch.equal(score(engine.llm), before)
