"""The times and counts of a training loop: what it was given, how long it waited, and for whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from penstock_common.pace import Pace

Cause = Literal["producers", "server", "reader"]
"""What was waited for: samples that were not written yet; the server and the way to it; this process's own work."""

NOTICEABLE = 0.05
"""A share of waiting below this is the ordinary cost of asking, and has no cause worth a word."""
MOSTLY = 0.5
"""A cause of more than this part of the waiting is named alone."""


class TimeSpent(NamedTuple):
    """Seconds by cause."""

    producers: float = 0.0
    server: float = 0.0
    reader: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all causes."""
        return self.producers + self.server + self.reader

    def plus(self, cause: Cause, seconds: float) -> TimeSpent:
        """With so much more of one cause."""
        producers, server, reader = self
        if cause == "producers":
            return TimeSpent(producers + seconds, server, reader)
        return (
            TimeSpent(producers, server + seconds, reader)
            if cause == "server"
            else TimeSpent(producers, server, reader + seconds)
        )

    def and_(self, other: TimeSpent) -> TimeSpent:
        """Both together."""
        return TimeSpent(self.producers + other.producers, self.server + other.server, self.reader + other.reader)

    def since(self, before: TimeSpent) -> TimeSpent:
        """Return what came after ``before``."""
        return TimeSpent(self.producers - before.producers, self.server - before.server, self.reader - before.reader)

    def times(self, factor: float) -> TimeSpent:
        """Return so much of each."""
        return TimeSpent(self.producers * factor, self.server * factor, self.reader * factor)


def attribute(seconds: float, booked: TimeSpent, doing: Cause) -> TimeSpent:
    """One stretch of waiting, by cause.

    ``booked`` is what the reader's thread has booked in it. 1. More than the stretch is long: some of it began before,
    and only its proportions count. 2. Less: the rest is what the thread is still at.
    """
    if booked.total > seconds:
        return booked.times(seconds / booked.total)
    return booked.plus(doing, seconds - booked.total)


def verdict(spent: TimeSpent, elapsed_s: float) -> Cause | None:
    """The cause of most of the waiting; None where there was no waiting to speak of."""
    if spent.total < NOTICEABLE * elapsed_s or spent.total <= 0:
        return None
    found: tuple[Cause, ...] = ("producers", "server", "reader")
    return max(found, key=lambda cause: float(getattr(spent, cause)))


LATE_S = 2.0
"""No request waits for producers longer than 1 s: an answer that takes longer than twice that waits for the server."""


class ReaderTimes:
    """One thread books; any thread may look at `spent` and `doing`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._since = clock, clock()
        self._is_idle = False
        self._doing: Cause = "reader"
        self.spent = TimeSpent()
        """All that is booked; replaced whole, so that nobody sees half of it."""

    @property
    def doing(self) -> Cause:
        """Return what the time from the last booking on is for. No answer waits for producers longer than `LATE_S`."""
        return "server" if self._doing == "producers" and self._clock() - self._since > LATE_S else self._doing

    def to(self, doing: Cause) -> None:
        """Books what was done until now; from here on it is something else."""
        now = self._clock()
        if not self._is_idle:
            self.spent = self.spent.plus(self.doing, now - self._since)
        self._since, self._doing, self._is_idle = now, doing, False

    def rest(self) -> None:
        """From here on nothing is done, nor waited for but the trainer: that is booked for nobody."""
        self.to("reader")
        self._is_idle = True

    def received(self, waited_s: float, created_s: float | None) -> None:
        """Books the time since the last booking, in which an answer was received: ``waited_s`` of it in the socket.

        ``created_s`` is when, by this clock, what it brought came into being: until then it was the producers who were
        waited for; None where it brought nothing because there was nothing.
        """
        now = self._clock()
        waited_s = min(waited_s, now - self._since)
        late_s = waited_s if created_s is None else min(max(0.0, created_s - self._since), waited_s)
        late_s = min(late_s, LATE_S)
        own_s = now - self._since - waited_s
        self.spent = self.spent.and_(TimeSpent(producers=late_s, server=waited_s - late_s, reader=own_s))
        self._since, self._doing = now, "reader"


