"""`reference` against an oracle written from the formulas alone, the oracle against hand values."""

import math

import pytest
import torch
from loss_cases import OBJECTIVES, OUTER, assert_same, cases, given_logps, gradients
from oracle import policy_loss_oracle

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss

E = math.exp


def sigmoid(x):
    return 1 / (1 + E(-x))


def phi(w, k, rate):
    return E(rate) * w**k * E(-rate * w)


def config(**kwargs):
    return PolicyLossConfig(**{"focal_gamma": 0.0} | kwargs)


SAPO, VESPO = config(surrogate="sapo"), config(surrogate="vespo")
TV, KL = config(surrogate="dppo_tv"), config(surrogate="dppo_kl")
GMPO = config(ratio_level="geometric_mean")
UP, UP_NEG = sigmoid(E(0.1) - 1), sigmoid(1.05 * (E(0.1) - 1))

# One token, log-prob -1: (config, old, ref, rollout, advantage, loss, dloss/dlogp), by hand.
ONE_TOKEN = {
    "clip-inside": (config(), -1.1, None, None, 2.0, -2 * E(0.1), -2 * E(0.1)),
    "clip-above-positive": (config(), -1.9, None, None, 2.0, -2 * 1.2, 0.0),
    "clip-above-negative": (config(), -1.9, None, None, -2.0, 2 * E(0.9), 2 * E(0.9)),
    "clip-below-positive": (config(), -0.5, None, None, 2.0, -2 * E(-0.5), -2 * E(-0.5)),
    "clip-below-negative": (config(), -0.5, None, None, -2.0, 2 * 0.8, 0.0),
    "dual-clip-bites": (config(dual_clip=2.0), -1.9, None, None, -2.0, 4.0, 0.0),
    "dual-clip-idle": (config(dual_clip=3.0), -1.9, None, None, -2.0, 2 * E(0.9), 2 * E(0.9)),
    "cispo-above": (config(surrogate="cispo"), -1.9, None, None, 2.0, 2.4, -2.4),
    "cispo-inside": (config(surrogate="cispo"), -1.1, None, None, 2.0, 2 * E(0.1), -2 * E(0.1)),
    "reinforce": (config(surrogate="reinforce"), -1.9, None, None, 2.0, 2.0, -2.0),
    "on-policy": (config(), None, None, None, 2.0, -2.0, -2.0),
    "sequence-ratio": (config(ratio_level="sequence"), -1.1, None, None, 2.0, -2 * E(0.1),
                       -2 * E(0.1)),
    "k1": (config(kl_coef=0.5, kl_estimator="k1"), None, -1.4, None, 0.0, 0.2, 0.5),
    "k2": (config(kl_coef=0.5, kl_estimator="k2"), None, -1.4, None, 0.0, 0.04, 0.2),
    "k3": (config(kl_coef=0.5), None, -1.4, None, 0.0, 0.5 * (E(-0.4) + 0.4 - 1),
           0.5 * (1 - E(-0.4))),
    "truncate-inside": (config(surrogate="reinforce", rollout_correction="truncate"), None, None,
                        -1.3, 2.0, 2 * E(0.3), -2 * E(0.3)),
    "truncate-above": (config(surrogate="reinforce", rollout_correction="truncate"), None, None,
                       -2.0, 2.0, 4.0, -4.0),
    "mask-inside": (config(rollout_correction="mask"), -1.1, None, -1.3, 2.0, -2 * E(0.3),
                    -2 * E(0.3)),
    "mask-outside": (config(rollout_correction="mask"), -1.1, None, -2.0, 2.0, 0.0, 0.0),
    "weight-not-on-kl": (config(rollout_correction="truncate", kl_coef=0.5, kl_estimator="k1"),
                         None, -1.4, -1.3, 0.0, 0.2, 0.5),
    "far-above": (config(), -30.0, None, None, -1.0, E(20), E(20)),
    "focal": (PolicyLossConfig(surrogate="reinforce"), None, None, None, 2.0, 1.0, -1.0),
    # -(4 / tau) sigmoid(tau (rho - 1)) A'; the slope of the sigmoid is 4 / 16 at rho = 1
    "sapo-on-policy": (SAPO, None, None, None, 2.0, -4.0, -2.0),
    "sapo-on-policy-negative": (SAPO, None, None, None, -2.0, 4 / 1.05, 2.0),
    "sapo-above": (SAPO, -1.1, None, None, 2.0, -8 * UP, -8 * UP * (1 - UP) * E(0.1)),
    "sapo-above-negative": (SAPO, -1.1, None, None, -2.0, 8 / 1.05 * UP_NEG,
                            8 * UP_NEG * (1 - UP_NEG) * E(0.1)),
    "sapo-far-above": (SAPO, -51.0, None, None, 2.0, -8.0, 0.0),
    "sapo-far-below": (SAPO, 49.0, None, None, 2.0, -8 * sigmoid(E(-20) - 1),
                       -8 * sigmoid(E(-20) - 1) * sigmoid(1 - E(-20)) * E(-20)),
    # -phi(w) A' logp, phi(1) = 1
    "vespo-on-policy": (VESPO, None, None, None, 2.0, 2.0, -2.0),
    "vespo-above": (VESPO, -1.1, None, None, 2.0, 2 * phi(E(0.1), 2, 3), -2 * phi(E(0.1), 2, 3)),
    "vespo-above-negative": (VESPO, -1.1, None, None, -2.0, -2 * phi(E(0.1), 3, 2),
                             2 * phi(E(0.1), 3, 2)),
    "vespo-far-above": (VESPO, -51.0, None, None, 2.0, 0.0, 0.0),
    "vespo-far-below": (VESPO, 49.0, None, None, 2.0, 2 * phi(E(-20), 2, 3),
                        -2 * phi(E(-20), 2, 3)),
    "vespo-rollout": (config(surrogate="vespo", rollout_correction="truncate", rollout_max=1.01),
                      -1.1, None, -1.3, 2.0, 2 * phi(E(0.3), 2, 3), -2 * phi(E(0.3), 2, 3)),
    "vespo-rollout-on-policy": (config(surrogate="vespo", rollout_correction="truncate"), None,
                                None, -1.3, 2.0, 2 * phi(E(0.3), 2, 3), -2 * phi(E(0.3), 2, 3)),
    # |p - p_old| = 0.218 at -1.9 and 0.239 at -0.5, both over 0.2
    "dppo_tv-on-policy": (TV, None, None, None, 2.0, 2.0, -2.0),
    "dppo_tv-inside": (TV, -1.1, None, None, 2.0, 2 * E(0.1), -2 * E(0.1)),
    "dppo_tv-above-positive": (TV, -1.9, None, None, 2.0, 0.0, 0.0),
    "dppo_tv-above-negative": (TV, -1.9, None, None, -2.0, -2 * E(0.9), 2 * E(0.9)),
    "dppo_tv-below-positive": (TV, -0.5, None, None, 2.0, 2 * E(-0.5), -2 * E(-0.5)),
    "dppo_tv-below-negative": (TV, -0.5, None, None, -2.0, 0.0, 0.0),
    "dppo_tv-far-above-negative": (TV, -51.0, None, None, -2.0, -40.0, 40.0),
    # KL = 0.118 at -1.9, 0.288 at -3, 0.117 at -0.5
    "dppo_kl-inside": (KL, -1.9, None, None, 2.0, 2 * E(0.9), -2 * E(0.9)),
    "dppo_kl-above-positive": (KL, -3.0, None, None, 2.0, 0.0, 0.0),
    "dppo_kl-above-negative": (KL, -3.0, None, None, -2.0, -2 * E(2), 2 * E(2)),
    "dppo_kl-below-negative": (config(surrogate="dppo_kl", clip_eps_low=0.11), -0.5, None, None,
                               -2.0, 0.0, 0.0),
    "dppo_kl-far-above": (KL, -51.0, None, None, 2.0, 0.0, 0.0),
    # -exp(x) A', x = log-ratio, at most 0.2 for A' > 0 and at least -0.2 for A' < 0
    "gmpo-on-policy": (GMPO, None, None, None, 2.0, -2.0, -2.0),
    "gmpo-inside": (GMPO, -1.1, None, None, 2.0, -2 * E(0.1), -2 * E(0.1)),
    "gmpo-above-positive": (GMPO, -1.9, None, None, 2.0, -2 * E(0.2), 0.0),
    "gmpo-above-negative": (GMPO, -1.9, None, None, -2.0, 2 * E(0.9), 2 * E(0.9)),
    "gmpo-below-positive": (GMPO, -0.5, None, None, 2.0, -2 * E(-0.5), -2 * E(-0.5)),
    "gmpo-below-negative": (GMPO, -0.5, None, None, -2.0, 2 * E(-0.2), 0.0),
    "gmpo-far-above-negative": (GMPO, -51.0, None, None, -2.0, 2 * E(20), 2 * E(20)),
    "gmpo-far-below-positive": (GMPO, 49.0, None, None, 2.0, -2 * E(-20), -2 * E(-20)),
}  # fmt: skip


