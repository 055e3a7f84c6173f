"""`repair_epoch`: what was lost comes back, bit for bit and once, and nothing else is touched."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

import pytest
import redis

from penstock.__main__ import main
from penstock_common.errors import EpochIncomplete, PenstockError, ReplayTruncated, SampleError
from penstock_common.stream.entries import index_records
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.mending.drop import drop_bad
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.writer import Writer
from tests.contracts.feed import entries
from tests.contracts.processes import child
from tests.producer import repaired
from tests.producer.repaired import (
    BAD,
    SAMPLES,
    Numbers,
    Pages,
    audit,
    damage_entry,
    lose_entry,
    lose_record,
    lose_tail,
    produce,
    records,
    repair,
    stream_of,
)
from tests.tuned import tuned

Identity = tuple[int, int, int]


def train(url: str, group: str = "g", **settings: Any) -> Counter[Identity]:
    """Count the identities that the group's next epoch gave out."""
    found: Counter[Identity] = Counter()
    with Loader(
        "t",
        group=group,
        batch_size=8,
        url=url,
        **tuned("Loader", settings, Tuning(timeout_s=20, notify=lambda _: None)),
    ) as loader:
        for batch in loader:
            found.update(batch.identities())
    return found


def replay(url: str) -> list[tuple[Any, ...]]:
    """The epoch in canonical order: identity and value of every sample."""
    rows: list[tuple[Any, ...]] = []
    with Replay("t", url=url, epoch=0, batch_size=16) as epoch:
        for batch in epoch:
            values = zip(batch["x"].tolist(), batch["noise"].tolist(), batch["tag"], strict=True)
            rows += [
                (*name, x, noise, bytes(tag)) for name, (x, noise, tag) in zip(batch.identities(), values, strict=True)
            ]
    return rows


def join(client: redis.Redis, group: str) -> None:
    """A group that will read."""
    join_group(client, Membership(stream_of(client), group, "", ""), declared=True)


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_deleted_entry_is_made_again_and_only_who_lacked_it_is_given_it(
    url: str, client: redis.Redis, partitions: int
) -> None:
    """One group had read the epoch, one had not: the audit is clean again and each got every sample once."""
    produce(url, partitions=partitions)
    before = replay(url)
    assert sum(train(url, "had").values()) == SAMPLES - len(BAD)
    join(client, "lacks")
    lost = lose_entry(client, 1, 2)
    assert not audit(url).is_clean
    source = Numbers()
    done = repair(url, source)
    assert (done.made, done.found, done.waiting) == (len(lost), 0, [])
    assert len(source.reads) == len(lost)
    report = audit(url)
    assert (report.findings, report.lost, report.duplicate, report.is_clean) == ([], 0, 0, True)
    assert replay(url) == before
    found = train(url, "lacks")
    assert len(found) == SAMPLES - len(BAD)
    assert set(found.values()) == {1}
    with Writer("t", url=url) as writer, writer.epoch() as epoch:
        epoch.write({"x": [1, 1], "noise": 0, "tag": b""})
    assert [epoch for epoch, _, _ in train(url, "had")] == [1]
    assert audit(url).is_clean


def test_a_damaged_payload_is_made_again_where_payloads_are_read(any_url: str, any_client: redis.Redis) -> None:
    """Headers are whole, so only a deep repair finds it. A damaged header is found by any."""
    produce(any_url)
    before = replay(any_url)
    lost = damage_entry(any_client, 1, 2)
    assert (repair(any_url).made, audit(any_url, deep=False).is_clean) == (0, True)
    source = Numbers()
    assert (repair(any_url, source, deep=True).made, len(source.reads)) == (len(lost), len(lost))
    report = audit(any_url)
    assert (report.findings, report.lost, report.duplicate, report.is_clean) == ([], 0, 0, True)
    damage_entry(any_client, 0, 3, b"meta")
    assert repair(any_url).made > 0
    assert (audit(any_url).findings, replay(any_url)) == ([], before)


