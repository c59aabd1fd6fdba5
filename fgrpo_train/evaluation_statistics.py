"""How certain a pass@k is, and how certain the difference of two policies.

Two sources of chance are kept apart. The bootstrap resamples the prompts: would other prompts of
the same kind say the same? m-out-of-n subsampling draws again from the completions of the given
prompts: would other completions say the same?

Dimensions: P prompts, K values of k, n completions of each prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fgrpo_train.evaluation import pass_at_k

RESAMPLES = 10_000
ITERATIONS = 50_000
LEVEL = 0.95
SEED = 0
ELEMENTS_PER_BLOCK = 1 << 22
"""Bounds the memory of a block of resamples: 32 MiB of float64."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """pass@k of a second policy minus that of a first, on the same prompts.

    over_prompts: with the interval of the paired bootstrap.
    over_samples: with the interval of m-out-of-n subsampling; None where k > m.
    sign_share: share of subsamples whose difference has the same sign.
    p: two-sided: twice the smaller share of subsamples on one side of 0, ties on both.
    """

    over_prompts: Estimate
    over_samples: Estimate | None
    sign_share: float | None
    p: float | None


def pass_at_ks(num_samples: int, correct: Integers, ks: Sequence[int]) -> Floats:
    """(P, K): the unbiased pass@k of each prompt."""
    counts = torch.from_numpy(np.asarray(correct, dtype=np.int64))
    return np.stack([pass_at_k(num_samples, counts, k).numpy() for k in ks], axis=1)


def bootstrap(values: Floats) -> list[Estimate]:
    """Mean over prompts of each column of (P, K), with its percentile bootstrap interval.

    P prompts are drawn with replacement, 10,000 times with a fixed seed, the same prompts for
    every column; the interval holds the middle 95 % of the means.

    Raises: ValueError without prompts.
    Source: Efron and Tibshirani 1993, chapter 13.
    """
    if values.ndim != 2 or not len(values):
        raise ValueError(f"values: expected shape (P, K) with P >= 1, received {values.shape}")
    rng = np.random.default_rng(SEED)
    num_prompts, num_columns = values.shape
    block = max(1, ELEMENTS_PER_BLOCK // (num_prompts * num_columns))
    means = [
        values[rng.integers(num_prompts, size=(min(block, RESAMPLES - start), num_prompts))].mean(1)
        for start in range(0, RESAMPLES, block)
    ]
    return _estimates(values.mean(0), np.concatenate(means))


def subsampled_means(
    num_samples: int,
    correct: Integers,
    ks: Sequence[int],
    *,
    subsample: int,
    iterations: int,
    rng: np.random.Generator,
) -> Floats:
    """(iterations, K): mean pass@k over prompts when each keeps `subsample` of its completions.

    m of the n completions of a prompt, drawn without replacement, hold X ~ Hypergeometric(c right,
    n - c wrong, m draws) right ones; pass@k is estimated from (m, X). Its expectation is the
    pass@k of all n, since a random k-subset of a random m-subset is a random k-subset.

    Raises: ValueError unless 1 <= k <= m <= n.
    """
    if not all(1 <= k <= subsample <= num_samples for k in ks):
        raise ValueError(
            f"expected 1 <= k <= subsample <= {num_samples}, received ks {list(ks)}, "
            f"subsample {subsample}"
        )
    table = pass_at_ks(subsample, np.arange(subsample + 1), ks)  # row X: what X right ones give
    sums = np.zeros((iterations, len(ks)))
    # Prompt by prompt: memory does not grow with the number of prompts.
    for count in np.asarray(correct).tolist():
        sums += table[rng.hypergeometric(count, num_samples - count, subsample, size=iterations)]
    return sums / len(correct)


def compare(
    num_samples: int,
    first: Integers,
    second: Integers,
    ks: Sequence[int],
    *,
    iterations: int = ITERATIONS,
) -> list[Difference]:
    """The differences second - first of the mean pass@k, for each k.

    m is a quarter of n: the F-GRPO paper (2602.06717) tests with m = 256 of n = 1024 completions
    and 50,000 iterations. It names m-out-of-n subsampling and no more; this is our reading: the
    prompts stay, each policy's completions are subsampled independently, and the sign of the
    difference is what has to hold. The interval is not rescaled from m to n: for pass@1 its width
    is sqrt((n - m) / m), about 1.7, times that of n completions, so it errs on the safe side.

    Args:
        first, second: (P,) right completions among the n of each prompt, prompts in the same order.
    Raises: ValueError if the shapes differ or there are no prompts.
    """
    if first.shape != second.shape:
        raise ValueError(
            f"expected counts of the same prompts, received {first.shape} and {second.shape}"
        )
    over_prompts = bootstrap(
        pass_at_ks(num_samples, second, ks) - pass_at_ks(num_samples, first, ks)
    )
    subsample = subsample_size(num_samples)
    small = [k for k in ks if k <= subsample]
    rng = np.random.default_rng(SEED)
    means = [
        subsampled_means(
            num_samples, counts, small, subsample=subsample, iterations=iterations, rng=rng
        )
        for counts in (first, second)
    ]
    # Rounded so that sums of equal terms in another order are a tie.
    differences = np.round(means[1] - means[0], 12)
    values = np.array([e.value for k, e in zip(ks, over_prompts, strict=True) if k in small])
    over_samples = dict(zip(small, _estimates(values, differences), strict=True))
    results = []
    for k, estimate in zip(ks, over_prompts, strict=True):
        if k not in over_samples:
            results.append(Difference(estimate, None, None, None))
            continue
        drawn = differences[:, small.index(k)]
        results.append(
            Difference(
                over_prompts=estimate,
                over_samples=over_samples[k],
                sign_share=float((np.sign(drawn) == np.sign(round(estimate.value, 12))).mean()),
                p=two_sided_p(drawn),
            )
        )
    return results


def subsample_size(num_samples: int) -> int:
    """m of m-out-of-n: a quarter of n, as the paper's 256 of 1024."""
    return max(1, num_samples // 4)


def two_sided_p(differences: Floats) -> float:
    """Twice the smaller of the shares at or below 0 and at or above 0, at most 1.

    The observed difference counts as one more draw, so p is never 0: 1 / (iterations + 1) is the
    least that a side can have.
    """
    smaller = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return min(1.0, 2 * (smaller + 1) / (len(differences) + 1))


def _estimates(values: Floats, drawn: Floats) -> list[Estimate]:
    tail = (1 - LEVEL) / 2
    lows, highs = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return [
        Estimate(float(value), float(low), float(high))
        for value, low, high in zip(values, lows, highs, strict=True)
    ]
