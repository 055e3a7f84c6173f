"""Feed a stream from an iterable that need not end: one process reads it and writes, this one watches and stops it.

There are no epochs to plan and nothing to repeat, so there are no jobs. The reader has a process of its own, because
only a process can be stopped in the middle of a user's `next`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import Any

from penstock_common.errors import BudgetFull, PenstockError, SampleError, SourceError, SpecMismatch
from penstock_common.waiting import Notify, to_stderr
from penstock_producer.jobs.fill import EpochSeed, FailureLimit, FillStopped, TooManyBad, named
from penstock_producer.jobs.forking import end_with_owner, forked
from penstock_producer.jobs.plan import ProductionPlan, open_writer
from penstock_producer.jobs.progress import (
    SHOWN_BAD,
    EpochProgress,
    ProductionProgress,
    ProductionSummary,
    bad_command,
)
from penstock_producer.jobs.worker import ENDING, WorkerOptions, replace_owners_handlers
from penstock_producer.sources.open import open_source
from penstock_producer.sources.protocol import IterSource, Sample
from penstock_producer.write.writer import WriterHooks

TELL_S = 0.2
"""The time between two progress reports of the process that feeds."""
COMMIT_WITHIN_S = 10.0
"""The time that the process has after SIGTERM to commit what it has. A process that does not react is killed."""


class EndlessProduction(AbstractContextManager["EndlessProduction"]):
    """A production of an iterable's items without an end. Use it in a ``with`` block and iterate over `run`."""

    samples_per_epoch = None
    epochs: tuple[int, ...] = ()

    def __init__(self, plan: ProductionPlan, options: WorkerOptions, *, notify: Notify = to_stderr) -> None:
        self._plan, self._notify, self._began = plan, notify, time.monotonic()
        self._last, self._bad_shown, self._told_of_more = FeedProgress(), 0, False
        self._pipe, far = Pipe(duplex=False)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until it has handlers of its own
        try:
            self._child = forked(_feed, plan, options.url, far)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        far.close()

    def run(self) -> Iterator[ProductionProgress]:
        """Yield the progress several times a second, until the iterable ends.

        Raises the error that ended it otherwise.
        """
        while self._last.end is None:
            new_bad = self._listen(TELL_S)
            last = self._last
            seen = EpochProgress(FEED, "live", None, last.good + last.bad, last.bad)
            more_bad = bad_command(self._plan.stream) if last.bad > SHOWN_BAD and not self._told_of_more else ""
            self._told_of_more |= bool(more_bad)
            yield ProductionProgress(
                (seen,), None, pids=(self._child.pid or 0,), new_bad=new_bad, more_bad=more_bad, workers=1
            )
        if self._last.end:
            raise PenstockError(f"{self._last.end}; {self._last.where(self._plan)}")

    def _listen(self, wait_s: float) -> tuple[str, ...]:
        """Read its reports. Returns the reasons of bad samples, of the first few of the run."""
        new_bad = []
        try:
            while self._last.end is None and self._pipe.poll(wait_s):
                kind, said = self._pipe.recv()
                if kind == "at":
                    self._last = FeedProgress(**said)
                elif kind == "bad":
                    if self._bad_shown < SHOWN_BAD:
                        self._bad_shown += 1
                        new_bad.append(said)
                else:
                    self._notify(said)
                wait_s = 0
        except (EOFError, OSError):
            self._child.join(COMMIT_WITHIN_S)
            self._last.ended(f"the process that feeds it ended with exit code {self._child.exitcode}")
        return tuple(new_bad)

    def summary(self) -> ProductionSummary:
        """Return what was made, after `run`."""
        last = self._last
        return ProductionSummary(
            self._plan.stream, (), last.good + last.bad, last.bad, last.nbytes, time.monotonic() - self._began
        )

    def abandon(self) -> None:
        """Do nothing: the committed part of a feed stays."""

    def close(self) -> None:
        """Stop the process that feeds. If it was still running, report its progress. A second call does nothing."""
        was_going = self._child.is_alive() and self._last.end is None
        if was_going:
            self._child.terminate()
            deadline = time.monotonic() + COMMIT_WITHIN_S
            while self._last.end is None and time.monotonic() < deadline:
                self._listen(TELL_S)
        self._child.join(COMMIT_WITHIN_S if self._last.end is not None else 0)
        if self._child.is_alive():
            self._child.kill()
            self._child.join()
        if was_going:
            self._notify(f"stopped {self._last.where(self._plan)}")
        self._pipe.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


