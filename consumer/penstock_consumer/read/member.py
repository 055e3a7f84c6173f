"""A member of a group at work: it joins, finds epochs, begins, ends and repeats them, and leaves."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakMethod, WeakValueDictionary

from penstock_common.errors import EpochIncomplete, EpochNotFound, GroupFinished, PenstockError
from penstock_common.explain.sentences import explain_unacknowledged, why_no_epoch
from penstock_common.explain.snapshot import snapshot_partition
from penstock_common.hints import near
from penstock_common.printable import listed
from penstock_common.stream.audit.reconciliation import is_left_over
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import pending_members
from penstock_common.stream.feeds import FEED
from penstock_common.stream.groups.presence import count_live, is_returned
from penstock_common.stream.groups.roster import Membership, known_groups, load_roster, replaced, unknown_group
from penstock_common.stream.manifest import ABANDONED, find_manifest
from penstock_common.stream.payloads import maps_of_stream
from penstock_common.stream.streams import read_counters
from penstock_common.waiting import AT_ONCE_S, Wait, join
from penstock_consumer.read.claims import LeaseClaim, RankClaim
from penstock_consumer.read.options import LoaderOptions
from penstock_consumer.read.ordered import OrderedReader
from penstock_consumer.read.shared import SharedReaders
from penstock_consumer.stages.batch import Batch, pool_for
from penstock_consumer.stages.queue import PrefetchLimit, PrefetchQueue, StageChain, stages_of
from penstock_consumer.stages.stage import StageContext

GONE_S = 1.0
"""The time for the heartbeat's thread to end while the server is away: it pauses for half a second between tries."""
NAMED = 3
"""The most similar groups that the notice on a new group names. A sweep makes a group for each trial."""


@dataclass(slots=True)
class EpochRun:
    """One epoch that is being read."""

    reader: OrderedReader | SharedReaders
    queue: StageChain
    thread: threading.Thread

    def why_waiting(self, seconds: float) -> str:
        """Return why there is no batch, though some samples may have come."""
        if trouble := self.queue.inner.trouble:
            return f"the server, to read on: {trouble}"
        return self.queue.waiting() or self.reader.why_waiting(seconds)


Name: TypeAlias = tuple[str, str, str]
"""Stream id, group and member."""
_MEMBERS: WeakValueDictionary[Name, Member] = WeakValueDictionary()
"""Name -> the member of this process that joined last."""
_JOINING: WeakValueDictionary[Name, threading.Lock] = WeakValueDictionary()
"""Name -> the lock of the members of this process that join under it."""
_JOINING_LOCK = threading.Lock()


def _forget_members() -> None:
    """Start again in a forked process. It has no members, and another thread may have held a lock."""
    global _JOINING_LOCK  # noqa: PLW0603
    _JOINING_LOCK = threading.Lock()
    _MEMBERS.clear()
    _JOINING.clear()


os.register_at_fork(after_in_child=_forget_members)


