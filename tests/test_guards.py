"""What would be lost or wrong without a word is an error instead."""

import numpy as np
import pytest
import torch
from torch import nn

from fgrpo_kernels import (
    FocalPolicyLoss,
    PolicyLossConfig,
    focal_policy_loss,
    focal_weight,
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
    with pytest.raises(ValueError, match="group_ids.*nan"):
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


def test_an_objective_that_writes_to_its_rows_writes_to_copies():
    inputs = make_inputs(4, 5, 6, 11)
    old_logps = inputs.old_logps.clone()

    def writes(logps, rows):
        rows.advantages.mul_(2)
        rows.old_logps.zero_()
        return -logps * rows.advantages

    values = {
        impl: focal_policy_loss(**inputs.arguments(), impl=impl, objective=writes)
        for impl in ("torch", "reference")
    }
    assert torch.allclose(values["torch"].loss, values["reference"].loss, rtol=1e-5)
    assert torch.equal(inputs.old_logps, old_logps)


def test_a_penalty_on_the_gradient_of_token_weights_raises():
    inputs = make_inputs(4, 5, 6, 11)
    weights = torch.ones(4, 5, requires_grad=True)
    output = focal_policy_loss(**inputs.arguments() | {"token_weights": weights}, config=CONFIG)
    (gradient,) = torch.autograd.grad(output.loss, weights, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.square().sum().backward()


def test_module_hooks_see_the_loss():
    """Engines that shard parameters gather them again in a backward hook of the module."""
    inputs = make_inputs(4, 5, 6, 11)
    head = nn.Linear(6, 11, bias=False)
    module = FocalPolicyLoss(head, PolicyLossConfig.dapo())
    fired = []
    module.register_full_backward_pre_hook(lambda module, gradients: fired.append(gradients))
    output = module(inputs.hidden, inputs.completion_ids, inputs.advantages)
    output.loss.backward()
    assert len(fired) == 1
    assert head.weight.grad is not None


@pytest.mark.parametrize(
    "rewards, kwargs, message",
    [
        (
            [1e308, -1e308, 0.0],
            {"group_size": 3, "correct": [1, 0, 0]},
            "rewards: expected finite values",
        ),
        ([1.0, 0.0], {"group_ids": torch.tensor([torch.nan, torch.nan])}, "group_ids.*NaN"),
        ([1.0, 0.0], {"group_ids": [[1], [1]]}, r"group_ids: expected numbers.*\[1\]"),
        ([1.0, 0.0], {"group_ids": 3}, "group_ids: expected 2 ids, received int"),
        ([1.0, 0.0], {"group_size": 2, "estimator": ["grpo"]}, "estimator: expected one of"),
    ],
)
def test_group_advantages_names_what_it_cannot_use(rewards, kwargs, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, **kwargs)


@pytest.mark.parametrize("rate, gamma", [(None, 1.0), ([0.5], "1"), (torch.tensor([1j]), 1.0)])
def test_focal_weight_names_what_it_cannot_use(rate, gamma):
    with pytest.raises(ValueError, match="success_rate: expected|gamma: expected"):
        focal_weight(rate, gamma)


def test_unused_rollout_bounds_are_accepted():
    PolicyLossConfig(rollout_min=3.0, rollout_max=2.0)
    with pytest.raises(ValueError, match="rollout_min"):
        PolicyLossConfig(rollout_min=3.0, rollout_max=2.0, rollout_correction="mask")
