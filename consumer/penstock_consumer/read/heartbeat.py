"""The thread that shows that a member lives. In a shared group it also renews leases and claims those of the dead.

A suspect is an entry that was delivered many times, because it may kill the members that read it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

from penstock_common.errors import GroupNotFound, MemberReplaced, ServerUnavailable
from penstock_common.explain.snapshot import PartitionSnapshot, snapshot_partition
from penstock_common.rate_meter import Measured
from penstock_common.server.background_query import BackgroundQuery
from penstock_common.stream.commands import Client, parse_id, server_ms
from penstock_common.stream.entries import (
    Keys,
    PendingEntry,
    claim,
    last_given,
    list_held,
    list_overdue,
)
from penstock_common.stream.groups.losses import LossDetector, ServerRuns
from penstock_common.stream.groups.presence import count_live, ended_members, is_returned
from penstock_common.stream.groups.roster import Held, Membership, Rejoining, beat, beat_each, leave, rank_member
from penstock_common.stream.keys import RELEASED, PartitionKeys
from penstock_common.stream.manifest import ABANDONED
from penstock_common.stream.reported_rates import RateReporter, ReportedRate, load_reported_rates, trainer_field
from penstock_common.waiting import Notify, Outage, join
from penstock_consumer.read.leases import Key, Leases, LeaseSighting, plan_reclaim
from penstock_consumer.stages.batch import Batch, Lease

FIRST_BATCHES = 20
"""Ranks that train together never differ by this many batches. A rank that still loads its model has not joined."""


def are_unused(peers: Sequence[ReportedRate | None], since_ms: int) -> bool | None:
    """Return True if all peers said after ``since_ms`` that they never asked for a batch.

    Args:
        peers: the last word of each other rank, None of one that was not heard of lately.
        since_ms: server time at which this rank had its first batches.

    Returns:
        False as soon as one of them has asked; None while that is not known.
    """
    if any(peer is not None and (peer.samples or peer.shares) for peer in peers):
        return False
    return True if all(peer is not None and peer.seen_ms > since_ms for peer in peers) else None


class UnusedRankCheck:
    """Rank 0's check of its peers after its first batches. It says at most once that they read nothing."""

    def __init__(self, client: Client, who: Membership, notify: Notify) -> None:
        assert who.order is not None
        self._client, self._who, self._notify, self._order = client.impatient(), who, notify, who.order
        self._since_ms: int | None = None
        self._is_over = self._order.rank != 0 or self._order.world == 1

    def look(self, samples: int) -> None:
        """Check, if ``samples`` trained on here make it due. No failure leaves this method."""
        if self._is_over or samples < FIRST_BATCHES * self._order.batch:
            return
        with suppress(Exception):  # a damaged key, too: no notice is worth a training job
            if self._since_ms is None:
                self._since_ms = server_ms(self._client, self._who.stream.keys.rates)
                return
            trainers = load_reported_rates(self._client, self._who.stream).trainers
            peers = [trainers.get((self._who.group, rank_member(rank))) for rank in range(1, self._order.world)]
            verdict = are_unused(peers, self._since_ms)
            self._is_over = verdict is not None
            if verdict:
                self._notify(self._said())

    def _said(self) -> str:
        world = self._order.world
        peers = "rank 1" if world == 2 else f"ranks 1 to {world - 1}"
        return (
            f"{peers} of group {self._who.group!r} joined and asked for no batch while rank 0 read {FIRST_BATCHES}: "
            f"1/{world} of each epoch is trained on. If Accelerate or the Hugging Face Trainer prepared the "
            "DataLoader, leave it out, accelerator.prepare(model, optimizer), so that every rank reads its own share"
        )


BEATS_PER_LEASE = 30
"""Renewals are cheap, and their rhythm decides how soon others see that a member lives."""
LONGEST_BEAT_S = 2.0
"""The longest time between renewals, because a thirtieth of a long lease is long. Others find a dead member sooner, and
do not take a live one for silent."""


