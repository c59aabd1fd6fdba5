"""token_logps against log_softmax of the full logits in float64, values and gradients."""

import itertools

import pytest
import torch
from loss_cases import assert_same, poisoned_memory

from fgrpo_kernels import token_logps
from fgrpo_kernels.testing import assert_error_rule, make_inputs

IMPLS = ["reference", "torch"]
WITH_TRITON = [*IMPLS, "triton"]
"""Interpreted: for few rows and tests."""


@pytest.fixture(autouse=True)
def poisoned():
    with poisoned_memory():
        yield


HEADS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "scale": {"logit_scale": 0.25, "temperature": 0.8},
    "softcap": {"logit_softcap": 2.0, "temperature": 0.8},
    "softcap-scale": {"logit_softcap": 3.0, "logit_scale": 1.7},
}


def full_logps(
    hidden, weight, ids, *, bias=None, temperature=1.0, logit_scale=1.0, logit_softcap=None
):
    """The same numbers from full logits, with -inf logits allowed."""
    logits = hidden @ weight.T
    if logits.dtype != torch.float64:
        logits = logits.float()
    logits = (logits if bias is None else logits + bias) * logit_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    log_probs = (logits / temperature).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0)).sum(-1)
    return log_probs.gather(-1, ids[..., None]).squeeze(-1), entropy


def head_inputs(seed=0, **kwargs):
    inputs = make_inputs(4, 5, 6, 13, group_size=2, dtype=torch.float64, seed=seed, **kwargs)
    bias = torch.linspace(-1, 1, 13, dtype=torch.float64).requires_grad_()
    return inputs.hidden, inputs.lm_head_weight, bias, inputs.completion_ids, inputs.completion_mask


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_for_any_upstream(head, with_bias, impl):
    hidden, weight, bias, ids, mask = head_inputs()
    bias = bias if with_bias else None
    expected_logps, expected_entropy = full_logps(hidden, weight, ids, bias=bias, **head)
    upstream = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    for mask_, chunk_bytes in itertools.product((None, mask), (None, 1, 3 * 13 * 8)):
        keep = torch.ones_like(mask) if mask_ is None else mask_
        logps, entropy = token_logps(
            hidden, weight, ids, completion_mask=mask_, lm_head_bias=bias, **head,
            with_entropy=True, impl=impl, max_chunk_bytes=chunk_bytes,
        )  # fmt: skip
        assert_same("logps", logps, torch.where(keep, expected_logps, 0))
        assert_same("entropy", entropy, torch.where(keep, expected_entropy, 0))
        leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
        grads = torch.autograd.grad((upstream[0] * logps + upstream[1] * entropy).sum(), leaves)
        expected = torch.autograd.grad(
            ((upstream[0] * expected_logps + upstream[1] * expected_entropy) * keep).sum(),
            leaves,
            retain_graph=True,
        )
        for name, grad, value in zip(("hidden", "weight", "bias"), grads, expected, strict=False):
            assert_same(name, grad, value)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("upstream", ["logps", "entropy", "both"])
@pytest.mark.parametrize(
    "wanted", [w for w in itertools.product((0, 1), repeat=3) if any(w)], ids=str
)
def test_gradients_of_only_some_inputs(wanted, upstream, impl):
    hidden, weight, bias, ids, mask = head_inputs(seed=1)
    tensors = [
        tensor.detach().requires_grad_(bool(want))
        for tensor, want in zip((hidden, weight, bias), wanted, strict=True)
    ]
    leaves = [t for t in tensors if t.requires_grad]
    results = []
    for function in (token_logps, full_logps):
        if function is token_logps:
            options = dict(lm_head_bias=tensors[2], with_entropy=True, impl=impl)
            options |= dict(max_chunk_bytes=4 * 13 * 8)
        else:
            options = dict(bias=tensors[2])
        logps, entropy = function(tensors[0], tensors[1], ids, **options)
        loss = {"logps": logps.square(), "entropy": entropy, "both": logps * entropy}[upstream]
        results.append(torch.autograd.grad(loss.sum(), leaves))
    for grad, value in zip(*results, strict=True):
        assert_same("gradient", grad, value)


