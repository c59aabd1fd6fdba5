"""What a person sees of an evaluation: the table on the terminal, the JSON record, the plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fgrpo_train.evaluation_folder import Fingerprint
from fgrpo_train.evaluation_statistics import (
    ITERATIONS,
    LEVEL,
    RESAMPLES,
    Difference,
    Estimate,
    subsample_size,
)
from fgrpo_train.passk_plot import BLUE, GREY, ORANGE, Band, Panel, plot

OVER_PROMPTS = f"{LEVEL:.0%} percentile bootstrap over prompts, {RESAMPLES} resamples"
TITLE = "pass@k on held-out prompts"


@dataclass(frozen=True)
class Result:
    """One policy on its prompts."""

    label: str
    fingerprint: Fingerprint
    num_samples: int
    correct: dict[str, int]
    """Right completions of each prompt that has all of its samples."""
    num_excluded: int
    """Prompts that have not."""
    pass_at_k: dict[int, Estimate]
    distinct_correct: Estimate

    def as_json(self) -> dict[str, Any]:
        """The content of result.json."""
        return {
            "policy": self.label,
            "num_prompts": len(self.correct),
            "excluded_prompts": self.num_excluded,
            "samples_per_prompt": self.num_samples,
            "pass_at_k": {str(k): e.value for k, e in self.pass_at_k.items()},
            "interval": {str(k): [e.low, e.high] for k, e in self.pass_at_k.items()},
            "distinct_correct": self.distinct_correct.value,
            "distinct_correct_interval": [self.distinct_correct.low, self.distinct_correct.high],
            "intervals": OVER_PROMPTS,
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class Comparison:
    """Two policies on the prompts that both have finished; differences are second - first."""

    first: Result
    second: Result
    num_prompts: int
    differences: dict[int, Difference]

    @property
    def over_samples(self) -> str:
        """What the interval over samples and p are."""
        n = self.first.num_samples
        return f"{subsample_size(n)}-out-of-{n} subsampling of completions, {ITERATIONS} iterations"

    def as_json(self) -> dict[str, Any]:
        """The content of versus-*.json."""
        return {
            "first": self.first.as_json(),
            "second": self.second.as_json(),
            "num_prompts": self.num_prompts,
            "over_prompts": OVER_PROMPTS + ", paired",
            "over_samples": self.over_samples,
            "differences": {str(k): asdict(found) for k, found in self.differences.items()},
        }


def result_table(result: Result) -> str:
    """pass@k with intervals, in percent."""
    rows = [f"  pass@{k:<6}{_percent(estimate)}" for k, estimate in result.pass_at_k.items()]
    return "\n".join(
        [
            "",
            f"{result.label}: {_size(result)}",
            "",
            *rows,
            f"  {'answers':<11}{_number(result.distinct_correct)}   "
            "different right answers per prompt",
            "",
            f"  [ ]: {OVER_PROMPTS}.",
        ]
    )


def comparison_table(comparison: Comparison) -> str:
    """pass@k of both and the difference with two intervals and p, in percent."""
    first, second = comparison.first, comparison.second
    rows = [
        f"  pass@{k:<6}{_percent(first.pass_at_k[k]):<23}{_percent(second.pass_at_k[k]):<23}"
        f"{_percent(found.over_prompts, '+'):<25}{_braces(found.over_samples):<18}{_p(found.p)}"
        for k, found in comparison.differences.items()
    ]
    lines = [
        "",
        f"A  {first.label}: {_size(first)}",
        f"B  {second.label}: {_size(second)}",
        "",
        f"  {'':11}{'A':>6}{'':17}{'B':>6}{'':17}{'B - A':>6}{'':19}{'{ }':<18}p",
        *rows,
        "",
        f"  [ ]: {OVER_PROMPTS}, paired for B - A.",
        f"  {{ }}, p: {comparison.over_samples}.",
    ]
    others = differences_of_settings(first, second)
    return "\n".join(lines + [f"  They differ in {text}." for text in others])


def differences_of_settings(first: Result, second: Result) -> list[str]:
    """Settings of sampling that differ: allowed, but to be known."""
    return [
        f"{name}: {value} and {second.fingerprint.get(name)}"
        for name, value in first.fingerprint.items()
        if name.startswith("sampling.") and value != second.fingerprint.get(name)
    ]


def files_text(folder: Path, files: Sequence[Path]) -> str:
    """Where the files are."""
    return f"\n\nFiles in {folder}/: {', '.join(file.name for file in files)}"


def result_plot(result: Result) -> str:
    """The curve of pass@k over k, an SVG file."""
    return plot([Panel(TITLE, [Band(result.label, result.pass_at_k, BLUE)])])


def comparison_plot(comparison: Comparison) -> str:
    """Both curves, and below them their difference, an SVG file."""
    first, second = comparison.first, comparison.second
    bands = [Band(first.label, first.pass_at_k, GREY), Band(second.label, second.pass_at_k, BLUE)]
    change = {k: found.over_prompts for k, found in comparison.differences.items()}
    name = "second - first, with the paired interval"
    return plot([Panel(TITLE, bands), Panel("Difference", [Band(name, change, ORANGE)])])


def _size(result: Result) -> str:
    left_out = f", {result.num_excluded} unfinished prompts left out" if result.num_excluded else ""
    return f"{len(result.correct)} prompts x {result.num_samples} completions{left_out}"


def _percent(estimate: Estimate, sign: str = "") -> str:
    value, low, high = (100 * number for number in (estimate.value, estimate.low, estimate.high))
    return f"{value:{sign}6.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def _braces(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{{{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}}}"


def _number(estimate: Estimate) -> str:
    return f"{estimate.value:6.1f} [{estimate.low:.1f}, {estimate.high:.1f}]"


def _p(p: float | None) -> str:
    if p is None:
        return "-"
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"
