"""Whether an engine that starts from a checkpoint is the policy's model: configuration, parameters, ties, adapters.

vLLM builds its model from a configuration and takes what weights come under names it knows. A policy that lacks a
layer, or whose head was tied or untied by hand, would leave the engine with the checkpoint's own weights there, and
nothing would say so. So the policy is compared with what the configuration builds, before anything starts.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ..float8.convert import whole_shape
from . import _upstream
from .layer_table import engine_name


# Two models whose configurations agree in these take each other's weights and compute the same, but for tied weights:
# those are compared themselves, since vLLM unties a model whose checkpoint has a head of its own
FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "attention_bias",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
)
Difference = tuple[str, Any, Any]
"""What differs, its value in the engine, its value in the policy."""


def engine_parameters(policy: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name, as vLLM knows it, and shape of each parameter that a weight sync sends; adapters are merged before."""
    adapter = getattr(policy, "prefix", None) if hasattr(policy, "peft_config") else None
    return {
        engine_name(name): tuple(whole_shape(parameter))
        for name, parameter in policy.named_parameters()
        if "original_module" not in name and not (adapter and adapter in name)
    }


def config_difference(config: Any, policy: Any) -> Difference | None:
    """The first field in which the configuration of an engine and that of the policy differ."""
    theirs, ours = config.get_text_config(), policy.config.get_text_config()
    for field in FIELDS:
        values = getattr(theirs, field, None), getattr(ours, field, None)
        if values[0] != values[1]:
            return field, *values
    return None


def difference(config: Any, policy: Any) -> Difference | None:
    """The first thing in which the model that `config` builds and the policy differ, `None` for the same model.

    Args:
        config: of the checkpoint an engine starts from.
        policy: a `PreTrainedModel`, or a PEFT model around one.
    """
    found = config_difference(config, policy)
    base = policy.get_base_model() if hasattr(policy, "peft_config") else policy
    if found or not isinstance(config, base.config_class):
        return found
    with torch.device("meta"):
        built = type(base)(deepcopy(config))
    theirs, ours = engine_parameters(built), engine_parameters(policy)
    for name in [*theirs, *ours]:
        if theirs.get(name) != ours.get(name):
            return name, theirs.get(name, "absent"), ours.get(name, "absent")
    if _tied(built) != _tied(policy):
        return "one weight of embedding and head", _tied(built), _tied(policy)
    return None


def check_adapters(policy: Any) -> None:
    """Refuse adapters whose merged weights an engine cannot be given.

    Raises:
        ValueError: one sits on an embedding that is the head as well, of which vLLM has one copy.
    """
    if not hasattr(policy, "peft_config") or not _tied(policy):
        return
    adapted = {id(layer.get_base_layer().weight): name for name, layer in _upstream.tuner_layers(policy)}
    name = adapted.get(id(policy.get_input_embeddings().weight))
    if name is not None:
        raise ValueError(
            f"The adapter on {engine_name(name)} changes one of two layers that share a weight (tie_word_embeddings), "
            "and vLLM has that weight once, so the policy that samples would be another one than the one that is "
            "trained. Take it out of target_modules, untie the checkpoint, or set use_vllm=False."
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


def _tied(model: Any) -> bool:
    ends: Sequence[Any] = (model.get_input_embeddings(), model.get_output_embeddings())
    return None not in ends and ends[0].weight is ends[1].weight
