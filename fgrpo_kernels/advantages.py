"""From the rewards of a group to advantages, and from its success rate to the focal weight.

A group is the G completions sampled for one prompt. Everything here is one number per completion,
so it is computed once per batch, in float64, on the device of the rewards.

Dimensions: B completions, G members of a group.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to the standard deviation of the rewards, as the mainstream trainers do."""

MAX_REWARD = 1e100
"""Squares of rewards and their sums stay finite in float64."""

SUCCESS_RATE_SLACK = 1e-4
"""A success rate this far outside [0, 1] is rounding and is clamped; farther is an error."""

Floats = Tensor | Sequence[float | None]


@dataclass(frozen=True)
class GroupAdvantages:
    """What `group_advantages` found, each of shape (B,) on the device of the rewards."""

    advantages: Tensor
    """(B,) float; 0 for members without a reward, exactly 0 in degenerate groups."""
    success_rate: Tensor
    """(B,) float in [0, 1]: share of correct members of the group among its scored ones; 0 for a
    group in which nothing was scored."""
    degenerate: Tensor
    """(B,) bool: the group has fewer than two distinct scored rewards."""


@dataclass(frozen=True)
class _Groups:
    """Rewards with their group statistics spread back to the members, all (B,)."""

    rewards: Tensor  # float64, 0 where not scored
    scored: Tensor  # bool
    index: Tensor  # int64, group of each member, in [0, B)

    def total(self, values: Tensor) -> Tensor:
        """Sum of `values` over the scored members of the group, given to each member."""
        sums = values.new_zeros(values.shape)
        sums.index_add_(0, self.index, torch.where(self.scored, values, 0.0))
        return sums[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """Mean of `values` over the scored members of the group; 0 where there is none."""
        return self.total(values) / self.count.clamp(min=1)

    @property
    def count(self) -> Tensor:
        """Number of scored members of the group."""
        return self.total(torch.ones_like(self.rewards))

    @property
    def deviations(self) -> Tensor:
        """Reward minus the mean of the group."""
        return self.rewards - self.mean(self.rewards)

    @property
    def degenerate(self) -> Tensor:
        """Fewer than two distinct scored rewards, decided on the rewards as given."""
        lowest, highest = (
            self.rewards.new_full(self.rewards.shape, start).scatter_reduce(
                0, self.index, torch.where(self.scored, self.rewards, start), reduce
            )
            for start, reduce in ((math.inf, "amin"), (-math.inf, "amax"))
        )
        return (lowest >= highest)[self.index]


def _grpo(groups: _Groups, *, std: str = "unbiased") -> Tensor:
    """(r - mean) / (std + 1e-4)."""
    if std not in ("unbiased", "population"):
        raise ValueError(f"std: expected 'unbiased' or 'population', received {std!r}")
    deviations = groups.deviations
    freedom = groups.count - (1.0 if std == "unbiased" else 0.0)
    variance = groups.total(deviations.square()) / freedom.clamp(min=1)
    return deviations / (variance.sqrt() + STD_EPSILON)


def _dr_grpo(groups: _Groups) -> Tensor:
    """r - mean."""
    return groups.deviations


def _rloo(groups: _Groups) -> Tensor:
    """r - mean of the others = (r - mean) n / (n - 1)."""
    count = groups.count
    return groups.deviations * count / (count - 1).clamp(min=1)


_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
}