@pytest.mark.parametrize("loss_fn", ["oracle", "reference", "torch", "triton"])
@pytest.mark.parametrize("case", ONE_TOKEN)
def test_one_token_by_hand(case, loss_fn):
    config, old, ref, rollout, advantage, loss, dlogp = ONE_TOKEN[case]
    given = given_logps([[-1.0]])

    def side(value):
        return None if value is None else torch.tensor([[value]], dtype=torch.float64)

    arguments = dict(
        old_logps=side(old), ref_logps=side(ref), rollout_logps=side(rollout), config=config
    )
    success_rate = torch.tensor([0.75], dtype=torch.float64)  # focal weight 1/2 at gamma 1/2
    advantages = torch.tensor([advantage], dtype=torch.float64)
    positional = (given.hidden, given.head, given.ids, advantages, success_rate)
    if loss_fn == "oracle":
        out = policy_loss_oracle(*positional, **arguments)
    else:
        out = focal_policy_loss(*positional, **arguments, impl=loss_fn)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss, rel=1e-12, abs=1e-12)
    assert given.dlogps().item() == pytest.approx(dlogp, rel=1e-12, abs=1e-12)


# Log-probs -1 and -2, log-ratios 0.1 and 0.3, token weights 1 and 3: (config, loss, dlogps).
TWO_TOKENS = {
    # s = e^0.2 for both, inside the bounds 0.7 and 1.3
    "sequence": (config(ratio_level="sequence", clip_eps_low=0.3, clip_eps_high=0.3),
                 -2 * E(0.2), [-0.5 * E(0.2), -1.5 * E(0.2)]),
    # s = e^0.2; each token moves the sequence's ratio by half of its move
    "gmpo-inside": (config(ratio_level="geometric_mean", clip_eps_high=0.3001), -2 * E(0.2),
                    [-E(0.2), -E(0.2)]),
    # the second log-ratio counts as 0.2 and gets no gradient: s = e^0.15
    "gmpo-clipped": (config(ratio_level="geometric_mean"), -2 * E(0.15), [-E(0.15), 0.0]),
    # w = e^0.4, the product of the ratios
    "vespo": (VESPO, 3.5 * phi(E(0.4), 2, 3), [-0.5 * phi(E(0.4), 2, 3), -1.5 * phi(E(0.4), 2, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("loss_fn", ["oracle", "reference", "torch", "triton"])
@pytest.mark.parametrize("case", TWO_TOKENS)
def test_one_sequence_by_hand(case, loss_fn):
    config, loss, dlogps = TWO_TOKENS[case]
    given = given_logps([[-1.0, -2.0]])
    arguments = dict(
        old_logps=torch.tensor([[-1.1, -2.3]], dtype=torch.float64),
        token_weights=torch.tensor([[1.0, 3.0]], dtype=torch.float64),
        config=config,
    )
    positional = (given.hidden, given.head, given.ids, torch.tensor([1.0], dtype=torch.float64))
    if loss_fn == "oracle":
        out = policy_loss_oracle(*positional, **arguments)
    else:
        out = focal_policy_loss(*positional, **arguments, impl=loss_fn)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss, rel=1e-12)
    assert given.dlogps().tolist()[0] == pytest.approx(dlogps, rel=1e-12)


# Per-token losses 1, 2, 3 in row 0 (third masked or rejected) and 4 in row 1, as k1 against a ref.
REDUCTIONS = {
    "token_mean": (dict(reduction="token_mean"), (1 + 2 + 4) / 3),
    "sequence_mean": (dict(reduction="sequence_mean"), (1.5 + 4) / 2),
    "fixed_length": (dict(reduction="fixed_length", fixed_length=5), 7 / (5 * 2)),
}


@pytest.mark.parametrize("loss_fn", ["oracle", "reference", "torch"])
@pytest.mark.parametrize("case", REDUCTIONS)
@pytest.mark.parametrize("rejected", [False, True])
def test_reductions_by_hand(case, rejected, loss_fn):
    kwargs, expected = REDUCTIONS[case]
    given = given_logps([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    ref = torch.tensor([[-2.0, -3.0, -4.0], [-5.0, 0, 0], [-7.0, 0, 0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    rollout = None
    if rejected:  # the same tokens, but the input mask also has those that the correction rejects
        rollout = torch.where(mask, -1.0, -3.0).double()
        mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]], dtype=torch.bool)
        if case == "fixed_length":  # counts the sequences of the input mask
            expected = 7 / (5 * 3)
    arguments = dict(
        ref_logps=ref,
        completion_mask=mask,
        rollout_logps=rollout,
        config=config(
            kl_coef=1.0,
            kl_estimator="k1",
            rollout_correction="mask" if rejected else None,
            **kwargs,
        ),
    )
    positional = (given.hidden, given.head, given.ids, torch.zeros(3, dtype=torch.float64))
    if loss_fn == "oracle":
        out = policy_loss_oracle(*positional, **arguments)
    else:
        out = focal_policy_loss(*positional, **arguments, impl=loss_fn)
    assert out.loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("outer", OUTER)
def test_reference_equals_the_oracle(outer):
    for case in cases(outer):
        arguments = case.arguments()
        expected = policy_loss_oracle(**arguments)
        actual = focal_policy_loss(**arguments, impl="reference")
        mask = case.inputs.completion_mask
        for field in ("loss", "per_token_loss", "logps", "entropy"):
            assert_same(f"{case.name} {field}", getattr(actual, field), getattr(expected, field))
            if field != "loss" and mask is not None:
                assert (getattr(actual, field)[~mask] == 0).all()
        for name, value in expected.metrics.items():
            metric = actual.metrics[name].double().item()
            assert metric == pytest.approx(value, rel=1e-6, abs=1e-9), f"{case.name} {name}"
        expected_grads = gradients(expected.loss, case.inputs)
        for name, grad in gradients(actual.loss, case.inputs).items():
            assert_same(f"{case.name} d{name}", grad, expected_grads[name])


def test_the_combinations_reach_every_branch():
    """Clipped on both sides, rejected, and wholly rejected sequences all occur."""
    seen = dict.fromkeys(("clip_fraction_high", "clip_fraction_low", "clip_binding_fraction"), 0)
    rejected, whole = 0, 0
    for outer in ("clip-token-token_mean-nokl", "clip-sequence-sequence_mean-nokl"):
        for case in cases(outer):
            metrics = policy_loss_oracle(**case.arguments()).metrics
            for name in seen:
                seen[name] += metrics[name] > 0
            rejected += metrics["rejected_fraction"] > 0
            whole += case.config.rollout_level == "sequence" and metrics["rejected_fraction"] > 0
    assert min(*seen.values(), rejected, whole) >= 4


def test_reference_is_differentiable_twice():
    given = given_logps([[-1.0, -0.5]])

    def loss(hidden):
        out = focal_policy_loss(
            hidden,
            given.head,
            given.ids,
            torch.tensor([1.0], dtype=torch.float64),
            old_logps=given.logps - 0.05,
            ref_logps=given.logps - 0.3,
            config=config(kl_coef=0.1, entropy_coef=0.05),
            impl="reference",
        )
        return out.loss

    assert torch.autograd.gradgradcheck(loss, given.hidden)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_permuting_sequences_permutes_the_losses(impl):
    case = next(cases("clip-token-sequence_mean-k3"))
    arguments = case.arguments()
    order = torch.tensor([2, 0, 3, 1])
    permuted = {
        k: v[order] if isinstance(v, torch.Tensor) and v.dim() and len(v) == 4 else v
        for k, v in arguments.items()
    }
    out = focal_policy_loss(**arguments, impl=impl)
    other = focal_policy_loss(**permuted, impl=impl)
    assert_same("loss", other.loss, out.loss)
    assert_same("per_token_loss", other.per_token_loss, out.per_token_loss[order])


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("surrogate,level", OBJECTIVES)
def test_scaling_advantages_scales_the_policy_term(surrogate, level, impl):
    case = next(cases(f"{surrogate}-{level}-token_mean-nokl"))
    arguments = case.arguments()
    out = focal_policy_loss(**arguments, impl=impl)
    scaled = {**arguments, "advantages": 3 * arguments["advantages"]}
    assert_same("loss", focal_policy_loss(**scaled, impl=impl).loss, 3 * out.loss)
