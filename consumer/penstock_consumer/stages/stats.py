"""Count what a training loop was given, how long it waited, and what it waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

from penstock_common.rate_meter import RateMeter, RateReading
from penstock_consumer.stages.batch import Batch

Cause = Literal["producers", "server", "reader"]
"""The cause of a loop's wait.

``producers`` stands for samples that were not written yet, and ``server`` for the server and the network to it.
``reader`` stands for this process's own work.
"""

NOTICEABLE = 0.05
"""A share of waiting below this is the ordinary cost of asking. No cause is named for it."""
MOSTLY = 0.5
"""A cause is named alone if it makes up more than this share of the waiting."""


class TimeSpent(NamedTuple):
    """The seconds that a loop or a reader spent, by cause."""

    producers: float = 0.0
    server: float = 0.0
    reader: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds of all causes."""
        return self.producers + self.server + self.reader

    def plus(self, cause: Cause, seconds: float) -> TimeSpent:
        """Return a copy with ``seconds`` added to one cause."""
        producers, server, reader = self
        if cause == "producers":
            return TimeSpent(producers + seconds, server, reader)
        return (
            TimeSpent(producers, server + seconds, reader)
            if cause == "server"
            else TimeSpent(producers, server, reader + seconds)
        )

    def and_(self, other: TimeSpent) -> TimeSpent:
        """Return the sum of both."""
        return TimeSpent(self.producers + other.producers, self.server + other.server, self.reader + other.reader)

    def since(self, before: TimeSpent) -> TimeSpent:
        """Return the difference from ``before``, an earlier value."""
        return TimeSpent(self.producers - before.producers, self.server - before.server, self.reader - before.reader)

    def times(self, factor: float) -> TimeSpent:
        """Return a copy with the seconds of each cause multiplied by ``factor``."""
        return TimeSpent(self.producers * factor, self.server * factor, self.reader * factor)


def attribute(seconds: float, booked: TimeSpent, doing: Cause) -> TimeSpent:
    """Divide one wait of the loop among the causes.

    ``booked`` is what the reader's thread has booked during the wait.

    1. If that is longer than the wait, some of it began before the wait, and only its proportions count.
    2. If it is shorter, the rest goes to ``doing``, which the thread has not finished.
    """
    if booked.total > seconds:
        return booked.times(seconds / booked.total)
    return booked.plus(doing, seconds - booked.total)


def verdict(spent: TimeSpent, elapsed_s: float) -> Cause | None:
    """Return the cause of most of the waiting, or None if the loop hardly waited (see `NOTICEABLE`)."""
    if spent.total < NOTICEABLE * elapsed_s or spent.total <= 0:
        return None
    found: tuple[Cause, ...] = ("producers", "server", "reader")
    return max(found, key=lambda cause: float(getattr(spent, cause)))


LATE_S = 2.0
"""No request waits for producers longer than 1 s. An answer that takes longer than twice that waits for the server."""


