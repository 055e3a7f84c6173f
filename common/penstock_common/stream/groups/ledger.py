"""The ledger: acknowledging by one script of ids and bit ranges, and reading which samples a group is done with.

The consumer keeps the books of ids and ranges. `uncovered` decides when an epoch closes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Arg, Client, ScriptCall, ask_all, run_script
from penstock_common.stream.entries import index_ends, index_records
from penstock_common.stream.groups.dead_notes import load_notes
from penstock_common.stream.groups.positions import done_below, kept_head, known_positions, starts_of
from penstock_common.stream.groups.roster import ORDERED, GroupRecord, find_group
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest, begun_shards
from penstock_common.stream.ranges import merge_ranges
from penstock_common.stream.streams import Stream

_ACKNOWLEDGE = load_script("acknowledge")
_DEAD_LETTER = load_script("dead_letter")

MOST_TOGETHER = 256
"""The entries that one call acknowledges at most, so that it does not hold up the server."""
LEDGERS_AT_ONCE = 64
"""The ledgers in one round trip, which are 8 MB at most."""

Ranges = Sequence[tuple[int, int]]
"""The offsets [lo, hi) of one shard."""


def acknowledge(
    client: Client, partition: PartitionKeys, manifest: Manifest, group: str, ids: Sequence[bytes],
    ranges: Mapping[int, Ranges],
) -> bool:  # fmt: skip
    """Acknowledge entries whose samples are all trained on, and set the samples' bits. It may be repeated.

    False if the epoch is no longer live: then nothing is written.
    """
    due = Acknowledgement(partition, manifest, group, list(ids), {shard: [*spans] for shard, spans in ranges.items()})
    return bool(run_script(client, *due.call()) >= 0)


@dataclass(slots=True)
class Acknowledgement:
    """Entries and samples of one partition of one epoch that one call of a script acknowledges."""

    partition: PartitionKeys
    manifest: Manifest
    group: str
    ids: list[bytes]
    """The entries whose last samples it acknowledges."""
    ranges: dict[int, list[tuple[int, int]]]
    """Shard -> offsets [lo, hi)."""

    def add(self, other: object) -> bool:
        """Take over what another one acknowledges. Return False if one call cannot do both."""
        if not isinstance(other, Acknowledgement) or len(self.ids) >= MOST_TOGETHER:
            return False
        if (other.partition, other.manifest.epoch) != (self.partition, self.manifest.epoch):
            return False
        self.ids += other.ids
        for shard, spans in other.ranges.items():
            self.ranges.setdefault(shard, []).extend(spans)
        return True

    def call(self) -> ScriptCall:
        """Return the call. It may be sent twice."""
        epoch = self.manifest.epoch
        keys = [self.partition.state(epoch), self.partition.entries(epoch)]
        args: list[Arg] = [self.manifest.live_state, self.group, len(self.ids), *self.ids]
        for shard, found in self.ranges.items():
            spans = found if len(found) == 1 else merge_ranges(found, gap=0)
            keys.append(self.partition.ledger(epoch, self.group, shard))
            args.append(len(spans))
            for lo, hi in spans:
                args += [lo, hi]
        return ScriptCall(_ACKNOWLEDGE, keys, args)


def add_dead_letter(
    client: Client, partition: PartitionKeys, manifest: Manifest, group: str, entry_id: bytes, reason: str
) -> bool:
    """Make an entry a dead letter of this group: it is acknowledged, and its id is kept with the reason."""
    epoch = manifest.epoch
    keys = [partition.state(epoch), partition.entries(epoch), partition.dead(epoch, group)]
    return bool(run_script(client, _DEAD_LETTER, keys, [manifest.live_state, group, entry_id, reason]) >= 0)


def done_bits(
    client: Client, partition: PartitionKeys, epoch: int, group: str, shard: int, lo: int, hi: int
) -> NDArray[np.bool_]:
    """Return for each offset of [lo, hi) whether the group has acknowledged it."""
    return _bits(client.getrange(partition.ledger(epoch, group, shard), lo // 8, hi // 8), lo, hi)


def whole_ledgers(
    client: Client, partition: PartitionKeys, epoch: int, group: str, lengths: Mapping[int, int]
) -> dict[int, tuple[NDArray[np.bool_], int]]:
    """Return shard -> (for each of its first offsets whether it is acknowledged, the bytes of its ledger)."""
    found: dict[int, tuple[NDArray[np.bool_], int]] = {}
    shards = list(lengths)
    for begin in range(0, len(shards), LEDGERS_AT_ONCE):
        some = shards[begin : begin + LEDGERS_AT_ONCE]
        keys = {shard: partition.ledger(epoch, group, shard) for shard in some}
        raws = ask_all(client, [("GETRANGE", key, 0, lengths[shard] // 8) for shard, key in keys.items()])
        sizes = ask_all(client, [("STRLEN", key) for key in keys.values()])
        found |= {
            shard: (_bits(raw, 0, lengths[shard]), nbytes) for shard, raw, nbytes in zip(some, raws, sizes, strict=True)
        }
    return found


def _bits(raw: bytes, lo: int, hi: int) -> NDArray[np.bool_]:
    """Return the bits in a ledger's bytes, which begin at offset ``lo``. Missing bits are not set."""
    bits = np.unpackbits(np.frombuffer(raw, dtype=np.uint8)).astype(bool)  # count= of an empty array gives random bits
    known = bits[lo % 8 : lo % 8 + hi - lo]
    return np.pad(known, (0, hi - lo - len(known)))


