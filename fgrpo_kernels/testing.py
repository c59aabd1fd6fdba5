"""What tests and benchmarks share: input factories and the error rule.

Dimensions: B sequences, T completion tokens, V vocabulary, D hidden size, G group size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fgrpo_kernels.advantages import group_advantages

SAMPLING_BLOCK_BYTES = 64 * 2**20
"""Logits are made for as many rows as this at a time: inputs may be larger than memory allows."""


@dataclass(frozen=True)
class LossInputs:
    """Tensor arguments of `focal_policy_loss`, by its argument names."""

    hidden: Tensor
    lm_head_weight: Tensor
    completion_ids: Tensor
    advantages: Tensor
    success_rate: Tensor
    completion_mask: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    rollout_logps: Tensor | None = None
    token_weights: Tensor | None = None
    lm_head_bias: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """The record as keyword arguments."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to(self, dtype: torch.dtype) -> LossInputs:
        """The same values in another dtype, as new leaves: float64 gives the exact twin.

        The per-token numbers stay at least float32, as log-probs do in trainers.
        """
        side = torch.float64 if dtype == torch.float64 else torch.float32
        changed: dict[str, Any] = {}
        for name, value in self.arguments().items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            model = name in ("hidden", "lm_head_weight", "lm_head_bias")
            leaf = value.detach().to(dtype if model else side, copy=True)
            changed[name] = leaf.requires_grad_(value.requires_grad)
        return replace(self, **changed)

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that take a gradient, by name."""
        return {k: v for k, v in self.arguments().items() if v is not None and v.requires_grad}


def make_inputs(
    batch: int = 8,
    length: int = 12,
    hidden_size: int = 16,
    vocab: int = 50,
    *,
    group_size: int = 4,
    zero_advantage: float = 0.25,
    drift: float = 0.15,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LossInputs:
    """Inputs that look like a training step, the same for the same arguments.

    Logits have standard deviation 2; completion_ids are drawn from the model's own distribution.
    old_logps are the log-probs of a policy `drift` away per token, so that with the default some
    tokens pass the clip bounds of 0.2; ref_logps are twice as far; rollout_logps differ from
    old_logps by 0.05. Lengths are ragged: from half of `length` to all of it. Rewards are 0 or 1 in
    groups of `group_size`; the share `zero_advantage` of the groups is all right or all wrong.

    Returns: LossInputs with padded (batch, length) tokens; hidden and lm_head_weight are leaves in
        `dtype` that require a gradient, the rest is float32 (float64 for float64).
    """
    generator = torch.Generator().manual_seed(seed)
    side = torch.float64 if dtype == torch.float64 else torch.float32
    hidden = torch.randn(batch, length, hidden_size, generator=generator, dtype=side)
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=side)
    weight *= 2 / hidden_size**0.5
    return _training_step(
        hidden.to(dtype), weight.to(dtype), group_size, zero_advantage, drift, device, generator
    )


def lm_like_inputs(
    batch: int = 8,
    length: int = 12,
    hidden_size: int = 64,
    vocab: int = 4096,
    *,
    confident_share: float = 0.8,
    mean_entropy: float = 0.35,
    group_size: int = 4,
    zero_advantage: float = 0.25,
    drift: float = 0.15,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LossInputs:
    """`make_inputs` with the next-token distributions of a language model under RLVR.

    A row's logits are a Zipf prior over token ids, noise, and one token that stands out, by as much
    as gives the row its entropy. `confident_share` of the rows are below 0.01 nats (log-uniform
    from 1e-4), the others uniform around what makes `mean_entropy` the mean; the defaults are the
    mix of 2506.01939. At equal entropy the number of tokens that hold all but 1e-3 or 1e-4 of the
    mass, and that of tokens over 1e-7, agree with the head of SmolLM2-135M-Instruct on its own
    samples (V = 49152): medians within a factor of about two up to 2 nats, more tokens here above.
    """
    if not 0 <= confident_share <= 1:
        raise ValueError(
            f"confident_share: expected a number in [0, 1], received {confident_share}"
        )
    generator = torch.Generator().manual_seed(seed)
    side = torch.float64 if dtype == torch.float64 else torch.float32
    entropy = _entropy_mix(
        batch * length, confident_share, mean_entropy, math.log(vocab), generator
    )
    prior = torch.nn.functional.normalize(
        torch.randn(hidden_size, generator=generator, dtype=side), dim=0
    )
    zipf = -torch.log(torch.arange(vocab, dtype=side) + 3)
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=side) / hidden_size**0.5
    weight += (zipf - zipf.mean())[:, None] * prior / 10
    noise = torch.randn(batch * length, hidden_size, generator=generator, dtype=side)
    tokens = torch.multinomial(zipf.softmax(0), batch * length, True, generator=generator)
    peaks = weight[tokens] - (weight[tokens] @ prior)[:, None] * prior
    hidden = _with_entropy(20 * prior + 2.5 * noise, peaks, weight, entropy.to(side))
    return _training_step(
        hidden.view(batch, length, hidden_size).to(dtype),
        weight.to(dtype),
        group_size,
        zero_advantage,
        drift,
        device,
        generator,
    )


def _entropy_mix(
    rows: int, confident_share: float, mean: float, highest: float, generator: torch.Generator
) -> Tensor:
    """(rows,) of entropies in random order."""
    count = round(confident_share * rows)
    confident = 10 ** (2 * torch.rand(count, generator=generator) - 4)
    uncertain = torch.rand(rows - count, generator=generator)
    if len(uncertain):
        centre = (mean * rows - float(confident.sum())) / len(uncertain)
        spread = min(centre - 0.01, 0.95 * highest - centre)
        if spread < 0:
            raise ValueError(
                f"mean_entropy: expected a mean that {confident_share} of confident rows and a "
                f"vocabulary of {math.exp(highest):.0f} tokens allow, received {mean}"
            )
        uncertain = centre + spread * (2 * uncertain - 1)
    return torch.cat((confident, uncertain))[torch.randperm(rows, generator=generator)]


def _with_entropy(base: Tensor, peaks: Tensor, weight: Tensor, entropy: Tensor) -> Tensor:
    """(N, D): hidden states min(x, 1) base + max(x - 1, 0) peak with the x of each row that gives
    its next-token distribution the wanted entropy."""
    found = []
    rows = max(1, SAMPLING_BLOCK_BYTES // (weight.shape[0] * weight.element_size()))
    for block, peak, wanted in zip(
        base.split(rows), peaks.split(rows), entropy[:, None].split(rows), strict=True
    ):
        base_logits, peak_logits = block @ weight.T, peak @ weight.T
        low, high = torch.zeros_like(wanted), torch.full_like(wanted, 200)
        for _ in range(24):
            x = (low + high) / 2
            log_probs = x.clamp(max=1) * base_logits + (x - 1).clamp(min=0) * peak_logits
            log_probs = log_probs.log_softmax(-1)
            too_flat = -(log_probs.exp() * log_probs).sum(-1, keepdim=True) > wanted
            low, high = torch.where(too_flat, x, low), torch.where(too_flat, high, x)
        found.append(x.clamp(max=1) * block + (x - 1).clamp(min=0) * peak)
    return torch.cat(found)


def _training_step(
    hidden: Tensor,
    weight: Tensor,
    group_size: int,
    zero_advantage: float,
    drift: float,
    device: torch.device | str,
    generator: torch.Generator,
) -> LossInputs:
    """What the rows of `hidden` (batch, length, D) need to be a training step."""
    batch, length = hidden.shape[:2]
    if batch % group_size:
        raise ValueError(f"batch: expected a multiple of group_size={group_size}, received {batch}")
    side = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    ids, logps = _sample(hidden.to(side).flatten(0, 1), weight.to(side), generator)
    ids, logps = ids.view(batch, length), logps.view(batch, length)

    def shifted(base: Tensor, std: float) -> Tensor:
        noise = torch.randn(batch, length, generator=generator, dtype=side)
        return (base + std * noise).clamp(max=0)

    old_logps = shifted(logps, drift)

    lengths = torch.randint((length + 1) // 2, length + 1, (batch,), generator=generator)
    lengths[torch.randint(batch, (), generator=generator)] = length
    rewards = _rewards(batch // group_size, group_size, zero_advantage, generator)
    groups = group_advantages(rewards.to(side), group_size=group_size)

    inputs = LossInputs(
        hidden=hidden.requires_grad_(),
        lm_head_weight=weight.requires_grad_(),
        completion_ids=ids,
        advantages=groups.advantages,
        success_rate=groups.success_rate,
        completion_mask=torch.arange(length) < lengths[:, None],
        old_logps=old_logps,
        ref_logps=shifted(logps, 2 * drift),
        rollout_logps=shifted(old_logps, 0.05),
    )
    moved = {
        name: value.detach().to(device).requires_grad_(value.requires_grad)
        for name, value in inputs.arguments().items()
        if value is not None
    }
    return replace(inputs, **moved)


def _sample(hidden: Tensor, weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(N,) ids drawn from softmax(W h) and their log-probs."""
    rows = max(1, SAMPLING_BLOCK_BYTES // (weight.shape[0] * weight.element_size()))
    last = weight.shape[0] - 1
    ids, logps = [], []
    for block in hidden.split(rows):
        log_probs = (block @ weight.T).log_softmax(-1)
        cumulative = log_probs.exp().cumsum(-1)
        uniform = torch.rand(len(block), 1, generator=generator, dtype=weight.dtype)
        drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:]).clamp(max=last)
        ids.append(drawn.squeeze(-1))
        logps.append(log_probs.gather(-1, drawn).squeeze(-1))
    return torch.cat(ids), torch.cat(logps)


def _rewards(
    groups: int, group_size: int, zero_advantage: float, generator: torch.Generator
) -> Tensor:
    """(groups * group_size,) of 0 and 1; the given share of the groups is degenerate."""
    correct = torch.randint(1, max(2, group_size), (groups,), generator=generator)
    degenerate = torch.randperm(groups, generator=generator)[: round(zero_advantage * groups)]
    correct[degenerate[0::2]] = 0
    correct[degenerate[1::2]] = group_size
    order = torch.rand(groups, group_size, generator=generator).argsort(1)
    return (order < correct[:, None]).double().flatten()


def assert_error_rule(
    name: str,
    actual: Tensor,
    plain: Tensor,
    exact: Tensor,
    *,
    factor: float = 2.0,
    largest: float | None = None,
) -> None:
    """The largest error against float64 is at most `factor` times plain torch's at the same dtype.

        max |actual - exact| <= factor * max |plain - exact| + eps * largest

    eps is the dtype's of `actual`, `largest` is max |exact|: plain torch may hit a value exactly by
    luck, and one rounding of the largest value must not fail for that. For a sum whose terms cancel
    pass the largest term. NaN and infinity fail.
    """
    exact = exact.double()
    error = (actual.double() - exact).abs().max()
    budget = factor * (plain.double() - exact).abs().max()
    largest = float(exact.abs().max()) if largest is None else largest
    budget = budget + torch.finfo(actual.dtype).eps * largest
    if not error <= budget:
        worst = int((actual.double() - exact).abs().nan_to_num(torch.inf).argmax())
        values = [float(tensor.flatten()[worst]) for tensor in (actual, plain, exact)]
        raise AssertionError(
            f"{name}: error {error:.3g} over the budget {budget:.3g}; at flat index {worst}: "
            f"actual {values[0]:.9g}, plain torch {values[1]:.9g}, float64 {values[2]:.9g}"
        )
