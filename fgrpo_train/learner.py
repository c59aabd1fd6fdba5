"""The learner: the policy under training, its reference, and the DeepSpeed engine that steps it.

A mini-batch goes through the model in micro-batches; DeepSpeed sums their gradients, averages over
processes, clips and runs AdamW, with the training state spread as the ZeRO stage says.

Dimensions: B sequences, T completion tokens.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from fgrpo_train.batching import Batch, micro_batches
from fgrpo_train.config import deepspeed_config
from fgrpo_train.policy_with_loss import (
    Denominators,
    PolicyWithLoss,
    prepare_policy,
    synchronize,
)
from fgrpo_train.rollout_metrics import RatioSums, ratio_sums
from fgrpo_train.settings import TrainConfig
from fgrpo_train.weight_files import open_tensors, write_tensors

if not torch.cuda.is_available():
    # Read by DeepSpeed at import; without it a GPU driver without a usable GPU is picked.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402

from fgrpo_train.training_state import TrainingState  # noqa: E402


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer update did; sums are of this process's sequences."""

    loss: float
    """This process's part of the global loss."""
    metric_sums: dict[str, tuple[float, float]]
    """(numerator, count) of the loss's metrics; ratio_max: the maximum."""
    grad_norm: float
    """Over all processes, before clipping."""
    learning_rate: float
    num_sequences: int
    """Sequences that the trunk saw."""
    num_tokens: int
    """Their tokens, prompts included."""
    num_columns: int
    """The same with padding: what the trunk computed."""
    num_micro_batches: int
    sampler_gap: tuple[float, float]
    """Sum and count of |log-prob at rollout time by this module - by the sampler| per token: what
    differs beyond rounding is a fault of one of the two."""
    sampler_ratio: RatioSums
    """Of the same two, before any correction."""
    seconds: dict[str, float]
    """Of forward_backward, of its part in the loss head (loss), and of the optimizer."""


