"""Bad samples and dead letters: listed with reasons and identities, given again, discarded. All counts agree each
time.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import redis

from penstock_common.errors import EntryNotFound, EpochIncomplete, GroupNotFound, StreamConflict
from penstock_common.stream.groups.roster import Membership, RankOrder, join_group, load_roster
from penstock_common.stream.mending.bad import list_bad, retry_dead, show_entry
from penstock_common.stream.mending.drop import drop_bad
from penstock_common.stream.streams import load_stream
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from tests.common.stream.audited import (
    PER_ENTRY,
    append,
    audited,
    entry_of,
    fill,
    partition_of,
    rewrite_index,
)

ALL = 64 - 1
"""The samples of `fill` without the bad one."""


def damage(client: redis.Redis) -> bytes:
    """Replace an entry by a damaged copy, as a broken disk would, and return its id."""
    entry_id, fields = entry_of(client, 1)
    broken = append(client, {**fields, b"x": fields[b"x"][:-1] + b"\xff"})
    client.xdel(partition_of(client).entries(0), entry_id)
    rewrite_index(client, 0, {17: (b"e", broken)})
    return broken


def join(client: redis.Redis, group: str) -> None:
    """Join a group that will read."""
    join_group(client, Membership(load_stream(client, "train"), group, "", ""), declared=True)


def read(url: str, group: str = "resnet") -> Counter[tuple[int, int, int]]:
    """Count the identities that the group's next epoch gives out."""
    found: Counter[tuple[int, int, int]] = Counter()
    with Loader(
        "train", group=group, batch_size=10, url=url, tuning=Tuning(timeout_s=20, notify=lambda _: None)
    ) as loader:
        for batch in loader:
            found.update(batch.identities())
    return found


def test_what_went_wrong_is_listed_with_identity_reason_and_time(url: str, client: redis.Redis) -> None:
    """The list is per group: one could not read an entry, and the other has not tried yet."""
    fill(url)
    broken = damage(client)
    assert sum(read(url).values()) == ALL - PER_ENTRY
    join(client, "vit")
    stream = load_stream(client, "train")
    bad = list_bad(client, stream)
    assert [(q.epoch, q.shard, q.offset, q.why) for q in bad.quarantined] == [(0, 0, 3, "truncated")]
    assert [(d.epoch, d.group, d.entry, d.shard, d.first, d.end) for d in bad.dead] == [
        (0, "resnet", broken.decode(), 0, 9, 17)
    ]
    assert bad.dead[0].why.startswith("ChecksumMismatch")
    assert abs(bad.dead[0].since_ms / 1000 - client.time()[0]) < 60
    assert list_bad(client, stream, group="vit").dead == []
    with pytest.raises(GroupNotFound, match="groups there: resnet, vit"):
        list_bad(client, stream, group="nobody")


def test_an_entry_is_shown_without_its_payload_and_without_belief(any_url: str, any_client: redis.Redis) -> None:
    """A hostile entry may hold any bytes, so it is shown as ASCII and its claims are not believed."""
    fill(any_url)
    stream = load_stream(any_client, "train")
    entry_id, fields = entry_of(any_client, 1)
    view = show_entry(any_client, stream, 0, entry_id.decode())
    assert (view.shard, view.first, view.end, view.problem) == (0, 9, 17, "")
    assert view.fields[:2] == [("meta", len(fields[b"meta"])), ("x", 8000)]
    assert json.loads(view.header)["first"] == 9
    forged = append(any_client, {b"meta": b'{"shard": 1e9, "\x1b[2J": "\xff"', b"\x1b[31m": b"x" * 100_000})
    before = any_client.info("stats")["total_net_output_bytes"]
    view = show_entry(any_client, stream, 0, forged.decode())
    assert any_client.info("stats")["total_net_output_bytes"] - before < 40_000
    assert (view.shard, view.header.isprintable()) == (None, True)
    assert "BadEntry" in view.problem
    assert view.fields[1] == ("\\x1b[31m", 100_000)
    for name in ("99-0", "nonsense"):
        with pytest.raises(EntryNotFound):
            show_entry(any_client, stream, 0, name)


