"""What a configuration must not say, found without a model, data or a device. The rest is in `checks.py`."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from .clipping.search import ClipSearch
from .float8.recipes import RECIPES


if TYPE_CHECKING:
    from .config import FP8GRPOConfig

# Names of vLLM 0.26 to 0.31 for quantising an unquantised checkpoint at load time
VLLM_QUANTIZATIONS = (
    "auto",
    "none",
    "fp8",
    "fp8_per_tensor",
    "fp8_per_channel",
    "fp8_per_block",
    "mxfp8",
    "nvfp4_per_token",
    "int8_per_channel_weight_only",
    "torchao",
    "compressed-tensors",
)
# Arguments of the engine that TRL's colocate mode passes (trl 1.16, `VLLMGeneration._init_vllm`), with what to do
# instead. `max_num_batched_tokens` is not here: it is a constant of TRL's and changes no result
ENGINE_OWNERS = {
    "model": "The engine runs the model the trainer is given",
    "tensor_parallel_size": "Use vllm_tensor_parallel_size",
    "gpu_memory_utilization": "Use vllm_gpu_memory_utilization",
    "max_model_len": "Use vllm_max_model_length",
    "max_num_seqs": "It is per_device_train_batch_size * vllm_tensor_parallel_size * steps_per_generation",
    "enable_sleep_mode": "Use vllm_enable_sleep_mode",
    "model_impl": "Use vllm_model_impl",
    "trust_remote_code": "Use trust_remote_code",
    "distributed_executor_backend": "Colocation needs 'external_launcher'; drop it",
    "seed": "Ranks of one tensor-parallel group share a seed; drop it, and use the trainer's seed",
    "logprobs_mode": "Importance weights need 'processed_logprobs'; drop it",
    "quantization": "Use vllm_quantization",
    "kv_cache_dtype": "Use vllm_kv_cache_dtype",
}
# Losses in which L bounds A < 0 tokens and H bounds A > 0 tokens
CALIBRATED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# Fields whose Python None (YAML null) means the word "none"
_NONE_FIELDS = ("fp8_recipe", "fp8_scale_rounding", "vllm_quantization")


def check_values(args: "FP8GRPOConfig", own_fields: Iterable[str]) -> None:
    """Values the parser lets through: Literal fields and numbers are not checked for Python callers or YAML."""
    for name in _NONE_FIELDS:
        value = getattr(args, name)
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            setattr(args, name, "none")
    if args.vllm_kv_cache_dtype is not None and str(args.vllm_kv_cache_dtype).lower() in ("none", "null"):
        args.vllm_kv_cache_dtype = None
    if isinstance(args.fp8_exclude_modules, str):
        args.fp8_exclude_modules = [args.fp8_exclude_modules]
    hints = get_type_hints(type(args))
    for name in own_fields:
        setattr(args, name, _checked(name, getattr(args, name), hints[name]))
    for name, hint in (("epsilon", float), ("epsilon_high", float | None), ("delta", float | None)):
        setattr(args, name, _checked(name, getattr(args, name), hint))
    for name in ("gradient_accumulation_steps", "num_iterations", "steps_per_generation", "generation_batch_size"):
        value = getattr(args, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r} is not a number of batches to train on. Set a whole number >= 1.")
    clip_max = args.vllm_importance_sampling_clip_max
    if clip_max is not None and not clip_max > 0:
        raise ValueError(
            f"vllm_importance_sampling_clip_max={clip_max} drops every token: a weight is positive. Set it above 0."
        )
    if isinstance(args.vllm_engine_kwargs, str):
        args.vllm_engine_kwargs = mapping("vllm_engine_kwargs", args.vllm_engine_kwargs)
    if args.vllm_quantization not in VLLM_QUANTIZATIONS:
        raise ValueError(_unknown("vllm_quantization", args.vllm_quantization, VLLM_QUANTIZATIONS))
    if args.vllm_importance_sampling_mode not in IMPORTANCE_SAMPLING_MODES:
        raise ValueError(
            _unknown("vllm_importance_sampling_mode", args.vllm_importance_sampling_mode, IMPORTANCE_SAMPLING_MODES)
        )
    for name in ("epsilon", "epsilon_high"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value} is not a trust region: it clips every ratio or none. Set a number > 0.")
    for name, off in (
        ("calibration_interval", "clip_policy='fixed' to keep the bounds"),
        ("shadow_interval", "unset"),
    ):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} never comes round. Set a number of generation batches >= 1, or {off}.")
    if args.vllm_sync_check_interval < 0 or args.vllm_sync_check_max_ratio <= 1:
        raise ValueError(
            f"vllm_sync_check_interval={args.vllm_sync_check_interval} and vllm_sync_check_max_ratio="
            f"{args.vllm_sync_check_max_ratio} would compare never or stop at the first sync. Set an interval >= 0 "
            "(0: off) and a ratio > 1."
        )
    search = ClipSearch(**{f.name: getattr(args, f.name) for f in dataclasses.fields(ClipSearch)})
    search.check_start(args.clip_lower_init, args.clip_upper_init)
    gathered = [recipe.name for recipe in RECIPES.values() if recipe.one_weight_scale]
    if args.fp8_fsdp_all_gather and args.fp8_recipe not in gathered:
        raise ValueError(
            f"fp8_fsdp_all_gather=True with fp8_recipe={args.fp8_recipe!r}: FP8 is gathered with one scale for the "
            f"whole weight, and this recipe has none or others. Set fp8_recipe={' or '.join(map(repr, gathered))}, or "
            "fp8_fsdp_all_gather=False: FSDP2 then gathers BF16, twice the bytes."
        )


def check_accelerate_fp8(args: "FP8GRPOConfig") -> None:
    # TRL's bf16=True beats this variable without a word, so the accelerator never shows what was asked for
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower() == "fp8":
        raise ValueError(
            "accelerate's mixed_precision='fp8' (ACCELERATE_MIXED_PRECISION) would be overridden by TRL's "
            "bf16=True, or convert the model a second time. Launch with mixed_precision 'bf16' or 'no' and choose "
            f"the FP8 recipe here (fp8_recipe={args.fp8_recipe!r})."
        )


def check_rollout(args: "FP8GRPOConfig") -> None:
    fp8 = args.fp8_recipe != "none"
    if not args.use_vllm:
        for name, value, off in (
            ("vllm_quantization", args.vllm_quantization, ("auto", "none")),
            ("vllm_kv_cache_dtype", args.vllm_kv_cache_dtype, (None,)),
            ("vllm_engine_kwargs", args.vllm_engine_kwargs, (None,)),
        ):
            if value not in off and value != {}:
                raise ValueError(
                    f"{name}={value!r} asks for something of the vLLM engine, but use_vllm=False starts none. Set "
                    f"use_vllm=True, or leave {name} unset."
                )
    else:
        _check_engine(args)
    least = args.vllm_importance_sampling_clip_min
    if least is not None and not (math.isfinite(least) and least >= 0):
        raise ValueError(
            f"vllm_importance_sampling_clip_min={least} bounds importance weights, which are positive, and would make "
            "them NaN or do nothing. Set a number >= 0, or None for no bound."
        )
    truncated = {"top_p": args.top_p < 1, "top_k": args.top_k > 0, "min_p": bool(args.min_p)}
    if args.use_vllm and args.vllm_importance_sampling_correction and any(truncated.values()):
        names = [name for name, on in truncated.items() if on]
        raise ValueError(
            f"{', '.join(f'{n}={getattr(args, n)}' for n in names)} truncates sampling, which multiplies every "
            "importance weight by the kept mass (huggingface/trl#6789). Set top_p=1.0, top_k=0, min_p=None, or "
            "vllm_importance_sampling_correction=False."
        )
    if fp8 or args.resolved_clip_policy != "fixed":
        _check_stock_features(args)


def _check_engine(args: "FP8GRPOConfig") -> None:
    if args.vllm_mode not in ("colocate", "server"):
        raise ValueError(_unknown("vllm_mode", args.vllm_mode, ("colocate", "server")))
    if args.vllm_mode == "server" and args.vllm_engine_kwargs:
        raise ValueError(
            f"vllm_engine_kwargs={args.vllm_engine_kwargs!r} with vllm_mode='server': the engine was built when the "
            "server was started, and takes no arguments from here. Pass them to `vllm serve` and leave "
            "vllm_engine_kwargs unset."
        )
    if args.rollout_quantization == "compressed-tensors":
        raise ValueError(
            "vllm_quantization='compressed-tensors' is the format of checkpoints quantised beforehand, and the engine "
            "starts from the policy's own, which is not. Use 'fp8_per_channel', which quantises while it loads."
        )
    kwargs = args.vllm_engine_kwargs or {}
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise ValueError(_nomapping("vllm_engine_kwargs", kwargs))
    for name, value in kwargs.items():
        if name in ENGINE_OWNERS:
            raise ValueError(
                f"vllm_engine_kwargs={{{name!r}: {value!r}}} sets what TRL sets already, and "
                f"only one can hold. {ENGINE_OWNERS[name]}."
            )
    sleeps = args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode
    if sleeps and str(args.vllm_kv_cache_dtype).startswith("fp8"):
        raise ValueError(
            f"vllm_kv_cache_dtype={args.vllm_kv_cache_dtype!r} with vllm_enable_sleep_mode=True: sleeping discards "
            "the scales of the FP8 cache and the engine wakes to garbage (vllm-project/vllm#25800). Unset one of them."
        )


def _check_stock_features(args: "FP8GRPOConfig") -> None:
    if args.use_liger_kernel:
        raise ValueError(
            "use_liger_kernel=True replaces forwards that call the linear layers, so neither FP8 nor the BF16 "
            "reference could be vouched for. Set use_liger_kernel=False."
        )
    if args.use_transformers_continuous_batching:
        raise ValueError(
            "use_transformers_continuous_batching=True casts the FP32 master weights to BF16 in place (TRL 1.16), "
            "which loses small updates. Set it to False, or use vLLM."
        )


def _checked(name: str, value: Any, hint: Any) -> Any:
    """`value` of field `name` if it fits the type hint (an int is a float); `ValueError` otherwise."""
    options = get_args(hint) if type(hint).__name__ in ("UnionType", "Union") else (hint,)
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return value
            raise ValueError(_unknown(name, value, get_args(option)))
        if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            if math.isfinite(value):
                return float(value)
            raise ValueError(f"{name}={value} is not finite, so nothing can be compared with it. Set a finite number.")
        plain = get_origin(option) or option
        if isinstance(value, plain) and not (isinstance(value, bool) and plain is not bool):
            if isinstance(value, list) and not all(isinstance(item, str) for item in value):
                break
            return value
    expected = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ValueError(f"{name}={value!r} has the wrong type ({type(value).__name__}). Pass {expected}.")


def mapping(name: str, text: str) -> dict[str, Any]:
    """The JSON object in `text`, which transformers parses as well, with json's own words where it is none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{_nomapping(name, text)} ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(_nomapping(name, text))
    return value


def _nomapping(name: str, value: Any) -> str:
    return (
        f"{name}={value!r} is not a mapping from argument names to values. Pass a dict, or on the command line a JSON "
        "object such as '{\"enforce_eager\": true}'."
    )


def _unknown(name: str, value: Any, known: tuple) -> str:
    return f"{name}={value!r} is not one of the values it can take. Use one of: {', '.join(map(str, known))}."
