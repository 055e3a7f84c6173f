"""Sources and transforms that worker processes import by name in the tests of jobs."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = 120


def numbers() -> list[int]:
    """A dataset."""
    return list(range(SAMPLES))


def late_numbers() -> list[int]:
    """A dataset whose constructor takes longer than a wait may be silent."""
    time.sleep(3.5)
    return numbers()


def with_pid(number: int) -> dict[str, Any]:
    """Says who made it."""
    return {"x": np.full(4, number, np.int32), "pid": os.getpid()}


def collects(number: int) -> dict[str, Any]:
    """Collects the garbage of the process that makes it."""
    gc.collect()
    return with_pid(number)


def collected() -> Iterator[dict[str, Any]]:
    """An iterable of five samples that does the same."""
    return map(collects, range(5))


def slowly(number: int) -> dict[str, Any]:
    """Long enough to be interrupted."""
    time.sleep(0.01)
    return with_pid(number)


def very_slowly(number: int) -> dict[str, Any]:
    """Long enough to be interrupted between its first commit, after a second, and its end, however busy the machine."""
    time.sleep(0.03)
    return with_pid(number)


def every_tenth_fails(number: int) -> dict[str, Any]:
    """Some bad among good."""
    if number % 10 == 3:
        raise ValueError(f"{number} is unlucky")
    return with_pid(number)


def most_fail(number: int) -> dict[str, Any]:
    """Seven of ten are bad."""
    if number % 10 < 7:
        raise ValueError(f"{number} is unlucky")
    return with_pid(number)


def always_fails(number: int) -> dict[str, Any]:
    """A broken transform."""
    raise ValueError("broken")


def grows(number: int) -> dict[str, Any]:
    """The last of many has another shape than the first."""
    return {"x": np.zeros(4 + (number == SAMPLES - 1), np.int32)}


def kills_its_worker(number: int) -> dict[str, Any]:
    """Kills the process that makes number 60, the first two times."""
    mark = Path(os.environ["PENSTOCK_TEST_MARK"])
    if number == SAMPLES // 2 and (tries := len(mark.read_text()) if mark.exists() else 0) < 2:
        mark.write_text("x" * (tries + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return with_pid(number)


class Batches:
    """Batches as a Keras Sequence gives them: seven of 8 samples, one of 4, and the fourth cannot be made."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, item: int) -> tuple[Any, Any]:
        if item == 3:
            raise OSError("no such batch")
        count = 4 if item == 7 else 8
        return np.full((count, 2), item, np.float32), np.arange(count) + 8 * item


def feed() -> Iterator[tuple[int, int]]:
    """A generator of samples."""
    for number in range(50):
        yield number, number * number


def slow_feed() -> Iterator[dict[str, Any]]:
    """Yield samples for half a second, which is several looks of a production."""
    for number in range(10):
        yield {"x": number}
        time.sleep(0.05)


def deadly_feed() -> Iterator[dict[str, Any]]:
    """A generator that kills the process that walks it to its end, no sample being made."""
    for number in range(60):
        yield with_pid(number)
    os.kill(os.getpid(), signal.SIGKILL)


def holds_up_the_first(number: int) -> dict[str, Any]:
    """The process that makes number 5 first says its pid in a file and then gets no further."""
    mark = Path(os.environ["PENSTOCK_TEST_MARK"])
    if number == 5 and not mark.exists():
        mark.write_text(str(os.getpid()))
        time.sleep(60)
    return with_pid(number)


def wide(number: int) -> dict[str, Any]:
    """A megabyte."""
    return {"x": np.full(1 << 20, number, np.uint8)}


def always_kills_its_worker(number: int) -> dict[str, Any]:
    """Kills every process that makes number 60."""
    if number == SAMPLES // 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return with_pid(number)


def takes_notes(number: int) -> dict[str, Any]:
    """Long enough to be looked after several times; each time a number is made it is noted who made it."""
    with Path(os.environ["PENSTOCK_TEST_MARK"]).open("a") as notes:
        notes.write(f"{os.getpid()} {number}\n")
    return very_slowly(number)


def traps(job: Any, connection: Any, *why: Any) -> None:
    """A callback as rq calls it, which leaves a mark."""
    Path(os.environ["PENSTOCK_TEST_MARK"]).write_text("trapped")


def held_up(number: int) -> dict[str, Any]:
    """Make a sample like `very_slowly`. While a certain file exists, wait from the number in it on, or from 0 on."""
    mark = Path(os.environ["PENSTOCK_TEST_MARK"])
    with suppress(FileNotFoundError):
        while number >= int(mark.read_text() or 0):
            time.sleep(0.02)
    return very_slowly(number)
