"""Evaluation: pass@k by its definition, and the counts behind it."""

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
import torch

from fgrpo_train import evaluation
from fgrpo_train.base_policy import make_tokenizer
from fgrpo_train.evaluation import (
    Counts,
    Ranks,
    add_up,
    evaluate,
    pass_at_k,
    plan_chunks,
    sample_chunks,
)
from fgrpo_train.prompts import Prompt
from fgrpo_train.rewards import CountdownVerifier
from fgrpo_train.rollout import Rollouts, Sampling

# 1 - product: the product of k rounded factors is off by at most about k eps, eps = 2.2e-16.
EPS = 2.3e-16


@pytest.mark.parametrize("num_samples", [1, 2, 5, 16, 64])
def test_pass_at_k_equals_the_binomial_formula(num_samples):
    counts = torch.arange(num_samples + 1)
    for k in range(1, num_samples + 1):
        exact = [
            float(1 - Fraction(comb(num_samples - c, k), comb(num_samples, k)))
            for c in counts.tolist()
        ]
        torch.testing.assert_close(
            pass_at_k(num_samples, counts, k),
            torch.tensor(exact, dtype=torch.float64),
            rtol=0,
            atol=2 * k * EPS,
        )


@pytest.mark.parametrize("num_correct", range(7))
def test_pass_at_k_counts_the_subsets_with_a_right_answer(num_correct):
    """By its definition: the share of the k-subsets of 6 completions that hold a right one."""
    right = [True] * num_correct + [False] * (6 - num_correct)
    for k in range(1, 7):
        subsets = list(combinations(right, k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        found = pass_at_k(6, torch.tensor(num_correct), k).item()
        assert found == pytest.approx(expected, abs=2 * k * EPS)


def test_pass_at_k_of_1024_samples_is_that_of_whole_numbers():
    """C(1024, 256) has 249 digits; every count, at the smallest and largest k of a table."""
    counts = torch.arange(1025)
    for k in (1, 2, 128, 256):
        exact = [float(1 - Fraction(comb(1024 - c, k), comb(1024, k))) for c in range(1025)]
        torch.testing.assert_close(
            pass_at_k(1024, counts, k),
            torch.tensor(exact, dtype=torch.float64),
            rtol=0,
            atol=2 * k * EPS,
        )


def test_pass_at_k_is_exact_at_the_edges_and_stable_for_many_samples():
    counts = torch.tensor([[0, 501], [1000, 999]])
    assert pass_at_k(1000, counts, 500).tolist() == [[0.0, 1.0], [1.0, 1.0]]
    # One right answer among n is in a subset of k with probability k/n; C(1000, 500) is 2.7e299.
    assert pass_at_k(10_000, torch.tensor(10_000), 10_000).item() == 1.0
    one = pass_at_k(10_000, torch.tensor(1), 5000).item()
    assert one == pytest.approx(0.5, abs=2 * 5000 * EPS)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_refuses_k_out_of_range(k):
    with pytest.raises(ValueError, match=f"expected 1..4 .*received {k}"):
        pass_at_k(4, torch.tensor([1]), k)


@pytest.mark.parametrize("count", [-1, 5])
def test_pass_at_k_refuses_counts_out_of_range(count):
    with pytest.raises(ValueError, match=r"num_correct: expected 0\.\.4"):
        pass_at_k(4, torch.tensor([1, count]), 2)


PROMPTS = [
    Prompt("a", "3,7,10=20:", (1,), {"numbers": (3, 7, 10), "target": 20}),
    Prompt("b", "1,2,4=5:", (2,), {"numbers": (1, 2, 4), "target": 5}),
    Prompt("c", "5,5,5=5:", (3,), {"numbers": (5, 5, 5), "target": 5}),
]
ANSWERS = {
    "a": ["3+7+10", "3+7+10", "7+3+10", "3+7-10"],
    "b": ["1+2+4", "1", "", "2+4"],
    "c": ["5+5-5", "5+5-5", "5-5+5", "5"],
}
SAMPLING = Sampling(eos_token_ids=(1,), pad_token_id=0)


class ScriptedEngine:
    """Completes each prompt with its ANSWERS and records the calls."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, *, group_size, sampling, seed):
        self.calls.append(([prompt.id for prompt in prompts], group_size, seed))
        tokenizer = make_tokenizer()
        rows = [
            torch.tensor(tokenizer.encode(answer + tokenizer.eos_token))
            for prompt in prompts
            for answer in ANSWERS[prompt.id][:group_size]
        ]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows]).unsqueeze(1)
        return Rollouts(
            completion_ids=ids,
            completion_mask=mask,
            logps=torch.zeros(ids.shape),
            truncated=torch.zeros(len(rows), dtype=torch.bool),
            prompt_index=torch.arange(len(prompts)).repeat_interleave(group_size),
        )

    def load_weights(self, model):
        raise AssertionError("evaluation must not change weights")


def run(engine, verifier, **changes):
    settings = dict(samples_per_prompt=4, sampling=SAMPLING, seed=7, ks=[1, 2, 4]) | changes
    return evaluate(engine, PROMPTS, verifier, make_tokenizer(), **settings)


def test_evaluate_means_over_prompts():
    result = run(ScriptedEngine(), CountdownVerifier())
    assert (result.num_prompts, result.samples_per_prompt) == (3, 4)
    assert result.success == pytest.approx((3 + 0 + 3) / 12)
    # c = 3 of 4: pass@2 and pass@4 are 1, pass@1 is 3/4; c = 0: all are 0.
    assert result.pass_at_k == pytest.approx({1: 0.5, 2: 2 / 3, 4: 2 / 3})
    assert result.distinct_correct == pytest.approx((2 + 0 + 2) / 3)


def test_parts_differ_in_seed_and_do_not_change_the_means(monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_SEQUENCES_PER_CALL", 8)
    engine, seen = ScriptedEngine(), []
    result = run(
        engine, CountdownVerifier(), progress=lambda done, total: seen.append((done, total))
    )
    assert result == run(ScriptedEngine(), CountdownVerifier())
    assert [call[:2] for call in engine.calls] == [(["a", "b"], 4), (["c"], 4)]
    assert seen == [(8, 12), (12, 12)]


def test_one_prompt_may_take_several_calls(monkeypatch):
    """The engine repeats its answers in each call, so the counts of "a" are those of 3, 3 and 1."""
    monkeypatch.setattr(evaluation, "MAX_SEQUENCES_PER_CALL", 3)
    engine = ScriptedEngine()
    chunks = plan_chunks(PROMPTS[:1], samples_per_prompt=7, seed=0)
    parts = list(
        sample_chunks(
            engine, chunks, CountdownVerifier(), make_tokenizer(), sampling=SAMPLING, ranks=Ranks()
        )
    )
    assert [(ids, size) for ids, size, _ in engine.calls] == [(["a"], 3), (["a"], 3), (["a"], 1)]
    assert len({seed for *_, seed in engine.calls}) == 3
    total = add_up(counts for part in parts for counts in part)["a"]
    assert (total.samples, total.correct, len(total.distinct)) == (7, 7, 2)
    assert total.seeds == tuple(chunk.seed for chunk in chunks)


def test_different_answers_are_counted_over_all_calls():
    parts = [Counts("a", 4, 2, ("x", "y"), (1,)), Counts("a", 4, 3, ("w", "y"), (2,))]
    assert add_up(parts) == {"a": Counts("a", 8, 5, ("w", "x", "y"), (1, 2))}


def test_seeds_follow_from_seed_prompts_and_first_sample_alone(monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_SEQUENCES_PER_CALL", 4)

    def seeds(prompts, samples=4, seed=0):
        chunks = plan_chunks(prompts, samples_per_prompt=samples, seed=seed)
        return [chunk.seed for chunk in chunks]

    assert seeds(PROMPTS) == [seeds([prompt])[0] for prompt in PROMPTS]
    assert seeds(PROMPTS, samples=8)[::2] == seeds(PROMPTS)
    assert len({*seeds(PROMPTS, samples=8), *seeds(PROMPTS, seed=1)}) == 9
    assert all(0 <= seed < 2**63 for seed in seeds(PROMPTS))


def test_no_verdict_does_not_count_as_right():
    def only_b(prompt, text):
        return None if prompt.id != "b" else 1.0

    result = run(ScriptedEngine(), only_b)
    assert result.success == pytest.approx(4 / 12)
    assert result.pass_at_k[4] == pytest.approx(1 / 3)


def test_partial_scores_do_not_count_as_right():
    assert run(ScriptedEngine(), lambda prompt, text: 0.99).success == 0.0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"every k in 1..samples_per_prompt.*ks \[1, 8\]"):
        run(ScriptedEngine(), CountdownVerifier(), ks=[1, 8])
    with pytest.raises(ValueError, match="received 0 prompts"):
        plan_chunks([], samples_per_prompt=4, seed=0)
    with pytest.raises(ValueError, match="samples_per_prompt 0"):
        plan_chunks(PROMPTS, samples_per_prompt=0, seed=0)
    with pytest.raises(ValueError, match="different ids, received 'a' 2x"):
        plan_chunks([*PROMPTS, PROMPTS[0]], samples_per_prompt=4, seed=0)
