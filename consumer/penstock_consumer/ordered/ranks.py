"""A rank's place in an ordered group, and the thread that shows that it lives: positions in the stead of leases.

Which batches a rank reads is ``canonical``'s; the roster, closing and waiting are those of a member (``shared.place``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from penstock_common.errors import (
    EpochNotFound,
    GroupBusy,
    ReplayTruncated,
    WaitTimeout,
)
from penstock_common.server.error_translation import ReplyError
from penstock_common.server.scripts import load_script
from penstock_common.stream.entries import index_records
from penstock_common.stream.groups.ledger import behind
from penstock_common.stream.groups.positions import known_positions, refusal_of, report, report_arguments, rewind
from penstock_common.stream.groups.roster import QUIET_MS, Order, close_for_group, join_group, load_roster
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import ABANDONED, Manifest, find_manifest, retained_epochs
from penstock_common.stream.streams import read_counters
from penstock_common.waiting import Wait
from penstock_consumer.settling.overdue import Jam
from penstock_consumer.shared.holdings import settled_entries
from penstock_consumer.shared.place import Place
from penstock_consumer.stages.batch import Batch

_REPORT_POSITION = load_script("report_position")

JOIN_EVERY_S = 0.2


@dataclass
class OrderedPlace(Place):
    """One rank of one ordered group of one stream."""

    quiet_ms: int = QUIET_MS
    """Ranks of another world size that were unseen for so long are gone."""
    _settled: dict[int, int] = field(default_factory=dict)
    """Epoch -> position reported from here."""
    _ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Epoch read to its end here -> (end of its last step, where everything of it is settled)."""

    @property
    def order(self) -> Order:
        """Rank, world size and batch size."""
        assert self.who.order is not None
        return self.who.order

    # --- joining ---

    def join(self, start: str | int) -> None:
        """Puts group and rank on the roster; ``start`` other than 'resume' makes this rank read again from there.

        Raises GroupKindMismatch, EpochsReleased, GroupBusy where ranks of another world size are alive.
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
            except GroupBusy as error:  # those who died a moment ago look alive for a moment
                busy = error
            try:
                wait.because("ranks", lambda: str(busy))  # noqa: B023  called at once
            except WaitTimeout:
                raise busy from None
            time.sleep(JOIN_EVERY_S)

    # --- positions ---

    def position(self, epoch: int) -> int:
        """Where this rank's next step begins, as the server knows it."""
        return known_positions(self.client, self.stream, epoch, self.who.group).of(self.order.rank)

    def rewind(self, epoch: int, position: int) -> None:
        """This rank goes on there: in ``epoch`` at ``position``, in later ones from their start, in none before.

        Raises ReplayTruncated where something of it may be gone, EpochNotFound.
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
            self._settled.pop(number, None)
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
        """Where the rank stands there already, nothing has to be looked after."""
        if self.position(manifest.epoch) != position:
            rewind(self.client, self.who, manifest, position)

    def next_epoch(self, after: int) -> int | None:
        """The lowest epoch above ``after`` that this rank has not read; see `Place.next_epoch`."""
        while True:
            epoch = super().next_epoch(after)
            if epoch is None or not self._has_read(epoch):
                return epoch
            self.unclosed.add(epoch)  # other ranks have not
            after = epoch

    def _has_read(self, epoch: int) -> bool:
        manifest = find_manifest(self.client, self.stream, epoch)
        samples = None if manifest is None else manifest.samples
        return bool(samples) and self.position(epoch) >= (samples or 0)

    # --- acknowledging ---

    def acknowledge(self, batch: Batch) -> None:
        """Settles everything of this rank up to and with this batch."""
        manifest = self._known.get(batch.epoch) or find_manifest(self.client, self.stream, batch.epoch)
        self._settled[batch.epoch] = max(batch.position, self._settled.get(batch.epoch, 0))
        if manifest is None:  # released: nothing is owed any more
            return
        self._known[batch.epoch] = manifest
        with self._refusals():
            self._outbox.send(_REPORT_POSITION, *report_arguments(manifest, self.who, batch.position))
        settled = settled_entries(batch)
        if all(one.lease.entry_id for one in settled):
            self.witness.acknowledged(manifest, settled)
        else:  # another process read it, and sent its rows without their entries
            self.witness.reached(manifest, batch.position)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """A refused report in words."""
        try:
            yield
        except ReplyError as error:
            refusal = refusal_of(error.error, self.who)
            if refusal is None:
                raise
            raise refusal from None

    def ended(self, epoch: int, last: int, total: int) -> None:
        """The epoch was read to its end: once all up to ``last`` is settled, all of its ``total`` positions are."""
        self._ends[epoch] = (last, max(last, total))

    def is_end(self, epoch: int, position: int) -> bool:
        """Whether of an epoch that was read to its end no step lies behind this position; a closed one has none."""
        return epoch not in self._ends or position >= self._ends[epoch][0]

    def reopen(self, epoch: int) -> None:
        """The epoch is read again from some step on."""
        self._ends.pop(epoch, None)
        self.unclosed.discard(epoch)

    def owes(self, epoch: int) -> bool:
        """Whether batches of an epoch that was read to its end are not settled yet."""
        return epoch in self._ends and self._reached(epoch) < self._ends[epoch][0]

    def _reached(self, epoch: int) -> int:
        if epoch not in self._settled:
            self._settled[epoch] = self.position(epoch)
        return self._settled[epoch]

    def flush(self) -> None:
        """Returns once every report is on the server."""
        with self._refusals():
            self._outbox.flush()

    def close_epochs(self, ended: int) -> None:
        """Closes for the group what every rank has settled by now."""
        self.flush()
        super().close_epochs(ended)

    def _close(self, epoch: int) -> bool:
        manifest = find_manifest(self.client, self.stream, epoch)
        if manifest is None or manifest.state == ABANDONED:
            return True
        if epoch in self._ends and not self.owes(epoch):
            report(self.client, self.who, manifest, self._ends[epoch][1])
        positions = known_positions(self.client, self.stream, epoch, self.who.group)
        if not manifest.is_ended or positions.minimum(self.order.world) < (manifest.samples or 0):
            return False
        close_for_group(self.client, self.stream, self.who.group, epoch)
        self._ends.pop(epoch, None)
        return True

    def jams(self, *, together: bool = False) -> list[Jam]:
        """See `Place.jams`; where a rank that is behind this one holds the room, this one holds nothing."""
        # what a rank holds is counted by the lowest rank's position: the group's already
        jams = [replace(jam, group=None) for jam in super().jams(together=together)]
        for epoch in retained_epochs(self.client, self.stream):
            positions = known_positions(self.client, self.stream, epoch, self.who.group)
            if positions.minimum(self.order.world) < positions.of(self.order.rank):
                return [replace(jam, mine_bytes=0, has_others=True) for jam in jams]
        return jams

    def _held_bytes(self, partition: PartitionKeys) -> int:
        """Payload bytes of the entries that this group's lowest rank has not settled."""
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

    def leave(self) -> None:
        """Signs off."""
        with self._refusals():
            super().leave()
