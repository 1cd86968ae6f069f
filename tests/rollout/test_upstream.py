"""Contract of the private or non-public names of TRL's vLLM generation and of PEFT that the rollout uses."""

import inspect

import pytest
import torch
from accelerate import Accelerator
from builders import build_model
from trl import GRPOTrainer
from trl.distributed import DistributedBackend

from trl_fp8.rollout import _upstream


@pytest.mark.parametrize("name", _upstream.REPLACED)
def test_names_are_replaced_inside_and_back_after_an_exception(name, monkeypatch):
    module = _upstream.REPLACED[name]
    monkeypatch.setattr(module, name, "original", raising=False)  # without vLLM there is no LLM

    def fails():
        with _upstream.in_place_of_trls(name, "ours") as original:
            assert (original, getattr(module, name)) == ("original", "ours")
            raise KeyError(name)

    with pytest.raises(KeyError, match=name):
        fails()
    assert getattr(module, name) == "original"


def test_trl_builds_its_engine_under_the_names_we_replace():
    assert "self.vllm_generation = VLLMGeneration(" in inspect.getsource(GRPOTrainer.__init__)
    assert "self.llm = LLM(" in inspect.getsource(_upstream.VLLMGeneration._init_vllm)
    assert "self.vllm_client = VLLMClient(" in inspect.getsource(_upstream.VLLMGeneration._init_vllm)
    assert "self._init_vllm()" in inspect.getsource(_upstream.VLLMGeneration.__init__)


@pytest.mark.parametrize("name", _upstream.VLLM_OVERRIDES)
def test_the_engines_methods_have_the_parameters_we_rely_on(name):
    parameters = inspect.signature(getattr(_upstream.VLLMGeneration, name)).parameters
    assert tuple(parameters) == _upstream.VLLM_OVERRIDES[name]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("init_communicator", ("self", "device")),
        ("update_named_params", ("self", "metadata", "named_params")),
        ("reset_prefix_cache", ("self",)),
        ("get_server_info", ("self",)),
        ("get_sequence_logprobs", ("self", "sequences", "prompt_lengths", "top_logprobs")),
    ],
)
def test_the_clients_methods_have_the_parameters_we_rely_on(name, parameters):
    signature = inspect.signature(getattr(_upstream.VLLMClient, name))
    assert tuple(signature.parameters)[: len(parameters)] == parameters


def test_trls_client_sends_all_weights_in_one_update():
    # The server quantises whole layers between start and finish; one update per tensor leaves fused layers garbage
    source = inspect.getsource(_upstream.VLLMClient.update_named_params)
    start, send, finish = (source.index(part) for part in ("_start_weight_update()", "iterator=", "_finish_weight_u"))
    assert start < send < finish
    assert "/start_weight_update" in inspect.getsource(_upstream.VLLMClient._start_weight_update)
    assert "/finish_weight_update" in inspect.getsource(_upstream.VLLMClient._finish_weight_update)


def test_trl_calls_the_sync_through_self_when_the_weights_sleep():
    source = inspect.getsource(_upstream.VLLMGeneration.generate)
    assert "self._llm_weights_sleeping" in source
    assert "self.sync_weights()" in source


def test_trl_streams_parameters_under_the_names_of_the_checkpoint():
    generation = object.__new__(_upstream.VLLMGeneration)
    generation.model = build_model()
    generation._dist = DistributedBackend(Accelerator(cpu=True))
    assert generation._dist.is_fsdp is False
    streamed = dict(generation._iter_named_params())
    assert streamed.keys() == dict(generation.model.named_parameters()).keys()
    weight = generation.model.model.layers[0].mlp.up_proj.weight
    assert streamed["model.layers.0.mlp.up_proj.weight"].data_ptr() == weight.data_ptr()


def test_the_fused_head_scores_at_temperature_1_and_is_gone_afterwards():
    model = build_model()
    ids = torch.arange(3, 15).view(2, 6)
    plain = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    forward = model.forward
    _upstream.add_fused_lm_head(model, temperature=2.0)  # as TRL does for `temperature`
    trained = model.forward
    for before in (trained, None):
        if before is None:
            del model.forward
        with _upstream.fused_head(model):
            scored = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        assert torch.allclose(scored, plain, atol=1e-3)
        assert model.forward == (before or forward)
