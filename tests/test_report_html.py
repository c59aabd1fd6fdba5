"""The page about runs: its structure, the values in it, and what it makes of odd runs."""

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from fgrpo_train.checkpoint import save_checkpoint
from fgrpo_train.config import build
from fgrpo_train.report_html import write_report
from fgrpo_train.report_tables import MAX_SAMPLES
from fgrpo_train.reporting import finish, make_summary
from fgrpo_train.run import main
from fgrpo_train.run_folder import RunFolder
from fgrpo_train.settings import ConfigError

START = {
    "success": 0.2, "pass_at_k": {"1": 0.2, "2": 0.36}, "distinct_correct": 4.5,
    "num_prompts": 256, "samples_per_prompt": 2,
}  # fmt: skip
END = START | {"success": 0.55, "pass_at_k": {"1": 0.55, "2": 0.7}, "distinct_correct": 2.25}
EVIL = "<script>alert(1)</script></td><b onclick='x'>&amp;\u2028\""


class Page(HTMLParser):
    """Fails on tags that are not closed in order; keeps what was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.headings: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag == "h2":
            self.headings.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.cells[-1][-1] += data
        if "h2" in self.open:
            self.headings[-1] += data

    def row(self, first: str) -> list[str]:
        """The cells after the first one, of the only row that begins with it."""
        (row,) = (row for row in self.cells if row and row[0] == first)
        return row[1:]

    def card(self, title: str) -> str:
        (card,) = (
            part for part in re.findall(r"<section.*?</section>", self.text, re.DOTALL)
            if f"<h2>{title}</h2>" in part
        )  # fmt: skip
        return card

    def curves(self, title: str) -> dict[str, dict[float, float]]:
        """{name: {x: y}} of the chart in the card with this title."""
        found = {}
        for attributes in re.findall(r"<polyline ([^>]*)/>", self.card(title)):
            data = dict(re.findall(r'([\w-]+)="([^"]*)"', attributes))
            xs, ys = (map(float, data[f"data-{axis}"].split()) for axis in "xy")
            found[data["data-name"]] = dict(zip(xs, ys, strict=True))
            assert len(found[data["data-name"]]) == len(data["points"].split())
        return found


def record(step: int, success_rate: float | None, **more: object) -> dict:
    return {
        "step": step, "reward": success_rate, "success_rate": success_rate,
        "acr": 0.25, "entropy": 0.5 / step, "kl": 0.0, "success_histogram": [4, 3, 1],
        "seconds": {"rollout": 0.1, "update": 0.3, "total": 0.4, "loss": 0.02},
    } | more  # fmt: skip


def make_run(path: Path, *, steps: int = 30, planned: int | None = None, **settings) -> RunFolder:
    """A run that was not finished."""
    config = build({name.replace("__", "."): value for name, value in settings.items()})
    folder = RunFolder(path, new=True)
    folder.open(config)
    document = yaml.safe_load(folder.config.read_text())
    document["run"]["steps"] = planned or steps
    folder.config.write_text(yaml.safe_dump(document))
    for step in range(1, steps + 1):
        folder.append_metrics(record(step, step / 40))
    return folder


def finish_run(folder: RunFolder, steps: int = 30) -> None:
    finish(folder, build({}), make_summary(START, END, steps=steps, wall_seconds=74))


def page_of(*folders: RunFolder) -> Page:
    out = folders[0].path.parent / "page.html"
    write_report([folder.path for folder in folders], out)
    return Page(out.read_text())


def test_the_page_of_a_run_is_well_formed_loads_nothing_and_has_its_values(tmp_path):
    folder = make_run(tmp_path / "a <run>")
    finish_run(folder)
    assert json.loads(folder.summary.read_text())["success_end"] == 0.55
    text = folder.report.read_text()
    page = Page(text)
    for _, attributes in page.tags:
        assert not {"src", "href", "onclick"} & attributes.keys()
    assert "@import" not in text and "url(" not in text and "://" not in text
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (a["content"] for _, a in page.tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none';") and f"script-src 'sha256-{digest}'" in policy
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    assert "<h1>a &lt;run&gt;</h1>" in text

    curves = page.curves("Success rate (= mean reward)")
    assert curves["each step"] == {step: step / 40 for step in range(1, 31)}
    # The trailing mean of steps 21..30 of step / 40.
    assert curves["mean of 10 steps"][30] == pytest.approx(25.5 / 40, rel=1e-3)
    assert curves["held-out"] == {0: 0.2, 30: 0.55}
    assert page.curves("Held-out pass@k") == {
        "before": {1: 0.2, 2: 0.36},
        "after": {1: 0.55, 2: 0.7},
    }
    assert page.row("a <run>") == ["20.0% \u2192 55.0%", "36.0% \u2192 70.0%"]
    assert "4.5 &rarr; 2.2" in text and "+35.0" in text and "1 min 14 s" in text
    assert "Not finished" not in text
    assert "<title>step 30: 0 of 2 correct in 50.0% of groups</title>" in text
    # 0.02 of 0.4 seconds in the loss head, 0.28 in the rest of the update.
    assert "20 ms (5%)" in text and "280 ms (70%)" in text and "100 ms (25%)" in text
    assert "The same all the time: kl 0." in text
    assert page.row("loss.focal_gamma") == ["0.5"]


def test_runs_lie_over_each_other_with_the_settings_that_differ_first(tmp_path):
    first = make_run(tmp_path / "first")
    second = make_run(tmp_path / "second", steps=12, loss__focal_gamma=0.0, run__name="x")
    finish_run(first)
    finish_run(second, steps=12)
    second.append_metrics(record(13, None, tokens_per_second=5000.0))
    page = page_of(first, second)
    assert page.headings[0] == "Settings that differ"
    assert page.cells[:3] == [
        ["setting", "first", "second"],
        ["loss.focal_gamma", "0.5", "0"],
        ["run.steps", "30", "12"],
    ]
    curves = page.curves("Success rate (= mean reward)")
    assert max(curves["first"]) == 30 and max(curves["second"]) == 12, "each its own range"
    assert curves["second"][12] == pytest.approx(7.5 / 40, rel=1e-3)
    assert curves["second, held-out"] == {0: 0.2, 12: 0.55}
    assert set(page.curves("Tokens per second")) == {"second, each step", "second"}
    assert list(page.curves("Held-out pass@k")) == ["before", "first", "second"]
    assert page.text.count("Where the time of a step goes") == 1
    assert "1 runs" not in page.text and "<h1>2 runs compared</h1>" in page.text
    classes = {(data["data-name"], data["class"]) for _, data in page.tags if "data-name" in data}
    for name, run_style in (("first", "c0 d0"), ("second", "c1 d1")):
        assert {(name, f"{run_style} mean"), (name, f"{run_style} dots")} <= classes
    assert ("before", "all before") in classes


def test_runs_with_the_same_settings_or_the_same_name_are_told_apart(tmp_path):
    runs = [make_run(tmp_path / group / "run", steps=2) for group in "ab"]
    page = page_of(*runs)
    assert "The runs have the same settings." in page.text
    assert set(page.curves("Entropy")) == {
        "a/run", "a/run, each step", "b/run", "b/run, each step",
    }  # fmt: skip


def test_a_run_that_is_going_on_or_was_stopped_says_so(tmp_path):
    folder = make_run(tmp_path / "stopped", steps=3, planned=100)
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "rew')
    save_checkpoint(folder.checkpoints, 3, lambda path: None, {"before": START})
    page = page_of(folder)
    assert "Not finished: 3 of 100 steps are recorded, the last at 20" in page.text
    assert page.curves("Held-out pass@k") == {"before": {1: 0.2, 2: 0.36}}
    assert page.row("stopped") == ["20.0% \u2192 -", "36.0% \u2192 -"]
    finish_run(folder, steps=3)
    page = page_of(folder)
    assert "Its results after training are those of step 3." in page.text


def test_a_run_without_a_step_and_one_without_any_value_are_drawn(tmp_path):
    empty = make_run(tmp_path / "empty", steps=0, planned=5)
    assert "Not finished: 0 of 5 steps are recorded. " in page_of(empty).text
    empty.append_metrics({"step": 1, "success_rate": None, "reward": None})
    assert "Entropy" not in page_of(empty).headings
    make_run(tmp_path / "b", steps=2)
    page_of(empty, RunFolder(tmp_path / "b", new=False))


def test_completions_are_shown_as_text_whatever_they_contain(tmp_path):
    folder = make_run(tmp_path / "run", steps=2, policy__path=EVIL)
    sample = {
        "prompt_id": EVIL, "prompt": EVIL, "completion": EVIL, "reward": 0.5, "advantage": -0.125,
        "success_rate": 0.25, "length": 7, "truncated": True,
    }  # fmt: skip
    folder.append_completions([{"step": 1} | sample, {"step": 2} | sample | {"reward": None}])
    assert folder.read_completions()[0]["completion"] == EVIL
    page = page_of(folder)
    assert page.row("2") == ["-", "-0.125", "0.25", "7", "yes", EVIL, EVIL]
    assert page.row("1") == ["0.5", "-0.125", "0.25", "7", "yes", EVIL, EVIL]
    assert [tag for tag, _ in page.tags].count("script") == 1, "the page's own"
    assert "alert(1)</script>" not in page.text
    assert page.row("policy.path") == [EVIL]


def test_of_many_completions_the_page_has_some_of_the_first_to_the_last_step(tmp_path):
    folder = make_run(tmp_path / "run", steps=2)
    for step in range(1, 501):
        folder.append_completions([{"step": step, "completion": "x" * 9999}] * 4)
    page = page_of(folder)
    rows = [row for row in page.cells if row[-1].startswith("xx")]
    steps = [int(row[0]) for row in rows]
    assert len(rows) == MAX_SAMPLES and steps == sorted(steps, reverse=True)
    assert steps[0] == 500 and steps[-1] == 1
    assert len(rows[0][-1]) < 2000
    assert f"{MAX_SAMPLES} of the 2000 recorded ones" in page.text


def test_evaluations_of_a_run_are_shown_with_their_intervals(tmp_path):
    folders = [make_run(tmp_path / name, steps=2) for name in "ab"]
    for folder, interval in zip(folders, ({"1": [0.1, 0.3]}, [0.15, 0.35]), strict=True):
        (folder.path / "evaluation" / "held-out").mkdir(parents=True)
        result = {"pass_at_k": {"1": 0.25, "4": 0.5}, "interval": interval}
        (folder.path / "evaluation" / "held-out" / "result.json").write_text(json.dumps(result))
    (folders[0].path / "evaluation" / "other").mkdir()
    (folders[0].path / "evaluation" / "other" / "result.json").write_text('{"success": 0.5}')
    page = page_of(*folders)
    assert page.curves("Evaluation: held-out") == {"a": {1: 0.25, 4: 0.5}, "b": {1: 0.25, 4: 0.5}}
    card = page.card("Evaluation: held-out")
    assert "a, k 1: 0.25 (0.1 to 0.3)" in card and "b, k 1: 0.25 (0.15 to 0.35)" in card
    assert "Evaluation: other" not in page.headings


def test_the_command_writes_the_page_where_it_says(tmp_path, capsys):
    first, second = (make_run(tmp_path / name, steps=2) for name in "ab")
    assert main(["--report", str(first.path)]) == 0
    assert capsys.readouterr().out == f"{first.report}\n" and first.report.exists()
    assert main(["--report", str(first.path), str(second.path)]) == 0
    assert capsys.readouterr().out == f"{first.comparison}\n"
    out = tmp_path / "c.html"
    assert main(["--report", str(first.path), str(second.path), "--out", str(out)]) == 0
    assert out.read_text() == first.comparison.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "nowhere"], "--report: no run in nowhere (it has no config.yaml)"),
        (["--report", "{run}", "{run}"], "--report: {run} is given twice"),
        (["--report", "{run}", "--steps", "3"], "--report trains nothing: remove --run.steps"),
        (["--out", "x"], "--out FILE is where --report writes: add --report RUN"),
        (["--report", "{run}", "--out", "{run}"], "--out: cannot write {run}: Is a directory"),
    ],
)
def test_a_mistake_gets_one_line(arguments, message, tmp_path, capsys):
    run = str(make_run(tmp_path / "run", steps=1).path)
    assert main([argument.format(run=run) for argument in arguments]) == 2
    assert capsys.readouterr().err == f"run.py: error: {message.format(run=run)}\n"
    assert not list(tmp_path.glob(".*")), "nothing is left aside"


def test_a_damaged_file_is_named(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    folder.summary.write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read the run in .*run: Expecting"):
        write_report([folder.path], None)
