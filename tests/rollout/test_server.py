"""The trainer's side of a vLLM server: what it asks, what it refuses, and what it sends, against a small HTTP server.

The real one is in `test_vllm_server.py`.
"""

import copy
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from builders import RUN, build_dataset, build_model, build_tokenizer, digits_reward
from safetensors.torch import load_file

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.float8 import convert_model
from trl_fp8.rollout import _upstream, server, server_checks


SERVED = {
    "instance_id": "a1b2c",
    "model_config": {
        "model": "/models/policy",
        "dtype": "torch.bfloat16",
        "quantization": "fp8_per_channel",
        "quantization_config": {"linear": {}, "ignore": []},
        "logprobs_mode": "processed_logprobs",
        "max_model_len": 64,
    },
    "cache_config": {"cache_dtype": "auto"},
    "weight_transfer_config": None,
}


class FakeServer:
    """Answers as vLLM does where the trainer asks; `status` overrides the HTTP status of a path."""

    def __init__(self):
        self.served = copy.deepcopy(SERVED)
        self.status: dict[str, int] = {}
        self.silent: set[str] = set()
        self.requests: list[str] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.closing = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(None)

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.answer(json.loads(body) if body else {})

            def answer(self, body):
                path = self.path.split("?")[0]
                fake.requests.append(path)
                if path in fake.silent:
                    fake.closing.wait(30)
                    return
                status = fake.status.get(path, 200)
                content = json.dumps(fake.content(path, body) if status == 200 else "no").encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()

    def content(self, path, body):
        if path == "/server_info":
            return {"vllm_config": self.served}
        if path == "/v1/models":
            return {"data": [{"id": "policy"}]}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            files = sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors"))
            self.weights.append({name: tensor for file in files for name, tensor in load_file(file).items()})
        if path == "/v1/completions" and "prompt_logprobs" in body:
            (prompt,) = body["prompt"]
            known = [None, *({str(token): {"logprob": -3.2, "rank": 1}} for token in prompt[1:])]
            return {"choices": [{"prompt_logprobs": known}]}
        if path == "/v1/completions":
            ids = [3, 4, 5, 1]
            logprobs = {
                "tokens": [f"token_id:{token}" for token in ids],
                "token_logprobs": [-3.2] * 4,
                "top_logprobs": [None] * 4,
            }
            choices = [(prompt, i) for prompt in body["prompt"] for i in range(body["n"])]
            return {"choices": [
                {"prompt_token_ids": prompt, "token_ids": [20 if i % 2 else 3, *ids[1:]], "logprobs": logprobs}
                for prompt, i in choices
            ]}  # fmt: skip
        return {}

    def close(self):
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def fake():
    server = FakeServer()
    yield server
    server.close()


