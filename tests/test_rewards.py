"""Rewards: 1 for an exact solution, 0 for everything else, and only the response counts."""

import random

import pytest
import reasoning_gym
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fgrpo_train.base_policy import expressions_by_value, make_tokenizer
from fgrpo_train.prompts import Prompt
from fgrpo_train.rewards import CountdownVerifier, completion_texts, score
from fgrpo_train.rollout import Rollouts

CHARACTERS = "0123456789+-() "
DATASET = reasoning_gym.create_dataset("countdown", size=1, seed=0)


def countdown(numbers=(3, 7, 10), target=20, text="3,7,10=20:"):
    return Prompt("p", text, (1,), {"numbers": numbers, "target": target})


@pytest.mark.parametrize(
    "answer",
    ["3+7+10", "10+7+3", "10+(7+3)", "(10+(7+3))", " 3 + 7 + 10\n", "10-(-7)+3", "--10+7++3"],
)
def test_solutions_score_one(answer):
    assert CountdownVerifier()(countdown(), answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        " ",
        "3+7-10",  # wrong value
        "20",  # the target itself
        "10+10",  # a number twice
        "3+7+10+0",  # a number too many
        "3+7+10+10-10",  # the right numbers, one of them more than once
        "3+7+10 # easy",
        "13+7",  # right value, other numbers
        "3+7+10=20",
        "3+7+10:",
        "3+7+10\n3",
        "3+7+10 and more",
        "3+7+1 0",
        "03+7+10",
        "3!+7+10-3",
        "3*7-1",
        "3*10-10",
        "3.0+7+10",
        "3_0+7-10-7",
        "3(7)10",
        "(3)(7)(10)",
        "3+7+10)",
        "()",
        "+",
        "３+7+10",  # a full-width digit
        "__import__('os')",
    ],
)
def test_everything_else_scores_zero(answer):
    assert CountdownVerifier()(countdown(), answer) == 0.0


@pytest.mark.parametrize(
    "answer", ["(" * 5000 + "3" + ")" * 5000, "-" * 100_000 + "3", "9" * 10_000]
)
def test_hostile_depth_and_size_score_zero(answer):
    assert CountdownVerifier()(countdown(), answer) == 0.0


def test_a_number_given_twice_must_be_used_twice():
    prompt = countdown((5, 5, 2), 8, "5,5,2=8:")
    assert CountdownVerifier()(prompt, "5+5-2") == 1.0
    assert CountdownVerifier()(prompt, "5+2") == 0.0
    assert CountdownVerifier()(prompt, "5+2+2-1") == 0.0


def test_only_the_response_is_looked_at():
    prompt = countdown(text="Reply with one expression, for example 3+7+10 = 20: ")
    assert CountdownVerifier()(prompt, "") == 0.0
    assert CountdownVerifier()(prompt, "as above") == 0.0
    assert CountdownVerifier()(prompt, prompt.text) == 0.0


def test_the_cache_keeps_problems_apart():
    verifier = CountdownVerifier()
    assert verifier(countdown(target=20), "3+7+10") == 1.0
    assert verifier(countdown(target=21), "3+7+10") == 0.0
    assert verifier(countdown(numbers=(4, 6, 10)), "3+7+10") == 0.0


def reference_reward(answer, numbers, target):
    """Right iff reasoning-gym's score is exactly 1, for answers made of the allowed characters."""
    entry = {"metadata": {"numbers": list(numbers), "target": target}}
    return float(DATASET.score_answer(answer, entry) == 1.0)


def test_agrees_with_reasoning_gym_on_right_and_wrong_expressions():
    rng = random.Random(0)
    verdicts = []
    for numbers, target in [((3, 7, 10), 14), ((2, 2, 9), 9), ((1, 6, 15), 8), ((4, 4, 4), 4)]:
        by_value = expressions_by_value(numbers)
        wrong = [text for value in by_value if value != target for text in by_value[value]]
        answers = (
            by_value[target] + rng.sample(wrong, min(12, len(wrong))) + [f"-{t}" for t in wrong[:8]]
        )
        for answer in answers:
            verdict = CountdownVerifier()(countdown(numbers, target), answer)
            assert verdict == reference_reward(answer, numbers, target), answer
            verdicts.append(verdict)
    assert {0.0, 1.0} == set(verdicts)


@st.composite
def near_solutions(draw):
    """A solution of 3,7,10=14 with up to two characters changed, removed or added."""
    text = draw(st.sampled_from(["7+10-3", "10-(3-7)", "7-(3-10)", "(7-3)+10", "-3+7+10"]))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + draw(st.sampled_from(["", *CHARACTERS]))
            + text[at + draw(st.integers(0, 1)) :]
        )
    return text


@settings(max_examples=150)
@given(near_solutions())
@example("07+10-3")
@example("7+10-+3")
@example("7+10 -3")
@example("7(10)-3")
def test_agrees_with_reasoning_gym_on_damaged_solutions(answer):
    verdict = CountdownVerifier()(countdown((3, 7, 10), 14), answer)
    assert verdict == reference_reward(answer, (3, 7, 10), 14)


def rollouts_of(texts, tokenizer, width=12):
    """Completions as the engine would return them; a text that ends in '|' has no EOS token."""
    ids, lengths, truncated = [], [], []
    for text in texts:
        row = tokenizer.encode(
            text.rstrip("|") + ("" if text.endswith("|") else tokenizer.eos_token)
        )
        ids.append(row + [tokenizer.pad_token_id] * (width - len(row)))
        lengths.append(len(row))
        truncated.append(text.endswith("|"))
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    return Rollouts(
        completion_ids=torch.tensor(ids),
        completion_mask=mask,
        logps=torch.zeros(mask.shape),
        truncated=torch.tensor(truncated),
        prompt_index=torch.arange(len(texts)) // 2,
    )


def test_score_gives_each_completion_the_verdict_on_its_own_prompt():
    prompts = [countdown(target=20), countdown(target=14, text="3,7,10=14:")]
    rollouts = rollouts_of(["3+7+10", "7+10-3", "3+7+10", "7+10-3"], make_tokenizer())
    rewards = score(CountdownVerifier(), prompts, rollouts, make_tokenizer())
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_the_text_ends_before_eos_and_shows_other_special_tokens():
    rollouts = rollouts_of(["3+7+10", "3+7+1|", "3+<pad>7+10", ""], make_tokenizer())
    assert completion_texts(rollouts, make_tokenizer()) == ["3+7+10", "3+7+1", "3+<pad>7+10", ""]
    prompts = [countdown(), countdown()]
    rewards = score(CountdownVerifier(), prompts, rollouts, make_tokenizer())
    assert rewards.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_no_verdict_becomes_nan():
    rollouts = rollouts_of(["3", "7"], make_tokenizer())
    rewards = score(
        lambda prompt, text: None if text == "3" else 0.25,
        [countdown()],
        rollouts,
        make_tokenizer(),
    )
    assert rewards[0].isnan() and rewards[1] == 0.25