class Learner:
    """Holds the policy; every process has one, and all call its methods alike."""

    def __init__(self, model: PreTrainedModel, config: TrainConfig) -> None:
        start_processes()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.config = config
        prepare_policy(model, config.policy)
        self.model = model
        self.policy = PolicyWithLoss(model, config.loss, packing=config.policy.packing)
        settings = deepspeed_config(config)
        self.reference = make_reference(self.policy, settings) if config.loss.kl_coef > 0 else None
        with exact_buffers(self.policy):
            self.engine, *_ = deepspeed.initialize(model=self.policy, config=settings)
        self.device = self.engine.device
        self.state = TrainingState(self.engine, model)
        self.num_updates = 0

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of the policy, in transformers' names, a tied weight once.

        Under ZeRO-3 a tensor is gathered when it is asked for and released when the next one is:
        every process goes through all of them, and copies what it keeps.
        """
        return self.state.weights()

    def logps(self, batch: Batch) -> Tensor:
        """(B, T) float32 log-probs of the completions under the present policy; 0 where masked."""
        return self._score(self.engine, batch)

    def reference_logps(self, batch: Batch) -> Tensor:
        """The same under the policy that training started from.

        Raises: ValueError if there is none, for kl_coef is 0.
        """
        if self.reference is None:
            raise ValueError("reference_logps: expected loss.kl_coef > 0, received 0")
        return self._score(self.reference, batch)

    @torch.no_grad()
    def _score(self, module: nn.Module, batch: Batch) -> Tensor:
        logps = torch.zeros(batch.completion_mask.shape, device=self.device)
        for rows, part in self._micro_batches(batch):
            scored = module(part, None)
            logps[rows, : scored.shape[1]] = scored[: len(rows)].float()
        return logps

    def _micro_batches(self, batch: Batch) -> list[tuple[Tensor, Batch]]:
        """Indices and sequences of each; equally many on every process, for the engine's collective
        operations come in step with them."""
        parts = micro_batches(
            batch,
            max_tokens=self.config.optimisation.tokens_per_micro_batch,
            packing=self.config.policy.packing,
        )
        most = int(self.max_over_ranks({"parts": len(parts)})["parts"])
        fillers = [(parts[0][:0], batch.filler())] * (most - len(parts))
        return [(rows, batch.rows(rows).trimmed()) for rows in parts] + fillers

    def update(self, batch: Batch, denominators: Denominators) -> Update:
        """One optimizer update on this process's share of a mini-batch.

        Each micro-batch's loss is its part of the global sum; the engine averages over processes,
        so the loss is multiplied by their number.
        """
        learning_rate = self._set_learning_rate()
        self.policy.loss_seconds = 0.0
        parts = self._micro_batches(batch)
        start = time.perf_counter()
        losses, sums, gaps, ratios = [], [], [], []
        for number, (rows, part) in enumerate(parts, start=1):
            self.engine.set_gradient_accumulation_boundary(number == len(parts))
            output = self.engine(part, denominators)
            self.engine.backward(output.loss * self.world_size, scale_wrt_gas=False)
            if len(rows):
                losses.append(output.loss.detach())
                sums.append(output.metric_sums)
                at_rollout = output.logps if part.old_logps is None else part.old_logps
                gaps.append(_sampler_gap(part, at_rollout))
                ratios.append(ratio_sums(at_rollout, part.rollout_logps, part.completion_mask))
        synchronize(self.device)
        backward_done = time.perf_counter()
        grad_norm = self._step()
        synchronize(self.device)
        stepped = time.perf_counter()
        real = [part for rows, part in parts if len(rows)]
        num_tokens = sum(int(part.attention_mask.sum()) for part in real)
        padded = sum(part.attention_mask.numel() for part in real)
        return Update(
            loss=float(torch.stack(losses).sum()),
            metric_sums=_merged(sums),
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_sequences=len(batch),
            num_tokens=num_tokens,
            num_columns=num_tokens if self.config.policy.packing else padded,
            num_micro_batches=len(parts),
            sampler_gap=(sum(gap for gap, _ in gaps), sum(count for _, count in gaps)),
            sampler_ratio=RatioSums.total(ratios),
            seconds={
                "forward_backward": backward_done - start,
                "loss": self.policy.loss_seconds,
                "optimizer": stepped - backward_done,
            },
        )

    def _set_learning_rate(self) -> float:
        """The one of the next update: linear warm-up, then constant."""
        optimisation = self.config.optimisation
        warm = min(1.0, (self.num_updates + 1) / max(optimisation.warmup_updates, 1))
        for group in self.state.adam.param_groups:
            group["lr"] = optimisation.learning_rate * warm
        return optimisation.learning_rate * warm

    def _step(self) -> float:
        """Let the optimizer step; returns the norm of the gradient over all processes."""
        grad_norm = None
        if self.state.stage == 0:  # every process has the whole gradient, and DeepSpeed no norm
            gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
            grad_norm = nn.utils.get_total_norm(gradients)
        self.engine.step()
        self.num_updates += 1
        return float(self.engine.get_global_grad_norm() if grad_norm is None else grad_norm)

    def sum_over_ranks(self, values: dict[str, float]) -> dict[str, float]:
        """Each value summed over the processes."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max_over_ranks(self, values: dict[str, float]) -> dict[str, float]:
        """The largest of each value over the processes."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: dict[str, float], operation: Any) -> dict[str, float]:
        reduced = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, operation)
        return dict(zip(values, reduced.tolist(), strict=True))

    def mean_over_ranks(
        self, sums_and_counts: dict[str, tuple[float, float]]
    ) -> dict[str, float | None]:
        """Each sum divided by its count, both summed over the processes; None for no count."""
        sums = self.sum_over_ranks({name: pair[0] for name, pair in sums_and_counts.items()})
        counts = self.sum_over_ranks({name: pair[1] for name, pair in sums_and_counts.items()})
        return {name: sums[name] / counts[name] if counts[name] else None for name in sums}

    def wait_for_all(self) -> None:
        """Return when every process is here."""
        dist.barrier()

    def export(self, folder: Path | None) -> None:
        """Write the policy in transformers' format, tensor by tensor.

        Every process calls it; the one that is given a folder writes.
        """
        element = next(iter(self.state.parameters.values())).element_size()
        sizes = {name: shape.numel() * element for name, shape in self.state.shapes().items()}
        write_tensors(folder, "model", sizes, self.weights())
        if folder is not None:
            self.model.config.architectures = [type(self.model).__name__]
            self.model.config.save_pretrained(folder)
            if self.model.generation_config is not None:
                self.model.generation_config.save_pretrained(folder)

    def save(self, folder: Path | None) -> None:
        """Write all that training needs to go on, under any number of processes and ZeRO stage.

        Weights as `export` does, the optimizer's float32 tensors as safetensors by parameter name,
        its counts as JSON. Nothing random is kept: every draw of a run follows from seed, step and
        process. Every process calls it; the one that is given a folder writes.
        """
        self.export(folder)
        sizes = {
            f"{name}/{kind}": self.state.shapes()[name].numel() * 4
            for name in self.state.parameters
            for kind in self.state.tensor_kinds
        }
        write_tensors(folder, "optimizer", sizes, self.state.optimizer_tensors())
        if folder is not None:
            counts = {"updates": self.num_updates, "optimizer_steps": self.state.num_steps}
            (folder / "learner.json").write_text(json.dumps(counts))

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote; the reference stays the policy at the start."""
        self.state.load(
            open_tensors(folder, "model", self.device),
            open_tensors(folder, "optimizer", self.device),
        )
        counts = json.loads((folder / "learner.json").read_text())
        self.num_updates = counts["updates"]
        self.state.set_num_steps(counts["optimizer_steps"])


