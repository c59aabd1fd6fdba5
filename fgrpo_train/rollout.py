"""Rollout: prompts -> groups of sampled completions with the log-probs of their tokens.

Dimensions: P prompts, G group size, B = P G sequences (prompt-major), T completion tokens.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from fgrpo_train.prompts import Prompt

# Dropping finished rows copies the cache; below this share the copy costs more than the rows.
DROP_FINISHED_SHARE = 0.25


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


class RolloutEngine(Protocol):
    """What samples completions; it holds its own copy of the weights."""

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Rollouts: ...

    def load_weights(self, model: torch.nn.Module) -> None: ...


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


class HFEngine:
    """Samples from a transformers causal LM with a key-value cache, in the calling process.

    The prompt is read once per prompt, not once per sample; finished rows are dropped as they
    accumulate. The model is a copy: training the original does not change what is sampled until
    `load_weights`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    def load_weights(self, model: torch.nn.Module) -> None:
        """Copy the weights of `model`, which must have the same parameters (names and shapes)."""
        self.model.load_state_dict(model.state_dict())

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Rollouts:
        """`group_size` completions of each prompt; equal weights, prompts and seed give equal ids.

        Raises: ValueError if there are no prompts, one has no tokens, or group_size < 1.
        """
        if not prompts or group_size < 1 or not all(prompt.token_ids for prompt in prompts):
            raise ValueError(
                f"expected prompts with tokens and group_size >= 1, received {len(prompts)} "
                f"prompts, lengths {[len(p.token_ids) for p in prompts]}, group_size {group_size}"
            )
        device = self.model.device
        generator = torch.Generator(device).manual_seed(seed)
        eos = torch.tensor(sampling.eos_token_ids, device=device)
        state = _DecodingState.start(prompts, self.model)
        state.repeat(group_size)
        batch = len(prompts) * group_size
        rows = torch.arange(batch, device=device)
        finished = torch.zeros(batch, dtype=torch.bool, device=device)
        ids = torch.full((batch, sampling.max_new_tokens), sampling.pad_token_id, device=device)
        logps = torch.zeros(batch, sampling.max_new_tokens, device=device)
        for t in range(sampling.max_new_tokens):
            token_ids, token_logps = _sample(state.logits, sampling.temperature, generator)
            ids[rows, t] = token_ids
            logps[rows, t] = token_logps
            finished |= torch.isin(token_ids, eos)
            num_finished = int(finished.sum())
            if num_finished == len(rows) or t + 1 == sampling.max_new_tokens:
                break
            if num_finished >= DROP_FINISHED_SHARE * len(rows):
                running = (~finished).nonzero().squeeze(1)
                state.select(running)
                rows, token_ids, finished = rows[running], token_ids[running], finished[running]
            state.advance(token_ids)
        return _rollouts(ids[:, : t + 1], logps[:, : t + 1], sampling, group_size)


@dataclass
class _DecodingState:
    """The rows being decoded: cache, attention mask (left-padded prompts), next-token logits."""

    model: PreTrainedModel
    cache: DynamicCache
    attention_mask: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def start(cls, prompts: Sequence[Prompt], model: PreTrainedModel) -> "_DecodingState":
        """Read the prompts, one row each."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        # The mask hides padding, so any id will do there.
        ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=model.device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[row, longest - len(prompt.token_ids) :] = 1
        state = cls(model, DynamicCache(config=model.config), mask, torch.empty(0))
        state._forward(ids, (mask.cumsum(1) - 1).clamp(min=0))
        return state

    def repeat(self, times: int) -> None:
        """Each row `times` times in succession."""
        self.cache.batch_repeat_interleave(times)
        self.attention_mask = self.attention_mask.repeat_interleave(times, 0)
        self.logits = self.logits.repeat_interleave(times, 0)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows."""
        self.cache.batch_select_indices(rows)
        self.attention_mask = self.attention_mask[rows]

    def advance(self, token_ids: torch.Tensor) -> None:
        """Append one token to each row."""
        positions = self.attention_mask.sum(1, keepdim=True)
        one = torch.ones_like(positions)
        self.attention_mask = torch.cat([self.attention_mask, one], dim=1)
        self._forward(token_ids.unsqueeze(1), positions)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        output = self.model(
            input_ids=ids,
            attention_mask=self.attention_mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits = output.logits[:, -1]


def _sample(
    logits: torch.Tensor, temperature: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row from softmax(logits / temperature), and its log-prob there."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logps = (logits / temperature).log_softmax(-1)
    token_ids = torch.multinomial(logps.exp(), 1, generator=generator)
    return token_ids.squeeze(1), logps.gather(1, token_ids).squeeze(1).float()


def _rollouts(
    ids: torch.Tensor, logps: torch.Tensor, sampling: Sampling, group_size: int
) -> Rollouts:
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
