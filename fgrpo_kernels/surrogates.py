"""From log-probs to the per-token loss, in plain torch: the specification of every objective.

All tensors are flat rows (n,), one row a scored token. The functions differentiate with respect to
`logps`, `entropy` and `rows.advantages` (which carries the gradient of `token_weights`); the rest
of the record is constant. sg = stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.log_ratio import bounded
from fgrpo_kernels.reductions import sequence_means, sequence_sums
from fgrpo_kernels.rollout_correction import rollout_correction

MAX_DPPO_RATIO = 20.0
"""The detached ratio of divergence PPO is at most this."""

LEAST_PROBABILITY = 1e-37
"""1 - p of a certain token in a divergence: fp32 holds it and its inverse."""


@dataclass(frozen=True)
class PolicyRows:
    """What belongs to the scored tokens, row by row; all (n,).

    mask: bool, the tokens in the loss. advantages: focal_weight * token_weights * advantages.
    old_logps: behaviour policy; the detached current log-probs where the caller gave none.
    ref_logps, rollout_logps: as given, or None. rollout_weights: of the rollout correction, or None
    where there is none or it still has to be computed from the current log-probs.
    sequence: int64, the row's sequence, in [0, num_sequences).
    """

    mask: Tensor
    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    rollout_logps: Tensor | None
    rollout_weights: Tensor | None
    sequence: Tensor
    num_sequences: int

    def map(self, function: Callable[[Tensor], Tensor]) -> PolicyRows:
        """The same record with `function` applied to each tensor of rows."""
        mapped: dict[str, Any] = {
            name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **mapped)


Objective = Callable[[Tensor, PolicyRows], Tensor]
"""(logps, rows) -> per-token loss, in the place of the configured surrogate."""


def with_old_logps(rows: PolicyRows, logps: Tensor) -> PolicyRows:
    """On-policy rows: old_logps = sg(logps) where the caller gave none."""
    if rows.old_logps is not None:
        return rows
    return replace(rows, old_logps=logps.detach())


def importance_ratio(logps: Tensor, rows: PolicyRows, config: PolicyLossConfig) -> Tensor:
    """rho_t = exp(logps - old_logps), or at sequence level
    sg(s_i) exp(logp_t - sg(logp_t)) with s_i = exp(mean over the sequence of logps - old_logps).
    """
    assert rows.old_logps is not None
    log_ratio = logps - rows.old_logps
    if config.ratio_level != "sequence":
        return bounded(log_ratio).exp()
    means = sequence_means(log_ratio.detach(), rows.mask, rows.sequence, rows.num_sequences)
    return bounded(means[rows.sequence]).exp() * (logps - logps.detach()).exp()


def by_sign(advantages: Tensor, positive: float, otherwise: float) -> Tensor:
    """`positive` where A' > 0, else `otherwise`."""
    return torch.where(advantages > 0, advantages.new_full((), positive), otherwise)


def divergence(logps: Tensor, old_logps: Tensor, config: PolicyLossConfig) -> Tensor:
    """dppo_tv |p - p_old|, dppo_kl KL(Bern(p_old) || Bern(p)) of the sampled tokens."""
    p_old = old_logps.exp()
    if config.surrogate == "dppo_tv":
        return (logps.exp() - p_old).abs()
    rest, rest_old = ((-torch.expm1(x)).clamp(min=LEAST_PROBABILITY) for x in (logps, old_logps))
    return p_old * (old_logps - logps) + rest_old * (rest_old / rest).log()


def beyond_bounds(
    logps: Tensor, rows: PolicyRows, config: PolicyLossConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """(above, below, binding): which tokens have left the bounds hi upwards and lo downwards, and
    where the sign of A' makes that bite. The bounds are those of the ratio, 1+hi and 1-lo; of the
    log-ratio, hi and -lo, at ratio_level "geometric_mean"; of the divergence for dppo."""
    assert rows.old_logps is not None
    low, high = config.clip_eps_low, config.clip_eps_high
    log_ratio = logps - rows.old_logps
    if config.surrogate in ("dppo_tv", "dppo_kl"):
        moved = divergence(logps, rows.old_logps, config)
        above, below = (moved > high) & (log_ratio > 0), (moved > low) & (log_ratio < 0)
    elif config.ratio_level == "geometric_mean":
        above, below = log_ratio > high, log_ratio < -low
    else:
        ratio = importance_ratio(logps, rows, config)
        above, below = ratio > 1 + high, ratio < 1 - low
    return above, below, (above & (rows.advantages > 0)) | (below & (rows.advantages < 0))


def clip_surrogate(logps: Tensor, rows: PolicyRows, config: PolicyLossConfig) -> Tensor:
    """-min(rho A', clamp(rho, 1-lo, 1+hi) A'); with dual_clip c and A' < 0 at most -c A'. At
    ratio_level "geometric_mean" `geometric_mean_surrogate`."""
    if config.ratio_level == "geometric_mean":
        return geometric_mean_surrogate(logps, rows, config)
    ratio = importance_ratio(logps, rows, config)
    clipped = ratio.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
    loss = -torch.minimum(ratio * rows.advantages, clipped * rows.advantages)
    if config.dual_clip is None:
        return loss
    bound = -config.dual_clip * rows.advantages
    return torch.where(rows.advantages < 0, torch.minimum(loss, bound), loss)


def geometric_mean_surrogate(logps: Tensor, rows: PolicyRows, config: PolicyLossConfig) -> Tensor:
    """-s_i A' with s_i = exp(mean over M_i of x_t), x_t = min(logp - old, hi) for A' > 0, else
    max(logp - old, -lo): each token's log-prob moves the ratio of its whole sequence."""
    assert rows.old_logps is not None
    log_ratio = logps - rows.old_logps
    clipped = torch.where(
        rows.advantages > 0,
        log_ratio.clamp(max=config.clip_eps_high),
        log_ratio.clamp(min=-config.clip_eps_low),
    )
    means = sequence_means(clipped, rows.mask, rows.sequence, rows.num_sequences)
    return -bounded(means[rows.sequence]).exp() * rows.advantages


def cispo_surrogate(logps: Tensor, rows: PolicyRows, config: PolicyLossConfig) -> Tensor:
    """-sg(clamp(rho, 1-lo, 1+hi)) A' logp: no token loses its gradient."""
    ratio = importance_ratio(logps.detach(), rows, config)
    return -ratio.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high) * rows.advantages * logps


