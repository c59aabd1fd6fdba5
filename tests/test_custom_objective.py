"""A callable in place of the surrogate: equal to the built-in one, and what it is given."""

import pytest
import torch
from loss_cases import assert_same, gradients

from fgrpo_kernels import PolicyLossConfig, PolicyRows, focal_policy_loss
from fgrpo_kernels.testing import make_inputs

LOW, HIGH = 0.1, 0.15


def clip(logps, rows):
    ratio = torch.exp(logps - rows.old_logps)
    clipped = ratio.clamp(1 - LOW, 1 + HIGH)
    return -torch.minimum(ratio * rows.advantages, clipped * rows.advantages)


def cispo(logps, rows):
    ratio = torch.exp(logps.detach() - rows.old_logps)
    return -ratio.clamp(1 - LOW, 1 + HIGH) * rows.advantages * logps


def gspo(logps, rows):
    """The sequence-level clip: needs all rows of a sequence at once."""
    log_ratio = torch.where(rows.mask, logps - rows.old_logps, 0).detach()
    count = int(rows.sequence.max()) + 1
    sums = torch.zeros(count, dtype=logps.dtype).index_add(0, rows.sequence, log_ratio)
    tokens = torch.zeros(count, dtype=logps.dtype).index_add(
        0, rows.sequence, rows.mask.to(logps.dtype)
    )
    s = torch.exp(sums / tokens.clamp(min=1))[rows.sequence]
    ratio = s * torch.exp(logps - logps.detach())
    clipped = ratio.clamp(1 - LOW, 1 + HIGH)
    return -torch.minimum(ratio * rows.advantages, clipped * rows.advantages)


gspo.row_local = False

SETTINGS = [
    dict(),
    dict(reduction="sequence_mean", kl_coef=0.3, entropy_coef=0.05),
    dict(rollout_correction="mask", rollout_min=0.97, rollout_max=1.03, kl_coef=0.1),
    dict(rollout_correction="truncate", rollout_level="sequence", rollout_max=1.01),
]


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    "objective,built_in",
    [
        (clip, dict(surrogate="clip")),
        (cispo, dict(surrogate="cispo")),
        (gspo, dict(surrogate="clip", ratio_level="sequence")),
    ],
    ids=["clip", "cispo", "gspo"],
)
def test_a_callable_equals_the_built_in_surrogate(objective, built_in, old, settings, impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64)
    arguments = inputs.arguments()
    factors = torch.linspace(0.5, 1.5, 20, dtype=torch.float64).view(4, 5).requires_grad_()
    arguments["token_weights"] = factors
    if not old:
        arguments["old_logps"] = None
    # the objective replaces the surrogate: the config's own is another one, and not used
    config = PolicyLossConfig(
        surrogate="reinforce", clip_eps_low=LOW, clip_eps_high=HIGH, max_chunk_bytes=7 * 88,
        **settings,
    )  # fmt: skip
    same = PolicyLossConfig(clip_eps_low=LOW, clip_eps_high=HIGH, **{**built_in, **settings})
    expected = focal_policy_loss(**arguments, config=same, impl="reference")
    out = focal_policy_loss(**arguments, config=config, impl=impl, objective=objective)
    assert_same("loss", out.loss, expected.loss)
    assert_same("per_token_loss", out.per_token_loss, expected.per_token_loss)
    leaves = [inputs.hidden, inputs.lm_head_weight, factors]
    grads = torch.autograd.grad(out.loss, leaves)
    for grad, value in zip(grads, torch.autograd.grad(expected.loss, leaves), strict=True):
        assert_same("gradient", grad, value)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("row_local", [True, False])
