"""The papers' advantage estimators: hand-computed values, exact expectations, and their limits.

1e-6 absolute where nothing else is said: a few roundings of float32 results of size 1.
"""

import math

import pytest
import torch

from fgrpo_kernels import advantage_collapse_rate, focal_weight, group_advantages
from fgrpo_kernels.advantages import matched_learning_rate_factor

GROUP_RELATIVE = [("maxrl", {}), ("pass_at_k", {"k": 2})]


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol
    )


def advantages(rewards, estimator, *, group_size=None, **options):
    size = group_size or len(rewards)
    return group_advantages(rewards, group_size=size, estimator=estimator, **options).advantages


def binary_group(correct, size):
    rewards = torch.zeros(size, dtype=torch.float64)
    rewards[:correct] = 1
    return rewards


def test_maxrl_divides_by_the_mean():
    # mean 1/4: A+ = q / p = 3, A- = -1, each less 1e-6 / mean = 4e-6 of itself
    close(advantages([1, 0, 0, 0], "maxrl"), [3, -1, -1, -1], atol=2e-5)


def test_pass_at_k_by_hand():
    # n = 4, 3 wrong, k = 2: R = 1 - 3/6, s = 1/2; A- = (1/2 - C(2,1)/C(3,1)) / s = -1/3
    close(advantages([1, 0, 0, 0], "pass_at_k", k=2), [1, -1 / 3, -1 / 3, -1 / 3])
    # 1 wrong: every pair holds a right answer, R = 1: nothing to gain
    assert advantages([1, 1, 1, 0], "pass_at_k", k=2).tolist() == [0, 0, 0, 0]
    # k = 1: population std, no epsilon
    close(advantages([1, 0, 0, 0], "pass_at_k", k=1), [3**0.5, *[-(3**-0.5)] * 3])


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_pass_at_k_agrees_with_its_definition_and_sums_to_zero(k):
    """Against binomials; sums of 8 float64 terms of size up to 2.6: below 1e-14."""
    for correct in range(1, 8):
        values = advantages(binary_group(correct, 8), "pass_at_k", k=k)
        wrong = 8 - correct
        rate = 1 - math.comb(wrong, k) / math.comb(8, k)
        deviation = math.sqrt(rate * (1 - rate))
        if deviation == 0:
            assert not values.any()
            continue
        share = math.comb(wrong - 1, k - 1) / math.comb(7, k - 1)
        expected = [(1 - rate) / deviation] * correct + [(1 - rate - share) / deviation] * wrong
        close(values, expected, atol=1e-12)
        assert abs(float(values.sum())) < 1e-14


def test_pass_at_k_uses_correctness_and_the_scored_members():
    shaped = advantages([0.9, -0.3, None, -0.1, 0.0], "pass_at_k", k=2, correct=[1, 0, None, 0, 0])
    close(shaped, [1, -1 / 3, 0, -1 / 3, -1 / 3])
    # a group left with fewer than k scored members has no pass@k
    out = advantages([1, None, None, 1, 0, 0], "pass_at_k", group_size=3, k=2)
    close(out, [0, 0, 0, *advantages([1, 0, 0], "pass_at_k", k=2).tolist()])


