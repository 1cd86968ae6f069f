"""The metric window by hand, and `docs/metrics.md` against the keys the code produces."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from trl_fp8 import diagnostics
from trl_fp8.clipping import ClipSearch, decide
from trl_fp8.clipping.calibrated import calibration_metrics
from trl_fp8.clipping.statistics import ClipStatistics
from trl_fp8.diagnostics import Last, Max, Mean, Sum
from trl_fp8.diagnostics.window import MetricWindow


ROOT = Path(__file__).parents[2]


def one_rank(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def two_equal_ranks(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


# -- the window ----------------------------------------------------------------------------------------------------


def test_a_pair_logs_the_ratio_of_sums_not_the_mean_of_ratios():
    window = MetricWindow()
    window.record({"overclip/lower": Mean(1, 2)})
    window.record({"overclip/lower": Mean(1, 98)})
    window.reduce(one_rank)
    window.record({"overclip/lower": Mean(3, 100)})  # another optimizer step
    window.reduce(one_rank)
    assert window.flush() == {"overclip/lower": 0.025}  # 5 / 200; the mean of ratios is 0.18


def test_tensors_and_numbers_mix_in_a_pair_and_sum_in_float64():
    window = MetricWindow()
    window.record({"fp8/noise_floor": Mean(torch.tensor(2.0**24), torch.tensor(1.0, dtype=torch.float64))})
    window.record({"fp8/noise_floor": Mean(torch.tensor(1.0), 1)})  # float32 loses it
    window.reduce(one_rank)
    assert window.flush() == {"fp8/noise_floor": (2**24 + 1) / 2}


def test_an_empty_denominator_logs_nothing_and_spoils_nothing():
    window = MetricWindow()
    window.record({"overclip/lower": Mean(0, 0), "overclip/upper": Mean(0, 0)})
    window.record({"overclip/upper": Mean(1, 4)})
    window.reduce(one_rank)
    assert window.flush() == {"overclip/upper": 0.25}


def test_plain_numbers_log_the_last_and_flags_the_largest():
    window = MetricWindow()
    for lower, saturated, degenerate, largest in (
        (0.6, 0.0, 0.0, -3.0),
        (0.65, 1.0, 0.0, -1.0),
        (0.62, 0.0, 0.0, -2.0),
    ):
        window.record({"clip_bounds/lower": lower, "calibration/saturated": Max(saturated)})
        window.record({"calibration/degenerate": Max(degenerate), "mismatch/ratio_raw_max": Max(largest)})
    assert window.flush() == {
        "clip_bounds/lower": 0.62,
        "calibration/saturated": 1.0,
        "calibration/degenerate": 0.0,
        "mismatch/ratio_raw_max": -1.0,
    }


@pytest.mark.parametrize(
    "value", ["0.5", None, (1.0, 2.0), Mean(1.0, "2"), Last([1.0]), Sum(None), torch.ones(3), Mean(torch.ones(3), 1.0)]
)
def test_what_is_no_number_is_refused_by_its_name(value):
    with pytest.raises(TypeError, match="Metric 'a/b' has the value .* Record a number, or"):
        MetricWindow().record({"a/b": value})


def test_numbers_of_every_kind_become_plain_floats():
    window = MetricWindow()
    one = torch.tensor(1.0, requires_grad=True)
    window.record(
        {
            "a/b": one,
            "a/n": np.int64(3),
            "a/x": Max(torch.tensor(2.0)),
            "a/pair": Mean(one, np.float32(2)),
            "a/sum": Sum(one),
        }
    )
    window.reduce(one_rank)
    logs = window.flush()
    assert logs == {"a/b": 1.0, "a/n": 3.0, "a/x": 2.0, "a/pair": 0.5, "a/sum": 1.0}
    assert {type(value) for value in logs.values()} == {float}


def test_a_sum_adds_up_micro_batches_and_ranks_and_logs_a_zero():
    window = MetricWindow()
    window.record({"clip_count/lower": Sum(2), "clip_count/negative": Sum(torch.tensor(0))})
    window.record({"clip_count/lower": Sum(3)})
    window.reduce(two_equal_ranks)
    assert window.flush() == {"clip_count/lower": 10.0, "clip_count/negative": 0.0}


def test_a_flush_starts_a_new_window():
    window = MetricWindow()
    window.record({"calibration/saturated": Max(1.0), "overclip/lower": Mean(1, 2)})
    window.reduce(one_rank)
    assert window.flush() == {"calibration/saturated": 1.0, "overclip/lower": 0.5}
    assert window.flush() == {}
    window.record({"calibration/saturated": Max(0.0), "overclip/lower": Mean(1, 4)})
    window.reduce(one_rank)
    assert window.flush() == {"calibration/saturated": 0.0, "overclip/lower": 0.25}


def test_what_is_not_reduced_yet_stays_for_the_next_window():
    window = MetricWindow()
    window.record({"overclip/lower": Mean(1, 2)})
    window.reduce(one_rank)
    window.record({"overclip/lower": Mean(3, 4)})  # an accumulation window that is still open
    assert window.flush() == {"overclip/lower": 0.5}
    assert window.flush() == {}
    window.record({"overclip/lower": Mean(0, 4)})
    window.reduce(one_rank)
    assert window.flush() == {"overclip/lower": 0.375}


def test_reduce_makes_one_collective_of_all_pairs_and_none_of_nothing():
    calls = []

    def other_rank_has_more(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor.clone())
        return tensor + torch.tensor([[1.0, 2.0], [0.0, 6.0]])

    window = MetricWindow()
    window.record({"clip_bounds/lower": 0.6})
    window.reduce(other_rank_has_more)
    assert calls == []
    window.record({"overclip/upper": Mean(1, 2), "overclip/lower": Mean(3, 4)})
    window.reduce(other_rank_has_more)
    window.reduce(other_rank_has_more)  # nothing is pending any more
    # sorted by key, so that ranks agree on the rows whatever the order of recording
    assert [call.tolist() for call in calls] == [[[3, 4], [1, 2]]]
    assert window.flush() == {"clip_bounds/lower": 0.6, "overclip/lower": 4 / 6, "overclip/upper": 1 / 8}


def test_equal_ranks_leave_pairs_and_plain_numbers_as_they_are():
    window = MetricWindow()
    window.record({"fp8/shadow_time": Mean(3.0, 1.0), "clip_bounds/lower": 0.6, "calibration/saturated": Max(1.0)})
    window.reduce(two_equal_ranks)
    window.record({"fp8/shadow_time": Mean(1.0, 1.0)})
    window.reduce(two_equal_ranks)
    assert window.flush() == {"fp8/shadow_time": 2.0, "clip_bounds/lower": 0.6, "calibration/saturated": 1.0}


@pytest.mark.parametrize(
    ("prob", "ratio", "expected"),
    [
        ((1, 4), (1, 2), 2.0),
        ((0, 4), (1, 2), None),  # FP8 made no error: no amplification
        ((0, 0), (1, 2), None),
        ((1, 4), (0, 0), None),
        ((1, 4), (0, 2), 0.0),
    ],
)
def test_amplification_is_the_quotient_of_the_logged_errors(prob, ratio, expected):
    window = MetricWindow()
    window.record({"fp8/prob_nmae": Mean(*prob), "fp8/ratio_nmae": Mean(*ratio)})
    window.reduce(two_equal_ranks)
    assert window.flush().get("fp8/nmae_amplification") == expected


def test_the_effective_sample_size_comes_from_the_logged_moments():
    window = MetricWindow()
    # w = 1, 3 and 0.5, 0.5 in two batches: mean 1.25, mean square 2.625
    window.record({"mismatch/ratio_raw_mean": Mean(4.0, 2), "mismatch/chi2_token": Mean(8.0, 2)})
    window.record({"mismatch/ratio_raw_mean": Mean(1.0, 2), "mismatch/chi2_token": Mean(-1.5, 2)})
    window.reduce(two_equal_ranks)
    assert window.flush()["mismatch/ess"] == 1.25**2 / 2.625


# -- a recalibration -----------------------------------------------------------------------------------------------


def recalibrate(advantages: tuple[float, float]) -> dict:
    """FP8's ratios are 0.5, 1 and 1, 2 of two sequences, BF16's 0.75, 1 and 1, 1.125; the bounds are at the start."""
    search, bounds, ref_bounds = ClipSearch(), (0.6, 1.8), (0.8, 1.24)
    statistics = ClipStatistics(search.lower_points(0.6, 0.8), search.upper_points(1.8, 1.24))
    ratio, ref_ratio = torch.tensor([[0.5, 1.0], [1.0, 2.0]]), torch.tensor([[0.75, 1.0], [1.0, 1.125]])
    statistics.update(ratio, ref_ratio, torch.tensor(advantages), torch.ones(2, 2))
    numbers = statistics.numbers()
    return calibration_metrics(numbers, decide(numbers, search, bounds, ref_bounds))


def test_a_recalibration_records_what_it_saw_and_decided():
    # FP8 clips one of two negative tokens at every lower bound, as BF16 does: L* is the reference. P_ref = 4.25,
    # N_ref = 1; P is 2 for every h up to 2, all equally far: H* is the reference
    assert recalibrate((-1.0, 2.0)) == {
        "update_ratio/after": Mean(2.0, 1.0),
        "calibration/saturated": Max(0.0),
        "calibration/degenerate": Max(0.0),
        "clip_bounds/lower_target": Last(0.8),
        "clip_bounds/upper_target": Last(1.24),
    }


def test_a_degenerate_recalibration_records_no_target():
    assert recalibrate((1.0, 2.0)) == {"calibration/saturated": Max(0.0), "calibration/degenerate": Max(1.0)}


# -- the page ------------------------------------------------------------------------------------------------------


def keys_of_the_functions() -> set[str]:
    """Keys of every diagnostic function on a small batch, of a recalibration that decides and of one that does not."""
    ratio, mask = torch.tensor([[0.5, 1.0], [1.0, 2.0]]), torch.ones(2, 2)
    advantages, entropy = torch.tensor([-1.0, 1.0]), torch.ones(2)
    negative, positive = diagnostics.signs(advantages, mask)
    return {
        *diagnostics.clip_shares(ratio, negative, positive, (0.6, 1.8), (0.8, 1.24)),
        *diagnostics.bf16_clip_shares(ratio, negative, positive, (0.8, 1.24)),
        *diagnostics.over_clipping(ratio, ratio, negative, positive, (0.8, 1.24), entropy),
        *diagnostics.quantization_error(ratio, ratio, ratio, ratio, mask),
        *diagnostics.noise_floor(ratio, mask),
        *diagnostics.entropy_shares(entropy, advantages),
        *diagnostics.mismatch(ratio, ratio, mask, mask.bool()),
        *diagnostics.upper_tail(ratio),
        *recalibrate((-1.0, 2.0)),
        *recalibrate((1.0, 2.0)),
    }


def keys_written_in_the_source() -> set[str]:
    """Every string constant of the form `area/thing` in the package: the fixed keys, wherever they are recorded."""
    nodes = (node for path in (ROOT / "src/trl_fp8").rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    strings = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {string for string in strings if re.fullmatch(r"[a-z0-9_]+/[a-z0-9_.]+", string)}


FIXED_KEYS = {
    "clip_bounds/lower",
    "clip_bounds/upper",
    "fp8/nmae_amplification",
    "fp8/num_converted_modules",
    "fp8/shadow_time",
    "mismatch/ess",
    "rollout/sync_bytes",
    "rollout/sync_logp_diff",
    "rollout/sync_logp_diff_first",
    "rollout/sync_time",
    "update_ratio/bf16",
    "update_ratio/fp8",
}


def test_the_fixed_keys_are_the_ones_no_function_returns():
    assert keys_written_in_the_source() - keys_of_the_functions() == FIXED_KEYS


def test_the_page_has_one_complete_row_per_key():
    rows = [line for line in (ROOT / "docs/metrics.md").read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    keys = [row[0].strip("`") for row in cells]
    assert len(keys) == len(set(keys))
    assert set(keys) == keys_of_the_functions() | FIXED_KEYS
    for row in cells:
        assert len(row) == 6, row
        assert all(row), row
