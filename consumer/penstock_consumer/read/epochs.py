"""A joined member at work: it begins, ends and repeats epochs, in shared or canonical order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock_common.errors import ServerUnavailable
from penstock_common.hints import near
from penstock_common.server.client import RetryPolicy
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import Membership, load_roster, unknown_group
from penstock_common.stream.manifest import find_manifest
from penstock_common.waiting import Outage, Wait
from penstock_consumer.read.canonical import EpochSteps
from penstock_consumer.read.heartbeat import ClaimedEntry, Heartbeat, LeaseRenewer, UnusedRankCheck
from penstock_consumer.read.member import Member, RankMember
from penstock_consumer.read.options import LoaderOptions
from penstock_consumer.read.ordered import OrderedReader
from penstock_consumer.read.shared import SharedReader
from penstock_consumer.stages.batch import Batch, Lease
from penstock_consumer.stages.chain import StageChain, stages_of
from penstock_consumer.stages.queue import PrefetchLimit, PrefetchQueue
from penstock_consumer.stages.stage import StageContext

QUIET_PER_LEASE = 6
"""Ranks of another world size that were not seen for this part of a lease, five heartbeats, are gone."""
MIN_QUIET_MS = 1000


class AnyReader(Protocol):
    """A reader of one epoch, which fills a prefetch queue in a thread of its own: ``shared.SharedReader``."""

    epoch: int
    bad_entries: int
    filled: int
    """The samples that replace bad ones. Always 0 in shared reading."""

    def run(self) -> None:
        """Run the thread. Everything ends in the queue, errors too."""

    def why_waiting(self, seconds: float) -> str:
        """Return why there is no batch."""


@dataclass(slots=True)
class EpochRun:
    """One epoch that is being read."""

    reader: AnyReader
    queue: StageChain
    thread: threading.Thread

    def why_waiting(self, seconds: float) -> str:
        """Return why there is no batch, though some samples may have come."""
        if trouble := self.queue.inner.trouble:
            return f"the server, to read on: {trouble}"
        return self.queue.waiting() or self.reader.why_waiting(seconds)


class Reading:
    """A joined member at work, with its heartbeat and the epoch being read. The base of both ways of reading."""

    is_ordered = False
    """Whether acknowledgement is by position: everything up to a batch."""

    def __init__(
        self,
        member: Member,
        heartbeat: Heartbeat,
        read: Callable[[int, PrefetchQueue], AnyReader],
        options: LoaderOptions,
    ) -> None:
        self.member, self.heartbeat = member, heartbeat
        self._read, self._options, self.has_begun = read, options, False
        self.run: EpochRun | None = None
        self._prefetch_limit = PrefetchLimit(options.prefetch_bytes)
        """The limit that was learned in one epoch, for the next."""
        self.cursor = -1
        """The last epoch that was iterated to its end here."""

    @property
    def is_ready(self) -> bool:
        """Return whether the next batch of the epoch being read has arrived."""
        return self.run is not None and self.run.queue.holds_batches

    def next_epoch(self) -> int | None:
        """Return the next epoch, or None if there is none yet.

        This only reads, so it may be repeated after a failure.
        """
        return self.member.next_epoch(self.cursor)

    def begin(self, epoch: int) -> EpochRun:
        """Start the thread that reads an epoch."""
        self.has_begun = True
        reader = self._read(epoch, queue := PrefetchQueue(self._prefetch_limit))
        thread = threading.Thread(target=reader.run, name="penstock-reader", daemon=True)
        options, spec = self._options, self.member.stream.spec
        assert spec is not None
        setting = StageContext(spec, options.pool(spec), epoch, options.batch_size, self.is_ordered)
        self.run = EpochRun(reader, StageChain(queue, stages_of(setting, options.stages, options.remainder)), thread)
        self.heartbeat.read_epoch(epoch)
        thread.start()
        return self.run

    def finish(self, run: EpochRun) -> None:
        """End an epoch that was read to its end."""
        run.thread.join()
        self.run = None
        self.cursor = max(self.cursor, run.reader.epoch)

    def hand_back(self, batches: Iterable[Batch], kept: Iterable[Batch] = ()) -> None:
        """Hand batches that were never trained on out again, when the next iteration starts.

        Args:
            batches: the batches.
            kept: the batches that were trained on and wait for their checkpoint.
        """
        raise NotImplementedError

    def take_up(self) -> None:
        """Find what is left for this member in an epoch that it has read and that did not close."""

    @property
    def is_fresh(self) -> bool:
        """Return whether the entries received are known to be this member's still."""
        return True

    def await_leases(self, wait: Wait) -> None:
        """Return once `is_fresh` is true."""

    @property
    def is_current_thread(self) -> bool:
        """Return whether the caller is one of the threads at work here."""
        return self.heartbeat.is_current_thread or (
            self.run is not None and self.run.thread is threading.current_thread()
        )

    def raise_error(self) -> None:
        """Raise the error that ended the heartbeat."""
        if self.heartbeat.error is not None:
            raise self.heartbeat.error


