"""Each surrogate where its value is known: on-policy, on a bound, and where TRL has it."""

import math

import pytest
import torch
from loss_cases import OBJECTIVES, assert_same, cases, given_logps

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, triton_objective
from fgrpo_kernels.surrogates import LEAST_PROBABILITY, divergence
from fgrpo_kernels.testing import make_inputs

IMPLS = ["reference", "torch", "triton"]


def config(**kwargs):
    return PolicyLossConfig(**{"focal_gamma": 0.0} | kwargs)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def run(logps, advantages, impl, config, **kwargs):
    """Loss, dloss/dlogps and metrics."""
    given = given_logps(logps)
    out = focal_policy_loss(
        given.hidden, given.head, given.ids, tensor(advantages), config=config, impl=impl, **kwargs
    )
    out.loss.backward()
    return out.loss.detach(), given.dlogps(), out.metrics


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "off_policy,reduction", [(False, "token_mean"), (True, "sequence_mean")], ids=["none", "equal"]
)
@pytest.mark.parametrize("surrogate,level", OBJECTIVES)
def test_on_policy_every_objective_is_the_policy_gradient(
    surrogate, level, off_policy, reduction, impl
):
    """dL/dlogp = -A' / denominator at ratio 1, with old_logps=None and with the same numbers."""
    logps = [[-1.0, -0.4, -2.0], [-0.3, -1.5, -0.9], [-0.1, -1.0, -0.7]]
    mask = torch.tensor([[True] * 3, [True, True, False], [True] * 3])
    counted = mask.double()
    weights = counted / 8 if reduction == "token_mean" else counted / mask.sum(1)[:, None] / 3
    advantages = [1.0, -0.5, 0.0]
    arguments = dict(completion_mask=mask, old_logps=tensor(logps) if off_policy else None)
    # two rows of two float64 logits a chunk
    settings = config(
        surrogate=surrogate, ratio_level=level, reduction=reduction, max_chunk_bytes=32
    )
    _, dlogps, metrics = run(logps, advantages, impl, settings, **arguments)
    assert_same("dlogps", dlogps, -tensor(advantages)[:, None] * weights)
    # up to the rounding of the head, which makes the log-probs from logits
    assert metrics["ratio_mean"].item() == pytest.approx(1, abs=1e-12)
    assert metrics["clip_binding_fraction"] == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_gmpo_on_policy_spreads_the_mean_of_unequal_advantages(impl):
    """s = 1, and each token moves it by a third: dL/dlogp = -mean(A) / 3, a zero A's included."""
    logps = [[-1.0, -0.4, -2.0]]
    settings = config(ratio_level="geometric_mean", max_chunk_bytes=16)
    _, dlogps, _ = run(logps, [[1.0, 0.0, -4.0]], impl, settings)
    assert_same("dlogps", dlogps, tensor([[1.0, 1.0, 1.0]]) / 3)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_divergence_on_the_threshold_is_inside(advantage, impl):
    """p = 1/2 and p_old = 1/4 or 3/4 in float64: |p - p_old| is 1/4 to the bit."""
    old = math.log(0.5 - 0.25 * advantage)
    for threshold, kept in ((0.25, 1), (math.nextafter(0.25, 0), 0)):
        settings = config(
            surrogate="dppo_tv", clip_eps_low=threshold, clip_eps_high=threshold, entropy_coef=0.0
        )
        _, dlogps, metrics = run(
            [[math.log(0.5)]], [advantage], impl, settings, old_logps=tensor([[old]])
        )
        assert_same("dlogps", dlogps, tensor([[-kept * advantage * 0.5 / math.exp(old)]]))
        assert metrics["clip_binding_fraction"] == 1 - kept


@pytest.mark.parametrize("impl", IMPLS)
def test_a_log_ratio_on_the_bound_keeps_its_gradient(impl):
    """logp = log 1/2 exactly, and old_logps half of a power of two below it."""
    settings = config(ratio_level="geometric_mean", clip_eps_high=0.25)
    logps = [[math.log(0.5)]]
    for step, kept in ((0.25, 1), (0.25 + 2**-40, 0)):
        old = tensor(logps) - step
        _, dlogps, metrics = run(logps, [1.0], impl, settings, old_logps=old)
        assert_same("dlogps", dlogps, tensor([[-kept * math.exp(0.25)]]))
        assert metrics["clip_fraction_high"] == 1 - kept


def test_the_binary_kl_of_certain_tokens():
    """Where 1 - p cancels, and where it is 0: finite, and by the limits of p log p."""
    settings = config(surrogate="dppo_kl")
    p, q = 1e-12, 1e-9  # 1 - p_old and 1 - p
    expected = p * math.log(p / q) + (q - p)  # + O(q^2)
    value = divergence(tensor([-q]), tensor([-p]), settings)
    assert value.item() == pytest.approx(expected, rel=1e-6)  # (1 - q)-factors and q^2 / 2
    # p_old = 1: -log p; p = 1: 1 - p counts as 1e-37
    assert divergence(tensor([-0.5]), tensor([0.0]), settings).item() == pytest.approx(0.5)
    rest = -math.expm1(-0.5)
    expected = math.exp(-0.5) * -0.5 + rest * math.log(rest / LEAST_PROBABILITY)
    assert divergence(tensor([0.0]), tensor([-0.5]), settings).item() == pytest.approx(expected)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("old", [-1e-7, -1e-3, -0.02, -0.05])
