"""A producer, a server and trainers on hosts of their own: packets are lost, and links are cut, both ways or one way.

Each test counts every sample. They need root and Linux, and are skipped by name elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from chaos.networks import Network, why_not
from penstock_common.explain.monitor import StreamMonitor
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Tuning
from penstock_producer.write.writer import Writer
from tests.clusters import until
from tests.contracts.fork_server import ROOT
from tests.contracts.processes import Child
from tests.journeys.trouble import SAMPLE_BYTES, SPEC, Lines, all_samples, require_clean, train, trained, write

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

SERVER, PRODUCER, TRAINER, OTHER = HOSTS = ("server", "producer", "trainer", "other")
CUT_S = 6.0
PROMISED_S, LATE_S = 5.0, 1.5
"""The time in which a wait is explained, and how late a test on a busy machine may see it."""
LEASE_S = "30"
"""Longer than any fault here, so that no member loses what it holds."""


class Started(Child):
    """A process of a new Python, because a fork server has the network of the host that started it."""

    def _started(self, call: list[str], errors: IO[str]) -> subprocess.Popen[str]:
        run = "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*sys.argv[3:])"
        return subprocess.Popen(
            [sys.executable, "-u", "-c", run, *call], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        )


class World:
    """One process on each host, and the samples that the trainers printed."""

    def __init__(self, network: Network, server: EmbeddedServer, stack: ExitStack) -> None:
        self.network, self._stack = network, stack
        self.url = server.url.replace("127.0.0.1", network.address(SERVER))
        self.trainers: list[Lines] = []

    def begin(self, count: int, pause_s: float) -> None:
        """Start a trainer on each of two hosts, and the writer of one epoch once both have joined."""
        self.count = count
        with self.network.inside(SERVER), connect(self.url) as client:
            with Writer("t", url=self.url, spec=SPEC, tuning=Tuning(block_bytes=4 * SAMPLE_BYTES)):
                pass
            self.trainers = [self._on(host, train, self.url, host, 1, LEASE_S) for host in (TRAINER, OTHER)]
            monitor = StreamMonitor(client, "t")
            until(lambda: sum(len(group.members) for group in monitor.snapshot().groups) == 2)
        self.writer = self._on(PRODUCER, write, self.url, count, pause_s)
        for one in self.trainers:
            one.until(1)

    def _on(self, host: str, function: Callable[..., None], *arguments: object) -> Lines:
        with self.network.inside(host):
            child = Started(function, *arguments)
        self._stack.callback(child.close)
        return Lines(child)

    def end(self) -> None:
        """Require that every sample was trained on once, and that the audit is clean."""
        assert self.writer.end() == "done", self.writer.child.errors()
        assert [one.end() for one in self.trainers] == ["done", "done"], self.trainers[0].lines[-1]
        found = trained([line for one in self.trainers for line in one.lines])
        assert set(found) == all_samples(self.count)
        assert max(found.values()) == 1
        with self.network.inside(SERVER):
            require_clean(self.url)

    def require_explained(self, ones: list[Lines]) -> None:
        """Require that all of these say in time that the server does not answer."""
        began = time.monotonic()
        address = self.network.address(SERVER)
        while not all(f"waiting: no answer from redis://{address}" in one.child.errors() for one in ones):
            assert time.monotonic() - began < PROMISED_S + LATE_S, [one.child.errors() for one in ones]
            time.sleep(0.02)


@pytest.fixture
def world() -> Iterator[World]:
    """Yield hosts with a server on one of them."""
    with Network(*HOSTS) as network, ExitStack() as stack:
        with network.inside(SERVER):
            server = stack.enter_context(EmbeddedServer(extra={"bind": "0.0.0.0"}))
        yield World(network, server, stack)


def test_with_one_packet_in_a_hundred_lost_every_sample_arrives_once(world: World) -> None:
    """TCP sends lost packets again. Nothing may depend on answers that come at once."""
    for host in (PRODUCER, TRAINER, OTHER):
        world.network.lose(host, 0.01)
    world.begin(800, 0.01)
    world.end()
    assert sum(map(world.network.lost, HOSTS)) > 0


def test_a_trainer_whose_link_is_cut_says_so_and_goes_on(world: World) -> None:
    """A user looks at the trainer first, which must say that its server is out of reach."""
    world.begin(280, 0.08)
    world.network.cut(TRAINER)
    began, before = time.monotonic(), len(world.trainers[1].lines)
    world.require_explained(world.trainers[:1])
    time.sleep(max(0.0, CUT_S - (time.monotonic() - began)))
    world.network.heal(TRAINER)
    assert "waiting: no answer" not in world.trainers[1].child.errors()
    assert len(world.trainers[1].lines) > before  # the other host did not wait for it
    world.end()


def test_a_producer_that_hears_no_answers_writes_every_sample_once(world: World) -> None:
    """Its commits arrive and their answers do not. To send them again without a look would duplicate them."""
    world.begin(240, 0.08)
    world.network.cut(PRODUCER, "in")
    world.require_explained([world.writer])
    world.network.heal(PRODUCER)
    world.end()


@pytest.mark.parametrize("fault", ["unplug", pytest.param("cut", marks=pytest.mark.slow)])
def test_a_server_that_nobody_reaches_is_named_by_all_and_loses_nothing(world: World, fault: str) -> None:
    """All members come back at once, and none may take another for dead."""
    world.begin(240, 0.08)
    getattr(world.network, fault)(SERVER)
    world.require_explained([world.writer, *world.trainers])
    world.network.heal(SERVER)
    world.end()


def test_namespaces_of_a_dead_process_are_removed_at_the_next_start() -> None:
    """A test run that was killed must leave nothing on the machine for ever."""
    made = "from chaos.networks import Network; n = Network('a', 'b'); print('there', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", made], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        left = [path for path in Path("/run/netns").iterdir() if f"-{process.pid}-" in path.name]
        process.kill()
    assert len(left) == 3
    with Network("a") as network:
        assert not any(path.exists() for path in left)
        assert Path("/run/netns", f"penstock-{os.getpid()}").parent.is_dir()
        with network.inside("a"):
            inside = Path("/proc/thread-self/ns/net").readlink()
        assert inside != Path("/proc/thread-self/ns/net").readlink()
    assert not [path for path in Path("/run/netns").iterdir() if f"-{os.getpid()}-" in path.name]
