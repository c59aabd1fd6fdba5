"""Dynamic sampling, PODS, dynamic pruning and packing: hand-made cases and exact expectations."""

import math
import random
from itertools import combinations, product

import pytest
import torch

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, focal_weight, group_advantages
from fgrpo_kernels.testing import make_inputs
from fgrpo_train.selection import (
    max_variance_subset,
    mixed_groups,
    pack_densely,
    prune,
    pruning_probabilities,
)

NAN = math.nan


def test_mixed_groups_have_a_right_and_a_wrong_answer():
    rewards = torch.tensor([0, 0, 1, 1, 1, 1, 0, 1, 0, 0.3, 0.3, 0.3, 1, NAN, 1, 0, NAN, 1])
    mixed = mixed_groups(rewards, group_size=3)
    assert mixed.tolist() == [True, False, True, False, False, True]
    assert mixed_groups(torch.full((4,), NAN), group_size=2).tolist() == [False, False]


@pytest.mark.parametrize("num_correct,expected", [(0, 0), (1, 1), (3, 3), (4, 4), (9, 4), (15, 7)])
def test_pods_takes_half_of_each_kind_or_all_of_the_scarce_one(num_correct, expected):
    """16 rollouts, 8 kept: min(X, 4) right ones, but 8 - (16 - X) where wrong ones are scarce."""
    rewards = torch.zeros(16)
    rewards[torch.randperm(16, generator=torch.Generator().manual_seed(0))[:num_correct]] = 1
    kept = max_variance_subset(rewards, group_size=16, keep=8)
    assert int(kept.sum()) == 8
    assert int(rewards[kept].sum()) == expected


def test_pods_finds_the_subset_of_largest_variance():
    """Against all subsets of 7 real rewards."""
    rewards = torch.randn(35, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for keep in (1, 2, 3, 4, 7):
        kept = max_variance_subset(rewards, group_size=7, keep=keep).view(5, 7)
        for group, chosen in zip(rewards.view(5, 7), kept, strict=True):
            best = max(
                float(group[list(rows)].var(unbiased=False))
                for rows in combinations(range(7), keep)
            )
            assert float(group[chosen].var(unbiased=False)) == pytest.approx(best, abs=1e-14)


def test_pods_keeps_what_there_is_of_a_group_with_missing_rewards():
    rewards = torch.tensor([1, NAN, 0, 0, NAN, NAN, NAN, 1, NAN, NAN, NAN, NAN])
    kept = max_variance_subset(rewards, group_size=4, keep=2)
    assert kept.tolist() == [True, False, True, *[False] * 4, True, *[False] * 4]


def test_after_pods_advantages_are_the_subsets_and_the_success_rate_the_groups():
    """2 of 8 right, 2 + 2 kept: +-0.866 with eps 1e-4 as in a half-solved group, but g = sqrt(3/4).

    Taken from the subset, g would be sqrt(1/2) for every prompt.
    """
    rewards = torch.tensor([0.0, 1, 0, 0, 0, 1, 0, 0])
    kept = max_variance_subset(rewards, group_size=8, keep=4)
    out = group_advantages(rewards, group_size=8, kept=kept)
    assert out.advantages[rewards == 1].tolist() == pytest.approx([0.8658754] * 2, abs=1e-6)
    wrong = out.advantages[(rewards == 0) & kept]
    assert wrong.tolist() == pytest.approx([-0.8658754] * 2, abs=1e-6)
    assert not out.advantages[~kept].any()
    assert focal_weight(out.success_rate, 0.5).tolist() == pytest.approx([0.75**0.5] * 8)


def test_pruning_probabilities_are_proportional_between_their_bounds():
    """c (1 + 2 + 3 + 4) = 2: 0.2, 0.4, 0.6, 0.8; and with a cap: 1, then c (1 + 1) = 1."""
    scores = torch.tensor([1.0, 2, 3, 4])
    assert pruning_probabilities(scores, rate=0.5).tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8])
    capped = pruning_probabilities(torch.tensor([100.0, 1, 1, 0]), rate=0.45)
    assert capped.tolist() == pytest.approx([1, 0.55, 0.55, 0.1])
    floored = pruning_probabilities(torch.tensor([1.0, 0, 0, 0]), rate=0.5, min_keep=0.2)
    assert floored.tolist() == pytest.approx([1, 0.2, 0.2, 0.2]), "fewer than wanted is left"
    assert pruning_probabilities(torch.zeros(3), rate=0.7).tolist() == pytest.approx([0.3] * 3)
    assert pruning_probabilities(torch.tensor([1.0, 0]), rate=0).tolist() == [1, 1]


def gradient(inputs, weights, config, **denominators):
    """Of all parameters in one vector, with the advantages times the weights; float64."""
    given = inputs.to(torch.float64)
    arguments = given.arguments() | {"advantages": inputs.advantages * weights}
    focal_policy_loss(**arguments, **denominators, config=config).loss.backward()
    return torch.cat([leaf.grad.flatten() for leaf in given.leaves().values()])


