"""Selection: which prompts, completions and sequences are trained on, and how they are packed.

A group is `group_size` neighbours, as the engine returns them. What is left out of a step never
changes a success rate: that is the full group's.

Dimensions: B completions, G members of a group, n items of any kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fgrpo_kernels import PolicyLossConfig
from fgrpo_train.batching import Batch
from fgrpo_train.shaping import in_groups


def drop_inactive(batch: Batch, config: PolicyLossConfig) -> Batch:
    """Leave out the sequences that cannot contribute to the gradient, before the trunk runs.

    A sequence with advantage 0 has a zero gradient whatever its log-probs, unless the entropy bonus
    or the KL term acts on it. The gradient of the rest is unchanged because the loss is given its
    denominators, counted before the selection. One sequence always stays: a process without any
    would miss the collective operations of the backward pass.
    """
    if config.entropy_coef != 0 or config.kl_coef > 0:
        return batch
    active = batch.advantages != 0
    if not active.any():
        active[0] = True
    return batch.rows(active).trimmed()


def mixed_groups(rewards: Tensor, *, group_size: int) -> Tensor:
    """Dynamic sampling: which groups carry a signal, 0 < X < G of their G members correct.

    A group is mixed when its scored members have two distinct values, which for 0 and 1 is the same
    and for graded correctness is what verl asks for (std > 0). Prompts whose group is not mixed are
    drawn anew until the batch is full.

    Args:
        rewards: (B,) of the correctness, not of a shaped reward: a length penalty would make every
            group look mixed. NaN where nothing was scored.
    Returns: (B / group_size,) bool.
    Source: DAPO 2503.14476 section 3.2.
    """
    groups = in_groups("rewards", rewards, len(rewards), group_size)
    scored = ~groups.isnan()
    lowest = torch.where(scored, groups, torch.inf).amin(1)
    highest = torch.where(scored, groups, -torch.inf).amax(1)
    return lowest < highest


def max_variance_subset(rewards: Tensor, *, group_size: int, keep: int) -> Tensor:
    """PODS: of each group the `keep` completions whose rewards have the largest variance.

    They are the k highest and the keep - k lowest rewards for some k, so sorting and sums from both
    ends find the best k: O(G log G). Of 0 and 1 it takes as many of each as possible.

    Give the result to `group_advantages(..., kept=...)`: mean and std are then those of the subset,
    as the paper has it, and the success rate stays that of the full group. Without it a balanced
    subset would make every prompt look half solved, and the focal weight would do nothing.

    Args:
        rewards: (B,); members without a reward (NaN) are never kept.
        keep: members to keep of each group; all scored ones of a group that has no more.
    Returns: (B,) bool. Of equal rewards the first are kept; of equally good k the smallest.
    Raises: ValueError unless group_size divides B and 1 <= keep <= group_size.
    Source: PODS 2504.13818 lemma 3.1.
    """
    if not 1 <= keep <= group_size:
        raise ValueError(f"keep: expected 1 to group_size = {group_size}, received {keep}")
    groups = in_groups("rewards", rewards, len(rewards), group_size)
    kept = torch.zeros_like(groups, dtype=torch.bool)
    for row, chosen in zip(groups, kept, strict=True):
        scored = (~row.isnan()).nonzero().squeeze(1)
        order = scored[row[scored].argsort(stable=True)]
        count = min(keep, len(order))
        if count == 0:
            continue
        values = row[order] - row[order[0]]
        sums, squares = (_sums_of_both_ends(v, count) for v in (values, values.square()))
        high = int((squares - sums.square() / count).argmax())
        chosen[order[: count - high]] = True
        chosen[order[len(order) - high :]] = True
    return kept.flatten()


def _sums_of_both_ends(values: Tensor, count: int) -> Tensor:
    """(count + 1,): of the last k and the first count - k values, for k from 0."""
    zero = values.new_zeros(1)
    first = torch.cat([zero, values[:count].cumsum(0)])
    last = torch.cat([zero, values.flip(0)[:count].cumsum(0)])
    return first.flip(0) + last


def pruning_probabilities(scores: Tensor, *, rate: float, min_keep: float = 0.1) -> Tensor:
    """Dynamic pruning: the probability with which each item is kept.

        kappa_i = clip(c score_i, min_keep, 1)   with mean(kappa) = 1 - rate

    For completions the score is |advantage|, known after the rewards; for prompts it is a statistic
    of an earlier visit, known before sampling, such as sqrt(p (1 - p)). A probability proportional
    to the size of an item's gradient gives the least variance for a number of items. Where even
    kappa = 1 for every score above 0 keeps fewer than wanted, that is the result.

    Args:
        scores: (n,) >= 0.
        rate: share to leave out on average, in [0, 1).
        min_keep: in (0, 1 - rate]. Not 0: an item that is never kept cannot be corrected for.
    Returns: (n,) float64 in [min_keep, 1]; 1 - rate for all when every score is 0.
    Raises: ValueError for numbers out of range.
    Source: derived. Of Dynamic Pruning 2603.04135 only the principle was found (prune by the size
        of the advantage, rescale so that the gradient stays unbiased), no rule for kappa and no
        code. Its variance bound is stated for rates to 0.7.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"rate: expected a number in [0, 1), received {rate}")
    if not 0 < min_keep <= 1 - rate:
        raise ValueError(
            f"min_keep: expected a number in (0, 1 - rate = {1 - rate:g}], received {min_keep}"
        )
    scores = scores.detach().double()
    if not (scores >= 0).all() or scores.isinf().any():
        raise ValueError("scores: expected finite numbers >= 0, received others")
    if rate == 0 or not scores.any():
        return torch.full_like(scores, 1 - rate)
    scores = scores / scores.max()
    low, high = math.log(min_keep), -math.log(float(scores[scores > 0].min()))
    for _ in range(80):  # the mean grows with c; bisected in its logarithm
        middle = (low + high) / 2
        if float((math.exp(middle) * scores).clamp(min_keep, 1).mean()) < 1 - rate:
            low = middle
        else:
            high = middle
    return (math.exp(high) * scores).clamp(min_keep, 1)


