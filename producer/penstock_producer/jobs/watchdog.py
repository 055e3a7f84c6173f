"""The supervisor's check on a worker: which sample it makes, for how long, what it waits for, and how much memory it
holds.

It also decides which sample is to blame for a worker's end. `fleet` ends and replaces processes. Memory is read from
Linux' /proc; elsewhere it is not known and not limited.
"""

from __future__ import annotations

import hmac
import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from ctypes import CDLL
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from penstock_common.printable import readable_bytes

SAMPLE_LIMIT_S = 300.0
"""The longest time that one sample may take. A longer one hangs, and its worker is replaced."""
ENOUGH = 6
"""The weight of evidence that makes a sample a bad one."""
CRASHED, HUNG, KILLED = 2, 3, 1
"""The weight of one death: three crashes or two hangs are enough. A SIGKILL may come from a kernel short of memory, or
from an operator who did not mean the sample. So it takes six SIGKILLs, all during the same sample."""
MEMORY_SHARE = 0.8
"""The share of the machine's memory that its workers divide. A worker that holds more than its part is replaced."""
RIPE_S = 10.0
"""A younger worker is not replaced for its memory, so that each one gets some work done."""
GROWN_S = 2.0
"""The time that a worker that must end for its memory has for its sample. Interrupting the sample takes longer."""
LOOK_S = 1.0
"""The time between two readings of memory."""


_BETWEEN, _OPENING = -1, -2
"""Notes of a worker that makes no sample: it has ended one, or opens the source of a shard."""


class CurrentSample:
    """A worker's note of what it is making, in memory shared with its supervisor, so that it outlives a crash.

    It is written and read without locks: each number is written as a whole, and the last one makes the others valid.
    """

    def __init__(self) -> None:
        self.cells: Any = RawArray("d", 3)
        """The sample's offset in its shard plus one (0: no shard was begun, `_OPENING`, `_BETWEEN`); since when; how
        long it may take (0: no limit)."""

    @property
    def has_begun(self) -> bool:
        """Return whether this worker ever began a shard."""
        return bool(self.cells[0])

    def open(self) -> None:
        """Note that a shard is begun: its source is being opened."""
        self.cells[0] = _OPENING

    def begin(self, offset: int, limit_s: float) -> None:
        """Note that the sample at this offset is being made from now on."""
        cells = self.cells
        cells[1], cells[2] = time.monotonic(), limit_s
        cells[0] = offset + 1

    def end(self) -> None:
        """Note that it is made or was given up. Our own work follows, and waits for quota and for the server."""
        self.cells[0] = _BETWEEN

    def look(self) -> WorkerSample:
        """Return what is being made now."""
        offset, since, limit_s = self.cells
        if offset == _BETWEEN:
            return BETWEEN
        return WorkerSample(int(offset) - 1, since, limit_s) if offset > 0 else NOTHING


@dataclass(frozen=True)
class WorkerSample:
    """The content of a worker's note at one moment."""

    offset: int | None
    since: float = 0.0
    limit_s: float = 0.0
    is_between: bool = False
    """Whether it has ended one sample and not begun the next: it may wait for quota."""

    def is_overdue(self, now: float) -> bool:
        """Return whether it takes longer than a sample may."""
        return self.offset is not None and 0 < self.limit_s < now - self.since


NOTHING = WorkerSample(None)
BETWEEN = WorkerSample(None, is_between=True)


_LONGEST_WAIT = 4096
"""The bytes for a note of a wait. A longer sentence is cut."""


