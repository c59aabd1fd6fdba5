"""Prompts: countdown problems for a tiny policy, and the order in which prompts are drawn.

A problem is three numbers in 1..15 and a target in 1..45 that + and - can reach; the prompt reads
`3,7,10=20:` and the answer is an expression such as `7+3+10`. The problems are items of
reasoning-gym's `countdown` data set, without duplicates by (sorted numbers, target). They were
drawn once and are shipped in assets/countdown.json: drawing takes half a minute.
`python -m fgrpo_train.prompts` draws them again.
"""

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

PROBLEMS_FILE = Path(__file__).parent / "assets" / "countdown.json"
COUNTDOWN_SETTINGS: dict[str, Any] = dict(
    seed=0,
    min_numbers=3,
    max_numbers=3,
    min_value=1,
    max_value=15,
    min_target=1,
    max_target=45,
    operators=("+", "-"),
)
NUM_DRAWS = 16_000
NUM_HELD_OUT = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `metadata` is what the verifier needs; the engine reads only `token_ids`."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """Reach `target` with each of `numbers` (sorted) used exactly once."""

    numbers: tuple[int, ...]
    target: int


def draw_problems(num_draws: int) -> list[Problem]:
    """The distinct problems among the first `num_draws` items, in order of first draw."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("countdown", size=num_draws, **COUNTDOWN_SETTINGS)
    items = (dataset[index]["metadata"] for index in range(num_draws))
    return list(dict.fromkeys(Problem(tuple(sorted(m["numbers"])), m["target"]) for m in items))


def load_problems() -> list[Problem]:
    """The shipped problems, in order of first draw."""
    rows = json.loads(PROBLEMS_FILE.read_text())["problems"]
    return [Problem(tuple(numbers), target) for *numbers, target in rows]


def countdown_text(numbers: tuple[int, ...], target: int) -> str:
    """The prompt for the numbers in the given order."""
    return f"{','.join(map(str, numbers))}={target}:"


class CountdownTask:
    """The shipped problems, split once and for all: no problem is both trained on and held out."""

    def __init__(self) -> None:
        problems = load_problems()
        self.held_out = random.Random(0).sample(problems, NUM_HELD_OUT)
        held_out = set(self.held_out)
        self.train = [problem for problem in problems if problem not in held_out]

    def train_prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
        """One prompt for every order of the numbers of every training problem."""
        orders = [
            (problem, numbers)
            for problem in self.train
            for numbers in dict.fromkeys(permutations(problem.numbers))
        ]
        return _make_prompts(orders, tokenizer)

    def held_out_prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
        """One prompt for every held-out problem, its numbers in a fixed random order."""
        rng = random.Random(1)
        orders = [(p, tuple(rng.sample(p.numbers, len(p.numbers)))) for p in self.held_out]
        return _make_prompts(orders, tokenizer)


def _make_prompts(
    orders: list[tuple[Problem, tuple[int, ...]]], tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    texts = [countdown_text(numbers, problem.target) for problem, numbers in orders]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [
        Prompt(
            id=f"countdown/{text[:-1]}",
            text=text,
            token_ids=tuple(token_ids),
            metadata={"numbers": numbers, "target": problem.target},
        )
        for text, token_ids, (problem, numbers) in zip(texts, encoded, orders, strict=True)
    ]


def prompt_batch(prompts: list[Prompt], *, step: int, batch_size: int, seed: int) -> list[Prompt]:
    """The prompts of one step: a pure function of (seed, step); resuming needs the step alone.

    The prompts are passed in a new random order each epoch; a step takes the next `batch_size` of
    them, across the end of an epoch where it falls inside the step.

    Raises: ValueError if there are no prompts, step < 0 or batch_size < 1.
    """
    if not prompts or step < 0 or batch_size < 1:
        raise ValueError(
            f"expected prompts, step >= 0 and batch_size >= 1, "
            f"received {len(prompts)} prompts, step {step}, batch_size {batch_size}"
        )
    positions = range(step * batch_size, (step + 1) * batch_size)
    epochs = (divmod(position, len(prompts)) for position in positions)
    return [prompts[_epoch_order(len(prompts), seed, epoch)[index]] for epoch, index in epochs]


@lru_cache(maxsize=2)
def _epoch_order(num_prompts: int, seed: int, epoch: int) -> list[int]:
    # A string seed is hashed whole: no two (seed, epoch) pairs coincide by arithmetic.
    return random.Random(f"{seed}/{epoch}").sample(range(num_prompts), num_prompts)


def main() -> None:
    """Draw the problems again and write the shipped file."""
    from importlib.metadata import version

    problems = draw_problems(NUM_DRAWS)
    header = {
        "source": f"reasoning-gym {version('reasoning-gym')}, countdown, first {NUM_DRAWS} items",
        "settings": COUNTDOWN_SETTINGS,
        "row": "three numbers in ascending order, then the target",
    }
    rows = ",\n".join(json.dumps([*p.numbers, p.target]) for p in problems)
    text = json.dumps(header, indent=1)[:-2] + f',\n "problems": [\n{rows}\n]\n}}\n'
    PROBLEMS_FILE.write_text(text)
    print(f"{len(problems)} problems written to {PROBLEMS_FILE}")


if __name__ == "__main__":
    main()
