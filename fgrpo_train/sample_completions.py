"""A few completions of each step for people to read: curves do not show what was written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fgrpo_kernels import GroupAdvantages
from fgrpo_train.prompts import Prompt
from fgrpo_train.rewards import completion_texts
from fgrpo_train.rollout import Rollouts

SAMPLES_PER_STEP = 4

MAX_CHARACTERS = 4000
"""Of a text; longer ones lose their middle, since an answer stands at the end."""


def sample_completions(
    prompts: Sequence[Prompt],
    rollouts: Rollouts,
    rewards: torch.Tensor,
    groups: GroupAdvantages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: str,
) -> list[dict[str, Any]]:
    """The completions with the highest and the lowest reward and some others, as flat records.

    Args:
        prompts: those given to the engine; `rollouts.prompt_index` points into them.
        rewards: (B,), NaN where there is no verdict; of equal ones the first counts.
        groups: of these rewards.
        seed: of the choice of the others.
    """
    rows = _choose(rewards, random.Random(seed))
    chosen = replace(
        rollouts,
        completion_ids=rollouts.completion_ids[rows],
        completion_mask=rollouts.completion_mask[rows],
        truncated=rollouts.truncated[rows],
    )
    texts = completion_texts(chosen, tokenizer)
    samples = []
    for row, text in zip(rows, texts, strict=True):
        prompt = prompts[int(rollouts.prompt_index[row])]
        samples.append(
            {
                "prompt_id": prompt.id,
                "prompt": shorten(prompt.text),
                "completion": shorten(text),
                "reward": float(rewards[row]),
                "advantage": float(groups.advantages[row]),
                "success_rate": float(groups.success_rate[row]),
                "length": int(rollouts.completion_mask[row].sum()),
                "truncated": bool(rollouts.truncated[row]),
            }
        )
    return samples


def _choose(rewards: torch.Tensor, draw: random.Random) -> list[int]:
    best = int(rewards.nan_to_num(nan=-torch.inf).argmax())
    worst = int(rewards.nan_to_num(nan=torch.inf).argmin())
    rows = list(dict.fromkeys([best, worst]))
    others = [row for row in range(len(rewards)) if row not in rows]
    return rows + draw.sample(others, min(SAMPLES_PER_STEP - len(rows), len(others)))


def shorten(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The text without its middle if it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