class SharedReading(Reading):
    """Reading through a consumer group.

    Entries that were handed back, or left by the dead, are claimed and read again.
    """

    member: Member
    heartbeat: LeaseRenewer

    def __init__(self, client: Client, who: Membership, options: LoaderOptions) -> None:
        member = Member(client, who, notify=options.notify)
        member.join(options.start)
        heartbeat = LeaseRenewer(client, who, member.leases, options.lease_s, options.notify, witness=member.witness)
        _bear(client.patience, heartbeat.recover)
        _bear(client.patience, heartbeat.look)
        heartbeat.start()
        assert who.stream.spec is not None
        pool = options.pool(who.stream.spec)

        def read(epoch: int, queue: PrefetchQueue) -> SharedReader:
            return SharedReader(
                member, heartbeat, epoch, queue, pool,
                batch_size=options.batch_size, notify=options.notify, views=options.views,
            )  # fmt: skip

        super().__init__(member, heartbeat, read, options)
        self._unfinished: set[int] = set()
        """The epochs of which something was handed back. They are iterated again, if the running iteration cannot read
        it."""

    def next_epoch(self) -> int | None:
        """Return an earlier epoch again if a member that held a part of it died, or if what it lacked was repaired."""
        repaired = [epoch - 1 for epoch in self.member.unclosed if self.member.has_unread(epoch)]
        self.cursor = min([self.cursor, *(claim.epoch - 1 for claim in list(self.heartbeat.claims)), *repaired])
        found = super().next_epoch()
        self.heartbeat.expect_members(self.member.members)
        return found

    def take_up(self) -> None:
        """Claim what is pending here though it was acknowledged, because a server that lost its last second forgot
        that.
        """
        _bear(self.member.client.patience, lambda: self.heartbeat.recover(self.member.is_all_acknowledged))
        self.cursor = min([self.cursor, *(claim.epoch - 1 for claim in list(self.heartbeat.claims))])

    @property
    def is_fresh(self) -> bool:
        """Return whether the leases were renewed in time."""
        return self.heartbeat.is_fresh

    def await_leases(self, wait: Wait) -> None:
        """Renew the leases first, because a process that stood still may hold what another one has taken over."""
        while not self.is_fresh:
            wait.because("leases", lambda: "the server, to renew the leases of what is handed out next")
            time.sleep(0.02)
            self.raise_error()

    def finish(self, run: EpochRun) -> None:
        """End an epoch. A cursor below its number means that something handed back is still due."""
        super().finish(run)
        if self._unfinished:
            self._go_back()

    def hand_back(self, batches: Iterable[Batch], kept: Iterable[Batch] = ()) -> None:
        """Give leases up and claim their entries anew. The ledger, and ``kept``, say what is handed out of them."""
        self.member.flush()
        spans: dict[Lease, list[tuple[int, int]]] = {}
        for span in (span for batch in kept for span in batch.spans):
            spans.setdefault(span.lease.current(), []).append((span.lo, span.hi))
        for lease in dict.fromkeys(span.lease for batch in batches for span in batch.spans):
            if self.member.leases.drop(lease):
                # held meanwhile, so that it is renewed, until the reader's lease replaces it
                self.member.leases.keep_place(lease, spans.get(lease, []))
                self.heartbeat.claims.append(ClaimedEntry(lease.partition, lease.epoch, lease.entry_id))
                self._unfinished.add(lease.epoch)
        if self.run is None and self._unfinished:
            self._go_back()

    def _go_back(self) -> None:
        """Read an epoch again if something that was handed back was not taken up."""
        left = self._unfinished & {claim.epoch for claim in list(self.heartbeat.claims)}
        self.cursor = min(self.cursor, *(epoch - 1 for epoch in left)) if left else self.cursor
        self._unfinished.clear()


def _bear(patience: RetryPolicy, ask: Callable[[], object]) -> None:
    """Call a heartbeat's method in the loop's thread, and wait through outages of the server."""
    outage = Outage(patience.notify, patience.seconds, "asking the server")
    while True:
        try:
            ask()
            return
        except ServerUnavailable as error:
            outage.bear(error)