@dataclass(frozen=True, slots=True)
class IdleLoop:
    """A loop that waits for a batch."""

    since_s: float
    """The start of the wait, by the monotonic clock."""
    handed_bytes: int
    """The payload bytes that the loop was given and has not acknowledged."""

    @property
    def milliseconds(self) -> int:
        """The length of the wait in milliseconds."""
        return max(0, int((time.monotonic() - self.since_s) * 1000))


class LoopReport:
    """The report on a training loop to others: its rate, and how long it waits for a batch."""

    def __init__(self, client: Client, who: Membership, peers: UnusedRankCheck | None) -> None:
        self._reporter = RateReporter(client, who.stream, trainer_field(who.group, who.member))
        self._peers = peers
        self._rate: Measured | None = None
        self.idle: IdleLoop | None = None
        """The wait of the loop, or None while it has a batch."""

    def follow(self, rate: Measured) -> None:
        """Report the rate of the training loop from now on, to the programs that start workers."""
        self._rate = rate

    def tell_idle(self, idle: IdleLoop | None) -> None:
        """Tell everyone with the next heartbeat that the loop waits for a batch, or, with None, that it does not."""
        self.idle = idle

    def said(self) -> dict[str, int]:
        """Return the arguments of `roster.beat` for a loop that waits, or for one that does not."""
        idle = self.idle
        return {} if idle is None else {"idle_ms": idle.milliseconds, "handed_bytes": idle.handed_bytes}

    def report(self) -> None:
        """Report the rate, and check whether other ranks have one."""
        if self._rate is not None:
            self._reporter.report(self._rate)
            if self._peers is not None:
                self._peers.look(self._rate.look().samples)

    def leave(self) -> None:
        """Take the report back."""
        self._reporter.leave()