def make_reference(policy: PolicyWithLoss, settings: dict[str, Any]) -> nn.Module:
    """A frozen copy of the policy as it is now; under ZeRO-3 spread over the processes like it."""
    frozen = copy.deepcopy(policy).requires_grad_(False)
    if settings["zero_optimization"]["stage"] < 3:
        return frozen.to(deepspeed.get_accelerator().current_device_name())
    zero = {k: v for k, v in settings["zero_optimization"].items() if k != "offload_optimizer"}
    kept = {k: v for k, v in settings.items() if k not in ("optimizer", "gradient_clipping")}
    with exact_buffers(frozen):
        engine, *_ = deepspeed.initialize(model=frozen, config=kept | {"zero_optimization": zero})
    return engine


@contextmanager
def exact_buffers(root: nn.Module) -> Iterator[None]:
    """Keep the buffers as they are while DeepSpeed casts a model to bfloat16: rounded inverse
    frequencies would turn RoPE's angles by radians at a few thousand tokens."""
    kept = [
        (module, name, buffer.clone())
        for module in root.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    yield
    for module, name, buffer in kept:
        setattr(module, name, buffer.to(getattr(module, name).device))


def _sampler_gap(batch: Batch, at_rollout: Tensor) -> tuple[float, float]:
    gap = (at_rollout - batch.rollout_logps)[batch.completion_mask].abs()
    return float(gap.sum()), float(gap.numel())


def _merged(sums: list[dict[str, tuple[Tensor, Tensor]]]) -> dict[str, tuple[float, float]]:
    """The micro-batches' (numerator, count) added up; one copy to the host."""
    names = list(sums[0])
    pairs = torch.stack([torch.stack([torch.stack(one[name]) for name in names]) for one in sums])
    total = pairs.double().sum(0)
    maximum = names.index("ratio_max")
    total[maximum] = pairs[:, maximum].amax(0)
    return {name: (a, b) for name, (a, b) in zip(names, total.tolist(), strict=True)}


def start_processes() -> None:
    """Join the launcher's processes, or start as a single one without it."""
    if dist.is_initialized():
        return
    if not torch.cuda.is_available():
        # DeepSpeed would compile a shared-memory collective at first use, a minute or two of C++
        # for a few hundred kilobytes per step; an empty list of buildable ops leaves it to gloo.
        deepspeed.ops.__compatible_ops__ = {}
    backend = deepspeed.get_accelerator().communication_backend_name()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        # A store in memory needs no port, so that runs side by side cannot collide.
        os.environ.setdefault("LOCAL_RANK", "0")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(backend)
