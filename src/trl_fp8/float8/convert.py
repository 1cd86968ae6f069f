"""In-place conversion of a model to FP8 training linears, with a report of what was converted.

Parameters stay what they were (FP32 or BF16 masters, same names, same objects): the cast happens inside the forward.
So one flag is enough to run the unconverted model on the same weights, see [`high_precision`].

Emulation casts to FP8 with the same scales and multiplies the dequantised values in FP32; it needs no FP8 hardware.
"""

import dataclasses
import fnmatch
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .._upstream import Float8Linear, adapter_modules, decode_emulated_matmuls_by, module_hooks, swap_linear_layers
from .emulation import decode
from .linear import SwitchableLinear
from .recipes import RECIPES, layer_factory


_ROUTER_NAMES = {"gate", "router", "router_gate", "shared_expert_gate"}


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What [`convert_model`] did.

    Args:
        recipe: name of the recipe.
        emulated: whether FP8 matmuls are emulated.
        converted: fully qualified names of the linears now in FP8.
        kept: name of each linear left as it was, with the reason.
        num_fused_expert_parameters: parameters of fused (3-D) experts. They are not linears and stay as they were.
    """

    recipe: str
    emulated: bool
    converted: tuple[str, ...]
    kept: dict[str, str]
    num_fused_expert_parameters: int = 0

    def __str__(self) -> str:
        total = len(self.converted) + len(self.kept)
        lines = [f"{len(self.converted)}/{total} linear layers train in FP8 ({self.recipe})"]
        for reason, count in Counter(self.kept.values()).most_common():
            names = [name for name, why in self.kept.items() if why == reason]
            shown = ", ".join(names[:3]) + (", ..." if count > 3 else "")
            lines.append(f"  {count:4d} kept: {reason} ({shown})")
        if self.num_fused_expert_parameters:
            lines.append(f"  {self.num_fused_expert_parameters:,} parameters of fused experts stay in high precision")
        return "\n".join(lines)


def convert_model(
    model: nn.Module,
    recipe: str,
    *,
    exclude: Sequence[str] = (),
    scale_rounding: str = "none",
    emulate: bool = True,
    fsdp_all_gather: bool = False,
) -> ConversionReport:
    """Swap the linear layers of `model` for FP8 ones, in place. Parameters keep their identity and their names.

    Args:
        model: a `PreTrainedModel` or a PEFT model around one, on one device, before anything hooks its linears.
        recipe: a name of `RECIPES`.
        exclude: patterns of layers to keep, matched with `fnmatch` against the full name or a dotted suffix of it
            (`lm_head` matches `model.lm_head`, not `lm_head2`). Output embeddings, routers, adapter layers and shapes
            FP8 kernels cannot take are always kept.
        scale_rounding: `"none"` or `"power_of_2"`.
        emulate: see [`~trl_fp8.float8.device.resolve_emulation`]; makes torchao's faster on CPUs, for the process.
        fsdp_all_gather: whether FSDP2 will gather weights in FP8 (tensorwise). The weights are then new parameters on
            the same memory.

    Returns:
        [`ConversionReport`]

    Raises:
        ValueError: nothing is left to convert, a pattern matches nothing, or the model cannot be converted safely
            (already converted, spread over devices, offloaded, hooked).
    """
    if recipe not in RECIPES:
        known = "; ".join(f"{name!r}: {record.description}" for name, record in RECIPES.items())
        raise ValueError(f"fp8_recipe={recipe!r} is not a recipe this package builds. Use one of these. {known}.")
    _refuse_unsafe(model)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    _refuse_shared(model)
    reasons = _kept_reasons(model, linears, exclude, RECIPES[recipe].feature_multiple)
    converted = tuple(name for name in linears if name not in reasons)
    if not converted:
        found = Counter(reasons.values())
        listing = "; ".join(f"{count} kept: {reason}" for reason, count in found.items()) or "it has no linear layer"
        raise ValueError(
            f"fp8_recipe={recipe!r} converts no layer of {type(model).__name__} ({listing}), so training would not be "
            "in FP8. Change fp8_exclude_modules or the model, or set fp8_recipe='none'."
        )
    for name in converted:
        _refuse_hooked(name, linears[name])

    if emulate and any(linears[name].weight.device.type == "cpu" for name in converted):
        decode_emulated_matmuls_by(decode)
    names, from_float = set(converted), layer_factory(recipe, scale_rounding, emulate, fsdp_all_gather)
    swap_linear_layers(model, from_float, module_filter_fn=lambda module, name: name in names)
    return ConversionReport(
        recipe=recipe,
        emulated=emulate,
        converted=converted,
        kept=reasons,
        num_fused_expert_parameters=sum(
            math.prod(whole_shape(p)) for n, p in model.named_parameters() if _is_fused_expert(n, p)
        ),
    )


def _refuse_unsafe(model: nn.Module) -> None:
    already = [name for name, module in model.named_modules() if isinstance(module, (Float8Linear, SwitchableLinear))]
    if already:
        raise ValueError(
            f"The model already has FP8 linear layers ({already[0]} and {len(already) - 1} more); converting twice "
            "would quantise with two recipes. Pass the unconverted model and let the trainer convert it."
        )
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise ValueError(
            f"The model is spread over devices (device_map over {sorted(map(str, devices))}), which moves activations "
            "with hooks the conversion would lose. Load it on one device (device_map=None), and use FSDP or DeepSpeed "
            "for models that do not fit."
        )


def _refuse_shared(model: nn.Module) -> None:
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names.setdefault(id(module), []).append(name)
    shared = next((found for found in names.values() if len(found) > 1 or found == [""]), None)
    if shared:
        raise ValueError(
            f"Linear layer {' = '.join(map(repr, shared))} is the model itself or has several names, and would be "
            "converted at one of them only. Give each place a layer of its own (weights may be tied)."
        )


def _refuse_hooked(name: str, linear: nn.Linear) -> None:
    hooks = module_hooks(linear)
    if hooks:
        raise ValueError(
            f"Layer {name} carries {', '.join(hooks)}, which the FP8 layer that replaces it would lose. Register "
            "hooks (and apply offloading or parametrisations) after the trainer is built, or exclude the layer with "
            "fp8_exclude_modules."
        )


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def _kept_reasons(
    model: nn.Module, linears: dict[str, nn.Linear], exclude: Sequence[str], multiple: int
) -> dict[str, str]:
    """Name of each linear that must not be converted, with the reason."""
    for pattern in exclude:
        if not any(_matches(name, pattern) for name in linears):
            inside = any(_matches(name, f"{pattern}.*") for name in linears)
            hint = f" To keep the layers inside it, write {pattern + '.*'!r}." if inside else ""
            raise ValueError(
                f"fp8_exclude_modules pattern {pattern!r} matches no linear layer of the model, so nothing would be "
                f"excluded.{hint} Names look like {next(iter(linears), '(none)')!r}; a pattern is matched against the "
                "full name or a dotted suffix of it."
            )
    embeddings = _embedding_parameters(model)
    adapters = adapter_modules(model)
    outside = _outside_language_model(model)
    reasons = {}
    for name, linear in linears.items():
        rows, columns = linear.out_features, linear.in_features
        if id(linear.weight) in embeddings:
            reasons[name] = "output embedding"
        elif id(linear) in adapters:
            reasons[name] = "adapter"
        elif any(_matches(name, pattern) for pattern in exclude):
            reasons[name] = "excluded by the user"
        elif _ROUTER_NAMES & set(name.split(".")):
            reasons[name] = "router"
        elif id(linear) in outside:
            reasons[name] = "outside the language model"
        elif type(linear) is not nn.Linear:
            reasons[name] = f"{type(linear).__name__} is not a plain nn.Linear"
        elif rows % multiple or columns % multiple:
            reasons[name] = f"shape not divisible by {multiple}"
    return reasons


def _embedding_parameters(model: nn.Module) -> set[int]:
    """Ids of the input and output embedding weights, whatever they are called, tied or not, wrapped or not."""
    getters = (getattr(model, f"get_{side}_embeddings", lambda: None) for side in ("output", "input"))
    modules = [module for getter in getters if (module := getter()) is not None]
    return {id(p) for module in modules for p in module.parameters() if len(whole_shape(p)) == 2}


def _outside_language_model(model: nn.Module) -> set[int]:
    """Ids of the modules outside the language model of a vision-language model: their token counts fit no kernel."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config") or config.get_text_config() is config:
        return set()
    get_decoder: Any = getattr(model, "get_decoder", None)
    inside = set() if get_decoder is None else {id(module) for module in get_decoder().modules()}
    return {id(module) for module in model.modules()} - inside


def _is_fused_expert(name: str, parameter: Tensor) -> bool:
    return len(whole_shape(parameter)) == 3 and "expert" in name


def whole_shape(parameter: Tensor) -> Sequence[int]:
    """Shape of the whole parameter: a model loaded under DeepSpeed ZeRO-3 is in pieces, and each looks empty."""
    return getattr(parameter, "ds_shape", parameter.shape)
