"""What DeepSpeed spreads over processes, as full tensors by the parameters' names, and back.

The names and shapes are those of the model, whatever the ZeRO stage and the number of processes, so
that what was saved under one is read under another. Every process must ask in the same order: each
tensor is gathered when it is asked for, and released when the next one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's, under torch's names."""
MASTER = "fp32"
"""The optimizer's own weights, where the model's are narrower."""


class TrainingState:
    """Weights, master weights and Adam's moments of an engine."""

    def __init__(self, engine: Any, model: nn.Module) -> None:
        self.engine, self.model = engine, model
        self.parameters = dict(model.named_parameters())
        kept = model.state_dict(keep_vars=True)
        self.buffers = {name: b for name, b in model.named_buffers() if name in kept}
        self.stage: int = engine.zero_optimization_stage()
        self.adam: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self._make_moments()

    def _make_moments(self) -> None:
        """What AdamW would make in its first step: a run may be saved and resumed before it."""
        optimizer = self.engine.optimizer
        if self.stage == 3:
            updated = optimizer.fp32_partitioned_groups_flat
        else:
            updated = [p for group in self.adam.param_groups for p in group["params"]]
        for tensor in updated:
            self.adam.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                **{key: torch.zeros_like(tensor) for key in MOMENTS},
            }
        if self.stage in (1, 2):
            optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def tensor_kinds(self) -> tuple[str, ...]:
        """What the optimizer has for each parameter: the moments, and weights if they differ."""
        narrow = any(p.dtype != torch.float32 for p in self.parameters.values())
        return (MASTER, *MOMENTS) if narrow else MOMENTS

    @property
    def num_steps(self) -> int:
        """Of the optimizer; AdamW corrects its moments' start by it."""
        return int(next(iter(self.adam.state.values()))["step"])

    def shapes(self) -> dict[str, torch.Size]:
        """Of the weights, in the order of `weights`."""
        whole = {n: getattr(p, "ds_shape", p.shape) for n, p in self.parameters.items()}
        return whole | {name: buffer.shape for name, buffer in self.buffers.items()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of the model's weights, a tied one once; valid until the next."""
        for name, parameter in self.parameters.items():
            with self._gathered(parameter):
                yield name, parameter.data
        yield from self.buffers.items()

    def optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """("name/kind", full float32 tensor) of every parameter and each of `tensor_kinds`."""
        for name, parameter in self.parameters.items():
            for kind in self.tensor_kinds:
                yield f"{name}/{kind}", self._read(parameter, kind)

    def load(self, read: Callable[[str], Tensor], read_optimizer: Callable[[str], Tensor]) -> None:
        """Take over full tensors; `read` has the names of `weights`, the other of
        `optimizer_tensors`."""
        for name, parameter in self.parameters.items():
            weight = read(name)
            with self._gathered(parameter, changed=True):
                parameter.data.copy_(weight)
            master = read_optimizer(f"{name}/{MASTER}") if MASTER in self.tensor_kinds else weight
            self._write(parameter, MASTER, master)
            for kind in MOMENTS:
                self._write(parameter, kind, read_optimizer(f"{name}/{kind}"))
        for name, buffer in self.buffers.items():
            buffer.copy_(read(name))

    def set_num_steps(self, num_steps: int) -> None:
        for state in self.adam.state.values():
            state["step"].fill_(num_steps)

    def _gathered(self, parameter: nn.Parameter, changed: bool = False) -> Any:
        # Every process reads the same file, so rank 0's copy is everybody's.
        return deepspeed.zero.GatheredParameters(
            [parameter], modifier_rank=0 if changed else None, enabled=self.stage == 3
        )

    def _read(self, parameter: nn.Parameter, kind: str) -> Tensor:
        if self.stage == 0:
            return self.adam.state[parameter][kind]
        if kind == MASTER:
            return safe_get_full_fp32_param(parameter)
        return safe_get_full_optimizer_state(parameter, kind)

    def _write(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        if self.stage == 0:
            if kind != MASTER:
                self.adam.state[parameter][kind].copy_(value)
            return
        if self.stage == 3:
            # The setter of full tensors reads beyond a tensor that does not divide evenly.
            value = _own_part(parameter, value)
            if kind == MASTER:
                safe_set_local_fp32_param(parameter, value)
            else:
                safe_set_local_optimizer_state(parameter, value, kind)
        elif kind == MASTER:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, kind)


def _own_part(parameter: Any, value: Tensor) -> Tensor:
    """This process's equal part of a flat tensor, the last one filled up with zeros."""
    size = parameter.ds_tensor.ds_numel
    rank = torch.distributed.get_rank(parameter.ds_process_group)
    part = value.flatten()[rank * size : (rank + 1) * size].float()
    return nn.functional.pad(part, (0, size - part.numel()))
