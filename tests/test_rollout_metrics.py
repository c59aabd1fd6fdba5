"""The raw ratio between trainer and sampler, by hand."""

import math

import pytest
import torch

from fgrpo_train.rollout_metrics import RatioSums, effective_sample_share, ratio_sums

OLD = torch.tensor([[0.0, math.log(2.0)], [math.log(3.0), math.nan]]) - 1.0
ROLLOUT = torch.full((2, 2), -1.0)
MASK = torch.tensor([[True, True], [True, False]])


def test_sums_of_three_ratios():
    """w = 1, 2, 3; float32 log-probs: 1e-6. What is masked does not count, even if it is NaN."""
    sums = ratio_sums(OLD, ROLLOUT, MASK)
    assert (sums.tokens, sums.ratio, sums.ratio_squared, sums.largest) == pytest.approx(
        (3.0, 6.0, 14.0, 3.0), rel=1e-6
    )
    # (1 + 2 + 3)^2 / (3 * (1 + 4 + 9))
    share = effective_sample_share(sums.tokens, sums.ratio, sums.ratio_squared)
    assert share == pytest.approx(36 / 42, rel=1e-6)


def test_parts_add_up():
    parts = [ratio_sums(OLD[i : i + 1], ROLLOUT[i : i + 1], MASK[i : i + 1]) for i in range(2)]
    assert RatioSums.total(parts) == ratio_sums(OLD, ROLLOUT, MASK)


@pytest.mark.parametrize(
    ("ratio", "expected"), [([1.0] * 8, 1.0), ([1e8] + [0.0] * 7, 1 / 8), ([5.0] * 3, 1.0)]
)
def test_the_effective_share_is_one_for_equal_weights_and_one_nth_for_a_single_one(ratio, expected):
    old = torch.tensor([ratio], dtype=torch.float64).log()
    sums = ratio_sums(old, torch.zeros_like(old), torch.ones_like(old, dtype=torch.bool))
    share = effective_sample_share(sums.tokens, sums.ratio, sums.ratio_squared)
    assert share == pytest.approx(expected, rel=1e-6)


def test_nothing_and_the_absurd():
    empty = ratio_sums(OLD, ROLLOUT, torch.zeros_like(MASK))
    assert empty == RatioSums(0.0, 0.0, 0.0, 0.0)
    assert effective_sample_share(empty.tokens, empty.ratio, empty.ratio_squared) is None
    far = ratio_sums(torch.zeros(1, 1), torch.full((1, 1), -1e4), torch.ones(1, 1).bool())
    assert far.largest == pytest.approx(math.exp(20.0))