def test_the_binary_kl_of_confident_tokens_in_float32(old, impl):
    """The decision is that of float64 for thresholds 1 % below and above the divergence."""
    logp = old / 3
    value = divergence(tensor([logp]), tensor([old]), config(surrogate="dppo_kl")).item()
    for factor, kept in ((0.99, 0), (1.01, 1)):
        given = given_logps([[logp]])
        out = focal_policy_loss(
            given.hidden.detach().float().requires_grad_(), given.head.float(), given.ids,
            torch.tensor([1.0]), old_logps=torch.tensor([[old]]), impl=impl,
            config=config(surrogate="dppo_kl", clip_eps_high=factor * value),
        )  # fmt: skip
        assert out.metrics["clip_binding_fraction"] == 1 - kept
        assert (out.per_token_loss != 0).item() == kept


# Log-probs, log-ratios, mask and advantages; loss and its gradient by the `_compute_loss` of TRL
# 1.16.0's GRPOTrainer and, for gmpo, GMPOTrainer, in float64.
LOGPS = [[-1.0, -0.6, -2.0], [-0.3, -1.5, -0.9], [-1.2, -0.7, -0.4], [-0.8, -0.2, -1.1]]
LOG_RATIOS = [[0.1, -0.3, 0.5], [0.2, 0.45, -0.1], [-0.55, 0.3, 0.05], [0.6, -0.1, -0.2]]
VALID = torch.tensor([[True] * 3, [True, True, False], [True] * 3, [True, False, False]])
ADVANTAGES = [1.0, -0.5, 0.8, -1.5]
ROLLOUT_WEIGHTS = [[1.1, 0.9, 1.05], [0.8, 1.2, 1.0], [1.0, 0.95, 1.3], [1.25, 1.0, 1.0]]
TRL = {
    "sapo": (
        PolicyLossConfig.sapo(reduction="sequence_mean"), 0.352900812002,
        [[-0.09184337423, -0.060709587, -0.1238948842], [0.07531550022, 0.08978660516, 0.0],
         [-0.03679242341, -0.08729206653, -0.07003870155], [0.5702921255, 0.0, 0.0]],
    ),
    "sapo-sequence": (
        PolicyLossConfig.sapo(reduction="sequence_mean", ratio_level="sequence"), 0.376847441783,
        [[-0.09184337423] * 3, [0.08307883293, 0.08307883293, 0.0], [-0.0623023256] * 3,
         [0.5702921255, 0.0, 0.0]],
    ),
    "vespo": (
        PolicyLossConfig.vespo(), 0.222789303422,
        [[-0.07087758818] * 3, [0.06257099694, 0.06257099694, 0.0], [-0.1026366305] * 3,
         [0.194758087, 0.0, 0.0]],
    ),
    "vespo-rollout": (
        PolicyLossConfig.vespo(rollout_correction="truncate"), 0.198604548139,
        [[-0.06526628978] * 3, [0.0645267035, 0.0645267035, 0.0], [-0.08789400944] * 3,
         [0.1529528131, 0.0, 0.0]],
    ),
    "gmpo": (
        PolicyLossConfig.gmpo(), 0.401962207451,
        [[-0.08907825881, -0.08907825881, 0.0], [0.08650191537, 0.08650191537, 0.0],
         [-0.06236713234] * 3, [0.6832945501, 0.0, 0.0]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", TRL)
def test_as_trl(case, impl):
    settings, loss, gradient = TRL[case]
    old = tensor(LOGPS) - tensor(LOG_RATIOS)
    rollout = None if settings.rollout_correction is None else old - tensor(ROLLOUT_WEIGHTS).log()
    arguments = dict(completion_mask=VALID, old_logps=old, rollout_logps=rollout)
    value, dlogps, _ = run(LOGPS, ADVANTAGES, impl, settings, **arguments)
    # the ten or twelve digits that are written here
    assert value.item() == pytest.approx(loss, rel=1e-11)
    torch.testing.assert_close(dlogps, tensor(gradient), rtol=1e-9, atol=0)


def test_constants_are_data_to_the_kernels():
    """A schedule of any constant compiles nothing again: all that is compiled in is the same."""
    for surrogate, level in OBJECTIVES:
        case = next(cases(f"{surrogate}-{level}-token_mean-k3"))
        same = PolicyLossConfig(
            surrogate=surrogate, ratio_level=level, kl_coef=0.7, dual_clip=case.config.dual_clip
        )
        flags = (
            triton_objective.objective_flags(c, has_old_logps=True) for c in (case.config, same)
        )
        assert len({tuple(f.items()) for f in flags}) == 1


def test_vespo_needs_to_know_the_sequences():
    inputs = make_inputs(2, 3, 4, 7, group_size=2)
    arguments = {k: v for k, v in inputs.arguments().items() if k != "success_rate"}
    packed = {k: v.flatten(0, 1) for k, v in arguments.items() if v is not None and v.dim() > 1}
    packed["lm_head_weight"] = inputs.lm_head_weight
    with pytest.raises(ValueError, match="cu_seqlens: .* needed for surrogate='vespo'"):
        focal_policy_loss(**packed, advantages=torch.ones(6), config=PolicyLossConfig.vespo())
