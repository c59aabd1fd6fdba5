"""The sampling process: vLLM, told what to do over a socket by `vllm_engine.VLLMEngine`.

It runs in a process of its own, so that vLLM's process groups never meet DeepSpeed's, and so that
its end is not the trainer's. It ends when the other end of the socket is closed.
"""

from __future__ import annotations

import hashlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from fgrpo_train.engine_channel import bit_sum, receive, send, unpack

# Most of a toy's key-value cache; on a CPU vLLM would take a share of the machine's memory.
CPU_CACHE_BYTES = 256 * 2**20
SIGN_OF_LIFE_SECONDS = 1.0


@dataclass
class NamedTensor(WeightTransferUpdateInfo):
    """One parameter by its name in the transformers model, in this process."""

    name: str
    tensor: Tensor


@dataclass
class NoRendezvous(WeightTransferInitInfo):
    """The socket is there already."""


class TensorTransfer(WeightTransferEngine[NoRendezvous, NamedTensor]):
    """vLLM's weight transfer for a sender that hands over one tensor at a time.

    vLLM brings transfers by NCCL and by CUDA IPC, none for a CPU. With both a sender waits inside
    vLLM for an engine that may be dead; here the socket between the two has a timeout.
    """

    init_info_cls = NoRendezvous
    update_info_cls = NamedTensor

    def init_transfer_engine(self, init_info: NoRendezvous) -> None:
        self.expected = {name for name, _ in self.model.named_parameters()}

    def start_weight_update(self) -> None:
        self.loaded: set[str] = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: NamedTensor) -> None:
        self.loaded |= self.model.load_weights([(update_info.name, update_info.tensor)])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if missing := self.expected - self.loaded:
            raise ValueError(f"no weights came for {', '.join(sorted(missing))}")
        _repack_for_cpu(self.model)

    def shutdown(self) -> None:
        """Nothing is open."""


def _repack_for_cpu(model: Any) -> None:
    """Pack the weights of tied heads again.

    On a CPU vLLM multiplies by a packed copy, and its reload does not make a new one for a head
    that shares the embedding's weight: the old head would go on sampling (vLLM 0.32).
    """
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def request_seed(seed: int, prompt: int, sample: int) -> int:
    """63 bits that depend on the three numbers alone."""
    digest = hashlib.blake2b(f"{seed}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Worker:
    """A vLLM engine and the requests that it answers: a method each, by its name."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def start(
        self,
        *,
        model: str,
        dtype: str,
        max_model_len: int,
        memory_share: float,
        enforce_eager: bool,
        can_sleep: bool,
        sender_gpu: int | None,
    ) -> dict[str, Any]:
        """Load the model with random weights: the trainer's follow."""
        on_cpu = sender_gpu is None
        self.sender_gpu = sender_gpu
        self.llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=dtype,
            max_model_len=max_model_len,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            weight_transfer_config={"backend": "tensors"},
            gpu_memory_utilization=memory_share,
            kv_cache_memory_bytes=CPU_CACHE_BYTES if on_cpu else None,
            enforce_eager=enforce_eager or on_cpu,
            enable_sleep_mode=can_sleep and not on_cpu,
            disable_log_stats=True,
        )
        self.llm.init_weight_transfer_engine({"init_info": {}})
        return {}

    def start_update(self) -> dict[str, Any]:
        self.llm.start_weight_update()
        return {}

    def tensor(self, *, payload: bytearray, name: str, bits: int, **packed: Any) -> dict[str, Any]:
        """Take one parameter; the sender may free it when this has returned."""
        tensor = unpack(packed, payload, self.sender_gpu)
        if tensor.is_cuda:
            tensor = tensor.to("cuda:0", copy=True)
        if bit_sum(tensor) != bits:
            raise ValueError(f"{name} arrived with other bits than were sent")
        self.llm.update_weights({"update_info": {"name": name, "tensor": tensor}})
        return {}

    def finish_update(self, *, version: str) -> dict[str, Any]:
        """The new weights are in use from here on; nothing computed with others is kept."""
        self.llm.finish_weight_update(version)
        self.llm.reset_prefix_cache()
        self.weights_bits = self._weights_bits()
        return {"version": self.llm.get_weight_version()}

    def sleep(self) -> dict[str, Any]:
        self.llm.sleep(level=1)
        return {}

    def wake(self) -> dict[str, Any]:
        self.llm.wake_up()
        if self._weights_bits() != self.weights_bits:
            raise ValueError("the weights changed while the engine slept")
        return {}

    def generate(
        self,
        *,
        prompts: list[list[int]],
        group_size: int,
        temperature: float,
        max_new_tokens: int,
        eos_token_ids: list[int],
        seed: int,
    ) -> tuple[dict[str, Any], bytes]:
        """Lengths, and token ids (int64) and log-probs (float32) of all completions in a row."""
        # What is cached of earlier calls must not decide how this one is computed.
        self.llm.reset_prefix_cache()
        parameters = [
            SamplingParams(
                temperature=temperature,
                seed=request_seed(seed, prompt, sample),
                max_tokens=max_new_tokens,
                stop_token_ids=eos_token_ids,
                ignore_eos=True,  # the model's own; those that count are given
                logprobs=0,  # of the sampled token alone
                flat_logprobs=True,
                detokenize=False,
            )
            for prompt in range(len(prompts))
            for sample in range(group_size)
        ]
        self.llm.enqueue(
            [{"prompt_token_ids": ids} for ids in prompts for _ in range(group_size)],
            parameters,
            use_tqdm=False,
        )
        return _completions(self._finish_requests())

    def _finish_requests(self) -> list[Any]:
        """All requests' outputs in order, with a sign of life every second."""
        outputs, said = [], time.monotonic()
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
            if time.monotonic() - said > SIGN_OF_LIFE_SECONDS:
                said = time.monotonic()
                send(self.connection, {"finished": len(outputs)})
        return [o.outputs[0] for o in sorted(outputs, key=lambda o: int(o.request_id))]

    def _weights_bits(self) -> list[int]:
        return self.llm.collective_rpc(_model_bits)


def _model_bits(worker: Any) -> int:
    return sum(bit_sum(p) for p in worker.get_model().parameters() if p.numel())


def _completions(outputs: Sequence[Any]) -> tuple[dict[str, Any], bytes]:
    ids = torch.tensor([token for output in outputs for token in output.token_ids])
    logps = torch.tensor([logp for output in outputs for logp in output.logprobs.logprobs])
    versions = {span.version for output in outputs for span in output.weight_versions}
    header = {
        "lengths": [len(output.token_ids) for output in outputs],
        "versions": sorted(versions),
    }
    return header, ids.numpy().tobytes() + logps.float().numpy().tobytes()


def _read_requests(connection: socket.socket, requests: queue.Queue[Any]) -> None:
    """Pass on what is received; when the trainer is gone, end, whatever vLLM is doing."""
    try:
        while True:
            requests.put(receive(connection))
    except (EOFError, OSError):
        os._exit(0)


def main() -> None:
    """Answer requests, one after the other, until the socket is closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    requests: queue.Queue[Any] = queue.Queue(maxsize=1)
    threading.Thread(target=_read_requests, args=(connection, requests), daemon=True).start()
    WeightTransferEngineFactory.register_engine("tensors", TensorTransfer)
    worker = Worker(connection)
    while True:
        header, payload = requests.get()
        if payload:
            header["payload"] = payload
        try:
            reply = getattr(worker, header.pop("do"))(**header)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        send(connection, *(reply if isinstance(reply, tuple) else (reply,)))


if __name__ == "__main__":
    main()
