"""The public `Loader`: options, iteration, acknowledgement, statistics and state.

The stages that change batches are in ``stages/``. ``view`` changes what a plain loop gets.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, Self

from penstock_common.errors import GroupFinished, PenstockError
from penstock_common.hints import Passing, an, callable_of, explained
from penstock_common.settings import Settings
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.events import await_event, last_event
from penstock_common.stream.feeds import FEED
from penstock_common.stream.groups.presence import new_incarnation
from penstock_common.stream.groups.roster import Membership, rank_member
from penstock_common.stream.keys import checked_name
from penstock_common.stream.manifest import ABANDONED, Manifest, find_manifest
from penstock_common.stream.rights import LOADER, require_rights
from penstock_common.stream.streams import Stream, find_stream, load_stream
from penstock_common.tuning import Canonical, Tuning, takes_old_names, tuning_of
from penstock_common.waiting import OUTAGE_S, Wait
from penstock_common.wire.spec import Spec
from penstock_consumer.read.ack import Acknowledge, Acknowledger, Adapter
from penstock_consumer.read.hooks import AlwaysTrue
from penstock_consumer.read.member import Member, join_as
from penstock_consumer.read.options import (
    STATE_VERSION,
    State,
    check_state,
    default_member,
    loader_options,
    spec_digest,
)
from penstock_consumer.read.resources import LoaderResources, end_resources
from penstock_consumer.read.view import View
from penstock_consumer.read.waits import EVENT_MS, await_stream
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.filter import Filter, Keep
from penstock_consumer.stages.queue import POLL_S
from penstock_consumer.stages.shuffle import ShuffleWindow
from penstock_consumer.stages.stats import Stats, StatsCounter

Notice = Literal["no batch", "finished"]

LATE_ANSWER_S = 0.05
"""Sending an acknowledgement takes far less. A call that takes longer waits for answers of the server."""
STARTUP_S = 60.0
"""A misspelt stream is reported after this time. A trainer may start before its producer."""


class SingleLoop:
    """The rule that one loop at a time reads a loader."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._loops, self._asking = 0, threading.Lock()
        self._thread = 0
        """The thread that asked last."""

    def begin(self) -> int:
        """Return the number of a loop that begins. The loops before it have ended."""
        if self._asking.locked() and self._thread == threading.get_ident():
            self._asking.release()  # an interruption kept the loop before from doing so
        self._loops += 1
        return self._loops

    def ask(self, loop: int) -> None:
        """Begin to ask for a batch. Raises PenstockError if a newer loop has begun or another thread asks now."""
        if loop == self._loops and self._asking.acquire(blocking=False):
            self._thread = threading.get_ident()
        else:
            raise PenstockError(
                f"this loader of {self._stream!r} is read by another loop or thread, and asking for the next batch "
                "acknowledges the one before: make a penstock.Loader in each thread, with the same group to share "
                "its batches"
            )

    def answered(self) -> None:
        """Note that the loop has its batch."""
        self._asking.release()


