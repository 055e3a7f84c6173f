"""``python -m benchmarks.backpressure``: producers far faster than their trainer, on a server with little memory.

Writers are plain processes, or an RQ fleet whose jobs are on the same server. They pass many times the server's memory
through a small budget to one trainer, which reads at a fixed rate and pauses three times. An observer reads ten times a
second what the server and the rosters hold, and the CPU time of the waiting writers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import redis

from benchmarks.command import penstock
from benchmarks.streams import rosters
from penstock import EmbeddedServer, Loader, Writer

STREAM = "soak"
LOOK_S = 0.1
WAITING_CPU = 0.02
"""The share of a core that a waiting writer may use."""
QUIET: dict[str, Any] = {"notify": lambda _: None}
PATIENT: dict[str, Any] = {**QUIET, "timeout_s": 120}
"""Options by their names in the oldest tree that `benchmarks.between` compares with. Both trees take them."""
POOL = 8
STALLS = (0.1, 0.3, 0.5)
"""The trainer pauses after these parts of the pass, until writers were seen to wait for long enough."""
STALL_LIMIT_S = 60.0
"""The longest pause."""


@dataclass(frozen=True)
class Soak:
    """The options of one pass."""

    total_bytes: int
    entry_bytes: int = 150_000
    maxmemory_bytes: int = 256_000_000
    budget_bytes: int = 200_000_000
    writers: int = 1
    is_fleet: bool = False
    partitions: int = 1
    epochs: int = 4
    shards: int = 8
    """The shards of an epoch."""
    trainer_bytes_s: int = 80_000_000
    stall_s: float = 5.0
    """The time for which all writers must be seen to wait in each pause of the trainer."""

    @property
    def shard_samples(self) -> int:
        """Return the samples of one shard."""
        return max(1, self.total_bytes // (self.entry_bytes * self.epochs * self.shards))

    @property
    def samples(self) -> int:
        """Return the samples of all epochs."""
        return self.shard_samples * self.shards * self.epochs


@dataclass
class Seen:
    """The observer's results."""

    looks: int = 0
    used_bytes: int = 0
    """The most memory that the server was seen to use."""
    peak_bytes: int = 0
    """The most memory that the server reports to have used."""
    payload_bytes: int = 0
    """The most payload bytes on the rosters."""
    waiting_s: float = 0.0
    """The writers' seconds between two looks that both found them in the same wait."""
    waiting_cpu_s: float = 0.0
    """The CPU time of their processes in those seconds."""
    most_waiting: int = 0
    samples: int = 0
    """The samples that the trainer got."""
    seconds: float = 0.0
    writer_cpu_s: float = 0.0
    findings: list[str] = field(default_factory=list)

    @property
    def waiting_cpu_share(self) -> float:
        """Return the share of a core that one waiting writer used."""
        return self.waiting_cpu_s / self.waiting_s if self.waiting_s else 0.0


def run_soak(soak: Soak) -> Seen:
    """Run the whole pass."""
    context = multiprocessing.get_context("spawn")
    with EmbeddedServer(maxmemory_bytes=soak.maxmemory_bytes) as server, redis.Redis.from_url(server.url) as client:
        stall = Stall(context.Event(), context.Event())
        train = context.Process(target=_train, args=(server.url, soak, trained := context.Queue(), stall), daemon=True)
        write = _fleet if soak.is_fleet else _write
        places = [-1] if soak.is_fleet else list(range(soak.writers))
        writers = [context.Process(target=write, args=(server.url, soak, place)) for place in places]
        began = time.monotonic()
        for process in [train, *writers]:
            process.start()
        seen = Seen()
        watched = Watched(server.url, client, soak, [process.pid or 0 for process in writers])
        try:
            while train.is_alive() and trained.empty():
                watched.look(seen)
                stall.end_after(soak.stall_s, seen.waiting_s / soak.writers)
                time.sleep(LOOK_S)
            seen.samples = trained.get(timeout=5)
            seen.seconds = time.monotonic() - began
            for process in writers:
                process.join(30)
                if process.exitcode:
                    seen.findings.append(f"a writer ended with {process.exitcode}")
        finally:
            for process in [train, *writers]:
                process.terminate()
        watched.end(seen)
    return seen


