"""A head whose vocabulary is spread over ranks: each holds a contiguous shard of W's rows.

A rank sees its shard's logits. For a row, with m_r the shard's maximum and S_r, M_r the sums over
the shard of exp(z_v - m_r) and of exp(z_v - m_r) (z_v - m_r), the target left out of both,

    m = max_r m_r,   S = sum_r S_r exp(m_r - m),
    M = sum_r exp(m_r - m) (M_r + S_r (m_r - m)),   z_y = sum_r (z_y where r owns y, else 0)

so two all-reduces of (C,) and (3, C) numbers a chunk give every rank what one rank would have. The
gradients of W and the bias stay where their rows are; that of hidden is a sum over ranks.

C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_SIZES: WeakKeyDictionary[Any, WeakTensorKeyDictionary] = WeakKeyDictionary()
"""By group, then by weight: the rows of every rank's shard. By weight and not by this rank's rows,
which another head may have too: this rank would then find what the others ask for."""


@dataclass(frozen=True)
class VocabShard:
    """Where this rank's rows of the head are in the whole vocabulary."""

    group: Any
    first: int
    """This rank's first row."""
    largest: int
    """Rows of the largest shard: what a chunk's size follows, so that all ranks make as many."""
    vocab_size: int
    """Over all ranks, padding left out."""

    def owned(self, ids: Tensor, columns: int) -> Tensor:
        """Which ids, counted from this rank's first row, are among its columns."""
        return (ids >= 0) & (ids < columns)

    def combine(
        self, maximum: Tensor, rest: Tensor, moment: Tensor, target: Tensor, owned: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(m, S, M, z_y) over all ranks from this rank's (C,), and m_r - m."""
        whole = maximum.clone()
        dist.all_reduce(whole, dist.ReduceOp.MAX, self.group)
        # A rank's infinities or NaN reach the others through the sums, whatever a maximum does.
        shift = torch.where(maximum == whole, 0, maximum - whole)
        rest = rest * shift.exp()
        moment = moment * shift.exp() + torch.where(rest == 0, 0, rest * shift)
        sums = torch.stack((rest, moment, torch.where(owned, target, 0)))
        self.sum_(sums)
        rest, moment, target = sums.unbind()
        return whole, rest, moment, target, shift

    def sum_(self, tensor: Tensor) -> None:
        """The sum over ranks, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.SUM, self.group)


def shard_of_head(
    weight: Tensor, vocab_size: int | None, tp_group: Any
) -> tuple[int, VocabShard | None]:
    """(rows of this weight that are no padding, the shard); without a group the weight is whole.

    Raises: ValueError for a tp_group that is none, and for a vocab_size out of range.
    """
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int)):
        raise ValueError(f"vocab_size: expected an integer or None, received {vocab_size!r}")
    rows = len(weight)
    if tp_group is None:
        _check_vocab_size(vocab_size, rows, "lm_head_weight has")
        return rows if vocab_size is None else vocab_size, None
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "tp_group: torch.distributed is not initialised; call init_process_group first, or "
            "pass None for a whole head"
        )
    if not isinstance(tp_group, dist.ProcessGroup):
        raise ValueError(
            "tp_group: expected a torch.distributed.ProcessGroup that this rank is in, received "
            f"{type(tp_group).__name__}"
        )
    sizes = _shard_sizes(tp_group, weight)
    _check_vocab_size(vocab_size, sum(sizes), "the shards together have")
    first = sum(sizes[: dist.get_rank(tp_group)])
    whole = sum(sizes) if vocab_size is None else vocab_size
    usable = min(max(whole - first, 0), rows)
    return usable, VocabShard(tp_group, first, max(sizes), whole)


def _check_vocab_size(vocab_size: int | None, rows: int, who: str) -> None:
    if vocab_size is not None and not 1 <= vocab_size <= rows:
        raise ValueError(
            f"vocab_size: expected 1 <= vocab_size <= {rows}, the rows that {who}, received "
            f"{vocab_size}"
        )


def _shard_sizes(group: Any, weight: Tensor) -> list[int]:
    known = _SIZES.setdefault(group, WeakTensorKeyDictionary())
    sizes: list[int] | None = known.get(weight)
    if sizes is None or sizes[dist.get_rank(group)] != len(weight):
        mine = torch.tensor([len(weight)], device=weight.device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group)
        sizes = known[weight] = torch.cat(gathered).tolist()
    return sizes
