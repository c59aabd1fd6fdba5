"""Advantage estimators: one function for each, from a group's rewards to advantages.

All take `Groups` and return (B,) float64. What they return for members without a reward is ignored
by `group_advantages`, and so is what a group-relative estimator returns in a degenerate group.

With success rate p and q = 1 - p, binary rewards, a large group and on-policy data, an estimator
ascends E_x[J(p)] with J' = w(p) = A+ + |A-|:

    dr_grpo, rloo   w = 1                  J = p
    grpo            w = 1 / sqrt(p q)      J = 2 arcsin sqrt(p)
    maxrl           w = 1 / p              J = log p
    pass_at_k       w = q^(k-1) / sqrt(R (1 - R)), R = 1 - q^k      J = (2 / k) arcsin sqrt(R)
    sign            w = 2                  J = 2 p

The focal weight multiplies w by q^gamma.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from fgrpo_kernels.groups import Floats, Groups, to_float64

STD_EPSILON = 1e-4
"""Added to the standard deviation of the rewards, as the mainstream trainers do."""

SMALL_EPSILON = 1e-6
"""What the released code of NGRPO and MaxRL adds to its denominator."""


def grpo(groups: Groups, *, std: str = "unbiased") -> Tensor:
    """(r - mean) / (std + 1e-4).

    std: "unbiased" (default) divides the sum of squares by n - 1, as verl and TRL do; "population"
    by n, whose advantages are sqrt(n / (n - 1)) times as large.
    Source: GRPO 2402.03300 section 4.1.
    """
    if std not in ("unbiased", "population"):
        raise ValueError(f"std: expected 'unbiased' or 'population', received {std!r}")
    deviations = groups.deviations
    freedom = groups.count - (1.0 if std == "unbiased" else 0.0)
    variance = groups.total(deviations.square()) / freedom.clamp(min=1)
    return deviations / (variance.sqrt() + STD_EPSILON)


def dr_grpo(groups: Groups) -> Tensor:
    """r - mean. Source: Dr. GRPO 2503.20783."""
    return groups.deviations


def rloo(groups: Groups) -> Tensor:
    """r - mean of the others = (r - mean) n / (n - 1). Source: RLOO 2402.14740."""
    count = groups.count
    return groups.deviations * count / (count - 1).clamp(min=1)


def maxrl(groups: Groups) -> Tensor:
    """(r - mean) / (mean + 1e-6); needs rewards >= 0.

    Binary rewards: A+ = q / p, A- = -1. Its expectation over groups of n is the gradient of
    sum_{k < n} pass@k / k, the log-likelihood log p cut short. (The paper's estimator without the
    baseline has the n-th term too; an all-wrong group gives 0 here.) It equals the difficulty part
    of DISCO.
    Source: MaxRL 2602.02710.
    """
    _check_range(groups, "maxrl", 0, math.inf, "it divides by the mean")
    return groups.deviations / (groups.mean(groups.rewards) + SMALL_EPSILON)


def pass_at_k(groups: Groups, *, k: int) -> Tensor:
    """The advantages of the pass@k objective, computed from correctness alone.

        R = 1 - C(n_wrong, k) / C(n, k),   s = sqrt(R (1 - R))
        A+ = (1 - R) / s,   A- = (1 - R - C(n_wrong - 1, k - 1) / C(n - 1, k - 1)) / s

    n counts the scored members; the advantages of a group sum to 0; k = 1 is GRPO with the
    population's std and no epsilon. Where every subset of k holds a right answer (R = 1) they are
    0, as in a group with fewer than k scored members, whose pass@k is not defined.

    k: 1 to the number of members, required: the paper has no default.
    Raises: ValueError unless k is such a number and correctness is 0 or 1.
    Source: 2508.10751. verl's `grpo_passk` is another thing: the best sample alone, against the
        second best.
    """
    right, count = _right_or_wrong(groups, "pass_at_k"), groups.count
    largest = int(count.max()) if len(count) else k
    if not isinstance(k, Integral) or isinstance(k, bool) or not 1 <= k <= max(1, largest):
        raise ValueError(
            f"k: expected an integer from 1 to {largest}, the scored members of the largest group, "
            f"received {k!r}"
        )
    wrong = groups.total(1 - right)
    rest = torch.ones_like(count)  # C(wrong - 1, k - 1) / C(n - 1, k - 1)
    for j in range(1, k):
        rest = rest * (wrong - j).clamp(min=0) / (count - j).clamp(min=1)
    all_wrong = rest * wrong / count.clamp(min=1)
    deviation = (all_wrong * (1 - all_wrong)).sqrt()
    advantages = torch.where(right > 0, all_wrong, all_wrong - rest) / deviation
    return torch.where((deviation > 0) & (count >= k), advantages, 0.0)


def sign(groups: Groups) -> Tensor:
    """2 r - 1 for rewards in [0, 1]: against the fixed reference 1/2, not against the group.

    Not group-relative: an all-wrong group gets -1, an all-right one +1. Its expectation on binary
    rewards is 2 n / (n - 1) times that of `dr_grpo`; the variance is higher.
    Source: Gradient Starvation 2605.07689; its code and hyper-parameters were not found.
    """
    _check_range(groups, "sign", 0, 1, "its reference is 1/2")
    return 2 * groups.rewards - 1


def avspo(groups: Groups, *, scope: str = "batch") -> Tensor:
    """`grpo`, with one virtual reward where the rewards have collapsed.

    All rewards 0: a virtual 1 joins each group's mean and unbiased std; all 1: a virtual 0. The
    members then get -1 / sqrt(n + 1) or +1 / sqrt(n + 1).

    Not group-relative: where it acts, a degenerate group's advantages are not 0.
    scope: "batch" (default) acts when the rewards of the whole call are all 0 or all 1, as the
    released code does (over all ranks: a call that has one rank's rewards judges by these).
    "group" looks at each group by itself, which is what the paper describes; its stratified virtual
    rewards and adaptive threshold were not found, so this is the released code's virtual reward,
    used where the paper uses its own.
    Source: 2605.21125; its repository `hexixiang/ACR`.
    """
    if scope not in ("batch", "group"):
        raise ValueError(f"scope: expected 'batch' or 'group', received {scope!r}")

    def all_are(reward: float) -> Tensor:
        hits = groups.total((groups.rewards == reward).double()) == groups.count
        return groups.scored & (hits if scope == "group" else hits[groups.scored].all())

    failed, passed = all_are(0), all_are(1)
    virtual = failed.double()
    collapsed = _with_virtual_rewards(groups, virtual, 1, STD_EPSILON)
    ordinary = torch.where(groups.degenerate, 0.0, grpo(groups))
    return torch.where(failed | passed, collapsed, ordinary)


def ngrpo(groups: Groups, *, max_reward: float = 1.0, virtual_rewards: int = 1) -> Tensor:
    """(r - mean) / (std + 1e-6), both over the group and `virtual_rewards` rewards `max_reward`.

    In every group, with the unbiased std. A group of n wrong answers gets -1 / sqrt(n + 1) with the
    defaults, a group whose rewards all are `max_reward` exactly 0. Mixed groups are pushed down on
    the whole: their advantages sum to a negative number.

    Not group-relative: degenerate groups below `max_reward` get a negative advantage, also a group
    of one.
    Source: NGRPO 2509.18851 and its code (`add_max_reward_num` is `virtual_rewards`). Its clip is
        `PolicyLossConfig.ngrpo`.
    """
    whole = isinstance(virtual_rewards, Integral) and not isinstance(virtual_rewards, bool)
    if not whole or virtual_rewards < 1:
        raise ValueError(f"virtual_rewards: expected an integer >= 1, received {virtual_rewards!r}")
    _check_finite("max_reward", max_reward)
    virtual = torch.full_like(groups.rewards, max_reward)
    return _with_virtual_rewards(groups, virtual, virtual_rewards, SMALL_EPSILON)


def ds_grpo(
    groups: Groups, *, sequence_logps: Floats, gamma_p: float, gamma_n: float, std: str = "unbiased"
) -> Tensor:
    """`grpo` with an entropy bonus on right answers and an entropy penalty on wrong ones.

        A - gamma_p logp(y | x)   if y is correct,      A + gamma_n logp(y | x)   otherwise

    Not group-relative: the log-prob acts in degenerate groups too.
    sequence_logps: (B,) log-probs of the completions under the policy that sampled them, detached.
    Whether the authors divide them by the length was not found, nor their coefficients: so the
    caller decides, and gamma_p and gamma_n have no default. A sum over tokens grows with length;
    the mean keeps the term at the size of a token's log-prob.
    Raises: ValueError unless correctness is 0 or 1 and each scored member's log-prob is finite.
    Source: Differential Smoothing 2511.19942 eq. 6, from a reproduction; the paper's eq. 4 puts the
        base model's log-prob into the reward instead.
    """
    for name, value in (("gamma_p", gamma_p), ("gamma_n", gamma_n)):
        _check_finite(name, value)
    logps, _ = to_float64("sequence_logps", sequence_logps)
    logps = logps.to(groups.rewards.device)
    if logps.shape != groups.rewards.shape:
        raise ValueError(
            f"sequence_logps: expected shape {tuple(groups.rewards.shape)} as the rewards, "
            f"received {tuple(logps.shape)}"
        )
    if not logps[groups.scored].isfinite().all():
        raise ValueError(
            "sequence_logps: expected finite values for each member with a reward, received others"
        )
    right = _right_or_wrong(groups, "ds_grpo") > 0
    relative = torch.where(groups.degenerate, 0.0, grpo(groups, std=std))
    return relative + torch.where(right, -gamma_p * logps, gamma_n * logps)


def _with_virtual_rewards(groups: Groups, virtual: Tensor, number: int, epsilon: float) -> Tensor:
    """(r - mean) / (std + epsilon) over the group's rewards and `number` times its `virtual` (B,).

    Centred on the virtual reward: members that equal it get exactly 0 when all do.
    """
    count = groups.count + number
    rewards = torch.where(groups.scored, groups.rewards - virtual, 0.0)
    mean = groups.total(rewards) / count
    squares = groups.total((rewards - mean).square()) + number * mean.square()
    variance = squares / (count - 1).clamp(min=1)
    return (rewards - mean) / (variance.sqrt() + epsilon)


def _right_or_wrong(groups: Groups, name: str) -> Tensor:
    """(B,) 0.0 or 1.0, 0 where not scored."""
    correct = torch.where(groups.scored, groups.correct, 0.0)
    graded = (correct != 0) & (correct != 1)
    if graded.any():
        raise ValueError(
            f"estimator {name!r}: expected correctness 0 or 1, received "
            f"{correct[graded][0].item():.9g}; pass correct= with a verdict for each completion"
        )
    return correct


def _check_range(groups: Groups, name: str, lowest: float, highest: float, reason: str) -> None:
    outside = groups.scored & ((groups.rewards < lowest) | (groups.rewards > highest))
    if outside.any():
        bound = f"in [0, {highest:g}]" if highest < math.inf else ">= 0"
        raise ValueError(
            f"estimator {name!r}: expected rewards {bound}, because {reason}, received "
            f"{groups.rewards[outside][0].item():.9g}; score right answers 1 and wrong ones 0"
        )


def _check_finite(name: str, value: float) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, received {value!r}")


ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (grpo, dr_grpo, rloo, maxrl, pass_at_k, sign, avspo, ngrpo, ds_grpo)
}

NOT_GROUP_RELATIVE = frozenset({"sign", "avspo", "ngrpo", "ds_grpo"})
"""What these give in a degenerate group counts; the others give 0 there."""


def estimate(name: str, groups: Groups, params: dict[str, Any]) -> Tensor:
    """(B,) float64 advantages; 0 for members without a reward, and in degenerate groups for the
    group-relative estimators, exactly."""
    if not isinstance(name, str) or name not in ESTIMATORS:
        raise ValueError(
            f"estimator: expected one of {', '.join(map(repr, ESTIMATORS))}, received {name!r}"
        )
    signature = list(inspect.signature(ESTIMATORS[name]).parameters.values())[1:]
    accepted = [parameter.name for parameter in signature]
    unknown = [key for key in params if key not in accepted]
    if unknown:
        raise ValueError(
            f"estimator {name!r}: expected options among {accepted}, received {unknown}"
        )
    missing = [p.name for p in signature if p.default is p.empty and p.name not in params]
    if missing:
        raise ValueError(f"estimator {name!r}: expected {', '.join(missing)} to be given")
    counts = groups.scored
    if name not in NOT_GROUP_RELATIVE:
        counts = counts & ~groups.degenerate
    return torch.where(counts, ESTIMATORS[name](groups, **params), 0.0)
