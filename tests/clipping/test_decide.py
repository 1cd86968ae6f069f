"""The mathematics of clip bounds: hand-worked numbers, and a brute-force oracle written from the method's text.

Hand-worked ratios are halves, quarters and eighths, exact in binary, where a ratio stands on a point.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trl_fp8.clipping import Calibration, ClipSearch, calibrate_bounds, decide, importance_weight, smooth_update
from trl_fp8.clipping.statistics import ClipStatistics


LOWER_GRID = [0.5, 0.52, 0.54, 0.56, 0.58, 0.6, 0.62, 0.64, 0.66, 0.68]
LOWER_GRID += [0.7, 0.72, 0.74, 0.76, 0.78, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9]
UPPER_GRID = [1.2, 1.22, 1.24, 1.26, 1.28, 1.3, 1.32, 1.34, 1.36, 1.38, 1.4, 1.42, 1.44, 1.46, 1.48, 1.5, 1.52, 1.54]
UPPER_GRID += [1.56, 1.58, 1.6, 1.62, 1.64, 1.66, 1.68, 1.7, 1.72, 1.74, 1.76, 1.78, 1.8, 1.82, 1.84, 1.86, 1.88, 1.9]
UPPER_GRID += [1.92, 1.94, 1.96, 1.98, 2.0]
SUM_TOLERANCE = 1e-12  # relative, of sums taken in another order

SUMS = ("alpha_low", "clip_share_before", "rho_ref", "rho_before", "rho_after")
DECISION = ("lower", "upper", "lower_target", "upper_target", "saturated", "degenerate")


def row(*values: float) -> Tensor:
    """One sequence, `(1, T)`, in float64."""
    return torch.tensor([values], dtype=torch.float64)


# -- smooth_update -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "target", "max_change", "expected"),
    [
        (0.6, 0.6, 0.05, 0.6),  # at the target
        (0.5, 0.75, 0.25, 0.625),  # half-way
        (0.75, 0.5, 0.25, 0.625),
        (0.5, 0.75, 0.125, 0.625),  # half-way is the limit
        (0.5, 0.875, 0.125, 0.625),  # clipped upwards
        (0.875, 0.5, 0.125, 0.75),  # clipped downwards
        (1.8, 1.24, 0.1, 1.7),
    ],
)
def test_smooth_update_moves_half_way_and_by_the_limit_at_most(bound, target, max_change, expected):
    assert smooth_update(bound, target, max_change) == pytest.approx(expected, rel=1e-15)


def test_smooth_update_at_the_target_keeps_every_bit():
    assert smooth_update(0.1 + 0.2, 0.1 + 0.2, 0.05) == 0.1 + 0.2


# -- ClipSearch ----------------------------------------------------------------------------------------------------


def test_default_grids_are_the_papers_and_exactly_the_decimal_numbers():
    search = ClipSearch()
    assert search.lower_grid == LOWER_GRID == [round(0.5 + k * 0.02, 10) for k in range(21)]
    assert search.upper_grid == UPPER_GRID == [round(1.2 + k * 0.02, 10) for k in range(41)]


@pytest.mark.parametrize(
    ("step", "lower", "upper"),
    [
        (0.15, [0.5, 0.65, 0.8], [1.2, 1.35, 1.5, 1.65, 1.8, 1.95]),  # divides neither
        (0.1, [0.5, 0.6, 0.7, 0.8, 0.9], [1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0]),
        (0.4, [0.5, 0.9], [1.2, 1.6, 2.0]),
    ],
)
def test_a_grid_begins_at_the_minimum_and_never_passes_the_maximum(step, lower, upper):
    search = ClipSearch(clip_grid_step=step)
    assert (search.lower_grid, search.upper_grid) == (lower, upper)


def test_a_grid_reaches_a_maximum_that_float_division_puts_just_below_a_step():
    assert (1.9 - 1.2) / 0.1 < 7
    assert ClipSearch(clip_upper_max=1.9, clip_grid_step=0.1).upper_grid == [1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_lower_min": math.nan}, r"clip_lower_min=nan .* Set a number > 0"),
        ({"clip_lower_min": 0.0}, r"clip_lower_min=0.0 .* Set a number > 0"),
        ({"clip_lower_max": -0.9}, r"clip_lower_max=-0.9 .* Set a number > 0"),
        ({"clip_upper_min": math.nan}, r"clip_upper_min=nan .* Set a number > 0"),
        ({"clip_upper_max": math.inf}, r"clip_upper_max=inf .* Set a number > 0"),
        ({"clip_grid_step": 0.0}, r"clip_grid_step=0.0 .* Set a finite number > 0"),
        ({"clip_grid_step": math.nan}, r"clip_grid_step=nan .* Set a finite number > 0"),
        ({"clip_lower_max_change": -0.05}, r"clip_lower_max_change=-0.05 .* Set a finite number > 0"),
        ({"clip_upper_max_change": math.inf}, r"clip_upper_max_change=inf .* Set a finite number > 0"),
        ({"clip_lower_min": 0.9}, r"Set clip_lower_min < clip_lower_max"),  # empty
        ({"clip_upper_min": 1.9, "clip_upper_max": 1.3}, r"Set clip_upper_min < clip_upper_max"),  # inverted
        ({"clip_lower_max": 1.0}, r"Set clip_lower_max < 1 < clip_upper_min"),
        ({"clip_upper_min": 1.0}, r"Set clip_lower_max < 1 < clip_upper_min"),
        ({"rebalance_with": "raw"}, r"rebalance_with='raw' .* Use 'smoothed' or 'target'"),
    ],
)
def test_a_search_that_cannot_work_says_what_to_set(settings, message):
    with pytest.raises(ValueError, match=message):
        ClipSearch(**settings)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ((0.49, 1.8), r"clip_lower_init=0.49 .* \[0.5, 0.9\].* widen it with clip_lower_min"),
        ((0.91, 1.8), r"clip_lower_init=0.91 .* \[0.5, 0.9\].* widen it with clip_lower_min"),
        ((math.nan, 1.8), r"clip_lower_init=nan"),
        ((0.6, 1.19), r"clip_upper_init=1.19 .* \[1.2, 2.0\].* widen it with clip_upper_min"),
        ((0.6, 2.01), r"clip_upper_init=2.01 .* \[1.2, 2.0\].* widen it with clip_upper_min"),
    ],
)
def test_a_start_outside_its_interval_is_refused(start, message):
    with pytest.raises(ValueError, match=message):
        ClipSearch().check_start(*start)
    for inside in ((0.5, 2.0), (0.9, 1.2), (0.8, 1.2)):  # the ends belong to the interval
        ClipSearch().check_start(*inside)


def test_points_hold_grid_candidates_bound_and_reference_in_order():
    search = ClipSearch(0.5, 0.875, 1.25, 2.0, 0.125, clip_lower_max_change=0.0625, clip_upper_max_change=0.125)
    # from 0.625: half-way to 0.5 is 0.5625, to 0.75 is 0.6875, and 0.875 is past the limit
    assert search.lower_points(0.625, 0.8125) == [0.5, 0.5625, 0.625, 0.6875, 0.75, 0.8125, 0.875]
    # from 1.5: half-way to 1.25, 1.375, 1.625, 1.75, past the limit from there on
    expected = [1.1875, 1.25, 1.375, 1.4375, 1.5, 1.5625, 1.625, 1.75, 1.875, 2.0]
    assert search.upper_points(1.5, 1.1875) == expected


# -- ClipStatistics: hand-worked -----------------------------------------------------------------------------------


def side(statistics: ClipStatistics, name: str = "fp8") -> tuple:
    """Everything one side holds, as plain data."""
    numbers = getattr(statistics.numbers(), name)
    return (
        numbers.num_negative,
        numbers.num_positive,
        numbers.lower_clipped,
        numbers.negative_sum,
        numbers.upper_clipped,
        numbers.positive_sum,
    )


def test_a_hand_worked_batch_is_counted_and_summed_at_every_point():
    ratio = row(0.5, 0.625, 0.75, 1.0, 1.25, 1.0, 1.5, 1.75)
    advantages = row(-1, -2, -1, -4, 2, 1, 4, 8)
    weight = row(1, 2, 0.5, 0.25, 1, 2, 0.5, 0.25)
    statistics = ClipStatistics([0.5, 0.75], [1.25, 1.5])
    statistics.update(ratio, None, advantages, torch.ones(1, 8), weight)
    # w r |A|: 0.5, 2.5, 0.375, 1.0 and 2.5, 2.0, 3.0, 3.5
    assert side(statistics) == (
        4,
        4,
        {0.5: 1, 0.75: 3},  # r <= c: 0.5 is clipped at 0.5, 0.75 at 0.75
        {0.5: 3.875, 0.75: 1.0},  # r > c
        {1.25: 3, 1.5: 2},  # r >= h: 1.25 is clipped at 1.25, 1.5 at 1.5
        {1.25: 2.0, 1.5: 4.5},  # r < h
    )
    assert side(statistics, "bf16") == (
        0,
        0,
        {0.5: 0, 0.75: 0},
        {0.5: 0.0, 0.75: 0.0},
        {1.25: 0, 1.5: 0},
        {1.25: 0.0, 1.5: 0.0},
    )


def test_the_reference_side_has_its_own_ratios_and_weights():
    statistics = ClipStatistics([0.75], [1.25])
    statistics.update(
        row(0.5, 1.5), row(1.0, 1.125), row(-1, 2), torch.ones(1, 2), row(1.0, 1.0), bf16_is_weight=row(0.5, 2.0)
    )
    assert side(statistics) == (1, 1, {0.75: 1}, {0.75: 0.0}, {1.25: 1}, {1.25: 0.0})
    assert side(statistics, "bf16") == (1, 1, {0.75: 0}, {0.75: 0.5}, {1.25: 0}, {1.25: 4.5})


def test_a_float32_ratio_is_compared_in_float64():
    # float32(0.8) = 0.80000001 and float32(0.7) = 0.69999999, each off its point. In float32 both would be on it
    ratio = torch.tensor([[0.8, 0.7]], dtype=torch.float32)
    statistics = ClipStatistics([0.7, 0.8], [1.2])
    statistics.update(ratio, None, row(-1, -1), torch.ones(1, 2))
    assert statistics.numbers().fp8.lower_clipped == {0.7: 1, 0.8: 1}


def test_delta_takes_a_negative_token_out_of_the_sum_but_not_of_the_count():
    statistics = ClipStatistics([0.75], [1.25], delta=4.0)
    statistics.update(row(0.5, 1.0, 4.0, 4.5, 4.5), None, row(-1, -1, -1, -1, 1), torch.ones(1, 5))
    # A < 0: 1.0 and 4.0 (r <= delta) are unclipped. A > 0 knows no delta, its 4.5 is clipped by the upper bound
    assert side(statistics) == (4, 1, {0.75: 1}, {0.75: 5.0}, {1.25: 1}, {1.25: 0.0})


def test_delta_holds_for_the_reference_too():
    statistics = ClipStatistics([0.75], [1.25], delta=4.0)
    statistics.update(row(1.0, 1.0), row(1.0, 4.5), row(-1, -1), torch.ones(1, 2))
    assert statistics.numbers().fp8.negative_sum == {0.75: 2.0}
    assert statistics.numbers().bf16.negative_sum == {0.75: 1.0}


def test_tokens_without_weight_or_advantage_count_nowhere():
    ratio, advantages = row(0.5, 0.5, 1.0, 1.0, 2.0), row(-1, -1, 0, 1, 1)
    weight = row(1, 0, 1, 1, 0)
    statistics = ClipStatistics([0.75], [1.25])
    statistics.update(ratio, ratio, advantages, torch.ones(1, 5), weight, bf16_is_weight=torch.ones(1, 5))
    for name in ("fp8", "bf16"):
        assert side(statistics, name) == (1, 1, {0.75: 1}, {0.75: 0.0}, {1.25: 0}, {1.25: 1.0})


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e4])
def test_rubbish_in_masked_tokens_changes_nothing(rubbish):
    mask = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1]])
    ratio = torch.tensor([[0.5, 1, 1.5, 1], [1, 1.25, 1, 0.625]], dtype=torch.float64)
    advantages = torch.tensor([[-1, 1, 2, 1], [1, 4, 1, -2]], dtype=torch.float64)
    clean = [ratio, ratio + 0.125, advantages, mask, ratio * 2, ratio * 4]
    dirty = [torch.where(mask.bool(), values, rubbish) for values in clean[:3]]
    dirty += [mask, *(torch.where(mask.bool(), values, rubbish) for values in clean[4:])]
    flats = []
    for arguments in (clean, dirty):
        statistics = ClipStatistics(LOWER_GRID, UPPER_GRID)
        statistics.update(*arguments)
        flats.append(statistics.flat)
    assert torch.equal(*flats)
    assert flats[0].isfinite().all()
    assert flats[0].sum() > 0


@pytest.mark.parametrize("mask", [torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.full((2, 3), 7)])
def test_any_nonzero_mask_value_keeps_a_token(mask):
    statistics = ClipStatistics([0.75], [1.25])
    statistics.update(torch.full((2, 3), 0.5), None, torch.tensor([-1.0, -1.0]), mask)
    assert statistics.numbers().fp8.lower_clipped == {0.75: 6}


def test_advantages_per_sequence_and_per_token_are_the_same():
    ratio = torch.tensor([[0.5, 1.0], [1.0, 2.0]], dtype=torch.float64)  # B = T: no shape can be guessed
    flats = []
    for advantages in (
        torch.tensor([-1.0, 2.0]),
        torch.tensor([[-1.0], [2.0]]),
        torch.tensor([[-1.0, -1.0], [2.0, 2.0]]),
    ):
        statistics = ClipStatistics([0.75], [1.25])
        statistics.update(ratio, None, advantages, torch.ones(2, 2))
        flats.append(statistics.flat)
        assert side(statistics) == (2, 2, {0.75: 1}, {0.75: 1.0}, {1.25: 1}, {1.25: 2.0})
    assert torch.equal(flats[0], flats[1])
    assert torch.equal(flats[0], flats[2])


def test_sequence_weights_broadcast_over_tokens():
    ratio = torch.tensor([[0.5, 1.0], [1.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    advantages = torch.tensor([-1.0, 2.0, 1.0])
    weight = torch.tensor([[0.5], [2.0], [0.0]])
    statistics = ClipStatistics([0.75], [1.25])
    statistics.update(ratio, ratio, advantages, torch.ones(3, 2), weight, weight)
    assert side(statistics) == (2, 2, {0.75: 1}, {0.75: 0.5}, {1.25: 1}, {1.25: 4.0})  # the third row has w = 0
    assert side(statistics, "bf16") == side(statistics)


@pytest.mark.parametrize("name", ["ratio", "bf16_ratio", "advantages", "is_weight", "bf16_is_weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_is_counted_and_enters_no_sum(name, value):
    arguments = {key: row(1.0, 1.0) for key in ("ratio", "bf16_ratio", "is_weight", "bf16_is_weight")}
    arguments["advantages"] = row(1.0, -1.0)
    arguments[name] = arguments[name].clone()
    arguments[name][0, 0] = value
    statistics = ClipStatistics([0.75], [1.25])
    statistics.update(mask=torch.ones(1, 2), **arguments)
    assert statistics.numbers().num_nonfinite == 1
    assert side(statistics) == (1, 0, {0.75: 0}, {0.75: 1.0}, {1.25: 0}, {1.25: 0.0})
    assert statistics.flat.isfinite().all()


def test_a_dropped_token_that_is_not_finite_is_not_counted():
    statistics = ClipStatistics([0.75], [1.25])
    statistics.update(row(math.nan, math.nan, 1.0), None, row(1, 0, 1), torch.ones(1, 3), row(0, 1, 1))
    assert statistics.numbers().num_nonfinite == 0
    assert statistics.numbers().fp8.num_positive == 1


@pytest.mark.parametrize("points", [[], [0.8, 0.7], [0.7, math.nan], [0.7, math.inf]])
@pytest.mark.parametrize("lower", [True, False])
def test_points_that_cannot_be_searched_are_refused(points, lower):
    arguments = (points, [1.2]) if lower else ([0.8], points)
    with pytest.raises(ValueError, match="(lower|upper)_points=.* Pass at least one finite point, ascending"):
        ClipStatistics(*arguments)


def test_statistics_without_a_token_are_zero_and_keep_the_bounds():
    search = ClipSearch()
    statistics = ClipStatistics(search.lower_points(0.6, 0.8), search.upper_points(1.8, 1.24))
    calibration = decide(statistics.numbers(), search, (0.6, 1.8), (0.8, 1.24))
    assert calibration == Calibration(
        0.6,
        1.8,
        *[None] * 7,
        saturated=False,
        reason="the batch has 0 tokens of negative and 0 of positive advantage",
    )
    assert calibration.degenerate


# -- the decision: hand-worked -------------------------------------------------------------------------------------

# A < 0, then A > 0. FP8 clips one of ten negative tokens at L = 0.6, BF16 two at 0.8.
RATIO = row(0.55, 0.65, 0.69, 0.73, 0.9, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1.25, 1.45, 1.65)
REF_RATIO = row(0.7, 0.75, 0.9, 0.95, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1.3)
ADVANTAGES = row(*[-1] * 10, *[1] * 7)
MASK = torch.ones(1, 17)


@pytest.mark.parametrize(
    ("rebalance_with", "upper", "upper_target"), [("smoothed", 1.43, 1.46), ("target", 1.33, 1.26)]
)
def test_a_hand_worked_decision(rebalance_with, upper, upper_target):
    """Stage 1: F_fp8 = 2 for c in [0.65, 0.69), of 0.66 and 0.68 the latter is nearer 0.8; L = 0.6 + 0.08 / 2.

    Stage 2: rho_ref = 6 / 7.85 = 0.7643. P = 4, 5.25, 6.7, 8.35 up to 1.25, 1.45, 1.65 and past it.
    Against the smoothed N(0.64) = 7.97, rho = 0.502, 0.659, 0.841, 1.048: 6.7 is nearest, its plateau begins at 1.46,
    H = 1.4 + 0.03. Against N(0.68) = 7.32, rho = 0.546, 0.717, 0.915, 1.141: 5.25 is nearest, its plateau begins at
    1.26, H = 1.4 - 0.07.
    """
    calibration = calibrate_bounds(
        RATIO, REF_RATIO, ADVANTAGES, MASK, bounds=(0.6, 1.4), rebalance_with=rebalance_with
    )
    expected = Calibration(
        lower=0.64,
        upper=upper,
        lower_target=0.68,
        upper_target=upper_target,
        alpha_low=0.2,
        clip_share_before=0.1,
        rho_ref=6 / 7.85,
        rho_before=5.25 / 7.97,  # P(1.4) / N(0.6)
        rho_after=5.25 / 7.97,  # P(1.43) = P(1.33), N(0.64)
        saturated=False,
    )
    assert not calibration.degenerate
    assert calibration.reason is None
    numbers, expected_numbers = ({k: v for k, v in vars(c).items() if k != "reason"} for c in (calibration, expected))
    assert numbers == pytest.approx(expected_numbers, rel=1e-14)


def test_rebalance_with_overrides_the_record_and_defaults_to_it():
    call = [RATIO, REF_RATIO, ADVANTAGES, MASK]
    target = ClipSearch(rebalance_with="target")
    assert calibrate_bounds(*call, bounds=(0.6, 1.4), search=target).upper_target == 1.26
    assert calibrate_bounds(*call, bounds=(0.6, 1.4), search=target, rebalance_with="smoothed").upper_target == 1.46


def test_the_limits_of_the_record_bound_the_move():
    search = ClipSearch(clip_lower_max_change=0.01, clip_upper_max_change=0.02)
    calibration = calibrate_bounds(RATIO, REF_RATIO, ADVANTAGES, MASK, bounds=(0.6, 1.4), search=search)
    assert (calibration.lower, calibration.upper) == pytest.approx((0.61, 1.42), rel=1e-14)


@pytest.mark.parametrize(
    ("reference", "lower_target"),
    [
        (0.79, 0.78),  # 0.78 is nearer
        (0.81, 0.82),  # 0.82 is nearer
        (0.8, 0.78),  # equally near up to rounding (0.8 - 0.78 > 0.82 - 0.8 in float64): the smaller
    ],
)
def test_ties_of_stage_1_go_to_the_point_nearest_the_reference_then_to_the_smaller(reference, lower_target):
    """BF16 clips one token; FP8 clips none up to 0.78 and two from 0.82 on. No grid point lies between."""
    search = ClipSearch(clip_lower_min=0.54, clip_lower_max=0.9, clip_grid_step=0.04)
    assert search.lower_grid[6:8] == [0.78, 0.82]
    calibration = calibrate_bounds(
        row(0.785, 0.795, 1, 1), row(0.7, 1, 1, 1), row(-1, -1, -1, 1), torch.ones(1, 4), search=search,
        ref_bounds=(reference, 1.24),
    )  # fmt: skip
    assert calibration.lower_target == lower_target


@pytest.mark.parametrize("below", [0.3, 1.1])  # the distances' last bits say that 1.3, or that 1.36, is nearer
@pytest.mark.parametrize(("reference", "upper_target"), [(1.31, 1.3), (1.35, 1.36), (1.33, 1.3)])
def test_ties_of_stage_2_go_to_the_point_nearest_the_reference_then_to_the_smaller(reference, upper_target, below):
    """N = 1 and P_ref = below + 0.66; FP8's P is below up to 1.32 and below + 1.32 from there: both miss by 0.66."""
    search = ClipSearch(clip_upper_min=1.24, clip_upper_max=1.6, clip_grid_step=0.06)
    assert search.upper_grid[1:3] == [1.3, 1.36]
    too_low, too_high = abs(below - (below + 0.66)), abs(below + 1.32 - (below + 0.66))
    assert 0 < abs(too_low - too_high) < 1e-15
    calibration = calibrate_bounds(
        row(1, 1, 1.32), row(1, 1, 0.66), row(-1, below, 1), torch.ones(1, 3), search=search,
        ref_bounds=(0.8, reference),
    )  # fmt: skip
    assert calibration.rho_ref == pytest.approx(below + 0.66, rel=1e-15)
    assert calibration.upper_target == upper_target


