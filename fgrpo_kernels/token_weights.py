"""Per-token factors on the advantage: the `token_weights` of `focal_policy_loss`.

Dimensions: B sequences, T completion tokens, G group size.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fgrpo_kernels.groups import group_index
from fgrpo_kernels.inputs import check_tensor
from fgrpo_kernels.log_ratio import bounded

FUTURE_BLOCK = 128
"""Tokens of a block of the discounted sum: a product inside, a carry between."""

MIN_LENGTH_FACTOR = 1e-3
"""1 + r z of a sequence is kept positive; only groups of more than 82 could pass it."""

MAX_EXPONENT = 700.0
"""exp of it is finite in float64."""


@torch.no_grad()
def future_kl_weights(
    logps: Tensor,
    old_logps: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    *,
    half_life: float = 32.0,
    clip_range: float = 0.2,
    clip_high_only: bool = True,
    dual_clip: float = 10.0,
    safety_threshold: float = 10.0,
) -> Tensor:
    """FIPO: a token counts more when the tokens after it have become likelier.

        D_k = logps_k - old_logps_k, and 0 where masked or exp(D_k) > dual_clip
        F_t = sum_{k >= t} g^(k-t) D_k,   g = 2^(-1 / half_life)
        weight_t = clip(exp(F_t), 1, 1 + clip_range)
        and for A < 0 and exp(logps_t - old_logps_t) > safety_threshold:
        weight_t = min(weight_t, 1)

    With `clip_high_only=False` the lower bound is 1 - clip_range. On-policy (logps = old_logps) all
    weights are exactly 1: the first mini-batch after sampling is not changed. The weights depend on
    the current log-probs, so they are computed anew for each mini-batch; they are constants.

    Args:
        logps, old_logps: (B, T) float, of the current policy and of the one that made the batch.
        completion_mask: (B, T) bool; what stands at masked positions is ignored.
        advantages: (B,) or (B, T); only the sign is used.
        half_life: tokens after which a log-ratio counts half (`decay_rate` elsewhere).
        dual_clip: the c of the dual clip; tokens over it take no part in the sums of others.
    Returns: (B, T) detached, float32 (float64 for float64 log-probs), 1.0 at masked positions.
    Raises: ValueError for shapes that do not fit and constants out of range.
    Source: FIPO 2603.19835; defaults of its 32B recipe. Its code lowers a weight to [0.8, 1] in the
        safety case; with weights in [1 - clip_range, 1 + clip_range] and clip_range <= 0.2 that is
        the minimum above, and for a wider range we keep the bound 0.8. ms-swift instead masks these
        tokens, with threshold 4. The recipe's further step, dropping sequences with more than one
        dual-clipped token, belongs to selection and is not done here.
    """
    for name, value, lowest in (
        ("half_life", half_life, 0.0),
        ("dual_clip", dual_clip, 1.0),
        ("safety_threshold", safety_threshold, 0.0),
    ):
        if not value > lowest:
            raise ValueError(f"{name}: expected a number > {lowest:g}, received {value!r}")
    if not 0 <= clip_range < 1:
        raise ValueError(f"clip_range: expected a number in [0, 1), received {clip_range!r}")
    if not isinstance(logps, Tensor) or logps.dim() != 2:
        got = tuple(logps.shape) if isinstance(logps, Tensor) else type(logps).__name__
        raise ValueError(f"logps: expected shape (B, T), received {got}")
    check_tensor("old_logps", old_logps, logps.shape, logps.device)
    check_tensor("completion_mask", completion_mask, logps.shape, logps.device, (torch.bool,))
    if not isinstance(advantages, Tensor) or advantages.shape not in (logps.shape, logps.shape[:1]):
        got = tuple(advantages.shape) if isinstance(advantages, Tensor) else type(advantages)
        raise ValueError(
            f"advantages: expected shape {tuple(logps.shape[:1])} or {tuple(logps.shape)}, "
            f"received {got}"
        )
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    dtype = torch.float64 if logps.dtype == torch.float64 else torch.float32
    difference = logps.to(dtype) - old_logps.to(dtype)
    # Bounded: an infinite term times the sum's zeros would be NaN for its whole block.
    log_ratio = bounded(torch.where(completion_mask, difference, 0.0))
    counted = torch.where(log_ratio > math.log(dual_clip), 0.0, log_ratio)
    lowest = 1.0 if clip_high_only else 1 - clip_range
    weights = _discounted_future(counted, 2.0 ** (-1 / half_life)).exp()
    weights = weights.clamp(lowest, 1 + clip_range)
    runaway = (advantages < 0) & (log_ratio > math.log(safety_threshold))
    weights = torch.where(runaway, weights.clamp(0.8, 1.0), weights)
    return torch.where(completion_mask, weights, 1.0)


def _discounted_future(values: Tensor, discount: float) -> Tensor:
    """(B, T): sum over k >= t of discount^(k-t) values[:, k]."""
    batch, length = values.shape
    block = min(FUTURE_BLOCK, max(1, length))
    blocks = -(-length // block)
    padded = torch.nn.functional.pad(values, (0, blocks * block - length))
    steps = torch.arange(block, device=values.device)
    distance = steps[:, None] - steps[None, :]  # from column to row: k - t
    powers = discount ** distance.clamp(min=0).to(values.dtype)
    inside = padded.view(batch, blocks, block) @ torch.where(distance >= 0, powers, 0.0)
    to_next = discount ** (block - steps).to(values.dtype)
    carry = torch.zeros_like(inside[:, 0, 0]) if blocks else values.new_zeros(batch)
    for index in range(blocks - 1, -1, -1):
        inside[:, index] += to_next * carry[:, None]
        carry = inside[:, index, 0]
    return inside.flatten(1)[:, :length]


def length_weights(
    lengths: Tensor,
    lam: Tensor | float,
    *,
    group_size: int | None = None,
    group_ids: Tensor | Sequence[Hashable] | None = None,
    scale: float = 1 / 9,
) -> Tensor:
    """lambda-GRPO: how much a sequence counts by its length, with one number that can be learned.

        z_i = (length_i - mean) / (std + 1e-6),   h_i = 1 + scale z_i
        w_i = G softmax_i(h_i ^ lam)

    Mean, population standard deviation and softmax run over the group of G members; the weights of
    a group have mean 1. lam = 0 gives 1 everywhere (DAPO, with reduction "token_mean"); lam > 0
    favours longer sequences, lam < 0 shorter ones.

    The gradient reaches `lam`: pass `w[:, None].expand(B, T)` as `token_weights`. It lowers the
    loss's value, so it moves lam towards sequences whose surrogate is lower; on-policy that value
    is -A, and lam follows the correlation of length and advantage within groups.

    Args:
        lengths: (B,) tokens of each completion.
        lam: 0-dim tensor, may require grad, or a number.
        group_size, group_ids: as in `group_advantages`; one of the two.
        scale: r of the paper. |z| <= sqrt(G - 1), so h > 0 for G < 82; in larger groups h is kept
            at least 1e-3.
    Returns: (B,) in the dtype of lam (float32 for a number), attached to lam.
    Raises: ValueError for shapes and groups that do not fit.
    Source: 2510.06870. Whether its standard deviation is the population's was not found; that one
        bounds z.
    """
    if not isinstance(lengths, Tensor) or lengths.dim() != 1:
        got = tuple(lengths.shape) if isinstance(lengths, Tensor) else type(lengths).__name__
        raise ValueError(f"lengths: expected a tensor (B,), received {got}")
    if not isinstance(lam, Tensor):
        lam = torch.tensor(float(lam), dtype=torch.float32, device=lengths.device)
    if lam.dim() != 0 or not lam.is_floating_point():
        raise ValueError(
            f"lam: expected a floating-point scalar, received {tuple(lam.shape)} {lam.dtype}"
        )
    index = group_index(len(lengths), lengths.device, group_size, group_ids)
    values = lengths.detach().double()

    def mean(values: Tensor) -> Tensor:
        sums = values.new_zeros(values.shape).index_add(0, index, values)
        counts = torch.zeros_like(values).index_add_(0, index, torch.ones_like(values))
        return (sums / counts.clamp(min=1))[index]

    deviations = values - mean(values)
    z = deviations / (mean(deviations.square()).sqrt() + 1e-6)
    h = (1 + scale * z).clamp(min=MIN_LENGTH_FACTOR)
    # h ^ lam - 1 and its maximum, which the softmax does not see: nothing cancels near lam = 0.
    powers = torch.expm1((lam.double() * h.log()).clamp(max=MAX_EXPONENT))
    highest = torch.full_like(values, -math.inf)
    highest.scatter_reduce_(0, index, powers.detach(), "amax")
    exponentials = (powers - highest[index]).exp()
    return (exponentials / mean(exponentials)).to(lam.dtype)
