"""A head sharded by FSDP2: gradients of two ranks equal one process's."""

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("fsdp2_worker.py")


def test_gradients_of_two_ranks_equal_one_process():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = subprocess.run([*launch, str(WORKER)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("result: ")]
    assert len(lines) == 12, run.stdout
    for line in lines:
        # Of twice the error of one process at this dtype, and one rounding.
        assert float(line.rsplit(": ", 1)[1]) <= 1, line
