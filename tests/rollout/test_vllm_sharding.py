"""FP8 rollout beside weights that two processes share: DDP, FSDP2, ZeRO-3 (gloo), an engine on each or one server.

One launch of `vllm_shard_run.py` per strategy. What the engines hold after the last sync is compared with an engine
that one process starts on the saved model.
"""

import contextlib
import copy
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


pytest.importorskip("vllm")

from transformers import AutoModelForCausalLM
from vllm_helpers import Server, build_policy, clean_environment, save_policy, score, start_engine


pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]
STRATEGIES = {
    "ddp": "DistributedType.MULTI_CPU",
    "fsdp2": "DistributedType.FSDP",
    "zero3": "DistributedType.DEEPSPEED",
}
LORA = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.0}
GATHERED = {"fp8_recipe": "tensorwise", "fp8_fsdp_all_gather": True, "vllm_quantization": "fp8_per_channel"}
REQUESTS = {
    "full": {"settings": {"save_strategy": "steps", "save_steps": 4}},
    "lora": {"lora": LORA},
    "resumed": {"resume": "full/checkpoint-4"},
    "gathered": {"settings": GATHERED},
    "dora": {"lora": {**LORA, "use_dora": True}},
    "server": {"settings": {"vllm_mode": "server", "vllm_server_timeout": 240.0}},
    "split": {"settings": {"vllm_tensor_parallel_size": 2}},
}
CELLS = [
    *((strategy, name) for strategy in STRATEGIES for name in ("full", "lora", "dora")),
    *(("fsdp2", name) for name in ("resumed", "gathered", "server", "split")),
]
WHOLE = [(strategy, name) for strategy, name in CELLS if name in ("full", "resumed", "gathered")]


def launch(strategy, requests, folder):
    script = [str(ROOT / "tests" / "helpers" / "vllm_shard_run.py"), str(folder), json.dumps(requests)]
    shim = [] if strategy == "ddp" else [str(ROOT / "tests" / "helpers" / "cpu_sharding.py")]
    config = str(ROOT / "configs" / "accelerate" / f"cpu_2proc_{strategy}.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    done = subprocess.run(
        [*command, *shim, *script],
        env=clean_environment(OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="ERROR"),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    ranks = [torch.load(path, weights_only=False) for path in sorted(folder.glob("rank*.pt"))]
    assert len(ranks) == 2
    return ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`runs(strategy, name)`: what each rank saw, and the folder of the run. Few launches for all runs."""
    done = {}

    def get(strategy, name):
        if strategy == "zero3" and find_spec("deepspeed") is None:
            pytest.skip("needs deepspeed")
        # vLLM keeps the size of its groups for the life of a process
        names = [n for s, n in CELLS if s == strategy and (n == "split") == (name == "split")]
        if (strategy, *names) not in done:
            folder = tmp_path_factory.mktemp(f"{strategy}-{len(names)}")
            path = save_policy(build_policy(tie_word_embeddings=False), folder / "policy")
            requests = {n: copy.deepcopy(REQUESTS[n]) for n in names}
            with contextlib.ExitStack() as stack:
                if "server" in names:
                    server = Server(path, "--quantization", "fp8_per_channel", log=folder / "server.log")
                    stack.callback(server.close)
                    requests["server"]["settings"]["vllm_server_base_url"] = server.url
                done[strategy, *names] = launch(strategy, requests, folder), folder
        ranks, folder = done[strategy, *names]
        return [rank[name] for rank in ranks], folder / name

    return get


@pytest.mark.parametrize(("strategy", "name"), CELLS)
def test_every_rank_rolls_out_with_the_same_weights_and_calibrates(strategy, name, runs):
    (first, second), _ = runs(strategy, name)
    assert first["type"] == STRATEGIES[strategy]
    for key in ("sync_logp_diff", "bounds", "bytes", "k3", "scores"):
        assert str(first[key]) == str(second[key]), key
    assert len(first["sync_logp_diff"]) == len(first["k3"]) == 3  # generation batches, those before a resume too
    assert len(first["rho"]) > 0
    assert first["bounds"] != (0.6, 1.8)
    assert max(first["k3"]) < 0.01


@pytest.mark.parametrize(("strategy", "name"), WHOLE)
def test_the_engines_hold_what_one_process_loads_from_the_saved_model(strategy, name, runs, tmp_path):
    ranks, folder = runs(strategy, name)
    saved = AutoModelForCausalLM.from_pretrained(folder / "final")
    fresh = score(start_engine(saved, tmp_path, bf16=True).llm)
    start = AutoModelForCausalLM.from_pretrained(folder.parent / "policy")
    assert (fresh - score(start_engine(start, tmp_path, bf16=True).llm)).abs().mean() > 0.3
    for rank in ranks:
        assert torch.equal(rank["scores"], fresh)


@pytest.mark.parametrize("name", ["lora", "dora"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_engines_hold_the_adapters_that_one_process_merges(strategy, name, runs, tmp_path):
    from peft import PeftModel

    ranks, folder = runs(strategy, name)
    dtype = torch.bfloat16 if strategy == "zero3" else torch.float32  # DeepSpeed casts the model
    base = AutoModelForCausalLM.from_pretrained(folder.parent / "policy", dtype=dtype)
    merged = PeftModel.from_pretrained(base, folder / "final", autocast_adapter_dtype=False).merge_and_unload()
    path = save_policy(merged, tmp_path / "merged", dtype)
    fresh = score(start_engine(AutoModelForCausalLM.from_pretrained(path), tmp_path, bf16=True).llm)
    start = score(
        start_engine(AutoModelForCausalLM.from_pretrained(folder.parent / "policy"), tmp_path, bf16=True).llm
    )
    assert (fresh - start).abs().mean() > 0.1
    for rank in ranks:
        assert torch.equal(rank["scores"], fresh)


def test_an_engine_split_over_two_processes_scores_as_one(runs, tmp_path):
    """But for its row-parallel layers, which quantise half a row each, with scales of their own."""
    ranks, folder = runs("fsdp2", "split")
    saved = AutoModelForCausalLM.from_pretrained(folder / "final")
    fresh = score(start_engine(saved, tmp_path, bf16=True).llm)
    for rank in ranks:
        assert 0 < (rank["scores"] - fresh).abs().mean() < 0.05
