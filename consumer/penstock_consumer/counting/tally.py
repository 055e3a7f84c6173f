"""Counts for one training loop: what it was given, and how long it waited in asking for it.

The clock is read a few times for each batch. What the record says is ``stats``'s; whom a dry queue waits for counts
``pipeline.prefetch``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar

from penstock_common.pace import Pace
from penstock_consumer.counting.stats import Stats, summed
from penstock_consumer.pipeline.causes import Cause, Spent
from penstock_consumer.pipeline.prefetch import Prefetch

Phase = Literal["off", "asking", "training"]
FEED_S = 60.0
"""An endless feed's epochs may be seconds long: no more than one line in this time."""


class Counted(Protocol):
    """A batch, or what is known of one that another process has read."""

    @property
    def size(self) -> int:
        """Samples."""

    @property
    def nbytes(self) -> int:
        """Payload bytes."""


_B = TypeVar("_B", bound=Counted)


class Tally:
    """One loop's. Its calls are the loop's thread's; `stats` is anybody's."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._epoch: int | None = None
        self._queue: Prefetch | None = None
        self._last, self._past = Stats(), Stats()
        """The epoch that ended last; all that ended."""
        self._outside: Phase = "training"
        """What begins when a batch goes out: within a view's `map`, nothing that the trainer does."""
        self._told_s: float | None = None
        self.pace = Pace("training", clock)
        """How fast the loop would be if it never waited; producers are told."""
        self._in_step = 0
        """Samples that the loop has in hand."""
        self._restart()

    def _restart(self) -> None:
        self._batches = self._samples = self._bytes = self._bad = self._filled = 0
        self._known = Spent()
        """Waiting whose cause is known without asking the queue, and that of queues which are gone."""
        self._time: tuple[Phase, float, float, float] = ("off", self._clock(), 0.0, 0.0)
        """What the loop does, since when, and seconds of asking and training before that; replaced whole."""

    def _spent(self, now: float) -> tuple[float, float]:
        """Seconds of asking and of training until now."""
        phase, since, asking_s, training_s = self._time
        if phase == "asking":
            return asking_s + max(0.0, now - since), training_s
        return asking_s, training_s + (max(0.0, now - since) if phase == "training" else 0.0)

    def _go(self, phase: Phase) -> None:
        now = self._clock()
        was, since, asking_s, training_s = self._time
        if was == "asking":
            asking_s += now - since
        elif was == "training":
            training_s += now - since
        self._time = (phase, now, asking_s, training_s)

    # --- the loop ---

    def ask(self) -> None:
        """The loop wants a batch."""
        self._go("asking")
        if self._in_step:
            self.pace.count(self._in_step, then="asking")
            self._in_step = 0
        else:
            self.pace.enter("asking")

    def hand(self, batch: Counted) -> None:
        """The loop is given one."""
        size = batch.size
        self._batches += 1
        self._samples += size
        self._bytes += batch.nbytes
        self._go(self._outside)
        self._in_step += size
        self.pace.enter(self._outside)

    def rest(self) -> None:
        """The iteration is over, or broken off."""
        self._go("off")
        self._in_step = 0
        self.pace.enter(None)

    def around(self, items: Iterable[Any]) -> Iterator[Any]:
        """The same items; what is done to make one of a batch is waiting for this process."""
        self._outside = "asking"
        try:
            self.ask()
            for item in items:
                self._go("training")
                self.pace.enter("training")
                yield item
                self.ask()
        finally:
            self._outside = "training"
            self.rest()

    def counted(self, batches: Iterable[_B]) -> Iterator[_B]:
        """The same batches, counted on their way to the loop."""
        try:
            self.ask()
            for batch in batches:
                self.hand(batch)
                yield batch
                self.ask()
        finally:
            self.rest()

    @contextmanager
    def waiting_for(self, cause: Cause) -> Iterator[None]:
        """What is done inside waits for nothing else."""
        began = self._clock()
        try:
            yield
        finally:
            if self._time[0] == "asking":  # else somebody asks for the spec, and no loop waits
                self._known = self._known.plus(cause, self._clock() - began)

    # --- epochs ---

    def begin(self, epoch: int, queue: Prefetch | None = None) -> None:
        """What is handed out from here on is of this epoch, and comes out of this queue. Again is harmless."""
        if self._epoch not in (None, epoch):
            self._close(self.stats())
        if queue is not self._queue:
            self._known = self._known.and_(self._hunger)
            self._queue = queue
        self._epoch = epoch

    def count(self, bad_entries: int, filled: int) -> None:
        """What the reader of this epoch met."""
        self._bad += bad_entries
        self._filled += filled

    def end(self) -> Stats:
        """The epoch was read to its end."""
        self._last = self.stats()
        self._close(self._last)
        return self._last

    def is_due(self, *, is_feed: bool) -> bool:
        """Whether a line on the epoch that just ended should be said."""
        now = self._clock()
        if not self._last.batches or (is_feed and self._told_s is not None and now - self._told_s < FEED_S):
            return False
        self._told_s = now
        return True

    def _close(self, stats: Stats) -> None:
        phase = self._time[0]
        self._past = summed([self._past, stats])
        self._epoch = self._queue = None
        self._restart()
        self._go(phase)

    # --- what it comes to ---

    @property
    def batches(self) -> int:
        """Of all epochs."""
        return self._past.batches + self._batches

    def stats(self, *, total: bool = False) -> Stats:
        """The epoch being read, else the one read last; ``total``: all there was."""
        if self._epoch is None:
            return replace(self._past, epoch=self._last.epoch) if total else self._last
        found = self.current()
        return summed([self._past, found], found.epoch) if total else found

    @property
    def _hunger(self) -> Spent:
        return Spent() if self._queue is None else self._queue.hunger

    def current(self) -> Stats:
        """Since the epoch before ended."""
        asking_s, training_s = self._spent(self._clock())
        known = self._known.and_(self._hunger)
        if known.total > asking_s > 0:  # a wait that was broken off by an error in the loop's own hands
            known = known.times(asking_s / known.total)
        return Stats(
            epoch=self._epoch, batches=self._batches, samples=self._samples, bytes=self._bytes,
            elapsed_s=asking_s + training_s, waited_s=asking_s,
            producers_s=known.producers, server_s=known.server,
            reader_s=max(0.0, asking_s - known.producers - known.server),
            bad_entries=self._bad, filled=self._filled,
        )  # fmt: skip