class Loader(AlwaysTrue, Passing):
    """The batches of a stream for one member of a group. ``for batch in loader`` reads the group's next epoch.

    Every group gets every sample, and the members of a group share them. A batch is a dict of arrays ``[n, *shape]``,
    aligned to 64 bytes. It is never overwritten while anything refers to it. The last batch of an epoch may be smaller.

    ``acknowledge`` says when a batch counts as trained on. Other batches are delivered again after a crash.

    - ``'on_next'``: when the loop asks for the next batch, or the loader is closed.
    - ``'manual'``: when `acknowledge` is called.
    - ``'on_checkpoint'``: when `checkpointed` is called, so that data and model go back together.

    With ``order=Canonical(rank, world_size)`` the loader is one rank of a group in canonical order. The same seed gives
    the same batches, whichever workers produced them. Every rank has the same number of batches, ``len(loader)``.
    `load_state_dict` continues exactly where `state_dict` was taken. A batch is acknowledged with all batches before
    it.

    Example:
        >>> with penstock.Loader("train", group="resnet", batch_size=64) as loader:
        ...     for batch in loader:
        ...         train(batch["x"], batch["y"])
    """

    @takes_old_names
    @explained
    def __init__(
        self,
        stream: str,
        *,
        group: str,
        batch_size: int,
        url: str | None = None,
        start: str | int = "resume",
        wait: bool = True,
        acknowledge: Acknowledge = "on_next",
        order: Canonical | Literal["canonical"] | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        """Join the group, if the stream exists and has a spec. Else the first batch, a state or `spec` waits and joins.

        Args:
            stream: the stream's name.
            group: the group's name. Each training job has a group of its own.
            batch_size: the samples of a batch; in canonical order, of a batch of each rank.
            url: the server's address. None means PENSTOCK_URL, else this user's own server on this host.
            start: 'resume' continues where the group stands. 'remaining' does so also if epochs were released before
                the group read them: it goes on without those. If one lost only a part of its entries, the group goes on
                behind it. 'earliest', or the number of an epoch, makes the group read again from there.
            wait: whether a stream that does not exist is waited for. A stream that the `penstock run` above this
                process prepares is always waited for.
            acknowledge: when a batch counts as trained on; see the class.
            order: `Canonical(rank, world_size)` makes this loader one rank of a group in canonical order. 'canonical'
                is the only rank of one. None is shared order.
            tuning: what most training jobs leave as it is: member, create, timeout_s, remainder, prefetch_bytes,
                lease_s, views, notify. See `Tuning`.

        Raises:
            ServerUnavailable: the server does not answer.
            StreamNotFound: the stream does not exist, with ``wait=False``.
            GroupNotFound: the group does not exist, with ``Tuning(create=False)``.
            GroupBusy: ranks of another world size are alive.
            GroupKindMismatch: the group is read in another order, or with another batch size.
            EpochsReleased: the group had stopped holding data, and lost epochs.
            WaitTimeout: a wait took longer than the tuning's ``timeout_s``.
            OrderNeedsSizes: at its first batch, if canonical order needs sizes that the epoch does not have.
        """
        tuning = tuning_of("Loader", tuning)
        options = loader_options(start, batch_size, order, tuning)
        settings, notify = Settings.from_environment(), options.notify
        self.name = checked_name("stream", stream)
        is_awaited = stream in settings.awaited
        if is_awaited and url and url != settings.named_url:
            notify(f"url= names another server than the `penstock run` above, which makes {stream!r}: leave out url=")
        self.group = checked_name("group", group)
        rank = options.order
        self.member = rank_member(rank.rank) if rank else checked_name("member", tuning.member or default_member())
        self._acknowledger = Acknowledger(acknowledge, self.name, notify)
        self._options = replace(options, url=url or settings.url, startup_s=None if is_awaited else STARTUP_S)
        patience_s = min(OUTAGE_S, options.timeout_s or OUTAGE_S)
        client = connect(self._options.url, bears_outages=notify, patience_s=patience_s)
        require_rights(client, LOADER, self.name)
        self._life = secrets.token_hex(8)
        """The random name of this loader in its states. It tells two loaders' batch counts apart."""
        self._loop = SingleLoop(self.name)
        self._closer: int | None = None
        """The thread that closed the loader."""
        self._noticed: set[Notice] = set()
        """The notices that were given, each of them once."""
        self._steps: int | None = None
        """The number of batches in the latest epoch whose size was known."""
        self._counter = StatsCounter()
        self._resources = LoaderResources(client, self._acknowledger.unacknowledged)
        self._closing = weakref.finalize(self, end_resources, self._resources)
        found = find_stream(self._client, self.name) if wait or is_awaited else load_stream(self._client, self.name)
        if found is not None and found.spec is not None:
            self._join(found)

    # --- the stream ---

    @property
    def batch_size(self) -> int:
        """Return the samples of a batch."""
        return self._options.batch_size

    @property
    def stream(self) -> Stream:
        """The facts about the stream. Waits until it exists and has a spec."""
        return self._joined().stream

    @property
    def spec(self) -> Spec:
        """The tensors of a sample. Waits until they are known."""
        return self.stream.require_spec()

    @property
    def info(self) -> dict[str, Any]:
        """The producer's facts about the stream, such as the names of classes in ``info["classes"]["y"]``."""
        return self.stream.info

    @property
    def samples(self) -> int | None:
        """The planned samples of the epoch being read, or before the first of the next epoch.

        None if they are not known.
        """
        member = self._joined()
        epoch = member.run.reader.epoch if member.run is not None else member.next_epoch()
        manifest = None if epoch is None else find_manifest(self._client, member.stream, epoch)
        return None if manifest is None else manifest.samples

    def __len__(self) -> int:
        """Return the batches of an epoch for each rank in canonical order: of the epoch being read, or of the next one.

        Waits for the first epoch. Raises TypeError if the number is not known, as list() and others expect it.
        """
        if self._options.order is None:
            raise TypeError(
                "the members of a group share its batches, so their number is not known: loader.samples counts the "
                'samples of the epoch, and a Loader with order="canonical" has a length; a DataLoader takes '
                "penstock.torch.dataset(loader), and `penstock produce ... --split train:0.9,val:0.1` makes parts"
            )
        member = self._joined()
        assert member.rank is not None
        with suppress(GroupFinished):
            epoch = member.run.reader.epoch if member.run is not None else member.next_epoch()
            if epoch is None and self._steps is None:
                epoch = self._await_epoch(member, True)
            if epoch is not None:
                self._note_steps(member, epoch)
                while self._steps == 0 and member.run is None and (epoch := member.next_epoch(epoch)) is not None:
                    self._note_steps(member, epoch)  # an iteration passes over an epoch without a batch
        if self._steps is None:
            raise TypeError("the epoch has no size yet, so the number of its batches is not known")
        return self._steps

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse attributes that would change nothing, because a loader keeps the options that it was made with."""
        if not name.startswith("_") and "_closing" in self.__dict__:
            raise AttributeError(
                f"a Loader stays what it was made as, and {name} changes nothing now: make another one"
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{an(self)} cannot go to another process: make one there, with the same group")

    def __repr__(self) -> str:
        ordered = "" if self._options.order is None else f" of {self._options.order.world} in canonical order"
        return (
            f"<Loader of {self.name!r} at {self._client.where}: group {self.group!r}, member {self.member!r}{ordered}, "
            f"batch_size {self.batch_size}>"
        )

    @property
    def _client(self) -> Client:
        return self._resources.client

    @property
    def _member(self) -> Member | None:
        """Return the member, or None before the loader has joined its group."""
        return self._resources.member

    def _joined(self) -> Member:
        if self._member is None:
            limit = self._options.timeout_s if self._options.timeout_s is not None else self._options.startup_s
            wait = Wait(self._options.notify, limit, server=self._client.where)
            with self._counter.waiting_for("producers"):
                return self._join(await_stream(self._client, self.name, wait, self._require_open))
        return self._member

    def _join(self, stream: Stream) -> Member:
        who = Membership(stream, self.group, self.member, new_incarnation(), self._options.order)
        member = join_as(self._client, who, self._options)
        self._resources.join(member)
        self._acknowledger.join(member)
        member.heartbeat.loop.follow(self._counter)
        if not self._closing.alive:  # another thread closed it, and knew no member to end
            end_resources(self._resources)
        return member

    # --- which samples ---

    @explained
    def shuffle(self, *, samples: int | None = None, bytes: int | None = None, seed: int = 0) -> Self:
        """Draw each batch at random from a window of samples. For shared order only.

        The first batch comes when the window is full, or when no sample came for 2 s. The window's samples are leased
        and not acknowledged. After a crash, and at `close`, they are delivered again. A sample is acknowledged with
        the batch that contains it. The same arrivals and seed give the same batches, but arrivals in shared order
        vary.

        Args:
            samples: the size of the window, in samples. Give this or ``bytes``.
            bytes: the size of the window, in payload bytes. The window adds this memory to ``prefetch_bytes``.
            seed: the seed of the draws.

        Returns:
            This loader.

        Raises:
            ValueError: a size is missing or below 1, the order is canonical, or the loader has given a batch already.

        Example:
            >>> for batch in loader.shuffle(samples=10_000, seed=1):
            ...     ...
        """
        if (samples is None) == (bytes is None) or (samples or bytes or 0) < 1:
            raise ValueError(f"shuffle(samples={samples}, bytes={bytes}): expected one of them, at least 1")
        if self._options.order is not None:
            raise ValueError(
                "shuffle() is for shared order: canonical order is a seeded permutation already, another one for "
                "each epoch, if its producer shuffles (--seed)"
            )
        self._options.stages.append(partial(ShuffleWindow, seed=seed, samples=samples, nbytes=bytes))
        return self._before_first_batch("shuffle")

    def filter(self, keep: Keep) -> Self:
        """Leave out samples. They count as trained on at once.

        In shared order later samples fill the batches up. In canonical order batches become smaller, and
        ``world_size`` must be 1, because all ranks have the same number of steps.

        Args:
            keep: a function that takes a batch of n samples and returns n booleans. Its answer on a sample should
                depend on the sample alone.

        Returns:
            This loader.

        Raises:
            TypeError: ``keep`` is no function.
            ValueError: the loader is one of several ranks, or has given a batch already.

        Example:
            >>> for batch in loader.filter(lambda batch: batch["y"] != 3):
            ...     ...
        """
        callable_of("keep", keep, "lambda batch: batch['y'] != 3")
        order = self._options.order
        if order is not None and order.world > 1:
            raise ValueError(
                f"filter() would give {order.world} ranks different numbers of steps; leave samples out where they are "
                "made (a generator that yields only the others), or weigh them with zero"
            )
        self._options.stages.append(partial(Filter, keep=keep))
        return self._before_first_batch("filter")

    def view(self) -> View:
        """Return the batches for a plain loop, to be mapped, selected or collated; see `view.View`."""
        return View(self)

    def _before_first_batch(self, verb: str) -> Self:
        member = self._resources.member
        if member is not None and member.has_begun:
            self._options.stages.pop()
            raise ValueError(f"{verb}() says how this loader reads, so it comes before its first batch")
        return self

    # --- iterating ---

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch, or the rest of an epoch after a ``break``. A feed without end never stops.

        A loader has one loop at a time. Raises PenstockError in an older loop, and in a second thread.
        """
        batches = self._counter.counted(self._batches())
        return self._acknowledger.given(batches if self._acknowledger.adapter is not None else self._alone(batches))

    def _alone(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of one iteration. Raises PenstockError in an older loop, and in a second thread."""
        mine = self._loop.begin()
        while True:
            try:
                self._loop.ask(mine)
            except PenstockError:
                self._require_own()  # a fork copies the mark of a thread that asks
                raise
            try:
                batch = next(batches, None)
            except Exception:
                self._raise_if_closed_elsewhere()  # whatever it met
                raise
            finally:
                self._loop.answered()
            self._raise_if_closed_elsewhere()
            if batch is None:
                return
            yield batch

    def _batches(self) -> Iterator[Batch]:
        self._require_open()
        self._require_own()
        member = self._joined()
        self._acknowledger.begin()
        wait = Wait(self._options.notify, self._options.timeout_s, server=self._client.where)
        is_empty, unfinished = True, None
        while True:
            if member.run is None:
                with self._counter.waiting_for("producers"):
                    epoch = self._await_epoch(member, is_empty) if unfinished is None else _due(member, unfinished)
            else:
                epoch = member.run.reader.epoch
            if epoch is None:
                return
            has_no_batch = member.run is None
            if has_no_batch and not member.begin_unless_released(epoch):
                continue
            while (batch := self._next_batch(member, epoch, wait)) is not None:
                is_empty = has_no_batch = False
                self._acknowledger.deliver(batch)
                yield batch
                self._require_own()
                began = self._counter.now()
                self._acknowledger.asked_for_next()
                self._counter.waited_since(began, "server", LATE_ANSWER_S)
                if member.run is None:  # a state was loaded during the step
                    return
            with self._counter.waiting_for("server"):
                is_lost = member.run is not None and bool(member.run.reader.loss)
                runs_on = self._finish(member, epoch)
            self._end_stats(epoch, is_feed=runs_on)
            if has_no_batch:
                self._tell_no_batch(epoch)
            if not runs_on and not is_empty and member.cursor >= epoch:  # below it: something of it is still due
                return
            # others may read what is due. An epoch that a server lost as a whole is waited for instead
            unfinished = None if runs_on or is_empty or is_lost else epoch

    def _tell_no_batch(self, epoch: int) -> None:
        """Say once why an epoch gave no batch, if the options of this loader are the reason."""
        options, manifest = self._options, find_manifest(self._client, self.stream, epoch)
        samples = (manifest.samples or 0) if manifest is not None else 0
        step = self.batch_size * (1 if options.order is None else options.order.world)
        if "no batch" in self._noticed or not samples:
            return
        if options.remainder == "drop" and samples < step:
            why = f"its {samples} samples do not fill one step of {step}, and remainder='drop' leaves the rest out"
        elif any(isinstance(stage, partial) and stage.func is Filter for stage in options.stages):
            why = "filter() kept none of the samples that this loader received"
        else:
            return
        self._noticed.add("no batch")
        self._options.notify(f"epoch {epoch} of {self.name!r} gave no batch: {why}")

    def _note_steps(self, member: Member, epoch: int) -> None:
        if member.rank is not None:
            self._steps = member.rank.steps(epoch, self._options.remainder)

    def _require_open(self) -> None:
        """Raise PenstockError if the loader is closed, also while it waits in another thread."""
        if not self._closing.alive:
            raise PenstockError(f"this loader of {self.name!r} is closed: make another, or read inside its `with`")

    def _raise_if_closed_elsewhere(self) -> None:
        """Raise PenstockError if another thread closed the loader: the loop would end as after a whole epoch."""
        if self._closer not in (None, threading.get_ident()):
            self._require_open()

    def _require_own(self) -> None:
        """Raise PenstockError in a process that was forked from the loader's, because its threads were not copied."""
        if self._resources.pid != os.getpid():
            raise PenstockError(
                f"this loader of {self.name!r} was made by process {self._resources.pid}, and a fork copied it: make a "
                "penstock.Loader in each process, with the same group to share its batches"
            )

    # --- acknowledging ---

    @explained
    def acknowledge(self, batch: Batch) -> None:
        """Acknowledge a batch: it is never delivered again to this group. A second call does nothing.

        Args:
            batch: a batch that this loader gave.

        Raises:
            ValueError: the policy is 'on_checkpoint'.
            TypeError: the batch is not one that a loader gave.

        Example:
            >>> loader.acknowledge(batch)
        """
        self._acknowledger.acknowledge(batch)

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """Acknowledge on the server everything that was delivered, because a checkpoint of it is durable.

        Args:
            state: a state that `state_dict` returned. Then everything until that state is acknowledged, for checkpoints
                that are written while training goes on.

        Raises:
            ValueError: the policy is not 'on_checkpoint'.
            StateMismatch: the state is another loader's.
            PenstockError: the loader of a rank is closed, so that what it had is given again.

        Example:
            >>> save_model()
            >>> loader.checkpointed()
        """
        if self._options.order is not None and not self._closing.alive:  # the rank has signed off
            if self._acknowledger.has_trained:
                self._require_open()
            return
        if state is not None:
            check_state(state, {**self._identity(), "loader": self._life})
        self._acknowledger.checkpointed(None if state is None else int(state["batches"]))

    # --- where the time goes ---

    def stats(self, *, total: bool = False) -> Stats:
        """Return samples, rates and waits of the epoch being read, or of the one read last; see `Stats`.

        Any thread may call this at any time. It sends nothing to the server.

        Args:
            total: whether all epochs of this loader are counted.
        """
        return self._counter.stats(total=total)

    def _end_stats(self, epoch: int, *, is_feed: bool) -> None:
        """Report the statistics of an epoch that was read to its end."""
        stats = self._counter.end()
        if self._counter.is_due(is_feed=is_feed):
            self._options.notify(f"{self.name}/{self.group} epoch {epoch}: {stats}")

    # --- state ---

    def state_dict(self) -> State:
        """Return what was handed to training so far, as JSON, to be saved with a checkpoint.

        Behind a framework this is the position of the training step, not of what was read ahead. In shared order the
        group's ledger says where to continue: with `checkpointed` nothing is lost or trained on twice, but the rest
        comes in another order.

        Example:
            >>> torch.save({"model": model.state_dict(), "data": loader.state_dict()}, path)
        """
        state = {**self._identity(), "loader": self._life, **self._acknowledger.progress()}
        if (rank := (member := self._joined()).rank) is not None:
            state |= rank.state_at(*member.position_after(rank, *self._acknowledger.frontier()))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken.

        In shared order this only compares, because the group's ledger knows where to continue. In canonical order a
        running iteration ends, and the next one begins with the first batch after the state. The world size may differ,
        if all ranks load one state.

        Args:
            state: a dict that `state_dict` returned.

        Raises:
            StateMismatch: the state is of another stream, spec, group, order or batch size, or newer than the server.
            ReplayTruncated: retention has removed what would come.
        """
        self._require_taken(state)
        if (rank := (member := self._joined()).rank) is not None:
            self._acknowledger.forget()
            member.go_to(rank, int(state["epoch"]), int(state["position"]))

    def _require_taken(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatch unless `load_state_dict` takes the state. Nothing changes."""
        check_state(state, self._identity())
        if (rank := self._joined().rank) is not None:
            rank.require_read(int(state["epoch"]), int(state["position"]), state.get("manifest"))

    def _identity(self) -> State:
        return {
            "version": STATE_VERSION,
            "stream": self.name,
            "stream_id": self.stream.id,
            "spec": spec_digest(self.spec),
            "group": self.group,
            "kind": "shared" if self._options.order is None else "ordered",
            "batch_size": self.batch_size,
        }

    # --- waiting ---

    def _await_epoch(self, member: Member, is_empty: bool) -> int | None:
        """Return the next epoch of the group, or None if it has read all epochs and this loader had its share."""
        wait = Wait(self._options.notify, self._options.timeout_s, server=self._client.where)
        fresh = self._counter.batches == 0
        limit = self._options.startup_s if fresh and self._options.timeout_s is None else None
        while True:
            try:
                if (epoch := self._look_for_epoch(member, wait, limit)) is not None:
                    return epoch
            except GroupFinished as error:
                if fresh or "finished" in self._noticed or not is_empty:
                    raise
                self._noticed.add("finished")
                self._options.notify(str(error))
                return None

    def _look_for_epoch(self, member: Member, wait: Wait, limit: float | None) -> int | None:
        """Return the next epoch, or None after a while without one.

        This only reads, so it may be repeated after a failure.
        """
        self._require_open()
        event = last_event(self._client, member.stream.keys)
        epoch = member.next_epoch()
        if epoch is None:
            self._acknowledger.wait_for_next(wait.seconds)
            wait.because(
                "epoch",
                lambda: f"{member.finished(member.cursor)}; is a producer running?",
                limit,
            )
            member.heartbeat.raise_error()
            await_event(self._client, member.stream.keys, event, EVENT_MS)
        return epoch

    def _next_batch(self, member: Member, epoch: int, wait: Wait) -> Batch | None:
        run = member.run or member.begin(epoch)
        self._counter.begin(epoch, run.queue.inner)
        wait.over()
        while True:
            queued = run.queue.get(POLL_S)
            member.heartbeat.raise_error()
            if queued is not None:
                if not member.heartbeat.is_fresh_for(queued):
                    with self._counter.waiting_for("server"), self._acknowledger.read_again_on_error():
                        member.await_leases(queued, wait)
            else:
                began = self._counter.now()
                self._acknowledger.attend()  # one that was lost with its connection would keep its entry from everyone
                self._counter.waited_since(began, "server", LATE_ANSWER_S)
            batch = None if queued is None else self._acknowledger.unless_dropped(queued.without_lost())
            if batch is not None:
                return batch
            if run.queue.is_over:
                return None
            # what came while a server was away may fill a batch in a moment
            self._acknowledger.raise_if_overdue(min(wait.seconds, run.queue.inner.undisturbed_s))
            wait.because("batch", lambda: run.why_waiting(wait.seconds))

    def _finish(self, member: Member, epoch: int) -> bool:
        """End an epoch that was read to its end.

        Return whether the iteration goes on into the next one, as in a feed.
        """
        run, claim = member.run, member.claim
        assert run is not None
        member.finish(run)
        self._counter.count(run.reader.bad_entries, run.reader.filled)
        manifest = find_manifest(self._client, claim.stream, epoch)
        if manifest is not None and manifest.state == ABANDONED:
            self._options.notify(f"epoch {epoch} of {self.name!r} was abandoned: it ends with what was there")
        self._note_steps(member, epoch)
        self._acknowledger.end_epoch(epoch)
        if epoch in claim.unclosed:
            member.take_up(epoch)
        return manifest is not None and manifest.kind == FEED

    # --- the end ---

    def close(self) -> None:
        """Acknowledge the outstanding batch ('on_next'), return what was not delivered, and leave the group.

        A second call does nothing.

        Raises:
            ServerUnavailable: an acknowledgement could not be sent. Its batch is delivered again.
        """
        if not self._closing.alive:
            return
        self._resources.take_time()
        try:
            self._acknowledger.close()
        except (KeyboardInterrupt, SystemExit):
            self._resources.hurry()
            raise
        finally:
            self._leave()

    def _leave(self) -> None:
        self._closer = threading.get_ident()
        if self._member is not None and (run := self._member.run) is not None:
            self._member.claim.unclosed.add(run.reader.epoch)
        self._closing()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        (self.close if kind is None else self._leave)()

    def _hooks(self) -> LoaderHooks:
        return LoaderHooks(self)


class LoaderHooks:
    """The inner side of a loader: see `hooks.Hooks`. Worker processes also use what a rank knows."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.client, self.options, self.order = loader._client, loader._options, loader._options.order
        self.acknowledger, self.counter = loader._acknowledger, loader._counter
        self.policy = self.acknowledger.policy

    @property
    def adapter(self) -> Adapter | None:
        """See `hooks.Hooks`."""
        return self.acknowledger.adapter

    @property
    def rows(self) -> int | None:
        """See `hooks.Hooks`."""
        options = self.options
        if options.remainder == "keep" or (options.order is not None and options.stages):  # a filter makes them smaller
            return None
        return options.batch_size

    @property
    def is_ready(self) -> bool:
        """See `hooks.Hooks`."""
        member = self.loader._member
        return member is not None and member.is_ready

    def take_over(self, adapter: Adapter) -> None:
        """See `hooks.Hooks`."""
        self.acknowledger.take_over(adapter)

    def trained(self, batch: Batch) -> None:
        """See `hooks.Hooks`."""
        self.acknowledger.trained(batch)

    def return_batches(self, batches: Iterable[Batch]) -> None:
        """See `hooks.Hooks`."""
        self.acknowledger.return_batches(batches)

    def given(self, items: Iterable[Any]) -> Iterator[Any]:
        """See `hooks.Hooks`."""
        return self.acknowledger.given(items, is_made=True)

    def bound_batches(self, check_size: Callable[[int], object]) -> None:
        """Call a function with the bytes of a batch while it is filled. What it raises ends the reading."""
        self.loader._joined().bound_batches(check_size)

    def identity(self) -> State:
        """Return what a state of the loader is compared by."""
        return self.loader._identity()

    def require_taken(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatch unless the loader takes a state. Nothing changes."""
        self.loader._require_taken(state)

    # --- for worker processes ---

    @property
    def member(self) -> Member:
        """The member, joined."""
        return self.loader._joined()

    def manifest_of(self, epoch: int) -> Manifest | None:
        """Return the manifest of an epoch, or None if it was released."""
        return find_manifest(self.client, self.loader.stream, epoch)

    def runs_on(self, epoch: int) -> bool:
        """Return whether an iteration continues behind this epoch: it is one of an endless feed."""
        manifest = self.manifest_of(epoch)
        return manifest is not None and manifest.kind == FEED

    def await_epoch(self, *, is_first: bool) -> int | None:
        """Wait for the next epoch. Returns None if the group has read all of them."""
        return self.loader._await_epoch(self.member, is_first)

    def end_epoch(self, epoch: int, *, is_feed: bool) -> None:
        """Note that an epoch was read to its end by worker processes, and report its statistics."""
        self.loader._note_steps(self.member, epoch)
        self.acknowledger.end_epoch(epoch)
        self.loader._end_stats(epoch, is_feed=is_feed)


def _due(member: Member, unfinished: int) -> int | None:
    """Return the epoch to read on after an iteration of an epoch, or None if other members have read what was due."""
    try:
        epoch = member.next_epoch()
    except GroupFinished:
        return None
    return epoch if epoch is not None and epoch <= unfinished else None
