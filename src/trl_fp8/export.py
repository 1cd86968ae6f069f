"""Write a trained model as an FP8 checkpoint that vLLM loads without quantising, with the scales of the rollout.

    python -m trl_fp8.export outputs/run outputs/run-fp8 --fp8_recipe rowwise

Reads the plain checkpoint that `trainer.save_model` writes under every strategy (DDP, FSDP2, ZeRO), one tensor at a
time, so that a model larger than memory can be exported. The layout is compressed-tensors' `float-quantized`: beside
each FP8 `weight` a `weight_scale` in FP32, and a `quantization_config` in `config.json`. Weights are quantised as by
the engine that quantises while it loads, from the same BF16 values (`float8/engine_weights.py`); activations are
scaled while serving.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from .float8.convert import convert_model
from .float8.recipes import RECIPES, Recipe
from .plain_checkpoint import refuse_incomplete, tensors_of, trained_recipe, weight_files
from .rollout.layer_table import FUSED


_SHARD_BYTES = 4 * 2**30


def export_fp8(
    checkpoint: str | Path, output: str | Path, recipe: str = "rowwise", exclude: Iterable[str] = ()
) -> int:
    """Quantise a plain `transformers` checkpoint for vLLM.

    Args:
        checkpoint: directory with `config.json` and safetensors, as `trainer.save_model` writes it.
        output: directory to create; the tokenizer and other small files are copied along.
        recipe: `fp8_recipe` of the run.
        exclude: `fp8_exclude_modules` of the run.

    Returns:
        Number of quantised layers.

    Raises:
        ValueError: an adapter, a quantised, half-written or incomplete checkpoint, weights that are not finite, a
            model with fused experts or of another kind than text, an unknown recipe, or an output that exists.
    """
    source, target = Path(checkpoint), Path(output)
    if recipe not in RECIPES:
        raise ValueError(f"fp8_recipe={recipe!r} has no FP8 weights to export. Use one of {', '.join(RECIPES)}.")
    if target.exists():
        raise ValueError(f"output={str(target)!r} exists, and a mix of two checkpoints is garbage. Name a new one.")
    files = weight_files(source)
    converted, kept, expected = _layers(source, recipe, list(exclude))
    refuse_incomplete(source, files, expected)
    trained, record = trained_recipe(source), RECIPES[recipe]
    if trained in RECIPES and RECIPES[trained].engine_quantization != record.engine_quantization:
        raise ValueError(
            f"fp8_recipe={recipe!r} with {source}, whose run trained with {trained!r}: the scales would not be those "
            f"the policy was trained with. Pass {trained!r}."
        )
    fused_amax = _fused_amax(files, converted) if record.one_weight_scale else {}
    partial = target.with_name(f".{target.name}.partial")  # renamed when complete: half a checkpoint is never found
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)

    def quantized() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors_of(files):
            layer = name.removesuffix(".weight")
            rounded = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            if not bool(torch.isfinite(rounded).all()):
                raise ValueError(
                    f"{name} in {source} holds NaN or infinity (in BF16), of which there is no FP8 weight. Export an "
                    "earlier checkpoint of the run."
                )
            if layer in converted:
                weight, scale = record.quantize_weight(rounded, fused_amax.get(_fused_name(layer)))
                yield name, weight
                yield f"{layer}.weight_scale", scale
            else:
                yield name, rounded

    _write(quantized(), partial)
    _copy_rest(source, partial)
    config = json.loads((source / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": quantization_config(record, kept)}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    partial.rename(target)
    return len(converted)


def quantization_config(recipe: Recipe, ignored: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of `config.json`; `ignored`: names of the linears that stay in BF16."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, **recipe.weight_scheme, "dynamic": False},
        "input_activations": {**common, **recipe.activation_scheme, "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
    }


# -- layers -----------------------------------------------------------------------------------------------------------


def _layers(source: Path, recipe: str, exclude: list[str]) -> tuple[set[str], list[str], set[str]]:
    """Names of the linears the trainer has in FP8, of those it keeps, by its own rules, and of all parameters."""
    config = AutoConfig.from_pretrained(source)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{source} is quantised already. Export from the checkpoint trainer.save_model has written.")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ValueError(
            f"{source} holds a {config.model_type}, which is not a text model (AutoModelForCausalLM), the only kind "
            "this package trains and exports. Serve it in BF16, or quantise it in vLLM."
        ) from error
    expected = {name for name, _ in model.named_parameters()}
    report = convert_model(model, recipe, exclude=exclude)
    if report.num_fused_expert_parameters:
        raise ValueError(
            f"{type(model).__name__} has fused experts, which train in BF16, while vLLM takes experts and linears in "
            "one format here. Serve the BF16 checkpoint, or quantise it in vLLM with "
            "quantization='fp8_per_channel'."
        )
    return set(report.converted), list(report.kept), expected


def _fused_name(layer: str) -> str:
    """The layer of the engine that `layer` is part of."""
    stem, dot, last = layer.rpartition(".")
    return next((f"{stem}{dot}{fused}" for fused, parts in FUSED.items() if last in parts), layer)


def _fused_amax(files: Iterable[Path], converted: set[str]) -> dict[str, Tensor]:
    largest: dict[str, Tensor] = {}
    for name, tensor in tensors_of(files):
        layer = name.removesuffix(".weight")
        if layer in converted:
            amax, fused = tensor.to(torch.bfloat16).abs().amax(), _fused_name(layer)
            largest[fused] = torch.maximum(largest[fused], amax) if fused in largest else amax
    return largest


# -- writing ---------------------------------------------------------------------------------------------------------


def _write(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """safetensors of some gigabytes each, with the index that says which tensor is where."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(pending, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and size + num_bytes > _SHARD_BYTES:
            flush()
            size = 0
        pending[name] = tensor.contiguous()
        size, total = size + num_bytes, total + num_bytes
    flush()
    where = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{index}").rename(folder / file)
        where |= dict.fromkeys(names, file)
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index_text + "\n")


def _copy_rest(source: Path, target: Path) -> None:
    """Tokenizer, generation settings and the like; neither weights nor anything of the training run."""
    for path in source.iterdir():
        small = path.suffix in (".json", ".jinja", ".model", ".txt")
        if small and path.name not in ("config.json", "trainer_state.json") and "safetensors" not in path.name:
            shutil.copy2(path, target)


def main(argv: list[str] | None = None, say: Callable[[str], Any] = print) -> None:
    """The command line of [`export_fp8`]."""
    parser = argparse.ArgumentParser(
        prog="python -m trl_fp8.export", description="Quantise a plain transformers checkpoint for vLLM."
    )
    parser.add_argument("checkpoint", help="directory that trainer.save_model has written")
    parser.add_argument("output", help="directory to create")
    parser.add_argument("--fp8_recipe", default="rowwise", choices=sorted(RECIPES), help="of the training run")
    parser.add_argument("--fp8_exclude_modules", nargs="*", default=[], help="of the training run")
    args = parser.parse_args(argv)
    try:
        count = export_fp8(args.checkpoint, args.output, args.fp8_recipe, args.fp8_exclude_modules)
    except ValueError as error:
        parser.error(str(error))
    say(f"{count} layers in FP8 ({args.fp8_recipe}) written to {args.output}; serve with: vllm serve {args.output}")


if __name__ == "__main__":
    main()
