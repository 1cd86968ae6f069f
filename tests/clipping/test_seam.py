"""The seam between trainer and clip policy: what a policy may change, and that it changes nothing else."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import build_model, build_trainer, logged
from seam import SETTINGS, BoundsInForce, DropEverySecond, Ones, WithoutEverySecond, run, same

from trl_fp8 import CalibratedClippingCallback, ClippingPolicy
from trl_fp8.clipping import ClipStatistics


ROOT = Path(__file__).parents[2]
RUNS = {
    "mini_batches": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "two_iterations": {"num_iterations": 2},
    "misaligned": {"gradient_accumulation_steps": 3},
}


@pytest.fixture(scope="module", params=RUNS)
def runs(request, tmp_path_factory):
    """A run without a policy, the settings of it, and a folder."""
    folder = tmp_path_factory.mktemp(request.param)
    return run(folder / "stock", **RUNS[request.param]), RUNS[request.param], folder


@pytest.mark.parametrize("policy", [Ones, BoundsInForce])
def test_a_policy_that_asks_for_what_is_there_is_bit_equal_to_none(policy, runs):
    stock, settings, folder = runs
    assert stock["clipped"] > 0
    assert same(stock, run(folder / policy.__name__, policy, **settings))


def test_weights_of_0_and_1_leave_the_numerator_and_nothing_else(runs):
    stock, settings, folder = runs
    dropped = run(folder / "dropped", DropEverySecond, **settings)
    assert same(dropped, run(folder / "removed", cls=WithoutEverySecond, **settings))
    assert not same(dropped, stock)


def test_the_same_on_two_processes(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
            *(str(ROOT / "tests" / "helpers" / "seam.py"), str(tmp_path)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert found.pop("clipped") > 0
        assert found == {"ones": True, "bounds": True, "drop": True, "drop_acts": True}


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "grpo"])
def test_token_weights_act_on_every_loss_type(loss_type, tmp_path):
    class Drop(DropEverySecond):
        reads_both_bounds = False

    settings = {"loss_type": loss_type, "max_steps": 4}
    dropped = run(tmp_path / "dropped", Drop, **settings)
    assert same(dropped, run(tmp_path / "removed", cls=WithoutEverySecond, **settings))
    assert not same(dropped, run(tmp_path / "stock", **settings))


# -- what an event sees and leaves behind


class Narrow(ClippingPolicy):
    """Other bounds for each micro-batch, and statistics of the whole batch."""

    def __init__(self):
        self.seen, self.statistics = [], []

    def on_generation_begin(self, host):
        host.collect_clip_statistics([0.9, 0.99], [1.01, 1.1], shadow=False)

    def micro_batch_bounds(self, host, batch):
        self.seen.append(batch)
        return 0.99, 1.01

    def token_weights(self, host, batch):
        weights = torch.ones_like(batch.log_probs)
        weights[0] = 0.0
        return weights

    def on_generation_end(self, host):
        self.statistics.append(host.clip_statistics.numbers())


def test_bounds_of_a_micro_batch_hold_for_its_loss_and_are_what_metrics_say(tmp_path, monkeypatch):
    policy = Narrow()
    trainer = build_trainer(tmp_path, trainer={"callbacks": [policy]}, max_steps=4, learning_rate=5e-3)
    bounds, thresholds = [], []
    compute_loss = type(trainer)._compute_loss

    def spy(self, model, inputs):
        loss = compute_loss(self, model, inputs)
        bounds.append((self.epsilon_low, self.epsilon_high))
        thresholds.append(self.off_policy_mask_threshold)
        return loss

    monkeypatch.setattr(type(trainer), "_compute_loss", spy)
    trainer.train()
    assert bounds == [(pytest.approx(0.01), pytest.approx(0.01))] * 4
    assert thresholds == [math.inf] * 4
    assert trainer.off_policy_mask_threshold is None
    assert trainer.args.off_policy_mask_threshold is None
    assert trainer.clip_bounds == (0.8, 1.24)
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.2, 0.24)
    assert logged(trainer, "clip_bounds/lower") == [0.99] * 4
    shares = logged(trainer, "clip_share/lower")
    assert max(shares) > max(logged(trainer, "clip_share/lower_at_reference"))


def test_a_micro_batch_is_detached_and_holds_the_tokens_of_the_model(tmp_path):
    policy = Narrow()
    build_trainer(tmp_path, trainer={"callbacks": [policy]}, max_steps=4).train()
    assert len(policy.seen) == 4
    for batch in policy.seen:
        assert batch.log_probs.shape == batch.old_log_probs.shape == batch.mask.shape
        assert batch.advantages.shape == (8, 1)
        assert batch.mask.dtype == torch.bool
        assert batch.sampler_log_probs is batch.weights is None
        assert not batch.log_probs.requires_grad


def test_what_token_weights_drop_the_statistics_drop(tmp_path):
    policy = Narrow()
    build_trainer(tmp_path, trainer={"callbacks": [policy]}, max_steps=4).train()
    kept = sum(int((b.mask[1:] & (b.advantages[1:] != 0)).sum()) for b in policy.seen)
    assert any(bool(b.mask[0].any() and b.advantages[0] != 0) for b in policy.seen)
    (numbers,) = policy.statistics
    assert numbers.fp8.num_negative + numbers.fp8.num_positive == kept > 0


@pytest.mark.parametrize("weights", [torch.ones(6), torch.ones(8, 3), [[1.0] * 6] * 8])
def test_token_weights_of_another_shape_are_refused(weights, tmp_path):
    class Wrong(ClippingPolicy):
        def token_weights(self, host, batch):
            return weights

    trainer = build_trainer(tmp_path, trainer={"callbacks": [Wrong()]}, max_steps=1)
    with pytest.raises(ValueError, match=r"token_weights of Wrong returned .* Return a tensor of shape \(8, "):
        trainer.train()
    assert trainer.off_policy_mask_threshold is None


def test_evaluation_asks_no_policy(tmp_path):
    policy = Narrow()
    trainer = build_trainer(tmp_path, trainer={"callbacks": [policy]}, max_steps=4)
    trainer.eval_dataset = trainer.train_dataset
    trainer.train()
    seen = len(policy.seen)
    assert math.isfinite(trainer.evaluate(trainer.train_dataset.select(range(8)))["eval_loss"])
    assert len(policy.seen) == seen == 4


def test_the_mask_of_trl_stays_static_on_the_class():
    from trl import GRPOTrainer

    from trl_fp8 import FP8GRPOTrainer

    assert FP8GRPOTrainer.get_off_policy_mask is GRPOTrainer.get_off_policy_mask


# -- which policy


class Host:
    """A host of ten lines is enough to test a policy."""

    class args:
        ratios_are_one, reference_bounds = False, (0.8, 1.24)

    def __init__(self):
        self.clip_bounds, self.metrics = (0.6, 1.8), {}

    def collect_clip_statistics(self, lower_points, upper_points, shadow):
        self.clip_statistics = ClipStatistics(lower_points, upper_points)

    def record_metrics(self, metrics):
        self.metrics |= metrics


def test_a_policy_is_tested_without_a_trainer():
    host, policy = Host(), CalibratedClippingCallback(calibration_interval=1)
    policy.on_generation_begin(host)
    ratio = torch.tensor([[0.5, 0.9], [1.0, 2.0]])
    host.clip_statistics.update(ratio, ratio, torch.tensor([-1.0, 1.0]), torch.ones(2, 2))
    policy.on_generation_end(host)
    assert policy.bounds == (0.65, 1.7)
    assert policy.num_completed_generation_batches == 1
    assert host.metrics["clip_bounds/lower_target"].value == 0.8


def test_a_named_policy_beside_one_in_callbacks_is_refused(tmp_path):
    for name in ("calibrated", "fixed"):
        with pytest.raises(ValueError, match=f"clip_policy='{name}' with Ones in callbacks.*Leave clip_policy unset"):
            build_trainer(tmp_path, trainer={"callbacks": [Ones()]}, clip_policy=name)


def test_auto_that_is_fixed_says_so_at_the_start(tmp_path, capsys):
    trainer = build_trainer(tmp_path, loss_type="cispo", epsilon_high=5.0, max_steps=1)
    assert not [c for c in trainer.callback_handler.callbacks if isinstance(c, ClippingPolicy)]
    line = capsys.readouterr().out.splitlines()[-1]
    assert "clip policy fixed (auto: loss_type='cispo' does not read both clip bounds" in line
    trainer.train()
    assert trainer.epsilon_high == 5.0


class Capped(ClippingPolicy):
    reads_both_bounds = False
    requires = {"loss_type": "cispo"}
    bounds = (0.5, 20.0)


def test_a_policy_in_callbacks_sets_the_fields_it_requires_and_the_cap_of_cispo(tmp_path):
    trainer = build_trainer(tmp_path, trainer={"callbacks": [Capped()]}, max_steps=1)
    assert trainer.loss_type == trainer.args.loss_type == "cispo"
    assert trainer.epsilon_high == 20.0  # TRL reads it as the cap itself
    assert trainer.args.epsilon_high == 0.24
    with pytest.raises(ValueError, match="loss_type='grpo' with Capped, which needs loss_type='cispo'"):
        build_trainer(tmp_path, trainer={"callbacks": [Capped()]}, loss_type="grpo")
    late = build_trainer(tmp_path, clip_policy="fixed", steps_per_generation=4, max_steps=1)
    late.add_callback(Capped())
    with pytest.raises(ValueError, match="Capped needs loss_type='cispo', and the run has 'dapo'"):
        late.train()


def test_a_policy_that_reads_both_bounds_meets_the_loss(tmp_path):
    class OnlyBounds(BoundsInForce):
        reads_both_bounds = False

    with pytest.raises(ValueError, match="OnlyBounds moves both clip bounds, but loss_type='cispo'"):
        build_trainer(tmp_path, trainer={"callbacks": [OnlyBounds()]}, loss_type="cispo")


def test_a_policy_without_a_shadow_pass_takes_a_model_with_dropout(tmp_path):
    model = build_model(attention_dropout=0.1)
    trainer = build_trainer(tmp_path, model=model, trainer={"callbacks": [Ones()]}, max_steps=1)
    trainer.train()

    class Late(Ones):
        def on_generation_begin(self, host):
            host.collect_clip_statistics([0.8], [1.2], shadow=True)

    late = build_trainer(tmp_path, model=build_model(attention_dropout=0.1), trainer={"callbacks": [Late()]})
    with pytest.raises(ValueError, match="attention_dropout=0.1"):
        late.train()


def test_settings_without_effect_are_named_once_in_a_run(tmp_path, caplog):
    trainer = build_trainer(tmp_path, trainer={"callbacks": [Ones()]}, clip_lower_init=0.7, max_steps=12)
    trainer.train()
    assert trainer._run.num_completed_generation_batches == 3
    assert caplog.text.count("No effect of clip_lower_init in FP8GRPOConfig") == 1


# -- measuring whatever the policy


def test_measure_only_logs_the_bf16_side_and_moves_nothing(tmp_path):
    trainer = build_trainer(
        tmp_path, clip_policy="fixed", shadow_interval=2, max_steps=16, learning_rate=5e-3, save_strategy="steps",
        save_steps=4,
    )  # fmt: skip
    trainer.train()
    for key in ("clip_share/lower_bf16", "update_ratio/bf16", "overclip/lower", "fp8/prob_nmae"):
        steps = [entry["step"] for entry in trainer.state.log_history if key in entry]
        assert {(step - 1) // 4 for step in steps} <= {1, 3}, key
        assert len(steps) >= 2, key
    assert len(logged(trainer, "fp8/shadow_time")) == 2
    assert trainer.clip_bounds == (0.8, 1.24)
    assert not any("calibration/" in key for entry in trainer.state.log_history for key in entry)

    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["RunRecord"]["attributes"]["num_completed_generation_batches"] == 1
    resumed = build_trainer(tmp_path, clip_policy="fixed", shadow_interval=2, max_steps=8, learning_rate=5e-3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    steps = [entry["step"] for entry in resumed.state.log_history if "fp8/shadow_time" in entry]
    assert steps == [8]


def test_measuring_changes_no_bit_of_a_run(tmp_path):
    stock = run(tmp_path / "stock", **SETTINGS)
    assert same(stock, run(tmp_path / "measured", **{**SETTINGS, "shadow_interval": 1}))


def test_a_run_with_dropout_is_not_measured(tmp_path):
    with pytest.raises(ValueError, match="attention_dropout=0.1"):
        build_trainer(tmp_path, model=build_model(attention_dropout=0.1), clip_policy="fixed", shadow_interval=2)