def test_a_damaged_dead_letter_is_made_again_and_its_group_is_given_it(any_url: str, any_client: redis.Redis) -> None:
    """The group had closed the epoch over it, and another group that trained before the damage is given nothing."""
    produce(any_url)
    first = train(any_url, "before")
    lost = damage_entry(any_client, 1, 1)
    met = train(any_url)
    assert sum(met.values()) == SAMPLES - len(BAD) - len(lost)
    assert repair(any_url, deep=True).made == len(lost)
    assert (audit(any_url).findings, audit(any_url).dead) == ([], 0)
    assert sorted(train(any_url)) == [(0, 1, offset) for offset in lost]
    assert set(first.values()) == {1}
    with Writer("t", url=any_url) as writer, writer.epoch() as epoch:
        epoch.write({"x": [1, 1], "noise": 0, "tag": b""})
    assert [epoch for epoch, _, _ in train(any_url, "before")] == [1]


def test_a_compressed_epoch_is_repaired_as_it_was(any_url: str, any_client: redis.Redis) -> None:
    """Entries that are made again, and entries that are found without a record, are compressed like the others."""
    produce(any_url, compression="x=zstd")
    before = replay(any_url)
    lose_entry(any_client, 0, 2)
    lose_entry(any_client, 1, 1)
    lose_record(any_client, 0, 4)
    done = repair(any_url)
    assert done.made > 0
    assert done.found > 0
    assert audit(any_url).is_clean
    assert replay(any_url) == before
    metas = [fields[b"meta"] for _, fields in entries(any_client, "t", 0)]
    repaired_metas = [meta for meta in metas if b'"repair":true' in meta]
    assert len(repaired_metas) >= 2
    assert all(b'"compression":{"x":"zstd"}' in meta for meta in metas)


