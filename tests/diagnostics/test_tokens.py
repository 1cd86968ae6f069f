"""Diagnosis of a micro-batch, by hand. Every fraction is (numerator, denominator), in float64."""

import math

import pytest
import torch
from torch import Tensor

from trl_fp8 import diagnostics
from trl_fp8.diagnostics import Last, Max, Mean, Sum


MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
NEGATIVE = torch.tensor([[True, True, True, False], [False] * 4])
POSITIVE = torch.tensor([[False] * 4, [True, True, False, False]])
BOUNDS, REF_BOUNDS = (0.5, 2.0), (0.75, 1.25)
# The last column, and the third token of the second row, are masked
RATIO = torch.tensor([[0.5, 0.75, 1.0, 0.1], [1.25, 2.0, 9.0, 9.0]])
REF_RATIO = torch.tensor([[0.75, 1.0, 0.5, 1.0], [1.0, 1.25, 1.0, 1.0]])


def plain(metrics: dict) -> dict:
    """Means as (numerator, denominator), sums as numbers; all float64 scalars."""
    found = {}
    for key, metric in metrics.items():
        values = list(vars(metric).values())
        for value in values:
            assert value.dtype == torch.float64
            assert value.shape == ()
        assert isinstance(metric, Mean if len(values) == 2 else Sum)
        found[key] = tuple(value.item() for value in values) if len(values) == 2 else values[0].item()
    return found


@pytest.mark.parametrize(
    ("advantages", "negative", "positive"),
    [
        ([-0.5, 2.0], [[1, 1, 1, 0], [0, 0, 0, 0]], [[0, 0, 0, 0], [1, 1, 0, 0]]),
        ([[-0.5], [2.0]], [[1, 1, 1, 0], [0, 0, 0, 0]], [[0, 0, 0, 0], [1, 1, 0, 0]]),
        ([0.0, -1.0], [[0, 0, 0, 0], [1, 1, 0, 0]], [[0, 0, 0, 0], [0, 0, 0, 0]]),
        ([[-1, 0, 1, -1], [0, 1, -1, math.nan]], [[1, 0, 0, 0], [0, 0, 0, 0]], [[0, 0, 1, 0], [0, 1, 0, 0]]),
    ],
)
def test_signs_split_the_kept_tokens_and_leave_zero_out(advantages, negative, positive):
    found = diagnostics.signs(torch.tensor(advantages), MASK)
    assert torch.equal(found[0], torch.tensor(negative, dtype=torch.bool))
    assert torch.equal(found[1], torch.tensor(positive, dtype=torch.bool))


def test_clip_shares_count_the_bound_itself_as_clipped():
    assert plain(diagnostics.clip_shares(RATIO, NEGATIVE, POSITIVE, BOUNDS, REF_BOUNDS)) == {
        "clip_count/negative": 3,
        "clip_count/positive": 2,
        "clip_count/lower": 1,
        "clip_count/lower_at_reference": 2,
        "clip_share/lower": (1, 3),  # 0.5
        "clip_share/upper": (1, 2),  # 2.0
        "clip_share/lower_at_reference": (2, 3),  # 0.5, 0.75
        "clip_share/upper_at_reference": (2, 2),  # 1.25, 2.0
    }


def test_bf16_clips_at_the_reference_bounds():
    assert plain(diagnostics.bf16_clip_shares(REF_RATIO, NEGATIVE, POSITIVE, REF_BOUNDS)) == {
        "clip_count/lower_bf16": 2,
        "clip_share/lower_bf16": (2, 3),  # 0.75 on the bound, 0.5
        "clip_share/upper_bf16": (1, 2),  # 1.25
    }


def test_update_ratio_is_what_is_left_of_the_push_on_both_sides():
    advantages = torch.tensor([[-2.0], [3.0]])
    # P(2.0) = 3 * 1.25, N(0.5) = 2 * (0.75 + 1); a token on a bound is clipped
    metric = diagnostics.update_ratio(RATIO, None, advantages, NEGATIVE, POSITIVE, BOUNDS)
    assert plain({"a": metric}) == {"a": (3.75, 3.5)}
    weight = torch.tensor([[0.5], [2.0]])
    metric = diagnostics.update_ratio(RATIO, weight, advantages, NEGATIVE, POSITIVE, BOUNDS, delta=0.9)
    assert plain({"a": metric}) == {"a": (7.5, 0.75)}  # delta takes the 1.0
    broken = RATIO.clone()
    broken[0, 1] = math.inf
    metric = diagnostics.update_ratio(broken, None, advantages, NEGATIVE, POSITIVE, BOUNDS)
    assert plain({"a": metric}) == {"a": (3.75, 2.0)}


def test_over_clipping_of_garbled_responses_is_a_share_of_the_lower_one():
    low, one, everyone = torch.full((3, 2), 0.5), torch.ones(3, 2), torch.ones(3, 2, dtype=torch.bool)
    entropy = torch.tensor([0.99, 1.0, math.nan])
    found = plain(diagnostics.over_clipping(low, one, everyone, ~everyone, REF_BOUNDS, entropy))
    assert found["overclip/lower_from_high_entropy"] == (2, 6)


