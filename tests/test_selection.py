"""Leaving sequences out before the trunk must not change the gradient."""

from dataclasses import replace

import pytest
import torch
from train_parts import random_policy, sampled_batch

from fgrpo_kernels import PolicyLossConfig
from fgrpo_train.batching import Batch
from fgrpo_train.policy_with_loss import Denominators, PolicyWithLoss
from fgrpo_train.selection import drop_inactive

NUM_CORRECT = [0, 2, 4, 1, 0, 3]


def gradients(batch: Batch, counts: Denominators, config: PolicyLossConfig) -> list[torch.Tensor]:
    model, _ = random_policy()
    policy = PolicyWithLoss(model.double(), config)
    old_logps = torch.where(batch.completion_mask, batch.rollout_logps.double() + 0.1, 0.0)
    behind = replace(batch, old_logps=old_logps, ref_logps=old_logps - 0.2)
    policy(behind, counts).loss.backward()
    return [parameter.grad for parameter in policy.parameters()]


def counts_of(batch: Batch) -> Denominators:
    return Denominators(float(batch.completion_mask.sum()), float(len(batch)))


@pytest.mark.parametrize(
    "config",
    [
        PolicyLossConfig(),
        PolicyLossConfig.grpo(focal_gamma=0.5),
        PolicyLossConfig.gspo(focal_gamma=0.5),
        PolicyLossConfig.dr_grpo(fixed_length=12),
        PolicyLossConfig(entropy_coef=0.01),
        PolicyLossConfig(kl_coef=0.1),
    ],
    ids=["token_mean", "sequence_mean", "gspo", "fixed_length", "entropy", "kl"],
)
def test_dropping_zero_advantage_sequences_leaves_the_gradient_equal(config):
    """In float64, so that only the order of summation differs: 1e-12 of the gradients' scale."""
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=NUM_CORRECT)
    kept = drop_inactive(batch, config)
    expected = 24 if config.entropy_coef or config.kl_coef else 12
    assert len(kept) == expected, "groups without a right or without a wrong answer leave"
    counts = counts_of(batch)
    for whole, selected in zip(
        gradients(batch, counts, config), gradients(kept, counts, config), strict=True
    ):
        scale = float(whole.abs().max())
        torch.testing.assert_close(selected, whole, rtol=1e-12, atol=1e-12 * scale)


def test_the_denominators_must_be_those_before_the_selection():
    """The loss's own count of the kept tokens would scale the gradient up."""
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=NUM_CORRECT)
    kept = drop_inactive(batch, PolicyLossConfig())
    right = gradients(kept, counts_of(batch), PolicyLossConfig())[0]
    wrong = gradients(kept, counts_of(kept), PolicyLossConfig())[0]
    scale = counts_of(batch).valid_tokens / counts_of(kept).valid_tokens
    # The loss's coefficients are float32: each of the two is rounded, by 6e-8 of it.
    bound = 2e-7 * float(wrong.abs().max())
    torch.testing.assert_close(wrong, right * scale, rtol=0, atol=bound)
    assert scale > 1.5


def test_one_sequence_stays_when_none_is_active_and_its_gradient_is_zero():
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=[0, 4])
    kept = drop_inactive(batch, PolicyLossConfig())
    assert len(kept) == 1
    assert all(not g.any() for g in gradients(kept, counts_of(batch), PolicyLossConfig()))
