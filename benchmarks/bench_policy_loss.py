"""Time and memory of the policy loss beside the bare matrix products and four peers.

    pytest benchmarks/ --benchmark-only                                   smoke size, a minute
    pytest benchmarks/ --benchmark-only --size full --threads 1           the numbers to quote
    pytest benchmarks/ --benchmark-only --benchmark-json=result.json      each contestant's rounds

pytest-benchmark times whole rounds; a round runs each contestant once. Timing one contestant to the
end before the next would compare the machine's load at two moments.
"""

from __future__ import annotations

from functools import partial

import pytest
from contestants import (
    FLOOR,
    ONE_PRODUCT,
    SCORED,
    SPARSE_FLAT,
    SPARSE_PEAKED,
    TRAINED,
    BareProducts,
    drop_gradients,
    ours_sparse,
    training_step,
)
from pytest_benchmark.fixture import BenchmarkFixture
from report import Report

from fgrpo_kernels.testing import LossInputs


def bench_policy_loss(
    benchmark: BenchmarkFixture,
    pytestconfig: pytest.Config,
    problems: tuple[LossInputs, LossInputs],
    report: Report,
    peak_memory: None,
) -> None:
    size = report.size
    problem, peaked = problems
    contestants = {
        FLOOR: BareProducts(problem, size, training=True),
        **{name: partial(training_step, loss, problem, size) for name, loss in TRAINED.items()},
        SPARSE_FLAT: partial(training_step, ours_sparse, problem, size),
        SPARSE_PEAKED: partial(training_step, ours_sparse, peaked, size),
        ONE_PRODUCT: BareProducts(problem, size, training=False),
        **{name: partial(loss, problem, size) for name, loss in SCORED.items()},
    }

    def clean_up() -> None:
        drop_gradients(problem)
        drop_gradients(peaked)

    benchmark.pedantic(
        report.times.run_round,
        args=(contestants, clean_up),
        rounds=pytestconfig.getoption("--rounds"),
    )
    benchmark.extra_info |= report.facts()
