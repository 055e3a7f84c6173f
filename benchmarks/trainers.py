"""Training processes that begin together, and their production: the common part of comparisons of whole feeds.

Nothing here knows what is trained, or compared. Starts, imports and first connections are not timed: every side does
something small first, and then the timed part.
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
"""The longest time of any part of a round, on a machine that does ten other things."""
QUIET: Any = {"notify": lambda _: None}


def in_clean_process(function: Callable[[Any], Any], job: Any) -> Any:
    """Return the result of ``function(job)`` from a new interpreter. Raises RuntimeError."""
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
    """Forked processes that run the same parts. All begin each part together."""

    def __init__(self, count: int, course: Callable[[int], Iterator[Any]]) -> None:
        """Fork the trainers. ``course(number)`` runs in trainer ``number``, and yields the result of each part."""
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
        """Return the pids of the processes."""
        return [process.pid or 0 for process in self._processes]

    def begin(self) -> float:
        """Let all begin the next part, and return the time of that."""
        self._gate.wait(PATIENCE_S)
        return time.perf_counter()

    def end(self) -> tuple[float, list[Any]]:
        """Return the time when the last of them finished its part, and all results."""
        found = [self._results.get(timeout=PATIENCE_S) for _ in self._processes]
        return max((at for at, _ in found), default=time.perf_counter()), [result for _, result in found]

    def close(self) -> None:
        """End after the last part."""
        self._gate.wait(PATIENCE_S)
        for process in self._processes:
            process.join(PATIENCE_S)


def produce(url: str, stream: str, name: str, epochs: int) -> None:
    """Produce epochs of the dataset ``name`` as ``penstock produce`` does, with existing workers."""
    arguments = ("produce", "dataset", name, "--stream", stream, "--epochs", epochs, "--workers", 0, "--json")
    penstock(*arguments, "--url", url)


def expect_more(url: str, stream: str) -> None:
    """Announce more epochs, because a production announced its last one, and trainers would not wait for another."""
    expect_epochs(url, stream, None)


def own_seconds() -> float:
    """Return the CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
