"""Data sets and reward functions of a run with its own data: what to read, in which form, and how to judge it."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import DatasetDict, IterableDatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, get_dataset
from trl.rewards import accuracy_reward, get_soft_overlong_punishment, reasoning_accuracy_reward, think_format_reward

from trl_fp8 import FP8GRPOConfig


# Suffix of a data file to the builder of `datasets` that reads it
FILE_KINDS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}
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
        builder = FILE_KINDS.get(path.suffix)
        if builder is None:
            raise ValueError(
                f"dataset_name={name!r} is a file of a kind that is not read here. Use .json, .jsonl, .csv or "
                ".parquet, or a folder written by `datasets`."
            )
        try:
            return load_dataset(builder, data_files={script_args.dataset_train_split: str(path)}, streaming=streaming)
        except (StopIteration, DatasetGenerationError) as error:
            raise ValueError(
                f"dataset_name={name!r} cannot be read as {builder} ({error.__cause__ or error or 'no row'}). Check "
                "the file; .jsonl has one JSON object per line."
            ) from error
    if not path.exists() and (path.suffix in FILE_KINDS or name.startswith((".", "/", "~"))):
        raise ValueError(
            f"dataset_name={name!r} looks like a file or folder, and there is none at {path.absolute()}. Check the "
            "path; a data set on the hub is named owner/name."
        )
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
    if not is_text and not isinstance(row[prompt_column], list):
        raise ValueError(
            f"prompt_column={prompt_column!r} holds {row[prompt_column]!r} in the first row, which is neither a text "
            "nor a conversation. Name the column of the prompts."
        )
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
        function = getattr(importlib.import_module(module), name)
        if not callable(function):
            raise AttributeError(f"{name} is a {type(function).__name__} and no function")
        return function
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"reward_funcs names {path!r}, which cannot be imported ({error}). Give the path of a function as Python "
            "would import it from here, such as my_rewards.exact_match."
        ) from error
