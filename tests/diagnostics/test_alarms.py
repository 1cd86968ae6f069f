"""Alarms of the train-rollout mismatch: at the published thresholds, once per run and kind."""

import pytest

from trl_fp8.diagnostics.alarms import mismatch_alarms


FINE = {
    "mismatch/ratio_raw_mean": 1.0,
    "mismatch/ess": 0.9,
    "mismatch/kl": 0.01,
    "mismatch/chi2_token": 0.1,
    "mismatch/frac_truncated": 0.1,
    "mismatch/unscored": 0.0,
}


@pytest.mark.parametrize(
    ("key", "on_the_limit", "beyond"),
    [
        ("mismatch/ratio_raw_mean", 2.0, 2.01),
        ("mismatch/ratio_raw_mean", 0.5, 0.49),
        ("mismatch/ess", 0.3, 0.29),
        ("mismatch/kl", 0.1, 0.11),
        ("mismatch/kl", -0.1, -0.11),
        ("mismatch/chi2_token", 1.0, 1.01),
        ("mismatch/frac_truncated", 0.9, 0.91),
        ("mismatch/unscored", 0.0, 0.001),
    ],
)
def test_an_alarm_is_raised_beyond_its_limit_and_once(key, on_the_limit, beyond):
    raised = set()
    assert mismatch_alarms({**FINE, key: on_the_limit}, raised) == []
    (message,) = mismatch_alarms({**FINE, key: beyond}, raised)
    assert message.startswith(f"{key}={beyond:.4g}")
    assert "weight sync" in message
    assert mismatch_alarms({**FINE, key: beyond}, raised) == []


def test_metrics_that_were_not_logged_raise_nothing():
    assert mismatch_alarms({"reward": 1.0}, set()) == []
