"""A stand-in for the sampling process that does as told at one request: REQUEST WHAT FD.

It speaks the bytes of the channel by itself, without torch, so that it starts at once.
"""

import json
import os
import signal
import socket
import struct
import sys
import time

connection = socket.socket(fileno=int(sys.argv[3]))
request, what = sys.argv[1:3]
print("vLLM would say this", flush=True)


def read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            sys.exit()
        data += part
    return data


def reply(header: dict[str, object]) -> None:
    text = json.dumps(header).encode()
    connection.sendall(struct.pack("!QQ", len(text), 0) + text)


while True:
    text_size, payload_size = struct.unpack("!QQ", read(16))
    header = json.loads(read(text_size))
    read(payload_size)
    if header["do"] == request:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "exits":
            sys.exit(7)
        elif what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "slow but alive":
            for finished in range(5):
                time.sleep(0.7)
                reply({"finished": finished})
        elif what == "slow but logging":
            for _ in range(5):
                time.sleep(0.7)
                print("loading", flush=True)
        elif what == "old version":
            header["version"] = "0"
    reply({"version": header.get("version"), "versions": ["0"], "lengths": []})
