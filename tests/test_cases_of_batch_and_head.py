"""More small inputs that broke others: batches, vocabularies and heads (see `test_cases.py`)."""

import math

import pytest
import torch
from loss_cases import given_logps
from small_cases import CONFIGS, INF, K1, close, config, k1, run

from fgrpo_kernels import focal_policy_loss, token_logps
from fgrpo_kernels.testing import make_inputs


@pytest.fixture(params=["reference", "torch", "triton"])
def impl(request):
    return request.param


def test_case_8_micro_batches_with_a_global_denominator(impl):
    losses = [[1.0, 1.0, 0, 0, 0, 0], [4.0] * 6]
    mask = [[1, 1, 0, 0, 0, 0], [1] * 6]
    settings = dict(config=config(**K1), impl=impl)
    whole, dwhole = run(
        [[-1.0] * 6] * 2, [0.0, 0.0], ref_logps=k1(losses), completion_mask=mask, **settings
    )
    close(whole.loss, 3.25)
    parts = [
        run(
            [[-1.0] * 6],
            [0.0],
            ref_logps=k1(losses[i : i + 1]),
            completion_mask=mask[i : i + 1],
            global_valid_tokens=torch.tensor(8),
            **settings,
        )
        for i in range(2)
    ]
    close(sum(out.loss for out, _ in parts), 3.25)
    close(torch.cat([dlogps for _, dlogps in parts]), dwhole.tolist())


def test_case_8_fixed_length_does_not_see_padding(impl):
    settings = dict(config=config(reduction="fixed_length", fixed_length=4, **K1), impl=impl)
    out, _ = run([[-1.0] * 4] * 2, [0.0] * 2, ref_logps=k1([[1.0] * 4] * 2), **settings)
    close(out.loss, 1.0)
    out, _ = run(
        [[-1.0] * 8] * 2,
        [0.0] * 2,
        ref_logps=k1([[1.0] * 8] * 2),
        completion_mask=[[1] * 4 + [0] * 4] * 2,
        **settings,
    )
    close(out.loss, 1.0)
    out, _ = run(
        [[-1.0] * 4] * 2,
        [0.0] * 2,
        ref_logps=k1([[1.0] * 4] * 2),
        completion_mask=[[1, 1, 0, 0], [1, 1, 1, 1]],
        **settings,
    )
    close(out.loss, 0.75)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", ["masked", "no-sequences", "no-tokens", "packed"])
def test_case_9_nothing_to_learn_from(shape, name, impl):
    inputs = make_inputs(4, 4, 5, 7, group_size=2)
    bias = torch.zeros(7, requires_grad=True)
    arguments = {**inputs.arguments(), "lm_head_bias": bias, "token_weights": torch.ones(4, 4)}
    arguments["token_weights"].requires_grad_()
    cut = {"no-sequences": 0, "packed": 0}.get(shape)
    for key, value in arguments.items():
        if key in ("lm_head_weight", "lm_head_bias"):
            continue
        if shape == "masked" and key == "completion_mask":
            arguments[key] = torch.zeros_like(value)
        if cut is not None:
            value = value.detach()[:cut]
            flat = value.flatten(0, 1) if shape == "packed" and value.dim() > 1 else value
            arguments[key] = flat
        if shape == "no-tokens" and value.dim() > 1:
            arguments[key] = value.detach()[:, :0]
    if shape == "packed":
        arguments["cu_seqlens"] = torch.zeros(1, dtype=torch.int64)
    leaves = {k: arguments[k] for k in ("hidden", "lm_head_weight", "lm_head_bias")}
    leaves = {k: v if v.requires_grad else v.requires_grad_() for k, v in leaves.items()}
    out = focal_policy_loss(**arguments, config=CONFIGS[name], impl=impl)
    assert out.loss == 0 and out.loss.requires_grad
    for key, grad in zip(leaves, torch.autograd.grad(out.loss, list(leaves.values())), strict=True):
        assert grad.shape == leaves[key].shape and (grad == 0).all(), key
    for key, value in out.metrics.items():
        assert value.isfinite(), key
    assert out.per_token_loss.shape == arguments["completion_ids"].shape


@pytest.mark.parametrize("name", CONFIGS)
def test_case_9_an_empty_micro_batch_changes_nothing(name, impl):
    inputs = make_inputs(4, 4, 5, 7, group_size=2)
    denominators = dict(global_valid_tokens=11, global_sequences=4)
    grads = []
    for with_empty in (False, True):
        loss = 0.0
        for empty in (False, True)[: 1 + with_empty]:
            arguments = inputs.arguments()
            if empty:
                arguments["completion_mask"] = torch.zeros_like(inputs.completion_mask)
            out = focal_policy_loss(**arguments, **denominators, config=CONFIGS[name], impl=impl)
            loss = loss + out.loss
        leaves = (inputs.hidden, inputs.lm_head_weight)
        grads.append((loss, *torch.autograd.grad(loss, leaves)))
    for without, with_ in zip(*grads, strict=True):
        assert torch.equal(without, with_)


