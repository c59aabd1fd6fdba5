"""A LoRA adapter on the head against a dense head of weight W + s B A, and its error messages."""

import contextlib
import itertools
import random
from dataclasses import replace

import pytest
import torch
from loss_cases import OUTER, assert_same, cases, poisoned_memory
from narrow_products import NarrowProducts

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, token_logps
from fgrpo_kernels.testing import assert_error_rule, make_inputs

RANK, SCALE = 2, 0.7
PLANS = {
    "row-local": PolicyLossConfig(kl_coef=0.1),
    "row-local-entropy": PolicyLossConfig(surrogate="cispo", entropy_coef=0.1),
    "not-row-local": PolicyLossConfig.gspo(focal_gamma=0.5, kl_coef=0.1),
    "not-row-local-entropy": PolicyLossConfig.gspo(focal_gamma=0.5, entropy_coef=0.1),
}


@pytest.fixture(autouse=True)
def poisoned():
    with poisoned_memory():
        yield


def adapter(width, vocab, dtype=torch.float64, seed=0, rank=RANK):
    """(A, B, scale) that moves logits by about 1, A and B leaves."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, width, generator=generator, dtype=torch.float64) / width**0.5
    b = torch.randn(vocab, rank, generator=generator, dtype=torch.float64)
    return a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), SCALE


def dense(weight, lora):
    a, b, scale = lora
    return weight + scale * (b @ a)


def compare(inputs, lora, *, impl, rtol=1e-9, **kwargs):
    """Loss, log-probs and the gradient of each leaf against the reference with a dense weight."""
    leaves = inputs.leaves() | {
        name: tensor for name, tensor in zip("AB", lora, strict=False) if tensor.requires_grad
    }
    whole = inputs.arguments() | {"lm_head_weight": dense(inputs.lm_head_weight, lora)}
    expected = focal_policy_loss(**whole, **kwargs, impl="reference")
    actual = focal_policy_loss(**inputs.arguments(), **kwargs, lm_head_lora=lora, impl=impl)
    assert_same("loss", actual.loss, expected.loss, rtol=rtol)
    if actual.logps is not None:
        assert_same("logps", actual.logps, expected.logps, rtol=rtol)
        assert_same("entropy", actual.entropy, expected.entropy, rtol=rtol)
    if not leaves:
        assert not actual.loss.requires_grad
        return actual, {}
    values = torch.autograd.grad(expected.loss, list(leaves.values()), materialize_grads=True)
    grads = dict(zip(leaves, torch.autograd.grad(actual.loss, list(leaves.values())), strict=True))
    for (name, grad), value in zip(grads.items(), values, strict=True):
        assert_same(name, grad, value, rtol=rtol)
    return actual, grads


@pytest.mark.parametrize("impl,step", [("reference", 7), ("torch", 1), ("triton", 7)])
def test_any_objective_equals_the_dense_head(impl, step):
    """A case of each surrogate x level x reduction x KL: entropy, correction, mask, soft-cap, bias,
    temperature, frozen tensors and the rest as `loss_cases` draws them."""
    moved = []
    for number, outer in enumerate(OUTER[::step]):
        case = next(itertools.islice(cases(outer), random.Random(outer).randrange(40), None))
        # so small that the rollout correction finds tokens to keep
        lora = (*adapter(6, 11, seed=number)[:2], 0.02)
        row = 11 * 8
        config = replace(case.config, max_chunk_bytes=(None, 1, 3 * row)[number % 3])
        _, grads = compare(case.inputs, lora, impl=impl, config=config, **case.extra)
        moved.append(all(grads[name].abs().max() > 1e-6 for name in "AB"))
    assert sum(moved) > 0.6 * len(moved)  # a correction may reject every token


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_any_subset_of_tensors_may_be_frozen(plan, impl):
    subsets = list(itertools.product((False, True), repeat=5))
    for number, wanted in enumerate(subsets):
        inputs = make_inputs(2, 5, 6, 11, group_size=2, dtype=torch.float64)
        bias = torch.linspace(-1, 1, 11, dtype=torch.float64)
        inputs = replace(inputs, lm_head_bias=bias)
        lora = adapter(6, 11)
        tensors = (inputs.hidden, inputs.lm_head_weight, bias, *lora[:2])
        for tensor, want in zip(tensors, wanted, strict=True):
            tensor.requires_grad_(want)
        if impl == "triton" and number % 7:
            continue  # the interpreter is slow
        chunk = (None, 2 * 11 * 8)[number % 2]
        config = replace(PLANS[plan], max_chunk_bytes=chunk, logit_softcap=3.0)
        compare(inputs, lora, impl=impl, config=config)


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
@pytest.mark.parametrize("trained", [False, True])
def test_token_logps_with_any_upstream(trained, impl):
    inputs = make_inputs(2, 5, 6, 13, group_size=2, dtype=torch.float64)
    lora = adapter(6, 13)
    for tensor in (inputs.lm_head_weight, *lora[:2]):
        tensor.requires_grad_(trained)
    leaves = [t for t in (inputs.hidden, inputs.lm_head_weight, *lora[:2]) if t.requires_grad]
    upstream = torch.randn(2, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    keywords = dict(
        completion_mask=inputs.completion_mask, logit_softcap=3.0, temperature=0.7,
        with_entropy=True, max_chunk_bytes=3 * 13 * 8,
    )  # fmt: skip
    results = []
    for weight, options in (
        (dense(inputs.lm_head_weight, lora), dict(impl="reference")),
        (inputs.lm_head_weight, dict(impl=impl, lm_head_lora=lora)),
    ):
        logps, entropy = token_logps(
            inputs.hidden, weight, inputs.completion_ids, **keywords, **options
        )
        total = (upstream[0] * logps + upstream[1] * entropy).sum()
        results.append([logps, entropy, *torch.autograd.grad(total, leaves)])
    for expected, actual in zip(*results, strict=True):
        assert_same("value", actual, expected)
    with torch.no_grad():
        logps, _ = token_logps(
            inputs.hidden, inputs.lm_head_weight, inputs.completion_ids,
            completion_mask=inputs.completion_mask, logit_softcap=3.0, temperature=0.7,
            lm_head_lora=lora, impl=impl,
        )  # fmt: skip
    assert_same("without gradient", logps, results[0][0])


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("plan", PLANS)
def test_skipping_masks_and_return_logps(plan, impl):
    inputs = make_inputs(4, 6, 6, 11, zero_advantage=1.0, group_size=2, dtype=torch.float64)
    some = inputs.advantages.clone()
    some[:2] = torch.tensor([1.0, -1.0])
    with torch.no_grad():
        inputs.hidden[~inputs.completion_mask] = torch.nan
    inputs = replace(inputs, advantages=some)
    lora = adapter(6, 11)
    whole = replace(inputs, hidden=inputs.hidden.detach().nan_to_num(0).requires_grad_())
    expected, grads = compare(whole, lora, impl="torch", config=PLANS[plan])
    for skip, return_logps in itertools.product((False, True), repeat=2):
        config = replace(PLANS[plan], skip_inactive=skip, max_chunk_bytes=4 * 11 * 8)
        out = focal_policy_loss(
            **inputs.arguments(), lm_head_lora=lora, config=config, impl=impl,
            return_logps=return_logps,
        )  # fmt: skip
        assert_same("loss", out.loss, expected.loss)
        leaves = (inputs.hidden, inputs.lm_head_weight, *lora[:2])
        actual = torch.autograd.grad(out.loss, leaves)
        for grad, value in zip(actual, grads.values(), strict=True):
            assert_same("gradient", grad, value)


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
@pytest.mark.parametrize("plan", PLANS)
def test_nothing_to_score_gives_zero_gradients(plan, impl):
    inputs = make_inputs(2, 3, 6, 11, group_size=2)
    lora = adapter(6, 11, torch.float32)
    empty = replace(inputs, completion_mask=torch.zeros(2, 3, dtype=torch.bool))
    out = focal_policy_loss(**empty.arguments(), lm_head_lora=lora, config=PLANS[plan], impl=impl)
    out.loss.backward()
    assert out.loss == 0
    for tensor in (inputs.hidden, inputs.lm_head_weight, *lora[:2]):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_packed_input_any_strides_and_a_custom_objective():
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    a, b, scale = adapter(6, 11)
    config = PolicyLossConfig(surrogate="reinforce", focal_gamma=0.5, max_chunk_bytes=300)
    expected, grads = compare(inputs, (a, b, scale), impl="torch", config=config)
    packed = {
        name: value.flatten(0, 1) if value is not None and value.shape[:2] == (4, 5) else value
        for name, value in inputs.arguments().items()
    }
    columns = b.detach().t().contiguous().requires_grad_()  # B read from (r, V) memory
    wide = torch.cat([a.detach(), a.detach()], 1).requires_grad_()
    out = focal_policy_loss(
        **packed,
        cu_seqlens=torch.arange(5) * 5,
        lm_head_lora=[wide[:, :6], columns.t(), scale],
        config=config,
        objective=lambda logps, rows: -rows.advantages * logps,
    )
    out.loss.backward()
    assert_same("loss", out.loss, expected.loss)
    assert_same("dA", wide.grad[:, :6], grads["A"])
    assert_same("dB", columns.grad.t(), grads["B"])


DTYPES = [
    # hidden and weight, A and B
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize("impl", ["torch", "triton", "torch-narrow"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_errors_are_at_most_twice_plain_torchs(dtypes, impl):
    """Plain torch: base(x) + s B(A x) with each layer in its dtype, as PEFT's layer computes it."""
    dtype, lora_dtype = dtypes
    inputs = make_inputs(4, 8, 32, 67, group_size=2, dtype=dtype)
    lora = adapter(32, 67, lora_dtype, rank=4)
    a, b, scale = lora
    config = PolicyLossConfig.dapo(focal_gamma=0.5, max_chunk_bytes=10 * 67 * 4)
    leaves = (inputs.hidden, inputs.lm_head_weight, a, b)

    exact_inputs = inputs.to(torch.float64)
    exact_lora = tuple(t.detach().double().requires_grad_() for t in (a, b)) + (scale,)
    exact_leaves = (exact_inputs.hidden, exact_inputs.lm_head_weight, *exact_lora[:2])
    exact = focal_policy_loss(
        **exact_inputs.arguments(), lm_head_lora=exact_lora, config=config, impl="reference"
    )
    exact_grads = torch.autograd.grad(exact.loss, exact_leaves)

    logits = inputs.hidden @ inputs.lm_head_weight.t()
    low = (inputs.hidden.to(lora_dtype) @ a.t() @ b.t()) * scale
    log_probs = (logits + low).to(logits.dtype).float().log_softmax(-1)
    plain_logps = log_probs.gather(-1, inputs.completion_ids[..., None]).squeeze(-1)
    # the loss's own coefficients, from its exact log-probs
    exact_logps = exact.logps.float().requires_grad_()
    ratio = torch.exp(exact_logps - inputs.old_logps)
    advantages = ((1 - inputs.success_rate) ** 0.5 * inputs.advantages)[:, None]
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    mask = inputs.completion_mask
    (upstream,) = torch.autograd.grad((losses * mask).sum() / mask.sum(), exact_logps)
    plain_grads = torch.autograd.grad(plain_logps, leaves, upstream)

    with NarrowProducts() if impl == "torch-narrow" else contextlib.nullcontext() as narrow:
        out = focal_policy_loss(
            **inputs.arguments(), lm_head_lora=lora, config=config, impl=impl.split("-")[0]
        )
        grads = torch.autograd.grad(out.loss, leaves)
    if narrow is not None and dtype.itemsize == 2:  # a chunk's Z, E W, dW; E B, dB
        assert narrow.count == 5 * -(-int((mask & (advantages != 0)).sum()) // 10)
    assert_error_rule("logps", out.logps, plain_logps.detach() * mask, exact.logps)
    for name, grad, plain, value, leaf in zip(
        ("hidden", "weight", "A", "B"), grads, plain_grads, exact_grads, leaves, strict=True
    ):
        assert grad.dtype == leaf.dtype
        assert_error_rule(name, grad, plain, value)


def test_a_low_rank_update_is_rounded_as_autocast_says():
    """Under autocast both layers' operands are bf16, sums fp32; gradients in the leaves' dtypes."""
    inputs = make_inputs(4, 6, 16, 41, group_size=2)
    lora = adapter(16, 41, torch.float32)
    leaves = (inputs.hidden, inputs.lm_head_weight, *lora[:2])
    rounded = [t.detach().bfloat16().float().requires_grad_() for t in leaves]
    config = PolicyLossConfig.dapo(max_chunk_bytes=7 * 41 * 4)
    given = inputs.arguments() | {"hidden": rounded[0], "lm_head_weight": rounded[1]}
    expected = focal_policy_loss(**given, lm_head_lora=(*rounded[2:], SCALE), config=config)
    values = torch.autograd.grad(expected.loss, rounded)
    for impl in ("reference", "torch", "triton"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = focal_policy_loss(
                **inputs.arguments(), lm_head_lora=lora, config=config, impl=impl
            )
        # float32 rounding of sums in another order; the reference rounds gradients to bf16
        torch.testing.assert_close(out.logps, expected.logps, rtol=1e-5, atol=1e-5)
        rtol, atol = (1e-2, 1e-4) if impl == "reference" else (1e-4, 1e-6)
        for grad, value in zip(torch.autograd.grad(out.loss, leaves), values, strict=True):
            assert grad.dtype == torch.float32
            torch.testing.assert_close(grad, value, rtol=rtol, atol=atol)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_float64_anywhere_makes_all_float64(impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    lora = adapter(6, 11)
    out = focal_policy_loss(**inputs.arguments(), lm_head_lora=lora, impl=impl)
    exact = inputs.to(torch.float64)
    expected = focal_policy_loss(**exact.arguments(), lm_head_lora=lora, impl="reference")
    assert out.loss.dtype == torch.float64
    assert_same("loss", out.loss, expected.loss)
    wide = focal_policy_loss(
        **exact.arguments(), lm_head_lora=(*(t.detach().float() for t in lora[:2]), SCALE)
    )
    assert wide.loss.dtype == torch.float64


def bad_adapters():
    a, b, scale = adapter(6, 11, torch.float32)
    meta = dict(device="meta")
    return {
        "pair": ((a, b), r"\(A, B, scale\), received 2 elements"),
        "tensor": (a, r"\(A, B, scale\), received Tensor"),
        "swapped": ((b, a, scale), r"A of shape \(r, D\).*D = 6.*received \(11, 2\)"),
        "rank-0": ((a[:0], b[:, :0], scale), r"r >= 1.*received \(0, 6\)"),
        "A-1d": ((a[0], b, scale), r"A of shape.*received \(6,\)"),
        "A-list": (([[0.0]], b, scale), "A of shape.*received list"),
        "B-transposed": ((a, b.t(), scale), r"B: expected shape \(11, 2\), received \(2, 11\)"),
        "other-rank": ((a, b[:, :1], scale), r"B: expected shape \(11, 2\), received \(11, 1\)"),
        "B-none": ((a, None, scale), "B: expected a tensor, received NoneType"),
        "A-int": ((torch.ones(2, 6, dtype=torch.int64), b, scale), "A: expected float.*int64"),
        "B-complex": ((a, b.to(torch.complex64), scale), "B: expected float.*complex64"),
        "A-device": ((torch.ones(2, 6, **meta), b, scale), "A: expected device cpu.*meta"),
        "B-device": ((a, torch.ones(11, 2, **meta), scale), "B: expected device cpu.*meta"),
        "scale-tensor": ((a, b, torch.tensor(1.0)), "finite number as scale, received tensor"),
        "scale-nan": ((a, b, float("nan")), "finite number as scale, received nan"),
        "scale-bool": ((a, b, True), "finite number as scale, received True"),
    }


@pytest.mark.parametrize("case", bad_adapters())
def test_bad_adapters_are_named(case):
    lora, message = bad_adapters()[case]
    inputs = make_inputs(2, 3, 6, 11, group_size=2)
    with pytest.raises(ValueError, match="lm_head_lora.*" + message):
        focal_policy_loss(**inputs.arguments(), lm_head_lora=lora)
    with pytest.raises(ValueError, match="lm_head_lora.*" + message):
        token_logps(inputs.hidden, inputs.lm_head_weight, inputs.completion_ids, lm_head_lora=lora)


def test_what_does_not_go_with_an_adapter_is_named():
    inputs = make_inputs(2, 3, 6, 11, group_size=2)
    lora = adapter(6, 11, torch.float32)
    with pytest.raises(ValueError, match="grad_tol > 0.*lm_head_lora; use grad_tol=0"):
        focal_policy_loss(
            **inputs.arguments(), lm_head_lora=lora, config=PolicyLossConfig(grad_tol=1e-3)
        )
    with pytest.raises(ValueError, match="tp_group: not with lm_head_lora"):
        focal_policy_loss(**inputs.arguments(), lm_head_lora=lora, tp_group=object())
    with pytest.raises(ValueError, match="tp_group: not with lm_head_lora"):
        token_logps(
            inputs.hidden, inputs.lm_head_weight, inputs.completion_ids, lm_head_lora=lora,
            tp_group=object(),
        )  # fmt: skip
