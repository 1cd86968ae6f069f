"""GRPO with training and rollout in FP8, in one process with a real engine."""

import pytest
import torch


pytest.importorskip("vllm")

from conftest import RUN, build_dataset, build_tokenizer, digits_reward
from vllm_helpers import ENGINE_KWARGS, build_policy, keep_alive, save_policy, score

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer


pytestmark = pytest.mark.vllm


def build_vllm_trainer(folder, *, seed=0, **settings):
    """A trainer on the tiny task whose policy was loaded from a path, FP32 masters from a BF16 checkpoint."""
    model = build_policy(seed)
    path = save_policy(model, folder / "policy")
    settings = {
        **RUN,
        "bf16": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_engine_kwargs": ENGINE_KWARGS,
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 64,
        "model_init_kwargs": {"dtype": "float32"},
        **settings,
    }
    trainer = FP8GRPOTrainer(
        path,
        digits_reward,
        FP8GRPOConfig(str(folder / "out"), **settings),
        build_dataset(),
        processing_class=build_tokenizer(),
    )
    return keep_alive(trainer)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    trainer = build_vllm_trainer(tmp_path_factory.mktemp("grpo"), calibration_interval=1, max_steps=8)
    trainer.train()
    return trainer


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def test_both_sides_are_fp8_and_both_bounds_are_calibrated(finished):
    assert finished.args.rollout_quantization == "fp8_per_channel"
    assert len(finished.conversion_report.converted) == 14
    assert logged(finished, "clip_bounds/lower")[-1] != 0.6
    assert logged(finished, "calibration/degenerate") == [0.0, 0.0]
    assert all(torch.isfinite(torch.tensor(logged(finished, "loss"))))


def test_the_engine_was_synced_once_per_generation_batch(finished):
    # float32 masters, sent before generation batches 1 and 2
    num_bytes = 4 * sum(p.numel() for p in finished.model.parameters())
    assert logged(finished, "rollout/sync_bytes") == [num_bytes] * 2
    assert all(0 < seconds < 5 for seconds in logged(finished, "rollout/sync_time"))


def test_the_mismatch_is_logged_once_per_generation_batch(finished):
    assert len(logged(finished, "mismatch/k3_kl")) == 2
    assert max(logged(finished, "mismatch/k3_kl")) < 0.02
    assert min(logged(finished, "mismatch/ess")) > 0.9
    assert logged(finished, "mismatch/unscored") == [0.0, 0.0]


def test_after_training_the_engine_follows_the_trainer(finished):
    before = score(finished.vllm_generation.llm)
    finished.vllm_generation.sync_weights()
    assert not torch.equal(score(finished.vllm_generation.llm), before)


def test_the_start_up_line_and_the_warning_of_an_unequal_pair(tmp_path, capsys, caplog):
    build_vllm_trainer(tmp_path, fp8_recipe="none", vllm_quantization="fp8_per_channel")
    assert "rollout: vLLM in fp8_per_channel (correction token_truncate)" in capsys.readouterr().out
    assert caplog.text.count("the engine quantises and the trainer does not") == 1


def test_a_bf16_rollout_goes_through_the_same_sync(tmp_path):
    """TRL's own sync raises where vLLM packs BF16 weights, as on CPUs with AVX-512."""
    trainer = build_vllm_trainer(tmp_path, vllm_quantization="none", max_steps=1)
    trainer.train()
    assert len(logged(trainer, "rollout/sync_time")) == 1
