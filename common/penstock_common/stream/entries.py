"""Entries and shard indexes: the commands that commit, read, claim and list entries.

A commit is one transaction: MULTI, XADD, a script that sees ids only, EXEC. The script refuses a block that is not the
next one (decision 21).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from redis.exceptions import OutOfMemoryError, ResponseError

from penstock_common.errors import PenstockError
from penstock_common.printable import listed, readable_span
from penstock_common.server.channel import Command, Reply
from penstock_common.server.error_translation import translate_reply
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import (
    Arg,
    Client,
    EntryId,
    ask_all,
    is_script_error,
    parse_id,
    read_by_script,
    readable,
    run_script,
    server_ms,
)
from penstock_common.stream.keys import LAST, RELEASED, PartitionKeys
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.streams import Stream
from penstock_common.wire.block import Block
from penstock_common.wire.codec import Fields
from penstock_common.wire.limits import MAX_HEADER_BYTES, MAX_NUMBER, MAX_SHARD_SAMPLES

_CLAIM_ENTRY = load_script("claim_entry")
_TRIM = load_script("trim")
_DESCRIBE_ENTRY = load_script("describe_entry")
_READ_HEADERS = load_script("read_headers")

_COMMIT = load_script("commit").encode()
"""The script is sent in full: a digest that the server forgot would fail in EXEC and leave an unindexed entry."""
FIRST_PAGE, PAGE = 32, 1000
"""Index records in the first page and in the largest one. A page doubles, because many callers need few records."""
SHARDS_AT_ONCE = 64
"""The shards in one question about how far their indexes go."""
PAGE_BYTES = 4 << 20
"""The payload that the server reads for one page of entries, so that it answers others every few milliseconds."""
MOST_AGES = 10
"""The most shards in a sentence on when they were written."""
PENDING_PAGE = 10_000
"""Pending entries in one page. A member with tiny entries and a long queue holds many more."""


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """The index record of a committed block."""

    end: int
    entry_id: bytes
    """Empty if every sample of the block was bad, since nothing was appended."""
    first: int
    count: int
    nbytes: int
    holes: tuple[int, ...]
    segment: str = ""
    """The segment that holds the payload; '' where the entry holds it."""
    writer: str = ""
    """The token of the feed writer that committed it; '' in a planned or numbered epoch."""


def is_believable(record: IndexRecord) -> bool:
    """Return whether a producer may have written the record: its offsets and holes are possible ones."""
    is_inside = 0 <= record.first < record.end <= MAX_SHARD_SAMPLES
    return is_inside and all(record.first <= hole < record.end for hole in record.holes)


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """A shard's progress as its writer finds it: the end, whether it may be written, and the bytes held."""

    end: int
    """All offsets below it are committed."""
    state: bytes
    """The epoch's state in this partition."""
    held_bytes: int
    """The payload bytes that the partition holds."""
    writer: str | None = None
    """The token in the shard's newest record; None while the shard has no record."""


def look_commands(partition: PartitionKeys, epoch: int, shard: int) -> list[Command]:
    """Return commands that read a shard's progress. `read_look` takes their three replies."""
    return [
        (b"XREVRANGE", partition.index(epoch, shard).encode(), b"+", b"-", b"COUNT", b"1"),
        (b"GET", partition.state(epoch).encode()),
        (b"HGET", partition.roster.encode(), b"bytes"),
    ]


@readable(lambda replies, where, partition, epoch, shard: f"{partition.index(epoch, shard)} or {partition.roster}")
def read_look(
    replies: Sequence[Reply], where: Client, partition: PartitionKeys, epoch: int, shard: int
) -> ShardProgress:
    """Return the progress in the replies to `look_commands`. Raises the first error among them."""
    raise_errors(replies, where, commit_keys(partition, epoch, shard))
    newest, state, held = cast("tuple[list[Any], bytes | None, bytes | None]", tuple(replies))
    end, writer = (_end_of(newest[0][0]), _writer_of(newest[0][1])) if newest else (0, None)
    return ShardProgress(end, state or b"", int(held or 0), writer)


