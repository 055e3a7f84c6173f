"""Runs histories one after the other, and shrinks the first that breaks a promise."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import redis

from penstock_common.errors import PenstockError
from penstock_common.segments.folder import INLINE
from penstock_common.stream.servers.embedded import EmbeddedServer
from tests.clusters import until
from tests.histories.replicas import Answers
from tests.histories.settle import settle
from tests.histories.shrink import shrunk
from tests.histories.step import History, drawn
from tests.histories.world import Arena, Violation, World


@dataclass(frozen=True, slots=True)
class Found:
    """A history that breaks a promise."""

    seed: int
    history: History
    violation: Violation


@contextmanager
def arena(durability: str = "memory", *, has_segments: bool = False) -> Iterator[Arena]:
    """Yield a server of its own on a Unix socket, with a replica if the durability of the stream needs one.

    With ``has_segments`` payloads are in files.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, ExitStack() as stack:
        socket = Path(folder) / "socket"
        settings = {
            "unixsocket": str(socket),
            "hz": "500",  # blocked requests end in time
            "repl-diskless-sync-delay": "0",
        }
        with EmbeddedServer(extra=settings) as server:
            login = server.url.partition("://")[2].rpartition("@")[0]
            if durability != "memory":
                follow = {"replicaof": f"127.0.0.1 {server.port}", "masterauth": server.password}
                stack.enter_context(EmbeddedServer(extra=follow))
                with redis.Redis.from_url(server.url) as client:
                    until(lambda: client.info("replication").get("slave0", {}).get("state") == "online")
            payload = f"segments:{folder}" if has_segments else INLINE
            place = Arena(f"unix://{login}@{socket}" if login else f"unix://{socket}", durability, payload)
            yield place
            place.close()


def violation_of(place: Arena, history: History) -> Violation | None:
    """Run a history, and return the first promise that it breaks, or None."""
    world = World(place)
    with world.interrupts.installed(), Answers(world.replicated).followed() if place.is_durable else nullcontext():
        try:
            world.run(history)
            if not world.violations:
                settle(world)
        finally:
            for who in [*world.producers, *world.trainers]:
                with suppress(PenstockError):
                    world.end(who)
            world.operator.close()
    return world.violations[0] if world.violations else None


def search(
    place: Arena, seed: int, *, histories: int | None = None, minutes: float | None = None, theme: str = ""
) -> tuple[Found | None, int]:
    """Run random histories from a seed on. Return the first that fails, shrunk, and the number of histories.

    Args:
        place: Where they run.
        seed: The seed of the first history. Each next one has the next seed.
        histories: The most histories.
        minutes: The longest time.
        theme: The theme of all histories; '' lets each seed choose.
    """
    ends, number = time.monotonic() + (minutes or 1e9) * 60, 0
    while (histories is None or number < histories) and time.monotonic() < ends:
        history = drawn(seed + number, theme)
        number += 1
        if (found := shortest_of(place, seed + number - 1, history)) is not None:
            return found, number
    return None, number


def shortest_of(place: Arena, seed: int, history: History) -> Found | None:
    """Run a history, and return the shortest one that breaks the same promise, or None if it breaks none."""
    first = violation_of(place, history)
    if first is None:
        return None

    def fails(one: History) -> bool:
        violation = violation_of(place, one)
        return violation is not None and violation.kind == first.kind

    history = shrunk(history, fails)
    violation = violation_of(place, history)
    assert violation is not None, "the same history fails each time"
    return Found(seed, history, violation)
