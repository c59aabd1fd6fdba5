"""Predicted time of the loss on GPUs, from what the running code computes and moves.

    python benchmarks/roofline.py [--json FILE] [--markdown]

No figure here is measured on a GPU. FLOPs and bytes are counted (`counting.py`) and scaled to the
head of Qwen2.5-7B in bf16, trained:

    time = sum over matrix products of max(FLOPs / rate, bytes / bandwidth)
           + sum over other operations of bytes / bandwidth

with the shares of the data sheets' peaks that are named below. The floor is 6 N V D FLOPs at the
rate of the products. N rows, C rows of a chunk, V vocabulary, D hidden size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from counting import FUSED, Counted, Phase, Shape, count, score, train


@dataclass(frozen=True)
class Gpu:
    flops: float
    """Dense bf16 peak of the data sheet."""
    bandwidth: float
    """Peak of the data sheet, bytes per second."""
    product_share: float
    """Assumed share of the peak that the library's products reach."""
    source: str


BANDWIDTH_SHARE = 0.9
"""Assumed of every GPU; a copy on one H200 ran at 4.3 of 4.8 TB/s."""
FUSED_SHARE = 0.9
"""Assumed rate of a product written in Triton relative to the library's."""
GPUS = {
    "A100-80GB": Gpu(312e12, 2.039e12, 0.80, "NVIDIA A100 data sheet, 80GB SXM"),
    "H100-SXM": Gpu(989.4e12, 3.35e12, 0.75, "NVIDIA H100 data sheet, SXM"),
    # 8192 x 8192 x 8192 random bf16 numbers ran at 770 to 800 TFLOP/s on one H200.
    "H200": Gpu(989.4e12, 4.8e12, 0.80, "NVIDIA H200 data sheet, SXM"),
    "MI300X": Gpu(1307.4e12, 5.3e12, 0.50, "AMD Instinct MI300X data sheet"),
}


QWEN_7B = Shape(rows=8192, chunk=2048, vocab=152064, hidden=3584)
CHUNKS = (1024, 2048, 4096, 8192)
TARGET = 1.12


def seconds(name: str, phase: Phase, gpu: Gpu, *, overlapped: bool = True) -> float:
    """Of one phase; not overlapped: the weight gradient's own traffic comes on top of its FLOPs."""
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE
    rate = gpu.flops * gpu.product_share * (FUSED_SHARE if name == FUSED else 1)
    exposed = 0.0 if overlapped else phase.accumulator_bytes / bandwidth
    return max(phase.flops / rate + exposed, phase.bytes / bandwidth)


def peak_bytes(shape: Shape) -> int:
    """Above the inputs, at most: fp32 dW and dhidden, a chunk's fp32 logits and bf16 E, its dhidden
    and operands; or, in the backward, both gradients once more in bf16."""
    weight, hidden = shape.vocab * shape.hidden, shape.rows * shape.hidden
    chunk = shape.chunk * (6 * shape.vocab + (4 + 4 + 2 + 2) * shape.hidden)
    return 4 * (weight + hidden) + max(chunk, 2 * (weight + hidden))


@dataclass(frozen=True)
class Prediction:
    gpu: str
    chunk: int
    floor_ms: float
    ours_ms: float
    exposed_ms: float
    """With the weight gradient's traffic on top of its FLOPs."""
    no_grad_ms: float
    one_product_ms: float
    peak_gib: float
    phases_ms: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.ours_ms / self.floor_ms


