"""Evaluation: samples of fixed prompts with fixed seeds, counted, and the unbiased pass@k.

The work is planned as chunks, one call to the engine each. A chunk's prompts, size and seed follow
from the prompts and the evaluation's seed alone, so neither the number of processes nor a stop in
between changes what is counted.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fgrpo_train.prompts import Prompt
from fgrpo_train.rewards import Verifier, completion_texts, score
from fgrpo_train.rollout import RolloutEngine, Sampling

# Bounds the memory of one call to the engine; larger calls were not faster per sample.
MAX_SEQUENCES_PER_CALL = 2048

EVALUATION_SEED = 1
"""The same in every run, so that policies are compared on the same draws."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One call to the engine: so many completions of each of the prompts."""

    prompts: tuple[Prompt, ...]
    samples: int
    seed: int


@dataclass(frozen=True, slots=True)
class Counts:
    """What the completions of one prompt were.

    distinct: digests of the different right completions, sorted.
    seeds: of the calls that drew them.
    """

    prompt_id: str
    samples: int
    correct: int
    distinct: tuple[str, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that share an evaluation, and which one this is."""

    rank: int = 0
    count: int = 1

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, on every process."""
        if self.count == 1:
            return [value]
        values = [None] * self.count
        dist.all_gather_object(values, value)
        return values


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


def plan_chunks(prompts: Sequence[Prompt], *, samples_per_prompt: int, seed: int) -> list[Chunk]:
    """The calls that give each prompt its samples, none of more than MAX_SEQUENCES_PER_CALL.

    Several prompts share a call where they fit; one with more samples takes several calls. The seed
    of a call is a function of the evaluation's seed, the ids of its prompts and its first sample.

    Raises: ValueError if there are no prompts or samples, or if two prompts have the same id.
    """
    if not prompts or samples_per_prompt < 1:
        raise ValueError(
            f"expected prompts and samples_per_prompt >= 1, received {len(prompts)} prompts, "
            f"samples_per_prompt {samples_per_prompt}"
        )
    [(prompt_id, times)] = Counter(prompt.id for prompt in prompts).most_common(1)
    if times > 1:
        raise ValueError(f"expected prompts with different ids, received {prompt_id!r} {times}x")
    per_call = max(1, MAX_SEQUENCES_PER_CALL // samples_per_prompt)
    return [
        Chunk(
            prompts=part,
            samples=min(MAX_SEQUENCES_PER_CALL, samples_per_prompt - first),
            seed=_seed(seed, first, part),
        )
        for start in range(0, len(prompts), per_call)
        for part in [tuple(prompts[start : start + per_call])]
        for first in range(0, samples_per_prompt, MAX_SEQUENCES_PER_CALL)
    ]


def _seed(seed: int, first_sample: int, prompts: Iterable[Prompt]) -> int:
    # A string is hashed whole: seeds of different chunks do not coincide by arithmetic.
    text = f"{seed}/{first_sample}/{'/'.join(prompt.id for prompt in prompts)}"
    return random.Random(text).getrandbits(63)


def sample_chunk(
    engine: RolloutEngine,
    chunk: Chunk,
    verifier: Verifier,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
) -> list[Counts]:
    """Sample and score one chunk; the counts of its prompts, in order.

    A completion counts as right if its reward is exactly 1; one without a verdict does not.
    """
    rollouts = engine.generate(
        chunk.prompts, group_size=chunk.samples, sampling=sampling, seed=chunk.seed
    )
    correct = score(verifier, chunk.prompts, rollouts, tokenizer) == 1
    texts = completion_texts(rollouts, tokenizer)
    right: list[list[str]] = [[] for _ in chunk.prompts]
    for index, text, is_right in zip(
        rollouts.prompt_index.tolist(), texts, correct.tolist(), strict=True
    ):
        if is_right:
            right[index].append(_digest(text))
    return [
        Counts(prompt.id, chunk.samples, len(digests), tuple(sorted(set(digests))), (chunk.seed,))
        for prompt, digests in zip(chunk.prompts, right, strict=True)
    ]


def _digest(text: str) -> str:
    """Stands for a completion in counts of different ones: 64 bits, whatever its length."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def sample_chunks(
    engine: RolloutEngine,
    chunks: Sequence[Chunk],
    verifier: Verifier,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sampling: Sampling,
    ranks: Ranks,
) -> Iterator[list[Counts]]:
    """The counts of every chunk in order, on every process; the processes take turns."""
    for start in range(0, len(chunks), ranks.count):
        own: list[Counts] = []
        if start + ranks.rank < len(chunks):
            chunk = chunks[start + ranks.rank]
            own = sample_chunk(engine, chunk, verifier, tokenizer, sampling)
        yield from (counts for counts in ranks.gather(own) if counts)


def add_up(counts: Iterable[Counts]) -> dict[str, Counts]:
    """The counts of each prompt over all its chunks, by id, in order of first appearance."""
    totals: dict[str, Counts] = {}
    for part in counts:
        whole = totals.get(part.prompt_id)
        totals[part.prompt_id] = part if whole is None else replace(
            part,
            samples=whole.samples + part.samples,
            correct=whole.correct + part.correct,
            distinct=tuple(sorted({*whole.distinct, *part.distinct})),
            seeds=whole.seeds + part.seeds,
        )  # fmt: skip
    return totals


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
    ranks: Ranks | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Sample, score and take the means, on every process.

    The same engine weights, prompts and seed give the same result, whatever the number of
    processes.

    Args:
        ranks: the processes that share the work; None: this one alone.
        progress: called with (completions done, completions in all) after each chunk.
    Raises: ValueError if there are no prompts, or a k exceeds samples_per_prompt.
    """
    chunks = plan_chunks(prompts, samples_per_prompt=samples_per_prompt, seed=seed)
    if not all(1 <= k <= samples_per_prompt for k in ks):
        raise ValueError(
            f"expected every k in 1..samples_per_prompt, received ks {list(ks)}, "
            f"samples_per_prompt {samples_per_prompt}"
        )
    counts: list[Counts] = []
    for part in sample_chunks(
        engine, chunks, verifier, tokenizer, sampling=sampling, ranks=ranks or Ranks()
    ):
        counts += part
        if progress is not None:
            progress(sum(c.samples for c in counts), len(prompts) * samples_per_prompt)
    totals = add_up(counts).values()
    correct = torch.tensor([total.correct for total in totals])
    return EvaluationResult(
        success=float(correct.double().mean() / samples_per_prompt),
        pass_at_k={k: float(pass_at_k(samples_per_prompt, correct, k).mean()) for k in ks},
        num_prompts=len(prompts),
        samples_per_prompt=samples_per_prompt,
        distinct_correct=sum(len(total.distinct) for total in totals) / len(prompts),
    )
