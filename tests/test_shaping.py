"""Reward shaping: unlikeliness, DISCO, overlong completions; values by hand."""

import math

import pytest
import torch

from fgrpo_kernels import group_advantages
from fgrpo_train.shaping import disco_rewards, overlong_penalty, unlikeliness_rewards

NAN = math.nan


def test_the_likeliest_right_answer_ends_with_the_lowest_reward_of_the_right_ones():
    """Ranks over all four: -4 -> 0, -3 -> 1, -2 -> 2, -1 -> 3; penalties of 1/4 rank / 4."""
    rewards = torch.tensor([1.0, 0, 1, 1])
    logps = torch.tensor([-1.0, -2, -3, -4])
    shaped = unlikeliness_rewards(rewards, logps, group_size=4)
    assert shaped.tolist() == [1 - 3 / 16, 0, 1 - 1 / 16, 1]
    assert int(torch.where(rewards > 0, shaped, 2).argmin()) == int(logps.argmax())
    advantages = group_advantages(shaped, group_size=4, correct=rewards)
    order = advantages.advantages.argsort().tolist()
    assert order == [1, 0, 2, 3], "every right answer above the wrong one, the rarest on top"
    assert advantages.success_rate.tolist() == [0.75] * 4


def test_wrong_answers_and_unscored_ones_keep_what_they_have():
    rewards = torch.tensor([-1.0, NAN, 1, 1, 0, 0, 0, 0])
    logps = torch.tensor([-1.0, NAN, -2, -3, -1, -2, -3, -4])
    shaped = unlikeliness_rewards(rewards, logps, group_size=4, rank_penalty=0.6)
    # three scored members: ranks 2, 1, 0 of 3
    torch.testing.assert_close(
        shaped, torch.tensor([-1, NAN, 0.8, 1, 0, 0, 0, 0]), rtol=0, atol=1e-7, equal_nan=True
    )


def test_no_penalty_no_change_and_all_right_groups_differ_by_rank_alone():
    rewards, logps = torch.ones(3), torch.tensor([-3.0, -1, -2])
    assert torch.equal(unlikeliness_rewards(rewards, logps, group_size=3, rank_penalty=0), rewards)
    shaped = unlikeliness_rewards(rewards, logps, group_size=3)
    torch.testing.assert_close(shaped, 1 - torch.tensor([0.0, 2, 1]) / 12)


SHARES = {"math": 3 / 4, "arc": 1 / 12}


@pytest.mark.parametrize(
    "version,of_math,of_arc", [("v1", 0.847, 2.565), ("v2", 0.72, 6.58), ("v3", 1.33, 12)]
)
def test_domain_weights_are_those_of_the_released_code(version, of_math, of_arc):
    """Three digits given; all-right groups, so the difficulty weight is 1 / (1 + 1e-5)."""
    shaped = disco_rewards(
        torch.ones(4),
        ["math", "math", "arc", "arc"],
        group_size=2,
        domain_shares=SHARES,
        version=version,
    )
    assert shaped.tolist() == pytest.approx([of_math, of_math, of_arc, of_arc], rel=5e-3)


def test_the_difficulty_part_is_maxrl():
    """One domain of share 1 has weight 1 in v3; 1e-5 / p of the values remains: 8e-5."""
    rewards = torch.tensor([[1.0] * x + [0.0] * (8 - x) for x in range(9)]).flatten()
    shaped = disco_rewards(
        rewards, ["all"] * 72, group_size=8, domain_shares={"all": 1.0}, version="v3"
    )
    disco = group_advantages(shaped, group_size=8, estimator="dr_grpo", correct=rewards)
    maxrl = group_advantages(rewards, group_size=8, estimator="maxrl")
    torch.testing.assert_close(disco.advantages, maxrl.advantages, rtol=1e-4, atol=1e-4)
    one_right = disco.advantages[8:16].tolist()
    assert one_right == pytest.approx([7, *[-1] * 7], rel=1e-4), "q / p and -1"


def test_unscored_members_leave_discos_success_rate():
    shaped = disco_rewards(
        torch.tensor([1.0, 0, NAN, NAN]), ["a"] * 4, group_size=4, domain_shares={"a": 1.0}
    )
    expected = torch.tensor([math.log(2) / (0.5 + 1e-5), 0, NAN, NAN])
    torch.testing.assert_close(shaped, expected, equal_nan=True)


def test_overlong_penalty_is_linear_in_the_buffer():
    lengths = torch.tensor([0, 16384, 16385, 18432, 20480])
    expected = [0, 0, -1 / 4096, -0.5, -1]
    assert overlong_penalty(lengths).tolist() == pytest.approx(expected, abs=1e-7)
    small = overlong_penalty(torch.tensor([6, 7, 8]), max_length=8, buffer=2, factor=0.5)
    assert small.tolist() == [0, -0.25, -0.5]


def test_a_shaped_reward_leaves_the_success_rate_alone():
    """p comes from correctness: with the penalty the right answer is worth 0.5 and p stays 1/2."""
    rewards = torch.tensor([1.0, 0.0])
    penalty = overlong_penalty(torch.tensor([7, 8]), max_length=8, buffer=2)
    out = group_advantages(rewards + penalty, group_size=2, correct=rewards)
    assert out.success_rate.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "call,message",
    [
        (
            lambda: unlikeliness_rewards(torch.ones(4), torch.ones(3), group_size=2),
            r"mean_logps: expected \(4,\) in groups of group_size = 2, received \(3,\)",
        ),
        (
            lambda: unlikeliness_rewards(torch.ones(3), torch.ones(3), group_size=2),
            r"rewards: expected \(3,\) in groups",
        ),
        (
            lambda: unlikeliness_rewards(torch.ones(2), torch.tensor([NAN, 0]), group_size=2),
            "mean_logps: expected a number for each",
        ),
        (
            lambda: unlikeliness_rewards(
                torch.ones(2), torch.ones(2), group_size=2, rank_penalty=1
            ),
            "rank_penalty: .*received 1",
        ),
        (lambda: disco(version="v4"), "version: expected one of .*received 'v4'"),
        (lambda: disco(domains=["a", "b"]), r"domain_shares: .*'b', received None"),
        (lambda: disco(domains=["a", "c"]), "domains: expected one domain a group"),
        (lambda: disco(domains=["a"]), "domains: expected 2"),
        (lambda: disco(rewards=torch.tensor([1.0, -1])), "rewards: .*received -1"),
        (lambda: overlong_penalty(torch.ones(1), buffer=0), "buffer: .*received 0"),
        (lambda: overlong_penalty(torch.ones(1), factor=-1), "factor: .*received -1"),
        (lambda: overlong_penalty(torch.tensor([9]), max_length=8, buffer=2), "received 9"),
    ],
)
def test_errors_name_expected_and_received(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def disco(*, rewards=None, domains=("a", "a"), version="v1"):
    rewards = torch.ones(2) if rewards is None else rewards
    shares = {"a": 0.5, "c": 0.5}
    return disco_rewards(rewards, domains, group_size=2, domain_shares=shares, version=version)
