"""Evaluation: success rate and unbiased pass@k on a fixed set of prompts, with fixed seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from fgrpo_train.prompts import Prompt
from fgrpo_train.rewards import Verifier, completion_texts, score
from fgrpo_train.rollout import RolloutEngine, Sampling

# Bounds the memory of one call to the engine; larger calls were not faster per sample.
MAX_SEQUENCES_PER_CALL = 2048


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Means over prompts.

    success: share of right completions (= pass@1).
    pass_at_k: {k: estimated probability that at least one of k completions is right}.
    distinct_correct: number of different right completions per prompt.
    """

    success: float
    pass_at_k: dict[int, float]
    num_prompts: int
    samples_per_prompt: int
    distinct_correct: float


def pass_at_k(num_samples: int, num_correct: torch.Tensor, k: int) -> torch.Tensor:
    """Unbiased estimate of pass@k for each prompt, float64.

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{i=0}^{k-1} (n - c - i) / (n - i)

    Factors stay in [0, 1], so nothing overflows; one is 0 if k > n - c, and pass@k exactly 1.

    Args:
        num_samples: n, completions drawn for each prompt.
        num_correct: c, right ones among them, any shape, integer.
        k: in 1..n.
    Raises: ValueError if k or a count is out of range.
    Source: Chen et al. 2021 (2107.03374), section 2.1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k: expected 1..{num_samples} (the number of samples), received {k}")
    if num_correct.numel() and not 0 <= num_correct.min() <= num_correct.max() <= num_samples:
        raise ValueError(f"num_correct: expected 0..{num_samples}, received {num_correct}")
    drawn = torch.arange(k, dtype=torch.float64)
    wrong_left = (num_samples - num_correct.double().unsqueeze(-1) - drawn).clamp(min=0)
    return 1 - (wrong_left / (num_samples - drawn)).prod(-1)


def evaluate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    verifier: Verifier,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples_per_prompt: int,
    sampling: Sampling,
    seed: int,
    ks: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Sample and score; the same engine weights, prompts and seed give the same result.

    A completion counts as right if its reward is exactly 1; one without a verdict does not.

    Args:
        progress: called with (prompts done, prompts in all) after each call to the engine.
    Raises: ValueError if there are no prompts, or a k exceeds samples_per_prompt.
    """
    if not prompts or not all(1 <= k <= samples_per_prompt for k in ks):
        raise ValueError(
            f"expected prompts and every k in 1..samples_per_prompt, received {len(prompts)} "
            f"prompts, ks {list(ks)}, samples_per_prompt {samples_per_prompt}"
        )
    num_correct, num_distinct = [], []
    prompts_per_call = max(1, MAX_SEQUENCES_PER_CALL // samples_per_prompt)
    for start in range(0, len(prompts), prompts_per_call):
        part = prompts[start : start + prompts_per_call]
        rollouts = engine.generate(
            part, group_size=samples_per_prompt, sampling=sampling, seed=seed + start
        )
        correct = score(verifier, part, rollouts, tokenizer) == 1
        texts = completion_texts(rollouts, tokenizer)
        for group in torch.arange(len(texts)).view(len(part), samples_per_prompt):
            right = [texts[i] for i in group.tolist() if correct[i]]
            num_correct.append(len(right))
            num_distinct.append(len(set(right)))
        if progress is not None:
            progress(start + len(part), len(prompts))
    counts = torch.tensor(num_correct)
    return EvaluationResult(
        success=float(counts.double().mean() / samples_per_prompt),
        pass_at_k={k: float(pass_at_k(samples_per_prompt, counts, k).mean()) for k in ks},
        num_prompts=len(prompts),
        samples_per_prompt=samples_per_prompt,
        distinct_correct=sum(num_distinct) / len(prompts),
    )
