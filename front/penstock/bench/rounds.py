"""The processes of one turn, which measures one method with one number of trainers.

A turn has trainers, all fed in the same way, and with Penstock a producer, too. A round has a turn of each method and
number.

All are forked from a process without threads, and end with it. A turn is timed from batch to batch, once every trainer
has had its first batches, so starts and imports are not counted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from penstock.bench.baselines import Feed, end_with, made, samples_in
from penstock_common.errors import PenstockError, SampleError
from penstock_common.stream.client import connect
from penstock_common.stream.removal.deletion import delete_stream
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.jobs.fill import HOPELESS, TooManyBad
from penstock_producer.jobs.forking import forked
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import SourceConfig, WeightedConfig, WeightedPart
from penstock_producer.sources.protocol import AnySource

STREAM = "bench"
PATIENCE_S = 120.0
"""The longest time in a turn without a batch of some trainer."""
END_S = 15.0
"""The longest time that the processes of a turn may take to end."""
WARM_UP = 0.25
"""The part of a turn that is not timed, while caches, free pages and buffers fill."""
_LOOK_S = 0.05
_FORK = get_context("fork")
_ENDING = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class SampleFacts:
    """The shape and size of one sample of the source."""

    seconds: float
    """The time to make it, alone in one process."""
    nbytes: float


@dataclass(frozen=True)
class BenchSetup:
    """The settings that all turns share."""

    config: SourceConfig
    source: AnySource
    """The open source that ``config`` describes. The epochs of ``config`` may be longer."""
    sample: SampleFacts
    url: str
    folder: str
    """The folder for segments, or '' without segments."""
    spec: Mapping[str, Any] | None
    batch: int
    workers: int
    budget_bytes: int


@dataclass(frozen=True)
class FeedMethod:
    """One way to feed a trainer: by ``feed``, or by a stream with the payload storage ``payload``."""

    name: str
    feed: Feed | None = None
    payload: str = ""


class BenchTurn:
    """The processes of one turn, as a ``with`` block."""

    def __init__(self, setup: BenchSetup, method: FeedMethod, trainers: int) -> None:
        self._setup, self._method, self._trainers = setup, method, trainers
        self._cells = _FORK.Array("d", 2 * trainers)
        """For each trainer, its samples and the time of the latest of them."""
        self._complaints = _FORK.SimpleQueue()
        self._processes: list[BaseProcess] = []

    def rate(self, seconds: float) -> float:
        """Return the samples per second of all trainers. It takes ``seconds``, including the start, or a little longer.

        Raises:
            PenstockError: A process ended, or a trainer had no batch for two minutes.
        """
        began = time.monotonic()
        for number in range(self._trainers):  # inside the `with` block, which ends the processes after any interruption
            self._start(self._train, number, max(1, self._setup.workers // self._trainers))
        if self._method.feed is None:
            self._start(self._produce)
        self._await(lambda: all(self._look()[::2]))
        left = max(seconds / 4, began + seconds - time.monotonic())
        self._sleep(left * WARM_UP)
        before = self._look()
        self._sleep(left * (1 - WARM_UP))
        self._await(lambda: all(now > then for now, then in zip(self._look()[1::2], before[1::2], strict=True)))
        after = self._look()
        gained = [now - then for now, then in zip(after, before, strict=True)]
        return sum(samples / spent for samples, spent in zip(gained[::2], gained[1::2], strict=True))

    def __enter__(self) -> BenchTurn:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        if self._method.feed is None:
            with contextlib.suppress(PenstockError), connect(self._setup.url) as client:
                delete_stream(client, STREAM)

    def _look(self) -> list[float]:
        with self._cells.get_lock():
            return list(self._cells.get_obj())

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._await(lambda: time.monotonic() >= until, patience_s=seconds + PATIENCE_S)

    def _await(self, is_true: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        until = time.monotonic() + patience_s
        while not is_true():
            if (ended := next((each for each in self._processes if not each.is_alive()), None)) is not None:
                why = f"a process ended with exit code {ended.exitcode}"
                raise PenstockError(
                    f"{self._method.name}: {why if self._complaints.empty() else self._complaints.get()}"
                )
            if time.monotonic() > until:
                raise PenstockError(f"{self._method.name}: no batch of some trainer in {patience_s:.0f} s")
            time.sleep(_LOOK_S)

    # --- in the processes -----------------------------------------------------------------------------------------

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        # a signal must not come between a fork and the note of its pid
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            self._processes.append(forked(self._guarded, os.getpid(), work, *args))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _guarded(self, owner: int, work: Callable[..., None], *args: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner gets it, too, and ends this process
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        end_with(owner, self._setup.folder)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            work(*args)
        except KeyboardInterrupt:
            pass
        except Exception as error:
            self._complaints.put(_as_text(error))
            raise SystemExit(1) from None

    def _train(self, number: int, workers: int) -> None:
        for samples in self._from_stream(number) if self._method.feed is None else self._from_feed(workers):
            with self._cells.get_lock():
                self._cells[2 * number] += samples
                self._cells[2 * number + 1] = time.monotonic()

    def _from_feed(self, workers: int) -> Iterator[int]:
        """Yield batches, and end between two of them, because torch's workers report an interrupted batch."""
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        assert self._method.feed is not None
        for samples in self._method.feed(self._setup.source, self._setup.batch, workers):
            yield samples
            if ended.is_set():
                return

    def _from_stream(self, number: int) -> Iterator[int]:
        setup, group = self._setup, f"trainer-{number}"
        with Loader(STREAM, group=group, batch_size=setup.batch, url=setup.url, tuning=Tuning(notify=_quiet)) as loader:
            while True:
                for batch in loader:
                    yield batch.size

    def _produce(self) -> None:
        setup = self._setup
        plan = ProductionPlan(
            stream=STREAM,
            source=setup.config,
            spec=setup.spec,
            is_endless=True,
            budget_bytes=setup.budget_bytes,
            payload=self._method.payload,
        )
        options = WorkerOptions(url=setup.url, queue_url=setup.url, queue=STREAM)
        with Production(plan, options, workers=setup.workers, notify=_quiet) as production:
            for _ in production.run():
                pass