def test_a_float32_ratio_is_compared_in_float64():
    ratio = torch.tensor([[0.8, 0.7]])  # 0.80000001 and 0.69999999
    both = torch.ones(1, 2, dtype=torch.bool)
    shares = plain(diagnostics.clip_shares(ratio, both, ~both, (0.8, 2.0), (0.7, 2.0)))
    assert shares["clip_share/lower"] == (1, 2)
    assert shares["clip_share/lower_at_reference"] == (1, 2)
    over = plain(diagnostics.over_clipping(torch.full((1, 2), 0.1), ratio, both, ~both, (0.8, 2.0)))
    assert over["overclip/lower"] == (1, 2)


def test_over_clipping_counts_what_fp8_clips_and_bf16_does_not():
    # A < 0: 0.75 -> 0.5: BF16 is on the bound, clipped itself; 1.0 -> 0.75: over-clipped; 0.5 -> 1.0: the other way
    # A > 0: 1.0 -> 1.25: over-clipped; 1.25 -> 2.0: BF16 is on the bound
    over = diagnostics.over_clipping(RATIO, REF_RATIO, NEGATIVE, POSITIVE, REF_BOUNDS)
    assert plain(over) == {"overclip/lower": (1, 3), "overclip/upper": (1, 2)}


def test_over_clipping_reads_the_side_of_the_advantage_only():
    low, high, one = torch.tensor([[0.1, 9.0]]), torch.tensor([[9.0, 0.1]]), torch.ones(1, 2)
    negative = torch.tensor([[True, False]])
    assert plain(diagnostics.over_clipping(low, one, negative, ~negative, REF_BOUNDS)) == {
        "overclip/lower": (1, 1),
        "overclip/upper": (1, 1),
    }
    assert plain(diagnostics.over_clipping(high, one, negative, ~negative, REF_BOUNDS)) == {
        "overclip/lower": (0, 1),
        "overclip/upper": (0, 1),
    }


def test_nmae_is_a_sum_of_errors_over_a_sum_of_magnitudes():
    values, ref_values = torch.tensor([[1.5, -1.0, 7.0]]), torch.tensor([[1.0, -3.0, 5.0]])
    assert plain({"a": diagnostics.nmae(values, ref_values, torch.tensor([[1, 1, 0]]))}) == {"a": (2.5, 4.0)}


def test_quantization_error_compares_probabilities_and_ratios():
    logps = torch.tensor([[0.5, 0.25, 1.0]], dtype=torch.float64).log()
    ref_logps = torch.tensor([[0.25, 0.5, 0.125]], dtype=torch.float64).log()
    ratio, ref_ratio = torch.tensor([[1.0, 2.0, 5.0]]), torch.tensor([[1.25, 1.0, 1.0]])
    error = plain(diagnostics.quantization_error(logps, ref_logps, ratio, ref_ratio, torch.tensor([[1, 1, 0]])))
    assert set(error) == {"fp8/prob_nmae", "fp8/ratio_nmae"}
    assert error["fp8/prob_nmae"] == pytest.approx((0.5, 0.75), rel=1e-14)
    assert error["fp8/ratio_nmae"] == (1.25, 2.25)


def test_noise_floor_is_the_mean_absolute_log_ratio():
    log_ratio = torch.tensor([[0.5, -0.25, 0.0, 8.0]])
    assert plain(diagnostics.noise_floor(log_ratio, torch.tensor([[1, 1, 1, 0]]))) == {"fp8/noise_floor": (0.75, 3)}


def test_entropy_shares_are_closed_below_and_open_above():
    # mean entropies 0, 0.2 - 1e-9, 0.2, 0.5, 1 - 1e-9, 1, 50, and -1e-9, which is rounding around 0
    means = torch.tensor([0.0, 0.2 - 1e-9, 0.2, 0.5, 1 - 1e-9, 1.0, 50.0, -1e-9], dtype=torch.float64)
    entropy = diagnostics.response_entropy(means.unsqueeze(1), torch.ones(8, 1))
    assert plain(diagnostics.entropy_shares(entropy, torch.tensor([1.0, 1, 1, 1, 1, -1, 1, 1]))) == {
        "entropy_share/below_0.2": (3, 8),
        "entropy_share/0.2_to_0.5": (1, 8),
        "entropy_share/0.5_to_1": (2, 8),
        "entropy_share/above_1": (2, 8),
        "entropy_share/above_1_positive": (1, 2),
    }


