"""A plain checkpoint on disk, as `trainer.save_model` writes it: its tensors, refused where it is not whole."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .checkpoints import MARKER


def weight_files(source: Path) -> list[Path]:
    if (source / "adapter_config.json").exists():
        raise ValueError(
            f"{source} holds an adapter, whose weights have no scales of their own. Merge it in BF16 or FP32 first: "
            "AutoPeftModelForCausalLM.from_pretrained(path).merge_and_unload().save_pretrained(merged)."
        )
    if (source / MARKER).exists():
        raise ValueError(
            f"{source} was only half written when its run was stopped (it holds a file {MARKER!r}), so its weights "
            "may be cut short. Export another checkpoint."
        )
    files = sorted(source.glob("model*.safetensors"))
    if not files or not (source / "config.json").exists():
        raise ValueError(
            f"{source} holds no config.json with model*.safetensors. Pass what trainer.save_model has "
            "written (a checkpoint of sharded optimizer files has to be consolidated first)."
        )
    return files


def refuse_incomplete(source: Path, files: Iterable[Path], expected: set[str]) -> None:
    found: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                found |= set(tensors.keys())
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read ({error}): it is damaged or cut short. Copy it again.") from error
    absent = sorted(expected - found)
    if absent:
        raise ValueError(
            f"{source} lacks {len(absent)} of the {len(expected)} tensors of its model ({', '.join(absent[:3])}, ...; "
            f"it has {', '.join(sorted(found)[:2])}, ...): a file is missing, or the names are those of a wrapped "
            "model. Pass what trainer.save_model has written, whole."
        )


def trained_recipe(source: Path) -> str | None:
    """`fp8_recipe` of the run a checkpoint is of (its `RunRecord`); `None` for a saved model, which has none."""
    state = source / "trainer_state.json"
    saved = json.loads(state.read_text()).get("stateful_callbacks", {}) if state.exists() else {}
    return saved.get("RunRecord", {}).get("attributes", {}).get("settings", {}).get("fp8_recipe")


def tensors_of(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)
