"""The audit names samples that are lost, duplicated or unexplained, and no others, in real streams with planted
damage.
"""

from __future__ import annotations

import json

import pytest
import redis

from penstock_common.errors import EpochNotFound, StreamNotFound
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.manifest import abandon_epoch
from penstock_common.stream.streams import load_stream
from penstock_common.wire.header import parse_header
from tests.common.stream.audited import (
    PER_ENTRY,
    SPEC,
    append,
    audited,
    entry_of,
    everything,
    fill,
    partition_of,
    rewrite_index,
    sample,
    the_finding,
    train,
    unfinished,
    writer,
)


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_stream_that_was_written_and_read_is_clean_and_adds_up(url: str, partitions: int) -> None:
    """These are the numbers at the end of the demo: every sample is produced or bad, and each group got each one
    once.
    """
    fill(url, partitions=partitions, bad=(0, 7, 39))
    assert [train(url, "resnet"), train(url, "vit")] == [61, 61]
    report = audited(url, deep=True)
    assert (report.produced, report.bad, report.delivered) == (61, 3, {"resnet": 61, "vit": 61})
    assert (report.lost, report.duplicate, report.pending, report.findings) == (0, 0, 0, [])
    assert report.is_clean
    assert report.verdict == "clean: lost 0, duplicate 0, pending 0"


def test_an_entry_deleted_before_it_was_read_is_lost_and_named(url: str, client: redis.Redis) -> None:
    """The group would wait for it, or end without it, so the audit must name the samples."""
    fill(url)
    join_group(client, Membership(load_stream(client, "train"), "resnet", "", ""), declared=True)
    entry_id, _ = entry_of(client, 1)
    client.xdel(partition_of(client).entries(0), entry_id)
    report = audited(url)
    assert (report.lost, report.duplicate, report.is_clean) == (PER_ENTRY, 0, False)
    assert report.epochs[0].groups["resnet"].lost == PER_ENTRY
    assert len(report.findings) == 2
    assert report.findings[0].startswith(
        f"epoch 0: entry {entry_id.decode()} (shard 0 offsets 9-16) is in the index and not"
    )
    assert report.findings[1] == "epoch 0: group resnet: shard 0: lost: offsets 9-16 (8 samples)"
    assert report.verdict.startswith("NOT CLEAN: lost 8, duplicate 0, pending 0")


def test_an_entry_deleted_before_any_group_came_is_lost(any_url: str, any_client: redis.Redis) -> None:
    """No group can ever be given it."""
    fill(any_url)
    any_client.xdel(partition_of(any_client).entries(0), entry_of(any_client, 0)[0])
    report = audited(any_url)
    the_finding(report, "shard 0 offsets 0-8", "deleted, and not by retention")
    assert report.lost == PER_ENTRY


def test_an_entry_deleted_after_training_is_named_though_nothing_is_lost(url: str, client: redis.Redis) -> None:
    """A replay would miss it."""
    fill(url)
    train(url)
    entry_id, _ = entry_of(client, -1)
    client.xdel(partition_of(client).entries(0), entry_id)
    report = audited(url)
    the_finding(report, entry_id.decode(), "shard 1 offsets 16-23")
    assert (report.lost, report.delivered) == (0, {"resnet": 63})


def test_a_forged_duplicate_is_named_with_the_identity_it_claims(url: str, client: redis.Redis) -> None:
    """A client that can write to Redis can append a copy, and trainers would see the samples duplicated."""
    fill(url)
    train(url)
    true_id, fields = entry_of(client, 2)
    forged_id = append(client, fields)
    report = audited(url)
    the_finding(
        report, f"entry {forged_id.decode()} is in no index", "shard 0 offsets 17-24", f"entry {true_id.decode()} holds"
    )
    assert (report.duplicate, report.lost) == (PER_ENTRY, 0)


def test_an_entry_deleted_and_a_copy_forged_are_both_named(url: str, client: redis.Redis) -> None:
    """One more and one less: the counts alone would agree."""
    fill(url)
    train(url)
    deleted, (_, fields) = entry_of(client, 0)[0], entry_of(client, 1)
    client.xdel(partition_of(client).entries(0), deleted)
    forged = append(client, fields)
    report = audited(url)
    assert len(report.findings) == 2
    assert forged.decode() in report.findings[0]
    assert deleted.decode() in report.findings[1]
    assert not report.is_clean


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shard": 9}, "it claims shard 9 offsets 9-16, which the manifest does not plan"),
        ({"first": 1 << 19}, "offsets 524288-524295, which the manifest does not plan"),
        ({"stream": "other"}, "of stream other epoch 0: it does not belong here"),
        ({"v": 2}, "cannot be read: UnsupportedVersion"),
        (None, "cannot be read: BadEntry"),
    ],
)
def test_a_forged_entry_that_fits_nowhere_is_named(
    any_url: str, any_client: redis.Redis, change: dict[str, object] | None, told: str
) -> None:
    """Hostile headers are reported, never believed."""
    fill(any_url)
    _, fields = entry_of(any_client, 1)
    meta = json.dumps({**json.loads(fields[b"meta"]), **change}).encode() if change else b"\xff" * 100
    append(any_client, {**fields, b"meta": meta})
    report = audited(any_url)
    the_finding(report, "is in no index", told)
    assert (report.duplicate, report.lost) == (0, 0)