class ReaderTimes:
    """The times that a reader's thread spends, by cause. One thread books; any thread may read `spent` and `doing`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._since = clock, clock()
        self._is_idle = False
        self._doing: Cause = "reader"
        self.spent = TimeSpent()
        """All time booked so far. Each booking replaces the whole tuple, so no thread reads a half-written one."""

    @property
    def doing(self) -> Cause:
        """Return what the time since the last booking is spent on.

        No answer waits for producers longer than `LATE_S`, so the server is the cause after that.
        """
        return "server" if self._doing == "producers" and self._clock() - self._since > LATE_S else self._doing

    def to(self, doing: Cause) -> None:
        """Book the time until now, and start to count time for ``doing``."""
        now = self._clock()
        if not self._is_idle:
            self.spent = self.spent.plus(self.doing, now - self._since)
        self._since, self._doing, self._is_idle = now, doing, False

    def pause(self) -> None:
        """Book the time until now, and book none until the next call of `to`. The thread waits for the trainer."""
        self.to("reader")
        self._is_idle = True

    def received(self, waited_s: float, created_s: float | None) -> None:
        """Book the time since the last booking, in which an answer was received.

        The thread waited ``waited_s`` of it at the socket. ``created_s`` is the time, by this clock, at which the
        producers wrote what the answer brought. Until then the thread waited for the producers. It is None if the
        answer was empty because nothing was written.
        """
        now = self._clock()
        waited_s = min(waited_s, now - self._since)
        late_s = waited_s if created_s is None else min(max(0.0, created_s - self._since), waited_s)
        late_s = min(late_s, LATE_S)
        own_s = now - self._since - waited_s
        self.spent = self.spent.and_(TimeSpent(producers=late_s, server=waited_s - late_s, reader=own_s))
        self._since, self._doing = now, "reader"


NAMES: Mapping[Cause, str] = {"producers": "producers", "server": "the server", "reader": "this process"}
"""The names of the causes in the line about an epoch."""
SHORT_S = 1.0
"""A shorter epoch consists mostly of its own start, so its line shows no share of waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The counts of one epoch as far as it was read, or of several. Times are of the training loop, in seconds.

    Example:
        >>> print(loader.stats())
        >>> loader.stats().samples_per_s
    """

    epoch: int | None = None
    """The epoch's number. It is None for several epochs together, and before the first."""
    batches: int = 0
    """The batches that the loop was given."""
    samples: int = 0
    """The samples in these batches."""
    bytes: int = 0
    """Payload bytes of the samples that the loop was given."""
    elapsed_s: float = 0.0
    """The time in which the loop was iterating, with its steps. The time between two iterations is left out."""
    waited_s: float = 0.0
    """The part of `elapsed_s` in which the loop waited for its next batch."""
    producers_s: float = 0.0
    """The part of `waited_s` in which nothing was written that could be read."""
    server_s: float = 0.0
    """The part of `waited_s` in which something was written but had not arrived, or answers to acknowledgements."""
    reader_s: float = 0.0
    """The part of `waited_s` in which this process worked (checksums, rows, stages, `map`) or acknowledged."""
    bad_entries: int = 0
    """The entries that became dead letters instead of samples."""
    filled: int = 0
    """In canonical order, samples that stood in for bad ones, so that every rank has the same number of steps."""
    streams: Mapping[str, Stats] = field(default_factory=dict)
    """The counts of each loader of a mixture, by name."""

    @property
    def samples_per_s(self) -> float:
        """Return the samples a second over all of the time, steps included."""
        return self.samples / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Return the payload bytes a second over all of the time, steps included."""
        return self.bytes / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """Return the part of the time that was waiting, 0 to 1."""
        return min(1.0, self.waited_s / self.elapsed_s) if self.elapsed_s > 0 else 0.0

    @property
    def cause(self) -> Cause | None:
        """Return the cause of most of the waiting, or None if the loop hardly waited."""
        return verdict(self._spent, self.elapsed_s)

    @property
    def _spent(self) -> TimeSpent:
        return TimeSpent(self.producers_s, self.server_s, self.reader_s)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the values computed from them, in JSON's types, for scripts."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "streams"}
        found |= {
            "samples_per_s": self.samples_per_s, "bytes_per_s": self.bytes_per_s, "wait_share": self.wait_share,
            "cause": self.cause,
        }  # fmt: skip
        return {**found, "streams": {name: one.as_dict() for name, one in self.streams.items()}}

    def __str__(self) -> str:
        """Return one line for people."""
        rates = f"{self.samples_per_s:,.0f} samples/s, {readable_rate(self.bytes_per_s)}"
        samples = f"{self.samples:,} samples"
        if self.filled:
            samples += f" ({self.filled:,} in place of bad ones)"
        if self.bad_entries:
            samples += f" and {self.bad_entries:,} dead letter{'' if self.bad_entries == 1 else 's'}"
        if self.elapsed_s < SHORT_S:
            return f"{samples} in {self.elapsed_s:.2g} s, {rates}"
        waited = f"waited {self.wait_share:.0%} of the time".replace("%", " %")
        return f"{samples} in {self.elapsed_s:.1f} s, {rates}; {waited}{self._whom()}"

    def _whom(self) -> str:
        if (cause := self.cause) is None:
            return ""
        spent, total = self._spent, self._spent.total
        share = float(getattr(spent, cause)) / total
        if share > MOSTLY:
            return f", mostly for {NAMES[cause]}"
        parts = [f"{name} {float(getattr(spent, key)) / total:.0%}".replace("%", " %") for key, name in NAMES.items()]
        return f", for {', '.join(parts)}"


def mixed(whole: Stats, streams: Mapping[str, Stats]) -> Stats:
    """Return the counts of a mixture.

    ``whole`` has the times of the mixture's own loop. Its loaders know the causes.
    """
    parts = summed(streams.values())
    producers, server = min(parts.producers_s, whole.waited_s), min(parts.server_s, whole.waited_s)
    return replace(
        whole, producers_s=producers, server_s=server, reader_s=max(0.0, whole.waited_s - producers - server),
        bad_entries=parts.bad_entries, filled=parts.filled, streams=dict(streams),
    )  # fmt: skip


def readable_rate(bytes_per_s: float) -> str:
    """Return a rate such as ``182 MB/s``. A kB has 1000 bytes, as networks and disks count."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.3g} {unit}/s"
    return f"{bytes_per_s:.0f} B/s"


