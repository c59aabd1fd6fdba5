"""FIPO's future-KL weights and lambda-GRPO's length weights."""

import math

import pytest
import torch

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, future_kl_weights, length_weights
from fgrpo_kernels.testing import make_inputs

LOG2 = math.log(2)


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def full(tensor):
    return torch.ones_like(tensor, dtype=torch.bool)


def future(log_ratio, advantages=None, mask=None, **options):
    old = torch.full_like(log_ratio, -3.0)
    advantages = log_ratio.new_ones(len(log_ratio)) if advantages is None else advantages
    mask = full(log_ratio) if mask is None else mask
    return future_kl_weights(old + log_ratio, old, mask, advantages, **options)


def test_future_log_ratios_count_half_after_the_half_life():
    """half_life 1: F = [log 2 + 1/2 log(1/2), log(1/2)]; the second is below the lower bound 0.1.

    exp F = [sqrt 2, 1/2], as ms-swift's own test has it.
    """
    log_ratio = rows([LOG2, -LOG2])
    wide = future(log_ratio, half_life=1, clip_range=0.9, clip_high_only=False)
    torch.testing.assert_close(wide, rows([2**0.5, 0.5]), rtol=0, atol=1e-14)
    narrow = future(log_ratio, half_life=1, clip_high_only=False)
    torch.testing.assert_close(narrow, rows([1.2, 0.8]), rtol=0, atol=1e-15)
    high_only = future(log_ratio, half_life=1)
    torch.testing.assert_close(high_only, rows([1.2, 1.0]), rtol=0, atol=1e-15)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_blocks_agree_with_the_sum_over_the_future(length):
    """Float64; 300 terms of size 0.02."""
    generator = torch.Generator().manual_seed(0)
    log_ratio = 0.02 * torch.randn(3, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, length, generator=generator) < 0.9
    weights = future(log_ratio, mask=mask, clip_range=0.9, clip_high_only=False)
    counted = torch.where(mask, log_ratio, 0)
    for t in range(length):
        powers = 2 ** (-torch.arange(length - t, dtype=torch.float64) / 32)
        expected = torch.where(mask[:, t], (counted[:, t:] @ powers).exp(), 1)
        torch.testing.assert_close(weights[:, t], expected.clamp(0.1, 1.9), rtol=0, atol=1e-13)


def test_on_policy_weights_are_exactly_one_and_constant():
    logps = torch.randn(2, 200, requires_grad=True)
    weights = future_kl_weights(logps, logps.detach(), full(logps), torch.tensor([1.0, -1.0]))
    assert torch.equal(weights, torch.ones(2, 200)) and not weights.requires_grad


def test_tokens_over_the_dual_clip_leave_the_sum():
    # ratio e^2.4 = 11 > 10 leaves, e^2.2 = 9 stays
    log_ratio = rows([0.01, 2.4], [0.01, 2.2])
    weights = future(log_ratio, clip_range=0.9)
    torch.testing.assert_close(weights[:, 0], rows(math.exp(0.01), 1.9), rtol=0, atol=1e-14)
    assert weights[0, 1] == 1


def test_a_runaway_token_with_negative_advantage_is_not_pushed_harder():
    """Ratio 11 over the threshold 10: its weight is at most 1; by sign of the token's advantage."""
    log_ratio = rows([2.4, 0.5, 0.5])
    for advantages, expected in (
        (rows(1.0), [1.2, 1.2, 1.2]),
        (rows(-1.0), [1.0, 1.2, 1.2]),
        (rows([1.0, -1.0, -1.0]), [1.2, 1.2, 1.2]),
    ):
        weights = future(log_ratio, advantages, clip_high_only=False)
        torch.testing.assert_close(weights, rows(expected), rtol=0, atol=1e-15)
    low = future(rows([2.4, -3.0]), rows(-1.0), clip_range=0.9, clip_high_only=False)
    torch.testing.assert_close(low, rows([0.8, 0.1]), rtol=0, atol=1e-15)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_garbage_is_ignored_and_gets_weight_one(garbage):
    log_ratio = rows([0.1, 0.2, 0.0])
    clean = future(log_ratio, mask=torch.tensor([[True, True, False]]))
    dirty = log_ratio.clone()
    dirty[0, 2] = garbage
    assert torch.equal(future(dirty, mask=torch.tensor([[True, True, False]])), clean)
    assert clean[0, 2] == 1


def test_a_token_that_became_impossible_takes_the_lowest_weight_not_nan():
    weights = future(rows([0.1, -math.inf, 0.1]), clip_high_only=False)
    torch.testing.assert_close(weights, rows([0.8, 0.8, math.exp(0.1)]), rtol=0, atol=1e-14)


