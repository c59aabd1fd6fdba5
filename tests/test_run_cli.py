"""run.py from outside: exit codes, files, and runs that are stopped and go on."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fgrpo_train
from fgrpo_train.run import main

RUN = Path(fgrpo_train.__file__).parent / "run.py"
STEPS = 20
SMALL = [
    "--steps", str(STEPS), "--data.prompts_per_step", "4", "--sampling.group_size", "4",
    "--evaluation.max_prompts", "8", "--evaluation.samples_per_prompt", "4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _signal_handlers():
    """main() installs its own; the test runner's come back."""
    saved = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in saved.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    """A run without a stop."""
    output = tmp_path_factory.mktemp("whole")
    assert main([*SMALL, "--output_dir", str(output)]) == 0
    return output / "tiny-cpu"


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[dict]:
    """The records without what a clock says."""
    clock = ("seconds", "tokens_per_second", "peak_memory_bytes")
    return [{k: v for k, v in r.items() if k not in clock} for r in read_metrics(folder)]


def start(arguments: list[str], folder: Path, *, lines: int) -> subprocess.Popen:
    """Start run.py as a program and return once it has recorded so many steps."""
    process = subprocess.Popen(
        [sys.executable, str(RUN), *arguments], stderr=subprocess.PIPE, text=True
    )
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    return process


def test_a_run_leaves_its_files_and_its_summary(whole_run):
    names = {path.name for path in whole_run.iterdir()}
    assert names == {
        "config.yaml", "metrics.jsonl", "completions.jsonl", "checkpoints", "tensorboard",
        "summary.json", "report.html", "policy",
    }  # fmt: skip
    summary = json.loads((whole_run / "summary.json").read_text())
    assert {
        "success_start", "success_end", "pass_at_k_start", "pass_at_k_end", "steps",
        "wall_seconds", "peak_memory_bytes",
    } <= set(summary)  # fmt: skip
    assert set(summary["pass_at_k_end"]) == {"1", "2", "4"}
    assert summary["steps"] == STEPS
    assert [record["step"] for record in read_metrics(whole_run)] == list(range(1, STEPS + 1))
    checkpoints = sorted(path.name for path in (whole_run / "checkpoints").iterdir())
    assert checkpoints == [f"step-{STEPS - 1:06d}", f"step-{STEPS:06d}"]
    assert any((whole_run / "tensorboard").iterdir())


def test_the_trained_policy_can_be_trained_again(whole_run, tmp_path):
    again = ["--policy.path", str(whole_run / "policy"), "--output_dir", str(tmp_path)]
    assert main([*SMALL, *again, "--steps", "1"]) == 0
    end = json.loads((whole_run / "summary.json").read_text())["success_end"]
    start = json.loads((tmp_path / "tiny-cpu" / "summary.json").read_text())["success_start"]
    assert start == end, "the same weights, prompts and seeds"


def test_kill_and_ctrl_c_lose_nothing_and_the_numbers_are_those_of_a_whole_run(whole_run, tmp_path):
    folder = tmp_path / "stopped"
    names = ["--name", "stopped", "--output_dir", str(tmp_path)]
    killed = start([*SMALL, *names], folder, lines=2)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "rew')  # as if the kill had hit in the middle of a line
    lines = len((folder / "metrics.jsonl").read_text().splitlines())

    interrupted = start(["--resume", str(folder)], folder, lines=lines + 2)
    interrupted.send_signal(signal.SIGINT)
    message = interrupted.communicate()[1]
    assert interrupted.returncode == 130
    assert f"--resume {folder}" in message and "Traceback" not in message
    assert not (folder / "summary.json").exists(), "it was stopped before the end"

    assert main(["--resume", str(folder)]) == 0
    assert numbers(folder) == numbers(whole_run)
    samples = [(f / "completions.jsonl").read_text() for f in (folder, whole_run)]
    assert samples[0] == samples[1] and samples[0].count("\n") == 4 * STEPS
    summaries = [json.loads((f / "summary.json").read_text()) for f in (folder, whole_run)]
    for key in ("success_start", "success_end", "pass_at_k_start", "pass_at_k_end"):
        assert summaries[0][key] == summaries[1][key]
    weights = [load_file(f / "policy" / "model.safetensors") for f in (folder, whole_run)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_finished_run_is_trained_longer_only_when_asked(whole_run, capsys):
    before = (whole_run / "metrics.jsonl").read_bytes()
    assert main(["--resume", str(whole_run)]) == 2
    assert f"--steps {2 * STEPS} trains it longer" in capsys.readouterr().err
    assert (whole_run / "metrics.jsonl").read_bytes() == before


def test_a_taken_name_is_refused_and_the_default_name_gets_a_number(whole_run, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole_run.rglob("*")}
    output = ["--output_dir", str(whole_run.parent)]
    assert main([*SMALL, *output, "--name", "tiny-cpu"]) == 2
    error = capsys.readouterr().err
    assert f"{whole_run} exists: choose another --name" in error and error.count("\n") == 1
    assert main([*SMALL, *output, "--steps", "1"]) == 0
    assert (whole_run.parent / "tiny-cpu-2" / "summary.json").exists()
    assert {path: path.stat().st_mtime_ns for path in whole_run.rglob("*")} == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--loss.focal_gama", "1"],
        ["--steps", "many"],
        ["--config", "nowhere.yaml"],
        ["--policy.path", "nowhere"],
        ["--resume", "nowhere"],
    ],
)
def test_a_mistake_gets_one_line_exit_code_2_and_leaves_no_files(arguments, tmp_path, capsys):
    assert main(["--output_dir", str(tmp_path / "runs"), *arguments]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("run.py: error: ") and output.err.count("\n") == 1
    assert not output.out and not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([*SMALL, "--output_dir", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("run.py: error: cannot make") and "set another" in error


def test_as_a_program_by_its_path_a_mistake_ends_with_exit_code_2():
    result = subprocess.run(
        [sys.executable, str(RUN), "--stepz", "3"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr == "run.py: error: unknown option --stepz; did you mean --steps?\n"


def test_help_is_printed_and_ends_with_exit_code_0(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "deepspeed fgrpo_train/run.py --steps 50" in capsys.readouterr().out
