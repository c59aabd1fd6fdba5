"""Metrics by their formulas on numbers that can be checked by hand, over the final mask M."""

import math
from dataclasses import replace

import pytest
import torch
from loss_cases import given_logps

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss
from fgrpo_kernels.testing import make_inputs

E = math.exp
NAMES = {
    "clip_fraction_high",
    "clip_fraction_low",
    "clip_binding_fraction",
    "ratio_mean",
    "ratio_max",
    "approx_kl",
    "kl",
    "entropy",
    "active_fraction",
    "focal_weight_mean",
    "rollout_weight_mean",
    "rejected_fraction",
    "sparse_row_fraction",
    "grad_error_bound",
}


@pytest.fixture(params=["reference", "torch", "triton"])
def impl(request):
    return request.param


# Two sequences, A = 1 and -1; log-ratios row by row; the last position of row 0 is masked.
LOGPS = [[-1.0] * 4] * 2
LOG_RATIO = [[0.3, -0.3, -0.35, 5.0], [0.4, 0.5, -0.4, 0.1]]
MASK = [[True, True, True, False], [True] * 4]
VALID = [*LOG_RATIO[0][:3], *LOG_RATIO[1]]


def metrics(impl, *, config=None, advantages=(1.0, -1.0), **kwargs):
    given = given_logps(LOGPS)
    log_ratio = torch.tensor(LOG_RATIO, dtype=torch.float64)
    arguments = dict(
        old_logps=given.logps - log_ratio,
        completion_mask=torch.tensor(MASK),
        config=config or PolicyLossConfig(focal_gamma=0.0),
        impl=impl,
    )
    out = focal_policy_loss(
        given.hidden,
        given.head,
        given.ids,
        torch.tensor(advantages, dtype=torch.float64),
        **arguments | kwargs,
    )
    assert out.metrics.keys() == out.metric_sums.keys() == NAMES
    for name, (numerator, count) in out.metric_sums.items():
        assert numerator.shape == count.shape == out.metrics[name].shape == ()
        assert not numerator.requires_grad and not out.metrics[name].requires_grad
        assert out.metrics[name] == (numerator / count if count else 0)
    return {name: value.item() for name, value in out.metrics.items()}, out


def test_ratio_metrics(impl):
    values, out = metrics(impl)
    expected = {
        "clip_fraction_high": 3 / 7,  # e^0.3, e^0.4 and e^0.5 are over 1.2
        "clip_fraction_low": 3 / 7,  # e^-0.3, e^-0.35 and e^-0.4 are under 0.8
        "clip_binding_fraction": 2 / 7,  # e^0.3 with A > 0, e^-0.4 with A < 0
        "ratio_mean": sum(E(x) for x in VALID) / 7,
        "ratio_max": E(0.5),
        "approx_kl": sum(E(-x) - 1 + x for x in VALID) / 7,
        "kl": 0,
        "entropy": -(E(-1) * -1 + (1 - E(-1)) * math.log(1 - E(-1))),
        "active_fraction": 1,
        "focal_weight_mean": 1,
        "rollout_weight_mean": 1,
        "rejected_fraction": 0,
        "sparse_row_fraction": 0,
        "grad_error_bound": 0,
    }
    assert values == pytest.approx(expected, rel=1e-9)
    assert out.metric_sums["ratio_mean"][1] == 7
    assert out.metric_sums["ratio_max"][1] == 1


@pytest.mark.parametrize("surrogate", ["cispo", "reinforce", "sapo", "vespo"])
def test_clip_fractions_are_reported_for_every_surrogate(surrogate, impl):
    config = PolicyLossConfig(surrogate=surrogate, focal_gamma=0.0)
    values, _ = metrics(impl, config=config)
    assert values["clip_fraction_high"] == values["clip_fraction_low"] == pytest.approx(3 / 7)
    assert values["clip_binding_fraction"] == pytest.approx(2 / 7)


def test_clip_fractions_of_a_geometric_mean_are_of_the_log_ratio(impl):
    config = PolicyLossConfig(
        ratio_level="geometric_mean", focal_gamma=0.0, clip_eps_low=0.32, clip_eps_high=0.35
    )
    values, _ = metrics(impl, config=config)
    assert values["clip_fraction_high"] == pytest.approx(2 / 7)  # 0.4 and 0.5 are over 0.35
    assert values["clip_fraction_low"] == pytest.approx(2 / 7)  # -0.35 and -0.4 are under -0.32
    assert values["clip_binding_fraction"] == pytest.approx(1 / 7)  # -0.4 with A < 0
    assert values["ratio_mean"] == pytest.approx(sum(E(x) for x in VALID) / 7, rel=1e-9)


