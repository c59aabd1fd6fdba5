"""What is written about a run: the line a step, the summary, the page."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from fgrpo_train.config import build
from fgrpo_train.report_html import Curve, line_chart, render_report, ticks
from fgrpo_train.reporting import (
    Reporter,
    duration,
    finish,
    make_summary,
    peak_memory_bytes,
    terminal_summary,
)
from fgrpo_train.run_folder import RunFolder

START = {
    "success": 0.2, "pass_at_k": {"1": 0.2, "2": 0.36}, "distinct_correct": 4.5,
    "num_prompts": 256, "samples_per_prompt": 2,
}  # fmt: skip
END = START | {"success": 0.55, "pass_at_k": {"1": 0.55, "2": 0.7}, "distinct_correct": 2.25}


def record(step: int, success_rate: float | None) -> dict:
    seconds = {"rollout": 0.1, "update": 0.3, "total": 0.5, "loss": 0.02}
    return {
        "step": step, "reward": success_rate, "success_rate": success_rate,
        "acr": 0.25, "entropy": 0.5 / step, "tokens_per_second": 1000.0,
        "seconds": seconds,
    }  # fmt: skip


def new_folder(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "a run", new=True)
    folder.open(build({}))
    return folder


class Page(HTMLParser):
    """Fails on tags that are not closed in order; keeps what was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_summary_has_the_promised_keys_and_values():
    summary = make_summary(START, END, steps=120, wall_seconds=94.26)
    assert summary["success_start"] == 0.2 and summary["success_end"] == 0.55
    assert summary["pass_at_k_start"] == {"1": 0.2, "2": 0.36}
    assert summary["pass_at_k_end"] == {"1": 0.55, "2": 0.7}
    assert summary["steps"] == 120 and summary["wall_seconds"] == 94.3
    # Python with torch holds between 100 MB and some GB.
    assert 1e8 < summary["peak_memory_bytes"] < 1e11
    assert abs(summary["peak_memory_bytes"] - peak_memory_bytes()) < 1e8


def test_the_terminal_summary_says_what_rose_where_the_files_are_and_what_to_try(tmp_path):
    folder = new_folder(tmp_path)
    summary = make_summary(START, END, steps=120, wall_seconds=94.26)
    text = terminal_summary(folder, build({}), summary)
    assert "rose from 20.0% to 55.0% in 120 steps and 1 min 34 s" in text
    assert re.search(r"pass@2 +36.0% +70.0%", text)
    assert f"--resume '{folder.path}' --steps 240" in text, "a path with a space is quoted"
    assert "--loss.focal_gamma 0 " in text
    fallen = make_summary(END, START, steps=1, wall_seconds=1)
    assert "fell from 55.0% to 20.0%" in terminal_summary(folder, build({}), fallen)
    plain = terminal_summary(folder, build({"loss.focal_gamma": 0}), summary)
    assert "--loss.focal_gamma 0.5" in plain


def test_the_report_is_one_well_formed_page_that_loads_nothing(tmp_path):
    folder = new_folder(tmp_path)
    for step in range(1, 31):
        folder.append_metrics(record(step, step / 40))
    summary = make_summary(START, END, steps=30, wall_seconds=10)
    finish(folder, build({"policy.path": "<b>&"}), summary)
    assert json.loads(folder.summary.read_text()) == summary
    text = folder.report.read_text()
    page = Page(text)
    assert not [name for name, _ in page.attributes if name in ("src", "href")]
    assert "<script" not in text and "@import" not in text and "url(" not in text
    assert "&lt;b&gt;&amp;" in text and "<b>&" not in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    for step in (1, 17, 30):
        assert f"each step, step {step}: {step / 40:.4g}<" in text
    # The trailing mean of steps 21..30 of step / 40.
    assert f"mean of 10 steps, step 30: {25.5 / 40:.4g}<" in text
    for k, before, after in ((1, 0.2, 0.55), (2, 0.36, 0.7)):
        assert f"before, k {k}: {before:g}<" in text and f"after, k {k}: {after:g}<" in text
    assert "20.0% &rarr; 55.0%" in text and "4.5 &rarr; 2.2" in text


def test_points_stand_where_their_values_are():
    chart = line_chart([Curve("a", [(0, 0.0), (5, 0.25), (10, 1.0)], "red")], x_label="x")
    svg = ElementTree.fromstring(chart)
    points = [tuple(map(float, p.split(","))) for p in svg.find("polyline").get("points").split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert y1 == pytest.approx(y0 + 0.25 * (y2 - y0)) and y2 < y0, "up is smaller in SVG"
    grid = [float(line.get("y1")) for line in svg.findall("line")]
    assert y0 == max(grid) and y2 == min(grid), "0 and 1 lie on grid lines"


def test_a_chart_of_one_point_one_value_or_nothing_is_drawn():
    for points in ([(3, 0.0)], [(1, 2.0), (2, 2.0)], [(1, -1.0), (2, -1.0)]):
        svg = ElementTree.fromstring(line_chart([Curve("a", points, "red")], x_label="x"))
        for circle in svg.findall("circle"):
            assert math.isfinite(float(circle.get("cx"))) and math.isfinite(float(circle.get("cy")))
    assert "no values" in line_chart([], x_label="x")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 0.017, [0, 0.005, 0.01, 0.015, 0.02]),
        (1, 120, [0, 20, 40, 60, 80, 100, 120]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0][:2]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low, high, expected):
    assert ticks(low, high, 6 if high == 120 else 5) == expected


def test_a_report_without_a_finished_step_or_with_missing_values_is_drawn():
    summary = make_summary(START, END, steps=1, wall_seconds=1)
    Page(render_report("x", build({}), summary, []))
    Page(render_report("x", build({}), summary, [record(1, None)]))


def test_metrics_after_a_stop_have_no_half_and_no_double_line(tmp_path):
    folder = new_folder(tmp_path)
    for step in (1, 2, 3):
        folder.append_metrics(record(step, 0.5))
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "rew')
    reporter = Reporter(folder, steps=5, finished=2)
    reporter.step(record(3, 0.25))
    reporter.close()
    lines = folder.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert [json.loads(line)["reward"] for line in lines] == [0.5, 0.5, 0.25]


def test_what_is_not_finite_becomes_null(tmp_path):
    folder = new_folder(tmp_path)
    folder.append_metrics({"step": 1, "a": math.nan, "b": {"c": math.inf}, "d": None})
    assert folder.metrics.read_text() == '{"step": 1, "a": null, "b": {"c": null}, "d": null}\n'


def test_tensorboard_has_the_numbers_of_every_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = new_folder(tmp_path)
    reporter = Reporter(folder, steps=2, finished=0)
    reporter.step(record(1, 0.25))
    reporter.step(record(2, None))
    reporter.close()
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25)]
    assert [e.step for e in events.Scalars("seconds/rollout")] == [1, 2]


def test_seconds_as_a_person_writes_them():
    assert [duration(s) for s in (0.4, 59.4, 60, 94.26)] == [
        "0 s",
        "59 s",
        "1 min 0 s",
        "1 min 34 s",
    ]
