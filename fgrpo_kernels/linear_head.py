"""The row-chunked driver: hidden states, head and ids -> log-probs, entropies and gradients.

One loop (`head_pass`) serves every plan; the full (N, V) logits never exist. Cost in units of N V D
multiply-adds x 2, for N rows, all of them active:

    statistics only                                    2
    row-local loss, head trained / frozen              6 / 4    gradient finished in the forward
    any other use, head frozen (with entropy)          4 (6)    unit gradients kept, scaled later
    any other use, head trained                        8        statistics, recomputed in backward
    ... of a loss whose rows fit one chunk             6        the chunk is kept for the backward

The last three are in `token_logps.py`. A LoRA adapter of rank r adds 2 N V r for each product;
where it is trained and the weight is not, the last two cost 6 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fgrpo_kernels import torch_rows
from fgrpo_kernels.first_order import first_order_only
from fgrpo_kernels.head import HeadProducts, LinearHead
from fgrpo_kernels.workspace import chunk_buffer

CPU_CHUNK_BYTES = 256 * 2**20
DEVICE_CHUNK_BYTES = 2 * 2**30
"""Below about 2048 rows the fp32 weight gradient's traffic shows on a GPU."""

TILE_ROWS = 128
SCALED_BLOCK_ELEMENTS = 2**26

Coefficients = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(rows, logps, entropy) -> (dL/dlogp, dL/dentropy or None) of these rows."""

RowPass = Callable[[Tensor, slice, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(logits of these rows, rows, out) -> (logps, entropy, g); writes E into `out`, which may be the
logits' buffer, with dL/dlogits = diag(g) E; what is stored in fp16 is `e_scale` times E."""


AddGradients = Callable[["ChunkPass", "HeadGradients", slice, Tensor, Tensor, Tensor], None]
"""What is done with a chunk's E and g: `ChunkPass.add_gradients`, or the sparse one."""


@dataclass(frozen=True)
class HeadRows:
    """The rows to score: which of hidden's rows, in which order, and how many need a gradient.

    index: (n,) int64 into hidden, or None when it is 0 ... n-1 of all rows. ids: (n,).
    num_active: the first num_active rows may have a non-zero coefficient.
    row_ops: `torch_rows` or `triton_rows`. with_entropy: whether rows without a gradient need it.
    """

    index: Tensor | None
    ids: Tensor
    num_active: int
    max_chunk_bytes: int | None
    row_ops: ModuleType = torch_rows
    with_entropy: bool = True

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, part: slice | Tensor) -> slice | Tensor:
        """Where in hidden these rows are."""
        return part if self.index is None else self.index[part]

    def first(self, count: int) -> HeadRows:
        index = None if self.index is None else self.index[:count]
        return replace(self, index=index, ids=self.ids[:count])


@dataclass
class HeadGradients:
    """In the accumulator's dtype; None where not wanted. hidden: all of hidden's rows (N, D)."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None


def wants_gradient(tensors: tuple[Tensor | None, ...]) -> bool:
    """Asked before `Function.apply`: inside, gradients are off."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def chunk_budget(head: LinearHead, max_chunk_bytes: int | None) -> int:
    on_cpu = head.weight.device.type == "cpu"
    return max_chunk_bytes or (CPU_CHUNK_BYTES if on_cpu else DEVICE_CHUNK_BYTES)


