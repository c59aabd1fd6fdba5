"""The shipped base policy is what it says, and its recipe learns."""

import random
from dataclasses import replace
from math import log

import pytest
import torch

from fgrpo_train.base_policy import (
    IGNORED_LABEL,
    TINY_COUNTDOWN,
    Recipe,
    draw_answer,
    expressions_by_value,
    load_policy,
    main,
    make_tokenizer,
    supervised_batch,
    train,
)
from fgrpo_train.evaluation import evaluate
from fgrpo_train.hf_engine import HFEngine
from fgrpo_train.prompts import CountdownTask, Problem, Prompt
from fgrpo_train.rewards import CountdownVerifier
from fgrpo_train.rollout import Sampling


def test_expressions_of_three_numbers():
    by_value = expressions_by_value((1, 2, 4))
    # Six orders, four pairs of signs, with and without the bracket; all texts differ.
    assert sum(len(texts) for texts in by_value.values()) == 48
    # 4+2-1 and 2+4-1 in any order that starts with a plus, and with the bracket around the rest.
    assert sorted(by_value[5]) == sorted(
        ["4+2-1", "2+4-1", "4-1+2", "2-1+4", "4+(2-1)", "2+(4-1)", "4-(1-2)", "2-(1-4)"]
    )
    for value, texts in by_value.items():
        assert all(eval(text) == value for text in texts)
    # Equal numbers give equal texts, which are kept once.
    assert sorted(expressions_by_value((3, 3, 3))[9]) == ["3+(3+3)", "3+3+3"]


def test_answers_are_right_or_wrong_as_asked():
    rng, verifier = random.Random(0), CountdownVerifier()
    for problem in CountdownTask().train[:200]:
        prompt = Prompt("p", "", (), {"numbers": problem.numbers, "target": problem.target})
        assert verifier(prompt, draw_answer(problem, rng, right=True)) == 1.0
        assert verifier(prompt, draw_answer(problem, rng, right=False)) == 0.0


def test_supervision_covers_the_answer_and_its_end_alone():
    tokenizer, problems = make_tokenizer(), [Problem((1, 2, 4), 5), Problem((10, 12, 15), 37)]
    input_ids, labels = supervised_batch(problems, tokenizer, random.Random(0), wrong_share=0.0)
    answers = [expressions_by_value(problem.numbers)[problem.target] for problem in problems]
    for ids, row, right in zip(input_ids, labels, answers, strict=True):
        supervised = row != IGNORED_LABEL
        assert ids[supervised].equal(row[supervised])
        text = tokenizer.decode(ids[: int(supervised.nonzero()[0])])
        assert text.endswith(":") and text.count(",") == 2
        assert tokenizer.decode(row[supervised]).removesuffix("<eos>") in right
        assert row[supervised][-1] == tokenizer.eos_token_id
        assert (ids[int(supervised.nonzero()[-1]) + 1 :] == tokenizer.pad_token_id).all()


def test_the_noise_comes_last():
    recipe = Recipe(steps=200, warmup_steps=50, noisy_steps_share=0.25)
    assert recipe.first_noisy_step == 150
    factors = [recipe.learning_rate_factor(step) for step in (0, 49, 50, 125, 199)]
    assert factors == pytest.approx([1 / 50, 1, 1, 75 / 150, 1 / 150])


def test_the_shipped_tokenizer_is_the_one_of_the_script():
    made = make_tokenizer()
    model, shipped = load_policy(TINY_COUNTDOWN)
    assert shipped.get_vocab() == made.get_vocab()
    assert len(shipped) == model.config.vocab_size == 19
    text = "3,7,10=20:3+(7+10)<eos>"
    assert shipped(text)["input_ids"] == made(text)["input_ids"]
    assert shipped.decode(shipped(text)["input_ids"]) == text
    assert (shipped.pad_token, shipped.eos_token) == ("<pad>", "<eos>")


def test_the_shipped_policy_is_small_tied_and_weak_but_not_ignorant():
    assert sum(path.stat().st_size for path in TINY_COUNTDOWN.iterdir()) < 4 * 2**20
    model, tokenizer = load_policy(TINY_COUNTDOWN)
    assert sum(parameter.numel() for parameter in model.parameters()) == 149_504
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    result = evaluate(
        HFEngine(model),
        CountdownTask().held_out_prompts(tokenizer)[:128],
        CountdownVerifier(),
        tokenizer,
        samples_per_prompt=32,
        sampling=Sampling((tokenizer.eos_token_id,), tokenizer.pad_token_id),
        seed=0,
        ks=[1, 32],
    )
    # Designed: right about one time in five, and nearly always once in 32.
    assert 0.15 < result.success < 0.27
    assert result.pass_at_k[32] > 0.95
    assert result.distinct_correct > 3


@pytest.fixture(scope="module")
def short():
    return replace(Recipe(), steps=40)


def test_a_short_rebuild_learns_and_can_be_loaded(short, tmp_path, capsys):
    main(["--out", str(tmp_path), "--steps", str(short.steps), "--seed", str(short.seed)])
    model, tokenizer, losses = train(short)
    # At the start every token is about equally likely; 40 steps teach the form of an answer.
    assert losses[0] == pytest.approx(log(len(tokenizer)), abs=0.2)
    assert losses[-1] < losses[0] - 1.5
    assert f"loss {losses[0]:.3f} -> {losses[-1]:.3f}" in capsys.readouterr().out, (
        "same seed, same run"
    )
    loaded, loaded_tokenizer = load_policy(tmp_path)
    ids = loaded_tokenizer("3,7,10=20:3+7", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert loaded(ids).logits.equal(model(ids).logits)


def test_the_seed_decides_the_rebuild(short):
    first = train(replace(short, steps=2))[2]
    assert train(replace(short, steps=2))[2] == first
    assert train(replace(short, steps=2, seed=1))[2] != first


def test_no_steps_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path / "new"), "--steps", "0"])
    assert "--steps: expected at least 1, received 0" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
