"""The start-up line: what is in FP8, which bounds are in force, and when they first change."""

from collections.abc import Iterable

from .clipping.policy import ClippingPolicy
from .config import FP8GRPOConfig
from .float8.convert import ConversionReport


def startup_line(
    args: FP8GRPOConfig,
    report: ConversionReport | None,
    clip_bounds: tuple[float, float],
    policies: Iterable[ClippingPolicy],
    processes: str = "",
) -> str:
    """One line; `report` is `None` for a model in its own precision, `processes` empty for a single process."""
    parts = [f"fp8_recipe={args.fp8_recipe}"]
    if processes:
        parts.append(processes + (", weights gathered in FP8" if args.fp8_fsdp_all_gather else ""))
    if report is not None:
        total = len(report.converted) + len(report.kept)
        kernels = "emulated" if report.emulated else "FP8 kernels"
        parts.append(f"{len(report.converted)}/{total} layers ({kernels})")
    if args.use_vllm:
        quantization = args.rollout_quantization
        precision = "high precision" if quantization == "none" else quantization
        cache = f", {args.vllm_kv_cache_dtype} KV cache" if args.vllm_kv_cache_dtype else ""
        correction = args.vllm_importance_sampling_mode if args.vllm_importance_sampling_correction else "none"
        engine = "vLLM" if args.vllm_mode == "colocate" else "a vLLM server"
        parts.append(f"rollout: {engine} in {precision}{cache} (correction {correction})")
    else:
        parts.append("rollout: transformers with the training forward" + (" (FP8)" if report else ""))
    policies = list(policies)
    if args.reads_both_bounds:
        resumed = " (a resumed run's are those of its checkpoint)" if policies else ""
        parts.append(f"clip bounds [{clip_bounds[0]:.4g}, {clip_bounds[1]:.4g}]{resumed}")
        if policies or args.shadow_interval is not None:
            ref_lower, ref_upper = args.reference_bounds
            parts.append(f"epsilon and epsilon_high are the BF16 reference [{ref_lower:.4g}, {ref_upper:.4g}]")
    parts += [f"clip policy {p.name or type(p).__name__}: {p.announcement(args)}" for p in policies]
    if not policies:
        parts.append("clip policy fixed" + (f" (auto: {args.auto_reason.rstrip('.')})" if args.auto_reason else ""))
    if args.shadow_interval is not None:
        parts.append(f"scored in BF16 as well: one generation batch in {args.shadow_interval}")
    if args._default_steps_per_generation:
        parts.append(f"steps_per_generation={args.steps_per_generation} (default 4 * gradient_accumulation_steps)")
    elif args.fp8_recipe != "none" and args.ratios_are_one:
        parts.append(
            f"steps_per_generation={args.steps_per_generation}: one update per generation batch, so every ratio is 1 "
            "(with another clip_policy than 'fixed', or with shadow_interval, the default makes four)"
        )
    else:
        parts.append(f"steps_per_generation={args.steps_per_generation}")
    if args.save_strategy == "steps" and args.save_steps * args.gradient_accumulation_steps % (
        args.micro_batches_per_generation
    ):
        parts.append(
            f"save_steps={args.save_steps:g} is not a multiple of the "
            f"{args.micro_batches_per_generation / args.gradient_accumulation_steps:g} optimizer steps per generation "
            "batch, so some resumes generate a batch again"
        )
    return "FP8 GRPO: " + "; ".join(parts)
