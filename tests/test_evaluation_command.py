"""`--evaluate` and `--compare` from outside: numbers, files, stops, refusals."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

import fgrpo_train
from fgrpo_train.command_line import parse_command
from fgrpo_train.evaluation import pass_at_k
from fgrpo_train.hf_engine import HFEngine
from fgrpo_train.run import main

RUN = Path(fgrpo_train.__file__).parent / "run.py"
SMALL = ["--evaluation.samples", "64", "--evaluation.max_prompts", "16"]
FOUR_CHUNKS = ["--evaluation.samples", "512", "--evaluation.max_prompts", "16"]
IN_TRAINING = ["--evaluation.samples_per_prompt", "8", "--evaluation.max_prompts", "8"]
TRAINING = ["--data.prompts_per_step", "4", "--sampling.group_size", "4", *IN_TRAINING]


@pytest.fixture(autouse=True)
def _signal_handlers():
    """main() installs its own; the test runner's come back."""
    saved = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in saved.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A run of 5 steps that evaluates every 2."""
    output = tmp_path_factory.mktemp("runs")
    arguments = ["--steps", "5", "--evaluation.every", "2", "--optimisation.learning_rate", "0.002"]
    assert main([*TRAINING, *arguments, "--output_dir", str(output)]) == 0
    return output / "tiny-cpu"


def evaluate(output: Path, *arguments: str) -> Path:
    assert main(["--evaluate", "tiny-countdown", *arguments, "--output_dir", str(output)]) == 0
    return output / "evaluation" / "tiny-countdown"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    """The files of an evaluation of four chunks without a stop."""
    return contents(evaluate(tmp_path_factory.mktemp("whole"), *FOUR_CHUNKS))


def test_the_shipped_policy_on_16_prompts(tmp_path, capsys):
    folder = evaluate(tmp_path, *SMALL)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len({line["prompt"] for line in samples}) == len(samples) == 16
    assert all(line["samples"] == 64 for line in samples)
    assert all(len(line["distinct"]) <= line["correct"] for line in samples)
    counts = torch.tensor([line["correct"] for line in samples])
    result = json.loads((folder / "result.json").read_text())
    assert list(result["pass_at_k"]) == ["1", "2", "4", "8", "16", "32", "64"]
    for k, value in result["pass_at_k"].items():
        assert value == pytest.approx(float(pass_at_k(64, counts, int(k)).mean()))
        low, high = result["interval"][k]
        assert low <= value <= high
    # On all 256 prompts the shipped policy has 22.5 %, sd of a prompt 7 points: 16 give 1.8 more.
    assert 0.15 < result["pass_at_k"]["1"] < 0.30
    printed = capsys.readouterr().out
    value, (low, high) = result["pass_at_k"]["4"], result["interval"]["4"]
    row = f"pass@4 +{100 * value:.1f} \\[{100 * low:.1f}, {100 * high:.1f}\\]"
    assert re.search(row, printed) and "16 prompts x 64 completions" in printed
    svg = ElementTree.parse(folder / "passk.svg")
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}circle"))) == 7


@pytest.mark.slow
def test_after_a_kill_the_files_are_those_of_an_evaluation_without_a_stop(whole, tmp_path):
    arguments = ["--evaluate", "tiny-countdown", *FOUR_CHUNKS, "--output_dir", str(tmp_path)]
    process = subprocess.Popen([sys.executable, str(RUN), *arguments], stderr=subprocess.DEVNULL)
    folder = tmp_path / "evaluation" / "tiny-countdown"
    samples, deadline = folder / "samples.jsonl", time.monotonic() + 120
    while not samples.exists() or not samples.stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    done = samples.read_bytes()
    assert whole["samples.jsonl"].startswith(done) and len(done) < len(whole["samples.jsonl"])
    samples.write_bytes(done + b'{"prompt": "countdo')
    assert contents(evaluate(tmp_path, *FOUR_CHUNKS)) == whole


def test_after_ctrl_c_nothing_is_drawn_twice(whole, tmp_path, monkeypatch, capsys):
    generate, sizes = HFEngine.generate, []

    def stop_in_the_third_call(self, prompts, **options):
        sizes.append(len(prompts))
        if len(sizes) == 3:
            raise KeyboardInterrupt
        return generate(self, prompts, **options)

    monkeypatch.setattr(HFEngine, "generate", stop_in_the_third_call)
    arguments = ["--evaluate", "tiny-countdown", *FOUR_CHUNKS, "--output_dir", str(tmp_path)]
    assert main(arguments) == 130
    assert "The same command goes on" in capsys.readouterr().err
    assert contents(evaluate(tmp_path, *FOUR_CHUNKS)) == whole
    assert sizes == [4, 4, 4, 4, 4], "the third chunk was begun twice, no other"


def test_a_run_its_policy_and_its_last_checkpoint_share_one_evaluation(run_folder, monkeypatch):
    assert main(["--evaluate", str(run_folder), "--evaluation.samples", "8"]) == 0
    folder = run_folder / "evaluation" / "step-000005"
    files = contents(folder)
    summary = json.loads((run_folder / "summary.json").read_text())
    result = json.loads(files["result.json"])
    # The same prompts, seeds and samples; terms are added up in another order.
    assert result["pass_at_k"] == pytest.approx(summary["pass_at_k_end"], abs=1e-14)
    assert result["distinct_correct"] == summary["distinct_correct_end"]
    assert result["policy"] == "tiny-cpu/step-000005" and result["num_prompts"] == 8

    def no_call(self, prompts, **options):
        raise AssertionError("everything is there")

    monkeypatch.setattr(HFEngine, "generate", no_call)
    for path in (run_folder / "policy", run_folder / "checkpoints" / "step-000005"):
        assert main(["--evaluate", str(path), "--evaluation.samples", "8"]) == 0
        assert contents(folder) == files


def test_training_evaluates_at_intervals_what_the_checkpoints_are(run_folder):
    held_out = {r["step"]: r["held_out"] for r in read_metrics(run_folder) if "held_out" in r}
    assert list(held_out) == [2, 4], "after 5, the end, it is in the summary"
    assert held_out[2] != held_out[4]
    checkpoint = run_folder / "checkpoints" / "step-000004"
    assert main(["--evaluate", str(checkpoint), "--evaluation.samples", "8"]) == 0
    result = json.loads((run_folder / "evaluation" / "step-000004" / "result.json").read_text())
    expected = {f"pass_at_{k}": value for k, value in result["pass_at_k"].items()}
    expected["distinct_correct"] = result["distinct_correct"]
    assert held_out[4] == pytest.approx(expected, abs=1e-14)
    page = (run_folder / "report.html").read_text()
    assert f"held-out, step 4: {held_out[4]['pass_at_1']:.4g}" in page


def test_evaluating_does_not_change_the_training(run_folder, tmp_path):
    """The same weights and records as without; what a machine measures aside."""
    arguments = ["--steps", "5", "--optimisation.learning_rate", "0.002"]
    assert main([*TRAINING, *arguments, "--output_dir", str(tmp_path)]) == 0
    without = tmp_path / "tiny-cpu"
    clock = ("seconds", "tokens_per_second", "peak_memory_bytes", "held_out")
    records = [
        [{k: v for k, v in record.items() if k not in clock} for record in read_metrics(folder)]
        for folder in (run_folder, without)
    ]
    assert records[0] == records[1]
    weights = [folder / "policy" / "model.safetensors" for folder in (run_folder, without)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_tensorboard_has_the_held_out_numbers(run_folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_folder / "tensorboard")).Reload()
    held_out = {r["step"]: r["held_out"] for r in read_metrics(run_folder) if "held_out" in r}
    found = [(e.step, e.value) for e in events.Scalars("held_out/pass_at_1")]
    assert found == [(step, pytest.approx(held_out[step]["pass_at_1"])) for step in (2, 4)]


def test_two_policies_are_compared_and_again_without_sampling(run_folder, tmp_path, capsys):
    checkpoint = run_folder / "checkpoints" / "step-000004"
    moved = ["--output_dir", str(tmp_path), "--evaluation.samples", "8"]
    assert main(["--evaluate", "tiny-countdown", str(checkpoint), *moved]) == 0
    first = tmp_path / "evaluation" / "tiny-countdown"
    second = run_folder / "evaluation" / "step-000004"
    comparison = json.loads((second / "versus-tiny-countdown.json").read_text())
    results = [json.loads((folder / "result.json").read_text()) for folder in (first, second)]
    assert results[0]["fingerprint"]["evaluation.max_prompts"] == 8, "the settings of the run"
    for k, found in comparison["differences"].items():
        difference = results[1]["pass_at_k"][k] - results[0]["pass_at_k"][k]
        assert found["over_prompts"]["value"] == pytest.approx(difference)
        assert (found["p"] is None) == (int(k) > 2), "m is a quarter of 8"
    svg = ElementTree.parse(second / "versus-tiny-countdown.svg")
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}polyline"))) == 3
    table = capsys.readouterr().out
    assert "B  tiny-cpu/step-000004: 8 prompts x 8 completions" in table
    assert main(["--compare", str(first), str(second)]) == 0
    assert capsys.readouterr().out == table


def test_settings_come_from_the_config_given_else_the_run_else_the_other_run(run_folder, tmp_path):
    def of(*arguments):
        command = parse_command(["--evaluate", *map(str, arguments)])
        return [e.config.evaluation.max_prompts for e in command.evaluations]

    (tmp_path / "my.yaml").write_text("evaluation: {max_prompts: 3}")
    assert of(run_folder) == [8] and of("tiny-countdown") == [None]
    assert of("tiny-countdown", run_folder) == [8, 8]
    assert of("tiny-countdown", run_folder, "--config", tmp_path / "my.yaml") == [3, 3]
    assert of(run_folder, "--evaluation.max_prompts", "5") == [5]


def test_unfinished_prompts_are_left_out_and_counted(whole, tmp_path, capsys):
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        for name, content in whole.items():
            (folder / name).write_bytes(content)
    lines = whole["samples.jsonl"].splitlines(keepends=True)
    (folders[1] / "samples.jsonl").write_bytes(b"".join(lines[:12]))
    assert main(["--compare", *map(str, folders)]) == 0
    table = capsys.readouterr().out
    assert "b: 12 prompts x 512 completions, 4 unfinished prompts left out" in table
    comparison = json.loads((folders[1] / "versus-a.json").read_text())
    assert comparison["num_prompts"] == 12 and comparison["second"]["excluded_prompts"] == 4
    assert comparison["differences"]["1"]["over_prompts"]["value"] == 0.0


def test_other_settings_for_the_same_folder_are_refused(tmp_path, capsys):
    folder = evaluate(tmp_path, *SMALL)
    before = contents(folder)
    capsys.readouterr()
    again = ["--evaluate", "tiny-countdown", *SMALL, "--output_dir", str(tmp_path)]
    for change in (["--evaluation.samples", "32"], ["--sampling.temperature", "0.5"]):
        assert main([*again, *change]) == 2
        error = capsys.readouterr().err
        assert f"{folder} holds samples with {change[0][2:]} = " in error
        assert error.count("\n") == 1 and contents(folder) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--evaluate", "nowhere"], "nowhere is no run .*shipped: tiny-countdown"),
        (["--evaluate", "a", "b", "c"], "expected one policy or two, got 3"),
        (["--evaluate", "tiny-countdown", "--policy.path", "x"], "remove --policy.path"),
        (["--evaluate", "tiny-countdown", "--resume", "x"], "only one of --resume, --evaluate"),
        (["--evaluate", "tiny-countdown", "--sampling.temperature", "0"], "expected > 0, got 0"),
        (["--evaluate", "tiny-countdown", "--evaluation.samples", "0"], "samples: expected >= 1"),
        (["--evaluation.every", "0"], "evaluation.every: expected none or >= 1"),
        (["--compare", "x", "y"], "no evaluation in x"),
        (["--compare", "x", "y", "--evaluation.samples", "8"], "no settings may be given"),
    ],
)
def test_a_mistake_gets_one_line(arguments, message, tmp_path, capsys):
    mine = ["--output_dir", str(tmp_path / "runs")] if "--compare" not in arguments else []
    assert main([*arguments, *mine]) == 2
    error = capsys.readouterr().err
    assert error.startswith("run.py: error: ") and error.count("\n") == 1
    assert re.search(message, error)
    assert not (tmp_path / "runs").exists()


def test_different_prompts_are_not_compared(whole, tmp_path, capsys):
    first = evaluate(tmp_path, *SMALL)
    second = tmp_path / "b"
    second.mkdir()
    for name, content in whole.items():
        (second / name).write_bytes(content)
    assert main(["--compare", str(first), str(second)]) == 2
    assert "cannot compare: evaluation.samples is 64 and 512" in capsys.readouterr().err


def test_two_policies_of_one_name_are_not_kept_in_one_folder(tmp_path, capsys):
    copy = tmp_path / "tiny-countdown"
    shutil.copytree(RUN.parent / "assets" / "tiny-countdown", copy)
    output = ["--output_dir", str(tmp_path / "runs")]
    assert main(["--evaluate", "tiny-countdown", str(copy), *SMALL, *output]) == 2
    assert "have the same name" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_run_without_a_finished_step_and_a_policy_that_is_behind(run_folder, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_bytes((run_folder / "config.yaml").read_bytes())
    assert main(["--evaluate", str(run)]) == 2
    assert "has no finished step yet" in capsys.readouterr().err
    # As if it had gone on after its summary: the newest checkpoint is the policy as it is now.
    (run / "summary.json").write_text('{"steps": 3}')
    for name in ("policy", "checkpoints"):
        (run / name).symlink_to(run_folder / name)
    assert main(["--evaluate", str(run), "--evaluation.samples", "8"]) == 0
    assert [path.name for path in (run / "evaluation").iterdir()] == ["step-000005"]


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path):
    """40 prompts x 64 completions are two chunks: each process takes one."""
    arguments = ["--evaluate", "tiny-countdown", "--evaluation.samples", "64"]
    arguments += ["--evaluation.max_prompts", "40"]
    assert main([*arguments, "--output_dir", str(tmp_path / "one")]) == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc_per_node=2", str(RUN)]
    two = subprocess.run(
        [*launch, *arguments, "--output_dir", str(tmp_path / "two")],
        capture_output=True,
        text=True,
    )
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("pass@64") == 1, "one process speaks"
    folders = [tmp_path / name / "evaluation" / "tiny-countdown" for name in ("one", "two")]
    assert contents(folders[0]) == contents(folders[1])
    training = ["--steps", "1", "--evaluation.samples_per_prompt", "64"]
    training += ["--evaluation.max_prompts", "40", "--output_dir", str(tmp_path / "two")]
    trained = subprocess.run([*launch, *training], capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    summary = json.loads((tmp_path / "two" / "tiny-cpu" / "summary.json").read_text())
    result = json.loads((folders[0] / "result.json").read_text())
    # The same terms, added up in another order.
    assert summary["pass_at_k_start"] == pytest.approx(result["pass_at_k"], abs=1e-14)
