"""SPO's tracker by hand, and DVPO's value model on chains whose values are known."""

import json

import pytest
import torch

from fgrpo_kernels import focal_weight
from fgrpo_train.values import (
    GlobalValue,
    SuccessTracker,
    ValueBatch,
    fit_global_value,
    spo_advantages,
    static_advantages,
    td_loss,
    terminal_rewards,
)


def counts(tracker, prompt_id="x"):
    return tracker.state_dict()[prompt_id]


def test_a_prompt_starts_from_its_samples_with_a_memory_of_eight():
    """n = 8, s = 2: alpha = 8 * 2.5 / 9, beta = 8 * 6.5 / 9; never started: 4 and 4."""
    tracker = SuccessTracker()
    tracker.start("x", successes=2, samples=8)
    assert counts(tracker) == pytest.approx([20 / 9, 52 / 9])
    assert tracker.values(["x", "new"]).tolist() == pytest.approx([2.5 / 9, 0.5])


@pytest.mark.parametrize(
    "divergence,rho",
    [(0, 0.96), (0.003, 0.96), (0.0060, 2**-0.1), (0.06, 0.875), (10.0, 0.875)],
)
def test_how_much_is_forgotten_follows_the_divergence_between_its_bounds(divergence, rho):
    """2^(-0.05) = 0.966 is over 0.96; 2^(-0.1) = 0.933 inside; 1/2 below 0.875."""
    tracker = SuccessTracker()
    tracker.start("x", successes=0, samples=0)
    tracker.update(["x"], [1.0], [divergence])
    assert counts(tracker) == pytest.approx([4 * rho + 1, 4 * rho])


@pytest.mark.parametrize("divergence,memory", [(0.0, 25), (1.0, 8)])
def test_the_memory_settles_at_one_over_one_minus_rho(divergence, memory):
    tracker = SuccessTracker()
    for _ in range(600):
        tracker.update(["x"], [0.25], [divergence])
    assert sum(counts(tracker)) == pytest.approx(memory)
    assert float(tracker.values(["x"])) == pytest.approx(0.25)


def test_prompts_in_the_middle_are_drawn_most_and_none_never():
    tracker = SuccessTracker()
    tracker.start("hopeless", successes=0, samples=10**9)
    tracker.start("solved", successes=10**9, samples=10**9)
    weights = tracker.sampling_weights(["hopeless", "solved", "new"])
    assert weights.tolist() == pytest.approx([0.05, 0.05, 0.55], abs=1e-4)


def test_the_state_survives_json_exactly():
    tracker = SuccessTracker()
    tracker.start("a", successes=1, samples=3)
    tracker.update(["a", "b"], [1, 0], [0.01, 0.02])
    resumed = SuccessTracker()
    resumed.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    assert torch.equal(resumed.values(["a", "b"]), tracker.values(["a", "b"]))
    for each in (tracker, resumed):
        each.update(["a"], [0], [0.03])
    assert resumed.state_dict() == tracker.state_dict()


def test_spo_advantages_use_the_value_before_the_update_and_the_batch_as_scale():
    """r - v = 0.5, -0.5, -0.75; mean -0.25, std sqrt((0.5625 + 0.0625 + 0.25) / 3)."""
    tracker = SuccessTracker()
    values = tracker.values(["new", "new"]).tolist() + [0.75, 0.3]
    rewards = torch.tensor([1.0, 0, 0, torch.nan])
    advantages = spo_advantages(rewards, torch.tensor(values))
    std = (0.875 / 3) ** 0.5
    assert advantages.tolist() == pytest.approx([0.75 / std, -0.25 / std, -0.5 / std, 0], abs=1e-6)
    assert spo_advantages(torch.ones(1), torch.zeros(1)).tolist() == [0]


