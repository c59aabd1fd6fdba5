"""The training batch: one padded record of a step's sequences, and its division into mini-batches.

A prompt is padded on the left and its completion on the right, so that the first completion token
stands in the same column for every sequence; positions count real tokens only.

Dimensions: B sequences, P prompt columns, T completion columns, G group size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fgrpo_kernels import GroupAdvantages
from fgrpo_train.prompts import Prompt
from fgrpo_train.rollout import Rollouts


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Sequences with everything that the loss needs; every tensor has B rows."""

    input_ids: Tensor
    """(B, P + T) int64: prompt and completion."""
    attention_mask: Tensor
    """(B, P + T) int64: 1 at real tokens."""
    completion_ids: Tensor
    """(B, T) int64."""
    completion_mask: Tensor
    """(B, T) bool: sampled tokens, the end-of-sequence token included."""
    rollout_logps: Tensor
    """(B, T) float32: log-probs as reported by the sampler."""
    advantages: Tensor
    """(B,) float."""
    success_rate: Tensor
    """(B,) float: share of correct completions in the sequence's group."""

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def rows(self, index: Tensor | slice) -> Batch:
        """The chosen sequences."""
        return Batch(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def to(self, device: torch.device | str) -> Batch:
        """The same record on `device`."""
        return Batch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def trimmed(self) -> Batch:
        """Without the columns in which no sequence has a token."""
        used = self.completion_mask.any(0).nonzero()
        width = int(used[-1]) + 1 if len(used) else 1
        num_prompt_columns = self.input_ids.shape[1] - self.completion_ids.shape[1]
        first = int(self.attention_mask[:, :num_prompt_columns].any(0).nonzero()[0])
        columns = slice(first, num_prompt_columns + width)
        return Batch(
            input_ids=self.input_ids[:, columns],
            attention_mask=self.attention_mask[:, columns],
            completion_ids=self.completion_ids[:, :width],
            completion_mask=self.completion_mask[:, :width],
            rollout_logps=self.rollout_logps[:, :width],
            advantages=self.advantages,
            success_rate=self.success_rate,
        )


def make_batch(
    prompts: Sequence[Prompt], rollouts: Rollouts, groups: GroupAdvantages, *, pad_token_id: int
) -> Batch:
    """Join each completion to its prompt.

    Args:
        prompts: the step's prompts; `rollouts.prompt_index` points into them.
        rollouts: (B, T), prompt-major.
        groups: (B,), of the same completions.
        pad_token_id: fills `input_ids` where there is no token; never attended to.
    """
    device = rollouts.completion_ids.device
    width = max(len(prompt.token_ids) for prompt in prompts)
    prompt_ids = torch.full((len(prompts), width), pad_token_id, device=device)
    prompt_mask = torch.zeros((len(prompts), width), dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt.token_ids)
        prompt_ids[row, start:] = torch.tensor(prompt.token_ids, device=device)
        prompt_mask[row, start:] = 1
    mask = rollouts.completion_mask
    completion_ids = torch.where(mask, rollouts.completion_ids, pad_token_id)
    index = rollouts.prompt_index
    return Batch(
        input_ids=torch.cat([prompt_ids[index], completion_ids], dim=1),
        attention_mask=torch.cat([prompt_mask[index], mask.long()], dim=1),
        completion_ids=completion_ids,
        completion_mask=mask,
        rollout_logps=rollouts.logps,
        advantages=groups.advantages.float(),
        success_rate=groups.success_rate.float(),
    )


def mini_batches(batch: Batch, *, count: int, group_size: int) -> list[Batch]:
    """`count` parts of equally many whole groups, in order.

    Raises: ValueError if the groups do not divide evenly.
    """
    num_groups, rest = divmod(len(batch), group_size)
    if rest or num_groups % count:
        raise ValueError(
            f"expected sequences in groups of {group_size} and a multiple of {count} groups, "
            f"received {len(batch)} sequences"
        )
    size = len(batch) // count
    return [batch.rows(slice(start, start + size)) for start in range(0, len(batch), size)]
