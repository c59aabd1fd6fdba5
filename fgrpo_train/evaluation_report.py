"""What a person sees of an evaluation: the table on the terminal, the JSON record, the plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
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
from fgrpo_train.report_html import BLUE, GREY, HEIGHT, ORANGE, WIDTH, Curve, line_chart

OVER_PROMPTS = f"{LEVEL:.0%} percentile bootstrap over prompts, {RESAMPLES} resamples"
_CSS = (
    "text { font: 11.5px system-ui, sans-serif; fill: #64748b; } .grid { stroke: #e8edf3; } "
    ".title { font-size: 14px; font-weight: 600; fill: #0f172a; }"
)
HEAD = 46
"""Height of a panel's title and legend."""


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
            "interval": OVER_PROMPTS,
            "pass_at_k": {str(k): asdict(estimate) for k, estimate in self.pass_at_k.items()},
            "distinct_correct": asdict(self.distinct_correct),
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
    """The curve of pass@k over k with its band, a whole SVG file."""
    curve = _curve(result.label, result.pass_at_k, BLUE)
    return _svg([("pass@k on held-out prompts", [curve])])


def comparison_plot(comparison: Comparison) -> str:
    """Both curves, and below them their difference, a whole SVG file."""
    first, second = comparison.first, comparison.second
    curves = [
        _curve(first.label, first.pass_at_k, GREY),
        _curve(second.label, second.pass_at_k, BLUE),
    ]
    found = {k: difference.over_prompts for k, difference in comparison.differences.items()}
    name = "second - first, with the paired interval"
    return _svg(
        [
            ("pass@k on held-out prompts", curves),
            ("Difference of pass@k", [_curve(name, found, ORANGE)]),
        ]
    )


def _curve(name: str, estimates: dict[int, Estimate], colour: str) -> Curve:
    return Curve(
        name,
        [(float(k), estimate.value) for k, estimate in estimates.items()],
        colour,
        dots=True,
        band=[(estimate.low, estimate.high) for estimate in estimates.values()],
    )


def _svg(panels: Sequence[tuple[str, Sequence[Curve]]]) -> str:
    height = len(panels) * (HEAD + HEIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}"><style>{_CSS}</style>'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    ]
    for number, (title, curves) in enumerate(panels):
        top = number * (HEAD + HEIGHT)
        parts.append(f'<text class="title" x="14" y="{top + 20}">{escape(title)}</text>')
        for column, curve in enumerate(curves):
            left = 14 + column * (WIDTH - 28) // len(curves)
            parts.append(
                f'<rect x="{left}" y="{top + 31}" width="14" height="3" fill="{curve.colour}"/>'
                f'<text x="{left + 19}" y="{top + 37}">{escape(curve.name)}</text>'
            )
        chart = line_chart(curves, x_label="k", log2_x=True)
        size = f'y="{top + HEAD}" width="{WIDTH}" height="{HEIGHT}" '
        parts.append(chart.replace("<svg ", f"<svg {size}", 1))
    return "".join(parts) + "</svg>"


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
