"""What the device reaches without us: the three bare products at our shapes, and a copy.

python benchmarks/gpu_ceilings.py --out FOLDER --budget SECONDS
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from gpu_inputs import (
    CHUNKS,
    DEVICE,
    DTYPE,
    ON_GPU,
    Clock,
    Results,
    full_size,
    median_ms,
    multiply,
    nothing,
)


def copy_gbytes_per_second(seconds: float) -> tuple[float, float]:
    """(ms, bytes read and written per second) of a copy that no cache holds."""
    source = torch.randn(2**29 if ON_GPU else 2**12, device=DEVICE)
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source), seconds, nothing)
    return ms, 2 * source.nbytes / ms / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=45, metavar="SECONDS")
    arguments = parser.parse_args()
    clock = Clock("ceilings", arguments.budget)
    columns = ["what", "chunk_rows", "ms", "tflops", "gbytes_per_second"]
    results = Results("ceilings", arguments.out, columns)
    size = full_size()
    seconds = arguments.budget / 20 if ON_GPU else 0.0

    ms, gbytes = copy_gbytes_per_second(seconds)
    results.add({"what": "copy, bytes read and written", "ms": ms, "gbytes_per_second": gbytes})
    weight = torch.randn(size.vocab, size.hidden, device=DEVICE, dtype=DTYPE)
    dweight = torch.zeros(weight.shape, device=DEVICE)
    for rows in CHUNKS:
        if clock.over():
            return
        x = torch.randn(rows, size.hidden, device=DEVICE, dtype=DTYPE)
        e = torch.randn(rows, size.vocab, device=DEVICE, dtype=DTYPE)
        logits = torch.empty(e.shape, device=DEVICE)
        dx = torch.empty(x.shape, device=DEVICE)
        total = 0.0
        for what, operands in {
            "logits = x W^T": (x, weight.t(), logits, False),
            "dx = E W": (e, weight, dx, False),
            "dW += E^T x": (e.t(), x, dweight, True),
        }.items():
            *tensors, add = operands
            ms = median_ms(partial(multiply, *tensors, add=add), seconds, nothing)
            total += ms * size.rows / rows
            flops = 2 * rows * size.vocab * size.hidden
            results.add({"what": what, "chunk_rows": rows, "ms": ms, "tflops": flops / ms / 1e9})
        flops = 6 * size.rows * size.vocab * size.hidden
        what = f"floor: all three, {size.rows} rows"
        results.add({"what": what, "chunk_rows": rows, "ms": total, "tflops": flops / total / 1e9})


if __name__ == "__main__":
    main()
