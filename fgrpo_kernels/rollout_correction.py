"""The correction of the mismatch between sampler and trainer: weights and rejections."""

from __future__ import annotations

import torch
from torch import Tensor

from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.head import accumulator_dtype
from fgrpo_kernels.inputs import FLOATS, check_tensor
from fgrpo_kernels.log_ratio import bounded
from fgrpo_kernels.reductions import sequence_means


def rollout_correction(
    old_logps: Tensor,
    rollout_logps: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    config: PolicyLossConfig,
) -> tuple[Tensor, Tensor]:
    """Weights w = sg(exp(d)), d = old - rollout or its sequence mean, and the mask after rejection.

    "truncate": min(w, rollout_max). "mask": w unchanged, tokens with w outside
    [rollout_min or 0, rollout_max] leave the mask. A NaN weight is kept, so that it shows.
    """
    difference = (old_logps - rollout_logps).detach()
    if config.rollout_level == "sequence":
        difference = sequence_means(difference, mask, sequence, num_sequences)[sequence]
    weights = bounded(difference).exp()
    if config.rollout_correction == "truncate":
        return weights.clamp(max=config.rollout_max), mask
    rejected = (weights < (config.rollout_min or 0.0)) | (weights > config.rollout_max)
    return weights, mask & ~rejected


def rollout_weights(
    old_logps: Tensor,
    rollout_logps: Tensor,
    completion_mask: Tensor | None,
    config: PolicyLossConfig,
) -> tuple[Tensor, Tensor]:
    """Weights and mask of the rollout correction, for use in several updates of one batch.

        d_t = old_logps_t - rollout_logps_t   (rollout_level="sequence": its mean over the sequence)
        w_t = exp(d_t);   "truncate": min(w_t, rollout_max)
        "mask": mask_t and rollout_min <= w_t <= rollout_max, survivors keep w_t

    Pass the weights on as `token_weights` and the mask as `completion_mask` with a config whose
    rollout_correction is None.

    Args:
        old_logps, rollout_logps: (B, T), or (N,) for rollout_level="token".
        completion_mask: bool, same shape; None: all valid.
        config: its rollout_* fields; rollout_correction must be set.
    Returns: (weights, mask): weights float32 (float64 for float64), detached, 0 at masked positions
        (rejected tokens keep theirs); mask bool.
    Raises: ValueError for shapes, dtypes, and for a config without correction.
    """
    if not isinstance(config, PolicyLossConfig):
        raise ValueError(f"config: expected a PolicyLossConfig, received {type(config).__name__}")
    if config.rollout_correction is None:
        raise ValueError("rollout_correction: expected 'truncate' or 'mask' in config, got None")
    if not isinstance(old_logps, Tensor):
        raise ValueError(f"old_logps: expected a tensor, received {type(old_logps).__name__}")
    check_tensor("old_logps", old_logps, old_logps.shape, old_logps.device, FLOATS)
    shape, device = old_logps.shape, old_logps.device
    check_tensor("rollout_logps", rollout_logps, shape, device, FLOATS)
    if completion_mask is None:
        completion_mask = torch.ones(shape, dtype=torch.bool, device=device)
    check_tensor("completion_mask", completion_mask, shape, device, (torch.bool,))
    if len(shape) not in (1, 2) or (len(shape) == 1 and config.rollout_level == "sequence"):
        expected = "(B, T)" if config.rollout_level == "sequence" else "(B, T) or (N,)"
        raise ValueError(f"old_logps: expected shape {expected}, received {tuple(shape)}")
    dtype = accumulator_dtype(torch.promote_types(old_logps.dtype, rollout_logps.dtype))
    num_sequences = shape[0] if len(shape) == 2 else 1
    sequence = torch.arange(num_sequences, device=device)[:, None]
    sequence = sequence.expand(num_sequences, old_logps.numel() // max(num_sequences, 1))
    mask = completion_mask.reshape(-1)
    weights, kept = rollout_correction(
        old_logps.reshape(-1).to(dtype),
        rollout_logps.reshape(-1).to(dtype),
        mask,
        sequence.reshape(-1),
        num_sequences,
        config,
    )
    return torch.where(mask, weights, 0).view(shape), kept.view(shape)
