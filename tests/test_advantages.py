"""Group advantages, success rates and the focal weight: hand-computed values.

The tolerance is 1e-6 absolute: a few roundings of float32 results of size 1. Where four digits are
quoted it is 5e-5, half a unit of the last.
"""

import math

import pytest
import torch

from fgrpo_kernels import focal_weight, group_advantages

NAN = math.nan


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol
    )


def test_grpo_uses_the_unbiased_std_and_epsilon_1e_4():
    close(
        group_advantages([1, 0, 0, 1], group_size=4).advantages,
        [0.8658754, -0.8658754, -0.8658754, 0.8658754],
    )
    close(
        group_advantages([1, 0, 0, 0], group_size=4).advantages,
        [1.4997, -0.4999, -0.4999, -0.4999],
        atol=5e-5,
    )


def test_population_std_on_request():
    # mean 1/4, population std sqrt(3)/4: (3/4) / (0.4330127 + 1e-4) and (-1/4) / the same
    out = group_advantages([1, 0, 0, 0], group_size=4, std="population")
    close(out.advantages, [1.7316510, -0.5772170, -0.5772170, -0.5772170])


@pytest.mark.parametrize("count,value", [(8, 0.2), (10, 0.3)])
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_are_degenerate_and_exactly_zero(count, value, estimator):
    # in fp32 the mean of these differs from the value by rounding, which a bare std would blow up
    rewards = torch.full((count,), value)
    out = group_advantages(rewards, group_size=count, estimator=estimator)
    assert out.degenerate.all()
    assert (out.advantages == 0).all()
    close(out.success_rate, [value] * count)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_is_degenerate(estimator):
    out = group_advantages([1.0, 0.0], group_size=1, estimator=estimator)
    assert out.advantages.tolist() == [0, 0]
    assert out.degenerate.tolist() == [True, True]
    assert out.success_rate.tolist() == [1, 0]


@pytest.mark.parametrize("rewards", [[1, None, 0, 1], torch.tensor([1, NAN, 0, 1])])
def test_unscored_members_leave_the_statistics(rewards):
    out = group_advantages(rewards, group_size=4)
    close(out.advantages, [0.5772502, 0.0, -1.1545006, 0.5772502])
    close(out.success_rate, [2 / 3] * 4)
    assert not out.degenerate.any()


def test_a_group_with_one_scored_member_or_none():
    out = group_advantages([1, None, None, None], group_ids=["a", "a", "b", "b"])
    assert out.advantages.tolist() == [0, 0, 0, 0]
    assert out.degenerate.all()
    assert out.success_rate.tolist() == [1, 1, 0, 0]


def test_dr_grpo_subtracts_the_mean():
    out = group_advantages([1, 0, 0, 0, 1, 1, 0, 0], group_size=4, estimator="dr_grpo")
    close(out.advantages, [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])


def test_rloo_subtracts_the_mean_of_the_others():
    out = group_advantages([3.0, 1.0, 2.0], group_size=3, estimator="rloo", correct=[1, 0, 0])
    close(out.advantages, [1.5, -1.5, 0.0])
    out = group_advantages([1, None, 0, 1], group_size=4, estimator="rloo")
    close(out.advantages, [0.5, 0.0, -1.0, 0.5])


# N = 8, X correct: (X, population A+, A-, focal A+, focal A-), three decimals
POPULATION_TABLE = [
    (1, 2.646, -0.378, 2.475, -0.354),
    (2, 1.732, -0.577, 1.500, -0.500),
    (3, 1.291, -0.775, 1.021, -0.612),
    (4, 1.000, -1.000, 0.707, -0.707),
    (5, 0.775, -1.291, 0.474, -0.791),
    (6, 0.577, -1.732, 0.289, -0.866),
    (7, 0.378, -2.646, 0.134, -0.935),
]


@pytest.mark.parametrize(
    "correct,positive,negative,focal_positive,focal_negative", POPULATION_TABLE
)
def test_population_advantages_of_a_group_of_eight(
    correct, positive, negative, focal_positive, focal_negative
):
    rewards = [1.0] * correct + [0.0] * (8 - correct)
    out = group_advantages(rewards, group_size=8, std="population")
    focal = focal_weight(out.success_rate, 0.5) * out.advantages
    # the table has no epsilon, which takes 1e-4 / std <= 3.1e-4 off each value, and three decimals
    for actual, expected in (
        (out.advantages[0], positive),
        (out.advantages[-1], negative),
        (focal[0], focal_positive),
        (focal[-1], focal_negative),
    ):
        assert abs(actual.item() - expected) <= 5e-4 + 3.1e-4 * abs(expected)