def test_a_deleted_index_record_is_named(url: str, client: redis.Redis) -> None:
    """Replays and ordered readers find entries by the index alone."""
    fill(url)
    train(url)
    entry_id, fields = entry_of(client, 1)
    header = parse_header(fields[b"meta"], SPEC)
    client.xdel(partition_of(client).index(0, 0), f"{header.end}-0")
    report = audited(url)
    text = "\n".join(report.findings)
    assert "shard 0: the index has a gap, offsets 9-16 are in no record" in text
    assert f"entry {entry_id.decode()} is in no index; it claims shard 0 offsets 9-16, which nobody else holds" in text
    assert "shard 0: never committed: offsets 9-16 (8 samples)" in text
    assert (report.lost, report.is_clean) == (0, False)


@pytest.mark.parametrize("end", ["1152921504606846976-0", "70-0"])
def test_a_forged_index_record_is_named_and_takes_no_memory(any_url: str, any_client: redis.Redis, end: str) -> None:
    """A forger chooses the numbers: offsets beyond any shard, holes outside the block."""
    fill(any_url)
    forged = {"e": "1-1", "f": "64", "n": "1", "b": "1", "h": "[4000]"}
    parts = [part for field in forged.items() for part in field]
    any_client.execute_command("XADD", partition_of(any_client).index(0, 1), end, *parts)
    the_finding(audited(any_url), f"shard 1: the index record {end} is none that a producer writes")


def test_a_shard_with_two_writers_is_named(any_url: str, any_client: redis.Redis) -> None:
    """After a failover, writers of an older version take each other's blocks for their own, and the counts agree."""
    with writer(any_url) as feed:
        for number in range(24):
            feed.write(sample(number))
    (token,) = {fields[b"w"] for _, fields in everything(any_client, partition_of(any_client).index(0, 0))}
    assert audited(any_url).is_clean
    rewrite_index(any_client, 0, {16: (b"w", b"0123456789ab")})
    the_finding(audited(any_url), "shard 0 has records of 2 writers", "0123456789ab", token.decode())


def test_an_index_record_that_is_none_is_one_finding(any_url: str, any_client: redis.Redis) -> None:
    """It is not a traceback: the operator learns where to look, and a script gets its verdict."""
    fill(any_url)
    key = partition_of(any_client).index(0, 1)
    any_client.execute_command("XADD", key, "70-0", "e", "1-1")
    report = audited(any_url)
    assert not report.is_clean
    assert any(f"b'70-0' of {key} holds what Penstock did not write" in text for text in report.findings)


def test_an_epoch_declared_produced_with_samples_missing_is_lost_and_named(
    any_url: str, any_client: redis.Redis
) -> None:
    """The manifest is complete while an index lost its end, as after a failover to an outdated replica."""
    fill(any_url)
    entry_id, _ = entry_of(any_client, -1)
    any_client.xdel(partition_of(any_client).entries(0), entry_id)
    any_client.xdel(partition_of(any_client).index(0, 1), "24-0")
    report = audited(any_url)
    assert report.findings[0] == "epoch 0: shard 1: never committed: offsets 16-23 (8 samples)"
    assert report.lost == 8


def test_a_header_that_disagrees_with_the_index_is_named(any_url: str, any_client: redis.Redis) -> None:
    """After two entries are exchanged, every reader by position would get other samples than it asked for."""
    fill(any_url)
    one, two = entry_of(any_client, 1)[0], entry_of(any_client, 2)[0]
    rewrite_index(any_client, 0, {17: (b"e", two), 25: (b"e", one)})
    report = audited(any_url)
    assert len(report.findings) == 2
    assert f"entry {one.decode()} (shard 0 offsets 17-24) says of itself:" in report.findings[0]
    assert "shard 0 offsets 9-16" in report.findings[0]


def test_only_a_deep_audit_reads_payloads_and_finds_a_flipped_bit(any_url: str, any_client: redis.Redis) -> None:
    """The quick audit moves no payloads, so it cannot find this. The deep one is for a suspected disk or writer."""
    fill(any_url)
    key = partition_of(any_client).entries(0)
    entry_id, fields = entry_of(any_client, 1)
    flipped = bytes([fields[b"x"][0] ^ 1]) + fields[b"x"][1:]
    replacement = append(any_client, {**fields, b"x": flipped})
    any_client.xdel(key, entry_id)
    rewrite_index(any_client, 0, {17: (b"e", replacement)})
    assert audited(any_url).is_clean
    the_finding(audited(any_url, deep=True), replacement.decode(), "cannot be read: ChecksumMismatch")