def group_advantages(
    rewards: Floats,
    *,
    group_size: int | None = None,
    group_ids: Tensor | Sequence[Hashable] | None = None,
    estimator: str = "grpo",
    correct: Floats | None = None,
    **params: object,
) -> GroupAdvantages:
    """Group-relative advantages, and the success rate of each group.

        grpo     (r - mean) / (std + 1e-4)      std="unbiased" (default) or "population"
        dr_grpo  r - mean
        rloo     r - mean of the other members
        success_rate = mean over the scored members of the group of `correct`

    Mean and standard deviation run over the scored members of the group, in two passes in float64.

    Args:
        rewards: (B,) tensor or floats. None or NaN: no reward; such a member leaves the statistics
            and gets advantage 0.
        group_size: members i * group_size ... (i + 1) * group_size - 1 form a group.
        group_ids: (B,) ids in any order; members with equal ids form a group. Give one of the two.
        estimator: "grpo", "dr_grpo" or "rloo".
        correct: (B,) bool, or floats in [0, 1] when correctness is graded: what the success rate
            counts. Give it whenever the reward is shaped. Without it, in this order: rewards all
            0 or 1 are the correctness; rewards all in [0, 1] are graded correctness; of exactly two
            values in the whole batch the larger is correct; else it must be given.
        params: options of the estimator.
    Returns: GroupAdvantages, (B,) each, detached; float64 for float64 rewards, else float32.
    Raises: ValueError for unknown estimators and options, shapes and group sizes that do not fit,
        infinite rewards, and correctness that cannot be told from the rewards.
    Source: GRPO 2402.03300 section 4.1, with the unbiased standard deviation of the mainstream
        trainers; Dr. GRPO 2503.20783; RLOO 2402.14740; success rate F-GRPO 2602.06717 eq. 11.
    """
    values, dtype = _to_float64("rewards", rewards)
    if (values.abs() > MAX_REWARD).any():
        raise ValueError(
            f"rewards: expected finite values (to +-{MAX_REWARD:g}), None or NaN, received others"
        )
    scored = ~torch.isnan(values)
    index = _group_index(len(values), values.device, group_size, group_ids)
    groups = _Groups(torch.where(scored, values, 0.0), scored, index)

    success_rate = groups.mean(_correctness(groups, correct))
    degenerate = groups.degenerate
    advantages = _estimator(estimator, params)(groups, **params)
    advantages = torch.where(scored & ~degenerate, advantages, 0.0)
    return GroupAdvantages(advantages.to(dtype), success_rate.to(dtype), degenerate)


def focal_weight(success_rate: Tensor | Sequence[float] | float, gamma: float) -> Tensor:
    """Down-weights prompts that the policy already solves often.

        w = (1 - success_rate).clamp(0, 1) ** gamma,   0 ** 0 = 1

    Args:
        success_rate: any shape, the group success rate of each sequence, in [0, 1] up to 1e-4.
        gamma: >= 0; 0 gives weight 1 everywhere.
    Returns: weights in the shape of success_rate, detached; float32 or float64.
    Raises: ValueError if gamma is negative or a success rate is outside [-1e-4, 1 + 1e-4] or NaN.
    Source: F-GRPO 2602.06717 eq. 12.
    """
    if not isinstance(gamma, Real) or not (gamma >= 0 and math.isfinite(gamma)):
        raise ValueError(f"gamma: expected a finite number >= 0, received {gamma!r}")
    try:
        rate = torch.as_tensor(success_rate).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"success_rate: expected numbers, received {success_rate!r}") from error
    if rate.is_complex():
        raise ValueError(f"success_rate: expected real numbers, received {rate.dtype}")
    if rate.dtype != torch.float64:
        rate = rate.float()
    outside = outside_unit_interval(rate)
    if outside.any():
        raise ValueError(
            f"success_rate: expected values in [0, 1], received {rate[outside].flatten()[0].item()}"
        )
    return focal_power(rate, gamma)


def focal_power(success_rate: Tensor, gamma: float) -> Tensor:
    """(1 - success_rate).clamp(0, 1) ** gamma of rates that were checked, or will be."""
    return (1 - success_rate).clamp(0, 1) ** gamma


def outside_unit_interval(success_rate: Tensor) -> Tensor:
    """Where a success rate is outside [0, 1] by more than rounding, or NaN."""
    inside = (success_rate >= -SUCCESS_RATE_SLACK) & (success_rate <= 1 + SUCCESS_RATE_SLACK)
    return ~inside