# N = 8, X correct, unbiased std, epsilon 1e-4, gamma 0.5: (X, focal A+, focal A-)
FOCAL_TABLE = [
    (1, 2.3144, -0.3306),
    (2, 1.4028, -0.4676),
    (3, 0.9545, -0.5727),
    (4, 0.6613, -0.6613),
    (5, 0.4436, -0.7394),
    (6, 0.2700, -0.8099),
    (7, 0.1250, -0.8748),
]


@pytest.mark.parametrize("correct,positive,negative", FOCAL_TABLE)
def test_focal_advantages_of_a_group_of_eight(correct, positive, negative):
    rewards = [0.0] * (8 - correct) + [1.0] * correct
    out = group_advantages(rewards, group_size=8)
    close(out.success_rate, [correct / 8] * 8)
    focal = focal_weight(out.success_rate, 0.5) * out.advantages
    close(focal, [negative] * (8 - correct) + [positive] * correct, atol=5e-5)


def test_focal_mass_of_a_prompt_peaks_where_the_paper_says():
    # m = p A+ focal is largest at p = 1 / (2 (1 + gamma)): 1/2, 1/3, 1/4, 1/6
    group = 120
    for gamma, peak in ((0, 60), (0.5, 40), (1, 30), (2, 20)):
        mass = []
        for correct in range(1, group):
            rewards = torch.zeros(group, dtype=torch.float64)
            rewards[:correct] = 1
            out = group_advantages(rewards, group_size=group, std="population")
            mass.append(out.advantages[0] * focal_weight(out.success_rate[0], gamma) * correct)
        assert 1 + int(torch.stack(mass).argmax()) == peak


def test_members_of_a_group_need_not_be_neighbours():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    ids = ["x", "y", "y", "x", "x", "y", "x"]
    out = group_advantages(rewards, group_ids=ids)
    for name in ("x", "y"):
        rows = [i for i, id_ in enumerate(ids) if id_ == name]
        alone = group_advantages(rewards[rows], group_size=len(rows))
        # same sums, perhaps in another order: float64 inside, so equal after rounding to float32
        assert torch.equal(out.advantages[rows], alone.advantages)
        assert torch.equal(out.success_rate[rows], alone.success_rate)
    tensor_ids = torch.tensor([7, -3, -3, 7, 7, -3, 7])
    assert torch.equal(out.advantages, group_advantages(rewards, group_ids=tensor_ids).advantages)


def test_large_offset_keeps_the_advantages():
    # two-pass statistics: E[r^2] - E[r]^2 would lose everything at 1e8
    rewards = torch.tensor([1, 0, 0, 1], dtype=torch.float64)
    out = group_advantages(rewards + 1e8, group_size=4)
    close(out.advantages, [0.8658754, -0.8658754, -0.8658754, 0.8658754])


def test_advantages_of_a_group_sum_to_zero():
    rewards = torch.rand(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for estimator in ("grpo", "dr_grpo", "rloo"):
        advantages = group_advantages(rewards, group_size=8, estimator=estimator).advantages
        # 8 float64 terms of size 1: a few 1e-16 each
        assert advantages.view(8, 8).sum(1).abs().max() < 1e-14


@pytest.mark.parametrize(
    "rewards,correct,expected",
    [
        pytest.param([0.3, -1.0, 2.0, 0.1], [True, False, True, True], 0.75, id="given"),
        pytest.param([1, 0, 1, 1], [0, 0, 0, 1], 0.25, id="given-beats-binary-rewards"),
        pytest.param([0.3, -1.0, None, 0.1], [1.0, 0.5, None, 0.0], 0.5, id="given-graded"),
        pytest.param([1, 0, 1, 1], None, 0.75, id="binary"),
        pytest.param([0.1, 1.0, 0.5, 0.0], None, 0.4, id="graded"),
        pytest.param([0.1, 1.0, 0.1, 0.1], None, 0.325, id="two-values-in-0-1-are-graded"),
        pytest.param([-1, 1, 1, -1], None, 0.5, id="two-values"),
        pytest.param([-1, None, 1, 1], None, 2 / 3, id="two-values-and-unscored"),
        pytest.param([1.5, 2.5, 1.5, 1.5], None, 0.25, id="two-values-any"),
    ],
)
def test_success_rate_comes_from_correctness(rewards, correct, expected):
    out = group_advantages(rewards, group_size=4, correct=correct)
    close(out.success_rate, [expected] * 4)


def test_two_values_are_counted_over_the_whole_batch():
    # one group alone is degenerate; the other tells that 1 is the correct value
    out = group_advantages([-1, -1, 1, -1], group_size=2)
    assert out.success_rate.tolist() == [0, 0, 0.5, 0.5]
    assert out.degenerate.tolist() == [True, True, False, False]


@pytest.mark.parametrize("rewards", [[0.0, 1.0, 2.0, 0.0], [-1.0, -1.0, -1.0, -1.0]])
def test_unclear_correctness_asks_for_it(rewards):
    with pytest.raises(ValueError, match=r"correct: expected.*received"):
        group_advantages(rewards, group_size=2)


def test_dtypes_and_gradients():
    for dtype, expected in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
    ):
        out = group_advantages(torch.tensor([1, 0, 0, 1]).to(dtype), group_size=4)
        assert out.advantages.dtype == out.success_rate.dtype == expected
        close(out.advantages, [0.8658754, -0.8658754, -0.8658754, 0.8658754])
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    assert not group_advantages(rewards, group_size=2).advantages.requires_grad