def test_entropy_is_the_mean_over_the_kept_tokens_of_a_response():
    entropies = torch.tensor([[0.25, 0.5, 9.0], [2.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])  # means 0.375 and 2, and an empty response
    entropy = diagnostics.response_entropy(entropies, mask)
    assert entropy[:2].tolist() == [0.375, 2.0]
    assert plain(diagnostics.entropy_shares(entropy, torch.tensor([[1.0], [0.0], [1.0]]))) == {
        "entropy_share/below_0.2": (0, 2),
        "entropy_share/0.2_to_0.5": (1, 2),
        "entropy_share/0.5_to_1": (0, 2),
        "entropy_share/above_1": (1, 2),
        "entropy_share/above_1_positive": (0, 1),
    }


def everything(values: Tensor, ref_values: Tensor, advantages: Tensor, mask: Tensor) -> dict:
    negative, positive = diagnostics.signs(advantages, mask)
    rows = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    return plain(
        {
            **diagnostics.clip_shares(values, negative, positive, BOUNDS, REF_BOUNDS),
            **diagnostics.over_clipping(values, ref_values, negative, positive, REF_BOUNDS),
            **diagnostics.quantization_error(values, ref_values, values, ref_values, mask),
            **diagnostics.noise_floor(values, mask),
            **diagnostics.entropy_shares(diagnostics.response_entropy(values, mask), advantages),
            "update_ratio": diagnostics.update_ratio(values, None, rows, negative, positive, BOUNDS),
        }
    )


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e4])
def test_rubbish_in_masked_tokens_changes_nothing(rubbish):
    advantages = torch.tensor([[-1.0] * 4, [1.0] * 4])
    clean = everything(RATIO, REF_RATIO, advantages, MASK)
    dirty = [torch.where(MASK.bool(), values, rubbish) for values in (RATIO, REF_RATIO, advantages)]
    assert everything(*dirty, MASK) == clean
    pairs = {key: value for key, value in clean.items() if isinstance(value, tuple)}
    assert len(pairs) == 15
    assert all(pair[1] > 0 for key, pair in pairs.items() if key != "entropy_share/above_1_positive")
    assert clean["clip_share/lower"] == (1, 3)


def test_an_empty_set_has_denominator_zero():
    nothing = everything(RATIO, REF_RATIO, torch.tensor([-1.0, 1.0]), torch.zeros(2, 4))
    assert {key: value for key, value in nothing.items() if not key.startswith("clip_count/")} == dict.fromkeys(
        (key for key in nothing if not key.startswith("clip_count/")), (0.0, 0.0)
    )
    assert {value for key, value in nothing.items() if key.startswith("clip_count/")} == {0.0}
    one_sided = everything(RATIO, REF_RATIO, torch.tensor([1.0, 0.0]), MASK)
    assert one_sided["clip_share/lower"] == one_sided["overclip/lower"] == (0.0, 0.0)
    assert one_sided["clip_share/upper"] == (0.0, 3.0)


# -- trainer against rollout engine


def test_mismatch_by_hand():
    # w = 2, 1/2 and an unscored token; w = 1 (the last columns are masked)
    sampling = torch.tensor([[0.2, 0.4, math.nan, 0.5], [0.5, math.nan, 0.1, 0.1]]).log()
    logps = torch.tensor([[0.4, 0.2, 0.3, 0.5], [0.5, 0.9, 0.9, 0.9]]).log()
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    truncated = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 1]]).bool()
    ln2 = math.log(2)
    expected = {
        "mismatch/kl": (-ln2 + ln2 + 0, 3),
        "mismatch/k3_kl": ((1 - ln2) + (-0.5 + ln2) + 0, 3),
        "mismatch/chi2_token": (3 - 0.75 + 0, 3),
        "mismatch/ratio_raw_mean": (3.5, 3),
        "mismatch/prob_abs_diff": (0.2 + 0.2, 3),
        "mismatch/logp_diff_first_token": (ln2 + 0, 2),
        "mismatch/logp_diff_other_tokens": (ln2, 1),
        "mismatch/unscored": (1, 4),
        "mismatch/frac_truncated": (1, 3),
    }
    found = plain(diagnostics.mismatch(logps, sampling, mask, truncated))
    assert found.keys() == expected.keys()
    for key, pair in expected.items():
        assert found[key] == pytest.approx(pair, abs=1e-6), key
    assert "mismatch/frac_truncated" not in diagnostics.mismatch(logps, sampling, mask)


def test_a_broken_token_is_held_at_twenty_nats():
    logps, sampling = torch.tensor([[0.0, -200.0]]), torch.tensor([[-300.0, 0.0]])
    found = plain(diagnostics.mismatch(logps, sampling, torch.ones(1, 2)))
    assert found["mismatch/kl"] == (0.0, 2)
    assert found["mismatch/ratio_raw_mean"][0] == pytest.approx(math.exp(20))


def test_the_upper_tail_is_the_nearest_rank_and_skips_no_tokens():
    ratios = torch.arange(1.0, 201.0)[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    padded = torch.cat([torch.full((7,), math.nan), ratios])
    assert diagnostics.upper_tail(padded) == {
        "mismatch/ratio_raw_max": Max(200.0),
        "mismatch/ratio_raw_p99": Last(198.0),
    }
    assert diagnostics.upper_tail(torch.tensor([3.0]))["mismatch/ratio_raw_p99"] == Last(3.0)
    assert diagnostics.upper_tail(torch.full((3,), math.nan)) == {}
