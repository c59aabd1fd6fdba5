"""What a run wants to watch, from the log-probs of one call, over the final mask M.

Each metric is numerator / count, 0 when the count is 0; the pairs can be summed over ranks
(ratio_max excepted: take the maximum of its numerators).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.log_ratio import bounded
from fgrpo_kernels.loss_inputs import LossInputs
from fgrpo_kernels.surrogates import PolicyRows, beyond_bounds, importance_ratio, kl_term


def policy_metrics(
    logps: Tensor, entropy: Tensor, rows: PolicyRows, config: PolicyLossConfig
) -> dict[str, tuple[Tensor, Tensor]]:
    """(numerator, count) of the per-token metrics of the scored rows.

    clip_fraction_high / low: rho > 1+hi / rho < 1-lo, whatever the sign of A'; the log-ratio over
    hi / under -lo at ratio_level "geometric_mean"; for dppo the divergence over hi and logp over
    old_logps / over lo and under.
    clip_binding_fraction: where the sign makes the clip bite, A' > 0 above or A' < 0 below.
    ratio_mean, ratio_max: of rho. approx_kl: exp(-lr) - 1 + lr, lr = logps - old_logps.
    kl: the configured estimator to ref_logps (0 without). entropy. rollout_weight_mean: the factor
    of the rollout correction (1 without).
    """
    assert rows.old_logps is not None
    ratio = importance_ratio(logps, rows, config)
    log_ratio = logps - rows.old_logps
    above, below, binding = beyond_bounds(logps, rows, config)
    ones = torch.ones_like(logps)
    has_ref = rows.ref_logps is not None
    per_token = {
        "clip_fraction_high": above.to(logps.dtype),
        "clip_fraction_low": below.to(logps.dtype),
        "clip_binding_fraction": binding.to(logps.dtype),
        "ratio_mean": ratio,
        "approx_kl": torch.expm1(bounded(-log_ratio)) + log_ratio,
        "kl": kl_term(logps, rows.ref_logps, config.kl_estimator) if has_ref else 0 * ones,  # type: ignore[arg-type]
        "entropy": entropy,
        "rollout_weight_mean": ones if rows.rollout_weights is None else rows.rollout_weights,
    }
    count = rows.mask.sum().to(logps.dtype)
    sums = {k: (torch.where(rows.mask, v, 0).sum(), count) for k, v in per_token.items()}
    if len(ratio):
        sums["ratio_max"] = (torch.where(rows.mask, ratio, 0).amax(), count.clamp(max=1))
    else:
        sums["ratio_max"] = (count, count)
    return sums


def batch_metrics(
    rows: PolicyRows, mask: Tensor, inputs: LossInputs, config: PolicyLossConfig, custom: bool
) -> dict[str, tuple[Tensor, Tensor]]:
    """(numerator, count) of what is known of all rows, scored or not; `mask` is M over them.

    active_fraction: tokens of M whose coefficient is not known to be zero. focal_weight_mean: over
    the sequences with a valid token. rejected_fraction: of the input mask.

    Of the sparse backward (grad_tol > 0); 0 for the exact one. sparse_row_fraction: share of the
    rows with a gradient pass that left the dense products. grad_error_bound: sum_t |c_t| u_t over
    sum_t |c_t|, with c = dL/dlogp and u >= the mass that the row dropped, so that with the loss's
    gradient scale = sum_t |c_t| logit_scale / temperature
        sum_t ||error of dL/dh_t|| <= grad_error_bound * scale * max_v ||W_v||
        ||error of dL/dW||_F       <= grad_error_bound * scale * max_t ||h_t||
    """
    dtype = rows.advantages.dtype
    keep = custom or config.kl_coef > 0 or config.entropy_coef != 0
    active = mask if keep else mask & (rows.advantages != 0)
    count, total = mask.sum().to(dtype), torch.full_like(inputs.focal_weight_sum, len(mask))
    zero = torch.zeros_like(count)
    return {
        "active_fraction": (active.sum().to(dtype), count),
        "focal_weight_mean": (inputs.focal_weight_sum, inputs.num_present.to(dtype)),
        "rejected_fraction": (total - count, total),
        "sparse_row_fraction": (zero, count),
        "grad_error_bound": (zero, torch.ones_like(count)),
    }


def quotients(sums: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """numerator / count, 0 when the count is 0; 0-dim."""
    return {name: a / torch.where(b == 0, 1, b) for name, (a, b) in sums.items()}