@pytest.mark.parametrize(
    "config",
    [
        PolicyLossConfig.dapo(focal_gamma=0.5, dual_clip=3.0),
        PolicyLossConfig.grpo(focal_gamma=0.5),
        PolicyLossConfig.dr_grpo(fixed_length=6),
        PolicyLossConfig.cispo(),
        PolicyLossConfig.gspo(),
    ],
    ids=["dapo", "grpo", "dr_grpo", "cispo", "gspo"],
)
def test_pruned_gradients_have_the_full_gradient_as_their_exact_mean(config):
    """All 2^6 ways in which 2 prompts and their 2 completions each can be kept, by probability.

    Float64: 64 terms, weights up to 12.5; 1e-12 of the largest element.
    """
    inputs = make_inputs(
        4, 6, 4, 11, group_size=2, zero_advantage=0.0, drift=0.3, dtype=torch.float64
    )
    counts = {"global_valid_tokens": float(inputs.completion_mask.sum()), "global_sequences": 4.0}
    of_prompts = torch.tensor([0.4, 0.9], dtype=torch.float64)
    of_completions = torch.tensor([0.2, 1.0, 0.5, 0.7], dtype=torch.float64)
    full = gradient(inputs, torch.ones(4, dtype=torch.float64), config, **counts)
    mean = torch.zeros_like(full)
    for pattern in product((False, True), repeat=6):
        prompts, completions = torch.tensor(pattern[:2]), torch.tensor(pattern[2:])
        probability = 1.0
        for kept, kappas in ((prompts, of_prompts), (completions, of_completions)):
            probability *= float(torch.where(kept, kappas, 1 - kappas).prod())
        if probability == 0:
            continue
        weights = (prompts / of_prompts).repeat_interleave(2) * (completions / of_completions)
        mean += probability * gradient(inputs, weights, config, **counts)
    scale = float(full.abs().max())
    assert scale > 1e-3
    torch.testing.assert_close(mean, full, rtol=0, atol=1e-12 * scale)


def test_the_mean_over_kept_tokens_is_biased():
    """The trap that the global denominator avoids: each draw divided by its own token count."""
    inputs = make_inputs(4, 6, 4, 11, group_size=2, zero_advantage=0.0, dtype=torch.float64)
    config = PolicyLossConfig.dapo()
    kappas = torch.tensor([0.2, 1.0, 0.5, 0.7], dtype=torch.float64)
    lengths = inputs.completion_mask.sum(1)
    full = gradient(inputs, torch.ones(4, dtype=torch.float64), config)
    mean = torch.zeros_like(full)
    for pattern in product((False, True), repeat=4):
        kept = torch.tensor(pattern)
        probability = float(torch.where(kept, kappas, 1 - kappas).prod())
        if probability > 0:
            tokens = float(lengths[kept].sum())
            draw = gradient(inputs, kept / kappas, config, global_valid_tokens=tokens)
            mean += probability * draw
    assert (mean - full).abs().max() > 0.05 * full.abs().max()


def test_many_draws_average_to_the_full_gradient():
    """Monte Carlo with the drawn weights themselves: within 4.5 standard errors in each element."""
    inputs = make_inputs(8, 6, 4, 11, group_size=4, zero_advantage=0.0, dtype=torch.float64)
    config = PolicyLossConfig.dapo(focal_gamma=0.5)
    counts = {"global_valid_tokens": float(inputs.completion_mask.sum())}
    kappas = pruning_probabilities(inputs.advantages.abs(), rate=0.5)
    assert float(kappas.mean()) == pytest.approx(0.5)
    parts = torch.stack([gradient(inputs, row, config, **counts) for row in torch.eye(8).double()])
    generator = torch.Generator().manual_seed(0)
    weights = torch.stack([prune(kappas, generator=generator) for _ in range(20_000)])
    assert {*weights[:, 0].tolist()} == {0.0, float(1 / kappas[0])}
    draws = weights @ parts
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - parts.sum(0)).abs() <= 4.5 * error + 1e-15).all()


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: pruning_probabilities(torch.ones(2), rate=1.0), r"rate: .*received 1.0"),
        (lambda: pruning_probabilities(torch.ones(2), rate=0.95), r"min_keep: .*received 0.1"),
        (lambda: pruning_probabilities(torch.ones(2), rate=0.5, min_keep=0), "min_keep: .*d 0"),
        (lambda: pruning_probabilities(-torch.ones(2), rate=0.5), "scores: expected finite"),
        (lambda: prune(torch.tensor([0.5, 0.0])), r"probabilities: expected values in \(0, 1\]"),
        (lambda: max_variance_subset(torch.ones(4), group_size=2, keep=3), "keep: .*received 3"),
        (
            lambda: mixed_groups(torch.ones(4), group_size=3),
            r"rewards: .*group_size = 3, received \(4,\)",
        ),
        (lambda: pack_densely([3, 9], capacity=8), "capacity = 8 tokens, received 9 at 1"),
        (lambda: pack_densely([0], capacity=8), "received 0 at 0"),
        (lambda: pack_densely([1], capacity=8, window=0), "window: .*received 0"),
    ],
)
def test_errors_name_expected_and_received(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_packing_by_hand():
    lengths = [6, 5, 3, 2, 4]
    # in order: 6, 5 + 3, 2 + 4; with a window: 6 + 4, 5 + 3 + 2
    assert pack_densely(lengths, capacity=10, window=1) == [[0], [1, 2, 3], [4]]
    assert pack_densely(lengths, capacity=10, window=5) == [[0, 4], [1, 2, 3]]
    assert pack_densely([], capacity=10) == []


@pytest.mark.parametrize("window", [1, 4, 32, 1000])
def test_packs_hold_every_sequence_once_and_get_denser_with_the_window(window):
    rng = random.Random(0)
    lengths = [min(1 + int(rng.expovariate(1 / 200)), 1024) for _ in range(400)]
    packs = pack_densely(lengths, capacity=1024, window=window)
    assert sorted(index for pack in packs for index in pack) == list(range(400))
    assert max(sum(lengths[index] for index in pack) for pack in packs) <= 1024
    least = -(-sum(lengths) // 1024)
    spare = {1: 1.25, 4: 1.1, 32: 1.03, 1000: 1.02}[window]
    assert len(packs) <= spare * least, "packs over the least possible number"
