"""A gateway as a process, and a client of it that decodes batches with Penstock's own decoder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import unpack_from
from typing import Any, Self

import numpy as np
from websockets.sync.client import ClientConnection, connect

import penstock
from penstock_common.wire.block import Block
from penstock_common.wire.codec import decode
from penstock_common.wire.header import Header
from penstock_common.wire.spec import Spec

ROOT = Path(penstock.__file__).parents[2]
PATHS = os.pathsep.join(str(ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
GROUP = "train/resnet"
SAMPLES = 120
SMALL = ("--ahead", "1kb")
"""Nearly nothing is read ahead, so that the members share even a small epoch."""

Identity = tuple[int, int, int]
Entry = tuple[Header, Block]


class GatewayProcess:
    """`penstock gateway` on a free port."""

    def __init__(self, url: str, *arguments: str) -> None:
        command = [
            sys.executable,
            "-m",
            "penstock",
            "gateway",
            "--port",
            "0",
            "--json",
            "--url",
            url,
            *SMALL,
            *arguments,
        ]
        env = {**os.environ, "PYTHONPATH": PATHS}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("\n}\n"):
            line = self.process.stdout.readline()
            if not line:
                raise AssertionError(self.process.communicate()[1])
            text += line
        facts = json.loads(text)
        self.url: str = facts["url"]
        self.tokens: list[str] = [one["token"] for one in facts["tokens"]]
        self.token = self.tokens[0] if self.tokens else ""
        self.said = ""

    @property
    def http_url(self) -> str:
        """Return its address for HTTP."""
        return self.url.replace("ws", "http", 1)

    def client(self, **options: Any) -> GatewayClient:
        """Return a client that has shown the token."""
        return GatewayClient(self.url, self.token, **options)

    def kill(self) -> None:
        """End it at once, without a chance to say good-bye."""
        self.process.kill()
        self.said = self.process.communicate()[1]

    def hears(self, words: str) -> str:
        """Return the next line on stderr with these words."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if words in line:
                return line
        raise AssertionError(f"it ended without {words!r}")

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it as an operator does, and return its exit code."""
        self.process.send_signal(number)
        self.said = self.process.communicate(timeout=30)[1]
        return self.process.returncode


@contextmanager
def gateway_for(url: str, *arguments: str) -> Iterator[GatewayProcess]:
    """Yield a gateway for `GROUP`, and end it."""
    gateway = GatewayProcess(url, *(arguments or (GROUP,)))
    try:
        yield gateway
    finally:
        if gateway.process.poll() is None:
            gateway.end()


class GatewayClient:
    """A client over WebSocket that grants one credit at a time."""

    def __init__(self, url: str, token: str, *, batch_size: int = 4, credits: int = 1) -> None:
        self.socket = raw(url)
        self._early: deque[tuple[int, list[Entry]]] = deque()
        """The batches that came before an answer."""
        self.send(type="open", token=token, stream="train", group="resnet", batch_size=batch_size)
        self.facts = self.told()
        self.spec = Spec.from_json(json.loads(self.facts["spec"]))
        self.send(type="credits", batches=credits)
        self.send(type="epoch")

    def send(self, **message: Any) -> None:
        """Send a message."""
        self.socket.send(json.dumps(message))

    def receive(self) -> dict[str, Any] | tuple[int, list[Entry]]:
        """Return the next message that is no notice: JSON, or a batch's number and blocks."""
        while True:
            found = self.socket.recv(timeout=60)
            if isinstance(found, bytes):
                return decoded(found, self.spec)
            if (told := json.loads(found))["type"] != "notice":
                return dict(told)

    def told(self) -> dict[str, Any]:
        """Return the next message, which is JSON."""
        return told(self.socket)

    def batch(self) -> tuple[int, list[Entry]] | None:
        """Return the next batch, or None at the end of the epoch."""
        found = self._early.popleft() if self._early else self.receive()
        if isinstance(found, dict):
            assert found["type"] == "end", found
            return None
        return found

    def acknowledge(self, number: int) -> None:
        """Acknowledge a batch, allow the next one, and wait for the answer."""
        self.send(type="ack", batches=[number])
        while not isinstance(found := self.receive(), dict):
            self._early.append(found)
        assert found == {"type": "acked", "batches": [number]}
        self.send(type="credits", batches=1)

    def read(self) -> list[Identity]:
        """Read the epoch to its end, acknowledge each batch, and return the identities of the samples."""
        seen: list[Identity] = []
        while (found := self.batch()) is not None:
            number, blocks = found
            seen += identities(blocks)
            self.acknowledge(number)
        return seen

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def told(socket: ClientConnection) -> dict[str, Any]:
    """Return the next JSON that is no notice."""
    while (found := json.loads(socket.recv(timeout=60)))["type"] == "notice":
        pass
    assert isinstance(found, dict)
    return found


def raw(url: str, **options: Any) -> ClientConnection:
    """Return a connection that has sent nothing."""
    connection: ClientConnection = connect(f"{url}/v1/read", max_size=None, compression=None, **options).__enter__()
    return connection


def decoded(message: bytes, spec: Spec) -> tuple[int, list[Entry]]:
    """Return the number and the entries of a batch, verified by their checksums; see docs/gateway-messages.md."""
    assert message[:4] == b"PSB1"
    (number,) = unpack_from("<I", message, 4)
    at, entries = 8, list[list[tuple[bytes, bytes]]]()
    while at < len(message):
        name_bytes, value_bytes = unpack_from("<II", message, at)
        at += 8
        name = message[at : at + name_bytes]
        at += name_bytes + -name_bytes % 8
        value = message[at : at + value_bytes]
        at += value_bytes + -value_bytes % 8
        if name == b"meta":
            entries.append([])
        entries[-1].append((name, value))
    return number, [decode(fields, spec) for fields in entries]


def identities(entries: list[Entry]) -> list[Identity]:
    """Return the identity of each sample, and check that its tensors are those of `write_train`."""
    seen = []
    for header, block in entries:
        x, label = block.columns
        assert label.shapes is not None
        texts = np.split(label.values, np.cumsum(label.shapes[:-1, 0]))
        for row, offset in enumerate(block.offsets().tolist()):
            assert (x.values[row] == offset).all(), "the pixels of a sample are its offset"
            assert texts[row].tobytes() == label_of(offset)
            seen.append((header.epoch, header.shard, offset))
    return seen


def label_of(offset: int) -> bytes:
    """Return a label whose length depends on the sample."""
    return b"label" * (offset % 3)


def write_train(
    url: str, *, samples: int = SAMPLES, epochs: int = 1, side: int = 16, compression: str | None = None
) -> list[Identity]:
    """Write epochs of two shards of fixed and ragged tensors, and return the identities of their samples."""
    spec = {"x": ("float32", (side, side)), "label": ("bytes", ())}
    half = samples // 2
    tuning = penstock.Tuning(block_bytes=8000, compression=compression)
    with penstock.Writer("train", url=url, spec=spec, tuning=tuning) as writer:
        for _ in range(epochs):
            with writer.epoch(sizes=[half, half]) as epoch:
                for number in range(2):
                    with epoch.shard(number) as shard:
                        for offset in range(half):
                            shard.write({"x": np.full((side, side), offset, np.float32), "label": label_of(offset)})
    return [(epoch, shard, offset) for epoch in range(epochs) for shard in range(2) for offset in range(half)]
