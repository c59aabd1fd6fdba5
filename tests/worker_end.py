"""How a process of a test with several processes ends."""

import os
import sys
from typing import NoReturn

import torch.distributed as dist


def end_of_work() -> NoReturn:
    """Wait for the others and leave without the interpreter's teardown: in one process of ten, a
    thread of gloo's is still running then and aborts it."""
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
