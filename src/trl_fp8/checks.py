"""Refusals and warnings that need the model, the data or the trainer. Settings alone are checked in `config.py`."""

import logging
import traceback
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from .clipping.policy import ClippingPolicy
from .config import FP8GRPOConfig
from .distributed import World, check_strategy
from .float8.recipes import RECIPES


logger = logging.getLogger(__name__)


def check_arguments(args: Any, model: Any, quantization_config: Any) -> None:
    """What can be refused before the model is loaded."""
    if not isinstance(args, FP8GRPOConfig):
        raise TypeError(
            f"args is a {type(args).__name__}, which has no FP8 settings. Pass FP8GRPOConfig(...); it takes every "
            "field of GRPOConfig."
        )
    if args.fp8_recipe == "none":
        if args.resolved_clip_policy == "calibrated":
            logger.warning(
                "fp8_recipe='none' with clip_policy='calibrated': the BF16 side is the training forward itself, so "
                "calibration only moves the bounds to the reference bounds. Set clip_policy='fixed' for plain GRPO."
            )
        return
    if quantization_config is not None:
        raise ValueError(
            f"quantization_config={type(quantization_config).__name__} quantises the weights that fp8_recipe="
            f"{args.fp8_recipe!r} quantises itself, in every forward pass (also with an adapter: no QLoRA). Drop it, "
            "or set fp8_recipe='none'."
        )
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code)
        _refuse_quantised(config, model, args.fp8_recipe)
    elif isinstance(model, nn.Module):
        _refuse_quantised(getattr(model, "config", None), type(model).__name__, args.fp8_recipe)


def _refuse_quantised(config: PretrainedConfig | None, name: str, recipe: str) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    raise ValueError(
        f"{name} is a quantised checkpoint (quant_method {getattr(method, 'value', method)!r}), whose weights "
        f"fp8_recipe={recipe!r} cannot train. Start from the BF16 or FP32 checkpoint, or dequantise it first."
    )


def check_dataset(dataset: Any, args: FP8GRPOConfig) -> None:
    """Refuse a train set without prompts, or with too few for a generation batch: the run would end before a step."""
    if isinstance(dataset, (Dataset, IterableDataset)):
        _check_columns(dataset)
    assert args.generation_batch_size  # set by GRPOConfig.__post_init__
    assert args.num_generations
    prompts = args.generation_batch_size // args.num_generations
    if isinstance(dataset, Sized) and len(dataset) < prompts:
        raise ValueError(
            f"train_dataset has {len(dataset)} prompts, and one generation batch takes {prompts} "
            f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}); "
            "incomplete batches are dropped, so there is nothing to train on. Add prompts, or lower "
            "per_device_train_batch_size or steps_per_generation."
        )


def _check_columns(dataset: Dataset | IterableDataset) -> None:
    """By name, without reading a row: that would use up a stream or the random numbers of a transform."""
    transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
    columns = None if transformed else dataset.column_names
    if columns and "prompt" not in columns:
        raise ValueError(
            f"train_dataset has no column 'prompt' (it has {', '.join(columns)}), and a completion needs one to begin "
            "with. Rename the column: dataset.rename_column(..., 'prompt')."
        )


def check_model(model: Any, args: FP8GRPOConfig, world: World, policies: list[ClippingPolicy]) -> None:
    """What the loaded model must not have."""
    check_strategy(args, world)
    if args.shadow_interval is not None or any(policy.needs_shadow for policy in policies):
        refuse_noise(model)
    if args.fp8_recipe != "none":
        _refuse_quantised(model.config, type(model).__name__, args.fp8_recipe)
        _refuse_bypassing(model, args.fp8_recipe)
        _warn_vanishing_updates(model, args.learning_rate)


def _refuse_bypassing(model: Any, recipe: str) -> None:
    """Refuse adapters that multiply by the base weight themselves: their layers would look converted (peft 0.21)."""
    for config in model.peft_config.values() if is_peft_model(model) else ():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind in ("HRA", "SHIRA") or (kind == "MISS" and config.init_weights == "bat"):
            raise ValueError(
                f"{type(config).__name__} with fp8_recipe={recipe!r}: this adapter computes with the weight of its "
                "layer and never calls the layer, so nothing of it would run in FP8. Use LoRA, or fp8_recipe='none'."
            )