@dataclass
class Stall:
    """A pause of the trainer, shared by the trainer and the observer."""

    began: Any
    """An event: the trainer has paused."""
    may_end: Any
    """An event: the trainer may continue."""
    _waited_s: float = 0.0
    """The writers' waiting time when the pause began."""

    def end_after(self, stall_s: float, waited_s: float) -> None:
        """Let the trainer continue once the writers have waited for ``stall_s`` more."""
        if not self.began.is_set() or self.may_end.is_set():
            self._waited_s = waited_s
        elif waited_s - self._waited_s >= stall_s:
            self.may_end.set()

    def stand_still(self) -> None:
        """Pause the trainer. The trainer calls this."""
        self.may_end.clear()
        self.began.set()
        self.may_end.wait(STALL_LIMIT_S)
        self.began.clear()


class Watched:
    """The observed server, its rosters and the writers' processes."""

    def __init__(self, url: str, client: Any, soak: Soak, pids: list[int]) -> None:
        self._client, self._soak, self._pids = client, soak, pids
        self._url = url
        self._before: dict[str, int] = {}
        self._cpu, self._at = 0.0, time.monotonic()

    def look(self, seen: Seen) -> None:
        """Take one look. It is called ten times a second."""
        seen.looks += 1
        seen.used_bytes = max(seen.used_bytes, int(self._client.info("memory")["used_memory"]))
        found = rosters(self._client, STREAM)
        seen.payload_bytes = max(seen.payload_bytes, sum(int(roster.get("bytes", 0)) for roster in found))
        waiting = {
            field: int(json.loads(value)["since"])
            for roster in found
            for field, value in roster.items()
            if field.startswith("w:")
        }
        cpu, now = sum(map(cpu_seconds, self._workers())), time.monotonic()
        seen.writer_cpu_s = max(seen.writer_cpu_s, cpu)
        still = sum(abs(since - self._before.get(place, 0)) < 100 for place, since in waiting.items())
        if still == self._soak.writers:  # all of them wait all the time, so all their CPU time is for waiting
            seen.waiting_s += still * (now - self._at)
            seen.waiting_cpu_s += cpu - self._cpu
        seen.most_waiting = max(seen.most_waiting, len(waiting))
        self._before, self._cpu, self._at = waiting, cpu, now

    def _workers(self) -> list[int]:
        """Return the pids of the writing processes. In a fleet, they are the dispatcher's children."""
        if not self._soak.is_fleet:
            return self._pids
        return [child for pid in self._pids for child in children(pid)]

    def end(self, seen: Seen) -> None:
        """Note the server's final report."""
        seen.peak_bytes = int(self._client.info("memory")["used_memory_peak"])
        seen.findings += json.loads(penstock("audit", STREAM, "--json", "--url", self._url, codes=(0, 1)))["findings"]


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process, or 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def faults(soak: Soak, seen: Seen) -> list[str]:
    """Return the broken promises."""
    found = [*seen.findings]
    if seen.samples != soak.samples:
        found.append(f"{seen.samples} samples came out of {soak.samples}")
    if max(seen.used_bytes, seen.peak_bytes) > soak.maxmemory_bytes:
        found.append(f"the server used {max(seen.used_bytes, seen.peak_bytes)} of {soak.maxmemory_bytes} bytes")
    if seen.payload_bytes > soak.budget_bytes:
        found.append(f"{seen.payload_bytes} payload bytes were held in a budget of {soak.budget_bytes}")
    if not seen.waiting_s:
        found.append("no writer ever waited: nothing was proved")
    if seen.waiting_cpu_share > WAITING_CPU:
        found.append(f"waiting writers used {100 * seen.waiting_cpu_share:.1f}% of a core each")
    return found


# --- the processes ---


def _pool(soak: Soak) -> list[np.ndarray[Any, Any]]:
    return [np.random.default_rng(n).integers(0, 256, soak.entry_bytes, np.uint8) for n in range(POOL)]


def _settings(soak: Soak) -> dict[str, Any]:
    return {"budget_bytes": soak.budget_bytes, "block_bytes": soak.entry_bytes, "partitions": soak.partitions}


def _write(url: str, soak: Soak, place: int) -> None:
    """Write each ``writers``-th shard of each epoch."""
    pool = _pool(soak)
    spec = {"x": ("uint8", (soak.entry_bytes,))}
    with Writer(STREAM, url=url, spec=spec, **QUIET, **_settings(soak)) as writer:
        for number in range(soak.epochs):
            epoch = writer.epoch(number, sizes=[soak.shard_samples] * soak.shards)
            for shard in range(place, soak.shards, soak.writers):
                with epoch.shard(shard) as one:
                    for offset in range(soak.shard_samples):
                        one.write({"x": pool[offset % POOL]})