class OrderedReading(Reading):
    """Reading by position, as one rank. What was handed back is read again from its position."""

    member: RankMember
    is_ordered = True

    def __init__(self, client: Client, who: Membership, options: LoaderOptions) -> None:
        quiet_ms = max(MIN_QUIET_MS, int(options.lease_s * 1000 / QUIET_PER_LEASE))
        member = RankMember(client, who, notify=options.notify, quiet_ms=quiet_ms)
        member.join(options.start)
        peers = UnusedRankCheck(client, who, options.notify)
        heartbeat = Heartbeat(client, who, options.lease_s, witness=member.witness, peers=peers)
        heartbeat.start()
        assert who.stream.spec is not None
        pool = options.pool(who.stream.spec)
        self._again: dict[int, int] = {}
        """Epoch -> position from which it is read again, though the server knows another position."""

        def read(epoch: int, queue: PrefetchQueue) -> OrderedReader:
            return OrderedReader(
                member, heartbeat, epoch, queue, pool, start=self.take_start(epoch),
                remainder=options.remainder, notify=options.notify, views=options.views,
            )  # fmt: skip

        super().__init__(member, heartbeat, read, options)
        self._remainder = options.remainder
        self._is_alone_told = False

    def take_start(self, epoch: int) -> int:
        """Return the position where reading an epoch begins. What was handed back is due once."""
        start = self._again.pop(epoch, None)
        return self.member.position(epoch) if start is None else start

    def finish(self, run: EpochRun) -> None:
        """End an epoch, and say once if other ranks never came, because nobody reads their share."""
        super().finish(run)
        if not self._is_alone_told and (absent := self.member.absent_ranks(run.reader.epoch)):
            self._is_alone_told = True
            self._options.notify(absent_notice(self.member.who, run.reader.epoch, absent))

    def hand_back(self, batches: Iterable[Batch], kept: Iterable[Batch] = ()) -> None:
        """Read every epoch again from the first of its batches."""
        size = self.member.order.world * self.member.order.batch
        for batch in batches:
            self._again[batch.epoch] = min(batch.position - size, self._again.get(batch.epoch, batch.position))
        if self._again:
            self.stop()
            self.cursor = min(self.cursor, min(self._again) - 1)
            for epoch in self._again:
                self.member.reopen(epoch)

    def stop(self) -> None:
        """End the thread that reads, with everything that it has read ahead."""
        if (run := self.run) is not None:
            run.queue.stop()
            run.thread.join()
            self.run = None

    def here(self, last: Batch | None, left: Batch | None = None) -> tuple[int, int]:
        """Return epoch and position of the first step after a batch; without a batch, the rank's own position.

        Args:
            last: the last batch trained on.
            left: an earlier batch that a framework still has in a buffer. Then its own step is returned.
        """
        if left is not None:
            return left.epoch, left.position - self.member.order.world * self.member.order.batch
        if last is None:
            epoch = self.run.reader.epoch if self.run is not None else self.next_epoch()
            if epoch is None:
                return max(self.cursor + 1, self.member.first), 0
            return epoch, self._again.get(epoch, self.member.position(epoch))
        run = self.run
        if run is None or run.reader.epoch != last.epoch:
            # a framework may have pulled to the end of this epoch, or into the next one, long before its step is there
            has_ended = last.epoch <= self.cursor or run is not None
            is_last = has_ended and self.member.is_end(last.epoch, last.position)
        else:
            is_last = isinstance(run.reader, OrderedReader) and run.reader.is_last(last.position)
        return (last.epoch + 1, 0) if is_last else (last.epoch, last.position)

    def go_to(self, epoch: int, position: int) -> None:
        """Continue there next, whatever was read or acknowledged since; see `RankMember.rewind`."""
        self.stop()
        self._again.clear()
        self.member.rewind(epoch, position)
        self.cursor = epoch - 1

    def steps(self, epoch: int) -> int | None:
        """Return the batches of a whole epoch, the same for each rank, or None while it has no size."""
        manifest = find_manifest(self.member.client, self.member.stream, epoch)
        if manifest is None or manifest.samples is None:
            return None
        order = self.member.order
        return EpochSteps(0, order.rank, order.world, order.batch, self._remainder).count(manifest.samples)


def new_group_notice(group: str, others: Iterable[str], first: int) -> str:
    """Return the notice on a group that was just made beside ``others``, because its name may be misspelt."""
    names = list(others)
    meant = near(group, names)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    question = f". Did you mean {meant!r}?" if meant else ""
    return f"new group {group!r} (there are: {', '.join(names[:10])}{more}); it starts at epoch {first}{question}"


def absent_notice(who: Membership, epoch: int, absent: Sequence[int]) -> str:
    """Return the notice on ranks that never came, at the end of an epoch that another rank read."""
    assert who.order is not None
    world, first = who.order.world, absent[0]
    ranks = f"rank {first}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
    return (
        f"epoch {epoch} ended here, and {ranks} of the {world} ranks of group {who.group!r} did not come: "
        f"{len(absent)}/{world} of its samples wait for them. If no process has rank={first} and this world_size, "
        "start one; for one process alone, give world_size=1 and a new group"
    )


def open_reading(client: Client, who: Membership, options: LoaderOptions) -> Reading:
    """Join the group and keep its member alive from now on. Only this function chooses between the ways of reading.

    A new group beside others is announced.

    Raises:
        GroupBusy: ranks of another world size are alive.
        EpochsReleased: the group lost epochs.
        EpochNotFound: the epoch to start at is not there.
        GroupKindMismatch: the group is read in another way.
        GroupNotFound: the group may not be made.
    """
    groups = load_roster(client, who.stream.partitions[0]).groups
    if not options.create and who.group not in groups:
        raise unknown_group(who.stream.name, who.group, groups)
    reading: SharedReading | OrderedReading
    reading = SharedReading(client, who, options) if who.order is None else OrderedReading(client, who, options)
    if groups and who.group not in groups:
        options.notify(new_group_notice(who.group, groups, reading.member.first))
    return reading
