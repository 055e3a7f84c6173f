"""A member's place in its group: joining, finding the next epoch, acknowledging, closing epochs, leaving.

Everything the training loop's thread asks of the server; receiving is ``reader``'s, renewing ``keeper``'s.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from penstock_common.errors import EpochIncomplete, EpochNotFound, GroupBusy, GroupFinished, ServerUnavailable
from penstock_common.stream.entries import has_unread, index_records, list_pending
from penstock_common.stream.groups.forgetting import reset_group
from penstock_common.stream.groups.ledger import owed_samples, uncovered
from penstock_common.stream.groups.presence import ended_members
from penstock_common.stream.groups.roster import (
    Membership,
    Roster,
    close_for_group,
    join_group,
    leave,
    load_roster,
    server_ms,
)
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.commands import Client
from penstock_common.stream.outbox import Outbox
from penstock_common.stream.losses import Witness
from penstock_common.stream.manifest import ABANDONED, Manifest, find_manifest
from penstock_common.stream.payloads import maps_of_stream
from penstock_common.stream.ranges import format_ranges, parse_ranges
from penstock_common.stream.removal.outlook import look_around
from penstock_common.stream.streams import Stream, read_counters
from penstock_common.waiting import Notify, to_stderr
from penstock_consumer.stages.batch import Batch
from penstock_consumer.settling.circle import find_circle, is_stuck
from penstock_consumer.settling.holds import hold_of
from penstock_consumer.settling.overdue import Jam
from penstock_consumer.shared.committed import Committed
from penstock_consumer.shared.holdings import Holdings, plan_acknowledgement
from penstock_consumer.shared.others import count_living

ALIVE_MS = 30_000
"""A member that renewed within a lease may be living: its group is not reset under it."""


@dataclass
class Place:
    """One member of one group of one stream."""

    client: Client
    who: Membership
    holdings: Holdings = field(default_factory=Holdings)
    first: int = 0
    """First epoch the group reads."""
    members: int = 1
    """Of the group, those that lived when an epoch was last looked for."""
    unclosed: set[int] = field(default_factory=set)
    """Epochs iterated here that were not fully settled yet: others held some of them."""

    notify: Notify = to_stderr

    _known: dict[int, Manifest] = field(default_factory=dict)
    _half_open: int | None = None
    """An epoch that a producer has begun to open, when last looked."""

    def __post_init__(self) -> None:
        self._outbox = Outbox(self.client, notify=self.notify)
        self.committed = Committed(self.client, self.stream)
        self._maps = maps_of_stream(self.stream)
        by = f"member {self.who.group}/{self.who.member}"
        self.witness = Witness(self.client.impatient(), self.stream, by, self.notify)

    @property
    def stream(self) -> Stream:
        """The stream read."""
        return self.who.stream

    def join(self, start: str | int) -> None:
        """Puts group and member on the roster; ``start`` other than 'resume' makes the group read again from there."""
        force = start != "resume"
        if force:
            self._restart(start)
        floor = start if isinstance(start, int) else self._released_floor()
        self.first = join_group(self.client, self.who, first=floor, force=force)
        self._begin_to_witness()

    def _begin_to_witness(self) -> None:
        """Learns which run of the server this member joined; the next beat does where this fails."""
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
            return  # nothing to reset, or not ours to reset: joining says so
        now, me = server_ms(self.client), (self.who.group, self.who.member)
        ended = ended_members(roster, now)
        living = [who for who, seen in roster.members.items() if now - seen < ALIVE_MS and who not in {me, *ended}]
        others = [member for group, member in living if group == self.who.group]
        if others:
            raise GroupBusy(
                f"group {self.who.group!r} is read by {', '.join(others)}: start={start!r} would reset it under them; "
                "stop them first, or use another group"
            )
        first = start if isinstance(start, int) else self._first_whole(roster)
        reset_group(self.client, self.stream, self.who.group, first)

    def _first_whole(self, roster: Roster) -> int:
        """The first epoch behind all that retention took entries of, in whichever partition: as for a new group."""
        partitions = self.stream.partitions
        trimmed = max((e for p in partitions for e in load_roster(self.client, p).trimmed), default=-1)
        return min((epoch for epoch in roster.epochs if epoch > trimmed), default=trimmed + 1)

    def next_epoch(self, after: int) -> int | None:
        """The group's lowest epoch above ``after`` that it has not settled; None if there is none yet.

        Raises GroupFinished once every planned epoch was read.
        """
        outlook = look_around(self.client, self.stream, self.stream.partitions[-1])  # the last to hear of a new epoch
        known, last = outlook.first, outlook.roster
        self.members = count_living(known, self.who.group)
        closed = {epoch for group, epoch in known.closed if group == self.who.group}
        self._half_open = None
        for epoch, state in outlook.states.items():
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
        if (epoch := self._half_open) is not None:
            died = f"`penstock epochs abandon {self.stream.name} {epoch}` if that died"
            return f"epoch {epoch} of {self.stream.name!r} is being opened by a producer; {died}"
        roster = load_roster(self.client, self.stream.partitions[0])
        record = roster.groups.get(self.who.group)
        closed = [(epoch, epoch) for group, epoch in roster.closed if group == self.who.group]
        here = [(self.first, after)] if after >= self.first else []
        settled = [(record.first, record.read)] if record and record.read >= record.first else []
        read = _merged([*closed, *settled, *here])
        if read:
            epochs = "epoch" if read == [(read[0][0], read[0][0])] else "epochs"
            return (
                f"group {self.who.group!r} has read {epochs} {format_ranges(read)} of {self.stream.name!r}; there is "
                "no other: `penstock produce` makes one; start='earliest' or penstock.Replay reads the retained again"
            )
        begun, _, _ = read_counters(self.client, self.stream)
        if self.first > begun:
            return (
                f"group {self.who.group!r} is to begin with epoch {self.first} of {self.stream.name!r}, "
                f"of which {begun} were begun (0 is the first): it is not there yet"
            )
        if self.first > 0:
            return (
                f"group {self.who.group!r} came after epoch {self.first - 1} of {self.stream.name!r}, which is not "
                f"whole any more, and begins with epoch {self.first}: it is not there yet"
            )
        which = "has no other epoch" if begun else "has no epoch yet"
        return f"stream {self.stream.name!r} {which} for group {self.who.group!r}: `penstock produce` makes one"

    def learn(self, manifest: Manifest) -> None:
        """What is known already of an epoch that is to be read."""
        self._known[manifest.epoch] = manifest

    def acknowledge(self, batch: Batch) -> None:
        """Settles a batch that was trained on."""
        manifest = find_manifest(self.client, self.stream, batch.epoch) if batch.epoch not in self._known else None
        if manifest is not None:
            self._known[batch.epoch] = manifest
        known = self._known.get(batch.epoch)
        for number, due in plan_acknowledgement(batch).items():
            partition = self.stream.partitions[number]
            if known is not None:
                self._outbox.acknowledge(partition, known, self.who.group, due.ids, due.ranges)
                self.witness.acknowledged(known, due.entries)
            self.holdings.remove(number, batch.epoch, due.ids)

    def owes(self, epoch: int) -> bool:
        """Whether this member still holds something of an epoch."""
        return self.holdings.holds_epoch(epoch)

    def is_all_settled(self) -> bool:
        """Whether every acknowledgement sent was answered."""
        return self._outbox.is_empty

    def flush(self) -> None:
        """Returns once every acknowledgement is in the ledger."""
        self._outbox.flush()

    def close_epochs(self, ended: int) -> None:
        """Closes for the group what its ledger covers by now; raises EpochIncomplete for what nobody will deliver."""
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
            return True  # another member closed it meanwhile: what was missing are ledgers that had gone already
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
        """Whether there is something of an epoch that no member was given: of one that was read, what was repaired."""
        return any(has_unread(self.client, p, epoch, self.who.group) for p in self.stream.partitions)

    def _is_released(self, epoch: int) -> bool:
        """Off the roster, which comes before anything of an epoch is unlinked."""
        return epoch not in load_roster(self.client, self.stream.partitions[0]).epochs

    def jams(self, *, together: bool = False) -> list[Jam]:
        """The partitions where writers wait for room, and what this member holds of them; ``together``: all others."""
        rosters = {partition: load_roster(self.client, partition) for partition in self.stream.partitions}
        if not any(roster.waiting for roster in rosters.values()) or not is_stuck(self.client, self.stream, rosters):
            return []
        return [
            Jam(
                tuple(roster.waiting.values()),
                mine_bytes=self._held_bytes(partition),
                budget_bytes=self.stream.partition_budget,
                has_others=self._have_others(partition, roster),
                group=hold_of(self.client, self.stream, partition, roster, self.who.group, with_freed=True)
                if together
                else None,
                circle=find_circle(self.client, self.stream, partition, roster) if together else None,
                me=(self.who.group, self.who.member),
            )
            for partition, roster in rosters.items()
            if roster.waiting
        ]

    def _held_bytes(self, partition: PartitionKeys) -> int:
        """Payload bytes of the entries this member holds, by the shards' indexes."""
        return sum(
            record.nbytes
            for (epoch, shard), ids in self.holdings.shards(partition.number).items()
            if shard >= 0
            for record in index_records(self.client, partition, epoch, shard)
            if record.entry_id in ids
        )

    def _have_others(self, partition: PartitionKeys, roster: Roster) -> bool:
        """Whether another group, member or replay holds something in a partition."""
        if roster.replays:
            return True
        me = self.who
        for epoch in roster.epochs:
            pending = list_pending(self.client, partition, epoch, me.group)
            if any(entry.member != me.member for entry in pending):
                return True
            owing = {
                name: group
                for name, group in roster.groups.items()
                if name != me.group and group.holds and group.first <= epoch and (name, epoch) not in roster.closed
            }
            manifest = find_manifest(self.client, self.stream, epoch) if owing else None
            if manifest is not None and any(owed_samples(self.client, self.stream, manifest, owing).values()):
                return True
        return False

    def hurry(self, patience_s: float) -> None:
        """From now on a server that went away is not waited for longer than this."""
        self._outbox.patience_s = patience_s

    def leave(self) -> None:
        """Hands back what is held and signs off."""
        try:
            self._outbox.flush()
            self.witness.check()
        finally:
            self._outbox.close()
            self.committed.close()
            self._maps = None
        for partition in self.stream.partitions:
            leave(self.client, self.who, partition, self.holdings.ids(partition.number))


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged
