"""Prompts: the shipped problems are the data set's, the split is clean, the order is a function."""

from collections import Counter
from itertools import product

import pytest

from fgrpo_train.base_policy import make_tokenizer
from fgrpo_train.prompts import (
    CountdownTask,
    Problem,
    Prompt,
    draw_problems,
    load_problems,
    prompt_batch,
)


@pytest.fixture(scope="module")
def task():
    return CountdownTask()


@pytest.fixture(scope="module")
def train_prompts(task):
    return task.train_prompts(make_tokenizer())


def prompts_named(count):
    return [Prompt(str(i), str(i), (i,), {}) for i in range(count)]


def names(prompts):
    return [prompt.id for prompt in prompts]


def test_shipped_problems_are_those_of_the_data_set():
    # Item i depends on the seed and i alone, so fewer draws give the beginning of the same list.
    drawn = draw_problems(1500)
    assert len(drawn) > 1000
    assert drawn == load_problems()[: len(drawn)]


def test_every_shipped_problem_has_a_solution_and_appears_once():
    problems = load_problems()
    assert len(problems) == len(set(problems)) == 2395
    for problem in problems:
        a, b, c = problem.numbers
        assert 1 <= a <= b <= c <= 15 and 1 <= problem.target <= 45
        values = {p * a + q * b + r * c for p, q, r in product((1, -1), repeat=3)}
        assert problem.target in values


def test_held_out_problems_are_fixed_and_never_trained_on(task, train_prompts):
    assert len(task.held_out) == 256
    assert not set(task.held_out) & set(task.train)
    assert set(task.held_out) | set(task.train) == set(load_problems())
    tokenizer = make_tokenizer()
    held_out = task.held_out_prompts(tokenizer)
    assert held_out == CountdownTask().held_out_prompts(tokenizer)
    # Success rates of different versions are comparable only on the same prompts.
    assert [prompt.text for prompt in held_out[:3]] == ["6,13,11=4:", "3,10,12=19:", "9,10,3=16:"]
    trained_on = {_problem(prompt) for prompt in train_prompts}
    assert not trained_on & {_problem(prompt) for prompt in held_out}
    assert trained_on == set(task.train)


def _problem(prompt):
    return Problem(tuple(sorted(prompt.metadata["numbers"])), prompt.metadata["target"])


def test_prompts_spell_out_the_problem(train_prompts):
    tokenizer = make_tokenizer()
    assert len(set(names(train_prompts))) == len(train_prompts)
    for prompt in train_prompts[::100]:
        numbers, target = prompt.metadata["numbers"], prompt.metadata["target"]
        assert prompt.text == f"{numbers[0]},{numbers[1]},{numbers[2]}={target}:"
        assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_training_has_each_order_of_the_numbers_once(train_prompts):
    orders = Counter(_problem(prompt) for prompt in train_prompts)
    for problem, count in orders.items():
        assert count == {3: 6, 2: 3, 1: 1}[len(set(problem.numbers))]


def test_an_epoch_takes_each_prompt_once_also_when_steps_do_not_divide_it():
    prompts = prompts_named(10)
    drawn = [
        n
        for step in range(5)
        for n in names(prompt_batch(prompts, step=step, batch_size=4, seed=3))
    ]
    first, second = drawn[:10], drawn[10:]
    assert sorted(first) == sorted(second) == names(prompts)
    assert first != second


def test_a_step_depends_on_seed_and_step_alone(train_prompts):
    def batch(step, seed):
        return names(prompt_batch(train_prompts, step=step, batch_size=8, seed=seed))

    expected = batch(2, 5)
    batch(400, 6)
    assert batch(2, 5) == expected
    assert batch(3, 5) != expected
    assert batch(2, 6) != expected
    # (seed, epoch) = (1, 0) and (0, 1): a sum of the two as the seed would give the same order.
    ten = prompts_named(10)
    assert prompt_batch(ten, step=0, batch_size=10, seed=1) != prompt_batch(
        ten, step=1, batch_size=10, seed=0
    )


def test_a_batch_may_exceed_the_prompts():
    drawn = names(prompt_batch(prompts_named(3), step=0, batch_size=7, seed=0))
    assert sorted(drawn[:3]) == sorted(drawn[3:6]) == ["0", "1", "2"] and len(drawn) == 7


@pytest.mark.parametrize(
    ("count", "step", "batch_size"),
    [(0, 0, 1), (3, -1, 1), (3, 0, 0)],
    ids=["empty", "step", "size"],
)
def test_bad_arguments_are_refused(count, step, batch_size):
    with pytest.raises(ValueError, match=f"received {count} prompts, step {step}, batch_size"):
        prompt_batch(prompts_named(count), step=step, batch_size=batch_size, seed=0)