def build_args(folder, **settings) -> FP8GRPOConfig:
    settings = {**RUN, "bf16": True, "use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 0.0, **settings}
    return FP8GRPOConfig(str(folder), **settings)


# -- asking


def test_the_address_is_trls(tmp_path):
    assert server_checks.server_url(build_args(tmp_path, vllm_server_port=8123)) == "http://0.0.0.0:8123"
    assert server_checks.server_url(build_args(tmp_path, vllm_server_base_url="http://a:1/")) == "http://a:1"


def test_the_servers_configuration_is_what_it_says(tmp_path, fake):
    assert (
        server_checks.read_server_configuration(build_args(tmp_path, vllm_server_base_url=fake.url), "Qwen/Qwen3-8B")
        == SERVED
    )
    assert fake.requests == ["/health", "/server_info"]


def test_an_absent_server_is_waited_for_until_the_timeout(tmp_path, fake, monkeypatch):
    fake.close()
    naps = []
    monkeypatch.setattr(server_checks.time, "sleep", naps.append)
    clock = iter(range(100))
    monkeypatch.setattr(server_checks.time, "monotonic", lambda: next(clock))
    args = build_args(tmp_path, vllm_server_base_url=fake.url, vllm_server_timeout=7.0)
    with pytest.raises(
        ConnectionError, match=f"no vLLM server at {fake.url} after vllm_server_timeout=7 s .*refused.*"
    ):
        server_checks.read_server_configuration(args, "Qwen/Qwen3-8B")
    assert naps  # it asked again
    assert max(naps) <= server_checks._RETRY_INTERVAL


def test_a_server_that_starts_late_is_found(tmp_path, fake, monkeypatch):
    fake.status["/health"] = 503
    monkeypatch.setattr(server_checks.time, "sleep", lambda seconds: fake.status.clear())
    args = build_args(tmp_path, vllm_server_base_url=fake.url, vllm_server_timeout=60.0)
    assert server_checks.read_server_configuration(args, "Qwen/Qwen3-8B") == SERVED


def test_a_server_that_never_gets_healthy_is_given_up(tmp_path, fake):
    """TRL's own wait has no end here: it gives up on refused connections only."""
    fake.status["/health"] = 503
    with pytest.raises(ConnectionError, match="503"):
        server_checks.read_server_configuration(build_args(tmp_path, vllm_server_base_url=fake.url), "Qwen/Qwen3-8B")


def test_a_server_without_development_endpoints_is_refused(tmp_path, fake):
    fake.status["/server_info"] = 404
    with pytest.raises(
        ValueError, match="has no /server_info.*VLLM_SERVER_DEV_MODE=1 .*openai.api_server --model Qwen/Qwen3-8B"
    ):
        server_checks.read_server_configuration(build_args(tmp_path, vllm_server_base_url=fake.url), "Qwen/Qwen3-8B")


@pytest.mark.parametrize("status", [401, 500])
def test_a_server_that_keeps_its_configuration_to_itself_is_refused(tmp_path, fake, status):
    fake.status["/server_info"] = status
    with pytest.raises(
        ValueError, match=f"answers /server_info with {status}.*API key.*api_server --model Qwen/Qwen3-8B"
    ):
        server_checks.read_server_configuration(build_args(tmp_path, vllm_server_base_url=fake.url), "Qwen/Qwen3-8B")


def test_a_server_that_is_silent_about_its_configuration_is_refused(tmp_path, fake, monkeypatch):
    fake.silent.add("/server_info")
    monkeypatch.setattr(server_checks, "_ANSWER_TIMEOUT", 0.2)
    with pytest.raises(ConnectionError, match="is healthy and does not answer /server_info within 0.2 s"):
        server_checks.read_server_configuration(build_args(tmp_path, vllm_server_base_url=fake.url), "Qwen/Qwen3-8B")


def test_a_server_with_less_room_than_the_run_needs_is_refused(tmp_path):
    args = build_args(tmp_path, vllm_max_model_length=128)
    with pytest.raises(ValueError, match="vllm_max_model_length needs .* 128 tokens, it has 64.*--max-model-len 128"):
        server_checks.check_settings(args, SERVED)
    with pytest.raises(ValueError, match="max_completion_length needs .* 65 tokens, it has 64"):
        server_checks.check_settings(build_args(tmp_path, max_completion_length=64), SERVED)
    server_checks.check_settings(build_args(tmp_path, max_completion_length=63), SERVED)


def test_what_is_not_json_is_refused(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(json, "dumps", lambda content: "<html>")
    with pytest.raises(ValueError, match="else at /server_info than the configuration of a vLLM server"):
        server_checks.read_server_configuration(build_args(tmp_path, vllm_server_base_url=fake.url), "Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    "answer",
    [
        {"model_config": {}},
        {},
        "VllmConfig(...)",
        None,
        {**SERVED, "model_config": None},
        {**SERVED, "model_config": {}},
        {**SERVED, "cache_config": {}},
        {**SERVED, "cache_config": None},
        {name: value for name, value in SERVED.items() if name != "instance_id"},
    ],
)
def test_what_is_not_a_vllm_server_is_refused(tmp_path, fake, answer):
    fake.served = answer
    with pytest.raises(
        ValueError, match="else at /server_info than the configuration of a vLLM server, .* Start vLLM there"
    ):
        server_checks.read_server_configuration(build_args(tmp_path, vllm_server_base_url=fake.url), "Qwen/Qwen3-8B")


# -- comparing


def changed(**changes):
    served = copy.deepcopy(SERVED)
    for name, value in changes.items():
        part = served["cache_config"] if name == "cache_dtype" else served["model_config"]
        part[name] = value
    return served


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, {}),
        ({"fp8_recipe": "rowwise_with_gw_hp"}, {}),
        ({"vllm_quantization": "fp8"}, {"quantization": "fp8_per_tensor"}),
        ({"fp8_recipe": "tensorwise"}, {"quantization": "fp8"}),
        ({"fp8_recipe": "blockwise"}, {"quantization": "fp8_per_block"}),
        ({"vllm_quantization": "none"}, {"quantization": None}),
        ({}, {"cache_dtype": "bfloat16"}),
        ({"vllm_kv_cache_dtype": "fp8"}, {"cache_dtype": "fp8_e4m3"}),
        ({"bf16": False}, {"dtype": "torch.float16"}),
    ],
)
def test_a_server_that_fits_passes(tmp_path, settings, changes):
    server_checks.check_settings(build_args(tmp_path, **settings), changed(**changes))


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (
            {},
            {"quantization": None},
            "='auto' with fp8_recipe='rowwise' needs the quantization 'fp8_per_channel', it has 'none'",
        ),
        ({"vllm_quantization": "fp8_per_tensor"}, {}, "needs the quantization 'fp8_per_tensor', it has 'fp8_per_ch"),
        ({"vllm_quantization": "none"}, {}, "needs the quantization 'none'"),
        ({}, {"dtype": "torch.float16"}, "bf16=True needs the dtype 'bfloat16', it has 'float16'"),
        ({}, {"cache_dtype": "fp8"}, "vllm_kv_cache_dtype=None needs the KV cache dtype 'auto', it has 'fp8'"),
        ({"vllm_kv_cache_dtype": "fp8_e5m2"}, {}, "needs the KV cache dtype 'fp8_e5m2', it has 'auto'"),
        ({}, {"logprobs_mode": "raw_logprobs"}, "needs the logprobs mode 'processed_logprobs', it has 'raw_logprobs'"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_the_command_of_one_that_does(tmp_path, settings, changes, message):
    args = build_args(tmp_path, **settings)
    with pytest.raises(ValueError, match=message) as error:
        server_checks.check_settings(args, changed(**changes))
    assert server_checks.serve_command(args, "/models/policy") in str(error.value)


def test_all_differences_are_named_at_once(tmp_path):
    with pytest.raises(ValueError, match="quantization.*; .*KV cache.*; .*logprobs mode"):
        server_checks.check_settings(
            build_args(tmp_path), changed(quantization="mxfp8", cache_dtype="fp8", logprobs_mode="raw_logits")
        )


def test_a_trainer_on_a_gpu_needs_a_server_that_takes_weights_over_nccl(tmp_path, monkeypatch):
    args = build_args(tmp_path)
    monkeypatch.setattr(type(args), "device", torch.device("cuda"))
    served = changed()
    with pytest.raises(ValueError, match="weight transfer backend 'nccl', it has None.*--weight-transfer-config"):
        server_checks.check_settings(args, served)
    server_checks.check_settings(args, {**served, "weight_transfer_config": {"backend": "nccl"}})


def test_the_command_on_a_cpu_is_one_that_starts(tmp_path):
    assert server_checks.serve_command(build_args(tmp_path), "tiny").startswith(
        "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model tiny --enforce-eager "
    )


def test_the_command_has_every_setting(tmp_path, monkeypatch):
    args = build_args(tmp_path, fp8_recipe="blockwise", vllm_kv_cache_dtype="fp8")
    monkeypatch.setattr(type(args), "device", torch.device("cuda"))
    assert server_checks.serve_command(args, "Qwen/Qwen3-8B", ["model.layers.0.mlp.down_proj"]) == (
        "VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-8B --quantization fp8_per_block --quantization-config "
        """'{"ignore": ["model.layers.0.mlp.down_proj"]}' --dtype bfloat16 --kv-cache-dtype fp8 --logprobs-mode """
        """processed_logprobs --max-logprobs -1 --weight-transfer-config '{"backend": "nccl"}'"""
    )


@pytest.mark.parametrize(
    ("exclude", "ignore", "message"),
    [
        ([], [], None),
        (["layers.0.mlp.down_proj"], ["model.layers.0.mlp.down_proj"], None),
        (["layers.0.mlp.down_proj"], ["*.0.mlp.down_proj"], None),
        (["mlp.down_proj"], [r"re:.*mlp\.down_proj"], None),
        (["layers.0.mlp.down_proj"], [], "in the server only: model.layers.0.mlp.down_proj"),
        ([], ["model.layers.1.self_attn.o_proj"], "in the trainer only: model.layers.1.self_attn.o_proj"),
        (
            ["layers.0.mlp.down_proj"],
            ["model.layers.1.mlp.down_proj"],
            "server only: model.layers.0.mlp.down_proj; in the trainer only: model.layers.1.mlp.down_proj",
        ),
    ],
)
def test_layers_must_be_quantised_on_both_sides_or_on_none(tmp_path, exclude, ignore, message):
    args = build_args(tmp_path, fp8_exclude_modules=exclude)
    report = convert_model(build_model(), "rowwise", exclude=exclude, emulate=True)
    served = changed(quantization_config={"ignore": ignore})
    if message is None:
        server_checks.check_layers(args, served, report)
    else:
        with pytest.raises(ValueError, match=f"{message}.*--model /models/policy.*fp8_exclude_modules"):
            server_checks.check_layers(args, served, report)


def test_a_trainer_in_bf16_takes_any_layers_of_the_server(tmp_path):
    args = build_args(tmp_path, fp8_recipe="none", vllm_quantization="fp8_per_channel")
    server_checks.check_layers(args, changed(quantization_config={"ignore": ["*"]}), None)


def test_another_checkpoint_of_the_same_architecture_is_no_other_model(tmp_path):
    build_model(seed=1).save_pretrained(tmp_path / "served")
    server_checks.check_model(build_args(tmp_path), changed(model=str(tmp_path / "served")), build_model())


def test_another_model_is_refused(tmp_path):
    build_model(hidden_size=32).save_pretrained(tmp_path / "served")
    with pytest.raises(ValueError, match="has hidden_size=32, and the policy .* has 64: it cannot take .* Restart"):
        server_checks.check_model(build_args(tmp_path), changed(model=str(tmp_path / "served")), build_model())


def test_a_server_that_changes_its_model_is_refused(tmp_path):
    build_model().save_pretrained(tmp_path / "served")
    served = changed(model=str(tmp_path / "served"), hf_overrides={"rms_norm_eps": 0.1})
    with pytest.raises(ValueError, match="has rms_norm_eps=0.1, and the policy .*1e-06.* Restart"):
        server_checks.check_model(build_args(tmp_path), served, build_model())


def test_a_model_that_cannot_be_seen_must_have_the_policys_name(tmp_path):
    policy = build_model()
    policy.name_or_path = str(tmp_path / "not_here")
    server_checks.check_model(build_args(tmp_path), changed(model=str(tmp_path / "not_here")), policy)
    with pytest.raises(ValueError, match="elsewhere' cannot be read here .*make that path readable"):
        server_checks.check_model(build_args(tmp_path), changed(model=str(tmp_path / "elsewhere")), policy)


# -- a run


@pytest.fixture
def policy(tmp_path):
    model = build_model()
    model.save_pretrained(tmp_path / "policy")
    build_tokenizer().save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


@pytest.fixture
def serving(fake, policy, monkeypatch):
    """A fake server of the policy, for a trainer that has no vLLM installed."""
    from trl.generation import vllm_client, vllm_generation

    fake.served["model_config"]["model"] = policy
    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda *args, **kwargs: True)
    monkeypatch.setattr(vllm_client, "_HAS_RESET_PREFIX_CACHE_SUCCESS", True)
    return fake


