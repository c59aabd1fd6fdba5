"""Row operations on a chunk of logits in plain torch, on any device.

The gradient never forms a softmax of its own. With E_v = exp(z_v - m) for v != y (m = row maximum),
e = exp(z_y - m) and S = sum_v E_v, all of a row's needs follow from one read:

    logp = -log1p(S / e)                     no cancellation for confident tokens
    H = log(e + S) - (sum_v E_v (z_v - m) + e (z_y - m)) / (e + S)
    dL/dz_v = g E_v,  E_y := -S,  g = -c / (e + S)

so that g, the only place where the loss enters, multiplies hidden states and never the vocabulary.
An entropy gradient carries p (log p + H) and reads the logits a second time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fgrpo_kernels.head import LinearHead, e_scale

BLOCK_BYTES = 2**20
"""Element passes run over blocks of rows, this much per thread, that stay in its cache."""


@dataclass(frozen=True)
class RowStatistics:
    """Of a chunk's rows, all (C,): log-prob of the target, entropy, and what the gradient needs."""

    ids: Tensor
    logps: Tensor
    entropy: Tensor
    maximum: Tensor
    rest: Tensor
    """S: the sum over the vocabulary without the target."""
    total: Tensor
    """e + S."""
    target_slope: Tensor | None
    """The soft-cap's derivative at the target; None without a soft-cap."""
    owned: Tensor | None = None
    """Which targets are among the logits' columns; None: all."""
    shift: Tensor | None = None
    """Of a shard of the vocabulary: its own maximum, which its E refer to, minus `maximum`."""


def row_statistics(
    logits: Tensor,
    ids: Tensor,
    head: LinearHead,
    *,
    keep_logits: bool,
    with_entropy: bool = True,
) -> RowStatistics:
    """Statistics of finished logits (C, V).

    The logits become E (the target column 0), times the soft-cap's slope, unless `keep_logits`,
    which also is the cheaper way when no gradient follows. Without `with_entropy` it is NaN.
    """
    # S then sums without the target, so nothing cancels. Finite: 0 times it is 0 in the moment.
    hole = torch.finfo(logits.dtype).min / 2
    owned = None if head.shard is None else head.shard.owned(ids, logits.shape[1])
    target = _targets(logits, ids, owned, hole)
    _put_targets(logits, ids, owned, torch.full_like(target, hole))
    results = torch.empty((3, *ids.shape), dtype=logits.dtype, device=logits.device)
    maximum, rest, moment = results.unbind()
    if not logits.shape[1]:  # of a shard that is all padding
        results.zero_()
        maximum.fill_(hole)
    size = block_rows(logits)
    shifted_buffer = torch.empty_like(logits[:size])
    exp_buffer = shifted_buffer
    if keep_logits and with_entropy:
        exp_buffer = torch.empty_like(shifted_buffer)
    needs_slope = head.logit_softcap is not None and not keep_logits
    # Splitting once: slicing each row of each tensor would cost as much as a pass.
    tensors = (logits, target, maximum[:, None], rest, moment) if logits.shape[1] else ()
    blocks = zip(*(t.split(size) for t in tensors), strict=True)
    for block, block_target, block_max, block_rest, block_moment in blocks:
        torch.maximum(block.amax(1, keepdim=True), block_target, out=block_max)
        # Not below 0, which E = 0 in the hole would turn into NaN.
        slope = head.softcap_slope(block).clamp_(min=0) if needs_slope else None
        shifted = torch.sub(block, block_max, out=shifted_buffer[: len(block)])
        if head.bias is not None:  # only a bias can forbid a token with -inf and harm no other
            shifted.clamp_(min=_lowest_exponent(logits.dtype))
        exps = torch.exp(shifted, out=exp_buffer[: len(block)] if keep_logits else block)
        torch.sum(exps, 1, out=block_rest)
        if with_entropy:
            _row_dots(shifted, exps, block_moment)
        if slope is not None:
            block.mul_(slope)
    target = target.squeeze(1)
    if keep_logits:
        _put_targets(logits, ids, owned, target[:, None])
    shift = None
    if head.shard is not None and owned is not None:
        maximum, rest, moment, target, shift = head.shard.combine(
            maximum, rest, moment, target, owned
        )
    if head.bias is not None:  # a row without a possible token has no log-prob: NaN, not -inf
        maximum.masked_fill_(maximum == hole, -torch.inf)
    if not with_entropy:
        moment.fill_(torch.nan)
    target_slope = None if head.logit_softcap is None else head.softcap_slope(target)
    stats = finish_statistics(ids, target, maximum, rest, moment, target_slope)
    return replace(stats, owned=owned, shift=shift)


def _targets(values: Tensor, ids: Tensor, owned: Tensor | None, missing: float) -> Tensor:
    """(C, 1) of the targets' columns; `missing` where the row's target is in another shard."""
    if owned is None:
        return values.gather(1, ids[:, None])
    if not values.shape[1]:
        return values.new_full((len(ids), 1), missing)
    found = values.gather(1, torch.where(owned, ids, 0)[:, None])
    return torch.where(owned[:, None], found, missing)


def _put_targets(values: Tensor, ids: Tensor, owned: Tensor | None, new: Tensor) -> None:
    """Write (C, 1) to the targets' columns that are here."""
    if owned is None:
        values.scatter_(1, ids[:, None], new)
    elif values.shape[1]:
        column = torch.where(owned, ids, 0)[:, None]
        values.scatter_(1, column, torch.where(owned[:, None], new, values.gather(1, column)))