class Heartbeat:
    """The thread that gives a heartbeat to one server from `start` to `stop`.

    Partitions that move to another server get a heartbeat of their own.
    """

    def __init__(
        self,
        client: Client,
        who: Membership,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        loss_detector: LossDetector | None = None,
        peers: UnusedRankCheck | None = None,
        *,
        partitions: Sequence[int] | None = None,
        loop: LoopReport | None = None,
        runs: ServerRuns | None = None,
    ) -> None:
        """Prepare the thread.

        Args:
            client: of the server.
            who: the member.
            lease_s: the length of a lease in seconds.
            clock: the monotonic clock.
            loss_detector: compares with a server that came back as another run.
            peers: the check of other ranks.
            partitions: the numbers of the partitions on the server. None: all of the stream.
            loop: the report of another heartbeat of this member. That one sends it, and compares losses.
            runs: the runs of the servers at the join.
        """
        self._client = client.impatient()  # this thread waits through failures itself
        self._who, self._lease_s, self._clock = who, lease_s, clock
        self.partitions = [who.stream.partitions[at] for at in partitions or range(len(who.stream.partitions))]
        """The partitions on the server."""
        self._is_only = len(self.partitions) == len(who.stream.partitions)
        """Whether this server has the whole stream."""
        self._runs = runs or ServerRuns(client, who.stream, [])
        self._rejoining = Rejoining(self._client, who, clock, self._runs.is_replaced)
        self._loss_detector = loss_detector
        self._losses = BackgroundQuery[None](is_elsewhere=not self._is_only)
        self._leads = loop is None
        self.loop = loop or LoopReport(self._client, who, peers)
        self.horizon = -1
        """The epoch that is being read here."""
        self.members = 1
        """The members of the group that lived at the last look."""
        self.error: Exception | None = None
        """The error that ended the thread, for example because another process took the name. The loader raises it."""
        self._outage = self._new_outage()
        self._moves = self._client.moves
        self._lock = threading.Lock()
        """Held while partitions are looked at, and while some of them are left to another heartbeat."""
        self._add: Callable[[Any], object] = lambda other: None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"penstock-heartbeat-{who.group}", daemon=True)

    def _new_outage(self) -> Outage:
        what = self._who.stream.named([partition.number for partition in self.partitions])
        return Outage(lambda _: None, doing="renewing", clock=self._clock, what=what)  # others report it

    def on_split(self, add: Callable[[Any], object]) -> None:
        """Give each heartbeat that takes over partitions to ``add``, which starts it."""
        self._add = add

    def read_epoch(self, epoch: int) -> None:
        """Learn which epoch is being read here. What others left of later epochs is not claimed yet."""
        self.horizon = epoch

    def expect_members(self, members: int) -> None:
        """Learn how many members of the group are live."""
        self.members = members

    def end_with(self, error: Exception) -> None:
        """Have the loader raise an error from now on, which this thread would learn of only with its next heartbeat."""
        self.error = self.error or error

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, patience_s: float = 5.0) -> None:
        """End the thread. Without patience it is only told to end."""
        self._stop.set()
        if patience_s:
            join(self._thread, patience_s)
            if self.error is None and self._leads:  # else another process may speak under this name by now
                self.loop.leave()

    @property
    def is_current_thread(self) -> bool:
        """Return whether the caller is this thread."""
        return self._thread is threading.current_thread()

    @property
    def is_fresh(self) -> bool:
        """Return True, because a rank has no leases that could lapse."""
        return True

    def _run(self) -> None:
        while not self._stop.wait(min(self._lease_s / BEATS_PER_LEASE, LONGEST_BEAT_S)):
            try:
                try:
                    self._split()
                    self._beat()
                finally:  # also if it fails because the server lost this member
                    self._compare_losses()
                self._outage.over()
                if self._leads:
                    self.loop.report()
                self._after_beat()
            except ServerUnavailable as error:
                self._missed()
                if not self._is_borne(error):
                    return
            except Exception as error:  # whatever it is: a loop that continued would train on what others take over
                self.error = error
                return

    def _compare_losses(self) -> None:
        """Compare with servers that came back. It asks all of them, and one that is away shows elsewhere."""
        try:
            if self._loss_detector is not None:
                self._losses.ask(self._loss_detector.check, 0)
        except ServerUnavailable:
            if self._is_only:
                raise

    def _split(self) -> None:
        """Leave partitions that moved to other servers to other heartbeats, unless another thread looks at them now."""
        if (moves := self._client.moves) == self._moves or len(self._by_server()) == 1:
            self._moves = moves
            return
        self._client.look_around()  # a redirection tells of one slot, also if a replica took over all of them
        own, *others = self._by_server()
        if not others or not self._lock.acquire(blocking=False):
            return
        try:
            for some in others:
                self._add(self._split_off([partition.number for partition in some]))
            self.partitions, self._moves = own, moves  # after that: each partition has a heartbeat at any time
        finally:
            self._lock.release()
        self._is_only, self._losses, self._outage = False, BackgroundQuery[None](is_elsewhere=True), self._new_outage()

    def _by_server(self) -> list[list[PartitionKeys]]:
        servers = self._client.by_server([partition.roster for partition in self.partitions])
        return [[self.partitions[at] for at in some] for some in servers]

    def _split_off(self, numbers: Sequence[int]) -> Self:
        """Return a heartbeat of the same kind, for some of the partitions."""
        return type(self)(
            self._client, self._who, self._lease_s, self._clock, partitions=numbers, loop=self.loop, runs=self._runs
        )  # fmt: skip

    def _beat(self) -> None:
        """Give a heartbeat in every partition, and join those again whose server came back without this member.

        Raises ServerUnavailable while one of them is to be looked at again.
        """
        held = [(partition, self._held(partition)) for partition in self.partitions]
        try:
            answers = beat_each(self._client, self._who, held, **self.loop.said())
        except (GroupNotFound, MemberReplaced):
            self._join_again(held)
            return
        for partition, lost in zip(self.partitions, answers, strict=True):
            self._lose(partition, lost)

    def _join_again(self, held: Sequence[tuple[PartitionKeys, Held]]) -> None:
        pending: Exception | None = None
        for partition, ids in held:
            try:
                lost = beat(self._client, self._who, partition, ids, **self.loop.said())
            except (GroupNotFound, MemberReplaced) as error:
                is_back = self._rejoining.is_back(partition)
                if is_back is None:
                    pending = error
                    continue
                if not is_back:
                    raise self._runs.explained(error, partition) from None
                lost = beat(self._client, self._who, partition, ids, **self.loop.said())
            self._lose(partition, lost)
        if pending is not None:
            raise ServerUnavailable(f"the server seems to have come back older: {pending}")

    def _held(self, partition: PartitionKeys) -> Held:
        """Return the entries to renew. A rank has none."""
        return {}

    def _lose(self, partition: PartitionKeys, lost: Held) -> None:
        """Note the entries that this member no longer holds."""

    def _after_beat(self) -> None:
        """Do what else is due after a heartbeat. A rank has nothing to do."""

    def _missed(self) -> None:
        """Handle a heartbeat that did not reach the server."""

    def _is_borne(self, error: ServerUnavailable) -> bool:
        try:
            self._outage.bear(error)
        except ServerUnavailable as final:
            self.error = final
        return self.error is None


