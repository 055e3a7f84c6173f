"""Freeing space in an epoch of many shards costs the server work, counted in commands, not in time."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from penstock_common.stream.commands import Client
from penstock_common.stream.entries import SHARDS_AT_ONCE
from penstock_common.stream.groups.ledger import acknowledge
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.manifest import SHARDS_ASKED, first_unfinished, load_manifest
from penstock_common.tuning import Tuning
from penstock_producer.write.admission import AdmissionControl
from penstock_producer.write.cleaner import Cleaner
from penstock_producer.write.resources import ORDER_LOOK_S, AdmissionOrder, SharedResources
from penstock_producer.write.target import ShardTarget
from penstock_producer.write.trimmer import FAR_S
from penstock_producer.write.writer import EpochWriter, Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, entries, sample, stored
from tests.producer import repaired

PLANNED, WRITTEN, HELD = 400, 60, 7


def calls(client: Client, name: str) -> int:
    """Return how often a command was called since the server started."""
    return int(client.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"])


def write(epoch: EpochWriter, number: int) -> None:
    """One shard of one sample."""
    with epoch.shard(number) as shard:
        shard.write(sample(number))


def test_what_is_gone_is_not_looked_at_again_and_what_is_far_off_only_now_and_then(
    any_url: str, any_client: Client
) -> None:
    """A writer that waits asks for space many times a second: with thousands of shards it did little else."""
    now = 0.0
    with Writer("t", url=any_url, spec=SPEC) as writer:
        join_group(any_client, Membership(writer.stream, "g", "", ""), declared=True)
        epoch = writer.epoch(sizes=[1] * PLANNED)
        for number in range(WRITTEN):
            write(epoch, number)
        manifest, partition = load_manifest(any_client, writer.stream, 0), writer.stream.partitions[0]
        acknowledged = {number: [(0, 1)] for number in range(WRITTEN) if number != HELD}
        assert acknowledge(any_client, partition, manifest, "g", [], acknowledged)

        cleaner = Cleaner(any_client, writer.stream, lambda _: None, clock=lambda: now)
        assert cleaner.free_bytes(partition, 10**9) == SAMPLE_BYTES * (WRITTEN - 1)
        asked, removed = calls(any_client, "xrevrange"), calls(any_client, "xdel")
        assert cleaner.free_bytes(partition, 10**9) == 0
        assert calls(any_client, "xrevrange") - asked == 1 + SHARDS_AT_ONCE  # what is held, and what may come next

        write(epoch, PLANNED - 1)  # a writer may begin with the last shard
        assert acknowledge(any_client, partition, manifest, "g", [], {PLANNED - 1: [(0, 1)], HELD: [(0, 1)]})
        assert cleaner.free_bytes(partition, 10**9) == SAMPLE_BYTES
        now += FAR_S
        assert cleaner.free_bytes(partition, 10**9) == SAMPLE_BYTES
        assert calls(any_client, "xdel") - removed == 2  # nothing that was gone was removed again


def test_a_writer_of_many_shards_removes_each_entry_once(any_url: str, any_client: Client) -> None:
    """Each shard's writer used to begin from the start, and to remove removed entries again."""
    shards = 120
    with Writer(
        "t", url=any_url, spec=SPEC, budget_bytes=20 * SAMPLE_BYTES, tuning=Tuning(notify=lambda _: None)
    ) as writer:
        join_group(any_client, Membership(writer.stream, "g", "", ""), declared=True)
        epoch = writer.epoch(sizes=[1] * shards)
        manifest = load_manifest(any_client, writer.stream, 0)
        before = calls(any_client, "xdel")
        for number in range(shards):
            write(epoch, number)
            assert acknowledge(any_client, writer.stream.partitions[0], manifest, "g", [], {number: [(0, 1)]})
        assert shards - 20 <= calls(any_client, "xdel") - before <= shards


def test_a_shard_in_the_last_quarter_asks_only_for_what_was_not_known_to_be_complete(
    any_url: str, any_client: Client
) -> None:
    """Each shard used to read the whole manifest to find whose turn it is, and manifests grow."""
    shards = 3 * SHARDS_ASKED
    with Writer("t", url=any_url, spec=SPEC, budget_bytes=(shards + 1) * SAMPLE_BYTES) as writer:
        epoch = writer.epoch(sizes=[1] * shards)
        for number in range(shards - 40):
            write(epoch, number)
        asked, read = calls(any_client, "hmget"), calls(any_client, "hgetall")
        for number in range(shards - 40, shards):
            write(epoch, number)
        assert calls(any_client, "hmget") - asked <= 5  # nor for what it completed itself
        assert calls(any_client, "hgetall") - read <= 50
        assert first_unfinished(any_client, writer.stream, 0, range(shards)) is None
    with Writer("u", url=any_url, spec=SPEC) as writer:
        epoch = writer.epoch(sizes=[1] * shards)
        late = SHARDS_ASKED + 5
        for number in (*range(late), late + 1):
            write(epoch, number)
        assert first_unfinished(any_client, writer.stream, 0, range(shards)) == late
        assert first_unfinished(any_client, writer.stream, 0, range(late)) is None


