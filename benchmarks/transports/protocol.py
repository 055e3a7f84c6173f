"""The protocol of a measured process and its observer: lines of JSON.

The input is a `Load`, then a line for each turn with the number of samples to move. The end of stdin ends the process.
The output, on the original stdout, is ``ready`` once, then ``done`` for each turn. The output of libraries goes to
stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS = 4096
"""The rows of one write by batch."""
POOL_BYTES = 64 << 20
"""The bytes of memory that samples come from, as in a real job. From a small buffer, copies look free."""


@dataclass(frozen=True)
class Load:
    """The work of one process."""

    role: str
    """``write`` or ``read``."""
    place: str
    """The address of the other processes: a URL or a folder."""
    shape: tuple[int, ...]
    """The shape of a sample."""
    dtype: str
    batch: int
    """The samples of a batch."""
    by_batch: bool = False
    """Whether the writer has ROWS samples at once."""
    room_bytes: int = 256 << 20
    """The payload bytes that may lie between writer and reader."""
    make_s: float = 0.0
    """The CPU time for making each sample."""
    reader: int = 0
    """The number of this reader."""
    mode: str = ""
    """The variant of a transport that has several."""
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def sample_bytes(self) -> int:
        """Return the payload bytes of one sample."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def pool(self) -> NDArray[Any]:
        """Return ``[n, *shape]``: different samples, the same in every process, made once in each."""
        return _pool(self.shape, self.dtype, max(2, min(ROWS, POOL_BYTES // self.sample_bytes)))

    def samples(self, count: int) -> Iterator[NDArray[Any]]:
        """Yield one sample after another, each made."""
        pool = self.pool()
        for number in range(count):
            make(self.make_s)
            yield pool[number % len(pool)]

    def batches(self, count: int, size: int) -> Iterator[NDArray[Any]]:
        """Yield the same samples as arrays ``[size, *shape]``.

        They are copied, unless a writer has that many at once.
        """
        pool = self.pool()
        if self.by_batch:
            for start in range(0, count, size):
                yield pool[start % ROWS : start % ROWS + size]
            return
        for start in range(0, count, size):
            batch = np.empty((min(size, count - start), *self.shape), self.dtype)
            for row in range(len(batch)):
                make(self.make_s)
                batch[row] = pool[(start + row) % len(pool)]
            yield batch


@cache
def _pool(shape: tuple[int, ...], dtype: str, count: int) -> NDArray[Any]:
    numbers = np.random.default_rng(0).integers(0, 255, count, np.uint8)
    pool = np.empty((count, *shape), dtype)
    for sample, number in zip(pool, numbers, strict=True):
        sample.fill(number)
    return pool


def make(seconds: float) -> None:
    """Use ``seconds`` of CPU time in Python."""
    if seconds:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass


class Turns:
    """The child's side. Iterating waits for the observer's next turn, and reports that the one before is done."""

    def __init__(self, load: Load, lines: Iterator[str], out: int) -> None:
        self._load, self._lines, self._out = load, lines, out
        self._samples, self._at = 0, 0.0
        self._is_checked = False

    def __iter__(self) -> Iterator[int]:
        """Yield the number of samples to move."""
        self._say(what="ready")
        for line in self._lines:
            self._samples, self._at = 0, 0.0
            yield int(json.loads(line)["samples"])
            self._say(what="done", at=self._at or time.monotonic(), samples=self._samples)

    def got(self, batch: Any) -> None:
        """Note that the training has this batch ``[n, *shape]``.

        The clock stops at the last one, and the first one is checked.
        """
        self._at = time.monotonic()
        self._samples += len(batch)
        if not self._is_checked:
            self._check(np.asarray(batch))
            self._is_checked = True

    @property
    def samples(self) -> int:
        """Return the samples of this turn so far."""
        return self._samples

    def _check(self, batch: NDArray[Any]) -> None:
        shape = (self._load.batch, *self._load.shape)
        if batch.shape != shape or batch.dtype != self._load.dtype:
            raise ValueError(f"a batch is {batch.dtype} {batch.shape}, expected {self._load.dtype} {shape}")
        values = {sample.flat[0] for sample in self._load.pool()}
        for row in batch:
            if row.flat[0] not in values or (row != row.flat[0]).any():
                raise ValueError("a batch has other bytes than were sent")

    def _say(self, **fields: Any) -> None:
        os.write(self._out, (json.dumps(fields) + "\n").encode())


def run(roles: Mapping[str, Callable[[Load, Turns], None]]) -> None:
    """Run a child: read its work, and do it.

    glibc returns memory to the kernel until a block of this size was freed once. Before that, a program that allocates
    for each sample spends twice its time in page faults. Any process that trains has freed such a block, so all are
    measured after it.
    """
    freed = np.ones(30 << 20, np.uint8)
    del freed
    out = os.dup(1)
    os.dup2(2, 1)
    fields = json.loads(sys.stdin.readline())
    load = Load(**{**fields, "shape": tuple(fields["shape"])})
    roles[load.role](load, Turns(load, iter(sys.stdin), out))