FEED = -1
"""Stands for an epoch's number: an endless feed goes through many."""


@dataclass
class FeedProgress:
    """The progress of a feed."""

    items: int = 0
    """Items taken from the iterable."""
    good: int = 0
    bad: int = 0
    lost: int = 0
    """Samples that were made and not committed, because there was no quota for them at the end."""
    nbytes: int = 0
    end: str | None = None
    """None while it runs; then the reason of its end, empty for a normal one."""

    def took(self) -> None:
        """Count an item that was taken."""
        self.items += 1

    def saw(self, watch: FailureLimit) -> None:
        """Take over the numbers of good and bad samples."""
        self.good, self.bad = watch.good, watch.bad

    def committed(self, nbytes: int, lost: int = 0) -> None:
        """Note the bytes that are committed, and the samples that will not be."""
        self.nbytes, self.lost = nbytes, lost

    def ended(self, reason: str = "") -> None:
        """Note that the feed ended, and why if it was not as it should."""
        self.end = reason

    def where(self, plan: ProductionPlan) -> str:
        """Return a line for people."""
        name = getattr(plan.source, "name", None) or "the iterable"
        lost = f"; {self.lost} more found no space and are lost" if self.lost else ""
        bad = f", {self.bad} bad" if self.bad else ""
        return (
            f"at item {self.items:,} of {name}: {self.good - self.lost:,} samples of this run are in "
            f"{plan.stream!r}{bad}{lost}"
        )


# --- the process that feeds -------------------------------------------------------------------------------------------


def _feed(plan: ProductionPlan, url: str, pipe: Connection) -> None:
    """Run the process that feeds."""
    stop = _StopSignal()
    end_with_owner(os.getppid(), COMMIT_WITHIN_S, 1)
    tell = _ProgressReporter(pipe)
    fed = FeedProgress()
    try:
        with stop.at_any_time():
            source = open_source(plan.source)
            if source.unit != "item":
                raise SourceError("--endless is for iterables: a source of samples by number has epochs (--epochs)")
        _Feeder(plan, source, url, stop, tell, fed).feed()
        fed.ended()
    except FillStopped:
        fed.ended()
    except PenstockError as error:
        fed.ended(str(error))
    except Exception as error:
        fed.ended(f"{type(error).__name__}: {error}")
    with suppress(OSError):
        tell.at(fed, is_due=True)


