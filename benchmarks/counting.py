"""FLOPs and bytes of the loss, counted in a small call of the running code and scaled to any shape.

The call runs on a CPU in the branch that a GPU takes. The sizes of its tensors are all different,
so that each says which of C, N, V, D it is. FLOPs are checked against torch's FLOP counter; bytes
are those of each operation's tensors, and of the Triton kernels' loads and stores as their
interpreter executes them.

N rows, C rows of a chunk, V vocabulary, D hidden size.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime import interpreter

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, head, token_logps
from fgrpo_kernels.testing import LossInputs, make_inputs


@dataclass(frozen=True)
class Shape:
    rows: int
    chunk: int
    vocab: int
    hidden: int

    @property
    def chunks(self) -> int:
        return self.rows // self.chunk


BATCH = 2
SMALL = Shape(rows=24, chunk=8, vocab=80, hidden=20)
CONFIG = PolicyLossConfig.dapo(focal_gamma=0.5)

Sizes = tuple[tuple[tuple[int, ...], int], ...]
"""(shape, bytes of an element) of some tensors."""


@dataclass(frozen=True)
class Operation:
    """One operation of the small call."""

    phase: str
    reads: Sizes
    writes: Sizes
    product: tuple[int, ...] = ()
    """m, k, n of a matrix product."""

    @property
    def per_chunk(self) -> bool:
        return any(SMALL.chunk in shape for shape, _ in (*self.reads, *self.writes))


@dataclass
class Phase:
    flops: float = 0.0
    bytes: float = 0.0
    accumulator_bytes: float = 0.0
    """The part of the bytes that reads and writes the fp32 weight gradient."""


def scaled(operations: list[Operation], shape: Shape) -> dict[str, Phase]:
    """The phases at another shape: each size of the small call stands for a size of this one."""
    sizes: dict[int, float] = {
        SMALL.rows: shape.rows,
        SMALL.rows // BATCH: shape.rows / BATCH,
        SMALL.chunk: shape.chunk,
        SMALL.vocab: shape.vocab,
        SMALL.hidden: shape.hidden,
    }
    phases: dict[str, Phase] = {}
    for operation in operations:
        phase = phases.setdefault(operation.phase, Phase())
        times = shape.chunks / SMALL.chunks if operation.per_chunk else 1.0
        if operation.product:
            phase.flops += times * 2 * math.prod(sizes[n] for n in operation.product)
        for is_read, tensors in ((True, operation.reads), (False, operation.writes)):
            for dims, width in tensors:
                size = width * math.prod(sizes.get(n, n) for n in dims)
                accumulator = operation.phase == DWEIGHT and dims == (SMALL.vocab, SMALL.hidden)
                if accumulator:
                    # The first chunk's product does not read what it writes to.
                    done = SMALL.chunks - 1 if is_read else SMALL.chunks
                    size *= (shape.chunks - 1 if is_read else shape.chunks) / done
                    phase.accumulator_bytes += size
                phase.bytes += size if accumulator else times * size
    return phases


LOGITS, DHIDDEN, DWEIGHT = "logits product", "dhidden product", "dW product"
FUSED, ROWS, FINISH, SMALL_PASSES = "fused product", "row kernel", "dW to bf16", "passes over rows"
ROW_KERNELS = {"policy_rows_kernel", "row_statistics_kernel", "row_gradient_kernel"}

WITHOUT_TRAFFIC = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
WRITTEN_ONLY = {"copy_", "zero_", "fill_"}


class Recorder(TorchDispatchMode):
    """Every operation with its tensors, and the two products that only GPUs have, computed here."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if str(function) in ("aten.addmm.dtype_out", "aten.mm.dtype_out"):
            return self._product(name, args, **kwargs)
        result = function(*args, **kwargs)
        if name == "linear_statistics":
            hidden, weight = args[:2]
            product = (*hidden.shape, len(weight))
            self._record(FUSED, (hidden, weight), (result,), product)
        elif not _is_view(function) and name not in WITHOUT_TRAFFIC:
            written = result if isinstance(result, list | tuple) else (result,)
            reads = args[1:] if name in WRITTEN_ONLY else args
            tensors = [t for t in (*_tensors(reads), *_tensors(written)) if t.numel() > 1]
            of_head = any(self._shape.vocab in t.shape for t in tensors)
            phase = FINISH if of_head else SMALL_PASSES
            self._record(phase, tuple(_tensors(reads)), tuple(_tensors(written)))
        return result

    def _product(
        self, name: str, args: Any, *, out: Tensor, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        left, right = args[1:3] if name == "addmm" else args[:2]
        assert left.dtype == right.dtype == torch.bfloat16 and out.dtype == torch.float32
        accumulates = name == "addmm" and beta != 0
        product = alpha * (left.float() @ right.float())
        out.copy_(out * beta + product if accumulates else product)
        shape = self._shape
        phase = {
            (shape.chunk, shape.vocab): LOGITS,
            (shape.chunk, shape.hidden): DHIDDEN,
            (shape.vocab, shape.hidden): DWEIGHT,
        }[tuple(out.shape)]
        reads = (left, right, *((out,) if accumulates else ()))
        self._record(phase, reads, (out,), (*left.shape, right.shape[1]))
        return out

    def _record(
        self,
        phase: str,
        reads: tuple[Tensor, ...],
        writes: tuple[Tensor, ...],
        product: tuple[int, ...] = (),
    ) -> None:
        def sizes(tensors: tuple[Tensor, ...]) -> Sizes:
            return tuple((tuple(t.shape), t.element_size()) for t in tensors)

        self.operations.append(Operation(phase, sizes(reads), sizes(writes), product))


def _is_view(function: Any) -> bool:
    aliases = [value.alias_info for value in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


@dataclass
class KernelTraffic:
    """Bytes that the Triton kernels of some calls loaded and stored."""

    loaded: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)


@contextmanager
def counted_kernels(traffic: KernelTraffic) -> Iterator[None]:
    """Count the elements of every masked load and store, by kernel; and keep what the interpreter
    itself does with tensors away from the dispatch modes."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, launch = builder.create_masked_load, builder.create_masked_store, executor.__call__
    running = [""]

    def count(into: dict[str, int], pointers: Any, mask: Any) -> None:
        width = pointers.get_element_ty().primitive_bitwidth // 8
        into[running[0]] = into.get(running[0], 0) + int(mask.data.sum()) * width

    def counted_load(self: Any, pointers: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        count(traffic.loaded, pointers, mask)
        return load(self, pointers, mask, *args, **kwargs)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        count(traffic.stored, pointers, mask)
        return store(self, pointers, value, mask, *args)

    def quiet_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        running[0] = self.fn.__name__
        with _disable_current_modes():
            return launch(self, *args, **kwargs)

    with ExitStack() as stack:
        for owner, name, replacement in (
            (builder, "create_masked_load", counted_load),
            (builder, "create_masked_store", counted_store),
            (executor, "__call__", quiet_launch),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def small_inputs(shape: Shape, dtype: torch.dtype) -> LossInputs:
    """Every token valid and active."""
    inputs = make_inputs(
        BATCH,
        shape.rows // BATCH,
        shape.hidden,
        shape.vocab,
        group_size=BATCH,
        zero_advantage=0,
        dtype=dtype,
    )
    arguments = inputs.arguments() | dict.fromkeys(("completion_mask", "ref_logps"))
    return LossInputs(**arguments | {"rollout_logps": None})


def train(inputs: LossInputs, chunk_bytes: int, impl: str) -> None:
    """Under an upstream factor: without one a CPU skips a pass that GPUs make."""
    config = replace(CONFIG, max_chunk_bytes=chunk_bytes)
    loss = focal_policy_loss(**inputs.arguments(), config=config, impl=impl).loss
    (0.5 * loss).backward()


def score(inputs: LossInputs, chunk_bytes: int, impl: str) -> None:
    arguments = (inputs.hidden, inputs.lm_head_weight, inputs.completion_ids)
    with torch.no_grad():
        token_logps(*arguments, impl=impl, max_chunk_bytes=chunk_bytes)


Call = Callable[[LossInputs, int, str], None]


def count_flops(call: Call) -> int:
    """torch's own count of a small call's FLOPs."""
    inputs = small_inputs(SMALL, torch.float32)
    with FlopCounterMode(display=False) as counter:
        call(inputs, 4 * SMALL.chunk * SMALL.vocab, "torch")
    return counter.get_total_flops()


def record(call: Call, shape: Shape = SMALL) -> tuple[list[Operation], KernelTraffic]:
    """The operations and the kernels' traffic of a small call with the products of a GPU."""
    inputs, traffic, recorder = (
        small_inputs(shape, torch.bfloat16),
        KernelTraffic(),
        Recorder(shape),
    )
    narrow = mock.patch.object(head, "multiplies_narrow", lambda weight: True)
    with counted_kernels(traffic), recorder, narrow:
        call(inputs, 4 * shape.chunk * shape.vocab, "triton")
    return recorder.operations, traffic


def bytes_per_logit(call: Call) -> dict[str, tuple[float, float]]:
    """(loaded, stored) bytes of each row kernel per element of the logits: the difference between
    two vocabularies, which leaves out what a row costs whatever its length."""
    shapes = [replace(SMALL, vocab=vocab) for vocab in (64, 192)]
    narrow, wide = (record(call, shape)[1] for shape in shapes)
    elements = SMALL.rows * (shapes[1].vocab - shapes[0].vocab)
    return {
        kernel: (
            (wide.loaded[kernel] - narrow.loaded[kernel]) / elements,
            (wide.stored[kernel] - narrow.stored[kernel]) / elements,
        )
        for kernel in ROW_KERNELS & wide.loaded.keys()
    }


@dataclass(frozen=True)
class Counted:
    """What a small call says of a call at any shape."""

    operations: list[Operation]
    kernels: dict[str, tuple[float, float]]

    def phases(self, shape: Shape) -> dict[str, Phase]:
        phases = scaled(self.operations, shape)
        if self.kernels:
            per_logit = sum(map(sum, self.kernels.values()))
            phases[ROWS] = Phase(bytes=per_logit * shape.rows * shape.vocab)
        return phases


def count(call: Call, products: int) -> Counted:
    """Raises AssertionError unless torch's count and the recorded one are 2 N V D FLOPs times the
    number of products."""
    expected = 2 * products * SMALL.rows * SMALL.vocab * SMALL.hidden
    operations, _ = record(call)
    recorded = sum(phase.flops for phase in scaled(operations, SMALL).values())
    counted = count_flops(call)
    assert counted == recorded == expected, (counted, recorded, expected)
    return Counted(operations, bytes_per_logit(call))