def test_sign_is_the_same_in_every_group():
    rewards = [1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert advantages(rewards, "sign", group_size=3).tolist() == [2 * r - 1 for r in rewards]
    assert advantages([1, None, 0.25], "sign").tolist() == [1, 0, -0.5]


def test_ngrpo_adds_the_maximal_reward_to_every_group():
    # [1, 0, 0, 0] and 1: mean 2/5, unbiased variance (2 * 0.36 + 3 * 0.16) / 4 = 0.3
    std = math.sqrt(0.3) + 1e-6
    values = advantages([1, 0, 0, 0], "ngrpo")
    close(values, [0.6 / std, *[-0.4 / std] * 3])
    assert values.sum() < 0, "an NGRPO group is pushed down on the whole"
    # two virtual rewards of 2: mean 5/6, squares 1/36 + 3 * 25/36 + 2 * 49/36 = 174/36
    std = math.sqrt(174 / 36 / 5) + 1e-6
    values = advantages([1, 0, 0, 0], "ngrpo", virtual_rewards=2, max_reward=2)
    close(values, [1 / 6 / std, *[-5 / 6 / std] * 3])


@pytest.mark.parametrize("size", [1, 4, 8])
def test_all_wrong_groups_get_minus_one_over_root_of_g_plus_one(size):
    """1e-4 / std takes at most 1e-4 sqrt(G + 1) = 3e-4 of the value off AVSPO's."""
    expected = -1 / math.sqrt(size + 1)
    for estimator, epsilon in (("ngrpo", 1e-6), ("avspo", 1e-4)):
        value = advantages([0.0] * size, estimator)[0].item()
        assert value == pytest.approx(expected, rel=1.1 * epsilon * math.sqrt(size + 1))
    value = advantages([1.0] * size, "avspo")[0].item()
    assert value == pytest.approx(-expected, rel=4e-4), "and all-right groups the opposite"


def test_ngrpo_leaves_all_correct_groups_at_exactly_zero():
    assert advantages([1.0] * 8, "ngrpo").tolist() == [0] * 8
    third = torch.full((10,), 0.3)
    assert not advantages(third, "ngrpo", max_reward=float(third[0])).any()


def test_avspo_acts_on_the_whole_batch_as_released_or_on_each_group():
    rewards = [0, 0, 0, 1, 0, 0, 1, 1, 1]
    grpo = advantages(rewards, "grpo", group_size=3)
    assert torch.equal(advantages(rewards, "avspo", group_size=3), grpo)
    # 3 wrong and a virtual 1: mean 1/4, unbiased variance 1/4
    low = -0.25 / (0.5 + 1e-4)
    by_group = advantages(rewards, "avspo", group_size=3, scope="group")
    close(by_group, [*[low] * 3, *grpo[3:6].tolist(), *[-low] * 3])
    close(advantages([0, 0, None, 0] * 2, "avspo", group_size=4), [low, low, 0, low] * 2)


def test_avspo_leaves_equal_rewards_that_are_neither_0_nor_1_alone():
    """The mean of ten fp32 0.3 differs from 0.3 by rounding."""
    assert not advantages(torch.full((10,), 0.3), "avspo").any()


def test_ds_grpo_rewards_rare_right_answers_and_punishes_rare_wrong_ones():
    logps = [-1.0, -2.0, -3.0, -4.0]
    values = advantages(
        [1, 0, 0, 1], "ds_grpo", sequence_logps=logps, gamma_p=0.1, gamma_n=0.01
    ).double()
    base = 0.8658754
    close(values, [base + 0.1, -base - 0.02, -base - 0.03, base + 0.4])
    degenerate = advantages([0, 0], "ds_grpo", sequence_logps=[-1, -3], gamma_p=0.1, gamma_n=0.01)
    close(degenerate, [-0.01, -0.03])
    unscored = advantages(
        [1, None, 0], "ds_grpo", sequence_logps=[-1, None, -1], gamma_p=0, gamma_n=0
    )
    assert torch.equal(unscored, advantages([1, None, 0], "grpo"))


@pytest.mark.parametrize("estimator,options", GROUP_RELATIVE)
def test_group_relative_estimators_give_exactly_zero_in_degenerate_groups(estimator, options):
    out = group_advantages([0, 0, 0, 1, 1, 1], group_size=3, estimator=estimator, **options)
    assert out.degenerate.all() and out.advantages.tolist() == [0] * 6
    assert out.success_rate.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("estimator", ["sign", "ngrpo", "avspo"])
def test_the_others_do_not_and_still_report_the_group_as_degenerate(estimator):
    out = group_advantages([0.0, 0.0, 0.0], group_size=3, estimator=estimator)
    assert out.degenerate.all() and (out.advantages < 0).all()
    assert out.success_rate.tolist() == [0, 0, 0], "the virtual reward is not a success"


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("p", [0.2, 0.7])
def test_expected_gradients_over_all_outcomes_of_a_group(size, p):
    """Bernoulli policy with logit z: d log pi / dz is q for a right answer, -p for a wrong one.

    E[mean A score]: dr_grpo (n - 1) / n pq, sign 2 pq, rloo pq, maxrl q - q^n, which is pq times
    the sum of q^(k-1) over k < n. Float64; maxrl's epsilon takes 1e-6 n off.
    """
    q = 1 - p

    def expected(estimator):
        total = 0.0
        for correct in range(size + 1):
            a = advantages(binary_group(correct, size), estimator)
            score = binary_group(correct, size) - p
            weight = math.comb(size, correct) * p**correct * q ** (size - correct)
            total += weight * float((a * score).mean())
        return total

    assert expected("dr_grpo") == pytest.approx((size - 1) / size * p * q, rel=1e-12)
    assert expected("rloo") == pytest.approx(p * q, rel=1e-12)
    assert expected("sign") == pytest.approx(2 * p * q, rel=1e-12)
    assert expected("maxrl") == pytest.approx(q - q**size, rel=2e-6 * size)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_weight_of_the_implied_objective_in_a_large_group(p):
    """w(p) = A+ + |A-| at n = 100,000; 1e-4 / std <= 3.4e-4 and 1 / n remain of the limits."""
    q, n, k = 1 - p, 100_000, 4
    rewards = binary_group(round(p * n), n)

    def weight(estimator, gamma=0.0, **options):
        out = group_advantages(rewards, group_size=n, estimator=estimator, **options)
        focal = focal_weight(out.success_rate, gamma) * out.advantages
        return float(focal[0] - focal[-1])

    solved = 1 - q**k
    pairs = [
        (weight("dr_grpo"), 1),
        (weight("rloo"), 1),
        (weight("grpo"), (p * q) ** -0.5),
        (weight("grpo", 0.5), p**-0.5),
        (weight("grpo", 1.0), (q / p) ** 0.5),
        (weight("dr_grpo", 1.0), q),
        (weight("dr_grpo", 3.0), q**3),
        (weight("maxrl"), 1 / p),
        (weight("pass_at_k", k=k), q ** (k - 1) / math.sqrt(solved * (1 - solved))),
        (weight("sign"), 2),
    ]
    for actual, limit in pairs:
        assert actual == pytest.approx(limit, rel=4e-4)


def test_kept_members_set_the_advantages_and_all_set_the_success_rate():
    rewards = [1, 0, 0, 0, 0, 0, 0, 0]
    kept = torch.tensor([True, True] + [False] * 6)
    out = group_advantages(rewards, group_size=8, kept=kept)
    close(out.advantages, [*(0.5 / (0.5**0.5 + 1e-4) * s for s in (1, -1)), *[0] * 6])
    close(out.success_rate, [1 / 8] * 8)
    assert not out.degenerate.any()
    for wrong in (torch.ones(3, dtype=torch.bool), torch.ones(8), [True] * 8):
        with pytest.raises(ValueError, match=r"kept: expected \(8,\) bool tensor, received"):
            group_advantages(rewards, group_size=8, kept=wrong)


def test_advantage_collapse_rate_counts_groups_without_signal():
    rewards = [0, 0, 0, 1, 1, 1, 0.3, 0.3, None, None, 1, None]
    assert advantage_collapse_rate(rewards, group_size=2) == 5 / 6
    ids = [5, 5, 7, 7, 5]
    assert advantage_collapse_rate([0, 0, 1, 1, 1], group_ids=ids) == 1 / 2
    assert advantage_collapse_rate(torch.full((8,), 0.2), group_size=8) == 1
    assert advantage_collapse_rate([], group_size=8) == 0


def test_matched_learning_rate_factors():
    """The values of F-GRPO's control, to the digits given; and the integrals they stand for."""
    for gamma, expected in ((0, 1), (0.5, 0.679), (1, 0.5), (2, 0.3125)):
        factor = matched_learning_rate_factor(gamma)
        assert factor == pytest.approx(expected, abs=5e-4)
        p = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
        mass = (p * (1 - p)).sqrt()
        integral = float(((1 - p) ** gamma * mass).sum() / mass.sum())
        assert factor == pytest.approx(integral, abs=1e-6)  # the midpoint rule's error
    with pytest.raises(ValueError, match="gamma: expected"):
        matched_learning_rate_factor(-1)


@pytest.mark.parametrize(
    "rewards,options,message",
    [
        ([1, -1], {"estimator": "sign"}, r"'sign': expected rewards in \[0, 1\].*received -1"),
        ([1, -1], {"estimator": "maxrl"}, "'maxrl': expected rewards >= 0.*received -1"),
        ([1, 0], {"estimator": "pass_at_k"}, "'pass_at_k': expected k to be given"),
        (
            [1, 0],
            {"estimator": "pass_at_k", "k": 3},
            "k: expected an integer from 1 to 2.*received 3",
        ),
        ([1, 0], {"estimator": "pass_at_k", "k": 1.5}, "k: expected an integer.*received 1.5"),
        ([1, 0.5], {"estimator": "pass_at_k", "k": 1}, "expected correctness 0 or 1, received 0.5"),
        ([1, 0], {"estimator": "avspo", "scope": "all"}, "scope: expected 'batch' or 'group'"),
        ([1, 0], {"estimator": "ngrpo", "virtual_rewards": 0}, "virtual_rewards: .*received 0"),
        ([1, 0], {"estimator": "ngrpo", "max_reward": math.inf}, "max_reward: .*received inf"),
        ([1, 0], {"estimator": "ds_grpo"}, "expected sequence_logps, gamma_p, gamma_n to be given"),
        (
            [1, 0],
            {"estimator": "ds_grpo", "sequence_logps": [-1], "gamma_p": 1, "gamma_n": 1},
            r"sequence_logps: expected shape \(2,\).*received \(1,\)",
        ),
        (
            [1, 0],
            {"estimator": "ds_grpo", "sequence_logps": [-1, None], "gamma_p": 1, "gamma_n": 1},
            "sequence_logps: expected finite values",
        ),
    ],
)
def test_errors_name_expected_and_received(rewards, options, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, group_size=2, **options)
