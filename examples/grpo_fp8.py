"""
GRPO in FP8 with Calibrated Clipping, from the command line or a YAML file. The flow is that of TRL's own `grpo.py`.

No arguments: the embedded task, on a CPU in a few minutes (see `embedded_task.py`):

    accelerate launch examples/grpo_fp8.py

A real run. Every field of `FP8GRPOConfig` is a flag; `--config` takes them from a YAML file, flags win over it:

    accelerate launch examples/grpo_fp8.py --config examples/configs/qwen3_8b_grpo_rowwise.yaml \
        --output_dir outputs/qwen3-8b --seed 1

A model and no data set: the embedded sums as questions to that model, with few steps and small batches:

    accelerate launch examples/grpo_fp8.py --model_name_or_path path/to/SmolLM2-135M-Instruct
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import run_report
import torch
import transformers
import yaml
from accelerate import PartialState
from data_and_rewards import FP8ScriptArguments, Task, named_task, reward_functions
from embedded_task import build_or_load, chat_prompt, exact_answer_reward, held_out_reward, plain_prompt, text_prompt
from embedded_task import datasets as embedded_datasets
from packaging.version import Version
from transformers import AutoTokenizer, ProgressCallback
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from trl.models import unwrap_model_for_generation

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer


sys.path.insert(0, os.getcwd())  # `my_rewards.py` and `my_policies.py` beside the user count

# TRL sets the old name of a setting that transformers has renamed; the warning would break the progress bar apart
warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)

# What the embedded task trains with. Each holds only where neither the command line nor the YAML file says otherwise.
EMBEDDED_DEFAULTS: dict[str, Any] = {
    "output_dir": "outputs/embedded",
    "per_device_train_batch_size": 192,
    "num_generations": 8,
    "max_completion_length": 6,
    "learning_rate": 3e-5,  # FP8 noise and the weights' own movement then matter about equally to the clipping
    "lr_scheduler_type": "constant",
    "max_steps": 240,  # 60 generation batches, 12 recalibrations
    "calibration_interval": 5,
    "logging_steps": 4,  # one line of the log per generation batch
    "save_steps": 60,  # at the end of a generation batch, so that a resumed run is identical to an uninterrupted one
    "save_total_limit": 2,
    "gradient_checkpointing": False,
    "ddp_find_unused_parameters": False,
    "report_to": "none",
    "seed": 42,
}
# A named model on the embedded sums: a few steps, that a laptop can do with some 100M parameters in a few minutes.
NAMED_MODEL_DEFAULTS: dict[str, Any] = {
    **EMBEDDED_DEFAULTS,
    "output_dir": "outputs/named_model",
    "per_device_train_batch_size": 8,
    "max_completion_length": 16,
    "learning_rate": 1e-6,
    "max_steps": 8,  # two generation batches, each of them recalibrates
    "calibration_interval": 1,
    "save_steps": 8,
}
LOSSES_WITH_TWO_BOUNDS = ("grpo", "bnpo", "dr_grpo", "dapo")


# -- arguments -------------------------------------------------------------------------------------------------------


def make_parser() -> TrlParser:
    return TrlParser((FP8ScriptArguments, FP8GRPOConfig, ModelConfig, DatasetMixtureConfig), prog="grpo_fp8.py")


def given_settings(argv: list[str]) -> dict[str, Any]:
    """What the command line and the YAML file set, without any default, so that ours fill only what is left."""
    argv, settings = list(argv), {}
    if "--config" in argv[:-1]:
        index = argv.index("--config")
        with open(argv[index + 1], encoding="utf-8") as file:
            settings = yaml.safe_load(file) or {}
        del argv[index : index + 2]
    parser = make_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    namespace, _ = parser.parse_known_args(argv)
    return {**settings, **vars(namespace)}


def defaults_for(given: dict[str, Any]) -> dict[str, Any]:
    """Defaults of the embedded task or of a named model on it; none for a run with its own data set."""
    defaults = _defaults_for(given)
    if given.get("clip_policy", "auto") not in ("auto", "calibrated"):
        defaults.pop("calibration_interval", None)
    return defaults


def _defaults_for(given: dict[str, Any]) -> dict[str, Any]:
    model, dataset = given.get("model_name_or_path"), given.get("dataset_name") or given.get("datasets")
    if dataset and not model:
        raise ValueError(
            f"dataset_name={dataset!r} is set without model_name_or_path, and the embedded model reads nothing but "
            "its own sums. Name a model, or leave the data set out to train the embedded task."
        )
    # TRL's default is a dropout of 0.05, with which no importance ratio could be calibrated
    common: dict[str, Any] = {"lora_dropout": 0.0}
    if dataset:
        return {name: value for name, value in common.items() if name not in given}
    defaults = {**common, **(NAMED_MODEL_DEFAULTS if model else EMBEDDED_DEFAULTS)}
    # transformers asks to say so before bf16 works there; a device that was named has been thought of already
    defaults["use_cpu"] = not torch.accelerator.is_available() and "ACCELERATE_TORCH_DEVICE" not in os.environ
    if "generation_batch_size" not in given:
        # Four mini-batches per generation batch, also where calibration is off and nothing else would ask for them
        defaults["steps_per_generation"] = 4 * int(given.get("gradient_accumulation_steps", 1))
    if "num_train_epochs" in given:
        del defaults["max_steps"]
    return {name: value for name, value in defaults.items() if name not in given}


def parse(argv: list[str]) -> tuple[FP8ScriptArguments, FP8GRPOConfig, ModelConfig, DatasetMixtureConfig]:
    parser = make_parser()
    if not {"-h", "--help"} & set(argv):
        parser.set_defaults(**defaults_for(given_settings(argv)))
    return parser.parse_args_and_config(argv)


# -- what to train on ------------------------------------------------------------------------------------------------


def embedded_task(
    args: FP8GRPOConfig, script_args: FP8ScriptArguments, model_args: ModelConfig, say: Callable
) -> Task:
    """The embedded sums, for the embedded model or for the named one."""
    named = model_args.model_name_or_path
    if named is None:
        say("No model and no data set named: two-digit addition with a small embedded model.")
        model, make_prompt = str(build_or_load(script_args.embedded_cache_dir, say)), text_prompt
    else:
        say(f"No data set named: two-digit addition, as questions to {named}.")
        tokenizer = AutoTokenizer.from_pretrained(
            named, revision=model_args.model_revision, trust_remote_code=args.trust_remote_code
        )
        model, make_prompt = named, chat_prompt if tokenizer.chat_template else plain_prompt
    train, held_out = embedded_datasets(make_prompt)
    rewards = reward_functions(script_args, args, train.column_names) if script_args.reward_funcs else []
    return Task(
        model=model,
        reward_funcs=rewards or [exact_answer_reward],
        train_dataset=train,
        eval_dataset=held_out if args.eval_strategy != "no" else None,
        # For another model the few default steps change less than so many samples could show
        held_out=held_out if named is None else None,
        is_embedded=True,
    )


# -- the run ---------------------------------------------------------------------------------------------------------


class ShortProgress(ProgressCallback):
    """A progress bar that carries three numbers, where the usual one prints every metric at every log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None and logs and "reward" in logs:
            shown = {"reward": logs["reward"]}
            if "clip_bounds/lower" in logs:
                shown |= {"L": logs["clip_bounds/lower"], "H": logs["clip_bounds/upper"]}
            self.training_bar.set_postfix({name: f"{value:.2f}" for name, value in shown.items()})