def test_of_many_small_shards_all_that_may_go_goes_in_a_few_steps(any_url: str, any_client: Client) -> None:
    """Each shard used to have its own request and removal, which cost more than a small shard's samples."""
    shards = 60
    with Writer("t", url=any_url, spec=SPEC) as writer:
        join_group(any_client, Membership(writer.stream, "g", "", ""), declared=True)
        epoch = writer.epoch(sizes=[1] * shards)
        for number in range(shards):
            write(epoch, number)
        manifest, partition = load_manifest(any_client, writer.stream, 0), writer.stream.partitions[0]
        assert acknowledge(any_client, partition, manifest, "g", [], {number: [(0, 1)] for number in range(shards)})
        scripts = calls(any_client, "evalsha")
        assert Cleaner(any_client, writer.stream, lambda _: None).free_bytes(partition, 10**9) == shards * SAMPLE_BYTES
        assert calls(any_client, "evalsha") - scripts <= 8
        assert not stored(any_client, "t", 0)


def test_exactly_what_every_group_acknowledged_goes_however_it_lies_in_shards(any_url: str, any_client: Client) -> None:
    """Many shards are looked at together, of very different length: none may lose, or keep, what is another's."""
    chance, lengths = random.Random(7), [1, 200, 3, 0, 90, 33, 32, 1, 400, 64, 2]
    with Writer("t", url=any_url, spec=SPEC, partitions=2, tuning=Tuning(block_bytes=1)) as writer:
        for group in ("g", "h"):
            join_group(any_client, Membership(writer.stream, group, "", ""), declared=True)
        epoch = writer.epoch(sizes=lengths)
        for number, length in enumerate(lengths):
            with epoch.shard(number) as shard:
                for _ in range(length):
                    shard.write(sample(number))
        manifest = load_manifest(any_client, writer.stream, 0)
        left = stored(any_client, "t", 0)
        cleaner = Cleaner(any_client, writer.stream, lambda _: None)
        acknowledged: dict[str, set[tuple[int, int]]] = {"g": set(), "h": set()}
        for share in (0.5, 0.9, 1.0):
            for group, known in acknowledged.items():
                for number, length in enumerate(lengths):
                    some = [offset for offset in range(length) if chance.random() < share]
                    known |= {(number, offset) for offset in some}
                    ranges = {number: [(offset, offset + 1) for offset in some]}
                    partition = writer.stream.partition_of(number)
                    assert acknowledge(any_client, partition, manifest, group, [], ranges)
            gone = (acknowledged["g"] & acknowledged["h"]) & left.keys()
            need = SAMPLE_BYTES * sum(lengths)
            freed = sum(cleaner.free_bytes(partition, need) for partition in writer.stream.partitions)
            assert freed == SAMPLE_BYTES * len(gone)
            left -= Counter(gone)
            assert stored(any_client, "t", 0) == left
        assert not left


