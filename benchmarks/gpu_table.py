"""Time and memory of the loss beside its peers on one GPU.

    python benchmarks/gpu_table.py --out FOLDER --budget SECONDS

Ours share a process; each peer has its own, so that one that crashes or poisons the device takes
nothing with it. A peer that is missing or fails has its error in the table. Each contestant's loss
and the gradient of some rows are compared with float64; the table has the errors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from contestants import CONFIG, Loss, Size, clip_loss, drop_gradients, training_step
from gpu_inputs import (
    CHUNKS,
    ON_GPU,
    Clock,
    Results,
    exact_gradient,
    full_size,
    median_ms,
    peak_mib,
    problem,
)
from gpu_peers import NEEDS_GPU, OURS, PEERS, SCORED, TRAINED, ours

COLUMNS = ["contestant", "ms", "of ours", "peak MiB", "loss error", "dhidden error", "error"]
PEER_SECONDS = 75
SECONDS_EACH = 3.0 if ON_GPU else 0.0


def measure(name: str) -> Iterator[dict[str, Any]]:
    """Records of one peer, or of everything of ours."""
    size = full_size()
    inputs, logps = problem(size)
    exact_loss = clip_loss(logps, inputs)
    exact = exact_gradient(inputs, size, CONFIG)
    clean = partial(drop_gradients, inputs)

    def record(name: str, loss: Loss, size: Size, *, trained: bool, checked: bool) -> Any:
        run = partial(training_step if trained else _score, loss, inputs, size)
        clean()
        value = run()
        found: dict[str, Any] = {"contestant": name}
        if checked:
            terms = inputs.advantages.abs().max()
            found["loss error"] = float((value - exact_loss).abs() / terms)
            assert inputs.hidden.grad is not None
            gradient = inputs.hidden.grad.flatten(0, 1)[: len(exact)].double()
            found["dhidden error"] = float((gradient - exact).norm() / exact.norm())
        found["peak MiB"] = peak_mib(run, clean)
        found["ms"] = median_ms(run, SECONDS_EACH, clean)
        clean()
        return found

    if name != OURS:
        yield record(name, PEERS[name], size, trained=True, checked=True)
        return
    for ours_name, loss in TRAINED.items():
        yield record(ours_name, loss, size, trained=True, checked="live" not in ours_name)
    for scored_name, loss in SCORED.items():
        yield record(scored_name, loss, size, trained=False, checked=False)
    for rows in CHUNKS:
        at = full_size(rows)
        yield record(f"{OURS}, C = {rows}", ours, at, trained=True, checked=True)


def _score(loss: Loss, inputs: Any, size: Size) -> Any:
    return loss(inputs, size)


def measured_apart(name: str, seconds: float) -> Iterator[dict[str, Any]]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--worker", name]
    command = ["timeout", f"{seconds:.0f}", *command]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        for line in process.stdout or ():
            if line.startswith("{"):
                yield json.loads(line)
        process.wait()
        log.seek(0)
        errors = log.read()
    if process.returncode == 124:
        yield {"contestant": name, "error": f"not done in {seconds:.0f} s"}
    elif process.returncode:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        yield {"contestant": name, "error": last[:300]}


def measured_here(name: str) -> Iterator[dict[str, Any]]:
    """For a dry run, where a process each would cost more than the rest."""
    if name in NEEDS_GPU:
        yield {"contestant": name, "error": "needs a GPU"}
        return
    try:
        yield from measure(name)
    except (ImportError, AttributeError) as error:
        if name == OURS:
            raise
        yield {"contestant": name, "error": f"{type(error).__name__}: {error}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=270, metavar="SECONDS")
    parser.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        for record in measure(arguments.worker):
            print(json.dumps(record), flush=True)
        return 0
    if arguments.out is None:
        parser.error("--out is needed")
    clock = Clock("table", arguments.budget)
    results = Results("table", arguments.out, COLUMNS)
    failed = False
    for name in (OURS, *PEERS):
        if clock.over():
            break
        seconds = min(clock.left, PEER_SECONDS * (2 if name == OURS else 1))
        for record in measured_apart(name, seconds) if ON_GPU else measured_here(name):
            if results.records and "ms" in record and "ms" in results.records[0]:
                record["of ours"] = record["ms"] / results.records[0]["ms"]
            results.add(record)
            failed |= name == OURS and "error" in record
    print(f"== table: {len(results.records)} rows", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
