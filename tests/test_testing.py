"""The shared input factory does what its docstring says; the error rule rejects bad kernels."""

import pytest
import torch

from fgrpo_kernels.testing import assert_error_rule, lm_like_inputs, make_inputs


def full_log_probs(inputs):
    return (inputs.hidden.detach() @ inputs.lm_head_weight.detach().T).log_softmax(-1)


def test_the_same_arguments_give_the_same_inputs():
    first, second, other = make_inputs(seed=3), make_inputs(seed=3), make_inputs(seed=4)
    for name, value in first.arguments().items():
        if value is not None:
            assert torch.equal(value, getattr(second, name)), name
    assert not torch.equal(first.hidden, other.hidden)


def test_tokens_are_drawn_from_the_models_distribution():
    inputs = make_inputs(batch=64, length=64, vocab=30)
    log_probs = full_log_probs(inputs)
    logps = log_probs.gather(-1, inputs.completion_ids[..., None]).squeeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    # E[logp] = -H for each row; the mean of 4096 rows is within 4 standard errors of that
    surprise = logps + entropy
    assert surprise.mean().abs() < 4 * surprise.std() / 64


def test_other_policies_are_as_far_away_as_asked():
    inputs = make_inputs(batch=64, length=64, drift=0.1)
    logps = full_log_probs(inputs).gather(-1, inputs.completion_ids[..., None]).squeeze(-1)
    for name, base, distance in (
        ("old_logps", logps, 0.1),
        ("ref_logps", logps, 0.2),
        ("rollout_logps", inputs.old_logps, 0.05),
    ):
        values = getattr(inputs, name)
        assert (values <= 0).all()
        # the median leaves out those cut at 0: 0.6745 standard deviations, 4096 samples
        spread = (values - base).abs().median() / 0.6745
        assert spread == pytest.approx(distance, rel=0.1)


def test_lengths_are_ragged_and_the_longest_is_full():
    mask = make_inputs(batch=32, length=11, group_size=8).completion_mask
    lengths = mask.sum(1)
    assert lengths.max() == 11 and lengths.min() >= 6 and len(lengths.unique()) > 2
    assert torch.equal(mask, torch.arange(11) < lengths[:, None])


@pytest.mark.parametrize("share,count", [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_share_of_groups_without_advantage(share, count):
    inputs = make_inputs(batch=32, group_size=4, zero_advantage=share)
    groups = inputs.advantages.view(8, 4)
    assert (groups == 0).all(1).sum() == count
    assert ((groups != 0).all(1)).sum() == 8 - count
    rates = inputs.success_rate.view(8, 4)
    assert (rates == rates[:, :1]).all()
    positive = (groups > 0).float().mean(1)
    active = (groups != 0).all(1)
    assert torch.equal(positive[active], rates[active, 0])


def test_a_batch_that_is_no_multiple_of_the_group_is_refused():
    with pytest.raises(ValueError, match="batch: expected a multiple of group_size=4, received 6"):
        make_inputs(batch=6)


def test_the_float64_twin_has_the_same_values_and_its_own_leaves():
    inputs = make_inputs(dtype=torch.bfloat16)
    assert inputs.hidden.dtype == torch.bfloat16 and inputs.old_logps.dtype == torch.float32
    exact = inputs.to(torch.float64)
    for name, value in inputs.arguments().items():
        if value is not None and value.is_floating_point():
            twin = getattr(exact, name)
            assert twin.dtype == torch.float64 and torch.equal(twin, value.double()), name
    assert set(exact.leaves()) == set(inputs.leaves()) == {"hidden", "lm_head_weight"}
    assert all(leaf.is_leaf for leaf in exact.leaves().values())


def test_error_rule_compares_with_plain_torch():
    exact = torch.tensor([1.0, 100.0], dtype=torch.float64)
    plain = torch.tensor([1.0, 100.01])
    assert_error_rule("x", torch.tensor([1.0199, 100.0]), plain, exact)
    with pytest.raises(AssertionError, match="x: error 0.0301 over the budget 0.02.* flat index 0"):
        assert_error_rule("x", torch.tensor([1.0301, 100.0]), plain, exact)


def test_error_rule_grants_one_rounding_when_plain_torch_is_exact():
    exact = torch.tensor([1.0], dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    assert_error_rule("x", torch.tensor([1.0 + eps]), torch.tensor([1.0]), exact)
    with pytest.raises(AssertionError):
        assert_error_rule("x", torch.tensor([1.0 + 2 * eps]), torch.tensor([1.0]), exact)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_error_rule_rejects_nan_and_infinity(value):
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    with pytest.raises(AssertionError, match="flat index 1"):
        assert_error_rule("x", torch.tensor([1.0, value]), torch.tensor([1.1, 2.1]), exact)


@pytest.mark.parametrize("share,mean", [(0.8, 0.35), (0.5, 0.6), (1.0, 0.0)])
def test_inputs_like_a_language_model_have_the_entropies_asked_for(share, mean):
    inputs = lm_like_inputs(16, 16, 32, 500, confident_share=share, mean_entropy=mean)
    log_probs = full_log_probs(inputs).flatten(0, 1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    # the entropies are found by bisection in float32: two digits of the small ones survive
    assert (entropy < 0.0105).float().mean() == pytest.approx(share, abs=0.01)
    if share < 1:  # 4 standard errors of the uncertain rows, which are spread over 0 to 2 means
        assert entropy.mean() == pytest.approx(mean, abs=0.12)
    assert entropy.min() > 0.5e-4
    ids = inputs.completion_ids.flatten()
    surprise = log_probs[torch.arange(256), ids] + entropy
    assert surprise.mean().abs() < 4 * surprise.std() / 16  # drawn from the distribution
    again = lm_like_inputs(16, 16, 32, 500, confident_share=share, mean_entropy=mean)
    assert torch.equal(inputs.hidden, again.hidden)


def test_entropies_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"confident_share: expected.*received 1.2"):
        lm_like_inputs(confident_share=1.2)
    with pytest.raises(ValueError, match="mean_entropy: expected.*received 5.0"):
        lm_like_inputs(vocab=100, mean_entropy=5.0)