@pytest.mark.parametrize("partitions", [1, 2])
def test_what_was_repaired_makes_room_as_everything_else_does(
    any_url: str, any_client: Client, partitions: int
) -> None:
    """A repair in one of the shards must neither stay, nor hide what is acknowledged of the others."""
    repaired.produce(any_url, partitions=partitions)
    stream = repaired.stream_of(any_client)
    join_group(any_client, Membership(stream, "g", "", ""), declared=True)
    repaired.lose_entry(any_client, 0, 1)
    repaired.repair(any_url)
    first = entries(any_client, "t", 0)[0][0]
    for shard in range(-(-repaired.SAMPLES // repaired.SHARD)):
        any_client.setrange(stream.partition_of(shard).ledger(0, "g", shard), 0, b"\xff" * (repaired.SHARD // 8))
    any_client.setbit(stream.partitions[0].ledger(0, "g", 0), 0, 0)  # of the first entry the group owes a sample
    cleaner = Cleaner(any_client, stream, lambda _: None)
    assert all(cleaner.free_bytes(partition, 1 << 30) > 0 for partition in stream.partitions)
    assert [entry for entry, _ in entries(any_client, "t", 0)] == [first]


def test_a_pass_over_the_stream_is_made_once_however_many_partitions_need_room(
    any_url: str, any_client: Client
) -> None:
    """Each partition's cleaner made its own, over all partitions: 32 of them cost a writer a thousand looks."""
    partitions = 16
    with Writer("t", url=any_url, spec=SPEC, partitions=partitions) as writer:
        join_group(any_client, Membership(writer.stream, "g", "", ""), declared=True)
        epoch = writer.epoch(sizes=[1] * partitions)
        for number in range(partitions):
            write(epoch, number)
        manifest, cleaner = load_manifest(any_client, writer.stream, 0), Cleaner(any_client, writer.stream, print)
        for number in range(partitions):
            partition = writer.stream.partition_of(number)
            assert acknowledge(any_client, partition, manifest, "g", [], {number: [(0, 1)]})
        before = {name: calls(any_client, name) for name in ("hgetall", "info")}
        for partition in writer.stream.partitions:
            assert cleaner.free_bytes(partition, 1) == SAMPLE_BYTES
        # the pass looks at every roster twice; each call at two, the epochs, the manifest, and as it removes
        assert calls(any_client, "hgetall") - before["hgetall"] <= 7 * partitions + 5
        assert calls(any_client, "info") - before["info"] <= 2  # of these questions themselves


def test_an_older_epoch_that_is_opened_later_comes_first_again(any_url: str, any_client: Client) -> None:
    """Which epochs there are is remembered for a moment only: jobs open theirs in any order."""
    now = 0.0
    with Writer("t", url=any_url, spec=SPEC) as writer:
        turns = AdmissionOrder(any_client, writer.stream, clock=lambda: now)
        writer.epoch(1, sizes=[1, 1])
        assert turns.is_next(1, 0)
        assert not turns.is_next(1, 1)
        older = writer.epoch(0, sizes=[1])
        now += ORDER_LOOK_S
        assert not turns.is_next(1, 0)
        assert turns.is_next(0, 0)
        write(older, 0)
        assert turns.is_next(1, 0)
        turns.end(1, 1)  # alone it says nothing about the one before it
        assert not turns.is_next(1, 1)
        turns.end(1, 0)
        assert turns.is_next(1, 1)


def test_a_wait_begins_with_short_pauses_however_long_ago_the_last_one_was(any_url: str, any_client: Client) -> None:
    """A wait that never ended for its keeper would look for space twice a second only, and ignore the low mark."""
    now, budget = 0.0, 100 * SAMPLE_BYTES
    with Writer("t", url=any_url, spec=SPEC, budget_bytes=budget, tuning=Tuning(notify=lambda _: None)) as writer:
        writer.epoch(sizes=[1])
        manifest = load_manifest(any_client, writer.stream, 0)
        resources = SharedResources(any_client, writer.stream, lambda _: None)
        keeper = AdmissionControl(ShardTarget(any_client, writer.stream, manifest, 0), lambda: now, resources)
        assert not keeper.admit(SAMPLE_BYTES, budget)
        now += 0.4
        assert keeper.admit(SAMPLE_BYTES, 0)
        now += 60
        assert not keeper.admit(SAMPLE_BYTES, budget)
        assert keeper.pause_s() == pytest.approx(0.1)


def test_what_a_full_server_refused_waits_a_round_though_room_was_made(any_url: str, any_client: Client) -> None:
    """The server may not have the memory back yet: a block sent at once would be refused again and again."""
    with Writer("t", url=any_url, spec=SPEC, tuning=Tuning(notify=lambda _: None)) as writer:
        join_group(any_client, Membership(writer.stream, "g", "", ""), declared=True)
        epoch = writer.epoch(sizes=[1, 1])
        write(epoch, 0)
        manifest = load_manifest(any_client, writer.stream, 0)
        assert acknowledge(any_client, writer.stream.partitions[0], manifest, "g", [], {0: [(0, 1)]})
        resources = SharedResources(any_client, writer.stream, lambda _: None)
        keeper = AdmissionControl(ShardTarget(any_client, writer.stream, manifest, 1), lambda: 0.0, resources)
        keeper.note_full_server()
        assert not keeper.admit(SAMPLE_BYTES, SAMPLE_BYTES)
        assert stored(any_client, "t", 0) == Counter()  # space was made
        assert keeper.admit(SAMPLE_BYTES, 0)
