"""The two kinds of claim that a member has on samples: leases in a shared group, a position in an ordered group.

A claim says what is acknowledged, what is read again, and which heartbeat keeps it. `member.Member` uses either kind.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from penstock_common.errors import (
    EpochIncomplete,
    EpochNotFound,
    GroupBusy,
    PenstockError,
    ReplayTruncated,
    ServerUnavailable,
    StateMismatch,
    WaitTimeout,
)
from penstock_common.explain.deadlock import BlockedPartition, find_blocked
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import has_unread, index_records, pending_members
from penstock_common.stream.groups.forgetting import first_whole, refuse_living, reset_group
from penstock_common.stream.groups.ledger import Acknowledgement, acknowledge, behind, uncovered
from penstock_common.stream.groups.losses import LossDetector, ServerRuns, describe_loss
from penstock_common.stream.groups.outbox import Outboxes, Probe
from penstock_common.stream.groups.positions import PositionReport, known_positions, report, rewind
from penstock_common.stream.groups.roster import (
    Membership,
    RankOrder,
    close_for_group,
    join_group,
    leave,
    load_roster,
    rank_member,
)
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import ABANDONED, Manifest, find_manifest, retained_epochs
from penstock_common.stream.ranges import parse_ranges
from penstock_common.stream.servers.confirmed import Confirmer
from penstock_common.stream.streams import is_released, read_counters, require_there
from penstock_common.waiting import Notify, Outage, Wait
from penstock_consumer.read.canonical import EpochSteps
from penstock_consumer.read.heartbeat import (
    ClaimedEntry,
    Heartbeat,
    Heartbeats,
    LeaseRenewer,
    LeaseRenewers,
    UnusedRankCheck,
)
from penstock_consumer.read.index_walk import IndexWalk
from penstock_consumer.read.leases import Leases, acknowledged_entries, plan_acknowledgement
from penstock_consumer.read.receive import CommitCheck, DeliveryCheck
from penstock_consumer.stages.batch import Batch, Lease

Answer = TypeVar("Answer")

JOIN_EVERY_S = 0.2
CLOSE_S = 2.0
"""The longest wait for a replica that has not got the end of an epoch."""
CLOSE_LOOKS = 3
"""The looks that must find samples missing. A server that is replaced between two gives entries out again."""
QUIET_PER_LEASE = 6
"""Ranks of another world size that were not seen for this part of a lease, five heartbeats, are gone."""
MIN_QUIET_MS = 1000
CONTINUED = ("resume", "remaining")
"""The values of ``start`` with which a group reads on where it stands."""


class Claim:
    """A member's claim on samples of its group, and their acknowledgement. The base of both kinds."""

    heartbeat: Heartbeats[Any]
    """The threads that keep the claim."""

    def __init__(self, client: Client, who: Membership, notify: Notify, acknowledge_every_s: float) -> None:
        self.client, self.who, self.stream = client, who, who.stream
        self.first = 0
        """The first epoch that the group reads."""
        self.unclosed: set[int] = set()
        """The epochs iterated here that were not acknowledged as a whole yet, because others held a part."""
        by = f"member {who.group}/{who.member}"
        self._loss_detector = LossDetector(client.impatient(), who.stream, by, notify)
        self.servers = client.by_server([partition.roster for partition in who.stream.partitions])
        """The numbers of the partitions on each server, as they lay when this member joined."""
        self.confirmer = Confirmer(client, who.stream, notify)
        """The question whether replicas have what this member wrote."""
        self._runs = ServerRuns(client, who.stream, self.servers)

        def probe_of(numbers: Sequence[int]) -> Probe:
            partitions = [who.stream.partitions[number] for number in numbers]
            return lambda limit_ms: self.confirmer.probe(partitions, limit_ms)

        self.notify = notify
        self._outboxes = Outboxes(
            client, who, self.servers, notify=notify, probe_of=probe_of, runs=self._runs, every_s=acknowledge_every_s
        )
        self._known: dict[int, Manifest] = {}
        self._returned: set[int] = set()
        """The epochs with returned samples that are not read again yet."""

    # --- joining ---

    def join(self, start: str | int) -> None:
        """Put group and member on the roster. 'earliest' or an epoch makes this member read again from there.

        'resume' and 'remaining' continue where the group stands, 'remaining' without epochs that the group lost.
        Before that it learns the runs of the servers. One that is replaced from then on may lack the member.
        """
        self._bear(self._runs.learn)
        self._join(start)

    def _join(self, start: str | int) -> None:
        """Join in the way of this kind of group."""
        raise NotImplementedError

    def _bear(self, ask: Callable[[], object]) -> None:
        """Ask a server in the loop's thread, and wait through its outages."""
        patience = self.client.patience
        outage = Outage(patience.notify, patience.seconds, "asking the server")
        while True:
            try:
                ask()
                outage.over()
                return
            except ServerUnavailable as error:
                outage.bear(error)

    def keep(self) -> None:
        """Keep the claim from now on."""
        with suppress(ServerUnavailable):  # then the first heartbeat does it
            self._loss_detector.check()
        self.heartbeat.start()

    def recover(self) -> set[int]:
        """Claim again what the server gave to this member's name and no reader here has. Return the epochs of it."""
        return set()

    def explained(self, error: PenstockError, partition: PartitionKeys) -> PenstockError:
        """Return an error of a partition, with server and time if the server was replaced since the join."""
        return self._runs.explained(error, partition)

    def _on_replicas(self, write: Callable[[], Answer], limit_s: float = math.inf) -> Answer:
        """Write on the rosters, as often as a failover loses it, and return once replicas have it."""
        return self.confirmer.run(self.stream.partitions, write, limit_s)

    def _close_for_group(self, epoch: int) -> None:
        """Note that the group is done with an epoch. Training goes on also while a replica is missing."""
        self._on_replicas(lambda: close_for_group(self.client, self.stream, self.who.group, epoch), CLOSE_S)

    def _floor(self, start: str | int) -> int:
        """Return the first epoch that may be there."""
        if isinstance(start, int):
            return start
        ranges = parse_ranges(read_counters(self.client, self.stream)[2])
        return ranges[0][1] + 1 if ranges and ranges[0][0] == 0 else 0

    def _restart_at(self, start: str | int) -> int:
        """Return the epoch to read again from: by default the first that no partition lost entries of."""
        return start if isinstance(start, int) else first_whole(self.client, self.stream)

    # --- which epochs to read ---

    def has_read(self, epoch: int) -> bool:
        """Return whether an epoch that the group has not closed is known to have nothing more for this member."""
        return False

    def reopened(self) -> set[int]:
        """Return the epochs that have something for this member again."""
        return set()

    def tell_absent(self, epoch: int) -> None:
        """Say once, after an epoch, that others never read their share of it."""

    def take_returned(self) -> set[int]:
        """Return, once, the epochs with returned samples that are not read again yet."""
        returned, self._returned = self._returned, set()
        return returned

    # --- acknowledging ---

    def is_all_acknowledged(self, partition: PartitionKeys | None = None) -> bool:
        """Return whether every acknowledgement sent was answered, by the server of a partition or by all."""
        return self._outboxes.is_empty if partition is None else self._outboxes.is_empty_for(partition.number)

    def attend(self) -> None:
        """See that no acknowledgement is lost with its connection."""
        self._outboxes.attend()

    def flush(self) -> None:
        """Return once every acknowledgement is on the server."""
        self._outboxes.flush()

    def close_epochs(self, ended: int) -> None:
        """Close for the group the epochs that it has acknowledged, of ``ended`` and `unclosed`.

        Raises EpochIncomplete for samples that no member will deliver.
        """
        self._outboxes.confirm()
        self.unclosed.add(ended)
        for epoch in sorted(self.unclosed):
            manifest = find_manifest(self.client, self.stream, epoch)
            if manifest is None or manifest.state == ABANDONED or self._close(manifest):
                self.unclosed.discard(epoch)
                self._known.pop(epoch, None)

    def _close(self, manifest: Manifest) -> bool:
        """Close an epoch for the group if it can be closed. Return whether it is closed."""
        raise NotImplementedError

    def _manifest_of(self, epoch: int) -> Manifest | None:
        """Return the manifest of an epoch, or None if it was released."""
        if (known := self._known.get(epoch)) is None and (known := find_manifest(self.client, self.stream, epoch)):
            self._known[epoch] = known
        return known

    def is_released(self, epoch: int) -> bool:
        """Return whether an epoch was released.

        That a roster lacks it proves nothing, because its server may have lost it. A release is noted on the rosters
        before anything is unlinked, and in meta before the manifest is.
        """
        rosters = [load_roster(self.client, partition) for partition in self.stream.partitions]
        if find_manifest(self.client, self.stream, epoch) is None:
            return is_released(self.client, self.stream, epoch)
        return any(
            epoch not in roster.epochs
            and (epoch in roster.retiring or any(low <= epoch <= high for low, high in roster.retired))
            for roster in rosters
        )

    def loss_of(self, epoch: int) -> str:
        """Return a notice on an epoch that was being read, if a server lost its manifest, else ''."""
        if find_manifest(self.client, self.stream, epoch) is not None or self.is_released(epoch):
            return ""
        gone = EpochNotFound(f"epoch {epoch} of {self.stream.name!r} is gone, and nobody released it")
        return f"{self.explained(gone, self.stream.partitions[0])}. It is read again once its producer opens it again"

    def forget(self, epoch: int) -> None:
        """Forget what is known of an epoch that a server lost, because it may come back with less."""
        self._known.pop(epoch, None)

    # --- what is held ---

    def _held(self, partition: PartitionKeys) -> Mapping[int, Sequence[bytes]]:
        """Return, by epoch, the ids of the entries that others may have once this member leaves."""
        return {}

    def blocked_partitions(self, *, together: bool) -> list[BlockedPartition]:
        """Return the partitions where writers wait for quota, and what this member holds there.

        ``together``: and all others.
        """
        me = (self.who.group, self.who.member)
        return find_blocked(self.client, self.stream, me, self._held_bytes, together=together)

    def _held_bytes(self, partition: PartitionKeys) -> int:
        raise NotImplementedError

    # --- the end ---

    def limit_patience(self, patience_s: float) -> None:
        """Wait no longer than this for a server that went away, from now on."""
        self._outboxes.limit_patience(patience_s)

    def leave(self) -> None:
        """Return what is held to the group, and leave it."""
        self._outboxes.confirm()
        self._loss_detector.check()
        for partition in self.stream.partitions:
            leave(self.client, self.who, partition, self._held(partition))

    def close(self) -> None:
        """Close the connections."""
        self._outboxes.close()


