"""Passes over one complete epoch, which `Replay` and `Files` have in common. A thread reads ahead into a queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadEntry
from penstock_common.hints import Passing, callable_of, whole
from penstock_common.segments.reader import AHEAD_BYTES, SegmentReader
from penstock_common.server.channel import SKIP, Skip
from penstock_common.tuning import PREFETCH_BYTES, Tuning, chosen
from penstock_common.waiting import AT_ONCE_S, join, to_stderr
from penstock_common.wire.header import Header, parse_header
from penstock_common.wire.limits import MAX_HEADER_BYTES
from penstock_common.wire.spec import META_FIELD, Spec
from penstock_consumer.stages.batch import Assembler, Batch, pool_for
from penstock_consumer.stages.queue import POLL_S, PrefetchQueue, QueueStopped
from penstock_consumer.stages.shuffle import QueueFeeder, ShuffleOptions
from penstock_consumer.stages.stage import Stage, StageContext
from penstock_consumer.stages.stats import Stats, StatsCounter

T = TypeVar("T")


def looked_ahead(blocks: Iterator[T], nbytes: Callable[[T], int]) -> Iterator[tuple[T, bool]]:
    """Yield each block twice in order: with False when the disk is to be asked for it, with True when it is due.

    Between the two are other blocks of `AHEAD_BYTES`, or all that are left.
    """
    waiting: deque[T] = deque()
    ahead = 0
    for block in blocks:
        yield block, False
        waiting.append(block)
        ahead += nbytes(block)
        while ahead > AHEAD_BYTES:
            ahead -= nbytes(waiting[0])
            yield waiting.popleft(), True
    for block in waiting:
        yield block, True


def held_back(elements: Iterable[T], count: int) -> Iterator[T]:
    """Yield each element once ``count`` later ones have been taken, or no more come."""
    taken: deque[T] = deque()
    for element in elements:
        taken.append(element)
        del element  # the memory is free as soon as the loop lets go of it
        if len(taken) > count:
            yield taken.popleft()
    while taken:
        yield taken.popleft()


@dataclass(frozen=True, slots=True)
class WholeScope:
    """A scope in which every sample is wanted."""

    check: Callable[[Header], None]
    """See `receive.ReadScope`."""

    def wanted(self, header: Header, entry_id: bytes) -> NDArray[np.bool_] | None:
        """See `receive.ReadScope`."""
        return None


class ReadaheadSink:
    """An EntrySink that asks the disk for the data that an entry refers to. It checks nothing."""

    def __init__(self, spec: Spec, segments: SegmentReader) -> None:
        self._spec, self._segments = spec, segments

    def begin(self, entry_id: bytes) -> None:
        """See EntrySink."""

    def target(self, name: bytes, nbytes: int) -> Sequence[memoryview] | Skip | None:
        """Take the header alone."""
        return None if name == META_FIELD and nbytes <= MAX_HEADER_BYTES else SKIP

    def value(self, name: bytes, data: bytes) -> None:
        """Take one of an entry's first fields, or any other."""
        try:
            ref = parse_header(data, self._spec, takes_refs=True).ref
        except BadEntry:
            return
        if ref is not None:
            self._segments.expect(ref)

    def end(self) -> None:
        """See EntrySink."""


class Passes(Passing):
    """The batches of one epoch. Each iteration is a pass over it, and the number of batches is known.

    Without ``shuffle`` every pass has the canonical order. With it, the seed and the number of the pass decide the
    order: blocks are read in a permuted order, and batches are drawn from a window of ``window`` samples.
    """

    epoch: int
    samples: int
    """The samples in the epoch, without bad ones."""

    def __init__(self, batch_size: int, shuffle: int | None, window: int | None, tuning: Tuning) -> None:
        batch_size = whole("batch_size", batch_size)
        prefetch_bytes = whole("prefetch_bytes", chosen(tuning.prefetch_bytes, PREFETCH_BYTES))
        notify = chosen(tuning.notify, to_stderr)
        callable_of("notify", notify, "print")
        if shuffle is not None and (type(shuffle) is not int or shuffle < 0):
            raise ValueError(f"shuffle is {shuffle!r}, expected a seed, 0 or more, or None for canonical order")
        if window is not None and (shuffle is None or window < 1):
            raise ValueError(f"window={window} is the samples to draw from, at least 1, and goes with shuffle=SEED")
        self.batch_size = batch_size
        self._prefetch_bytes, self._shuffle, self._window, self._notify = prefetch_bytes, shuffle, window, notify
        self._pass = 0
        self._counter = StatsCounter()

    @property
    def spec(self) -> Spec:
        """Return the tensors of a sample."""
        raise NotImplementedError

    def _name(self) -> str:
        """Return a name for what is read, for people."""
        raise NotImplementedError

    def _read(self, queue: PrefetchQueue, feeder: QueueFeeder, shuffle: ShuffleOptions | None) -> None:
        """Read one pass in a thread of its own, into the feeder's assembler. Raises QueueStopped or what ends it."""
        raise NotImplementedError

    def _check(self) -> None:
        """Raise what makes it impossible to continue. The loop calls this now and then."""

    def stats(self) -> Stats:
        """Return the statistics of the running iteration, or of the last one. See `Loader.stats`."""
        return self._counter.stats()

    def set_pass(self, number: int) -> None:
        """Choose the pass that the next iteration is, so that a training job that restarts shuffles as it would have.

        Args:
            number: the number of the pass. Passes count from 0, and only a shuffled one depends on its number.
        """
        if type(number) is not int or number < 0:
            raise ValueError(f"pass {number!r}: passes are counted from 0")
        self._pass = number

    def __len__(self) -> int:
        """Return the batches in an iteration."""
        return (self.samples + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        """Yield the epoch from its first sample. The last batch may be smaller."""
        shuffle = None
        if self._shuffle is not None:
            shuffle = ShuffleOptions(self._shuffle, self._pass, self._window, self._prefetch_bytes)
        self._pass += 1
        counter = self._counter = StatsCounter()
        pool = pool_for(self.spec, self.batch_size, self._prefetch_bytes)  # of one pass alone, because two may overlap
        queue = PrefetchQueue(self._prefetch_bytes, pool.trim)
        counter.ask()
        counter.begin(self.epoch, queue)
        context = StageContext(self.spec, pool, self.epoch, self.batch_size, is_ordered=False)
        stage = Stage(context) if shuffle is None else shuffle.window(context)
        feeder = QueueFeeder(Assembler(self.spec, self.batch_size, pool, self.epoch), queue, stage)
        thread = threading.Thread(target=self._run, args=(queue, feeder, shuffle), name="penstock-replay", daemon=True)
        thread.start()
        try:
            while True:
                batch = queue.get(POLL_S)
                self._check()
                if batch is not None:
                    counter.deliver(batch)
                    yield batch
                    counter.ask()
                elif queue.is_over:
                    self._notify(f"{self._name()}: {counter.end()}")
                    return
        finally:
            counter.pause()
            queue.stop()
            join(thread, AT_ONCE_S)

    def _run(self, queue: PrefetchQueue, feeder: QueueFeeder, shuffle: ShuffleOptions | None) -> None:
        try:
            self._read(queue, feeder, shuffle)
            queue.end()
        except QueueStopped:
            queue.end()
        except BaseException as error:
            queue.end(error)


def permuted(items: Iterator[T], shuffle: ShuffleOptions | None) -> Iterator[T]:
    """Return the same items. A shuffled pass reads all of them before the first."""
    if shuffle is None:
        yield from items
        return
    held = list(items)
    for number in shuffle.blocks(len(held)).tolist():
        yield held[number]
