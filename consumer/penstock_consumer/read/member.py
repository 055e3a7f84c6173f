"""A member of a group: it joins, finds epochs, acknowledges, closes epochs and leaves."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from penstock_common.errors import (
    EpochIncomplete,
    EpochNotFound,
    GroupBusy,
    GroupFinished,
    ReplayTruncated,
    ServerUnavailable,
    WaitTimeout,
)
from penstock_common.explain.deadlock import BlockedPartition, find_blocked
from penstock_common.explain.sentences import why_no_epoch
from penstock_common.explain.snapshot import snapshot_partition
from penstock_common.stream.commands import Client, server_ms
from penstock_common.stream.entries import has_unread, index_records, list_pending, pending_members
from penstock_common.stream.groups.forgetting import reset_group
from penstock_common.stream.groups.ledger import acknowledgement, behind, uncovered
from penstock_common.stream.groups.losses import Witness
from penstock_common.stream.groups.outbox import Outbox
from penstock_common.stream.groups.positions import known_positions, position_report, report, rewind
from penstock_common.stream.groups.presence import count_live, liveness_of
from penstock_common.stream.groups.roster import (
    QUIET_MS,
    Membership,
    Order,
    Roster,
    close_for_group,
    join_group,
    leave,
    load_roster,
    rank_member,
)
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import ABANDONED, Manifest, find_manifest, retained_epochs
from penstock_common.stream.payloads import maps_of_stream
from penstock_common.stream.ranges import parse_ranges
from penstock_common.stream.streams import Stream, read_counters
from penstock_common.waiting import Notify, Wait, to_stderr
from penstock_consumer.read.leases import Leases, acknowledged_entries, plan_acknowledgement
from penstock_consumer.read.receive import CommitCheck
from penstock_consumer.stages.batch import Batch


def holders(member: Member, epoch: int) -> set[str]:
    """Return the names of other members that hold entries of an epoch."""
    keys = [(partition, epoch) for partition in member.stream.partitions]
    return {*pending_members(member.client, keys, member.who.group)} - {member.who.member}


def live_members(member: Member, since_ms: int) -> set[str]:
    """Return the names of members that gave a heartbeat after a moment of the server's clock."""
    roster = load_roster(member.client, member.stream.partitions[0])
    return {name for (group, name), seen in roster.members.items() if group == member.who.group and seen > since_ms}


