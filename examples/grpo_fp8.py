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
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import run_report
import torch
import transformers
import yaml
from accelerate import PartialState
from datasets import DatasetDict, IterableDatasetDict, load_dataset, load_from_disk
from embedded_task import build_or_load, chat_prompt, exact_answer_reward, held_out_reward, plain_prompt, text_prompt
from embedded_task import datasets as embedded_datasets
from packaging.version import Version
from transformers import AutoTokenizer, ProgressCallback
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from trl.rewards import accuracy_reward, get_soft_overlong_punishment, reasoning_accuracy_reward, think_format_reward

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer


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
# These of TRL read a completion as a conversation
CONVERSATIONAL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")


@dataclass
class FP8ScriptArguments(ScriptArguments):
    """
    What this script takes beside `FP8GRPOConfig`, `ModelConfig` and `DatasetMixtureConfig`.

    Args:
        reward_funcs (`list[str]`, *optional*):
            Reward functions: `accuracy_reward`, `reasoning_accuracy_reward`, `think_format_reward`,
            `get_soft_overlong_punishment`, or dotted import paths. Without it, `accuracy_reward` and
            `think_format_reward` for a data set with a `solution` column.
        reward_model_name_or_path (`str`, *optional*):
            Reward model, on the hub or on disk, in addition to `reward_funcs`.
        prompt_column (`str`, defaults to `"prompt"`):
            Column with the prompts, text or conversations.
        solution_column (`str`, *optional*):
            Column with the bare final answers, passed to the reward functions as `solution`.
        system_prompt (`str`, *optional*):
            System message before each prompt; a text prompt becomes a conversation.
        soft_punish_cache (`int`, *optional*):
            Length over which `get_soft_overlong_punishment` rises to 1, before `max_completion_length`. Without it, a
            fifth of `max_completion_length`, which is DAPO's proportion.
        embedded_cache_dir (`str`, *optional*):
            Where the embedded model is kept, instead of `~/.cache/trl_fp8/embedded_task`.
    """

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: `accuracy_reward`, `reasoning_accuracy_reward`, `think_format_reward`, "
            "`get_soft_overlong_punishment`, or dotted import paths. Without it, `accuracy_reward` and "
            "`think_format_reward` for a data set with a `solution` column."
        },
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Reward model, on the hub or on disk, in addition to `reward_funcs`."}
    )
    prompt_column: str = field(default="prompt", metadata={"help": "Column with the prompts, text or conversations."})
    solution_column: str | None = field(
        default=None,
        metadata={"help": "Column with the bare final answers, passed to the reward functions as `solution`."},
    )
    system_prompt: str | None = field(
        default=None,
        metadata={"help": "System message before each prompt; a text prompt becomes a conversation."},
    )
    soft_punish_cache: int | None = field(
        default=None,
        metadata={
            "help": "Length over which `get_soft_overlong_punishment` rises to 1, before `max_completion_length`. "
            "Without it, a fifth of `max_completion_length`, which is DAPO's proportion."
        },
    )
    embedded_cache_dir: str | None = field(
        default=None,
        metadata={"help": "Where the embedded model is kept, instead of `~/.cache/trl_fp8/embedded_task`."},
    )


@dataclass
class Task:
    """What to train, on what, and by which rewards."""

    model: str
    reward_funcs: list[str | Callable]
    train_dataset: Any
    eval_dataset: Any = None
    held_out: Any = None
    """Sums on which the embedded model's reward is measured before and after the run."""
    is_embedded: bool = False
    """Whether the prompts are the embedded sums, for the embedded model or another."""


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
    model, dataset = given.get("model_name_or_path"), given.get("dataset_name") or given.get("datasets")
    if dataset and not model:
        raise ValueError(
            f"dataset_name={dataset!r} is set without model_name_or_path, and the embedded model reads nothing but "
            "its own sums. Name a model, or leave the data set out to train the embedded task."
        )
    if dataset:
        return {}
    defaults = dict(NAMED_MODEL_DEFAULTS if model else EMBEDDED_DEFAULTS)
    defaults["use_cpu"] = not torch.accelerator.is_available()  # transformers asks to say so before bf16 works there
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


def named_task(
    args: FP8GRPOConfig, script_args: FP8ScriptArguments, model_args: ModelConfig, mixture: DatasetMixtureConfig
) -> Task:
    """The named model on the named data set."""
    with PartialState().main_process_first():  # one process downloads and prepares, the others read its cache
        splits = prepare(get_dataset(mixture) if mixture.datasets else load(script_args), script_args, args)
    evaluates = args.eval_strategy != "no"
    for name in [script_args.dataset_train_split] + evaluates * [script_args.dataset_test_split]:
        if name not in splits:
            raise ValueError(
                f"The data set has no split {name!r} (it has {', '.join(splits)}), so there is nothing to read. Set "
                "dataset_train_split or dataset_test_split, or eval_strategy='no' to train without evaluation."
            )
    train = splits[script_args.dataset_train_split]
    return Task(
        model=model_args.model_name_or_path,
        reward_funcs=reward_functions(script_args, args, list(next(iter(train)))),
        train_dataset=train,
        eval_dataset=splits[script_args.dataset_test_split] if evaluates else None,
    )


