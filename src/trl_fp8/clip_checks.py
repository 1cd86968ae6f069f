"""Which clip policy a run has, and what it cannot be combined with. Takes values, no model."""

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .clipping.calibrated import CalibratedClippingCallback
from .clipping.policy import ClippingPolicy
from .clipping.registry import build_policy
from .clipping.search import ClipSearch
from .config_checks import CALIBRATED_LOSS_TYPES, mapping


if TYPE_CHECKING:
    from .config import FP8GRPOConfig

logger = logging.getLogger(__name__)

# Fields of FP8GRPOConfig that build the default policy
_POLICY_SETTINGS = (
    "calibration_interval",
    "clip_lower_init",
    "clip_upper_init",
    *(f.name for f in dataclasses.fields(ClipSearch)),
)


def resolve_clip_policy(args: "FP8GRPOConfig") -> tuple[str, str | None]:
    """What `clip_policy` stands for, and why `"auto"` is `"fixed"` where it is.

    Raises:
        ValueError: a policy asked for by name is not there, or cannot act on this run.
    """
    if isinstance(args.clip_policy_kwargs, str):
        args.clip_policy_kwargs = mapping("clip_policy_kwargs", args.clip_policy_kwargs)
    if args.clip_policy == "fixed":
        if args.clip_policy_kwargs:
            raise ValueError(
                f"clip_policy_kwargs={args.clip_policy_kwargs!r} with clip_policy='fixed', which takes no arguments. "
                "Leave clip_policy_kwargs unset, or name another policy."
            )
        return "fixed", None
    if args.clip_policy in ("auto", "calibrated"):
        problem = calibration_problem(args, args.clip_search)
        if problem and args.clip_policy == "calibrated":
            raise ValueError(" ".join(problem))
        return ("calibrated", None) if problem is None else ("fixed", problem[0])
    policy = build_policy(args.clip_policy, args.clip_policy_kwargs or {})
    apply_requirements(args, policy)
    return args.clip_policy, None


def clip_policy_of(args: "FP8GRPOConfig") -> ClippingPolicy:
    """The policy that the run's `clip_policy` names, which is not "fixed"."""
    settings = {}
    if args.resolved_clip_policy == "calibrated":
        search = args.clip_search
        settings = {
            "calibration_interval": args.calibration_interval,
            "clip_lower_init": args.clip_lower_init,
            "clip_upper_init": min(args.clip_upper_init, search.clip_upper_max),  # the interval may end at `delta`
            **vars(search),
        }
    return build_policy(args.resolved_clip_policy, cast(dict, args.clip_policy_kwargs or {}), settings)


def calibration_problem(args: "FP8GRPOConfig", search: ClipSearch) -> tuple[str, str] | None:
    """Why Calibrated Clipping over `search` cannot act on this run and what to do, or `None`."""
    fixed = "or clip_policy='fixed'."
    if args.loss_type not in CALIBRATED_LOSS_TYPES:
        return (
            f"loss_type={args.loss_type!r} does not read both clip bounds, so calibrating them changes nothing.",
            f"Use one of {', '.join(CALIBRATED_LOSS_TYPES)}, {fixed}",
        )
    if args.importance_sampling_level != "token":
        return (
            f"importance_sampling_level={args.importance_sampling_level!r} clips one ratio per sequence, and "
            "calibration is built for token ratios.",
            f"Use 'token', {fixed}",
        )
    if args.neftune_noise_alpha:
        return (
            f"neftune_noise_alpha={args.neftune_noise_alpha} adds noise to every forward pass, so every importance "
            "ratio is noise and nothing can be calibrated.",
            f"Leave it unset, {fixed}",
        )
    if args.epsilon >= 1:
        return (
            f"epsilon={args.epsilon} puts the lower reference bound at {1 - args.epsilon}, where no ratio is ever "
            "clipped and nothing can be calibrated.",
            f"Set 0 < epsilon < 1, {fixed}",
        )
    if args.delta is not None and args.delta < max(
        search.clip_upper_max, search.clip_upper_min + search.clip_grid_step
    ):
        return (
            f"delta={args.delta} leaves no room in the search interval of the upper bound [{search.clip_upper_min}, "
            f"{search.clip_upper_max}], so the bounds would cross.",
            "Raise delta, or lower clip_upper_min and clip_upper_max.",
        )
    return None