class LeaseClaim(Claim):
    """The claim of a member of a shared group: the entries that it was given, each for as long as its lease is renewed.

    Entries that were returned, or that dead members left, are claimed and read again.
    """

    heartbeat: LeaseRenewers

    def __init__(
        self, client: Client, who: Membership, lease_s: float, notify: Notify, acknowledge_every_s: float = 0.0
    ) -> None:
        super().__init__(client, who, notify, acknowledge_every_s)
        self.leases = Leases()
        renewers: list[LeaseRenewer] = []
        for numbers in self.servers:
            first = renewers[0] if renewers else None
            losses = self._loss_detector if first is None else None
            renewers.append(
                LeaseRenewer(
                    client, who, self.leases, lease_s, notify, loss_detector=losses, partitions=numbers, first=first,
                    runs=self._runs,
                )
            )  # fmt: skip
        self.heartbeat = LeaseRenewers(renewers)
        self.commit_checks = [CommitCheck(client, who.stream) for _ in who.stream.partitions]
        """The test of entries. A reader uses that of its first partition, on a connection of its own."""
        self.deliveries = DeliveryCheck(client, who.stream)

    def _join(self, start: str | int) -> None:
        """See `Claim.join`. With 'earliest' or an epoch the whole group reads again.

        Raises GroupBusy then while other members are at work.
        """
        self._bear(lambda: self.deliveries.look(self.stream.partitions))
        if start not in CONTINUED:
            self._restart(start)
        self.first = self._on_replicas(
            lambda: join_group(self.client, self.who, first=self._floor(start), force=start != "resume")
        )

    def _restart(self, start: str | int) -> None:
        roster = load_roster(self.client, self.stream.partitions[0])
        if isinstance(start, int) and start not in roster.epochs and start < read_counters(self.client, self.stream)[0]:
            there = ", ".join(map(str, roster.epochs)) or "none"
            raise EpochNotFound(f"epoch {start} of {self.stream.name!r} is not retained; retained: {there}")
        if self.who.group not in roster.groups or roster.groups[self.who.group].kind != self.who.kind:
            return  # nothing to reset, or not this member's to reset; joining reports that
        advice = f"start={start!r} would reset it under them; stop them first, or use another group"
        refuse_living(self.client, self.stream, self.who.group, advice, but=self.who.member)
        reset_group(self.client, self.stream, self.who.group, self._restart_at(start))

    def keep(self) -> None:
        """See `Claim.keep`. First claims what is left of an earlier process of this name, and of dead members."""
        self.recover()
        self._bear(self.heartbeat.look)
        super().keep()

    def recover(self) -> set[int]:
        """See `Claim.recover`: what an earlier process of this name had, or a server that went back forgot."""
        self._bear(lambda: self.heartbeat.recover(self.is_all_acknowledged))
        return self._claimed()

    def _claimed(self) -> set[int]:
        """Return the epochs of entries that were claimed and are not read yet."""
        return {one.epoch for one in list(self.heartbeat.claims)}

    # --- which epochs to read ---

    def reopened(self) -> set[int]:
        """See `Claim.reopened`: a member that held a part of an epoch died, or what the epoch lacked was repaired."""
        return self._claimed() | {epoch for epoch in self.unclosed if self.has_unread(epoch)}

    def return_batches(self, batches: Iterable[Batch], kept: Iterable[Batch]) -> bool:
        """Give leases up and claim their entries again. The ledger, and ``kept``, say what of them is delivered.

        Return False, because the epoch being read goes on.
        """
        self._claim_again(dict.fromkeys(span.lease for batch in batches for span in batch.spans), kept)
        return False

    def begin_again(self, epoch: int, kept: Iterable[Batch], last: Batch | None) -> None:
        """Give up all leases of the epoch and claim their entries again, also of batches lost on the way."""
        claimed = {(one.partition, one.epoch, one.entry_id) for one in list(self.heartbeat.claims)}
        held = self.leases.of(epoch)
        self._claim_again([one for one in held if (one.partition, epoch, one.entry_id) not in claimed], kept)
        self._returned.add(epoch)

    def _claim_again(self, leases: Iterable[Lease], kept: Iterable[Batch]) -> None:
        self.flush()
        spans: dict[Lease, list[tuple[int, int]]] = {}
        for span in (span for batch in kept for span in batch.spans):
            spans.setdefault(span.lease.current(), []).append((span.lo, span.hi))
        for lease in leases:
            if self.leases.drop(lease):
                # held until then, so that it is renewed, until the reader's lease replaces it
                self.leases.hold_again(lease, spans.get(lease, []))
                self.heartbeat.claims.append(ClaimedEntry(lease.partition, lease.epoch, lease.entry_id))
                self._returned.add(lease.epoch)

    def take_returned(self) -> set[int]:
        """See `Claim.take_returned`. The reader takes up what it can without this."""
        return super().take_returned() & self._claimed()

    # --- acknowledging ---

    def acknowledge(self, batch: Batch) -> None:
        """Acknowledge the samples of a batch, and the entries that have no others left."""
        manifest = self._manifest_of(batch.epoch)
        for number, due in plan_acknowledgement(batch).items():
            if manifest is not None:
                partition = self.stream.partitions[number]
                self._outboxes.send(number, Acknowledgement(partition, manifest, self.who.group, due.ids, due.ranges))
                self._loss_detector.acknowledged(manifest, due.entries)
            self.leases.remove(number, batch.epoch, due.ids)

    def end_entry(
        self, manifest: Manifest, partition: PartitionKeys, entry_id: bytes, lease: Lease | None = None
    ) -> None:
        """Acknowledge an entry whose samples are all acknowledged, and the bits that its ``lease`` knows again."""
        ranges = {} if lease is None else {lease.shard: lease.acknowledged}
        acknowledge(self.client, partition, manifest, self.who.group, [entry_id], ranges)
        self.leases.remove(partition.number, manifest.epoch, [entry_id])

    def has_unacknowledged(self, epoch: int) -> bool:
        """Return whether this member still holds an entry of an epoch."""
        return self.leases.holds_epoch(epoch)

    def _close(self, manifest: Manifest) -> bool:
        epoch = manifest.epoch
        if not manifest.is_ended:
            return False
        missing: list[tuple[int, int, int]] = []
        for _ in range(CLOSE_LOOKS):
            missing = uncovered(self.client, self.stream, manifest, self.who.group)
            if not missing:
                self._close_for_group(epoch)
                return True
            if self.is_released(epoch):
                return True  # another member has closed it: the missing ledgers had gone already
            # in the order in which an entry goes, so that no member takes one behind these looks
            if self.has_unread(epoch) or self._is_pending(epoch):
                return False
        raise self._incomplete(manifest, missing)

    def _is_pending(self, epoch: int) -> bool:
        """Return whether a member has entries of an epoch that it has not acknowledged."""
        return bool(pending_members(self.client, [(p, epoch) for p in self.stream.partitions], self.who.group))

    def _incomplete(self, manifest: Manifest, missing: list[tuple[int, int, int]]) -> EpochIncomplete:
        epoch, name, group = manifest.epoch, self.stream.name, self.who.group
        require_there(self.client, self.stream)  # a deletion removes the entries first
        ranges = ", ".join(f"shard {shard} offsets {lo}-{hi - 1}" for shard, lo, hi in missing[:5])
        lost = describe_loss(self.client, self.stream, manifest, missing)
        return EpochIncomplete(
            f"epoch {epoch} of {name!r} is produced, but group {group!r} cannot be given "
            f"{sum(hi - lo for _, lo, hi in missing)} samples ({lost or ranges}): "
            f"`penstock audit {name} --repair SOURCE...` makes them again, "
            f"`penstock bad drop {name} {epoch} --group {group}` goes on without",
            missing,
        )

    def has_unread(self, epoch: int) -> bool:
        """Return whether an epoch has entries that no member was given.

        In an epoch that was read, those are repairs.
        """
        return any(has_unread(self.client, p, epoch, self.who.group) for p in self.stream.partitions)

    def other_holders(self, epoch: int, partitions: Iterable[PartitionKeys]) -> set[str]:
        """Return the names of other members that hold entries of an epoch in these partitions."""
        keys = [(partition, epoch) for partition in partitions]
        return {*pending_members(self.client, keys, self.who.group)} - {self.who.member}

    def live_members(self, since_ms: int, partition: PartitionKeys) -> set[str]:
        """Return the names of members that gave a heartbeat after a moment of the clock of a partition's server."""
        roster = load_roster(self.client, partition)
        return {name for (group, name), seen in roster.members.items() if group == self.who.group and seen > since_ms}

    # --- what is held ---

    def close(self) -> None:
        """See `Claim.close`."""
        super().close()
        for check in self.commit_checks:
            check.close()

    def _held(self, partition: PartitionKeys) -> Mapping[int, Sequence[bytes]]:
        return self.leases.ids(partition.number)

    def _held_bytes(self, partition: PartitionKeys) -> int:
        """Return the payload bytes of the entries that this member holds, by the shards' indexes."""
        return sum(
            record.nbytes
            for (epoch, shard), ids in self.leases.shards(partition.number).items()
            if shard >= 0
            for record in index_records(self.client, partition, epoch, shard)
            if record.entry_id in ids
        )


