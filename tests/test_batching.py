"""The training batch: alignment, padding, and the division into mini-batches."""

from dataclasses import fields, replace

import pytest
import torch

from fgrpo_kernels import group_advantages
from fgrpo_train.batching import Batch, make_batch, micro_batches, mini_batches
from fgrpo_train.prompts import Prompt
from fgrpo_train.rollout import Rollouts


def small_batch() -> Batch:
    """Two prompts of 3 and 1 tokens, two completions each; pad token 0, end token 9."""
    prompts = [
        Prompt(id=str(ids), text="", token_ids=ids, metadata={}) for ids in ((1, 2, 3), (4,))
    ]
    ids = torch.tensor([[5, 9, 7, 7], [5, 6, 9, 0], [9, 0, 0, 0], [5, 6, 9, 0]])
    rollouts = Rollouts(
        completion_ids=ids,
        completion_mask=torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0]]) > 0,
        logps=-ids.float(),
        truncated=torch.zeros(4, dtype=torch.bool),
        prompt_index=torch.tensor([0, 0, 1, 1]),
    )
    groups = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), group_size=2)
    return make_batch(prompts, rollouts, groups, pad_token_id=0)


def test_prompts_end_where_completions_begin_and_padding_is_hidden():
    batch = small_batch()
    # What follows the end token (7, 7 in row 0) is padding whatever the sampler left there.
    assert batch.input_ids.tolist() == [
        [1, 2, 3, 5, 9, 0, 0],
        [1, 2, 3, 5, 6, 9, 0],
        [0, 0, 4, 9, 0, 0, 0],
        [0, 0, 4, 5, 6, 9, 0],
    ]
    assert batch.attention_mask.tolist() == [
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 0],
    ]
    assert batch.completion_ids.tolist() == [[5, 9, 0, 0], [5, 6, 9, 0], [9, 0, 0, 0], [5, 6, 9, 0]]
    # Unbiased std of (1, 0) is sqrt(1/2): advantages +-0.5 / (0.70711 + 1e-4).
    assert batch.advantages.tolist() == pytest.approx([0.7070068, -0.7070068, 0, 0], abs=1e-6)
    assert batch.success_rate.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_trimming_removes_the_columns_without_tokens_on_both_sides():
    trimmed = small_batch().rows(torch.tensor([2, 3])).trimmed()
    assert trimmed.input_ids.tolist() == [[4, 9, 0, 0], [4, 5, 6, 9]]
    assert trimmed.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert trimmed.completion_ids.tolist() == [[9, 0, 0], [5, 6, 9]]
    assert trimmed.completion_mask.tolist() == [[True, False, False], [True, True, True]]
    assert trimmed.rollout_logps.tolist() == [[-9, 0, 0], [-5, -6, -9]]


def test_mini_batches_are_whole_groups_in_order_and_lose_nothing():
    batch = small_batch()
    batch = replace(batch, old_logps=batch.rollout_logps + 1, ref_logps=batch.rollout_logps + 2)
    parts = mini_batches(batch, count=2, group_size=2)
    assert [part.success_rate.tolist() for part in parts] == [[0.5, 0.5], [0.0, 0.0]]
    for f in fields(Batch):
        joined = torch.cat([getattr(part, f.name) for part in parts])
        assert torch.equal(joined, getattr(batch, f.name)), f.name


@pytest.mark.parametrize(("count", "group_size"), [(3, 2), (2, 4), (1, 3)])
def test_groups_that_do_not_divide_evenly_are_refused(count, group_size):
    with pytest.raises(ValueError, match=f"groups of {group_size} and a multiple of {count}"):
        mini_batches(small_batch(), count=count, group_size=group_size)


def sequences(*lengths: tuple[int, int]) -> Batch:
    """One sequence for each (prompt tokens, completion tokens); token ids count the sequences."""
    prompts = [
        Prompt(id=str(n), text="", token_ids=(n,) * p, metadata={})
        for n, (p, _) in enumerate(lengths)
    ]
    longest = max(t for _, t in lengths)
    mask = torch.tensor([[t < own for t in range(longest)] for _, own in lengths])
    rollouts = Rollouts(
        completion_ids=torch.arange(len(lengths))[:, None].expand(mask.shape).clone(),
        completion_mask=mask,
        logps=torch.zeros(mask.shape),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        prompt_index=torch.arange(len(lengths)),
    )
    groups = group_advantages(torch.tensor([0.0, 1.0] * (len(lengths) // 2)), group_size=2)
    return make_batch(prompts, rollouts, groups, pad_token_id=0)


def test_micro_batches_are_cut_by_length_within_the_budget():
    """Lengths 5, 12, 3, 9, 4, 3 by hand. Padded: 12 alone, for 9 more make 2 x (7 + 6); the prompt
    of 7 columns and the completion of 4 make 2 x 11 of sequences 3 and 0; the rest is 3 x (2 + 3).
    Packed: 12 + 9, then 5 + 4 + 3 + 3."""
    batch = sequences((1, 4), (6, 6), (2, 1), (7, 2), (1, 3), (2, 1))
    padded = micro_batches(batch, max_tokens=22, packing=False)
    assert [part.tolist() for part in padded] == [[1], [3, 0], [4, 2, 5]]
    for part in padded:
        assert batch.rows(part).trimmed().input_ids.numel() <= 22
    packed = micro_batches(batch, max_tokens=22, packing=True)
    assert [part.tolist() for part in packed] == [[1, 3], [0, 4, 2, 5]]
    alone = micro_batches(batch, max_tokens=1, packing=False)
    assert [part.tolist() for part in alone] == [[1], [3], [0], [4], [2], [5]]
    whole = micro_batches(batch, max_tokens=None, packing=False)
    assert [part.tolist() for part in whole] == [[0, 1, 2, 3, 4, 5]]


def test_a_filler_is_one_short_sequence_without_a_completion_token():
    filler = sequences((1, 4), (6, 6)).filler()
    assert filler.input_ids.shape == (1, 2) and filler.completion_ids.shape == (1, 1)
    assert filler.attention_mask[0, 0] == 1, "something to attend to"
    assert not filler.completion_mask.any()
