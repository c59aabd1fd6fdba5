"""Ways from fp32 logits to log-probs and gradients that differ in what is stored, and how rounded.

For `numerics.py`. Z are the logits, E what multiplies W and x in the backward products. "Narrow" is
the operands' type, bf16 or fp16; sums are fp32. What the package has is the package's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fgrpo_kernels.head import LinearHead, e_scale
from fgrpo_kernels.log_ratio import bounded
from fgrpo_kernels.torch_rows import RowStatistics, row_gradient, row_statistics


@dataclass(frozen=True)
class Rows:
    """Rows of one kind, and their truth in float64."""

    kind: str
    x: Tensor
    """(N, D) and (V, D), in the operands' type."""
    weight: Tensor
    bias: Tensor | None
    ids: Tensor
    old_logps: Tensor
    advantages: Tensor
    logps: Tensor
    dhidden: Tensor
    dweight: Tensor

    @property
    def operands(self) -> torch.dtype:
        return self.x.dtype

    @property
    def head(self) -> LinearHead:
        return LinearHead(self.weight, self.bias, self.operands)

    def logits(self, dtype: torch.dtype) -> Tensor:
        z = self.x.to(dtype) @ self.weight.to(dtype).t()
        return z if self.bias is None else z.add_(self.bias.to(dtype))

    def coefficients(self, logps: Tensor) -> Tensor:
        """dL/dlogp of the policy gradient -ratio A."""
        return -bounded(logps - self.old_logps.to(logps.dtype)).exp() * self.advantages


@dataclass(frozen=True)
class Result:
    logps: Tensor
    dhidden: Tensor
    dweight: Tensor
    fallback: float = 0.0
    """Share of rows that left the form for the running maximum."""


Form = Callable[[Rows, Tensor], Result]
"""(rows, fp32 logits of its own) -> what this way of storing makes of them."""


# Plain models: logits are the output of a narrow product.


def autograd_form(rows: Rows, z: Tensor, logps_of: Callable[[Tensor], Tensor]) -> Result:
    """Autograd from logits stored in the operands' type; their gradient is stored alike."""
    z = z.to(rows.operands).requires_grad_()
    logps = logps_of(z).float()
    (dlogits,) = torch.autograd.grad(logps, z, rows.coefficients(logps.detach()))
    return products(rows, logps.detach(), dlogits)


def narrow_logits_narrow_softmax(rows: Rows, z: Tensor) -> Result:
    return autograd_form(rows, z, lambda z: target_of(z.log_softmax(1), rows))


def narrow_logits(rows: Rows, z: Tensor) -> Result:
    return autograd_form(rows, z, lambda z: target_of(z.float().log_softmax(1), rows))


def narrow_logits_exact_target(rows: Rows, z: Tensor) -> Result:
    exact = target_of(z, rows)

    def logps(stored: Tensor) -> Tensor:
        wide = stored.float()
        target = target_of(wide, rows)
        return exact + (target - target.detach()) - wide.logsumexp(1)

    return autograd_form(rows, z, logps)


def target_of(values: Tensor, rows: Rows) -> Tensor:
    return values.gather(1, rows.ids[:, None]).squeeze(1)


# The package's forms: statistics from fp32 logits.


def probabilities(storage: torch.dtype | None = None, scale: float = 1.0) -> Form:
    """E = p and -(1 - p_y) in the operands' type, or in `storage`; g = -c stays outside. `scale`
    is a power of two that comes off the finished gradients."""

    def form(rows: Rows, z: Tensor) -> Result:
        stats = row_statistics(z, rows.ids, rows.head, keep_logits=False)
        c = rows.coefficients(stats.logps)
        out = torch.empty_like(z, dtype=storage or rows.operands)
        total = stats.total * (e_scale(out.dtype) / scale)
        g = row_gradient(z, replace(stats, total=total), c, None, rows.head, out)
        result = products(rows, stats.logps, out, g)
        return replace(result, dhidden=result.dhidden / scale, dweight=result.dweight / scale)

    return form