def _writer_of(fields: Sequence[bytes]) -> str:
    """Return the token in a record's fields, names and values in turn, as a channel delivers them."""
    return next((fields[at + 1].decode(errors="replace") for at in range(0, len(fields), 2) if fields[at] == b"w"), "")


@readable(lambda answer, block, live_state, writer="", roster="a roster": roster)
def read_commit(
    answer: Reply, block: Block, live_state: str, writer: str = "", roster: str = "a roster"
) -> tuple[bool, ShardProgress]:
    """Return, from the reply of a commit's script, whether the block is committed, and the shard's progress."""
    match answer:
        case int():
            return True, ShardProgress(block.end, live_state.encode(), answer, writer)
        case [bytes() as at, bytes() as state, bytes() as held, bytes() as newest]:
            end = _end_of(at)
            return False, ShardProgress(end, state, int(held), newest.decode(errors="replace") if end else None)
    raise PenstockError(f"the script of a commit answered {answer!r:.80}")


def raise_errors(replies: Iterable[Reply], where: Client, keys: Sequence[str | bytes] = ()) -> None:
    """Raise the first error among replies.

    Args:
        replies: The replies of some commands.
        where: The client of the servers.
        keys: The keys of the commands. The server that holds the first one sent the replies.

    Raises:
        ServerUnavailable: The error may pass, as on a read-only replica.
        DamagedKey: One of the keys holds something that Penstock did not write.
        ReplyError: Any other error.
    """
    for reply in replies:
        if isinstance(reply, ResponseError):
            node = where.node_of(keys[0]) if keys else where
            raise where.explain_refusal(reply, keys) or translate_reply(reply, node)


def is_out_of_memory(reply: Reply) -> bool:
    """Return whether the server refused a command at its maxmemory."""
    return isinstance(reply, ResponseError) and ("OOM" in str(reply) or isinstance(reply, OutOfMemoryError))


def is_sealed(reply: Reply) -> bool:
    """Return whether a commit was refused because its segment was sealed: its writer was taken for dead."""
    return isinstance(reply, ResponseError) and is_script_error(reply, "its segment is sealed")


def is_gone(error: ResponseError) -> bool:
    """Return whether a command failed because the epoch was released or the group dropped."""
    return "NOGROUP" in str(error) or "no such key" in str(error)


def _end_of(record_id: bytes) -> int:
    return int(record_id.partition(b"-")[0])


def commit_commands(
    keys: Sequence[bytes],
    manifest: Manifest,
    shard: int,
    block: Block,
    fields: Fields,
    *,
    bad: Mapping[int, str] | None = None,
    nbytes: int | None = None,
    segment: str = "",
    writer: str = "",
) -> list[Command]:
    """Return the commands that commit one block. `read_commit` takes the script's reply, the last of EXEC's.

    A block of holes only is the script alone: it appends no entry, and at maxmemory a MULTI is refused.

    Args:
        keys: The keys of the shard, as `commit_keys` returns them.
        manifest: The manifest of the epoch.
        shard: The number of the shard.
        block: The block.
        fields: The fields of the entry; none for a block of holes only.
        bad: JSON on the block's holes.
        nbytes: The payload bytes as stored; None for those of the block, which is not compressed.
        segment: The segment that holds the payload, which this registers; '' where the entry holds it.
        writer: The token of a feed's writer. The block is refused if the shard's newest record has another token.
    """
    keys = keys[: 6 if segment else 5]
    holes = json.dumps(block.holes, separators=(",", ":")) if block.holes else "[]"
    stored = block.nbytes if nbytes is None else nbytes
    numbers = b"%d %d %d %d %d" % (manifest.epoch, block.end, block.first, block.count, stored)
    noted = [text.encode() for offset, why in (bad or {}).items() for text in (f"{shard}:{offset}", why)]
    args = [manifest.live_state.encode(), *numbers.split(), holes.encode(), segment.encode(), writer.encode(), *noted]
    script = (b"EVAL", _COMMIT, b"%d" % len(keys), *keys, *args)
    if not fields:
        return [script]
    appended = [part for field in fields for part in field]
    return [(b"MULTI",), (b"XADD", keys[0], b"NOMKSTREAM", b"*", *appended), script, (b"EXEC",)]