def main(
    script_args: FP8ScriptArguments, args: FP8GRPOConfig, model_args: ModelConfig, mixture: DatasetMixtureConfig
) -> None:
    is_main = PartialState().is_main_process
    say = print if is_main else lambda *_: None
    if not is_main:
        transformers.utils.logging.disable_progress_bar()
    try:
        if script_args.dataset_name or mixture.datasets:
            task = named_task(args, script_args, model_args, mixture)
        else:
            task = embedded_task(args, script_args, model_args, say)
    except ValueError as error:  # a setting or the data: its message says all, a traceback adds nothing
        sys.exit(f"grpo_fp8.py: {error}")

    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(args.model_init_kwargs or {}),
    }
    trainer = FP8GRPOTrainer(
        model=task.model,
        reward_funcs=task.reward_funcs,
        args=args,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )

    def measure() -> float | None:
        if task.held_out is None:
            return None
        # On every rank, because a sharded model needs all of them to generate
        with torch.autocast(args.device.type, dtype=torch.bfloat16, enabled=args.bf16), whole_model(trainer) as model:
            return held_out_reward(model, trainer.processing_class, task.held_out, args.max_completion_length)

    before = measure()
    if task.is_embedded and not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(ShortProgress)
    # "True" is what a flag can say for transformers' True, the last checkpoint in output_dir
    resume: Any = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    after = measure()

    trainer.save_model(args.output_dir)
    if is_main:
        report(trainer, before, after, say)
        say(f"Model saved to {args.output_dir}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
        say(f"Model pushed to https://huggingface.co/{trainer.hub_model_id}")
    if Version(transformers.__version__) >= Version("5.18.0"):
        trainer.end()  # trackers and the process group; older versions do it by themselves


def whole_model(trainer: FP8GRPOTrainer) -> AbstractContextManager:
    """Context that enters with a model that can generate. Only DeepSpeed ZeRO-3 has to gather its weights for it."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    if plugin is None or plugin.zero_stage != 3:
        return nullcontext(trainer.model)
    return unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator)


def report(trainer: FP8GRPOTrainer, before: float | None, after: float | None, say: Callable) -> None:
    """The closing table, and the figure where matplotlib is installed; both from the run's own log."""
    args, history = trainer.args, trainer.state.log_history
    if args.loss_type not in LOSSES_WITH_TWO_BOUNDS:  # the others have no bounds to show
        if before is not None:
            say(f"Reward on held-out prompts, before -> after: {before:.3f} -> {after:.3f}")
        return
    precision = "FP8" if args.fp8_recipe != "none" else "BF16" if args.bf16 else "FP32"
    table = run_report.table(history, args.reference_bounds, trainer.clip_bounds, before, after, precision)
    say(f"\n{table}\n")
    say(f"All metrics: trainer_state.json in the checkpoints of {args.output_dir} (docs/metrics.md)")
    path = Path(args.output_dir) / "calibration.png"
    if run_report.figure(history, args.reference_bounds, path, precision):
        say(f"Figure of bounds and clip shares: {path}")
    else:
        say("No figure: matplotlib is not installed (pip install matplotlib)")


if __name__ == "__main__":
    try:
        arguments = parse(sys.argv[1:])
    except (ValueError, TypeError, OSError, yaml.YAMLError) as error:
        sys.exit(f"grpo_fp8.py: {error}")
    main(*arguments)