def two_reads(rows: Rows, z: Tensor) -> Result:
    """c (onehot - p) from a second read of the logits, c inside, stored in the operands' type."""
    stats = row_statistics(z, rows.ids, rows.head, keep_logits=True)
    c = rows.coefficients(stats.logps)
    out = torch.empty_like(z)
    row_gradient(z, stats, c, torch.zeros_like(c), rows.head, out)
    return products(rows, stats.logps, out.to(rows.operands))


def running_maximum(rows: Rows, z: Tensor) -> Result:
    """E = exp(z - m) and -S, unnormalised, in the operands' type."""
    return unnormalised(rows, z, row_statistics(z, rows.ids, rows.head, keep_logits=False))


def unnormalised(rows: Rows, e: Tensor, stats: RowStatistics, fallback: float = 0.0) -> Result:
    g = row_gradient(e, stats, rows.coefficients(stats.logps), None, rows.head, e)
    return products(rows, stats.logps, e.to(rows.operands), g, fallback)


@dataclass(frozen=True)
class Hint:
    """E = exp(z - o) with o = z_y - hint, known before a row is read: one read, or none.

    The hint is `stale` nats from the true log-prob, half of the rows above, half below. (Above 0
    it is no log-prob; E and S are those of a token that has fallen from about 0 to -stale.)
    guarded: rows whose e + S = exp(hint - logp) is not between the bounds of the type fall back,
    and not only those with a non-finite S.
    """

    stale: float
    guarded: bool = True

    def __call__(self, rows: Rows, z: Tensor) -> Result:
        sign = 1 - 2 * (torch.arange(len(z)) % 2)
        hint = rows.old_logps + self.stale * sign
        # The target's logit comes from a dot product of its own: nothing has read Z yet.
        target = (rows.x.float() * rows.weight[rows.ids].float()).sum(1)
        target = target if rows.bias is None else target + rows.bias[rows.ids]
        bounds = GUARD[rows.operands] if self.guarded else (-1.0, torch.inf)
        return relative_to(target - hint, hint.exp(), rows, z, bounds)


def relative_to_target(rows: Rows, z: Tensor) -> Result:
    """E = exp(z - z_y): z_y is the only thing read before the row, and e = 1."""
    target = target_of(z, rows)
    return relative_to(target, torch.ones_like(target), rows, z, (0.0, GUARD[rows.operands][1]))


def relative_to(
    offset: Tensor, exp_target: Tensor, rows: Rows, z: Tensor, bounds: tuple[float, float]
) -> Result:
    """E = exp(z - offset); rows with e + S out of bounds take the running maximum."""
    e = torch.exp(z - offset[:, None]).scatter_(1, rows.ids[:, None], 0)
    rest = e.sum(1)
    total = exp_target + rest
    fall = ~((total > bounds[0]) & (total < bounds[1]))
    logps, maximum = -torch.log1p(rest / exp_target), torch.zeros_like(rest)
    stats = RowStatistics(rows.ids, logps, logps, maximum, rest, total, None)
    if fall.any():
        part = z[fall]
        exact = row_statistics(part, rows.ids[fall], rows.head, keep_logits=False)
        e[fall] = part
        for name in ("logps", "rest", "total"):
            getattr(stats, name)[fall] = getattr(exact, name)
    return unnormalised(rows, e, stats, fall.double().mean().item())


GUARD = {
    torch.bfloat16: (2.0**-64, 2.0**64),
    torch.float16: (0.5, 2.0**10),
}
"""Bounds of e + S. In bf16 a p of 1e-18 then stays a normal number; in fp16 nothing overflows, and
no p is lost that E = p would keep twice as large."""


def products(
    rows: Rows, logps: Tensor, e: Tensor, g: Tensor | None = None, fallback: float = 0.0
) -> Result:
    """dhidden = g (E W), dW = E^T (g x) in fp32, g x stored as E is."""
    wide = e.float()
    dhidden, x = wide @ rows.weight.float(), rows.x.float()
    if g is not None:
        dhidden *= g[:, None]
        x = (x * g[:, None]).to(e.dtype).float()
    return Result(logps, dhidden, wide.t() @ x, fallback)