@pytest.mark.parametrize("surrogate", ["dppo_tv", "dppo_kl"])
def test_clip_fractions_of_dppo_are_of_the_divergence(surrogate, impl):
    """p = e^-1, p_old = e^(-1 - x): |p - p_old| and KL at the log-ratios x of `VALID`."""
    p = E(-1)

    def divergence(x):
        q = E(-1 - x)
        if surrogate == "dppo_tv":
            return abs(p - q)
        return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))

    # between the smaller and the larger moves: 0.3 < 0.4 up, -0.3 < -0.35 down
    high = (divergence(0.3) + divergence(0.4)) / 2
    low = (divergence(-0.3) + divergence(-0.35)) / 2
    config = PolicyLossConfig(
        surrogate=surrogate, focal_gamma=0.0, clip_eps_low=low, clip_eps_high=high
    )
    values, _ = metrics(impl, config=config)
    assert values["clip_fraction_high"] == pytest.approx(2 / 7)  # 0.4, 0.5
    assert values["clip_fraction_low"] == pytest.approx(2 / 7)  # -0.35, -0.4
    assert values["clip_binding_fraction"] == pytest.approx(1 / 7)  # -0.4 with A < 0


def test_sequence_ratio_metrics(impl):
    config = PolicyLossConfig(
        ratio_level="sequence", focal_gamma=0.0, clip_eps_low=0.01, clip_eps_high=0.02
    )
    values, _ = metrics(impl, config=config)
    s = [E(-0.35 / 3), E(0.6 / 4)]  # mean log-ratios of the two sequences
    assert values["ratio_mean"] == pytest.approx((3 * s[0] + 4 * s[1]) / 7, rel=1e-9)
    assert values["ratio_max"] == pytest.approx(s[1], rel=1e-9)
    assert values["clip_fraction_high"] == pytest.approx(4 / 7)
    assert values["clip_fraction_low"] == pytest.approx(3 / 7)
    assert values["clip_binding_fraction"] == 0  # below with A > 0, above with A < 0
    token_level, _ = metrics(impl)
    assert values["approx_kl"] == pytest.approx(token_level["approx_kl"], rel=1e-9)


@pytest.mark.parametrize(
    "estimator,value",
    [("k1", 0.5), ("k2", 0.125), ("k3", E(-0.5) + 0.5 - 1)],
)
def test_kl_metric_is_the_configured_estimator(estimator, value, impl):
    ref = torch.tensor(LOGPS, dtype=torch.float64) - 0.5
    config = PolicyLossConfig(focal_gamma=0.0, kl_coef=0.1, kl_estimator=estimator)
    values, _ = metrics(impl, config=config, ref_logps=ref)
    assert values["kl"] == pytest.approx(value, rel=1e-9)


def test_approx_kl_is_bounded_far_away(impl):
    old = torch.tensor(LOGPS, dtype=torch.float64) + 100.0  # log-ratio -100: exp taken at 20
    values, _ = metrics(impl, old_logps=old)
    assert values["approx_kl"] == pytest.approx(E(20) - 1 - 100, rel=1e-9)
    assert values["ratio_mean"] == pytest.approx(E(-20), rel=1e-9)


def test_active_fraction_counts_what_may_have_a_gradient(impl):
    advantages = torch.tensor([1.0, 0.0], dtype=torch.float64)
    given = given_logps(LOGPS)
    mask = torch.tensor(MASK)

    def active(**kwargs):
        config = PolicyLossConfig(**{"focal_gamma": 0.0} | kwargs)
        out = focal_policy_loss(
            given.hidden, given.head, given.ids, advantages, torch.tensor([0.5, 0.5]).double(),
            completion_mask=mask, ref_logps=given.logps, config=config, impl=impl,
        )  # fmt: skip
        return out.metrics["active_fraction"].item()

    assert active() == pytest.approx(3 / 7)
    assert active(kl_coef=0.1) == 1
    assert active(entropy_coef=0.1) == 1


