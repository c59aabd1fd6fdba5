"""Rollouts by transformers, in the training process: the reference for other engines.

Dimensions: P prompts, G group size, B = P G sequences (prompt-major), T completion tokens.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from fgrpo_train.prompts import Prompt
from fgrpo_train.rollout import Rollouts, Sampling, check_request, make_rollouts

# Dropping finished rows copies the cache; below this share the copy costs more than the rows.
DROP_FINISHED_SHARE = 0.25


class HFEngine:
    """Samples from a transformers causal LM with a key-value cache, in the calling process.

    The prompt is read once per prompt, not once per sample; finished rows are dropped as they
    accumulate. The model is a copy: training the original does not change what is sampled until
    `load_weights`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights, which must be all of the model's parameters by their names.

        Persistent buffers may be among them.
        Raises: ValueError for a name or a shape that the model does not have, or a missing name.
        """
        parameters = dict(self.model.named_parameters())
        buffers = dict(self.model.named_buffers())
        for name, tensor in weights:
            own = parameters.pop(name, buffers.get(name))
            if own is None or own.shape != tensor.shape:
                expected = "no such parameter" if own is None else tuple(own.shape)
                raise ValueError(f"{name}: expected {expected}, received {tuple(tensor.shape)}")
            own.copy_(tensor)
        if parameters:
            raise ValueError(f"expected every parameter, received none for {sorted(parameters)}")

    def sleep(self) -> None:
        """Nothing: the copy of the weights stays where it is."""

    def wake(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing: there is no other process."""

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Rollouts:
        """`group_size` completions of each prompt; equal weights, prompts and seed give equal ids.

        Raises: ValueError if there are no prompts, one has no tokens, or group_size < 1.
        """
        check_request(prompts, group_size)
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
        return make_rollouts(ids[:, : t + 1], logps[:, : t + 1], sampling, group_size)


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
