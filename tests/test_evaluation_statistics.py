"""Intervals and comparisons: against enumeration, the binomial distribution and hand calculation.

Draws are seeded. Bounds on shares of draws are four standard errors of a share of that many.
"""

from itertools import combinations
from math import comb, sqrt

import numpy as np
import pytest

from fgrpo_train import evaluation_statistics
from fgrpo_train.evaluation_statistics import (
    RESAMPLES,
    bootstrap,
    compare,
    pass_at_ks,
    subsample_size,
    subsampled_means,
    two_sided_p,
)

ITERATIONS = 20_000


def four_errors(share: float, draws: int) -> float:
    return 4 * sqrt(share * (1 - share) / draws)


def test_the_bootstrap_of_zeros_and_ones_has_binomial_quantiles():
    """A resampled mean of P values, s of them 1, is Binomial(P, s / P) / P: its ends are known."""
    num_prompts, ones = 60, 15
    values = np.array([[1.0]] * ones + [[0.0]] * (num_prompts - ones))
    [estimate] = bootstrap(values)
    assert estimate.value == ones / num_prompts
    share = ones / num_prompts
    pmf = [
        comb(num_prompts, x) * share**x * (1 - share) ** (num_prompts - x)
        for x in range(num_prompts + 1)
    ]
    cdf = np.cumsum(pmf)
    slack = four_errors(0.025, RESAMPLES)

    def quantile(level):
        return int(np.searchsorted(cdf, level)) / num_prompts

    assert quantile(0.025 - slack) <= estimate.low <= quantile(0.025 + slack)
    assert quantile(0.975 - slack) <= estimate.high <= quantile(0.975 + slack)


def test_the_interval_has_the_width_of_the_standard_error():
    """2 x 1.96 standard errors for a mean of many: 5 % for the rest that is not normal, and chance.

    The end of an interval, a 2.5 % quantile of 10,000 draws, is itself off by 2.7 % of the
    standard error: sqrt(0.025 x 0.975 / 10,000) / 0.058, the density there.
    """
    values = np.random.default_rng(1).uniform(size=(400, 2))
    for column, estimate in enumerate(bootstrap(values)):
        error = values[:, column].std() / sqrt(400)
        assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * error, rel=0.05)
        assert estimate.low < estimate.value < estimate.high


def test_columns_are_resampled_together_and_blocks_do_not_matter(monkeypatch):
    """The paired bootstrap rests on it: a constant difference has no interval."""
    values = np.random.default_rng(2).uniform(size=(30, 1))
    pair = bootstrap(np.hstack([values, values + 0.25]))
    assert pair[1].low - pair[0].low == pytest.approx(0.25)
    [difference] = bootstrap(np.full((30, 1), 0.25))
    assert (difference.low, difference.high) == (0.25, 0.25)
    monkeypatch.setattr(evaluation_statistics, "ELEMENTS_PER_BLOCK", 1000)
    assert bootstrap(np.hstack([values, values + 0.25])) == pair


def test_subsampling_draws_every_subset_equally_often():
    """n = 6 completions, 2 right, m = 3 kept, k = 2: each of the 20 subsets, counted out."""
    right = [True, True, False, False, False, False]
    outcomes = [pass_at_ks(3, np.array([sum(kept)]), [2])[0, 0] for kept in combinations(right, 3)]
    drawn = subsampled_means(
        6, np.array([2]), [2], subsample=3, iterations=ITERATIONS, rng=np.random.default_rng(0)
    )[:, 0]
    for outcome in set(outcomes):
        share = outcomes.count(outcome) / 20
        assert np.isclose(drawn, outcome).mean() == pytest.approx(
            share, abs=four_errors(share, ITERATIONS)
        )
    # Exactly, not only in the draws: the mean over the subsets is the pass@2 of all six.
    assert np.mean(outcomes) == pytest.approx(pass_at_ks(6, np.array([2]), [2])[0, 0], abs=1e-15)