def refuse_noise(model: nn.Module) -> None:
    """Refuse what makes two forward passes of the same weights differ."""
    for name, module in model.named_modules():
        for attribute, value in {
            **vars(module),
            **({"p": module.p} if isinstance(module, nn.Dropout) else {}),
        }.items():
            # nn.Dropout; plain numbers that attention reads in training mode; PEFT's, one per adapter; router noise
            noisy = (
                "dropout" in attribute
                or "jitter" in attribute
                or (attribute == "p" and isinstance(module, nn.Dropout))
            )
            values = value.values() if isinstance(value, dict) else [value]
            found = [v for v in values if noisy and isinstance(v, float) and v > 0]
            if found:
                where = name if attribute == "p" else f"{name}.{attribute}".lstrip(".")
                raise ValueError(
                    f"Dropout is active ({where}={found[0]}), so two forward passes of the same weights differ and "
                    "every importance ratio is noise; nothing can be calibrated. Set it to 0 in the model config (in "
                    "the PEFT config, --lora_dropout 0), pass disable_dropout=True where it is an nn.Dropout, or set "
                    "clip_policy='fixed' without shadow_interval."
                )


def _warn_vanishing_updates(model: nn.Module, learning_rate: float) -> None:
    # An Adam step moves a weight by about the learning rate; BF16 keeps 8 bits, so less than 2^-9 of a weight is lost
    for name, parameter in model.named_parameters():
        if (
            parameter.requires_grad
            and parameter.dtype == torch.bfloat16
            and parameter.dim() == 2
            and parameter.numel()
        ):
            smallest = parameter.detach().abs().float().mean().item() * 2**-9
            if learning_rate < smallest:
                logger.warning(
                    f"The weights are BF16 and learning_rate={learning_rate:g}: a step smaller than about "
                    f"{smallest:.1g} ({name}) rounds to nothing, so most updates vanish. Load the model in float32 "
                    "(model_init_kwargs={'dtype': 'float32'}); matmuls run in FP8/BF16 all the same."
                )
            return


@contextmanager
def naming_reward_functions(names: list[str]) -> Iterator[None]:
    """Name the reward functions where TRL fails on what one of them returned, which is not a list."""
    try:
        yield
    except TypeError as error:
        frames = list(traceback.walk_tb(error.__traceback__))
        if frames[-1][0].f_globals.get("__name__") != "trl.trainer.grpo_trainer":
            raise  # by the reward function itself
        functions = f"A reward function ({' or '.join(names)})"
        if "argument" in str(error):
            raise ValueError(
                f"{functions} cannot be called with what TRL passes: prompts, completions, completion_ids, the other "
                f"columns and more ({error}). Give it the names it reads and **kwargs."
            ) from error
        raise ValueError(
            f"{functions} did not return a list with one number or None for each completion ({error}). Return such a "
            "list; for a single number, [number] * len(completions)."
        ) from error


def warn_without_rewards(rewards: Tensor, names: list[str]) -> None:
    """Name the functions of a generation batch without any reward, in which every advantage is 0.

    An outage of a judge passes, so the run goes on.

    Args:
        rewards (`Tensor` of shape `(samples of all ranks, functions)`): NaN where a function gave none.
        names: of the functions.
    """
    if bool(torch.isnan(rewards).all()):
        logger.warning(
            f"No reward function gave a number for any of the {rewards.size(0)} samples of the generation batch "
            f"({', '.join(names)}), so nothing is learned from it. If this repeats, check that they return floats for "
            "this data set; None means not applicable."
        )


def padding_for_kernels(recipe: str, bf16: bool | None, pad_to_multiple_of: Any, automatic: bool) -> int | None:
    """`pad_to_multiple_of` of a run on real FP8 kernels: the multiple they need where it is `automatic`.

    Raises:
        ValueError: the run asks for something the kernels of `recipe` do not do.
    """
    record = RECIPES[recipe]
    if record.writes_bf16_only and not bf16:
        raise ValueError(
            f"bf16={bf16} with fp8_recipe={recipe!r}: rowwise FP8 kernels write BF16 only. Set bf16=True, "
            "fp8_recipe='tensorwise', or fp8_emulate=True."
        )
    multiple = record.token_multiple
    if multiple is None:
        return pad_to_multiple_of
    if automatic:
        return multiple
    if pad_to_multiple_of is None or pad_to_multiple_of % multiple:
        raise ValueError(
            f"pad_to_multiple_of={pad_to_multiple_of} lets a micro-batch have a token count the FP8 weight gradient "
            f"kernel of fp8_recipe={recipe!r} cannot take (it needs a multiple of {multiple}). Leave it 'auto', set "
            f"a multiple of {multiple}, or use fp8_recipe='rowwise_with_gw_hp'."
        )
    return pad_to_multiple_of
