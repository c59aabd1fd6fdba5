"""From per-token losses to the scalar: L = sum over M of row_weight_t * l_t / denominator.

M is the final mask (after rejection), M_i its part in sequence i. Every reduction is this form, so
the gradient of a row needs its weight alone and the denominator can come at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fgrpo_kernels.config import PolicyLossConfig


@dataclass(frozen=True)
class Denominators:
    """The caller's counts over ranks and accumulation steps, 0-dim or None (count this call's)."""

    global_valid_tokens: Tensor | None
    global_sequences: Tensor | None


def sequence_counts(mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """|M_i|: (num_sequences,) int64."""
    counts = torch.zeros(num_sequences, dtype=torch.int64, device=mask.device)
    return counts.index_add_(0, sequence, mask.to(torch.int64))


def sequence_sums(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Sum of `values` over M_i: (num_sequences,)."""
    sums = torch.zeros(num_sequences, dtype=values.dtype, device=values.device)
    return sums.index_add(0, sequence, torch.where(mask, values, 0))


def sequence_means(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Mean of `values` over M_i, 0 where M_i is empty: (num_sequences,)."""
    sums = sequence_sums(values, mask, sequence, num_sequences)
    return sums / sequence_counts(mask, sequence, num_sequences).clamp(min=1)


def row_weights(
    mask: Tensor, sequence: Tensor, num_sequences: int, config: PolicyLossConfig, dtype: torch.dtype
) -> Tensor:
    """(n,) weight of each row, 0 outside M: 1 / |M_i| for sequence_mean, else 1."""
    if config.reduction != "sequence_mean":
        return mask.to(dtype)
    counts = sequence_counts(mask, sequence, num_sequences).clamp(min=1)
    return mask / counts[sequence].to(dtype)


def denominator(
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    config: PolicyLossConfig,
    given: Denominators,
    dtype: torch.dtype,
) -> Tensor:
    """0-dim: global_valid_tokens or |M| for token_mean; global_sequences or the sequences with a
    token in M for sequence_mean; fixed_length times global_sequences or the sequences with a row at
    all (the input mask) for fixed_length. At least 1 when counted here."""
    if config.reduction == "token_mean":
        if given.global_valid_tokens is not None:
            return given.global_valid_tokens.to(dtype)
        return mask.sum().clamp(min=1).to(dtype)
    if given.global_sequences is not None:
        sequences = given.global_sequences.to(dtype)
    else:
        counted = mask if config.reduction == "sequence_mean" else torch.ones_like(mask)
        present = sequence_counts(counted, sequence, num_sequences) > 0
        sequences = present.sum().clamp(min=1).to(dtype)
    if config.reduction == "fixed_length":
        assert config.fixed_length is not None
        return sequences * config.fixed_length
    return sequences


def weighted_sum(losses: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Sum over M of weights * losses; what is outside M is not looked at, NaN included."""
    return (torch.where(mask, losses, 0) * weights).sum()