@pytest.mark.parametrize(("ref_ratio", "reference", "upper_target"), [(0.660001, 1.31, 1.36), (0.659999, 1.35, 1.3)])
def test_a_millionth_nearer_is_no_tie(ref_ratio, reference, upper_target):
    """As above, P_ref a millionth off the middle: the nearer rho wins over the nearer bound."""
    search = ClipSearch(clip_upper_min=1.24, clip_upper_max=1.6, clip_grid_step=0.06)
    calibration = calibrate_bounds(
        row(1, 1, 1.32), row(1, 1, ref_ratio), row(-1, 0.3, 1), torch.ones(1, 3), search=search,
        ref_bounds=(0.8, reference),
    )  # fmt: skip
    assert calibration.upper_target == upper_target


def test_without_fp8_error_and_at_the_reference_nothing_moves():
    calibration = calibrate_bounds(REF_RATIO, REF_RATIO, ADVANTAGES, MASK, bounds=(0.8, 1.24))
    assert (
        (calibration.lower, calibration.upper) == (calibration.lower_target, calibration.upper_target) == (0.8, 1.24)
    )
    assert calibration.rho_ref == calibration.rho_before == calibration.rho_after
    assert calibration.alpha_low == calibration.clip_share_before == 0.2


@pytest.mark.parametrize(
    ("ratio", "lower_target", "upper_target", "saturated"),
    [
        (row(0.4, 0.51, 1, 1), 0.5, 1.24, True),  # FP8 clips more than BF16 (none) at every lower bound
        (row(0.6, 1, 1, 1.98), 0.58, 2.0, True),  # rho is 0 up to 1.98, then 5.94 / 2.6 = 2.28; rho_ref = 1.2
        (row(0.6, 1, 1, 1.3), 0.58, 1.32, False),  # rho is 0 up to 1.3, then 3.9 / 2.6 = 1.5
    ],
)
def test_a_target_on_an_end_of_its_interval_is_saturated(ratio, lower_target, upper_target, saturated):
    calibration = calibrate_bounds(ratio, row(1, 1, 1, 1.2), row(-1, -1, -1, 3), torch.ones(1, 4), bounds=(0.6, 1.8))
    assert (calibration.lower_target, calibration.upper_target) == (lower_target, upper_target)
    assert calibration.saturated is saturated


