"""Which quantisation of the rollout engine goes with which training recipe, and what a mixed pair costs.

Trainer and engine are closest when both scale the same values by the same rule: the granularity of weights and
activations, and how a scale is rounded. Mismatches are means of |log pi_trainer - log pi_engine| over sampled tokens,
in nats: SmolLM2-135M, 177 tokens, one seed, vLLM 0.31 on a CPU (`benchmarks/mismatch.py` measures your own model).
"""

import math
from typing import Any

from ..float8.recipes import RECIPES


# engine -> measured mismatch beside BF16 training; those of the recipes are in their records
_BF16_MISMATCH = {"none": 0.046, "fp8_per_channel": 0.196, "fp8_per_tensor": 0.172}
# The log of a product of T token ratios has a variance of about 2 k3 T. With the k3 = 0.004 that FP8 rollouts reach at
# best (NeMo-RL's gate), its deviation passes ln 2, the limit of C = 2, at T = 60
LONG_RESPONSE = 64


def resolve_quantization(vllm_quantization: str, recipe: str) -> str:
    """The engine's quantisation: `"auto"` is the pair of `recipe`."""
    if vllm_quantization != "auto":
        return vllm_quantization
    return "none" if recipe == "none" else RECIPES[recipe].engine_quantization


def rollout_warnings(args: Any) -> list[str]:
    """What a run with an FP8 rollout should be told once, from its `FP8GRPOConfig`."""
    pair = pair_warning(args.fp8_recipe, args.fp8_scale_rounding, args.rollout_quantization)
    warnings = [] if pair is None else [pair]
    if args.rollout_quantization == "none":
        return warnings
    if not args.bf16 and not args.fp16:
        warnings.append(
            f"bf16=False and fp16=False with a rollout in {args.rollout_quantization!r}: the trainer computes in FP32 "
            "and vLLM's FP8 layers in BF16, so the two quantise different numbers. Set bf16=True."
        )
    if not args.vllm_importance_sampling_correction:
        warnings.append(
            f"vllm_importance_sampling_correction=False with a rollout in {args.rollout_quantization!r}: the loss "
            "takes the engine's samples for the trainer's, and accuracy falls (verl-project/verl#2809). Set it True."
        )
    elif args.vllm_importance_sampling_mode == "sequence_mask" and args.max_completion_length > LONG_RESPONSE:
        warnings.append(
            f"vllm_importance_sampling_mode='sequence_mask' with max_completion_length={args.max_completion_length}: "
            "it masks a response by the product of its token ratios, whose spread grows with the length; beyond about "
            f"{LONG_RESPONSE} tokens of FP8 most responses are masked (huggingface/trl#5814). Use 'token_truncate'."
        )
    return warnings


def scale_rule_warning(args: Any, engine_rounds: bool) -> str | None:
    """What to tell of a blockwise pair whose scales follow two rules; `None` where they follow one.

    Args:
        args: of the run.
        engine_rounds: whether the engine's block scales are powers of two (UE8M0).
    """
    rounds, record = args.fp8_scale_rounding == "power_of_2", RECIPES.get(args.fp8_recipe)
    if record is None or not record.engine_rounds_somewhere or rounds == engine_rounds:
        return None
    if args.rollout_quantization != record.engine_quantization:
        return None
    rule, fitting = ("powers of two", "power_of_2") if engine_rounds else ("FP32 numbers", "none")
    return (
        f"fp8_scale_rounding={args.fp8_scale_rounding!r} with vLLM in {record.engine_quantization!r}: on this device "
        f"the engine's scales are {rule}, so nine in ten FP8 values differ (docs/numerics.md). Set "
        f"fp8_scale_rounding={fitting!r}."
    )


def pair_warning(recipe: str, scale_rounding: str, quantization: str) -> str | None:
    """What is unequal on the two sides and how far apart they were measured; `None` for a pair that agrees."""
    if quantization == "none" and recipe == "none":
        return None
    per_tensor = quantization in ("fp8", "fp8_per_tensor")
    engine = "fp8_per_tensor" if per_tensor else quantization
    record = RECIPES.get(recipe)  # of BF16 training there is none
    rounded = record is not None and record.takes_scale_rounding and scale_rounding == "power_of_2"
    if record is None:
        reason = "the engine quantises and the trainer does not"
    elif quantization == "none":
        reason = "the trainer quantises and the engine does not"
    elif engine != record.engine_quantization:
        reason = f"they scale at different granularity ({record.engine_quantization} is the pair)"
    elif rounded and not record.engine_rounds_somewhere:  # where it does: `scale_rule_warning`
        reason = "the trainer rounds scales to powers of two and vLLM does not"
    elif per_tensor:
        reason = "the engine scales q, k and v (and gate and up) by one number, the trainer by one each"
    else:
        return None
    table = _BF16_MISMATCH if record is None else record.mismatch_rounded if rounded else record.mismatch
    measured = table.get(engine)
    distance = "not measured for this pair" if measured is None else f"{measured} nats a token on a 135M model"
    best = min(RECIPES.values(), key=lambda other: other.mismatch.get(other.engine_quantization, math.inf))
    least = best.mismatch[best.engine_quantization]
    setting = f"fp8_recipe={recipe!r}" + (f", fp8_scale_rounding={scale_rounding!r}" if rounded else "")
    return (
        f"{setting} with vLLM in {quantization!r}: {reason}. Mismatch of log-probs: {distance}, against {least} of "
        f"fp8_recipe={best.name!r} with {best.engine_quantization!r}. Importance sampling corrects for it; watch "
        "mismatch/*."
    )
