"""Peak memory of one contestant above its inputs, measured in a process of its own.

    python benchmarks/peak_memory.py "ours" --size full

prints MiB: the high-water mark of the resident set during one step, minus what was resident before
it, when inputs existed and a small step had loaded every library. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from contestants import SCORED, SIZES, TRAINED, Size, drop_gradients, make_problem, training_step

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(name: str, size: Size) -> float:
    _run(name, replace(size, batch=4, length=2, vocab=512))
    return _run(name, size)


def measure_in_subprocess(name: str, size_name: str, threads: int, scale: int = 1) -> float:
    """MiB. Raises RuntimeError with the process's error output."""
    command = [sys.executable, __file__, name, f"--size={size_name}"]
    command += [f"--threads={threads}", f"--scale={scale}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def _run(name: str, size: Size) -> float:
    inputs = make_problem(size)
    gc.collect()
    CLEAR.write_text("5")  # resets the high-water mark (proc(5))
    before = _resident("VmRSS")
    if name in TRAINED:
        training_step(TRAINED[name], inputs, size)
    else:
        SCORED[name](inputs, size)
    extra = _resident("VmHWM") - before
    drop_gradients(inputs)
    return extra


def _resident(field: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of one contestant above its inputs.")
    parser.add_argument("name", choices=[*TRAINED, *SCORED])
    parser.add_argument("--size", choices=list(SIZES), default="smoke")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--scale", type=int, default=1, help="times as many sequences")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = SIZES[args.size]
    print(measure(args.name, replace(size, batch=size.batch * args.scale)))


if __name__ == "__main__":
    main()
