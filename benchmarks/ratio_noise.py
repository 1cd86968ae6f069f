"""How FP8 noise compounds in the importance ratio of a real model: SmolLM2-135M-Instruct, every recipe and scale rule.

    .venv/bin/python examples/prepare_smollm2.py --output /tmp/smollm2
    .venv/bin/python benchmarks/ratio_noise.py --model /tmp/smollm2

The model samples one batch of completions in its own precision; each recipe then trains on the same tokens for four
mini-batches (random rewards, so that advantages have both signs) and scores every mini-batch in FP8 and in the shadow
precision. The weights move as in a real run: a mini-batch sees 0, 1, 2 or 3 optimizer steps. Pooled over all tokens of
the mini-batches after the first step:

    prob NMAE    sum |p_fp8 - p| / sum p of the sampled tokens
    ratio NMAE   the same of the importance ratio; amplification = ratio NMAE / prob NMAE
    clipped      share of ratios <= 0.8, FP8 and reference
"""

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path

import torch
from common import ROOT, versions
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_fp8 import CalibratedClippingCallback, FP8GRPOConfig, FP8GRPOTrainer, diagnostics
from trl_fp8.clipping.statistics import ClipStatistics


RECIPES = [
    ("tensorwise", "none"),
    ("rowwise", "none"),
    ("rowwise", "power_of_2"),
    ("rowwise_with_gw_hp", "none"),
    ("rowwise_with_gw_hp", "power_of_2"),
    ("blockwise", "none"),
    ("blockwise", "power_of_2"),
]
TOPICS = (
    "a river, two trains, the moon, bread, a king, rain, a bridge, numbers, a dog, the sea, a clock, winter".split(
        ", "
    )
)


def random_reward(completion_ids, **kwargs) -> list[float]:
    """A coin that depends on the tokens only, so that every recipe trains on the same advantages."""
    return [float(hashlib.sha256(str(ids).encode()).digest()[0] % 2) for ids in completion_ids]


class Recorder:
    """Keeps what the trainer hands to the statistics."""

    def __init__(self):
        self.batches = []
        self.update = ClipStatistics.update

    def __enter__(self):
        def spy(statistics, *tensors):
            self.batches.append(tensors)
            self.update(statistics, *tensors)

        ClipStatistics.update = spy
        return self

    def __exit__(self, *_):
        ClipStatistics.update = self.update


def sample(model_path: str, num_prompts: int, num_generations: int, length: int, seed: int) -> dict:
    """Completions of the unconverted model, `num_generations` per prompt."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    prompts = [f"Tell me something about {TOPICS[i % len(TOPICS)]}, please ({i})." for i in range(num_prompts)]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]
    batch = tokenizer([t for t in texts for _ in range(num_generations)], return_tensors="pt", padding=True)
    with torch.no_grad():
        output = model.generate(**batch, do_sample=True, max_new_tokens=length, min_new_tokens=length, top_k=0)
    return {
        text: output[i * num_generations : (i + 1) * num_generations, batch["input_ids"].shape[1] :].tolist()
        for i, text in enumerate(texts)
    }


def off_the_ties(model: torch.nn.Module) -> None:
    """Move every weight by a random part of half a BF16 step.

    A BF16 number has 8 significant bits and an e4m3 number 4, so 1/16 of the weights of a BF16 checkpoint lie exactly
    half-way between two FP8 numbers where the scale is a power of two. In FP32 an optimizer step of any size tips all
    of them over, each in the direction of the step.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2**-8 * (torch.rand(parameter.shape, generator=generator) - 0.5))