_IS_OLDER = (
    "the server came back from before the state was taken, as from a backup: load a checkpoint of that time, or begin "
    "without this state"
)


def _last_read(epoch: int, position: int) -> int:
    """Return the last epoch of which something was read before a position."""
    return epoch if position else epoch - 1


class RankClaim(Claim):
    """The claim of a rank of an ordered group: its steps from its position on."""

    def __init__(
        self, client: Client, who: Membership, lease_s: float, notify: Notify, acknowledge_every_s: float = 0.0
    ) -> None:
        super().__init__(client, who, notify, acknowledge_every_s)
        peers = UnusedRankCheck(client, who, notify)
        first, *others = self.servers
        lead = Heartbeat(
            client, who, lease_s, loss_detector=self._loss_detector, peers=peers, partitions=first, runs=self._runs
        )  # fmt: skip
        beats = [
            Heartbeat(client, who, lease_s, partitions=numbers, loop=lead.loop, runs=self._runs) for numbers in others
        ]
        self.heartbeat = Heartbeats([lead, *beats])
        self._quiet_ms = max(MIN_QUIET_MS, int(lease_s * 1000 / QUIET_PER_LEASE))
        self._again: dict[int, int] = {}
        """Epoch -> position from which it is read again, though the server knows another position."""
        self._is_absence_reported = False
        self._reported: dict[int, int] = {}
        """Epoch -> position that was reported from here."""
        self._ends: dict[int, tuple[int, int]] = {}
        """Epoch that was read to its end here -> (end of its last step, position where all of it is acknowledged)."""
        self._ids: dict[int, str] = {}
        """Epoch -> its manifest's id, of the newest epochs that were read here."""

    @property
    def order(self) -> RankOrder:
        """Rank, world size and batch size."""
        assert self.who.order is not None
        return self.who.order

    # --- joining ---

    def _join(self, start: str | int) -> None:
        """See `Claim.join`. With 'earliest' or an epoch this rank alone reads again.

        Raises GroupKindMismatch, EpochsReleased, and GroupBusy if ranks of another world size are alive.
        """
        self.first = self._enter(self._floor(start), force=start != "resume")
        if start not in CONTINUED:
            self.rewind(self._restart_at(start), 0)

    def _enter(self, floor: int, *, force: bool) -> int:
        wait = Wait(self.notify, 2 * self._quiet_ms / 1000)
        while True:
            try:
                return self._on_replicas(
                    lambda: join_group(self.client, self.who, first=floor, force=force, quiet_ms=self._quiet_ms)
                )
            except GroupBusy as error:  # a rank that died a moment ago looks alive for a moment
                busy = error
            try:
                wait.because("ranks", lambda: str(busy))  # noqa: B023  called at once
            except WaitTimeout:
                raise busy from None
            time.sleep(JOIN_EVERY_S)

    def tell_absent(self, epoch: int) -> None:
        """See `Claim.tell_absent`."""
        is_due = not self._is_absence_reported and self.steps(epoch, "pad") != 0
        if is_due and (absent := self._absent_ranks(epoch)):
            self._is_absence_reported = True
            self.notify(absent_notice(self.who, epoch, absent))

    def _absent_ranks(self, epoch: int) -> list[int]:
        """Return the ranks that are not there and have acknowledged nothing of an epoch."""
        members = load_roster(self.client, self.stream.partitions[0]).members
        reported = known_positions(self.client, self.stream, epoch, self.who.group).ranks
        here = {rank for rank in range(self.order.world) if (self.who.group, rank_member(rank)) in members}
        return sorted({*range(self.order.world)} - here - {*reported, self.order.rank})

    # --- positions ---

    def steps(self, epoch: int, remainder: str) -> int | None:
        """Return the batches of a whole epoch, the same for each rank, or None while it has no size.

        An abandoned epoch has the batches of what was committed.
        """
        manifest = find_manifest(self.client, self.stream, epoch)
        if manifest is None:
            return None
        samples = manifest.samples
        if manifest.state == ABANDONED:
            samples = IndexWalk(self.client, self.stream, manifest, 0).to_the_end()
        if samples is None:
            return None
        return EpochSteps(0, self.order.rank, self.order.world, self.order.batch, remainder).count(samples)

    def position(self, epoch: int) -> int:
        """Return where this rank's next step begins, as the server knows it."""
        return known_positions(self.client, self.stream, epoch, self.who.group).of(self.order.rank)

    def start_of(self, epoch: int) -> int:
        """Return the position where reading an epoch begins."""
        start = self._again.get(epoch)
        return self.position(epoch) if start is None else start

    def take_start(self, epoch: int) -> int:
        """Return the same to a reader. What was returned is due once."""
        start = self.start_of(epoch)
        self._again.pop(epoch, None)
        return start

    def step_of(self, batch: Batch) -> int:
        """Return the position where the step of a batch begins."""
        return batch.position - self.order.world * self.order.batch

    def return_batches(self, batches: Iterable[Batch], kept: Iterable[Batch]) -> bool:
        """Read every epoch again from the first of its batches. Return whether there is one."""
        for batch in batches:
            self._again[batch.epoch] = min(self.step_of(batch), self._again.get(batch.epoch, batch.position))
        self._returned.update(self._again)
        return bool(self._again)

    def begin_again(self, epoch: int, kept: Iterable[Batch], last: Batch | None) -> None:
        """Read the epoch again behind the last batch, or from where it is acknowledged."""
        self.flush()
        if last is not None and last.epoch == epoch:
            self._again[epoch] = last.position
        self._returned.add(epoch)

    def take_returned(self) -> set[int]:
        """See `Claim.take_returned`. They have no end any more; their reader was ended before."""
        returned = super().take_returned()
        for epoch in returned:
            self._ends.pop(epoch, None)
            self.unclosed.discard(epoch)
        return returned

    def forget(self, epoch: int) -> None:
        """See `Claim.forget`."""
        super().forget(epoch)
        self._reported.pop(epoch, None)

    def has_read(self, epoch: int) -> bool:
        """Return whether this rank has acknowledged all of an epoch. Then it waits for the other ranks."""
        manifest = find_manifest(self.client, self.stream, epoch)
        if manifest is None or not manifest.samples:
            return False
        return self.position(epoch) >= manifest.samples

    def note_manifest(self, epoch: int, manifest_id: str) -> None:
        """Remember the manifest's id for states that rest on the epoch."""
        if self._ids.get(epoch) != manifest_id:
            recent = {known: its_id for known, its_id in self._ids.items() if known >= epoch - 1}
            self._ids = {**recent, epoch: manifest_id}

    def state_at(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the part of a state that says where a rank continues. Nothing is asked of the server."""
        return {"epoch": epoch, "position": position, "manifest": self._ids.get(_last_read(epoch, position))}

    def require_read(self, epoch: int, position: int, manifest_id: str | None) -> None:
        """Raise StateMismatch if the server does not know what was read, or has other samples in its place.

        Args:
            epoch: the epoch that is read next.
            position: where its next step begins.
            manifest_id: the manifest of the epoch that was read last, if it is known.
        """
        last, begun = _last_read(epoch, position), read_counters(self.client, self.stream)[0]
        if epoch > self.first and last >= begun:
            raise StateMismatch("epoch", epoch, begun, f"the next epoch that is made has number {begun}: {_IS_OLDER}")
        if not manifest_id:
            return
        found = find_manifest(self.client, self.stream, last)
        if found is not None and found.id != manifest_id:
            raise StateMismatch("manifest", manifest_id, found.id, f"epoch {last} was made again since: {_IS_OLDER}")
        self.note_manifest(last, manifest_id)

    def rewind(self, epoch: int, position: int) -> None:
        """Move this rank to ``position`` in ``epoch``, to the start of later epochs, and to the end of earlier ones.

        Raises ReplayTruncated if something of it may be gone, and EpochNotFound.
        """
        self._again.clear()
        self.flush()
        self._outboxes.forget()  # a report that is sent again would undo the rewind
        self._require_retained(epoch)
        for number in retained_epochs(self.client, self.stream):
            manifest = find_manifest(self.client, self.stream, number)
            if manifest is None or manifest.state == ABANDONED:
                continue
            if number >= epoch:
                self._go_back(manifest, position if number == epoch else 0)
            elif number >= self.first and manifest.samples is not None:
                report(self.client, self.who, manifest, manifest.samples)
                self.unclosed.add(number)
            self._reported.pop(number, None)
            self._ends.pop(number, None)
        self.first = min(self.first, epoch)

    def _require_retained(self, epoch: int) -> None:
        if epoch in retained_epochs(self.client, self.stream) or epoch >= read_counters(self.client, self.stream)[0]:
            return
        there = ", ".join(map(str, retained_epochs(self.client, self.stream))) or "none"
        raise ReplayTruncated(
            f"epoch {epoch} of {self.stream.name!r} was released, so it cannot be gone back to; retained: {there}. "
            "Without this state or start= the group goes on where it stands, and skips what came between. A declared "
            f"group (`penstock groups declare {self.stream.name} {self.who.group} --ordered`) keeps what no checkpoint "
            "contains with acknowledge='on_checkpoint', and retention='epochs:9' keeps older epochs"
        ) from EpochNotFound(f"epoch {epoch}")

    def _go_back(self, manifest: Manifest, position: int) -> None:
        """Move the rank back, unless it stands there already."""
        if self.position(manifest.epoch) != position:
            rewind(self.client, self.who, manifest, position)

    # --- acknowledging ---

    def acknowledge(self, batch: Batch) -> None:
        """Acknowledge everything of this rank up to and with this batch."""
        manifest = self._manifest_of(batch.epoch)
        self._reported[batch.epoch] = max(batch.position, self._reported.get(batch.epoch, 0))
        if manifest is None:  # released: nothing is left to acknowledge
            return
        self.note_manifest(batch.epoch, manifest.id)  # a worker process of a DataLoader may have read it
        self._outboxes.send(0, PositionReport(manifest, self.who, batch.position))
        entries = acknowledged_entries(batch)
        if all(one.lease.entry_id for one in entries):
            self._loss_detector.acknowledged(manifest, entries)
        else:  # another process read it, and sent its rows without their entries
            self._loss_detector.reached(manifest, batch.position)

    def ended(self, epoch: int, last: int, total: int) -> None:
        """Note that the epoch was read to its end.

        Once all up to ``last`` is acknowledged, all ``total`` positions are.
        """
        self._ends[epoch] = (last, max(last, total))

    def is_end(self, epoch: int, position: int) -> bool:
        """Return whether no step of an epoch that was read to its end lies behind this position."""
        return epoch not in self._ends or position >= self._ends[epoch][0]

    def has_unacknowledged(self, epoch: int) -> bool:
        """Return whether batches of an epoch that was read to its end are outstanding."""
        return epoch in self._ends and self._reached(epoch) < self._ends[epoch][0]

    def _reached(self, epoch: int) -> int:
        if epoch not in self._reported:
            self._reported[epoch] = self.position(epoch)
        return self._reported[epoch]

    def _close(self, manifest: Manifest) -> bool:
        epoch = manifest.epoch
        if epoch in self._ends and not self.has_unacknowledged(epoch):
            self._outboxes.send(0, PositionReport(manifest, self.who, self._ends[epoch][1]))
            self.flush()
        positions = known_positions(self.client, self.stream, epoch, self.who.group)
        if not manifest.is_ended or positions.minimum(self.order.world) < (manifest.samples or 0):
            return False
        self._close_for_group(epoch)
        self._ends.pop(epoch, None)
        return True

    # --- what is held ---

    def blocked_partitions(self, *, together: bool) -> list[BlockedPartition]:
        """See `Claim.blocked_partitions`. If a rank behind this one holds the space, this one holds none."""
        # a rank's holdings are counted by the lowest rank's position, which are the group's already
        found = [replace(blocked, group=None) for blocked in super().blocked_partitions(together=together)]
        for epoch in retained_epochs(self.client, self.stream):
            positions = known_positions(self.client, self.stream, epoch, self.who.group)
            if positions.minimum(self.order.world) < positions.of(self.order.rank):
                return [replace(blocked, mine_bytes=0, has_others=True) for blocked in found]
        return found

    def _held_bytes(self, partition: PartitionKeys) -> int:
        """Return the payload bytes of the entries that this group's lowest rank has not acknowledged."""
        record, held = load_roster(self.client, partition).groups.get(self.who.group), 0
        if record is None:
            return held
        for epoch in retained_epochs(self.client, self.stream):
            manifest = find_manifest(self.client, self.stream, epoch)
            if manifest is None or epoch < record.first:
                continue
            for shard, lo, hi in behind(self.client, self.stream, manifest, self.who.group, record):
                if self.stream.partition_of(shard) == partition:
                    held += sum(r.nbytes for r in index_records(self.client, partition, epoch, shard, lo, hi))
        return held


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