def numbers() -> list[int]:
    """Return the fleet's dataset: one epoch."""
    return list(range(int(os.environ["PENSTOCK_SOAK_SAMPLES"])))


def sample_of(number: int) -> dict[str, Any]:
    """Return a sample, as the fleet's transform."""
    entry = int(os.environ["PENSTOCK_SOAK_ENTRY"])
    return {"x": np.full(entry, number % 251, np.uint8)}


def _fleet(url: str, soak: Soak, place: int) -> None:
    """Run a dispatcher with its workers. The jobs are on the stream's own server."""
    os.environ["PENSTOCK_SOAK_SAMPLES"] = str(soak.shard_samples * soak.shards)
    os.environ["PENSTOCK_SOAK_ENTRY"] = str(soak.entry_bytes)
    with Writer(STREAM, url=url, **QUIET, **_settings(soak)):
        pass
    source = ("dataset", "benchmarks.backpressure:numbers", "--transform", "benchmarks.backpressure:sample_of")
    size = ("--epochs", soak.epochs, "--shard-samples", soak.shard_samples, "--workers", soak.writers)
    penstock("produce", *source, "--stream", STREAM, *size, "--json", "--url", url)


def _train(url: str, soak: Soak, trained: Any, stall: Stall) -> None:
    """Read at the fixed rate, with three pauses."""
    batch_size = max(1, 2_000_000 // soak.entry_bytes)
    stalls = [int(soak.samples * share) for share in STALLS]
    seen = 0
    with Loader(STREAM, group="g", batch_size=batch_size, url=url, **PATIENT) as loader:
        due = time.monotonic()
        for _ in range(soak.epochs):
            for batch in loader:
                seen += batch.size
                due = max(due, time.monotonic() - 0.5) + batch.size * soak.entry_bytes / soak.trainer_bytes_s
                time.sleep(max(0.0, due - time.monotonic()))
                if stalls and seen >= stalls[0]:
                    stalls.pop(0)
                    stall.stand_still()
    trained.put(seen)


def main() -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backpressure", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=20, help="payload to pass (default 20)")
    parser.add_argument("--entry-kb", type=int, default=150, help="kB of a sample, one to an entry (default 150)")
    parser.add_argument("--maxmemory-mb", type=int, default=256, help="of the server (default 256)")
    parser.add_argument("--budget-mb", type=int, default=200, help="of the stream (default 200)")
    parser.add_argument("--writers", type=int, default=1, help="processes that write (default 1)")
    parser.add_argument("--fleet", action="store_true", help="the writers are RQ workers, jobs on the same server")
    parser.add_argument("--partitions", type=int, default=1, help="default 1")
    parser.add_argument("--trainer-mb-s", type=float, default=80, help="what the trainer reads (default 80)")
    parser.add_argument("--stall-s", type=float, default=5, help="how long writers wait at each standstill (default 5)")
    args = parser.parse_args()
    soak = Soak(
        total_bytes=int(args.gigabytes * 1e9), entry_bytes=args.entry_kb * 1000, budget_bytes=args.budget_mb * 10**6,
        maxmemory_bytes=args.maxmemory_mb * 10**6, writers=args.writers, is_fleet=args.fleet,
        partitions=args.partitions, trainer_bytes_s=int(args.trainer_mb_s * 1e6), stall_s=args.stall_s,
    )  # fmt: skip
    seen = run_soak(soak)
    print(json.dumps({"soak": asdict(soak), "seen": asdict(seen)}))
    passed = seen.samples * soak.entry_bytes / 1e9
    print(
        f"{passed:.1f} GB in {seen.seconds:.0f} s; server at most {seen.peak_bytes / 1e6:.0f} of "
        f"{soak.maxmemory_bytes / 1e6:.0f} MB, payload {seen.payload_bytes / 1e6:.0f} of {soak.budget_bytes / 1e6:.0f} "
        f"MB ({seen.looks} looks); a waiting writer used {100 * seen.waiting_cpu_share:.2f}% of a core "
        f"({seen.waiting_s:.0f} s of waiting), writing {seen.writer_cpu_s / max(passed, 1e-9):.2f} CPU s/GB in all"
    )
    found = faults(soak, seen)
    for fault in found:
        print(f"NOT AS PROMISED: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
