"""The learner: the policy under training, its loss head, and the DeepSpeed engine that steps it.

The trunk gives hidden states; the loss module owns the head and never forms the logits of the whole
batch. DeepSpeed clips, averages over processes and runs AdamW.

Dimensions: B sequences, T completion tokens, D hidden size.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from fgrpo_kernels import FocalPolicyLoss, PolicyLossConfig, PolicyLossOutput, token_logps
from fgrpo_train.batching import Batch
from fgrpo_train.config import deepspeed_config
from fgrpo_train.rollout_metrics import RatioSums, ratio_sums
from fgrpo_train.settings import TrainConfig

if not torch.cuda.is_available():
    # Read by DeepSpeed at import; without it a GPU driver without a usable GPU is picked.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts of a mini-batch over all processes, before any sequence is left out."""

    valid_tokens: float
    sequences: float


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer update did."""

    output: PolicyLossOutput
    """Of this process's sequences."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    num_sequences: int
    """Sequences that the trunk saw."""
    sampler_gap: tuple[float, float]
    """Sum and count of |log-prob at rollout time by this module - by the sampler| per token: what
    differs beyond rounding is a fault of one of the two."""
    sampler_ratio: RatioSums
    """Of the same two, before any correction."""
    loss_seconds: float
    """Time in the loss head, forward and its part of the gradient."""


class PolicyWithLoss(nn.Module):
    """Trunk and loss head as the one module that DeepSpeed wraps."""

    def __init__(self, model: PreTrainedModel, config: PolicyLossConfig) -> None:
        super().__init__()
        self.model = model
        self.loss = FocalPolicyLoss(model.get_output_embeddings(), config)
        self.loss_seconds = 0.0

    def hidden(self, batch: Batch) -> Tensor:
        """(B, T, D): row t predicts completion token t."""
        positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
        outputs = self.model.base_model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=positions,
            use_cache=False,
        )
        num_tokens = batch.completion_ids.shape[1]
        return outputs.last_hidden_state[:, -num_tokens - 1 : -1]

    def forward(
        self, batch: Batch, old_logps: Tensor | None, denominators: Denominators
    ) -> PolicyLossOutput:
        hidden = self.hidden(batch)
        deepspeed.get_accelerator().synchronize()
        start = time.perf_counter()
        output = self.loss(
            hidden,
            batch.completion_ids,
            batch.advantages,
            batch.success_rate,
            completion_mask=batch.completion_mask,
            old_logps=old_logps,
            rollout_logps=batch.rollout_logps,
            global_valid_tokens=denominators.valid_tokens,
            global_sequences=denominators.sequences,
        )
        deepspeed.get_accelerator().synchronize()
        self.loss_seconds = time.perf_counter() - start
        return output


class Learner:
    """Holds the policy; every process has one."""

    def __init__(self, model: PreTrainedModel, config: TrainConfig) -> None:
        start_processes()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.policy = PolicyWithLoss(model.float(), config.loss)
        warmup = max(config.optimisation.warmup_updates, 1)
        self.engine, _, _, self.lr_scheduler = deepspeed.initialize(
            model=self.policy,
            config=deepspeed_config(config),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda updates: min(1.0, (updates + 1) / warmup)
            ),
        )
        self.device = self.engine.device
        self.temperature = config.loss.temperature

    @property
    def model(self) -> PreTrainedModel:
        """The policy as a transformers model."""
        return self.policy.model

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's parameters by their names in the transformers model, tied ones once."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    @torch.no_grad()
    def logps(self, batch: Batch) -> Tensor:
        """(B, T) float32 log-probs of the completions under the present policy."""
        head = self.model.get_output_embeddings()
        logps, _ = token_logps(
            self.policy.hidden(batch),
            head.weight,
            batch.completion_ids,
            completion_mask=batch.completion_mask,
            lm_head_bias=head.bias,
            temperature=self.temperature,
        )
        return logps

    def update(self, batch: Batch, old_logps: Tensor | None, denominators: Denominators) -> Update:
        """One optimizer update on this process's share of a mini-batch.

        Each process's loss is its part of the global sum; the engine averages over processes, so
        the loss is multiplied by their number.
        """
        learning_rate = self.lr_scheduler.get_last_lr()[0]
        output = self.engine(batch, old_logps, denominators)
        self.engine.backward(output.loss * self.world_size, scale_wrt_gas=False)
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        grad_norm = float(nn.utils.get_total_norm(gradients))
        self.engine.step()
        at_rollout = output.logps if old_logps is None else old_logps
        gap = (at_rollout - batch.rollout_logps)[batch.completion_mask].abs()
        return Update(
            output=output,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_sequences=len(batch),
            sampler_gap=(float(gap.sum()), float(gap.numel())),
            sampler_ratio=ratio_sums(at_rollout, batch.rollout_logps, batch.completion_mask),
            loss_seconds=self.policy.loss_seconds,
        )

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

    def save(self, folder: Path) -> None:
        """Weights as safetensors; optimizer and schedule as plain tensors and numbers."""
        safetensors.torch.save_model(self.model, str(folder / "model.safetensors"))
        state = {
            "optimizer": self.engine.optimizer.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict(),
        }
        torch.save(state, folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        safetensors.torch.load_model(self.model, str(folder / "model.safetensors"))
        state: dict[str, Any] = torch.load(
            folder / "optimizer.pt", map_location=self.device, weights_only=True
        )
        self.engine.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])


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
