"""The processes of ``benchmarks.loading``: one round of one side, in a process that is started clean for it.

Every side makes the same samples with the same lines (``photographs``), in batches of the same size, and ends with
torch tensors. Before the clock starts each process has done some of it: imports, starts and first connections are
nobody's, file caches are warm.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from benchmarks.cpu import tree_seconds
from benchmarks.photographs import SIDE, photographs, warm_up

STREAM = "photographs"
BATCH = 64
PATIENCE_S = 120.0
QUIET: Any = {"notify": lambda _: None}


@dataclass(frozen=True)
class Job:
    """What one round of one side does."""

    side: str
    """``penstock``, ``torch`` or ``bare``."""
    workers: int
    """Of torch: of each trainer."""
    trainers: int
    payload: str = "inline"
    epochs: int = 1
    """On the clock, one after the other."""


@dataclass(frozen=True)
class Round:
    """What it took."""

    seconds: float
    samples: int
    """That trainers got in all; without trainers, that were made."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Role -> CPU seconds of its processes."""

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds

    @property
    def cpu_ms(self) -> float:
        """Of all processes, for each sample."""
        return 1000 * sum(self.cpu_s.values()) / self.samples


def run_round(job: Job) -> Round:
    """One round. Raises RuntimeError if it does not end well."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_round, args=(job, results))
    process.start()
    process.join(PATIENCE_S)
    if process.exitcode or results.empty():
        process.kill()
        raise RuntimeError(f"a round of {job} ended with {process.exitcode}")
    found: Round = results.get()
    return found


def _round(job: Job, results: Any) -> None:
    results.put({"penstock": _penstock, "torch": _torch, "bare": _bare}[job.side](job))


# --- a loop that does nothing else ------------------------------------------------------------------------------------


def _bare(job: Job) -> Round:
    """Decode and transform, in this process.

    glibc gives memory back to the kernel until a block of this size was freed once; without that (any worker has
    freed one) the loop takes 1.5 times as long in page faults, and would be no baseline.
    """
    freed = np.ones(30 << 20, np.uint8)
    del freed
    _walk(warm_up())
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    made = sum(_walk(photographs()) for _ in range(job.epochs))
    after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - began
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Round(seconds, made, {"workers": cpu})


def _walk(dataset: Any) -> int:
    for index in np.random.default_rng(1).permutation(len(dataset)):
        dataset[int(index)]
    return len(dataset)


# --- trainers ---------------------------------------------------------------------------------------------------------


class Trainers:
    """Forked processes that pass through the same data: once to warm up, then as often as there are epochs."""

    def __init__(self, count: int, epochs: int, passes: Callable[[int], Iterator[Any]]) -> None:
        """``passes(number)`` is called in trainer ``number``; each element is an iterable of one pass's batches."""
        self._epochs = epochs
        context = multiprocessing.get_context("fork")
        self._gate = context.Barrier(count + 1)
        self._results = context.Queue()
        self._processes: list[BaseProcess] = [
            context.Process(target=self._train, args=(passes, number)) for number in range(count)
        ]
        for process in self._processes:
            process.start()

    def _train(self, passes: Callable[[int], Iterator[Any]], number: int) -> None:
        found = passes(number)
        for epochs in (1, self._epochs):
            self._gate.wait(PATIENCE_S)
            samples = sum(len(batch["x"]) for _ in range(epochs) for batch in next(found))
            # perf_counter is CLOCK_MONOTONIC here: one clock for all processes of the machine
            self._results.put((time.perf_counter(), samples))
        self._gate.wait(PATIENCE_S)

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [process.pid or 0 for process in self._processes]

    def begin(self) -> float:
        """Lets all begin the next pass; returns when that was."""
        self._gate.wait(PATIENCE_S)
        return time.perf_counter()

    def end(self) -> tuple[float, int]:
        """When the last of them was through its pass, and how many samples they got in all."""
        found = [self._results.get(timeout=PATIENCE_S) for _ in self._processes]
        return max((at for at, _ in found), default=time.perf_counter()), sum(samples for _, samples in found)

    def close(self) -> None:
        """After the last pass."""
        self._gate.wait(PATIENCE_S)
        for process in self._processes:
            process.join(PATIENCE_S)


