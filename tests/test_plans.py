"""The driver's plans: who is row-local, what each plan costs, and that no plan holds (N, V)."""

import itertools
from dataclasses import replace

import pytest
import torch
from loss_cases import (
    CORRECTIONS,
    OBJECTIVES,
    REDUCTIONS,
    given_logps,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fgrpo_kernels import PolicyLossConfig, focal_policy_loss, token_logps
from fgrpo_kernels.loss_call import is_row_local
from fgrpo_kernels.testing import make_inputs

ROW_LOCAL = PolicyLossConfig(surrogate="cispo")
ENTROPY = PolicyLossConfig(surrogate="cispo", entropy_coef=0.1)
SEQUENCE = PolicyLossConfig.gspo()
GMPO, VESPO = PolicyLossConfig.gmpo(), PolicyLossConfig.vespo()
SEQUENCE_ENTROPY = PolicyLossConfig.gspo(entropy_coef=0.1)


def coefficients(logps, old_logps, config):
    """dL/dlogp of each row by autograd of the reference."""
    given = given_logps(logps)
    rollout = torch.tensor([[-1.0, -1.2, -0.9], [-1.1, -0.8, -1.0]], dtype=torch.float64)
    out = focal_policy_loss(
        given.hidden,
        given.head,
        given.ids,
        torch.tensor([1.0, -2.0], dtype=torch.float64),
        old_logps=old_logps,
        rollout_logps=None if config.rollout_correction is None else rollout,
        config=config,
        impl="reference",
    )
    out.loss.backward()
    return given.dlogps().flatten()


def follows_from_the_row(old_logps, config):
    """Whether moving one row's log-prob changes the other coefficients by one common factor."""
    logps = torch.tensor([[-1.0, -1.1, -1.0], [-1.0, -0.9, -1.0]], dtype=torch.float64)
    base = coefficients(logps, old_logps, config)
    for row, step in itertools.product(range(6), (-0.3, -0.02, 0.3)):
        moved = logps.clone()
        moved.view(-1)[row] += step
        others = [i for i in range(6) if i != row]
        new, old = coefficients(moved, old_logps, config)[others], base[others]
        # parallel vectors have no 2 x 2 minor: old_i new_j = old_j new_i, up to rounding
        minors = torch.outer(old, new) - torch.outer(new, old)
        if minors.abs().max() > 1e-12:
            return False
    return True


@pytest.mark.parametrize("surrogate,level", OBJECTIVES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_row_local_is_what_follows_from_the_row(surrogate, level, reduction):
    """For every config: a plan that finishes gradients row by row must be right, and is taken
    wherever it is."""
    old_logps = torch.tensor([[-1.05, -1.0, -1.1], [-1.0, -1.0, -0.9]], dtype=torch.float64)
    for (correction, rollout_level), old in itertools.product(CORRECTIONS, (None, old_logps)):
        config = PolicyLossConfig(
            surrogate=surrogate,
            ratio_level=level,
            reduction=reduction,
            fixed_length=5,
            focal_gamma=0.0,
            rollout_correction=correction,
            rollout_level=rollout_level,
            rollout_min=0.8 if correction == "mask" else None,
            rollout_max=1.2,
        )
        row_local = is_row_local(
            config, has_old_logps=old is not None, constant_advantages=True, objective=None
        )
        if surrogate == "reinforce" and level == "sequence" and old is not None:
            row_local = True  # it does not use the ratio: row-local, whichever plan is taken
        assert row_local == follows_from_the_row(old, config), (config, old is not None)


@pytest.mark.parametrize(
    "kwargs,has_old_logps,expected",
    [
        (dict(), True, True),
        (dict(), False, True),
        (dict(surrogate="cispo"), True, True),
        (dict(surrogate="reinforce", reduction="sequence_mean"), True, True),
        (dict(kl_coef=0.1, entropy_coef=0.1), True, True),
        (dict(ratio_level="sequence"), True, False),
        (dict(ratio_level="sequence"), False, True),
        (dict(surrogate="cispo", ratio_level="sequence"), True, False),
        (dict(rollout_correction="truncate", rollout_level="sequence"), True, True),
        (dict(rollout_correction="truncate", rollout_level="sequence"), False, False),
        (dict(rollout_correction="truncate"), False, True),
        (dict(rollout_correction="mask", reduction="sequence_mean"), True, True),
        (dict(rollout_correction="mask", reduction="sequence_mean"), False, False),
        (dict(rollout_correction="mask"), False, True),
        (dict(surrogate="sapo"), True, True),
        (dict(surrogate="sapo", ratio_level="sequence"), True, False),
        (dict(surrogate="dppo_tv"), True, True),
        (dict(surrogate="dppo_kl", ratio_level="sequence"), True, False),
        (dict(surrogate="vespo"), True, False),
        (dict(surrogate="vespo"), False, True),
        (dict(surrogate="vespo", rollout_correction="truncate"), False, False),
        (dict(ratio_level="geometric_mean"), True, False),
        (dict(ratio_level="geometric_mean"), False, True),
        (dict(ratio_level="geometric_mean", rollout_correction="truncate"), False, False),
    ],
    ids=str,
)
def test_the_plan_table(kwargs, has_old_logps, expected):
    config = PolicyLossConfig(**kwargs)
    facts = dict(has_old_logps=has_old_logps, objective=None)
    assert is_row_local(config, constant_advantages=True, **facts) is expected
    # Only in a geometric mean does a token's advantage reach the others.
    expected = expected and config.ratio_level != "geometric_mean"
    assert is_row_local(config, constant_advantages=False, **facts) is expected


N, V, D = 24, 40, 8  # 4 sequences of 6 tokens
CHUNK = 5 * V * 4  # five rows: five chunks


def cost(inputs, *, backward=True, **kwargs):
    """Counted FLOPs of a call and its backward, in units of N V D."""
    with FlopCounterMode(display=False) as counter:
        out = focal_policy_loss(**inputs.arguments(), **kwargs)
        if backward:
            out.loss.backward()
    return counter.get_total_flops() / (N * V * D)


def full_inputs(*, zero_advantage=0.0, frozen=False, masked=False):
    inputs = make_inputs(4, 6, D, V, group_size=2, zero_advantage=zero_advantage)
    if not masked:
        inputs = replace(inputs, completion_mask=None)
    inputs.lm_head_weight.requires_grad_(not frozen)
    return inputs


def test_cost_without_gradient():
    inputs = full_inputs()
    for config in (ROW_LOCAL, ENTROPY, SEQUENCE, SEQUENCE_ENTROPY):
        with torch.no_grad():
            assert cost(inputs, config=config, backward=False) == 2
    frozen = full_inputs(frozen=True)
    frozen.hidden.requires_grad_(False)
    assert cost(frozen, config=ROW_LOCAL, backward=False) == 2


@pytest.mark.parametrize("chunk", [CHUNK, 1, None], ids=["chunks", "rows", "one"])
@pytest.mark.parametrize(
    "config,trained,frozen",
    [(ROW_LOCAL, 6, 4), (ENTROPY, 6, 4), (SEQUENCE, 8, 4), (SEQUENCE_ENTROPY, 8, 6)],
    ids=["row-local", "row-local-entropy", "not-row-local", "not-row-local-entropy"],
)
def test_cost_of_training(config, trained, frozen, chunk):
    if chunk is None and config.ratio_level == "sequence":
        trained = 6  # the only chunk is kept
    config = replace(config, max_chunk_bytes=chunk)
    assert cost(full_inputs(), config=config) == trained
    assert cost(full_inputs(frozen=True), config=config) == frozen


@pytest.mark.parametrize("config", [GMPO, VESPO], ids=["gmpo", "vespo"])
def test_cost_of_whole_sequences(config):
    """Row-local on-policy, but for a geometric mean over tokens of different weight."""
    config = replace(config, max_chunk_bytes=CHUNK)
    inputs = full_inputs()
    assert cost(inputs, config=config) == 8
    assert cost(full_inputs(frozen=True), config=config) == 4
    assert cost(inputs, config=replace(config, max_chunk_bytes=None)) == 6
    on_policy = replace(inputs, old_logps=None)
    assert cost(on_policy, config=config) == 6
    weighted = replace(on_policy, token_weights=torch.ones(4, 6))
    assert cost(weighted, config=config) == (
        8 if config == replace(GMPO, max_chunk_bytes=CHUNK) else 6
    )


def test_cost_of_the_weight_gradient_alone():
    inputs = full_inputs()
    inputs.hidden.requires_grad_(False)
    assert cost(inputs, config=ROW_LOCAL) == 4


def test_cost_follows_active_rows():
    half = full_inputs(zero_advantage=0.5)
    assert cost(half, config=ROW_LOCAL) == 2 + 4 / 2
    assert cost(half, config=ROW_LOCAL, return_logps=False) == 6 / 2
    # nothing may be skipped with a KL or entropy term, or when asked not to
    kl = replace(ROW_LOCAL, kl_coef=0.1)
    for config in (kl, ENTROPY, replace(ROW_LOCAL, skip_inactive=False)):
        assert cost(half, config=config) == 6
        assert cost(half, config=config, return_logps=False) == 6


def test_cost_of_solved_prompts_is_skipped_too():
    inputs = full_inputs()
    solved = replace(inputs, success_rate=torch.tensor([1.0, 1.0, 0.5, 0.5]))
    assert cost(solved, config=ROW_LOCAL) == 2 + 4 / 2


def test_cost_follows_valid_tokens():
    inputs = full_inputs(masked=True)
    valid = int(inputs.completion_mask.sum())
    assert valid < N
    for config in (ROW_LOCAL, ENTROPY):
        assert cost(inputs, config=config) * N == pytest.approx(6 * valid, rel=1e-12)
    config = replace(SEQUENCE, max_chunk_bytes=CHUNK)
    assert cost(inputs, config=config) * N == pytest.approx(8 * valid, rel=1e-12)


def test_cost_of_rejected_tokens_is_skipped():
    inputs = full_inputs()
    far = inputs.old_logps.clone()
    far[:, :3] -= 3.0  # weights e^3: half of the tokens leave the loss
    inputs = replace(inputs, rollout_logps=far)
    config = replace(ROW_LOCAL, rollout_correction="mask")
    assert cost(inputs, config=config) == 2 + 4 / 2
    assert cost(inputs, config=config, return_logps=False) == 6 / 2


def test_cost_of_a_custom_objective():
    def objective(logps, rows):
        return -rows.advantages * logps

    # never skipped: a callable may use rows without advantage
    inputs = full_inputs(zero_advantage=0.5)
    config = replace(ROW_LOCAL, max_chunk_bytes=CHUNK)
    assert cost(inputs, config=config, objective=objective) == 6
    objective.row_local = False
    assert cost(inputs, config=config, objective=objective) == 8
    assert cost(inputs, config=ROW_LOCAL, objective=objective) == 6  # one chunk, kept


@pytest.mark.parametrize("chunk", [CHUNK, None])
def test_cost_of_token_logps(chunk):
    def logps_cost(inputs, with_entropy, backward):
        with FlopCounterMode(display=False) as counter:
            logps, entropy = token_logps(
                inputs.hidden, inputs.lm_head_weight, inputs.completion_ids,
                with_entropy=with_entropy, max_chunk_bytes=chunk,
            )  # fmt: skip
            if backward:
                (logps if entropy is None else logps + entropy).sum().backward()
        return counter.get_total_flops() / (N * V * D)

    assert logps_cost(full_inputs(), with_entropy=False, backward=True) == 8
    assert logps_cost(full_inputs(), with_entropy=True, backward=True) == 8
    assert logps_cost(full_inputs(frozen=True), with_entropy=False, backward=True) == 4
    assert logps_cost(full_inputs(frozen=True), with_entropy=True, backward=True) == 6
    with torch.no_grad():
        assert logps_cost(full_inputs(), with_entropy=True, backward=False) == 2


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned, in-place ones included."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("return_logps", [False, True])
@pytest.mark.parametrize(
    "config",
    [ROW_LOCAL, ENTROPY, SEQUENCE, SEQUENCE_ENTROPY],
    ids=["row-local", "row-local-entropy", "not-row-local", "not-row-local-entropy"],
)
def test_nothing_of_n_times_v_elements_is_ever_made(config, return_logps, frozen, dtype):
    # N V = 32 * 60 elements; the chunk has 4 rows, the weight 60 * 8 elements, hidden 32 * 8
    inputs = make_inputs(4, 8, 8, 60, group_size=2, dtype=dtype)
    inputs = replace(inputs, completion_mask=None)
    inputs.lm_head_weight.requires_grad_(not frozen)
    config = replace(config, max_chunk_bytes=4 * 60 * 4)
    with LargestTensor() as largest:
        out = focal_policy_loss(
            **inputs.arguments(), config=config, return_logps=return_logps, impl="torch"
        )
        out.loss.backward()
    assert largest.elements == 60 * 8  # the weight and its gradient; a chunk has half of that


def test_nothing_of_n_times_v_elements_for_other_calls():
    inputs = replace(make_inputs(4, 8, 8, 60, group_size=2), completion_mask=None)

    def objective(logps, rows):
        return -rows.advantages * logps

    objective.row_local = False
    config = PolicyLossConfig(max_chunk_bytes=4 * 60 * 4)
    with LargestTensor() as largest:
        out = focal_policy_loss(**inputs.arguments(), config=config, objective=objective)
        out.loss.backward()
        logps, entropy = token_logps(
            inputs.hidden, inputs.lm_head_weight, inputs.completion_ids, with_entropy=True,
            max_chunk_bytes=4 * 60 * 4,
        )  # fmt: skip
        (logps + entropy).sum().backward()
        with torch.no_grad():
            focal_policy_loss(**inputs.arguments(), config=config)
    assert largest.elements == 60 * 8


def test_the_reference_does_make_it():
    """The mode above would see it."""
    inputs = replace(make_inputs(4, 8, 8, 60, group_size=2), completion_mask=None)
    with LargestTensor() as largest:
        focal_policy_loss(**inputs.arguments(), impl="reference").loss.backward()
    assert largest.elements == 32 * 60
