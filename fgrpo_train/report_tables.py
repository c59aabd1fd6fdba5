"""The tables of a report: settings, results, sampled completions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from fgrpo_train.charts import style
from fgrpo_train.report_cards import key
from fgrpo_train.run_records import RunRecord
from fgrpo_train.sample_completions import shorten

MAX_SAMPLES = 240
"""Completions in a page, of all its runs together."""
MAX_SAMPLE_CHARACTERS = 1500
NOT_COMPARED = ("run.name", "run.output_dir")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, classes: str = "") -> str:
    """A table that scrolls sideways by itself; head and cells are HTML."""
    cells = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    return (
        f'<div class="scroll"><table class="{classes}"><thead><tr>{titles}</tr></thead>'
        f"<tbody>{cells}</tbody></table></div>"
    )


def different_settings(runs: Sequence[RunRecord]) -> str:
    """The settings in which the runs differ: what a comparison is about."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    different = [
        name
        for name in names
        if name not in NOT_COMPARED and len({_value(run, name) for run in runs}) > 1
    ]
    if not different:
        return "<p>The runs have the same settings.</p>"
    return _settings_table(runs, different)


def all_settings(runs: Sequence[RunRecord]) -> str:
    """Every setting of every run, folded."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    content = _settings_table(runs, names)
    return f"<details><summary>All settings</summary>{content}</details>"


def _settings_table(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    head = ["setting", *(key(run.name, f"{style(n)} mean") for n, run in enumerate(runs))]
    rows = [[escape(name), *(escape(_value(run, name)) for run in runs)] for name in names]
    return table(head, rows, classes="settings")


def _value(run: RunRecord, name: str) -> str:
    if name not in run.settings:
        return "-"
    value = run.settings[name]
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else f"{value}"


def pass_at_k_table(runs: Sequence[RunRecord]) -> str:
    """pass@k as numbers, before -> after."""
    ks = sorted({k for run in runs for k in (*run.before, *run.after)})
    if not ks:
        return ""
    head = ["run", *(f"pass@{k}" for k in ks)]
    rows = [
        [
            key(run.name, f"{style(n)} mean"),
            *(arrow(run.before.get(k), run.after.get(k), "{:.1%}") for k in ks),
        ]
        for n, run in enumerate(runs)
    ]
    return table(head, rows, classes="numbers")


def arrow(before: float | None, after: float | None, form: str) -> str:
    """`before -> after`, as much of it as is known."""
    left, right = ("-" if v is None else form.format(v) for v in (before, after))
    return "-" if before is None and after is None else f"{left} &rarr; {right}"


def samples_table(runs: Sequence[RunRecord]) -> str:
    """Sampled completions; the page's script lets a reader search and sort them."""
    share = MAX_SAMPLES // len(runs)
    chosen = [(n, sample) for n, run in enumerate(runs) for sample in _spread(run, share)]
    chosen.sort(key=lambda item: -item[1]["step"])
    if not chosen:
        return ""
    recorded = sum(len(run.completions) for run in runs)
    head = ["run"] * (len(runs) > 1) + [
        "step", "reward", "advantage", "success rate", "tokens", "truncated", "prompt",
        "completion",
    ]  # fmt: skip
    rows = [
        [
            *([key(runs[n].name, f"{style(n)} mean")] if len(runs) > 1 else []),
            *(_number(sample.get(name)) for name in
              ("step", "reward", "advantage", "success_rate", "length")),
            "yes" if sample.get("truncated") else "no",
            *(_text(sample.get(name)) for name in ("prompt", "completion")),
        ]
        for n, sample in chosen
    ]  # fmt: skip
    return (
        '<section class="wide" id="samples"><h2>Sampled completions</h2>'
        "<p>Of each step the completions with the highest and the lowest reward, and some others. "
        f"{len(rows)} of the {recorded} recorded ones; all are in completions.jsonl.</p>"
        '<p class="tools" hidden><label>Search <input type="search"></label> '
        f"<output>{len(rows)}</output> shown; a click on a heading sorts.</p>"
        f"{table(head, rows, classes='samples')}</section>"
    )


def _spread(run: RunRecord, most: int) -> list[dict[str, Any]]:
    """Those of the last step and of steps evenly spread before it, the newest first."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for sample in run.completions:
        by_step.setdefault(sample["step"], []).append(sample)
    steps = sorted(by_step, reverse=True)
    largest = max((len(samples) for samples in by_step.values()), default=1)
    num_steps = max(1, most // largest)
    if len(steps) > num_steps:
        last = len(steps) - 1
        places = {round(i * last / max(1, num_steps - 1)) for i in range(num_steps)}
        steps = [steps[place] for place in sorted(places)]
    return [sample for step in steps for sample in by_step[step]][:most]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _text(value: str | None) -> str:
    return f'<div class="text">{escape(shorten(value or "", MAX_SAMPLE_CHARACTERS))}</div>'
