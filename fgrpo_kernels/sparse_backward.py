"""Certified sparse backward: rows that put nearly all mass on few tokens skip the dense products.

With a row's probabilities p, c = dL/dlogp and k = logit_scale / temperature, the exact gradient is

    dL/dh = c k (W_y - sum_v p_v W_v),   dL/dW_v = sum_i c_i k ([v = y_i] - p_iv) h_i

Let theta = grad_tol * 32 / V and u = sum_{v != y} min(p_v, theta). A row with u <= grad_tol keeps
its target and S = {v: p_v > theta} only: the mass outside is t <= u <= grad_tol, and |S| <= V / 32.
Any set that leaves out at most grad_tol has |S| >= (u - grad_tol) / theta tokens, so this one sum
decides before anything is gathered. Other rows stay dense. What is dropped changes the gradients by

    ||d(dL/dh)|| <= |c| k t max_v ||W_v||,   ||d(dL/dW)||_F <= sum_i |c_i| k t_i ||h_i||

(a soft-cap only shrinks both). Kept entries are exact; rows with c = 0 need none. Sums run in a
fixed order, so that the same inputs give the same bits.

C rows of a chunk, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fgrpo_kernels.head import UPCAST_BLOCK_BYTES, LinearHead
from fgrpo_kernels.linear_head import ChunkPass, Coefficients, HeadGradients, HeadRows
from fgrpo_kernels.torch_rows import block_rows, row_gradient, row_statistics

SUPPORT_SHARE = 32
"""|S| <= V / 32: there a row costs as much gathered, search included, as in the dense products (3.8
ms; one AVX-512 core, D = 896, V = 151936)."""

MAX_LAYERS = 64
"""Columns that share one maximum while S is searched."""

Table = Callable[[Tensor], tuple[Tensor, Tensor]]
"""index -> (rows, index into these rows)."""


def check_tolerance(impl: str, head: LinearHead, row_local: bool) -> None:
    """Refuse what the sparse backward does not do."""
    device = head.weight.device
    for name, given in (("lm_head_lora", head.lora), ("tp_group", head.shard)):
        if given is not None:
            raise ValueError(
                "grad_tol > 0 (sparse backward) needs a whole head without an adapter, received "
                f"{name}; use grad_tol=0"
            )
    if impl != "torch" or device.type != "cpu":
        raise ValueError(
            "grad_tol > 0 (sparse backward) needs impl='torch' on CPU, received "
            f"impl={impl!r} on {device.type}; use grad_tol=0"
        )
    if not row_local:
        raise ValueError(
            "grad_tol > 0 (sparse backward) needs row-local coefficients, which a sequence-level "
            "or geometric-mean ratio or vespo with old_logps, a rollout correction that waits for "
            "the current log-probs or objective.row_local=False do not give; use grad_tol=0"
        )


@dataclass(frozen=True)
class Support:
    """The sparse rows of a chunk and their kept entries (n,), one row and one column each."""

    sparse: Tensor
    rows: Tensor
    columns: Tensor
    dropped: Tensor
    """u of the sparse rows, 0 of the others; (C,)."""


class SparseBackward:
    """The row pass and the gradient step of `head_pass` with a tolerance, and what they dropped."""

    def __init__(
        self, head: LinearHead, rows: HeadRows, coefficients: Coefficients, grad_tol: float
    ) -> None:
        self._head, self._rows, self._coefficients = head, rows, coefficients
        self._grad_tol = grad_tol
        self._support: Support | None = None
        zero = torch.zeros((), dtype=head.dtype)
        self._sparse, self._all, self._dropped, self._scale = zero, zero, zero, zero

    def metric_sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        """See `metrics.batch_metrics`."""
        return {
            "sparse_row_fraction": (self._sparse, self._all),
            "grad_error_bound": (self._dropped, self._scale),
        }

    def row_pass(self, logits: Tensor, part: slice, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A `RowPass`; the chunk's support waits for `add_gradients`."""
        ids = self._rows.ids[part]
        stats = row_statistics(logits, ids, self._head, keep_logits=False)
        dlogps, _ = self._coefficients(part, stats.logps, stats.entropy)
        support = find_support(logits, stats.total, ids, dlogps != 0, self._grad_tol)
        g = row_gradient(logits, stats, dlogps, None, self._head, out)
        self._sparse = self._sparse + support.sparse.sum()
        self._all = self._all + len(ids)
        self._dropped = self._dropped + (dlogps.abs() * support.dropped).sum()
        self._scale = self._scale + dlogps.abs().sum()
        self._support = support
        return stats.logps, stats.entropy, g

    def add_gradients(
        self, run: ChunkPass, wanted: HeadGradients, part: slice, x: Tensor, e: Tensor, g: Tensor
    ) -> None:
        """`ChunkPass.add_gradients`, by gathered sums for the sparse rows; reorders e."""
        support, self._support = self._support, None
        assert support is not None
        rows, columns = support.rows, support.columns
        values = e[rows, columns]
        dense = dense_to_front(e, support.sparse)
        run.add_gradients(wanted, part.start + dense, x[dense], e[: len(dense)], g[dense])
        if wanted.hidden is not None:
            for row, sums in weighted_sums(rows, columns, values, run.products.weight_rows):
                wanted.hidden[run.positions(part.start + row)] = sums.mul_(g[row, None])
        if wanted.weight is not None:
            scaled = x * g[:, None]
            for column, sums in weighted_sums(columns, rows, values, lambda row: (scaled, row)):
                wanted.weight.index_add_(0, column, sums)
        if wanted.bias is not None:
            for column, sums in weighted_sums(columns, rows, values, lambda row: (g[:, None], row)):
                wanted.bias.index_add_(0, column, sums.squeeze(1))


