"""One rank of runs of the tiny task; writes what it saw to `<folder>/rank<r>.pt`. Launched by `test_sharding.py`.

A `fixed` run trains on completions that are a function of prompt, place in the group and step, split into mini-batches
as two processes split them, so that one process and two train on the same tokens. Any other run generates.
"""

import hashlib
import json
import os
import random
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from builders import VOCABULARY, build_dataset, build_model, build_moe, build_trainer
from gather_run import gather_run
from trl.trainer import grpo_trainer

from trl_fp8 import trainer as trainer_module
from trl_fp8.float8 import all_gather, compile
from trl_fp8.float8.linear import SwitchableLinear


WORLD = 2
GATHERS = Counter()  # what `watch_gathers` saw in the run at hand
SETTINGS = {
    "calibration_interval": 1,
    "max_steps": 8,  # two generation batches of four optimizer steps
    "learning_rate": 5e-3,
    "per_device_train_batch_size": 8,
    "logging_steps": 4,
}


def fixed_rollout(prompts: list[str], trainer) -> dict:
    """Completions that any split over processes makes again: groups are never divided between ranks."""
    place, completions = Counter(), []
    for prompt in prompts:
        key = f"{prompt} {place[prompt]} {trainer.state.global_step}"
        place[prompt] += 1
        rng = random.Random(hashlib.sha256(key.encode()).hexdigest())
        tokens = [rng.randrange(3, len(VOCABULARY)) for _ in range(rng.randrange(1, 6))]
        completions.append([*tokens, 1])
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": None,
    }


def split_as_two_ranks(batch: dict) -> dict:
    """In place of TRL's shuffle: mini-batches that are unions of the ranks' mini-batches."""
    size = len(batch["prompt_ids"])
    steps = size // (SETTINGS["per_device_train_batch_size"] * (WORLD if "RANK" not in os.environ else 1))
    ranks = 1 if "RANK" in os.environ else WORLD
    order = torch.arange(size).view(ranks, steps, -1).transpose(0, 1).flatten()

    def permuted(value):
        if value is None or (isinstance(value, torch.Tensor) and value.ndim == 0):
            return value
        return value[order] if isinstance(value, torch.Tensor) else [value[i] for i in order]

    return {key: permuted(value) for key, value in batch.items()}


def watch_gathers(seen: dict) -> None:
    """Record of every FP8 gather its dtype, and whether its scale is that of the weight as it is at that moment."""

    def watched(layer, shard, dtype):
        (data,), (scale, config) = quantize(layer, shard, dtype)
        fresh = torch.finfo(data.dtype).max / layer.weight.full_tensor().to(dtype).abs().max().double()
        seen["gathers"] += 1
        seen["stale"] += int(scale != fresh.float())
        seen[str(data.dtype)] += 1
        return (data,), (scale, config)

    quantize = all_gather.GatheredFloat8Linear.quantize_shard
    all_gather.GatheredFloat8Linear.quantize_shard = watched


def base_folder(folder: Path) -> Path:
    return folder / f"base{os.environ.get('RANK', 0)}"


def run(folder: Path, request: dict) -> dict:
    settings = {**SETTINGS, "use_cpu": os.environ.get("ACCELERATE_TORCH_DEVICE") != "cpu", **request["settings"]}
    extra = {"eval_dataset": build_dataset(16)}
    if request.get("lora"):
        from peft import LoraConfig

        extra["peft_config"] = LoraConfig(**request["lora"])
    if request.get("fixed"):
        extra["rollout_func"] = fixed_rollout
        if "RANK" not in os.environ:
            settings["per_device_train_batch_size"] *= WORLD
    model = build_moe() if request.get("moe") else build_model()
    if request.get("path"):  # loaded by TRL, in pieces from the start under ZeRO-3
        model = str(base_folder(folder))
    elif settings.get("beta"):  # TRL loads the reference from where the policy came from
        model.config._name_or_path = str(base_folder(folder))
    trainer = build_trainer(folder / request.get("folder", request["name"]), model=model, trainer=extra, **settings)
    GATHERS.clear()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    bounds = []
    end = trainer._end_batch
    trainer._end_batch = lambda: (end(), bounds.append(trainer.clip_bounds))
    resume = request.get("resume")
    trainer.train(resume_from_checkpoint=str(folder / resume) if resume else None)
    trainer.save_model(str(folder / request["name"] / "final"))
    reference = 0 if trainer.ref_model is None else trainer.ref_model.modules()
    return {
        "bounds": bounds,
        "gathers": dict(GATHERS),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs,
        "reference": sum(isinstance(m, SwitchableLinear) for m in reference) if reference else 0,
        "kept": trainer.conversion_report.kept if trainer.conversion_report else {},
        "report": str(trainer.conversion_report),
        "log": trainer.state.log_history,
        "type": str(trainer.accelerator.distributed_type),
    }


def main(folder: Path, requests: list[dict]) -> None:
    # A head whose shape FP8 kernels would take
    build_model(vocab_size=32, tie_word_embeddings=False).save_pretrained(
        base_folder(folder)
    )  # before there is a world, in which only rank 0 writes
    shuffle, results = grpo_trainer.shuffle_sequence_dict, {}
    watch_gathers(GATHERS)
    for request in requests:
        if request.get("parity"):
            results[request["name"]] = gather_run()
            continue
        # Graphs are traced and differentiated as ever, and not turned into C++, which takes minutes
        trainer_module.compile_layers = partial(compile.compile_layers, backend="aot_eager")
        grpo_trainer.shuffle_sequence_dict = split_as_two_ranks if request.get("fixed") else shuffle
        results[request["name"]] = run(folder, request)
    grpo_trainer.shuffle_sequence_dict = shuffle
    torch.save(results, folder / f"rank{os.environ.get('RANK', 0)}.pt")


if __name__ == "__main__":
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
