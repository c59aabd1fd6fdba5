"""The fused log-probs (interpreted without a GPU) against float64: values, tails, layouts, dtypes.

Where several tiles are wanted the tile is made small. Memory is poisoned: what a kernel leaves
unwritten is NaN.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from loss_cases import assert_same, poisoned_memory
from test_plans import LargestTensor
from test_token_logps import HEADS, full_logps
from test_triton_rows import hard_logits

from fgrpo_kernels import triton_linear_stats, triton_rows
from fgrpo_kernels.head import LinearHead
from fgrpo_kernels.primitives import offset
from fgrpo_kernels.testing import assert_error_rule
from fgrpo_kernels.triton_linear_stats import linear_statistics

INF, NAN = torch.inf, torch.nan
TILE, ROW_TILE = 16, 32  # what merges the tiles takes 32 rows at a time


@pytest.fixture(autouse=True)
def poisoned():
    with poisoned_memory():
        yield


@pytest.fixture
def small_tiles(monkeypatch):
    """Groups of two row tiles, so that a last group may hold one."""
    options = {"BLOCK_N": ROW_TILE, "BLOCK_V": TILE, "BLOCK_D": TILE, "GROUP_TILES": 2}
    monkeypatch.setattr(triton_linear_stats, "options_on", lambda device, has_bias: options)


def operands(rows, vocab, width, *, bias=False, dtype=torch.float64, seed=0):
    """Logits of standard deviation 2; ids that visit the first and the last token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(rows, width), normal(vocab, width) * (2 / width**0.5)
    ids = torch.randint(vocab, (rows,), generator=generator)
    ids[0], ids[-1] = 0, vocab - 1
    return hidden.to(dtype), weight.to(dtype), normal(vocab).to(dtype) if bias else None, ids


def assert_exact(hidden, weight, bias, ids, **constants):
    """Equal to full logits, float64 rounding apart."""
    head = LinearHead(weight, bias, weight.dtype, **constants)
    values = linear_statistics(hidden, head, ids, with_entropy=True)
    expected = full_logps(hidden, weight, ids, bias=bias, **constants)
    for name, value, truth in zip(("logps", "entropy"), values, expected, strict=True):
        assert_same(name, value, truth)
    return values


@pytest.mark.parametrize("vocab", [1, 2, 13, 15, 16, 17, 31, 32, 33, 3 * TILE + 5])
def test_vocabularies_around_a_tile(vocab, small_tiles):
    for bias, constants in itertools.product((False, True), HEADS.values()):
        assert_exact(*operands(5, vocab, 6, bias=bias), **constants)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 32, 41])
def test_widths_around_a_tile(width, small_tiles):
    assert_exact(*operands(5, 37, width))


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 65, 5 * ROW_TILE + 1])
def test_rows_around_a_tile_and_a_group(rows, small_tiles):
    assert_exact(*operands(rows, 37, 6))


@pytest.mark.parametrize("vocab", [255, 256, 257, 1009, 3 * 256 + 81])
def test_the_launchers_own_tiles(vocab):
    """128 rows, 256 columns, 64 deep; 1009 is prime, 81 the tail of GPT-2's 50257."""
    assert_exact(*operands(131, vocab, 70))


def test_no_rows():
    hidden, weight, _, ids = operands(3, 7, 4)
    head = LinearHead(weight, None, weight.dtype)
    for values in linear_statistics(hidden[:0], head, ids[:0], with_entropy=True):
        assert values.shape == (0,)


@pytest.mark.parametrize("name", hard_logits())
def test_hard_logits(name, small_tiles, monkeypatch):
    """The row kernels' rows by an identity weight in float32; what is forbidden, by the bias."""
    values, target = hard_logits()[name]
    forbidden = values == -INF
    hidden = values.masked_fill(forbidden, 0.0).repeat(3, 1)
    bias = torch.zeros(21).masked_fill(forbidden, -INF)
    head = LinearHead(torch.eye(21), bias, torch.float32)
    logps, entropy = linear_statistics(hidden, head, torch.tensor([target] * 3), with_entropy=True)
    exact = values.double().log_softmax(0)
    truth = -(exact.exp() * exact.masked_fill(forbidden, 0)).sum()
    # the bounds of the row kernels: a few float32 roundings of the result and of sums below 21
    for value, expected in ((logps, exact[target]), (entropy, truth)):
        atol = 1e-6 if expected.isfinite() else 0
        torch.testing.assert_close(value.double(), expected.expand(3), rtol=5e-7, atol=atol)