class _StopSignal:
    """SIGTERM: it acts at once while the user's code runs, otherwise when the current work is done."""

    def __init__(self) -> None:
        self.is_set = False
        self._may_interrupt = False
        self._pid = os.getpid()
        replace_owners_handlers(self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # the user's code forked, and the child inherited this handler
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        self.is_set = True
        if self._may_interrupt:
            self._may_interrupt = False
            raise FillStopped

    @contextmanager
    def at_any_time(self) -> Iterator[None]:
        """Permit FillStopped at any point of the block."""
        self._may_interrupt = True
        try:
            if self.is_set:
                raise FillStopped
            yield
        finally:
            self._may_interrupt = False


class _ProgressReporter:
    """The reports to the owner. Progress is not sent more often than the owner looks."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._said = pipe, 0.0
        self._sending = threading.Lock()
        """The lock for each message: the stall detector speaks from a thread of its own."""

    def at(self, fed: FeedProgress, *, is_due: bool = False) -> None:
        if is_due or time.monotonic() - self._said >= TELL_S:
            self._said = time.monotonic()
            self._send("at", vars(fed))

    def bad(self, reason: str) -> None:
        self._send("bad", reason)

    def say(self, text: str) -> None:
        with suppress(OSError):
            self._send("say", text)

    def _send(self, kind: str, said: object) -> None:
        with self._sending:
            self._pipe.send((kind, said))


class _Feeder:
    """One pass over the iterable into the endless feed."""

    def __init__(
        self,
        plan: ProductionPlan,
        source: IterSource,
        url: str,
        stop: _StopSignal,
        tell: _ProgressReporter,
        fed: FeedProgress,
    ) -> None:
        self._source, self._stop, self._tell, self._fed = source, stop, tell, fed
        self._seed = EpochSeed(plan.seed, 0)
        self._watch = FailureLimit(
            lambda: stop.is_set, on_error=plan.on_error, max_bad=plan.max_bad, spec_is_declared=plan.spec is not None
        )  # fmt: skip
        self._bad_before: list[str] = []
        """Bad items before the first good one, which a stream without spec needs to begin."""
        self._writer = open_writer(plan, url, tell.say, spec=source.spec, info=source.info)
        WriterHooks(self._writer).stop_when(lambda: stop.is_set)

    def feed(self) -> None:
        """Write to the iterable's end, or until it is stopped: then everything that was written and finds quota is
        committed.
        """
        with closing(self._source), self._writer:
            try:
                self._pass()
            except FillStopped:
                pass
            except BudgetFull:
                if not self._stop.is_set:
                    raise
            self._commit_rest()

    def _pass(self) -> None:
        items = iter(self._source)
        while True:
            with self._stop.at_any_time():
                item = next(items, self)
                if item is self:
                    break
                made = self._made(item)
            self._fed.took()
            self._write(made)
            self._fed.saw(self._watch)
            self._tell.at(self._fed)
        if not self._watch.good and self._watch.bad:
            raise TooManyBad(f"none of the {self._watch.bad} items could be made: {self._bad_before[:1]}")

    def _made(self, item: Any) -> Sample | SampleError:
        offset = self._fed.items
        make = partial(self._source.make, item, offset, self._seed.of(0, offset))
        return self._watch.attempt(offset, self._source.key(offset), make)

    def _write(self, made: Sample | SampleError) -> None:
        if isinstance(made, SampleError):
            self._quarantine(self._watch.saw_bad(made))
            return
        count = len(next(iter(made.values()))) if self._source.batched else 1
        try:
            if self._source.batched:
                self._writer.write_batch(made)
            else:
                self._writer.write(made)
        except SpecMismatch as error:
            spec, key = self._writer.stream.spec, self._source.key(self._fed.items - 1)
            wider = None if self._source.batched or spec is None else self._watch.widen(spec, made, ())
            self._quarantine(self._watch.saw_mismatch(named(error, key, wider, is_batch=self._source.batched)))
            return
        except BudgetFull:
            self._watch.saw_good(count)  # it was taken, and waits for quota
            raise
        self._watch.saw_good(count)
        for reason in self._bad_before:
            self._writer.quarantine(reason)
        self._bad_before.clear()

    def _quarantine(self, reason: str) -> None:
        self._tell.bad(reason)
        if self._writer.stream.spec is None:
            self._bad_before.append(reason)
        else:
            self._writer.quarantine(reason)

    def _commit_rest(self) -> None:
        """Commit the rest. Samples that find no quota while it is stopped are lost, and reported."""
        self._fed.saw(self._watch)
        try:
            self._writer.flush()
        except BudgetFull:
            self._fed.committed(WriterHooks(self._writer).bytes_fed, lost=self._writer.uncommitted)
            raise FillStopped from None  # the writer ends its epoch with what is committed
        self._fed.committed(WriterHooks(self._writer).bytes_fed)
