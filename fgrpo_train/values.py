"""Baselines other than the group's mean: a tracker of success rates, and a value model.

With either, one completion a prompt is enough.

Dimensions: B completions, T completion tokens, S tokens of an example trajectory, D features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FORGET_MOST, FORGET_LEAST = 0.875, 0.96
"""Bounds of SPO's rho: a memory of 1 / (1 - rho) = 8 to 25 completions."""

MEMORY_AT_START = 1 / (1 - FORGET_MOST)

EXPLORATION = 0.05
"""Added to SPO's sampling weight: solved and hopeless prompts are still visited."""

WHITENING_EPSILON = 1e-8


class SuccessTracker:
    """SPO: for each prompt a Beta distribution of its success rate, which forgets.

        value = alpha / (alpha + beta)
        rho = clip(2^(-divergence / half_life), 0.875, 0.96)
        alpha <- rho alpha + r,   beta <- rho beta + 1 - r

    Divergence is how far the policy has moved since the prompt's last visit: the mean over tokens
    of |logps - old_logps| of its last completion, scored by both. A prompt starts from `samples`
    completions of which `successes` were right, with a memory of 8: alpha = 8 (s + 1/2) / (n + 1).
    One that was never started has n = 0: value 1/2.

    `1 - value` takes the place of `1 - success_rate` in the focal weight.

    Args: half_life: divergence at which half is forgotten, were there no bounds.
    Source: SPO 2509.13232 and verl-recipe `spo`; its n is 8. The start from n = 0 is the same
        formula, used where nothing was sampled beforehand (ours).
    """

    def __init__(self, half_life: float = 0.06) -> None:
        if not half_life > 0:
            raise ValueError(f"half_life: expected a number > 0, received {half_life}")
        self._half_life = half_life
        self._counts: dict[str, tuple[float, float]] = {}

    def start(self, prompt_id: str, *, successes: float, samples: int) -> None:
        """Set a prompt's state from completions sampled beforehand."""
        if not 0 <= successes <= samples:
            raise ValueError(
                f"successes: expected 0 to samples = {samples}, received {successes} for "
                f"{prompt_id!r}"
            )
        scale = MEMORY_AT_START / (samples + 1)
        self._counts[prompt_id] = (scale * (successes + 0.5), scale * (samples - successes + 0.5))

    def values(self, prompt_ids: Sequence[str]) -> Tensor:
        """(B,) float64: the success rate expected of each prompt, before this step's update."""
        counts = [self._of(prompt_id) for prompt_id in prompt_ids]
        return torch.tensor([alpha / (alpha + beta) for alpha, beta in counts], dtype=torch.float64)

    def update(
        self, prompt_ids: Sequence[str], rewards: Sequence[float], divergences: Sequence[float]
    ) -> None:
        """Take in one completion a prompt, after the advantages were taken from `values`.

        Raises: ValueError for rewards outside [0, 1] (leave unscored completions out) and negative
            divergences.
        """
        for prompt_id, reward, divergence in zip(prompt_ids, rewards, divergences, strict=True):
            if not 0 <= reward <= 1 or not divergence >= 0:
                raise ValueError(
                    f"expected a reward in [0, 1] and a divergence >= 0, received {reward} and "
                    f"{divergence} for {prompt_id!r}"
                )
            rho = min(max(2 ** (-divergence / self._half_life), FORGET_MOST), FORGET_LEAST)
            alpha, beta = self._of(prompt_id)
            self._counts[prompt_id] = (rho * alpha + reward, rho * beta + 1 - reward)

    def sampling_weights(self, prompt_ids: Sequence[str]) -> Tensor:
        """(B,) float64, not normalised: sqrt(value (1 - value)) + 0.05, for `torch.multinomial`."""
        values = self.values(prompt_ids)
        return (values * (1 - values)).sqrt() + EXPLORATION

    def state_dict(self) -> dict[str, list[float]]:
        """{prompt id: [alpha, beta]}, plain numbers: JSON keeps them exactly."""
        return {prompt_id: list(counts) for prompt_id, counts in self._counts.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Go on from a `state_dict`."""
        self._counts = {prompt_id: (alpha, beta) for prompt_id, (alpha, beta) in state.items()}

    def _of(self, prompt_id: str) -> tuple[float, float]:
        return self._counts.get(prompt_id, (MEMORY_AT_START / 2, MEMORY_AT_START / 2))


def spo_advantages(rewards: Tensor, values: Tensor) -> Tensor:
    """SPO's advantages: A = r - value, then (A - mean) / (std + 1e-8) over the whole batch.

    Args:
        rewards: (B,), NaN where there is none. values: (B,), `SuccessTracker.values` before the
            update; a value that has seen the reward would hide it.
    Returns: (B,) float32; 0 without a reward.
    Source: SPO 2509.13232. Which standard deviation is not said; ours is the population's, also
        defined for one completion (0).
    """
    if rewards.shape != values.shape or rewards.dim() != 1:
        raise ValueError(
            f"values: expected (B,) as the rewards, received {tuple(values.shape)} for "
            f"{tuple(rewards.shape)}"
        )
    advantages = rewards.double() - values.to(rewards.device).double()
    return _whitened(advantages, ~rewards.isnan()).float()


class GlobalValue(nn.Module):
    """DVPO: one value for every state under any policy, told which policy by an example of it.

        value = MLP([state, mean over the example's tokens of relu(W token)])

    It is trained once, by `fit_global_value` on trajectories of several policies, frozen, and then
    gives static advantages: no critic learns during reinforcement learning. States are features of
    the position that predicts the token, such as a frozen model's hidden states; this is the value
    before a token, which is Q of the token that led there.

    Args: state_size, example_size: D of states and of the example's tokens. width: of both layers.
    Source: DVPO 2502.16944, which conditions a language model on the trajectory in its context; a
        pooled example and an MLP are the smallest form of that, and ours.
    """

    def __init__(self, state_size: int, example_size: int, width: int = 64) -> None:
        super().__init__()
        self.example = nn.Linear(example_size, width)
        self.value = nn.Sequential(
            nn.Linear(state_size + width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, states: Tensor, example: Tensor, example_mask: Tensor) -> Tensor:
        """(B, T) values of states (B, T, D) under the policy of example (B, S, D)."""
        tokens = torch.where(example_mask[..., None], self.example(example).relu(), 0)
        counts = example_mask.sum(1, keepdim=True).clamp(min=1)
        policy = (tokens.sum(1) / counts)[:, None].expand(-1, states.shape[1], -1)
        return self.value(torch.cat([states, policy], dim=-1)).squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class ValueBatch:
    """Trajectories to learn values from."""

    states: Tensor
    """(B, T, D)."""
    mask: Tensor
    """(B, T) bool: tokens of the trajectory, from column 0 on."""
    rewards: Tensor
    """(B, T), most often `terminal_rewards`."""
    example: Tensor
    """(B, S, D): another trajectory of the same policy."""
    example_mask: Tensor
    """(B, S) bool."""


def fit_global_value(
    model: GlobalValue, batches: Iterable[ValueBatch], *, learning_rate: float = 1e-3
) -> list[float]:
    """One Adam step of the temporal-difference loss a batch; then the model is frozen.

    Values of long chains settle slowly: call it again with a tenth of the rate to take out the
    noise of the last updates.

    Returns: the loss of each batch.
    """
    model.requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    losses = []
    for batch in batches:
        values = model(batch.states, batch.example, batch.example_mask)
        loss = td_loss(values, batch.rewards, batch.mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.requires_grad_(False)
    return losses


def terminal_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """(B, T): each completion's reward (B,) at its last token, 0 elsewhere."""
    mask = _checked_mask(mask)
    last = mask & ~_next(mask)
    return torch.where(last, rewards[:, None], 0.0)


def td_loss(values: Tensor, rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Mean over tokens of (r_t + gamma sg(V_{t+1}) - V_t)^2, with V = 0 after the last token.

    Args: values, rewards, mask: (B, T); the mask's tokens from column 0 on.
    Source: DVPO 2502.16944. The target is constant (semi-gradient), as in TD(0): a gradient through
        it would minimise the residual instead and miss the value where transitions are random.
    """
    mask = _checked_mask(mask)
    errors = torch.where(mask, _td_targets(values, rewards, mask, gamma) - values, 0.0)
    return errors.square().sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def static_advantages(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
) -> Tensor:
    """Generalised advantage estimation with values that do not learn.

        d_t = r_t + gamma V_{t+1} - V_t,   A_t = d_t + gamma lam A_{t+1}
        whiten: (A - mean) / (std + 1e-8) over the tokens of the batch

    Args: values, rewards, mask: (B, T); the mask's tokens from column 0 on. A KL penalty goes into
        the rewards.
    Returns: (B, T) detached, 0 at masked positions: per-token `advantages` of the loss.
    Source: DVPO 2502.16944 and its code (gamma 1, lambda 0.95, whitened).
    """
    mask = _checked_mask(mask)
    deltas = torch.where(mask, _td_targets(values, rewards, mask, gamma) - values, 0.0)
    advantages = torch.zeros_like(deltas)
    following = deltas.new_zeros(len(deltas))
    for t in range(deltas.shape[1] - 1, -1, -1):
        following = deltas[:, t] + gamma * lam * following
        advantages[:, t] = following
    return _whitened(advantages, mask) if whiten else torch.where(mask, advantages, 0.0)


def _td_targets(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """r_t + gamma sg(V_{t+1})."""
    return rewards + gamma * _next(torch.where(mask, values.detach(), 0.0))


def _next(values: Tensor) -> Tensor:
    """Each column's right neighbour; zeros (False) in the last."""
    return torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)


def _checked_mask(mask: Tensor) -> Tensor:
    if mask.dim() != 2 or mask.dtype != torch.bool or (_next(mask) & ~mask).any():
        raise ValueError(
            "mask: expected (B, T) bool with each row's tokens from column 0 on without a gap, "
            f"received {tuple(mask.shape)} {mask.dtype}"
        )
    return mask


def _whitened(values: Tensor, counted: Tensor) -> Tensor:
    """(values - mean) / std over the counted ones, 0 elsewhere."""
    count = counted.sum().clamp(min=1)
    values = torch.where(counted, values, 0.0)
    centred = torch.where(counted, values - values.sum() / count, 0.0)
    return centred / ((centred.square().sum() / count).sqrt() + WHITENING_EPSILON)