def test_the_focal_weight_takes_the_trackers_value():
    tracker = SuccessTracker()
    tracker.start("x", successes=3, samples=3)
    assert focal_weight(tracker.values(["x"]), 1).tolist() == pytest.approx([1 - 3.5 / 4])


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: SuccessTracker(half_life=0), "half_life: .*received 0"),
        (lambda: SuccessTracker().start("x", successes=3, samples=2), "successes: .*received 3"),
        (lambda: SuccessTracker().update(["x"], [1.5], [0]), r"reward in \[0, 1\].*1.5"),
        (lambda: SuccessTracker().update(["x"], [1], [-1]), "divergence >= 0.*-1"),
        (lambda: spo_advantages(torch.ones(2), torch.ones(3)), r"values: .*received \(3,\)"),
        (
            lambda: terminal_rewards(torch.ones(1), torch.tensor([[True, False, True]])),
            "without a gap",
        ),
    ],
)
def test_errors_name_expected_and_received(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_generalised_advantages_by_hand():
    """Values 0.2, 0.5, 0.7, reward 1 at the end: d = 0.3, 0.2, 0.3.

    A = 0.3 + 0.95 (0.2 + 0.95 * 0.3), 0.2 + 0.95 * 0.3, 0.3. What stands behind the end is ignored.
    """
    values = torch.tensor([[0.2, 0.5, 0.7, 9.0], [0.2, 9.0, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    rewards = terminal_rewards(torch.tensor([1.0, 0.5], dtype=torch.float64), mask)
    assert rewards.tolist() == [[0, 0, 1, 0], [0.5, 0, 0, 0]]
    raw = static_advantages(values, rewards, mask, whiten=False)
    expected = torch.tensor([[0.76075, 0.485, 0.3, 0], [0.3, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(raw, expected, rtol=0, atol=1e-12)
    monte_carlo = static_advantages(values, rewards, mask, lam=1.0, whiten=False)
    assert monte_carlo[0].tolist() == pytest.approx([0.8, 0.5, 0.3, 0]), "return minus value"
    white = static_advantages(values, rewards, mask)
    assert float(white[mask].mean()) == pytest.approx(0, abs=1e-12)
    assert float(white[mask].square().mean()) == pytest.approx(1)
    assert not white[~mask].any()


def test_td_loss_by_hand_and_its_target_is_constant():
    """Errors 0.3, 0.2, 0.3; derivative to V_t is -2 error_t / 3 alone."""
    values = torch.tensor([[0.2, 0.5, 0.7, 9.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    rewards = terminal_rewards(torch.ones(1, dtype=torch.float64), mask)
    loss = td_loss(values, rewards, mask)
    assert float(loss.detach()) == pytest.approx(0.22 / 3)
    loss.backward()
    assert values.grad[0].tolist() == pytest.approx([-0.2, -0.4 / 3, -0.2, 0])


POSITIONS, LENGTH = 3, 25


def walk(rights, generator):
    """Walks on positions 1..3 from a random start, one step right with its walk's probability;
    reward 1 for leaving on the right. 25 steps leave about 1 in 5000 unfinished."""
    count = len(rights)
    position = torch.randint(1, POSITIONS + 1, (count,), generator=generator)
    states = torch.zeros(count, LENGTH, POSITIONS)
    mask = torch.zeros(count, LENGTH, dtype=torch.bool)
    for t in range(LENGTH):
        inside = (position >= 1) & (position <= POSITIONS)
        rows = inside.nonzero().squeeze(1)
        mask[rows, t] = True
        states[rows, t, position[rows] - 1] = 1
        right = torch.rand(count, generator=generator) < rights
        position = torch.where(inside, position + 2 * right.long() - 1, position)
    return states, mask, (position > POSITIONS).float()


def known_values(right):
    """Gambler's ruin from position i of 4: (1 - (l/r)^i) / (1 - (l/r)^4), i / 4 for r = l."""
    i = torch.arange(1, POSITIONS + 1, dtype=torch.float32)
    if right == 0.5:
        return i / 4
    odds = (1 - right) / right
    return (1 - odds**i) / (1 - odds**4)


def test_one_value_model_knows_the_values_of_three_policies():
    """Policies that go right with 0.3, 0.5 and 0.7, told apart by an example of 200 of their steps.

    The share of right steps in it has a standard error of 0.035, so neighbours are confused once in
    several hundred; what is left is the noise of the last updates, measured at 0.02. The values of
    neighbouring policies differ by 0.2 to 0.35.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    policies = torch.tensor([0.3, 0.5, 0.7])

    def example(rights):
        right = torch.rand(len(rights), 200, generator=generator) < rights[:, None]
        tokens = torch.nn.functional.one_hot(right.long(), 2).float()
        return tokens, torch.ones(right.shape, dtype=torch.bool)

    def batches(count):
        for _ in range(count):
            rights = policies[torch.randint(3, (128,), generator=generator)]
            states, mask, reward = walk(rights, generator)
            tokens, example_mask = example(rights)
            yield ValueBatch(
                states=states,
                mask=mask,
                rewards=terminal_rewards(reward, mask),
                example=tokens,
                example_mask=example_mask,
            )

    model = GlobalValue(POSITIONS, 2, width=32)
    fit_global_value(model, batches(250), learning_rate=1e-2)
    fit_global_value(model, batches(150), learning_rate=1e-3)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    states = torch.eye(POSITIONS)[None].expand(64, -1, -1)
    for right in policies.tolist():
        tokens, example_mask = example(torch.full((64,), right))
        values = model(states, tokens, example_mask).mean(0)
        torch.testing.assert_close(values, known_values(right), rtol=0, atol=0.05)