@pytest.mark.parametrize(
    ("ratio", "ref_ratio", "advantages", "known"),
    [
        # no positive token: alpha_low 1/2, FP8 clips 1/2; P = 0 of N = 1 on both sides
        (row(0.5, 1), row(0.7, 1), row(-1, -1), (0.5, 0.5, 0.0, 0.0)),
        (row(1, 2), row(1, 1), row(1, 1), (None, None, None, None)),  # no negative token
        (row(1, 1), row(1, 1), row(0, 0), (None, None, None, None)),  # neither
        (row(1, 1), row(0.7, 1), row(-1, 1), (1.0, 0.0, None, 1.0)),  # BF16 clips every negative token
        (row(0.4, 1), row(1, 1), row(-1, 1), (0.0, 1.0, 1.0, None)),  # FP8 clips every negative token, at any bound
        (row(1, math.nan), row(1, 1), row(-1, 1), (0.0, 0.0, 0.0, 0.0)),
        (row(1, 1, math.inf), row(1, 1, 1), row(-1, 1, 1), (0.0, 0.0, 1.0, 1.0)),
    ],
)
@pytest.mark.parametrize("rebalance_with", ["smoothed", "target"])
def test_degenerate_data_keeps_both_bounds(ratio, ref_ratio, advantages, known, rebalance_with):
    calibration = calibrate_bounds(
        ratio, ref_ratio, advantages, torch.ones_like(ratio), bounds=(0.61, 1.77), rebalance_with=rebalance_with
    )
    alpha_low, clip_share, rho_ref, rho = known
    assert calibration.reason
    assert calibration == Calibration(
        0.61, 1.77, None, None, alpha_low, clip_share, rho_ref, rho, rho, saturated=False, reason=calibration.reason
    )


def test_a_smoothed_bound_that_clips_every_negative_token_keeps_both_bounds():
    """L* = 0.5 leaves the token at 0.78 unclipped, the smoothed 0.85 does not: rho at the new bounds has no value."""
    call = [row(0.78, 1), row(1, 1), row(-1, 1), torch.ones(1, 2)]
    search = ClipSearch(clip_lower_max=0.7)
    for rebalance_with in ("smoothed", "target"):
        calibration = calibrate_bounds(*call, bounds=(0.9, 1.8), search=search, rebalance_with=rebalance_with)
        assert calibration.degenerate
        assert (calibration.lower, calibration.upper) == (0.9, 1.8)


# -- the decision: brute force -------------------------------------------------------------------------------------


@dataclass
class Case:
    ratio: Tensor
    ref_ratio: Tensor
    advantages: Tensor
    mask: Tensor
    weight: Tensor | None
    ref_weight: Tensor | None
    bounds: tuple[float, float]
    ref_bounds: tuple[float, float]
    rebalance_with: str
    delta: float | None

    @property
    def search(self) -> ClipSearch:
        return ClipSearch(rebalance_with=self.rebalance_with)

    def statistics(self) -> ClipStatistics:
        lower_points = self.search.lower_points(self.bounds[0], self.ref_bounds[0])
        upper_points = self.search.upper_points(self.bounds[1], self.ref_bounds[1])
        return ClipStatistics(lower_points, upper_points, delta=self.delta)

    def add(self, statistics: ClipStatistics, rows: Tensor, mask: Tensor) -> None:
        weight = None if self.weight is None else self.weight[rows]
        ref_weight = None if self.ref_weight is None else self.ref_weight[rows]
        statistics.update(
            self.ratio[rows], self.ref_ratio[rows], self.advantages[rows], mask[rows], weight, ref_weight
        )

    def decide(self, statistics: ClipStatistics) -> Calibration:
        return decide(statistics.numbers(), self.search, self.bounds, self.ref_bounds)