def test_what_the_callable_is_given(row_local, impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, dtype=torch.float64, seed=2)
    weights = torch.linspace(0.5, 1.5, 20, dtype=torch.float64).view(4, 5)
    config = PolicyLossConfig(focal_gamma=0.5, max_chunk_bytes=7 * 88)
    seen = []

    def objective(logps, rows):
        assert isinstance(rows, PolicyRows)
        seen.append((logps.detach().clone(), rows))
        return -rows.advantages * logps

    objective.row_local = row_local
    out = focal_policy_loss(
        **{**inputs.arguments(), "token_weights": weights},
        config=config, objective=objective, impl=impl,
    )  # fmt: skip
    out.loss.backward()
    mask = inputs.completion_mask
    focal = (1 - inputs.success_rate).sqrt()[:, None]
    expected = {
        "logps": out.logps[mask],
        "old_logps": inputs.old_logps[mask],
        "ref_logps": inputs.ref_logps[mask],
        "rollout_logps": inputs.rollout_logps[mask],
        "advantages": (focal * weights * inputs.advantages[:, None])[mask],
        "sequence": torch.arange(4)[:, None].expand(4, 5)[mask],
    }
    total = int(mask.sum())
    for logps, rows in seen:
        assert rows.mask.all() and rows.sequence.dtype == torch.int64
        if not row_local:
            assert len(logps) == total
        # the rows of the call are valid positions, possibly a chunk of them, in any order:
        # find each by its log-prob and compare the rest
        where = torch.stack([(expected["logps"] - value).abs().argmin() for value in logps])
        for name, values in expected.items():
            actual = logps if name == "logps" else getattr(rows, name)
            assert_same(name, actual.detach(), values[where])
    longest = max(len(logps) for logps, _ in seen)
    assert longest == total
    if row_local and impl == "torch":
        assert min(len(logps) for logps, _ in seen) <= 7


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_on_policy_rows_have_the_detached_log_probs_as_old(impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)

    def objective(logps, rows):
        assert torch.equal(rows.old_logps, logps.detach()) and not rows.old_logps.requires_grad
        assert rows.ref_logps is None and rows.rollout_logps is None
        return -rows.advantages * torch.exp(logps - rows.old_logps)

    arguments = {**inputs.arguments(), "old_logps": None, "ref_logps": None, "rollout_logps": None}
    out = focal_policy_loss(**arguments, objective=objective, impl=impl)
    expected = focal_policy_loss(**arguments, impl="reference")
    torch.testing.assert_close(out.loss, expected.loss)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_rows_without_advantage_are_not_skipped(impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2, zero_advantage=1.0, dtype=torch.float64)
    assert (inputs.advantages == 0).all()

    def objective(logps, rows):
        return logps.square()

    out = focal_policy_loss(
        **inputs.arguments(), objective=objective, impl=impl, return_logps=False
    )
    exact = focal_policy_loss(**inputs.arguments(), impl="reference")
    mask = inputs.completion_mask
    assert_same("loss", out.loss, exact.logps[mask].square().mean())
    assert out.metrics["active_fraction"] == 1
    assert gradients(out.loss, inputs)["hidden"].abs().max() > 0


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize(
    "result,received",
    [
        (lambda logps: logps.sum(), r"\(\)"),
        (lambda logps: 1.0, "float"),
        (lambda logps: None, "None"),
    ],
    ids=["scalar", "float", "none"],
)
def test_a_wrong_result_is_named(result, received, impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)
    with pytest.raises(ValueError, match=f"objective.*shape.*{received}"):
        focal_policy_loss(
            **inputs.arguments(), objective=lambda logps, rows: result(logps), impl=impl
        )


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("row_local", [True, False])
def test_an_objective_without_gradient_gives_zero_gradients(row_local, impl):
    inputs = make_inputs(4, 5, 6, 11, group_size=2)

    def objective(logps, rows):
        return torch.ones_like(logps)

    objective.row_local = row_local
    out = focal_policy_loss(**inputs.arguments(), objective=objective, impl=impl)
    assert out.loss == 1
    for grad in gradients(out.loss, inputs).values():
        assert (grad == 0).all()


def test_an_error_of_the_callable_is_passed_on():
    def objective(logps, rows):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        focal_policy_loss(**make_inputs().arguments(), objective=objective)