def build_trainer(policy, folder, url, **settings):
    settings = {"vllm_sync_check_interval": 0, "model_init_kwargs": {"dtype": "float32"}, **settings}
    args = build_args(folder / "out", vllm_server_base_url=url, **settings)
    return FP8GRPOTrainer(policy, digits_reward, args, build_dataset(), processing_class=build_tokenizer())


def test_a_server_that_does_not_fit_is_refused_before_the_policy_is_loaded(policy, tmp_path, serving, monkeypatch):
    import trl.trainer.grpo_trainer as upstream

    monkeypatch.setattr(
        upstream, "create_model_from_path", lambda *args, **kwargs: pytest.fail("the policy is loaded")
    )
    with pytest.raises(ValueError, match="needs the quantization 'fp8_per_tensor'"):
        build_trainer(policy, tmp_path, serving.url, fp8_recipe="tensorwise")
    serving.close()
    with pytest.raises(ConnectionError, match="no vLLM server at"):
        build_trainer(policy, tmp_path, serving.url)
    serving.__init__()  # for the fixture to close


def test_a_run_sends_every_weight_before_every_generation(policy, tmp_path, serving, capsys):
    trainer = build_trainer(policy, tmp_path, serving.url, max_steps=8, vllm_sync_check_interval=1)
    assert "rollout: a vLLM server in fp8_per_channel" in capsys.readouterr().out
    start = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    assert len(serving.weights) == 2
    # A tied head is sent under both names, as a checkpoint of an untied one has it
    assert serving.weights[0].keys() == start.keys()
    assert all(torch.equal(serving.weights[0][name], start[name]) for name in start)
    assert not torch.equal(serving.weights[1]["model.norm.weight"], start["model.norm.weight"])
    syncs = [path for path in serving.requests if path in ("/collective_rpc", "/reset_prefix_cache")]
    assert syncs == ["/collective_rpc", "/reset_prefix_cache"] * 2
    assert list((tmp_path / "out").glob("rollout-weights-*")) == []
    logs = [entry for entry in trainer.state.log_history if "rollout/sync_logp_diff" in entry]
    assert len(logs) == 2
    assert all(entry["rollout/sync_bytes"] > 0 for entry in logs)


