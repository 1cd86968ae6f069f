"""Off means identical: with FP8 and calibration off, the trainer is GRPOTrainer, bit for bit."""

import pytest
import torch
from builders import build_dataset, build_trainer
from trl import GRPOConfig, GRPOTrainer


OFF = {"fp8_recipe": "none", "clip_policy": "fixed"}
# GRPOConfig fields whose defaults differ, made equal
EQUAL = {
    "epsilon_high": 0.28,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}
TIMINGS = ("step_time", "runtime", "per_second", "fp8/shadow_time")

RUNS = {
    "aligned": {"gradient_accumulation_steps": 2},
    "misaligned": {"gradient_accumulation_steps": 3, "steps_per_generation": 4},
    "mini_batches_and_iterations": {"steps_per_generation": 4, "num_iterations": 2},
    "evaluation": {"steps_per_generation": 2, "eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
    "checkpointing_and_reference_model": {"steps_per_generation": 2, "beta": 0.1, "save_strategy": "steps"},
    "bf16_without_gradient_checkpointing": {"steps_per_generation": 2, "gradient_checkpointing": False},
    "fp32": {"steps_per_generation": 2, "bf16": False},
    "masks": {
        "steps_per_generation": 2,
        "mask_truncated_completions": True,
        "top_entropy_quantile": 0.5,
        "off_policy_mask_threshold": 0.01,
        "delta": 1.5,
    },
    "cispo": {"steps_per_generation": 2, "loss_type": "cispo"},
    "sequence_level": {"steps_per_generation": 2, "importance_sampling_level": "sequence", "loss_type": "grpo"},
}


def run(output_dir, cls, **settings):
    completions = []

    def reward(completions: list[str], completion_ids, **kwargs):
        recorded.extend(completion_ids)
        return [float(sum(c.isdigit() for c in text)) for text in completions]

    recorded = completions
    settings = {"max_steps": 6, "save_steps": 3, "logging_steps": 2, **EQUAL, **settings}
    if cls is GRPOTrainer:
        kind = {"cls": GRPOTrainer, "config": GRPOConfig}
    else:
        kind = {"cls": cls}
        settings |= OFF
    model = None
    if settings.get("beta"):
        # the reference model is loaded from where the policy came from
        from builders import build_model

        path = output_dir / "start"
        build_model().save_pretrained(path)
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path)
    extra = {"reward_funcs": reward, "eval_dataset": build_dataset(8)}
    trainer = build_trainer(output_dir, model=model, trainer=extra, **kind, **settings)
    trainer.train()
    return trainer, completions


@pytest.mark.parametrize("name", RUNS)
def test_off_is_bit_equal_to_grpo_trainer(name, tmp_path):
    from trl_fp8 import FP8GRPOTrainer

    stock, stock_tokens = run(tmp_path / "stock", GRPOTrainer, **RUNS[name])
    ours, our_tokens = run(tmp_path / "ours", FP8GRPOTrainer, **RUNS[name])
    assert our_tokens == stock_tokens
    assert len(stock_tokens) >= 24
    stock_weights, our_weights = stock.model.state_dict(), ours.model.state_dict()
    assert list(our_weights) == list(stock_weights)
    for key, value in stock_weights.items():
        assert torch.equal(our_weights[key], value), key
    assert len(ours.state.log_history) == len(stock.state.log_history)
    for our_log, stock_log in zip(ours.state.log_history, stock.state.log_history, strict=True):
        compared = [key for key in stock_log if not any(part in key for part in TIMINGS)]
        assert compared
        for key in compared:
            assert our_log[key] == stock_log[key] or (
                our_log[key] != our_log[key] and stock_log[key] != stock_log[key]
            )
    assert ours.epsilon_low == stock.epsilon_low
    assert ours.epsilon_high == stock.epsilon_high
