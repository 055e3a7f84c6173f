"""One round of one side: new processes, a warm-up, and one turn on the clock, with the CPU time of all of them.

The warm-up measures how much a turn must move to take the wanted time, so that a slow side does not delay the others.
The clock starts when all processes get their turn, and stops when the last of them has read, or written, everything.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.cpu import page_faults, running_seconds
from benchmarks.peers.environments import python_of
from benchmarks.sides import SHARED_MEMORY, Side
from benchmarks.stock import StockServer, free_port
from benchmarks.transports.protocol import Load
from penstock import EmbeddedServer

ROOT = Path(__file__).parents[1]
PATIENCE_S = 60.0
"""The longest wait for a line of a child. A turn takes seconds, and TensorFlow's import about ten seconds on slow
cores.
"""
END_S = 5.0
"""The time that a process has to end."""
GROWTH = 8
"""The largest ratio of a turn of the warm-up to the one before."""
FILLED = 1.25
"""The payload of a warm-up, relative to the space between writer and reader."""
LEAST_SHARE = 0.2
"""A turn that is shorter than this share of the wanted time says too little about the rate."""
LEAST_WARM_UP_S = 1.0
MOST_WARM_UP_S = 5.0
"""The warm-up time for each quarter of a GiB of space. A side that cannot fill it in this time is measured without
that.
"""


class Failed(Exception):
    """A side that fails. The message has its last output."""


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one turn of one side."""

    seconds: float
    samples: int
    """The samples that were sent to each reader."""
    got: int
    """The samples that all readers got together."""
    readers: int
    sample_bytes: int
    writer_cpu_s: float
    reader_cpu_s: float
    server_cpu_s: float
    writer_faults: int = 0
    """The pages that the kernel gave the writer during the turn."""
    reader_faults: int = 0
    server_faults: int = 0

    @property
    def samples_per_s(self) -> float:
        """Return the rate of all readers together."""
        return self.got / self.seconds

    @property
    def gb_per_s(self) -> float:
        """Return the rate of all readers together."""
        return self.samples_per_s * self.sample_bytes / 1e9

    @property
    def cpu_s(self) -> float:
        """Return the CPU time of all processes."""
        return self.writer_cpu_s + self.reader_cpu_s + self.server_cpu_s

    @property
    def cpu_s_per_gb(self) -> float:
        """Return the CPU time of all processes, for each GB that readers got."""
        return self.cpu_s / (self.got * self.sample_bytes / 1e9)

    @property
    def client_cpu_s_per_gb(self) -> float:
        """Return the CPU time of writer and reader, for each GB."""
        return (self.writer_cpu_s + self.reader_cpu_s) / (self.got * self.sample_bytes / 1e9)

    @property
    def lost(self) -> float:
        """Return the share that did not arrive."""
        return max(0.0, 1 - self.got / (self.samples * self.readers))


