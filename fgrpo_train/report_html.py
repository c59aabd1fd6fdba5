"""report.html: one self-contained page with the curves of a run as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fgrpo_train.config import config_yaml
from fgrpo_train.settings import TrainConfig

BLUE, ORANGE, GREY = "#2563eb", "#ea580c", "#94a3b8"
WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 12, 34
SMOOTHING_STEPS = 10

_CSS = """
:root { color-scheme: light; }
body { margin: 0; background: #f8fafc; color: #0f172a; font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; }
h2 { font-size: 16px; margin: 0; }
p { margin: 2px 0 8px; color: #64748b; font-size: 13.5px; min-height: 2.9em; }
p.subtitle { min-height: 0; margin: 2px 0 18px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin-bottom: 20px; }
.tiles div, section { background: white; border: 1px solid #e2e8f0; border-radius: 10px; }
.tiles div { flex: 1 1 150px; padding: 12px 16px; }
.tiles b { display: block; font-size: 20px; font-weight: 650; white-space: nowrap; }
.tiles span { color: #64748b; font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 16px; }
section { padding: 16px 18px; }
.legend { float: right; font-size: 13px; color: #475569; }
.legend i { display: inline-block; width: 14px; height: 3px; margin: 0 5px 3px 14px;
  border-radius: 2px; }
svg { width: 100%; display: block; }
svg text { font-size: 11.5px; fill: #64748b; }
svg .grid { stroke: #e8edf3; }
.row { display: flex; align-items: center; gap: 8px; font-size: 13.5px; color: #475569;
  margin: 11px 0; white-space: nowrap; }
.row span { width: 105px; }
.row i { height: 18px; background: #2563eb; border-radius: 4px; min-width: 2px; }
details { margin-top: 18px; } summary { cursor: pointer; color: #475569; }
pre { background: white; border: 1px solid #e2e8f0; border-radius: 10px; padding: 14px;
  font-size: 13px; overflow-x: auto; }
"""


@dataclass(frozen=True)
class Curve:
    """Points (x, y) in order of x."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 2.0
    dots: bool = False


def line_chart(curves: Sequence[Curve], *, x_label: str, log2_x: bool = False) -> str:
    """An SVG of the curves; every point tells its value when pointed at."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return '<p class="none">no values</p>'
    xs, ys = zip(*points, strict=True)
    x_ticks = (
        sorted(set(xs))
        if log2_x
        else [x for x in ticks(min(xs), max(xs), 6) if min(xs) <= x <= max(xs)]
    )
    y_ticks = ticks(min(0.0, *ys), max(ys), 5)
    x_scale = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, log2=log2_x)
    y_scale = _scale(y_ticks[0], max(y_ticks[-1], *ys), HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for y in y_ticks:
        at = y_scale(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{at + 4}" text-anchor="end">{y:g}</text>')
    for x in x_ticks:
        parts.append(
            f'<text x="{x_scale(x)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_label)}</text>'
    )
    for curve in curves:
        at_points = [(x_scale(x), y_scale(y), x, y) for x, y in curve.points]
        path = " ".join(f"{px},{py}" for px, py, _, _ in at_points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{curve.colour}" '
            f'stroke-width="{curve.width}" stroke-linejoin="round"/>'
        )
        for px, py, x, y in at_points:
            fill = curve.colour if curve.dots else "transparent"
            parts.append(
                f'<circle cx="{px}" cy="{py}" r="4" fill="{fill}">'
                f"<title>{escape(curve.name)}, {escape(x_label)} {x:g}: {y:.4g}</title></circle>"
            )
    return "".join(parts) + "</svg>"


def ticks(low: float, high: float, count: int) -> list[float]:
    """At most about `count` round numbers that cover [low, high]."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= count)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(n * step, 10) for n in range(first, max(last, first + 1) + 1)]


def _scale(low: float, high: float, start: float, end: float, *, log2: bool = False) -> Any:
    transform = math.log2 if log2 else float
    origin, span = transform(low), (transform(high) - transform(low)) or 1.0
    return lambda value: round(start + (transform(value) - origin) / span * (end - start), 2)


def render_report(
    name: str, config: TrainConfig, summary: dict[str, Any], records: Sequence[dict[str, Any]]
) -> str:
    """The page: what rose, the curves of training, where the time went, the settings."""
    loss = config.loss
    subtitle = (
        f"policy {escape(config.policy.path)} &middot; {loss.surrogate}, {loss.reduction}, "
        f"focal gamma {loss.focal_gamma:g} &middot; {config.data.prompts_per_step} prompts x "
        f"{config.sampling.group_size} completions a step &middot; seed {config.run.seed}"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_CSS}</style></head>
<body><main>
<h1>{escape(name)}</h1><p class="subtitle">{subtitle}</p>
<div class="tiles">{_tiles(summary)}</div>
<div class="cards">
{_pass_at_k_card(summary)}
{_training_cards(summary, records)}
{_time_card(records)}
</div>
<details><summary>Settings (config.yaml)</summary><pre>{escape(config_yaml(config))}</pre></details>
</main></body></html>
"""


def _tiles(summary: dict[str, Any]) -> str:
    start, end = summary["success_start"], summary["success_end"]
    minutes, seconds = divmod(round(summary["wall_seconds"]), 60)
    solutions = (
        f"{summary['distinct_correct_start']:.1f} &rarr; {summary['distinct_correct_end']:.1f}"
    )
    held_out, samples = summary["held_out_prompts"], summary["samples_per_prompt"]
    tiles = [
        (f"success on {held_out} held-out prompts", f"{start:.1%} &rarr; {end:.1%}"),
        ("change", f"{100 * (end - start):+.1f} points"),
        (f"different right answers in {samples} tries", solutions),
        (f"for {summary['steps']} steps", f"{minutes} min {seconds} s"),
        ("peak memory", f"{summary['peak_memory_bytes'] / 2**20:.0f} MiB"),
    ]
    return "".join(f"<div><b>{value}</b><span>{label}</span></div>" for label, value in tiles)


def _card(title: str, text: str, curves: Sequence[Curve], *, x_label: str, **axes: Any) -> str:
    named = curves if len(curves) > 1 else []
    legend = "".join(f'<i style="background:{c.colour}"></i>{escape(c.name)}' for c in named)
    return (
        f'<section><span class="legend">{legend}</span><h2>{escape(title)}</h2>'
        f"<p>{escape(text)}</p>{line_chart(curves, x_label=x_label, **axes)}</section>"
    )


def _pass_at_k_card(summary: dict[str, Any]) -> str:
    curves = [
        Curve(name, [(float(k), y) for k, y in summary[key].items()], colour, dots=True)
        for name, key, colour in (
            ("before", "pass_at_k_start", GREY),
            ("after", "pass_at_k_end", BLUE),
        )
    ]
    text = "Share of held-out prompts that at least one of k completions solves."
    return _card("Held-out pass@k", text, curves, x_label="k", log2_x=True)


def _training_cards(summary: dict[str, Any], records: Sequence[dict[str, Any]]) -> str:
    between = [(float(r["step"]), r["held_out"]["pass_at_1"]) for r in records if "held_out" in r]
    start, end = (0.0, summary["success_start"]), (float(summary["steps"]), summary["success_end"])
    held_out = [start, *between, end]
    cards = [
        _card(
            "Success rate",
            "Correct completions in the training batches; the dots are the held-out prompts.",
            [*_smoothed(records, "success_rate", "training"),
             Curve("held-out", held_out, ORANGE, width=0, dots=True)],
            x_label="step",
        )
    ]  # fmt: skip
    for title, key, text in _CARDS:
        if any(record.get(key) is not None for record in records):
            cards.append(_card(title, text, _smoothed(records, key, title), x_label="step"))
    return "\n".join(cards)


_CARDS = [
    ("Degenerate groups", "acr",
     "Share of prompts whose completions are all right or all wrong: they teach nothing."),
    ("Entropy", "entropy", "Nats per token: how undecided the policy still is."),
    ("Clipped tokens", "clip_binding_fraction",
     "Share of tokens whose gradient the clipping removed."),
    ("Gradient norm", "grad_norm", "Before clipping, mean of the updates of a step."),
    ("Completion length", "completion_length", "Tokens, the end-of-sequence token included."),
]  # fmt: skip


def _smoothed(records: Sequence[dict[str, Any]], key: str, name: str) -> list[Curve]:
    """The values, pale, under their trailing mean."""
    points = [(float(r["step"]), r[key]) for r in records if r.get(key) is not None]
    means = []
    for end in range(1, len(points) + 1):
        window = [y for _, y in points[max(0, end - SMOOTHING_STEPS) : end]]
        means.append((points[end - 1][0], sum(window) / len(window)))
    return [
        Curve("each step", points, "#bfdbfe", width=1.2),
        Curve(f"mean of {SMOOTHING_STEPS} steps", means, BLUE),
    ]


def _time_card(records: Sequence[dict[str, Any]]) -> str:
    """Mean time of each phase of a step as horizontal bars."""
    if not records:
        return ""
    phases = [record["seconds"] for record in records]
    mean = {phase: sum(s[phase] for s in phases) / len(phases) for phase in phases[-1]}
    total, loss = mean.pop("total"), mean.pop("loss")
    update = mean.pop("update") - loss
    parts = {"loss head": loss, "rest of update": update, **mean}
    longest = max(parts.values())
    rows = "".join(
        f'<div class="row"><span>{escape(phase)}</span>'
        f'<i style="width:{50 * seconds / longest:.1f}%"></i>'
        f"{1000 * seconds:.3g} ms ({seconds / total:.0%})</div>"
        for phase, seconds in sorted(parts.items(), key=lambda item: -item[1])
    )
    return (
        "<section><h2>Where the time of a step goes</h2>"
        f"<p>Mean of {len(records)} steps, {1000 * total:.0f} ms each.</p>{rows}</section>"
    )
