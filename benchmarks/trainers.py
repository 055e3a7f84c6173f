"""Training processes that begin together, and the production beside them: what comparisons of whole feeds share.

Nothing here knows what is trained, or compared. Starts, imports and first connections are nobody's: every side does
something small first, and then what is on the clock.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.command import penstock
from benchmarks.streams import expect_epochs

PATIENCE_S = 300.0
"""Longer than any part of a round takes on a machine that does ten other things."""
QUIET: Any = {"notify": lambda _: None}


def in_clean_process(function: Callable[[Any], Any], job: Any) -> Any:
    """What ``function(job)`` returns, from an interpreter that has done nothing else. Raises RuntimeError."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_put, args=(function, job, results))
    process.start()
    process.join(PATIENCE_S)
    if process.exitcode or results.empty():
        process.kill()
        raise RuntimeError(f"a round of {job} ended with {process.exitcode}")
    return results.get()


def _put(function: Callable[[Any], Any], job: Any, results: Any) -> None:
    results.put(function(job))


class Trainers:
    """Forked processes that go through the same course, part by part, each part begun by all at once."""

    def __init__(self, count: int, course: Callable[[int], Iterator[Any]]) -> None:
        """``course(number)`` runs in trainer ``number``; what it yields is the result of one part."""
        context = multiprocessing.get_context("fork")
        self._gate = context.Barrier(count + 1)
        self._results = context.Queue()
        self._processes: list[BaseProcess] = [
            context.Process(target=self._go, args=(course, number)) for number in range(count)
        ]
        for process in self._processes:
            process.start()

    def _go(self, course: Callable[[int], Iterator[Any]], number: int) -> None:
        parts = course(number)
        while True:
            self._gate.wait(PATIENCE_S)
            try:
                result = next(parts)
            except StopIteration:
                return
            # perf_counter is CLOCK_MONOTONIC here: one clock for all processes of the machine
            self._results.put((time.perf_counter(), result))

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [process.pid or 0 for process in self._processes]

    def begin(self) -> float:
        """Lets all begin the next part; returns when that was."""
        self._gate.wait(PATIENCE_S)
        return time.perf_counter()

    def end(self) -> tuple[float, list[Any]]:
        """When the last of them was through its part, and what came of it."""
        found = [self._results.get(timeout=PATIENCE_S) for _ in self._processes]
        return max((at for at, _ in found), default=time.perf_counter()), [result for _, result in found]

    def close(self) -> None:
        """After the last part."""
        self._gate.wait(PATIENCE_S)
        for process in self._processes:
            process.join(PATIENCE_S)


def produce(url: str, stream: str, name: str, epochs: int) -> None:
    """Epochs of the dataset ``name``, as ``penstock produce`` makes them beside workers that are there."""
    arguments = ("produce", "dataset", name, "--stream", stream, "--epochs", epochs, "--workers", 0, "--json")
    penstock(*arguments, "--url", url)


def expect_more(url: str, stream: str) -> None:
    """A production announced its last epoch, and trainers would wait for no other."""
    expect_epochs(url, stream, None)


def own_seconds() -> float:
    """CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