def test_focal_weight_mean_is_over_sequences_with_a_valid_token(impl):
    mask = torch.tensor([[True] * 4, [False] * 4])
    config = PolicyLossConfig(focal_gamma=0.5)
    rate = torch.tensor([0.75, 0.0], dtype=torch.float64)
    values, out = metrics(impl, config=config, success_rate=rate, completion_mask=mask)
    assert values["focal_weight_mean"] == pytest.approx(0.5, rel=1e-9)
    values, _ = metrics(impl, config=config, success_rate=rate)
    assert values["focal_weight_mean"] == pytest.approx(0.75, rel=1e-9)


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_rollout_metrics(correction, impl):
    # weights e^d with d = old - rollout
    d = torch.tensor([[0.1, -0.1, 0.3, 0.0], [0.9, 0.2, -2.0, 0.1]], dtype=torch.float64)
    old = torch.tensor(LOGPS, dtype=torch.float64) - torch.tensor(LOG_RATIO, dtype=torch.float64)
    config = PolicyLossConfig(
        focal_gamma=0.0,
        rollout_correction=correction,
        rollout_min=0.5 if correction == "mask" else None,
    )
    values, out = metrics(impl, config=config, rollout_logps=old - d)
    if correction == "truncate":
        weights = [E(0.1), E(-0.1), E(0.3), 2.0, E(0.2), E(-2.0), E(0.1)]
        assert values["rejected_fraction"] == 0
        assert out.metric_sums["ratio_mean"][1] == 7
    else:
        weights = [E(0.1), E(-0.1), E(0.3), E(0.2), E(0.1)]
        assert values["rejected_fraction"] == pytest.approx(2 / 7)
        assert out.metric_sums["ratio_mean"][1] == 5  # metrics are over M
        assert values["ratio_max"] == pytest.approx(E(0.5), rel=1e-9)
    assert values["rollout_weight_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-9)


def test_all_metrics_are_zero_when_everything_is_rejected(impl):
    old = torch.tensor(LOGPS).double()
    config = PolicyLossConfig(focal_gamma=0.0, rollout_correction="mask")
    values, _ = metrics(impl, config=config, old_logps=old, rollout_logps=old - 5.0)
    assert values.pop("rejected_fraction") == 1
    assert values.pop("focal_weight_mean") == 1  # over sequences with a token in the input mask
    assert set(values.values()) == {0.0}


def test_without_logps_token_metrics_cover_the_scored_rows():
    values, out = metrics("torch", advantages=(1.0, 0.0), return_logps=False)
    assert values["ratio_mean"] == pytest.approx(sum(E(x) for x in VALID[:3]) / 3, rel=1e-9)
    assert out.metric_sums["ratio_mean"][1] == 3
    assert values["active_fraction"] == pytest.approx(3 / 7)  # still of all of M
    assert values["rejected_fraction"] == 0


def test_sums_over_micro_batches_give_the_metrics_of_the_whole(impl):
    inputs = make_inputs(8, 4, 5, 7, group_size=2, dtype=torch.float64)
    config = PolicyLossConfig(kl_coef=0.1, rollout_correction="mask", rollout_max=1.05)
    whole = focal_policy_loss(**inputs.arguments(), config=config, impl=impl).metrics
    parts = []
    for rows in (slice(0, 2), slice(2, 8)):
        cut = {
            name: value[rows] if value is not None and name != "lm_head_weight" else value
            for name, value in inputs.arguments().items()
        }
        parts.append(focal_policy_loss(**cut, config=config, impl=impl).metric_sums)
    for name, value in whole.items():
        if name == "ratio_max":
            total = max(part[name][0] for part in parts)
        else:
            count = sum(part[name][1] for part in parts)
            total = sum(part[name][0] for part in parts) / max(count, 1)
        assert float(total) == pytest.approx(float(value), rel=1e-9, abs=1e-12), name


def test_metrics_do_not_depend_on_what_is_masked(impl):
    inputs = make_inputs(4, 4, 5, 7, group_size=2)
    masked = ~inputs.completion_mask
    config = PolicyLossConfig(kl_coef=0.1, rollout_correction="truncate")
    clean = focal_policy_loss(**inputs.arguments(), config=config, impl=impl).metrics
    spoiled = replace(
        inputs,
        **{
            name: getattr(inputs, name).masked_fill(masked, math.nan)
            for name in ("old_logps", "ref_logps", "rollout_logps")
        },
    )
    dirty = focal_policy_loss(**spoiled.arguments(), config=config, impl=impl).metrics
    for name, value in clean.items():
        assert torch.equal(value, dirty[name]), name
