"""
The embedded task: a model, a tokenizer, data and a reward that need no hub, no download and no GPU.

The task is two-digit addition, one token per character: the prompt `37+58=` and the completion `95`. `build_or_load`
trains a small Qwen3 on it by supervision and stops where GRPO has both room (the accuracy is far from 1) and signal
(most groups of eight completions hold right and wrong ones, and the answers are still uncertain, which is where FP8
moves probability ratios). The result is an ordinary `transformers` checkpoint on disk, built once and then reused.
"""

import hashlib
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)


PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
VOCABULARY = [PAD, BOS, EOS, *"0123456789+="]
DEFAULT_CACHE_DIR = Path("~/.cache/trl_fp8/embedded_task").expanduser()

SPLIT_SEED = 1234
NUM_HELD_OUT = 512
MAX_COMPLETION_LENGTH = 6  # three digits and eos, and room for a wrong turn

WARM_START_SEED = 0
WARM_START_BATCH_SIZE = 64
WARM_START_LEARNING_RATE = 1e-3
WARM_START_MAX_STEPS = 3000
WARM_START_CHECK_EVERY = 20
WARM_START_STOP_REWARD = 0.30


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character. There is no unknown token: text outside the vocabulary is a mistake, and fails."""
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        model_max_length=64,
    )


def model_config() -> Qwen3Config:
    """A Qwen3 small enough for a CPU. Every linear layer's dimensions are multiples of 16, as FP8 kernels require."""
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
    )


