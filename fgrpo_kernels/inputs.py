"""What callers pass, checked and flattened: (B, T) or packed (N,) becomes rows.

Shapes, dtypes and devices are checked at once. What depends on data (ids in range, success rates,
counts of rows) is asked of the device in a single copy, `HostFacts`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fgrpo_kernels.advantages import focal_power, outside_unit_interval
from fgrpo_kernels.config import PolicyLossConfig
from fgrpo_kernels.head import LinearHead
from fgrpo_kernels.low_rank import LowRankUpdate
from fgrpo_kernels.reductions import Denominators, sequence_counts

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class HostFacts:
    """Named 0-dim integers of the device, read with one copy."""

    def __init__(self) -> None:
        self._pending: dict[str, Tensor] = {}

    def ask(self, name: str, value: Tensor) -> None:
        self._pending[name] = value.to(torch.int64)

    def read(self) -> dict[str, int]:
        values = torch.stack(list(self._pending.values())).tolist()
        return dict(zip(self._pending, values, strict=True))


@dataclass(frozen=True)
class HeadInputs:
    """What every path needs of the head: rows of hidden and ids, which of them count."""

    shape: torch.Size
    """Of completion_ids."""
    hidden: Tensor
    ids: Tensor
    valid: Tensor
    head: LinearHead


def read_head_inputs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor | None,
    lm_head_bias: Tensor | None,
    lm_head_lora: tuple[Tensor, Tensor, float] | None,
    *,
    temperature: float,
    logit_scale: float,
    logit_softcap: float | None,
    facts: HostFacts,
) -> HeadInputs:
    """Check and flatten; ids out of range are asked of `facts` and raised by `check_ids`."""
    for name, tensor in (("hidden", hidden), ("lm_head_weight", lm_head_weight)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: expected a tensor, received {type(tensor).__name__}")
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name}: expected one of {_names(FLOATS)}, received {tensor.dtype}")
    if hidden.dim() not in (2, 3):
        raise ValueError(
            f"hidden: expected shape (B, T, D) or packed (N, D), received {tuple(hidden.shape)}"
        )
    if lm_head_weight.dim() != 2 or lm_head_weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"lm_head_weight: expected shape (V, D) with D = {hidden.shape[-1]} as in hidden, "
            f"received {tuple(lm_head_weight.shape)}"
        )
    if 0 in lm_head_weight.shape:
        raise ValueError(
            f"lm_head_weight: expected V >= 1 and D >= 1, received {tuple(lm_head_weight.shape)}"
        )
    device, shape = hidden.device, hidden.shape[:-1]
    check_tensor("lm_head_weight", lm_head_weight, lm_head_weight.shape, device)
    check_tensor("completion_ids", completion_ids, shape, device, (torch.int64,))
    vocab_size = lm_head_weight.shape[0]
    if lm_head_bias is not None:
        check_tensor("lm_head_bias", lm_head_bias, (vocab_size,), device, FLOATS)
    operand_dtype = _operand_dtype(hidden, lm_head_weight)
    lora = None if lm_head_lora is None else _read_lora(lm_head_lora, hidden, lm_head_weight)
    if lora is not None and torch.float64 in (operand_dtype, lora.operand_dtype):
        operand_dtype = torch.float64
        lora = replace(lora, operand_dtype=torch.float64)
    ids = completion_ids.reshape(-1)
    if completion_mask is None:
        valid = torch.ones_like(ids, dtype=torch.bool)
    else:
        check_tensor("completion_mask", completion_mask, shape, device, (torch.bool,))
        valid = completion_mask.reshape(-1)
    outside = valid & ((ids < 0) | (ids >= vocab_size))
    facts.ask("num_valid", valid.sum())
    facts.ask("ids_outside", outside.sum())
    if ids.numel():
        position = outside.to(torch.int8).argmax()
        facts.ask("outside_position", position)
        facts.ask("outside_id", ids.gather(0, position[None]).squeeze(0))
    head = LinearHead(
        weight=lm_head_weight,
        bias=lm_head_bias,
        operand_dtype=operand_dtype,
        logit_scale=logit_scale,
        temperature=temperature,
        logit_softcap=logit_softcap,
        lora=lora,
    )
    return HeadInputs(shape, hidden.reshape(-1, hidden.shape[-1]), ids, valid, head)


def refuse_tp_group(tp_group: Any, lm_head_lora: object) -> None:
    if tp_group is not None:
        also = "; it also excludes lm_head_lora" if lm_head_lora is not None else ""
        raise ValueError(
            f"tp_group (vocabulary-parallel head) is not implemented yet; pass None{also}"
        )


def _read_lora(lora: object, hidden: Tensor, weight: Tensor) -> LowRankUpdate:
    if not isinstance(lora, (tuple, list)) or len(lora) != 3:
        parts = f"{len(lora)} elements" if isinstance(lora, (tuple, list)) else type(lora).__name__
        raise ValueError(f"lm_head_lora: expected (A, B, scale), received {parts}")
    a, b, scale = lora
    width, device = hidden.shape[-1], hidden.device
    if not isinstance(a, Tensor) or a.dim() != 2 or a.shape[1] != width or not len(a):
        got = tuple(a.shape) if isinstance(a, Tensor) else type(a).__name__
        raise ValueError(
            f"lm_head_lora: expected A of shape (r, D) with r >= 1 and D = {width} as in hidden, "
            f"received {got}"
        )
    check_tensor("lm_head_lora A", a, a.shape, device, FLOATS)
    check_tensor("lm_head_lora B", b, (weight.shape[0], len(a)), device, FLOATS)
    if isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale):
        raise ValueError(f"lm_head_lora: expected a finite number as scale, received {scale!r}")
    return LowRankUpdate(a, b, float(scale), _operand_dtype(hidden, a, b))


def check_ids(inputs: HeadInputs, known: dict[str, int]) -> None:
    if known["ids_outside"]:
        position = known["outside_position"]
        if len(inputs.shape) == 2:
            where = f"{list(divmod(position, inputs.shape[1]))}"
        else:
            where = f"[{position}]"
        raise ValueError(
            f"completion_ids: expected ids in [0, {inputs.head.vocab_size}) at unmasked positions, "
            f"received {known['outside_id']} at {where} ({known['ids_outside']} such ids)"
        )


@dataclass(frozen=True)
class LossInputs:
    """The loss's side inputs as flat rows of all positions (N,), in the accumulator's dtype."""

    sequence: Tensor
    num_sequences: int
    advantages: Tensor
    """focal_weight * advantages."""
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


def check_tensor(
    name: str,
    tensor: object,
    shape: torch.Size | tuple[int, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> None:
    """Raise ValueError with what was expected and what was received."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a tensor, received {type(tensor).__name__}")
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, received {tuple(tensor.shape)}")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {_names(dtypes)}, received {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device} as hidden, received {tensor.device}")


def _operand_dtype(*tensors: Tensor) -> torch.dtype:
    """The autocast dtype under autocast (which leaves float64 alone), else promoted."""
    promoted = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    device_type = tensors[0].device.type
    if torch.is_autocast_enabled(device_type) and promoted != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return promoted


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
    bounds = cu_seqlens.to(device=device, dtype=torch.int64)
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
        f"rollout_level={config.rollout_level!r}"
        if config.rollout_correction is not None and config.rollout_level != "token"
        else "",
    ]
    if any(uses):
        raise ValueError(
            "cu_seqlens: expected (B+1,) sequence bounds for packed input, received None; needed "
            f"for {', '.join(use for use in uses if use)}"
        )


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
        value = value.detach().to(device=device, dtype=torch.float64)
        facts.ask(f"{name}_bad", ~((value > 1e-30) & (value < 1e30)))
        return value
    if isinstance(value, bool) or not isinstance(value, Real) or not 1e-30 < value < 1e30:
        raise ValueError(f"{name}: expected a finite number > 0, received {value!r}")
    return torch.full((), float(value), dtype=torch.float64, device=device)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
