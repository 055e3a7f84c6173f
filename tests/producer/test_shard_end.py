"""A shard's end: its writer looks once whether the index holds what was committed, before it declares it complete."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import DamagedKey, ShardMismatch
from penstock_common.server.connection import open_channel
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import IndexRecord, index_records
from penstock_common.stream.groups.ledger import add_dead_letter
from penstock_common.stream.manifest import Manifest, load_manifest
from penstock_consumer.read.hooks import hooks_of
from penstock_producer.write import commit, completion
from penstock_producer.write.completion import find_forged, first_fault
from penstock_producer.write.shard import ShardWriter
from penstock_producer.write.target import ShardTarget
from tests.contracts.feed import SAMPLE_BYTES, SPEC, loader_of, open_stream, replayed, sample, writer_of

QUIET: dict[str, Any] = {"spec": SPEC, "block_bytes": 4 * SAMPLE_BYTES}
SIZE = 40


def fill(shard: ShardWriter, upto: int) -> None:
    """Writes the numbered samples from where the shard stands."""
    while shard.position < upto:
        shard.write(sample(shard.position))


def forge(client: Client, end: int, **fields: Any) -> None:
    """Appends a record to the index of shard 0, as no producer does."""
    record = {"e": "1-1", "f": 8, "n": end - 8, "b": 100, "h": "[]", **fields}
    client.xadd(open_stream(client, "t").partitions[0].index(0, 0), record, id=f"{end}-0")


def first_entry(client: Client) -> str:
    """The id of an entry that is there."""
    found: Any = client.xrange(open_stream(client, "t").partitions[0].entries(0), count=1)
    return str(found[0][0].decode())


@pytest.mark.parametrize(
    ("forged", "told"),
    [
        ({"e": "1-1"}, "24-0 names an entry that is not its own"),
        ({"e": "first"}, "24-0 names an entry that is not its own"),
        ({"f": 10, "n": 14}, "24-0 does not follow the offset 8"),
        ({"n": 3}, "24-0 does not follow the offset 8"),
        ({"n": 12, "h": "[1, 2, 3, 4]"}, "24-0 does not follow the offset 8"),
        ({"e": ""}, "24-0 does not follow the offset 8"),
    ],
)
def test_a_forged_record_does_not_make_a_writer_skip_samples_and_end_well(
    any_url: str, any_client: Client, forged: dict[str, Any], told: str
) -> None:
    """The writer goes on behind the newest record: 16 samples were in no entry, and the shard was complete."""
    with (
        writer_of(any_url, **QUIET) as writer,
        pytest.raises(ShardMismatch, match=told),
        writer.epoch(0, sizes=[SIZE]).shard(0) as shard,
    ):
        fill(shard, 8)
        shard.commit_all()
        entry = first_entry(any_client) if forged.get("e") == "first" else forged.get("e", "1-1")
        forge(any_client, 24, **{**forged, "e": entry})
        fill(shard, SIZE)
    assert load_manifest(any_client, open_stream(any_client, "t"), 0).state == "sized"


def test_a_forged_record_of_another_writer_ends_a_planned_shard(any_url: str, any_client: Client) -> None:
    """Records of jobs name no writer."""
    with (
        writer_of(any_url, **QUIET) as writer,
        pytest.raises(ShardMismatch, match="another writer's"),
        writer.epoch(0, sizes=[SIZE]).shard(0) as shard,
    ):
        fill(shard, 8)
        shard.commit_all()
        forge(any_client, 24, w="somebody")
        fill(shard, SIZE)


def test_a_forged_record_in_a_feed_is_told_from_a_lost_one(any_url: str, any_client: Client) -> None:
    """Every sample that the writer committed is there, so the message must not say that the server lost it."""
    with (
        pytest.raises(ShardMismatch, match="behind this writer's records is another one"),
        writer_of(any_url, **QUIET) as writer,
    ):
        for number in range(8):
            writer.write(sample(number))
        writer.flush()
        forge(any_client, 24)
        for number in range(8, 40):
            writer.write(sample(number))


def test_records_that_were_deleted_meanwhile_are_missed(any_url: str, any_client: Client) -> None:
    """The shard would be declared complete with a hole that no reader by position gets over."""
    with (
        writer_of(any_url, **QUIET) as writer,
        pytest.raises(ShardMismatch, match="12-0 does not follow the offset 4"),
        writer.epoch(0, sizes=[SIZE]).shard(0) as shard,
    ):
        fill(shard, 20)
        shard.commit_all()
        any_client.xdel(writer.stream.partitions[0].index(0, 0), "8-0")
        fill(shard, SIZE)


def test_a_feed_whose_confirmed_samples_are_gone_at_its_end_says_so(any_url: str, any_client: Client) -> None:
    """It has nothing more to commit, and would complete a shard that is not there."""
    with (
        pytest.raises(ShardMismatch, match="it ends at the offset 0, and this writer at 8"),
        writer_of(any_url, **QUIET) as writer,
    ):
        for number in range(8):
            writer.write(sample(number))
        writer.flush()
        any_client.delete(writer.stream.partitions[0].index(0, 0))


def test_a_shard_that_another_run_began_ends_well(any_url: str, any_client: Client) -> None:
    """A retried job meets records and entries that it did not write; they are as good as its own."""
    with writer_of(any_url, **QUIET) as first:
        shard = first.epoch(0, sizes=[SIZE]).shard(0)
        for offset in range(18):
            if offset % 9 == 8:
                shard.quarantine("bad")
            else:
                shard.write(sample(offset))
        shard.commit_all()
        shard.abort()
    with writer_of(any_url, **QUIET) as second, second.epoch(0, sizes=[SIZE]).shard(0) as again:
        assert again.position == 18
        fill(again, SIZE)
    assert load_manifest(any_client, open_stream(any_client, "t"), 0).state == "produced"
    assert audit_stream(any_client, "t").is_clean


@pytest.mark.parametrize("is_acknowledged", [True, False])
def test_entries_that_retention_removed_are_told_from_entries_that_never_were(
    any_url: str, any_client: Client, is_acknowledged: bool
) -> None:
    """A full budget frees what every group has trained on, also of a shard that is still written."""
    with writer_of(any_url, **QUIET) as first:
        shard = first.epoch(0, sizes=[SIZE]).shard(0)
        fill(shard, 20)
        shard.commit_all()
        shard.abort()
    partition = open_stream(any_client, "t").partitions[0]
    with loader_of(any_url, batch_size=4, start="earliest") as loader, writer_of(any_url, **QUIET) as second:
        batches = iter(loader)
        for _ in range(5 if is_acknowledged else 2):
            next(batches)
        hooks_of(loader).acknowledger.flush()
        ids: Any = [entry_id for entry_id, _ in any_client.xrange(partition.entries(0), count=4)]
        any_client.hset(partition.roster, "t:0", "1")
        any_client.xdel(partition.entries(0), *ids)
        again = second.epoch(0, sizes=[SIZE]).shard(0)
        fill(again, SIZE)
        if is_acknowledged:
            again.close()
        else:
            with pytest.raises(ShardMismatch, match="names an entry that is not its own"):
                again.close()
            again.abort()


def test_what_is_wrong_with_an_index_is_said_in_one_clause() -> None:
    """The first record that does not fit is named, and a correct index gives no message."""
    good = [
        IndexRecord(4, b"1-0", 0, 4, 96, ()),
        IndexRecord(6, b"", 4, 0, 0, (4, 5)),
        IndexRecord(9, b"2-0", 6, 2, 48, (7,)),
    ]
    assert first_fault(good, 9, "") == ""
    assert first_fault([], 0, "token") == ""
    assert first_fault(good, 12, "") == "it ends at the offset 9, and this writer at 12"
    assert first_fault(good, 6, "") == "it ends at the offset 9, and this writer at 6"
    assert first_fault(good[:1] + good[2:], 9, "") == "the record 9-0 does not follow the offset 4"
    assert first_fault(good, 9, "token") == "the record 4-0 is another writer's"
    for wrong in (
        IndexRecord(9, b"2-0", 6, 2, 48, (9,)),
        IndexRecord(9, b"2-0", 6, 2, 48, (5,)),
        IndexRecord(9, b"2-0", 6, 1, 24, (7, 9)),
        IndexRecord(9, b"2-0", 6, 3, 72, (7,)),
        IndexRecord(9, b"2-0", 6, 0, 0, (6, 7, 8)),
        IndexRecord(9, b"", 6, 1, 24, (7, 8)),
    ):
        assert first_fault([*good[:2], wrong], 9, "") == "the record 9-0 does not follow the offset 6"


def test_an_index_that_another_program_replaced_is_named(any_url: str, any_client: Client) -> None:
    """The error says which key it is, and what to do."""
    with (
        writer_of(any_url, **QUIET) as writer,
        pytest.raises(DamagedKey, match=":0:0:index"),
        writer.epoch(0, sizes=[8]).shard(0) as shard,
    ):
        fill(shard, 8)
        shard.commit_all()
        any_client.set(writer.stream.partitions[0].index(0, 0), "x")


def test_a_feed_whose_confirmed_samples_another_writer_replaced_says_so(any_url: str, any_client: Client) -> None:
    """The shard is that writer's, and these samples are in no other one."""
    with (
        pytest.raises(ShardMismatch, match=r"with it 8 samples .* \(offsets 0-7, .*; write those again that you have"),
        writer_of(any_url, **QUIET) as writer,
    ):
        for number in range(8):
            writer.write(sample(number))
        writer.flush()
        any_client.delete(writer.stream.partitions[0].index(0, 0))
        forge(any_client, 8, f=0, w="another")


