"""The formulas of the row kernels as Triton functions: the only Triton copy of each.

The torch counterparts, which are the specification, are in `surrogates.py` and `log_ratio.py`.
c = dL/dlogp of a row before its weight.
"""

import triton
import triton.language as tl

CLIP: tl.constexpr = tl.constexpr(0)
CISPO: tl.constexpr = tl.constexpr(1)
REINFORCE: tl.constexpr = tl.constexpr(2)

K1: tl.constexpr = tl.constexpr(1)
K2: tl.constexpr = tl.constexpr(2)
K3: tl.constexpr = tl.constexpr(3)

TRUNCATE: tl.constexpr = tl.constexpr(1)
MASK: tl.constexpr = tl.constexpr(2)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0 without losing a small x: the rounding of 1 + x is divided out."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.where(x > 1e8, tl.log(u), tl.log(u) * (x / (u - 1.0))))


@triton.jit
def bounded_exp(log_ratio):
    """exp of clamp(log_ratio, -20, 20); NaN stays NaN."""
    bounded = tl.where(log_ratio > 20.0, 20.0, tl.where(log_ratio < -20.0, -20.0, log_ratio))
    return tl.exp(bounded)


@triton.jit
def clamp_ratio(ratio, eps_low, eps_high):
    low = 1.0 - eps_low
    high = 1.0 + eps_high
    return tl.where(ratio > high, high, tl.where(ratio < low, low, ratio))


@triton.jit
def surrogate_coefficient(
    ratio, advantage, eps_low, eps_high, dual_clip, SURROGATE: tl.constexpr, HAS_DUAL: tl.constexpr
):
    """dl/dlogp of the surrogate: clip -rho A' where not clipped, cispo -clamp(rho) A',
    reinforce -A'."""
    if SURROGATE == REINFORCE:
        coefficient = -advantage
    elif SURROGATE == CISPO:
        coefficient = -clamp_ratio(ratio, eps_low, eps_high) * advantage
    else:
        unclipped = ratio * advantage
        binds = clamp_ratio(ratio, eps_low, eps_high) * advantage < unclipped
        if HAS_DUAL:
            binds = binds | ((advantage < 0) & (unclipped < dual_clip * advantage))
        coefficient = tl.where(binds, 0.0, -unclipped)
    return coefficient


@triton.jit
def rollout_weight(weight, low, high, CORRECTION: tl.constexpr):
    """(factor, kept) of an untruncated weight: truncated from above, or kept within the bounds."""
    if CORRECTION == TRUNCATE:
        return tl.where(weight > high, high, weight), weight == weight
    return weight, ((weight < low) | (weight > high)) == 0


@triton.jit
def kl_coefficient(logp, ref_logp, KL: tl.constexpr):
    """dkl/dlogp: k1 1, k2 logp - ref, k3 1 - exp(ref - logp)."""
    difference = logp - ref_logp
    if KL == K1:
        coefficient = difference * 0.0 + 1.0
    elif KL == K2:
        coefficient = difference
    else:
        coefficient = 1.0 - bounded_exp(-difference)
    return coefficient


@triton.jit
def merge_row_statistics(m, s, moment, z, mask):
    """Online softmax over one tile: maximum m, s = sum exp(z - m), moment = sum exp(z - m) (z - m).

    Lanes outside `mask` do not count; a tile of -inf leaves everything as it is.
    """
    z = tl.where(mask, z, float("-inf"))
    tile_max = tl.max(z, 0)
    new_m = tl.maximum(m, tile_max, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    shifted = z - base
    e = tl.exp(shifted)
    # 0 * -inf would be NaN: lanes without probability leave the moment alone.
    tile_moment = tl.sum(e * tl.where(e > 0, shifted, 0.0), 0)
    shift = tl.where(m == float("-inf"), 0.0, m - base)
    scale = tl.where(m == float("-inf"), 0.0, tl.exp(shift))
    new_moment = (moment + s * shift) * scale + tile_moment
    return new_m, s * scale + tl.sum(e, 0), new_moment


@triton.jit
def statistics_of_row(logits_ptr, row_start, target_id, n_cols, BLOCK_V: tl.constexpr):
    """(logp, entropy, m, rest, total) of a row; `rest` sums without the target, so that confident
    tokens keep their precision."""
    target = tl.load(logits_ptr + row_start + target_id)
    m = target
    s = tl.full((), 0.0, target.dtype)
    moment = tl.full((), 0.0, target.dtype)
    for start in range(0, n_cols, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        inside = (cols < n_cols) & (cols != target_id)
        z = tl.load(logits_ptr + row_start + cols, mask=inside, other=float("-inf"))
        m, s, moment = merge_row_statistics(m, s, moment, z, inside)
    shifted = target - m
    e = tl.exp(shifted)
    total = e + s
    log_total = tl.where(e >= s, shifted + log1p(s / e), tl.log(total))
    logp = tl.where(shifted < -60.0, shifted - log_total, -log1p(s / e))
    entropy = log_total - (moment + e * tl.where(e > 0, shifted, 0.0)) / total
    return logp, entropy, m, s, total


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
    """E of a row: p_v and -(1 - p_y), or with an entropy gradient s the finished
    c (onehot - p) - s p (log p + H); times the soft-cap's slope."""
    log_total = tl.log(total)
    target_z = tl.load(logits_ptr + row_start + target_id)
    for start in range(0, n_cols, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        inside = (cols < n_cols) & (cols != target_id)
        z = tl.load(logits_ptr + row_start + cols, mask=inside, other=float("-inf"))
        log_p = (z - m) - log_total
        p = tl.exp(log_p)
        if HAS_ENTROPY:
            e = -p * (c + s * tl.where(p > 0, log_p + entropy, 0.0))
        else:
            e = p
        if HAS_SOFTCAP:
            e = e * softcap_slope(z, softcap_factor)
        tl.store(e_ptr + e_row_start + cols, e.to(e_ptr.dtype.element_ty), mask=inside)
    e_target = -(rest / total)
    if HAS_ENTROPY:
        p_target = tl.exp(logp)
        bonus = tl.where(p_target > 0, s * p_target * (logp + entropy), 0.0)
        e_target = c * (rest / total) - bonus
    if HAS_SOFTCAP:
        e_target = e_target * softcap_slope(target_z, softcap_factor)
    tl.store(e_ptr + e_row_start + target_id, e_target.to(e_ptr.dtype.element_ty))