def random_case(seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def uniform(low: float, high: float, shape: tuple[int, ...] = ()) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    def chance(share: float) -> bool:
        return bool(uniform(0, 1) < share)

    shape = (1, 1) if chance(0.03) else (integer(1, 8), integer(1, 12))
    bounds = (uniform(0.5, 0.95).item(), uniform(1.1, 2.1).item()) if chance(0.6) else (0.6, 1.8)
    ref_bounds = [(0.8, 1.24), (0.8, 1.28), (0.75, 1.25), (uniform(0.5, 0.95).item(), uniform(1.1, 2.1).item())]
    ref_bounds = ref_bounds[integer(0, 3)]

    def ratios(scale: float) -> Tensor:
        kind = integer(0, 9)
        if kind < 4:  # as in training, in float32
            return (scale * torch.randn(shape, generator=generator)).exp()
        if kind < 8:  # on the grid and on the bounds: every comparison is an equality somewhere
            search = ClipSearch()
            points = search.lower_points(bounds[0], ref_bounds[0]) + search.upper_points(bounds[1], ref_bounds[1])
            points = torch.tensor([*points, *bounds * 10, *ref_bounds * 10, *[1.0] * 40], dtype=torch.float64)
            return points[torch.randint(len(points), shape, generator=generator)]
        # all clipped, or none
        return uniform(0.3, 0.49, shape) if kind == 8 else uniform(0.96, 1.09, shape)

    if chance(0.4):  # few values: ties
        advantages = torch.randint(-1, 2, shape, generator=generator).double()
    else:
        advantages = torch.randn(shape, generator=generator)
    if chance(0.1):  # an empty side
        advantages = advantages.abs()
    kind = integer(0, 3)
    advantages = (advantages, advantages, advantages[:, :1], advantages[:, 0])[kind]
    weight = ref_weight = None
    if chance(0.6):
        sequence_level = chance(0.3)
        weight, ref_weight = uniform(0, 2, shape), uniform(0, 2, shape)
        weight[uniform(0, 1, shape) < 0.2] = 0.0
        if sequence_level:
            weight, ref_weight = weight[:, :1], ref_weight[:, :1]
        if chance(0.2):
            ref_weight = None
    mask = (uniform(0, 1, shape) < uniform(0.3, 1.3)).long()
    ratio, ref_ratio = ratios(0.3), ratios(0.15)
    if chance(0.03):
        ratio = torch.where(uniform(0, 1, shape) < 0.2, math.inf, ratio)
    return Case(
        ratio=ratio,
        ref_ratio=ref_ratio,
        advantages=advantages,
        mask=mask,
        weight=weight,
        ref_weight=ref_weight,
        bounds=bounds,
        ref_bounds=ref_bounds,
        rebalance_with="smoothed" if chance(0.5) else "target",
        delta=uniform(1.02, 3).item() if chance(0.25) else None,
    )


class Oracle:
    """The decision of `method.md` sections 2 to 6, token by token in float64. Shares nothing with the package."""

    def __init__(self, case: Case):
        self.case = case
        self.num_nonfinite = 0
        self.negative, self.positive = [], []  # (r, r_ref, w |A|, w_ref |A|) of each token
        num_rows, num_tokens = case.mask.shape
        advantages = case.advantages.reshape(num_rows, -1).tolist()
        for b in range(num_rows):
            for t in range(num_tokens):
                advantage = advantages[b][t if len(advantages[b]) > 1 else 0]
                w, w_ref = self.cell(case.weight, b, t), self.cell(case.ref_weight, b, t)
                r, r_ref = case.ratio[b, t].item(), case.ref_ratio[b, t].item()
                if not case.mask[b, t] or advantage == 0 or w == 0:
                    continue
                if not all(math.isfinite(x) for x in (r, r_ref, advantage, w, w_ref)):
                    self.num_nonfinite += 1
                    continue
                token = (r, r_ref, w * abs(advantage), w_ref * abs(advantage))
                (self.negative if advantage < 0 else self.positive).append(token)

    @staticmethod
    def cell(weight: Tensor | None, b: int, t: int) -> float:
        if weight is None:
            return 1.0
        return weight[b, t if weight.shape[1] > 1 else 0].item()

    def count_lower(self, c: float, reference: bool = False) -> int:
        return sum(1 for token in self.negative if token[reference] <= c)

    def count_upper(self, h: float, reference: bool = False) -> int:
        return sum(1 for token in self.positive if token[reference] >= h)

    def sum_positive(self, h: float, reference: bool = False) -> float:
        return math.fsum(token[reference] * token[2 + reference] for token in self.positive if token[reference] < h)

    def sum_negative(self, c: float, reference: bool = False) -> float:
        limit = math.inf if self.case.delta is None else self.case.delta
        return math.fsum(
            token[reference] * token[2 + reference] for token in self.negative if c < token[reference] <= limit
        )

    def clipped_lower(self, c: float, reference: bool = False) -> float:
        return math.fsum(token[2 + reference] for token in self.negative if token[reference] <= c)

    def clipped_upper(self, h: float, reference: bool = False) -> float:
        return math.fsum(token[2 + reference] for token in self.positive if token[reference] >= h)

    def decide(self) -> Calibration:
        (lower, upper), (c_low, c_high) = self.case.bounds, self.case.ref_bounds
        total = len(self.negative)
        alpha_low = self.count_lower(c_low, True) / total if total else None
        share = self.count_lower(lower) / total if total else None
        rho_ref = quotient(self.sum_positive(c_high, True), self.sum_negative(c_low, True))
        rho = quotient(self.sum_positive(upper), self.sum_negative(lower))
        kept = Calibration(
            lower, upper, None, None, alpha_low, share, rho_ref, rho, rho, saturated=False, reason="no decision"
        )
        if self.num_nonfinite or not self.negative or not self.positive or rho_ref is None:
            return kept
        k_ref = self.count_lower(c_low, True)
        lower_target = self.closest(LOWER_GRID, [abs(self.count_lower(c) - k_ref) for c in LOWER_GRID], c_low, 0)
        new_lower = lower + max(-0.05, min(0.05, (lower_target - lower) / 2))
        denominator = self.sum_negative(new_lower if self.case.rebalance_with == "smoothed" else lower_target)
        if denominator == 0 or self.sum_negative(new_lower) == 0:
            return kept
        distances = [abs(self.sum_positive(h) / denominator - rho_ref) for h in UPPER_GRID]
        upper_target = self.closest(UPPER_GRID, distances, c_high, 1e-12 * rho_ref)
        new_upper = upper + max(-0.1, min(0.1, (upper_target - upper) / 2))
        saturated = lower_target in (0.5, 0.9) or upper_target in (1.2, 2.0)
        rho_after = self.sum_positive(new_upper) / self.sum_negative(new_lower)
        return Calibration(
            new_lower, new_upper, lower_target, upper_target, alpha_low, share, rho_ref, rho, rho_after, saturated
        )  # fmt: skip

    @staticmethod
    def closest(grid: list[float], distances: list[float], reference: float, tolerance: float) -> float:
        best = None
        for point, distance in zip(
            grid, distances, strict=True
        ):  # ascending: an equally near later point is the larger
            if distance > min(distances) + tolerance:
                continue
            if best is None or abs(point - reference) < abs(best - reference) - 1e-9:
                best = point
        assert best is not None
        return best


def quotient(numerator: float, denominator: float) -> float | None:
    return None if denominator == 0 else numerator / denominator


def assert_same_decision(found: Calibration, expected: Calibration, label: object) -> None:
    for name in DECISION:
        assert getattr(found, name) == getattr(expected, name), (label, name, found, expected)
    for name in SUMS:
        value, other = getattr(found, name), getattr(expected, name)
        if value is None or other is None:
            assert value is other, (label, name, found, expected)
        else:
            assert math.isclose(value, other, rel_tol=SUM_TOLERANCE), (label, name, value, other)


NUM_CASES = 600


@pytest.fixture(scope="module")
def oracles() -> list[tuple[Case, Oracle, Calibration]]:
    cases = [random_case(seed) for seed in range(NUM_CASES)]
    return [(case, oracle := Oracle(case), oracle.decide()) for case in cases]


def test_the_decision_equals_brute_force(oracles):
    for seed, (case, _, expected) in enumerate(oracles):
        statistics = case.statistics()
        case.add(statistics, torch.arange(len(case.mask)), case.mask)
        assert_same_decision(case.decide(statistics), expected, seed)
        if case.delta is None:
            found = calibrate_bounds(
                case.ratio, case.ref_ratio, case.advantages, case.mask, is_weight=case.weight,
                ref_is_weight=case.ref_weight, bounds=case.bounds, ref_bounds=case.ref_bounds,
                rebalance_with=case.rebalance_with,
            )  # fmt: skip
            assert_same_decision(found, expected, seed)


def test_the_statistics_equal_brute_force_at_every_point(oracles):
    for seed, (case, oracle, _) in enumerate(oracles):
        statistics = case.statistics()
        case.add(statistics, torch.arange(len(case.mask)), case.mask)
        numbers = statistics.numbers()
        assert numbers.num_nonfinite == oracle.num_nonfinite, seed
        for reference, found in ((False, numbers.fp8), (True, numbers.bf16)):
            assert found.num_negative == len(oracle.negative), seed
            assert found.num_positive == len(oracle.positive), seed
            assert found.lower_clipped == {c: oracle.count_lower(c, reference) for c in statistics.lower_points}, seed
            assert found.upper_clipped == {h: oracle.count_upper(h, reference) for h in statistics.upper_points}, seed
            sums = {c: oracle.sum_negative(c, reference) for c in statistics.lower_points}
            assert found.negative_sum == pytest.approx(sums, rel=SUM_TOLERANCE, abs=0), seed
            sums = {h: oracle.sum_positive(h, reference) for h in statistics.upper_points}
            assert found.positive_sum == pytest.approx(sums, rel=SUM_TOLERANCE, abs=0), seed
            sums = {c: oracle.clipped_lower(c, reference) for c in statistics.lower_points}
            assert found.lower_clipped_weight == pytest.approx(sums, rel=SUM_TOLERANCE, abs=0), seed
            sums = {h: oracle.clipped_upper(h, reference) for h in statistics.upper_points}
            assert found.upper_clipped_weight == pytest.approx(sums, rel=SUM_TOLERANCE, abs=0), seed


def test_any_split_into_micro_batches_and_ranks_decides_the_same(oracles):
    for seed, (case, _, expected) in enumerate(oracles):
        generator = torch.Generator().manual_seed(10_000 + seed)
        ranks = [case.statistics() for _ in range(3)]
        # rows go to micro-batches of the ranks in random order; one of them is split between tokens as well
        for index, rows in enumerate(torch.randperm(len(case.mask), generator=generator).split(2)):
            first = torch.rand(case.mask.shape, generator=generator) < 0.5
            masks = [case.mask * first, case.mask * ~first] if index == 0 else [case.mask]
            for part, mask in enumerate(masks):
                case.add(ranks[(index + part) % len(ranks)], rows, mask)
        world = case.statistics()
        world.flat = sum(rank.flat for rank in ranks if rank.flat is not None)
        assert_same_decision(case.decide(world), expected, seed)


def test_the_random_cases_reach_every_branch(oracles):
    """Else the oracle proves nothing."""
    decided = [(case, oracle, result) for case, oracle, result in oracles if not result.degenerate]
    degenerate = [(oracle, result) for _, oracle, result in oracles if result.degenerate]
    reached = {
        "decided": len(decided),
        "saturated": sum(result.saturated for _, _, result in decided),
        "not saturated": sum(not result.saturated for _, _, result in decided),
        "delta changes a sum": sum(
            any(r > case.delta for r, *_ in oracle.negative) for case, oracle, _ in decided if case.delta is not None
        ),
        "smoothed": sum(case.rebalance_with == "smoothed" for case, _, _ in decided),
        "sequence weights": sum(case.weight is not None and case.weight.shape[1] == 1 for case, _, _ in decided),
        "float32": sum(case.ratio.dtype == torch.float32 for case, _, _ in decided),
        "ratio on a bound": sum(any(r == case.bounds[0] for r, *_ in oracle.negative) for case, oracle, _ in decided),
        "one token of each sign": sum(len(oracle.negative) == len(oracle.positive) == 1 for _, oracle, _ in decided),
        "no negative": sum(not oracle.negative for oracle, _ in degenerate),
        "no positive": sum(not oracle.positive for oracle, _ in degenerate),
        "nonfinite": sum(bool(oracle.num_nonfinite) for oracle, _ in degenerate),
        "BF16 clips all": sum(
            bool(oracle.negative and oracle.positive) and result.rho_ref is None for oracle, result in degenerate
        ),
        "FP8 clips all": sum(
            bool(oracle.negative and oracle.positive) and result.rho_ref is not None and not oracle.num_nonfinite
            for oracle, result in degenerate
        ),
    }
    assert min(reached.values()) >= 5, reached


def test_sums_are_monotonic_in_the_bounds():
    generator = torch.Generator().manual_seed(0)
    statistics = ClipStatistics(LOWER_GRID, UPPER_GRID)
    ratio = (0.5 * torch.randn((16, 64), generator=generator)).exp()
    statistics.update(ratio, None, torch.randn(16, generator=generator), torch.ones(16, 64))
    numbers = statistics.numbers().fp8
    positive, negative = list(numbers.positive_sum.values()), list(numbers.negative_sum.values())
    assert positive == sorted(positive)
    assert negative == sorted(negative, reverse=True)
    assert positive[0] < positive[-1]
    assert negative[0] > negative[-1]


# -- the method's promise ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rebalance_with", ["smoothed", "target"])
@pytest.mark.parametrize("step", [0.02, 0.002])
def test_recalibration_on_a_stationary_distribution_reaches_bf16s_clip_share_and_update_ratio(rebalance_with, step):
    """Log-normal BF16 ratios (sd 0.12 nats) and as much FP8 noise: FP8's log-ratios are sqrt(2) times as wide, so the
    lower bound of equal clip share is 0.8 ** sqrt(2) = 0.7294 in closed form."""
    generator = torch.Generator().manual_seed(1)
    search = ClipSearch(clip_grid_step=step, rebalance_with=rebalance_with)
    bounds, ref_bounds, shape = (0.6, 1.8), (0.8, 1.24), (256, 512)
    advantages = torch.randn(shape[0], generator=generator)
    calibrations = []
    for _ in range(12):
        log_ratio = 0.12 * torch.randn(shape, generator=generator)
        noise = 0.12 * torch.randn(shape, generator=generator)
        call = [(log_ratio + noise).exp(), log_ratio.exp(), advantages, torch.ones(shape)]
        calibrations.append(calibrate_bounds(*call, bounds=bounds, ref_bounds=ref_bounds, search=search))
        bounds = calibrations[-1].lower, calibrations[-1].upper
    vanilla = calibrate_bounds(*call, bounds=ref_bounds, ref_bounds=ref_bounds, search=search)
    first, last = calibrations[0], calibrations[-1]
    # The bounds at the start clip next to nothing (measured 0.045 of BF16's share), vanilla three times as much (3.10)
    assert first.clip_share_before / first.alpha_low < 0.1
    assert vanilla.clip_share_before / vanilla.alpha_low > 2.5
    # Half a grid step, and sampling (BF16 clips 2000 tokens, 2 % in the share). Measured: 0.7244 and 0.7287
    assert last.lower == pytest.approx(0.8 ** math.sqrt(2), abs=step / 2 + 0.002)
    assert last.clip_share_before == pytest.approx(last.alpha_low, rel=0.1)  # measured 1.026 and 1.039
    assert last.rho_before == pytest.approx(last.rho_ref, rel=0.004)  # measured 0.9987 to 1.0002
    assert vanilla.rho_before < 0.96 * vanilla.rho_ref  # measured 0.948
    moves = [abs(new.lower - old.lower) for old, new in zip(calibrations[:-1], calibrations[1:], strict=True)]
    assert max(moves) <= 0.05 + 1e-12  # from 0.6 to 0.72 in steps of at most 0.05
    assert moves[-1] <= step / 2 + 0.002  # between neighbours of the grid: measured 0.0044 and 0.0002


# -- importance weight ---------------------------------------------------------------------------------------------

# pi_old / pi_sampler = 3, 1.5, 1, 0.25; the product is 1.125
OLD = row(-1.0, -1.0, -1.0, -3.0)
SAMPLER = OLD - row(*(math.log(value) for value in (3, 1.5, 1, 0.25)))


@pytest.mark.parametrize(
    ("mode", "clip_min", "clip_max", "mask", "expected"),
    [
        ("token_truncate", None, 2.0, (1, 1, 1, 1), (2, 1.5, 1, 0.25)),
        ("token_truncate", 0.5, 2.0, (1, 1, 1, 1), (2, 1.5, 1, 0.5)),
        ("token_truncate", 0.5, None, (1, 1, 1, 1), (3, 1.5, 1, 0.5)),
        ("token_truncate", None, None, (1, 1, 1, 1), (3, 1.5, 1, 0.25)),
        ("token_mask", None, 2.0, (1, 1, 1, 1), (0, 1.5, 1, 0.25)),
        ("token_mask", 0.5, 2.0, (1, 1, 1, 1), (0, 1.5, 1, 0)),
        ("token_mask", 0.5, None, (1, 1, 1, 1), (3, 1.5, 1, 0)),
        ("token_mask", None, 1.0, (1, 1, 1, 1), (0, 0, 1, 0.25)),  # a weight on the bound stays
        ("token_mask", 1.0, None, (1, 1, 1, 1), (3, 1.5, 1, 0)),
        ("sequence_truncate", None, 2.0, (1, 1, 1, 1), (1.125, 1.125, 1.125, 1.125)),
        ("sequence_truncate", None, 1.0625, (1, 1, 1, 1), (1.0625, 1.0625, 1.0625, 1.0625)),
        ("sequence_truncate", 1.25, 2.0, (1, 1, 1, 1), (1.25, 1.25, 1.25, 1.25)),
        ("sequence_mask", None, 2.0, (1, 1, 1, 1), (1.125, 1.125, 1.125, 1.125)),
        ("sequence_mask", None, 1.0625, (1, 1, 1, 1), (0, 0, 0, 0)),
        ("sequence_mask", 1.25, 2.0, (1, 1, 1, 1), (0, 0, 0, 0)),
        # a token outside the mask has ratio 1, and no part in the product of its sequence
        ("token_truncate", None, 2.0, (0, 1, 1, 0), (1, 1.5, 1, 1)),
        ("sequence_truncate", None, 2.0, (0, 1, 1, 1), (0.375, 0.375, 0.375, 0.375)),
        ("sequence_mask", None, 2.0, (1, 1, 1, 0), (0, 0, 0, 0)),  # 4.5
    ],
)
def test_importance_weights_by_hand(mode, clip_min, clip_max, mask, expected):
    """The numbers follow TRL 1.16 (`_generate_and_score_completions`), worked by hand."""
    weight = importance_weight(OLD, SAMPLER, torch.tensor([mask]), mode=mode, clip_min=clip_min, clip_max=clip_max)
    assert weight.tolist() == [pytest.approx(expected, rel=1e-12)]


def test_importance_weight_is_truncated_at_two_by_default():
    weight = importance_weight(OLD, SAMPLER, torch.ones(1, 4))
    assert weight.tolist() == [pytest.approx((2, 1.5, 1, 0.25), rel=1e-12)]


def test_sequences_do_not_mix():
    weight = importance_weight(OLD.repeat(2, 1), torch.cat([SAMPLER, OLD]), torch.ones(2, 4), mode="sequence_truncate")
    assert weight.tolist() == [pytest.approx([1.125] * 4), pytest.approx([1.0] * 4)]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", (2, 0, 1, 0.25)),
        ("token_mask", (0, 0, 1, 0.25)),
        ("sequence_truncate", (0.75, 0, 0.75, 0.75)),  # 3 * 0.25: the unscored token has no part in the product
        ("sequence_mask", (0.75, 0, 0.75, 0.75)),
    ],
)
def test_a_token_the_sampler_could_not_score_has_no_weight(mode, expected):
    sampler = SAMPLER.clone()
    sampler[0, 1] = math.nan
    weight = importance_weight(OLD, sampler, torch.ones(1, 4), mode=mode)
    assert weight.tolist() == [pytest.approx(expected, rel=1e-12)]


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e4])
def test_rubbish_in_masked_tokens_changes_no_other_weight(mode, rubbish):
    mask = torch.tensor([[1, 1, 0, 1]])
    expected = importance_weight(OLD, SAMPLER, mask, mode=mode)
    for old, sampler in ((OLD, SAMPLER.clone()), (OLD.clone(), SAMPLER)):
        changed = sampler if old is OLD else old
        changed[0, 2] = rubbish
        weight = importance_weight(old, sampler, mask, mode=mode)
        assert torch.equal(weight[mask.bool()], expected[mask.bool()])
        assert weight.isfinite().all()


