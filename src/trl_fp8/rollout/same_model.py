"""Whether an engine that starts from a checkpoint is the policy's model: configuration, parameters, ties, adapters.

vLLM builds its model from a configuration and takes what weights come under names it knows. Where a policy lacks a
layer, or its head was tied or untied by hand, the engine goes on with the checkpoint's own weights; one layer of many
moves the log-probs too little for the check after a weight sync. So the policy is compared with what the configuration
builds, before anything starts.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from accelerate.utils import find_tied_parameters, is_peft_model
from torch import nn
from transformers import PreTrainedConfig

from ..float8.convert import whole_shape
from .layer_table import engine_name


# What a configuration says beside the model's computation: the fields of every model (labels, outputs, versions), and
# what concerns training, generation or the longest input. A field that is missing here refuses a pair that would do,
# and never lets one pass. Ties are compared themselves: vLLM unties a model whose checkpoint has a head of its own
_OF_EVERY_MODEL = PreTrainedConfig().to_dict().keys() - {"model_type"}
_BESIDE_COMPUTATION = re.compile(
    "tie_word_embeddings|use_cache|initializer_range|max_position_embeddings|output_router_logits|.*aux_loss_coef"
    "|.*_token_ids?|.*(dropout|pdrop)"
)
Difference = tuple[str, Any, Any]
"""What differs, its value in the engine, its value in the policy."""


def _sent(policy: nn.Module) -> Callable[[str], bool]:
    """Whether a weight sync sends the parameter of a name; adapters are merged before."""
    adapter = getattr(policy, "prefix", None) if is_peft_model(policy) else None
    return lambda name: "original_module" not in name and not (adapter and adapter in name)


def engine_parameters(policy: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name, as vLLM knows it, and shape of each parameter that a weight sync sends."""
    sent = _sent(policy)
    return {engine_name(name): tuple(whole_shape(p)) for name, p in policy.named_parameters() if sent(name)}


def tied_parameters(policy: nn.Module) -> list[list[str]]:
    """The names, as vLLM knows them, of each parameter that a weight sync sends and several modules share."""
    sent = _sent(policy)
    groups = [sorted(engine_name(name) for name in group if sent(name)) for group in find_tied_parameters(policy)]
    return sorted(group for group in groups if len(group) > 1)


def config_difference(config: Any, policy: Any) -> Difference | None:
    """The first field of the computation in which an engine's configuration differs from the policy's."""
    theirs, ours = (c.get_text_config().to_dict() for c in (config, policy.config))
    for field in ours:
        compared = field in theirs and field not in _OF_EVERY_MODEL and not _BESIDE_COMPUTATION.fullmatch(field)
        if compared and theirs[field] != ours[field]:
            return field, theirs[field], ours[field]
    return None


def difference(config: Any, policy: Any) -> Difference | None:
    """The first thing in which the model that `config` builds and the policy differ, `None` for the same model.

    Args:
        config: of the checkpoint an engine starts from.
        policy: a `PreTrainedModel`, or a PEFT model around one.
    """
    found = config_difference(config, policy)
    base: Any = policy.get_base_model() if is_peft_model(policy) else policy
    if found or not isinstance(config, base.config_class):
        return found
    with torch.device("meta"):
        built = type(base)(deepcopy(config))
    theirs, ours = engine_parameters(built), engine_parameters(policy)
    for name in [*theirs, *ours]:
        if theirs.get(name) != ours.get(name):
            return name, theirs.get(name, "absent"), ours.get(name, "absent")
    ties = tied_parameters(built), tied_parameters(policy)
    return None if ties[0] == ties[1] else ("list of tied weights", *ties)


def refuse_difference(found: Difference | None, engine: str, policy: Any, advice: str) -> None:
    """Raise a `ValueError` that names `engine`, what was found (if anything was), and what to do."""
    if found is not None:
        what, theirs, ours = found
        raise ValueError(
            f"{engine} has {what}={theirs}, and the policy {policy.name_or_path!r} has {ours}: it cannot take the "
            f"policy's weights, or would compute something else with them. {advice}"
        )


def check_adapters(policy: Any) -> None:
    """Refuse adapters whose merged weights an engine cannot be given.

    Raises:
        ValueError: one sits on a layer that shares its weight, as an embedding with the head; vLLM has one copy.
    """
    tied = [name for group in find_tied_parameters(policy) for name in group] if is_peft_model(policy) else []
    adapted = [engine_name(name) for name in tied if ".base_layer." in name]
    if adapted:
        raise ValueError(
            f"The adapter on {adapted[0].removesuffix('.weight')} changes one of two layers that share a weight "
            "(tie_word_embeddings), and vLLM has that weight once, so the policy that samples would be another one "
            "than the one that is trained. Take it out of target_modules, untie the checkpoint, or set use_vllm=False."
        )


def check_experts(policy: Any, device_type: str) -> None:
    """Refuse what a vLLM engine on a CPU does not take over from a weight sync (measured, vLLM 0.31).

    Raises:
        ValueError: the policy has fused experts, and the engine would go on with others.
    """
    fused = [name for name, shape in engine_parameters(policy).items() if ".experts." in name and len(shape) == 3]
    if device_type == "cpu" and fused:
        raise ValueError(
            f"use_vllm=True on a CPU with fused experts ({fused[0]}): vLLM's CPU engine multiplies by a packed copy "
            "of them, which a weight sync leaves stale, so it would sample from another policy. Use a GPU, or set "
            "use_vllm=False."
        )
