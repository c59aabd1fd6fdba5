"""The cards of a report: a title, what is shown, and a chart in which all runs lie together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from fgrpo_train.charts import Curve, Point, heat_cells, heat_map, line_chart, style, trailing_means
from fgrpo_train.run_records import Evaluation, PassAtK, RunRecord

SMOOTHING_STEPS = 10
"""Of the trailing means; a fiftieth of the steps if that is more."""

MAX_RUNS_WITH_PALE_VALUES = 4
"""Of more runs, the values of each step would hide the means."""

METRIC_CARDS = [
    ("acr", "Advantage collapse rate (ACR)",
     "Share of groups whose rewards are all equal: without advantages, they teach nothing."),
    ("focal_weight_mean", "Focal weight",
     "Mean of (1 - success rate)^gamma over the sequences that were trained on."),
    ("abs_advantage_sum", "Sum of |A'|",
     "Over the completions of a step, focal weight included: a smaller one is a smaller step."),
    ("entropy", "Entropy", "Nats per token: how undecided the policy still is."),
    ("sampler_gap", "Sampler-trainer gap",
     "Mean difference of a token's log-prob between sampler and trainer, before the update."),
    ("clip_binding_fraction", "Clipped tokens",
     "Share of tokens whose gradient the clipping removed."),
    ("clip_fraction_high", "Ratio above its bound",
     "Share of tokens, whatever the sign of their advantage."),
    ("clip_fraction_low", "Ratio below its bound",
     "Share of tokens, whatever the sign of their advantage."),
    ("grad_norm", "Gradient norm", "Before clipping, mean of the updates of a step."),
    ("completion_length", "Completion length", "Tokens, the end-of-sequence token included."),
    ("truncated_share", "Truncated completions", "Share that reached the limit of new tokens."),
    ("tokens_per_second", "Tokens per second", "Sampled tokens by the time of the whole step."),
]  # fmt: skip
"""(key in metrics.jsonl, title, text)."""


def card(title: str, text: str, legend: str, content: str, *, wide: bool = False) -> str:
    """One box of the page; `legend` and `content` are HTML."""
    opening = '<section class="wide">' if wide else "<section>"
    return (
        f"{opening}<h2>{escape(title)}</h2><p>{escape(text)}</p>"
        f'<div class="legend">{legend}</div>{content}</section>'
    )


def key(name: str, classes: str, value: str = "") -> str:
    """An entry of a legend: a piece of the line, the name, and perhaps a value."""
    mark = (
        f'<circle class="{classes}" cx="15" cy="4" r="3.5"/>'
        if classes.endswith("points")
        else f'<line class="{classes}" x1="0" x2="30" y1="4" y2="4"/>'
    )
    bold = f" <b>{escape(value)}</b>" if value else ""
    return (
        f'<span class="key"><svg class="swatch" viewBox="0 0 30 8">{mark}</svg>'
        f"{escape(name)}{bold}</span>"
    )


def short(value: float) -> str:
    """Three digits, and no exponent where a person would not write one."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as a person writes them."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def values(run: RunRecord, name: str) -> list[Point]:
    """(step, value) of a metric where it was recorded."""
    return [(float(r["step"]), r[name]) for r in run.records if _is_number(r.get(name))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def metric_card(
    runs: Sequence[RunRecord], name: str, title: str, text: str, *, more: Sequence[Curve] = ()
) -> str:
    """Trailing means over the pale values of each step; "" if no run recorded the metric.

    Args:
        more: drawn too; not in the legend of a comparison, whose text explains them.
    """
    pale, means, legend = [], [], []
    recorded = {number: values(run, name) for number, run in enumerate(runs)}
    window = max(SMOOTHING_STEPS, *(len(points) // 50 for points in recorded.values()))
    for number, points in recorded.items():
        if not points:
            continue
        run, smooth = runs[number], trailing_means(points, window)
        label = run.name if len(runs) > 1 else f"mean of {window} steps"
        each = f"{run.name}, each step" if len(runs) > 1 else "each step"
        pale.append(Curve(each, points, number, "each"))
        means.append(Curve(label, smooth, number))
        legend.append(key(label, means[-1].classes, short(smooth[-1][1])))
    if not means:
        return ""
    if len(runs) == 1:
        legend += [key(curve.name, curve.classes) for curve in (*pale, *more)]
    crowded = len(means) > MAX_RUNS_WITH_PALE_VALUES
    chart = line_chart([*([] if crowded else pale), *means, *more], x_label="step")
    return card(title, text, "".join(legend), chart)


def success_card(runs: Sequence[RunRecord]) -> str:
    """Success rate of the training batches, with the held-out ones as dots."""
    held_out = []
    for number, run in enumerate(runs):
        points = [(0.0, run.before[1])] if 1 in run.before else []
        points += [(float(r["step"]), r["held_out"]["pass_at_1"]) for r in run.records
                   if "held_out" in r]  # fmt: skip
        points += [(float(run.summary["steps"]), run.after[1])] if 1 in run.after else []
        if points:
            name = f"{run.name}, held-out" if len(runs) > 1 else "held-out"
            held_out.append(Curve(name, points, number, "points"))
    same = all(r.get("reward") == r.get("success_rate") for run in runs for r in run.records)
    title = "Success rate (= mean reward)" if same else "Success rate"
    text = "Correct completions in the training batches; dots: the held-out prompts."
    cards = metric_card(runs, "success_rate", title, text, more=held_out)
    if not same:
        cards += metric_card(runs, "reward", "Reward", "Mean over the completions of a step.")
    return cards


def pass_at_k_card(runs: Sequence[RunRecord]) -> str:
    """Held-out pass@k of every run, before and after; one curve before if all began alike."""
    befores = [run.before for run in runs if run.before]
    alike = len(befores) > 1 and all(before == befores[0] for before in befores)
    curves: list[Curve] = []
    for number, run in enumerate(runs):
        if run.before and not (alike and curves):
            name = "before" if alike or len(runs) == 1 else f"{run.name}, before"
            whose = number if len(runs) > 1 and not alike else None
            curves.append(Curve(name, _points(run.before), whose, "before"))
    for number, run in enumerate(runs):
        if run.after:
            name = "after" if len(runs) == 1 else run.name
            curves.append(Curve(name, _points(run.after), number, "dots"))
    if not curves:
        return ""
    text = "Share of held-out prompts that at least one of k completions solves."
    text += " Dotted: before training." if len(runs) > 1 else ""
    return _pass_at_k("Held-out pass@k", text, curves)


def evaluation_cards(runs: Sequence[RunRecord]) -> Iterator[str]:
    """A card for each evaluation that any of the runs has."""
    for name in dict.fromkeys(name for run in runs for name in run.evaluations):
        having = [(n, run) for n, run in enumerate(runs) if name in run.evaluations]
        curves = [_evaluation(run.name, run.evaluations[name], number) for number, run in having]
        text = "pass@k of the evaluation of this name; bars: confidence intervals, where given."
        yield _pass_at_k(f"Evaluation: {name}", text, curves)


def _evaluation(name: str, evaluation: Evaluation, number: int) -> Curve:
    intervals = {
        float(k): bounds for k, bounds in evaluation.intervals.items() if k in evaluation.pass_at_k
    }
    return Curve(name, _points(evaluation.pass_at_k), number, "dots", intervals)


def _pass_at_k(title: str, text: str, curves: Sequence[Curve]) -> str:
    several = len({curve.run for curve in curves} - {None}) > 1
    named = [curve for curve in curves if not (several and curve.kind == "before")]
    legend = "".join(key(curve.name, curve.classes) for curve in named)
    return card(title, text, legend, line_chart(curves, x_label="k", log2_x=True))


def _points(pass_at_k: PassAtK) -> list[Point]:
    return sorted((float(k), value) for k, value in pass_at_k.items())


def histogram_card(runs: Sequence[RunRecord]) -> str:
    """A heat map for each run, step x number correct, all on one scale."""
    columns = {
        number: [
            (r["step"], r["success_histogram"]) for r in run.records if r.get("success_histogram")
        ]
        for number, run in enumerate(runs)
    }
    columns = {number: value for number, value in columns.items() if value}
    if not columns:
        return ""
    cells = [cell for value in columns.values() for cell in heat_cells(value)]
    most = max(share for _, _, shares in cells for share in shares) or 1.0
    maps = "".join(
        f"<figure><figcaption>{key(runs[n].name, style(n) + ' mean') if len(runs) > 1 else ''}"
        f"</figcaption>{heat_map(value, most=most, title=runs[n].name)}</figure>"
        for n, value in columns.items()
    )
    shades = "".join(
        f'<span class="key"><i class="shade" style="opacity:{(share / most) ** 0.5:.3f}"></i>'
        f"{share:.0%}</span>"
        for share in sorted({0.02, 0.1, 0.3, most})
        if share <= most
    )
    text = (
        "Groups of a step by their number of correct completions. Those in the bottom and the top "
        "row teach nothing; the focal weight moves weight downwards."
    )
    content = f'<div class="maps">{maps}</div>'
    return card("Success-rate histogram over time", text, shades, content, wide=True)


def time_card(runs: Sequence[RunRecord]) -> str:
    """Mean time of each phase of a step, as bars side by side."""
    times = {number: phase_times(run) for number, run in enumerate(runs)}
    times = {number: parts for number, parts in times.items() if parts}
    if not times:
        return ""
    totals = {number: sum(parts.values()) for number, parts in times.items()}
    phases = dict.fromkeys(phase for parts in times.values() for phase in parts)
    longest = {p: max(parts.get(p, 0.0) for parts in times.values()) for p in phases}
    scale = max(longest.values()) or 1.0
    rows = ""
    for phase in sorted(phases, key=lambda phase: -longest[phase]):
        bars = "".join(
            f'<div class="bar"><i class="{style(number)}" '
            f'style="width:{55 * parts[phase] / scale:.1f}%"></i>'
            f"{1000 * parts[phase]:.3g} ms ({parts[phase] / (totals[number] or 1):.0%})</div>"
            for number, parts in times.items()
            if phase in parts
        )
        rows += f'<div class="phase"><span>{escape(phase)}</span><div>{bars}</div></div>'
    if len(runs) == 1:
        text, legend = f"Mean of {len(runs[0].records)} steps, {1000 * totals[0]:.0f} ms each.", ""
    else:
        text = "Means over the steps of a run; beside its name, the whole step."
        legend = "".join(
            key(runs[n].name, f"{style(n)} mean", f"{1000 * total:.0f} ms")
            for n, total in totals.items()
        )
    content = f'<div class="phases">{rows}</div>'
    return card("Where the time of a step goes", text, legend, content, wide=len(runs) > 1)


def phase_times(run: RunRecord) -> dict[str, float]:
    """Mean seconds of each phase of a step; the loss head apart from the rest of the update."""
    seconds = [record["seconds"] for record in run.records if record.get("seconds")]
    phases = dict.fromkeys(phase for step in seconds for phase in step)
    mean = {p: sum(step.get(p) or 0.0 for step in seconds) / len(seconds) for p in phases}
    mean.pop("total", None)
    if "loss" in mean and "update" in mean:
        mean["loss head"] = mean.pop("loss")
        mean["rest of update"] = mean.pop("update") - mean["loss head"]
    return mean


def other_metrics(runs: Sequence[RunRecord]) -> str:
    """Everything else that was recorded, folded; what never changes is named in a line."""
    shown = {name for name, _, _ in METRIC_CARDS} | {"step", "success_rate", "reward"}
    names = dict.fromkeys(name for run in runs for record in run.records for name in record)
    cards, constant = [], []
    for name in names:
        found = {y for run in runs for _, y in values(run, name)}
        if name in shown or not found:
            continue
        if len(found) == 1:
            constant.append(f"{name} {found.pop():g}")
        else:
            cards.append(metric_card(runs, name, name, ""))
    still = f'<p class="still">The same all the time: {escape(", ".join(constant))}.</p>'
    return (
        '<details class="more"><summary>Other metrics</summary>'
        f'{still if constant else ""}<div class="cards">{"".join(cards)}</div></details>'
        if cards or constant
        else ""
    )
