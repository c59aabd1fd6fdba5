"""What callers pass for the loss, checked and flattened as `inputs.py` does for the head."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from fgrpo_kernels.advantages import focal_power, outside_unit_interval
from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.inputs import FLOATS, HeadInputs, HostFacts, check_tensor
from fgrpo_kernels.reductions import Denominators, sequence_counts


@dataclass(frozen=True)
class LossInputs:
    """The loss's side inputs as flat rows of all positions (N,), in the accumulator's dtype."""

    sequence: Tensor
    num_sequences: int
    advantages: Tensor
    """focal_weight * advantages."""
    constant_advantages: bool
    """One advantage a sequence and no token weights."""
    token_weights: Tensor | None
    old_logps: Tensor | None
    ref_logps: Tensor | None
    rollout_logps: Tensor | None
    focal_weight_sum: Tensor
    """Over the sequences with a valid token, and their number."""
    num_present: Tensor
    denominators: Denominators


def read_loss_inputs(
    inputs: HeadInputs,
    advantages: Tensor,
    success_rate: Tensor | None,
    *,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    rollout_logps: Tensor | None,
    token_weights: Tensor | None,
    cu_seqlens: Tensor | None,
    global_valid_tokens: float | Tensor | None,
    global_sequences: float | Tensor | None,
    config: PolicyLossConfig,
    facts: HostFacts,
) -> LossInputs:
    """Check and flatten; what depends on data is asked of `facts`, raised by `check_loss_facts`."""
    shape, device, dtype = inputs.shape, inputs.hidden.device, inputs.head.dtype
    side: dict[str, Tensor | None] = {}
    for name, tensor in (
        ("old_logps", old_logps),
        ("ref_logps", ref_logps),
        ("rollout_logps", rollout_logps),
        ("token_weights", token_weights),
    ):
        if tensor is not None:
            check_tensor(name, tensor, shape, device, FLOATS)
            tensor = tensor.reshape(-1).to(dtype)
        side[name] = tensor if name == "token_weights" or tensor is None else tensor.detach()
    if config.kl_coef > 0 and ref_logps is None:
        raise ValueError(f"ref_logps: needed when kl_coef > 0 (kl_coef={config.kl_coef}), got None")
    if config.rollout_correction is not None and rollout_logps is None:
        raise ValueError(
            "rollout_logps: needed when rollout_correction is set "
            f"(rollout_correction={config.rollout_correction!r}), got None"
        )
    sequence, num_sequences = _sequences(shape, cu_seqlens, device, facts)
    per_token = _token_advantages(advantages, shape, sequence, num_sequences, cu_seqlens, device)
    if cu_seqlens is None and len(shape) == 1:
        _refuse_per_sequence_use(config)
    present = sequence_counts(inputs.valid, sequence, num_sequences) > 0
    num_present = present.sum()
    focal_sum = num_present.to(dtype)
    per_token = per_token.detach().to(dtype)
    if config.focal_gamma > 0:
        if success_rate is None:
            raise ValueError(
                f"success_rate: needed when focal_gamma > 0 (focal_gamma={config.focal_gamma}), "
                "got None; pass the group's success rate of each sequence, or focal_gamma=0"
            )
        check_tensor("success_rate", success_rate, (num_sequences,), device, FLOATS)
        rate = success_rate.detach().to(dtype)
        facts.ask("success_rate_outside", (present & outside_unit_interval(rate)).sum())
        weights = focal_power(rate, config.focal_gamma)
        focal_sum = torch.where(present, weights, 0).sum()
        per_token = per_token * weights[sequence]
    return LossInputs(
        sequence=sequence,
        num_sequences=num_sequences,
        advantages=per_token,
        constant_advantages=advantages.shape == (num_sequences,) and token_weights is None,
        token_weights=side["token_weights"],
        old_logps=side["old_logps"],
        ref_logps=side["ref_logps"],
        rollout_logps=side["rollout_logps"],
        focal_weight_sum=focal_sum,
        num_present=num_present,
        denominators=Denominators(
            _positive("global_valid_tokens", global_valid_tokens, device, facts),
            _positive("global_sequences", global_sequences, device, facts),
        ),
    )


def check_loss_facts(known: dict[str, int]) -> None:
    if known.get("success_rate_outside"):
        raise ValueError(
            "success_rate: expected values in [0, 1] (1e-4 of rounding allowed) for every sequence "
            f"with a valid token, received {known['success_rate_outside']} outside or NaN"
        )
    if known.get("cu_seqlens_bad"):
        raise ValueError(
            "cu_seqlens: expected 0 = cu_seqlens[0] <= cu_seqlens[1] <= ... <= cu_seqlens[B] = N, "
            f"received {known['cu_seqlens_first']} first and {known['cu_seqlens_last']} last, or a "
            "decrease between"
        )
    for name in ("global_valid_tokens", "global_sequences"):
        if known.get(f"{name}_bad"):
            raise ValueError(f"{name}: expected a finite number > 0, received one that is not")


def _sequences(
    shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device, facts: HostFacts
) -> tuple[Tensor, int]:
    """(N,) the sequence of each position, and their number."""
    if len(shape) == 2:
        if cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens: only for packed (N, D) hidden, received it with (B, T) = "
                f"{tuple(shape)}"
            )
        rows = torch.arange(shape[0], device=device)
        return rows[:, None].expand(shape).reshape(-1), shape[0]
    if cu_seqlens is None:
        return torch.zeros(shape[0], dtype=torch.int64, device=device), 1
    integers = (torch.int32, torch.int64)
    fewest = 2 if shape[0] else 1
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or len(cu_seqlens) < fewest:
        got = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, Tensor) else type(cu_seqlens)
        raise ValueError(f"cu_seqlens: expected an integer tensor of shape (B+1,), received {got}")
    check_tensor("cu_seqlens", cu_seqlens, cu_seqlens.shape, cu_seqlens.device, integers)
    bounds = _uploaded(cu_seqlens, device, torch.int64)
    bad = (bounds[0] != 0) | (bounds[-1] != shape[0]) | (bounds.diff() < 0).any()
    facts.ask("cu_seqlens_bad", bad)
    facts.ask("cu_seqlens_first", bounds[0])
    facts.ask("cu_seqlens_last", bounds[-1])
    count = len(bounds) - 1
    sequence = torch.searchsorted(bounds[1:], torch.arange(shape[0], device=device), right=True)
    return sequence.clamp(max=max(count - 1, 0)), count


def _token_advantages(
    advantages: Tensor,
    shape: torch.Size,
    sequence: Tensor,
    num_sequences: int,
    cu_seqlens: Tensor | None,
    device: torch.device,
) -> Tensor:
    """(N,) advantages; with as many sequences as tokens the (B,) reading wins."""
    per_sequence = len(shape) == 2 or cu_seqlens is not None
    received = advantages.shape if isinstance(advantages, Tensor) else None
    if per_sequence and received == torch.Size((num_sequences,)):
        check_tensor("advantages", advantages, (num_sequences,), device, FLOATS)
        return advantages[sequence]
    if received != shape:
        got = type(advantages).__name__ if received is None else tuple(received)
        options = f"{(num_sequences,)} or {tuple(shape)}" if per_sequence else f"{tuple(shape)}"
        hint = "" if per_sequence else " (pass cu_seqlens for one advantage per sequence)"
        raise ValueError(f"advantages: expected shape {options}{hint}, received {got}")
    check_tensor("advantages", advantages, shape, device, FLOATS)
    return advantages.reshape(-1)


def _refuse_per_sequence_use(config: PolicyLossConfig) -> None:
    uses = [
        f"focal_gamma={config.focal_gamma}" if config.focal_gamma > 0 else "",
        f"reduction={config.reduction!r}" if config.reduction != "token_mean" else "",
        f"ratio_level={config.ratio_level!r}" if config.ratio_level != "token" else "",
        "surrogate='vespo'" if config.surrogate == "vespo" else "",
        f"rollout_level={config.rollout_level!r}"
        if config.rollout_correction is not None and config.rollout_level != "token"
        else "",
    ]
    if any(uses):
        raise ValueError(
            "cu_seqlens: expected (B+1,) sequence bounds for packed input, received None; needed "
            f"for {', '.join(use for use in uses if use)}"
        )


def _uploaded(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """On the device. From the CPU without waiting: the read of the facts waits for it anyway, so
    that after the call the caller may write to the tensor."""
    return tensor.to(device=device, dtype=dtype, non_blocking=tensor.device.type == "cpu")


def _positive(
    name: str, value: float | Tensor | None, device: torch.device, facts: HostFacts
) -> Tensor | None:
    """A denominator as a 0-dim float64 tensor on the device."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(
                f"{name}: expected a number or 0-dim tensor, received shape {tuple(value.shape)}"
            )
        value = _uploaded(value.detach(), device, torch.float64)
        facts.ask(f"{name}_bad", ~((value > 1e-30) & (value < 1e30)))
        return value
    if isinstance(value, bool) or not isinstance(value, Real) or not 1e-30 < value < 1e30:
        raise ValueError(f"{name}: expected a finite number > 0, received {value!r}")
    return torch.full((), float(value), dtype=torch.float64, device=device)
