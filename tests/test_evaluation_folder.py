"""The samples of an evaluation on disk: what a stop leaves, and what may not be mixed."""

import dataclasses

import pytest
import torch

from fgrpo_train.evaluation import Counts, plan_chunks
from fgrpo_train.evaluation_folder import EvaluationFolder, prompts_digest, weights_digest
from fgrpo_train.prompts import Prompt
from fgrpo_train.settings import ConfigError

FINGERPRINT = {"evaluation.samples": 1024, "prompts": "abc", "weights": "def"}
PROMPTS = [Prompt(name, f"{name}?", (1,), {"answer": 1}) for name in "abcde"]
CHUNKS = plan_chunks(PROMPTS, samples_per_prompt=1024, seed=0)


def counts_of(chunk) -> list[Counts]:
    return [Counts(p.id, chunk.samples, 3, ("x", "y"), (chunk.seed,)) for p in chunk.prompts]


def filled(tmp_path, chunks=2) -> EvaluationFolder:
    folder = EvaluationFolder(tmp_path / "evaluation" / "a")
    assert folder.open(FINGERPRINT, CHUNKS) == 0
    for chunk in CHUNKS[:chunks]:
        folder.append(counts_of(chunk))
    return folder


def test_what_is_written_is_read_again_and_gone_on_with(tmp_path):
    assert [len(chunk.prompts) for chunk in CHUNKS] == [2, 2, 1]
    folder = filled(tmp_path)
    text = folder.samples.read_text()
    assert folder.open(FINGERPRINT, CHUNKS) == 2
    assert folder.samples.read_text() == text
    assert folder.read_counts() == counts_of(CHUNKS[0]) + counts_of(CHUNKS[1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: text.rindex("\n", 0, -1) + 1],  # half of a chunk's prompts
        lambda text: text[:-1],  # a line without its end
        lambda text: text[:-30],  # half a line
        lambda text: text[:-30] + "\0" * 30,  # blocks that never reached the disk
        lambda text: text.replace('"d"', '"other"'),  # not what was planned
    ],
    ids=["half-chunk", "no-newline", "half-line", "zeros", "other-prompt"],
)
def test_a_chunk_that_is_not_whole_is_dropped(tmp_path, damage):
    folder = filled(tmp_path)
    whole = folder.samples.read_text()
    folder.samples.write_text(damage(whole))
    assert folder.open(FINGERPRINT, CHUNKS) == 1
    assert folder.read_counts() == counts_of(CHUNKS[0])
    folder.append(counts_of(CHUNKS[1]))
    assert folder.samples.read_text() == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"evaluation.samples": 64}, r"evaluation.samples = 1024, now it is 64: go on with --eval"),
        ({"prompts": "xyz"}, "prompts = abc, now it is xyz"),
        ({"weights": "xyz"}, "weights = def, now it is xyz: evaluate the policy"),
    ],
)
def test_samples_of_something_else_are_refused_and_left_alone(tmp_path, change, message):
    folder = filled(tmp_path)
    before = folder.samples.read_bytes(), folder.fingerprint.read_bytes()
    with pytest.raises(ConfigError, match=message) as error:
        folder.open(FINGERPRINT | change, CHUNKS)
    assert "move that folder away" in str(error.value) and "\n" not in str(error.value)
    assert (folder.samples.read_bytes(), folder.fingerprint.read_bytes()) == before


def test_a_folder_without_an_evaluation_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"no evaluation in {tmp_path}"):
        EvaluationFolder(tmp_path).read_fingerprint()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make"):
        EvaluationFolder(tmp_path / "file").open(FINGERPRINT, CHUNKS)


def test_digests_tell_apart_what_changes_a_number():
    model = torch.nn.Linear(3, 2).requires_grad_(False)
    digest = weights_digest(model)
    model.weight[1, 2] += 1e-6
    assert weights_digest(model) != digest
    assert weights_digest(model.bfloat16()) not in (digest, weights_digest(model.float()))
    other = dataclasses.replace(PROMPTS[0], metadata={"answer": 2})
    digests = {prompts_digest(p) for p in (PROMPTS, PROMPTS[::-1], PROMPTS[1:], [other])}
    assert len(digests | {prompts_digest([PROMPTS[0]])}) == 5
