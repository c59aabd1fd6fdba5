"""impl="triton" through the public calls: which rows go which way, what it costs, upstream scalars
and invariances. V, D and tiles are small: the kernels are interpreted."""

from dataclasses import replace

import pytest
import torch
from loss_cases import assert_same, gradients, poisoned_memory
from test_imports import run_python
from test_plans import CHUNK, GMPO, ROW_LOCAL, SEQUENCE, VESPO, D, N, V, cost, full_inputs
from torch.utils.flop_counter import FlopCounterMode

from fgrpo_kernels import (
    PolicyLossConfig,
    focal_policy_loss,
    linear_head,
    token_logps,
    triton_linear_stats,
    triton_rows,
)
from fgrpo_kernels.testing import make_inputs

HALF = dict(zero_advantage=0.5)


@pytest.fixture(autouse=True)
def poisoned():
    with poisoned_memory():
        yield


def forbid(monkeypatch, module, name):
    def forbidden(*args, **kwargs):
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(module, name, forbidden)


def recorded(monkeypatch, module, name):
    """The calls of a function, which go on as before."""
    function, calls = getattr(module, name), []

    def call(*args, **kwargs):
        calls.append((args, kwargs))
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, call)
    return calls


def scored(inputs, **options):
    return token_logps(
        inputs.hidden, inputs.lm_head_weight, inputs.completion_ids, impl="triton", **options
    )


def test_scoring_costs_one_product_and_no_logits(monkeypatch):
    for module, name in ((linear_head, "chunk_buffer"), (triton_rows, "row_statistics_kernel")):
        forbid(monkeypatch, module, name)
    inputs = full_inputs()
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            scored(inputs, with_entropy=True)
        assert counter.get_total_flops() == 2 * N * V * D
        for config in (ROW_LOCAL, SEQUENCE):
            assert cost(inputs, config=config, backward=False, impl="triton") == 2


@pytest.mark.parametrize("chunk", [CHUNK, None], ids=["chunks", "one"])
def test_cost_of_the_other_plans(chunk):
    config, sequence = (replace(c, max_chunk_bytes=chunk) for c in (ROW_LOCAL, SEQUENCE))
    assert cost(full_inputs(), config=config, impl="triton") == 6
    assert cost(full_inputs(frozen=True), config=config, impl="triton") == 4
    assert cost(full_inputs(**HALF), config=config, impl="triton") == 2 + 4 / 2
    assert cost(full_inputs(**HALF), config=config, impl="triton", return_logps=False) == 6 / 2
    assert cost(full_inputs(), config=sequence, impl="triton") == (8 if chunk else 6)
    assert cost(full_inputs(frozen=True), config=sequence, impl="triton") == 4


FIRST_CALL = """
import torch
from torch.utils.flop_counter import FlopCounterMode
from fgrpo_kernels import token_logps
with FlopCounterMode(display=False) as counter:
    ids = torch.zeros(3, dtype=torch.int64)
    token_logps(torch.ones(3, 5), torch.ones(7, 5), ids, impl="triton")
print(counter.get_total_flops())
"""


def test_a_counter_around_the_first_call_of_a_process_counts():
    """The formula is registered by an import inside the counter."""
    assert int(run_python(FIRST_CALL)) == 2 * 3 * 7 * 5