class Member:
    """A member that has joined its group, with its claim and the epoch being read."""

    def __init__(self, claim: LeaseClaim | RankClaim, options: LoaderOptions) -> None:
        """Join the group, and keep the member alive from now on. An older member of this process and name ends."""
        self.claim, self.heartbeat, self.stream, self._options = claim, claim.heartbeat, claim.stream, options
        self._tell_replaced: Callable[[], Callable[[], None] | None] = lambda: None
        self._join()
        self.rank = claim if isinstance(claim, RankClaim) else None
        """The claim of a rank, or None in a shared group."""
        self.run: EpochRun | None = None
        self.has_begun = False
        self.cursor = -1
        """The last epoch that was iterated to its end here."""
        self._half_open: int | None = None
        """An epoch that a producer had begun to open at the last look."""
        self._spec = claim.stream.require_spec()
        self._pool = pool_for(self._spec, options.batch_size, options.prefetch_bytes)
        self._prefetch_limit = PrefetchLimit(options.prefetch_bytes)
        """The limit that was learned in one epoch, for the next."""
        self._maps = maps_of_stream(claim.stream)

    def _join(self) -> None:
        """Join as the only member of this process and name, so that the server and this process name the same one."""
        who = self.claim.who
        key = who.stream.id, who.group, who.member
        with _JOINING_LOCK:
            joining = _JOINING.setdefault(key, threading.Lock())
        with joining:
            older = _MEMBERS.get(key)
            if older is not None:
                older.claim.who.is_succeeded.set()
            try:
                self.claim.join(self._options.start)
            except BaseException:
                if older is not None:
                    older.claim.who.is_succeeded.clear()
                raise
            self.claim.keep()
            _MEMBERS[key] = self
            if older is not None:
                older.end_replaced()

    def on_replaced(self, tell: Callable[[], None]) -> None:
        """Call a method when a newer member takes the name of this one. The method's object is not kept alive."""
        self._tell_replaced = WeakMethod(tell)

    def end_replaced(self) -> None:
        """End with an error, because a newer member of this process took the name."""
        self.heartbeat.end_with(replaced(self.claim.who))
        if (tell := self._tell_replaced()) is not None:
            tell()

    # --- finding epochs ---

    def next_epoch(self, above: int = -1) -> int | None:
        """Return the next epoch with something for this member, or None if there is none yet.

        This only reads, so it may be repeated after a failure. Raises GroupFinished once every planned epoch was read.

        Args:
            above: an epoch. Only later ones are returned.
        """
        self._read_again(self.claim.reopened())
        after = max(self.cursor, above)
        while True:
            epoch = self._next_of_group(after)
            if epoch is None or not self.claim.has_read(epoch):
                return epoch
            self.claim.unclosed.add(epoch)  # others have not read it
            after = epoch

    def _next_of_group(self, after: int) -> int | None:
        """Return the lowest epoch above ``after`` that the group has not acknowledged."""
        claim, stream, group = self.claim, self.stream, self.claim.who.group
        snapshot = snapshot_partition(claim.client, stream, stream.partitions[-1])  # it hears of a new epoch last
        known, last = snapshot.first, snapshot.roster
        self.heartbeat.expect_members(count_live(known, group))
        closed = {epoch for name, epoch in known.closed if name == group}
        self._half_open = None
        for epoch, state in snapshot.states.items():
            if epoch < claim.first or epoch <= after or epoch in closed:
                continue
            if epoch in last.epochs:
                return epoch
            if state != ABANDONED and epoch not in last.retiring:
                if epoch not in known.epochs and is_left_over(claim.client, stream, epoch):
                    claim.unclosed.add(epoch)  # should its producer go on after all
                    continue
                self._half_open = epoch
                return None  # read now, it would look like one that was released
        following, final, _ = read_counters(claim.client, stream)
        record = known.groups.get(group)
        if (
            final is not None
            and following >= final
            and max(after, claim.first - 1, record.read if record is not None else -1, *closed) + 1 >= final
        ):
            raise GroupFinished(self.finished(after))
        return None

    def finished(self, after: int) -> str:
        """Return a sentence on a group for which there is no epoch to read now.

        Args:
            after: the last epoch that this member was given, or -1. The group may have samples of it to acknowledge.
        """
        client, stream, first = self.claim.client, self.stream, self.claim.first
        begun, _, _ = read_counters(client, stream)
        roster = load_roster(client, stream.partitions[0])
        found = [find_manifest(client, stream, epoch) for epoch in roster.epochs if first <= epoch <= after]
        given = [one for one in found if one is not None and one.state != ABANDONED]
        why = why_no_epoch(
            stream.name, self.claim.who.group, roster, first=first, begun=begun, given=[one.epoch for one in given],
            half_open=self._half_open, is_feed=bool(given) and given[-1].kind == FEED,
        )  # fmt: skip
        return why + explain_unacknowledged(self._held_by_others([one.epoch for one in given]))

    def _held_by_others(self, epochs: Sequence[int]) -> dict[str, int]:
        """Return the other members that hold entries of these epochs, each with their number."""
        claim = self.claim
        if isinstance(claim, RankClaim) or not epochs:
            return {}
        keys = [(partition, epoch) for epoch in epochs for partition in self.stream.partitions]
        held = pending_members(claim.client, keys, claim.who.group)
        return {name: count for name, count in held.items() if name != claim.who.member and not is_returned(name)}

    # --- reading them ---

    @property
    def is_ready(self) -> bool:
        """Return whether the next batch of the epoch being read has arrived."""
        return self.run is not None and self.run.queue.holds_batches

    def bound_batches(self, check_size: Callable[[int], object]) -> None:
        """See `ArrayPool.bound`."""
        self._pool.bound(check_size)

    def begin(self, epoch: int) -> EpochRun:
        """Start the thread that reads an epoch."""
        self.has_begun = True
        reader = self._reader_of(epoch, queue := PrefetchQueue(self._prefetch_limit, self._pool.trim))
        thread = threading.Thread(target=reader.run, name="penstock-reader", daemon=True)
        options = self._options
        pool = pool_for(self._spec, options.batch_size, options.prefetch_bytes)
        setting = StageContext(self._spec, pool, epoch, options.batch_size, is_ordered=self.rank is not None)
        self.run = EpochRun(reader, StageChain(queue, stages_of(setting, options.stages, options.remainder)), thread)
        self.heartbeat.read_epoch(epoch)
        thread.start()
        return self.run

    def begin_unless_released(self, epoch: int) -> bool:
        """Begin an epoch. Return False if it is gone since it was found: the others acknowledged it, or it was lost.

        Raises EpochNotFound if it is not there for another reason.
        """
        try:
            self.begin(epoch)
        except EpochNotFound:
            if loss := self.claim.loss_of(epoch):
                self.claim.notify(loss)
                return False
            if isinstance(self.claim, RankClaim) or not self.claim.is_released(epoch):
                raise
            self.passed(epoch)
            return False
        return True

    def _reader_of(self, epoch: int, queue: PrefetchQueue) -> OrderedReader | SharedReaders:
        claim, options = self.claim, self._options
        if isinstance(claim, RankClaim):
            return OrderedReader(
                claim, epoch, queue, self._pool, start=claim.take_start(epoch),
                remainder=options.remainder, views=options.views,
            )  # fmt: skip
        return SharedReaders(
            claim, epoch, queue, self._pool,
            batch_size=options.batch_size, views=options.views,
        )  # fmt: skip

    def finish(self, run: EpochRun) -> None:
        """End an epoch that was read to its end. A cursor below it means that something of it is still due."""
        run.thread.join()
        self.run = None
        if run.reader.loss:
            self.claim.notify(run.reader.loss)
            self.claim.forget(run.reader.epoch)
        else:
            self.passed(run.reader.epoch)
        self._read_again(self.claim.take_returned())
        self.claim.tell_absent(run.reader.epoch)

    def passed(self, epoch: int) -> None:
        """Note that an epoch was iterated to its end here."""
        self.cursor = max(self.cursor, epoch)

    def stop(self) -> None:
        """End the thread that reads, with everything that it has read ahead."""
        if (run := self.run) is not None:
            run.queue.inner.stop()
            if run.thread.ident is not None:  # else Ctrl-C came before it was started
                run.thread.join()
            self.run = None

    # --- reading them again ---

    def return_batches(self, batches: Iterable[Batch], kept: Iterable[Batch] = ()) -> None:
        """Hand batches that were never trained on out again, when the next iteration starts.

        Args:
            batches: the batches.
            kept: the batches that were trained on and wait for their checkpoint.
        """
        if self.claim.return_batches(batches, kept):
            self.stop()
        if self.run is None:
            self._read_again(self.claim.take_returned())

    def begin_again(self, kept: Iterable[Batch], last: Batch | None) -> None:
        """Read the rest of the epoch again, because an interruption lost track of what had been read ahead.

        Args:
            kept: the batches that were trained on and are not acknowledged.
            last: the last batch that was trained on.
        """
        if (run := self.run) is None:
            if self.cursor >= 0:  # it may have ended without being closed for the group
                self.claim.unclosed.add(self.cursor)
            return
        self.stop()
        self.claim.begin_again(run.reader.epoch, kept, last)
        self._read_again(self.claim.take_returned())

    def take_up(self, epoch: int) -> None:
        """Find what is left for this member in an epoch that it has read and that did not close.

        It may have entries that no member was given, where a server came back as it was before it gave them out.
        """
        self._read_again(self.claim.recover() | ({epoch} & self.claim.reopened()))

    def _read_again(self, epochs: Iterable[int]) -> None:
        self.cursor = min([self.cursor, *(epoch - 1 for epoch in epochs)])

    def await_leases(self, batch: Batch, wait: Wait) -> None:
        """Return once a batch's leases are renewed: others may have taken over what a stopped process holds."""
        while not self.heartbeat.is_fresh_for(batch):
            wait.because("leases", lambda: "the server, to renew the leases of what is handed out next")
            time.sleep(0.02)
            self.heartbeat.raise_error()

    # --- the position of a rank ---

    def position_after(self, rank: RankClaim, last: Batch | None, left: Batch | None) -> tuple[int, int]:
        """Return epoch and position of a rank's first step after a batch; without a batch, the rank's own position.

        Args:
            rank: the claim of this member.
            last: the last batch trained on.
            left: an earlier batch that a framework still has in a buffer. Then its own step is returned.
        """
        run = self.run
        if left is not None:
            return left.epoch, rank.step_of(left)
        if last is None:
            epoch = run.reader.epoch if run is not None else self.next_epoch()
            return (max(self.cursor + 1, rank.first), 0) if epoch is None else (epoch, rank.start_of(epoch))
        if run is None or run.reader.epoch != last.epoch:
            # a framework may have pulled to the end of this epoch, or into the next one, long before its step is there
            has_ended = last.epoch <= self.cursor or run is not None
            is_last = has_ended and rank.is_end(last.epoch, last.position)
        else:
            is_last = isinstance(run.reader, OrderedReader) and run.reader.is_last(last.position)
        return (last.epoch + 1, 0) if is_last else (last.epoch, last.position)

    def go_to(self, rank: RankClaim, epoch: int, position: int) -> None:
        """Continue there next, whatever was read or acknowledged since; see `RankClaim.rewind`."""
        self.stop()
        rank.rewind(epoch, position)
        self.cursor = epoch - 1

    # --- the end ---

    @property
    def is_current_thread(self) -> bool:
        """Return whether the caller is one of the threads at work here."""
        return self.heartbeat.is_current_thread or (
            self.run is not None and self.run.thread is threading.current_thread()
        )

    def end(self, join_s: float, patience_s: float) -> None:
        """End the threads, close for the group what it has acknowledged, and leave it.

        Args:
            join_s: the time for a thread to end.
            patience_s: the time to wait for a server that is away. 0 if the caller does not wait for the end.
        """
        try:
            self._end(join_s, patience_s)
        except PenstockError as error:
            if not self.claim.is_all_acknowledged() and not patience_s:  # `close` raises it
                self.claim.notify(
                    f"left {self.stream.name!r} before its server had every acknowledgement ({error}): "
                    "some samples may be handed out again"
                )
            raise
        finally:
            self.claim.close()
            self._maps = None

    def _end(self, join_s: float, patience_s: float) -> None:
        claim = self.claim
        self._tell_replaced = lambda: None
        self.heartbeat.stop(0)  # first of all: whatever fails below, the leases lapse
        run, self.run = self.run, None
        if run is not None:
            run.queue.inner.stop()
        try:
            claim.client.ping()
        except PenstockError:  # it would not hear that we leave, and the threads may long be waiting for it
            claim.client.limit_patience(0, AT_ONCE_S)
            self.heartbeat.stop(GONE_S if patience_s else 0)
            raise
        if run is not None:
            join(run.thread, join_s)
        self.heartbeat.stop(join_s)
        claim.limit_patience(patience_s)
        with suppress(EpochIncomplete):  # the next iteration reports it
            for epoch in sorted(claim.unclosed):
                claim.close_epochs(epoch)
        claim.leave()


