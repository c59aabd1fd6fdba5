"""The objective as Triton scalars: log-prob of a row -> c = dL/dlogp, s = dL/dH.

The only Triton copy of each formula, of the row-local objectives. The torch counterparts, which are
the specification, are in `surrogates.py`, `log_ratio.py` and `rollout_correction.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.head import LinearHead
from fgrpo_kernels.surrogates import LEAST_PROBABILITY, MAX_DPPO_RATIO

CLIP: tl.constexpr = tl.constexpr(0)
CISPO: tl.constexpr = tl.constexpr(1)
REINFORCE: tl.constexpr = tl.constexpr(2)
SAPO: tl.constexpr = tl.constexpr(3)
DPPO_TV: tl.constexpr = tl.constexpr(4)
DPPO_KL: tl.constexpr = tl.constexpr(5)

K1: tl.constexpr = tl.constexpr(1)
K2: tl.constexpr = tl.constexpr(2)
K3: tl.constexpr = tl.constexpr(3)

TRUNCATE: tl.constexpr = tl.constexpr(1)
MASK: tl.constexpr = tl.constexpr(2)

LEAST: tl.constexpr = tl.constexpr(LEAST_PROBABILITY)
MAX_RATIO: tl.constexpr = tl.constexpr(MAX_DPPO_RATIO)

SURROGATES = {
    "clip": CLIP,
    "cispo": CISPO,
    "reinforce": REINFORCE,
    "sapo": SAPO,
    "dppo_tv": DPPO_TV,
    "dppo_kl": DPPO_KL,
}
KLS = {None: tl.constexpr(0), "k1": K1, "k2": K2, "k3": K3}
CORRECTIONS = {None: tl.constexpr(0), "truncate": TRUNCATE, "mask": MASK}


def objective_flags(config: PolicyLossConfig, *, has_old_logps: bool) -> dict[str, int]:
    """What of the objective is compiled into a kernel."""
    # Row-local "vespo" is on-policy, where phi(1) = 1.
    surrogate = "reinforce" if config.surrogate == "vespo" else config.surrogate
    return {
        "SURROGATE": SURROGATES[surrogate].value,
        "KL": KLS[config.kl_estimator if config.kl_coef > 0 else None].value,
        "CORRECTION": CORRECTIONS[config.rollout_correction].value,
        "HAS_OLD": has_old_logps,
        "HAS_DUAL": config.dual_clip is not None,
        "HAS_ENTROPY": config.entropy_coef != 0,
    }


def objective_scalars(config: PolicyLossConfig, head: LinearHead, like: Tensor) -> Tensor:
    """The constants as data: exact in float64 and never a reason to compile again."""
    values = [
        config.clip_eps_low,
        config.clip_eps_high,
        config.dual_clip or 0.0,
        config.kl_coef,
        config.entropy_coef,
        config.rollout_min or 0.0,
        config.rollout_max,
        head.slope,
        softcap_factor(head),
        config.sapo_tau_pos,
        config.sapo_tau_neg,
    ]
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


def softcap_factor(head: LinearHead) -> float:
    """z -> tanh: temperature / cap."""
    return 0.0 if head.logit_softcap is None else head.temperature / head.logit_softcap


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
def clip_coefficient(ratio, advantage, scalars_ptr, HAS_DUAL: tl.constexpr):
    """-rho A' where not clipped."""
    unclipped = ratio * advantage
    clamped = clamp_ratio(ratio, tl.load(scalars_ptr), tl.load(scalars_ptr + 1))
    binds = clamped * advantage < unclipped
    if HAS_DUAL:
        dual_clip = tl.load(scalars_ptr + 2)
        binds = binds | ((advantage < 0) & (unclipped < dual_clip * advantage))
    return tl.where(binds, 0.0, -unclipped)


@triton.jit
def sapo_coefficient(ratio, advantage, tau):
    """-4 sigmoid'(tau (rho - 1)) rho A'."""
    u = tl.exp(-tl.abs(tau * (ratio - 1.0)))
    return -4.0 * (u / ((1.0 + u) * (1.0 + u))) * ratio * advantage


