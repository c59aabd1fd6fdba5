"""The formulas of the row kernels as Triton scalars: the only Triton copy of each.

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
