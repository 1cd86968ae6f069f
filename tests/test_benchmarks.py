"""What the benchmarks hook into the trainer still fits it; their numbers are for `docs/log.md`, not for tests."""

import sys
from pathlib import Path

import pytest
from builders import build_trainer


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))


def test_the_overhead_benchmark_times_every_part(tmp_path):
    from overhead import TimedTrainer

    trainer = build_trainer(tmp_path, cls=TimedTrainer, max_steps=8, calibration_interval=2)
    trainer.train()
    assert [batch["shadow"] for batch in trainer.batches] == [False, True]
    assert all(batch["seconds"] > batch["measuring"] > 0 for batch in trainer.batches)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_overclipping_benchmark_records_each_recalibration(frozen, tmp_path):
    from overclipping import Recorder

    policy = Recorder(calibration_interval=1, frozen=frozen)
    trainer = build_trainer(tmp_path, trainer={"callbacks": [policy]}, max_steps=8)
    trainer.train()
    assert [(row.lower, row.upper) == (0.8, 1.24) for row in policy.rows] == [frozen, frozen]
    assert all(row.negative > 0 and row.positive > 0 for row in policy.rows)
    assert (trainer.clip_bounds == (0.8, 1.24)) is frozen


def test_the_ratio_noise_benchmark_keeps_what_the_statistics_get(tmp_path):
    from ratio_noise import Recorder

    with Recorder() as recorder:
        build_trainer(tmp_path, max_steps=4, calibration_interval=1).train()
    assert len(recorder.batches) == 4
    ratio, ref_ratio, _, mask, *_ = recorder.batches[1]
    assert ratio.shape == ref_ratio.shape == mask.shape