def run(recipe: str, rounding: str, samples: dict, options: argparse.Namespace, folder: str) -> dict:
    def rollout(prompts, trainer):
        count = {}
        ids, completions = [], []
        for prompt in prompts:
            count[prompt] = count.get(prompt, -1) + 1
            ids.append(trainer.processing_class(prompt, add_special_tokens=False)["input_ids"])
            completions.append(samples[prompt][count[prompt]])
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    args = FP8GRPOConfig(
        folder,
        fp8_recipe=recipe,
        fp8_scale_rounding=rounding,
        bf16=options.bf16,
        max_steps=4,
        per_device_train_batch_size=len(samples) * options.num_generations // 4,
        num_generations=options.num_generations,
        steps_per_generation=4,
        calibration_interval=1,
        max_completion_length=options.length,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=4,
    )
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    if options.dither:
        off_the_ties(model)
    trainer = FP8GRPOTrainer(
        model,
        random_reward,
        args,
        train_dataset=Dataset.from_dict({"prompt": list(samples)}),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        callbacks=[CalibratedClippingCallback(calibration_interval=1)],
        rollout_func=rollout,
    )
    start = time.perf_counter()
    with Recorder() as recorder:
        trainer.train()
    seconds = time.perf_counter() - start
    moved = recorder.batches[1:]
    ratio, ref_ratio, mask = (torch.cat([b[i] for b in moved]) for i in (0, 1, 3))
    error = diagnostics.nmae(ratio, ref_ratio, mask)
    logs = next(entry for entry in trainer.state.log_history if "fp8/prob_nmae" in entry)
    result = {
        "recipe": recipe,
        "rounding": rounding,
        "tokens": int(mask.sum()),
        "prob_nmae": logs["fp8/prob_nmae"],
        "ratio_nmae": (error.numerator / error.denominator).item(),
        "fp8_below_0.8": (ratio[mask] <= 0.8).double().mean().item(),
        "ref_below_0.8": (ref_ratio[mask] <= 0.8).double().mean().item(),
        "fp8_above_1.24": (ratio[mask] >= 1.24).double().mean().item(),
        "ref_above_1.24": (ref_ratio[mask] >= 1.24).double().mean().item(),
        "noise_floor": logs["fp8/noise_floor"],
        "ratio_nmae_per_step": [
            (lambda e: (e.numerator / e.denominator).item())(diagnostics.nmae(b[0], b[1], b[3]))
            for b in recorder.batches
        ],
        "seconds": seconds,
    }
    result["amplification"] = result["ratio_nmae"] / result["prob_nmae"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder written by examples/prepare_smollm2.py")
    parser.add_argument("--num_prompts", type=int, default=16)
    parser.add_argument("--num_generations", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--bf16", action="store_true", help="compute in BF16 autocast (slow on most CPUs)")
    parser.add_argument("--dither", action="store_true", help="start from weights off the ties of a BF16 checkpoint")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--recipes", nargs="+", default=None, help="recipe or recipe:rounding")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "ratio_noise.jsonl")
    options = parser.parse_args()
    chosen = RECIPES
    if options.recipes:
        chosen = [tuple((r + ":none").split(":")[:2]) for r in options.recipes]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    print("| seed | recipe | rounding | tokens | prob NMAE | ratio NMAE | x | FP8 <= 0.8 | ref <= 0.8 | noise floor |")
    print("|" + "---|" * 10)
    for seed in options.seeds:
        samples = sample(options.model, options.num_prompts, options.num_generations, options.length, seed)
        for recipe, rounding in chosen:
            with tempfile.TemporaryDirectory() as folder:
                r = run(recipe, rounding, samples, options, folder)
            with options.output.open("a") as file:
                settings = {"seed": seed, **{k: getattr(options, k) for k in ("learning_rate", "bf16", "dither")}}
                file.write(json.dumps({**settings, **r}) + "\n")
            print(
                f"| {seed} | {recipe} | {rounding} | {r['tokens']} | {r['prob_nmae']:.2%} | {r['ratio_nmae']:.2%} | "
                f"{r['amplification']:.2f} | {r['fp8_below_0.8']:.2%} | {r['ref_below_0.8']:.2%} | "
                f"{r['noise_floor']:.4f} |",
                flush=True,
            )
    print(versions())


if __name__ == "__main__":
    main()
