"""The table at the end of a run."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field

import torch
from contestants import (
    FLOOR,
    GRAD_TOL,
    ONE_PRODUCT,
    SCORED,
    SPARSE_FLAT,
    SPARSE_PEAKED,
    TRAINED,
    Size,
)
from timing import Times

PLAIN, OURS = "plain PyTorch", "ours"
TIME_TARGETS = [
    # (contestant, relative to, at most); for the full size.
    (OURS, FLOOR, 1.10),
    (OURS, PLAIN, 0.85),
    (OURS, "TRL ChunkedLogProb", 0.80),
    (OURS, "F.linear_cross_entropy", 0.80),
    (OURS, "Liger fused GRPO", 0.40),
    ("ours, half inactive", OURS, 0.72),
    ("ours, half inactive, no logps", OURS, 0.55),
    (SPARSE_PEAKED, PLAIN, 0.50),
    (SPARSE_FLAT, OURS, 1.05),
    ("ours, no grad", ONE_PRODUCT, 1.15),
]
MEMORY_TARGET = 0.25
"""Ours relative to plain PyTorch."""


@dataclass
class Report:
    size_name: str
    size: Size
    threads: int
    times: Times
    checked: list[str] = field(default_factory=list)
    """Contestants whose loss and gradients agreed with the reference."""
    peak_mib: dict[str, float] = field(default_factory=dict)
    peak_mib_twice_the_rows: float | None = None

    def facts(self) -> dict[str, object]:
        """For --benchmark-json."""
        seconds = self.times.seconds
        return {
            "size": vars(self.size),
            "threads": self.threads,
            "clock": "process CPU" if self.times.use_cpu_clock else "wall",
            "load_average": os.getloadavg(),
            "seconds": seconds,
            "median_seconds": {name: self.times.median(name) for name in seconds},
            "peak_mib": self.peak_mib,
            "peak_mib_twice_the_rows": self.peak_mib_twice_the_rows,
            "targets": [
                {"what": what, "measured": measured, "at_most": bound, "met": measured <= bound}
                for what, measured, bound in self._targets()
            ],
        }

    def lines(self) -> list[str]:
        size = self.size
        rounds = len(next(iter(self.times.seconds.values())))
        clock = "process CPU seconds" if self.times.use_cpu_clock else "wall seconds"
        load = " ".join(f"{value:.1f}" for value in os.getloadavg())
        lines = [
            f"{datetime.datetime.now():%Y-%m-%d %H:%M}  size {self.size_name}: N={size.rows} "
            f"D={size.hidden} V={size.vocab} fp32, head trained",
            f"torch {torch.__version__}, {self.threads} thread(s), load average {load}; median "
            f"{clock} of {rounds} interleaved rounds",
            f"loss and gradients agree with the reference: {len(self.checked)} of "
            f"{len(TRAINED) + 3} contestants (grad_tol = {GRAD_TOL:g}: within it)",
            "",
            f"{'':31}{'seconds':>9}{'/ floor':>9}{'/ plain':>9}{'/ ours':>9}"
            f"{'peak MiB':>10}{'less grads':>12}",
        ]
        trained = (FLOOR, *TRAINED, SPARSE_FLAT, SPARSE_PEAKED)
        lines += [self._row(name, FLOOR, PLAIN, OURS) for name in trained]
        lines.append("")
        lines += [self._row(name, ONE_PRODUCT, *SCORED) for name in (ONE_PRODUCT, *SCORED)]
        lines += [
            "",
            "peak MiB: resident memory above the inputs, one fresh process each; less grads: "
            "without",
            f"dW and dhidden ({size.gradient_bytes / 2**20:.0f} MiB), which every contestant "
            "returns. No grad: / floor is / one bare product.",
        ]
        if self.peak_mib_twice_the_rows is not None:
            growth = self.peak_mib_twice_the_rows - self.peak_mib[OURS]
            hidden = 4 * size.rows * size.hidden / 2**20
            lines.append(
                f"twice the rows: ours takes {growth:+.1f} MiB; one more [N, D] is {hidden:.1f} MiB"
            )
        lines += ["", f"{'target (DESIGN, for --size full)':56}{'measured':>9}{'at most':>9}"]
        for what, measured, bound in self._targets():
            verdict = "met" if measured <= bound else "missed"
            lines.append(f"{what:56}{measured:9.3f}{bound:9.2f}  {verdict}")
        return lines

    def _row(self, name: str, floor: str, plain: str, ours: str) -> str:
        seconds = self.times.median(name)
        line = f"{name:31}{seconds:9.3f}"
        for base in (floor, plain, ours):
            line += f"{seconds / self.times.median(base):9.3f}"
        peak = self.peak_mib.get(name)
        if peak is not None:
            line += f"{peak:10.0f}"
            if name in TRAINED:
                line += f"{peak - self.size.gradient_bytes / 2**20:12.0f}"
        return line

    def _targets(self) -> list[tuple[str, float, float]]:
        targets = [
            (f"time: {name} / {base}", self.times.median(name) / self.times.median(base), bound)
            for name, base, bound in TIME_TARGETS
        ]
        if self.peak_mib:
            ours, plain = self.peak_mib[OURS], self.peak_mib[PLAIN]
            gradients = self.size.gradient_bytes / 2**20
            what = f"peak memory: {OURS} / {PLAIN}"
            targets.append((what, ours / plain, MEMORY_TARGET))
            less = (ours - gradients) / (plain - gradients)
            targets.append((f"{what}, less grads", less, MEMORY_TARGET))
        return targets