def commit_keys(partition: PartitionKeys, epoch: int, shard: int) -> tuple[bytes, ...]:
    """Return the keys that a commit reads or writes."""
    keys = (partition.entries(epoch), partition.index(epoch, shard), partition.roster, partition.state(epoch),
            partition.quarantine(epoch), partition.segments(epoch))  # fmt: skip
    return tuple([key.encode() for key in keys])


def index_records(
    client: Client, partition: PartitionKeys, epoch: int, shard: int, after: int = 0, upto: int | None = None
) -> Iterator[IndexRecord]:
    """Yield a shard's records that end beyond ``after`` and at most at ``upto``, by offset, read in pages.

    A repair's record replaces those that it overrides.
    """
    key, last = partition.index(epoch, shard), "+" if upto is None else f"{upto}-0"
    begin = f"({after}-0" if after else "-"
    # in one round trip: a caller that follows a shard asks often, and mostly for a few
    found, page = ask_all(
        client,
        [("XRANGE", partition.repairs(epoch, shard), "-", "+"), ("XRANGE", key, begin, last, "COUNT", FIRST_PAGE)],
    )
    if not found:
        yield from _base_records(client, key, page, FIRST_PAGE, last)
        return
    repairs = [repair_record(fields, partition.repairs(epoch, shard)) for _, fields in found]
    for record in overridden(_base_records(client, key, client.xrange(key, count=PAGE), PAGE, "+"), repairs):
        if record.end > after and (upto is None or record.end <= upto):
            yield record


Page = list[tuple[bytes, dict[bytes, bytes]]]


def _base_records(client: Client, key: str, page: Page, size: int, last: str) -> Iterator[IndexRecord]:
    """Yield the records of a first page of ``size`` records, and of the pages after it up to an id."""
    while True:
        for record_id, fields in page:
            yield index_record(record_id, fields, key)
        if len(page) < size:
            return
        size = min(2 * size, PAGE)
        page = client.xrange(key, min=f"({page[-1][0].decode()}", max=last, count=size)


def overridden(records: Iterable[IndexRecord], repairs: Iterable[IndexRecord]) -> list[IndexRecord]:
    """Return the valid records by offset: a repair replaces every earlier record that it overlaps."""
    standing = list(records)
    for repair in repairs:
        standing = [record for record in standing if record.end <= repair.first or repair.end <= record.first]
        standing.append(repair)
    return sorted(standing, key=lambda record: record.first)


def repair_record(fields: dict[bytes, bytes], key: str) -> IndexRecord:
    """Return a record of the repairs key. Its end is computed, because its id has no meaning."""
    record = index_record(b"0-0", fields, key)
    return replace(record, end=record.first + record.count + len(record.holes))


@readable(lambda record_id, fields, key="a shard's index": f"record {record_id!a} of {key}")
def index_record(record_id: bytes, fields: dict[bytes, bytes], key: str = "a shard's index") -> IndexRecord:
    """Return a record of a shard's index. Raises DamagedKey, which names ``key``, if no producer wrote it."""
    if entry_id := fields[b"e"]:
        parse_id(entry_id)  # raises ValueError if it is not an id
    holes = () if fields[b"h"] == b"[]" else tuple(json.loads(fields[b"h"]))
    numbers = int(fields[b"f"]), int(fields[b"n"]), int(fields[b"b"])
    if not all(type(hole) is int for hole in holes) or max(map(abs, (*numbers, *holes))) > MAX_NUMBER:
        raise ValueError(f"numbers are {numbers}, holes {str(holes)[:40]}: none that a producer writes")
    first, count, nbytes = numbers
    return IndexRecord(
        end=_end_of(record_id),
        entry_id=entry_id,
        first=first,
        count=count,
        nbytes=nbytes,
        holes=holes,
        segment=fields.get(b"s", b"").decode(),
        writer=fields.get(b"w", b"").decode(),
    )


