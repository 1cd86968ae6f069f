"""vLLM as the rollout engine: FP8 from the first token, and the trainer's weights in it before every rollout.

TRL loads one parameter at a time into the running engine. A quantised engine has thrown its BF16 parameters away, so
that raises, or leaves garbage where it does not (q, k and v live in one fused FP8 weight with its scales). vLLM's own
way to new weights is one bracket around all of them: the layers become BF16 placeholders, each is quantised when its
last parameter has arrived and is copied into the old storage, and the rest is finished at the end. The weights' side
of it is `engine.py`, the same with vLLM in a server of its own `server.py`.
"""

import contextlib
import difflib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import AutoConfig

from ..config import FP8GRPOConfig
from ..float8.convert import ConversionReport
from ..float8.recipes import RECIPES
from . import _upstream, same_model, server_checks
from .engine import SyncedEngine
from .layer_table import build_layer_table, check_one_sided, engine_layers, ignored_by_engine
from .pairing import engine_dtype, rollout_warnings, scale_rule_warning
from .server import ServerEngine


logger = logging.getLogger(__name__)


def engine_context(
    args: FP8GRPOConfig,
    before_start: Callable[[], ConversionReport | None],
    record: Callable[[Mapping[str, Any]], None],
    policy: Any,
) -> contextlib.AbstractContextManager:
    """Context in which TRL constructs our engine in place of its own.

    Args:
        args: of the run. Without vLLM, or with everything of ours off, TRL keeps its own engine.
        policy: name or model, as the trainer was given it.
        before_start: called when the policy is loaded and the engine (5 to 40 s) is not started yet; converts it.
        record: takes metrics, see [`~trl_fp8.diagnostics.MetricWindow`].

    Raises:
        ConnectionError, ValueError: no server answers, or it is not the one the run is configured for; vLLM knows no
            such engine argument.
    """
    quantization, fp8 = args.rollout_quantization, args.fp8_recipe != "none"
    ours = fp8 or quantization != "none" or args.vllm_kv_cache_dtype or args.vllm_engine_kwargs
    if not args.use_vllm or not ours:
        return contextlib.nullcontext()
    for warning in rollout_warnings(args):
        logger.warning(warning)
    _upstream.require_vllm()  # now, since loading a policy takes long
    if args.vllm_mode == "colocate":
        check_arguments(args)
        if args.device.type == "cpu" and "enforce_eager" not in cast(dict, args.vllm_engine_kwargs or {}):
            logger.warning(
                "vLLM compiles the model before it generates, on a CPU for minutes and without a sign of life. Skip "
                "it with vllm_engine_kwargs={'enforce_eager': True}."
            )
    elif args.process_index == 0:
        name = policy if isinstance(policy, str) else policy.name_or_path or ""
        server_checks.check_settings(args, server_checks.read_server_configuration(args, name))
    engine = ServerEngine if args.vllm_mode == "server" else RolloutEngine
    build = partial(engine, settings=args, before_start=before_start, record=record)
    return _upstream.in_place_of_trls("VLLMGeneration", build)


