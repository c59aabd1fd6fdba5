"""The learner: its log-probs, its state on disk, and its sums over processes."""

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors import safe_open
from train_parts import random_policy, sampled_batch

from fgrpo_train.config import build
from fgrpo_train.hf_engine import HFEngine
from fgrpo_train.learner import Learner
from fgrpo_train.policy_with_loss import Denominators

COUNTS = Denominators(valid_tokens=150.0, sequences=24.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_samplers_log_probs_are_the_learners(temperature):
    """Off by one token, one position or one temperature, the ratio would leave 1."""
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=[1] * 6, temperature=temperature)
    learner = Learner(model, build({"sampling.temperature": temperature}))
    ratio = torch.exp(learner.logps(batch) - batch.rollout_logps)[batch.completion_mask]
    assert batch.rollout_logps[batch.completion_mask].std() > 0.3, "the log-probs do differ"
    # fp32 over a few dozen additions, and logits of some units: 1e-5.
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
    update = learner.update(batch, COUNTS)
    assert update.sampler_gap[0] / update.sampler_gap[1] < 1e-5
    assert update.metric_sums["ratio_max"] == (1.0, 1.0)


def test_the_sampler_follows_the_learner_only_when_told():
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=[1] * 6)
    learner = Learner(model, build({"optimisation.learning_rate": 0.1}))
    engine = HFEngine(learner.model)
    learner.update(batch, COUNTS)
    name, before = next(iter(engine.model.named_parameters()))
    after = learner.model.get_parameter(name)
    assert not torch.equal(before, after)
    engine.load_weights(learner.weights())
    assert torch.equal(before, after)


def weights(learner: Learner) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(learner.policy.parameters()).detach().clone()


def test_a_learner_goes_on_from_disk_bit_for_bit(tmp_path):
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=[1] * 6)
    learner = Learner(model, build({}))
    for _ in range(2):
        learner.update(batch, COUNTS)
    learner.save(tmp_path)
    third = learner.update(batch, COUNTS)

    other = Learner(random_policy(seed=1)[0], build({}))
    other.load(tmp_path)
    third_again = other.update(batch, COUNTS)
    assert torch.equal(weights(other), weights(learner))
    assert third_again.grad_norm == third.grad_norm
    assert third_again.learning_rate == third.learning_rate == pytest.approx(5e-4 * 3 / 5)


def test_the_saved_files_are_safetensors_and_plain_tensors(tmp_path):
    learner = Learner(random_policy()[0], build({}))
    learner.save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tied = {"lm_head.weight", "model.embed_tokens.weight"}
        assert len(tied & set(file.keys())) == 1, "a tied weight is written once"
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert set(state) == {"optimizer", "lr_scheduler"}


def test_two_processes_with_half_of_the_sequences_each_do_the_same_update(tmp_path):
    """The denominators are global and the engine averages: the product with the count undoes it.

    The gradient norm tells, for AdamW's first update hardly depends on the gradient's scale. fp32
    sums in another order: 1e-5 of the gradient, and of the way that the weights went.
    """
    alone = update_from_halves(rank=0, world_size=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path / f"{rank}.pt")],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    before = torch.nn.utils.parameters_to_vector(random_policy()[0].parameters()).detach()
    for rank in (0, 1):
        together = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
        missed = together["weights"] - alone["weights"]
        assert missed.norm() < 1e-5 * (alone["weights"] - before).norm()


def update_from_halves(*, rank: int, world_size: int) -> dict[str, Any]:
    model, tokenizer = random_policy()
    batch = sampled_batch(model, tokenizer, num_correct=[1, 2, 3, 0, 1, 3])
    learner = Learner(model, build({"optimisation.warmup_updates": 0}))
    size = len(batch) // world_size
    part = batch.rows(slice(rank * size, (rank + 1) * size))
    tokens = learner.sum_over_ranks({"tokens": float(part.completion_mask.sum())})["tokens"]
    assert tokens == float(batch.completion_mask.sum())
    update = learner.update(part, Denominators(tokens, float(len(batch))))
    return {"weights": weights(learner), "grad_norm": update.grad_norm}


if __name__ == "__main__":
    torch.save(update_from_halves(rank=int(os.environ["RANK"]), world_size=2), sys.argv[1])