def indexed_ids(client: Client, partition: PartitionKeys, epoch: int, shard: int, after: int = 0) -> set[bytes]:
    """Return the ids of the entries that a shard's index names beyond an offset, repaired or not."""
    key = partition.index(epoch, shard)
    first_page = ("XRANGE", key, f"({after}-0", "+", "COUNT", FIRST_PAGE)
    repairs, page = ask_all(client, [("XRANGE", partition.repairs(epoch, shard), "-", "+"), first_page])
    repaired = {fields[b"e"] for _, fields in repairs}
    return repaired | {record.entry_id for record in _base_records(client, key, page, FIRST_PAGE, "+")}


def is_indexed(
    client: Client, partition: PartitionKeys, epoch: int, shard: int, end: int, entry_id: bytes
) -> bool:  # fmt: skip
    """Return whether the index record at ``end``, or one of the shard's repairs, names an entry."""
    at_end = ("XRANGE", partition.index(epoch, shard), f"{end}-0", f"{end}-0")
    found, repairs = ask_all(client, [at_end, ("XRANGE", partition.repairs(epoch, shard), "-", "+")])
    return any(fields.get(b"e") == entry_id for _, fields in (*found, *repairs))


def read_index_page(reply: Reply) -> list[IndexRecord]:
    """Return the records in the answer of ``read_index.lua``. Raises DamagedKey for one that no producer wrote."""
    page: list[tuple[str, list[str]]] = json.loads(cast("bytes", reply).decode("latin-1")) or []
    records = ((record_id, [part.encode("latin-1") for part in fields]) for record_id, fields in page)
    return [index_record(at.encode(), dict(zip(fields[::2], fields[1::2], strict=True))) for at, fields in records]


def index_ends(client: Client, stream: Stream, epoch: int, shards: Iterable[int]) -> dict[int, int]:
    """Return shard -> number of committed offsets, in one round trip."""
    return {shard: end for shard, (end, _) in index_heads(client, stream, epoch, shards).items()}


def index_heads(client: Client, stream: Stream, epoch: int, shards: Iterable[int]) -> dict[int, tuple[int, str]]:
    """Return shard -> (number of committed offsets, token of the last feed writer), in one round trip."""
    keys = {shard: stream.partition_of(shard).index(epoch, shard) for shard in shards}
    return {
        shard: (_end_of(found[0][0]), found[0][1].get(b"w", b"").decode()) if found else (0, "")
        for shard, found in zip(keys, _newest_records(client, keys.values()), strict=True)
    }


def _newest_records(client: Client, keys: Iterable[str]) -> list[Page]:
    """Return the newest record of each index, as a page that is empty for an index without records."""
    return ask_all(client, [("XREVRANGE", key, "+", "-", "COUNT", 1) for key in keys])


def shard_ages(client: Client, stream: Stream, epoch: int, shards: Iterable[int]) -> dict[int, int | None]:
    """Return shard -> ms since its newest entry, by its server's clock, the newest first. None is a shard without."""
    wanted = {shard: stream.partition_of(shard) for shard in shards}
    keys = {shard: partition.index(epoch, shard) for shard, partition in wanted.items()}
    replies = _newest_records(client, keys.values())
    now = {partition.number: server_ms(client, partition.roster) for partition in wanted.values()}
    ages: dict[int, int | None] = dict.fromkeys(wanted)
    for shard, found in zip(wanted, replies, strict=True):
        if found and (entry_id := index_record(*found[0], keys[shard]).entry_id):
            ages[shard] = max(0, now[wanted[shard].number] - parse_id(entry_id)[0])
    return dict(sorted(ages.items(), key=lambda one: math.inf if one[1] is None else one[1]))


def said_ages(ages: Mapping[int, int | None]) -> str:
    """Return shards with the time since each was written, for people."""
    said = [
        f"{shard} ({'no sample' if age is None else f'last written {readable_span(age / 1000)} ago'})"
        for shard, age in ages.items()
    ]
    return listed(said, MOST_AGES)


