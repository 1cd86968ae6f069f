"""kill -9 anywhere, resume, and the run ends as if nothing had happened: every checkpoint lies on a batch boundary."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import build_trainer

from trl_fp8.checkpoints import MARKER, check_optimizer, last_whole_checkpoint
from trl_fp8.distributed import World


SCRIPT = Path(__file__).parent / "helpers" / "kill_run.py"


def launch(folder, point):
    result = folder / "result.pt"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "run"), point, str(result)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if point != "none":
        assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
        assert not result.exists()
        return None
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(result, weights_only=False)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("whole"), "none")


def history(result, start):
    skipped = ("time", "runtime", "per_second", "num_converted", "train_loss", "total_flos")
    return [
        {key: value for key, value in entry.items() if not any(part in key for part in skipped)}
        for entry in result["log"]
        if entry["step"] > start and "train_runtime" not in entry
    ]


@pytest.mark.parametrize(
    ("points", "resumed_from"),
    [
        (["generation:3"], 8),
        (["saving:6"], 4),  # optimizer.pt of the second checkpoint is there, its RNG and trainer state are not
        # the recalibration batch is trained on, the decision is not taken or not saved
        pytest.param(["recalibration:1"], 4, marks=pytest.mark.slow),
        pytest.param(["step:6"], 4, marks=pytest.mark.slow),  # between two mini-batches
        pytest.param(["step:8"], 4, marks=pytest.mark.slow),
        pytest.param(["saving:1"], None, marks=pytest.mark.slow),  # the first checkpoint: nothing to resume from
        pytest.param(["saving:12"], 8, marks=pytest.mark.slow),
        # killed again and again, at the same place too
        pytest.param(["generation:2", "saving:2", "saving:1", "recalibration:1", "step:5"], 8, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_it_ends_where_the_uninterrupted_run_ends(points, resumed_from, tmp_path, uninterrupted):
    for point in points:
        launch(tmp_path, point)
    if resumed_from is None:
        with pytest.raises(ValueError, match="Start without resume_from_checkpoint"):
            last_whole_checkpoint(tmp_path / "run")
        for marker in (tmp_path / "run").glob(f"checkpoint-*/{MARKER}"):
            for file in marker.parent.iterdir():
                file.unlink()
            marker.parent.rmdir()
    result = launch(tmp_path, "none")
    start = resumed_from or 0
    assert result["resumed_from"].endswith(f"checkpoint-{resumed_from}" if resumed_from else "")
    assert history(result, start) == history(uninterrupted, start)
    assert result["bounds"] == uninterrupted["bounds"] != (0.6, 1.8)
    for name, weight in uninterrupted["weights"].items():
        assert torch.equal(result["weights"][name], weight), name
    # of all the checkpoints one is left, and it is whole
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-16"]
    assert not (tmp_path / "run" / "checkpoint-16" / MARKER).exists()


def test_a_half_written_checkpoint_is_skipped_and_refused_by_name(tmp_path):
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "calibration_interval": 1}
    build_trainer(tmp_path, **settings).train()
    (tmp_path / "checkpoint-8" / MARKER).touch()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    trainer = build_trainer(tmp_path, **settings)
    with pytest.raises(ValueError, match="only half written"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8
    assert not (tmp_path / "checkpoint-8" / MARKER).exists()


def test_what_is_left_of_a_checkpoint_half_deleted_is_never_resumed_from(tmp_path, monkeypatch):
    """A stop while old checkpoints go: some have a higher step, since another run left them."""
    settings = {"save_strategy": "steps", "save_steps": 4, "calibration_interval": 1}
    build_trainer(tmp_path, max_steps=8, **settings).train()

    def stops(path, **kwargs):
        (Path(path) / "optimizer.pt").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", stops)
    for checkpoint in tmp_path.glob("checkpoint-*"):  # older than what comes
        os.utime(checkpoint, (0, 0))
    with pytest.raises(KeyboardInterrupt):
        build_trainer(tmp_path, max_steps=8, **settings, save_total_limit=1).train()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_the_checkpoint_just_saved_stays_where_another_run_left_a_higher_step(tmp_path):
    """transformers deletes by age, which a marker must not change."""
    (tmp_path / "checkpoint-100").mkdir()
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text('{"global_step": 100}')
    os.utime(tmp_path / "checkpoint-100", (0, 0))
    settings = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    build_trainer(tmp_path, max_steps=8, **settings).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-8"]


@pytest.mark.parametrize("name", ["nowhere", "checkpoint-4/model.safetensors", "."])
def test_what_is_no_checkpoint_is_refused_with_those_there_are(tmp_path, name):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    build_trainer(tmp_path, **settings).train()
    with pytest.raises(ValueError, match="is not a checkpoint, .* checkpoint-4. Name one"):
        build_trainer(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / name))


def test_a_finished_run_is_not_gone_on_with(tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    build_trainer(tmp_path, **settings).train(resume_from_checkpoint="false")  # what a command line makes of False
    with pytest.raises(ValueError, match="is of step 4 and max_steps=4: nothing is left"):
        build_trainer(tmp_path, **settings).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("content", [None, "", '{"epoch": 1', "[]", "3"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog, content):
    for step, state in ((4, '{"global_step": 4}'), (8, content)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    assert "checkpoint-8 is not whole and is passed over: the run resumes from checkpoint-4" in caplog.text


@pytest.mark.parametrize(
    ("files", "world", "message"),
    [
        (["global_step4/x"], World(), "saved under DeepSpeed ZeRO, and this run is under one process or DDP"),
        (["optimizer_0/x"], World(), "saved under FSDP, and this run is under one process or DDP"),
        (["optimizer.bin"], World(zero_stage=2), "saved under FSDP, and this run is under DeepSpeed ZeRO"),
        (["optimizer.pt"], World(fsdp_version=2), "saved under one process or DDP, and this run is under FSDP"),
        ([], World(fsdp_version=2), "holds no optimizer state .* without which FSDP loads nothing"),
    ],
)
def test_an_optimizer_saved_by_another_way_of_sharding_is_refused(tmp_path, files, world, message):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(ValueError, match=f"{message}.*from its weights"):
        check_optimizer(tmp_path, world)


def test_a_checkpoint_without_an_optimizer_is_told(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 4, "calibration_interval": 1, "save_only_model": True}
    build_trainer(tmp_path, max_steps=4, **settings).train()
    assert "holds no optimizer state" not in caplog.text
    build_trainer(tmp_path, max_steps=8, **settings).train(resume_from_checkpoint=True)
    assert "checkpoint-4 holds no optimizer state (save_only_model?)" in caplog.text


def test_a_run_that_starts_beside_the_checkpoints_of_another_is_told(tmp_path, caplog):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    build_trainer(tmp_path, **settings).train()
    assert "of another run" not in caplog.text
    build_trainer(tmp_path, **settings).train()
    assert "holds checkpoints of another run (up to checkpoint-4)" in caplog.text


def test_without_any_checkpoint_transformers_says_so(tmp_path):
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        build_trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=True)


def test_the_limit_holds_and_the_older_ones_go(tmp_path):
    trainer = build_trainer(
        tmp_path, max_steps=12, save_strategy="steps", save_steps=4, save_total_limit=2, calibration_interval=1
    )
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-8"]
    assert trainer.args.save_total_limit == 2
