"""From the rewards of a group to advantages, and from its success rate to the focal weight.

A group is the G completions sampled for one prompt. Everything here is one number per completion,
so it is computed once per batch, in float64, on the device of the rewards.

Dimensions: B completions, G members of a group.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from fgrpo_kernels.estimators import estimate
from fgrpo_kernels.groups import Floats, Groups, correctness, group_index, read_rewards

SUCCESS_RATE_SLACK = 1e-4
"""A success rate this far outside [0, 1] is rounding and is clamped; farther is an error."""


@dataclass(frozen=True)
class GroupAdvantages:
    """What `group_advantages` found, each of shape (B,) on the device of the rewards."""

    advantages: Tensor
    """(B,) float; 0 for members without a reward, and exactly 0 in degenerate groups unless the
    estimator is "sign", "avspo", "ngrpo" or "ds_grpo"."""
    success_rate: Tensor
    """(B,) float in [0, 1]: share of correct members of the group among its scored ones; 0 for a
    group in which nothing was scored."""
    degenerate: Tensor
    """(B,) bool: the group has fewer than two distinct scored rewards."""


def group_advantages(
    rewards: Floats,
    *,
    group_size: int | None = None,
    group_ids: Tensor | Sequence[Hashable] | None = None,
    estimator: str = "grpo",
    correct: Floats | None = None,
    kept: Tensor | None = None,
    **params: object,
) -> GroupAdvantages:
    """Advantages of the members of each group, and the group's success rate.

        grpo       (r - mean) / (std + 1e-4)      std="unbiased" (default) or "population"
        dr_grpo    r - mean
        rloo       r - mean of the other members
        maxrl      (r - mean) / (mean + 1e-6)
        pass_at_k  of the pass@k objective; k=
        sign       2 r - 1
        avspo      grpo, with a virtual reward where all rewards are 0 or all are 1
        ngrpo      (r - mean) / (std + 1e-6), both with a virtual maximal reward in the group
        ds_grpo    grpo - gamma_p logp if correct, + gamma_n logp if not; sequence_logps=, gamma_p=,
                   gamma_n=
        success_rate = mean over the scored members of the group of `correct`

    Mean and standard deviation run over the scored members of the group, in two passes in float64.
    Each estimator's options, origin and choices are in its docstring in `estimators.py`. The last
    four give degenerate groups a non-zero advantage, the others exactly 0.

    Args:
        rewards: (B,) tensor or floats. None or NaN: no reward; such a member leaves the statistics
            and gets advantage 0.
        group_size: members i * group_size ... (i + 1) * group_size - 1 form a group.
        group_ids: (B,) ids in any order; members with equal ids form a group. Give one of the two.
        estimator: one of the names above.
        correct: (B,) bool, or floats in [0, 1] when correctness is graded: what the success rate
            counts. Give it whenever the reward is shaped. Without it, in this order: rewards all
            0 or 1 are the correctness; rewards all in [0, 1] are graded correctness; of exactly two
            values in the whole batch the larger is correct; else it must be given.
        kept: (B,) bool, the members that a selection left; None keeps all. The others leave the
            statistics of the advantages and get 0, but still count in the success rate: after a
            balanced selection every prompt would look half solved.
        params: options of the estimator.
    Returns: GroupAdvantages, (B,) each, detached; float64 for float64 rewards, else float32.
        `degenerate` is about the kept members.
    Raises: ValueError for unknown estimators and options, shapes and group sizes that do not fit,
        infinite rewards, and correctness that cannot be told from the rewards.
    Source: success rate F-GRPO 2602.06717 eq. 11; of the estimators, see theirs.
    """
    values, dtype = read_rewards(rewards)
    scored = ~torch.isnan(values)
    index = group_index(len(values), values.device, group_size, group_ids)
    values = torch.where(scored, values, 0.0)
    groups = Groups(values, scored, index, correctness(values, scored, correct))
    success_rate = groups.mean(groups.correct)
    if kept is not None:
        if not isinstance(kept, Tensor) or kept.dtype != torch.bool or kept.shape != scored.shape:
            got = f"{tuple(kept.shape)} {kept.dtype}" if isinstance(kept, Tensor) else type(kept)
            raise ValueError(f"kept: expected {tuple(scored.shape)} bool tensor, received {got}")
        groups = replace(groups, scored=scored & kept.to(scored.device))
    advantages = estimate(estimator, groups, params)
    return GroupAdvantages(advantages.to(dtype), success_rate.to(dtype), groups.degenerate)


def advantage_collapse_rate(
    rewards: Floats,
    *,
    group_size: int | None = None,
    group_ids: Tensor | Sequence[Hashable] | None = None,
) -> float:
    """Share of the groups that give a group-relative estimator nothing: ACR.

        groups with fewer than two distinct scored rewards / groups

    The paper asks for a standard deviation below a threshold near 0; equal rewards are told here
    without one, so that rounding of the mean does not matter. 0 for an empty batch.

    Args: as in `group_advantages`.
    Source: AVSPO 2605.21125, the metric ACR.
    """
    values, _ = read_rewards(rewards)
    scored = ~torch.isnan(values)
    index = group_index(len(values), values.device, group_size, group_ids)
    values = torch.where(scored, values, 0.0)
    groups = Groups(values, scored, index, values)
    if not len(values):
        return 0.0
    return len(index[groups.degenerate].unique()) / len(index.unique())


def matched_learning_rate_factor(gamma: float) -> float:
    """What the focal weight leaves of GRPO's step, on average over uniform success rates.

        m = int (1 - p)^gamma sqrt(p (1 - p)) dp / int sqrt(p (1 - p)) dp
          = (4 / sqrt(pi)) Gamma(gamma + 3/2) / Gamma(gamma + 3)

    0.679 for gamma = 0.5, 0.5 for 1, 0.3125 for 2. A run without the focal weight at this multiple
    of the learning rate is the control that tells the weighting from the smaller step.
    Raises: ValueError unless gamma is a finite number >= 0.
    Source: F-GRPO 2602.06717, its low-learning-rate control (6.8e-7 for 1e-6).
    """
    _check_gamma(gamma)
    return 4 / math.sqrt(math.pi) * math.exp(math.lgamma(gamma + 1.5) - math.lgamma(gamma + 3))


def focal_weight(success_rate: Tensor | Sequence[float] | float, gamma: float) -> Tensor:
    """Down-weights prompts that the policy already solves often.

        w = (1 - success_rate).clamp(0, 1) ** gamma,   0 ** 0 = 1

    Args:
        success_rate: any shape, the group success rate of each sequence, in [0, 1] up to 1e-4.
        gamma: >= 0; 0 gives weight 1 everywhere.
    Returns: weights in the shape of success_rate, detached; float32 or float64.
    Raises: ValueError if gamma is negative or a success rate is outside [-1e-4, 1 + 1e-4] or NaN.
    Source: F-GRPO 2602.06717 eq. 12.
    """
    _check_gamma(gamma)
    try:
        rate = torch.as_tensor(success_rate).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"success_rate: expected numbers, received {success_rate!r}") from error
    if rate.is_complex():
        raise ValueError(f"success_rate: expected real numbers, received {rate.dtype}")
    if rate.dtype != torch.float64:
        rate = rate.float()
    outside = outside_unit_interval(rate)
    if outside.any():
        raise ValueError(
            f"success_rate: expected values in [0, 1], received {rate[outside].flatten()[0].item()}"
        )
    return focal_power(rate, gamma)


def _check_gamma(gamma: float) -> None:
    if not isinstance(gamma, Real) or not (gamma >= 0 and math.isfinite(gamma)):
        raise ValueError(f"gamma: expected a finite number >= 0, received {gamma!r}")


def focal_power(success_rate: Tensor, gamma: float) -> Tensor:
    """(1 - success_rate).clamp(0, 1) ** gamma of rates that were checked, or will be."""
    return (1 - success_rate).clamp(0, 1) ** gamma


def outside_unit_interval(success_rate: Tensor) -> Tensor:
    """Where a success rate is outside [0, 1] by more than rounding, or NaN."""
    inside = (success_rate >= -SUCCESS_RATE_SLACK) & (success_rate <= 1 + SUCCESS_RATE_SLACK)
    return ~inside
