"""A LoRA adapter on the head: its record, and what it adds to the products of a chunk.

    Z += s (X A^T) B^T,   dX += s diag(g) (E B) A
    dA = s (diag(g) E B)^T X,   dB = s E^T (diag(g) X A^T)

W + s B A is never formed. Each product over the vocabulary costs 2 C V r FLOPs, a share r / D of a
product with W. C rows of a chunk, V vocabulary, D hidden size, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRankUpdate:
    """scale * b a on top of the weight: a (r, D), b (V, r)."""

    a: Tensor
    b: Tensor
    scale: float
    operand_dtype: torch.dtype
    """What a and b are rounded to: the autocast dtype, else the promoted one of hidden, a and b."""


class LowRankProducts:
    """Sums and operands are accumulators (fp32; fp64 for fp64), but for what multiplies a narrow E:
    that is rounded as E is. X A^T is never rounded: at these ranks a GPU's time goes into writing
    Z, whatever the operands."""

    def __init__(
        self,
        update: LowRankUpdate,
        dtype: torch.dtype,
        storage_dtype: torch.dtype,
        e_scale: float,
    ) -> None:
        a, b = (t.detach().to(update.operand_dtype) for t in (update.a, update.b))
        self._a, self._b, self._scale = a.to(dtype), b.to(dtype), update.scale
        self._scale_of_e = update.scale / e_scale
        self._narrow = storage_dtype != dtype
        self._b_of_e = b.to(storage_dtype) if self._narrow else self._b

    def write_logits(self, x: Tensor, scale: float, out: Tensor) -> None:
        """out (C, V) = scale * s (x A^T) B^T."""
        projected = self._projected(x).mul_(scale * self._scale)
        torch.mm(projected, self._b.t(), out=out)

    def back_projected(self, e: Tensor) -> Tensor:
        """(C, r) E B, its scale left in."""
        if self._narrow:
            return torch.mm(e, self._b_of_e, out_dtype=self._b.dtype)
        return torch.mm(e, self._b_of_e)

    def add_hidden_gradient(self, e_b: Tensor, out: Tensor) -> None:
        """out (C, D) += s (E B) A, the scale of E left in."""
        torch.addmm(out, e_b, self._a, alpha=self._scale, out=out)

    def add_a_gradient(self, e_b: Tensor, g: Tensor, x: Tensor, out: Tensor) -> None:
        """out (r, D) += s (diag(g) E B)^T x."""
        scaled = e_b * g[:, None]
        torch.addmm(out, scaled.t(), x.to(out.dtype), alpha=self._scale_of_e, out=out)

    def add_b_gradient(self, e: Tensor, g: Tensor, x: Tensor, out: Tensor) -> None:
        """out (V, r) += s E^T (diag(g) x A^T)."""
        scaled = self._projected(x).mul_(g[:, None]).to(e.dtype)
        if self._narrow:
            dtype = out.dtype
            torch.addmm(out, e.t(), scaled, out_dtype=dtype, alpha=self._scale_of_e, out=out)
        else:
            torch.addmm(out, e.t(), scaled, alpha=self._scale_of_e, out=out)

    def _projected(self, x: Tensor) -> Tensor:
        return x.to(self._a.dtype) @ self._a.t()