@pytest.mark.parametrize("impl", WITH_TRITON)
def test_without_entropy_there_is_none(impl):
    hidden, weight, _, ids, _ = head_inputs()
    logps, entropy = token_logps(hidden, weight, ids, impl=impl)
    assert entropy is None
    assert_same("logps", logps, full_logps(hidden, weight, ids)[0])


@pytest.mark.parametrize("impl", WITH_TRITON)
def test_packed_equals_padded(impl):
    hidden, weight, _, ids, mask = head_inputs()
    padded, _ = token_logps(hidden, weight, ids, completion_mask=mask, impl=impl)
    packed, _ = token_logps(hidden[mask], weight, ids[mask], impl=impl)
    assert packed.shape == (int(mask.sum()),)
    assert_same("logps", packed, padded[mask])


@pytest.mark.parametrize("impl", WITH_TRITON)
def test_what_is_masked_is_ignored(impl):
    hidden, weight, bias, ids, mask = head_inputs()
    assert not mask.all()
    garbage, bad_ids = hidden.detach().clone(), ids.clone()
    garbage[~mask], bad_ids[~mask] = torch.nan, -100
    garbage.requires_grad_()
    clean = token_logps(hidden, weight, ids, completion_mask=mask, with_entropy=True, impl=impl)
    dirty = token_logps(
        garbage, weight, bad_ids, completion_mask=mask, with_entropy=True, impl=impl
    )
    for value, expected in zip(dirty, clean, strict=True):
        assert torch.equal(value, expected)
        assert (value[~mask] == 0).all()
    grads = torch.autograd.grad(dirty[0].sum() + dirty[1].sum(), (garbage, weight))
    expected = torch.autograd.grad(clean[0].sum() + clean[1].sum(), (hidden, weight))
    assert (grads[0][~mask] == 0).all()
    for grad, value in zip(grads, expected, strict=True):
        assert_same("gradient", grad, value)


@pytest.mark.parametrize("impl", WITH_TRITON)
def test_nothing_to_score(impl):
    hidden, weight, _, ids, mask = head_inputs()
    empty = torch.zeros_like(mask)
    logps, entropy = token_logps(
        hidden, weight, ids, completion_mask=empty, with_entropy=True, impl=impl
    )
    assert (logps == 0).all() and (entropy == 0).all()
    for grad in torch.autograd.grad(logps.sum() + entropy.sum(), (hidden, weight)):
        assert (grad == 0).all()
    none, _ = token_logps(hidden[:0], weight, ids[:0], impl=impl)
    assert none.shape == (0, 5)


def test_no_grad_gives_the_same_values():
    hidden, weight, _, ids, _ = head_inputs()
    expected = token_logps(hidden, weight, ids, with_entropy=True, impl="torch")
    with torch.no_grad():
        actual = token_logps(hidden, weight, ids, with_entropy=True, impl="torch")
    for value, with_graph in zip(actual, expected, strict=True):
        assert not value.requires_grad and with_graph.requires_grad
        assert torch.equal(value, with_graph)


@pytest.mark.parametrize("frozen", [False, True])
def test_one_backward_only(frozen):
    hidden, weight, _, ids, _ = head_inputs()
    weight.requires_grad_(not frozen)
    logps, _ = token_logps(hidden, weight, ids, impl="torch")
    logps.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already"):
        logps.sum().backward()