def read_group_command(
    partition: PartitionKeys, epoch: int, group: str, member: str, count: int, block_ms: int | None
) -> Command:
    """Return the XREADGROUP of entries that no member was given yet. With None it does not wait."""
    waiting = (b"BLOCK", b"%d" % block_ms) if block_ms else ()
    return (
        b"XREADGROUP", b"GROUP", group.encode(), member.encode(), b"COUNT", b"%d" % count, *waiting,
        b"STREAMS", partition.entries(epoch).encode(), b">",
    )  # fmt: skip


def fetch_command(partition: PartitionKeys, epoch: int, entry_id: bytes) -> Command:
    """Return the command that reads one entry by id. It touches no group and counts as no delivery."""
    return (b"XRANGE", partition.entries(epoch).encode(), entry_id, entry_id)


def fetch_fields(client: Client, partition: PartitionKeys, epoch: int, entry_id: bytes) -> Fields | None:
    """Read the fields of one entry by id, in order, or None if it is gone. For reading single entries."""
    found: list[tuple[bytes, dict[bytes, bytes]]] = client.xrange(partition.entries(epoch), entry_id, entry_id, count=1)
    return list(found[0][1].items()) if found else None


def describe_entry(client: Client, partition: PartitionKeys, epoch: int, entry_id: Arg) -> list[Any]:
    """Return an entry's header, then name and size of each other field, or nothing if it was removed.

    No payload is sent.
    """
    found: list[Any] = read_by_script(client, _DESCRIBE_ENTRY, [partition.entries(epoch)], [entry_id, MAX_HEADER_BYTES])
    return found


def read_headers(client: Client, partition: PartitionKeys, epoch: int, ids: Iterable[bytes]) -> list[bytes]:
    """Return the header of each entry, or b"" for one that was removed."""
    found: list[bytes] = read_by_script(client, _READ_HEADERS, [partition.entries(epoch)], [MAX_HEADER_BYTES, *ids])
    return found


def count_entries(client: Client, stream: Stream, epoch: int) -> int:
    """Return the entries of an epoch, committed or not. It reads lengths only."""
    return sum(ask_all(client, [("XLEN", partition.entries(epoch)) for partition in stream.partitions]))


def newest_entry(
    client: Client, partition: PartitionKeys, epoch: int, before: bytes = b""
) -> tuple[bytes, Fields] | None:
    """Return id and fields of the newest entry, or of the newest ``before`` an id, or None."""
    latest = b"(" + before if before else b"+"
    found: list[tuple[bytes, dict[bytes, bytes]]] = client.xrevrange(partition.entries(epoch), latest, "-", count=1)
    return (found[0][0], list(found[0][1].items())) if found else None


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """One delivered, unacknowledged entry of a group."""

    entry_id: bytes
    member: str
    idle_ms: int
    deliveries: int


def list_pending(client: Client, partition: PartitionKeys, epoch: int, group: str) -> list[PendingEntry]:
    """Return the pending entries of a group, oldest first."""
    return [one for _, one in _listed(client, [(partition, epoch)], group, [{}])]


Keys = tuple[PartitionKeys, int]
"""A partition and an epoch, which have one entries key."""


def pending_members(client: Client, keys: Sequence[Keys], group: str) -> dict[str, int]:
    """Return member -> number of pending entries in these keys, in one round trip."""
    commands = [("XPENDING", partition.entries(epoch), group) for partition, epoch in keys]
    replies = ask_all(client, commands, raises=False)
    held: dict[str, int] = {}
    for summary in _without_gone(replies, client):
        for consumer in summary["consumers"]:
            name = consumer["name"].decode()
            held[name] = held.get(name, 0) + int(consumer["pending"])
    return held


def list_overdue(client: Client, keys: Sequence[Keys], group: str, idle_ms: int) -> list[tuple[Keys, PendingEntry]]:
    """Return the pending entries that were not renewed for ``idle_ms``, and all that were returned.

    Another member may have to take them. While all members live the list is short, however many entries they hold.
    """
    return _listed(client, keys, group, [{"idle": idle_ms}, {"consumername": RELEASED}])


def list_held(client: Client, keys: Sequence[Keys], group: str, member: str) -> list[tuple[Keys, PendingEntry]]:
    """Return the pending entries of one member."""
    return _listed(client, keys, group, [{"consumername": member}])


