"""Small inputs that broke others, each a test with its numbers; float32, absolute tolerance 1e-6.

Log-probs are set through an identity head (`given_logps`), dloss/dlogp is read back from the
gradient of the target's logit. Losses of chosen size come from k1 = logp - ref.
"""

import math
from dataclasses import replace

import pytest
import torch
from loss_cases import given_logps

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, group_advantages, token_logps
from fgrpo_kernels.testing import make_inputs

INF, NAN = math.inf, math.nan


@pytest.fixture(params=["reference", "torch", "triton"])
def impl(request):
    return request.param


def config(**kwargs):
    return PolicyLossConfig(**{"focal_gamma": 0.0} | kwargs)


def run(logps, advantages, *, impl, config, **kwargs):
    """The output and dloss/dlogps for log-probs given as a nested list."""
    given = given_logps(logps, torch.float32)
    for name, value in kwargs.items():
        if isinstance(value, list):
            dtype = torch.bool if name == "completion_mask" else torch.float32
            kwargs[name] = torch.tensor(value, dtype=dtype)
    advantages = torch.tensor(advantages, dtype=torch.float32)
    out = focal_policy_loss(
        given.hidden, given.head, given.ids, advantages, **kwargs, config=config, impl=impl
    )
    out.loss.backward()
    return out, given.dlogps()


def close(actual, expected, atol=1e-6):
    expected = torch.tensor(expected)
    torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=atol)


def k1(losses):
    """ref_logps that make logp - ref the given losses at logp = -1."""
    return [[-1.0 - loss for loss in row] for row in losses]


K1 = dict(kl_coef=1.0, kl_estimator="k1")
CONFIGS = {
    "clip": config(),
    "cispo-entropy": config(surrogate="cispo", entropy_coef=0.1),
    "grpo-kl": PolicyLossConfig.grpo(kl_coef=0.1),
    "dr_grpo": PolicyLossConfig.dr_grpo(fixed_length=4, rollout_correction="truncate"),
    "gspo": PolicyLossConfig.gspo(rollout_correction="mask", rollout_level="sequence"),
    "gspo-entropy": PolicyLossConfig.gspo(entropy_coef=0.1, kl_coef=0.1),
}