class RolloutEngine(SyncedEngine):
    """TRL's colocated vLLM with our quantisation, KV cache type and engine arguments, and a sync that re-quantises."""

    # -- construction ------------------------------------------------------------------------------------------------

    def check_model(self) -> None:
        check_source(self.model, self.trust_remote_code)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        settings, report = self._settings, self._report
        self._chosen = cast(dict, settings.vllm_engine_kwargs or {})
        self._ignored = [] if settings.rollout_quantization == "none" else ignored_by_engine(report)
        with _upstream.in_place_of_trls("LLM", self._build) as self._llm_class:
            yield
        if "hf_overrides" in self._chosen:
            found = same_model.config_difference(self.llm.llm_engine.model_config.hf_config, self.model)
            advice = "Take it out of hf_overrides in vllm_engine_kwargs."
            same_model.refuse_difference(found, "The engine", self.model, advice)
        fused = self.llm.apply_model(lambda model: getattr(model, "packed_modules_mapping", None) or {})[0]
        layers = self.llm.apply_model(engine_layers)[0]
        self.layer_table = build_layer_table(report, settings.fp8_scale_rounding, layers, fused)
        recipe, asked_for = "none" if report is None else report.recipe, "quantization_config" in self._chosen
        warnings = [check_one_sided(self.layer_table, recipe, settings.rollout_quantization, asked_for)]
        if recipe != "none" and RECIPES[recipe].engine_rounds_somewhere:
            warnings.append(scale_rule_warning(settings, _upstream.engine_rounds_block_scales()))
        for warning in filter(None, warnings):
            logger.warning(warning)
        if self.accelerator.is_main_process:
            print(self.layer_table)  # noqa: T201 - beside the report of the conversion

    @property
    def max_length(self) -> int:
        return self.llm.llm_engine.model_config.max_model_len

    def _build(self, **kwargs: Any) -> Any:
        quantization, extra = self._settings.rollout_quantization, dict(self._chosen)
        # vLLM follows the checkpoint, which may be FP16 or FP32; the trainer quantises what autocast makes of it
        own = {"dtype": engine_dtype(self._settings), "kv_cache_dtype": self._settings.vllm_kv_cache_dtype}
        own = {name: value for name, value in own.items() if value is not None}
        if quantization != "none":
            if kwargs.get("quantization") is not None:
                raise ValueError(
                    f"vllm_quantization={quantization!r} with a policy in {kwargs['quantization']}: the engine can "
                    "have one quantisation only. Load the policy unquantised, or set vllm_quantization='none'."
                )
            # One method under two names, of which only the second takes names to ignore
            own["quantization"] = "fp8_per_tensor" if quantization == "fp8" and self._ignored else quantization
            if self._ignored:
                chosen = dict(extra.get("quantization_config") or {})
                chosen["ignore"] = [*chosen.get("ignore", []), *self._ignored]
                extra["quantization_config"] = chosen
        try:
            return self._llm_class(**{**kwargs, **own, **extra})
        except Exception as error:
            on_cpu = self.accelerator.device.type == "cpu" and quantization not in ("none", "fp8_per_channel")
            raise RuntimeError(
                f"vLLM could not start an engine for this run ({type(error).__name__}: {error}). On top of TRL's "
                f"arguments it got {own | extra}: correct vllm_quantization={quantization!r}, vllm_kv_cache_dtype="
                f"{self._settings.vllm_kv_cache_dtype!r} or vllm_engine_kwargs; if memory is short, "
                "vllm_gpu_memory_utilization or vllm_max_model_length."
                + on_cpu
                * " On a CPU vLLM has kernels for 'fp8_per_channel' only (fp8_recipe='rowwise')."
            ) from error

    # -- weights -----------------------------------------------------------------------------------------------------

    def send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self.enable_sleep_mode:
            _upstream.wake_weights(self)
        self.llm.collective_rpc(_upstream.reload_weights, args=(weights,))
        if self.accelerator.device.type == "cpu":
            self.llm.apply_model(_upstream.repack_tied_heads)
        if self._settings.vllm_kv_cache_dtype is not None:
            self.llm.apply_model(check_cache_scales)
        self.llm.reset_prefix_cache()

    def score(self, token_ids: list[int]) -> list[float]:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports] - an extra

        # Greedy: sampling would take numbers from the random generator the rollout uses
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        (output,) = self.llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [position[token].logprob for token, position in pairs]


def check_arguments(args: FP8GRPOConfig) -> None:
    """Refuse names and types the installed vLLM does not know."""
    names, dtypes = _upstream.engine_arguments(), _upstream.kv_cache_dtypes()
    unknown = sorted(cast(dict, args.vllm_engine_kwargs or {}).keys() - names)
    if unknown:
        close = {name: difflib.get_close_matches(name, names, 2) for name in unknown}
        meant = "; ".join(f"{name}: {' or '.join(found)}?" for name, found in close.items() if found)
        raise ValueError(
            f"vllm_engine_kwargs has {', '.join(unknown)}, which the engine of this vLLM does not take. "
            f"{f'Did you mean {meant} ' if meant else ''}Names are those of vllm.EngineArgs."
        )
    if args.vllm_kv_cache_dtype is not None and args.vllm_kv_cache_dtype not in dtypes:
        raise ValueError(
            f"vllm_kv_cache_dtype={args.vllm_kv_cache_dtype!r} is not a type of cache this vLLM has. Use one of "
            f"{', '.join(dtypes)}, or None for the model's."
        )


def check_source(model: Any, trust_remote_code: bool) -> None:
    """Refuse a policy the engine cannot load by itself: it starts from the path the policy came from."""
    path = model.name_or_path
    advice = "Save policy and tokenizer with save_pretrained and pass the directory as model, or set use_vllm=False."
    if not path:
        raise ValueError(
            f"use_vllm=True with a {type(model).__name__} that was built in memory: vLLM starts from a checkpoint, "
            f"and this one has no path. {advice}"
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"use_vllm=True with a policy from {path!r}, which holds no configuration vLLM could start from: "
            f"{error}. {advice}"
        ) from error
    if is_peft_model(model):
        advice = (
            "If the adapter is what differs: the weight sync carries over what PEFT merges, for adapters named "
            "'default' (not AdaLoRA, nor trainable tokens of a larger adapter). Otherwise: " + advice
        )
    same_model.refuse_difference(same_model.difference(config, model), f"The checkpoint {path!r}", model, advice)


def check_cache_scales(model: nn.Module) -> None:
    """Refuse scales of a quantised KV cache that would turn it to nothing: a reload has zeroed them (vllm#57163)."""
    for name, module in model.named_modules():
        for kind in ("_k_scale", "_v_scale"):
            scale = getattr(module, kind, None)
            if isinstance(scale, Tensor) and not bool((torch.isfinite(scale) & (scale > 0)).all()):
                raise RuntimeError(
                    f"The KV cache scale {name}.{kind} is {scale.flatten()[:4].tolist()} after a weight sync, so keys "
                    "and values would be lost. Set vllm_kv_cache_dtype=None, or use a vLLM that keeps its scales."
                )