def test_what_every_group_goes_on_without_can_still_be_made_again(
    url: str, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replay or a new group needs it. The audit said that nothing is missing, and the repair made nothing."""
    produce(url)
    before = replay(url)
    join(client, "g")
    lost = lose_entry(client, 1, 2)
    assert drop_bad(client, stream_of(client), 0, group=None, reason="goes on")
    assert (audit(url).is_clean, main(["audit", "t", "--url", url])) == (True, 0)
    assert f"{len(lost)} samples are missing. Every group goes on without them; a new" in capsys.readouterr().out
    with pytest.raises(ReplayTruncated, match="--repair SOURCE"):
        replay(url)
    assert repair(url, Numbers()).made == len(lost)
    assert (audit(url).findings, replay(url)) == ([], before)
    assert main(["audit", "t", "--url", url]) == 0
    assert "are missing" not in capsys.readouterr().out


def test_a_group_that_was_told_of_a_gap_ends_its_epoch_after_the_repair(url: str, client: redis.Redis) -> None:
    """EpochIncomplete comes back at every start, with the same ranges, until what is missing is there."""
    produce(url)
    lost = lose_entry(client, 0, 1)
    ranges = [(0, lost.start, lost.stop)]
    first: Counter[Identity] = Counter()
    with (
        Loader("t", group="g", batch_size=8, url=url, tuning=Tuning(timeout_s=20)) as loader,
        pytest.raises(EpochIncomplete) as told,
    ):
        for batch in loader:
            first.update(batch.identities())
    assert told.value.missing == ranges
    with pytest.raises(EpochIncomplete) as again:
        train(url)
    assert again.value.missing == ranges
    repair(url)
    rest = train(url)
    assert sorted(rest) == [(0, 0, offset) for offset in lost]
    assert set((first + rest).values()) == {1}
    assert audit(url).is_clean


def test_a_trainer_that_goes_on_is_given_what_was_repaired_meanwhile(any_url: str, any_client: redis.Redis) -> None:
    """It need not be restarted: the next iteration takes up what the epoch lacked, and closes it."""
    produce(any_url)
    lost = lose_entry(any_client, 0, 1)
    with Loader(
        "t", group="g", batch_size=8, url=any_url, tuning=Tuning(timeout_s=20, notify=lambda _: None)
    ) as loader:
        with pytest.raises(EpochIncomplete):
            list(loader)
        repair(any_url)
        assert sorted(name for batch in loader for name in batch.identities()) == [(0, 0, offset) for offset in lost]
    assert audit(any_url).is_clean
    assert any_client.hexists(stream_of(any_client).partitions[0].roster, "d:g:0")


@pytest.mark.parametrize("count", [1, 3])
def test_the_lost_end_of_an_index_is_made_again(url: str, client: redis.Redis, count: int) -> None:
    """A failover kept the manifest and lost the last commits: bad samples among them are bad again, and named."""
    produce(url)
    before = replay(url)
    lose_tail(client, 0, count)
    lose_tail(client, 2, 1)
    assert audit(url).lost > 0
    assert repair(url).made > 0
    report = audit(url)
    assert (report.findings, report.is_clean, report.bad) == ([], True, len(BAD))
    assert replay(url) == before
    assert len(train(url)) == SAMPLES - len(BAD)


def test_the_lost_middle_of_an_index_is_made_again_and_stands_in_its_place(
    any_url: str, any_client: redis.Redis
) -> None:
    """Record ids only rise, so the record of a gap has its own key, and every reader must see it in order."""
    produce(any_url)
    before = replay(any_url)
    lose_entry(any_client, 0, 1)
    lose_record(any_client, 0, 1)
    assert repair(any_url).made > 0
    assert audit(any_url).is_clean
    assert replay(any_url) == before
    partition = stream_of(any_client).partitions[0]
    ends = [record.end for record in index_records(any_client, partition, 0, 0)]
    assert ends == sorted(set(ends))
    assert any_client.xlen(partition.repairs(0, 0)) == 1


def test_an_entry_that_only_lost_its_record_gets_it_back(any_url: str, any_client: redis.Redis) -> None:
    """Making it again would have it in the stream twice."""
    produce(any_url)
    before, count = replay(any_url), any_client.xlen(stream_of(any_client).partitions[0].entries(0))
    lose_record(any_client, 0, 1)
    lose_record(any_client, 1, -1)
    source = Numbers()
    done = repair(any_url, source)
    assert (done.made, done.found > 0, source.reads) == (0, True, [])
    assert audit(any_url).is_clean
    assert any_client.xlen(stream_of(any_client).partitions[0].entries(0)) == count
    assert replay(any_url) == before


def test_an_entry_that_is_not_what_it_claims_is_not_put_into_the_index(any_url: str, any_client: redis.Redis) -> None:
    """A forger may delete a record and append a copy with other bytes; its checksum tells."""
    produce(any_url)
    _, fields = records(any_client, 0)[1]
    key = stream_of(any_client).partitions[0].entries(0)
    found: Any = any_client.xrange(key, fields[b"e"], fields[b"e"])
    any_client.xdel(key, fields[b"e"])
    any_client.xadd(key, {**found[0][1], b"noise": bytes(len(found[0][1][b"noise"]))})
    lose_record(any_client, 0, 1)
    said: list[str] = []
    done = repair(any_url, said=said)
    assert (done.made, done.found) == (0, 0)
    assert "cannot be decoded" in said[0]
    assert not audit(any_url).is_clean


def test_batches_are_made_again_and_only_the_rows_that_were_lost_are_written(
    any_url: str, any_client: redis.Redis
) -> None:
    """A Keras Sequence makes ten samples at a time; an entry need not end where a batch does."""
    produce(any_url, Pages())
    before = replay(any_url)
    lose_entry(any_client, 1, 1)
    lose_tail(any_client, 0, 2)
    source = Pages()
    assert repair(any_url, source).made > 0
    assert len(source.reads) < 9
    assert audit(any_url).is_clean
    assert replay(any_url) == before


def test_a_repair_may_be_repeated_and_what_it_wrote_may_be_lost_again(any_url: str, any_client: redis.Redis) -> None:
    """Whatever was repaired is a part of the epoch like any other."""
    produce(any_url)
    before = replay(any_url)
    lost = lose_entry(any_client, 0, 1)
    assert [repair(any_url).made for _ in range(2)] == [len(lost), 0]
    key, partition = stream_of(any_client).partitions[0].entries(0), stream_of(any_client).partitions[0]
    newest: Any = any_client.xrevrange(key, count=1)
    assert json.loads(newest[0][1][b"meta"])["repair"] is True
    any_client.xdel(key, newest[0][0])
    assert repair(any_url).made == len(lost)
    assert any_client.xlen(partition.repairs(0, 0)) == 2
    assert (audit(any_url).findings, replay(any_url) == before) == ([], True)


def test_repairs_at_the_same_time_put_everything_back_once(url: str, client: redis.Redis) -> None:
    """Two operators, or two automatic ones: the same rule as for a job that runs twice."""
    produce(url)
    before = replay(url)
    for position in (0, 2, 3):
        lose_entry(client, 0, position)
    lose_tail(client, 1, 3)
    made: list[int] = []
    threads = [threading.Thread(target=lambda: made.append(repair(url).made)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    repair(url)  # the last one may have compared bytes while another wrote
    report = audit(url)
    assert (report.findings, report.duplicate, report.is_clean) == ([], 0, True)
    assert replay(url) == before
    assert len(made) == 4


def repair_slowly(url: str) -> None:
    """Says when each sample is made; to be killed."""

    class Slow(Numbers):
        def read(self, index: int, rng: Any) -> dict[str, Any]:
            print(index, flush=True)
            return super().read(index, rng)

    repair(url, Slow())


@pytest.mark.parametrize("after", [1, 9, 16])
def test_a_killed_repair_is_simply_started_again(any_url: str, any_client: redis.Redis, after: int) -> None:
    """Kill -9 in the middle: what was put back stands, the rest follows."""
    produce(any_url)
    before = replay(any_url)
    for position in (1, 3):
        lose_entry(any_client, 0, position)
    lose_tail(any_client, 1, 3)
    with child(repair_slowly, any_url) as killed:
        for _ in range(after):
            assert killed.line()
        killed.kill()
    repair(any_url)
    assert (audit(any_url).findings, replay(any_url) == before) == ([], True)


def test_what_a_living_member_has_in_hand_is_not_made_again_under_it(any_url: str, any_client: redis.Redis) -> None:
    """The entry was deleted while a trainer steps on it: given again, its samples would be trained on twice."""
    produce(any_url)
    with Loader("t", group="g", batch_size=8, url=any_url, tuning=Tuning(member="m", timeout_s=20)) as loader:
        batches = iter(loader)
        found = Counter(next(batches).identities())
        lose_entry(any_client, 0, 0)
        said: list[str] = []
        done = repair(any_url, said=said)
        assert (done.made, len(done.waiting)) == (0, 1)
        assert "member 'm' of group 'g'" in said[0]
        for batch in batches:
            found.update(batch.identities())
    assert repair(any_url).made > 0
    assert set(found.values()) == {1}
    assert len(found) == SAMPLES - len(BAD)
    assert audit(any_url).is_clean


def test_what_a_dead_member_had_of_a_deleted_entry_is_handed_out_again_from_the_repaired_one(
    any_url: str, any_client: redis.Redis
) -> None:
    """Its pending id can never be claimed any more: the repair takes it off the books, and the new entry comes."""
    produce(any_url)
    join(any_client, "g")
    partition = stream_of(any_client).partitions[0]
    any_client.xreadgroup("g", "dead", {partition.entries(0): ">"}, count=2)
    lose_entry(any_client, 0, 0)
    assert repair(any_url).made > 0
    found = train(any_url, lease_s=1.0)
    assert len(found) == SAMPLES - len(BAD)
    assert audit(any_url).is_clean


def test_a_half_acknowledged_range_is_handed_out_for_its_other_half_only(any_url: str, any_client: redis.Redis) -> None:
    """A repaired entry says so in its header, and the reader leaves out what the ledger has."""
    produce(any_url)
    join(any_client, "g")
    partition = stream_of(any_client).partitions[0]
    lost = lose_entry(any_client, 0, 1)
    half = list(lost)[: len(lost) // 2]
    for offset in half:
        any_client.setbit(partition.ledger(0, "g", 0), offset, 1)
    repair(any_url)
    found = train(any_url)
    assert not {(0, 0, offset) for offset in half} & set(found)
    assert len(found) == SAMPLES - len(BAD) - len(half)


def test_who_reads_in_order_finds_repaired_ranges_in_their_place(any_url: str, any_client: redis.Redis) -> None:
    """Rank and resume count positions: the batches after a repair are those that were there before the loss."""
    produce(any_url)

    def in_order(group: str) -> list[Identity]:
        with Loader(
            "t", group=group, batch_size=8, url=any_url, tuning=Tuning(timeout_s=20), order="canonical"
        ) as loader:
            return [name for batch in loader for name in batch.identities()]

    before = in_order("first")
    lose_entry(any_client, 0, 1)
    lose_tail(any_client, 1, 2)
    with pytest.raises(EpochIncomplete):
        in_order("second")
    repair(any_url)
    assert in_order("second") == before
    assert audit(any_url).is_clean


def test_the_records_of_a_repair_go_with_the_epoch(any_url: str, any_client: redis.Redis) -> None:
    """A released epoch must leave nothing behind."""
    produce(any_url)
    lose_entry(any_client, 0, 1)
    repair(any_url)
    stream = stream_of(any_client)
    assert any_client.exists(stream.partitions[0].repairs(0, 0))
    assert release_epoch(any_client, stream, 0)
    assert not list(any_client.scan_iter("*:0:*"))


class TestRefusals:
    """Better no repair than a wrong one."""

    def test_another_source_is_refused(self, any_url: str, any_client: redis.Redis) -> None:
        """Other files would be other samples under the same identities."""
        produce(any_url)
        lose_entry(any_client, 0, 1)
        with pytest.raises(
            PenstockError, match="made from another source: its fingerprint is numbers, of this one other"
        ):
            repair(any_url, Numbers("other"))

    def test_a_source_of_another_length_is_refused(self, any_url: str, any_client: redis.Redis) -> None:
        """The order would be another one."""
        produce(any_url)
        lose_entry(any_client, 0, 1)
        with pytest.raises(PenstockError, match="cut into 3 shards otherwise"):
            repair(any_url, Numbers(count=SAMPLES + 1))

    def test_a_source_in_its_own_order_is_found_out_by_itself(self, any_url: str, any_client: redis.Redis) -> None:
        """The fingerprint says if it was shuffled, so an operator need not remember."""
        produce(any_url, shuffle=False)
        before = replay(any_url)
        lose_entry(any_client, 0, 1)
        repair(any_url)
        assert replay(any_url) == before

    def test_what_a_program_wrote_cannot_be_repaired(self, any_url: str, any_client: redis.Redis) -> None:
        """Only the program could make such samples again, and the text says what can be done."""
        with Writer("t", url=any_url, spec=repaired.SPEC) as writer, writer.epoch() as epoch:
            epoch.write({"x": [1, 1], "noise": 0, "tag": b""})
        lose_entry(any_client, 0, 0)
        with pytest.raises(PenstockError, match=r"written by a program.*`penstock bad drop t 0 --all-groups`"):
            repair(any_url)

    def test_a_good_sample_that_cannot_be_made_any_more_is_named(self, any_url: str, any_client: redis.Redis) -> None:
        """It is not turned into a bad one behind the groups' back."""
        produce(any_url)
        lost = lose_entry(any_client, 0, 1)
        source = Numbers()
        source.broken = set(range(SAMPLES))
        with pytest.raises(SampleError, match=rf"shard 0 offset {lost.start} of epoch 0 was good"):
            repair(any_url, source)
        assert repair(any_url).made > 0
