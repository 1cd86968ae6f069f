"""The trainer's weights on their way to a vLLM engine: the same names every time, whole groups, every value alive.

A sync that lacks k_proj fills a third of the fused layer with uninitialised memory and says nothing, and one that
fails half-way leaves old, new and no weights side by side. So names are compared before anything is sent, and an
engine that was left half-loaded generates no more. Per sync:

    names complete?  ->  send(all parameters, one at a time)  ->  log-probs of both sides  ->  metrics
"""

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ..config import FP8GRPOConfig
from ..float8.convert import ConversionReport, whole_shape
from ..reductions import Mean
from . import _upstream, same_model
from .adapters import merging_into_copies
from .sync_check import SyncCheck


logger = logging.getLogger(__name__)
_ADVICE = "Change the modules of the policy before the trainer is built."


class SyncedEngine(_upstream.VLLMGeneration):
    """TRL's vLLM with a weight sync that re-quantises; where the engine runs is what its subclasses know.

    Args:
        settings: of the run.
        before_start: called when the policy is loaded and the engine is not used yet; converts it.
        record: takes metrics, see [`~trl_fp8.diagnostics.MetricWindow`].
        *args, **kwargs: of TRL's class.
    """

    def __init__(
        self,
        *args: Any,
        settings: FP8GRPOConfig,
        before_start: Callable[[], ConversionReport | None],
        record: Callable[[Mapping[str, Any]], None],
        **kwargs: Any,
    ):
        self._settings, self._before_start, self._record = settings, before_start, record
        self._source: dict[str, tuple] | None = None  # type and shape of the parameters at the first sync
        # Of the tensors the engine gets: name -> type and shape
        self._stream_metadata: dict[str, tuple[str, list[int]]] = {}
        self._unusable: BaseException | None = None
        super().__init__(*args, **kwargs)

    # -- what a kind of engine fills in ------------------------------------------------------------------------------

    max_length: int
    """Longest prompt and completion the engine takes, in tokens; known once it runs."""

    def check_model(self) -> None:
        """Refuse a policy whose weights the engine could not take, before anything is converted or started."""
        raise NotImplementedError

    def starting(self) -> contextlib.AbstractContextManager[None]:
        """Context in which TRL starts or reaches the engine; enters with the policy converted, leaves checking."""
        raise NotImplementedError

    def send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Give the engine all `weights`, in one bracket in which it quantises them as it did when it started."""
        raise NotImplementedError

    def score(self, token_ids: list[int]) -> list[float]:
        """The engine's log-probs of the tokens of a prompt after the first, nats."""
        raise NotImplementedError

    # -- the same for every kind -------------------------------------------------------------------------------------

    def _init_vllm(self) -> None:
        settings = self._settings
        same_model.check_experts(self.model, self.accelerator.device.type)
        same_model.check_adapters(self.model)
        self.check_model()
        self._expected = set(same_model.engine_parameters(self.model))
        self._report = self._before_start()
        with self.starting():
            super()._init_vllm()
        interval = settings.vllm_sync_check_interval
        if interval and self.mode == "colocate" and self.enable_sleep_mode:
            logger.warning(
                f"vllm_sync_check_interval={interval} with vllm_enable_sleep_mode=True: the cache still sleeps when a "
                "prompt could be scored, so weight syncs are not checked. Turn one of them off."
            )
            interval = 0
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        vocab_size = self.model.config.get_text_config().vocab_size
        max_ratio = settings.vllm_sync_check_max_ratio
        self.sync_check = SyncCheck(tokenizer, vocab_size, interval, max_ratio, self.max_length)

    def sync_weights(self) -> None:
        """Load the trainer's weights into the engine and quantise them. TRL's own loop is what cannot be called here.

        Raises:
            ValueError: parameters have come or gone since the first sync; the engine is as it was.
            RuntimeError: this sync failed half-way, or an earlier one did.
        """
        self._refuse_unusable()
        start = time.perf_counter()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # after a forward pass alone FSDP2 still holds the root's weights whole
                module.reshard()
        self._check_names()
        sent = {"bytes": 0}
        try:
            with torch.no_grad(), contextlib.closing(self._stream(sent)) as stream:
                self.send(stream)
            compared = self.sync_check.after_sync(self.model, self.score, self.accelerator)
        except BaseException as error:
            self._unusable = error
            raise
        self._record(
            {
                "rollout/sync_time": Mean(time.perf_counter() - start, 1.0),
                "rollout/sync_bytes": Mean(float(sent["bytes"]), 1.0),
                **compared,
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
        source = {name: (p.dtype, tuple(whole_shape(p))) for name, p in self.model.named_parameters()}
        if self._source is None:
            self._stream_metadata = {
                name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in self._walk()
            }
            lacking = sorted(self._expected - self._stream_metadata.keys())
            if lacking:
                raise ValueError(
                    f"The first weight sync lacks {', '.join(lacking[:4])}, which the policy had when the trainer was "
                    "built, and the engine would keep what it started with, or uninitialised memory where vLLM fuses "
                    f"layers. {_ADVICE}"
                )
            self._source = source
        elif source != self._source:
            missing, extra = sorted(self._source.keys() - source), sorted(source.keys() - self._source)
            changed = sorted(name for name in source.keys() & self._source if source[name] != self._source[name])
            raise ValueError(
                f"The policy's parameters have changed since the first weight sync (missing: {missing[:3]}, new: "
                f"{extra[:3]}, of another type or shape: {changed[:3]}), and a layer that gets half its parameters is "
                f"filled with uninitialised memory. {_ADVICE}"
            )

    def _walk(self) -> Generator[tuple[str, Tensor]]:
        """TRL's walk over the weights, gathered and with adapters merged, which leaves the policy as it was."""
        with merging_into_copies(self.model) if is_peft_model(self.model) else contextlib.nullcontext():
            yield from self._iter_named_params()

    def _stream(self, sent: dict[str, int]) -> Generator[tuple[str, Tensor]]:
        """The weights under vLLM's names, one at a time; adds up `sent["bytes"]`."""
        lacking = set(self._stream_metadata)
        with contextlib.closing(self._walk()) as walk:
            for name, parameter in walk:
                if name not in self._stream_metadata:
                    raise ValueError(f"The weight sync meets {name}, which the first one had not. {_ADVICE}")
                lacking.discard(name)
                # vLLM keeps a reference until the fused layer is complete, and ZeRO-3 and FSDP free or change the
                # source when the next parameter is asked for
                copy = parameter.detach().clone()
                sent["bytes"] += copy.numel() * copy.element_size()
                yield name, copy
        if lacking:
            raise ValueError(f"The weight sync lacks {sorted(lacking)[:3]}, which the first one had. {_ADVICE}")