def group_bits(
    client: Client, stream: Stream, manifest: Manifest, group: str, record: GroupRecord, shard: int, lo: int, hi: int,
    *, may_go: bool = False,
) -> NDArray[np.bool_]:  # fmt: skip
    """Return for each offset of [lo, hi) whether the group is done with it.

    The ledger says it, or the positions of an ordered group.

    ``may_go`` leaves out samples that are acknowledged and still needed: an ordered group fills an epoch's end from its
    start.
    """
    return bits_of_shards(client, stream, manifest, group, record, {shard: (lo, hi)}, may_go=may_go)[shard]


def bits_of_shards(
    client: Client, stream: Stream, manifest: Manifest, group: str, record: GroupRecord,
    spans: Mapping[int, tuple[int, int]], *, may_go: bool,
) -> dict[int, NDArray[np.bool_]]:  # fmt: skip
    """Return shard -> the same for its [lo, hi) in ``spans``, in one round trip."""
    epoch = manifest.epoch
    if record.kind != ORDERED:
        keys = [stream.partition_of(shard).ledger(epoch, group, shard) for shard in spans]
        parts = zip(keys, spans.values(), strict=True)
        replies = ask_all(client, [("GETRANGE", key, lo // 8, hi // 8) for key, (lo, hi) in parts])
        return {shard: _bits(raw, lo, hi) for (shard, (lo, hi)), raw in zip(spans.items(), replies, strict=True)}
    minimum = known_positions(client, stream, epoch, group).minimum(record.world)
    starts = starts_of(manifest, range(max(spans, default=-1) + 1))
    found = {shard: done_below(minimum, starts.get(shard), lo, hi) for shard, (lo, hi) in spans.items()}
    if may_go and (manifest.samples is None or minimum < manifest.samples):
        for shard, (lo, hi) in spans.items():
            found[shard] &= ~done_below(kept_head(record), starts.get(shard), lo, hi)
    return found


def dead_letters(client: Client, partition: PartitionKeys, epoch: int, group: str) -> dict[bytes, str]:
    """Return entry id -> reason. What an operator gave up is left out, because its bits are set."""
    notes = load_notes(client, partition, epoch, group)
    return {entry_id: note.why for entry_id, note in notes.items() if not note.given_up}


def uncovered(client: Client, stream: Stream, manifest: Manifest, group: str) -> list[tuple[int, int, int]]:
    """Return (shard, lo, hi) of each range of the epoch that is neither acknowledged, nor dead, nor quarantined."""
    missing: list[tuple[int, int, int]] = []
    dead = {p.number: dead_letters(client, p, manifest.epoch, group) for p in stream.partitions}
    known = find_group(client, stream.partitions[0], group)
    if known is not None and known.kind == ORDERED:
        minimum = known_positions(client, stream, manifest.epoch, group).minimum(known.world)
        ends = {shard: (at, manifest.shard_size(shard)) for shard, at in starts_of(manifest, manifest.shards()).items()}
        return [(shard, max(minimum - at, 0), size) for shard, (at, size) in ends.items() if minimum < at + size]
    counts = _bit_counts(client, stream, manifest.epoch, group, manifest.shards())
    # bits lie inside the manifest, so as many bits as samples are all of them
    left = [shard for shard in manifest.shards() if counts[shard] != manifest.shard_size(shard)]
    committed = index_ends(client, stream, manifest.epoch, left)
    for shard in left:
        size = manifest.shard_size(shard)
        if not counts[shard] and not committed[shard]:
            missing.append((shard, 0, size))
            continue
        partition = stream.partition_of(shard)
        done = done_bits(client, partition, manifest.epoch, group, shard, 0, size)
        for record in index_records(client, partition, manifest.epoch, shard):
            done[list(record.holes)] = True
            if record.entry_id in dead[partition.number]:
                done[record.first : record.end] = True
        missing += [(shard, lo, hi) for lo, hi in runs(np.flatnonzero(~done))]
    return missing


def unacknowledged_samples(
    client: Client, stream: Stream, manifest: Manifest, groups: Mapping[str, GroupRecord]
) -> dict[str, int]:
    """Return group -> samples of the epoch that are committed and not acknowledged, with the bad ones."""
    shards = begun_shards(client, stream, manifest)
    found = {}
    for group, record in groups.items():
        if record.kind == ORDERED:
            found[group] = sum(hi - lo for _, lo, hi in behind(client, stream, manifest, group, record))
        else:
            done = _bit_counts(client, stream, manifest.epoch, group, shards)  # first, so that no bit is too new
            ends = index_ends(client, stream, manifest.epoch, shards)
            found[group] = sum(ends.values()) - sum(done.values())
    return found


def behind(
    client: Client, stream: Stream, manifest: Manifest, group: str, record: GroupRecord
) -> list[tuple[int, int, int]]:
    """Return (shard, lo, hi) of what is committed and an ordered group has not acknowledged."""
    shards = begun_shards(client, stream, manifest)
    minimum = known_positions(client, stream, manifest.epoch, group).minimum(record.world)
    starts = starts_of(manifest, shards)
    found = []
    for shard, end in index_ends(client, stream, manifest.epoch, shards).items():
        lo = min(max(minimum - starts[shard], 0), end) if shard in starts else 0
        found += [(shard, lo, end)] if lo < end else []
    return found


def _bit_counts(client: Client, stream: Stream, epoch: int, group: str, shards: Sequence[int]) -> dict[int, int]:
    """Return shard -> number of its samples that a shared group has acknowledged."""
    commands = [("BITCOUNT", stream.partition_of(shard).ledger(epoch, group, shard)) for shard in shards]
    return dict(zip(shards, ask_all(client, commands), strict=True))


def runs(offsets: NDArray[np.integer] | Iterable[int]) -> list[tuple[int, int]]:
    """Return rising offsets as ranges [lo, hi)."""
    rising = np.asarray(offsets, dtype=np.int64)
    if not len(rising):
        return []
    breaks = np.flatnonzero(np.diff(rising) != 1) + 1
    starts = rising[np.concatenate([[0], breaks])].tolist()
    ends = rising[np.concatenate([breaks - 1, [len(rising) - 1]])].tolist()
    return [(lo, hi + 1) for lo, hi in zip(starts, ends, strict=True)]
