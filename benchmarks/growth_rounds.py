"""One round of growth: a fresh server, one writer process and one process for each member. It measures the CPU time of
all, and the calls of the server.

Samples of 1 kB in blocks of 256 kB are small, so that the protocol dominates. The initial work of a process (fresh
memory, connections, code run for the first time) happens in an epoch before the clock starts.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from dataclasses import dataclass, field, replace
from typing import Any

import redis

from benchmarks.cpu import cpu_seconds
from penstock import EmbeddedServer, Loader, Writer

STREAM = "growth"
SAMPLE_BYTES = 1024
BATCH = 256
"""Samples in a batch, and in a block. So a rank's batch is an entry, and entries are as large in a small shard."""
BUDGET_BYTES = 256 << 20
"""The budget. It is below what a round writes, so that entries are trimmed during the round, as in a long run."""
OLD_SAMPLES = 64
"""The samples of each older retained epoch."""
WARM_SHARE = 4
"""The epoch before has this part of the samples, 1 / 4, in equally many shards."""
WARM_PATIENCE_S = 20.0
"""A member that got nothing of that epoch, because others were faster, continues in the measured one after this
time.
"""
PATIENCE_S = 170.0


@dataclass(frozen=True)
class Size:
    """The parameters of one round."""

    samples: int = 300_000
    partitions: int = 1
    groups: int = 1
    members: int = 1
    """The members of each group, or the ranks of an ordered one."""
    shards: int = 32
    retained: int = 1
    """The retained epochs, with the measured one, and without the one in which processes warm up."""
    is_ordered: bool = False

    @property
    def delivered(self) -> int:
        """Return the samples that all groups get together."""
        return self.samples * self.groups


@dataclass(frozen=True)
class Cost:
    """The cost of one round. Joining, warming up and leaving are counted separately."""

    seconds: float
    writer_cpu_s: float
    readers_cpu_s: float
    server_cpu_s: float
    joining_cpu_s: float
    """The CPU time of all members to join, to read the epoch before, and to leave."""
    calls: int
    """The commands that clients sent."""
    commands: dict[str, int] = field(default_factory=dict)
    """Command -> calls, including those of scripts."""


def run_round(size: Size) -> Cost:
    """Run a round. All members have joined and read an epoch when the clock starts, and none has left when it ends."""
    with EmbeddedServer() as server:
        _prepare(server.url, size)
        context = _context()
        start, results = context.Barrier(size.groups * size.members + 2), context.Queue()
        warm, go, leave = context.Semaphore(0), context.Event(), context.Event()
        processes = [context.Process(target=_write, args=(server.url, size, start, go, results, leave), daemon=True)]
        for group in range(size.groups):
            for member in range(size.members):
                arguments = (server.url, size, group, member, start, warm, results, leave)
                processes.append(context.Process(target=_read, args=arguments, daemon=True))
        for process in processes:
            process.start()
        start.wait(PATIENCE_S)
        until = time.monotonic() + WARM_PATIENCE_S
        for _ in range(size.groups * size.members):
            warm.acquire(timeout=max(0.0, until - time.monotonic()))
        began, before = time.perf_counter(), _look(server.url)
        go.set()
        found = [results.get(timeout=PATIENCE_S) for _ in processes]
        seconds, after = time.perf_counter() - began, _look(server.url)
        leave.set()
        joining = sum(results.get(timeout=PATIENCE_S)[1] for _ in processes)
        for process in processes:
            process.join(30)
    cpu = {role: sum(one[1] for one in found if one[0] == role) for role in ("write", "read")}
    handed = sum(one[2] for one in found if one[0] == "read")
    if handed < size.delivered - (size.members * BATCH if size.is_ordered else 0):
        raise AssertionError(f"{handed} of {size.delivered} samples were handed out")
    return Cost(seconds, cpu["write"], cpu["read"], after[0] - before[0], joining, after[1] - before[1],
                {name: count - before[2].get(name, 0) for name, count in after[2].items()})  # fmt: skip


def run_waiting(size: Size, seconds: float = 5.0) -> Cost:
    """Measure the cost of waiting: an open epoch without samples, for ``seconds``."""
    with EmbeddedServer() as server:
        _prepare(server.url, size)
        context = _context()
        start, nothing, never = context.Barrier(size.groups * size.members + 2), context.Queue(), context.Event()
        writer = context.Process(target=_hold, args=(server.url, size, start, never), daemon=True)
        shared = (start, context.Semaphore(0), nothing, never)
        members = [
            context.Process(target=_read, args=(server.url, size, group, member, *shared), daemon=True)
            for group in range(size.groups)
            for member in range(size.members)
        ]
        for process in (writer, *members):
            process.start()
        start.wait(PATIENCE_S)
        time.sleep(2)
        before, cpu = _look(server.url), [cpu_seconds(process.pid or 0) for process in (writer, *members)]
        time.sleep(seconds)
        now, after = [cpu_seconds(process.pid or 0) for process in (writer, *members)], _look(server.url)
        for process in (writer, *members):
            process.kill()
            process.join()
    used = [late - early for early, late in zip(cpu, now, strict=True)]
    return Cost(seconds, used[0], sum(used[1:]), after[0] - before[0], 0.0, after[1] - before[1],
                {name: count - before[2].get(name, 0) for name, count in after[2].items()})  # fmt: skip


