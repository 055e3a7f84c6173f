"""The check of a shard before it is declared complete: its index holds what its writers committed, and no more.

A writer trusts the newest record. A forged one would make it skip samples and complete the shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock_common.errors import BadEntry
from penstock_common.server.channel import Channel
from penstock_common.server.scripts import load_script
from penstock_common.stream.entries import (
    PAGE,
    PAGE_BYTES,
    IndexRecord,
    raise_errors,
    read_headers,
    read_index_page,
)
from penstock_common.stream.groups.ledger import dead_letters, group_bits
from penstock_common.stream.groups.roster import load_roster
from penstock_common.wire.header import parse_header
from penstock_producer.write.target import ShardTarget

_READ_INDEX = load_script("read_index").encode()


def read_index(channel: Channel, target: ShardTarget) -> list[IndexRecord]:
    """Return all records of a shard's index, without repairs, by a channel with nothing under way."""
    key, records = target.partition.index(target.epoch, target.number).encode(), list[IndexRecord]()
    while True:
        after = b"(%d-0" % records[-1].end if records else b"-"
        channel.send([(b"EVAL", _READ_INDEX, b"1", key, after, b"%d" % PAGE)])
        reply = channel.read()
        raise_errors([reply], target.client, [key])
        page = read_index_page(reply)
        records += page
        if len(page) < PAGE:
            return records


def first_fault(records: Iterable[IndexRecord], end: int, token: str) -> str:
    """Describe what is wrong with the records of a shard that its writer committed up to ``end``. Returns '' if nothing
    is.
    """
    at = 0
    for record in records:
        name = f"the record {record.end}-0"
        if record.writer != token:
            return f"{name} is another writer's"
        counted = record.first + record.count + len(record.holes)
        is_inside = all(record.first <= hole < record.end for hole in record.holes)
        if record.first != at or counted != record.end or not is_inside or bool(record.entry_id) != (record.count > 0):
            return f"{name} does not follow the offset {at}"
        at = record.end
    return "" if at == end else f"it ends at the offset {at}, and this writer at {end}"


def find_forged(target: ShardTarget, records: Sequence[IndexRecord]) -> IndexRecord | None:
    """Return the first record whose entry is missing or is another block's, or None if all are as a producer writes
    them.

    An entry that retention removed is not forged. Its epoch is marked as trimmed, and every group for which data is
    held has acknowledged it.
    """
    named = [record for record in records if record.entry_id]
    some = max(1, min(PAGE, PAGE_BYTES // max(1, target.stream.block_bytes)))
    for begin in range(0, len(named), some):
        page = named[begin : begin + some]
        ids = [record.entry_id for record in page]
        headers = read_headers(target.client, target.partition, target.epoch, ids)
        for record, meta in zip(page, headers, strict=True):
            is_right = _is_of(meta, target, record) if meta else False
            if not is_right and (meta or not _is_trimmed(target, record)):
                return record
    return None


def _is_of(meta: bytes, target: ShardTarget, record: IndexRecord) -> bool:
    """Return True if an entry's header agrees with its record."""
    try:
        header = parse_header(meta, target.stream.require_spec(), takes_refs=True)
    except BadEntry:
        return False
    said = header.stream, header.epoch, header.shard, header.first, header.end, header.holes
    return said == (target.stream.id, target.epoch, target.number, record.first, record.end, record.holes)


def _is_trimmed(target: ShardTarget, record: IndexRecord) -> bool:
    """Return True if retention may have removed the entry: it marks the epoch first."""
    client, partition, manifest = target.client, target.partition, target.manifest
    roster = load_roster(client, partition)
    if target.epoch not in roster.trimmed:
        return False
    for name, group in roster.groups.items():
        if not group.holds or group.first > target.epoch:
            continue
        if record.entry_id in dead_letters(client, partition, target.epoch, name):
            continue
        bits = group_bits(client, target.stream, manifest, name, group, target.number, record.first, record.end)
        bits[[hole - record.first for hole in record.holes]] = True
        if not bits.all():
            return False
    return True