def finish_statistics(
    ids: Tensor,
    target: Tensor,
    maximum: Tensor,
    rest: Tensor,
    moment: Tensor,
    target_slope: Tensor | None,
) -> RowStatistics:
    """A row's results from its target logit and the statistics of the rest."""
    shifted = target - maximum
    exp_target = shifted.exp()
    total = exp_target + rest
    log_total = torch.where(
        exp_target >= rest, exp_target.log() + torch.log1p(rest / exp_target), total.log()
    )
    # Far below the maximum exp(z_y - m) is 0 or subnormal; there the plain form loses nothing.
    unlikely = shifted < -60
    logps = torch.where(unlikely, shifted - log_total, -torch.log1p(rest / exp_target))
    target_moment = torch.where(exp_target > 0, exp_target * shifted, 0)
    entropy = log_total - (moment + target_moment) / total
    return RowStatistics(ids, logps, entropy, maximum, rest, total, target_slope)


def fused_statistics(head: LinearHead) -> None:
    """A way to the statistics of rows without a gradient that makes no logits: none here."""


def row_gradient(
    buffer: Tensor,
    rows: RowStatistics,
    dlogps: Tensor,
    dentropy: Tensor | None,
    head: LinearHead,
    out: Tensor,
) -> Tensor:
    """g (C,), and E into `out`, with dL/dlogits = diag(g) E.

    `buffer` is what `row_statistics` left: E but for its target column, or with `keep_logits` the
    logits, which an entropy gradient (`dentropy` given) needs. `out` may be `buffer`; a narrower
    `out`, and that of a shard, whose maximum may be far below the row's, gets E / (e + S), whose
    entries are in [-1, 1], times `e_scale`.
    """
    scale = e_scale(out.dtype)
    if dentropy is not None:
        dlogps, dentropy, norm = unit_coefficients(dlogps, dentropy, out.dtype)
        _write_dlogits(buffer, rows, dlogps, dentropy, head, out)
        return head.slope * norm
    target = -rows.rest if rows.target_slope is None else -rows.rest * rows.target_slope
    if out.data_ptr() == buffer.data_ptr() and rows.shift is None:
        _put_targets(out, rows.ids, None, target[:, None])
        return -dlogps * head.slope / rows.total
    factor = scale / rows.total
    buffer_factor = factor if rows.shift is None else rows.shift.exp() * factor
    torch.mul(buffer, buffer_factor[:, None], out=out)
    _put_targets(out, rows.ids, rows.owned, (target * factor)[:, None].to(out.dtype))
    return -dlogps * head.slope


def unit_coefficients(
    dlogps: Tensor, dentropy: Tensor, storage: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(c, s, norm) of a finished gradient E: as they are with norm 1, or for fp16 so that E is at
    most `e_scale`, as |p (log p + H)| < 16 for any vocabulary."""
    scale = e_scale(storage)
    if scale == 1:
        return dlogps, dentropy, torch.ones_like(dlogps)
    norm = dlogps.abs() + 16 * dentropy.abs()
    factor = scale / torch.where(norm == 0, 1, norm)
    return dlogps * factor, dentropy * factor, norm


def _write_dlogits(
    logits: Tensor,
    rows: RowStatistics,
    dlogps: Tensor,
    dentropy: Tensor,
    head: LinearHead,
    out: Tensor,
) -> None:
    """c (onehot_v - p_v) - s p_v (log p_v + H), times the soft-cap's slope."""
    log_total = rows.total.log()
    size = block_rows(logits)
    for start in range(0, len(rows.ids), size):
        part = slice(start, min(start + size, len(rows.ids)))
        slope = None if head.logit_softcap is None else head.softcap_slope(logits[part])
        # One after the other: a large common offset must cancel before the logarithm is added.
        log_probs = logits[part] - rows.maximum[part, None]
        log_probs.sub_(log_total[part, None]).clamp_(min=_lowest_exponent(logits.dtype))
        coefficients = (log_probs + rows.entropy[part, None]) * -dentropy[part, None]
        coefficients -= dlogps[part, None]
        torch.mul(log_probs.exp_(), coefficients, out=out[part])
        if slope is not None:
            out[part] *= slope
    probs = rows.logps.exp()
    target = dlogps * (rows.rest / rows.total)
    # A forbidden token's logp is -inf: with probability 0 it has no part in the entropy.
    bonus = dentropy * probs * (rows.logps + rows.entropy)
    target = torch.where(probs > 0, target - bonus, target)
    if rows.target_slope is not None:
        target = target * rows.target_slope
    _put_targets(out, rows.ids, rows.owned, target[:, None].to(out.dtype))


def _lowest_exponent(dtype: torch.dtype) -> float:
    """exp of it is 0; without it 0 * -inf would spoil a row's moment."""
    return -800.0 if dtype == torch.float64 else -200.0


def _row_dots(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Row-wise dot products; for few long rows BLAS' dot is much faster than a batched one."""
    if len(a) > 8:
        torch.linalg.vecdot(a, b, out=out)
        return
    for row_a, row_b, row_out in zip(a, b, out, strict=True):
        torch.dot(row_a, row_b, out=row_out)


def block_rows(logits: Tensor) -> int:
    """Rows of a block of the element passes."""
    row_bytes = max(1, logits.shape[1] * logits.element_size())
    return max(1, torch.get_num_threads() * BLOCK_BYTES // row_bytes)
