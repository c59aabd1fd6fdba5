"""What the parts of a GPU session share: sizes, inputs made on the device, a clock, result files.

A session works on a GPU, or dry on a CPU: toy sizes, kernels interpreted, no time worth quoting.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton
from contestants import Size, weighted_advantages
from torch import Tensor

from fgrpo_kernels.testing import LossInputs

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
"""Of the table: what models are trained in; on a CPU what peers can multiply."""
CHUNKS = (1024, 2048, 4096, 8192) if ON_GPU else (4, 8)
CHECKED_ROWS = 64


def full_size(chunk_rows: int | None = None) -> Size:
    """The head of Qwen2.5-7B and 8192 tokens, or toys."""
    batch, length, hidden, vocab = (8, 1024, 3584, 152064) if ON_GPU else (2, 8, 32, 97)
    chunk_bytes = 4 * vocab * chunk_rows if chunk_rows else 2 * 2**30
    return Size(batch, length, hidden, vocab, chunk_bytes)


def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """out (fp32) = or += left right, as the package has it multiplied."""
    dtype: dict[str, Any] = {"out_dtype": torch.float32} if ON_GPU else {}
    return torch.addmm(out, left, right, beta=1 if add else 0, out=out, **dtype)


def problem(size: Size, dtype: torch.dtype = DTYPE, seed: int = 0) -> tuple[LossInputs, Tensor]:
    """(inputs, log-probs in float32 of their ids); every token valid, no advantage 0. Logits have
    standard deviation 2, ids are drawn from them, old_logps are 0.1 away."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    weight = torch.empty(size.vocab, size.hidden, dtype=dtype, device=DEVICE)
    for block in weight.split(16384):
        block.copy_(normal(*block.shape) * (2 / size.hidden**0.5))
    hidden = normal(size.rows, size.hidden).to(dtype)
    ids, logps = [], []
    for block in hidden.split(512):
        logits = torch.empty(len(block), size.vocab, device=DEVICE)
        log_probs = multiply(block, weight.t(), logits).log_softmax(-1)
        drawn = torch.multinomial(log_probs.exp(), 1, generator=generator)
        ids.append(drawn)
        logps.append(log_probs.gather(1, drawn))
    shape = (size.batch, size.length)
    logps_of_ids = torch.cat(logps).view(shape)
    advantages = normal(size.batch)
    inputs = LossInputs(
        hidden=hidden.view(*shape, size.hidden).requires_grad_(),
        lm_head_weight=weight.requires_grad_(),
        completion_ids=torch.cat(ids).view(shape),
        advantages=torch.where(advantages.abs() < 0.1, 0.5, advantages),
        success_rate=torch.full((size.batch,), 0.4, device=DEVICE),
        old_logps=logps_of_ids + 0.1 * normal(*shape),
    )
    return inputs, logps_of_ids


def exact_gradient(inputs: LossInputs, size: Size, config: Any) -> Tensor:
    """(rows, D): float64 gradient of the token-mean clip loss for the first CHECKED_ROWS rows."""
    assert inputs.old_logps is not None
    count = min(CHECKED_ROWS, size.length)
    hidden = inputs.hidden.detach().flatten(0, 1)[:count].double().requires_grad_()
    logits = hidden @ inputs.lm_head_weight.detach().double().t()
    ids = inputs.completion_ids.flatten()[:count, None]
    logps = logits.log_softmax(-1).gather(1, ids).squeeze(1)
    ratio = (logps - inputs.old_logps.flatten()[:count].double()).exp()
    advantage = weighted_advantages(inputs)[0].double()
    clipped = ratio.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage).sum() / size.rows
    return torch.autograd.grad(loss, hidden)[0]


def nothing() -> None:
    pass


def median_ms(run: Callable[[], object], seconds: float, clean: Callable[[], None]) -> float:
    """Median of as many runs as fit, 3 to 30, after 3 that do not count: events on a GPU."""
    times: list[float] = []
    stop = time.perf_counter() + seconds
    for turn in range(33):
        clean()
        if turn >= 6 and time.perf_counter() > stop:
            break
        if ON_GPU:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(end)
        else:
            before = time.perf_counter()
            run()
            elapsed = 1e3 * (time.perf_counter() - before)
        if turn >= 3:
            times.append(elapsed)
        if not ON_GPU and turn >= 3:
            break
    return statistics.median(times)


def peak_mib(run: Callable[[], object], clean: Callable[[], None]) -> float | None:
    """Device memory of one run above what was allocated before it; None on a CPU."""
    clean()
    if not ON_GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


class Results:
    """A part's records, written anew after each: what is cut off loses nothing."""

    def __init__(self, part: str, folder: Path, columns: list[str]) -> None:
        device = torch.cuda.get_device_name() if ON_GPU else "cpu-dry-run"
        self.records: list[dict[str, Any]] = []
        self._columns = columns
        self._facts = {
            "part": part,
            "date": date.today().isoformat(),
            "device": device,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "measured_on_gpu": ON_GPU,
        }
        folder.mkdir(parents=True, exist_ok=True)
        name = device.lower().replace(" ", "-").replace("/", "-")
        self._stem = folder / f"{name}-{self._facts['date']}-{part}"

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        print("  " + "  ".join(self._cells(record)), flush=True)
        document = {**self._facts, "records": self.records}
        self._stem.with_suffix(".json").write_text(json.dumps(document, indent=1))
        self._stem.with_suffix(".md").write_text("\n".join(self._markdown()) + "\n")

    def _cells(self, record: dict[str, Any]) -> list[str]:
        return [_text(record.get(column)) for column in self._columns]

    def _markdown(self) -> Iterator[str]:
        yield ", ".join(f"{name}: {value}" for name, value in self._facts.items())
        yield ""
        yield "| " + " | ".join(self._columns) + " |"
        yield "|" + "---|" * len(self._columns)
        for record in self.records:
            yield "| " + " | ".join(self._cells(record)) + " |"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


class Clock:
    """The seconds that a part may take."""

    def __init__(self, part: str, budget: float) -> None:
        self._part, self._stop = part, time.monotonic() + budget
        print(f"== {part}: at most {budget:.0f} s", flush=True)

    @property
    def left(self) -> float:
        return self._stop - time.monotonic()

    def over(self) -> bool:
        if self.left > 0:
            return False
        print(f"== {self._part}: out of time, the rest is left out", file=sys.stderr, flush=True)
        return True
