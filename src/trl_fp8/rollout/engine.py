"""The trainer's weights on their way to a vLLM engine: the same names every time, whole groups, every value alive.

A sync that lacks k_proj fills a third of the fused layer with uninitialised memory and says nothing, and one that
fails half-way leaves old, new and no weights side by side. So names are compared before anything is sent, and an
engine that was left half-loaded generates no more. Per sync:

    names complete?  ->  send(all parameters, one at a time)  ->  canary  ->  metrics
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ..config import FP8GRPOConfig
from ..float8.convert import ConversionReport, whole_shape
from . import _upstream
from .adapters import merging_into_copies
from .sync_check import Canary


class SyncedEngine(_upstream.VLLMGeneration):
    """TRL's vLLM with a weight sync that re-quantises; how weights get to the engine is what its subclasses know.

    Args:
        settings: of the run.
        before_start: called when the policy is loaded and the engine is not used yet; converts it.
        record: takes metrics, see [`~trl_fp8.metrics.MetricWindow`].
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
        self._expected: set[str] = set()  # names of the policy's parameters when the trainer was built
        self._unusable: BaseException | None = None
        self._report: ConversionReport | None = None
        self.canary: Canary
        super().__init__(*args, **kwargs)

    def send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Give the engine all `weights`, in one bracket in which it quantises them as it did when it started."""
        raise NotImplementedError

    def build_canary(self, interval: int, max_length: int) -> Canary:
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        vocab_size = self.model.config.get_text_config().vocab_size
        return Canary(tokenizer, vocab_size, interval, self._settings.vllm_canary_max_jump, max_length)

    def score(self, token_ids: list[int]) -> list[float]:
        """The engine's log-probs of the tokens of a prompt after the first, nats."""
        raise NotImplementedError

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
            canary = self.canary.check(self.model, self.score, self.accelerator)
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
                    "layers. Change the modules of the policy before the trainer is built."
                )
            self._source = source
        elif source != self._source:
            missing, extra = sorted(self._source.keys() - source), sorted(source.keys() - self._source)
            changed = sorted(name for name in source.keys() & self._source if source[name] != self._source[name])
            raise ValueError(
                f"The policy's parameters have changed since the first weight sync (missing: {missing[:3]}, new: "
                f"{extra[:3]}, of another type or shape: {changed[:3]}), and a layer that gets half its parameters is "
                "filled with uninitialised memory. Change the modules of the policy before the trainer is built."
            )

    def _walk(self) -> Generator[tuple[str, Tensor]]:
        """TRL's walk over the weights, gathered and with adapters merged, which leaves the policy as it was."""
        adapters = hasattr(self.model, "merge_adapter")
        with merging_into_copies(self.model) if adapters else contextlib.nullcontext():
            yield from self._iter_named_params()

    def _stream(self, sent: dict[str, int]) -> Generator[tuple[str, Tensor]]:
        """The weights under vLLM's names, one at a time; adds up `sent["bytes"]`."""
        seen = set()
        with contextlib.closing(self._walk()) as walk:
            for name, parameter in walk:
                if name not in self._stream_metadata:
                    raise ValueError(
                        f"The weight sync meets {name}, which the first one had not. Change the modules of the policy "
                        "before the trainer is built."
                    )
                seen.add(name)
                # vLLM keeps a reference until the fused layer is complete, and ZeRO-3 and FSDP free or change the
                # source when the next parameter is asked for
                copy = parameter.detach().clone()
                sent["bytes"] += copy.numel() * copy.element_size()
                yield name, copy
        if seen != set(self._stream_metadata):
            lacking = sorted(set(self._stream_metadata) - seen)
            raise ValueError(
                f"The weight sync lacks {lacking[:3]}, which the first one had. Change the modules of the policy "
                "before the trainer is built."
            )
