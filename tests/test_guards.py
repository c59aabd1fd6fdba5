"""What would be lost or wrong without a word is an error instead."""

import numpy as np
import pytest
import torch
from torch import nn

from fgrpo_kernels import (
    FocalPolicyLoss,
    PolicyLossConfig,
    focal_policy_loss,
    group_advantages,
    rollout_weights,
    token_logps,
)
from fgrpo_kernels.testing import make_inputs

CONFIG = PolicyLossConfig.grpo()
GSPO = PolicyLossConfig.gspo(max_chunk_bytes=1)  # not row-local: recomputes in the backward


def loss(inputs, config):
    return focal_policy_loss(**inputs.arguments(), config=config, impl="torch").loss


@pytest.mark.parametrize("config", [CONFIG, GSPO], ids=["row-local", "recompute"])
def test_a_penalty_on_the_gradient_raises(config):
    inputs = make_inputs(4, 5, 6, 11)
    (gradient,) = torch.autograd.grad(loss(inputs, config), inputs.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative.*reference"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("name", ["hidden", "lm_head_weight"])
def test_an_operand_written_to_before_the_backward_raises(name):
    inputs = make_inputs(4, 5, 6, 11)
    value = loss(inputs, GSPO)
    with torch.no_grad():
        getattr(inputs, name).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_token_logps_may_be_written_to():
    inputs = make_inputs(4, 5, 6, 11)
    arguments = (inputs.hidden, inputs.lm_head_weight, inputs.completion_ids)
    plain, _ = token_logps(*arguments)
    doubled, _ = token_logps(*arguments)
    assert torch.equal(doubled.mul_(2), 2 * plain)


def test_an_objective_in_another_dtype_keeps_the_loss_in_float32():
    inputs = make_inputs(4, 5, 6, 11)
    arguments = inputs.arguments()

    def wide(logps, rows):
        return (-rows.advantages * logps).double()

    config = PolicyLossConfig.grpo(focal_gamma=0.5)
    reinforce = PolicyLossConfig.grpo(focal_gamma=0.5, surrogate="reinforce")
    got = focal_policy_loss(**arguments, config=config, objective=wide).loss
    expected = focal_policy_loss(**arguments, config=reinforce).loss
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="floating-point losses, got torch.bool"):
        focal_policy_loss(**arguments, config=config, objective=lambda logps, rows: logps > 0)


def test_a_head_whose_weight_is_computed_is_refused():
    head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 11, bias=False))
    with pytest.raises(ValueError, match="weight .V, D. is a parameter"):
        FocalPolicyLoss(head)


def test_group_ids_of_tensors_are_their_numbers():
    rewards = [1.0, 0.0, 1.0, 1.0]
    ids = [torch.tensor(0), torch.tensor(0), torch.tensor(7), torch.tensor(7)]
    by_tensor = group_advantages(rewards, group_ids=ids)
    assert torch.equal(
        by_tensor.advantages, group_advantages(rewards, group_ids=[0, 0, 7, 7]).advantages
    )
    assert by_tensor.degenerate.tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match="group_ids.*NaN"):
        group_advantages(rewards, group_ids=[float("nan")] * 4)


def test_numpy_numbers_are_numbers():
    assert PolicyLossConfig(temperature=np.float32(0.5)) == PolicyLossConfig(temperature=0.5)


def test_rollout_weights_names_what_is_not_a_tensor_or_config():
    tensor = torch.zeros(2, 3)
    config = PolicyLossConfig(rollout_correction="truncate")
    with pytest.raises(ValueError, match="old_logps: expected a tensor, received list"):
        rollout_weights([[0.0]], tensor, None, config)
    with pytest.raises(ValueError, match="config: expected a PolicyLossConfig, received NoneType"):
        rollout_weights(tensor, tensor, None, None)


def test_a_row_without_a_possible_token_is_nan_as_in_the_reference():
    bias = torch.full((3,), -torch.inf)
    arguments = (torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([1]))
    for impl in ("reference", "torch", "triton"):
        logps, _ = token_logps(*arguments, lm_head_bias=bias, impl=impl)
        assert logps.isnan().all(), impl


def test_sizes_and_scales_that_hold_nothing_are_named():
    with pytest.raises(ValueError, match="logit_scale / temperature.*got inf|temperature"):
        PolicyLossConfig(temperature=1e-300)
    with pytest.raises(ValueError, match="lm_head_weight: expected V >= 1 and D >= 1"):
        token_logps(torch.zeros(1, 0), torch.zeros(3, 0), torch.tensor([1]))
    with pytest.raises(ValueError, match="cu_seqlens: expected an integer tensor of shape .B.1"):
        focal_policy_loss(
            torch.zeros(2, 1),
            torch.zeros(3, 1),
            torch.tensor([1, 1]),
            torch.zeros(0),
            cu_seqlens=torch.tensor([0]),
            config=PolicyLossConfig.dapo(),
        )