def sapo_surrogate(logps: Tensor, rows: PolicyRows, config: PolicyLossConfig) -> Tensor:
    """-(4 / tau) sigmoid(tau (rho - 1)) A': slope A' at rho = 1, none far away."""
    tau = by_sign(rows.advantages, config.sapo_tau_pos, config.sapo_tau_neg)
    ratio = importance_ratio(logps, rows, config)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * rows.advantages


def vespo_surrogate(logps: Tensor, rows: PolicyRows, config: PolicyLossConfig) -> Tensor:
    """-phi(w_i) A' logp with phi(w) = exp(lambda) w^k exp(-lambda w), w_i = exp(sum over M_i of
    logp - old, and of d_t = old - rollout with a rollout correction), phi detached."""
    assert rows.old_logps is not None
    log_ratio = logps.detach() - rows.old_logps
    if config.rollout_correction is not None:
        # At rollout_level "sequence" d_t is its mean, which has the same sum.
        assert rows.rollout_logps is not None
        log_ratio = log_ratio + (rows.old_logps - rows.rollout_logps)
    sums = sequence_sums(log_ratio, rows.mask, rows.sequence, rows.num_sequences)
    log_w = bounded(sums[rows.sequence])
    k = by_sign(rows.advantages, config.vespo_k_pos, config.vespo_k_neg)
    rate = by_sign(rows.advantages, config.vespo_lambda_pos, config.vespo_lambda_neg)
    return -(k * log_w - rate * torch.expm1(log_w)).exp() * rows.advantages * logps


def dppo_surrogate(logps: Tensor, rows: PolicyRows, config: PolicyLossConfig) -> Tensor:
    """-sg(min(rho, 20)) A' logp; 0 for a token beyond its bound in the direction of A'."""
    ratio = importance_ratio(logps.detach(), rows, config).clamp(max=MAX_DPPO_RATIO)
    _, _, dropped = beyond_bounds(logps.detach(), rows, config)
    return torch.where(dropped, 0, -ratio * rows.advantages * logps)


def reinforce_surrogate(logps: Tensor, rows: PolicyRows, config: PolicyLossConfig) -> Tensor:
    """-A' logp."""
    return -rows.advantages * logps


SURROGATES = {
    "clip": clip_surrogate,
    "cispo": cispo_surrogate,
    "sapo": sapo_surrogate,
    "vespo": vespo_surrogate,
    "reinforce": reinforce_surrogate,
    "dppo_tv": dppo_surrogate,
    "dppo_kl": dppo_surrogate,
}


def kl_term(logps: Tensor, ref_logps: Tensor, estimator: str) -> Tensor:
    """k1 = logp - ref, k2 = (logp - ref)^2 / 2, k3 = exp(ref - logp) - (ref - logp) - 1."""
    difference = logps - ref_logps
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(bounded(-difference)) + difference


def corrected_rows(logps: Tensor, rows: PolicyRows, config: PolicyLossConfig) -> PolicyRows:
    """Fill in what depends on the current log-probs: old_logps when None, and with it the rollout
    correction (weights and rejections)."""
    pending = config.rollout_correction is not None and rows.rollout_weights is None
    rows = with_old_logps(rows, logps)
    if not pending:
        return rows
    assert rows.old_logps is not None and rows.rollout_logps is not None
    weights, mask = rollout_correction(
        rows.old_logps, rows.rollout_logps, rows.mask, rows.sequence, rows.num_sequences, config
    )
    return replace(rows, rollout_weights=weights, mask=mask)


def per_token_loss(
    logps: Tensor,
    entropy: Tensor,
    rows: PolicyRows,
    config: PolicyLossConfig,
    objective: Objective | None = None,
) -> Tensor:
    """w_t * surrogate_t + kl_coef * kl_t - entropy_coef * H_t for rows from `corrected_rows`;
    "vespo" has the rollout weights inside already."""
    # Select before any exp: outside M the value is kept, and no derivative of garbage comes back.
    logps = torch.where(rows.mask, logps, logps.detach())
    entropy = torch.where(rows.mask, entropy, entropy.detach())
    if objective is None:
        loss = SURROGATES[config.surrogate](logps, rows, config)
    else:
        # Copies: what a user's function writes to must not reach the caller's tensors.
        loss = objective(logps.clone(), rows.map(Tensor.clone))
        if not isinstance(loss, Tensor) or loss.shape != logps.shape:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"objective must return a per-token loss of shape {tuple(logps.shape)}, got {got}"
            )
        if not loss.is_floating_point():
            raise ValueError(f"objective must return floating-point losses, got {loss.dtype}")
        loss = loss.to(logps.dtype)
    weighted = objective is None and config.surrogate == "vespo"
    if rows.rollout_weights is not None and not weighted:
        loss = rows.rollout_weights * loss
    if config.kl_coef > 0:
        assert rows.ref_logps is not None
        loss = loss + config.kl_coef * kl_term(logps, rows.ref_logps, config.kl_estimator)
    if config.entropy_coef != 0:
        loss = loss - config.entropy_coef * entropy
    return loss