LOOKS_PER_LEASE = 12
LONGEST_LOOK_S = 2.0
"""The longest pause between two looks. A member whose process has ended on this host is to be known within 5 s."""
OVERDUE_BEATS = 2
"""An entry whose holder lives is renewed with every heartbeat, and is not even listed. Together with a look, others get
what a dead member held within 7/6 of a lease."""
MANY_DELIVERIES = 5
OUTAGES_PER_LEASE = 3
"""A server or process that stood still for longer than a third of a lease counts as an outage. A slower answer counts
as late. Live members keep two thirds of a lease for their renewals."""


@dataclass(frozen=True, slots=True)
class ClaimedEntry:
    """An entry that this member took over, to be fetched by id. A part of it may be acknowledged already."""

    partition: int
    epoch: int
    entry_id: bytes
    deliveries: int = 0
    """The number of members that got it and did not leave by themselves, handed to training or not. 0 if that does not
    matter."""

    @property
    def is_suspect(self) -> bool:
        """Return whether training may die on it. Then it is delivered alone, after everything else."""
        return self.deliveries >= MANY_DELIVERIES


class LeaseRenewer(Heartbeat):
    """A heartbeat that also renews leases and claims entries, which the reader fetches from ``claims``.

    Entries that others left of epochs after ``horizon`` are not claimed yet.
    """

    def __init__(
        self,
        client: Client,
        who: Membership,
        leases: Leases,
        lease_s: float,
        notify: Notify,
        clock: Callable[[], float] = time.monotonic,
        loss_detector: LossDetector | None = None,
        *,
        partitions: Sequence[int] | None = None,
        first: LeaseRenewer | None = None,
        runs: ServerRuns | None = None,
        renewed_s: float | None = None,
    ) -> None:
        """See `Heartbeat`. ``first`` is the member's heartbeat of its first server. Claims of all are together.

        ``renewed_s`` is when leases that exist already were renewed last.
        """
        loop = None if first is None else first.loop
        super().__init__(client, who, lease_s, clock, loss_detector, partitions=partitions, loop=loop, runs=runs)
        self._leases, self._notify = leases, notify
        self._seen: dict[Key, LeaseSighting] = {}
        self.claims: deque[ClaimedEntry] = deque() if first is None else first.claims
        # the server of the first partition has the epochs' states
        self._looks = BackgroundQuery[None](is_elsewhere=self.partitions[0] != who.stream.partitions[0])
        now_s = clock()
        self._began_s = self._looked_s = now_s
        self._renewed_s = now_s if renewed_s is None else renewed_s
        self._late_s = float("-inf")
        """When the last late answer was received. Its entries are not known to be held before the next renewal."""

    @property
    def is_fresh(self) -> bool:
        """Return whether the leases were renewed in time. If not, they may be another member's by now.

        An entry is received up to a third of a lease after it was given out, without a renewal. The rest of the lease
        is the limit here.
        """
        limit_s = self._lease_s - self._lease_s / OUTAGES_PER_LEASE
        return self._renewed_s > self._late_s and self._clock() - self._renewed_s < limit_s

    def received(self, partition: int, asked_s: float) -> None:
        """Note that leases of a partition were added, and when their entries were asked for.

        A process that stood still finds an answer of long ago, and a renewal that is under way may not include it.
        """
        now_s = self._clock()
        is_late = now_s - asked_s > self._lease_s / OUTAGES_PER_LEASE
        if is_late and any(one.number == partition for one in self.partitions):
            self._late_s = now_s

    def _split_off(self, numbers: Sequence[int]) -> Self:
        """See `Heartbeat`."""
        other = type(self)(
            self._client, self._who, self._leases, self._lease_s, self._notify, self._clock, partitions=numbers,
            first=self, runs=self._runs, renewed_s=self._renewed_s if self.is_fresh else float("-inf"),
        )  # fmt: skip
        other.read_epoch(self.horizon)
        return other

    def recover(
        self,
        is_all_acknowledged: Callable[[], bool] = lambda: False,
        partitions: Collection[PartitionKeys] | None = None,
    ) -> None:
        """Claim what an earlier process of this member's name was given.

        That process is dead, because this one has its name.

        Args:
            is_all_acknowledged: returns whether the server has answered every acknowledgement. Then an acknowledged
                entry that is pending is so because the server lost the end of its append-only file.
            partitions: those to look at, if not all of this server. What is being read in others looks the same.
        """
        held = self._leases
        with self._lock:
            some = [one for one in self.partitions if partitions is None or one in partitions]
            if not some:
                return
            before = {p.number: held.ids(p.number) for p in some}
            are_lost = is_all_acknowledged()  # asked after that: what is acknowledged from now on was held before
            keys = self._open_keys(self._snapshot(), some)
            if self.horizon >= 0:  # later epochs are looked at when they are read; a new member chooses where to begin
                keys = [key for key in keys if key[1] <= self.horizon]
            mine = _located(list_held(self._client, keys, self._who.group, self._who.member))
            lost = [
                (k, entry)
                for k, entry in mine
                if not held.holds(*k)
                and (not held.is_acknowledging(*k) or (are_lost and k[2] not in before[k[0]].get(k[1], ())))
            ]
            self._claim(lost, min_idle_ms=0)

    def count_turn(self, suspect: ClaimedEntry) -> None:
        """Note that an entry which is held here is delivered now."""
        partition, who = self._who.stream.partitions[suspect.partition], (self._who.group, self._who.member)
        held = PendingEntry(suspect.entry_id, self._who.member, 0, suspect.deliveries)
        claim(self._client, partition, suspect.epoch, who, held, min_idle_ms=0)

    def _beat(self) -> None:
        now = self._clock()
        self._forget_after_stall(self._began_s)
        self._began_s = now
        super()._beat()
        self._renewed_s = now  # the time of the question, not of the answer

    def _after_beat(self) -> None:
        self._forget_after_stall(self._began_s)
        if self._began_s - self._looked_s >= min(self._lease_s / LOOKS_PER_LEASE, LONGEST_LOOK_S):
            self._looked_s = self._began_s
            self._looks.ask(self.look, 0)

    def _missed(self) -> None:
        self._seen.clear()  # a stopped server ages every lease at once

    def _forget_after_stall(self, since_s: float) -> None:
        """Treat a process or server that stood still as an outage, because that ages every lease."""
        if self._clock() - since_s > self._lease_s / OUTAGES_PER_LEASE:
            self._missed()

    def _held(self, partition: PartitionKeys) -> Held:
        return self._leases.to_renew(partition.number)

    def _lose(self, partition: PartitionKeys, lost: Held) -> None:
        for epoch, ids in lost.items():
            if count := self._leases.lose(partition.number, epoch, list(ids)):
                why = self._why_lost(partition, epoch, ids)
                self._notify(f"member {self._who.member!r} lost {count} entries of epoch {epoch}: {why}")

    def _why_lost(self, partition: PartitionKeys, epoch: int, ids: Collection[bytes]) -> str:
        with suppress(ServerUnavailable):
            given = last_given(self._client, partition, epoch).get(self._who.group)
            if given is not None and given < max(map(parse_id, ids)):
                where = self._client.node_of(partition.roster).where
                return f"the server {where} came back as it was before it gave them out, and gives them out again"
        return f"not renewed within {self._lease_s:.0f} s, or dropped; another member hands them out"

    def look(self) -> None:
        """Look once at everything pending of the group on this server, and claim what may be claimed.

        Members whose processes have ended on this host are signed off first, so that their entries may be claimed.
        """
        with self._lock:
            began = self._clock()
            overdue_ms = int(self._lease_s * 1000 * OVERDUE_BEATS / BEATS_PER_LEASE)
            snapshot = self._snapshot()
            self._sign_off_ended(snapshot)
            keys = [key for key in self._open_keys(snapshot, self.partitions) if key[1] <= self.horizon]
            listed = _located(list_overdue(self._client, keys, self._who.group, overdue_ms))
            pending = [(key, entry) for key, entry in listed if not self._leases.holds(*key)]
            self._forget_after_stall(began)
            self._seen, claims = plan_reclaim(self._seen, pending, self._who.member, self._clock(), self._lease_s)
            self._claim([c for c in claims if is_returned(c[1].member)], min_idle_ms=0)
            self._claim([c for c in claims if not is_returned(c[1].member)], min_idle_ms=int(self._lease_s * 900))

    def _sign_off_ended(self, snapshot: PartitionSnapshot) -> None:
        group = self._who.group
        ended = {m: inc for (g, m), inc in ended_members(snapshot.roster, snapshot.now_ms).items() if g == group}
        keys = [(partition, epoch) for partition in self.partitions for epoch in snapshot.roster.epochs]
        for member, incarnation in ended.items():
            self._sign_off(replace(self._who, member=member, incarnation=incarnation), keys)

    def _sign_off(self, ended: Membership, keys: list[Keys]) -> None:
        held: dict[int, dict[int, list[bytes]]] = {}
        for (partition, epoch), entry in list_held(self._client, keys, ended.group, ended.member):
            held.setdefault(partition.number, {}).setdefault(epoch, []).append(entry.entry_id)
        # the first partition comes last, so that another look finds the member again until then
        for partition in reversed(self.partitions):
            was_there = leave(self._client, ended, partition, held.get(partition.number, {}))
        if was_there:
            count = sum(len(ids) for epochs in held.values() for ids in epochs.values())
            self._notify(f"member {ended.member!r} has ended on this host: its {count} entries are handed out again")

    def _snapshot(self) -> PartitionSnapshot:
        """Look at the first partition here, which hears of everything first."""
        snapshot = snapshot_partition(self._client, self._who.stream, self.partitions[0])
        self.members = count_live(snapshot.roster, self._who.group)
        return snapshot

    def _open_keys(self, snapshot: PartitionSnapshot, partitions: Sequence[PartitionKeys]) -> list[Keys]:
        """Return where entries of the group's open epochs may be pending in some partitions.

        An abandoned epoch takes no acknowledgements any more. What is pending of it may be acknowledged, and would
        be delivered again and again.
        """
        roster = snapshot.roster
        record = roster.groups.get(self._who.group)
        epochs = [
            epoch
            for epoch in roster.epochs
            if record is not None
            and epoch >= record.first
            and (self._who.group, epoch) not in roster.closed
            and snapshot.states.get(epoch) != ABANDONED
        ]
        return [(partition, epoch) for partition in partitions for epoch in epochs]

    def _claim(self, claims: list[tuple[Key, PendingEntry]], min_idle_ms: int) -> None:
        for (number, epoch, entry_id), entry in claims:
            partition = self._who.stream.partitions[number]
            who = (self._who.group, self._who.member)
            # What a member returned as it left killed none. A suspect's turn counts when it comes, so that those that
            # are only suspected along with it come before it.
            counts, asked_s = entry.member != RELEASED and entry.deliveries < MANY_DELIVERIES, self._clock()
            if claim(self._client, partition, epoch, who, entry, min_idle_ms, counts=counts):
                # held from now on, so that it is renewed, until the reader's lease replaces it
                self._leases.add(Lease(number, epoch, shard=-1, entry_id=entry_id, unacknowledged=0))
                self.received(number, asked_s)
                self.claims.append(ClaimedEntry(number, epoch, entry_id, entry.deliveries))