def measure(
    setup: BenchSetup,
    methods: Sequence[FeedMethod],
    trainers: Sequence[int],
    seconds: float,
    tell: Callable[[int, str], None],
) -> dict[int, dict[str, list[float]]]:
    """Run all turns, every other round backwards. ``tell`` gets the number of finished turns and the latest result.

    Returns:
        Number of trainers -> name of method -> samples per second in each round.
    """
    rates: dict[int, dict[str, list[float]]] = {count: {method.name: [] for method in methods} for count in trainers}
    turns = [(count, method) for count in trainers for method in methods]
    order = [turn for number in range(rounds_in(seconds)) for turn in (turns if number % 2 == 0 else turns[::-1])]
    until = time.monotonic() + seconds
    for done, (count, method) in enumerate(order):
        share = (until - time.monotonic()) / (len(order) - done)
        with BenchTurn(setup, method, count) as turn:
            rates[count][method.name].append(turn.rate(max(share, seconds / len(order) / 2)))
        whom = "1 trainer" if count == 1 else f"{count} trainers"
        tell(done + 1, f"{method.name}, {whom}: {rates[count][method.name][-1]:,.0f} samples/s")
    return rates


def rounds_in(seconds: float) -> int:
    """Return the number of rounds. Turns that are too short give no reliable rate."""
    return 3 if seconds >= 60 else 1


def measure_source(source: AnySource, seconds: float) -> SampleFacts:
    """Make samples for about ``seconds``, in a separate process.

    Raises:
        PenstockError: No sample can be made.
    """
    ours, theirs = _FORK.Pipe(duplex=False)
    process = forked(_measure_source, theirs, source, seconds)
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = "the process that made the first samples died"
    finally:
        process.join()
    if isinstance(found, str):
        raise PenstockError(found)
    return SampleFacts(*found)


def repeated(config: SourceConfig, source: AnySource, samples: int) -> SourceConfig:
    """Return a source with epochs of at least ``samples``, if possible, so that no turn meets an epoch's end."""
    if source.unit != "sample" or len(source) >= samples:
        return config
    if isinstance(config, WeightedConfig):
        return config.model_copy(update={"samples": samples})
    return WeightedConfig(parts=(WeightedPart(source=config),), samples=samples)


def _measure_source(pipe: Connection, source: AnySource, seconds: float) -> None:
    try:
        pipe.send(_costs(source, seconds))
    except Exception as error:
        pipe.send(_as_text(error))


def _costs(source: AnySource, seconds: float) -> tuple[float, float]:
    bad = 0

    def complain(error: SampleError) -> None:
        nonlocal bad
        bad += 1
        if bad >= HOPELESS:
            raise TooManyBad(f"{bad} samples cannot be made; the last: {error}")

    samples = made(source, complain)
    first = next(samples)  # not timed, because it includes imports
    count = samples_in(source, first)
    nbytes = sum(len(value) if isinstance(value, bytes) else np.asarray(value).nbytes for value in first.values())
    began, timed = time.perf_counter(), 0
    while timed == 0 or time.perf_counter() - began < seconds:
        timed += samples_in(source, next(samples))
    return (time.perf_counter() - began) / timed, nbytes / max(1, count)


def _as_text(error: Exception) -> str:
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def _quiet(_: str) -> None:
    """Ignore a notice of a wait: the turn's result shows it."""
