"""Which quantisation of the rollout engine goes with which training recipe, and what a mixed pair costs.

Trainer and engine are closest when both scale the same values by the same rule: the granularity of weights and
activations, and how a scale is rounded. `docs/numerics.md` has the measured mismatch of each pair, and
`benchmarks/mismatch.py` measures your own model.
"""

from typing import Any

from ..float8.recipes import RECIPES


# The log of a product of T token ratios has a variance of about 2 k3 T. With the k3 = 0.004 that FP8 rollouts reach at
# best (NeMo-RL's gate), its deviation passes ln 2, the limit of C = 2, at T = 60
LONG_RESPONSE = 64


def engine_dtype(args: Any) -> str | None:
    """The type that trainer and engine must both compute in, as vLLM calls it; `None` leaves it to the checkpoint."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else None


def rollout_warnings(args: Any) -> list[str]:
    """What the user of an FP8 rollout should know once, from the `FP8GRPOConfig`."""
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
    """What is wrong with a blockwise pair whose scales follow two rules; `None` where they follow one.

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
        f"the engine's scales are {rule}, so most FP8 values differ (docs/numerics.md). Set fp8_scale_rounding="
        f"{fitting!r}."
    )


def pair_warning(recipe: str, scale_rounding: str, quantization: str) -> str | None:
    """What is unequal on the two sides, and what to do; `None` for a pair that agrees."""
    record = RECIPES.get(recipe)  # of BF16 training there is none
    rounded = record is not None and record.takes_scale_rounding and scale_rounding == "power_of_2"
    engine = "fp8_per_tensor" if quantization == "fp8" else quantization
    if recipe == quantization == "none":
        return None
    if record is None:
        reason = "the engine quantises and the trainer does not"
    elif quantization == "none":
        reason = "the trainer quantises and the engine does not"
    elif engine != record.engine_quantization:
        reason = f"they scale at different granularity ({record.engine_quantization} is the pair)"
    elif rounded and not record.engine_rounds_somewhere:  # where it does: `scale_rule_warning`
        reason = "the trainer rounds scales to powers of two and vLLM does not"
    elif engine == "fp8_per_tensor":
        reason = "the engine scales q, k and v (and gate and up) by one number, the trainer by one each"
    else:
        return None
    setting = f"fp8_recipe={recipe!r}" + (f", fp8_scale_rounding={scale_rounding!r}" if rounded else "")
    return (
        f"{setting} with vLLM in {quantization!r}: {reason}, so their log-probs are farther apart than those of "
        "fp8_recipe='rowwise' with fp8_scale_rounding='none' and vllm_quantization='auto' (docs/numerics.md). "
        "Importance sampling corrects for it: watch mismatch/*, or use that pair."
    )
