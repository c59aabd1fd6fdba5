"""Sparse backward: the true gradient error is under the reported bound, exact where it says so."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, sparse_backward
from fgrpo_kernels.sparse_backward import dense_to_front, find_support, weighted_sums
from fgrpo_kernels.testing import lm_like_inputs

VOCAB = 4096  # at most 128 tokens kept
MIXES = {
    "peaked": {"confident_share": 1.0},
    "mixed": {"confident_share": 0.6, "mean_entropy": 0.5},
    "flat": {"confident_share": 0.0, "mean_entropy": 7.0},
}
HEADS = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "scaled": {"logit_scale": 1.8, "temperature": 1.4},
    "capped": {"logit_softcap": 60.0, "temperature": 0.8},
}


def problem(mix="mixed", vocab=VOCAB, dtype=torch.float64, **kwargs):
    inputs = lm_like_inputs(
        4, 24, 32, vocab, zero_advantage=0, dtype=torch.float64, **MIXES[mix], **kwargs
    )
    return replace(inputs, ref_logps=None, rollout_logps=None).to(dtype)


def negative_log_likelihood(logps, rows):
    """c_t = -advantage_t / valid tokens, and no token is clipped."""
    return -rows.advantages * logps


def run(inputs, grad_tol, head=None, objective=negative_log_likelihood, **config):
    for leaf in inputs.leaves().values():
        leaf.grad = None
    config = PolicyLossConfig(focal_gamma=0.0, grad_tol=grad_tol, **(head or {}), **config)
    out = focal_policy_loss(**inputs.arguments(), config=config, objective=objective)
    out.loss.backward()
    return out, {name: leaf.grad.double() for name, leaf in inputs.leaves().items()}


def bounds(inputs, out, head):
    """The two right-hand sides of `metrics.batch_metrics`, and what a row of |c| = 1 may lose."""
    slope = head.get("logit_scale", 1.0) / head.get("temperature", 1.0)
    dropped, _ = out.metric_sums["grad_error_bound"]
    hidden = inputs.hidden.detach().double()[inputs.completion_mask]
    longest_token = inputs.lm_head_weight.detach().double().norm(dim=1).max()
    longest_state = hidden.norm(dim=1).max()
    return slope * dropped * longest_token, slope * dropped * longest_state, slope * longest_token


@pytest.mark.parametrize("grad_tol", [1e-4, 1e-2])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("mix", MIXES)
def test_the_true_error_is_under_the_bound(mix, head, grad_tol):
    inputs = problem(mix)
    out, grads = run(inputs, grad_tol, HEADS[head])
    exact_out, exact = run(inputs, 0.0, HEADS[head])
    assert torch.equal(out.loss, exact_out.loss)

    hidden_bound, weight_bound, per_row = bounds(inputs, out, HEADS[head])
    # float64 rounding of sums in another order; where nothing is dropped the bound is 0
    rounding = 1e-15
    errors = (grads["hidden"] - exact["hidden"]).norm(dim=-1)
    assert errors.sum() <= hidden_bound + rounding
    assert (grads["lm_head_weight"] - exact["lm_head_weight"]).norm() <= weight_bound + rounding

    coefficients = (inputs.advantages[:, None] / inputs.completion_mask.sum()).abs()
    assert (errors <= coefficients * grad_tol * per_row + rounding).all()
    fraction = out.metrics["sparse_row_fraction"]
    if mix == "flat":
        assert fraction < 0.2 and (head != "plain" or fraction == 0)
    else:
        assert fraction > 0.5 and errors.sum() > 1e-12  # something was dropped, so this can fail
    assert 0 <= out.metrics["grad_error_bound"] <= grad_tol
    assert exact_out.metrics["sparse_row_fraction"] == exact_out.metrics["grad_error_bound"] == 0


def test_the_bound_is_near_what_was_dropped():
    """u counts a kept token as theta = 32 tol / V, so it exceeds the dropped mass by the share of
    tol that |S| is of V / 32."""
    e = torch.rand(50, VOCAB, dtype=torch.float64) ** 40
    ids = torch.arange(50)
    e[ids, ids] = 0
    total = e.sum(1) + 5e4
    support = find_support(e, total, ids, torch.ones(50, dtype=torch.bool), 1e-2)
    kept = torch.zeros(e.shape, dtype=torch.bool)
    kept[support.rows, support.columns] = True
    assert len(support.rows) == kept.sum()  # none twice
    theta = 1e-2 * 32 / VOCAB
    assert torch.equal(kept, (e > theta * total[:, None]) | (torch.arange(VOCAB) == ids[:, None]))
    outside = (e * ~kept).sum(1) / total
    expected = outside + theta * (kept.sum(1) - 1)
    torch.testing.assert_close(support.dropped, expected, rtol=1e-12, atol=0)
    assert support.sparse.all() and (kept.sum(1) <= VOCAB / 32 + 1).all()


def test_the_lower_bound_on_any_support():
    """No set of fewer than (u - tol) / theta tokens leaves out tol or less: rows that stay dense
    because of u would have needed that many."""
    tol = 1e-2
    p = torch.cat([torch.rand(20, 500).double() ** power for power in (1, 8, 40)])
    p /= p.sum(1, keepdim=True)
    theta = tol * 32 / 500
    u = p.clamp(max=theta).sum(1)
    outside = 1 - p.sort(1, descending=True).values.cumsum(1)
    smallest = (outside > tol).sum(1) + 1
    assert (smallest >= (u - tol) / theta).all() and (u > tol).any()


def test_flat_rows_keep_the_bits_of_the_exact_gradient():
    inputs = problem("flat", dtype=torch.float32)
    out, grads = run(inputs, 1e-3, max_chunk_bytes=40 * 4 * VOCAB)
    _, exact = run(inputs, 0.0, max_chunk_bytes=40 * 4 * VOCAB)
    assert out.metrics["sparse_row_fraction"] == 0
    assert all(torch.equal(grads[name], exact[name]) for name in exact)


def test_the_same_inputs_give_the_same_bits():
    inputs = problem(dtype=torch.float32)
    _, first = run(inputs, 1e-3)
    run(problem("peaked", dtype=torch.float32), 1e-2)
    _, second = run(inputs, 1e-3)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("vocab", [4096, 4099, 50])  # 64 layers; a prime: one layer; |S| <= 1
def test_chunks_and_gather_blocks_do_not_matter(vocab, monkeypatch):
    inputs = problem(vocab=vocab)
    _, whole = run(inputs, 1e-3)
    monkeypatch.setattr(sparse_backward, "UPCAST_BLOCK_BYTES", 8 * 32 * 7)  # seven entries
    _, pieces = run(inputs, 1e-3, max_chunk_bytes=10 * 8 * vocab)
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types(dtype):
    """The exact path is the same computation but for what is dropped, so the two differ by the
    bound, fp32 rounding (1e-6 of the gradient) and, in narrow types, the last cast of each: one
    eps."""
    inputs = problem(dtype=dtype)
    out, grads = run(inputs, 1e-2)
    _, exact = run(inputs, 0.0)
    hidden_bound, weight_bound, _ = bounds(inputs, out, {})
    eps = max(1e-6, torch.finfo(dtype).eps if dtype != torch.float32 else 0)
    errors = {name: grads[name] - exact[name] for name in grads}
    norms = exact["hidden"].norm(dim=-1).sum(), exact["lm_head_weight"].norm()
    # fp16: gradients below its smallest number
    floors = [torch.finfo(dtype).smallest_normal * grads[n].numel() ** 0.5 for n in grads]
    slack = [eps * norm + floor for norm, floor in zip(norms, floors, strict=True)]
    assert errors["hidden"].norm(dim=-1).sum() <= hidden_bound + slack[0]
    assert errors["lm_head_weight"].norm() <= weight_bound + slack[1]


@pytest.mark.parametrize("trained", ["hidden", "lm_head_weight", "lm_head_bias"])
def test_each_gradient_alone_equals_the_one_among_all(trained):
    inputs = problem()
    bias = torch.linspace(-0.5, 0.5, VOCAB, dtype=torch.float64, requires_grad=True)
    inputs = replace(inputs, lm_head_bias=bias)
    out, everything = run(inputs, 1e-2)
    _, exact = run(inputs, 0.0)
    # ||d(dL/db)|| <= sum |c| k t: the bound of the weight for hidden states of length 1
    dropped, _ = out.metric_sums["grad_error_bound"]
    assert 1e-12 < (everything["lm_head_bias"] - exact["lm_head_bias"]).norm() <= dropped
    values = {
        name: value.detach().requires_grad_(name == trained)
        for name, value in inputs.leaves().items()
    }
    _, alone = run(replace(inputs, **values), 1e-2)
    assert list(alone) == [trained]
    torch.testing.assert_close(alone[trained], everything[trained], rtol=1e-12, atol=1e-18)


def test_clipped_rows_cost_nothing():
    inputs = replace(problem("flat"), old_logps=torch.full((4, 24), -30.0, dtype=torch.float64))
    inputs = replace(inputs, advantages=inputs.advantages.abs())  # every ratio is over the clip
    out, grads = run(inputs, 1e-3, objective=None)
    assert out.metrics["sparse_row_fraction"] == 1
    assert out.metrics["grad_error_bound"] == 0
    assert all((grad == 0).all() for grad in grads.values())


def test_rows_without_gradient_leave_the_metrics_at_zero():
    inputs = replace(problem(), completion_mask=torch.zeros(4, 24, dtype=torch.bool))
    out, _ = run(inputs, 1e-3)
    assert out.metrics["sparse_row_fraction"] == out.metrics["grad_error_bound"] == 0
    with torch.no_grad():
        config = PolicyLossConfig(grad_tol=1e-3)
        out = focal_policy_loss(**problem().arguments(), config=config)
    assert out.metrics["sparse_row_fraction"] == out.metrics["grad_error_bound"] == 0


def test_metric_sums_of_micro_batches_add_up():
    inputs = problem()
    whole, _ = run(inputs, 1e-2)
    tokens = inputs.completion_mask.sum()
    parts = []
    for part in (slice(0, 1), slice(1, 4)):
        values = {
            name: value if name == "lm_head_weight" else value[part]
            for name, value in inputs.arguments().items()
            if value is not None
        }
        config = PolicyLossConfig(focal_gamma=0.0, grad_tol=1e-2)
        parts.append(
            focal_policy_loss(
                **values,
                config=config,
                objective=negative_log_likelihood,
                global_valid_tokens=tokens,
            ).metric_sums
        )
    for name in ("sparse_row_fraction", "grad_error_bound"):
        for side in (0, 1):
            total = parts[0][name][side] + parts[1][name][side]
            torch.testing.assert_close(total, whole.metric_sums[name][side], rtol=1e-12, atol=0)


def test_a_nan_at_a_scored_position_is_not_dropped():
    inputs = problem()
    with torch.no_grad():
        inputs.hidden[0, 0, 0] = torch.nan
    out, grads = run(inputs, 1e-2)
    assert out.loss.isnan()
    assert grads["hidden"][0, 0].isnan().all() and grads["lm_head_weight"].isnan().any()
    assert grads["hidden"][1].isfinite().all()


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_other_implementations_are_refused(impl):
    inputs = problem(dtype=torch.float32)
    with pytest.raises(ValueError, match=f"grad_tol > 0 .*impl='torch' on CPU, .*impl='{impl}'"):
        focal_policy_loss(**inputs.arguments(), config=PolicyLossConfig(grad_tol=1e-3), impl=impl)


def test_calls_that_are_not_row_local_are_refused():
    inputs = problem(dtype=torch.float32)
    with pytest.raises(ValueError, match="grad_tol > 0 .*row-local"):
        focal_policy_loss(**inputs.arguments(), config=PolicyLossConfig.gspo(grad_tol=1e-3))

    def of_all_rows(logps, rows):
        return logps

    of_all_rows.row_local = False
    with pytest.raises(ValueError, match="grad_tol > 0 .*row-local"):
        focal_policy_loss(
            **inputs.arguments(), config=PolicyLossConfig(grad_tol=1e-3), objective=of_all_rows
        )


@given(st.lists(st.booleans(), max_size=12))
def test_dense_rows_come_first(sparse):
    sparse = torch.tensor(sparse, dtype=torch.bool)
    e = torch.arange(len(sparse) * 3.0).view(-1, 3)
    moved = e.clone()
    order = dense_to_front(moved, sparse)
    assert sorted(order.tolist()) == (~sparse).nonzero().flatten().tolist()
    assert torch.equal(moved[: len(order)], e[order])
    assert (moved != e).any(1).sum() <= min(sparse.sum(), (~sparse).sum())


@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 2**31))
def test_weighted_sums(entries, keys, seed):
    generator = torch.Generator().manual_seed(seed)
    key = torch.randint(keys, (entries,), generator=generator)
    index = torch.randint(7, (entries,), generator=generator)
    weights = torch.randn(entries, generator=generator, dtype=torch.float64)
    table = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    expected = torch.zeros(keys, 3, dtype=torch.float64)
    expected.index_add_(0, key, weights[:, None] * table[index])
    actual = torch.zeros_like(expected)
    for some, sums in weighted_sums(key, index, weights, lambda i: (table, i)):
        assert (actual[some] == 0).all()  # no key twice
        actual[some] = sums
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
