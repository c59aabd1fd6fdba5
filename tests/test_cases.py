"""Small inputs that broke others, each a test with its numbers; float32, absolute tolerance 1e-6.

Log-probs are set through an identity head (`given_logps`), dloss/dlogp is read back from the
gradient of the target's logit. Losses of chosen size come from k1 = logp - ref.
"""

from dataclasses import replace

import pytest
import torch
from small_cases import CONFIGS, INF, K1, NAN, close, config, k1, run

from fgrpo_kernels import focal_policy_loss, group_advantages, token_logps
from fgrpo_kernels.testing import make_inputs


@pytest.fixture(params=["reference", "torch", "triton"])
def impl(request):
    return request.param


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
