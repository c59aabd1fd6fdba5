"""The loss module under DeepSpeed ZeRO-3: gradients of sharded ranks equal one process's."""

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("zero3_worker.py")


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_sharded_ranks_equal_one_process(ranks):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*launch, f"--nproc_per_node={ranks}", str(WORKER)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("result: ")]
    assert len(lines) == 8, run.stdout
    for line in lines:
        error, in_forward, in_backward = map(float, line.rsplit(": ", 1)[1].split())
        assert error <= 1, line
        # Once for all chunks; before a backward the engine gathers every module's parameters again.
        assert (in_forward, in_backward) == (1, 1), line
