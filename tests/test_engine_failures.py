"""A sampling process that dies, hangs or is wrong: an error that says what is known, and no orphan.

A stand-in takes the place of vLLM; test_vllm_engine.py does some of it to the real one.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fgrpo_train import vllm_engine
from fgrpo_train.prompts import Prompt
from fgrpo_train.rollout import EngineError, Sampling
from fgrpo_train.settings import ConfigError, EngineSettings
from fgrpo_train.vllm_engine import VLLMEngine, worker_gpus

FAKE = Path(__file__).with_name("fake_vllm_worker.py")
WEIGHTS = {"a": torch.ones(2, 3), "b": torch.zeros(5)}
SAMPLING = Sampling(eos_token_ids=(1,), pad_token_id=0)
USES = {
    "start_update": ("taking new weights", lambda e: e.load_weights(WEIGHTS.items())),
    "tensor": ("taking new weights", lambda e: e.load_weights(WEIGHTS.items())),
    "finish_update": ("taking new weights", lambda e: e.load_weights(WEIGHTS.items())),
    "generate": (
        "sampling",
        lambda e: e.generate([Prompt("p", "", (3,), {})], group_size=2, sampling=SAMPLING, seed=0),
    ),
    "sleep": ("going to sleep", lambda e: e.sleep()),
    "wake": ("waking up", lambda e: e.wake()),
}


@pytest.fixture
def start(monkeypatch):
    engines = []

    def start_fake(request, what, **settings):
        monkeypatch.setattr(vllm_engine, "WORKER", (sys.executable, str(FAKE), request, what))
        settings = dict(kind="vllm", timeout_seconds=1.5) | settings
        engine = VLLMEngine(
            Path("policy"), EngineSettings(**settings), dtype=torch.float32, max_model_len=32
        )
        engines.append(engine)
        return engine

    yield start_fake
    for engine in engines:
        engine.close()
        assert engine.process.poll() is not None
        Path(engine.log).unlink(missing_ok=True)


@pytest.mark.parametrize("request_name", USES)
@pytest.mark.parametrize(
    ("what", "problem"),
    [("killed", r"died \(killed by SIGKILL\)"), ("exits", r"died \(exit code 7\)")],
)
def test_a_dead_engine_is_an_error_that_says_what_is_known(start, request_name, what, problem):
    engine = start(request_name, what)
    doing, use = USES[request_name]
    with pytest.raises(EngineError, match=f"the vLLM engine {problem} while {doing}") as error:
        use(engine)
    assert "  | vLLM would say this" in str(error.value)
    assert f"Its whole log: {engine.log}" in str(error.value) and Path(engine.log).exists()
    with pytest.raises(EngineError):
        use(engine)


@pytest.mark.parametrize("request_name", ["tensor", "generate", "wake"])
def test_a_stopped_engine_is_found_by_its_silence_and_killed(start, request_name):
    engine = start(request_name, "stopped")
    doing, use = USES[request_name]
    message = f"gave no sign of life for 1.5 s .engine.timeout_seconds. while {doing}"
    with pytest.raises(EngineError, match=message):
        use(engine)
    assert engine.process.returncode == -9


def test_more_bytes_than_fit_into_the_socket_are_not_waited_for_for_ever(start):
    engine = start("start_update", "stopped")
    with pytest.raises(EngineError, match="gave no sign of life"):
        vllm_engine.send(engine._connection, {"do": "start_update"})
        engine._call("taking new weights", "tensor", bytes(2**24), name="a")


@pytest.mark.parametrize("what", ["slow but alive", "slow but logging"])
def test_an_engine_that_shows_life_may_take_longer_than_the_timeout(start, what):
    start("sleep", what).sleep()


def test_a_death_while_starting_is_an_error_too(start):
    with pytest.raises(EngineError, match="died .exit code 7. while starting"):
        start("start", "exits")


def test_weights_of_another_version_are_refused(start):
    with pytest.raises(EngineError, match="used the weights of version 0 instead of 1"):
        start("finish_update", "old version").load_weights(WEIGHTS.items())
    engine = start("none", "")
    engine.load_weights(WEIGHTS.items())
    with pytest.raises(EngineError, match="used the weights of version 0 instead of 1 while samp"):
        USES["generate"][1](engine)


def test_a_closed_engine_leaves_neither_process_nor_log(start):
    engine = start("none", "")
    engine.close()
    assert engine.process.returncode == 0, "it ends by itself when the socket is closed"
    assert not Path(engine.log).exists()


def test_a_separate_engine_does_not_sleep(start):
    engine = start("sleep", "killed", placement="separate")
    engine.sleep()
    engine.wake()


def test_a_missing_vllm_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vLLM is not installed: pip install 'fgrpo\[vllm\]'"):
        VLLMEngine(Path("policy"), EngineSettings(), dtype=torch.float32, max_model_len=32)


@pytest.mark.parametrize(
    ("environment", "num_gpus", "placement", "expected"),
    [
        ({}, 1, "colocated", ["0"]),
        ({"LOCAL_RANK": "3", "LOCAL_SIZE": "8"}, 8, "colocated", ["3"]),
        ({"CUDA_VISIBLE_DEVICES": "2,5", "LOCAL_RANK": "1"}, 2, "colocated", ["5"]),
        ({}, 2, "separate", ["1", "0"]),
        ({"LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, 8, "separate", ["5", "1"]),
        # `deepspeed --num_gpus 4` shows its processes the first four of the machine's GPUs.
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, 4, "separate",
         ["5", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 2, "separate", ["GPU-b", "GPU-a"]),
    ],
)  # fmt: skip
def test_the_engines_gpu_is_that_of_its_process_or_a_free_one(
    environment, num_gpus, placement, expected
):
    assert worker_gpus(environment, num_gpus, placement) == expected


def test_no_free_gpu_is_an_error():
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-a", "LOCAL_SIZE": "1"}
    with pytest.raises(ConfigError, match="no GPU is left for the engine among GPU-a"):
        worker_gpus(environment, 1, "separate")
