"""The policy's state survives stops: at a batch boundary, inside a batch, into other settings, with HF's own flag."""

import json

import pytest
import torch
from builders import build_trainer
from transformers import TrainerCallback

from trl_fp8 import CalibratedClippingCallback, ClippingPolicy


# 4 optimizer steps per generation batch, recalibration after batches 2, 4, 6 (steps 8, 16, 24)
SCHEDULE = {"calibration_interval": 2, "max_steps": 24, "save_strategy": "steps", "learning_rate": 5e-3}


class StopAt(TrainerCallback):
    """Ends training after an optimizer step, as a killed job would right after its checkpoint."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True
            control.should_save = True


class Subclass(CalibratedClippingCallback):
    pass


def policy_of(trainer):
    (policy,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, ClippingPolicy))
    return policy


def stop_and_resume(tmp_path, step, resumed=None, policies=(None, None), **settings):
    """A run stopped after `step`, and a new trainer resumed from its checkpoint; returns the latter."""
    settings = {**SCHEDULE, "save_steps": 100, **settings}
    callbacks = [StopAt(step)] + ([policies[0]] if policies[0] else [])
    first = build_trainer(tmp_path / "run", trainer={"callbacks": callbacks}, **settings)
    first.train()
    assert first.state.global_step == step
    callbacks = [policies[1]] if policies[1] else []
    second = build_trainer(tmp_path / "run", trainer={"callbacks": callbacks}, **{**settings, **(resumed or {})})
    second.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    return second


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    trainer = build_trainer(tmp_path_factory.mktemp("whole"), **{**SCHEDULE, "save_steps": 100})
    trainer.train()
    return trainer


def history(trainer, start):
    skipped = ("time", "runtime", "per_second", "num_converted", "train_loss", "total_flos")
    return [
        {key: value for key, value in entry.items() if not any(part in key for part in skipped)}
        for entry in trainer.state.log_history
        if entry["step"] > start and "train_runtime" not in entry
    ]


@pytest.mark.parametrize("step", [4, 8, 12])
def test_stopped_at_a_batch_boundary_everything_is_identical(step, tmp_path, uninterrupted):
    resumed = stop_and_resume(tmp_path, step)
    assert history(resumed, step) == history(uninterrupted, step)
    for name, value in uninterrupted.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    assert policy_of(resumed).state() == policy_of(uninterrupted).state()


@pytest.mark.parametrize("step", [2, 7, 9])  # 7: inside the recalibration batch 2
def test_stopped_inside_a_batch_it_keeps_its_number_and_is_redone(step, tmp_path):
    completed = step // 4
    events = []

    class Spy(CalibratedClippingCallback):
        def on_generation_begin(self, trainer):
            super().on_generation_begin(trainer)
            events.append((self.num_completed_generation_batches + 1, trainer.clip_bounds, trainer.clip_statistics))

    policies = (Spy(calibration_interval=2), Spy(calibration_interval=2))
    first_bounds = {}
    stop_and_resume(tmp_path, step, policies=policies, max_steps=16)
    before, after = events[: completed + 1], events[completed + 1 :]
    for number, bounds, _ in before:
        first_bounds[number] = bounds
    assert [number for number, *_ in before] == list(range(1, completed + 2))
    assert after[0][0] == completed + 1
    assert after[0][1] == first_bounds[completed + 1]
    # a recalibration batch is collected in full, from the start
    for number, _, collected in events:
        assert (collected is not None) == (number % 2 == 0)
    assert [number for number, *_ in after] == list(range(completed + 1, completed + 1 + len(after)))


def test_a_batch_redone_after_a_stop_recalibrates_over_all_its_micro_batches(tmp_path, monkeypatch):
    from trl_fp8.clipping.statistics import ClipStatistics

    updates = []
    update = ClipStatistics.update
    monkeypatch.setattr(ClipStatistics, "update", lambda s, *t: updates.append(id(s)) or update(s, *t))
    resumed = stop_and_resume(tmp_path, 7, max_steps=11)
    # stopped run: 3 of 4 micro-batches of batch 2; resumed run: all 4 of the same batch
    assert len(updates) == 3 + 4
    assert len(set(updates[3:])) == 1
    assert policy_of(resumed).num_completed_generation_batches == 2
    assert policy_of(resumed).clip_lower != 0.6


def test_two_saves_in_one_run_each_hold_the_state_of_their_step(tmp_path):
    trainer = build_trainer(tmp_path, **{**SCHEDULE, "max_steps": 16, "save_steps": 4})
    trainer.train()
    saved = []
    for step in (4, 8, 12, 16):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        saved.append(state["stateful_callbacks"]["CalibratedClippingCallback"]["attributes"])
    assert [s["num_completed_generation_batches"] for s in saved] == [1, 2, 3, 4]
    assert saved[0]["clip_lower"] == 0.6
    assert saved[1]["clip_lower"] == saved[2]["clip_lower"] != 0.6
    assert saved[3]["clip_lower"] == policy_of(trainer).clip_lower


def test_a_checkpoint_without_the_callback_resumes_and_saves_again(tmp_path, caplog, capsys):
    resumed = stop_and_resume(
        tmp_path,
        8,
        resumed={"clip_policy": "calibrated", "save_steps": 12},
        clip_policy="fixed",
        steps_per_generation=4,
    )
    assert "The checkpoint holds no state of CalibratedClippingCallback" in caplog.text
    assert "resumed with clip bounds" not in capsys.readouterr().out
    assert policy_of(resumed).num_completed_generation_batches == 4
    state = json.loads((tmp_path / "run" / "checkpoint-24" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["CalibratedClippingCallback"] == policy_of(resumed).state()


def test_a_checkpoint_with_the_callback_resumes_without_it(tmp_path):
    resumed = stop_and_resume(tmp_path, 8, resumed={"clip_policy": "fixed"}, steps_per_generation=4)
    assert resumed.clip_bounds == (0.8, 1.24)


@pytest.mark.parametrize("flag", [False, True])
def test_new_settings_hold_over_the_checkpoints_and_are_named_once(flag, tmp_path, caplog):
    resumed = stop_and_resume(
        tmp_path,
        8,
        resumed={
            "calibration_interval": 3,
            "clip_lower_min": 0.7,
            "clip_lower_init": 0.75,
            "restore_callback_states_from_checkpoint": flag,
        },
    )
    policy = policy_of(resumed)
    assert policy.calibration_interval == 3
    assert policy.search.clip_lower_min == 0.7
    assert policy.num_completed_generation_batches == 6
    warnings = [record.message for record in caplog.records if "settings differ" in record.message]
    assert len(warnings) == 1
    assert "calibration_interval: 2 -> 3" in warnings[0]
    assert "clip_lower_min: 0.5 -> 0.7" in warnings[0]


def test_a_restored_bound_outside_the_new_range_is_kept_and_pulled_in(tmp_path):
    resumed = stop_and_resume(tmp_path, 4, resumed={"clip_lower_min": 0.8, "clip_lower_init": 0.85})
    lower = [e["clip_bounds/lower"] for e in resumed.state.log_history if "clip_bounds/lower" in e]
    assert lower[4] == 0.6  # restored, below the new minimum
    changes = sorted(set(lower[4:]))
    assert changes[0] == 0.6
    assert changes[1] == pytest.approx(0.65)  # one SmoothUpdate of at most 0.05


@pytest.mark.parametrize("flag", [False, True])
def test_hfs_restore_flag_changes_nothing(flag, tmp_path, uninterrupted):
    resumed = stop_and_resume(tmp_path, 8, restore_callback_states_from_checkpoint=flag)
    assert history(resumed, 8) == history(uninterrupted, 8)


@pytest.mark.parametrize("flag", [False, True])
def test_a_subclass_is_saved_and_restored_under_its_own_name(flag, tmp_path, uninterrupted):
    policies = (Subclass(calibration_interval=2), Subclass(calibration_interval=2))
    resumed = stop_and_resume(tmp_path, 8, policies=policies, restore_callback_states_from_checkpoint=flag)
    assert policy_of(resumed) is policies[1]
    assert history(resumed, 8) == history(uninterrupted, 8)
    state = json.loads((tmp_path / "run" / "checkpoint-24" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["Subclass"] == policies[1].state()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"attributes": {"clip_lower": None}}, "clip_lower=None"),
        ({"attributes": {"clip_upper": "1.8"}}, "clip_upper='1.8'"),
        ({"attributes": {"clip_upper": float("nan")}}, "clip_upper=nan"),
        ({"attributes": {"num_completed_generation_batches": 1.5}}, "num_completed_generation_batches=1.5"),
        ({"attributes": None}, "attributes"),
        ({"args": [1]}, "args"),
        ({"attributes": {"clip_lower": 1.2}}, "clip_lower=1.2"),
        ({"attributes": {"clip_upper": 1.0}}, "clip_upper=1.0"),
    ],
)
def test_a_damaged_state_is_refused_before_a_step(entry, message, tmp_path):
    trainer = build_trainer(tmp_path, **{**SCHEDULE, "max_steps": 4})
    trainer.train()
    path = tmp_path / "checkpoint-4" / "trainer_state.json"
    state = json.loads(path.read_text())
    saved = state["stateful_callbacks"]["CalibratedClippingCallback"]
    for part, value in entry.items():
        saved[part] = {**saved[part], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(state))
    resumed = build_trainer(tmp_path, **{**SCHEDULE, "max_steps": 8})
    with pytest.raises(ValueError, match=f"damaged state of CalibratedClippingCallback.*{message}.*Resume from"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.state.global_step == 4


@pytest.mark.parametrize("flag", [False, True])
def test_resuming_in_another_precision_is_named(flag, tmp_path, caplog):
    changed = {"fp8_recipe": "tensorwise", "clip_policy": "fixed"}
    resumed = stop_and_resume(
        tmp_path, 4, resumed={**changed, "restore_callback_states_from_checkpoint": flag}, steps_per_generation=4
    )
    (warning,) = [r.message for r in caplog.records if "with other settings" in r.message]
    assert "fp8_recipe: 'rowwise' -> 'tensorwise', clip_policy: 'calibrated' -> 'fixed'" in warning
    state = json.loads((tmp_path / "run" / "checkpoint-24" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["RunRecord"]["attributes"]["settings"]["fp8_recipe"] == "tensorwise"
    assert resumed.state.global_step == 24


def test_resuming_with_another_generation_batch_is_named(tmp_path, caplog):
    """As on fewer processes, where each goes on with the batch it had."""
    stop_and_resume(tmp_path, 4, resumed={"per_device_train_batch_size": 4}, steps_per_generation=4)
    (warning,) = [r.message for r in caplog.records if "with other settings" in r.message]
    assert "(generation_batch_size: 32 -> 16)" in warning


def test_bounds_from_before_a_run_without_calibration_are_not_restored(tmp_path, caplog):
    settings = {**SCHEDULE, "steps_per_generation": 4, "save_steps": 4}
    for steps, policy in ((8, "auto"), (12, "fixed"), (16, "auto")):
        trainer = build_trainer(tmp_path, **{**settings, "max_steps": steps, "clip_policy": policy})
        trainer.train(resume_from_checkpoint=steps > 8 or None)
    assert "The checkpoint holds no state of CalibratedClippingCallback" in caplog.text
    assert trainer.clip_bounds == (0.6, 1.8)
    assert policy_of(trainer).num_completed_generation_batches == 1


@pytest.mark.parametrize("entry", [{}, None, [1], {"attributes": {"settings": None}}, {"attributes": {}}])
def test_a_damaged_record_of_settings_does_not_stop_a_resume(entry, tmp_path):
    trainer = build_trainer(tmp_path, **{**SCHEDULE, "max_steps": 4})
    trainer.train()
    path = tmp_path / "checkpoint-4" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["stateful_callbacks"]["RunRecord"] = entry
    path.write_text(json.dumps(state))
    resumed = build_trainer(tmp_path, **{**SCHEDULE, "max_steps": 5, "save_steps": 5})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    state = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["RunRecord"]["attributes"]["settings"]["fp8_recipe"] == "rowwise"


def test_a_subclass_may_save_what_it_likes(tmp_path):
    class Momentum(CalibratedClippingCallback):
        momentum = -0.1

        def state(self):
            state = super().state()
            state["attributes"]["momentum"] = self.momentum
            return state

    policies = (Momentum(calibration_interval=2), Momentum(calibration_interval=2))
    policies[0].momentum = -0.2
    stop_and_resume(tmp_path, 8, policies=policies, max_steps=12)
    assert policies[1].momentum == -0.2


def test_the_state_is_plain_numbers():
    state = CalibratedClippingCallback().state()
    assert json.loads(json.dumps(state)) == state
    words = {key for part in state.values() for key, value in part.items() if type(value) not in (int, float)}
    assert words == {"rebalance_with"}


def test_training_twice_continues_the_count(tmp_path):
    trainer = build_trainer(tmp_path, **{**SCHEDULE, "max_steps": 8})
    trainer.train()
    bounds = trainer.clip_bounds
    trainer.train()
    assert policy_of(trainer).num_completed_generation_batches == 4
    assert trainer.clip_bounds != bounds


def test_callback_arguments_are_checked():
    with pytest.raises(ValueError, match="calibration_interval=0"):
        CalibratedClippingCallback(calibration_interval=0)
    with pytest.raises(ValueError, match="clip_lower_min=0.9 and clip_lower_max=0.5"):
        CalibratedClippingCallback(clip_lower_min=0.9, clip_lower_max=0.5)
    with pytest.raises(ValueError, match="clip_upper_init=nan lies outside"):
        CalibratedClippingCallback(clip_upper_init=float("nan"))
