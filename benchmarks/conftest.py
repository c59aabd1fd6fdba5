"""Options of the benchmark run, its session-wide state and the table at the end."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from contestants import (
    SCORED,
    SIZES,
    TRAINED,
    check,
    drop_gradients,
    make_peaked_problem,
    make_problem,
)
from peak_memory import measure_in_subprocess
from report import OURS, Report
from timing import Times

from fgrpo_kernels.testing import LossInputs

PEERS = {"liger_kernel": "liger-kernel", "trl": "trl"}
REPORT = pytest.StashKey[Report]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fgrpo benchmarks")
    group.addoption("--size", choices=list(SIZES), default="smoke", help="default: smoke")
    group.addoption("--rounds", type=int, default=5, help="interleaved rounds, default: 5")
    group.addoption(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="1 also switches from wall to process CPU time; default: PyTorch's own choice",
    )
    group.addoption("--no-memory", action="store_true", help="leave peak memory out")


def pytest_configure(config: pytest.Config) -> None:
    # The table below says more than seconds per round, which is all that pytest-benchmark sees.
    config.option.benchmark_quiet = True


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    missing = [name for module, name in PEERS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise pytest.UsageError(f"peers not installed: {missing}; pip install -e '.[bench]'")
    threads = pytestconfig.getoption("--threads")
    torch.set_num_threads(threads)
    size_name = pytestconfig.getoption("--size")
    times = Times(use_cpu_clock=threads == 1)
    report = Report(size_name, SIZES[size_name], threads, times)
    pytestconfig.stash[REPORT] = report
    return report


@pytest.fixture(scope="session")
def problems(report: Report) -> tuple[LossInputs, LossInputs]:
    """Flat and peaked rows, after every contestant has shown that it computes the same."""
    flat, peaked = make_problem(report.size), make_peaked_problem(report.size)
    report.checked += check(flat, peaked, report.size)
    drop_gradients(flat)
    drop_gradients(peaked)
    return flat, peaked


@pytest.fixture(scope="session")
def peak_memory(pytestconfig: pytest.Config, report: Report) -> None:
    if pytestconfig.getoption("--no-memory"):
        return
    for name in (*TRAINED, *SCORED):
        report.peak_mib[name] = measure_in_subprocess(name, report.size_name, report.threads)
    report.peak_mib_twice_the_rows = measure_in_subprocess(
        OURS, report.size_name, report.threads, scale=2
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    report = config.stash.get(REPORT, None)
    if report is None or not report.times.seconds:
        return
    terminalreporter.section("policy loss: time and memory")
    for line in report.lines():
        terminalreporter.write_line(line)
