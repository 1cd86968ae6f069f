"""Which layers are in FP8 on which side: the trainer's linears beside the engine's, by name.

vLLM fuses q, k and v (and gate and up) into one layer with one name, so a row is a layer of the engine with the
linears of the trainer it stands for. A layer quantised on one side only is a systematic difference between the policy
that is trained and the one that samples; it is refused, since everything excluded in the trainer is ignored by the
engine (`ignored_by_engine`) and nothing else should differ.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..float8.convert import ConversionReport
from ..float8.recipes import RECIPES


# Fused layers of vLLM's decoder models. The engine's own table is read once it runs; names to ignore are needed before
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
# vLLM quantises none of these by itself, and an adapter has no layer there
_NOT_IN_ENGINE = ("output embedding", "adapter")


def engine_name(name: str) -> str:
    """A module or parameter of the trainer (a PEFT model's too) under the name vLLM knows, as TRL maps them."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace("modules_to_save.default.", "")


def ignored_by_engine(report: ConversionReport | None) -> list[str]:
    """Fully qualified names of the layers the trainer keeps in high precision and the engine would quantise.

    Raises:
        ValueError: a fused layer of the engine would be in FP8 in part.
    """
    if report is None:
        return []
    kept = {engine_name(name): why for name, why in report.kept.items() if why not in _NOT_IN_ENGINE}
    converted = {engine_name(name) for name in report.converted}
    for name, why in kept.items():
        stem, _, last = name.rpartition(".")
        for fused, parts in FUSED.items():
            others = [part for part in parts if last in parts and f"{stem}.{part}" in converted]
            if others:
                raise ValueError(
                    f"{name} trains in high precision ({why}) and {', '.join(others)} beside it in FP8, but vLLM "
                    f"quantises them as one layer ({fused}). Exclude all of {', '.join(parts)} or none with "
                    "fp8_exclude_modules, or set vllm_quantization='none'."
                )
    return sorted(kept)


def engine_layers(model: nn.Module) -> dict[str, str | None]:
    """Name of each layer of a vLLM model that has weights -> its quantisation method, `None` in high precision."""
    layers = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and any(parameter.dim() > 0 for parameter in module.parameters(recurse=False)):
            kind = type(method).__name__
            layers[name] = None if kind.startswith("Unquantized") else kind
    return layers


@dataclass(frozen=True)
class LayerTable:
    """The layers of both sides; each row is `(layer of the engine, format in the trainer, method of the engine)`.

    A format is `None` in high precision.
    """

    rows: tuple[tuple[str, str | None, str | None], ...]

    @property
    def one_sided(self) -> list[str]:
        """Layers quantised on one side only."""
        return [name for name, trainer, engine in self.rows if (trainer is None) != (engine is None)]

    def __str__(self) -> str:
        kinds: Counter = Counter()
        for name, trainer, engine in self.rows:
            kinds[".".join(part for part in name.split(".") if not part.isdigit()), trainer, engine] += 1
        lines = ["layers of the engine: trainer | vLLM"]
        for (name, trainer, engine), count in kinds.items():
            mark = "  <- one side only" if (trainer is None) != (engine is None) else ""
            lines.append(f"  {count:4d} {name}: {trainer or 'high precision'} | {engine or 'high precision'}{mark}")
        return "\n".join(lines)


def build_layer_table(
    report: ConversionReport | None,
    scale_rounding: str,
    layers: Mapping[str, str | None],
    fused: Mapping[str, list[str]],
) -> LayerTable:
    """Put the trainer's layers beside the engine's.

    Args:
        report: of the trainer's conversion; `None` for a model that trains in high precision.
        scale_rounding: `fp8_scale_rounding`.
        layers: of [`engine_layers`].
        fused: layer of the engine -> linears of the trainer, by their last names.
    """
    rounds = scale_rounding != "none" and report is not None and RECIPES[report.recipe].takes_scale_rounding
    rounding = "2^n" if rounds else "FP32 scales"
    converted = set() if report is None else {engine_name(name) for name in report.converted}
    rows = []
    for name, method in layers.items():
        stem, dot, last = name.rpartition(".")
        parts = [f"{stem}{dot}{part}" for part in fused.get(last, [last])]
        trainer = f"{report.recipe}, {rounding}" if report is not None and converted & set(parts) else None
        rows.append((name, trainer, method))
    return LayerTable(tuple(rows))


def check_one_sided(table: LayerTable, recipe: str, quantization: str, asked_for: bool) -> str | None:
    """Refuse what is in FP8 on one side by accident; a warning of a difference that was asked for, else `None`.

    Args:
        table: of [`build_layer_table`].
        recipe, quantization: of trainer and engine, resolved.
        asked_for: whether the user chose layers of the engine (`quantization_config` in `vllm_engine_kwargs`).

    Raises:
        ValueError: the engine quantises nothing, or a layer is in FP8 on one side and nobody asked for it.
    """
    if quantization != "none" and all(engine is None for _, _, engine in table.rows):
        raise ValueError(
            f"vllm_quantization={quantization!r} quantises no layer of this model (some of vLLM's methods are for "
            "mixture-of-experts layers only), so the rollout would be in high precision. Use 'fp8_per_channel', or "
            "set vllm_quantization='none'."
        )
    if "none" in (recipe, quantization) or not table.one_sided:
        return None
    names = ", ".join(table.one_sided[:4]) + (", ..." if len(table.one_sided) > 4 else "")
    if asked_for:
        return f"{len(table.one_sided)} layers are quantised on one side only ({names}), as vllm_engine_kwargs asks."
    raise ValueError(
        f"{len(table.one_sided)} layers are quantised on one side only with fp8_recipe={recipe!r} and "
        f"vllm_quantization={quantization!r} ({names}), which makes the policy that samples another one than the one "
        "that is trained. Exclude them in the trainer (fp8_exclude_modules), or in the engine with "
        "vllm_engine_kwargs={'quantization_config': {'ignore': [...]}}, which also accepts the difference."
    )
