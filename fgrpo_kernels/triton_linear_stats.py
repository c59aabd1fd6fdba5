"""Log-probs and entropies straight from hidden states: a matrix product that stores no logits.

One program per tile of rows and vocabulary. Its epilogue reduces the tile, still in the product's
accumulators, to three numbers a row (`primitives.tile_statistics`); a second kernel merges a row's
tiles:

    hidden, W -> [ W h -> scale, bias, soft-cap -> m, s, moment, target logit ] -> logp, entropy

2 N V D FLOPs. Memory: 12 bytes per row and tile of 128 or 256 columns. Tiles are ordered so that
some thousand rows stay in the cache while the weight streams past them once.

N rows, V vocabulary, D hidden size. Offsets of tiles are int64. Lengths are runtime arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import _FlopCounterMode, flop_registry, register_flop_formula

from fgrpo_kernels.head import LinearHead
from fgrpo_kernels.linear_head import HeadRows, chunk_budget, chunks
from fgrpo_kernels.primitives import (
    COMPILER_OPTIONS,
    LOWEST,
    finished_statistics,
    floored,
    offset,
    rebased,
    tanh,
    tile_statistics,
)


@triton.jit(do_not_specialize=["n_rows", "n_cols"], do_not_specialize_on_alignment=["ids_ptr"])
def tile_statistics_kernel(
    partials_ptr,  # (3, vocabulary tiles, padded rows): m, s, moment
    targets_ptr,  # (padded rows,): logits of the targets
    hidden_ptr,  # (N, D)
    weight_ptr,  # (V, D)
    bias_ptr,  # (V,)
    ids_ptr,
    scalars_ptr,  # factors before and after the soft-cap
    n_rows,
    n_cols,
    width,
    padded_rows,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WHOLE_D: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_TILES: tl.constexpr,
):
    dtype = partials_ptr.dtype.element_ty
    col_tiles = tl.cdiv(n_cols, BLOCK_V)
    group = tl.program_id(0) // (GROUP_TILES * col_tiles)
    in_group = tl.program_id(0) % (GROUP_TILES * col_tiles)
    group_tiles = tl.minimum(tl.cdiv(n_rows, BLOCK_N) - group * GROUP_TILES, GROUP_TILES)
    first_row = (group * GROUP_TILES + in_group % group_tiles) * BLOCK_N
    col_tile = in_group // group_tiles
    first_col = col_tile * BLOCK_V

    # Beyond the edge the last row or column is read again: loads without masks are wide.
    row = tl.minimum(tl.arange(0, BLOCK_N), n_rows - 1 - first_row)
    col = tl.minimum(tl.arange(0, BLOCK_V), n_cols - 1 - first_col)
    depth = tl.arange(0, BLOCK_D)
    hidden_tile_ptr = hidden_ptr + offset(first_row, width)
    weight_tile_ptr = weight_ptr + offset(first_col, width)
    acc = tl.zeros((BLOCK_N, BLOCK_V), dtype)
    for start in range(0, width, BLOCK_D):
        x_ptrs = hidden_tile_ptr + start + (row[:, None] * width + depth[None, :])
        w_ptrs = weight_tile_ptr + start + (col[None, :] * width + depth[:, None])
        if WHOLE_D:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=depth[None, :] < width - start, other=0.0)
            w = tl.load(w_ptrs, mask=depth[:, None] < width - start, other=0.0)
        if UPCAST:
            x = x.to(dtype)
            w = w.to(dtype)
        acc = tl.dot(x, w, acc, input_precision="ieee", out_dtype=dtype)

    scale = tl.load(scalars_ptr)
    z = acc * scale
    if HAS_BIAS:
        z += (tl.load(bias_ptr + first_col + col) * scale)[None, :]
    if HAS_SOFTCAP:
        z = tanh(z) * tl.load(scalars_ptr + 1)
    # Few tiles hold a target, and the search for it would keep a second tile in registers.
    target_col = (tl.load(ids_ptr + first_row + row) - first_col).to(tl.int32)
    here = (target_col >= 0) & (target_col < BLOCK_V)
    rows = first_row + tl.arange(0, BLOCK_N)
    if tl.max(here.to(tl.int32), 0) > 0:
        is_target = tl.arange(0, BLOCK_V)[None, :] == target_col[:, None]
        tl.store(targets_ptr + rows, tl.sum(tl.where(is_target, z, 0.0), 1), mask=here)
        z = tl.where(is_target, LOWEST, z)
    if first_col + BLOCK_V > n_cols:
        z = tl.where((tl.arange(0, BLOCK_V) < n_cols - first_col)[None, :], z, LOWEST)
    if HAS_BIAS:  # nothing else can forbid a token with -inf
        z = floored(z)
    m, s, moment = tile_statistics(z, 1, WITH_ENTROPY)
    at = offset(col_tile, padded_rows) + rows
    field = offset(col_tiles, padded_rows)
    tl.store(partials_ptr + at, m)
    tl.store(partials_ptr + field + at, s)
    if WITH_ENTROPY:
        tl.store(partials_ptr + 2 * field + at, moment)


@triton.jit(do_not_specialize=["n_rows", "col_tiles"])
def merge_tiles_kernel(
    out_ptr,  # (2, N): logp, entropy
    partials_ptr,
    targets_ptr,
    n_rows,
    col_tiles,
    padded_rows,
    WITH_ENTROPY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    field = offset(col_tiles, padded_rows)
    target = tl.load(targets_ptr + rows)
    m = floored(target)
    s = tl.zeros((BLOCK_N,), target.dtype)
    moment = s
    for start in range(0, col_tiles, BLOCK_T):
        tiles = start + tl.arange(0, BLOCK_T)
        at = offset(tiles, padded_rows)[:, None] + rows[None, :]
        inside = (tiles < col_tiles)[:, None]
        tile_m = tl.load(partials_ptr + at, mask=inside, other=LOWEST)
        tile_s = tl.load(partials_ptr + field + at, mask=inside, other=0.0)
        tile_moment = tile_s * 0.0
        if WITH_ENTROPY:
            tile_moment = tl.load(partials_ptr + 2 * field + at, mask=inside, other=0.0)
        new_m = tl.maximum(m, tl.max(tile_m, 0), propagate_nan=tl.PropagateNan.ALL)
        s, moment = rebased(m, s, moment, new_m)
        tile_s, tile_moment = rebased(tile_m, tile_s, tile_moment, new_m[None, :])
        m, s, moment = new_m, s + tl.sum(tile_s, 0), moment + tl.sum(tile_moment, 0)
    logp, entropy, m, s = finished_statistics(target, m, s, moment)
    if not WITH_ENTROPY:
        entropy = logp * float("nan")
    tl.store(out_ptr + rows, logp, mask=rows < n_rows)
    tl.store(out_ptr + n_rows + rows, entropy, mask=rows < n_rows)


INTERPRETED = not isinstance(tile_statistics_kernel, triton.JITFunction)
GROUP_ROWS = 2048
"""Rows that share one pass over the weight: 14 MB at D = 3584, a third of an A100's cache."""