def predict(training: Counted, scoring: Counted) -> list[Prediction]:
    predictions = []
    for name, gpu in GPUS.items():
        product = 2 * QWEN_7B.rows * QWEN_7B.vocab * QWEN_7B.hidden
        product_ms = 1e3 * product / (gpu.flops * gpu.product_share)
        for chunk in CHUNKS:
            shape = replace(QWEN_7B, chunk=chunk)
            phases = training.phases(shape)
            times = {phase: 1e3 * seconds(phase, phases[phase], gpu) for phase in phases}
            exposed = sum(seconds(*item, gpu, overlapped=False) for item in phases.items())
            no_grad = sum(seconds(*item, gpu) for item in scoring.phases(shape).items())
            predictions.append(
                Prediction(
                    gpu=name,
                    chunk=chunk,
                    floor_ms=3 * product_ms,
                    ours_ms=sum(times.values()),
                    exposed_ms=1e3 * exposed,
                    no_grad_ms=1e3 * no_grad,
                    one_product_ms=product_ms,
                    peak_gib=peak_bytes(shape) / 2**30,
                    phases_ms=times,
                )
            )
    return predictions


HEAD = ["GPU", "C", "floor ms", "ours ms", "ratio", "dW traffic exposed", "no grad ms", "ratio"]
HEAD += ["peak GiB"]


def rows(predictions: list[Prediction]) -> Iterator[list[str]]:
    for p in predictions:
        times = [f"{p.floor_ms:.1f}", f"{p.ours_ms:.1f}", f"{p.ratio:.2f}"]
        times += [f"{p.exposed_ms / p.floor_ms:.2f}", f"{p.no_grad_ms:.1f}"]
        times += [f"{p.no_grad_ms / p.one_product_ms:.2f}", f"{p.peak_gib:.1f}"]
        yield [p.gpu, str(p.chunk), *times]


def table(lines: list[list[str]], *, markdown: bool) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        yield f"| {' | '.join(cells)} |" if markdown else "  ".join(cells)
        if markdown and number == 0:
            yield f"|{'|'.join('-' * (width + 1) + ':' for width in widths)}|"


def report(
    training: Counted, scoring: Counted, predictions: list[Prediction], *, markdown: bool
) -> Iterator[str]:
    q = QWEN_7B
    yield (
        f"Predicted, not measured: head of Qwen2.5-7B (D = {q.hidden}, V = {q.vocab}), "
        f"N = {q.rows}, bf16, head trained."
    )
    for what, counted in (("training", training), ("no grad", scoring)):
        for kernel, (loaded, stored) in counted.kernels.items():
            yield f"{kernel} ({what}): {loaded:g} bytes loaded, {stored:g} stored per logit."
    yield ""
    yield from table([HEAD, *rows(predictions)], markdown=markdown)
    yield ""
    yield f"Phases in ms at C = {q.chunk}:"
    yield ""
    chosen = [p for p in predictions if p.chunk == q.chunk]
    phases = list(chosen[0].phases_ms)
    times = [[p.gpu, *(f"{p.phases_ms[phase]:.2f}" for phase in phases)] for p in chosen]
    yield from table([["GPU", *phases], *times], markdown=markdown)
    yield ""
    yield (
        f"Floor: 6 N V D FLOPs at the products' rate; target: {TARGET} times that. Peak: above the "
        "inputs, at most."
    )
    for name, gpu in GPUS.items():
        yield (
            f"{name}: {gpu.flops / 1e12:g} TFLOP/s x {gpu.product_share:.2f}, "
            f"{gpu.bandwidth / 1e12:g} TB/s x {BANDWIDTH_SHARE}; peaks from the {gpu.source}, "
            "shares assumed."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    arguments = parser.parse_args()
    training, scoring = count(train, products=3), count(score, products=1)
    predictions = predict(training, scoring)
    print(*report(training, scoring, predictions, markdown=arguments.markdown), sep="\n")
    if arguments.json:
        facts: dict[str, Any] = {"measured": False, "date": date.today().isoformat()}
        facts |= {"shape": asdict(QWEN_7B), "bytes_per_logit": training.kernels}
        facts |= {"gpus": {name: asdict(gpu) for name, gpu in GPUS.items()}}
        facts |= {"predicted": [asdict(prediction) for prediction in predictions]}
        arguments.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