def test_a_retried_dead_letter_is_handed_out_by_a_reader_that_can(
    url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader was at fault: the group had closed the epoch, gets exactly these samples, and the counts agree
    again.
    """
    fill(url)
    entry_id, _ = entry_of(client, 1)
    refuse_first(monkeypatch, 9)
    first = read(url)
    assert sum(first.values()) == ALL - PER_ENTRY
    stream, partition = load_stream(client, "train"), partition_of(client)
    assert ("resnet", 0) in load_roster(client, partition).closed
    assert not audited(url).is_clean
    monkeypatch.undo()
    assert [letter.entry for letter in retry_dead(client, stream)] == [entry_id.decode()]
    assert ("resnet", 0) not in load_roster(client, partition).closed
    report = audited(url)
    assert (report.is_clean, report.pending, report.dead) == (True, PER_ENTRY, 0)
    rest = read(url)
    assert sorted(rest) == [(0, 0, offset) for offset in range(9, 17)]
    assert set((first + rest).values()) == {1}
    report = audited(url)
    assert (report.is_clean, report.delivered, report.pending) == (True, {"resnet": ALL}, 0)
    assert ("resnet", 0) in load_roster(client, partition).closed


def refuse_first(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Simulate a bug of a reader: entries that begin at this offset cannot be verified."""
    from penstock_common.errors import ChecksumMismatch
    from penstock_common.wire import codec

    def verify(header: Any, buffers: Any) -> None:
        if header.first == first and header.shard == 0:
            raise ChecksumMismatch("this reader has a bug")
        codec.verify(header, buffers)

    monkeypatch.setattr("penstock_consumer.read.receive.verify", verify)


def test_a_member_that_is_reading_takes_a_retried_dead_letter_up(
    any_url: str, any_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No restart is needed: a member that waits for the next epoch also takes pending entries."""
    fill(any_url)
    refuse_first(monkeypatch, 9)
    with Loader(
        "train",
        group="g",
        batch_size=10,
        url=any_url,
        tuning=Tuning(lease_s=1.0, timeout_s=20, notify=lambda _: None),
    ) as loader:
        assert sum(batch.size for batch in loader) == ALL - PER_ENTRY
        monkeypatch.undo()
        assert len(retry_dead(any_client, load_stream(any_client, "train"), group="g")) == 1
        assert sum(batch.size for batch in loader) == PER_ENTRY
    assert audited(any_url).is_clean


def test_a_dead_letter_of_one_group_is_nothing_to_another(
    any_url: str, any_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group has separate readers, and its own decision."""
    fill(any_url)
    refuse_first(monkeypatch, 9)
    assert sum(read(any_url, "old").values()) == ALL - PER_ENTRY
    monkeypatch.undo()
    assert sum(read(any_url, "new").values()) == ALL
    stream = load_stream(any_client, "train")
    drop_bad(any_client, stream, 0, group="old", reason="not needed")
    report = audited(any_url)
    assert report.is_clean
    assert report.delivered == {"old": ALL - PER_ENTRY, "new": ALL}
    assert (report.epochs[0].groups["old"].dead, report.epochs[0].groups["old"].given_up) == (PER_ENTRY, PER_ENTRY)
    assert list_bad(any_client, stream, group="new").dead == []


def test_what_was_given_up_stays_so_and_its_reasons_are_kept(
    any_url: str, any_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry of all entries does not undo an operator's decision."""
    fill(any_url)
    refuse_first(monkeypatch, 9)
    read(any_url)
    monkeypatch.undo()
    stream = load_stream(any_client, "train")
    (dropped,) = drop_bad(any_client, stream, 0, group="resnet", reason="known")
    assert "known (ChecksumMismatch: this reader has a bug)" in dropped.why
    assert retry_dead(any_client, stream) == []
    assert list_bad(any_client, stream).dead == [dropped]
    with pytest.raises(EntryNotFound, match="is no dead letter"):
        retry_dead(any_client, stream, entry=dropped.entry)


def test_a_loss_that_is_given_up_does_not_come_back_at_each_start(url: str, client: redis.Redis) -> None:
    """EpochIncomplete names ranges, also after a restart.

    Discarded samples count as dead, and the next epoch is read.
    """
    fill(url, bad=())
    join(client, "resnet")
    join(client, "vit")
    client.xdel(partition_of(client).entries(0), entry_of(client, 1)[0])
    for _ in range(2):
        with pytest.raises(EpochIncomplete, match="shard 0 offsets 8-15") as told:
            read(url)
        assert told.value.missing == [(0, 8, 16)]
    stream = load_stream(client, "train")
    dropped = drop_bad(client, stream, 0, group="resnet", reason="gone")
    assert [(d.entry, d.shard, d.first, d.end, d.why) for d in dropped] == [("", 0, 8, 16, "gone")]
    fill(url, bad=())
    assert {epoch for epoch, _, _ in read(url)} == {1}
    groups = audited(url).epochs[0].groups
    assert (groups["resnet"].delivered, groups["resnet"].dead, groups["resnet"].lost) == (56, 8, 0)
    assert groups["vit"].lost == 8
    assert not audited(url).is_clean
    drop_bad(client, stream, 0, group=None, reason="gone")
    report = audited(url)
    assert (report.lost, report.findings, report.is_clean) == (0, [], True)
    assert sum(read(url, "vit").values()) == 56


def test_a_lost_end_of_an_index_is_given_up_too(any_url: str, any_client: redis.Redis) -> None:
    """A feed cannot be made again, so training continues without these samples and the audit reports them."""
    fill(any_url, bad=())
    join(any_client, "g")
    any_client.xdel(partition_of(any_client).entries(0), entry_of(any_client, -1)[0])
    any_client.xdel(partition_of(any_client).index(0, 1), "24-0")
    drop_bad(any_client, load_stream(any_client, "train"), 0, group=None, reason="a failover")
    report = audited(any_url)
    assert (report.findings, report.dead, report.lost) == ([], 8, 0)
    assert sum(read(any_url, "g").values()) == 56
    assert ("g", 0) in load_roster(any_client, partition_of(any_client)).closed


def test_a_pending_entry_is_dropped_by_its_id(any_url: str, any_client: redis.Redis) -> None:
    """A training dies of it each time. The group continues without it, and it is never yielded again."""
    fill(any_url, bad=())
    join(any_client, "g")
    partition, stream = partition_of(any_client), load_stream(any_client, "train")
    any_client.xreadgroup("g", "died", {partition.entries(0): ">"}, count=2)
    poison = entry_of(any_client, 1)[0].decode()
    unread = entry_of(any_client, 5)[0].decode()
    with pytest.raises(EntryNotFound, match="not given yet cannot be dropped"):
        drop_bad(any_client, stream, 0, group="g", reason="x", entry=unread)
    (dropped,) = drop_bad(any_client, stream, 0, group="g", reason="training dies on it", entry=poison)
    assert (dropped.shard, dropped.first, dropped.end) == (0, 8, 16)
    found = Counter[tuple[int, int, int]]()
    with Loader(
        "train", group="g", batch_size=10, url=any_url, tuning=Tuning(lease_s=1.0, notify=lambda _: None)
    ) as loader:
        for batch in loader:
            found.update(batch.identities())
    assert set(found) == {(0, 0, n) for n in range(40) if not 8 <= n < 16} | {(0, 1, n) for n in range(24)}
    report = audited(any_url)
    assert (report.is_clean, report.dead, report.delivered) == (True, 8, {"g": 56})


def test_forged_entries_are_deleted_when_every_group_drops_them(any_url: str, any_client: redis.Redis) -> None:
    """No number in them is believed, so the ledger of the samples that they claim does not change."""
    fill(any_url, bad=())
    _, fields = entry_of(any_client, 1)
    forged = append(any_client, {**fields, b"x": b"short"})
    assert sum(read(any_url).values()) == 64
    stream = load_stream(any_client, "train")
    assert [(d.entry, d.shard) for d in list_bad(any_client, stream).dead] == [(forged.decode(), None)]
    drop_bad(any_client, stream, 0, group=None, reason="forged")
    report = audited(any_url)
    assert (report.findings, report.is_clean, report.delivered) == ([], True, {"resnet": 64})
    assert any_client.xlen(partition_of(any_client).entries(0)) == 8


def test_a_forged_entry_is_deleted_beside_an_ordered_group_and_after_one_group_gave_it_up(
    any_url: str, any_client: redis.Redis
) -> None:
    """Otherwise no command could remove it, and the audit would never be clean again."""
    fill(any_url, bad=())
    _, fields = entry_of(any_client, 1)
    forged = append(any_client, {**fields, b"x": b"short"}).decode()
    stream = load_stream(any_client, "train")
    join_group(any_client, Membership(stream, "ranks", "", "", RankOrder(0, 0, 0)), declared=True)
    assert sum(read(any_url).values()) == 64
    drop_bad(any_client, stream, 0, group="resnet", reason="forged", entry=forged)
    with pytest.raises(EntryNotFound, match="neither a dead letter of ranks"):
        drop_bad(any_client, stream, 0, group="ranks", reason="forged", entry=forged)
    drop_bad(any_client, stream, 0, group=None, reason="forged", entry=forged)
    report = audited(any_url)
    assert (report.findings, report.is_clean, report.delivered["resnet"]) == ([], True, 64)
    assert any_client.xlen(partition_of(any_client).entries(0)) == 8


def test_what_is_gone_cannot_be_retried_and_the_text_says_what_can(any_url: str, any_client: redis.Redis) -> None:
    """The entry was deleted after it was found to be bad."""
    fill(any_url)
    broken = damage(any_client)
    read(any_url)
    any_client.xdel(partition_of(any_client).entries(0), broken)
    stream = load_stream(any_client, "train")
    with pytest.raises(StreamConflict, match=r"cannot be given again; `penstock audit train --repair SOURCE...`"):
        retry_dead(any_client, stream, entry=broken.decode())
    assert retry_dead(any_client, stream) == []
    with pytest.raises(StreamConflict, match="a quarantined sample is a hole"):
        retry_dead(any_client, stream, entry="0:3")
    with pytest.raises(GroupNotFound):
        drop_bad(any_client, stream, 0, group="nobody", reason="x")


def test_a_ledger_takes_about_a_bit_a_sample_and_goes_with_its_epoch(any_url: str, any_client: redis.Redis) -> None:
    """It is a set of bits, whatever was repeated or discarded: 100,000 samples in 12.5 kB a group."""
    from penstock_common.stream.removal.deletion import release_epoch
    from tests.contracts.feed import produce

    produce(any_url, "train", 100_000, block_samples=1000)
    with Loader("train", group="g", batch_size=700, url=any_url, tuning=Tuning(notify=lambda _: None)) as loader:
        assert sum(batch.size for batch in loader) == 100_000
    key = partition_of(any_client).ledger(0, "g", 0)
    assert any_client.strlen(key) == 100_000 // 8
    # a string that grew by SETBIT is allocated at up to twice its length, rounded up to the allocator's next size
    assert (any_client.memory_usage(key) or 0) < 3 * 100_000 // 8
    assert release_epoch(any_client, load_stream(any_client, "train"), 0)
    assert not any_client.exists(key)