def test_case_1_masked_nan_stays_out_of_the_sequence_mean(impl):
    for rows in (slice(0, 1), slice(0, 2)):
        out, dlogps = run(
            [[-1.0] * 3] * 2 if rows.stop == 2 else [[-1.0] * 3],
            [0.0, 0.0][rows],
            completion_mask=[[1, 0, 1], [1, 1, 1]][rows],
            ref_logps=k1([[1, NAN, 3], [2, 2, 2]])[rows],
            config=config(reduction="sequence_mean", **K1),
            impl=impl,
        )
        close(out.loss, 2.0)
        assert dlogps.isfinite().all() and dlogps[0, 1] == 0


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("name", CONFIGS)
def test_case_1_garbage_at_masked_positions_is_ignored(name, garbage, impl):
    inputs = make_inputs(4, 4, 5, 7, group_size=2, seed=1)
    masked = ~inputs.completion_mask
    assert masked.any()
    per_token = replace(
        inputs,
        advantages=inputs.old_logps + 2,
        token_weights=torch.linspace(0.5, 1.5, 16).view(4, 4),
    )
    fields = ("hidden", "old_logps", "ref_logps", "rollout_logps", "advantages", "token_weights")
    results = []
    for spoil in (False, True):
        arguments = per_token.arguments()
        for field in fields:
            value = arguments[field].detach().clone()
            if spoil:
                value[masked] = garbage
            arguments[field] = value.requires_grad_(field in ("hidden", "token_weights"))
        out = focal_policy_loss(**arguments, config=CONFIGS[name], impl=impl)
        leaves = (arguments["hidden"], arguments["token_weights"], inputs.lm_head_weight)
        results.append((out.loss, *torch.autograd.grad(out.loss, leaves)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert (results[1][1][masked] == 0).all() and (results[1][2][masked] == 0).all()


@pytest.mark.parametrize("skip_inactive", [True, False])
@pytest.mark.parametrize("on_policy", [False, True])
def test_case_1_garbage_at_rejected_tokens_is_ignored(on_policy, skip_inactive, impl):
    losses = []
    for garbage in (0.0, NAN, INF):
        out, dlogps = run(
            [[-1.0, -1.0]],
            [1.0],
            old_logps=None if on_policy else [[-1.1, -1.0]],
            rollout_logps=[[-1.1, -9.0]],  # the second token's weight is e^8
            ref_logps=[[-1.2, garbage]],
            config=config(rollout_correction="mask", kl_coef=1.0, skip_inactive=skip_inactive),
            impl=impl,
        )
        assert dlogps[0, 1] == 0
        losses.append((out.loss, dlogps))
    for loss, dlogps in losses[1:]:
        assert torch.equal(loss, losses[0][0]) and torch.equal(dlogps, losses[0][1])


def test_case_2_selection_happens_before_exp(impl):
    out, dlogps = run(
        [[-1.0, -1.0]],
        [-1.0],
        old_logps=[[-1.0, -200.0]],
        completion_mask=[[1, 0]],
        config=config(),
        impl=impl,
    )
    close(out.loss, 1.0)
    close(dlogps, [[1.0, 0.0]])


def test_case_3_k3_far_apart(impl):
    out, dlogps = run([[-200.0]], [0.0], ref_logps=[[-1.0]], config=config(kl_coef=1.0), impl=impl)
    # half a unit of the fifth digit
    close(out.loss, 4.8516e8, atol=5e3)
    close(dlogps, [[-4.8517e8]], atol=5e3)


@pytest.mark.parametrize("difference,value", [(0.1, 0.0051709181), (-0.1, 0.0048374180)])
def test_case_3_k3_near(difference, value, impl):
    out, _ = run(
        [[-1.0]], [0.0], ref_logps=[[-1.0 + difference]], config=config(kl_coef=1.0), impl=impl
    )
    # d k3 / d logp = 0.1 times the float32 rounding of log-probs of size 1
    close(out.loss, value, atol=2e-8)


def test_case_3_masked_reference_of_minus_infinity(impl):
    out, dlogps = run(
        [[-1.0, -1.0]],
        [0.0],
        ref_logps=[[-1.0, -INF]],
        completion_mask=[[1, 0]],
        config=config(kl_coef=1.0),
        impl=impl,
    )
    close(out.loss, 0.0)
    close(dlogps, [[0.0, 0.0]])


def test_case_4_gamma_zero_is_the_unweighted_loss_bit_for_bit(impl):
    inputs = make_inputs(4, 4, 5, 7, group_size=2)
    arguments = inputs.arguments()
    weighted = focal_policy_loss(**arguments, config=config(), impl=impl)
    arguments["success_rate"] = None
    plain = focal_policy_loss(**arguments, config=config(), impl=impl)
    assert torch.equal(weighted.loss, plain.loss)
    grads = [torch.autograd.grad(out.loss, inputs.hidden)[0] for out in (weighted, plain)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_case_4_a_solved_prompt_has_weight_exactly_zero(gamma, impl):
    out, dlogps = run(
        [[-1.0], [-1.0]],
        [1.0, -1.0],
        success_rate=[1.0, 1.0],
        config=config(focal_gamma=gamma),
        impl=impl,
    )
    assert out.loss == 0 and (dlogps == 0).all()


def test_case_4_success_rates_off_by_rounding_are_clamped(impl):
    out, dlogps = run(
        [[-1.0], [-1.0]],
        [1.0, 1.0],
        success_rate=[1.0 + 1e-7, -1e-7],
        config=config(focal_gamma=0.5),
        impl=impl,
    )
    close(out.loss, -0.5)
    close(dlogps, [[0.0], [-0.5]])


@pytest.mark.parametrize("rate", [1.001, -0.001, NAN])
def test_case_4_success_rates_farther_off_are_an_error(rate, impl):
    with pytest.raises(ValueError, match="success_rate"):
        run([[-1.0], [-1.0]], [1.0, 1.0], success_rate=[0.5, rate],
            config=config(focal_gamma=0.5), impl=impl)  # fmt: skip


FOCAL_TABLE = {
    1: (2.3144, -0.3306),
    2: (1.4028, -0.4676),
    3: (0.9545, -0.5727),
    4: (0.6613, -0.6613),
    5: (0.4436, -0.7394),
    6: (0.2700, -0.8099),
    7: (0.1250, -0.8748),
}


@pytest.mark.parametrize("correct", FOCAL_TABLE)
def test_case_4_focal_table_through_the_loss(correct, impl):
    groups = group_advantages([1.0] * correct + [0.0] * (8 - correct), group_size=8)
    _, dlogps = run(
        [[-1.0]] * 8,
        groups.advantages.tolist(),
        success_rate=groups.success_rate,
        config=config(surrogate="reinforce", focal_gamma=0.5),
        impl=impl,
    )
    positive, negative = FOCAL_TABLE[correct]
    # half a unit of the table's fourth digit
    close(-8 * dlogps, [[positive]] * correct + [[negative]] * (8 - correct), atol=5e-5)


def test_case_5_cispo_keeps_the_gradient_of_clipped_tokens(impl):
    dapo_bounds = dict(clip_eps_low=0.2, clip_eps_high=0.28)
    cispo, clip = config(surrogate="cispo", **dapo_bounds), config(**dapo_bounds)
    out, dlogps = run([[-1.0]], [1.0], old_logps=[[-1.9]], config=cispo, impl=impl)
    close(out.metrics["ratio_mean"], 2.459603, atol=2e-6)  # exp(0.9 + 1e-7)
    close(dlogps, [[-1.28]])
    close(out.metrics["clip_fraction_high"], 1.0)
    _, dlogps = run([[-1.0]], [1.0], old_logps=[[-1.9]], config=clip, impl=impl)
    close(dlogps, [[0.0]])
    out, dlogps = run([[-1.0]], [1.0], old_logps=[[-1.1]], config=cispo, impl=impl)
    close(dlogps, [[-1.1051710]])
    close(out.metrics["clip_fraction_high"], 0.0)


def test_case_6_the_rollout_weight_is_a_constant(impl):
    _, dlogps = run(
        [[-2.0]],
        [1.0],
        rollout_logps=[[-2.1]],
        config=config(surrogate="reinforce", rollout_correction="truncate"),
        impl=impl,
    )
    close(dlogps, [[-1.1051710]])


@pytest.mark.parametrize(
    "bias,entropy", [([0.0, 0.0, -INF], 0.6931472), ([0.0, -INF], 0.0)], ids=["two", "one"]
)
def test_case_7_entropy_with_forbidden_tokens(bias, entropy, impl):
    bias = torch.tensor(bias, requires_grad=True)
    hidden = torch.zeros(1, 1, 2, requires_grad=True)
    weight = torch.ones(len(bias), 2, requires_grad=True)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    logps, value = token_logps(hidden, weight, ids, lm_head_bias=bias, with_entropy=True, impl=impl)
    close(value, [[entropy]])
    for grad in torch.autograd.grad((value + logps).sum(), (hidden, weight, bias)):
        assert grad.isfinite().all()
    out = focal_policy_loss(
        hidden, weight, ids, torch.tensor([1.0]), lm_head_bias=bias,
        config=config(entropy_coef=0.5, surrogate="reinforce"), impl=impl,
    )  # fmt: skip
    close(out.loss, 0.5 * entropy)  # -A logp - 0.5 H with logp = -H here
    for grad in torch.autograd.grad(out.loss, (hidden, weight, bias)):
        assert grad.isfinite().all()


def test_case_7_entropy_gradient_equals_the_dense_one(impl):
    logits = torch.tensor([[[0.3, -1.2, 2.0, -INF, 0.0]]])
    hidden = torch.zeros(1, 1, 5, requires_grad=True)
    bias = logits[0, 0].clone().requires_grad_()
    ids = torch.tensor([[1]])
    _, entropy = token_logps(
        hidden, torch.eye(5), ids, lm_head_bias=bias, with_entropy=True, impl=impl
    )
    dense = logits[0, 0].double().requires_grad_()
    log_probs = dense.log_softmax(-1)
    expected = -(log_probs.exp() * log_probs.masked_fill(log_probs == -INF, 0)).sum()
    close(entropy, [[expected.item()]])
    (dense_grad,) = torch.autograd.grad(expected, dense)
    for grad in torch.autograd.grad(entropy.sum(), (hidden, bias)):
        close(grad.flatten(), dense_grad.tolist())


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