def test_a_dead_letter_is_named_and_its_samples_are_not_called_delivered(url: str, client: redis.Redis) -> None:
    """The group continued without them, and that must be visible."""
    fill(url, bad=())
    key = partition_of(client).entries(0)
    entry_id, fields = entry_of(client, 1)
    replacement = append(client, {**fields, b"x": b"short"})
    client.xdel(key, entry_id)
    rewrite_index(client, 0, {16: (b"e", replacement)})
    train(url)
    report = audited(url)
    assert report.epochs[0].groups["resnet"].dead == PER_ENTRY
    assert (report.delivered, report.lost, report.is_clean) == ({"resnet": 56}, 0, False)
    assert any(
        f"group resnet: entry {replacement.decode()} (shard 0 offsets 8-15) is a dead letter" in f
        for f in report.findings
    )


def test_samples_of_a_group_whose_members_are_gone_are_unread_not_lost(any_url: str, any_client: redis.Redis) -> None:
    """They wait until the group returns."""
    fill(any_url)
    join_group(any_client, Membership(load_stream(any_client, "train"), "resnet", "", ""), declared=True)
    report = audited(any_url)
    assert (report.unread, report.lost, report.is_clean) == (63, 0, True)


def test_what_lies_before_a_late_groups_first_whole_epoch_was_not_offered_to_it(url: str, client: redis.Redis) -> None:
    """It is neither delivered nor lost, and the audit says so instead of leaving the group out."""
    fill(url)
    fill(url)
    train(url, "early")
    join_group(client, Membership(load_stream(client, "train"), "late", "", ""), first=1, declared=True)
    first, second = audited(url).epochs
    assert (first.groups["late"].not_offered, first.groups["late"].lost, first.groups["early"].not_offered) == (
        63,
        0,
        0,
    )
    assert (second.groups["late"].not_offered, second.groups["late"].unread) == (0, 63)
    assert audited(url).is_clean


def test_a_consumer_group_destroyed_behind_our_back_is_loss(any_url: str, any_client: redis.Redis) -> None:
    """XGROUP DESTROY removes the pending entries, but the roster still counts them as unacknowledged."""
    fill(any_url)
    join_group(any_client, Membership(load_stream(any_client, "train"), "resnet", "", ""), declared=True)
    any_client.xgroup_destroy(partition_of(any_client).entries(0), "resnet")
    report = audited(any_url)
    assert report.lost == 63
    assert any("group resnet: shard 1: lost: offsets 0-23 (24 samples)" in finding for finding in report.findings)


def test_a_ledger_that_acknowledges_what_was_never_committed_is_named(any_url: str, any_client: redis.Redis) -> None:
    """A member that acknowledged too much would end epochs early."""
    with writer(any_url) as made:
        epoch = unfinished(made)
        join_group(any_client, Membership(load_stream(any_client, "train"), "resnet", "", ""), declared=True)
        epoch.close()
        any_client.setbit(partition_of(any_client).ledger(0, "resnet", 0), 1000, 1)
    the_finding(audited(any_url), "group resnet: the ledger of shard 0 is longer than the shard")


def test_an_abandoned_epoch_owes_nothing(any_url: str, any_client: redis.Redis) -> None:
    """Its producer abandoned it, so a half epoch is not a loss of the stream."""
    with writer(any_url) as made:
        epoch = made.epoch(sizes=(40, 40))
        part = epoch.shard(0)
        part.write(sample(1))
        part.commit_all()
        abandon_epoch(any_client, made.stream, epoch.number)
    report = audited(any_url)
    assert (report.is_clean, report.lost, report.produced) == (True, 0, 1)


def test_the_audit_moves_no_payloads(any_url: str, any_client: redis.Redis) -> None:
    """A gigabyte of samples may be audited through a slow link."""
    fill(any_url, sizes=(1000,))
    before = any_client.info("stats")["total_net_output_bytes"]
    assert audited(any_url).produced == 999
    moved = any_client.info("stats")["total_net_output_bytes"] - before
    assert moved < 200_000  # headers, ids and INFO itself; payloads are 1,000,000


def test_what_is_not_there_is_named(any_url: str, any_client: redis.Redis) -> None:
    """A typo gets an answer."""
    with pytest.raises(StreamNotFound, match="no stream 'train'"):
        audit_stream(any_client, "train")
    fill(any_url)
    with pytest.raises(EpochNotFound, match="has no epoch 5; retained epochs: 0"):
        audit_stream(any_client, "train", epoch=5)
