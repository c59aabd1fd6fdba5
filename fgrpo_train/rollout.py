"""Rollout: prompts -> groups of sampled completions with the log-probs of their tokens.

Dimensions: P prompts, G group size, B = P G sequences (prompt-major), T completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from fgrpo_train.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: from softmax(logits / temperature), untruncated, up to an EOS token."""

    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    temperature: float = 1.0
    max_new_tokens: int = 16

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature: expected > 0, received {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected >= 1, received {self.max_new_tokens}")
        if not self.eos_token_ids:
            raise ValueError("eos_token_ids: expected at least one token id, received none")


@dataclass
class Rollouts:
    """Sampled completions, `group_size` consecutive rows for each prompt, on the CPU.

    completion_ids: (B, T) int64, right-padded; T is the longest completion.
    completion_mask: (B, T) bool, True up to and including the first EOS token.
    logps: (B, T) float32, log-probs of the sampled tokens in the distribution they were drawn
        from (temperature included); 0 where the mask is False.
    truncated: (B,) bool, no EOS token within max_new_tokens.
    prompt_index: (B,) int64, index into the prompts that were given.
    """

    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    logps: torch.Tensor
    truncated: torch.Tensor
    prompt_index: torch.Tensor


class EngineError(RuntimeError):
    """An engine that died, hangs or cannot start, in the words of a person who has to act."""


class RolloutEngine(Protocol):
    """What samples completions; it holds its own copy of the weights.

    `sleep` gives its memory to the update, `wake` takes it back: the weights are then those of
    before. `load_weights` takes every parameter by its name in the transformers model, tied ones
    once. `close` ends what the engine started.
    """

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Rollouts: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def check_request(prompts: Sequence[Prompt], group_size: int) -> None:
    """Raises: ValueError if there are no prompts, one has no tokens, or group_size < 1."""
    if not prompts or group_size < 1 or not all(prompt.token_ids for prompt in prompts):
        raise ValueError(
            f"expected prompts with tokens and group_size >= 1, received {len(prompts)} "
            f"prompts, lengths {[len(p.token_ids) for p in prompts]}, group_size {group_size}"
        )


def completion_mask_from_ids(
    completion_ids: torch.Tensor, eos_token_ids: Sequence[int]
) -> torch.Tensor:
    """True up to and including the first EOS token of each row, (B, T) bool.

    What follows the first EOS does not matter, so the pad token may be an EOS token. A row
    without EOS is True throughout.
    """
    is_eos = _is_eos(completion_ids, eos_token_ids)
    eos_before = is_eos.cumsum(1) - is_eos.long()
    return eos_before == 0


def _is_eos(ids: torch.Tensor, eos_token_ids: Sequence[int]) -> torch.Tensor:
    return torch.isin(ids, torch.tensor(eos_token_ids, device=ids.device))


def make_rollouts(
    ids: torch.Tensor, logps: torch.Tensor, sampling: Sampling, group_size: int
) -> Rollouts:
    """The record of sampled tokens: ids and logps (B, T); what follows an EOS is ignored."""
    mask = completion_mask_from_ids(ids, sampling.eos_token_ids)
    # Rows that were finished but not yet dropped went on for some tokens.
    ids = ids.masked_fill(~mask, sampling.pad_token_id)
    return Rollouts(
        completion_ids=ids.cpu(),
        completion_mask=mask.cpu(),
        logps=logps.masked_fill(~mask, 0.0).cpu(),
        truncated=~(_is_eos(ids, sampling.eos_token_ids) & mask).any(1).cpu(),
        prompt_index=torch.arange(len(ids) // group_size).repeat_interleave(group_size),
    )