def _located(listed: list[tuple[Keys, PendingEntry]]) -> list[tuple[Key, PendingEntry]]:
    return [((partition.number, epoch, entry.entry_id), entry) for (partition, epoch), entry in listed]


AnyHeartbeat = TypeVar("AnyHeartbeat", bound=Heartbeat)


class Heartbeats(Generic[AnyHeartbeat]):
    """The heartbeats of one member, one for each server, so that a silent server delays no other server's."""

    def __init__(self, each: Sequence[AnyHeartbeat]) -> None:
        """``each`` is in the order of partitions."""
        self._each = list(each)
        self._changing, self._is_stopped = threading.Lock(), False
        for one in each:
            one.on_split(self._add)
        self.loop = each[0].loop

    def _add(self, other: AnyHeartbeat) -> None:
        """Start a heartbeat that takes over partitions of another one."""
        with self._changing:
            if self._is_stopped:
                return
            other.on_split(self._add)
            self._each.append(other)
            other.start()

    @property
    def members(self) -> int:
        """Return the members of the group that lived at the last look."""
        return self._each[0].members

    @property
    def is_current_thread(self) -> bool:
        """Return whether the caller is one of these threads."""
        return any(one.is_current_thread for one in self._each)

    def read_epoch(self, epoch: int) -> None:
        """See `Heartbeat.read_epoch`."""
        for one in self._each:
            one.read_epoch(epoch)

    def expect_members(self, members: int) -> None:
        """See `Heartbeat.expect_members`."""
        self._each[0].expect_members(members)

    def start(self) -> None:
        """Start the threads."""
        for one in self._each:
            one.start()

    def stop(self, patience_s: float = 5.0) -> None:
        """End the threads. Without patience they are only told to end."""
        with self._changing:
            self._is_stopped = True
        for one in self._each:
            one.stop(0)
        for one in self._each if patience_s else ():
            one.stop(patience_s)

    def is_fresh_for(self, batch: Batch) -> bool:
        """Return whether the leases of a batch were renewed in time. If not, they may be another member's by now."""
        for one in self._each:
            if not one.is_fresh:
                late = {partition.number for partition in one.partitions}
                if any(span.lease.partition in late for span in batch.spans):
                    return False
        return True

    def end_with(self, error: Exception) -> None:
        """See `Heartbeat.end_with`."""
        for one in self._each:
            one.end_with(error)

    def raise_error(self) -> None:
        """Raise the error that ended a thread."""
        for one in self._each:
            if one.error is not None:
                raise one.error


class LeaseRenewers(Heartbeats[LeaseRenewer]):
    """The heartbeats of a member of a shared group."""

    def __init__(self, each: Sequence[LeaseRenewer]) -> None:
        """See `Heartbeats`."""
        super().__init__(each)
        self.claims = each[0].claims

    def received(self, partition: int, asked_s: float) -> None:
        """See `LeaseRenewer.received`."""
        for one in self._each:
            one.received(partition, asked_s)

    def recover(
        self,
        is_all_acknowledged: Callable[[], bool] = lambda: False,
        partitions: Collection[PartitionKeys] | None = None,
    ) -> None:
        """See `LeaseRenewer.recover`."""
        for one in self._each:  # including those that are added during the loop
            one.recover(is_all_acknowledged, partitions)

    def look(self, partitions: Collection[PartitionKeys] | None = None) -> None:
        """See `LeaseRenewer.look`. It looks at the servers of these partitions, or at all."""
        for one in self._each:
            if partitions is None or not {*partitions}.isdisjoint(one.partitions):
                one.look()

    def count_turn(self, suspect: ClaimedEntry) -> None:
        """See `LeaseRenewer.count_turn`."""
        self._each[0].count_turn(suspect)