def chunk_rows(head: LinearHead, max_chunk_bytes: int | None) -> int:
    """Rows of a chunk whose logits fit the budget, at least one."""
    budget = chunk_budget(head, max_chunk_bytes)
    columns = head.vocab_size if head.shard is None else head.shard.largest
    count = max(1, budget // (columns * head.dtype.itemsize))
    return count if count < TILE_ROWS else count // TILE_ROWS * TILE_ROWS


def chunk_shape(head: LinearHead, rows: HeadRows) -> tuple[int, int]:
    """Of the largest chunk's logits."""
    return _even_size(len(rows), chunk_rows(head, rows.max_chunk_bytes)), head.vocab_size


def chunks(count: int, size: int, offset: int = 0) -> Iterator[slice]:
    """Slices of at most `size` rows, of nearly equal length."""
    step = _even_size(count, size)
    for start in range(offset, offset + count, max(1, step)):
        yield slice(start, min(start + step, offset + count))


def _even_size(count: int, size: int) -> int:
    """Rows of each chunk but the last when `count` rows fill as few chunks of `size` as possible:
    as equal as whole tiles of the matrix products allow."""
    pieces = -(-count // max(1, size))
    step = -(-count // max(1, pieces))
    in_tiles = -(-step // TILE_ROWS) * TILE_ROWS
    return in_tiles if in_tiles <= min(size, count) else step


class ChunkPass:
    """The buffers of one pass and what is done to a chunk of rows; `logits` is (size, V)."""

    def __init__(self, head: LinearHead, hidden: Tensor, rows: HeadRows, logits: Tensor) -> None:
        self.size = len(logits)
        self._hidden, self.positions = hidden.detach(), rows.positions
        self.products = HeadProducts(head)
        self._first = True
        like: dict[str, Any] = {"dtype": head.dtype, "device": hidden.device}
        self._logits = self._e = logits
        if self.products.storage_dtype != head.dtype:
            self._e = torch.empty_like(self._logits, dtype=self.products.storage_dtype)
        self._dhidden = torch.empty(self.size, hidden.shape[1], **like)

    def x(self, part: slice) -> Tensor:
        """The rows' hidden states as operands."""
        return self.products.rows(self._hidden[self.positions(part)])

    def logits(self, x: Tensor) -> Tensor:
        return self.products.logits(x, self._logits[: len(x)])

    def e(self, x: Tensor, *, apart: bool = False) -> Tensor:
        """Where a chunk's E goes: in place of its logits where the types agree, unless `apart`."""
        if apart and self._e is self._logits:
            self._e = torch.empty_like(self._logits)
        return self._e[: len(x)]

    def add_gradients(
        self, wanted: HeadGradients, part: slice | Tensor, x: Tensor, e: Tensor, g: Tensor
    ) -> None:
        """hidden = g (E W), weight += E^T (g x), bias += E^T g; the adapter's: `low_rank.py`."""
        low_rank, e_b = self.products.low_rank, None
        if low_rank is not None and not (wanted.hidden is None and wanted.lora_a is None):
            e_b = low_rank.back_projected(e)
        if wanted.hidden is not None:
            where = self.positions(part)
            in_place = isinstance(where, slice)
            out = wanted.hidden[where] if in_place else self._dhidden[: len(x)]
            self.products.hidden_gradient(e, out)
            if low_rank is not None and e_b is not None:
                low_rank.add_hidden_gradient(e_b, out)
            out.mul_((g / self.products.e_scale)[:, None])
            if not in_place:
                wanted.hidden[where] = out
        if wanted.weight is not None:
            scaled = (x * g[:, None]).to(x.dtype)
            self.products.add_weight_gradient(e, scaled, wanted.weight, first=self._first)
        if wanted.bias is not None:
            self.products.add_bias_gradient(e, g, wanted.bias)
        if wanted.lora_a is not None and low_rank is not None and e_b is not None:
            low_rank.add_a_gradient(e_b, g, x, wanted.lora_a)
        if wanted.lora_b is not None and low_rank is not None:
            low_rank.add_b_gradient(e, g, x, wanted.lora_b)
        self._first = False


def head_pass(
    head: LinearHead,
    hidden: Tensor,
    rows: HeadRows,
    wanted: HeadGradients,
    row_pass: RowPass | None,
    add_gradients: AddGradients = ChunkPass.add_gradients,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (n,) of all rows; with `row_pass`, gradients of the active ones into
    `wanted`."""
    logps = torch.empty(len(rows), dtype=head.dtype, device=hidden.device)
    entropy = torch.empty_like(logps)
    num_active = 0 if row_pass is None else rows.num_active
    fused = rows.row_ops.fused_statistics(head)
    if fused is not None and num_active < len(rows):
        part = slice(num_active, len(rows))
        logps[part], entropy[part] = fused(hidden.detach(), head, rows, part)
        rows = rows.first(num_active)
        if num_active == 0:
            return logps, entropy
    with chunk_buffer(chunk_shape(head, rows), head.dtype, hidden.device) as buffer:
        run = ChunkPass(head, hidden, rows, buffer)
        for part in chunks(num_active, run.size):
            assert row_pass is not None
            x = run.x(part)
            e = run.e(x)
            logps[part], entropy[part], g = row_pass(run.logits(x), part, e)
            add_gradients(run, wanted, part, x, e, g)
        for part in chunks(len(rows) - num_active, run.size, num_active):
            logits = run.logits(run.x(part))
            stats = rows.row_ops.row_statistics(
                logits, rows.ids[part], head, keep_logits=True, with_entropy=rows.with_entropy
            )
            logps[part], entropy[part] = stats.logps, stats.entropy
    return logps, entropy


def split_row_pass(
    head: LinearHead, rows: HeadRows, coefficients: Coefficients, *, entropy_gradient: bool
) -> RowPass:
    """Statistics, then the coefficients from any function of them, then E and g."""
    ops = rows.row_ops

    def row_pass(logits: Tensor, part: slice, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stats = ops.row_statistics(logits, rows.ids[part], head, keep_logits=entropy_gradient)
        dlogps, dentropy = coefficients(part, stats.logps, stats.entropy)
        g = ops.row_gradient(logits, stats, dlogps, dentropy, head, out)
        return stats.logps, stats.entropy, g

    return row_pass


def new_gradients(
    head: LinearHead, hidden: Tensor, needs: tuple[bool, ...], num_rows: int
) -> HeadGradients:
    """Buffers for hidden and `head.tensors`. The weight's is written by the first chunk, not
    zeroed: half a gigabyte less to touch; a pass without rows zeroes it."""
    like: dict[str, Any] = {"dtype": head.dtype, "device": hidden.device}
    new = [torch.zeros, torch.empty if num_rows else torch.zeros, *[torch.zeros] * 3]
    return HeadGradients(
        *(
            make(tensor.shape, **like) if need and tensor is not None else None
            for make, need, tensor in zip(new, needs, (hidden, *head.tensors), strict=True)
        )
    )


def finished_gradients(
    gradients: HeadGradients,
    head: LinearHead,
    like: tuple[torch.dtype | None, ...],
    scale: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Each gradient times the scalar, in its tensor's dtype, hidden's summed over shards. On CPU,
    where looking costs nothing, a factor of 1 is skipped."""
    if head.shard is not None and gradients.hidden is not None:
        head.shard.sum_(gradients.hidden)
    if scale is not None and scale.device.type == "cpu" and scale.item() == 1:
        scale = None
    finished: list[Tensor | None] = []
    for tensor, dtype in zip(vars(gradients).values(), like, strict=True):
        if tensor is not None and scale is not None:
            tensor = _scaled(tensor, scale, dtype)
        finished.append(None if tensor is None else tensor.to(dtype))
    return tuple(finished)


def _scaled(tensor: Tensor, scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    """tensor * scale, in place or, for another dtype, in one pass that also casts: 6 bytes an
    element of a bf16 weight instead of 14. In blocks, because a CPU casts by way of a copy."""
    if tensor.dtype == dtype:
        return tensor.mul_(scale)
    out = torch.empty_like(tensor, dtype=dtype)
    rows = max(1, SCALED_BLOCK_ELEMENTS // max(1, tensor[:1].numel()))
    for source, target in zip(tensor.split(rows), out.split(rows), strict=True):
        torch.mul(source, scale, out=target)
    return out


class RowLocalGradient(torch.autograd.Function):
    """A loss whose row coefficients follow from the row alone: gradient finished in the forward.

    Returns (anchor, logps, entropy): anchor is a 0 that carries the gradient, so that
    `value + scale * anchor` is the loss, with any scalar that is known only after the pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        head: LinearHead,
        rows: HeadRows,
        row_pass: RowPass,
        add_gradients: AddGradients,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = new_gradients(head, hidden, ctx.needs_input_grad[:5], rows.num_active)
        logps, entropy = head_pass(head, hidden, rows, wanted, row_pass, add_gradients)
        ctx.gradients, ctx.head = wanted, head
        tensors = (hidden, weight, bias, lora_a, lora_b)
        ctx.dtypes = tuple(None if t is None else t.dtype for t in tensors)
        ctx.mark_non_differentiable(logps, entropy)
        return logps.new_zeros(()), logps, entropy

    @staticmethod
    @first_order_only
    def backward(ctx: Any, danchor: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "this loss was already differentiated and its gradients are freed: call the loss "
                "again, or use impl='reference', which keeps the graph"
            )
        gradients, ctx.gradients = ctx.gradients, None
        finished = finished_gradients(gradients, ctx.head, ctx.dtypes, danchor)
        return (*finished, None, None, None, None)
