"""Reward shaping: what is done to verified rewards before advantages are taken.

A shaped reward says less about correctness than the verifier's did, so pass the latter on:
`group_advantages(shaped, correct=rewards, ...)`. A group is `group_size` neighbours.

Dimensions: B completions, G members of a group.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

DIFFICULTY_EPSILON = 1e-5
"""Added to the success rate in DISCO's difficulty weight, as its code does."""


def unlikeliness_rewards(
    rewards: Tensor, mean_logps: Tensor, *, group_size: int, rank_penalty: float = 0.25
) -> Tensor:
    """Rewarding the Unlikely: of the right answers of a group, the likeliest is paid least.

        r_i = R_i (1 - rank_penalty rank_i / n)   for R_i > 0, else R_i

    rank_i counts the group's scored members, right and wrong, that are less likely: 0 for the least
    likely, n - 1 for the likeliest; n is their number. Ties are ranked in order.

    In an all-right group only the rank is left: the rewards differ and push away from likely right
    answers. Leave such groups out by `mixed_groups(rewards)` where that is not wanted.

    Args:
        rewards: (B,) of the verifier; NaN where there is none, and then in the result.
        mean_logps: (B,) log-prob of each completion under the sampling policy, divided by its
            length.
        rank_penalty: in [0, 1).
    Returns: (B,) in the dtype of rewards.
    Raises: ValueError for shapes and ranges.
    Source: 2506.02355, in the form of its code. The paper counts ranks from the likeliest, from 0:
        the same order, each penalty larger by rank_penalty / n.
    """
    groups = in_groups("rewards", rewards, len(rewards), group_size)
    logps = in_groups("mean_logps", mean_logps, len(rewards), group_size)
    if not 0 <= rank_penalty < 1:
        raise ValueError(f"rank_penalty: expected a number in [0, 1), received {rank_penalty}")
    scored = ~groups.isnan()
    if logps[scored].isnan().any():
        raise ValueError("mean_logps: expected a number for each member with a reward, got NaN")
    # Members without a reward come last and take no rank from the others.
    order = torch.where(scored, logps, torch.inf).argsort(dim=1, stable=True)
    rank = order.argsort(1)
    factor = 1 - rank_penalty * rank / scored.sum(1, keepdim=True).clamp(min=1)
    return torch.where(groups > 0, groups * factor, groups).to(rewards.dtype).flatten()


def disco_rewards(
    rewards: Tensor,
    domains: Sequence[Hashable],
    *,
    group_size: int,
    domain_shares: Mapping[Hashable, float],
    version: str = "v1",
) -> Tensor:
    """DISCO: rewards count more in rare domains and on hard prompts.

        r'_i = r_i w_domain / (success_rate + 1e-5)
        w_domain, with p the domain's share:   v1 log(1 + 1/p),   v2 log(1 + 1/p)^2,   v3 1/p

    The success rate is the mean reward of the group's scored members. Take advantages with
    `estimator="dr_grpo"`: no standard deviation, which would cancel both weights. For rewards 0 and
    1 the difficulty part then gives (r - mean) / mean, MaxRL's advantages.

    Args:
        rewards: (B,) in [0, 1]; NaN where there is none, and then in the result.
        domains: (B,) the domain of each completion, equal within a group.
        domain_shares: share of each domain among the training prompts, in (0, 1].
        version: "v1" did best in the paper.
    Returns: (B,) in the dtype of rewards.
    Raises: ValueError for shapes, unknown versions, domains without a share, shares out of range.
    Source: 2505.15074 and its code, whose weights (0.847 and 2.565 for shares 3/4 and 1/12) are
        those of v1 on the training data. Not DisCO 2505.12366.
    """
    weights = {
        "v1": lambda share: math.log(1 + 1 / share),
        "v2": lambda share: math.log(1 + 1 / share) ** 2,
        "v3": lambda share: 1 / share,
    }
    if version not in weights:
        raise ValueError(f"version: expected one of {list(weights)}, received {version!r}")
    groups = in_groups("rewards", rewards, len(rewards), group_size)
    if len(domains) != len(rewards):
        raise ValueError(f"domains: expected {len(rewards)}, one a reward, received {len(domains)}")
    outside = (groups < 0) | (groups > 1)
    if outside.any():
        received = float(groups[outside][0])
        raise ValueError(f"rewards: expected values in [0, 1], received {received:g}")
    for domain in dict.fromkeys(domains):
        if not 0 < domain_shares.get(domain, 0) <= 1:
            raise ValueError(
                f"domain_shares: expected a share in (0, 1] for {domain!r}, received "
                f"{domain_shares.get(domain)}"
            )
    for start in range(0, len(domains), group_size):
        if len(set(domains[start : start + group_size])) > 1:
            raise ValueError(
                f"domains: expected one domain a group, received "
                f"{list(domains[start : start + group_size])}"
            )
    by_domain = {domain: weights[version](domain_shares[domain]) for domain in set(domains)}
    of_domain = groups.new_tensor([by_domain[domain] for domain in domains]).view_as(groups)
    scored = ~groups.isnan()
    success_rate = groups.nansum(1, keepdim=True) / scored.sum(1, keepdim=True).clamp(min=1)
    shaped = groups * of_domain / (success_rate + DIFFICULTY_EPSILON)
    return shaped.to(rewards.dtype).flatten()


def overlong_penalty(
    lengths: Tensor, *, max_length: int = 20480, buffer: int = 4096, factor: float = 1.0
) -> Tensor:
    """DAPO's soft punishment of overlong completions, to be added to the rewards.

        min(0, -factor (length - (max_length - buffer)) / buffer)

    0 up to max_length - buffer tokens, then linear to -factor at max_length.

    Args:
        lengths: (B,) tokens; at most max_length, beyond which sampling stops.
    Returns: (B,) float32, <= 0.
    Raises: ValueError unless 0 < buffer <= max_length, factor >= 0, lengths <= max_length.
    Source: DAPO 2503.14476 eq. 13, with the defaults of its run.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer: expected 1 to max_length = {max_length}, received {buffer}")
    if not factor >= 0:
        raise ValueError(f"factor: expected a number >= 0, received {factor}")
    if (lengths > max_length).any():
        raise ValueError(
            f"lengths: expected at most max_length = {max_length}, received {int(lengths.max())}"
        )
    excess = lengths.double() - (max_length - buffer)
    return (-factor * excess / buffer).clamp(max=0).float()


def in_groups(name: str, values: Tensor, size: int, group_size: int) -> Tensor:
    """(B,) of groups of neighbours as (B / G, G) float64, detached."""
    if values.shape != (size,) or group_size < 1 or size % group_size:
        raise ValueError(
            f"{name}: expected ({size},) in groups of group_size = {group_size}, received "
            f"{tuple(values.shape)}"
        )
    return values.detach().double().view(-1, group_size)
