"""Every combination of the objective's options, with inputs, for the tests that walk them all."""

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

from fgrpo_kernels import PolicyLossConfig
from fgrpo_kernels.testing import LossInputs, make_inputs

LEVELS = ("token", "sequence")
WHOLE_GRID = list(itertools.product(("clip", "cispo", "reinforce"), LEVELS))
ONE_KL = list(itertools.product(("sapo", "dppo_tv", "dppo_kl"), LEVELS))
ONE_KL += [("clip", "geometric_mean"), ("vespo", "token")]
OBJECTIVES = WHOLE_GRID + ONE_KL
"""Every surrogate with every level it may have."""
REDUCTIONS = ("token_mean", "sequence_mean", "fixed_length")
KLS = (None, "k1", "k2", "k3")
CORRECTIONS = (
    (None, "token"),
    ("truncate", "token"),
    ("truncate", "sequence"),
    ("mask", "token"),
    ("mask", "sequence"),
)
OUTER = [
    f"{surrogate}-{level}-{reduction}-{kl or 'nokl'}"
    for (surrogate, level), reduction, kl in itertools.product(WHOLE_GRID, REDUCTIONS, KLS)
]
OUTER += [
    f"{surrogate}-{level}-{reduction}-{kl or 'nokl'}"
    for ((surrogate, level), reduction), kl in zip(
        itertools.product(ONE_KL, REDUCTIONS), itertools.cycle(KLS), strict=False
    )
]
"""Test ids; the remaining options are walked inside a test, to spare some thousand test set-ups."""


BOUNDS = {"sequence": (0.02, 0.03), "dppo_tv": (0.02, 0.03), "dppo_kl": (0.002, 0.004)}
"""clip_eps_low and high that some tokens of `cases` pass, by surrogate or level; else 0.1, 0.15."""


@dataclass(frozen=True)
class Case:
    name: str
    inputs: LossInputs
    extra: dict[str, Any]  # further keyword arguments
    config: PolicyLossConfig

    def arguments(self) -> dict[str, Any]:
        return {**self.inputs.arguments(), **self.extra, "config": self.config}


def cases(outer: str, batch: int = 4, length: int = 5) -> Iterator[Case]:
    """Entropy x correction x mask x old_logps for one member of OUTER.

    What is not part of the grid (bias, soft-cap, dual clip, token weights, per-token advantages,
    global denominators, which tensors need a gradient) is drawn per case from a seed of its name.
    """
    surrogate, level, reduction, kl = outer.split("-")
    low, high = BOUNDS.get(surrogate, BOUNDS.get(level, (0.1, 0.15)))
    for entropy_coef, (correction, rollout_level), masked, off_policy in itertools.product(
        (0.0, 0.1), CORRECTIONS, (False, True), (False, True)
    ):
        name = f"{outer}-{entropy_coef}-{correction}-{rollout_level}-{masked=}-{off_policy=}"
        draw = random.Random(name)
        config = PolicyLossConfig(
            surrogate=surrogate,
            ratio_level=level,
            reduction=reduction,
            fixed_length=7 if reduction == "fixed_length" else None,
            clip_eps_low=low,
            clip_eps_high=high,
            dual_clip=draw.choice((None, 1.1)) if level != "geometric_mean" else None,
            sapo_tau_pos=1.5,
            sapo_tau_neg=4.0,
            vespo_k_pos=1.5,
            vespo_lambda_pos=2.5,
            vespo_k_neg=3.5,
            vespo_lambda_neg=0.5,
            focal_gamma=draw.choice((0.0, 0.5, 1.0)),
            kl_coef=0.0 if kl == "nokl" else 0.3,
            kl_estimator="k3" if kl == "nokl" else kl,
            entropy_coef=entropy_coef,
            rollout_correction=correction,
            rollout_level=rollout_level,
            # about the middle half of the weights at token level
            rollout_min=0.97 if correction == "mask" else None,
            rollout_max=1.02,
            temperature=draw.choice((1.0, 0.7)),
            logit_scale=draw.choice((1.0, 1.3)),
            logit_softcap=draw.choice((None, 3.0)),
        )
        inputs = make_inputs(
            batch, length, 6, 11, group_size=2, dtype=torch.float64, seed=draw.randrange(9)
        )
        extra: dict[str, Any] = {}
        if draw.random() < 0.3:
            extra = {"global_valid_tokens": 31, "global_sequences": torch.tensor(9.0)}
        generator = torch.Generator().manual_seed(draw.randrange(100))
        inputs = replace(
            inputs,
            completion_mask=inputs.completion_mask if masked else None,
            old_logps=inputs.old_logps if off_policy else None,
            ref_logps=inputs.ref_logps if config.kl_coef else None,
            rollout_logps=inputs.rollout_logps if correction else None,
        )
        if draw.random() < 0.5:
            bias = torch.randn(11, generator=generator, dtype=torch.float64)
            inputs = replace(inputs, lm_head_bias=bias.requires_grad_(draw.random() < 0.8))
        if draw.random() < 0.5:
            factors = 0.5 + torch.rand(batch, length, generator=generator, dtype=torch.float64)
            inputs = replace(inputs, token_weights=factors.requires_grad_(draw.random() < 0.8))
        if draw.random() < 0.3:
            per_token = torch.randn(batch, length, generator=generator, dtype=torch.float64)
            inputs = replace(inputs, advantages=per_token)
        if draw.random() < 0.2:
            inputs.lm_head_weight.requires_grad_(False)
        elif draw.random() < 0.1:
            inputs.hidden.requires_grad_(False)
        yield Case(name, inputs, extra, config)


def gradients(scalar: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
    """Gradient of the scalar for each leaf; it is an error if one is not part of the graph."""
    leaves = inputs.leaves()
    return dict(zip(leaves, torch.autograd.grad(scalar, list(leaves.values())), strict=True))


def assert_same(name: str, actual: Any, expected: Any, *, rtol: float = 1e-9) -> None:
    """Equal to float64 rounding: 1e-9 of each value, 1e-11 absolute (values are of size 0.01 to 10,
    sums have at most some hundred terms, so rounding alone stays under 1e-13)."""
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=1e-11, msg=lambda text: f"{name}: {text}"
    )


@dataclass(frozen=True)
class GivenLogps:
    """Inputs whose log-probs are given numbers: two logits a row, an identity head, ids all 0."""

    logps: Tensor  # (B, T), below 0
    hidden: Tensor  # (B, T, 2), a leaf
    head: Tensor  # (2, 2)
    ids: Tensor  # (B, T)

    def dlogps(self) -> Tensor:
        """dloss / dlogps after backward: the gradient of the target's logit over 1 - p."""
        assert self.hidden.grad is not None
        return self.hidden.grad[..., 0] / -torch.expm1(self.logps)


def given_logps(logps: Any, dtype: torch.dtype = torch.float64) -> GivenLogps:
    logps = torch.as_tensor(logps, dtype=dtype)
    other = torch.log(-torch.expm1(logps))
    hidden = torch.stack([logps, other], -1).requires_grad_()
    ids = torch.zeros(logps.shape, dtype=torch.int64)
    return GivenLogps(logps, hidden, torch.eye(2, dtype=dtype), ids)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN: an output that is not written fails loudly."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill
