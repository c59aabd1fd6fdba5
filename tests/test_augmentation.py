"""iGRPO, TA-GRPO and HiLL: texts as they should read, numbers by hand."""

import math
import random
from itertools import product

import pytest
import torch
from transformers import AutoTokenizer

from fgrpo_kernels import group_advantages
from fgrpo_train.augmentation import (
    COUNTDOWN_REFINE_TEMPLATE,
    RESTATED_TEMPLATES,
    best_draft,
    best_hint,
    hint_gain,
    hint_reliance,
    hint_request,
    hinted_prompt,
    hinter_reward,
    leaks_answer,
    permuted_countdown,
    pooled_group_ids,
    prob_term,
    restated,
    second_stage_prompt,
)
from fgrpo_train.base_policy import TINY_COUNTDOWN
from fgrpo_train.prompts import Prompt
from fgrpo_train.rewards import CountdownVerifier

NAN = math.nan


def test_the_best_draft_is_the_first_of_the_highest_reward():
    drafts = ["a", "b", "c", "d"]
    assert best_draft(drafts, [0, 1, 1, 0]) == "b"
    assert best_draft(drafts, [None, -1, NAN, -0.5]) == "d"
    assert best_draft(drafts, [0, 0, 0, 0]) == "a", "some draft is used when none is right"
    assert best_draft(["a", "b"], [None, NAN]) == "a"


def test_the_best_of_n_drafts_is_right_with_one_minus_all_wrong():
    """Exactly, over the 2^4 outcomes at V = 0.3: 1 - 0.7^4 = 0.7599."""
    outcomes = list(product((0, 1), repeat=4))
    best = [best_draft([str(reward) for reward in outcome], outcome) for outcome in outcomes]
    chances = [0.3 ** sum(outcome) * 0.7 ** (4 - sum(outcome)) for outcome in outcomes]
    right = sum(c for c, draft in zip(chances, best, strict=True) if draft == "1")
    assert right == pytest.approx(0.7599)


def test_the_second_stage_prompt_holds_prompt_and_draft_as_they_are():
    text = second_stage_prompt("Simplify {x}.", "I get {y}: \\frac{1}{2}")
    assert text.startswith("Simplify {x}.\n") and "\nI get {y}: \\frac{1}{2}\n" in text
    tiny = second_stage_prompt("3,7,10=20:", "7+3+10", template=COUNTDOWN_REFINE_TEMPLATE)
    assert tiny == "7+3+10:3,7,10=20:"
    tokenizer = AutoTokenizer.from_pretrained(TINY_COUNTDOWN)
    assert tokenizer.decode(tokenizer(tiny, add_special_tokens=False)["input_ids"]) == tiny


def test_permuted_countdown_keeps_the_answers():
    variants = permuted_countdown("3,7,10=20:", count=10, rng=random.Random(0))
    assert sorted(variants) == [
        "10,3,7=20:",
        "10,7,3=20:",
        "3,10,7=20:",
        "7,10,3=20:",
        "7,3,10=20:",
    ]
    verifier = CountdownVerifier()
    for text in variants:
        numbers = tuple(int(n) for n in text.split("=")[0].split(","))
        prompt = Prompt(text, text, (), {"numbers": numbers, "target": 20})
        assert verifier(prompt, "7+3+10") == 1 and verifier(prompt, "7+3-10") == 0
    assert permuted_countdown("5,5,2=8:", count=1, rng=random.Random(0))[0] in (
        "2,5,5=8:",
        "5,2,5=8:",
    )
    assert permuted_countdown("4,4,4=4:", count=3, rng=random.Random(0)) == []


def test_restated_problems_are_different_and_hold_the_problem():
    problem = "What is {1, 2} \\cup {3}?"
    variants = restated(problem, count=len(RESTATED_TEMPLATES), rng=random.Random(0))
    assert len({*variants, problem}) == len(RESTATED_TEMPLATES) + 1
    assert all(problem in variant for variant in variants)


def test_variants_of_a_problem_share_mean_and_std():
    """Two variants with 2 completions each, rewards 0 0 and 1 1: alone both groups give nothing."""
    ids = pooled_group_ids(["x", "x", "y"], group_size=2)
    assert ids == ["x", "x", "x", "x", "y", "y"]
    out = group_advantages([0, 0, 1, 1, 1, 1], group_ids=ids)
    expected = [-0.8658754, -0.8658754, 0.8658754, 0.8658754, 0, 0]
    assert out.advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert out.success_rate.tolist() == [0.5] * 4 + [1] * 2


def test_pooled_groups_are_degenerate_less_often():
    """All 16 outcomes of two variants of 2: 0.2^2 0.6^2 + 0.8^2 0.4^2 = 0.1168.

    Alone they are degenerate with 0.68 and 0.52.
    """
    ids = pooled_group_ids(["x", "x"], group_size=2)
    total = 0.0
    for outcome in product((0.0, 1.0), repeat=4):
        rates = (0.2, 0.2, 0.6, 0.6)
        chance = math.prod(p if r else 1 - p for p, r in zip(rates, outcome, strict=True))
        total += chance * bool(group_advantages(outcome, group_ids=ids).degenerate[0])
    assert total == pytest.approx(0.1168)


def test_hint_texts():
    request = hint_request("Find {x}.", "x = {3}", "x is 4")
    for part in ("Find {x}.", "x = {3}", "x is 4"):
        assert part in request
    assert hinted_prompt("Find {x}.", " try {4}\n") == "Find {x}.\n\nHint: try {4}"


@pytest.mark.parametrize(
    "hint,answer,leaks",
    [
        ("The answer is 42.", "42", True),
        ("The answer is 42", " 42\n", True),
        ("Think of 1 420 things.", "42", False),
        ("It is 42.5 at most.", "42", False),
        ("Try 7 + 3 + 10 first", "7+3+10", True),
        ("Add 7 and 3", "7+3+10", False),
        ("it is Paris, of course", "paris", True),
        ("Parisian food", "Paris", False),
        ("anything", "", False),
    ],
)
def test_a_hint_that_states_the_answer_leaks(hint, answer, leaks):
    assert leaks_answer(hint, answer) is leaks


def test_prob_terms_by_hand():
    """n = 8, p = 1/2: 1 - 2 / 256; p = 1/8: 1 - (7/8)^8 - 8^-8."""
    assert prob_term(0.5, num_samples=8) == 254 / 256
    assert prob_term(1 / 8, num_samples=8) == pytest.approx(1 - 0.875**8 - 8.0**-8)
    assert prob_term(0.25, num_samples=8, kind="variance") == 0.1875
    for kind in ("non_deg", "variance"):
        assert (
            prob_term(0.0, num_samples=8, kind=kind) == prob_term(1, num_samples=8, kind=kind) == 0
        )


def test_hint_gain_and_the_best_hint_of_an_all_wrong_group():
    assert hint_gain(0.5, 0.0, num_samples=8) == 254 / 256
    assert hint_gain(1.0, 0.5, num_samples=8) == -254 / 256
    assert best_hint([0, 1 / 8, 1 / 2, 1], num_samples=8) == 2
    assert best_hint([3 / 8, 5 / 8], num_samples=8) == 0, "the first of equals"
    assert best_hint([0, 1, 0, 1], num_samples=8) is None, "no hint makes a mixed group"
    assert best_hint([], num_samples=8) is None
    assert best_hint([1 / 8], 1 / 2, num_samples=8) is None, "not better than without"


def test_hint_reliance_is_over_the_tokens_of_right_completions():
    """Row 0: (-2 + 1 - 4 + 2) / 2 = -1.5; row 2: -0.5; row 1 is wrong. Mean -1."""
    logps = torch.tensor([[-2.0, -4, NAN], [-9, -9, -9], [-1, NAN, NAN]])
    hinted = torch.tensor([[-1.0, -2, NAN], [-1, -1, -1], [-0.5, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [True] * 3, [True, False, False]])
    correct = torch.tensor([True, False, True])
    assert hint_reliance(logps, hinted, mask, correct) == -1
    assert hint_reliance(logps, hinted, mask, torch.zeros(3, dtype=torch.bool)) == 0


def test_a_hint_that_answers_rely_on_earns_less():
    """254/256 exp(-0.3 / 0.3); a positive reliance earns no more than 0 does."""
    assert hinter_reward(0.5, -0.3, num_samples=8) == pytest.approx(254 / 256 / math.e)
    assert hinter_reward(0.5, 0.4, num_samples=8) == 254 / 256
    assert hinter_reward(0.0, 0.0, num_samples=8) == hinter_reward(1.0, 0.0, num_samples=8) == 0
    assert hinter_reward(1 / 8, 0.0, 0.5, num_samples=8) == 0, "worse than without"
    assert hinter_reward(0.5, 0.0, num_samples=8, passes_gate=False) == -1


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: best_draft([], []), "received 0 and 0"),
        (lambda: best_draft(["a"], [1, 0]), "received 1 and 2"),
        (lambda: permuted_countdown("3+7", count=1, rng=random.Random(0)), "received '3\\+7'"),
        (lambda: restated("x", count=9, rng=random.Random(0)), "count: .*received 9"),
        (lambda: pooled_group_ids(["x"], group_size=0), "group_size: .*received 0"),
        (lambda: prob_term(1.5, num_samples=8), "success_rate: .*received 1.5"),
        (lambda: prob_term(0.5, num_samples=8, kind="std"), "kind: .*received 'std'"),
        (lambda: hinter_reward(0.5, 0, num_samples=8, temperature=0), "temperature: .*received 0"),
    ],
)
def test_errors_name_expected_and_received(call, message):
    with pytest.raises(ValueError, match=message):
        call()