def test_subsampled_means_are_means_over_prompts_around_the_whole():
    """The mean over 20,000 subsamples, within four of its own standard errors."""
    correct, ks = np.array([0, 3, 17, 40, 64]), [1, 4, 16]
    drawn = subsampled_means(
        64, correct, ks, subsample=16, iterations=ITERATIONS, rng=np.random.default_rng(0)
    )
    whole = pass_at_ks(64, correct, ks).mean(0)
    assert drawn.shape == (ITERATIONS, 3)
    assert (abs(drawn.mean(0) - whole) < 4 * drawn.std(0) / sqrt(ITERATIONS)).all()


def test_a_comparison_by_hand():
    """n = 4, m = 1, k = 1: one completion each, right with probability 1/4 and 3/4.

    The difference is +1, 0, -1 with probability 9, 6, 1 of 16.
    """
    [found] = compare(4, np.array([1]), np.array([3]), [1], iterations=ITERATIONS)
    assert found.over_prompts.value == 0.5
    assert found.sign_share == pytest.approx(9 / 16, abs=four_errors(9 / 16, ITERATIONS))
    assert found.p == pytest.approx(2 * 7 / 16, abs=2 * four_errors(7 / 16, ITERATIONS) + 1e-4)
    assert (found.over_samples.low, found.over_samples.high) == (-1.0, 1.0)


def test_a_clear_difference_and_none():
    prompts = np.full(20, 64)
    [clear] = compare(64, 0 * prompts, prompts, [1], iterations=999)
    assert (clear.over_prompts.low, clear.over_samples.low, clear.sign_share) == (1.0, 1.0, 1.0)
    assert clear.p == 2 / 1000
    [none] = compare(64, prompts, prompts, [1], iterations=999)
    assert (none.over_prompts.value, none.p) == (0.0, 1.0)
    # Equal counts between 0 and n: above and below 0 equally often, so twice a share near 1/2.
    [equal] = compare(64, prompts // 2, prompts // 2, [1], iterations=ITERATIONS)
    assert equal.p >= 1 - 2 * four_errors(0.5, ITERATIONS)


def test_the_order_gives_the_sign_and_prompts_are_paired():
    first, second = np.array([10, 20, 60]), np.array([12, 22, 62])
    ahead = compare(64, first, second, [1, 2], iterations=999)
    behind = compare(64, second, first, [1, 2], iterations=999)
    assert ahead[0].over_prompts.low == ahead[0].over_prompts.high == pytest.approx(2 / 64)
    for one, other in zip(ahead, behind, strict=True):
        assert one.over_prompts.value == pytest.approx(-other.over_prompts.value)


def test_k_beyond_the_subsample_has_no_subsampling_result():
    found = compare(64, np.array([1, 2]), np.array([3, 4]), [16, 32], iterations=99)
    assert found[0].p is not None and found[0].over_samples is not None
    assert found[1].p is None and found[1].over_samples is None and found[1].sign_share is None
    assert subsample_size(1024) == 256, "as in the paper"


def test_p_by_hand():
    assert two_sided_p(np.array([1.0, 2.0, -1.0])) == 2 * 2 / 4
    assert two_sided_p(np.array([1.0, 2.0, 3.0])) == 2 * 1 / 4
    assert two_sided_p(np.array([0.0, 0.0, 0.0])) == 1.0


def test_bad_arguments_are_refused():
    rng = np.random.default_rng(0)
    for ks, subsample in (([8], 4), ([1], 17), ([0], 4)):
        with pytest.raises(ValueError, match="expected 1 <= k <= subsample <= 16"):
            subsampled_means(16, np.array([1]), ks, subsample=subsample, iterations=1, rng=rng)
    with pytest.raises(ValueError, match="same prompts"):
        compare(16, np.array([1, 2]), np.array([1]), [1])
    with pytest.raises(ValueError, match="P >= 1"):
        bootstrap(np.zeros((0, 2)))
    with pytest.raises(ValueError, match="k: expected"):
        pass_at_ks(4, np.array([1]), [8])