@pytest.mark.parametrize("forbidden", [slice(0, 2100), slice(2100, 4200), slice(1, 4201)])
def test_case_11_whole_tiles_of_minus_infinity(forbidden, impl):
    vocab = 4201  # a multiple of no tile
    bias = torch.linspace(-1, 1, vocab)
    bias[forbidden] = -INF
    hidden, weight = torch.zeros(1, 1, 2), torch.ones(vocab, 2)
    target = int(bias.isfinite().nonzero()[0])
    bias.requires_grad_()
    logps, entropy = token_logps(
        hidden, weight, torch.tensor([[target]]), lm_head_bias=bias, with_entropy=True, impl=impl
    )
    exact = bias.detach().double().log_softmax(-1)
    close(logps, [[exact[target].item()]], atol=2e-6)  # float32 sums of 2000 terms, log-probs of 8
    close(entropy, [[-(exact.exp() * exact.masked_fill(exact == -INF, 0)).sum().item()]], atol=2e-6)
    (grad,) = torch.autograd.grad(logps.sum(), bias)
    expected = -exact.exp()
    expected[target] += 1
    close(grad, expected.float().tolist())


def test_case_11_a_large_common_offset(impl):
    hidden = (torch.tensor([[[2.0, -1.0]]]) + 1e6).requires_grad_()
    logps, _ = token_logps(hidden, torch.eye(2), torch.tensor([[0]]), impl=impl)
    close(-logps, [[0.0485873]])
    (grad,) = torch.autograd.grad(logps.sum(), hidden)
    close(grad, [[[0.0474259, -0.0474259]]])


@pytest.mark.parametrize("bad", [2, -1, 10**12])
def test_case_12_ids_outside_the_vocabulary(bad, impl):
    given = given_logps([[-1.0, -1.0], [-1.0, -1.0]], torch.float32)
    ids = torch.tensor([[0, 0], [bad, 0]])
    arguments = dict(config=config(), impl=impl)
    positional = (given.hidden, given.head, ids, torch.ones(2))
    with pytest.raises(ValueError, match=rf"completion_ids.*{bad} at \[1, 0\]"):
        focal_policy_loss(*positional, **arguments)
    with pytest.raises(ValueError, match=rf"completion_ids.*{bad} at \[1, 0\]"):
        token_logps(given.hidden, given.head, ids, impl=impl)
    mask = torch.tensor([[True, True], [False, True]])
    masked = focal_policy_loss(*positional, completion_mask=mask, **arguments)
    close(masked.loss, -1.0)


def test_case_13_temperature_is_applied_once(impl):
    logits = torch.tensor([[[1.0, 0.0, -1.0, -2.0]]])
    weight = torch.eye(4, requires_grad=True)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    out = focal_policy_loss(
        logits, weight, ids, torch.tensor([1.0]),
        config=config(surrogate="reinforce", temperature=0.6), impl=impl,
    )  # fmt: skip
    close(out.logps, [[-0.2080604]])
    out.loss.backward()
    probs = (logits.double() / 0.6).softmax(-1)[0, 0]
    dlogits = (probs - torch.eye(4)[0]) / 0.6
    close(weight.grad, torch.outer(dlogits, logits[0, 0].double()).float().tolist())


def test_case_14_a_low_rank_head_as_a_dense_weight(impl):
    inputs = make_inputs(4, 4, 5, 7, group_size=2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 5, dtype=torch.float64, generator=generator).requires_grad_()
    b = torch.randn(7, 2, dtype=torch.float64, generator=generator).requires_grad_()
    arguments = inputs.arguments()
    arguments["lm_head_weight"] = inputs.lm_head_weight.detach() + 0.5 * b @ a
    out = focal_policy_loss(**arguments, config=config(), impl=impl)
    da, db = torch.autograd.grad(out.loss, (a, b), retain_graph=False)
    dense = arguments["lm_head_weight"].detach().requires_grad_()
    arguments["lm_head_weight"] = dense
    focal_policy_loss(**arguments, config=config(), impl=impl).loss.backward()
    torch.testing.assert_close(da, 0.5 * b.T @ dense.grad)
    torch.testing.assert_close(db, 0.5 * dense.grad @ a.T)


@pytest.mark.parametrize(
    "change", [{"lm_head_bias": True}, {"logit_scale": 0.5}, {"logit_softcap": 1.5}], ids=str
)
def test_case_14_bias_scale_and_softcap_are_never_dropped(change, impl):
    logits = torch.tensor([2.0, -1.0, 0.5])
    bias = torch.tensor([-1.0, 1.0, 0.0]) if change.pop("lm_head_bias", False) else None
    out = focal_policy_loss(
        logits[None, None], torch.eye(3), torch.tensor([[0]]), torch.tensor([1.0]),
        lm_head_bias=bias, config=config(**change), impl=impl,
    )  # fmt: skip
    z = logits.double() + (0 if bias is None else bias)
    z = z * change.get("logit_scale", 1.0)
    if "logit_softcap" in change:
        z = 1.5 * torch.tanh(z / 1.5)
    close(out.logps, [[z.log_softmax(0)[0].item()]])


def test_case_16_on_policy_step(impl):
    given = given_logps([[-1.0], [-2.0]], torch.float32)
    positional = (given.hidden, given.head, given.ids, torch.tensor([1.0, -1.0]))
    logps = focal_policy_loss(*positional, config=config(), impl=impl).logps
    out = focal_policy_loss(*positional, old_logps=logps, config=config(), impl=impl)
    out.loss.backward()
    close(out.loss, 0.0)
    close(given.dlogps(), [[-0.5], [0.5]])
    assert out.metrics["ratio_mean"] == out.metrics["ratio_max"] == 1
    assert out.metrics["approx_kl"] == 0
    shifted = focal_policy_loss(*positional, old_logps=logps.roll(1, 0), config=config(), impl=impl)
    close(shifted.metrics["ratio_max"], math.e, atol=2e-6)  # 2 float32 roundings of log-probs of 2
