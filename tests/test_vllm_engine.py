"""vLLM on the CPU: what it samples, that it has the trainer's weights, and how it ends.

Without vLLM these tests fail: its absence is a defect of the environment, not a reason to skip.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from test_rollout import full_forward_logps
from train_parts import random_policy, sampled_batch, sampling_of

import fgrpo_train
from fgrpo_train import vllm_engine
from fgrpo_train.base_policy import TINY_COUNTDOWN, load_policy
from fgrpo_train.config import build
from fgrpo_train.learner import Learner
from fgrpo_train.prompts import CountdownTask
from fgrpo_train.rollout import EngineError, completion_mask_from_ids
from fgrpo_train.run import main
from fgrpo_train.settings import EngineSettings
from fgrpo_train.vllm_engine import VLLMEngine

pytestmark = pytest.mark.slow

# float32 by other kernels and in another order: some eps (1.2e-7) of logits of order ten.
CLOSE = dict(rtol=0, atol=1e-4)
RUN = Path(fgrpo_train.__file__).parent / "run.py"


def start(max_model_len=48, timeout=120.0):
    settings = EngineSettings(kind="vllm", timeout_seconds=timeout)
    return VLLMEngine(TINY_COUNTDOWN, settings, dtype=torch.float32, max_model_len=max_model_len)


@pytest.fixture(scope="module")
def engine():
    engine = start()
    yield engine
    engine.close()
    assert engine.process.returncode == 0, "it ends by itself when the socket is closed"


@pytest.fixture(scope="module")
def policy():
    """The shipped policy, its tokenizer and prompts of several lengths."""
    model, tokenizer = load_policy(TINY_COUNTDOWN)
    return model, tokenizer, CountdownTask().held_out_prompts(tokenizer)[:12]


@pytest.fixture
def loaded(engine, policy):
    """The engine with the shipped policy's weights."""
    engine.load_weights(policy[0].named_parameters())
    return engine