@dataclass
class Member:
    """A member of a group: what the training loop's thread asks of the server. Its claim on entries is by leases."""

    client: Client
    who: Membership
    leases: Leases = field(default_factory=Leases)
    first: int = 0
    """The first epoch that the group reads."""
    members: int = 1
    """The members of the group that lived when an epoch was last looked for."""
    unclosed: set[int] = field(default_factory=set)
    """The epochs iterated here that were not acknowledged as a whole yet, because others held a part."""

    notify: Notify = to_stderr

    _known: dict[int, Manifest] = field(default_factory=dict)
    _half_open: int | None = None
    """An epoch that a producer had begun to open at the last look."""

    def __post_init__(self) -> None:
        self._outbox = Outbox(self.client, self.who, notify=self.notify)
        self.committed = CommitCheck(self.client, self.stream)
        self._maps = maps_of_stream(self.stream)
        by = f"member {self.who.group}/{self.who.member}"
        self.witness = Witness(self.client.impatient(), self.stream, by, self.notify)

    @property
    def stream(self) -> Stream:
        """The stream that is read."""
        return self.who.stream

    def join(self, start: str | int) -> None:
        """Put group and member on the roster. Any ``start`` but 'resume' makes the group read again from there."""
        force = start != "resume"
        if force:
            self._restart(start)
        floor = start if isinstance(start, int) else self._released_floor()
        self.first = join_group(self.client, self.who, first=floor, force=force)
        self._begin_to_witness()

    def _begin_to_witness(self) -> None:
        """Learn which run of the server this member joined. If this fails, the next heartbeat does it."""
        with suppress(ServerUnavailable):
            self.witness.check()

    def _released_floor(self) -> int:
        ranges = parse_ranges(read_counters(self.client, self.stream)[2])
        return ranges[0][1] + 1 if ranges and ranges[0][0] == 0 else 0

    def _restart(self, start: str | int) -> None:
        roster = load_roster(self.client, self.stream.partitions[0])
        if isinstance(start, int) and start not in roster.epochs and start < read_counters(self.client, self.stream)[0]:
            there = ", ".join(map(str, roster.epochs)) or "none"
            raise EpochNotFound(f"epoch {start} of {self.stream.name!r} is not retained; retained: {there}")
        if self.who.group not in roster.groups or roster.groups[self.who.group].kind != self.who.kind:
            return  # nothing to reset, or not this member's to reset; joining reports that
        others = [
            member
            for (group, member), liveness in liveness_of([roster], server_ms(self.client)).items()
            if group == self.who.group and member != self.who.member and liveness.may_be_at_work
        ]
        if others:
            raise GroupBusy(
                f"group {self.who.group!r} is read by {', '.join(others)}: start={start!r} would reset it under them; "
                "stop them first, or use another group"
            )
        first = start if isinstance(start, int) else self._first_whole(roster)
        reset_group(self.client, self.stream, self.who.group, first)

    def _first_whole(self, roster: Roster) -> int:
        """Return the first epoch after all those that retention took entries of, in any partition."""
        partitions = self.stream.partitions
        trimmed = max((e for p in partitions for e in load_roster(self.client, p).trimmed), default=-1)
        return min((epoch for epoch in roster.epochs if epoch > trimmed), default=trimmed + 1)

    def next_epoch(self, after: int) -> int | None:
        """Return the group's lowest epoch above ``after`` that it has not acknowledged, or None if there is none yet.

        Raises GroupFinished once every planned epoch was read.
        """
        snapshot = snapshot_partition(
            self.client, self.stream, self.stream.partitions[-1]
        )  # this partition hears of a new epoch last
        known, last = snapshot.first, snapshot.roster
        self.members = count_live(known, self.who.group)
        closed = {epoch for group, epoch in known.closed if group == self.who.group}
        self._half_open = None
        for epoch, state in snapshot.states.items():
            if epoch < self.first or epoch <= after or epoch in closed:
                continue
            if epoch in last.epochs:
                return epoch
            if state != ABANDONED and epoch not in last.retiring:
                self._half_open = epoch
                return None  # read now, it would look like one that was released
        following, final, _ = read_counters(self.client, self.stream)
        record = known.groups.get(self.who.group)
        if (
            final is not None
            and following >= final
            and max(after, self.first - 1, record.read if record is not None else -1, *closed) + 1 >= final
        ):
            raise GroupFinished(self.finished(after))
        return None

    def finished(self, after: int) -> str:
        """Return a sentence on a group for which there is no epoch to read now.

        Args:
            after: the last epoch that this member was given, or -1. The group may have samples of it to acknowledge.
        """
        begun, _, _ = read_counters(self.client, self.stream)
        roster = load_roster(self.client, self.stream.partitions[0])
        given = [epoch for epoch in roster.epochs if self.first <= epoch <= after]
        found = [find_manifest(self.client, self.stream, epoch) for epoch in given]
        here = [one.epoch for one in found if one is not None and one.state != ABANDONED]
        return why_no_epoch(
            self.stream.name,
            self.who.group,
            roster,
            first=self.first,
            begun=begun,
            given=here,
            half_open=self._half_open,
        )

    def learn(self, manifest: Manifest) -> None:
        """Learn what is known already of an epoch that is to be read."""
        self._known[manifest.epoch] = manifest

    def acknowledge(self, batch: Batch) -> None:
        """Acknowledge a batch that was trained on."""
        manifest = find_manifest(self.client, self.stream, batch.epoch) if batch.epoch not in self._known else None
        if manifest is not None:
            self._known[batch.epoch] = manifest
        known = self._known.get(batch.epoch)
        for number, due in plan_acknowledgement(batch).items():
            partition = self.stream.partitions[number]
            if known is not None:
                self._outbox.send(acknowledgement(partition, known, self.who.group, due.ids, due.ranges))
                self.witness.acknowledged(known, due.entries)
            self.leases.remove(number, batch.epoch, due.ids)

    def has_unacknowledged(self, epoch: int) -> bool:
        """Return whether this member still holds something of an epoch."""
        return self.leases.holds_epoch(epoch)

    def is_all_acknowledged(self) -> bool:
        """Return whether every acknowledgement sent was answered."""
        return self._outbox.is_empty

    def flush(self) -> None:
        """Return once every acknowledgement is in the ledger."""
        self._outbox.flush()

    def close_epochs(self, ended: int) -> None:
        """Close for the group the epochs that its ledger covers.

        Raises EpochIncomplete for what nobody will deliver.
        """
        self._outbox.flush()
        self.unclosed.add(ended)
        for epoch in sorted(self.unclosed):
            if self._close(epoch):
                self.unclosed.discard(epoch)
                self._known.pop(epoch, None)

    def _close(self, epoch: int) -> bool:
        manifest = find_manifest(self.client, self.stream, epoch)
        if manifest is None or manifest.state == ABANDONED:
            return True
        if not manifest.is_ended:
            return False
        is_pending = any(
            list_pending(self.client, partition, epoch, self.who.group, limit=1) for partition in self.stream.partitions
        )
        missing = uncovered(self.client, self.stream, manifest, self.who.group)
        if missing and self._is_released(epoch):
            return True  # another member closed it meanwhile: the missing ledgers had gone already
        if not missing:
            close_for_group(self.client, self.stream, self.who.group, epoch)
            return True
        if not is_pending and not self.has_unread(epoch):
            ranges = ", ".join(f"shard {shard} offsets {lo}-{hi - 1}" for shard, lo, hi in missing[:5])
            raise EpochIncomplete(
                f"epoch {epoch} of {self.stream.name!r} is produced, but group {self.who.group!r} was never given "
                f"{sum(hi - lo for _, lo, hi in missing)} samples ({ranges}): "
                f"`penstock audit {self.stream.name} --repair SOURCE...` makes them again, "
                f"`penstock bad drop {self.stream.name} {epoch} --group {self.who.group}` goes on without",
                missing,
            )
        return False

    def has_unread(self, epoch: int) -> bool:
        """Return whether an epoch has entries that no member was given.

        In an epoch that was read, those are repairs.
        """
        return any(has_unread(self.client, p, epoch, self.who.group) for p in self.stream.partitions)

    def _is_released(self, epoch: int) -> bool:
        """Return whether an epoch is off the roster. It leaves the roster before anything of it is unlinked."""
        return epoch not in load_roster(self.client, self.stream.partitions[0]).epochs

    def blocked_partitions(self, *, together: bool = False) -> list[BlockedPartition]:
        """Return the partitions where writers wait for quota, and what this member holds there.

        ``together``: and all others.
        """
        me = (self.who.group, self.who.member)
        return find_blocked(self.client, self.stream, me, self._held_bytes, together=together)

    def _held_bytes(self, partition: PartitionKeys) -> int:
        """Return the payload bytes of the entries that this member holds, by the shards' indexes."""
        return sum(
            record.nbytes
            for (epoch, shard), ids in self.leases.shards(partition.number).items()
            if shard >= 0
            for record in index_records(self.client, partition, epoch, shard)
            if record.entry_id in ids
        )

    def hurry(self, patience_s: float) -> None:
        """Wait no longer than this for a server that went away, from now on."""
        self._outbox.hurry(patience_s)

    def leave(self) -> None:
        """Hand back what is held, and leave."""
        try:
            self._outbox.flush()
            self.witness.check()
        finally:
            self._outbox.close()
            self.committed.close()
            self._maps = None
        for partition in self.stream.partitions:
            leave(self.client, self.who, partition, self.leases.ids(partition.number))


