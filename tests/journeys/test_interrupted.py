"""Ctrl-C on a training: it ends at once, as Python programs do, whatever it was waiting for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SPEC, produce, sample
from tests.contracts.processes import Child, child

AT_ONCE_S = 1.0
"""The time that a user takes for immediate."""
SAMPLES = 4000
HOW = ["waiting", "stepping", "server killed", "server stopped"]


def train(url: str, kind: str, is_closed: str) -> None:
    """Prints a line for each batch, at a pace; in a ``with``, or as people write it."""
    loader: Loader | Replay
    if kind == "replay":
        loader = Replay("t", epoch=0, batch_size=4, url=url, tuning=Tuning(prefetch_bytes=500))
    else:
        order = "canonical" if kind == "ordered" else None
        loader = Loader("t", group="g", batch_size=4, url=url, order=order, tuning=Tuning(prefetch_bytes=500))  # type: ignore[arg-type]
    with loader if is_closed == "closed" else nullcontext():
        for _ in loader:
            print("batch", flush=True)
            time.sleep(0.01)


def leave(url: str, acknowledges: str) -> None:
    """Print a line before and after a loader is closed, whose last batch is to be acknowledged or is not."""
    loader = Loader("t", group="g", batch_size=4, url=url, acknowledge=acknowledges)  # type: ignore[arg-type]
    for _ in loader:
        break
    print("batch", flush=True)
    time.sleep(2)  # meanwhile the server is stopped
    loader.close()
    print("closed", flush=True)


def idle() -> None:
    """Do nothing, to measure what Python itself needs to end with the same modules."""
    print("batch", flush=True)
    time.sleep(60)


def require_at_once(took: float) -> None:
    """On a machine that is busy with other things everything takes its time: three times what Python alone does, and
    as much longer as there are processes that wait for a processor.
    """
    at_once_s = AT_ONCE_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    if took < at_once_s:
        return
    with child(idle) as other:
        read_lines(other, 1)
        began = time.monotonic()
        other.interrupt()
        other.finish()
        assert took < at_once_s + 3 * (time.monotonic() - began), took


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """One to be killed."""
    with EmbeddedServer() as one:
        yield one


def read_lines(training: Child, count: int) -> None:
    """Returns once it has printed so many."""
    for _ in range(count):
        assert training.line() == "batch", training.errors()


def make_trouble(server: EmbeddedServer, how: str) -> None:
    """Bring the training into the state in which it is interrupted."""
    if how == "server killed":
        server.kill()
    elif how == "server stopped":
        os.kill(server.pid, signal.SIGSTOP)
    if how != "stepping":
        time.sleep(1)  # what it then waits for is the test's subject


def seconds_to_end(server: EmbeddedServer, kind: str, is_closed: str, how: str) -> float:
    """From Ctrl-C to the end of the process, which must be the end that Python gives it."""
    with child(train, server.url, kind, is_closed) as training:
        read_lines(training, 10)
        try:
            make_trouble(server, how)
            began = time.monotonic()
            training.interrupt()
            training.finish()
            took = time.monotonic() - began
        finally:
            if how == "server stopped":
                os.kill(server.pid, signal.SIGCONT)
        said = [line for line in training.errors().splitlines() if not line.startswith("penstock: left ")]
        assert said[-1] == "KeyboardInterrupt"
        assert training.process.returncode == -signal.SIGINT
    return took


@pytest.mark.parametrize(
    ("kind", "is_closed", "how"),
    [
        *(("shared", "closed", how) for how in HOW),
        *(("shared", "open", how) for how in ("waiting", "stepping", "server stopped")),
        *(("ordered", "closed", how) for how in ("waiting", "server killed")),
        *(("replay", is_closed, how) for is_closed in ("closed", "open") for how in ("stepping", "server stopped")),
    ],
)
def test_an_interrupted_training_ends_at_once(server: EmbeddedServer, kind: str, is_closed: str, how: str) -> None:
    """A training that has to be killed with -9 leaves its leases, and its user, behind."""
    if how == "waiting":
        with Writer("t", url=server.url, spec=SPEC, tuning=Tuning(block_bytes=240, notify=lambda _: None)) as writer:
            epoch = writer.epoch()
            for number in range(40):
                epoch.write(sample(number))
            epoch.flush()
            require_at_once(seconds_to_end(server, kind, is_closed, how))
        return
    produce(server.url, "t", SAMPLES)
    require_at_once(seconds_to_end(server, kind, is_closed, how))


def test_an_interrupted_close_ends_at_once(server: EmbeddedServer) -> None:
    """It gave the silent server another 16 s to hear that the loader leaves, after Ctrl-C."""
    produce(server.url, "t", SAMPLES)
    with child(leave, server.url, "on_next") as training:
        read_lines(training, 1)
        try:
            os.kill(server.pid, signal.SIGSTOP)
            time.sleep(4)
            began = time.monotonic()
            training.interrupt()
            training.finish()
            require_at_once(time.monotonic() - began)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert training.process.returncode == -signal.SIGINT


def test_a_close_without_acknowledgements_waits_5_s_for_a_silent_server(server: EmbeddedServer) -> None:
    """It took 16 s: two tries to leave and one to take a report back, of 5 s each."""
    produce(server.url, "t", SAMPLES)
    with child(leave, server.url, "manual") as training:
        read_lines(training, 1)
        try:
            os.kill(server.pid, signal.SIGSTOP)
            began = time.monotonic()
            assert training.line() == "closed"
            assert time.monotonic() - began < 2 + 5 + 3
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_one_that_waits_for_a_stream_ends_at_once(server: EmbeddedServer) -> None:
    """A user who mistyped the name presses Ctrl-C."""
    with child(train, server.url, "shared", "closed") as training:
        deadline = time.monotonic() + 60
        while "waiting: " not in training.errors():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        began = time.monotonic()
        training.interrupt()
        training.finish()
        require_at_once(time.monotonic() - began)
        assert training.errors().splitlines()[-1] == "KeyboardInterrupt"