def generate(engine, policy, *, seed=0, prompts=None, group_size=4, **changes):
    _, tokenizer, all_prompts = policy
    return engine.generate(
        prompts or all_prompts,
        group_size=group_size,
        sampling=dataclasses.replace(sampling_of(tokenizer), **changes),
        seed=seed,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_learners_at_its_temperature(engine, temperature):
    model, tokenizer = random_policy()
    engine.load_weights(model.named_parameters())
    batch = sampled_batch(
        model, tokenizer, num_correct=[1] * 6, temperature=temperature, engine=engine
    )
    assert batch.rollout_logps[batch.completion_mask].std() > 0.3, "the log-probs do differ"
    learner = Learner(model, build({"sampling.temperature": temperature}))
    torch.testing.assert_close(learner.logps(batch), batch.rollout_logps, **CLOSE)


def test_new_weights_arrive_and_stay_after_sleep_and_wake(engine, policy):
    """Each time the log-probs of what it sampled are those of the weights that it was given."""
    seen = []
    for seed in (1, 2, 1):
        model = random_policy(seed)[0]
        engine.load_weights(model.named_parameters())
        rollouts = generate(engine, policy)
        expected = full_forward_logps(model, policy[2], rollouts)
        torch.testing.assert_close(rollouts.logps.double(), expected, **CLOSE)
        engine.sleep()
        engine.wake()
        again = generate(engine, policy)
        assert again.completion_ids.equal(rollouts.completion_ids)
        assert again.logps.equal(rollouts.logps)
        seen.append(rollouts.completion_ids)
    assert not torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_the_seed_the_prompt_and_the_place_decide_a_completion(loaded, policy):
    first, second = generate(loaded, policy, seed=5), generate(loaded, policy, seed=5)
    assert second.completion_ids.equal(first.completion_ids)
    assert second.logps.equal(first.logps)
    other = generate(loaded, policy, seed=6)
    assert not torch.equal(other.completion_ids, first.completion_ids)
    for group in first.completion_ids.view(12, 4, -1):
        assert len(group.unique(dim=0)) > 1, "the samples of a group differ"
    # Fewer prompts in the call: the first ones are answered as before.
    part = generate(loaded, policy, seed=5, prompts=policy[2][:3])
    width = part.completion_ids.shape[1]
    assert part.completion_ids.equal(first.completion_ids[:12, :width])


def test_draws_follow_the_tempered_distribution(loaded, policy):
    model, _, prompts = policy
    rollouts = generate(
        loaded, policy, prompts=prompts[:1], group_size=4096, temperature=0.7, max_new_tokens=1
    )
    ids = torch.tensor([prompts[0].token_ids])
    with torch.no_grad():
        probs = (model(ids).logits[0, -1] / 0.7).softmax(0)
    shares = rollouts.completion_ids[:, 0].bincount(minlength=len(probs)) / 4096
    # Five standard deviations of a binomial share, and one count for what hardly ever occurs.
    bound = 5 * (probs * (1 - probs) / 4096).sqrt() + 1 / 4096
    assert ((shares - probs).abs() < bound).all()


def test_a_completion_ends_with_the_first_of_several_eos_tokens(loaded, policy):
    _, tokenizer, _ = policy
    plus, minus = tokenizer.encode("+-")
    for eos in [(plus,), (tokenizer.eos_token_id, plus), (plus, minus)]:
        rollouts = generate(loaded, policy, eos_token_ids=eos)
        ids, mask = rollouts.completion_ids, rollouts.completion_mask
        assert mask.equal(completion_mask_from_ids(ids, eos))
        last = ids[range(len(ids)), mask.sum(1) - 1]
        assert rollouts.truncated.equal(~torch.isin(last, torch.tensor(eos)))
        assert set(eos) <= set(last.tolist()), "each of them ended one, and was kept"
        assert (rollouts.logps[mask] < 0).all() and (rollouts.logps[~mask] == 0).all()
    # The model's own EOS token means nothing unless it is asked for: sampling goes on after it.
    rollouts = generate(loaded, policy, eos_token_ids=tuple(tokenizer.encode(":")))
    ids, mask = rollouts.completion_ids, rollouts.completion_mask
    assert (mask[:, 1:] & (ids[:, :-1] == tokenizer.eos_token_id)).any()


def test_pad_equal_to_eos_changes_the_padding_alone(loaded, policy):
    eos = policy[1].eos_token_id
    plain, same = generate(loaded, policy), generate(loaded, policy, pad_token_id=eos)
    mask = plain.completion_mask
    assert same.completion_mask.equal(mask) and same.truncated.equal(plain.truncated)
    assert same.completion_ids[mask].equal(plain.completion_ids[mask])
    assert (same.completion_ids[~mask] == eos).all() and not mask.all()


def test_what_is_cut_is_marked(loaded, policy):
    whole, cut = generate(loaded, policy), generate(loaded, policy, max_new_tokens=6)
    lengths = whole.completion_mask.sum(1)
    assert not whole.truncated.any() and lengths.min() <= 6 < lengths.max()
    assert cut.truncated.equal(lengths > 6)
    assert cut.completion_ids.equal(whole.completion_ids[:, :6]), (
        "the same draws, as far as they go"
    )


def test_bad_requests_are_refused_and_leave_the_engine_alone(loaded, policy):
    with pytest.raises(ValueError, match="vLLM needs >= 0.01, got 0.001"):
        generate(loaded, policy, temperature=0.001)
    with pytest.raises(ValueError, match="group_size >= 1"):
        generate(loaded, policy, group_size=0)
    generate(loaded, policy)


@pytest.mark.parametrize("case", ["missing", "unknown", "bits"])
def test_wrong_weights_are_refused(policy, monkeypatch, case):
    weights = dict(policy[0].named_parameters())
    message = {
        "missing": "no weights came for model.norm.weight",
        "unknown": "other",
        "bits": "model.embed_tokens.weight arrived with other bits than were sent",
    }[case]
    if case == "missing":
        del weights["model.norm.weight"]
    elif case == "unknown":
        weights["other"] = torch.zeros(3)
    else:
        monkeypatch.setattr(vllm_engine, "bit_sum", lambda tensor: 1)
    engine = start()
    with pytest.raises(EngineError, match=f"(?s)reported an error while taking.*{message}"):
        engine.load_weights(weights.items())
    assert engine.process.poll() is not None
    os.unlink(engine.log)


def test_a_start_that_fails_gives_vllms_reason():
    with pytest.raises(EngineError, match="(?s)error while starting.*max_model_len.*4096") as error:
        start(max_model_len=4096)
    assert str(error.value).count("\n") < 20


def test_a_stopped_engine_is_found_by_its_silence(policy):
    engine = start()
    engine._timeout = 2.0
    os.kill(engine.process.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match="gave no sign of life for 2 s"):
        generate(engine, policy)
    assert engine.process.returncode == -signal.SIGKILL
    os.unlink(engine.log)


SMALL = [
    "--engine.kind", "vllm", "--engine.timeout_seconds", "120", "--steps", "4",
    "--data.prompts_per_step", "4", "--sampling.group_size", "4", "--sampling.temperature", "0.9",
    "--evaluation.max_prompts", "8", "--evaluation.samples_per_prompt", "4",
]  # fmt: skip


def read_metrics(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("seconds", "tokens_per_second", "peak_memory_bytes")
    return [{k: v for k, v in record.items() if k not in clock} for record in records]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    output = tmp_path_factory.mktemp("whole")
    others = children("fgrpo_train.vllm_worker", of=os.getpid())
    assert main([*SMALL, "--output_dir", str(output)]) == 0
    assert children("fgrpo_train.vllm_worker", of=os.getpid()) == others, "its engine has ended"
    return output / "tiny-cpu"


def test_a_run_samples_with_the_weights_of_every_step(whole_run):
    records = read_metrics(whole_run)
    assert len(records) == 4
    for record in records:
        assert record["sampler_gap"] < 1e-3
        assert record["sampler_ratio_mean"] == pytest.approx(1.0, abs=1e-3)
        assert record["sampler_effective_share"] == pytest.approx(1.0, abs=1e-3)
        assert record["rejected_fraction"] == 0.0
    assert "rollout_correction: truncate" in (whole_run / "config.yaml").read_text()


def children(module, *, of):
    """Processes below `of` that run a module."""
    found = psutil.Process(of).children(recursive=True)
    return [child for child in found if module in " ".join(child.cmdline())]


def run_until(arguments, folder, *, lines):
    """Start run.py and return it with its engine's process once it has recorded so many steps."""
    process = subprocess.Popen(
        [sys.executable, str(RUN), *arguments], stderr=subprocess.PIPE, text=True
    )
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    (worker,) = children("fgrpo_train.vllm_worker", of=process.pid)
    return process, worker


def test_a_dead_engine_and_ctrl_c_lose_nothing(whole_run, tmp_path):
    folder = tmp_path / "stopped"
    names = ["--name", "stopped", "--output_dir", str(tmp_path)]
    process, worker = run_until([*SMALL, *names], folder, lines=1)
    worker.kill()
    message = process.communicate(timeout=60)[1]
    assert process.returncode == 3
    assert "the vLLM engine died (killed by SIGKILL) while" in message
    assert f"--resume {folder}" in message and "Traceback" not in message
    done = len(read_metrics(folder))
    assert done < 4, "it was stopped before the end"

    process, worker = run_until(["--resume", str(folder)], folder, lines=done + 1)
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert not worker.is_running(), "Ctrl-C leaves no engine behind"

    assert main(["--resume", str(folder)]) == 0
    assert read_metrics(folder) == read_metrics(whole_run)
