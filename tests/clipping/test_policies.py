"""The policies of `docs/policies.md` are run as they stand there."""

import json
import re
from pathlib import Path

import pytest
from builders import build_trainer


BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "policies.md").read_text(), re.S)


@pytest.fixture(scope="module")
def policies():
    names = {}
    for block in BLOCKS:
        exec(block, names)
    return names


def bounds(trainer, side):
    return [e[f"clip_bounds/{side}"] for e in trainer.state.log_history if f"clip_bounds/{side}" in e]


def test_a_relaxed_bound_holds_throughout(policies, tmp_path):
    trainer = build_trainer(tmp_path, trainer={"callbacks": [policies["RelaxedLowerBound"]()]}, max_steps=8)
    trainer.train()
    assert set(bounds(trainer, "lower")) == {0.6}
    assert set(bounds(trainer, "upper")) == {1.24}


def test_a_fixed_clip_share_moves_the_bound_and_survives_a_stop(policies, tmp_path):
    settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4, "learning_rate": 5e-3}
    policy = policies["FixedClipShare"](share=0.05)
    trainer = build_trainer(tmp_path, trainer={"callbacks": [policy]}, **settings)
    trainer.train()
    lower = bounds(trainer, "lower")
    assert lower[0] == 0.7
    assert [len(set(lower[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]  # one decision per generation batch
    assert lower[0] != lower[4] != lower[8]
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["FixedClipShare"]["attributes"]["lower"] == lower[8]

    resumed = build_trainer(tmp_path, trainer={"callbacks": [policies["FixedClipShare"](share=0.05)]}, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert bounds(resumed, "lower") == lower
