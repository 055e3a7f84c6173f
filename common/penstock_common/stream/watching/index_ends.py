"""The ends of many shards' indexes, read at once in pages: what is new, or backwards to what all groups have.

`entries.index_records` reads a single shard in order of offset. Repairs are left out: there are few, and the audit
reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from penstock_common.stream.commands import Client
from penstock_common.stream.entries import PAGE, Record, index_record, parse_id
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest

FIRST_PAGE = 8
"""The records that are read first, because most groups are hardly behind."""

LOOK_BACK: Final = 4
"""The records of each shard that tell when it was written last. The newest may hold bad samples alone."""
AHEAD: Final = 32
"""The shards after the last begun one that are read each time. Jobs begin them about in order."""
ALL_EACH: Final = 15
"""Each so many looks read all shards that are not complete, in whatever order they were begun."""

Page = list[tuple[bytes, dict[bytes, bytes]]]
EntryId = tuple[int, int]


def due_shards(manifest: Manifest, begun: Iterable[int], ends: Mapping[int, int], looks: int) -> list[int]:
    """Return the shards that may have more than was seen up to ``ends``, at this look. Pure."""
    due = [shard for shard in begun if shard not in ends or ends[shard] < manifest.shard_size(shard)]
    if not ends or looks % ALL_EACH == 0 or manifest.sizes is None:
        return due
    last = max((shard for shard, end in ends.items() if end), default=-1)
    return [shard for shard in due if shard <= last + AHEAD]


def newest_records(
    client: Client, where: Mapping[int, PartitionKeys], epoch: int, count: int
) -> list[tuple[int, Record]]:
    """Return (shard, record) of the newest blocks of these shards that have an entry, oldest first."""
    latest: dict[int, EntryId] = {}
    for shard, record in _written(client, where, epoch, list(where), LOOK_BACK):
        latest[shard] = max(latest.get(shard, (0, 0)), parse_id(record.entry_id))
    last = sorted(latest, key=lambda shard: latest[shard])[-count:]  # the newest ones are among these
    found = _written(client, where, epoch, last, count)
    return sorted(found, key=lambda one: parse_id(one[1].entry_id))[-count:]


def _written(
    client: Client, where: Mapping[int, PartitionKeys], epoch: int, shards: list[int], each: int
) -> list[tuple[int, Record]]:
    """Return of each shard so many records from its end, those that have an entry."""
    if not shards:
        return []
    with client.pipeline(transaction=False) as pipe:
        for shard in shards:
            pipe.xrevrange(where[shard].index(epoch, shard), count=each)
        pages: list[Page] = pipe.execute()
    found = [
        (shard, index_record(*one, where[shard].index(epoch, shard)))
        for shard, page in zip(shards, pages, strict=True)
        for one in page
    ]
    return [one for one in found if one[1].entry_id]


def read_on(
    client: Client, where: Mapping[int, PartitionKeys], epoch: int, ends: Mapping[int, int]
) -> dict[int, list[Record]]:
    """Return shard -> its records that end beyond ``ends``, rising."""
    found: dict[int, list[Record]] = {shard: [] for shard in where}
    wanted = dict(ends)
    while wanted:
        with client.pipeline(transaction=False) as pipe:
            for shard, end in wanted.items():
                pipe.xrange(where[shard].index(epoch, shard), min=f"({end}-0" if end else "-", count=PAGE)
            pages: list[Page] = pipe.execute()
        more: dict[int, int] = {}
        for shard, page in zip(wanted, pages, strict=True):
            found[shard] += [index_record(*each, where[shard].index(epoch, shard)) for each in page]
            if len(page) == PAGE:
                more[shard] = found[shard][-1].end
        wanted = more
    return found


def read_back(
    client: Client, where: Mapping[int, PartitionKeys], epoch: int, floors: Mapping[int, EntryId | None]
) -> dict[int, list[Record]]:
    """Return shard -> its newest records, rising.

    They go back to one whose entry is not above the floor. None asks for the newest record alone.
    """
    with client.pipeline(transaction=False) as pipe:
        for shard, partition in where.items():
            count = 1 if floors[shard] is None else FIRST_PAGE
            pipe.xrevrange(partition.index(epoch, shard), count=count)
        pages: list[Page] = pipe.execute()
    found: dict[int, list[Record]] = {}
    for (shard, partition), page in zip(where.items(), pages, strict=True):
        key = partition.index(epoch, shard)
        records = [index_record(*each, key) for each in page]
        floor, is_more = floors[shard], len(page) == FIRST_PAGE
        while floor is not None and is_more and not _reaches(records, floor):
            older: Page = client.xrevrange(key, max=f"({records[-1].end}-0", count=PAGE)
            records += [index_record(*each, key) for each in older]
            is_more = len(older) == PAGE
        found[shard] = records[::-1]
    return found


def _reaches(records: list[Record], floor: EntryId) -> bool:
    return any(record.entry_id and parse_id(record.entry_id) <= floor for record in records[-FIRST_PAGE:])
