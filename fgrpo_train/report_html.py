"""report.html: one self-contained page about one run, or about several laid over each other.

The page loads nothing and sends nothing: its policy (CSP) allows only its own style and script, so
that a completion with HTML in it could not do anything even if it were not escaped. Without
scripts, everything but the crosshair and the search is there.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fgrpo_train.charts import style
from fgrpo_train.report_cards import (
    METRIC_CARDS,
    SMOOTHING_STEPS,
    duration,
    evaluation_cards,
    histogram_card,
    key,
    metric_card,
    other_metrics,
    pass_at_k_card,
    success_card,
    time_card,
    trailing_means,
    values,
)
from fgrpo_train.report_tables import (
    all_settings,
    arrow,
    different_settings,
    pass_at_k_table,
    samples_table,
)
from fgrpo_train.run_folder import RunFolder, write_whole
from fgrpo_train.run_records import RunRecord, load_runs
from fgrpo_train.settings import ConfigError

ASSETS = Path(__file__).parent / "assets"


def write_report(folders: Sequence[Path], out: Path | None) -> Path:
    """Write the page about the runs in these folders; returns where it lies.

    Args:
        out: none: report.html of the run, or comparison.html in the folder of the first.
    Raises: ConfigError if a folder is no run or the page cannot be written.
    """
    runs = load_runs(folders)
    if out is None:
        first = RunFolder(folders[0], new=False)
        out = first.report if len(runs) == 1 else first.comparison
    try:
        write_whole(out, render_report(runs))
    except OSError as error:
        raise ConfigError(f"--out: cannot write {out}: {error.strerror}") from None
    return out


def render_report(runs: Sequence[RunRecord]) -> str:
    """The page: in what the runs differ, what rose, the curves, samples, every setting."""
    css, script = ((ASSETS / name).read_text() for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{css}</style></head>
<body><main>
<h1>{escape(title)}</h1>
{_single_header(runs[0]) if len(runs) == 1 else _comparison_header(runs)}
<div class="cards">
{success_card(runs)}
{pass_at_k_card(runs)}
{"".join(evaluation_cards(runs))}
{histogram_card(runs)}
{"".join(metric_card(runs, *metric) for metric in METRIC_CARDS)}
{time_card(runs)}
{samples_table(runs)}
</div>
{other_metrics(runs)}
{all_settings(runs)}
</main><script>{script}</script></body></html>
"""


def _single_header(run: RunRecord) -> str:
    tiles = "".join(f"<div><b>{value}</b><span>{text}</span></div>" for value, text in _tiles(run))
    return (
        f'<p class="subtitle">{_subtitle(run)}</p>{_status(run)}'
        f'<div class="tiles">{tiles}</div>{pass_at_k_table([run])}'
    )


def _comparison_header(runs: Sequence[RunRecord]) -> str:
    boxes = ""
    for number, run in enumerate(runs):
        (value, text), *others = _tiles(run)
        lines = "".join(f"<span><em>{v}</em> {t}</span>" for v, t in others)
        boxes += (
            f"<div>{key(run.name, f'{style(number)} mean')}<b>{value}</b><span>{text}</span>"
            f"{lines}{_status(run)}</div>"
        )
    return (
        f"<h2>Settings that differ</h2>{different_settings(runs)}"
        f'<div class="tiles runs">{boxes}</div>{pass_at_k_table(runs)}'
    )


def _subtitle(run: RunRecord) -> str:
    def setting(name: str) -> str:
        return f"{run.settings.get(name, '?')}"

    parts = [
        f"policy {setting('policy.path')}",
        f"{setting('loss.surrogate')}, {setting('loss.reduction')}, "
        f"focal gamma {setting('loss.focal_gamma')}",
        f"{setting('data.prompts_per_step')} prompts x {setting('sampling.group_size')} "
        "completions a step",
        f"seed {setting('run.seed')}",
    ]
    return " &middot; ".join(map(escape, parts))


def _status(run: RunRecord) -> str:
    """What a reader has to know of a run that did not come to its end; else nothing."""
    if run.finished:
        return ""
    planned = run.steps_planned or "an unknown number of"
    when = f", the last at {run.last_change}" if run.records else ""
    text = (
        f"Not finished: {run.steps_done} of {planned} steps are recorded{when}. "
        "The run is still going, or was stopped."
    )
    if run.summary:
        text += f" Its results after training are those of step {run.summary['steps']}."
    return f'<p class="status">{escape(text)}</p>'


def _tiles(run: RunRecord) -> list[tuple[str, str]]:
    """(value, what it is), as HTML; the most important first."""
    summary = run.summary
    if not summary:
        rates = trailing_means(values(run, "success_rate"), SMOOTHING_STEPS)
        tiles = [(f"step {run.steps_done}", f"of {run.steps_planned or '?'}")]
        if rates:
            tiles.append((f"{rates[-1][1]:.1%}", f"success in training, last {SMOOTHING_STEPS}"))
        if 1 in run.before:
            tiles.append((f"{run.before[1]:.1%}", "success on held-out prompts before training"))
        return tiles
    start, end = summary["success_start"], summary["success_end"]
    answers = arrow(
        summary.get("distinct_correct_start"), summary.get("distinct_correct_end"), "{:.1f}"
    )
    return [
        (arrow(start, end, "{:.1%}"), f"success on {summary['held_out_prompts']} held-out prompts"),
        (f"{100 * (end - start):+.1f}", "points of change"),
        (answers, f"different right answers in {summary['samples_per_prompt']} tries"),
        (duration(summary["wall_seconds"]), f"for {summary['steps']} steps"),
        (f"{summary['peak_memory_bytes'] / 2**20:.0f} MiB", "peak memory"),
    ]