def summed(parts: Iterable[Stats], epoch: int | None = None) -> Stats:
    """Return the sum of several counts, as if they followed one another."""
    counted = ("batches", "samples", "bytes", "elapsed_s", "waited_s", "producers_s", "server_s", "reader_s")
    every = list(parts)
    totals = {name: sum(getattr(one, name) for one in every) for name in (*counted, "bad_entries", "filled")}
    return Stats(epoch=epoch, **totals)


Phase = Literal["off", "asking", "training"]
FEED_S = 60.0
"""The epochs of an endless feed may last seconds. No more than one line is printed in this time."""


class WaitedFor(Protocol):
    """A queue that notes how long the training loop waited at it."""

    @property
    def loop_waited(self) -> TimeSpent:
        """Return the seconds that the loop waited, by cause."""


@dataclass(slots=True)
class EpochCounts:
    """The counts of an epoch that is being read."""

    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    bad_entries: int = 0
    filled: int = 0

    def add(self, samples: int, nbytes: int) -> None:
        """Count a batch that the loop is given."""
        self.batches += 1
        self.samples += samples
        self.nbytes += nbytes

    def take_back(self, samples: int, nbytes: int) -> None:
        """Leave out a batch that the loop was given."""
        self.batches -= 1
        self.samples -= samples
        self.nbytes -= nbytes

    def add_bad(self, bad_entries: int, filled: int) -> None:
        """Count bad entries, and samples that stand in for bad ones."""
        self.bad_entries += bad_entries
        self.filled += filled


def _without(stats: Stats, batch: Batch) -> Stats:
    return replace(
        stats, batches=stats.batches - 1, samples=stats.samples - batch.size, bytes=stats.bytes - batch.nbytes
    )


