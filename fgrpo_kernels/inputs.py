"""What callers pass for the head, checked and flattened: (B, T) or packed (N,) becomes rows.

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

from fgrpo_kernels.head import LinearHead
from fgrpo_kernels.low_rank import LowRankUpdate
from fgrpo_kernels.vocab_parallel import shard_of_head

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
    tp_group: Any,
    vocab_size: int | None,
    *,
    impl: str,
    temperature: float,
    logit_scale: float,
    logit_softcap: float | None,
    facts: HostFacts,
) -> HeadInputs:
    """Check and flatten; ids out of range are asked of `facts` and raised by `check_ids`."""
    if _is_distributed(hidden):
        raise ValueError(
            f"hidden: expected a plain tensor, received {type(hidden).__name__}; pass its "
            "to_local() or full_tensor()"
        )
    for name, tensor in (("lm_head_weight", lm_head_weight), ("lm_head_bias", lm_head_bias)):
        if tp_group is not None and _is_distributed(tensor):
            # Gathered over the group it would count each row once a rank.
            raise ValueError(
                f"tp_group: expected {name} as this rank's shard in a plain tensor, received "
                f"{type(tensor).__name__}; pass its to_local()"
            )
    lm_head_weight, lm_head_bias = _gathered(lm_head_weight), _gathered(lm_head_bias)
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
    if lm_head_bias is not None:
        check_tensor("lm_head_bias", lm_head_bias, (len(lm_head_weight),), device, FLOATS)
    operand_dtype = _operand_dtype(hidden, lm_head_weight)
    lora = None if lm_head_lora is None else _read_lora(lm_head_lora, hidden, lm_head_weight)
    if lora is not None and torch.float64 in (operand_dtype, lora.operand_dtype):
        operand_dtype = torch.float64
        lora = replace(lora, operand_dtype=torch.float64)
    if tp_group is not None and (impl == "reference" or lora is not None):
        what = "lm_head_lora" if lora is not None else "impl='reference', which needs a whole head"
        raise ValueError(f"tp_group: not with {what}")
    columns, shard = shard_of_head(lm_head_weight, vocab_size, tp_group)
    if columns < len(lm_head_weight):
        lm_head_weight = lm_head_weight[:columns]
        lm_head_bias = None if lm_head_bias is None else lm_head_bias[:columns]
        lora = None if lora is None else replace(lora, b=lora.b[:columns])
    ids = completion_ids.reshape(-1)
    if completion_mask is None:
        valid = torch.ones_like(ids, dtype=torch.bool)
    else:
        check_tensor("completion_mask", completion_mask, shape, device, (torch.bool,))
        valid = completion_mask.reshape(-1)
    outside = valid & ((ids < 0) | (ids >= (columns if shard is None else shard.vocab_size)))
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
        shard=shard,
    )
    if shard is not None:
        ids = ids - shard.first
    return HeadInputs(shape, hidden.reshape(-1, hidden.shape[-1]), ids, valid, head)


def _read_lora(lora: object, hidden: Tensor, weight: Tensor) -> LowRankUpdate:
    if not isinstance(lora, (tuple, list)) or len(lora) != 3:
        parts = f"{len(lora)} elements" if isinstance(lora, (tuple, list)) else type(lora).__name__
        raise ValueError(f"lm_head_lora: expected (A, B, scale), received {parts}")
    a, b, scale = _gathered(lora[0]), _gathered(lora[1]), lora[2]
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
        head = inputs.head
        vocab_size = head.vocab_size if head.shard is None else head.shard.vocab_size
        if len(inputs.shape) == 2:
            where = f"{list(divmod(position, inputs.shape[1]))}"
        else:
            where = f"[{position}]"
        raise ValueError(
            f"completion_ids: expected ids in [0, {vocab_size}) at unmasked positions, "
            f"received {known['outside_id']} at {where} ({known['ids_outside']} such ids)"
        )


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


def _is_distributed(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and hasattr(tensor, "full_tensor")


def _gathered(tensor: Any) -> Any:
    """A DTensor's whole (FSDP2 outside its hooks), anything else as it is. The gradient that goes
    back is the mean over the mesh, as FSDP's own."""
    if not _is_distributed(tensor):
        return tensor
    from torch.distributed.tensor import Partial

    return tensor.full_tensor(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)


def _operand_dtype(*tensors: Tensor) -> torch.dtype:
    """The autocast dtype under autocast (which leaves float64 alone), else promoted."""
    promoted = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    device_type = tensors[0].device.type
    if torch.is_autocast_enabled(device_type) and promoted != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return promoted


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
