"""Prompt augmentation: what iGRPO, TA-GRPO and HiLL do to the texts of prompts.

Pure functions on texts and numbers; sampling is the caller's. None of the three papers' prompts
were found (HiLL's code has its own), so the wording here is ours.

Templates are `str.format` strings; what is filled in may contain braces.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from itertools import permutations

import torch
from torch import Tensor

REFINE_TEMPLATE = (
    "{prompt}\n\nHere is an earlier attempt:\n\n{draft}\n\n"
    "It may be right or wrong. Use what is right in it and write a better solution."
)
COUNTDOWN_REFINE_TEMPLATE = "{draft}:{prompt}"
"""In the alphabet of the tiny policy: `7+3+10:3,7,10=20:`."""

RESTATED_TEMPLATES = (
    "Solve the following problem.\n\n{prompt}",
    "Question:\n{prompt}\n\nAnswer:",
    "{prompt}\n\nWork it out step by step.",
    "Consider the problem below and find its answer.\n\n<problem>\n{prompt}\n</problem>",
)
"""Ways to ask the same: they change the frame, never the problem, so the answer stays."""

HINT_REQUEST_TEMPLATE = (
    "A student could not solve this problem.\n\nProblem:\n{prompt}\n\nThe student's attempt:\n"
    "{attempt}\n\nA reference solution:\n{solution}\n\nWrite one short hint that helps the student "
    "to find the solution alone. Do not state the answer or steps that give it away."
)
HINTED_TEMPLATE = "{prompt}\n\nHint: {hint}"

_COUNTDOWN = re.compile(r"(\d+(?:,\d+)*)=(\d+):")


def best_draft(drafts: Sequence[str], rewards: Sequence[float | None]) -> str:
    """iGRPO, stage 1: the draft with the highest reward.

    Of several the first; a draft without a reward (None or NaN) comes last. When none is right some
    draft is used all the same, as in the paper. With success rate V the best of N drafts is right
    with probability 1 - (1 - V)^N.
    Raises: ValueError if there is no draft, or not one reward for each.
    Source: iGRPO 2602.09000; how it breaks ties is not said.
    """
    if not drafts or len(drafts) != len(rewards):
        raise ValueError(
            f"expected drafts and a reward for each, received {len(drafts)} and {len(rewards)}"
        )
    values = [-math.inf if r is None or math.isnan(r) else r for r in rewards]
    return drafts[values.index(max(values))]


def second_stage_prompt(prompt: str, draft: str, *, template: str = REFINE_TEMPLATE) -> str:
    """iGRPO, stage 2: the prompt with a draft in it.

    Only completions of this prompt are trained on; evaluation uses the plain prompt. N drafts and G
    completions cost as much as N + G samples (4 + 4 in the paper's runs, against 8).
    Source: iGRPO 2602.09000; the template is ours.
    """
    return template.format(prompt=prompt, draft=draft)


def permuted_countdown(prompt: str, *, count: int, rng: random.Random) -> list[str]:
    """TA-GRPO for countdown: `3,7,10=20:` with its numbers in other orders; the answers stay right.

    Returns: at most `count` different prompts, none the one given; fewer where numbers repeat.
    Raises: ValueError for a prompt that is not of that form.
    Source: TA-GRPO 2601.22478, whose transforms are paraphrase, renaming and format (3 of them).
    """
    match = _COUNTDOWN.fullmatch(prompt)
    if match is None:
        raise ValueError(f"prompt: expected the form '3,7,10=20:', received {prompt!r}")
    numbers = tuple(match[1].split(","))
    others = sorted(set(permutations(numbers)) - {numbers})
    return [f"{','.join(p)}={match[2]}:" for p in rng.sample(others, min(count, len(others)))]


def restated(prompt: str, *, count: int, rng: random.Random) -> list[str]:
    """TA-GRPO for problems in words: the same problem in `count` different frames.

    The problem's own text is not touched, so its answer cannot change.
    Raises: ValueError for more than there are templates.
    Source: the "format" transform of TA-GRPO 2601.22478; paraphrases by a model are not made here.
    """
    if not 0 <= count <= len(RESTATED_TEMPLATES):
        raise ValueError(f"count: expected 0 to {len(RESTATED_TEMPLATES)}, received {count}")
    return [template.format(prompt=prompt) for template in rng.sample(RESTATED_TEMPLATES, count)]


def pooled_group_ids(origins: Sequence[str], *, group_size: int) -> list[str]:
    """TA-GRPO: completions of a problem's variants form one group.

        A = (r - mean) / std over the G completions of each of the problem's V variants

    Give it to `group_advantages(group_ids=...)`. A pool has no signal with probability
    prod p_v^G + prod (1 - p_v)^G, at most the largest of its variants'. It also has V times the
    samples: compare with group_size V G.

    Args: origins: for each sampled prompt, the id of the problem it states; variants share one.
    Returns: one id a completion, prompt-major.
    Source: TA-GRPO 2601.22478. Its version 5 scores a variant's completions under the original
        prompt in the importance ratio; that is not done here.
    """
    if group_size < 1:
        raise ValueError(f"group_size: expected a number >= 1, received {group_size}")
    return [origin for origin in origins for _ in range(group_size)]


def hint_request(
    prompt: str, attempt: str, solution: str, *, template: str = HINT_REQUEST_TEMPLATE
) -> str:
    """HiLL: what the hinter is asked, with one failed completion and a reference solution.

    Source: HiLL 2604.00698; the template is ours.
    """
    return template.format(prompt=prompt, attempt=attempt, solution=solution)


def hinted_prompt(prompt: str, hint: str, *, template: str = HINTED_TEMPLATE) -> str:
    """HiLL: the prompt that takes an all-wrong prompt's place, also in the update."""
    return template.format(prompt=prompt, hint=hint.strip())


def leaks_answer(hint: str, answer: str) -> bool:
    """HiLL's gate: whether a hint states the answer.

    Case and white space between words and signs do not matter; part of a longer word or number does
    not count.
    Source: derived. HiLL penalises hints that leak the answer; its exact rule was not found.
    """
    parts = [re.escape(part) for part in re.findall(r"\w+|[^\w\s]", answer)]
    pattern = r"(?<![\w.])" + r"\s*".join(parts) + r"(?!\w|\.\d)"
    return bool(parts) and re.search(pattern, hint, re.IGNORECASE) is not None


def prob_term(success_rate: float, *, num_samples: int, kind: str = "non_deg") -> float:
    """HiLL: how much a prompt can teach at this success rate.

        non_deg   1 - p^n - (1 - p)^n, the probability that n samples are not all alike
        variance  p (1 - p)

    0 at p = 0 and p = 1 for both.
    Source: HiLL 2604.00698 and its code.
    """
    if not 0 <= success_rate <= 1:
        raise ValueError(f"success_rate: expected a number in [0, 1], received {success_rate}")
    if kind == "non_deg":
        return 1 - success_rate**num_samples - (1 - success_rate) ** num_samples
    if kind == "variance":
        return success_rate * (1 - success_rate)
    raise ValueError(f"kind: expected 'non_deg' or 'variance', received {kind!r}")


def hint_gain(
    hinted_rate: float, original_rate: float, *, num_samples: int, kind: str = "non_deg"
) -> float:
    """HiLL: prob_term with the hint minus prob_term without."""
    hinted, original = (
        prob_term(rate, num_samples=num_samples, kind=kind) for rate in (hinted_rate, original_rate)
    )
    return hinted - original


def best_hint(
    hinted_rates: Sequence[float],
    original_rate: float = 0.0,
    *,
    num_samples: int,
    kind: str = "non_deg",
) -> int | None:
    """HiLL: index of the hint with the largest gain, the first of several; None if none gains.

    Args: hinted_rates: success rate of the reasoner with each of the M hints (4 in the paper), over
        num_samples completions (8). original_rate: 0 for the all-wrong groups that get hints.
    """
    gains = [
        hint_gain(rate, original_rate, num_samples=num_samples, kind=kind) for rate in hinted_rates
    ]
    best = max(gains, default=0.0)
    return gains.index(best) if best > 0 else None


def hint_reliance(logps: Tensor, hinted_logps: Tensor, mask: Tensor, correct: Tensor) -> float:
    """HiLL: how little the right completions need the hint; negative where it makes them likely.

        mean over right completions of the mean over tokens of
        logp(y | prompt) - logp(y | prompt, hint)

    Args: logps, hinted_logps: (B, T) of the same completions, scored without and with the hint.
        mask: (B, T) bool. correct: (B,) bool.
    Returns: 0.0 when none is right.
    Source: HiLL 2604.00698 and its code.
    """
    rows = correct & mask.any(1)
    if not rows.any():
        return 0.0
    difference = torch.where(mask, logps.double() - hinted_logps.double(), 0.0)[rows]
    return float((difference.sum(1) / mask[rows].sum(1)).mean())


def hinter_reward(
    hinted_rate: float,
    reliance: float,
    original_rate: float = 0.0,
    *,
    num_samples: int,
    kind: str = "non_deg",
    temperature: float = 0.3,
    passes_gate: bool = True,
    gate_penalty: float = -1.0,
) -> float:
    """HiLL: what a hint earns the hinter, who is trained with GRPO over the M hints of a prompt.

        prob_term(hinted) exp(min(reliance, 0) / temperature)      if hint_gain > 0, else 0
        gate_penalty                                               if the hint fails the gate

    A hint that makes answers likely only where it is given teaches little that transfers, and the
    exponential takes its reward away.
    Source: HiLL 2604.00698, `transfer_weighted_non_deg` with T = 0.3. The size of the penalty was
        not found; -1 is ours.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number > 0, received {temperature}")
    if not passes_gate:
        return gate_penalty
    if hint_gain(hinted_rate, original_rate, num_samples=num_samples, kind=kind) <= 0:
        return 0.0
    term = prob_term(hinted_rate, num_samples=num_samples, kind=kind)
    return term * math.exp(min(reliance, 0.0) / temperature)