class StatsCounter:
    """The counter of one loop, whose thread calls it. Any thread may call `stats` and `look`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._epoch: int | None = None
        self._queue: WaitedFor | None = None
        self._last, self._past = Stats(), Stats()
        """`_last` counts the epoch that ended last, and `_past` all that ended."""
        self._outside: Phase = "training"
        """The phase that begins when a batch leaves. Inside a view's `map` it is not the trainer's step."""
        self._notified_s: float | None = None
        self._time: tuple[Phase, float, float, float] = ("off", clock(), 0.0, 0.0)
        """The phase, its start, and the seconds of asking and training before it. It is replaced as a whole."""
        self._in_step = self._trained = 0
        """The numbers of samples in the loop's current step, and in all steps before it."""
        self._taken_back = 0
        """The number of batches that came back from a framework."""
        self._broken_off_s = 0.0
        """The seconds of steps that the loop was broken off in."""
        self._rate, self._looking = RateMeter("training", clock), threading.Lock()
        self._seen = (0.0, 0.0, 0.0, 0)
        """The seconds of asking, training and whole steps, and the samples of these, at the last `look`."""
        self._restart()

    def _restart(self) -> None:
        self._counts = EpochCounts()
        self._known = TimeSpent()
        """Waiting with a cause that is known without the queue, and the waiting at earlier queues."""
        _, _, *self._before = self._time
        """The seconds of asking and training of earlier epochs."""

    def _spent(self, now: float) -> tuple[float, float]:
        """Return the seconds of asking and of training until now, in all epochs."""
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
        """Note that the loop wants a batch."""
        self._go("asking")
        self._trained += self._in_step
        self._in_step = 0

    def deliver(self, batch: Batch) -> None:
        """Note that the loop is given a batch."""
        size = batch.size
        self._counts.add(size, batch.nbytes)
        self._go(self._outside)
        self._in_step += size

    def take_back(self, batches: Iterable[Batch]) -> None:
        """Leave out batches that a framework had read ahead. They are given again, and count then."""
        for batch in batches:
            self._taken_back += 1
            if batch.epoch == self._epoch or not self._past.batches:  # a mixture counts all epochs as one
                self._counts.take_back(batch.size, batch.nbytes)
                continue
            if batch.epoch == self._last.epoch:
                self._last = _without(self._last, batch)
            self._past = _without(self._past, batch)

    def pause(self) -> None:
        """Note that the iteration has ended or was broken off."""
        phase, since, *_ = self._time
        self._go("off")
        if phase == "training":
            self._broken_off_s += self._time[1] - since
        self._in_step = 0

    def around(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the same items. The work on a batch before the loop gets it counts as waiting."""
        self._outside = "asking"
        try:
            self.ask()
            for item in items:
                self._go("training")
                yield item
                self.ask()
        finally:
            self._outside = "training"
            self.pause()

    def counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches, and count them on their way to the loop."""
        try:
            self.ask()
            for batch in batches:
                self.deliver(batch)
                yield batch
                self.ask()
        finally:
            self.pause()

    @contextmanager
    def waiting_for(self, cause: Cause) -> Iterator[None]:
        """Count all time inside as waiting for ``cause``."""
        began = self.now()
        try:
            yield
        finally:
            self.waited_since(began, cause)

    def now(self) -> float:
        """Return the time of the counter's clock."""
        return self._clock()

    def waited_since(self, began: float, cause: Cause, least_s: float = 0.0) -> None:
        """Count the time since ``began`` as waiting for ``cause``, unless it is shorter than ``least_s``.

        It is a plain call for each batch, because a context manager costs 4 % of a loop over batches of 500 bytes.
        """
        waited_s = self._clock() - began
        # in another phase a caller asks for the spec, and no loop waits
        if waited_s >= least_s and self._time[0] == "asking":
            self._known = self._known.plus(cause, waited_s)

    # --- epochs ---

    def begin(self, epoch: int, queue: WaitedFor | None = None) -> None:
        """Begin an epoch whose batches come from ``queue``. A second call for the same epoch is harmless."""
        if self._epoch not in (None, epoch):
            self._close(self.stats())
        if queue is not self._queue:
            self._known = self._known.and_(self._loop_waited)
            self._queue = queue
        self._epoch = epoch

    def count(self, bad_entries: int, filled: int) -> None:
        """Add the bad entries and the filled-in samples that the reader of this epoch met."""
        self._counts.add_bad(bad_entries, filled)

    def end(self) -> Stats:
        """Note that the epoch was read to its end, and return its counts."""
        self._last = self.stats()
        self._close(self._last)
        return self._last

    def is_due(self, *, is_feed: bool) -> bool:
        """Return whether a line on the epoch that just ended is due."""
        now = self._clock()
        if not self._last.batches or (is_feed and self._notified_s is not None and now - self._notified_s < FEED_S):
            return False
        self._notified_s = now
        return True

    def _close(self, stats: Stats) -> None:
        self._past = summed([self._past, stats])
        self._epoch = self._queue = None
        self._go(self._time[0])
        self._restart()

    # --- what it comes to ---

    @property
    def batches(self) -> int:
        """Return the number of batches that were given in all epochs, with those that came back."""
        return self._past.batches + self._counts.batches + self._taken_back

    def stats(self, *, total: bool = False) -> Stats:
        """Return the counts of the epoch being read, else of the last one; with ``total`` of all epochs."""
        if self._epoch is None:
            return replace(self._past, epoch=self._last.epoch) if total else self._last
        found = self.current()
        return summed([self._past, found], found.epoch) if total else found

    def look(self) -> RateReading:
        """Return the rate of the loop if it never waited. The producers receive it."""
        with self._looking:
            before = self._seen
            asking_s, training_s = self._spent(self._clock())
            now = self._seen = asking_s, training_s, self._time[3] - self._broken_off_s, self._trained
            asked_s, trained_s, worked_s, samples = (max(0, new - old) for new, old in zip(now, before, strict=True))
            spent_s = {"asking": asked_s, "training": trained_s}
            self._rate.add({kind: seconds for kind, seconds in spent_s.items() if seconds}, int(samples), worked_s)
            return self._rate.look()

    @property
    def _loop_waited(self) -> TimeSpent:
        return TimeSpent() if self._queue is None else self._queue.loop_waited

    def current(self) -> Stats:
        """Return the counts since the previous epoch ended."""
        asking_s, training_s = (
            spent_s - before_s for spent_s, before_s in zip(self._spent(self._clock()), self._before, strict=True)
        )
        known = self._known.and_(self._loop_waited)
        if known.total > asking_s > 0:  # an error in the loop's own code broke off a wait
            known = known.times(asking_s / known.total)
        counts = self._counts
        return Stats(
            epoch=self._epoch, batches=counts.batches, samples=counts.samples, bytes=counts.nbytes,
            elapsed_s=asking_s + training_s, waited_s=asking_s,
            producers_s=known.producers, server_s=known.server,
            reader_s=max(0.0, asking_s - known.producers - known.server),
            bad_entries=counts.bad_entries, filled=counts.filled,
        )  # fmt: skip