def test_a_server_that_was_restarted_is_refused(policy, tmp_path, serving):
    trainer = build_trainer(policy, tmp_path, serving.url)
    engine = trainer.vllm_generation
    engine.sync_weights()
    engine.generate([[3, 4, 5]], None, 1)
    serving.served["instance_id"] = "d4e5f"
    with pytest.raises(RuntimeError, match="it was restarted.*resume_from_checkpoint=True"):
        engine.generate([[3, 4, 5]], None, 1)


def test_a_server_that_cannot_load_the_weights_generates_no_more(policy, tmp_path, serving, monkeypatch):
    engine = build_trainer(policy, tmp_path, serving.url).vllm_generation
    engine.vllm_client.session.get_adapter(serving.url).max_retries.backoff_factor = 0
    serving.status["/collective_rpc"] = 500
    with pytest.raises(RuntimeError, match="could not load the weights from .*500 error.*output_dir"):
        engine.sync_weights()
    serving.status.clear()
    with pytest.raises(RuntimeError, match="A weight sync failed half-way .*last checkpoint"):
        engine.generate([[3, 4, 5]], None, 1)


def test_a_lost_server_is_named(policy, tmp_path, serving):
    engine = build_trainer(policy, tmp_path, serving.url).vllm_generation
    engine.vllm_client.session.get_adapter(serving.url).max_retries.backoff_factor = 0
    engine.sync_weights()
    serving.close()
    with pytest.raises(RuntimeError, match=f"{serving.url} was lost during generation .*resume_from_checkpoint=True"):
        engine.generate([[3, 4, 5]], None, 1)
    with pytest.raises(RuntimeError, match="was lost during a weight sync"):
        engine.sync_weights()
    serving.__init__()


