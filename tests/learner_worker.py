"""Updates of the learner under every way of spreading it; run on each rank by test_sharding.py,
which also calls it in its own process.

Every case gives one update from the same sequences. After it AdamW's first moment is 0.1 times the
averaged gradient, which tells whether all of it arrived.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from train_parts import random_policy, sampled_batch
from worker_end import end_of_work

from fgrpo_train.batching import Batch
from fgrpo_train.config import build
from fgrpo_train.learner import Learner
from fgrpo_train.policy_with_loss import Denominators

SEQUENCES = 24
FIRST_SHARE = 7  # of two ranks: they need different numbers of micro-batches
SMALL = {"optimisation.tokens_per_micro_batch": 60}
KL = {"loss.kl_coef": 0.5, "loss.kl_estimator": "k1"}
CLIPPED = {"optimisation.max_grad_norm": 0.01}


def zero(stage: int, **values) -> dict:
    return {"deepspeed.zero_stage": stage} | {f"deepspeed.{k}": v for k, v in values.items()}


BF16 = {"policy.dtype": "bfloat16"}
RECOMPUTED = {"policy.activation_checkpointing": True}
PACKED = {"policy.packing": True}
CASES = {
    "zero 0": zero(0) | SMALL | KL,
    "zero 1": zero(1) | SMALL | CLIPPED,
    "zero 2, offloaded": zero(2, offload="optimizer") | SMALL | CLIPPED,
    "zero 3, recomputed": zero(3) | SMALL | KL | RECOMPUTED,
    "zero 3, packed, offloaded": zero(3, offload="all") | SMALL | CLIPPED | PACKED,
    "bf16, zero 1": zero(1) | SMALL | BF16 | RECOMPUTED,
    "bf16, zero 2": zero(2) | SMALL | BF16,
    "bf16, zero 3, offloaded": zero(3, offload="optimizer") | SMALL | BF16,
}
RESUMED = {"fp32": zero(3) | SMALL | KL, "bf16": zero(3) | BF16}
BASE = {"optimisation.max_grad_norm": 0, "optimisation.warmup_updates": 0}


def whole_batch() -> Batch:
    """The sequences of all ranks, their log-probs at rollout a little off the policy's."""
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=[1, 2, 3, 0, 1, 3])
    noise = torch.linspace(-0.1, 0.1, batch.rollout_logps.numel()).view_as(batch.rollout_logps)
    return replace(batch, old_logps=batch.rollout_logps + noise)


def counts_of(batch: Batch) -> Denominators:
    return Denominators(float(batch.completion_mask.sum()), float(len(batch)))


def share(batch: Batch, learner: Learner) -> Batch:
    """This rank's sequences."""
    bounds = [0, SEQUENCES] if learner.world_size == 1 else [0, FIRST_SHARE, SEQUENCES]
    return batch.rows(slice(bounds[learner.rank], bounds[learner.rank + 1]))


def update(learner: Learner, batch: Batch) -> float:
    part = share(batch, learner)
    if learner.reference is not None:
        part = replace(part, ref_logps=learner.reference_logps(part))
    return learner.update(part, counts_of(batch)).grad_norm


def state_of(learner: Learner) -> dict[str, torch.Tensor]:
    """Weights under their names, AdamW's tensors under name/kind."""
    return {
        name: tensor.detach().clone()
        for tensors in (learner.weights(), learner.state.optimizer_tensors())
        for name, tensor in tensors
    }


def run_case(values: dict) -> dict[str, torch.Tensor]:
    """The state after one update, its norm, and log-probs before and after it."""
    batch = whole_batch()
    learner = Learner(random_policy()[0], build(BASE | values))
    part = share(batch, learner)
    before = learner.logps(part)
    norm = update(learner, batch)
    result = {"/norm": torch.tensor(norm), "/logps": before}
    if learner.reference is not None:
        moved = (learner.logps(part) - before).abs().max()
        kept = (learner.reference_logps(part) - before).abs().max()
        result |= {"/policy moved": moved, "/reference moved": kept}
    return state_of(learner) | result


def save_and_go_on(values: dict, folder: Path) -> dict[str, torch.Tensor]:
    """Two updates, a save, and the state after a third."""
    batch = whole_batch()
    learner = Learner(random_policy()[0], build(BASE | values))
    for _ in range(2):
        update(learner, batch)
    learner.save(folder if learner.rank == 0 else None)
    learner.wait_for_all()
    update(learner, batch)
    return state_of(learner)


def load_and_go_on(values: dict, folder: Path) -> dict[str, torch.Tensor]:
    """From what `save_and_go_on` saved: the state after a third update."""
    learner = Learner(random_policy()[0], build(BASE | values))
    learner.load(folder)
    update(learner, whole_batch())
    return state_of(learner)


def main(folder: Path) -> None:
    """Each case's result of each rank; what one process saved is read, and the other way."""
    rank = os.environ["RANK"]
    results = {name: run_case(values) for name, values in CASES.items()}
    for kind, values in RESUMED.items():
        results[f"{kind}: saved by two"] = save_and_go_on(values, made(folder / f"{kind}, two"))
        results[f"{kind}: saved by one"] = load_and_go_on(values, folder / f"{kind}, one")
    for name, result in results.items():
        save_file(result, folder / f"{name} ({rank}).safetensors")


def made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_of_work()
