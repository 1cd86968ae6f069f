"""Trackers get every metric under `area/thing` names, which they show in groups, and the table of completions."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from builders import build_trainer


# Warnings of the trackers' own dependencies are not ours to fix
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

RUN = {"calibration_interval": 1, "max_steps": 8, "logging_steps": 4, "log_completions": True, "learning_rate": 5e-3}
# One metric of each group
KEYS = (
    "clip_bounds/lower",
    "clip_share/lower",
    "update_ratio/fp8",
    "overclip/lower",
    "fp8/ratio_nmae",
    "entropy_share/above_1",
    "rewards/digits_reward/mean",
)


def run(tmp_path, tracker):
    trainer = build_trainer(tmp_path / "run", report_to=tracker, run_name="tiny", **RUN)
    trainer.train()
    return trainer


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = run(tmp_path, "tensorboard")
    (file,) = (tmp_path / "run").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {f"train/{key}" for key in KEYS} <= tags
    logged = [entry["clip_bounds/lower"] for entry in trainer.state.log_history if "clip_bounds/lower" in entry]
    assert [event.value for event in events.Scalars("train/clip_bounds/lower")] == pytest.approx(logged)


def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tables = []
    monkeypatch.setattr(wandb, "Table", lambda dataframe: tables.append(dataframe) or len(dataframe))
    try:
        run(tmp_path, "wandb")
        summary = dict(wandb.run.summary)
    finally:
        wandb.finish()
    assert {f"train/{key}" for key in KEYS} <= set(summary)
    assert tables
    assert {"prompt", "completion", "digits_reward", "advantage"} <= set(tables[0].columns)


def test_trackio(tmp_path):
    pytest.importorskip("trackio")
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]; from pathlib import Path; "
        "import test_trackers; test_trackers.run(Path(sys.argv[1]), 'trackio')"
    )
    tests = Path(__file__).parent
    done = subprocess.run(  # a process of its own, because trackio reads where to write when it is imported
        [sys.executable, "-c", script, str(tmp_path), str(tests), str(tests / "helpers")],
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = set()
    for path in (tmp_path / "trackio").rglob("*.db"):
        with sqlite3.connect(path) as database:
            for (metrics,) in database.execute("select metrics from metrics"):
                seen |= set(json.loads(metrics))
    assert {f"train/{key}" for key in KEYS} <= seen
