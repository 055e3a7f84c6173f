"""Append-only journals: what a process of the run did, line by line, in a file that survives SIGKILL.

A line is one ``write`` to a file opened with O_APPEND, which the kernel has as soon as the call returns. Times are of
the monotonic clock, which all processes of a host share. The letters:

    B                 the loader is open, or the writer's first samples are committed
    H seq epoch ids position
                      a batch was given to the training loop; ids are nonces, proved from the payloads (- if none was
                      good); position: in ordered reading, the end of its step; written before the step
    X seq what        a sample in it was corrupt
    D seq             its step is done
    A seq             the call that acknowledged it returned
    F                 the server has answered all earlier acknowledgements
    S seconds         this process did not run for these seconds, without a fault
    O text            its checkpoint was reported as overdue, and it acknowledged what it had
    W n / C n         the feed's samples below n were given to the writer / are committed
    Z                 it begins to leave, perhaps by an error
    L                 left: the loader or writer was closed and everything is flushed
    E class text      ended by an error
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TICK_S = 0.2


class Journal:
    """The journal of one process, open for appending."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, letter: str, *words: object) -> None:
        """Append one line, which outlives this process."""
        line = " ".join([letter, str(time.monotonic_ns()), *map(str, words)])
        os.write(self._file, line.replace("\n", " ").encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Line:
    """One line that was read back."""

    letter: str
    ns: int
    words: list[str]


def read_journal(path: Path) -> Iterator[Line]:
    """Yield all complete lines of a journal, or nothing if the process never began one."""
    if not path.exists():
        return
    with path.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                letter, ns, *words = line.split()
                yield Line(letter, int(ns), words)


def note_stalls(journal: Journal, longest_s: float) -> None:
    """Start a thread that notes when this process stood still for longer than ``longest_s``, as on a loaded machine."""

    def watch() -> None:
        last = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            if now - last > longest_s:
                journal.note("S", f"{now - last:.3f}")
            last = now

    threading.Thread(target=watch, daemon=True).start()
