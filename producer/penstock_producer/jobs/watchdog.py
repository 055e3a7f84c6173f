"""The supervisor's check on a worker: which sample it makes and for how long, and how much memory it holds.

It also says which sample is to blame for a worker's end. Ending and replacing processes is ``fleet``'s. Memory is read
from Linux' /proc; where there is none, nothing is known and nothing is limited.
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

SAMPLE_LIMIT_S = 300.0
"""One sample may take so long; then it hangs, and its worker is replaced."""
ENOUGH = 6
"""So much weight of evidence makes a sample a bad one."""
CRASHED, HUNG, KILLED = 2, 3, 1
"""The weight of one death: three crashes, two hangs. A SIGKILL may come from a kernel short of memory, or from an
operator who did not mean the sample: six of them, all while the same one was made."""
MEMORY_SHARE = 0.8
"""Of the machine's memory, shared by its workers: one that holds more than its part is replaced."""
RIPE_S = 10.0
"""A worker younger than that is not replaced for its memory: each one gets some work done."""
GROWN_S = 2.0
"""A worker that is to end for its memory may take so long for its sample: less than it takes to cut that short."""
LOOK_S = 1.0
"""How often memory is looked at."""


class CurrentSample:
    """One worker's note of what it is making, in memory shared with its supervisor: it outlives a crash of the worker.

    Taken down and read without locks: each number is written whole, and the last of them says that the others count.
    """

    def __init__(self, cells: Any = None) -> None:
        self.cells: Any = RawArray("d", 3) if cells is None else cells
        """The place in its shard plus one (0: none is being made, -1: nor is anything else); since when; how long
        it may take (0: no limit)."""

    def open(self) -> None:
        """A shard is begun: its source is opened."""
        self.cells[0] = 0

    def begin(self, place: int, limit_s: float) -> None:
        """The sample at this place is being made from now on."""
        cells = self.cells
        cells[1], cells[2] = time.monotonic(), limit_s
        cells[0] = place + 1

    def end(self) -> None:
        """It is made, or was given up: what follows is our own work, and waits for room and for the server."""
        self.cells[0] = -1

    def look(self) -> WorkerSample:
        """What is being made now."""
        place, since, limit_s = self.cells
        if place < 0:
            return BETWEEN
        return WorkerSample(int(place) - 1, since, limit_s) if place else NOTHING


@dataclass(frozen=True)
class WorkerSample:
    """One look at a worker's note."""

    place: int | None
    since: float = 0.0
    limit_s: float = 0.0
    is_between: bool = False
    """Whether it is done with one sample and not yet at the next: it may wait for room."""

    def is_overdue(self, now: float) -> bool:
        """Whether it takes longer than a sample may."""
        return self.place is not None and 0 < self.limit_s < now - self.since


NOTHING = WorkerSample(None)
BETWEEN = WorkerSample(None, is_between=True)


@dataclass(frozen=True)
class WorkerDeath:
    """A worker's end that was not its own wish."""

    worker: str
    """Its name."""
    reason: str
    """For people: ``worker process 4711 was killed by SIGSEGV``."""
    is_to_blame: bool = True
    """Whether what it was doing may be the cause."""
    place: int | None = None
    """Where in its shard the sample is that it was making."""
    deed: str = ""
    """What that sample did: ``killed its worker by SIGSEGV``."""
    weight: int = 0
    key: bytes = field(default=b"", repr=False)
    """Of the supervisor that saw it; see `WorkerOptions.key`."""


@dataclass(frozen=True)
class CrashRecord:
    """A record of the workers that one sample ended.

    It is noted in the sample's job, where others may write. So a supervisor signs its notes, and its workers believe
    no other.
    """

    times: int
    weight: int
    deed: str

    @classmethod
    def of(cls, meta: Mapping[str, Any], job_id: str, key: bytes) -> dict[int, CrashRecord]:
        """Return place -> suspicion, of the notes in a job's ``meta`` that were signed with ``key`` for this job."""
        return {
            int(name.partition(".")[0]): cls(*noted)
            for name, (*noted, signature) in meta.get("suspects", {}).items()
            if signature == sign(key, job_id, name, *noted)
        }

    @property
    def is_enough(self) -> bool:
        """Whether to try it no more."""
        return self.weight >= ENOUGH

    def __str__(self) -> str:
        return f"{self.deed}, {self.times} times"