def find_support(e: Tensor, total: Tensor, ids: Tensor, needed: Tensor, grad_tol: float) -> Support:
    """Which rows of e (C, V) = total * p, target columns 0, are sparse, and what they keep.

    Rows that are not `needed` are sparse and keep nothing.
    """
    limit = grad_tol * total[:, None]
    threshold = limit * (SUPPORT_SHARE / e.shape[1])
    size = block_rows(e)
    buffer = torch.empty_like(e[:size])
    sums, rows, columns = [], [], []
    blocks = zip(*(t.split(size) for t in (e, limit, threshold, needed)), strict=True)
    for number, (block, block_limit, block_threshold, block_needed) in enumerate(blocks):
        clipped = torch.minimum(block, block_threshold, out=buffer[: len(block)])
        sums.append(clipped.sum(1, keepdim=True))
        wanted = (sums[-1] <= block_limit) & block_needed[:, None]
        if not wanted.any():
            continue
        row, column = _entries_above(block, torch.where(wanted, block_threshold, torch.inf))
        rows.append(row + number * size)
        columns.append(column)
    u = torch.cat(sums)
    certified = (u <= limit).squeeze(1)
    targets = (certified & needed).nonzero().squeeze(1)
    return Support(
        sparse=certified | ~needed,
        rows=torch.cat((targets, *rows)),
        columns=torch.cat((ids[targets], *columns)),
        dropped=torch.where(certified, u.squeeze(1) / total, 0),
    )


def _entries_above(block: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """(row, column) of the entries of (R, V) over their row's threshold (R, 1). Maxima over layers
    of columns first: comparing and searching every entry would cost more than computing it."""
    vocab = block.shape[1]
    layers = next(n for n in range(min(MAX_LAYERS, vocab), 0, -1) if vocab % n == 0)
    layered = block.unflatten(1, (layers, -1))
    row, group = (layered.amax(1) > threshold).nonzero(as_tuple=True)
    hit, layer = (layered[row, :, group] > threshold[row]).nonzero(as_tuple=True)
    return row[hit], layer * layered.shape[2] + group[hit]


def dense_to_front(e: Tensor, sparse: Tensor) -> Tensor:
    """Move the m dense rows of e to its first m, the fewest possible; which row each of them is."""
    dense = (~sparse).nonzero().squeeze(1)
    order = torch.arange(len(dense))
    holes, fillers = sparse[: len(dense)].nonzero().squeeze(1), dense[dense >= len(dense)]
    order[holes] = fillers
    for hole, filler in zip(holes.tolist(), fillers.tolist(), strict=True):
        e[hole] = e[filler]
    return order


def weighted_sums(
    keys: Tensor, index: Tensor, weights: Tensor, table: Table
) -> Iterator[tuple[Tensor, Tensor]]:
    """(distinct keys (n,), their sums of weights * table[index] (n, D)), some keys at a time."""
    if not len(keys):
        return
    keys, order = keys.sort(stable=True)
    distinct, counts = keys.unique_consecutive(return_counts=True)
    width = table(index[:1])[0].shape[1]
    limit = max(1, UPCAST_BLOCK_BYTES // (width * weights.itemsize))
    block_of_key = (counts.cumsum(0) - 1) // limit
    sizes = block_of_key.unique_consecutive(return_counts=True)[1].tolist()
    entries = [int(part.sum()) for part in counts.split(sizes)]
    blocks = zip(
        distinct.split(sizes),
        counts.split(sizes),
        index[order].split(entries),
        weights[order].split(entries),
        strict=True,
    )
    for key, count, block_index, block_weights in blocks:
        rows, local = table(block_index)
        starts = count.cumsum(0) - count
        yield (
            key,
            embedding_bag(local, rows, starts, mode="sum", per_sample_weights=block_weights),
        )
