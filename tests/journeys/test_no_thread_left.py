"""No thread of Penstock outlives what it was for, and none keeps a program from ending, however it ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import penstock
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.reported_rates import RateReporter
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_consumer.stages.queue import PrefetchQueue
from tests.contracts.feed import open_stream, produce
from tests.contracts.processes import child
from tests.tuned import tuned

SAMPLES = 4000
BATCH = 8
END_S = 20.0
"""An end that hangs, hangs for longer; a busy machine needs some seconds to end a process."""


def opened(url: str, kind: str, **settings: Any) -> Any:
    """A way of reading, with a queue too small for the epoch: its thread always has something left to do."""
    settings = {"batch_size": BATCH, "url": url, "prefetch_bytes": 1000, "notify": _silent, **settings}
    if kind == "replay":
        return Replay("t", epoch=0, **tuned("Replay", settings))
    if kind == "mixture":
        return penstock.mix({name: (Loader("t", group=name, **tuned("Loader", settings)), 1.0) for name in "ab"})
    order: Any = "canonical" if kind == "ordered" else None
    return Loader("t", group="g", order=order, **tuned("Loader", settings))


def _silent(_: str) -> None:
    pass


def threads() -> set[str]:
    """Those of a reader, by name."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-")}


KINDS = ["shared", "ordered", "replay", "mixture"]


@pytest.fixture
def before() -> set[str]:
    """Threads of fixtures that are shared by all tests."""
    return threads()


def require_none_beyond(before: set[str]) -> None:
    """A thread that must end has ended within moments."""
    deadline = time.monotonic() + END_S
    while left := threads() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_leaves_no_thread(any_url: str, kind: str, before: set[str]) -> None:
    """Cover the middle of an epoch, an error in the loop, and an unused object that was never closed."""
    produce(any_url, "t", SAMPLES)
    with opened(any_url, kind) as loader:
        next(iter(loader))
        assert threads() - before
    require_none_beyond(before)
    with suppress(ZeroDivisionError), opened(any_url, kind) as loader:
        for _ in loader:
            raise ZeroDivisionError
    require_none_beyond(before)
    loader = opened(any_url, kind)
    batches = iter(loader)
    next(batches)
    del batches, loader
    require_none_beyond(before)


class Cycle:
    """Keep an object in a reference cycle, so that only the garbage collector can free it."""

    def __init__(self, held: Any) -> None:
        self.held, self.itself = held, self


@contextmanager
def collected_in(thread: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a thread of this name, and no other thread, collect the garbage of the block."""
    is_due, is_done = threading.Event(), threading.Event()

    def collecting(method: Any) -> Any:
        def called(*arguments: Any) -> Any:
            if is_due.is_set() and threading.current_thread().name == thread and not is_done.is_set():
                gc.collect()
                is_done.set()
            return method(*arguments)

        return called

    for owner, name in (
        (PrefetchQueue, "wait_for_space"),
        (RateReporter, "report"),
    ):  # each thread comes by one of them all the time
        monkeypatch.setattr(owner, name, collecting(getattr(owner, name)))
    gc.collect()
    gc.disable()
    try:
        yield
        is_due.set()
        assert is_done.wait(END_S)
    finally:
        gc.enable()


@pytest.mark.parametrize("thread", ["penstock-reader", "penstock-heartbeat-g"])
@pytest.mark.parametrize("kind", ["shared", "ordered"])
def test_a_loader_that_its_own_thread_collects_leaves_its_group(
    any_url: str, any_client: Client, kind: str, thread: str, before: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage is collected in whichever thread runs just then. The leases must lapse in every case."""
    produce(any_url, "t", SAMPLES)
    with collected_in(thread, monkeypatch):
        held = Cycle(opened(any_url, kind, lease_s=3.0))
        next(iter(held.held))
        assert threads() - before
        del held
    require_none_beyond(before)
    assert load_roster(any_client, open_stream(any_client, "t").partitions[0]).members == {}


def test_an_iteration_that_its_own_thread_collects_ends(
    any_url: str, before: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of a replay reads for an iterator that may no longer be in use."""
    produce(any_url, "t", SAMPLES)
    with opened(any_url, "replay") as replay:
        with collected_in("penstock-replay", monkeypatch):
            held = Cycle(iter(replay))
            next(held.held)
            del held
        require_none_beyond(before | {"penstock-replay-lease"})


def run(url: str, kind: str, how: str) -> None:
    """A program as people write it: it closes nothing."""
    loader = opened(url, kind)
    for number, _ in enumerate(loader):
        if number == 3:
            print("step", flush=True)
            if how == "error":
                raise ZeroDivisionError
            break
    print("end", flush=True)


@pytest.mark.parametrize("how", ["end", "error"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_ends_that_closes_nothing(any_url: str, any_client: Client, kind: str, how: str) -> None:
    """And says goodbye all the same: what it was given is handed back, and others need not wait for its leases."""
    produce(any_url, "t", SAMPLES)
    with child(run, any_url, kind, how) as program:
        assert program.line() == "step", program.errors()
        began = time.monotonic()
        lines = program.finish(END_S)
        assert time.monotonic() - began < END_S, program.errors()
        assert lines == ([] if how == "error" else ["end"])
        assert program.process.returncode == (1 if how == "error" else 0), program.errors()
        assert ("ZeroDivisionError" in program.errors()) == (how == "error")
    if kind in ("shared", "mixture"):
        assert load_roster(any_client, open_stream(any_client, "t").partitions[0]).members == {}


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_the_readers_thread_is_raised_in_the_loop(
    any_url: str, kind: str, before: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: a loop that waited for a thread that is gone would wait for ever."""
    produce(any_url, "t", SAMPLES)

    def breaks(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("nobody expects this")

    with pytest.raises(ZeroDivisionError, match="nobody expects"), opened(any_url, kind) as loader:
        batches = iter(loader)
        next(batches)
        monkeypatch.setattr("penstock_consumer.stages.batch.Assembler.take", breaks)
        for _ in batches:
            pass
    monkeypatch.undo()
    require_none_beyond(before)