class Child:
    """A child process that speaks the protocol."""

    def __init__(self, side: Side, role: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `close`
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._name = f"{side.name}, {role}"
        self._popen = subprocess.Popen(
            [python_of(side.environment), "-m", f"benchmarks.transports.{side.module}"], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
            env={**os.environ, "PYTHONPATH": side.path} if side.path else None,
        )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Return the pid of the process."""
        return self._popen.pid

    def begin(self, load: Load) -> None:
        """Send the work of the process, once. It imports before that."""
        self._tell(asdict(load))

    def go(self, samples: int) -> None:
        """Start its next turn."""
        self._tell({"samples": samples})

    def hear(self) -> dict[str, Any]:
        """Return its next line. Raises Failed."""
        try:
            said = self._said.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise Failed(f"{self._name} is silent for {PATIENCE_S:.0f} s: {self._last_words()}") from None
        if said is None:
            raise Failed(f"{self._name} ended: {self._last_words()}")
        return said

    def close(self) -> None:
        """End it with all its children."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._listener.join(END_S)
        self._popen.stdout.close()
        self._errors.close()

    def _tell(self, fields: dict[str, Any]) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(fields) + "\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"{self._name} ended: {self._last_words()}") from None

    def _listen(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return (lines[-1] if lines else "it said nothing")[-300:]


@dataclass(frozen=True)
class Stage:
    """The processes of one round."""

    writers: list[Child]
    readers: list[Child]
    servers: list[int]
    place: str
    """The address where they meet: the server's URL, or a folder."""

    def turn(self, case: Case, samples: int) -> Round:
        """Run a turn of all processes at once."""
        everyone = [*self.writers, *self.readers]
        before, given = self._cpu(), self._faults()
        began = time.monotonic()  # one clock for all processes of the machine
        for child in everyone:
            child.go(samples)
        heard = [child.hear() for child in everyone]
        after, taken = self._cpu(), self._faults()
        seconds = max(one["at"] for one in heard) - began
        got = sum(one["samples"] for one in heard)
        if not got:
            raise Failed("nothing arrived")
        writer, reader, server = (late - early for early, late in zip(before, after, strict=True))
        faults = [late - early for early, late in zip(given, taken, strict=True)]
        return Round(seconds, samples, got, len(self.readers), case.sample_bytes, writer, reader, server, *faults)

    def _cpu(self) -> list[float]:
        return [running_seconds(pids) for pids in (*self._children(), self.servers)]

    def _faults(self) -> list[int]:
        return [page_faults(pids) for pids in (*self._children(), self.servers)]

    def _children(self) -> tuple[list[int], list[int]]:
        return [child.pid for child in self.writers], [child.pid for child in self.readers]


def run_round(
    side: Side, case: Case, seconds: float, readers: int = 1, make_s: float = 0.0, kept: Path | None = None
) -> Round:
    """Run one turn of processes that are started for it.

    ``seconds`` is the approximate time on the clock. ``kept`` is a folder of this side and case for data that is made
    once.
    """
    with ExitStack() as stack:
        return warmed_up(stack, side, case, seconds, readers, make_s, kept)()


def warmed_up(
    stack: ExitStack, side: Side, case: Case, seconds: float, readers: int = 1, make_s: float = 0.0,
    kept: Path | None = None,
) -> Callable[[], Round]:  # fmt: skip
    """Return a function that runs a turn. The processes are ready, and live until ``stack`` is closed."""
    stage = set_up(stack, side, case, readers, make_s, kept)
    return partial(stage.turn, case, warm_up(stage, case, seconds))


def warm_up(stage: Stage, case: Case, seconds: float) -> int:
    """Run longer and longer turns until the space was filled, or cannot be in time. Return the samples for one turn.

    Memory that is touched for the first time costs as much as several copies. A stream keeps its memory while there is
    space.
    """
    samples, missing = 2 * case.unit, FILLED * case.room_bytes
    stage.turn(case, samples)  # it says nothing about the rate, because late imports happen now
    most = max(2, int(case.most_bytes / case.sample_bytes / case.unit)) * case.unit
    began, most_s = time.monotonic(), MOST_WARM_UP_S * max(1.0, case.room_bytes / (256 << 20))
    while True:
        found = stage.turn(case, samples)
        missing = max(0.0, missing - samples * case.sample_bytes)
        rate = found.samples / found.seconds
        samples = min(most, max(2, round(min(rate * seconds, GROWTH * samples) / case.unit)) * case.unit)
        taken, still_s = time.monotonic() - began, missing / (rate * case.sample_bytes)
        if not missing and found.seconds > LEAST_SHARE * seconds:
            return samples
        if taken > max(seconds, LEAST_WARM_UP_S) and (not missing or taken + still_s > most_s):
            return samples


def set_up(
    stack: ExitStack, side: Side, case: Case, readers: int = 1, make_s: float = 0.0, kept: Path | None = None
) -> Stage:
    """Start all processes, and return once they are ready. They live until ``stack`` is closed."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
    place, servers, extra = str(kept or folder), [], {"address": f"127.0.0.1:{free_port()}"}
    if side.has_server:
        if side.is_stock:
            stock = stack.enter_context(StockServer(folder))
            place, servers = stock.url, [stock.pid]
        else:
            own = stack.enter_context(EmbeddedServer())
            place, servers = own.url, [own.pid]
    if "segments" in side.mode:
        extra["folder"] = tempfile.mkdtemp(prefix="penstock-bench-", dir=SHARED_MEMORY)
        stack.callback(shutil.rmtree, extra["folder"], ignore_errors=True)

    def started(role: str) -> Child:
        child = Child(side, role)
        stack.callback(child.close)
        return child

    def begin(children: list[Child], role: str) -> None:
        for number, child in enumerate(children):
            child.begin(
                Load(
                    role, place, case.shape, case.dtype, case.batch, case.by_batch, case.room_bytes, make_s, number,
                    side.mode, extra,
                )
            )  # fmt: skip
        for child in children:
            child.hear()

    writers = [started("write")] if side.has_writer else []
    reading = [started("read") for _ in range(readers)]
    begin(writers, "write")
    begin(reading, "read")
    return Stage(writers, reading, servers, place)