@pytest.mark.parametrize("gap", [1.0, 10.0, 30.0, 80.0, 150.0, 1000.0])
@pytest.mark.parametrize("other", [1, TILE + 1], ids=["same tile", "another tile"])
def test_confident_and_hopeless_tokens_keep_their_digits(gap, other, small_tiles):
    """Two tokens `gap` apart, the rest impossible: -log1p(e^-gap), and gap more for the other."""
    bias = torch.full((20,), -INF)
    bias[0], bias[other] = gap, 0.0
    head = LinearHead(torch.zeros(20, 4), bias, torch.float32)
    logps, _ = linear_statistics(
        torch.zeros(2, 4), head, torch.tensor([0, other]), with_entropy=False
    )
    small = torch.log1p(torch.exp(torch.tensor(-gap, dtype=torch.float64)))
    # some float32 roundings; below e^-87 a float32 sum is subnormal or 0
    torch.testing.assert_close(-logps[0].double(), small, rtol=1e-6, atol=1e-37)
    torch.testing.assert_close(-logps[1].double(), gap + small, rtol=1e-6, atol=0)


def test_a_row_without_a_possible_token_is_nan(small_tiles):
    hidden, weight, _, ids = operands(2, 21, 4)
    bias = torch.full((21,), -INF, dtype=torch.float64)
    logps, entropy = linear_statistics(
        hidden, LinearHead(weight, bias, weight.dtype), ids, with_entropy=True
    )
    assert logps.isnan().all() and entropy.isnan().all()


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("row", [0, 7, 17])
def test_a_bad_hidden_state_spoils_its_row_alone(row, bad, small_tiles):
    hidden, weight, _, ids = operands(18, 37, 6)
    hidden[row, 2] = bad
    head = LinearHead(weight, None, weight.dtype)
    logps, entropy = linear_statistics(hidden, head, ids, with_entropy=True)
    others = torch.arange(18) != row
    assert logps[row].isnan() and entropy[row].isnan()
    assert logps[others].isfinite().all() and entropy[others].isfinite().all()


@pytest.mark.parametrize("token", [3, 36])
def test_a_bad_weight_spoils_every_row(token, small_tiles):
    hidden, weight, _, ids = operands(5, 37, 6)
    weight[token] = NAN
    ids[1] = token
    logps, _ = linear_statistics(
        hidden, LinearHead(weight, None, weight.dtype), ids, with_entropy=False
    )
    assert logps.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_log_probs_come_from_float32_accumulators(dtype, bias):
    """By the error rule against a float32 product of the same operands: a rounding to bf16 on the
    way would be 2^16 times too much. (Float64 is the other tests' dtype.)"""
    hidden, weight, bias, ids = operands(40, 301, 70, bias=bias, dtype=dtype)
    constants = dict(temperature=0.7, logit_softcap=9.0)
    head = LinearHead(weight, bias, dtype, **constants)
    values = linear_statistics(hidden, head, ids, with_entropy=True)

    def full(to):
        wide_bias = None if bias is None else bias.to(to)
        return full_logps(hidden.to(to), weight.to(to), ids, bias=wide_bias, **constants)

    for name, value, plain, exact in zip(
        ("logps", "entropy"), values, full(torch.float32), full(torch.float64), strict=True
    ):
        assert value.dtype == torch.float32
        assert_error_rule(name, value, plain, exact)


def test_hidden_states_are_rounded_to_the_operands_dtype():
    """As the row path does under autocast: float32 states, bf16 products."""
    hidden, weight, _, ids = operands(5, 37, 8, dtype=torch.float32)
    head = LinearHead(weight, None, torch.bfloat16)
    rounded = LinearHead(weight.bfloat16(), None, torch.bfloat16)
    actual = linear_statistics(hidden, head, ids, with_entropy=False)[0]
    assert torch.equal(
        actual, linear_statistics(hidden.bfloat16(), rounded, ids, with_entropy=False)[0]
    )


def test_invariances(small_tiles):
    hidden, weight, bias, ids = operands(70, 53, 6, bias=True)
    logps, entropy = assert_exact(hidden, weight, bias, ids)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    permuted = assert_exact(hidden[order], weight, bias, ids[order])
    assert_same("permuted logps", permuted[0], logps[order])
    assert_same("permuted entropy", permuted[1], entropy[order])
    # powers of two change no rounding
    for scaled in (
        assert_exact(4 * hidden, weight / 4, bias, ids),
        assert_exact(hidden, weight / 4, bias / 4, ids, logit_scale=4.0),
        assert_exact(hidden, weight / 4, bias / 4, ids, temperature=0.25),
    ):
        assert torch.equal(scaled[0], logps) and torch.equal(scaled[1], entropy)
    shifted = linear_statistics(
        hidden, LinearHead(weight, bias + 2.0**10, weight.dtype), ids, with_entropy=True
    )
    # logits of 1024 carry 2^10 times the rounding of logits of 1
    for value, truth in zip(shifted, (logps, entropy), strict=True):
        torch.testing.assert_close(value, truth, rtol=0, atol=1e-12)