def launch_options(
    backend: str, arch: int | str, shared_bytes: int, *, has_bias: bool
) -> dict[str, int]:
    """Tile, warps and stages by GPU ("cuda", 90, bytes of shared memory a program may use).

    An accumulator of 128 x 256 on 8 warps fills half of an NVIDIA thread's registers and leaves the
    epilogue the other half. On sm_100 and sm_103 a thread owns a row of tensor memory, so the tile
    is turned, for fewer columns a thread. Half of the tile is what AMD's 64 KiB of shared memory
    take, and what leaves registers for a bias, but on sm_90, where it spills nothing.
    """
    tensor_memory = backend == "cuda" and 100 <= int(arch) < 120
    block_n, block_v = (256, 128) if tensor_memory else (128, 256)
    if backend == "hip" or (has_bias and arch != 90):
        block_n = block_v = 128
    tiles = {"BLOCK_N": block_n, "BLOCK_V": block_v, "BLOCK_D": 64}
    if backend == "hip":
        stages = 2
    else:
        buffers = min(4, shared_bytes // (2 * 64 * (block_n + block_v)))
        # Without asynchronous tensor cores (wgmma, tcgen05) the last stage is in registers.
        stages = buffers if arch == 90 or tensor_memory else min(4, buffers + 1)
    tiles["GROUP_TILES"] = GROUP_ROWS // block_n
    return {**tiles, "num_warps": 8, "num_stages": stages, **COMPILER_OPTIONS}


def merge_options() -> dict[str, int]:
    return {"BLOCK_N": 32, "BLOCK_T": 32, "num_warps": 4, **COMPILER_OPTIONS}


@functools.cache
def options_on(device: torch.device, *, has_bias: bool) -> dict[str, int]:
    if INTERPRETED:
        return launch_options("cuda", 90, 232448, has_bias=has_bias)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    major, minor = torch.cuda.get_device_capability(device)
    backend, arch = "hip" if torch.version.hip else "cuda", 10 * major + minor
    return launch_options(backend, arch, properties["max_shared_mem"], has_bias=has_bias)


torch.library.define(
    "fgrpo::linear_statistics",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor scalars, *, "
    "bool has_softcap, bool with_entropy) -> Tensor",
)


def launch(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    scalars: Tensor,
    *,
    has_softcap: bool,
    with_entropy: bool,
) -> Tensor:
    (n_rows, width), n_cols = hidden.shape, len(weight)
    out = scalars.new_empty((2, n_rows))
    if n_rows == 0:
        return out
    options = options_on(hidden.device, has_bias=bias is not None)
    row_tiles = triton.cdiv(n_rows, options["BLOCK_N"])
    col_tiles = triton.cdiv(n_cols, options["BLOCK_V"])
    padded_rows = row_tiles * options["BLOCK_N"]
    partials = scalars.new_empty((3 if with_entropy else 2, col_tiles, padded_rows))
    targets = scalars.new_empty(padded_rows)
    tile_statistics_kernel[(row_tiles * col_tiles,)](
        partials,
        targets,
        hidden,
        weight,
        scalars if bias is None else bias,
        ids,
        scalars,
        n_rows,
        n_cols,
        width,
        padded_rows,
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=has_softcap,
        WITH_ENTROPY=with_entropy,
        WHOLE_D=width % options["BLOCK_D"] == 0,
        UPCAST=INTERPRETED,  # where a product of bf16 numbers is wrong
        **options,
    )
    merge = merge_options()
    merge_tiles_kernel[(padded_rows // merge["BLOCK_N"],)](
        out, partials, targets, n_rows, col_tiles, padded_rows, WITH_ENTROPY=with_entropy, **merge
    )
    return out


torch.library.impl("fgrpo::linear_statistics", "CompositeExplicitAutograd", launch)


def _register_flops() -> None:
    operator = torch.ops.fgrpo.linear_statistics

    @register_flop_formula(operator)
    def flops(hidden: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
        return 2 * hidden[0] * weight[0] * weight[1]

    # The first call imports this module, and a counter around that call copied the registry before.
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _FlopCounterMode):
            mode.counter.flop_registry[operator] = flop_registry[operator]


_register_flops()


def linear_statistics(
    hidden_rows: Tensor, head: LinearHead, ids: Tensor, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (n,) of hidden_rows (n, D), in the accumulator's dtype; no gradient.
    Without `with_entropy` the entropy is NaN.
    """
    cap = head.logit_softcap
    factors = (
        [head.inner_scale, 1.0] if cap is None else [head.logit_scale / cap, cap / head.temperature]
    )
    scalars = torch.tensor(factors, dtype=head.dtype)
    out = torch.ops.fgrpo.linear_statistics(
        hidden_rows.detach().to(head.operand_dtype).contiguous(),
        head.weight.detach().to(head.operand_dtype),
        None if head.bias is None else head.bias.detach().to(head.dtype).contiguous(),
        ids.contiguous(),
        scalars.to(hidden_rows.device, non_blocking=True),
        has_softcap=cap is not None,
        with_entropy=with_entropy,
    )
    logps, entropy = out.unbind()
    return logps, entropy


def launch_rows(head: LinearHead, rows: HeadRows) -> int:
    """Rows of one launch, at least one, whose operands and tile statistics fit the chunk budget."""
    width, has_bias = head.weight.shape[1], head.bias is not None
    options = options_on(head.weight.device, has_bias=has_bias)
    col_tiles = triton.cdiv(head.vocab_size, options["BLOCK_V"])
    bytes_per_row = width * head.operand_dtype.itemsize + 3 * col_tiles * head.dtype.itemsize
    return max(1, chunk_budget(head, rows.max_chunk_bytes) // bytes_per_row)


def statistics_of_rows(
    hidden: Tensor, head: LinearHead, rows: HeadRows, part: slice
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the rows in `part`."""
    found = [
        linear_statistics(
            hidden[rows.positions(piece)], head, rows.ids[piece], with_entropy=rows.with_entropy
        )
        for piece in chunks(part.stop - part.start, launch_rows(head, rows), part.start)
    ]
    logps, entropy = (torch.cat(values) for values in zip(*found, strict=True))
    return logps, entropy


def fused_statistics(head: LinearHead) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """`statistics_of_rows` where it is the way to take, else None: a whole head without adapter,
    operands that tensor cores multiply without loss, and rows that begin at 16-byte boundaries.
    Another layout would need a copy of the weight.
    """
    weight = head.weight
    whole = head.lora is None and head.shard is None
    if not (whole and weight.is_contiguous()):
        return None
    narrow = weight.is_cuda and head.operand_dtype != head.dtype
    aligned = weight.shape[1] % 16 == 0 and weight.data_ptr() % 16 == 0
    return statistics_of_rows if INTERPRETED or (narrow and aligned) else None
