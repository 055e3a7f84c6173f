"""The four questions of ``benchmarks.correctness`` for one peer: real processes, real kills."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.counting import Count, Process, Stuck, counted, tallied, wait_for
from benchmarks.peers.catalogue import PRODUCER, RESUME, SLOW, TRAINER, Peer
from benchmarks.peers.protocol import Job
from benchmarks.stock import free_port
from penstock import EmbeddedServer

QUIET_S = 4.0
"""The silence after which a system without an end has nothing more to give: twice a lease."""
SLOWER = 4
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where segments are meant to be


@dataclass(frozen=True)
class Size:
    """The samples that are moved, and their rate."""

    samples: int = 2000
    batch: int = 20
    make_s: float = 0.001
    step_s: float = 0.02
    checkpoint_every: int = 10

    @property
    def room(self) -> int:
        """Return the samples between producer and trainer: a quarter of all."""
        return self.samples // 4


@dataclass(frozen=True)
class Answer:
    """The counts of one run."""

    count: Count
    steps: tuple[int, ...] = ()
    """The steps of each rank."""
    first_batch_s: float | None = None
    """The time from the start of a resuming process to its first batch, without its imports."""
    with_imports_s: float | None = None
    note: str = ""
    """The reported failures."""


class Stage:
    """One run of one peer: its server or folder, and its processes."""

    def __init__(self, peer: Peer, size: Size) -> None:
        self.peer, self.size = peer, size
        self.processes: list[Process] = []
        self._stack = ExitStack()
        self._extra: dict[str, str] = {}
        self._place = ""
        self.servers: list[int] = []
        """The process ids of servers."""

    def __enter__(self) -> Stage:
        folder = tempfile.mkdtemp(prefix="penstock-bench-", dir=SHARED_MEMORY if self.peer.segments else None)
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self._place = folder
        if self.peer.segments:
            self._extra["segments"] = folder
        if self.peer.backing == "server":
            server = self._stack.enter_context(EmbeddedServer())
            self._place, self.servers = server.url, [server.pid]
        elif self.peer.backing == "socket":
            self._place = f"{folder}/socket"
        elif self.peer.backing == "folder":
            self._extra["MASTER_PORT"] = str(free_port())
            self._place = f"{folder}/shards"
            process = self._start("prepare")
            wait_for(lambda: process.is_over, "the data to be written", [process])
        elif self.peer.backing == "service":
            self._extra |= {"port": str(free_port()), "worker": str(free_port()), "folder": folder}
            process = self._start("serve")
            wait_for(lambda: bool(process.all("made")), "the dispatcher", [process])
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.close()
        self._stack.close()

    def produce(self) -> Process | None:
        """Start the producer. Returns None if the trainers make their samples, or if all is written."""
        return None if self.peer.inside or self.peer.backing == "folder" else self._start("produce")

    def train(self, **fields: Any) -> Process:
        """Start a trainer."""
        return self._start("read", **fields)

    def _start(self, role: str, **fields: Any) -> Process:
        size = self.size
        job = Job(
            role, self.peer.mode, self._place, size.samples, size.batch, size.room, size.make_s, size.step_s,
            extra=self._extra,
        )  # fmt: skip
        process = Process(self.peer.module, self.peer.environment, replace(job, **fields))
        self.processes.append(process)
        return process

    def finish(self, trainers: list[Process], producer: Process | None) -> str:
        """Wait until nothing more will come, and return the reports at the end."""
        living = [one for one in trainers if not one.was_killed]
        if self.peer.ends:
            wait_for(lambda: all(one.is_over for one in living), "the epoch's end", living)
            failed = [one for one in living if one.popen.returncode]
            return "; ".join(one.last_words() for one in failed)
        assert producer is not None
        wait_for(lambda: producer.is_over or bool(producer.all("made")), "the producer", [producer])
        wait_for(lambda: time.monotonic() - max(_last(one) for one in trainers) > QUIET_S, "silence", trainers)
        return ""


def _last(process: Process) -> float:
    return float(process.said[-1]["at"]) if process.said else process.began


def handed(process: Process) -> int:
    """Return the samples that a training got so far."""
    return sum(map(len, process.steps))


def _until(process: Process, is_so: Callable[[], bool], what: str) -> None:
    """Wait until ``is_so`` returns True, or the process has ended."""
    wait_for(lambda: is_so() or process.is_over, what, [process])


def producer_killed(peer: Peer, size: Size) -> Answer:
    """Kill the producer twice, after a third and after two. It is started again at once, as by a supervisor."""
    with Stage(peer, size) as stage:
        trainers = [stage.train()]
        producer = None
        for third in (1, 2):
            enough = size.samples * third // 3
            producer = stage.produce()
            _until(trainers[-1], lambda enough=enough: handed(trainers[-1]) >= enough, f"{enough} samples")  # type: ignore[misc]
            if producer is not None:
                producer.kill()
                continue
            os.kill(trainers[-1].all("workers")[0]["pids"][0], signal.SIGKILL)
            wait_for(lambda: trainers[-1].is_over, "the trainer whose worker is dead", trainers)
            trainers.append(stage.train())  # a worker process of the trainer, which ends with it
        note = stage.finish(trainers[-1:], stage.produce())
        return Answer(counted(trainers, size.samples), note=note)


def trainer_killed(peer: Peer, size: Size) -> Answer:
    """Kill a trainer in a step, after a part of the epoch.

    Others of its group take over. A rank, or a single trainer, is started again.
    """
    with Stage(peer, size) as stage:
        world = {"members": 1, "ranks": 2, "one": 1}[peer.crew]
        places: list[dict[str, Any]] = [{"member": f"m{n}", "rank": n % world, "world": world} for n in range(2)]
        trainers = [stage.train(**place) for place in places[: 1 if peer.crew == "one" else 2]]
        wait_for(lambda: all(one.all("ready") for one in trainers), "the trainers", trainers)
        producer = stage.produce()
        first = trainers[0]
        enough = size.samples // 6
        _until(first, lambda: handed(first) >= enough and len(first.ended) < len(first.steps), f"{enough} samples")
        first.kill()
        if peer.crew != "members":
            trainers.append(stage.train(**places[0]))
        note = stage.finish(trainers, producer)
        return Answer(counted(trainers, size.samples), note=note)


def one_slowed(peer: Peer, size: Size) -> Answer:
    """Run two trainers, one with a step that takes four times as long."""
    with Stage(peer, size) as stage:
        world = 2 if peer.fan == "ranks" else 1
        trainers = [
            stage.train(
                member=f"m{n}", group=f"g{n}" if peer.fan == "groups" and peer.backing == "server" else "g",
                rank=n % world, world=world, step_s=size.step_s * (SLOWER if n else 1),
            )
            for n in range(2)
        ]  # fmt: skip
        wait_for(lambda: all(one.all("ready") for one in trainers), "the trainers", trainers)
        note = stage.finish(trainers, stage.produce())
        steps = tuple(len(one.ended) for one in trainers) if peer.fan == "ranks" else ()
        if peer.fan != "groups":
            return Answer(counted(trainers, size.samples), steps, note=note)
        counts = [counted([one], size.samples) for one in trainers]
        both = Count(*(sum(getattr(one, name) for one in counts) for name in Count.__dataclass_fields__))
        return Answer(both, steps, note=note)


def resumed(peer: Peer, size: Size) -> Answer:
    """Kill a trainer between two checkpoints.

    Model and data go back to the last checkpoint, and later training is undone.
    """
    with Stage(peer, size) as stage:
        first = stage.train(checkpoint_every=size.checkpoint_every)
        producer = stage.produce()
        enough = size.samples // size.batch // 2 + size.checkpoint_every // 2
        _until(first, lambda: len(first.steps) >= enough, f"{enough} steps")
        first.kill()
        saved = first.all("checkpoint")
        state = saved[-1]["state"] if saved else None
        kept = first.ended[: len(saved) * size.checkpoint_every]
        second = stage.train(checkpoint_every=size.checkpoint_every, state=state)
        note = stage.finish([second], producer)
        if not second.steps:
            raise Stuck(f"the resumed trainer got nothing: {note or second.last_words()}")
        count = tallied([(True, batch) for batch in (*kept, *second.ended)], size.samples)
        at, ready = second.all("step")[0]["at"], second.all("ready")[0]["at"]
        return Answer(count, (), at - ready, at - second.began, note)


ASK: dict[str, Callable[[Peer, Size], Answer]] = {
    PRODUCER: producer_killed,
    TRAINER: trainer_killed,
    SLOW: one_slowed,
    RESUME: resumed,
}