def test_an_empty_batch_gives_empty_results():
    for groups in ({"group_size": 4}, {"group_ids": []}):
        out = group_advantages([], **groups)
        assert out.advantages.shape == out.success_rate.shape == out.degenerate.shape == (0,)


@pytest.mark.parametrize(
    "kwargs,message",
    [
        ({"group_size": 3}, "group_size: expected a divisor of the 4 rewards, received 3"),
        ({"group_size": 0}, "group_size: .*received 0"),
        ({"group_size": 2.0}, "group_size: .*received 2.0"),
        ({"group_size": True}, "group_size: .*received True"),
        ({}, "exactly one of group_size and group_ids, received group_size=None"),
        ({"group_size": 2, "group_ids": [0, 0, 1, 1]}, "exactly one of.*received group_size=2"),
        ({"group_ids": [0, 1]}, r"group_ids: expected shape \(4,\).*received \(2,\)"),
        ({"group_ids": torch.zeros(4, 1)}, r"group_ids: expected shape \(4,\).*received \(4, 1\)"),
        (
            {"group_size": 4, "estimator": "gae"},
            "estimator: expected one of 'grpo', 'dr_grpo', 'rloo', .*, received 'gae'",
        ),
        ({"group_size": 4, "std": "sample"}, "std: expected 'unbiased' or 'population', received"),
        (
            {"group_size": 4, "eps": 0.1},
            r"'grpo': expected options among \['std'\], received \['eps'\]",
        ),
        (
            {"group_size": 4, "estimator": "rloo", "std": "unbiased"},
            r"'rloo': expected options among \[\], received \['std'\]",
        ),
        ({"group_size": 4, "correct": [1, 0]}, r"correct: expected shape \(4,\).*received \(2,\)"),
        ({"group_size": 4, "correct": [1, 0, 2, 0]}, r"correct: expected.*received 2"),
        ({"group_size": 4, "correct": [1, 0, None, 0]}, r"correct: expected.*received nan"),
    ],
)
def test_errors_name_expected_and_received(kwargs, message):
    with pytest.raises(ValueError, match=message):
        group_advantages([1.0, 0.0, 0.0, 1.0], **kwargs)


@pytest.mark.parametrize(
    "rewards,message",
    [
        (torch.ones(2, 2), r"rewards: expected \(B,\) numbers, received \(2, 2\)"),
        (["a", 1.0], r"rewards: expected \(B,\) floats or None, received"),
        ([math.inf, 1.0], "rewards: expected finite values"),
    ],
)
def test_bad_rewards_are_named(rewards, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, group_size=2)


def test_focal_weight_values():
    rate = torch.tensor([0.0, 0.25, 0.75, 1.0])
    close(focal_weight(rate, 0.5), [1.0, 0.8660254, 0.5, 0.0])
    close(focal_weight(rate, 2), [1.0, 0.5625, 0.0625, 0.0])


def test_focal_weight_at_the_edges():
    assert focal_weight(torch.tensor([0.0, 0.5, 1.0]), 0).tolist() == [1, 1, 1]  # 0 ** 0 = 1
    for gamma in (0.5, 1.0, 2.0):
        assert focal_weight(torch.tensor([1.0]), gamma).tolist() == [0]
    off_by_rounding = torch.tensor([1 + 1e-7, -1e-7, 1 + 1e-4, -1e-4], dtype=torch.float64)
    assert focal_weight(off_by_rounding, 0.5).tolist() == [0, 1, 0, 1]


def test_focal_weight_is_detached():
    rate = torch.tensor([0.5], requires_grad=True)
    assert not focal_weight(rate, 0.5).requires_grad


@pytest.mark.parametrize("rate", [1.001, -0.001, NAN, math.inf])
def test_success_rate_outside_its_range_is_an_error(rate):
    with pytest.raises(ValueError, match=r"success_rate: expected values in \[0, 1\], received"):
        focal_weight(torch.tensor([0.5, rate]), 0.5)


@pytest.mark.parametrize("gamma", [-0.5, NAN, math.inf])
def test_gamma_is_checked(gamma):
    with pytest.raises(ValueError, match=f"gamma: expected a finite number >= 0, received {gamma}"):
        focal_weight(torch.tensor([0.5]), gamma)