def suspect(meta: dict[str, Any], death: WorkerDeath, job_id: str) -> None:
    """Notes in a job's meta which sample a worker died of; forgets those that were committed since."""
    if death.place is None or not death.weight:
        return
    known = CrashRecord.of(meta, job_id, death.key).get(death.place, CrashRecord(0, 0, ""))
    noted = (known.times + 1, known.weight + death.weight, death.deed)
    name = f"{death.place}.{sign(death.key)[:8]}"  # other supervisors have notes of their own
    suspects = meta.setdefault("suspects", {})
    suspects[name] = [*noted, sign(death.key, job_id, name, *noted)]
    for old in [old for old in suspects if int(old.partition(".")[0]) < int(meta.get("at", 0))]:
        del suspects[old]


def sign(key: bytes, *signed: object) -> str:
    """Return the signature of what a supervisor, or a worker of its own, notes in a job."""
    return hmac.digest(key, json.dumps(signed).encode(), "sha256").hex()[:32]


class WorkerWatchdog:
    """Over one worker process."""

    def __init__(self, memory_bytes: int | None, clock: Any = time.monotonic) -> None:
        self.current = CurrentSample()
        self._memory_bytes, self._clock = memory_bytes, clock
        self._began = self._looked = clock()
        self._verdict = ""
        """What the sample did for which this supervisor ended the worker."""
        self._grown: tuple[WorkerSample, float] | None = None

    def look_after(self, process: BaseProcess) -> None:
        """Ends a worker that hangs in a sample at once, and one that holds too much memory after its sample."""
        now = self._clock()
        sight = self.current.look()
        if sight.is_overdue(now):
            self._kill(process, f"took its worker longer than {sight.limit_s:g} s")
        elif self._grown is not None:
            if sight == self._grown[0] and sight.place is not None and now - self._grown[1] > GROWN_S:
                self._kill(process, f"grew its worker beyond {_size(self._memory_bytes or 0)}")
        elif self._memory_bytes and now - self._looked >= LOOK_S and now - self._began >= RIPE_S:
            self._looked = now
            if process.pid and held_bytes(process.pid) > self._memory_bytes:
                self._grown = (sight, now)
                process.terminate()

    def _kill(self, process: BaseProcess, deed: str) -> None:
        if not self._verdict:
            self._verdict = deed
            process.kill()

    def death(self, name: str, pid: int | None, code: int) -> WorkerDeath | None:
        """How a worker ended; None if it just had nothing more to do."""
        sight, who = self.current.look(), f"worker process {pid}"
        if self._verdict:
            weight = CRASHED if self._grown else HUNG
            return WorkerDeath(name, f"{who}: one sample {self._verdict}", True, sight.place, self._verdict, weight)
        if self._grown:
            return WorkerDeath(name, f"{who} held more than {_size(self._memory_bytes or 0)} of memory", False)
        if code == 0 and sight.place is None:
            return None
        weight = KILLED if code == -signal.SIGKILL else CRASHED
        how = f"with exit code {code}" if code >= 0 else f"by {_signal(-code)}"
        deed = f"ended its worker {how}" if code >= 0 else f"killed its worker {how}"
        # a kill -9 of one that waits for room, or for the server, is nothing the shard has done
        is_to_blame = not (sight.is_between and code == -signal.SIGKILL)
        return WorkerDeath(name, f"{who} {_ending(code)}", is_to_blame, sight.place, deed, weight)


def memory_part(workers: int) -> int | None:
    """Bytes that each of so many workers of this machine may hold; None where nobody knows the machine's."""
    memory = machine_bytes()
    return None if memory is None else int(memory * MEMORY_SHARE) // max(1, workers)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {_signal(-code)}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one has no name
        return f"signal {number}"


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Of cgroups 2 and 1: bytes, or ``max``."""


_LARGEST_KEPT = 32 << 20
"""glibc takes no larger threshold."""
_TRIM, _MAP = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h."""


def keep_freed() -> None:
    """Has this process keep memory that it freed for its next allocation, where its C library is glibc.

    Else an image's pixels are given back after each sample, and every page of the next is a fault: a third of the time
    that decoding a photograph takes.
    """
    with suppress(OSError, AttributeError):
        library = CDLL(None)
        library.mallopt(_MAP, _LARGEST_KEPT)
        library.mallopt(_TRIM, 8 * _LARGEST_KEPT)


def held_bytes(pid: int) -> int:
    """Memory that would be free without this process: what forked processes share is nobody's. 0 if it is not known."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return 0


def machine_bytes() -> int | None:
    """Of the machine, or of the container if that has less."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):
            memory = min(memory, int(Path(path).read_text()))
    return memory
