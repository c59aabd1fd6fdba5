"""Row operations on a chunk of logits as Triton kernels: the same operations as `torch_rows`.

One program a row. `policy_rows_kernel` is the fused path of the built-in row-local objectives:

    logits -> log-sum-exp -> logp -> ratio -> clip / truncation -> focal-scaled advantage -> c -> E

In bf16, whose exponents are those of fp32, E_v = exp(z_v - z_y) and E_y = -S = -sum of the others:
nothing but z_y is needed before the row is read, so the logits are read once, 6 bytes per element:

    logp = -log1p(S),   dL/dlogits = diag(g) E,   g = -c / (1 + S)

A row with S over 2^64 (logp < -44) is read again. In fp16, fp32 and fp64, and with an entropy
gradient, E holds p_v, and -(1 - p_y) at the target, with g = -c (or the finished gradient, with
g = 1), and the logits are read twice. In fp16 what is stored is `head.e_scale` times E.

Lengths, schedules and coefficients are runtime arguments, and neither a row count nor where a chunk
starts in a vector is specialised on: nothing recompiles per call or step.
C rows of the chunk, V vocabulary. Row offsets are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fgrpo_kernels import torch_rows
from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.head import LinearHead
from fgrpo_kernels.linear_head import HeadRows, RowPass
from fgrpo_kernels.primitives import (
    COMPILER_OPTIONS,
    E_SCALE_FP16,
    offset,
    statistics_of_row,
    write_exps_of_row,
    write_gradient_of_row,
)
from fgrpo_kernels.surrogates import PolicyRows
from fgrpo_kernels.torch_rows import RowStatistics
from fgrpo_kernels.triton_linear_stats import fused_statistics
from fgrpo_kernels.triton_objective import (
    objective_flags,
    objective_scalars,
    row_coefficients,
    softcap_factor,
)

__all__ = ["fused_statistics", "policy_row_pass", "row_gradient", "row_statistics"]
"""What `HeadRows.row_ops` offers; `torch_rows` has the same but for `policy_row_pass`."""


@triton.jit(do_not_specialize=["n_rows"], do_not_specialize_on_alignment=["ids_ptr"])
def row_statistics_kernel(
    stats_ptr,  # (7, C): logp, entropy, m, rest, total, moment, target
    logits_ptr,
    ids_ptr,
    n_rows,
    n_cols,
    logits_row_stride,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    row_start = offset(row, logits_row_stride)
    target_id = tl.load(ids_ptr + row)
    logp, entropy, m, rest, total, moment, target = statistics_of_row(
        logits_ptr, row_start, target_id, n_cols, BLOCK_V
    )
    tl.store(stats_ptr + row, logp)
    tl.store(stats_ptr + n_rows + row, entropy)
    tl.store(stats_ptr + 2 * n_rows + row, m)
    tl.store(stats_ptr + 3 * n_rows + row, rest)
    tl.store(stats_ptr + 4 * n_rows + row, total)
    tl.store(stats_ptr + 5 * n_rows + row, moment)
    tl.store(stats_ptr + 6 * n_rows + row, target)


@triton.jit(
    do_not_specialize=["n_rows"],
    do_not_specialize_on_alignment=["ids_ptr", "dlogps_ptr", "dentropy_ptr"],
)
def row_gradient_kernel(
    e_ptr,
    logits_ptr,
    ids_ptr,
    stats_ptr,
    dlogps_ptr,
    dentropy_ptr,
    softcap_factor_ptr,
    n_rows,
    n_cols,
    e_row_stride,
    logits_row_stride,
    HAS_ENTROPY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    c = tl.load(dlogps_ptr + row)
    s = c * 0.0
    if HAS_ENTROPY:
        s = tl.load(dentropy_ptr + row)
    write_gradient_of_row(
        e_ptr,
        logits_ptr,
        offset(row, e_row_stride),
        offset(row, logits_row_stride),
        tl.load(ids_ptr + row),
        c,
        s,
        tl.load(stats_ptr + row),
        tl.load(stats_ptr + n_rows + row),
        tl.load(stats_ptr + 2 * n_rows + row),
        tl.load(stats_ptr + 3 * n_rows + row),
        tl.load(stats_ptr + 4 * n_rows + row),
        tl.load(softcap_factor_ptr),
        n_cols,
        HAS_ENTROPY,
        HAS_SOFTCAP,
        BLOCK_V,
    )


@triton.jit(
    do_not_specialize_on_alignment=[
        "logps_ptr",
        "entropy_ptr",
        "factor_ptr",
        "ids_ptr",
        "advantages_ptr",
        "row_weights_ptr",
        "old_logps_ptr",
        "ref_logps_ptr",
        "rollout_ptr",
    ]
)
def policy_rows_kernel(
    logps_ptr,
    entropy_ptr,
    factor_ptr,  # g
    e_ptr,
    logits_ptr,
    ids_ptr,
    advantages_ptr,  # focal_weight * token_weights * advantages
    row_weights_ptr,
    old_logps_ptr,
    ref_logps_ptr,
    rollout_ptr,  # rollout weights where old_logps are given, else rollout log-probs
    scalars_ptr,  # `objective_scalars`, in the logits' dtype
    n_cols,
    e_row_stride,
    logits_row_stride,
    SURROGATE: tl.constexpr,
    KL: tl.constexpr,
    CORRECTION: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_DUAL: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    row_start = offset(row, logits_row_stride)
    target_id = tl.load(ids_ptr + row)
    softcap_factor = tl.load(scalars_ptr + 8)
    ONE_READ: tl.constexpr = (e_ptr.dtype.element_ty == tl.bfloat16) and not HAS_ENTROPY
    if ONE_READ:
        logp, entropy, share = write_exps_of_row(
            e_ptr,
            logits_ptr,
            offset(row, e_row_stride),
            row_start,
            target_id,
            softcap_factor,
            n_cols,
            HAS_SOFTCAP,
            BLOCK_V,
        )
    else:
        logp, entropy, m, rest, total, _, _ = statistics_of_row(
            logits_ptr, row_start, target_id, n_cols, BLOCK_V
        )
    slope = tl.load(scalars_ptr + 7)
    c, s = row_coefficients(
        logp, row, advantages_ptr, row_weights_ptr, old_logps_ptr, ref_logps_ptr, rollout_ptr,
        scalars_ptr, SURROGATE, KL, CORRECTION, HAS_OLD, HAS_DUAL,
    )  # fmt: skip
    factor = -slope * c
    if HAS_ENTROPY:
        factor = slope + 0.0 * s
        if e_ptr.dtype.element_ty == tl.float16:  # as `torch_rows.unit_coefficients`
            norm = tl.abs(c) + 16.0 * tl.abs(s)
            unit = E_SCALE_FP16 / tl.where(norm == 0, 1.0, norm)
            factor = slope * norm
            c = c * unit
            s = s * unit
    if ONE_READ:
        factor = factor * share
    else:
        write_gradient_of_row(
            e_ptr, logits_ptr, offset(row, e_row_stride), row_start, target_id, c, s, logp, entropy,
            m, rest, total, softcap_factor, n_cols, HAS_ENTROPY, HAS_SOFTCAP, BLOCK_V,
        )  # fmt: skip
    tl.store(logps_ptr + row, logp)
    tl.store(entropy_ptr + row, entropy)
    tl.store(factor_ptr + row, factor)


def launch_options(vocab_size: int) -> dict[str, int]:
    """One tile for a small vocabulary, 16 elements a thread for any other: four 16-byte loads in
    flight, and registers to spare."""
    if vocab_size <= 1024:
        return {"BLOCK_V": 1024, "num_warps": 4, **COMPILER_OPTIONS}
    return {"BLOCK_V": 4096, "num_warps": 8, **COMPILER_OPTIONS}


def row_statistics(
    logits: Tensor,
    ids: Tensor,
    head: LinearHead,
    *,
    keep_logits: bool,
    with_entropy: bool = True,
) -> RowStatistics:
    """As `torch_rows.row_statistics`; the logits are always kept, the entropy always there."""
    if not logits.shape[1]:
        return torch_rows.row_statistics(logits, ids, head, keep_logits=True)
    stats = logits.new_empty((7, len(ids)))
    if len(ids):
        row_statistics_kernel[(len(ids),)](
            stats,
            logits,
            ids.contiguous(),
            len(ids),
            logits.shape[1],
            logits.stride(0),
            **launch_options(logits.shape[1]),
        )
    logps, entropy, maximum, rest, total, moment, target = stats.unbind()
    if head.shard is not None:
        owned = head.shard.owned(ids, logits.shape[1])
        maximum, rest, moment, target, _ = head.shard.combine(maximum, rest, moment, target, owned)
        return torch_rows.finish_statistics(ids, target, maximum, rest, moment, None)
    return RowStatistics(ids, logps, entropy, maximum, rest, total, target_slope=None)


def row_gradient(
    buffer: Tensor,
    rows: RowStatistics,
    dlogps: Tensor,
    dentropy: Tensor | None,
    head: LinearHead,
    out: Tensor,
) -> Tensor:
    """As `torch_rows.row_gradient`; `buffer` are the logits."""
    stats = torch.stack((rows.logps, rows.entropy, rows.maximum, rows.rest, rows.total))
    factor = -head.slope * dlogps
    if dentropy is not None:
        dlogps, dentropy, norm = torch_rows.unit_coefficients(dlogps, dentropy, out.dtype)
        factor = head.slope * norm
    dlogps = dlogps.contiguous()
    if len(rows.ids) and buffer.shape[1]:
        row_gradient_kernel[(len(rows.ids),)](
            out,
            buffer,
            rows.ids.contiguous(),
            stats,
            dlogps,
            dlogps if dentropy is None else dentropy.contiguous(),
            dlogps.new_full((1,), softcap_factor(head)),
            len(rows.ids),
            buffer.shape[1],
            out.stride(0),
            buffer.stride(0),
            HAS_ENTROPY=dentropy is not None,
            HAS_SOFTCAP=head.logit_softcap is not None,
            **launch_options(buffer.shape[1]),
        )
    return factor


def policy_row_pass(
    head: LinearHead,
    head_rows: HeadRows,
    rows: PolicyRows,
    row_weights: Tensor,
    config: PolicyLossConfig,
) -> RowPass:
    """The fused kernel as a row pass, for row-local built-in objectives; `row_weights` (n,), 0
    outside the loss, carry whatever is known of the reduction."""
    rollout = rows.rollout_logps if rows.rollout_weights is None else rows.rollout_weights
    flags = {
        **objective_flags(config, has_old_logps=rows.old_logps is not None),
        "HAS_SOFTCAP": head.logit_softcap is not None,
        **launch_options(head.vocab_size),
    }
    scalars = objective_scalars(config, head, row_weights)

    def row_pass(logits: Tensor, part: slice, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = part.stop - part.start
        logps, entropy, factor = logits.new_empty((3, count)).unbind()
        policy_rows_kernel[(count,)](
            logps,
            entropy,
            factor,
            out,
            logits,
            *(
                row_weights if row is None else row[part].contiguous()
                for row in (
                    head_rows.ids,
                    rows.advantages,
                    row_weights,
                    rows.old_logps,
                    rows.ref_logps,
                    rollout,
                )
            ),
            scalars,
            logits.shape[1],
            out.stride(0),
            logits.stride(0),
            **flags,
        )
        return logps, entropy, factor

    return row_pass
