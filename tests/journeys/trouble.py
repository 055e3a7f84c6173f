"""A writer and trainers as processes of their own, for tests that make trouble for the server between them.

Identities are verified from the payload: every value of a sample follows from its epoch and number.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import numpy as np

from penstock_common.errors import PenstockError
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import Writer
from tests.contracts.processes import Child

SPEC = {"x": ("uint32", (64,)), "epoch": ("int64", ()), "y": ("int64", ())}
SAMPLE_BYTES = 272
BATCH = 5


def payload(epoch: int, number: int) -> np.ndarray:
    """The values by which a sample is known."""
    return np.random.default_rng([epoch, number]).integers(0, 1 << 32, 64, dtype=np.uint32)


def write(url: str, count: str, pause_s: str = "0.002", epochs: str = "1", outage_s: str = "60") -> None:
    """A producer: epochs of one shard each, from wherever they stand; prints how far it is, and how it ended."""
    _bear_outages_for(float(outage_s))
    try:
        with Writer("t", url=url, spec=SPEC, tuning=Tuning(block_bytes=4 * SAMPLE_BYTES)) as writer:
            for epoch in range(int(epochs)):
                # samples follow from their numbers, which is what a fingerprint says
                with writer.epoch(epoch, sizes=[int(count)], fingerprint="numbers").shard(0) as shard:
                    while shard.position < int(count):
                        number = shard.position
                        shard.write({"x": payload(epoch, number), "epoch": epoch, "y": number})
                        if number % 4 == 3:
                            print(f"wrote {epoch} {number}", flush=True)
                            time.sleep(float(pause_s))
        print("done", flush=True)
    except PenstockError as error:
        print(f"ended {type(error).__name__}: {error}", flush=True)


def train(url: str, member: str = "m", epochs: str = "1", lease_s: str = "2", outage_s: str = "60") -> None:
    """A trainer: prints ``epoch:number`` of each batch's samples after its step, and how it ended."""
    _bear_outages_for(float(outage_s))
    try:
        with Loader(
            "t",
            group="g",
            batch_size=BATCH,
            url=url,
            tuning=Tuning(member=member, lease_s=float(lease_s), prefetch_bytes=40_000),
        ) as loader:
            for _ in range(int(epochs)):
                for batch in loader:
                    names = list(zip(batch["epoch"].tolist(), batch["y"].tolist(), strict=True))
                    for row, (epoch, number) in enumerate(names):
                        assert np.array_equal(batch["x"][row], payload(epoch, number)), (epoch, number)
                    print(*(f"{epoch}:{number}" for epoch, number in names), flush=True)
        print("done", flush=True)
    except PenstockError as error:
        print(f"ended {type(error).__name__}: {error}", flush=True)


def _bear_outages_for(seconds: float) -> None:
    for module in list(sys.modules.values()):
        if hasattr(module, "OUTAGE_S"):
            setattr(module, "OUTAGE_S", seconds)  # noqa: B010  no type checker knows which modules


def trained(lines: list[str]) -> Counter[tuple[int, int]]:
    """(epoch, number) -> how often it was trained on, from what trainers printed."""
    words = [word for line in lines if line[:1].isdigit() for word in line.split()]
    return Counter((int(epoch), int(number)) for epoch, _, number in (word.partition(":") for word in words))


def all_samples(count: int, epochs: int = 1) -> set[tuple[int, int]]:
    """Return all samples that must have been trained on."""
    return {(epoch, number) for epoch in range(epochs) for number in range(count)}


def require_clean(url: str) -> None:
    """The audit finds nothing lost, nothing twice, nothing owed."""
    with connect(url) as client:
        report = audit_stream(client, "t")
    assert report.is_clean, report
    assert not report.pending
    assert not report.unread


def until(child: Child, lines: list[str], wanted: Callable[[str], bool]) -> str:
    """Reads on until a line is as wanted."""
    while True:
        line = child.line()
        assert line, child.errors()
        lines.append(line)
        if wanted(line):
            return line


class Lines:
    """Reads a process' lines in a thread, so that it never waits for its reader."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while line := self.child.line():
            self.lines.append(line)

    def until(self, enough: int, timeout_s: float = 60) -> None:
        """Return once ``enough`` lines were printed."""
        deadline = time.monotonic() + timeout_s
        while len(self.lines) < enough:
            assert time.monotonic() < deadline, (self.lines[-3:], self.child.errors())
            time.sleep(0.01)

    def end(self, timeout_s: float = 90) -> str:
        """Waits for the end of the process; its last line."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), (self.lines[-3:], self.child.errors())
        return self.lines[-1] if self.lines else self.child.errors()


def at_port(url: str, port: int) -> str:
    """Return the URL of another port of the same host, with the same login."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{port}").geturl()


@contextmanager
def stopped(server: EmbeddedServer) -> Iterator[None]:
    """The server's process stands still; connections to it are taken by the kernel."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


class CuttingProxy:
    """A TCP proxy to a server that cuts connections after a random number of bytes, in either direction."""

    def __init__(self, url: str, seed: int, longest: int, first: int | None = None) -> None:
        """``first``: after how many bytes of its client's the first connection is cut."""
        self._target, self._random = urlsplit(url).port or 0, random.Random(seed)
        self._longest, self._first = longest, first
        self._lock = threading.Lock()
        self.cuts = {"up": 0, "down": 0}
        self.calm = False
        """From now on nothing is cut any more."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = at_port(url, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No further connection is taken."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with self._lock:
            way = self._random.choice(["up", "down"])
            after = self._random.randrange(200, self._longest)
            if self._first is not None:
                way, after, self._first = "up", self._first, None
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            ways = [("up", client, server), ("down", server, client)]
            limits = [after if name == way else None for name, _, _ in ways]
            pumps = [
                threading.Thread(target=self._pass_on, args=(*one, limit), daemon=True)
                for one, limit in zip(ways, limits, strict=True)
            ]
            for pump in pumps:
                pump.start()
            for pump in pumps:
                pump.join()

    def _pass_on(self, name: str, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if limit is not None and passed + len(data) > limit and not self.calm:
                    sink.sendall(data[: limit - passed])  # in the middle of whatever this is
                    self.cuts[name] += 1
                    break
                sink.sendall(data)
                passed += len(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class StandingProxy:
    """A TCP proxy to a server that stops before it forwards one of its answers, until the test continues it."""

    def __init__(self, url: str, answers: int) -> None:
        """``answers``: pieces of answers that are passed on before it stands still."""
        self._target, self._left = urlsplit(url).port or 0, answers
        self._lock = threading.Lock()
        self.stood_s: float | None = None
        """When it came to a stand."""
        self._goes_on = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = at_port(url, port)
        self.where = f"redis://127.0.0.1:{port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def go_on(self) -> None:
        """From now on everything is passed on."""
        self._goes_on.set()

    def close(self) -> None:
        """No further connection is taken."""
        self.go_on()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> StandingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            ways = [(client, server, False), (server, client, True)]
            pumps = [threading.Thread(target=self._pass_on, args=way, daemon=True) for way in ways]
            for pump in pumps:
                pump.start()
            for pump in pumps:
                pump.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket, are_answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if are_answers:
                    self._stand()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _stand(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0 and self.stood_s is None:
                self.stood_s = time.monotonic()
        if self.stood_s is not None:
            self._goes_on.wait()
