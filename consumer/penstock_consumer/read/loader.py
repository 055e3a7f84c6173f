"""The public `Loader`: options, iteration, acknowledging, statistics and state. Its stage methods are in a base class.

The stages themselves are ``pipeline``'s; what a batch is made to look like for a plain loop is ``view``'s.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from penstock_common.errors import GroupFinished, PenstockError
from penstock_common.hints import Passing, an, callable_of, explained, seconds, whole
from penstock_common.settings import Settings
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.feeds import FEED
from penstock_common.stream.groups.presence import new_incarnation
from penstock_common.stream.groups.roster import Membership, rank_member
from penstock_common.stream.keys import checked_name
from penstock_common.stream.manifest import ABANDONED, find_manifest
from penstock_common.stream.streams import Stream, await_event, find_stream, last_event, load_stream
from penstock_common.waiting import OUTAGE_S, Notify, Wait, to_stderr
from penstock_common.wire.spec import Spec
from penstock_consumer.read.ack import Acknowledge, Acknowledger, Adapter
from penstock_consumer.read.epochs import OrderedReading, Reading, open_reading
from penstock_consumer.read.member import EVENT_MS, await_stream
from penstock_consumer.read.options import VERSION, LoaderOptions, State, check_state, rank_options, spec_digest
from penstock_consumer.read.resources import LoaderResources, default_member, end_resources
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.filter import Filter, Keep
from penstock_consumer.stages.shuffle import ShuffleWindow
from penstock_consumer.stages.stats import Stats, StatsCounter

if TYPE_CHECKING:
    from penstock_consumer.read.view import View


class StageMethods:
    """The methods of a loader that choose its samples.

    They change the loader and return it, so any adapter takes it.
    """

    _options: LoaderOptions
    _reading: Reading | None

    @explained
    def shuffle(self, *, samples: int | None = None, bytes: int | None = None, seed: int = 0) -> Self:
        """Draws each batch at random from a window of so many samples, or bytes of payload. Shared reading only.

        Nothing is handed out before the window is full, or nothing came for 2 s: writers may wait for the room it
        takes. What it holds is leased, not acknowledged: after a crash, and at `close`, it is handed out again. A
        sample is acknowledged with the batch it left in. Memory: the window and one batch, beside ``prefetch_bytes``.
        The same arrivals and seed give the same batches; arrivals of shared reading are no two times the same.
        """
        if (samples is None) == (bytes is None) or (samples or bytes or 0) < 1:
            raise ValueError(f"shuffle(samples={samples}, bytes={bytes}): expected one of them, at least 1")
        if self._options.order is not None:
            raise ValueError(
                "shuffle() is for shared reading: canonical order is a seeded permutation already, another one for "
                "each epoch, if its producer shuffles (--seed)"
            )
        self._options.stages.append(partial(ShuffleWindow, seed=seed, samples=samples, nbytes=bytes))
        return self._told("shuffle")

    def filter(self, keep: Keep) -> Self:
        """Leaves out samples: ``keep`` is given a batch of n and gives n booleans. They count as trained on, at once.

        In shared reading batches are filled up again from the next ones; in ordered reading they come out smaller, and
        ``world_size`` must be 1, since every rank has the same steps. What filters should be a function of the sample.
        """
        callable_of("keep", keep, "lambda batch: batch['y'] != 3")
        order = self._options.order
        if order is not None and order.world > 1:
            raise ValueError(
                f"filter() would give {order.world} ranks different numbers of steps; leave samples out where they are "
                "made (a transform that raises SampleError), or weigh them with zero"
            )
        self._options.stages.append(partial(Filter, keep=keep))
        return self._told("filter")

    @property
    def rows(self) -> int | None:
        """Rows of every batch, where ``remainder`` makes all alike; else None."""
        options = self._options
        if options.remainder == "keep" or (options.order is not None and options.stages):  # a filter makes them smaller
            return None
        return options.batch_size

    def view(self) -> View:
        """The batches for a plain loop, to be mapped, selected, taken apart: see `view.View`."""
        from penstock_consumer.read.view import View

        return View(self)  # type: ignore[arg-type]  # every Loader is one of these

    def _told(self, verb: str) -> Self:
        if self._reading is not None and self._reading.has_begun:
            self._options.stages.pop()
            raise ValueError(f"{verb}() says how this loader reads, so it comes before its first batch")
        return self


PREFETCH_BYTES = 64 << 20
"""Received and not yet trained on (design.md section 2)."""
LEASE_S = 30.0
"""How long entries of a silent member stay its own."""
SHORTEST_LEASE_S = 0.1
"""A shorter one would lapse between two renewals."""
STARTUP_S = 60.0
"""A mistyped stream is reported after this long; a trainer may well start before its producer."""
POLL_S = 0.5


class Loader(StageMethods, Passing):
    """Batches of a stream for one member of a group: ``for batch in loader`` is the group's next epoch.

    Every group sees every sample; the members of a group share them. A batch is a dict of arrays ``[n, *shape]``,
    64-byte aligned and never overwritten while anything refers to them; the last one of an epoch may be smaller.
    ``acknowledge`` says when a batch counts as trained on; what does not is handed out again after a crash:

    - ``'on_next'``: when the loop asks for the next one, or the loader is closed.
    - ``'manual'``: when `acknowledge` is called.
    - ``'on_checkpoint'``: when `checkpointed` is called, so that data and model go back together.

    With ``order='canonical'`` it reads as one rank of an ordered group: the same seed gives the same batches whoever
    produced them and however fast, every rank has the same number of them, ``len(loader)``, and `load_state_dict` goes
    on exactly where `state_dict` was taken. Such a batch is acknowledged with all that came before it.
    """

    @explained
    def __init__(
        self,
        stream: str,
        *,
        group: str,
        batch_size: int,
        url: str | None = None,
        member: str | None = None,
        start: str | int = "resume",
        create: bool = True,
        wait: bool = True,
        acknowledge: Acknowledge = "on_next",
        order: Literal["canonical"] | None = None,
        rank: int = 0,
        world_size: int = 1,
        remainder: Literal["pad", "drop", "keep"] | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        lease_s: float = LEASE_S,
        timeout_s: float | None = None,
        views: bool = False,
        notify: Notify = to_stderr,
    ) -> None:
        """``start`` is 'resume' (where the group stands), 'earliest' or an epoch, which make the group read again.

        ``create=False`` refuses a group that is not there (GroupNotFound); else it is made, and announced where the
        stream has others. ``wait=False`` refuses a stream that is not there (StreamNotFound); else it is waited for,
        since a trainer may start before its producer. A stream that the `penstock run` above this process prepares is
        always waited for.

        ``timeout_s`` bounds every wait (WaitTimeout); None waits, saying for what, except 60 s for a stream or first
        epoch that never comes. ``member`` names this process in the group; restarted under the same name it goes on
        with what it held. With ``views`` a batch that is one block of a segment is not copied, and read-only: see
        docs/segments.md. Raises ServerUnavailable, GroupBusy, EpochsReleased.

        With ``order='canonical'`` this is rank ``rank`` of ``world_size``, each with batches of ``batch_size``.
        ``remainder`` says what becomes of a last step that the epoch does not fill: 'pad' fills it with the epoch's
        first samples (the default for several ranks; in shared reading the batch's own), 'drop' leaves it out, 'keep'
        makes it smaller (the default otherwise). Raises OrderNeedsSizes (when the epoch is begun), GroupKindMismatch.
        """
        batch_size, prefetch_bytes = whole("batch_size", batch_size), whole("prefetch_bytes", prefetch_bytes)
        seconds("lease_s", lease_s)
        if lease_s < SHORTEST_LEASE_S:
            raise ValueError(
                f"lease_s is {lease_s}, expected seconds, {SHORTEST_LEASE_S} or more ({LEASE_S:.0f} if left out)"
            )
        if timeout_s is not None:
            seconds("timeout_s", timeout_s)
        callable_of("notify", notify, "print")
        ranked = rank_options(order, rank, world_size, batch_size, remainder, member)
        if start not in ("resume", "earliest") and (type(start) is not int or start < 0):
            raise ValueError(f"start is {start!r}, expected 'resume', 'earliest' or an epoch's number")
        settings = Settings.from_environment()
        self.name = checked_name("stream", stream)
        is_awaited = stream in settings.awaited
        if is_awaited and url and url != settings.named_url:
            notify(f"url= names another server than the `penstock run` above, which makes {stream!r}: leave out url=")
        self._startup_s = None if is_awaited else STARTUP_S
        self.group = checked_name("group", group)
        self.member = rank_member(rank) if ranked else checked_name("member", member or default_member())
        self.batch_size = batch_size
        self._acknowledger = Acknowledger(acknowledge, self.name, notify)
        self._timeout_s, self._notify, self._url = timeout_s, notify, url or settings.url
        self._options = LoaderOptions(
            start=start,
            create=create,
            batch_size=batch_size,
            prefetch_bytes=prefetch_bytes,
            lease_s=lease_s,
            notify=notify,
            order=ranked,
            remainder=remainder or ("keep" if world_size == 1 else "pad"),
            views=views,
        )
        patience_s = min(OUTAGE_S, timeout_s or OUTAGE_S)
        self._client: Client = connect(self._url, bears_outages=notify, patience_s=patience_s)
        self._reading: Reading | None = None
        self._life = secrets.token_hex(8)
        """A state's numbers mean the batches of one loader."""
        self._iterations, self._asking = 0, threading.Lock()
        self._is_told_finished = False
        self._steps: int | None = None
        """Batches in the latest epoch whose size was known."""
        self.tally = StatsCounter()
        self._resources = LoaderResources(self._client, self._acknowledger.unacknowledged)
        self._closing = weakref.finalize(self, end_resources, self._resources)
        found = find_stream(self._client, self.name) if wait or is_awaited else load_stream(self._client, self.name)
        if found is not None and found.spec is not None:
            self._join(found)

    # --- the stream ---

    @property
    def stream(self) -> Stream:
        """The stream's meta; waits until it exists and has a spec."""
        return self._joined().member.stream

    @property
    def spec(self) -> Spec:
        """The tensors of a sample; waits until it is known."""
        spec = self.stream.spec
        assert spec is not None
        return spec

    @property
    def info(self) -> dict[str, Any]:
        """Return what the producer says of the stream, such as the names of classes in ``info["classes"]["y"]``."""
        return self.stream.info

    @property
    def samples(self) -> int | None:
        """Samples planned in the epoch being read (or, before the first, in the next one there is); None if unknown."""
        reading = self._joined()
        epoch = reading.run.reader.epoch if reading.run is not None else reading.next_epoch()
        manifest = None if epoch is None else find_manifest(self._client, reading.member.stream, epoch)
        return None if manifest is None else manifest.samples

    def __len__(self) -> int:
        """Batches of an epoch for each rank of an ordered group: of the one being read, or the next.

        Waits for the first epoch. A TypeError where they are not known, as list() and others expect it.
        """
        if self._options.order is None:
            raise TypeError(
                "the members of a group share its batches, so their number is not known: loader.samples counts the "
                'samples of the epoch, and a Loader with order="canonical" has a length; a DataLoader takes '
                "penstock.torch.dataset(loader), and `penstock produce ... --split train:0.9,val:0.1` makes parts"
            )
        reading = self._joined()
        assert isinstance(reading, OrderedReading)
        with suppress(GroupFinished):
            epoch = reading.run.reader.epoch if reading.run is not None else reading.next_epoch()
            if epoch is None and self._steps is None:
                epoch = self._await_epoch(reading, True)
            self._steps = self._steps if epoch is None else reading.steps(epoch)
        if self._steps is None:
            raise TypeError("the epoch has no size yet, so the number of its batches is not known")
        return self._steps

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises AttributeError for what would change nothing: a loader stays what it was made as."""
        if not name.startswith("_") and "_closing" in self.__dict__:
            raise AttributeError(
                f"a Loader stays what it was made as, and {name} changes nothing now: make another one"
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{an(self)} cannot go to another process: make one there, with the same group")

    def __bool__(self) -> bool:
        """Return True: ``if loader:`` asks whether there is one, not how many batches it has."""
        return True

    def __repr__(self) -> str:
        ordered = "" if self._options.order is None else f" of {self._options.order.world} in canonical order"
        return (
            f"<Loader of {self.name!r} at {self._client.where}: group {self.group!r}, member {self.member!r}{ordered}, "
            f"batch_size {self.batch_size}>"
        )

    def _joined(self) -> Reading:
        if self._reading is None:
            limit = self._timeout_s if self._timeout_s is not None else self._startup_s
            wait = Wait(self._notify, limit, server=self._client.where)
            with self.tally.waiting_for("producers"):
                return self._join(await_stream(self._client, self.name, wait))
        return self._reading

    def _join(self, stream: Stream) -> Reading:
        who = Membership(stream, self.group, self.member, new_incarnation(), self._options.order)
        self._reading = reading = open_reading(self._client, who, self._options)
        self._resources.join(reading)
        self._acknowledger.join(reading)
        reading.heartbeat.follow(self.tally.pace)
        return reading

    # --- iterating ---

    @property
    def is_ready(self) -> bool:
        """Return whether the next batch of the epoch being read has arrived."""
        return self._reading is not None and self._reading.is_ready

    def __iter__(self) -> Iterator[Batch]:
        """One epoch. Going on after a ``break`` gives the rest of it. Of an endless feed: everything, for ever.

        A loader has one loop at a time: raises PenstockError in an older iteration, and in a second thread.
        """
        batches = self._batches()
        return self.tally.counted(batches if self._acknowledger.adapter is not None else self._alone(batches))

    def _alone(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of one iteration, unless a newer one has begun or another thread asks meanwhile."""
        self._iterations += 1
        mine = self._iterations
        while True:
            self._require_own()
            if mine != self._iterations or not self._asking.acquire(blocking=False):
                raise PenstockError(
                    f"this loader of {self.name!r} is read by another loop or thread, and asking for the next batch "
                    "acknowledges the one before: make a penstock.Loader in each thread, with the same group to share "
                    "its batches"
                )
            try:
                batch = next(batches, None)
            finally:
                self._asking.release()
            if batch is None:
                return
            yield batch

    def _batches(self) -> Iterator[Batch]:
        if not self._closing.alive:
            raise PenstockError(f"this loader of {self.name!r} is closed: make another, or read inside its `with`")
        self._require_own()
        reading = self._joined()
        self._acknowledger.asked_for_next()
        is_empty = True
        while True:
            if reading.run is None:
                with self.tally.waiting_for("producers"):
                    epoch = self._await_epoch(reading, is_empty)
            else:
                epoch = reading.run.reader.epoch
            if epoch is None:
                return
            while (batch := self._next_batch(reading, epoch)) is not None:
                is_empty = False
                self._acknowledger.hand(batch)
                yield batch
                self._require_own()
                self._acknowledger.asked_for_next()
                if reading.run is None:  # a state was loaded meanwhile
                    return
            with self.tally.waiting_for("server"):
                runs_on = self._finish(reading, epoch)
            self.end_tally(epoch, is_feed=runs_on)
            if not runs_on and not is_empty and reading.cursor >= epoch:  # below it: something handed back is still due
                return

    def _require_own(self) -> None:
        """Raises PenstockError in a process that was forked from the loader's: its threads did not come along."""
        if self._resources.pid != os.getpid():
            raise PenstockError(
                f"this loader of {self.name!r} was made by process {self._resources.pid}, and a fork copied it: make a "
                "penstock.Loader in each process, with the same group to share its batches"
            )

    # --- acknowledging ---

    @property
    def policy(self) -> Acknowledge:
        """When batches are acknowledged."""
        return self._acknowledger.policy

    @property
    def adapter(self) -> Adapter | None:
        """Return the adapter that reports what was trained on, for a framework that reads ahead."""
        return self._acknowledger.adapter

    @explained
    def acknowledge(self, batch: Batch) -> None:
        """Settles a batch: it was trained on and is never handed out again to this group. Twice is the same as once."""
        self._acknowledger.acknowledge(batch)

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """A checkpoint is durable: settles everything handed out so far ('on_checkpoint' only), on the server.

        With a ``state`` that `state_dict` returned before, everything handed out until then: for checkpoints that
        are written while training goes on. Raises StateMismatch for the state of another loader.
        """
        if state is not None:
            check_state(state, {**self._identity(), "loader": self._life})
        self._acknowledger.checkpointed(None if state is None else int(state["batches"]))

    def trained(self, batch: Batch) -> None:
        """An adapter's word: the training step is done with a batch it had pulled."""
        self._acknowledger.trained(batch)

    def take_over(self, adapter: Adapter) -> None:
        """From now on ``adapter`` says what was trained on: pulling proves nothing where a framework reads ahead."""
        self._acknowledger.take_over(adapter)

    def hand_back(self, batches: Iterable[Batch]) -> None:
        """Has batches that were handed out and never trained on handed out again, at the next iteration's start."""
        self._acknowledger.hand_back(batches)

    # --- where the time goes ---

    def stats(self, *, total: bool = False) -> Stats:
        """The epoch being read, else the one read last: samples, rates, and whom the loop waited for; see `Stats`.

        ``total`` counts all epochs of this loader. From any thread, at any time; it asks nobody.
        """
        return self.tally.stats(total=total)

    def end_tally(self, epoch: int, *, is_feed: bool) -> None:
        """An epoch was read to its end: says so."""
        stats = self.tally.end()
        if self.tally.is_due(is_feed=is_feed):
            self._notify(f"{self.name}/{self.group} epoch {epoch}: {stats}")

    # --- state ---

    def state_dict(self) -> State:
        """Return as JSON what was handed to training so far, to be saved with a checkpoint. See `checkpointed`.

        Behind a framework it means the training step, not what was read ahead. Shared reading resumes by the group's
        ledger: with `checkpointed` nothing is lost or trained on twice, but what is left comes in another order.
        """
        state = {**self._identity(), "loader": self._life, **self._acknowledger.progress()}
        if isinstance(reading := self._joined(), OrderedReading):
            state["epoch"], state["position"] = reading.here(*self._acknowledger.frontier())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises StateMismatch unless the state is of this stream, spec, group, way of reading and batch size.

        In shared reading that is all: the group's ledger knows where to go on. In ordered reading an iteration under
        way ends, and the next begins with the first batch after the state, also with another world size, if every
        rank loads it. Raises ReplayTruncated where retention has removed what would come.
        """
        check_state(state, self._identity())
        if isinstance(reading := self._joined(), OrderedReading):
            self._acknowledger.forget()
            reading.go_to(int(state["epoch"]), int(state["position"]))

    def _identity(self) -> State:
        return {
            "version": VERSION,
            "stream": self.name,
            "stream_id": self.stream.id,
            "spec": spec_digest(self.spec),
            "group": self.group,
            "kind": "shared" if self._options.order is None else "ordered",
            "batch_size": self.batch_size,
        }

    # --- waiting ---

    def _await_epoch(self, reading: Reading, is_empty: bool) -> int | None:
        """The next epoch of the group; None where it has read them all and this loader has had its share."""
        wait = Wait(self._notify, self._timeout_s, server=self._client.where)
        fresh = self.tally.batches == 0
        limit = self._startup_s if fresh and self._timeout_s is None else None
        while True:
            try:
                if (epoch := self._look_for_epoch(reading, wait, limit)) is not None:
                    return epoch
            except GroupFinished as error:
                if fresh or self._is_told_finished or not is_empty:
                    raise
                self._is_told_finished = True
                self._notify(str(error))
                return None

    def _look_for_epoch(self, reading: Reading, wait: Wait, limit: float | None) -> int | None:
        """The next epoch; None after a while without one. Only reads: it may be called again after any failure."""
        member = reading.member
        event = last_event(self._client, member.stream.keys)
        epoch = reading.next_epoch()
        if epoch is None:
            self._acknowledger.wait_for_next(wait.seconds)
            wait.because(
                "epoch",
                lambda: f"{member.finished(reading.cursor)}; is a producer running (`penstock produce`)?",
                limit,
            )
            reading.raise_error()
            await_event(self._client, member.stream.keys, event, EVENT_MS)
        return epoch

    def _next_batch(self, reading: Reading, epoch: int) -> Batch | None:
        run = reading.run or reading.begin(epoch)
        self.tally.begin(epoch, run.queue.inner)
        wait = Wait(self._notify, self._timeout_s, server=self._client.where)
        while True:
            queued = run.queue.get(POLL_S)
            reading.raise_error()
            if queued is not None:
                if not reading.is_fresh:
                    with self.tally.waiting_for("server"):
                        reading.await_leases(wait)
            else:
                self._acknowledger.flush()  # one that was lost with its connection would keep its entry from everyone
            batch = None if queued is None else self._acknowledger.unless_dropped(queued.without_lost())
            if batch is not None:
                return batch
            if run.queue.is_over:
                return None
            self._acknowledger.raise_if_overdue(wait.seconds)
            wait.because("batch", lambda: run.why_waiting(wait.seconds))

    def _finish(self, reading: Reading, epoch: int) -> bool:
        """Ends an epoch that was read to its end; whether the iteration goes on into the next one (a feed)."""
        run, member = reading.run, reading.member
        assert run is not None
        reading.finish(run)
        self.tally.count(run.reader.bad_entries, run.reader.filled)
        manifest = find_manifest(self._client, member.stream, epoch)
        if manifest is not None and manifest.state == ABANDONED:
            self._notify(f"epoch {epoch} of {self.name!r} was abandoned: it ends with what was there")
        if isinstance(reading, OrderedReading):
            self._steps = reading.steps(epoch)
        self._acknowledger.end_epoch(epoch)
        if epoch in member.unclosed:
            reading.take_up()
        return manifest is not None and manifest.kind == FEED

    # --- the end ---

    def close(self) -> None:
        """Acknowledges the batch in hand ('on_next'), hands back what was not handed out, and leaves the group.

        Raises ServerUnavailable where an acknowledgement could not be delivered: its batch is handed out again.
        """
        self._resources.take_time()
        try:
            self._acknowledger.close()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._reading is not None and (run := self._reading.run) is not None:
            self._reading.member.unclosed.add(run.reader.epoch)
        self._closing()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        (self.close if kind is None else self._leave)()
