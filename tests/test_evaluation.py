"""Evaluation: pass@k by its definition, and the counts behind it."""

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
import torch

from fgrpo_train import evaluation
from fgrpo_train.base_policy import make_tokenizer
from fgrpo_train.evaluation import evaluate, pass_at_k
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


def test_pass_at_k_counts_the_subsets_with_a_right_answer():
    right = [True, False, False, True, False]
    subsets = list(combinations(right, 3))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert expected == 0.9
    assert pass_at_k(5, torch.tensor(2), 3).item() == pytest.approx(0.9, abs=6 * EPS)


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
    assert engine.calls == [(["a", "b"], 4, 7), (["c"], 4, 9)]
    assert seen == [(2, 3), (3, 3)]


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
        evaluate(
            ScriptedEngine(),
            [],
            CountdownVerifier(),
            make_tokenizer(),
            samples_per_prompt=4,
            sampling=SAMPLING,
            seed=0,
            ks=[1],
        )