def load(script_args: FP8ScriptArguments) -> DatasetDict | IterableDatasetDict:
    """A data set from the hub, from a folder (also one of `save_to_disk`), or from a JSON, CSV or Parquet file."""
    name, streaming = script_args.dataset_name, script_args.dataset_streaming
    path = Path(name).expanduser()
    if path.is_file():
        builder = {".jsonl": "json", ".ndjson": "json"}.get(path.suffix, path.suffix.removeprefix("."))
        if builder not in ("json", "csv", "parquet"):
            raise ValueError(
                f"dataset_name={name!r} is a file of a kind that is not read here. Use .json, .jsonl, .csv or "
                ".parquet, or a folder written by `datasets`."
            )
        return load_dataset(builder, data_files={script_args.dataset_train_split: str(path)}, streaming=streaming)
    if (path / "dataset_dict.json").is_file():
        return load_from_disk(path)
    if (path / "state.json").is_file():
        return DatasetDict({script_args.dataset_train_split: load_from_disk(path)})
    return load_dataset(name, name=script_args.dataset_config, streaming=streaming)


def prepare(splits: Any, script_args: FP8ScriptArguments, args: FP8GRPOConfig) -> Any:
    """Bring every split into the form the trainer and the reward functions read: `prompt`, and `solution` if any."""
    prompt_column, solution_column = script_args.prompt_column, script_args.solution_column
    system_prompt = script_args.system_prompt
    row = next(iter(splits[next(iter(splits))]), {})
    for setting, column in (("prompt_column", prompt_column), ("solution_column", solution_column)):
        if column is not None and column not in row:
            raise ValueError(
                f"{setting}={column!r} is no column of the data set, which has {', '.join(row) or 'no rows'}. Name "
                "the right one."
            )
    is_text = isinstance(row[prompt_column], str)
    as_conversation = is_text and (system_prompt or needs_conversations(script_args, row, solution_column))
    if prompt_column == "prompt" and solution_column is None and not as_conversation and not system_prompt:
        return splits

    def convert(row: dict) -> dict:
        prompt = row[prompt_column]
        if as_conversation:
            prompt = [{"role": "user", "content": prompt}]
        if system_prompt:
            prompt = [{"role": "system", "content": system_prompt}, *prompt]
        converted = {"prompt": prompt}
        if solution_column is not None:
            converted["solution"] = as_latex(row[solution_column])
        return converted

    return splits.map(convert)


def needs_conversations(script_args: FP8ScriptArguments, row: dict, solution_column: str | None) -> bool:
    names = script_args.reward_funcs or (CONVERSATIONAL_REWARDS if "solution" in row or solution_column else ())
    return any(name in CONVERSATIONAL_REWARDS for name in names)


def as_latex(answer: Any) -> str:
    """A bare final answer in math mode, without which math-verify reads `10^{10}` as 10 and intervals not at all."""
    answer = str(answer)
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"


def reward_functions(script_args: FP8ScriptArguments, args: FP8GRPOConfig, columns: list[str]) -> list[str | Callable]:
    """The reward functions and the reward model that were named, or the two defaults for a `solution` column."""
    registry: dict[str, Callable] = {
        "accuracy_reward": accuracy_reward,
        "reasoning_accuracy_reward": reasoning_accuracy_reward,
        "think_format_reward": think_format_reward,
    }
    functions: list[str | Callable] = []
    if script_args.reward_model_name_or_path:
        functions.append(script_args.reward_model_name_or_path)
    names = script_args.reward_funcs or []
    if not names and not functions:
        if "solution" not in columns:
            raise ValueError(
                f"reward_funcs is not set, and the data set has no `solution` column (it has {', '.join(columns)}) "
                "that the default accuracy_reward could compare with. Set reward_funcs, or solution_column."
            )
        names = ["accuracy_reward", "think_format_reward"]
    for name in names:
        if name == "get_soft_overlong_punishment":
            length = args.max_completion_length
            functions.append(get_soft_overlong_punishment(length, script_args.soft_punish_cache or length // 5))
        elif name in registry:
            functions.append(registry[name])
        elif "." in name:
            functions.append(import_dotted(name))
        else:
            raise ValueError(
                f"reward_funcs names {name!r}, which is not a known reward function. Use one of "
                f"{', '.join([*registry, 'get_soft_overlong_punishment'])}, or a dotted import path."
            )
    return functions


def import_dotted(path: str) -> Callable:
    module, name = path.rsplit(".", 1)
    sys.path.insert(0, os.getcwd())  # as TRL's script: `my_rewards.py` beside the user counts
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"reward_funcs names {path!r}, which cannot be imported ({error}). Give the path of a function as Python "
            "would import it from here, such as my_rewards.exact_match."
        ) from error


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
    if script_args.dataset_name or mixture.datasets:
        task = named_task(args, script_args, model_args, mixture)
    else:
        task = embedded_task(args, script_args, model_args, say)

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
        with torch.autocast(args.device.type, dtype=torch.bfloat16, enabled=args.bf16):
            return held_out_reward(trainer.model, trainer.processing_class, task.held_out, args.max_completion_length)

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


def report(trainer: FP8GRPOTrainer, before: float | None, after: float | None, say: Callable) -> None:
    """The closing table, and the figure where matplotlib is installed; both from the run's own log."""
    history, reference = trainer.state.log_history, trainer.args.reference_bounds
    say("\n" + run_report.table(history, reference, trainer.clip_bounds, before, after) + "\n")
    path = Path(trainer.args.output_dir) / "calibration.png"
    if run_report.figure(history, reference, path):
        say(f"Figure of bounds and clip shares: {path}")
    else:
        say("No figure: matplotlib is not installed (pip install matplotlib)")


if __name__ == "__main__":
    main(*parse(sys.argv[1:]))
