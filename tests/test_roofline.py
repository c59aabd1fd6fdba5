"""The predicted GPU times against hand calculation; what is counted, against what the code says."""

import importlib
import sys

import pytest
from test_imports import ROOT

sys.path.append(str(ROOT / "benchmarks"))
counting, roofline = map(importlib.import_module, ("counting", "roofline"))

N, C, V, D = 8192, 2048, 152064, 3584
SHAPE = counting.Shape(rows=N, chunk=C, vocab=V, hidden=D)


@pytest.fixture(scope="module")
def training():
    return counting.count(counting.train, products=3)


@pytest.fixture(scope="module")
def scoring():
    return counting.count(counting.score, products=1)


def test_a_wrong_plan_is_noticed():
    with pytest.raises(AssertionError):
        counting.count(counting.train, products=4)


def test_flops_are_those_of_the_plans(training, scoring):
    assert sum(p.flops for p in training.phases(SHAPE).values()) == 6 * N * V * D
    assert sum(p.flops for p in scoring.phases(SHAPE).values()) == 2 * N * V * D


def test_bytes_of_the_row_kernel_per_logit(training):
    """fp32 logits are read for the statistics and again for the gradient, E is written in bf16."""
    assert training.kernels == {"policy_rows_kernel": (4, 2)}
    assert training.phases(SHAPE)[counting.ROWS].bytes == 6 * N * V


def test_bytes_of_the_products(training):
    phases, chunks = training.phases(SHAPE), 4
    x, weight, logits, e = 2 * C * D, 2 * V * D, 4 * C * V, 2 * C * V
    assert phases[counting.LOGITS].bytes == chunks * (x + weight + logits)
    assert phases[counting.DHIDDEN].bytes == chunks * (e + weight + 4 * C * D)
    accumulator = (3 + 4) * 4 * V * D  # read by all chunks but the first
    assert phases[counting.DWEIGHT].bytes == chunks * (e + x) + accumulator
    assert phases[counting.DWEIGHT].accumulator_bytes == accumulator


def test_the_finish_is_one_pass_over_the_weight_gradient(training):
    """fp32 in, bf16 out, the upstream scalar on the way."""
    found = training.phases(SHAPE)[counting.FINISH].bytes
    assert found == pytest.approx(6 * V * D, rel=1e-6)


def test_passes_over_rows_are_a_small_share(training):
    """None of them has a vocabulary: some tens of bytes for each of N D elements."""
    assert training.phases(SHAPE)[counting.SMALL_PASSES].bytes < 60 * N * D


def test_one_figure_by_hand(training, scoring):
    """H200: 989.4 TFLOP/s x 0.8 and 4.8 TB/s x 0.9."""
    (found,) = (
        p for p in roofline.predict(training, scoring) if (p.gpu, p.chunk) == ("H200", 2048)
    )
    assert found.floor_ms == pytest.approx(33.843, abs=1e-3)  # 6 N V D / 791.52e12
    assert found.phases_ms[counting.ROWS] == pytest.approx(1.7302, abs=1e-4)  # 6 N V / 4.32e12
    assert found.phases_ms[counting.FINISH] == pytest.approx(0.7569, abs=1e-4)  # 6 V D / 4.32e12
    # fp32 dW 2079 MiB and dhidden 112 MiB; a chunk's Z and E 1782 MiB, its x, g x, E W 84 MiB
    assert found.peak_gib == pytest.approx((2079 + 112 + 1782 + 84) / 1024, abs=1e-9)
    assert found.ours_ms == pytest.approx(sum(found.phases_ms.values()))
