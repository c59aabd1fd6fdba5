"""What is written about a run: the lines of a step, TensorBoard, the summary."""

import json
import math
import re

from fgrpo_train.config import build
from fgrpo_train.reporting import (
    Reporter,
    duration,
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


SAMPLE = {
    "prompt_id": "p/1", "prompt": "1,2=3:", "completion": "1+2\n<script>alert(1)</script>",
    "advantage": 0.5, "success_rate": 0.25, "length": 4, "truncated": False,
}  # fmt: skip


def record(step: int, success_rate: float | None) -> dict:
    seconds = {"rollout": 0.1, "update": 0.3, "total": 0.5, "loss": 0.02}
    return {
        "step": step, "reward": success_rate, "success_rate": success_rate,
        "acr": 0.25, "entropy": 0.5 / step, "tokens_per_second": 1000.0,
        "seconds": seconds, "completions": [SAMPLE | {"reward": success_rate}],
    }  # fmt: skip


def new_folder(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "a run", new=True)
    folder.open(build({}))
    return folder


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
    assert f"--report {tmp_path}/*" in text
    fallen = make_summary(END, START, steps=1, wall_seconds=1)
    assert "fell from 55.0% to 20.0%" in terminal_summary(folder, build({}), fallen)
    plain = terminal_summary(folder, build({"loss.focal_gamma": 0}), summary)
    assert "--loss.focal_gamma 0.5" in plain


def test_files_after_a_stop_have_no_half_and_no_double_line(tmp_path):
    folder = new_folder(tmp_path)
    for step in (1, 2, 3):
        folder.append_metrics({"step": step, "reward": 0.5})
        folder.append_completions([{"step": step, "reward": 0.5}, {"step": step, "reward": 0}])
    for path in (folder.metrics, folder.completions):
        with path.open("a") as file:
            file.write('{"step": 4, "rew')
    reporter = Reporter(folder, steps=5, finished=2)
    reporter.step(record(3, 0.25))
    reporter.close()
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["reward"] for line in lines] == [0.5, 0.5, 0.25]
    assert "completions" not in lines[2], "they have a file of their own"
    lines = [json.loads(line) for line in folder.completions.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 1, 2, 2, 3]
    assert lines[-1] == {"step": 3} | SAMPLE | {"reward": 0.25}


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
    (tag,) = events.Tags()["tensors"]
    (text,) = events.Tensors(tag)[0].tensor_proto.string_val
    # Markdown shows an indented line as it is.
    assert b"p/1, reward 0.250:\n\n    1,2=3:1+2\n    <script>alert(1)</script>\n" in text


def test_seconds_as_a_person_writes_them():
    assert [duration(s) for s in (0.4, 59.4, 60, 94.26)] == [
        "0 s",
        "59 s",
        "1 min 0 s",
        "1 min 34 s",
    ]