def test_reference_is_differentiable_twice():
    hidden, weight, bias, ids, _ = head_inputs()

    def both(hidden, weight, bias):
        return token_logps(
            hidden, weight, ids[:1], lm_head_bias=bias, with_entropy=True, impl="reference"
        )

    small = [t.detach()[..., :2].requires_grad_() for t in (hidden[:1], weight)]
    assert torch.autograd.gradgradcheck(both, (*small, bias))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_dtypes_by_the_error_rule(dtypes, impl):
    base = make_inputs(8, 12, 32, 67, seed=2)
    tensors = (base.hidden, base.lm_head_weight)
    hidden, weight = (
        tensor.detach().to(dtype).requires_grad_()
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    )
    ids = base.completion_ids
    upstream = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(3))
    promoted = torch.promote_types(*dtypes)

    def run(function, *tensors, **kwargs):
        leaves = [t.detach().requires_grad_() for t in tensors]
        logps, entropy = function(*leaves, ids, **kwargs)
        total = (upstream[0] * logps + upstream[1] * entropy).sum()
        return logps.detach(), entropy.detach(), *torch.autograd.grad(total, leaves)

    exact = run(full_logps, hidden.double(), weight.double())
    plain = run(full_logps, hidden.to(promoted), weight.to(promoted))
    actual = run(
        token_logps, hidden, weight, with_entropy=True, impl=impl, max_chunk_bytes=9 * 67 * 4
    )
    assert [t.dtype for t in actual] == [torch.float32, torch.float32, *dtypes]
    names = ("logps", "entropy", "dhidden", "dweight")
    for name, *values in zip(names, actual, plain, exact, strict=True):
        assert_error_rule(name, *values)


@pytest.mark.parametrize("impl", WITH_TRITON)
def test_a_common_offset_costs_no_more_than_the_logits_lose(impl):
    # 2**20 + small: the logits themselves keep 1/8; multiples of 1/8 survive exactly
    logits = torch.tensor([[0.5, -1.25, 2.0, 0.0]])
    hidden = torch.cat([logits, torch.ones(1, 1)], -1)  # the last coordinate carries the offset
    weight = torch.cat([torch.eye(4), torch.full((4, 1), 2.0**20)], -1)
    ids = torch.tensor([1])
    for target in range(4):
        ids[0] = target
        logps, entropy = token_logps(hidden, weight, ids, with_entropy=True, impl=impl)
        expected = full_logps(logits.double(), torch.eye(4, dtype=torch.float64), ids)
        # a few float32 roundings of numbers of size 3
        torch.testing.assert_close(logps.double(), expected[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("impl", WITH_TRITON)
@pytest.mark.parametrize("gap", [1.0, 10.0, 30.0, 80.0, 150.0, 1000.0])
def test_confident_and_hopeless_tokens_keep_their_digits(gap, impl):
    # two tokens `gap` apart: -logp = log1p(e^-gap) for the likely one, gap + that for the other;
    # float32 keeps the likely one's digits down to e^-gap = 1e-38 only in the log1p form
    hidden, weight = torch.tensor([[gap, 0.0]]).repeat(2, 1), torch.eye(2)
    hidden.requires_grad_()
    logps, _ = token_logps(hidden, weight, torch.tensor([0, 1]), impl=impl)
    small = torch.log1p(torch.exp(torch.tensor(-gap, dtype=torch.float64)))
    exact_form = impl != "reference"
    if exact_form:  # plain log_softmax rounds the likely one to a multiple of 1e-7
        torch.testing.assert_close(-logps[0].double(), small, rtol=1e-6, atol=1e-37)
    torch.testing.assert_close(-logps[1].double(), gap + small, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(logps.sum(), hidden)
    p = torch.sigmoid(torch.tensor([-gap, gap], dtype=torch.float64))  # 1 - p of either target
    expected = torch.stack([torch.stack([p[0], -p[0]]), torch.stack([-p[1], p[1]])])
    relative, absolute = (1e-6, 1e-37) if exact_form else (0, 2e-7)
    torch.testing.assert_close(grad.double(), expected, rtol=relative, atol=absolute)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"temperature": 0.0}, "temperature.*0"),
        ({"temperature": -1.0}, "temperature.*-1"),
        ({"logit_softcap": 0.0}, "logit_softcap.*0"),
        ({"logit_scale": 0.0}, "logit_scale.*0"),
        ({"max_chunk_bytes": 0}, "max_chunk_bytes.*0"),
        ({"impl": "cuda"}, "impl.*'cuda'"),
    ],
)
def test_bad_options(change, message):
    hidden, weight, _, ids, _ = head_inputs()
    with pytest.raises(ValueError, match=message):
        token_logps(hidden, weight, ids, **change)
