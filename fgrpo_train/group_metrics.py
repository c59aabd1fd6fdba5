"""What the groups of a step tell about it: how many members were correct, how hard it pushes.

Dimensions: B completions, G members of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fgrpo_kernels import GroupAdvantages, focal_weight


def success_histogram(
    rewards: Tensor, groups: GroupAdvantages, group_size: int
) -> dict[str, float]:
    """The number of groups with 0, 1, ..., G correct members, by str(number).

    Members without a verdict are taken to be as often correct as the others of their group, rounded
    to whole members; a group without any verdict is not counted.

    Args:
        rewards: (B,), NaN where there is no verdict; groups of `group_size` consecutive rows.
        groups: of these rewards.
    """
    scored = rewards.view(-1, group_size).isfinite().any(1)
    success_rate = groups.success_rate.view(-1, group_size)[:, 0][scored]
    num_correct = (success_rate * group_size).round().long()
    counts = torch.bincount(num_correct, minlength=group_size + 1)
    return {str(correct): float(count) for correct, count in enumerate(counts.tolist())}


def abs_advantage_sum(groups: GroupAdvantages, focal_gamma: float) -> float:
    """sum_i (1 - success_rate_i)^gamma |A_i| over the completions.

    The focal weight makes it smaller, as a lower learning rate would: of two runs that differ in
    gamma it tells how much of the difference is that.
    """
    weight = focal_weight(groups.success_rate, focal_gamma)
    return float((weight * groups.advantages.abs()).double().sum())
