"""vLLM as the rollout engine: FP8 from the first token, and the trainer's weights in it before every rollout.

TRL loads one parameter at a time into the running engine. A quantised engine has thrown its BF16 parameters away, so
that raises, or leaves garbage where it does not (q, k and v live in one fused FP8 weight with its scales). vLLM's own
way to new weights is one bracket around all of them: the layers become BF16 placeholders, each is quantised when its
last parameter has arrived and is copied into the old storage, and the rest is finished at the end. Per sync:

    names complete?  ->  wake up  ->  reload_weights(all parameters, one at a time)  ->  tied head, caches, canary

The names are compared before anything is loaded, because a bracket that lacks k_proj fills it with uninitialised
memory and says nothing. What fails inside leaves a half-loaded engine, which then refuses to generate.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from . import _upstream, parity
from .canary import Canary
from .config import FP8GRPOConfig
from .float8 import ConversionReport
from .pairing import rollout_warnings
from .parity import engine_layers, ignored_by_engine


logger = logging.getLogger(__name__)


def engine_context(
    args: FP8GRPOConfig,
    before_start: Callable[[], ConversionReport | None],
    record: Callable[[Mapping[str, Any]], None],
) -> contextlib.AbstractContextManager:
    """Context in which TRL constructs our engine in place of its own.

    Args:
        args: of the run. Without vLLM, with a server, or with everything of ours off, TRL keeps its own engine.
        before_start: called when the policy is loaded and the engine (5 to 40 s) is not started yet; converts it.
        record: takes metrics, see [`~trl_fp8.metrics.MetricWindow`].
    """
    quantization, fp8 = args.rollout_quantization, args.fp8_recipe != "none"
    ours = fp8 or quantization != "none" or args.vllm_kv_cache_dtype or args.vllm_engine_kwargs
    if not args.use_vllm or args.vllm_mode != "colocate" or not ours:
        return contextlib.nullcontext()
    for warning in rollout_warnings(args):
        logger.warning(warning)
    engine = partial(RolloutEngine, settings=args, before_start=before_start, record=record)
    return _upstream.engine_in_place_of_trls(engine)


class RolloutEngine(_upstream.VLLMGeneration):
    """TRL's colocated vLLM with our quantisation, KV cache type and engine arguments, and a sync that re-quantises."""

    def __init__(
        self,
        *args: Any,
        settings: FP8GRPOConfig,
        before_start: Callable[[], ConversionReport | None],
        record: Callable[[Mapping[str, Any]], None],
        **kwargs: Any,
    ):
        self._settings, self._before_start, self._record = settings, before_start, record
        self._source_names: set[str] | None = None  # of the trainer's parameters, at the first sync
        self._stream_names: set[str] = set()  # of the tensors the engine gets
        self._unusable: BaseException | None = None
        super().__init__(*args, **kwargs)

    # -- construction ------------------------------------------------------------------------------------------------

    def _init_vllm(self) -> None:
        settings = self._settings
        check_source(self.model, self.trust_remote_code)
        self._report = self._before_start()
        self._ignored = [] if settings.rollout_quantization == "none" else ignored_by_engine(self._report)
        with _upstream.llm_in_place_of_vllms(self._build) as self._llm_class:
            super()._init_vllm()
        self._fused = self.llm.apply_model(lambda model: getattr(model, "packed_modules_mapping", None) or {})[0]
        layers = self.llm.apply_model(engine_layers)[0]
        self.parity = parity.compare(self._report, settings.fp8_scale_rounding, layers, self._fused)
        asked_for = "quantization_config" in (settings.vllm_engine_kwargs or {})
        recipe = "none" if self._report is None else self._report.recipe
        told = parity.check(self.parity, recipe, settings.rollout_quantization, asked_for)
        if told:
            logger.warning(told)
        if self.accelerator.is_main_process:
            print(self.parity)  # noqa: T201 - beside the report of the conversion
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        interval = settings.vllm_canary_interval
        if self.enable_sleep_mode and interval:
            logger.warning(
                "The canary after a weight sync is off: with vllm_enable_sleep_mode the cache still sleeps."
            )
            interval = 0
        max_length = self.llm.llm_engine.model_config.max_model_len
        self.canary = Canary(tokenizer, interval, settings.vllm_canary_max_jump, max_length)

    def _build(self, **kwargs: Any) -> Any:
        quantization, own = self._settings.rollout_quantization, {}
        extra = dict(cast(dict, self._settings.vllm_engine_kwargs or {}))
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
        # vLLM follows the checkpoint, which may be FP16 or FP32; the trainer quantises what autocast makes of it
        if self._settings.bf16 or self._settings.fp16:
            own["dtype"] = "bfloat16" if self._settings.bf16 else "float16"
        if self._settings.vllm_kv_cache_dtype is not None:
            own["kv_cache_dtype"] = self._settings.vllm_kv_cache_dtype
        return self._llm_class(**{**kwargs, **own, **extra})

    # -- weights -----------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Load the trainer's weights into the engine and quantise them. TRL's own loop is what cannot be called here.

        Raises:
            ValueError: parameters have come or gone since the first sync; the engine is as it was.
            RuntimeError: an earlier sync failed half-way.
        """
        self._refuse_unusable()
        start = time.perf_counter()
        self._check_names()
        if self.enable_sleep_mode:
            _upstream.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        sent = {"bytes": 0}
        try:
            with torch.no_grad(), contextlib.closing(self._stream(sent)) as stream:
                self.llm.collective_rpc(_upstream.reload_weights, args=(stream,))
                if self.accelerator.device.type == "cpu":
                    self.llm.apply_model(_upstream.repack_tied_heads)
                if self._settings.vllm_kv_cache_dtype is not None:
                    self.llm.apply_model(check_cache_scales)
            self.llm.reset_prefix_cache()
            canary = self.canary.check(self.model, self.llm, self.accelerator)
        except BaseException as error:
            self._unusable = error
            raise
        self._record(
            {
                "rollout/sync_time": (time.perf_counter() - start, 1.0),
                "rollout/sync_bytes": (float(sent["bytes"]), 1.0),
                **canary,
            }
        )

    def generate(self, *args: Any, **kwargs: Any) -> tuple:
        self._refuse_unusable()
        return super().generate(*args, **kwargs)

    def _refuse_unusable(self) -> None:
        if self._unusable is not None:
            raise RuntimeError(
                f"A weight sync failed half-way ({type(self._unusable).__name__}: {self._unusable}), so some layers "
                "of the engine hold new weights, some old ones and some none: what it generates is garbage. Repair "
                "the cause and start the run again from its last checkpoint."
            ) from self._unusable

    def _check_names(self) -> None:
        """Names are compared where they cost nothing: gathering every parameter for its name would double the sync."""
        source = {name for name, _ in self.model.named_parameters()}
        if self._source_names is None:
            self._stream_names = {name for name, _ in self._walk()}
            refuse_incomplete_groups(self._stream_names, self._fused)
            self._source_names = source
        elif source != self._source_names:
            missing, extra = sorted(self._source_names - source), sorted(source - self._source_names)
            raise ValueError(
                f"The policy's parameters have changed since the first weight sync (missing: {missing[:3]}, new: "
                f"{extra[:3]}), and a layer that gets half its parameters is filled with uninitialised memory. Change "
                "the modules of the policy before the trainer is built."
            )

    @contextlib.contextmanager
    def _unmerged(self) -> Iterator[bool]:
        """Whether adapters have to be merged into copies here; sharded parameters are merged by TRL, in place."""
        adapters = hasattr(self.model, "merge_adapter") and not self._dist.is_fsdp
        with _upstream.without_merging(self.model) if adapters else contextlib.nullcontext():
            yield adapters

    def _walk(self) -> Iterator[tuple[str, Tensor]]:
        with self._unmerged():
            yield from self._iter_named_params()

    def _stream(self, sent: dict[str, int]) -> Generator[tuple[str, Tensor]]:
        """The weights under vLLM's names, one at a time; adds up `sent["bytes"]`."""
        seen = set()
        with self._unmerged() as adapters:
            merged = None
            for name, parameter in self._iter_named_params():
                if adapters and merged is None:  # ZeRO-3 has gathered every parameter now, and none before
                    merged = _upstream.merged_parameters(self.model)
                if name not in self._stream_names:
                    raise ValueError(
                        f"The weight sync meets {name}, which the first one had not. Change the modules of the policy "
                        "before the trainer is built."
                    )
                seen.add(name)
                copy = None if merged is None else merged(parameter)
                # vLLM keeps a reference until the fused layer is complete, and ZeRO-3, FSDP and PEFT free or change
                # the source when the next parameter is asked for
                copy = parameter.detach().clone() if copy is None else copy
                sent["bytes"] += copy.numel() * copy.element_size()
                yield name, copy
        if seen != self._stream_names:
            raise ValueError(
                f"The weight sync lacks {sorted(self._stream_names - seen)[:3]}, which the first one had. Change the "
                "modules of the policy before the trainer is built."
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
    saved, current = config.get_text_config(), model.config.get_text_config()
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings"):
        values = getattr(saved, name, None), getattr(current, name, None)
        if values[0] != values[1]:
            raise ValueError(
                f"use_vllm=True with a policy whose {name} is {values[1]}, while its checkpoint {path!r}, from which "
                f"vLLM starts, says {values[0]}. {advice}"
            )


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


def refuse_incomplete_groups(names: set[str], groups: Mapping[str, list[str]]) -> None:
    """Refuse weights that fill a fused layer of the engine in part.

    Args:
        names: of the tensors the engine will get.
        groups: fused layer -> its parts, e.g. `{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}`.
    """
    for fused, parts in groups.items():
        for part in parts:
            for name in names:
                stem, found, _ = name.partition(f".{part}.weight")
                absent = [other for other in parts if found and f"{stem}.{other}.weight" not in names]
                if absent:
                    raise ValueError(
                        f"The policy has {name} and no {', '.join(absent)} beside it, but vLLM fuses {parts} into "
                        f"{fused} and would fill the rest with uninitialised memory. Pass a policy whose parameters "
                        "match the checkpoint the engine starts from."
                    )
