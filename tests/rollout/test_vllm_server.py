"""FP8 rollout in a vLLM server: a real server in a process of its own, as far as a machine without CUDA goes.

Weights reach it through a directory; over NCCL they need CUDA, which is not run here.
"""

import signal
import socket
import threading
import time

import pytest
import torch


pytest.importorskip("vllm")

import requests
from builders import RUN, build_dataset, build_tokenizer, digits_reward, logged
from vllm_helpers import PROMPTS, Server, build_policy, save_policy, score, start_engine

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer


pytestmark = pytest.mark.vllm
START_TIMEOUT = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def path(folder):
    return save_policy(build_policy(), folder / "policy")


@pytest.fixture(scope="module")
def server(folder, path):
    server = Server(path, "--quantization", "fp8_per_channel", log=folder / "server.log")
    yield server
    server.close()


def build_server_trainer(path, output_dir, url, *, reward=digits_reward, **settings):
    settings = {
        **RUN,
        "bf16": True,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_server_timeout": START_TIMEOUT,
        "model_init_kwargs": {"dtype": "float32"},
        **settings,
    }
    return FP8GRPOTrainer(
        path,
        reward,
        FP8GRPOConfig(str(output_dir), **settings),
        build_dataset(),
        processing_class=build_tokenizer(),
    )


def server_scores(trainer) -> torch.Tensor:
    """What `score` of the helpers gives, from the server."""
    client = trainer.vllm_generation.vllm_client
    rows = client.get_sequence_logprobs(PROMPTS, [1] * len(PROMPTS), top_logprobs=0)["actual_logprobs"]
    return torch.tensor([logprob for row in rows for (logprob,) in row])


@pytest.fixture(scope="module")
def finished(path, folder, server):
    trainer = build_server_trainer(path, folder / "out", server.url, calibration_interval=1, max_steps=8)
    trainer.train()
    return trainer


def test_the_trainer_waits_for_the_server_and_trains_with_it(finished):
    assert logged(finished, "clip_bounds/lower")[-1] != 0.6
    assert len(logged(finished, "mismatch/k3_kl")) == 2
    assert max(logged(finished, "mismatch/k3_kl")) < 0.02
    assert min(logged(finished, "mismatch/ess")) > 0.9
    assert logged(finished, "mismatch/unscored") == [0.0, 0.0]


def test_each_generation_batch_syncs_once_and_is_compared(finished):
    num_bytes = 4 * sum(p.numel() for p in finished.model.parameters())
    assert logged(finished, "rollout/sync_bytes") == [num_bytes] * 2
    differences = logged(finished, "rollout/sync_logp_diff")
    assert len(differences) == 2
    assert all(0 < value < 0.1 for value in differences)


def test_no_weights_are_left_on_disk(finished, folder):
    assert list((folder / "out").glob("rollout-weights-*")) == []


def test_a_synced_server_equals_a_fresh_engine_on_the_new_checkpoint(finished, folder, monkeypatch):
    engine, model = finished.vllm_generation, finished.model
    before = server_scores(finished)
    other = build_policy(seed=1)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_policy(other, folder / "other")
    fresh = score(start_engine(other, folder).llm)
    monkeypatch.setattr(engine.sync_check, "interval", 0)  # the engine is given other weights than were trained
    engine.sync_weights()
    trained = server_scores(finished)
    assert (trained - before).abs().mean() > 0  # the last step was not sent yet
    model.load_state_dict(other.state_dict())
    engine.sync_weights()
    assert (server_scores(finished) - trained).abs().mean() > 0.3
    assert torch.equal(server_scores(finished), fresh)
    model.load_state_dict(start)
    engine.sync_weights()
    assert torch.equal(server_scores(finished), trained)


# -- refusals, by what a real server says of itself


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_quantization": "fp8_per_tensor"}, "needs the quantization 'fp8_per_tensor', it has 'fp8_per_channel'"),
        ({"vllm_quantization": "none"}, "needs the quantization 'none', it has 'fp8_per_channel'"),
        ({"vllm_kv_cache_dtype": "fp8"}, "needs the KV cache dtype 'fp8', it has 'auto'"),
        ({"bf16": False, "fp16": True}, "fp16=True needs the dtype 'float16', it has 'bfloat16'"),
        (
            {"fp8_exclude_modules": ["layers.1.mlp.down_proj"]},
            r"different layers \(in the server only: model.layers.1.mlp.down_proj\)",
        ),
    ],
)
def test_a_server_that_quantises_otherwise_is_refused(path, tmp_path, finished, server, settings, message):
    with pytest.raises(ValueError, match=f"{message}.*openai.api_server --model"):
        build_server_trainer(path, tmp_path, server.url, **settings)


def test_a_server_of_another_model_is_refused(tmp_path, finished, server):
    other = save_policy(build_policy(num_hidden_layers=3), tmp_path / "other")
    with pytest.raises(ValueError, match="has num_hidden_layers=2, and the policy .* has 3: it cannot take"):
        build_server_trainer(other, tmp_path, server.url)


def test_a_server_without_development_endpoints_is_refused(path, tmp_path, monkeypatch, finished, server):
    # What vLLM answers without VLLM_SERVER_DEV_MODE, from the same server
    from trl_fp8.rollout import server_checks

    get = requests.get
    monkeypatch.setattr(
        server_checks.requests, "get", lambda url, **options: get(url.replace("server_info", "nothing"), **options)
    )
    with pytest.raises(ValueError, match="has no /server_info.*VLLM_SERVER_DEV_MODE=1"):
        build_server_trainer(path, tmp_path, server.url)


# -- the end of a server


def test_a_server_that_dies_in_mid_generation_is_told_and_the_run_resumes_on_another(
    path, folder, tmp_path, finished, server, monkeypatch
):
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    mortal = Server(path, "--quantization", "fp8_per_channel", log=folder / "mortal.log")
    try:
        trainer = build_server_trainer(path, tmp_path, mortal.url, **settings)
        client = trainer.vllm_generation.vllm_client
        client.session.mount("http://", requests.adapters.HTTPAdapter())  # TRL's repeats for a minute
        generate, calls = client.generate, []

        def generate_and_lose_the_server(**kwargs):
            calls.append(kwargs)
            if len(calls) == 2:
                mortal.signal(signal.SIGSTOP)  # it takes the request and does not answer
                threading.Timer(1.0, mortal.signal, [signal.SIGKILL]).start()
            return generate(**kwargs)

        monkeypatch.setattr(client, "generate", generate_and_lose_the_server)
        with pytest.raises(RuntimeError, match=f"{mortal.url} was lost during generation .*resume_from_checkpoint"):
            trainer.train()
        assert trainer.state.global_step == 4
    finally:
        mortal.close()
    again = build_server_trainer(path, tmp_path, server.url, **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8
    assert logged(again, "mismatch/k3_kl")[-1] < 0.02


def test_a_server_that_is_asked_to_stop_leaves_nothing(finished, server):
    """The last test of the file: it ends the server of all."""
    server.process.terminate()
    server.process.wait(60)
    deadline = time.monotonic() + 30  # its children follow
    while server.is_alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not server.is_alive()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0
