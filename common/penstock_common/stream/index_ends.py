"""Reading many shards' indexes at once, in pages: what is new at their ends, or backwards to what everybody has.

A single shard in order of offset is ``entries``'s (`index_records`). Repairs are left out: few, and the audit's.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock_common.stream.commands import Client
from penstock_common.stream.entries import PAGE, Record, index_record, parse_id
from penstock_common.stream.keys import PartitionKeys

FIRST_PAGE = 8
"""Records read first: most groups are hardly behind."""

Page = list[tuple[bytes, dict[bytes, bytes]]]
EntryId = tuple[int, int]


def read_on(
    client: Client, where: Mapping[int, PartitionKeys], epoch: int, ends: Mapping[int, int]
) -> dict[int, list[Record]]:
    """Shard -> its records that end beyond ``ends``, rising."""
    found: dict[int, list[Record]] = {shard: [] for shard in where}
    wanted = dict(ends)
    while wanted:
        with client.pipeline(transaction=False) as pipe:
            for shard, end in wanted.items():
                pipe.xrange(where[shard].index(epoch, shard), min=f"({end}-0" if end else "-", count=PAGE)
            pages: list[Page] = pipe.execute()
        more: dict[int, int] = {}
        for shard, page in zip(wanted, pages, strict=True):
            found[shard] += [index_record(*each) for each in page]
            if len(page) == PAGE:
                more[shard] = found[shard][-1].end
        wanted = more
    return found


def read_back(
    client: Client, where: Mapping[int, PartitionKeys], epoch: int, floors: Mapping[int, EntryId | None]
) -> dict[int, list[Record]]:
    """Shard -> its newest records, rising, back to one whose entry is not above the floor; None: the newest alone."""
    with client.pipeline(transaction=False) as pipe:
        for shard, partition in where.items():
            count = 1 if floors[shard] is None else FIRST_PAGE
            pipe.xrevrange(partition.index(epoch, shard), count=count)
        pages: list[Page] = pipe.execute()
    found: dict[int, list[Record]] = {}
    for (shard, partition), page in zip(where.items(), pages, strict=True):
        records = [index_record(*each) for each in page]
        floor, is_more = floors[shard], len(page) == FIRST_PAGE
        while floor is not None and is_more and not _reaches(records, floor):
            older: Page = client.xrevrange(partition.index(epoch, shard), max=f"({records[-1].end}-0", count=PAGE)
            records += [index_record(*each) for each in older]
            is_more = len(older) == PAGE
        found[shard] = records[::-1]
    return found


def _reaches(records: list[Record], floor: EntryId) -> bool:
    return any(record.entry_id and parse_id(record.entry_id) <= floor for record in records[-FIRST_PAGE:])
