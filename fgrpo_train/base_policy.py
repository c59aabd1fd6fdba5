"""The shipped base policy: a tiny Qwen2 trained to write countdown answers, weak by design.

Like a pre-trained language model it knows many ways to write a solution and picks a right one
rarely. The weakness is put in deliberately: supervised training first teaches right answers, then,
in its last part, replaces most of them by wrong ones over the same numbers, so that the policy
mostly writes well-formed answers that miss the target. What reinforcement learning gains on it is
therefore largely the removal of noise that was put in.

`python -m fgrpo_train.base_policy --out DIR` builds it again.
"""

import argparse
import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from fgrpo_train.prompts import CountdownTask, Problem, countdown_text

TINY_COUNTDOWN = Path(__file__).parent / "assets" / "tiny-countdown"
CHARACTERS = "0123456789+-(),=:"
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class Recipe:
    """Supervised training: linear warm-up, linear decay; right answers first, then mostly wrong."""

    steps: int = 1000
    batch_size: int = 128
    learning_rate: float = 5e-3
    warmup_steps: int = 50
    noisy_steps_share: float = 0.1
    wrong_share: float = 0.7
    seed: int = 0

    @property
    def first_noisy_step(self) -> int:
        """From here on `wrong_share` of the answers are wrong."""
        return round((1 - self.noisy_steps_share) * self.steps)

    def learning_rate_factor(self, step: int) -> float:
        """Multiplies the learning rate at a step."""
        remaining = (self.steps - step) / max(1, self.steps - self.warmup_steps)
        return min((step + 1) / self.warmup_steps, remaining)


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per character; characters outside the alphabet are dropped.

    AutoTokenizer loads the tokenizer of any Qwen2 checkpoint as a Qwen2Tokenizer, whatever class
    saved it, and adds the special tokens that it misses: so this is one, and none is missing.
    """
    vocabulary = {token: index for index, token in enumerate(("<pad>", "<eos>", *CHARACTERS))}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<eos>",
        padding_side="left",
        model_max_length=64,
    )


def make_model(tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 with 0.15 M parameters, embedding and head tied.

    Its heads have 32 dimensions, the fewest for which vLLM has an attention kernel on CPUs.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


@cache
def expressions_by_value(numbers: tuple[int, int, int]) -> dict[int, list[str]]:
    """The texts `a+b-c` and `a-(b+c)`, over all orders of the numbers and all signs, by value."""
    found: dict[int, dict[str, None]] = defaultdict(dict)
    sign = {"+": 1, "-": -1}
    for (a, b, c), (p, q) in product(permutations(numbers), product(sign, repeat=2)):
        found[a + sign[p] * b + sign[q] * c][f"{a}{p}{b}{q}{c}"] = None
        found[a + sign[p] * (b + sign[q] * c)][f"{a}{p}({b}{q}{c})"] = None
    return {value: list(texts) for value, texts in found.items()}


def draw_answer(problem: Problem, rng: random.Random, *, right: bool) -> str:
    """A random right answer, or a random wrong one over the same numbers."""
    by_value = expressions_by_value(problem.numbers)
    if right:
        return rng.choice(by_value[problem.target])
    return rng.choice([t for value in by_value if value != problem.target for t in by_value[value]])


def supervised_batch(
    problems: list[Problem],
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    *,
    wrong_share: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, S) of prompt, answer and EOS, and labels, which ignore prompt and padding."""
    rows, labels = [], []
    for problem in problems:
        numbers = tuple(rng.sample(problem.numbers, len(problem.numbers)))
        prompt = tokenizer.encode(countdown_text(numbers, problem.target))
        answer = draw_answer(problem, rng, right=rng.random() >= wrong_share)
        completion = tokenizer.encode(answer + tokenizer.eos_token)
        rows.append(torch.tensor(prompt + completion))
        labels.append(torch.tensor([IGNORED_LABEL] * len(prompt) + completion))
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad(labels, batch_first=True, padding_value=IGNORED_LABEL),
    )


def train(recipe: Recipe) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer, list[float]]:
    """The policy after supervised training, its tokenizer, and the loss of every step."""
    torch.manual_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    problems = CountdownTask().train
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.learning_rate_factor)
    losses = []
    progress = tqdm(range(recipe.steps), desc="supervised", unit="step")
    for step in progress:
        input_ids, labels = supervised_batch(
            rng.choices(problems, k=recipe.batch_size),
            tokenizer,
            rng,
            wrong_share=recipe.wrong_share if step >= recipe.first_noisy_step else 0.0,
        )
        logits = model(input_ids).logits
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    return model.eval(), tokenizer, losses


def load_policy(
    path: Path | str, dtype: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer from a local folder in the transformers format;
    dtype "auto" is the one that the weights are stored in."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(path)


def main(arguments: list[str] | None = None) -> None:
    """Train, and write model and tokenizer."""
    defaults = Recipe()
    parser = argparse.ArgumentParser(description="Build the shipped base policy again.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, made if missing")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="default %(default)s")
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error(f"--steps: expected at least 1, received {args.steps}")
    model, tokenizer, losses = train(Recipe(steps=args.steps, seed=args.seed))
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; policy written to {args.out}")


if __name__ == "__main__":
    main()