# --- torch ------------------------------------------------------------------------------------------------------------


class Order:
    """Batches of places: of the first few, until `length` says otherwise."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        places = np.random.default_rng(1).permutation(self.length).tolist()
        return iter([places[at : at + BATCH] for at in range(0, len(places), BATCH)])


def _torch(job: Job) -> Round:
    """Every trainer has a DataLoader of its own, and that its worker processes."""
    from torch.utils.data import DataLoader

    def passes(number: int) -> Iterator[Any]:
        whole, order = photographs(), Order(len(warm_up()))
        loader: Any = DataLoader(whole, batch_sampler=order, num_workers=job.workers, persistent_workers=True)
        yield loader
        order.length = len(whole)
        while True:
            yield loader

    trainers = Trainers(job.trainers, job.epochs, passes)
    trainers.begin()
    trainers.end()
    before = tree_seconds(trainers.pids)
    began = trainers.begin()
    at, samples = trainers.end()
    found = Round(at - began, samples, {"trainers and workers": tree_seconds(trainers.pids) - before})
    trainers.close()
    return found


# --- Penstock ---------------------------------------------------------------------------------------------------------


def _penstock(job: Job) -> Round:
    """One server, one fleet, one stream; a group for each trainer. The epoch is planned and queued on the clock."""
    from penstock_common.stream.servers.embedded import EmbeddedServer
    from penstock_producer.working.fleet import Fleet
    from penstock_producer.working.worker import WorkerOptions
    from penstock_producer.writing.writer import Writer

    spec = {"x": ("uint8", (SIDE, SIDE, 3)), "y": ("int64", ())}
    with EmbeddedServer() as server:
        with Writer(STREAM, url=server.url, spec=spec, payload=job.payload, **QUIET):
            pass
        options = WorkerOptions(server.url, server.url, owner=os.getpid())
        fleet = Fleet(options, job.workers)  # forked while there are neither threads nor frameworks
        try:
            return _fed(job, server, options, fleet)
        finally:
            fleet.stop()


def _fed(job: Job, server: Any, options: Any, fleet: Any) -> Round:
    def passes(number: int) -> Iterator[Any]:
        from torch.utils.data import DataLoader

        from penstock_consumer.adapters.torch import dataset
        from penstock_consumer.loader import Loader

        with Loader(STREAM, group=f"g{number}", batch_size=BATCH, url=server.url, **QUIET) as loader:
            batches: Any = DataLoader(dataset(loader), batch_size=None)
            while True:
                yield batches

    trainers = Trainers(job.trainers, job.epochs, passes)
    roles = {"server": [server.pid], "workers": fleet.pids, "trainers": trainers.pids}
    trainers.begin()
    _produce(options, "warm_up", 1)
    trainers.end()
    _expect_more(server.url)
    before = {role: tree_seconds(pids) for role, pids in roles.items()} | {"dispatcher": _own_seconds()}
    began = trainers.begin()
    made = _produce(options, "photographs", job.epochs)
    at, samples = trainers.end()
    after = {role: tree_seconds(pids) for role, pids in roles.items()} | {"dispatcher": _own_seconds()}
    trainers.close()
    return Round(at - began, samples or made, {role: after[role] - before[role] for role in after})


def _produce(options: Any, name: str, epochs: int) -> int:
    """So many, as ``penstock produce --workers 0`` makes them beside workers that are there."""
    from penstock_producer.planning.plan import ProductionPlan
    from penstock_producer.planning.production import Production
    from penstock_producer.sources.config import DatasetConfig

    plan = ProductionPlan(stream=STREAM, source=DatasetConfig(name=f"benchmarks.photographs:{name}"), epochs=epochs)
    with Production(plan, options, workers=0, **QUIET) as production:
        for _ in production.run():
            pass
        return production.summary().samples


def _expect_more(url: str) -> None:
    """A production announced its last epoch, and trainers would wait for no other."""
    from penstock_common.stream.link.connection import connect
    from penstock_common.stream.streams import load_stream, set_plan

    client = connect(url)
    set_plan(client, load_stream(client, STREAM), None)
    client.close()


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