JOIN_EVERY_S = 0.2


@dataclass
class RankMember(Member):
    """A rank of an ordered group. Its claim on samples is by position."""

    quiet_ms: int = QUIET_MS
    """Ranks of another world size that were unseen for so long are gone."""
    _reported: dict[int, int] = field(default_factory=dict)
    """Epoch -> position that was reported from here."""
    _ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Epoch that was read to its end here -> (end of its last step, position where everything of it is acknowledged).
    """

    @property
    def order(self) -> Order:
        """Rank, world size and batch size."""
        assert self.who.order is not None
        return self.who.order

    # --- joining ---

    def join(self, start: str | int) -> None:
        """Put group and rank on the roster. Any ``start`` but 'resume' makes this rank read again from there.

        Raises GroupKindMismatch, EpochsReleased, and GroupBusy if ranks of another world size are alive.
        """
        force = start != "resume"
        floor = start if isinstance(start, int) else self._released_floor()
        self.first = self._enter(floor, force=force)
        self._begin_to_witness()
        if force:
            roster = load_roster(self.client, self.stream.partitions[0])
            self.rewind(start if isinstance(start, int) else self._first_whole(roster), 0)

    def _enter(self, floor: int, *, force: bool) -> int:
        wait = Wait(self.notify, 2 * self.quiet_ms / 1000)
        while True:
            try:
                return join_group(self.client, self.who, first=floor, force=force, quiet_ms=self.quiet_ms)
            except GroupBusy as error:  # a rank that died a moment ago looks alive for a moment
                busy = error
            try:
                wait.because("ranks", lambda: str(busy))  # noqa: B023  called at once
            except WaitTimeout:
                raise busy from None
            time.sleep(JOIN_EVERY_S)

    # --- positions ---

    def position(self, epoch: int) -> int:
        """Return where this rank's next step begins, as the server knows it."""
        return known_positions(self.client, self.stream, epoch, self.who.group).of(self.order.rank)

    def absent_ranks(self, epoch: int) -> list[int]:
        """Return the ranks that are not there and have acknowledged nothing of an epoch."""
        members = load_roster(self.client, self.stream.partitions[0]).members
        reported = known_positions(self.client, self.stream, epoch, self.who.group).ranks
        here = {rank for rank in range(self.order.world) if (self.who.group, rank_member(rank)) in members}
        return sorted({*range(self.order.world)} - here - {*reported, self.order.rank})

    def rewind(self, epoch: int, position: int) -> None:
        """Move this rank to ``position`` in ``epoch``, to the start of later epochs, and to the end of earlier ones.

        Raises ReplayTruncated if something of it may be gone, and EpochNotFound.
        """
        self._outbox.flush()
        self._require_retained(epoch)
        for number in retained_epochs(self.client, self.stream):
            manifest = find_manifest(self.client, self.stream, number)
            if manifest is None or manifest.state == ABANDONED:
                continue
            if number < epoch:
                self._skip(manifest)
            else:
                self._go_back(manifest, position if number == epoch else 0)
            self._reported.pop(number, None)
            self._ends.pop(number, None)
        self.first = min(self.first, epoch)

    def _require_retained(self, epoch: int) -> None:
        if epoch in retained_epochs(self.client, self.stream) or epoch >= read_counters(self.client, self.stream)[0]:
            return
        there = ", ".join(map(str, retained_epochs(self.client, self.stream))) or "none"
        raise ReplayTruncated(
            f"epoch {epoch} of {self.stream.name!r} was released, so it cannot be gone back to; retained: {there}"
        ) from EpochNotFound(f"epoch {epoch}")

    def _skip(self, manifest: Manifest) -> None:
        if manifest.epoch >= self.first and manifest.samples is not None:
            report(self.client, self.who, manifest, manifest.samples)
            self.unclosed.add(manifest.epoch)

    def _go_back(self, manifest: Manifest, position: int) -> None:
        """Move the rank back, unless it stands there already."""
        if self.position(manifest.epoch) != position:
            rewind(self.client, self.who, manifest, position)

    def next_epoch(self, after: int) -> int | None:
        """Return the lowest epoch above ``after`` that this rank has not read; see `Member.next_epoch`."""
        while True:
            epoch = super().next_epoch(after)
            if epoch is None or not self._has_read(epoch):
                return epoch
            self.unclosed.add(epoch)  # other ranks have not read it
            after = epoch

    def _has_read(self, epoch: int) -> bool:
        manifest = find_manifest(self.client, self.stream, epoch)
        samples = None if manifest is None else manifest.samples
        return bool(samples) and self.position(epoch) >= (samples or 0)

    # --- acknowledging ---

    def acknowledge(self, batch: Batch) -> None:
        """Acknowledge everything of this rank up to and with this batch."""
        manifest = self._known.get(batch.epoch) or find_manifest(self.client, self.stream, batch.epoch)
        self._reported[batch.epoch] = max(batch.position, self._reported.get(batch.epoch, 0))
        if manifest is None:  # released: nothing is left to acknowledge
            return
        self._known[batch.epoch] = manifest
        self._outbox.send(position_report(manifest, self.who, batch.position))
        settled = acknowledged_entries(batch)
        if all(one.lease.entry_id for one in settled):
            self.witness.acknowledged(manifest, settled)
        else:  # another process read it, and sent its rows without their entries
            self.witness.reached(manifest, batch.position)

    def ended(self, epoch: int, last: int, total: int) -> None:
        """Note that the epoch was read to its end.

        Once all up to ``last`` is acknowledged, all ``total`` positions are.
        """
        self._ends[epoch] = (last, max(last, total))

    def is_end(self, epoch: int, position: int) -> bool:
        """Return whether no step of an epoch that was read to its end lies behind this position."""
        return epoch not in self._ends or position >= self._ends[epoch][0]

    def reopen(self, epoch: int) -> None:
        """Note that the epoch is read again from some step on."""
        self._ends.pop(epoch, None)
        self.unclosed.discard(epoch)

    def has_unacknowledged(self, epoch: int) -> bool:
        """Return whether batches of an epoch that was read to its end are outstanding."""
        return epoch in self._ends and self._reached(epoch) < self._ends[epoch][0]

    def _reached(self, epoch: int) -> int:
        if epoch not in self._reported:
            self._reported[epoch] = self.position(epoch)
        return self._reported[epoch]

    def _close(self, epoch: int) -> bool:
        manifest = find_manifest(self.client, self.stream, epoch)
        if manifest is None or manifest.state == ABANDONED:
            return True
        if epoch in self._ends and not self.has_unacknowledged(epoch):
            report(self.client, self.who, manifest, self._ends[epoch][1])
        positions = known_positions(self.client, self.stream, epoch, self.who.group)
        if not manifest.is_ended or positions.minimum(self.order.world) < (manifest.samples or 0):
            return False
        close_for_group(self.client, self.stream, self.who.group, epoch)
        self._ends.pop(epoch, None)
        return True

    def blocked_partitions(self, *, together: bool = False) -> list[BlockedPartition]:
        """See `Member.blocked_partitions`. If a rank behind this one holds the space, this one holds none."""
        # a rank's holdings are counted by the lowest rank's position, which are the group's already
        found = [replace(blocked, group=None) for blocked in super().blocked_partitions(together=together)]
        for epoch in retained_epochs(self.client, self.stream):
            positions = known_positions(self.client, self.stream, epoch, self.who.group)
            if positions.minimum(self.order.world) < positions.of(self.order.rank):
                return [replace(blocked, mine_bytes=0, has_others=True) for blocked in found]
        return found

    def _held_bytes(self, partition: PartitionKeys) -> int:
        """Return the payload bytes of the entries that this group's lowest rank has not acknowledged."""
        record = load_roster(self.client, partition).groups.get(self.who.group)
        held = 0
        for epoch in retained_epochs(self.client, self.stream) if record is not None else ():
            manifest = find_manifest(self.client, self.stream, epoch)
            if manifest is None or record is None or epoch < record.first:
                continue
            for shard, lo, hi in behind(self.client, self.stream, manifest, self.who.group, record):
                if self.stream.partition_of(shard) == partition:
                    held += sum(r.nbytes for r in index_records(self.client, partition, epoch, shard, lo, hi))
        return held
