"""Entries that cannot be read: which become dead letters, and which do not."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from penstock_common.errors import (
    BadEntry,
    PenstockError,
    SegmentGone,
    ServerUnavailable,
    TooManyDeadLetters,
    UncommittedEntry,
    UnsupportedVersion,
)
from penstock_common.printable import shortened
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import fetch_fields, read_headers
from penstock_common.stream.groups.ledger import add_dead_letter, done_bits, uncovered
from penstock_common.stream.groups.roster import Membership
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.streams import Stream, require_there
from penstock_common.wire.header import Header
from penstock_consumer.read.claims import LeaseClaim
from penstock_consumer.read.heartbeat import ClaimedEntry
from penstock_consumer.read.receive import ReceivedEntry
from penstock_consumer.stages.batch import Lease


def too_old(who: Membership, epoch: int, entry_id: bytes, error: BadEntry | None) -> UnsupportedVersion:
    """Return the error of a reader that is older than an entry, and has taken nothing of it."""
    return UnsupportedVersion(
        f"entry {entry_id.decode()} of epoch {epoch} of {who.stream.name!r} is too new for this process: {error}, then "
        f"start again; it is kept for group {who.group!r}"
    )


def is_done(
    client: Client, partition: PartitionKeys, manifest: Manifest, group: str, entry_id: bytes,
    error: BadEntry | None, header: Header | None,
) -> bool:  # fmt: skip
    """Return whether an entry's payload is gone and the group is done with all of it, or its epoch is over.

    A released epoch has no index either: it says nothing about an entry that was received before. Nor is anything
    wrong with an entry that a restarted server has forgotten together with its record.
    """
    if not isinstance(error, SegmentGone | UncommittedEntry) or header is None:
        return False
    state: bytes | None = client.get(partition.state(manifest.epoch))
    if isinstance(error, UncommittedEntry):
        if state is None or state.startswith(b"gone:"):
            return True
        return read_headers(client, partition, manifest.epoch, [entry_id]) == [b""]
    if state != manifest.live_state.encode():
        return True
    bits = done_bits(client, partition, manifest.epoch, group, header.shard, header.first, header.end)
    bits[np.array(header.holes, dtype=np.int64) - header.first] = True
    return bool(bits.all())


def is_removed(client: Client, partition: PartitionKeys, epoch: int, entry_id: bytes, error: BadEntry) -> bool:
    """Return whether an entry's payload is gone because the entry is."""
    return isinstance(error, SegmentGone) and fetch_fields(client, partition, epoch, entry_id) is None


def cause_of(client: Client, stream: Stream, error: PenstockError) -> PenstockError:
    """Return this error, or the one that took the whole stream along."""
    try:
        require_there(client, stream)
    except PenstockError as worse:
        return worse
    return error


HOPELESS_ENTRIES = 100
"""If this many entries before the first good one are bad, the reader, its spec or the whole epoch is broken."""


@dataclass(frozen=True, slots=True)
class _BadEntry:
    manifest: Manifest
    partition: PartitionKeys
    entry_id: bytes
    reason: str


class DeadLetters:
    """The bad entries that one reader finds in one epoch."""

    def __init__(self, claim: LeaseClaim, readable: threading.Event) -> None:
        """``readable`` is set once an entry of the epoch could be read: one that could not is bad in itself then."""
        self._claim, self._readable = claim, readable
        self.count = 0
        """The entries that could not be read."""
        self._held: list[_BadEntry] = []
        self._gave_up = False

    def deal_with(self, odd: Sequence[ReceivedEntry], manifest: Manifest, partition: PartitionKeys) -> None:
        """Deal with entries that deliver no sample. Raises TooManyDeadLetters, UnsupportedVersion."""
        claim, newer = self._claim, list[ReceivedEntry]()
        for one in odd:
            if isinstance(one.error, UnsupportedVersion):
                newer.append(one)
                continue
            if is_done(claim.client, partition, manifest, claim.who.group, one.entry_id, one.error, one.header):
                claim.end_entry(manifest, partition, one.entry_id)
                continue
            self.count += one.lease is None
            if one.is_missing:
                lost = "payload lost: the entry was deleted while it was pending"
                self.add_now(manifest, partition, one.entry_id, lost)
            elif one.error is not None:
                self._add(manifest, partition, one.entry_id, f"{type(one.error).__name__}: {one.error}")
            elif one.lease is not None:  # every sample of it was acknowledged before: only the entry itself is due
                claim.end_entry(manifest, partition, one.entry_id, one.lease)
        self._require_hope()
        for one in newer:  # pending, and held like others: leaving returns them at once, a death after a lease
            claim.leases.add(Lease(partition.number, manifest.epoch, shard=-1, entry_id=one.entry_id, unacknowledged=0))
        if newer:
            raise too_old(claim.who, manifest.epoch, newer[0].entry_id, newer[0].error)

    def saw_good(self) -> None:
        """Note that an entry could be read, so that those that could not are bad in themselves."""
        self._readable.set()
        with suppress(ServerUnavailable):  # the next good entry tries again
            self._add_held()

    def _add(self, manifest: Manifest, partition: PartitionKeys, entry_id: bytes, reason: str) -> None:
        """Make an entry a dead letter, or hold it back while nothing could be read."""
        if self._readable.is_set():
            self.add_now(manifest, partition, entry_id, reason)
            return
        # leased like any other entry: the lease is renewed, and returned when this reader fails
        self._claim.leases.add(Lease(partition.number, manifest.epoch, shard=-1, entry_id=entry_id, unacknowledged=0))
        self._held.append(_BadEntry(manifest, partition, entry_id, reason))

    def _require_hope(self) -> None:
        """Raise TooManyDeadLetters, once, when too much is held back."""
        if len(self._held) >= HOPELESS_ENTRIES and not self._gave_up and not self._readable.is_set():
            self._gave_up = True
            raise self._hopeless(f"none of the first {len(self._held)} entries")

    def add_now(self, manifest: Manifest, partition: PartitionKeys, entry_id: bytes, reason: str) -> None:
        """Make an entry a dead letter that no reader could read."""
        self._claim.notify(f"entry {entry_id.decode()} of epoch {manifest.epoch} is a dead letter: {reason[:300]}")
        add_dead_letter(
            self._claim.client, partition, manifest, self._claim.who.group, entry_id, shortened(reason, 500)
        )
        self._claim.leases.remove(partition.number, manifest.epoch, [entry_id])

    def end(self, manifest: Manifest, *, is_alone: bool) -> None:
        """Make dead letters of what is held back, at the epoch's end.

        Raises TooManyDeadLetters if no entry of the epoch could be read.
        """
        if not self._held:
            return
        if is_alone and not self._readable.is_set() and self._is_nothing_done(manifest):
            raise self._hopeless(f"none of the {len(self._held)} entries")
        self._add_held()

    def _is_nothing_done(self, manifest: Manifest) -> bool:
        missing = uncovered(self._claim.client, self._claim.stream, manifest, self._claim.who.group)
        return bool(manifest.samples) and sum(hi - lo for _, lo, hi in missing) == manifest.samples

    def _add_held(self) -> None:
        while self._held:
            bad = self._held[0]
            self.add_now(bad.manifest, bad.partition, bad.entry_id, bad.reason)
            del self._held[0]

    def _hopeless(self, which: str) -> TooManyDeadLetters:
        gone = [bad for bad in self._held if bad.reason.startswith(SegmentGone.__name__)]
        last, name, group = (gone or self._held)[-1], self._claim.stream.name, self._claim.who.group
        epoch = last.manifest.epoch
        drop = f"penstock bad drop {name} {epoch} [ENTRY] --group {group}"
        if gone:
            advice = (
                "files of payloads are gone or damaged, and no reader brings them back. To make the samples again: "
                f"`penstock audit {name} --repair SOURCE...`. To go on without them: `{drop}`; without ENTRY it takes "
                "all that are lost"
            )
        else:
            advice = (
                f"is this penstock of the producer's version? To go on without them: `{drop}`; without ENTRY it takes "
                "all that no producer committed"
            )
        return TooManyDeadLetters(
            f"{which} of epoch {epoch} of {name!r} could be read, one of them ({last.entry_id.decode()}): "
            f"{last.reason[:300]}. Nothing was buried, they stay pending for group {group!r}: {advice}"
        )


def crash_notice(who: Membership, entry: ClaimedEntry, header: Header | None) -> str:
    """Return the notice on an entry that was delivered often, was never acknowledged, and is delivered once more."""
    name, group = who.stream.name, who.group
    what = "" if header is None else f" (shard {header.shard} offsets {header.first}-{header.end - 1})"
    return (
        f"entry {entry.entry_id.decode()} of epoch {entry.epoch}{what} was given out {entry.deliveries} times to group "
        f"{group!r} and never acknowledged: does training die on it? It is handed out once more, alone and last; to go "
        f"on without it: `penstock bad drop {name} {entry.epoch} {entry.entry_id.decode()} --group {group}`"
    )