def test_strides(small_tiles):
    hidden, weight, bias, ids = operands(18, 37, 6, bias=True)
    expected = assert_exact(hidden, weight, bias, ids)
    head = LinearHead(weight, bias.repeat_interleave(2)[::2], weight.dtype)
    for view in (hidden.t().contiguous().t(), torch.cat((hidden, hidden), 1)[:, :6]):
        actual = linear_statistics(view, head, ids.repeat_interleave(3)[::3], with_entropy=True)
        for value, truth in zip(actual, expected, strict=True):
            assert torch.equal(value, truth)


def test_without_entropy_it_is_nan_and_the_log_probs_are_the_same(small_tiles):
    hidden, weight, _, ids = operands(18, 37, 6)
    head = LinearHead(weight, None, weight.dtype)
    logps, entropy = linear_statistics(hidden, head, ids, with_entropy=False)
    assert entropy.isnan().all()
    assert torch.equal(logps, linear_statistics(hidden, head, ids, with_entropy=True)[0])


def weight_on_gpu(**changes):
    facts = dict(is_cuda=True, shape=(21, 32), contiguous=True, address=4096) | changes
    return SimpleNamespace(
        is_cuda=facts["is_cuda"],
        shape=facts["shape"],
        is_contiguous=lambda: facts["contiguous"],
        data_ptr=lambda: facts["address"],
    )


def test_the_way_is_taken_where_tensor_cores_multiply_without_loss(monkeypatch):
    monkeypatch.setattr(triton_linear_stats, "INTERPRETED", False)
    fused = triton_linear_stats.fused_statistics
    for dtype in (torch.bfloat16, torch.float16):
        assert fused(LinearHead(weight_on_gpu(), None, dtype)) is not None
    for dtype in (torch.float32, torch.float64):
        assert fused(LinearHead(weight_on_gpu(), None, dtype)) is None
    for change in (
        {"is_cuda": False},
        {"contiguous": False},  # a transposed tied weight: no copy of half a gigabyte
        {"shape": (21, 24)},
        {"address": 4104},
    ):
        head = LinearHead(weight_on_gpu(**change), None, torch.bfloat16)
        assert fused(head) is None, change


@triton.jit
def offset_kernel(out_ptr, rows_ptr, stride):
    pid = tl.program_id(0)
    tl.store(out_ptr + pid, offset(tl.load(rows_ptr + pid), stride))


def test_offsets_are_64_bits_wide():
    """Row and stride are 32 bits each; the kernels form every long offset by this function."""
    rows = torch.tensor([0, 1, 14134, 14135, 2**31 - 1], dtype=torch.int32)
    stride = 151936  # 14135 rows of it pass 2^31
    out = torch.empty(5, dtype=torch.int64)
    offset_kernel[(5,)](out, rows, stride)
    assert out.tolist() == [row * stride for row in rows.tolist()]
    assert out[3] > 2**31


def test_rows_beyond_two_billion_elements(monkeypatch):
    """The row kernels themselves on rows 2^30 elements apart; the memory between is never touched,
    so it is only promised."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    monkeypatch.setattr(
        triton_rows, "launch_options", lambda vocab_size: {"BLOCK_V": 16, "num_warps": 4}
    )
    values = torch.linspace(-2, 2, 13).repeat(3, 1) + torch.arange(3.0)[:, None]
    far = torch.empty(2**31 + 64).as_strided((3, 13), (2**30 + 8, 1))
    far.copy_(values)
    head, ids = LinearHead(torch.zeros(13, 1), None, torch.float32), torch.tensor([1, 5, 12])
    c = torch.tensor([1.0, -0.5, 2.0])
    results = []
    for logits in (values, far):
        stats = triton_rows.row_statistics(logits, ids, head, keep_logits=True)
        g = triton_rows.row_gradient(logits, stats, c, None, head, logits)
        results.append((stats.logps, stats.entropy, g, logits.clone()))
    for near_value, far_value in zip(*results, strict=True):
        assert torch.equal(near_value, far_value)


class NoKernel:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def test_the_tile_statistics_are_all_that_is_stored(small_tiles, monkeypatch):
    """3 numbers a row and tile: no tensor of rows x vocabulary. Without the kernels, for which the
    interpreter copies memory."""
    for kernel in ("tile_statistics_kernel", "merge_tiles_kernel"):
        monkeypatch.setattr(triton_linear_stats, kernel, NoKernel())
    hidden, weight, _, ids = operands(64, 160, 4)
    with LargestTensor() as largest:
        triton_linear_stats.launch(
            hidden, weight, None, ids, torch.ones(2).double(), has_softcap=False, with_entropy=True
        )
    assert largest.elements == 3 * 64 * (160 // TILE)