class CurrentWait:
    """A worker's note of what its writer waits for, in memory shared with its supervisor.

    The supervisor tells the user, because each of many workers would tell the same.
    """

    def __init__(self) -> None:
        self.cells: Any = RawArray("d", 1), RawArray("c", _LONGEST_WAIT)
        """Since when it waits (0: it does not); its stream and the sentence on two lines. The latter may be empty."""

    @property
    def is_noted(self) -> bool:
        """Return whether a wait has begun and not ended."""
        return bool(self.cells[0][0])

    def begin(self, stream: str) -> None:
        """Note that the writer of this stream waits. A wait that is noted goes on."""
        noted = self.look()
        if noted is None or noted.stream != stream:
            self._write(time.monotonic(), stream, "")

    def explain(self, stream: str, text: str) -> None:
        """Note the sentence that says for what it waits."""
        self.begin(stream)
        self._write(self.cells[0][0], stream, text)

    def end(self) -> None:
        """Note that it waits no longer."""
        self.cells[0][0] = 0.0

    def look(self) -> WorkerWait | None:
        """Return the wait, or None if there is none."""
        since, chars = self.cells
        since_s = since[0]
        stream, _, text = chars.value.decode(errors="ignore").partition("\n")
        return WorkerWait(since_s, stream, text) if since_s and since_s == since[0] else None

    def _write(self, since_s: float, stream: str, text: str) -> None:
        since, chars = self.cells
        since[0] = 0.0  # so that nobody reads half a sentence
        note = f"{stream}\n{text}".encode()[: _LONGEST_WAIT - 1] + b"\0"
        chars[: len(note)] = note
        since[0] = since_s


@dataclass(frozen=True)
class WorkerWait:
    """The content of a worker's note of a wait."""

    since_s: float
    stream: str
    text: str


LOST_SERVER = "its server went away"
"""The reason why a worker ended whose replacement waits for the server."""

STOPPED = "stopped"
"""The reason why a worker ended that did not stop in time."""


@dataclass(frozen=True)
class WorkerDeath:
    """The end of a worker that did not want to end."""

    worker: str
    """The name of the worker."""
    reason: str
    """A sentence for people: ``worker process 4711 was killed by SIGSEGV``."""
    is_to_blame: bool = True
    """Whether what it was doing may be the cause."""
    offset: int | None = None
    """The offset in its shard of the sample that it was making."""
    deed: str = ""
    """The deed of that sample, such as ``killed its worker by SIGSEGV``."""
    weight: int = 0
    key: bytes = field(default=b"", repr=False)
    """The key of the supervisor that saw it; see `WorkerOptions.key`."""


@dataclass(frozen=True)
class CrashRecord:
    """A record of the workers that one sample ended.

    It is noted in the sample's job, where others may write. So a supervisor signs its notes, and its workers believe no
    other.
    """

    times: int
    weight: int
    deed: str

    @classmethod
    def of(cls, meta: Mapping[str, Any], job_id: str, key: bytes) -> dict[int, CrashRecord]:
        """Return offset -> record, of the notes in a job's ``meta`` that were signed with ``key`` for this job."""
        return {
            int(name.partition(".")[0]): cls(*noted)
            for name, (*noted, signature) in meta.get("suspects", {}).items()
            if signature == sign(key, job_id, name, *noted)
        }

    @property
    def is_enough(self) -> bool:
        """Return whether the sample is tried no more."""
        return self.weight >= ENOUGH

    def __str__(self) -> str:
        return f"{self.deed}, {self.times} times"


def note_crash(meta: dict[str, Any], death: WorkerDeath, job_id: str) -> None:
    """Note in a job's meta which sample ended a worker, and forget samples that were committed since."""
    if death.offset is None or not death.weight:
        return
    known = CrashRecord.of(meta, job_id, death.key).get(death.offset, CrashRecord(0, 0, ""))
    noted = (known.times + 1, known.weight + death.weight, death.deed)
    name = f"{death.offset}.{sign(death.key)[:8]}"  # other supervisors have notes of their own
    crashes = meta.setdefault("suspects", {})
    crashes[name] = [*noted, sign(death.key, job_id, name, *noted)]
    for old in [old for old in crashes if int(old.partition(".")[0]) < int(meta.get("at", 0))]:
        del crashes[old]