def _context() -> Any:
    """Return a context that forks children from one process that has imported everything, and has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # a member needs the imports of this module
    return context


def _prepare(url: str, size: Size) -> None:
    """Make the stream and the earlier epochs. They are written, read by every group, and kept."""
    with Writer(
        STREAM, url=url, spec={"x": ("uint8", (SAMPLE_BYTES,))}, partitions=size.partitions,
        budget_bytes=BUDGET_BYTES, **QUIET, **BLOCKS,
    ) as writer:  # fmt: skip
        loaders = [_loader(url, Size(is_ordered=size.is_ordered), group, 0) for group in range(size.groups)]
        for _ in range(size.retained - 1):
            with writer.epoch() as epoch:
                epoch.write_batch({"x": _rows()[:OLD_SAMPLES]})
            for loader in loaders:
                for _ in loader:
                    pass
        for loader in loaders:
            loader.close()


def _loader(url: str, size: Size, group: int, member: int) -> Any:
    name = f"group-{group}"
    how: dict[str, Any] = {"member": f"member-{member}"}
    if size.is_ordered:
        how = {"order": "canonical", "rank": member, "world_size": size.members, "remainder": "drop"}
    return Loader(STREAM, group=name, batch_size=BATCH, url=url, **QUIET, **how)


def _silent(_: str) -> None:
    """Ignore the notices of members."""


QUIET: dict[str, Any] = {"notify": _silent}
BLOCKS: dict[str, Any] = {"block_bytes": BATCH * SAMPLE_BYTES}
"""Options by their names in the oldest tree that `benchmarks.between` compares with. Both trees take them."""


def _rows() -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, 255, (BATCH, SAMPLE_BYTES)).astype(np.uint8)


def _sizes(size: Size) -> list[int]:
    return [size.samples * (n + 1) // size.shards - size.samples * n // size.shards for n in range(size.shards)]


def _write(url: str, size: Size, start: Any, go: Any, results: Any, leave: Any) -> None:
    with Writer(STREAM, url=url, **QUIET) as writer:
        start.wait(PATIENCE_S)
        rows = _rows()
        _write_epoch(writer, _sizes(replace(size, samples=size.samples // WARM_SHARE)), rows)
        go.wait(PATIENCE_S)
        before = _own_cpu()
        _write_epoch(writer, _sizes(size), rows)
        results.put(("write", _own_cpu() - before, 0))
        leave.wait(PATIENCE_S)
    results.put(("written", 0.0, 0))


def _write_epoch(writer: Any, sizes: list[int], rows: Any) -> None:
    with writer.epoch(sizes=sizes) as epoch:
        for number, length in enumerate(sizes):
            with epoch.shard(number) as shard:
                for at in range(0, length, BATCH):
                    shard.write_batch({"x": rows[: length - at]})


def _hold(url: str, size: Size, start: Any, never: Any) -> None:
    with Writer(STREAM, url=url, **QUIET) as writer, writer.epoch(sizes=_sizes(size)):
        start.wait(PATIENCE_S)
        never.wait()


def _read(
    url: str, size: Size, group: int, member: int, start: Any, warm: Any, results: Any, leave: Any
) -> None:  # fmt: skip
    born = _own_cpu()
    loader = _loader(url, size, group, member)
    start.wait(PATIENCE_S)
    epoch = -1
    while epoch < size.retained:  # the epochs before the measured one have the lower numbers
        before = _own_cpu()
        for batch in loader:
            epoch = batch.epoch
        warm.release()
    measured = _own_cpu() - before
    results.put(("read", measured, loader.stats().samples))
    leave.wait(PATIENCE_S)
    loader.close()
    results.put(("left", _own_cpu() - born - measured, 0))


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _look(url: str) -> tuple[float, int, dict[str, int]]:
    """Return CPU seconds of the server, the commands it got, and calls by command, including those of scripts."""
    with redis.Redis.from_url(url) as client:
        told: dict[str, Any] = client.info("all")
    commands = {name.removeprefix("cmdstat_"): one["calls"] for name, one in told.items() if name[:8] == "cmdstat_"}
    return (
        float(told["used_cpu_sys"]) + float(told["used_cpu_user"]), int(told["total_commands_processed"]), commands,
    )  # fmt: skip
