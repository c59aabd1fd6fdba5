"""rollout_weights by hand, and its use in place of the loss's own correction."""

from dataclasses import replace

import pytest
import torch
from loss_cases import CORRECTIONS, assert_same, gradients

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, rollout_weights
from fgrpo_kernels.testing import make_inputs

OLD = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0]], dtype=torch.float64)
D = torch.tensor([[0.1, -0.1, 9.0], [0.9, 0.2, -2.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, True]])


def weights(**kwargs):
    return rollout_weights(OLD, OLD - D, MASK, PolicyLossConfig(**kwargs))


def test_token_truncate():
    values, mask = weights(rollout_correction="truncate")
    expected = D.exp().clamp(max=2.0)
    assert_same("weights", values[MASK], expected[MASK])
    assert (values[~MASK] == 0).all() and torch.equal(mask, MASK)


def test_token_mask_keeps_the_weight_of_survivors():
    values, mask = weights(rollout_correction="mask", rollout_min=0.5)
    assert_same("weights", values[MASK], D.exp()[MASK])  # rejected tokens keep theirs
    assert mask.tolist() == [[True, True, False], [False, True, False]]


def test_mask_without_lower_bound():
    _, mask = weights(rollout_correction="mask")
    assert mask.tolist() == [[True, True, False], [False, True, True]]


def test_sequence_level_takes_the_mean_over_the_input_mask():
    mean = torch.tensor([0.0, (0.9 + 0.2 - 2.0) / 3], dtype=torch.float64)
    values, mask = weights(rollout_correction="truncate", rollout_level="sequence")
    assert_same("weights", values, torch.where(MASK, mean.exp()[:, None], 0))
    values, mask = weights(rollout_correction="mask", rollout_level="sequence", rollout_min=0.9)
    assert mask.tolist() == [[True, True, False], [False, False, False]]


def test_weights_are_bounded_and_a_nan_is_kept():
    old = torch.tensor([[0.0, 0.0, 0.0]])
    rollout = torch.tensor([[-100.0, 100.0, torch.nan]])
    config = PolicyLossConfig(rollout_correction="mask", rollout_max=1e9)
    values, mask = rollout_weights(old, rollout, None, config)
    torch.testing.assert_close(values[0, :2], torch.tensor([20.0, -20.0]).exp())
    assert values[0, 2].isnan() and mask.all()  # it must surface, not vanish


def test_detached_and_dtype():
    old = OLD.float().requires_grad_()
    values, mask = rollout_weights(
        old, OLD.float(), MASK, PolicyLossConfig(rollout_correction="mask")
    )
    assert not values.requires_grad and values.dtype == torch.float32 and mask.dtype == torch.bool
    narrow, _ = rollout_weights(
        OLD.bfloat16(), OLD.bfloat16(), MASK, PolicyLossConfig(rollout_correction="mask")
    )
    assert narrow.dtype == torch.float32


def test_garbage_at_masked_positions_is_ignored():
    rollout = (OLD - D).masked_fill(~MASK, torch.nan)
    for correction, level in CORRECTIONS[1:]:
        config = PolicyLossConfig(rollout_correction=correction, rollout_level=level)
        clean, kept = rollout_weights(OLD, OLD - D, MASK, config)
        dirty, kept_dirty = rollout_weights(OLD, rollout, MASK, config)
        assert torch.equal(clean, dirty) and torch.equal(kept, kept_dirty)


@pytest.mark.parametrize("correction,level", CORRECTIONS[1:])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_precomputed_for_the_batch_equals_the_loss_own_correction(correction, level, reduction):
    inputs = make_inputs(8, 5, 6, 11, group_size=2, dtype=torch.float64)
    config = PolicyLossConfig(
        reduction=reduction,
        rollout_correction=correction,
        rollout_level=level,
        rollout_min=0.97 if correction == "mask" else None,
        rollout_max=1.03,
    )
    own = focal_policy_loss(**inputs.arguments(), config=config)
    values, mask = rollout_weights(
        inputs.old_logps, inputs.rollout_logps, inputs.completion_mask, config
    )
    given = replace(inputs, token_weights=values, completion_mask=mask)
    out = focal_policy_loss(**given.arguments(), config=replace(config, rollout_correction=None,
                                                                rollout_min=None))  # fmt: skip
    assert_same("loss", out.loss, own.loss)
    expected = gradients(own.loss, inputs)
    for name, grad in gradients(out.loss, inputs).items():
        assert_same(name, grad, expected[name])


@pytest.mark.parametrize(
    "change,message",
    [
        ({"config": PolicyLossConfig()}, "rollout_correction: expected.*None"),
        ({"rollout_logps": OLD[:, :2]}, r"rollout_logps.*\(2, 3\).*\(2, 2\)"),
        ({"completion_mask": MASK.long()}, "completion_mask.*bool.*int64"),
        ({"completion_mask": MASK[0]}, r"completion_mask.*\(2, 3\).*\(3,\)"),
        ({"old_logps": OLD.long()}, "old_logps.*int64"),
    ],
)
def test_errors_name_expected_and_received(change, message):
    arguments = dict(
        old_logps=OLD,
        rollout_logps=OLD - D,
        completion_mask=MASK,
        config=PolicyLossConfig(rollout_correction="mask"),
    )
    with pytest.raises(ValueError, match=message):
        rollout_weights(**{**arguments, **change})