def test_a_server_that_hangs_is_given_up_and_not_asked_again(policy, tmp_path, serving):
    engine = build_trainer(policy, tmp_path, serving.url, ddp_timeout=1).vllm_generation
    serving.silent.add("/collective_rpc")
    with pytest.raises(RuntimeError, match=r"was lost during a weight sync .*timeout.* raise ddp_timeout=1"):
        engine.sync_weights()
    assert serving.requests.count("/collective_rpc") == 1


def test_everything_off_leaves_trls_engine_alone(policy, tmp_path, serving, monkeypatch):
    opened = []
    monkeypatch.setattr(_upstream.VLLMClient, "init_communicator", lambda self, device: opened.append(type(self)))
    off = {"fp8_recipe": "none", "clip_policy": "fixed"}
    trainer = build_trainer(policy, tmp_path, serving.url, **off)
    assert type(trainer.vllm_generation) is _upstream.VLLMGeneration
    assert opened == [_upstream.VLLMClient]


# -- parts


def test_shards_hold_everything_and_no_more_than_asked(tmp_path):
    tensors = {f"t{i}": torch.full((i + 1, 4), float(i)).t() for i in range(5)}  # 16 to 80 bytes, not contiguous
    server.write_shards(str(tmp_path), iter(tensors.items()), max_bytes=64)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        "model-00000.safetensors",
        "model-00001.safetensors",
        "model-00002.safetensors",
    ]
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("address", ["foo", "http://127.0.0.1:abc"])
def test_what_is_not_an_address_is_refused_at_once(address, tmp_path):
    args = FP8GRPOConfig(
        str(tmp_path), use_cpu=True, report_to=[], use_vllm=True, vllm_mode="server", vllm_server_base_url=address
    )
    with pytest.raises(ValueError, match="which is not an address.*Set vllm_server_base_url"):
        server_checks.read_server_configuration(args, "Qwen/Qwen3-8B")


def test_what_does_not_speak_http_is_no_server(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer():
            connection, _ = listening.accept()
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        args = FP8GRPOConfig(
            str(tmp_path),
            use_cpu=True,
            report_to=[],
            use_vllm=True,
            vllm_mode="server",
            vllm_server_port=port,
            vllm_server_timeout=0.1,
        )
        with pytest.raises(ConnectionError, match="with no vLLM server at"):
            server_checks.read_server_configuration(args, "Qwen/Qwen3-8B")


def test_weights_a_killed_run_has_left_are_deleted(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getpid()):
        (tmp_path / f"rollout-weights-{pid}-x").mkdir()
    (tmp_path / "rollout-weights-mine").mkdir()
    server.delete_weights_of_dead_runs(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"rollout-weights-{os.getpid()}-x", "rollout-weights-mine"]