def _listed(
    client: Client, keys: Sequence[Keys], group: str, filters: Sequence[dict[str, Any]]
) -> list[tuple[Keys, PendingEntry]]:
    """Return each pending entry once, in one round trip a page."""
    todo = [(key, "-", chosen) for key in keys for chosen in filters]
    listed: dict[tuple[Keys, bytes], PendingEntry] = {}
    while todo:
        with client.pipeline(transaction=False) as pipe:
            for (partition, epoch), start, chosen in todo:
                pipe.xpending_range(partition.entries(epoch), group, start, "+", PENDING_PAGE, **chosen)
            pages = [_without_gone([page], client) for page in pipe.execute(raise_on_error=False)]
        more = []
        for (key, _, chosen), page in zip(todo, pages, strict=True):
            found = [_pending(one) for one in page[0]] if page else []
            listed |= {(key, one.entry_id): one for one in found}
            if len(found) == PENDING_PAGE:
                more.append((key, f"({found[-1].entry_id.decode()}", chosen))
        todo = more
    return [(key, one) for (key, _), one in listed.items()]


def _without_gone(replies: Iterable[Any], where: Client) -> list[Any]:
    """Return the replies without those for released epochs. Raises any other error."""
    left = [reply for reply in replies if not (isinstance(reply, ResponseError) and is_gone(reply))]
    raise_errors(left, where)
    return left


def _pending(one: dict[str, Any]) -> PendingEntry:
    return PendingEntry(
        one["message_id"], one["consumer"].decode(), one["time_since_delivered"], one["times_delivered"]
    )


def claim(
    client: Client, partition: PartitionKeys, epoch: int, who: tuple[str, str], pending: PendingEntry, min_idle_ms: int,
    *, counts: bool = True,
) -> bool:  # fmt: skip
    """Claim one entry if its holder is still the one that was seen, and was idle that long.

    The caller fetches the entry by id later. With ``counts`` it is one more delivery.
    """
    args = (*who, pending.member, min_idle_ms, pending.entry_id, pending.deliveries + counts)
    return bool(run_script(client, _CLAIM_ENTRY, [partition.entries(epoch)], args))


def trim_entries(
    client: Client, partition: PartitionKeys, generation: str, epoch: int, records: Sequence[IndexRecord]
) -> int | None:
    """Remove entries that every group is done with, and return the bytes freed, or None if a group joined."""
    if not records:
        return 0
    args = [part for record in records for part in (record.entry_id, record.nbytes, record.segment)]
    keys = [partition.roster, partition.entries(epoch), partition.segments(epoch)]
    freed = int(run_script(client, _TRIM, keys, [generation, epoch, *args]))
    return freed if freed >= 0 else None


def last_given(client: Client, partition: PartitionKeys, epoch: int) -> dict[str, EntryId]:
    """Return the last entry that each group of an entries key was given. That of `LAST` is the newest entry."""
    try:
        groups = client.xinfo_groups(partition.entries(epoch))
    except ResponseError as error:
        if not is_gone(error):
            raise
        return {}
    return {info["name"].decode(): parse_id(info["last-delivered-id"]) for info in groups}


def was_given_since(client: Client, partition: PartitionKeys, epoch: int, group: str, seconds: float) -> bool:
    """Return whether a group was given the newest entry, and that was committed in the last ``seconds``."""
    last = last_given(client, partition, epoch)
    if group not in last or LAST not in last:
        return False
    return last[LAST] <= last[group] and last[LAST][0] > server_ms(client, partition.roster) - seconds * 1000


def has_unread(client: Client, partition: PartitionKeys, epoch: int, group: str) -> bool:
    """Return whether there is an entry that no member of the group was given yet.

    Ids are not enough, because a deleted entry's id remains the newest one. So this looks for an entry.
    """
    last = last_given(client, partition, epoch)
    if group not in last or LAST not in last or last[LAST] <= last[group]:
        return False
    high, low = last[group]
    return bool(client.xrange(partition.entries(epoch), f"({high}-{low}", "+", count=1))