def split_pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """
    All pairs of two-digit numbers as (train, held out), shuffled by `SPLIT_SEED`.

    A pair and its mirror image (37+58, 58+37) land on the same side, so every held-out sum is new to the model.
    """
    unordered = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng = random.Random(SPLIT_SEED)
    rng.shuffle(unordered)

    def both_orders(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        ordered = [pair for a, b in pairs for pair in sorted({(a, b), (b, a)})]
        rng.shuffle(ordered)
        return ordered

    return both_orders(unordered[NUM_HELD_OUT:]), both_orders(unordered[:NUM_HELD_OUT])[:NUM_HELD_OUT]


def text_prompt(a: int, b: int) -> str:
    """The sum as the embedded model reads it."""
    return f"{a}+{b}="


def chat_prompt(a: int, b: int) -> list[dict[str, str]]:
    """The sum as a question to a model with a chat template, after one example: small models ramble without it."""
    return [
        {"role": "user", "content": "What is 12 + 34?"},
        {"role": "assistant", "content": "12 + 34 = 46"},
        {"role": "user", "content": f"What is {a} + {b}?"},
    ]


def plain_prompt(a: int, b: int) -> str:
    """The sum as a text to continue, for a base model with a tokenizer of its own."""
    return f"Question: What is 12 + 34?\nAnswer: 12 + 34 = 46\nQuestion: What is {a} + {b}?\nAnswer:"


def datasets(make_prompt: Callable[[int, int], Any] = text_prompt) -> tuple[Dataset, Dataset]:
    """The train and the held-out prompts, as data sets with the columns `prompt` and `answer`."""

    def build(pairs: list[tuple[int, int]]) -> Dataset:
        return Dataset.from_dict(
            {"prompt": [make_prompt(a, b) for a, b in pairs], "answer": [str(a + b) for a, b in pairs]}
        )

    train, held_out = split_pairs()
    return build(train), build(held_out)


def exact_answer_reward(completions: list, answer: list[str], **kwargs) -> list[float]:
    """
    Reward function: 1 where the last integer of the completion is the answer, otherwise 0.

    Args:
        completions (`list[str]` or `list[list[dict[str, str]]]`):
            Completions, as text or as conversations.
        answer (`list[str]`):
            The sums, from the data set's column.
        **kwargs:
            What else the trainer passes; not used.
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    numbers = [re.findall(r"\d+", text) for text in texts]
    return [float(bool(found) and found[-1] == right) for found, right in zip(numbers, answer, strict=True)]


@torch.no_grad()
def held_out_reward(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_completion_length: int = MAX_COMPLETION_LENGTH,
    samples_per_prompt: int = 4,
    batch_size: int = 256,
    seed: int = 0,
) -> float:
    """
    Mean `exact_answer_reward` of completions sampled at temperature 1, which is the quantity GRPO maximises.

    The random state and the training mode are left as they were, so that measuring changes nothing about a run.
    """
    was_training = model.training
    model.eval()
    rewards: list[float] = []
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for start in range(0, len(dataset), batch_size):
            rows = dataset[start : start + batch_size]
            inputs = _tokenize(tokenizer, rows["prompt"]).to(model.device)
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=samples_per_prompt,
                max_new_tokens=max_completion_length,
                pad_token_id=tokenizer.pad_token_id,
            )
            texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            rewards += exact_answer_reward(texts, [a for a in rows["answer"] for _ in range(samples_per_prompt)])
    model.train(was_training)
    return sum(rewards) / len(rewards)


def _tokenize(tokenizer: PreTrainedTokenizerBase, prompts: list) -> Any:
    """Left-padded input ids of plain or conversational prompts."""
    side, tokenizer.padding_side = tokenizer.padding_side, "left"
    try:
        if isinstance(prompts[0], str):
            return tokenizer(prompts, padding=True, return_tensors="pt")
        return tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
    finally:
        tokenizer.padding_side = side


def warm_start(say: Callable[[str], None] = print) -> Qwen3ForCausalLM:
    """
    Train a fresh model by supervision until its sampled held-out reward reaches `WARM_START_STOP_REWARD`.

    The stop is a measurement, not a step count: floating-point details differ between machines, and the same step
    would be a different model there.
    """
    tokenizer = build_tokenizer()
    train_pairs, _ = split_pairs()
    _, held_out = datasets()
    texts = [f"{text_prompt(a, b)}{a + b}{EOS}" for a, b in train_pairs]
    tokens = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)
    first = len(text_prompt(10, 10))  # all prompts have this length; what follows is learned

    reward = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(WARM_START_SEED)
        model = Qwen3ForCausalLM(model_config()).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_START_LEARNING_RATE, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        for step in range(1, WARM_START_MAX_STEPS + 1):
            rows = torch.randint(len(texts), (WARM_START_BATCH_SIZE,))
            logits = model(tokens["input_ids"][rows], attention_mask=tokens["attention_mask"][rows]).logits
            loss = F.cross_entropy(logits[:, first - 1 : -1].flatten(0, 1), labels[rows, first:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % WARM_START_CHECK_EVERY == 0:
                reward = held_out_reward(model, tokenizer, held_out, samples_per_prompt=1)
                if step % (5 * WARM_START_CHECK_EVERY) == 0 or reward >= WARM_START_STOP_REWARD:
                    say(f"  warm start: step {step}, loss {loss.item():.2f}, held-out reward {reward:.2f}")
                if reward >= WARM_START_STOP_REWARD:
                    return model.eval()
    raise RuntimeError(
        f"WARM_START_MAX_STEPS={WARM_START_MAX_STEPS} ended at a held-out reward of {reward:.3f}, too little for GRPO "
        f"to start from (WARM_START_STOP_REWARD={WARM_START_STOP_REWARD}). Raise the former in {__file__}."
    )


def cache_key() -> str:
    """Hash of everything that determines the checkpoint: this file (task, model, schedule, seeds) and torch."""
    parts = [Path(__file__).read_text(encoding="utf-8"), torch.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """
    Let `write` fill a directory, then move it to `path` in one step.

    A killed process leaves a stray temporary directory, never a half-written `path`. Where another process was
    faster, its result stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        write(temporary)
        try:
            os.replace(temporary, path)
        except OSError:  # `path` exists and is not empty
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def build_or_load(cache_dir: str | os.PathLike | None = None, say: Callable[[str], None] = print) -> Path:
    """
    The path of the warm-started checkpoint, model and tokenizer; trained now if the cache does not hold it.

    In a distributed run the main process builds and the others wait for it.
    """
    path = Path(cache_dir or DEFAULT_CACHE_DIR) / cache_key()

    def write(directory: Path) -> None:
        warm_start(say).save_pretrained(directory)
        build_tokenizer().save_pretrained(directory)

    with PartialState().main_process_first():
        if not path.is_dir():
            say(f"Building the embedded model once (about half a minute), to be kept in {path}")
            write_atomically(path, write)
    return path
