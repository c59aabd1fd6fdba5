"""What a training process and its sampling process say to one another, over a socket.

A message is a JSON header and raw bytes: nothing that is received is ever executed. A tensor on the
CPU travels as its bytes; one on a GPU stays there, and only its CUDA IPC handle travels.

    16 bytes: length of the header, length of the payload;  the header;  the payload
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_LENGTHS = struct.Struct("!QQ")
_POLL_SECONDS = 0.5
# The fields of rebuild_cuda_tensor that are bytes, and those that follow from the tensor's dtype.
_HANDLE_BYTES = (7, 11, 13)
_HANDLE_TYPES = {0: torch.Tensor, 4: torch.storage.TypedStorage}
_HANDLE_DTYPE, _HANDLE_DEVICE = 5, 6


def send(
    connection: socket.socket, header: dict[str, Any], payload: bytes | memoryview = b""
) -> None:
    """Send one message.

    Raises: OSError if the other end is closed, TimeoutError if it takes nothing for the socket's
        timeout.
    """
    text, body = json.dumps(header).encode(), memoryview(payload)
    connection.sendall(_LENGTHS.pack(len(text), body.nbytes) + text)
    if body.nbytes:
        connection.sendall(body)


def receive(
    connection: socket.socket, idle: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], bytearray]:
    """The next message; `idle` is called twice a second while there is nothing, and may raise.

    Raises: EOFError if the other end is closed.
    """
    lengths = _LENGTHS.unpack(_read(connection, _LENGTHS.size, idle))
    text, payload = (_read(connection, length, idle) for length in lengths)
    return json.loads(text), payload


def _read(connection: socket.socket, size: int, idle: Callable[[], None]) -> bytearray:
    data, filled = bytearray(size), 0
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while filled < size:
        if not poll.poll(1000 * _POLL_SECONDS):
            idle()
            continue
        received = connection.recv_into(memoryview(data)[filled:])
        if not received:
            raise EOFError("the other end is closed")
        filled += received
    return data


def bit_sum(tensor: Tensor) -> int:
    """The sum of the elements' bits, read as integers: equal only if all bits that arrived are.

    Two changes may cancel, but not by accident. int64, modulo 2^64; shape and order do not matter.
    """
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().reshape(-1).view(integer[tensor.element_size()])
    return int(bits.sum(dtype=torch.int64))


def pack(tensor: Tensor) -> tuple[dict[str, Any], bytes | memoryview]:
    """Header and payload of a tensor, which must live until the other end has answered."""
    header = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if tensor.is_cuda:
        _, fields = reduce_tensor(tensor)
        handle = [
            None if i in _HANDLE_TYPES or i == _HANDLE_DTYPE
            else field.hex() if i in _HANDLE_BYTES
            else list(field) if isinstance(field, tuple)
            else field
            for i, field in enumerate(fields)
        ]  # fmt: skip
        return header | {"cuda_handle": handle}, b""
    return header, tensor.reshape(-1).view(torch.uint8).numpy().data


def unpack(header: dict[str, Any], payload: bytearray, gpu: int | None) -> Tensor:
    """The tensor that was packed.

    Args:
        gpu: index, in this process, of the GPU that the sender's tensor is on; None on a CPU.
    """
    dtype = getattr(torch, header["dtype"])
    if gpu is None:
        return torch.frombuffer(payload, dtype=dtype).reshape(header["shape"])
    fields = list(header["cuda_handle"])
    for i in _HANDLE_BYTES:
        fields[i] = bytes.fromhex(fields[i])
    for i, cls in _HANDLE_TYPES.items():
        fields[i] = cls
    fields[_HANDLE_DTYPE], fields[_HANDLE_DEVICE] = dtype, gpu
    return rebuild_cuda_tensor(*fields)