def _to_float64(name: str, values: Floats) -> tuple[Tensor, torch.dtype]:
    """(B,) float64 with NaN for None, and the dtype of the results."""
    if isinstance(values, Tensor):
        if values.dim() != 1 or values.is_complex():
            raise ValueError(
                f"{name}: expected (B,) numbers, received {tuple(values.shape)} {values.dtype}"
            )
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        return values.detach().double(), dtype
    try:
        floats = [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected (B,) floats or None, received {values!r}") from error
    return torch.tensor(floats, dtype=torch.float64), torch.float32


def _group_index(
    n: int,
    device: torch.device,
    group_size: int | None,
    group_ids: Tensor | Sequence[Hashable] | None,
) -> Tensor:
    """(B,) int64 in [0, B): members with equal numbers form a group."""
    if (group_size is None) == (group_ids is None):
        raise ValueError(
            "expected exactly one of group_size and group_ids, received "
            f"group_size={group_size}, group_ids={'None' if group_ids is None else 'given'}"
        )
    if group_size is not None:
        whole = isinstance(group_size, Integral) and not isinstance(group_size, bool)
        if not whole or group_size < 1 or n % group_size:
            raise ValueError(
                f"group_size: expected a divisor of the {n} rewards, received {group_size}"
            )
        return torch.arange(n, device=device) // group_size
    if not isinstance(group_ids, Tensor):
        try:
            group_ids = list(group_ids)  # type: ignore[arg-type]
        except TypeError:
            got = type(group_ids).__name__
            raise ValueError(f"group_ids: expected {n} ids, received {got}") from None
    shape = tuple(group_ids.shape) if isinstance(group_ids, Tensor) else (len(group_ids),)
    if shape != (n,):
        raise ValueError(f"group_ids: expected shape {(n,)} as the rewards, received {shape}")
    if isinstance(group_ids, Tensor):
        if group_ids.is_floating_point() and group_ids.isnan().any():
            raise ValueError("group_ids: expected numbers or strings, received NaN")
        return torch.unique(group_ids.to(device), return_inverse=True)[1]
    # Tensors hash by identity: each would be a group of its own.
    keys = [i.item() if isinstance(i, Tensor) and i.dim() == 0 else i for i in group_ids]
    for key in keys:
        if not isinstance(key, Hashable) or isinstance(key, Tensor) or key != key:
            raise ValueError(f"group_ids: expected numbers or strings, received {key!r}")
    numbers: dict[Hashable, int] = {}
    inverse = [numbers.setdefault(key, len(numbers)) for key in keys]
    return torch.tensor(inverse, dtype=torch.int64, device=device)


def _correctness(groups: _Groups, correct: Floats | None) -> Tensor:
    """(B,) float64 in [0, 1]: how correct each scored member is."""
    scored = groups.scored
    if correct is not None:
        values, _ = _to_float64("correct", correct)
        values = values.to(scored.device)
        if values.shape != scored.shape:
            raise ValueError(
                f"correct: expected shape {tuple(scored.shape)} as the rewards, "
                f"received {tuple(values.shape)}"
            )
        wrong = scored & ~((values >= 0) & (values <= 1))
        if wrong.any():
            raise ValueError(
                "correct: expected bool or values in [0, 1] for each member with a reward, "
                f"received {values[wrong][0].item()}"
            )
        return values
    distinct = groups.rewards[scored].unique()
    if ((distinct >= 0) & (distinct <= 1)).all():
        return groups.rewards
    if len(distinct) == 2:
        return (groups.rewards == distinct[1]).double()
    raise ValueError(
        "correct: expected it to be given, because the rewards are neither all in [0, 1] nor of "
        f"exactly two values; received {len(distinct)} distinct rewards from "
        f"{distinct[0].item():.9g} to {distinct[-1].item():.9g}"
    )


def _estimator(name: str, params: dict[str, object]) -> Callable[..., Tensor]:
    """The estimator's function, after a check that it takes these options."""
    if not isinstance(name, str) or name not in _ESTIMATORS:
        raise ValueError(
            f"estimator: expected one of {', '.join(map(repr, _ESTIMATORS))}, received {name!r}"
        )
    accepted = list(inspect.signature(_ESTIMATORS[name]).parameters)[1:]
    unknown = [key for key in params if key not in accepted]
    if unknown:
        raise ValueError(
            f"estimator {name!r}: expected options among {accepted}, received {unknown}"
        )
    return _ESTIMATORS[name]