def test_a_token_the_sampler_gave_no_probability_is_truncated_or_dropped():
    sampler = row(-math.inf, -1.0)
    old = row(-1.0, -1.0)
    assert importance_weight(old, sampler, torch.ones(1, 2)).tolist() == [[2.0, 1.0]]
    assert importance_weight(old, sampler, torch.ones(1, 2), mode="token_mask").tolist() == [[0.0, 1.0]]


def test_an_unknown_mode_names_the_ones_there_are():
    with pytest.raises(ValueError, match="mode='token' .* Use 'token_truncate', 'token_mask', 'sequence_truncate' or"):
        importance_weight(OLD, SAMPLER, torch.ones(1, 4), mode="token")


@pytest.mark.parametrize("name", ["ratio", "ref_ratio", "advantages", "mask"])
@pytest.mark.parametrize("value", [None, [[1.0]]])
def test_what_is_no_tensor_is_refused(name, value):
    given = {name: torch.ones(1, 1) for name in ("ratio", "ref_ratio", "advantages", "mask")} | {name: value}
    with pytest.raises(TypeError, match=f"{name} is a {type(value).__name__}.* Pass a torch.Tensor"):
        calibrate_bounds(**given)


@pytest.mark.parametrize("side", [0, 1])
def test_log_ratios_in_the_place_of_ratios_are_refused(side):
    ratios = [torch.ones(2, 3), torch.ones(2, 3)]
    ratios[side][0, 0] = -0.1
    with pytest.raises(ValueError, match="holds negative numbers.*Pass exp"):
        calibrate_bounds(*ratios, torch.tensor([1.0, -1.0]), torch.ones(2, 3))