@triton.jit
def complement(logp):
    """1 - exp(logp), at least LEAST: a series where 1 - p would cancel."""
    near = -logp * (1.0 + logp * (0.5 + logp * (1.0 / 6.0 + logp * (1.0 / 24.0))))
    rest = tl.where(logp > -0.03, near, 1.0 - tl.exp(logp))
    return tl.where(rest < LEAST, LEAST, rest)


@triton.jit
def divergence(logp, old_logp, SURROGATE: tl.constexpr):
    """|p - p_old|, or KL(Bern(p_old) || Bern(p))."""
    p_old = tl.exp(old_logp)
    if SURROGATE == DPPO_TV:
        value = tl.abs(tl.exp(logp) - p_old)
    else:
        rest_old = complement(old_logp)
        value = p_old * (old_logp - logp) + rest_old * tl.log(rest_old / complement(logp))
    return value


@triton.jit
def dppo_coefficient(logp, old_logp, ratio, advantage, scalars_ptr, SURROGATE: tl.constexpr):
    """-min(rho, 20) A', 0 where the token is beyond its threshold in the direction of A'."""
    up = (advantage > 0) & (logp > old_logp)
    down = (advantage < 0) & (logp < old_logp)
    threshold = tl.where(advantage > 0, tl.load(scalars_ptr + 1), tl.load(scalars_ptr))
    dropped = (up | down) & (divergence(logp, old_logp, SURROGATE) > threshold)
    return tl.where(dropped, 0.0, -tl.where(ratio > MAX_RATIO, MAX_RATIO, ratio) * advantage)


@triton.jit
def surrogate_coefficient(
    logp, old_logp, advantage, scalars_ptr, SURROGATE: tl.constexpr, HAS_DUAL: tl.constexpr
):
    """dl/dlogp of the surrogate; cispo -clamp(rho) A', reinforce -A'."""
    ratio = bounded_exp(logp - old_logp)
    if SURROGATE == REINFORCE:
        coefficient = -advantage
    elif SURROGATE == CISPO:
        clamped = clamp_ratio(ratio, tl.load(scalars_ptr), tl.load(scalars_ptr + 1))
        coefficient = -clamped * advantage
    elif SURROGATE == SAPO:
        tau = tl.where(advantage > 0, tl.load(scalars_ptr + 9), tl.load(scalars_ptr + 10))
        coefficient = sapo_coefficient(ratio, advantage, tau)
    elif SURROGATE == CLIP:
        coefficient = clip_coefficient(ratio, advantage, scalars_ptr, HAS_DUAL)
    else:
        coefficient = dppo_coefficient(logp, old_logp, ratio, advantage, scalars_ptr, SURROGATE)
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
def row_coefficients(
    logp,
    row,
    advantages_ptr,
    row_weights_ptr,
    old_logps_ptr,
    ref_logps_ptr,
    rollout_ptr,  # rollout weights where old_logps are given, else rollout log-probs
    scalars_ptr,
    SURROGATE: tl.constexpr,
    KL: tl.constexpr,
    CORRECTION: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_DUAL: tl.constexpr,
):
    """(c, s) of a row, its weight included."""
    row_weight = tl.load(row_weights_ptr + row)
    old_logp = logp
    if HAS_OLD:
        old_logp = tl.load(old_logps_ptr + row)
    advantage = tl.load(advantages_ptr + row)
    c = surrogate_coefficient(logp, old_logp, advantage, scalars_ptr, SURROGATE, HAS_DUAL)
    if CORRECTION:
        given = tl.load(rollout_ptr + row)
        if HAS_OLD:
            c = c * given  # rejected rows carry a row weight of 0
        else:
            low, high = tl.load(scalars_ptr + 5), tl.load(scalars_ptr + 6)
            weight, kept = rollout_weight(bounded_exp(logp - given), low, high, CORRECTION)
            c = c * weight
            if CORRECTION == MASK:
                row_weight = tl.where(kept, row_weight, 0.0)
    if KL:
        c += tl.load(scalars_ptr + 3) * kl_coefficient(logp, tl.load(ref_logps_ptr + row), KL)
    # Select, not multiply: what is outside the loss may hold anything.
    c = tl.where(row_weight == 0, 0.0, c * row_weight)
    return c, -tl.load(scalars_ptr + 4) * row_weight
