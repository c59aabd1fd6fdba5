"""What a step's record says of its groups, and which completions are kept for people."""

import math

import pytest
import torch
from train_parts import random_policy, sampling_of

from fgrpo_kernels import group_advantages
from fgrpo_train.config import build
from fgrpo_train.group_metrics import abs_advantage_sum, success_histogram
from fgrpo_train.hf_engine import HFEngine
from fgrpo_train.prompts import CountdownTask
from fgrpo_train.rewards import completion_texts
from fgrpo_train.run import build_trainer
from fgrpo_train.sample_completions import SAMPLES_PER_STEP, sample_completions, shorten

NAN = math.nan


def test_the_histogram_counts_groups_by_number_correct():
    rewards = torch.tensor(
        [0.0, 0, 0, 0] + [1, 0, 0, 0] + [1, 1, 1, 1] + [0, 1, 0, 0]
        + [NAN, NAN, NAN, NAN]  # without any verdict: not counted
        + [1, 1, NAN, 0]  # two of three: 8/3 of four, rounded to 3
    )  # fmt: skip
    groups = group_advantages(rewards, group_size=4)
    histogram = success_histogram(rewards, groups, 4)
    assert histogram == {"0": 1.0, "1": 2.0, "2": 0.0, "3": 1.0, "4": 1.0}


def test_the_sum_of_absolute_advantages_has_the_focal_weight():
    """Dr. GRPO: advantages 0.75 and three times -0.25, success rate 1/4; the other group none."""
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.float64)
    groups = group_advantages(rewards, group_size=4, estimator="dr_grpo")
    assert abs_advantage_sum(groups, 0.0) == pytest.approx(1.5, abs=1e-12)
    assert abs_advantage_sum(groups, 2.0) == pytest.approx(1.5 * 0.75**2, abs=1e-12)


def test_the_record_of_a_step_has_both_and_its_collapse_rate():
    config = {"data.prompts_per_step": 8, "sampling.group_size": 4, "loss.focal_gamma": 1.0}
    trainer = build_trainer(build(config))
    record = trainer.step(0)
    histogram = record["success_histogram"]
    assert len(histogram) == 5 and sum(histogram) == 8
    correct = sum(number * count for number, count in enumerate(histogram))
    assert record["success_rate"] == pytest.approx(correct / 32)
    assert record["acr"] == (histogram[0] + histogram[4]) / 8
    # A group with c of 4 correct, unbiased std s: |A| = c (1 - c/4) / s + (4 - c) (c/4) / s.
    expected = 0.0
    for c in (1, 2, 3):
        p = c / 4
        std = math.sqrt(4 * p * (1 - p) / 3) + 1e-4
        expected += histogram[c] * (1 - p) * (c * (1 - p) + (4 - c) * p) / std
    assert record["abs_advantage_sum"] == pytest.approx(expected, rel=1e-5)  # fp32 advantages
    assert len(record["completions"]) == SAMPLES_PER_STEP


def test_the_best_the_worst_and_others_are_kept_with_what_is_known_of_them():
    model, tokenizer = random_policy()
    prompts = CountdownTask().train_prompts(tokenizer)[:2]
    rollouts = HFEngine(model).generate(
        prompts, group_size=4, sampling=sampling_of(tokenizer), seed=0
    )
    rewards = torch.tensor([NAN, 0.5, 0.25, 0.5, 1.0, 0.0, 0.5, 0.5])
    groups = group_advantages(rewards, group_size=4)
    samples = sample_completions(prompts, rollouts, rewards, groups, tokenizer, seed="0/1")
    assert len(samples) == SAMPLES_PER_STEP
    texts = completion_texts(rollouts, tokenizer)
    for sample, row in zip(samples[:2], (4, 5), strict=True):
        assert sample == {
            "prompt_id": prompts[1].id,
            "prompt": prompts[1].text,
            "completion": texts[row],
            "reward": float(rewards[row]),
            "advantage": float(groups.advantages[row]),
            "success_rate": 0.5,
            "length": int(rollouts.completion_mask[row].sum()),
            "truncated": bool(rollouts.truncated[row]),
        }
    again = sample_completions(prompts, rollouts, rewards, groups, tokenizer, seed="0/1")
    assert repr(again) == repr(samples), "repr, since NaN is not equal to itself"
    others = [
        [s["completion"] for s in sample_completions(
            prompts, rollouts, rewards, groups, tokenizer, seed=f"0/{step}")[2:]]
        for step in range(8)
    ]  # fmt: skip
    assert any(other != others[0] for other in others), "drawn anew in each step"
    no_verdict = torch.full((8,), NAN)
    groups = group_advantages(no_verdict, group_size=4)
    assert len(sample_completions(prompts, rollouts, no_verdict, groups, tokenizer, seed="")) == 4


def test_a_long_text_loses_its_middle():
    assert shorten("abc", 3) == "abc"
    assert shorten("abcdefghij", 4) == "ab [... 6 characters ...] ij"