def test_rows_without_a_gradient_leave_the_chunks(monkeypatch):
    """Half of the rows are inactive: the chunk holds the others alone, and all values agree."""
    inputs = full_inputs(**HALF)
    shapes = recorded(monkeypatch, linear_head, "chunk_buffer")
    forbid(monkeypatch, triton_rows, "row_statistics")
    out = focal_policy_loss(**inputs.arguments(), config=ROW_LOCAL, impl="triton")
    assert [args[0] for args, _ in shapes] == [(N // 2, V)]
    expected = focal_policy_loss(**inputs.arguments(), config=ROW_LOCAL, impl="reference")
    for field in ("loss", "logps", "entropy", "per_token_loss"):
        torch.testing.assert_close(getattr(out, field), getattr(expected, field))


MIXED = {
    "row-local": ROW_LOCAL,
    "sequence": SEQUENCE,
    "sapo": PolicyLossConfig.sapo(rollout_correction="mask", rollout_max=1.05),
    "dppo": PolicyLossConfig(surrogate="dppo_tv", clip_eps_low=0.02, clip_eps_high=0.02),
    "gmpo": GMPO,
    "vespo": VESPO,
}


@pytest.mark.parametrize("config", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("masked", [False, True])
def test_mixed_rows_equal_the_reference(config, masked):
    inputs = make_inputs(4, 5, 6, 37, group_size=2, zero_advantage=0.5, dtype=torch.float64)
    if not masked:
        inputs = replace(inputs, completion_mask=None)
    config = replace(config, max_chunk_bytes=3 * 37 * 8)
    results = []
    for impl in ("triton", "reference"):
        out = focal_policy_loss(**inputs.arguments(), config=config, impl=impl)
        fields = (out.loss, out.per_token_loss, out.logps, out.entropy)
        results.append((*fields, *gradients(out.loss, inputs).values()))
    for actual, expected in zip(*results, strict=True):
        assert_same("value", actual, expected)


def test_other_layouts_take_the_row_path(monkeypatch):
    """A transposed tied weight is read as it is."""
    inputs = full_inputs()
    expected = scored(inputs, with_entropy=True)
    inputs = replace(inputs, lm_head_weight=inputs.lm_head_weight.detach().t().contiguous().t())
    inputs.hidden.requires_grad_(False)
    forbid(monkeypatch, triton_linear_stats, "linear_statistics")
    for actual, value in zip(scored(inputs, with_entropy=True), expected, strict=True):
        torch.testing.assert_close(actual, value.detach())


def test_entropy_is_computed_where_it_is_wanted(monkeypatch):
    inputs = full_inputs()
    calls = recorded(monkeypatch, triton_linear_stats, "linear_statistics")
    with torch.no_grad():
        scored(inputs)
        scored(inputs, with_entropy=True)
        focal_policy_loss(**inputs.arguments(), impl="triton")  # returns it
    assert [options["with_entropy"] for _, options in calls] == [False, True, True]


def test_launches_keep_to_the_chunk_budget(monkeypatch):
    """A row costs its hidden state and three numbers a tile: (8 + 3) x 4 bytes here."""
    inputs = full_inputs(masked=True)
    mask = inputs.completion_mask
    calls = recorded(monkeypatch, triton_linear_stats, "linear_statistics")
    with torch.no_grad():
        whole = scored(inputs, completion_mask=mask, with_entropy=True)
        parts = scored(
            inputs, completion_mask=mask, with_entropy=True, max_chunk_bytes=5 * (D + 3) * 4
        )
    rows = [len(args[0]) for args, _ in calls]
    assert rows[0] == sum(rows[1:]) == int(mask.sum()) and max(rows[1:]) == 5
    for value, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("config", [ROW_LOCAL, SEQUENCE], ids=["row-local", "sequence"])
def test_upstream_scalars_of_any_value_and_stride(config):
    inputs = make_inputs(2, 3, 4, 11, group_size=2, dtype=torch.float64)
    config = replace(config, max_chunk_bytes=2 * 11 * 8)

    def grads(upstream=None):
        out = focal_policy_loss(**inputs.arguments(), config=config, impl="triton")
        leaves = list(inputs.leaves().values())
        return torch.autograd.grad(out.loss, leaves, upstream)

    expected = grads()
    numbers = torch.tensor([0.0, 1.0, -3.7, 1e-30, 1e30], dtype=torch.float64)
    strided = torch.stack((numbers, numbers * torch.nan), 1)[:, 0]
    for upstream in (*strided, numbers[2:3].expand(3)[1]):
        for grad, value in zip(grads(upstream), expected, strict=True):
            torch.testing.assert_close(grad, upstream * value, rtol=1e-12, atol=0)


def outcome(inputs, config=ROW_LOCAL, **changes):
    inputs = replace(inputs, **changes)
    out = focal_policy_loss(**inputs.arguments(), config=config, impl="triton")
    return out, gradients(out.loss, inputs)


def test_permuting_sequences_permutes_the_result():
    inputs = make_inputs(4, 5, 6, 37, group_size=2, zero_advantage=0.5, dtype=torch.float64)
    out, grads = outcome(inputs)
    order = torch.tensor([2, 0, 3, 1])
    changes = {
        name: value.detach()[order].requires_grad_(value.requires_grad)
        for name, value in inputs.arguments().items()
        if value is not None and name != "lm_head_weight"
    }
    permuted, permuted_grads = outcome(inputs, **changes)
    assert_same("loss", permuted.loss, out.loss)
    for field in ("per_token_loss", "logps", "entropy"):
        assert_same(field, getattr(permuted, field), getattr(out, field)[order])
    assert_same("dhidden", permuted_grads["hidden"], grads["hidden"][order])
    assert_same("dweight", permuted_grads["lm_head_weight"], grads["lm_head_weight"])


@pytest.mark.parametrize(
    "config",
    [PolicyLossConfig(focal_gamma=0.0), PolicyLossConfig(entropy_coef=0.1)],
    ids=["c", "e"],
)
def test_a_common_offset_changes_nothing(config):
    """2^20 on every logit, through the bias: float64 logits of that size are rounded by 2^-33."""
    inputs = make_inputs(4, 5, 6, 37, group_size=2, zero_advantage=0.5, dtype=torch.float64)
    zero = torch.zeros(37, dtype=torch.float64)
    (out, grads), (moved, moved_grads) = (
        outcome(inputs, config, lm_head_bias=zero + shift) for shift in (0.0, 2.0**20)
    )
    for name, actual, expected in (
        ("loss", moved.loss, out.loss),
        ("logps", moved.logps, out.logps),
        ("entropy", moved.entropy, out.entropy),
        *((name, moved_grads[name], grads[name]) for name in grads),
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-8, msg=name)


def test_scaling_states_against_the_weight_changes_nothing():
    """By powers of two, which round nothing: values to the bit, gradients scaled the other way."""
    inputs = make_inputs(4, 5, 6, 37, group_size=2, zero_advantage=0.5, dtype=torch.float64)
    out, grads = outcome(inputs)
    scaled, scaled_grads = outcome(
        inputs,
        hidden=(inputs.hidden.detach() * 4).requires_grad_(),
        lm_head_weight=(inputs.lm_head_weight.detach() / 4).requires_grad_(),
    )
    for field in ("loss", "logps", "entropy"):
        assert torch.equal(getattr(scaled, field), getattr(out, field))
    assert torch.equal(scaled_grads["hidden"] * 4, grads["hidden"])
    assert torch.equal(scaled_grads["lm_head_weight"] / 4, grads["lm_head_weight"])


@pytest.mark.parametrize("factor", [-1.0, 0.25, 8.0])
def test_scaling_advantages_scales_the_gradient(factor):
    inputs = make_inputs(2, 5, 6, 37, group_size=2, zero_advantage=0.0, dtype=torch.float64)
    _, grads = outcome(inputs)
    _, scaled = outcome(inputs, advantages=inputs.advantages * factor)
    for name in grads:
        torch.testing.assert_close(scaled[name], factor * grads[name], rtol=1e-12, atol=1e-14)