def prune(probabilities: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Keep each item with its probability; returns its weight: 1 / kappa if kept, else 0.

    Multiply the advantages by the weights. Every surrogate is proportional to the advantage for a
    fixed sign, so the gradient's mean over draws is the full batch's, if

    - the advantages come from all rewards of the group, pruned or not;
    - the denominators are those of the full batch (`global_valid_tokens`, `global_sequences`): a
      mean over the kept tokens is biased;
    - kl_coef and entropy_coef are 0, because those terms do not carry the advantage.

    A completion of a pruned prompt has the weight 1 / (kappa_prompt kappa_completion): multiply the
    two results. Pruned prompts save their sampling too, pruned completions only the update;
    `drop_inactive` leaves both out.

    Args:
        probabilities: (n,) in (0, 1]. generator: of its device; None: the global one.
    Returns: (n,) float64.
    Raises: ValueError for a probability that is not in (0, 1].
    Source: derived safe form of Dynamic Pruning 2603.04135; see `pruning_probabilities`.
    """
    if not ((probabilities > 0) & (probabilities <= 1)).all():
        raise ValueError("probabilities: expected values in (0, 1], received others")
    probabilities = probabilities.double()
    draws = torch.rand(
        probabilities.shape, generator=generator, dtype=torch.float64, device=probabilities.device
    )
    return torch.where(draws < probabilities, 1 / probabilities, 0.0)


def pack_densely(lengths: Sequence[int], *, capacity: int, window: int = 32) -> list[list[int]]:
    """Dense packing: indices of sequences, pack by pack, each pack at most `capacity` tokens.

    Greedy within a window of waiting sequences: a pack starts with the one that waits longest, then
    takes the longest in the window that still fits until none does. The window is refilled in
    order. `window=1` fills packs in order.

    Args:
        lengths: tokens of each sequence, >= 1. capacity: tokens of a pack.
    Returns: every index exactly once.
    Raises: ValueError for a sequence longer than the capacity.
    Source: Dense Prompt Packing of 2603.04135, of which "window-based greedy" is all that was
        found; order and tie-breaking are ours.
    """
    if window < 1:
        raise ValueError(f"window: expected a number >= 1, received {window}")
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(
                f"lengths: expected 1 to capacity = {capacity} tokens, received {length} at "
                f"{index}: raise the capacity or leave the sequence out"
            )
    waiting = list(range(min(window, len(lengths))))
    next_index = len(waiting)
    packs = []
    while waiting:
        pack, room = [], capacity
        chosen: int | None = waiting[0]
        while chosen is not None:
            pack.append(chosen)
            room -= lengths[chosen]
            waiting.remove(chosen)
            if next_index < len(lengths):
                waiting.append(next_index)
                next_index += 1
            fitting = [index for index in waiting if lengths[index] <= room]
            chosen = max(fitting, key=lambda index: lengths[index], default=None)
        packs.append(pack)
    return packs
