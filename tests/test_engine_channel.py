"""What travels between trainer and sampling process arrives as it was, or not at all."""

import socket
import threading
from types import SimpleNamespace

import pytest
import torch

from fgrpo_train import engine_channel
from fgrpo_train.engine_channel import bit_sum, pack, receive, send, unpack


@pytest.fixture
def ends():
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (700, 900)])
def test_a_tensor_arrives_bit_for_bit(ends, dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    header, payload = pack(tensor)
    # More bytes than a socket holds, so somebody has to read meanwhile.
    sender = threading.Thread(target=send, args=(ends[0], {"name": "w"} | header, payload))
    sender.start()
    received, data = receive(ends[1])
    sender.join()
    assert received.pop("name") == "w"
    arrived = unpack(received, data, None)
    assert arrived.dtype == dtype and arrived.equal(tensor)
    assert bit_sum(arrived) == bit_sum(tensor)


def test_the_bit_sum_is_the_sum_of_the_bits():
    # 1.0 is 0x3f800000 in float32 and 0x3f80 in bfloat16, -0.0 the sign alone.
    assert bit_sum(torch.ones(2, 3)) == 6 * 0x3F800000
    assert bit_sum(torch.ones(4, dtype=torch.bfloat16)) == 4 * 0x3F80
    assert bit_sum(torch.tensor([0.0, -0.0])) == -(2**31)


def test_the_bit_sum_sees_one_bit_and_not_the_order():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    changed = weight.clone()
    changed[3, 4] = torch.nextafter(changed[3, 4], torch.tensor(10.0))
    assert bit_sum(changed) != bit_sum(weight)
    assert bit_sum(weight.t()) == bit_sum(weight.flip(0)) == bit_sum(weight)


def test_a_closed_end_is_an_end_of_file(ends):
    ends[0].sendall(b"half a len")
    ends[0].close()
    with pytest.raises(EOFError):
        receive(ends[1])


def test_whoever_waits_is_asked_whether_to_go_on(ends):
    def give_up():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        receive(ends[1], give_up)


def test_a_cuda_handle_survives_json(ends, monkeypatch):
    """The fields as torch orders them, made up: no GPU is here to make real ones."""
    fields = [
        torch.Tensor, torch.Size([2, 3]), (3, 1), 4, torch.storage.TypedStorage, torch.bfloat16, 7,
        b"\x00handle\xff", 4096, 512, False, b"counter\x80", 8, b"event", True,
    ]  # fmt: skip
    monkeypatch.setattr(engine_channel, "reduce_tensor", lambda tensor: (None, tuple(fields)))
    monkeypatch.setattr(engine_channel, "rebuild_cuda_tensor", lambda *rebuilt: rebuilt)
    tensor = SimpleNamespace(shape=torch.Size([2, 3]), dtype=torch.bfloat16, is_cuda=True)
    send(ends[0], *pack(tensor))
    rebuilt = list(unpack(*receive(ends[1]), gpu=1))
    assert rebuilt[6] == 1, "the sender's GPU has another number here"
    rebuilt[6] = 7
    assert [tuple(f) if isinstance(f, list) else f for f in rebuilt] == [
        tuple(f) if isinstance(f, torch.Size) else f for f in fields
    ]