NAMES: Mapping[Cause, str] = {"producers": "producers", "server": "the server", "reader": "this process"}
"""The causes as the line of an epoch spells them."""
SHORT_S = 1.0
"""A shorter epoch is mostly its own start: its line has no share of waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """One epoch as far as it was read, or several together. Times are of the training loop, in seconds."""

    epoch: int | None = None
    """None of several, and before the first."""
    batches: int = 0
    samples: int = 0
    bytes: int = 0
    """Payload, of the samples handed out."""
    elapsed_s: float = 0.0
    """While the loop was iterating, its steps included; what it does between two iterations is not."""
    waited_s: float = 0.0
    """Of it, what the loop spent in asking for the next batch."""
    producers_s: float = 0.0
    """Of the waiting: nothing was there to be read."""
    server_s: float = 0.0
    """Of the waiting: something was there, and had not arrived."""
    reader_s: float = 0.0
    """Of the waiting: this process was at work on it (checksums, rows, stages, `map`), or at acknowledging."""
    bad_entries: int = 0
    filled: int = 0
    """In ordered reading, samples that stood in for bad ones, so that every rank has the same number of steps."""
    streams: Mapping[str, Stats] = field(default_factory=dict)
    """Of a mixture, each loader's own."""

    @property
    def samples_per_s(self) -> float:
        """Over all of the time, steps included."""
        return self.samples / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Over all of the time, steps included."""
        return self.bytes / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """Return the part of the time that was waiting, 0 to 1."""
        return min(1.0, self.waited_s / self.elapsed_s) if self.elapsed_s > 0 else 0.0

    @property
    def cause(self) -> Cause | None:
        """Return whom most of the waiting was for, or None where there was none to speak of."""
        return verdict(self._spent, self.elapsed_s)

    @property
    def _spent(self) -> TimeSpent:
        return TimeSpent(self.producers_s, self.server_s, self.reader_s)

    def as_dict(self) -> dict[str, Any]:
        """For scripts: fields and what follows from them, as JSON has them."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "streams"}
        found |= {
            "samples_per_s": self.samples_per_s, "bytes_per_s": self.bytes_per_s, "wait_share": self.wait_share,
            "cause": self.cause,
        }  # fmt: skip
        return {**found, "streams": {name: one.as_dict() for name, one in self.streams.items()}}

    def __str__(self) -> str:
        """One line."""
        rates = f"{self.samples_per_s:,.0f} samples/s, {readable_rate(self.bytes_per_s)}"
        if self.elapsed_s < SHORT_S:
            return f"{self.samples:,} samples in {self.elapsed_s:.2g} s, {rates}"
        waited = f"waited {self.wait_share:.0%} of the time".replace("%", " %")
        return f"{self.samples:,} samples in {self.elapsed_s:.1f} s, {rates}; {waited}{self._whom()}"

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
    """A mixture's: ``whole`` as its own loop was waited for, with the causes that its loaders know."""
    parts = summed(streams.values())
    producers, server = min(parts.producers_s, whole.waited_s), min(parts.server_s, whole.waited_s)
    return replace(
        whole, producers_s=producers, server_s=server, reader_s=max(0.0, whole.waited_s - producers - server),
        bad_entries=parts.bad_entries, filled=parts.filled, streams=dict(streams),
    )  # fmt: skip


def readable_rate(bytes_per_s: float) -> str:
    """``182 MB/s``: of 1000, as networks and disks count."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.3g} {unit}/s"
    return f"{bytes_per_s:.0f} B/s"


def summed(parts: Iterable[Stats], epoch: int | None = None) -> Stats:
    """Several, one after the other."""
    counted = ("batches", "samples", "bytes", "elapsed_s", "waited_s", "producers_s", "server_s", "reader_s")
    every = list(parts)
    totals = {name: sum(getattr(one, name) for one in every) for name in (*counted, "bad_entries", "filled")}
    return Stats(epoch=epoch, **totals)


Phase = Literal["off", "asking", "training"]
FEED_S = 60.0
"""An endless feed's epochs may be seconds long: no more than one line in this time."""


class WaitedFor(Protocol):
    """A queue that notes how long the training loop waited at it."""

    @property
    def loop_waited(self) -> TimeSpent:
        """The seconds that the loop waited, by cause."""


class CountedBatch(Protocol):
    """A batch, or what is known of one that another process has read."""

    @property
    def size(self) -> int:
        """Samples."""

    @property
    def nbytes(self) -> int:
        """Payload bytes."""


_B = TypeVar("_B", bound=CountedBatch)


class StatsCounter:
    """The counter of one loop, whose thread calls it. Any thread may call `stats`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._epoch: int | None = None
        self._queue: WaitedFor | None = None
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
        self._known = TimeSpent()
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

    def hand(self, batch: CountedBatch) -> None:
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
        """Return the same items. The time that a batch is worked on before the loop has it counts as waiting."""
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
        """Return the same batches, counted on their way to the loop."""
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
        """Count all time inside as waiting for ``cause``."""
        began = self._clock()
        try:
            yield
        finally:
            if self._time[0] == "asking":  # else somebody asks for the spec, and no loop waits
                self._known = self._known.plus(cause, self._clock() - began)

    # --- epochs ---

    def begin(self, epoch: int, queue: WaitedFor | None = None) -> None:
        """Begin an epoch: what is handed out from here on comes out of this queue. A second call is harmless."""
        if self._epoch not in (None, epoch):
            self._close(self.stats())
        if queue is not self._queue:
            self._known = self._known.and_(self._loop_waited)
            self._queue = queue
        self._epoch = epoch

    def count(self, bad_entries: int, filled: int) -> None:
        """Add what the reader of this epoch met."""
        self._bad += bad_entries
        self._filled += filled

    def end(self) -> Stats:
        """The epoch was read to its end."""
        self._last = self.stats()
        self._close(self._last)
        return self._last

    def is_due(self, *, is_feed: bool) -> bool:
        """Return whether a line on the epoch that just ended is due."""
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
        """Return the number of batches of all epochs."""
        return self._past.batches + self._batches

    def stats(self, *, total: bool = False) -> Stats:
        """The epoch being read, else the one read last; ``total``: all there was."""
        if self._epoch is None:
            return replace(self._past, epoch=self._last.epoch) if total else self._last
        found = self.current()
        return summed([self._past, found], found.epoch) if total else found

    @property
    def _loop_waited(self) -> TimeSpent:
        return TimeSpent() if self._queue is None else self._queue.loop_waited

    def current(self) -> Stats:
        """Return the counts since the epoch before ended."""
        asking_s, training_s = self._spent(self._clock())
        known = self._known.and_(self._loop_waited)
        if known.total > asking_s > 0:  # a wait that was broken off by an error in the loop's own hands
            known = known.times(asking_s / known.total)
        return Stats(
            epoch=self._epoch, batches=self._batches, samples=self._samples, bytes=self._bytes,
            elapsed_s=asking_s + training_s, waited_s=asking_s,
            producers_s=known.producers, server_s=known.server,
            reader_s=max(0.0, asking_s - known.producers - known.server),
            bad_entries=self._bad, filled=self._filled,
        )  # fmt: skip
