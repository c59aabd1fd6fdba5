"""The linear head: what maps hidden states to logits, and its three matrix products.

    z = softcap(logit_scale * (W h + b)) / temperature,  softcap(x) = cap * tanh(x / cap) or x

With a LoRA adapter, W + s B A in place of W (`low_rank.py`).
Operands may be bf16 or fp16; sums are fp32 (fp64 for fp64 operands).
C rows of a chunk, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fgrpo_kernels.low_rank import LowRankProducts, LowRankUpdate
from fgrpo_kernels.vocab_parallel import VocabShard

UPCAST_BLOCK_BYTES = 16 * 2**20
"""A block of the vocabulary is upcast at a time, small enough to stay in a shared cache."""


def accumulator_dtype(operand_dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if operand_dtype == torch.float64 else torch.float32


def multiplies_narrow(weight: Tensor) -> bool:
    """Whether its device's library multiplies bf16 and fp16 into fp32 (`out_dtype`)."""
    return weight.is_cuda


def e_scale(storage: torch.dtype) -> float:
    """What E is multiplied by where it is stored: fp16 has no numbers below 6e-8, which many p are.
    A power of two comes off the finished sums without rounding."""
    return 2.0**14 if storage == torch.float16 else 1.0


@dataclass(frozen=True)
class LinearHead:
    """Weight (V, D), bias (V,) or None, the constants between product and log-softmax, adapter."""

    weight: Tensor
    bias: Tensor | None
    operand_dtype: torch.dtype
    logit_scale: float = 1.0
    temperature: float = 1.0
    logit_softcap: float | None = None
    lora: LowRankUpdate | None = None
    shard: VocabShard | None = None
    """With it, weight and bias are this rank's rows only."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What may take a gradient: weight, bias, and the adapter's a and b."""
        lora = self.lora
        return (self.weight, self.bias, *((None, None) if lora is None else (lora.a, lora.b)))

    @property
    def dtype(self) -> torch.dtype:
        """The accumulator's dtype: of logits, statistics and gradients before their last cast."""
        return accumulator_dtype(self.operand_dtype)

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def inner_scale(self) -> float:
        """Factor before the soft-cap; with no soft-cap the temperature joins it."""
        if self.logit_softcap is None:
            return self.logit_scale / self.temperature
        return self.logit_scale

    @property
    def slope(self) -> float:
        """dz / d(W h) without the soft-cap's own derivative."""
        return self.logit_scale / self.temperature

    def finish_logits_(self, products: Tensor) -> Tensor:
        """inner_scale * W h -> z in place."""
        if self.bias is not None:
            products.add_(self.bias.detach().to(self.dtype) * self.inner_scale)
        if self.logit_softcap is not None:
            cap = self.logit_softcap
            products.div_(cap).tanh_().mul_(cap / self.temperature)
        return products

    def softcap_slope(self, logits: Tensor) -> Tensor:
        """The soft-cap's derivative 1 - tanh(x / cap)^2 from the finished logits."""
        assert self.logit_softcap is not None
        return 1 - (logits * (self.temperature / self.logit_softcap)).square()


class HeadProducts:
    """The three products of a chunk into caller-owned buffers of the accumulator's dtype.

    Three cases: operands already are accumulators (fp32, fp64); a device whose library multiplies
    narrow operands into fp32; anything else upcasts W block by block, which on CPU also is faster
    than most processors' bf16 product.
    """

    def __init__(self, head: LinearHead) -> None:
        self._head = head
        weight = head.weight.detach()
        self._narrow = head.operand_dtype != head.dtype and multiplies_narrow(weight)
        self._direct = weight.dtype == head.dtype == head.operand_dtype
        if self._narrow:
            weight = weight.to(head.operand_dtype)
        self._weight = weight
        self.low_rank: LowRankProducts | None = None
        if head.lora is not None:
            self.low_rank = LowRankProducts(head.lora, head.dtype, self.storage_dtype, self.e_scale)

    @property
    def storage_dtype(self) -> torch.dtype:
        """Of what multiplies W and x in the backward products."""
        return self._head.operand_dtype if self._narrow else self._head.dtype

    @property
    def e_scale(self) -> float:
        return e_scale(self.storage_dtype)

    def rows(self, hidden: Tensor) -> Tensor:
        """Hidden states rounded to the operand's dtype, stored for the products."""
        return hidden.to(self._head.operand_dtype).to(self.storage_dtype)

    def weight_rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, index into them): the rows of W that `index` names, as accumulators."""
        if self._direct:
            return self._weight, index
        distinct, index = index.unique(return_inverse=True)
        return self._weight[distinct].to(self._head.operand_dtype).to(self._head.dtype), index

    def logits(self, x: Tensor, out: Tensor) -> Tensor:
        """out (C, V) = the finished logits of x."""
        scale, beta = self._head.inner_scale, 0
        if self.low_rank is not None:
            # Before the large product, which adds to it: the other order would read out again.
            self.low_rank.write_logits(x, scale, out)
            beta = 1
        if self._narrow:
            dtype = self._head.dtype
            torch.addmm(out, x, self._weight.t(), out_dtype=dtype, beta=beta, alpha=scale, out=out)
        elif self._direct:
            torch.addmm(out, x, self._weight.t(), beta=beta, alpha=scale, out=out)
        else:
            for columns, block in self._blocks():
                part = out[:, columns]
                torch.addmm(part, x, block.t(), beta=beta, alpha=scale, out=part)
        return self._head.finish_logits_(out)

    def hidden_gradient(self, e: Tensor, out: Tensor) -> Tensor:
        """out (C, D) = e W, its scale left in, without the adapter's part."""
        if not len(self._weight):  # a shard that is all padding: no block would write to out
            return out.zero_()
        if self._narrow:
            return torch.mm(e, self._weight, out_dtype=self._head.dtype, out=out)
        if self._direct:
            return torch.mm(e, self._weight, out=out)
        for columns, block in self._blocks():
            beta = 0 if columns.start == 0 else 1
            torch.addmm(out, e[:, columns], block, beta=beta, out=out)
        return out

    def add_weight_gradient(self, e: Tensor, x: Tensor, out: Tensor, *, first: bool) -> None:
        """out (V, D) = or += e^T x."""
        beta = 0 if first else 1
        alpha = 1 / self.e_scale
        if self._narrow:
            dtype = self._head.dtype
            torch.addmm(out, e.t(), x, out_dtype=dtype, beta=beta, alpha=alpha, out=out)
        else:
            torch.addmm(out, e.t(), x, beta=beta, alpha=alpha, out=out)

    def add_bias_gradient(self, e: Tensor, g: Tensor, out: Tensor) -> None:
        """out (V,) += e^T g, g (C,)."""
        if self._narrow:
            column = g.to(e.dtype)[:, None]
            sums = torch.mm(e.t(), column, out_dtype=self._head.dtype).squeeze(1)
            out.add_(sums, alpha=1 / self.e_scale)
        else:
            out.add_(torch.mv(e.t(), g))

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        vocab_size, width = self._weight.shape
        rows = max(1, UPCAST_BLOCK_BYTES // (width * self._head.dtype.itemsize))
        for start in range(0, vocab_size, rows):
            columns = slice(start, min(start + rows, vocab_size))
            block = self._weight[columns].to(self._head.operand_dtype).to(self._head.dtype)
            yield columns, block