def test_future_weights_scale_the_gradient_of_their_tokens():
    """cispo inside its bounds: dloss/dlogp = -ratio weight A, token by token (float64)."""
    inputs = make_inputs(dtype=torch.float64, drift=0.05)
    config = PolicyLossConfig.cispo()
    mask = inputs.completion_mask

    def gradient(**extra):
        given = inputs.to(torch.float64)
        out = focal_policy_loss(**(given.arguments() | extra), config=config)
        out.loss.backward()
        return out, given.hidden.grad

    out, plain = gradient()
    weights = future_kl_weights(out.logps, inputs.old_logps, mask, inputs.advantages)
    _, weighted = gradient(token_weights=weights)
    assert weights[mask].max() > 1.01, "off-policy they do something"
    torch.testing.assert_close(weighted, plain * weights[..., None], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"half_life": 0}, "half_life: expected a number > 0, received 0"),
        ({"dual_clip": 1}, "dual_clip: expected a number > 1, received 1"),
        ({"clip_range": 1}, r"clip_range: expected a number in \[0, 1\), received 1"),
        ({"advantages": torch.ones(3)}, r"advantages: expected shape \(1,\) or \(1, 2\).*\(3,\)"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, r"completion_mask: expected shape \(1, 2\)"),
    ],
)
def test_future_errors(options, message):
    with pytest.raises(ValueError, match=message):
        future(rows([0.1, 0.2]), **options)


def test_lam_zero_weighs_all_lengths_the_same():
    weights = length_weights(torch.tensor([3, 50, 7, 700]), 0.0, group_size=2)
    assert weights.tolist() == [1, 1, 1, 1]


def test_length_weights_by_hand():
    """Lengths 1 and 3: z = -1, 1 up to 1e-6; h = 8/9, 10/9; softmax of h^lam, times 2."""
    for lam in (1.0, -2.0, 5.0):
        low, high = (math.exp((h / 9) ** lam) for h in (8, 10))
        expected = torch.tensor([2 * low, 2 * high], dtype=torch.float64) / (low + high)
        lam = torch.tensor(lam, dtype=torch.float64)
        weights = length_weights(torch.tensor([1, 3]), lam, group_size=2)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    longer = length_weights(torch.tensor([1, 3, 5, 5]), 1.0, group_ids=["a", "a", "b", "b"])
    assert longer[0] < 1 < longer[1] and longer[2:].tolist() == [1, 1]


def test_weights_of_a_group_have_mean_one_also_with_an_outlier_in_a_large_group():
    """G = 200 with one long outlier has z = 14; with one short one z = -14, where h is held up."""
    lengths = torch.full((400,), 50)
    lengths[0], lengths[200] = 5000, 1
    for lam in (-500.0, -3.0, 0.5, 3.0, 500.0):
        weights = length_weights(lengths, lam, group_size=200)
        assert weights.isfinite().all() and (weights >= 0).all()
        torch.testing.assert_close(weights.view(2, 200).mean(1), torch.ones(2), rtol=0, atol=1e-5)


def test_the_gradient_reaches_lam():
    """Through the loss, against central differences in float64: their error is about 1e-10."""
    inputs = make_inputs(dtype=torch.float64)
    lengths = inputs.completion_mask.sum(1)
    config = PolicyLossConfig.dapo(focal_gamma=0.5)

    def loss(lam):
        weights = length_weights(lengths, lam, group_size=4)
        weights = weights[:, None].expand(inputs.completion_ids.shape)
        return focal_policy_loss(
            **(inputs.arguments() | {"token_weights": weights}), config=config
        ).loss

    for value in (0.0, 0.7):
        lam = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        loss(lam).backward()
        high, low = (float(loss(lam.detach() + step).detach()) for step in (1e-5, -1e-5))
        assert float(lam.grad) == pytest.approx((high - low) / 2e-5, rel=1e-6, abs=1e-9)
        assert abs(float(lam.grad)) > 1e-5


@pytest.mark.parametrize(
    "lengths,lam,groups,message",
    [
        ([1, 2], 0.0, {"group_size": 2}, "lengths: expected a tensor"),
        (torch.ones(2, 2), 0.0, {"group_size": 2}, r"lengths: .*received \(2, 2\)"),
        (torch.ones(2), torch.ones(1), {"group_size": 2}, r"lam: expected.*received \(1,\)"),
        (torch.ones(2), 0.0, {}, "expected exactly one of group_size and group_ids"),
    ],
)
def test_length_errors(lengths, lam, groups, message):
    with pytest.raises(ValueError, match=message):
        length_weights(lengths, lam, **groups)
