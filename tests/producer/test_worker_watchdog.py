"""On the test's own clock, a supervisor decides whether a worker hangs or grew, and which sample is to blame."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from penstock_producer.jobs import watchdog
from penstock_producer.jobs.task import readable_meta
from penstock_producer.jobs.watchdog import (
    ENOUGH,
    GROWN_S,
    LOOK_S,
    RIPE_S,
    CrashRecord,
    WorkerDeath,
    WorkerWatchdog,
    held_bytes,
    machine_bytes,
    memory_part,
    note_crash,
)


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        """Now."""
        return self.now


class Process:
    """Remembers what was done to it."""

    pid = 4711

    def __init__(self) -> None:
        self.done: list[str] = []

    def kill(self) -> None:
        """Ends it at once."""
        self.done.append("kill")

    def terminate(self) -> None:
        """Asks it to end."""
        self.done.append("terminate")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Give worker and supervisor the same clock."""
    clock = Clock()
    monkeypatch.setattr("penstock_producer.jobs.watchdog.time.monotonic", clock)
    return clock


@pytest.fixture
def process() -> Any:
    """A worker's."""
    return Process()


def test_a_sample_is_hung_when_its_limit_is_over_and_never_without_one(clock: Clock, process: Any) -> None:
    """A slow decoder is not a hung one; and only the sample's own time counts."""
    watched = WorkerWatchdog(None, clock)
    watched.current.begin(7, 0.0)
    clock.now += 1e6
    watched.look_after(process)
    watched.current.end()
    watched.current.begin(8, 60.0)
    clock.now += 59
    watched.look_after(process)
    assert process.done == []
    clock.now += 2
    watched.look_after(process)
    watched.look_after(process)
    assert process.done == ["kill"]
    death = watched.death("me", 4711, -signal.SIGKILL)
    assert death is not None
    assert (death.offset, death.deed, death.weight) == (
        8,
        "took its worker longer than 60 s (--sample-limit)",
        watchdog.HUNG,
    )


def test_a_grown_worker_ends_after_its_sample_and_one_that_cannot_is_killed(
    clock: Clock, process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leak is no fault of a sample. A sample that grows for ever must count as bad, or it is tried for ever."""
    monkeypatch.setattr(watchdog, "held_bytes", lambda pid: 2 << 30)
    watched = WorkerWatchdog(1 << 30, clock)
    watched.current.begin(3, 300.0)
    clock.now += RIPE_S - 1
    watched.look_after(process)
    assert process.done == []  # it must get some work done
    clock.now += 1 + LOOK_S
    watched.look_after(process)
    assert process.done == ["terminate"]
    innocent = WorkerWatchdog(1 << 30, clock)
    innocent._grown = watched._grown
    gentle = innocent.death("me", 4711, 0)
    assert gentle is not None
    assert (gentle.is_to_blame, gentle.weight) == (False, 0)
    clock.now += GROWN_S + 0.1
    watched.look_after(process)
    assert process.done == ["terminate", "kill"]
    harsh = watched.death("me", 4711, -signal.SIGKILL)
    assert harsh is not None
    assert (harsh.offset, harsh.deed) == (3, "grew its worker beyond 1024 MiB")
    assert harsh.weight > 0


@pytest.mark.parametrize(
    ("code", "deed", "tries"),
    [
        (-signal.SIGSEGV, "killed its worker by SIGSEGV", 3),
        (-signal.SIGKILL, "killed its worker by SIGKILL", 6),
        (3, "ended its worker with exit code 3", 3),
        (0, "ended its worker with exit code 0", 3),
        (-(signal.SIGRTMIN + 1), f"killed its worker by signal {signal.SIGRTMIN + 1}", 3),
    ],
)
def test_a_death_is_held_against_the_sample_that_was_made(clock: Clock, code: int, deed: str, tries: int) -> None:
    """And against no other, and not for ever: what others did before it was committed is forgotten."""
    meta: dict[str, Any] = {"at": 5, "suspects": {"2.0123abcd": [1, 2, "was long ago", "signed"]}}
    for tried in range(tries):
        watched = WorkerWatchdog(None, clock)
        watched.current.begin(9, 300.0)
        death = watched.death("me", 4711, code)
        assert death is not None
        note_crash(meta, replace(death, key=b"ours"), "job-0")
        note_crash(meta, replace(death, key=b"theirs"), "job-0")
        assert list(readable_meta(json.dumps(meta).encode())) == ["at", "suspects"]
        (found,) = CrashRecord.of(meta, "job-0", b"ours").items()
        assert found == (9, CrashRecord(tried + 1, death.weight * (tried + 1), deed))
        assert found[1].is_enough == (tried + 1 == tries)
    assert CrashRecord.of(meta, "job-1", b"ours") == CrashRecord.of(meta, "job-0", b"another") == {}
    assert str(CrashRecord(3, ENOUGH, deed)) == f"{deed}, 3 times"


def test_a_worker_that_had_nothing_more_to_do_did_not_die(clock: Clock) -> None:
    """In a burst each worker ends normally, and none is replaced."""
    watched = WorkerWatchdog(None, clock)
    watched.current.begin(9, 300.0)
    watched.current.end()
    assert watched.death("me", 4711, 0) is None
    crashed = watched.death("me", 4711, -signal.SIGSEGV)
    assert crashed is not None
    assert crashed.offset is None
    meta: dict[str, Any] = {}
    note_crash(meta, WorkerDeath("me", "stopped"), "job-0")
    note_crash(meta, crashed, "job-0")
    assert meta == {}


def test_workers_share_most_of_the_memory_there_is() -> None:
    """Their parts together must fit the machine, and each must be more than a worker that has done nothing."""
    memory = machine_bytes()
    part = memory_part(2)
    assert memory is not None
    assert part is not None
    assert held_bytes(os.getpid()) > 1 << 20
    assert 1 << 28 < 2 * part < memory
    assert held_bytes(1 << 30) == 0  # nobody
