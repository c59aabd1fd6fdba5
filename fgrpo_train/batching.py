"""The training batch: one padded record of a step's sequences, and its division into mini-batches
and micro-batches.

A prompt is padded on the left and its completion on the right, so that the first completion token
stands in the same column for every sequence; positions count real tokens only.

Dimensions: B sequences, P prompt columns, T completion columns, G group size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

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
    old_logps: Tensor | None = None
    """(B, T) float32: under the policy that sampled; None where that is the present one."""
    ref_logps: Tensor | None = None
    """(B, T) float32: under the reference policy; None without a KL term."""

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def rows(self, index: Tensor | slice) -> Batch:
        """The chosen sequences."""
        return self._map(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> Batch:
        """The same record on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def trimmed(self) -> Batch:
        """Without the columns in which no sequence has a token."""
        used = self.completion_mask.any(0).nonzero()
        width = int(used[-1]) + 1 if len(used) else 1
        first = int(self.attention_mask[:, : self.num_prompt_columns].any(0).nonzero()[0])
        return self._columns(first, width)

    def filler(self) -> Batch:
        """One sequence of two columns without a completion token: it has no loss and no gradient,
        and lets a process take part in what the others do."""
        one = self.rows(slice(0, 1))
        masked = replace(one, completion_mask=torch.zeros_like(one.completion_mask))
        return masked._columns(self.num_prompt_columns - 1, 1)

    @property
    def num_prompt_columns(self) -> int:
        """P."""
        return self.input_ids.shape[1] - self.completion_ids.shape[1]

    def _columns(self, first: int, width: int) -> Batch:
        """Columns from prompt column `first` to completion column `width`, exclusive."""
        whole = slice(first, self.num_prompt_columns + width)
        num_all = self.input_ids.shape[1]

        def cut(tensor: Tensor) -> Tensor:
            if tensor.dim() == 1:
                return tensor
            return tensor[:, whole] if tensor.shape[1] == num_all else tensor[:, :width]

        assert self.num_prompt_columns > 0, "columns are told apart by their number"
        return self._map(cut)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return replace(self, **{k: change(v) for k, v in values if v is not None})


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


def micro_batches(batch: Batch, *, max_tokens: int | None, packing: bool) -> list[Tensor]:
    """Indices of the sequences that go through the model together, the longest first.

    A micro-batch has at most `max_tokens` tokens: with packing its real ones, else rows x columns,
    padding included. A sequence that is longer goes alone. None: all at once, in order.
    """
    if max_tokens is None:
        return [torch.arange(len(batch), device=batch.input_ids.device)]
    prompts = batch.attention_mask[:, : batch.num_prompt_columns].sum(1).tolist()
    completions = batch.completion_mask.sum(1).clamp(min=1).tolist()
    lengths = [p + c for p, c in zip(prompts, completions, strict=True)]
    parts: list[list[int]] = []
    for row in sorted(range(len(batch)), key=lambda row: -lengths[row]):
        joined = [*parts[-1], row] if parts else [row]
        if packing:
            size = sum(lengths[r] for r in joined)
        else:
            width = max(prompts[r] for r in joined) + max(completions[r] for r in joined)
            size = len(joined) * width
        if parts and size <= max_tokens:
            parts[-1] = joined
        else:
            parts.append([row])
    return [torch.tensor(part, device=batch.input_ids.device) for part in parts]