def new_group_notice(group: str, others: Iterable[str], first: int) -> str:
    """Return the notice on a group that was made while ``others`` exist, because its name may be misspelt."""
    from difflib import get_close_matches  # imported only with the notice

    names = list(others)
    stems = {re.sub(r"\d+", "", name) for name in names}
    meant = "" if re.sub(r"\d+", "", group) in stems else near(group, names)  # the trials of a sweep have numbers
    nearest = sorted(get_close_matches(group, names, NAMED, cutoff=0))
    there = listed([*nearest, *(name for name in names if name not in nearest)], NAMED)
    question = f". Did you mean {meant!r}?" if meant else ""
    return f"new group {group!r} (there are: {there}); it starts at epoch {first}{question}"


def join_as(client: Client, who: Membership, options: LoaderOptions) -> Member:
    """Join the group and keep its member alive from now on. A new group is announced if there are others.

    Raises:
        GroupBusy: ranks of another world size are alive.
        EpochsReleased: the group lost epochs.
        EpochNotFound: the epoch to start at is not there.
        GroupKindMismatch: the group is read in another way.
        GroupNotFound: the group may not be made.
    """
    groups = known_groups(client, who.stream)
    if not options.create and who.group not in groups:
        raise unknown_group(who.stream.name, who.group, groups)
    kind = LeaseClaim if who.order is None else RankClaim
    claim = kind(client, who, options.lease_s, options.notify, options.acknowledge_every_s)
    member = Member(claim, options)
    if groups and who.group not in groups:
        options.notify(new_group_notice(who.group, groups, member.claim.first))
    return member
