"""Rewards: exact verifiers, and the rewards of a batch of rollouts."""

import ast
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from transformers import PreTrainedTokenizerBase

from fgrpo_train.prompts import Prompt
from fgrpo_train.rollout import Rollouts

Verifier = Callable[[Prompt, str], float | None]
"""(prompt, completion text) -> reward, or None where no verdict is possible."""

_ALLOWED = re.compile(r"[0-9+\-() ]+")


class CountdownVerifier:
    """1.0 if the completion is an expression that solves the problem, else 0.0.

    Solved: the whole completion, white space around it aside, is an expression in integers, +, -
    (also as signs) and brackets; it uses each of the prompt's numbers exactly once; its value is
    the target. There is no partial score for a well-formed wrong answer. The numbers and the target
    come from the prompt's metadata; the prompt's text is not looked at.
    """

    def __call__(self, prompt: Prompt, completion_text: str) -> float:
        numbers = tuple(sorted(prompt.metadata["numbers"]))
        return float(_solves(completion_text.strip(), numbers, prompt.metadata["target"]))


@lru_cache(maxsize=1 << 16)
def _solves(text: str, numbers: tuple[int, ...], target: int) -> bool:
    if not _ALLOWED.fullmatch(text):
        return False
    try:
        used: list[int] = []
        value = _value(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, RecursionError, MemoryError):  # the parser's answers to bad or deep input
        return False
    return value == target and tuple(sorted(used)) == numbers


def _value(node: ast.expr, used: list[int]) -> int:
    """The value of an expression; the integers in it are appended to `used`."""
    match node:
        case ast.Constant(value=int(number)):
            used.append(number)
            return number
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, used)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, used)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, used) + _value(right, used)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left, used) - _value(right, used)
        case _:
            raise SyntaxError(f"not a sum of integers: {ast.dump(node)}")


def completion_texts(rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each completion, without the EOS token that ended it.

    Other special tokens stay visible: a policy that samples a pad token in the middle of an answer
    has not written that answer.
    """
    lengths = rollouts.completion_mask.sum(1) - (~rollouts.truncated).long()
    rows = zip(rollouts.completion_ids.tolist(), lengths.tolist(), strict=True)
    return tokenizer.batch_decode([ids[:length] for ids, length in rows])


def score(
    verifier: Verifier,
    prompts: Sequence[Prompt],
    rollouts: Rollouts,
    tokenizer: PreTrainedTokenizerBase,
) -> torch.Tensor:
    """The reward of each completion, (B,) float32; NaN where the verifier gives no verdict.

    Args:
        prompts: those given to the engine; `rollouts.prompt_index` points into them.
    """
    texts = completion_texts(rollouts, tokenizer)
    rewards = [
        verifier(prompts[index], text)
        for index, text in zip(rollouts.prompt_index.tolist(), texts, strict=True)
    ]
    return torch.tensor([float("nan") if r is None else r for r in rewards], dtype=torch.float32)