def apply_requirements(args: "FP8GRPOConfig", policy: ClippingPolicy) -> None:
    """Set the TRL fields that a policy requires; before TRL reads them.

    Raises:
        ValueError: one of them was set to something else.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(args)}
    for name, value in policy.requires.items():
        given = getattr(args, name)
        if given not in (value, defaults[name]):
            raise ValueError(
                f"{name}={given!r} with {type(policy).__name__}, which needs {name}={value!r}. Leave {name} unset, or "
                "use another clip policy."
            )
        setattr(args, name, value)


def check_clip(args: "FP8GRPOConfig") -> None:
    """What the resolved policy and the shadow passes need of the finished configuration."""
    if args.resolved_clip_policy != "fixed":
        check_policy(clip_policy_of(args), args)
    if args.shadow_interval is None:
        return
    if args.neftune_noise_alpha:
        raise ValueError(
            f"shadow_interval={args.shadow_interval} with neftune_noise_alpha={args.neftune_noise_alpha}, which adds "
            "noise to every forward pass: FP8's own noise could not be seen beside it. Leave one of them unset."
        )
    if args.ratios_are_one:
        raise ValueError(
            f"shadow_interval={args.shadow_interval} with gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps} and steps_per_generation * num_iterations="
            f"{args.micro_batches_per_generation}: each generation batch gets one update, so every ratio is 1 and "
            "there is nothing to measure. Raise steps_per_generation or num_iterations."
        )


def check_policy(policy: ClippingPolicy, args: "FP8GRPOConfig") -> None:
    """Refuse a policy that cannot act on this run. The same for a policy by name and for one in `callbacks`."""
    name = type(policy).__name__
    for field_name, value in policy.requires.items():
        if getattr(args, field_name) != value:
            raise ValueError(
                f"{name} needs {field_name}={value!r}, and the run has {getattr(args, field_name)!r}. Pass the policy "
                "when the trainer is built, or set the field."
            )
    needs_both = policy.reads_both_bounds or type(policy).micro_batch_bounds is not ClippingPolicy.micro_batch_bounds
    if needs_both and not args.reads_both_bounds:
        raise ValueError(
            f"{name} moves both clip bounds, but loss_type={args.loss_type!r} with importance_sampling_level="
            f"{args.importance_sampling_level!r} does not clip token ratios at both (it does not read both clip "
            "bounds, or clips one ratio per sequence). Use loss_type grpo, bnpo, dr_grpo or dapo at token level, "
            "clip_policy='fixed', or reads_both_bounds = False in a policy that only weighs tokens."
        )
    if isinstance(policy, CalibratedClippingCallback):
        problem = calibration_problem(args, policy.search)
        if problem:
            raise ValueError(" ".join(problem))


def give_way_to_callbacks(args: "FP8GRPOConfig", policies: list[ClippingPolicy]) -> None:
    """Let a policy passed in `callbacks` take the place of `clip_policy`, before TRL reads the fields it requires.

    Raises:
        ValueError: `clip_policy` names another one.
    """
    if policies and args.clip_policy != "auto":
        raise ValueError(
            f"clip_policy={args.clip_policy!r} with {type(policies[0]).__name__} in callbacks: a run has one clip "
            "policy. Leave clip_policy unset, or take the policy out of callbacks."
        )
    if policies and args.clip_policy_kwargs:
        raise ValueError(
            f"clip_policy_kwargs={args.clip_policy_kwargs!r} with {type(policies[0]).__name__} in callbacks, which is "
            "built already. Pass the arguments to its constructor."
        )
    for policy in policies:
        apply_requirements(args, policy)


def check_policies(policies: list[ClippingPolicy], args: "FP8GRPOConfig") -> None:
    """One clip policy at most, whose conditions hold."""
    if len(policies) > 1:
        names = ", ".join(type(policy).__name__ for policy in policies)
        raise ValueError(
            f"callbacks holds {len(policies)} clipping policies ({names}), which would overwrite each other's bounds. "
            "Pass one."
        )
    for policy in policies:
        check_policy(policy, args)


def warn_ignored_settings(policy: ClippingPolicy | None, args: "FP8GRPOConfig") -> None:
    """Name the settings of the calibrated policy that another one, or none, ignores."""
    defaults = {f.name: f.default for f in dataclasses.fields(args)}
    own = policy.arguments() if isinstance(policy, CalibratedClippingCallback) else {}
    given = {name: getattr(args, name) for name in _POLICY_SETTINGS}
    ignored = [name for name, value in given.items() if value not in (defaults[name], own.get(name))]
    if ignored:
        logger.warning(
            f"No effect of {', '.join(ignored)} in FP8GRPOConfig: "
            + (
                f"the clip policy of this run ({type(policy).__name__}) has its own settings."
                if policy is not None
                else "the clip bounds of this run are fixed."
            )
        )


def check_bounds(lower: float, upper: float, delta: float | None) -> None:
    """Refuse bounds no loss can clip at."""
    # TRL computes with 1 - lower and upper - 1; FP32 holds no ratio beyond 3e38
    if not (0 < lower < 1 < upper <= torch.finfo(torch.float32).max and 1 - lower < 1):
        raise ValueError(
            f"clip_bounds=({lower}, {upper}) do not enclose the ratio 1 of an unchanged policy, or lie so far from it "
            "that no FP32 ratio reaches them. Set 0 < lower < 1 < upper, such as (0.6, 1.8)."
        )
    if delta is not None and upper > delta:
        raise ValueError(
            f"clip_bounds=({lower}, {upper}) exceed delta={delta}, TRL's cap on the ratio of negative-advantage "
            "tokens, so the bounds would cross. Keep the upper bound at delta or below."
        )


def check_collection(args: "FP8GRPOConfig", beginning: bool, shadow: bool) -> None:
    """Refuse statistics that would miss part of a batch, or a shadow pass that has nothing to find."""
    if not beginning:
        raise RuntimeError(
            "collect_clip_statistics was called outside on_generation_begin, so part of the batch would be missed. "
            "Call it in on_generation_begin, and read host.clip_statistics in on_generation_end."
        )
    if shadow and args.ratios_are_one:
        raise ValueError(
            "shadow=True asks for BF16 ratios, but with gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps} and steps_per_generation * num_iterations="
            f"{args.micro_batches_per_generation} each generation batch gets one update and every ratio is 1. Raise "
            "steps_per_generation or num_iterations, or ask for no shadow pass."
        )


def check_token_weights(weights: Any, shape: torch.Size, policy: str) -> None:
    """Refuse token weights that do not belong to the tokens of the micro-batch `(B, T)`."""
    allowed = (tuple(shape), (shape[0], 1))
    if not isinstance(weights, Tensor) or tuple(weights.shape) not in allowed:
        found = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(
            f"token_weights of {policy} returned {found}, and the micro-batch has the shape {tuple(shape)}, so the "
            f"weights do not belong to its tokens. Return a tensor of shape {allowed[0]} or {allowed[1]}, or None."
        )
