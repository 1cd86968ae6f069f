"""Tiny models, a character tokenizer and data, all built in code: nothing is downloaded."""

import copy

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer


TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
RECIPES = (*TORCHAO_RECIPES, "blockwise")
VOCABULARY = ["<pad>", "<eos>", "<unk>", *"0123456789+=abcdefghij"]

# Settings of every small run; a test overrides what it is about
RUN = {
    "use_cpu": True,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def build_model(seed: int = 0, **overrides) -> Qwen3ForCausalLM:
    config = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "tie_word_embeddings": True,
        **overrides,
    }
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**config))


def build_moe(seed: int = 0, **overrides) -> Qwen3MoeForCausalLM:
    """Two layers of four fused experts, of which a token takes two; attention as in [`build_model`]."""
    dense = build_model().config
    shared = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = {
        **{name: getattr(dense, name) for name in (*shared, "head_dim", "pad_token_id", "eos_token_id")},
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "bos_token_id": None,
        "router_jitter_noise": 0.0,
        **overrides,
    }
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**config))


def build_dataset(size: int = 64) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{i // 10 % 10}+{i % 10}=" for i in range(size)]})


def digits_reward(completions, **kwargs) -> list[float]:
    """Share of digits: the advantages have both signs from the first batch on."""
    return [sum(c.isdigit() for c in completion) / max(len(completion), 1) for completion in completions]


def build_trainer(output_dir, *, model=None, cls=FP8GRPOTrainer, config=FP8GRPOConfig, trainer=None, **settings):
    """A trainer on the tiny task; `settings` go to the config, `trainer` to the trainer."""
    arguments = {
        "reward_funcs": digits_reward,
        "train_dataset": build_dataset(),
        "processing_class": build_tokenizer(),
        **(trainer or {}),
    }
    args = config(str(output_dir), **{**RUN, **settings})
    return cls(build_model() if model is None else model, args=args, **arguments)


def clone(model):
    return copy.deepcopy(model)


def logged(trainer, key) -> list:
    """Values of `key` in the log of a run, in order."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]