def sign(key: bytes, *signed: object) -> str:
    """Return the signature of what a supervisor, or a worker of its own, notes in a job."""
    return hmac.digest(key, json.dumps(signed).encode(), "sha256").hex()[:32]


class WorkerWatchdog:
    """The watch over one worker process."""

    def __init__(self, memory_bytes: int | None, clock: Any = time.monotonic) -> None:
        self.current, self.wait = CurrentSample(), CurrentWait()
        self._memory_bytes, self._clock = memory_bytes, clock
        self._began = self._looked = clock()
        self._verdict = ""
        """The deed of the sample for which this supervisor ended the worker."""
        self._grown: tuple[WorkerSample, float] | None = None

    def look_after(self, process: BaseProcess) -> None:
        """End a worker that hangs in a sample at once, and one that holds too much memory after its sample."""
        now = self._clock()
        sample = self.current.look()
        if sample.is_overdue(now):
            self._kill(process, f"took its worker longer than {sample.limit_s:g} s (--sample-limit)")
        elif self._grown is not None:
            if sample == self._grown[0] and sample.offset is not None and now - self._grown[1] > GROWN_S:
                self._kill(process, f"grew its worker beyond {readable_bytes(self._memory_bytes or 0)}")
        elif self._memory_bytes and now - self._looked >= LOOK_S and now - self._began >= RIPE_S:
            self._looked = now
            if process.pid and held_bytes(process.pid) > self._memory_bytes:
                self._grown = (sample, now)
                process.terminate()

    def _kill(self, process: BaseProcess, deed: str) -> None:
        if not self._verdict:
            self._verdict = deed
            process.kill()

    def death(self, name: str, pid: int | None, code: int) -> WorkerDeath | None:
        """Return how a worker ended, or None if it had nothing more to do."""
        sample, who = self.current.look(), f"worker process {pid}"
        if self._verdict:
            weight = CRASHED if self._grown else HUNG
            return WorkerDeath(name, f"{who}: one sample {self._verdict}", True, sample.offset, self._verdict, weight)
        if self._grown:
            return WorkerDeath(name, f"{who} held more than {readable_bytes(self._memory_bytes or 0)} of memory", False)
        if code == 0 and sample.offset is None:
            return None
        weight = KILLED if code == -signal.SIGKILL else CRASHED
        how = f"with exit code {code}" if code >= 0 else f"by {_signal(-code)}"
        ending = f"ended {how}" if code >= 0 else f"was killed {how}"
        deed = f"ended its worker {how}" if code >= 0 else f"killed its worker {how}"
        # a kill -9 of a worker that waits for quota or for the server is not the shard's fault
        is_to_blame = not (sample.is_between and code == -signal.SIGKILL)
        return WorkerDeath(name, f"{who} {ending}", is_to_blame, sample.offset, deed, weight)


def memory_part(workers: int) -> int | None:
    """Return the bytes that each of ``workers`` workers of this machine may hold, or None if that is not known."""
    memory = machine_bytes()
    return None if memory is None else int(memory * MEMORY_SHARE) // max(1, workers)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""The limit files of cgroups 2 and 1: bytes, or ``max``."""


_LARGEST_KEPT = 32 << 20
"""The largest threshold that glibc accepts."""
_TRIM, _MAP = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h."""


def keep_freed() -> None:
    """Make this process keep freed memory for its next allocation, if its C library is glibc.

    Otherwise an image's pixels are returned after each sample, and every page of the next one is a fault: a third of
    the time that decoding a photograph takes.
    """
    with suppress(OSError, AttributeError):
        library = CDLL(None)
        library.mallopt(_MAP, _LARGEST_KEPT)
        library.mallopt(_TRIM, 8 * _LARGEST_KEPT)


def held_bytes(pid: int) -> int:
    """Return the memory that would be free without this process. Memory shared by forked processes does not count.

    0: not known.
    """
    with suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return 0


def machine_bytes() -> int | None:
    """Return the memory of the machine, or of the container if that has less."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):
            memory = min(memory, int(Path(path).read_text()))
    return memory
