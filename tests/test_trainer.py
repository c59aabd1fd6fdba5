"""The training step: what it computes, by hand, and what it records."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from fgrpo_train.batching import Batch, make_batch
from fgrpo_train.config import build
from fgrpo_train.rewards import score
from fgrpo_train.run import build_trainer
from fgrpo_train.settings import ConfigError, TrainConfig
from fgrpo_train.trainer import Trainer

SMALL = {"data.prompts_per_step": 8, "sampling.group_size": 4, "optimisation.warmup_updates": 5}


def logps_by_hand(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """(B, T), one sequence at a time without any padding, from the full logits."""
    rows = []
    for ids, attention, completion_mask in zip(
        batch.input_ids, batch.attention_mask, batch.completion_mask, strict=True
    ):
        real, num_tokens = ids[attention.bool()], int(completion_mask.sum())
        logits = model(input_ids=real[None]).logits[0, -num_tokens - 1 : -1]
        logps = logits.log_softmax(-1).gather(1, real[-num_tokens:, None])[:, 0]
        rows.append(F.pad(logps, (0, len(completion_mask) - num_tokens)))
    return torch.stack(rows)


def step_by_hand(model: PreTrainedModel, batch: Batch, config: TrainConfig) -> None:
    """F-GRPO as the paper writes it, on every sequence: clip, focal weight, token mean, AdamW."""
    optimisation, loss_config = config.optimisation, config.loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    with torch.no_grad():
        old_logps = logps_by_hand(model, batch)
    size = len(batch) // optimisation.mini_batches
    for update, start in enumerate(range(0, len(batch), size)):
        rows = slice(start, start + size)
        part = batch.rows(rows)
        ratio = torch.exp(logps_by_hand(model, part) - old_logps[rows])
        weight = (1 - part.success_rate) ** loss_config.focal_gamma
        advantages = (weight * part.advantages)[:, None]
        clipped = ratio.clamp(1 - loss_config.clip_eps_low, 1 + loss_config.clip_eps_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        loss = loss[part.completion_mask].sum() / part.completion_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimisation.max_grad_norm)
        warm = min(1.0, (update + 1) / optimisation.warmup_updates)
        optimizer.param_groups[0]["lr"] = optimisation.learning_rate * warm
        optimizer.step()


def batch_of_step(trainer: Trainer, step: int) -> Batch:
    prompts = trainer.draw_prompts(step)
    rollouts = trainer.sample(prompts, step)
    rewards = score(trainer.verifier, prompts, rollouts, trainer.tokenizer)
    group_size = trainer.config.sampling.group_size
    mean = rewards.view(-1, group_size).mean(1).repeat_interleave(group_size)
    std = rewards.view(-1, group_size).std(1).repeat_interleave(group_size)

    class Groups:  # by hand as well
        advantages = (rewards - mean) / (std + 1e-4)
        success_rate = mean

    return make_batch(prompts, rollouts, Groups, pad_token_id=trainer.tokenizer.pad_token_id)


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.05])
def test_one_step_by_hand_gives_the_loops_weights(max_grad_norm):
    """Two updates, the second off-policy; at norm 0.05 the clipping acts.

    AdamW divides by the root of the second moment, so a gradient element near rounding level (1e-8)
    may move by a good part of the learning rate: the bound is on the distance of all weights,
    relative to the distance that they went.
    """
    config = build(SMALL | {"optimisation.max_grad_norm": max_grad_norm})
    trainer = build_trainer(config)
    by_hand = copy.deepcopy(trainer.engine.model).requires_grad_(True)
    before = torch.nn.utils.parameters_to_vector(by_hand.parameters()).clone()
    batch = batch_of_step(trainer, 0)
    assert 0 < batch.success_rate.mean() < 1
    step_by_hand(by_hand, batch, config)
    record = trainer.step(0)
    expected = torch.nn.utils.parameters_to_vector(by_hand.parameters())
    actual = torch.nn.utils.parameters_to_vector(trainer.learner.model.parameters())
    moved, missed = (expected - before).norm(), (actual - expected).norm()
    assert missed < 1e-3 * moved
    assert (record["grad_norm"] > max_grad_norm) == (max_grad_norm == 0.05)


def test_the_record_of_a_step_is_what_its_parts_say():
    trainer = build_trainer(build(SMALL))
    batch = batch_of_step(trainer, 0)
    record = trainer.step(0)
    assert record["step"] == 1
    assert record["reward"] == record["success_rate"]
    assert record["reward"] == pytest.approx(float(batch.success_rate.mean()))
    groups = batch.success_rate.view(-1, 4)[:, 0]
    degenerate = float(((groups == 0) | (groups == 1)).float().mean())
    assert record["acr"] == degenerate
    assert record["trained_share"] == 1 - degenerate
    lengths = batch.completion_mask.sum(1).float()
    assert record["completion_length"] == pytest.approx(float(lengths.mean()))
    # The mini-batches' own learning rates are 1/5 and 2/5 of the full one.
    assert record["learning_rate"] == pytest.approx(5e-4 * 2 / 5)
    assert record["sampler_gap"] < 1e-5
    for name in ("sampler_ratio_mean", "sampler_ratio_max", "sampler_effective_share"):
        assert record[name] == pytest.approx(1.0, abs=1e-4)
    # The first update is on-policy and changes little before the second one.
    assert record["ratio_mean"] == pytest.approx(1.0, abs=0.05)
    seconds = record["seconds"]
    phases = ("rollout", "rewards", "advantages", "sleep", "update", "wake", "sync")
    assert sum(seconds[phase] for phase in phases) == pytest.approx(seconds["total"], rel=0.05)
    assert 0 < seconds["loss"] < seconds["update"]
    assert record["tokens_per_second"] == pytest.approx(float(lengths.sum()) / seconds["total"])


def test_the_sampler_has_the_learners_weights_in_every_step():
    """fp32: 1e-5; a sampler one step behind would be off by about the learning rate."""
    trainer = build_trainer(build(SMALL | {"optimisation.learning_rate": 5e-3}))
    gaps = [trainer.step(step)["sampler_gap"] for step in range(3)]
    assert max(gaps) < 1e-5


def test_a_step_without_any_verdict_changes_nothing_it_should_not_and_says_so():
    trainer = dataclasses.replace(
        build_trainer(build(SMALL)), verifier=lambda prompt, completion_text: None
    )
    before = torch.nn.utils.parameters_to_vector(trainer.learner.model.parameters()).clone()
    record = trainer.step(0)
    after = torch.nn.utils.parameters_to_vector(trainer.learner.model.parameters())
    assert torch.equal(before, after)
    assert record["reward"] is None
    assert record["acr"] == 1.0
    assert record["grad_norm"] == 0.0


def test_prompts_and_draws_depend_on_seed_and_step_alone():
    trainer = build_trainer(build(SMALL))
    first = trainer.sample(trainer.draw_prompts(3), 3)
    trainer.sample(trainer.draw_prompts(4), 4)
    again = trainer.sample(trainer.draw_prompts(3), 3)
    assert torch.equal(first.completion_ids, again.completion_ids)
    other = build_trainer(build(SMALL | {"run.seed": 1}))
    ids = [[p.id for p in t.draw_prompts(3)] for t in (trainer, other)]
    assert ids[0] != ids[1]


def test_prompts_must_divide_over_mini_batches_and_processes():
    trainer = build_trainer(build(SMALL))
    trainer.learner.world_size = 3
    with pytest.raises(ConfigError, match=r"\(8\) must be a multiple.*processes \(3\)"):
        dataclasses.replace(trainer)
