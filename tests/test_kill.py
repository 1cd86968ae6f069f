"""kill -9 anywhere, resume, and the run ends as if nothing had happened: every checkpoint lies on a batch boundary."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import build_trainer

from trl_fp8.checkpoints import MARKER, last_whole_checkpoint


SCRIPT = Path(__file__).with_name("kill_run.py")


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
