"""The formulas of the row kernels as Triton functions: from logits to statistics and E.

Those of the objective are in `triton_objective.py`.
"""

import torch
import triton
import triton.language as tl

from fgrpo_kernels.head import e_scale

E_SCALE_FP16: tl.constexpr = tl.constexpr(e_scale(torch.float16))

LOWEST: tl.constexpr = tl.constexpr(-1.7e38)
"""Stands for -inf inside the sums: 0 times it is 0, and differences of two are finite."""

COMPILER_OPTIONS = {"enable_fp_fusion": True}
"""a * b + c rounds once: Triton's default before 3.10, and 3.9 warns where nothing is said."""


@triton.jit
def offset(index, stride):
    """index * stride in int64: logits of one chunk, or a weight, may pass 2^31 elements."""
    return index.to(tl.int64) * stride


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0 without losing a small x: the rounding of 1 + x is divided out."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.where(x > 1e8, tl.log(u), tl.log(u) * (x / (u - 1.0))))


@triton.jit
def floored(z):
    """z, but LOWEST for -inf; NaN stays NaN."""
    return tl.maximum(z, LOWEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_statistics(z, AXIS: tl.constexpr, WITH_MOMENT: tl.constexpr):
    """(m, s, moment) of floored logits along the last axis, AXIS: m = max z, s = sum exp(z - m),
    moment = sum exp(z - m) (z - m), or 0."""
    m = tl.max(z, AXIS)
    if AXIS == 0:
        shifted = z - m
    else:
        shifted = z - m[:, None]
    e = tl.exp(shifted)
    s = tl.sum(e, AXIS)
    moment = s * 0.0
    if WITH_MOMENT:
        moment = tl.sum(e * shifted, AXIS)
    return m, s, moment


@triton.jit
def rebased(m, s, moment, base):
    """(s, moment) with exponents relative to `base` >= m. What stood for nothing but -inf, m at
    LOWEST, vanishes beside any real logit."""
    shift = m - base
    s = s * tl.exp(shift)
    return s, moment * tl.exp(shift) + s * shift


@triton.jit
def finished_statistics(target, m, s, moment):
    """(logp, entropy, m, total) of a row from its target logit and the statistics of the rest, m
    being at least the target. A row without a possible token is NaN."""
    m = tl.where(m == LOWEST, float("-inf"), m)
    shifted = target - m
    e = tl.exp(shifted)
    total = e + s
    log_total = tl.where(e >= s, shifted + log1p(s / e), tl.log(total))
    logp = tl.where(shifted < -60.0, shifted - log_total, -log1p(s / e))
    entropy = log_total - (moment + e * tl.where(e > 0, shifted, 0.0)) / total
    return logp, entropy, m, total


@triton.jit
def statistics_of_row(logits_ptr, row_start, target_id, n_cols, BLOCK_V: tl.constexpr):
    """(logp, entropy, m, rest, total, moment, target) of a row; `rest` and `moment` sum without the
    target, so that confident tokens keep their precision. A target outside the columns counts as
    LOWEST."""
    here = (target_id >= 0) & (target_id < n_cols)
    target = tl.load(logits_ptr + row_start + target_id, mask=here, other=LOWEST)
    m = floored(target)
    s = tl.full((), 0.0, target.dtype)
    moment = tl.full((), 0.0, target.dtype)
    for start in range(0, n_cols, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        # The target is taken out in registers: a mask with a hole would split the wide loads.
        z = tl.load(logits_ptr + row_start + cols, mask=cols < n_cols, other=LOWEST)
        z = floored(tl.where(cols == target_id, LOWEST, z))
        tile_m, tile_s, tile_moment = tile_statistics(z, 0, True)
        new_m = tl.maximum(m, tile_m, propagate_nan=tl.PropagateNan.ALL)
        s, moment = rebased(m, s, moment, new_m)
        tile_s, tile_moment = rebased(tile_m, tile_s, tile_moment, new_m)
        m, s, moment = new_m, s + tile_s, moment + tile_moment
    logp, entropy, m, total = finished_statistics(target, m, s, moment)
    return logp, entropy, m, s, total, moment, target


@triton.jit
def write_exps_of_row(
    e_ptr,
    logits_ptr,
    e_row_start,
    row_start,
    target_id,
    softcap_factor,
    n_cols,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """(logp, entropy, share) of a row from one read: E_v = exp(z_v - z_y), E_y = -S with S the sum
    of the others, so that logp = -log1p(S) and dL/dz_v = -c share E_v with share = 1 / (1 + S).
    Needs the exponents of fp32 in E. A row whose S grows too large, or is NaN, is read again, by
    its maximum."""
    target = tl.load(logits_ptr + row_start + target_id)
    s = tl.full((), 0.0, target.dtype)
    moment = tl.full((), 0.0, target.dtype)
    for start in range(0, n_cols, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        inside = cols < n_cols
        z = tl.load(logits_ptr + row_start + cols, mask=inside, other=LOWEST)
        x = floored(tl.where(cols == target_id, LOWEST, z)) - target
        e = tl.exp(x)
        s += tl.sum(e, 0)
        moment += tl.sum(e * x, 0)
        if HAS_SOFTCAP:
            e = e * softcap_slope(z, softcap_factor)
        tl.store(e_ptr + e_row_start + cols, e.to(e_ptr.dtype.element_ty), mask=inside)
    total = 1.0 + s
    logp = -log1p(s)
    entropy = -logp - moment / total
    share = 1.0 / total
    tl.debug_barrier()  # other threads wrote what is written again now
    if s < 1.8e19:  # 2^64: E and g = -c / (1 + S) then keep their distance from the ends of bf16
        e_target = -s
        if HAS_SOFTCAP:
            e_target = e_target * softcap_slope(target, softcap_factor)
        tl.store(e_ptr + e_row_start + target_id, e_target.to(e_ptr.dtype.element_ty))
    else:
        logp, entropy, m, rest, total, _, _ = statistics_of_row(
            logits_ptr, row_start, target_id, n_cols, BLOCK_V
        )
        share = total * 0.0 + 1.0
        write_gradient_of_row(
            e_ptr,
            logits_ptr,
            e_row_start,
            row_start,
            target_id,
            share,
            share,
            logp,
            entropy,
            m,
            rest,
            total,
            softcap_factor,
            n_cols,
            False,
            HAS_SOFTCAP,
            BLOCK_V,
        )
    return logp, entropy, share


@triton.jit
def tanh(x):
    """Within a few ulp in float32: a series where 1 - exp(-2 |x|) would cancel."""
    u = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - u) / (1.0 + u)
    q = x * x
    series = 1382.0 / 155925.0 - q * (21844.0 / 6081075.0)
    series = 62.0 / 2835.0 - q * series
    series = 17.0 / 315.0 - q * series
    series = 2.0 / 15.0 - q * series
    series = 1.0 / 3.0 - q * series
    near = x - x * q * series
    return tl.where(q < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit
def softcap_slope(z, slope_factor):
    th = z * slope_factor
    return 1.0 - th * th


@triton.jit
def write_gradient_of_row(
    e_ptr,
    logits_ptr,
    e_row_start,
    row_start,
    target_id,
    c,
    s,
    logp,
    entropy,
    m,
    rest,
    total,
    softcap_factor,
    n_cols,
    HAS_ENTROPY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """E of a row: p_v and -(1 - p_y), times `head.e_scale`, or with an entropy gradient s the
    finished c (onehot - p) - s p (log p + H); times the soft-cap's slope."""
    E_SCALE: tl.constexpr = E_SCALE_FP16 if e_ptr.dtype.element_ty == tl.float16 else 1.0
    log_total = tl.log(total)
    e_target = -E_SCALE * (rest / total)
    if HAS_ENTROPY:
        p_target = tl.exp(logp)
        bonus = tl.where(p_target > 0, s * p_target * (logp + entropy), 0.0)
        e_target = c * (rest / total) - bonus
    for start in range(0, n_cols, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        inside = cols < n_cols
        z = tl.load(logits_ptr + row_start + cols, mask=inside, other=float("-inf"))
        log_p = (z - m) - log_total
        p = tl.exp(log_p)
        if HAS_ENTROPY:
            e = -p * (c + s * tl.where(p > 0, log_p + entropy, 0.0))
        else:
            e = E_SCALE * p
        e = tl.where(cols == target_id, e_target, e)
        if HAS_SOFTCAP:
            e = e * softcap_slope(z, softcap_factor)
        tl.store(e_ptr + e_row_start + cols, e.to(e_ptr.dtype.element_ty), mask=inside)
