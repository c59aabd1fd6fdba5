"""Groups of completions: who belongs together, their rewards and their correctness.

A group is the G completions sampled for one prompt. Everything is one number per completion, in
float64, on the device of the rewards.

Dimensions: B completions, G members of a group.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

MAX_REWARD = 1e100
"""Squares of rewards and their sums stay finite in float64."""

Floats = Tensor | Sequence[float | None]


@dataclass(frozen=True)
class Groups:
    """Rewards with their group statistics spread back to the members, all (B,)."""

    rewards: Tensor  # float64, 0 where not scored
    scored: Tensor  # bool
    index: Tensor  # int64, group of each member, in [0, B)
    correct: Tensor  # float64 in [0, 1], how correct each scored member is

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


def read_rewards(rewards: Floats) -> tuple[Tensor, torch.dtype]:
    """(B,) float64 with NaN where there is no reward, and the dtype of the results."""
    values, dtype = to_float64("rewards", rewards)
    if (values.abs() > MAX_REWARD).any():
        raise ValueError(
            f"rewards: expected finite values (to +-{MAX_REWARD:g}), None or NaN, received others"
        )
    return values, dtype


def to_float64(name: str, values: Floats) -> tuple[Tensor, torch.dtype]:
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


def group_index(
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


def correctness(rewards: Tensor, scored: Tensor, correct: Floats | None) -> Tensor:
    """(B,) float64 in [0, 1]: how correct each scored member is."""
    if correct is not None:
        values, _ = to_float64("correct", correct)
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
    distinct = rewards[scored].unique()
    if ((distinct >= 0) & (distinct <= 1)).all():
        return rewards
    if len(distinct) == 2:
        return (rewards == distinct[1]).double()
    raise ValueError(
        "correct: expected it to be given, because the rewards are neither all in [0, 1] nor of "
        f"exactly two values; received {len(distinct)} distinct rewards from "
        f"{distinct[0].item():.9g} to {distinct[-1].item():.9g}"
    )