@pytest.fixture
def begun(any_url: str) -> Manifest:
    """Return an epoch with ten committed blocks of four samples, the last of each a bad one."""
    with writer_of(any_url, spec=SPEC, block_bytes=8 * SAMPLE_BYTES) as writer:
        epoch = writer.epoch(0, sizes=[SIZE + 1])
        shard = epoch.shard(0)
        for offset in range(SIZE):
            if offset % 4 < 3:
                shard.write(sample(offset))
            else:
                shard.quarantine("bad")
                shard.flush()
        shard.commit_all()
        shard.abort()
        return epoch.manifest


def test_a_long_index_is_read_in_pages(any_client: Client, begun: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard has as many records as blocks, and a writer judges all of them."""
    monkeypatch.setattr(completion, "PAGE", 4)
    target = ShardTarget(any_client, open_stream(any_client, "t"), begun, 0)
    channel = open_channel(any_client)
    records = completion.read_index(channel, target)
    channel.close()
    assert records == list(index_records(any_client, target.partition, 0, 0))
    assert [record.end for record in records] == list(range(4, SIZE + 1, 4))


@pytest.mark.parametrize("payload", ["inline", "segments"])
@pytest.mark.parametrize("is_feed", [True, False])
def test_a_writer_looks_up_no_entry_of_its_own_records(
    any_url: str, memory_path: Path, monkeypatch: pytest.MonkeyPatch, payload: str, is_feed: bool
) -> None:
    """Looking them up would cost a round trip at the end of each shard."""

    def fail(*looked_up: object) -> None:
        raise AssertionError(f"{looked_up!r} was looked up")

    monkeypatch.setattr(commit, "find_forged", fail)
    monkeypatch.setattr(completion, "PAGE", 4)
    where = payload if payload == "inline" else f"segments:{memory_path}"
    with writer_of(any_url, **QUIET, payload=where, compression="zstd") as writer:
        shard: Any = writer if is_feed else writer.epoch(0, sizes=[SIZE]).shard(0)
        for number in range(SIZE - 1):
            shard.write(sample(number))
        shard.quarantine("bad")
        if not is_feed:
            shard.close()


def test_each_entry_of_a_long_index_is_compared_with_its_record(
    any_client: Client, begun: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forged one may be anywhere, also where a page of answers begins or ends."""
    monkeypatch.setattr(completion, "PAGE", 4)
    target = ShardTarget(any_client, open_stream(any_client, "t"), begun, 0)
    records = list(index_records(any_client, target.partition, 0, 0))
    assert find_forged(target, records) is None
    for at, record in enumerate(records):
        for changed in (
            replace(record, entry_id=b"1-1"),
            replace(record, entry_id=records[at - 1].entry_id),
            replace(record, holes=()),
        ):
            assert find_forged(target, [*records[:at], changed, *records[at + 1 :]]) is changed


def test_a_missing_entry_is_excused_if_no_group_for_which_data_is_held_lacks_it(
    any_client: Client, begun: Manifest
) -> None:
    """Retention removes nothing else. A manual deletion must not pass for it."""
    stream = open_stream(any_client, "t")
    partition = stream.partitions[0]
    first, second, *_ = records = list(index_records(any_client, partition, 0, 0))
    group = {"first": 0, "declared": False, "holds": True, "seen": 0, "kind": "shared"}

    def forged() -> IndexRecord | None:
        return find_forged(ShardTarget(any_client, stream, begun, 0), records)

    def with_group(name: str, **fields: Any) -> None:
        any_client.hset(partition.roster, f"g:{name}", json.dumps({**group, **fields}))

    for record in (first, second):
        any_client.xgroup_create(partition.entries(0), f"of {record.end}", id="0")
    add_dead_letter(any_client, partition, begun, "of 8", second.entry_id, "bad")
    any_client.xdel(partition.entries(0), first.entry_id, second.entry_id)
    assert forged() is first  # the epoch is not marked
    any_client.hset(partition.roster, "t:0", "1")
    assert forged() is None
    with_group("a", first=1)  # it reads later epochs
    with_group("b", holds=False)  # no data is held for it
    assert forged() is None
    with_group("c")
    assert forged() is first
    for offset in (0, 1, 2):  # its ledger has no bit for the bad sample
        assert forged() is first
        any_client.setbit(partition.ledger(0, "c", 0), offset, 1)
    assert forged() is second
    any_client.hset(
        partition.dead(0, "c"), second.entry_id, any_client.hgetall(partition.dead(0, "of 8"))[second.entry_id]
    )
    assert forged() is None
    with_group("d")
    assert forged() is first
    for offset in (0, 1, 2):
        any_client.setbit(partition.ledger(0, "d", 0), offset, 1)
    assert forged() is second


def test_an_entry_that_is_no_block_is_not_its_records(any_client: Client, begun: Manifest) -> None:
    """A record may name what another program wrote."""
    stream = open_stream(any_client, "t")
    partition = stream.partitions[0]
    first, *_ = index_records(any_client, partition, 0, 0)
    wrong = replace(first, entry_id=any_client.xadd(partition.entries(0), {"meta": "rubbish"}))
    assert find_forged(ShardTarget(any_client, stream, begun, 0), [wrong]) is wrong


def test_a_block_of_an_earlier_run_may_have_its_payload_in_a_segment(any_url: str, memory_path: Path) -> None:
    """A retried job judges the blocks of the first one."""
    with writer_of(any_url, payload=f"segments:{memory_path}", **QUIET) as writer:
        epoch = writer.epoch(0, sizes=[SIZE])
        first = epoch.shard(0)
        fill(first, 8)
        first.commit_all()
        first.abort()
        with epoch.shard(0) as shard:
            assert shard.position == 8
            fill(shard, SIZE)
    assert replayed(any_url) == list(range(SIZE))
