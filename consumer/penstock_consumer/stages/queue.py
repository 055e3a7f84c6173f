"""The queue between the reader's thread and the training loop. It is bounded in bytes, and errors pass through it.

The training loop pulls batches out of it through the stages of a StageChain. One thread pulls, and waits for the reader
only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.filter import Filter
from penstock_consumer.stages.rebatch import Rebatch
from penstock_consumer.stages.stage import Stage, StageContext, StageMaker
from penstock_consumer.stages.stats import Cause, ReaderTimes, TimeSpent, attribute

START_BYTES = 8 << 20
"""Four requests of a reader in shared order. A trainer that never waits needs no more. Smaller budgets are used
whole."""
PATIENCE = 16
"""The limit is halved after the trainer took this many times its bytes while more than half always stayed."""


class PrefetchLimit:
    """The bytes that may wait for one trainer now, between `START_BYTES` and the budget."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.nbytes = self._least = min(budget_bytes, START_BYTES)
        self._patience = PATIENCE
        self._was_full, self._taken = False, 0
        self._lowest: int | None = None

    def refused(self) -> None:
        """Note that the limit kept the reader from reading more."""
        self._was_full = True

    def starved(self) -> None:
        """Note that the trainer found nothing. Double the limit if it has kept the reader from reading since."""
        if not self._was_full:
            return
        if self.nbytes < self.budget_bytes:
            self.nbytes = min(2 * self.nbytes, self.budget_bytes)
            self._patience *= 2  # halved as soon again, the trainer would starve as often
        self._forget()

    def took(self, nbytes: int, left_bytes: int) -> bool:
        """Note that the trainer took a batch and left ``left_bytes``. Return whether half the limit is enough now."""
        self._taken += nbytes
        self._lowest = left_bytes if self._lowest is None else min(self._lowest, left_bytes)
        if self.nbytes == self._least or self._taken < self._patience * self.nbytes:
            return False
        is_enough = self._lowest > self.nbytes // 2
        self._forget()
        if is_enough:
            self.nbytes = max(self.nbytes // 2, self._least)
        return is_enough

    def _forget(self) -> None:
        """Forget what was seen under another limit, because it says nothing about this one."""
        self._was_full, self._taken, self._lowest = False, 0, None


POLL_S = 0.5
"""The longest wait for a batch before the loop looks at what else may have happened."""


class QueueStopped(Exception):
    """An error for the reader's thread: the loop will take no more batches."""


class PrefetchQueue:
    """The queue between one training loop and the thread that reads for it, or several (see `new_input`)."""

    def __init__(
        self,
        limit: PrefetchLimit | int,
        when_less: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make an empty queue.

        Args:
            limit: a budget in bytes, or a limit that has been learned already.
            when_less: a function that the reader's thread calls when less memory is enough. It may free some.
            clock: in seconds.
        """
        self._prefetch_limit = limit if isinstance(limit, PrefetchLimit) else PrefetchLimit(limit)
        self._when_less, self._clock = when_less, clock
        self.reader_times = ReaderTimes(clock)
        """The times of the first reader's thread, by cause."""
        self._inputs: list[QueueInput] = []
        """The ends of several readers."""
        self.loop_waited = TimeSpent()
        """The seconds that the training loop waited here, by cause. The tuple is replaced as a whole."""
        self.trouble = ""
        """The outage of the server that the reader's thread waits out now. No batch comes until it ends."""
        self._troubled_s = float("-inf")
        """The end of the last outage."""
        self._is_less = False
        self._batches: deque[tuple[Batch, int]] = deque()
        self._bytes = 0
        self._lock = threading.RLock()
        """The lock of `_changed`. Taking it directly is cheaper, and each batch takes it several times."""
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        """The number of threads that wait for `_changed`. Each batch changes the queue twice, mostly for nobody."""
        self._ended = False
        self._error: BaseException | None = None
        self._stopped = False

    def new_input(self) -> QueueInput:
        """Return an end of the queue for one of several readers. Others may follow until all readers have ended."""
        with self._lock:
            self._inputs.append(QueueInput(self, ReaderTimes(self._clock) if self._inputs else self.reader_times))
            return self._inputs[-1]

    # --- the reader's side ---

    def tell_trouble(self, trouble: str) -> None:
        """Set why the server is away, or "" once it is back."""
        if self.trouble:
            self._troubled_s = self._clock()
        self.trouble = trouble

    def put(self, batch: Batch) -> None:
        """Add a batch without a limit. The reader calls `wait_for_space` before it reads more."""
        with self._lock:
            if self._stopped:
                return
            nbytes = batch.nbytes
            self._batches.append((batch, nbytes))
            self._bytes += nbytes
            self._wake()

    def wait_for_space(self, pending_bytes: int, timeout_s: float, times: ReaderTimes | None = None) -> bool:
        """Return whether more may be read.

        More may be read while less than the limit waits here, or nothing at all. Raises QueueStopped.
        """
        with self._lock:
            if not self._has_space(pending_bytes):
                self._prefetch_limit.refused()
                if timeout_s > 0:
                    self._rest(pending_bytes, timeout_s, times or self.reader_times)
            if self._stopped:
                raise QueueStopped
            is_less, self._is_less = self._is_less, False
            has_space = self._has_space(pending_bytes)
        if is_less:
            self._when_less()
        return has_space

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Return whether every batch was taken. Raises QueueStopped."""
        with self._lock:
            self._wait_for(lambda: self._stopped or not self._batches, timeout_s)
            if self._stopped:
                raise QueueStopped
            return not self._batches

    @property
    def budget_bytes(self) -> int:
        """Return the most bytes that may wait here, whatever the trainer needs."""
        return self._prefetch_limit.budget_bytes

    def _wait_for(self, is_due: Callable[[], object], timeout_s: float) -> None:
        self._waiting += 1
        try:
            self._changed.wait_for(is_due, timeout_s)
        finally:
            self._waiting -= 1

    def _wake(self) -> None:
        if self._waiting:
            self._changed.notify_all()

    def _has_space(self, pending_bytes: int) -> bool:
        return not self._batches or self._bytes + pending_bytes < self._prefetch_limit.nbytes

    def _rest(self, pending_bytes: int, timeout_s: float, times: ReaderTimes) -> None:
        times.pause()
        self._wait_for(lambda: self._stopped or self._has_space(pending_bytes), timeout_s)
        times.to("reader")

    def end(self, error: BaseException | None = None) -> None:
        """Note that no more batches will come. The training loop gets ``error`` after those that wait here."""
        with self._lock:
            self._ended, self._error = True, error
            self._wake()

    def input_changed(self) -> None:
        """Take note of several readers: of their outages, of the first error of one, and of the end of all."""
        with self._lock:
            self.tell_trouble("; ".join(dict.fromkeys(one.trouble for one in self._inputs if one.trouble)))
            if self._ended:
                return
            self._error = next((one.error for one in self._inputs if one.error is not None), None)
            self._ended = self._error is not None or all(one.is_over for one in self._inputs)
            self._wake()

    @property
    def is_ended(self) -> bool:
        """Return whether no reader brings more batches."""
        return self._ended

    # --- the training loop's side ---

    @property
    def undisturbed_s(self) -> float:
        """Return for how long no server was away."""
        return 0.0 if self.trouble else self._clock() - self._troubled_s

    def get(self, timeout_s: float) -> Batch | None:
        """Return the next batch, or None at the timeout or if `is_over`. Raises the reader's error."""
        with self._lock:
            if not self._batches and not self._ended:
                self._wait(timeout_s)
            if self._batches:
                batch, nbytes = self._batches.popleft()
                self._bytes -= nbytes
                self._is_less |= self._prefetch_limit.took(nbytes, self._bytes)
                self._wake()
                return batch
            if self._error is not None:
                raise self._error  # at every call, so that an epoch that broke off never looks complete
            return None

    def _wait(self, timeout_s: float) -> None:
        self._prefetch_limit.starved()
        began, (before, _) = self._clock(), self._booked()
        self._wait_for(lambda: self._batches or self._ended, timeout_s)
        seconds, (booked, doing) = self._clock() - began, self._booked()
        if booked is before:  # the usual case of small batches, and a cheap one
            self.loop_waited = self.loop_waited.plus(doing, seconds)
        else:
            self.loop_waited = self.loop_waited.and_(attribute(seconds, booked.since(before), doing))

    def _booked(self) -> tuple[TimeSpent, Cause]:
        """Return the times of the readers, and what they spend the present one on: their work, if one works."""
        if len(self._inputs) < 2:  # the first has the times of this queue
            return self.reader_times.spent, self.reader_times.doing
        spent, busy = TimeSpent(), [one for one in self._inputs if not one.is_over]
        for one in self._inputs:
            spent = spent.and_(one.reader_times.spent)
        doing: tuple[Cause, ...] = tuple(one.reader_times.doing for one in busy)
        return spent, next((one for one in doing if one != "producers"), "producers")

    @property
    def is_over(self) -> bool:
        """Return whether every batch was taken and no more will come."""
        with self._lock:
            return self._ended and not self._batches and self._error is None

    @property
    def holds_batches(self) -> bool:
        """Return whether `get` would return one at once."""
        return bool(self._batches)

    def stop(self) -> None:
        """Tell the reader's thread to end, and drop the batches. A view would keep its segment from being reused."""
        with self._lock:
            self._stopped = True
            self._batches.clear()
            self._bytes = 0
            self._wake()

    @property
    def is_stopped(self) -> bool:
        """Return whether `stop` was called."""
        return self._stopped


class QueueInput:
    """The end of a prefetch queue that one of several readers has, in a thread of its own."""

    def __init__(self, queue: PrefetchQueue, reader_times: ReaderTimes) -> None:
        self._queue, self.reader_times = queue, reader_times
        self.trouble = ""
        """The outage of this reader's server."""
        self.is_over = False
        """Whether this reader has ended."""
        self.error: BaseException | None = None
        """The error that ended it early. It ends the other readers, too."""

    @property
    def budget_bytes(self) -> int:
        """See `PrefetchQueue.budget_bytes`."""
        return self._queue.budget_bytes

    @property
    def is_stopped(self) -> bool:
        """Return whether the loop takes no more batches, or another reader has failed."""
        return self._queue.is_stopped or (self._queue.is_ended and not self.is_over)

    def tell_trouble(self, trouble: str) -> None:
        """See `PrefetchQueue.tell_trouble`."""
        self.trouble = trouble
        self._queue.input_changed()

    def put(self, batch: Batch) -> None:
        """See `PrefetchQueue.put`."""
        self._queue.put(batch)

    def wait_for_space(self, pending_bytes: int, timeout_s: float) -> bool:
        """See `PrefetchQueue.wait_for_space`."""
        has_space = self._queue.wait_for_space(pending_bytes, timeout_s, self.reader_times)
        if self.is_stopped:
            raise QueueStopped
        return has_space

    def wait_until_empty(self, timeout_s: float) -> bool:
        """See `PrefetchQueue.wait_until_empty`."""
        is_empty = self._queue.wait_until_empty(timeout_s)
        if self.is_stopped:
            raise QueueStopped
        return is_empty

    def end(self, error: BaseException | None = None) -> None:
        """Note that this reader brings no more batches. An error ends them all."""
        self.error, self.is_over = error, True
        self._queue.input_changed()


ReaderQueue = PrefetchQueue | QueueInput
"""The reader's side of a prefetch queue: the queue itself, or the end of it that one of several readers has."""


# --- stages -----------------------------------------------------------------------------------------------------------

STARVED_S = 2.0
"""After this time without a batch, a stage gives what it holds. Writers may be waiting for the quota that it takes."""


def stages_of(setting: StageContext, makers: Sequence[StageMaker], remainder: str) -> list[Stage]:
    """Return the stages of one epoch. In shared order the last stage makes full batches of smaller ones."""
    stages = [make(setting) for make in makers]
    is_refilled = not setting.is_ordered and (remainder != "keep" or any(isinstance(one, Filter) for one in stages))
    return [*stages, Rebatch(setting, remainder)] if is_refilled else stages


class StageChain:
    """The training loop's end of a prefetch queue and its stages. One thread uses it; any thread may stop the queue."""

    def __init__(
        self, inner: PrefetchQueue, stages: Sequence[Stage], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.inner = inner
        self._stages, self._clock = stages, clock
        self._ended = 0
        """The number of stages, from the first on, that know that nothing more comes."""
        self._next: Batch | None = None
        self._empty_s: float | None = None
        """The time of the first `get` that found nothing. A long step of the trainer does not count."""

    def get(self, timeout_s: float) -> Batch | None:
        """Return the next batch, or None at the timeout or if `is_over`. Raises the reader's error."""
        batch, self._next = self._next, None
        if batch is not None:
            return batch
        if not self._stages and self.inner.holds_batches:
            self._empty_s = None
            return self.inner.get(0)
        last, asked_s = len(self._stages) - 1, self._clock()
        batch = self._pull(last, asked_s + timeout_s)
        if batch is not None:
            return batch
        if self._empty_s is None:
            self._empty_s = asked_s
        if self._clock() - self._empty_s < STARVED_S:
            return None
        for stage in self._stages:
            stage.starve()
        return self._pull(last, None)

    @property
    def holds_batches(self) -> bool:
        """Return whether `get` would return one at once."""
        self._peek()
        return self._next is not None

    @property
    def is_over(self) -> bool:
        """Return whether every batch was taken and no more will come."""
        self._peek()
        return self._next is None and self._is_over(len(self._stages) - 1)

    def waiting(self) -> str | None:
        """Return what a stage waits for, if it holds back samples that have arrived."""
        return next((said for stage in self._stages if (said := stage.waiting()) is not None), None)

    def _peek(self) -> None:
        if self._next is None:
            self._next = self._pull(len(self._stages) - 1, None)

    def _pull(self, number: int, until: float | None) -> Batch | None:
        """Return a stage's next batch, or the reader's for number -1. Wait for it until ``until``; None never waits."""
        if number < 0:
            return self._arrived(until)
        stage = self._stages[number]
        while True:
            if (batch := stage.take()) is not None:
                return batch
            if (below := self._pull(number - 1, until)) is not None:
                stage.put(below)
            elif self._ended == number and self._is_over(number - 1):
                self._ended += 1
                stage.end()
            else:
                return None

    def _is_over(self, number: int) -> bool:
        """Return whether a stage will give no more batches. Call it after `_pull` gave nothing."""
        return self.inner.is_over if number < 0 else self._ended > number

    def _arrived(self, until: float | None) -> Batch | None:
        if until is None and not self.inner.holds_batches:
            return None
        batch = self.inner.get(0 if until is None else max(0.0, until - self._clock()))
        if batch is not None:
            self._empty_s = None
        return batch
