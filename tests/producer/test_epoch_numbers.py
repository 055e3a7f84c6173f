"""Epoch numbers that a server gave out, forgot, and gives out again."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_common.errors import EpochAbandoned, EpochFailed, StreamConflict
from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import load_manifest, open_epoch, retained_epochs
from penstock_common.stream.servers.confirmed import Question
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from tests.contracts.feed import SAMPLE_BYTES, SPEC, open_stream, produce, replayed, sample, stored, writer_of
from tests.producer.test_jobs import dataset, options_of
from tests.torn_slots import stream_slot

QUIET: dict[str, Any] = {"spec": SPEC, "block_bytes": 4 * SAMPLE_BYTES}


def forget_epoch(client: Client, number: int, name: str = "t") -> None:
    """Change the server as if it came back from a time before the epoch was opened."""
    stream = open_stream(client, name)
    partition = stream.partitions[0]
    client.delete(stream.keys.manifest(number), partition.state(number), partition.entries(number))
    client.delete(partition.index(number, 0))
    client.hdel(stream.keys.epochs, str(number))
    client.hdel(partition.roster, f"e:{number}", f"b:{number}")
    client.hset(stream.keys.meta, "next_epoch", number)


def test_a_number_that_a_partition_has_under_another_manifest_leaves_no_open_epoch(
    any_url: str, any_client: Client
) -> None:
    """A process that was opening it when the server went down registers it afterwards, and may die then.

    The error was redis-py's, and trainers waited for ever in an epoch without a writer.
    """
    with writer_of(any_url, **QUIET) as writer:
        roster = writer.stream.partitions[0].roster
        any_client.hset(roster, "e:0", "forgotten")
        with pytest.raises(StreamConflict, match="number 0 of 't' was given out twice"):
            writer.epoch()
        assert not retained_epochs(any_client, writer.stream)
        assert not any_client.exists(writer.stream.keys.manifest(0))
        assert any_client.hget(roster, "e:0") == b"forgotten"
        with writer.epoch() as epoch:
            epoch.write(sample(1))
        assert epoch.number == 1
    assert replayed(any_url, 1) == [1]


def test_a_damaged_partition_does_not_take_a_running_epoch_away(any_url: str, any_client: Client) -> None:
    """Only what was begun here and now is taken back: others may write the epoch."""
    with writer_of(any_url, **QUIET) as writer:
        epoch = writer.epoch(0, sizes=[4])
        any_client.hset(writer.stream.partitions[0].roster, "e:0", "other")
        with pytest.raises(StreamConflict):
            writer.epoch(0, sizes=[4])
        assert load_manifest(any_client, writer.stream, 0).id == epoch.manifest.id


def test_a_new_epoch_is_never_one_that_another_writer_opened(any_url: str, any_client: Client) -> None:
    """Both would write its shard 0, and each would take the other's samples for its own."""
    produce(any_url, "t", 8)
    stream = open_stream(any_client, "t")
    any_client.hset(stream.keys.meta, "next_epoch", 0)
    with writer_of(any_url, **QUIET) as writer:
        with pytest.raises(StreamConflict, match="number 0 of 't' was given out twice"):
            writer.epoch()
        with writer.epoch() as epoch:
            epoch.write(sample(99))
    assert retained_epochs(any_client, stream) == {0: "produced", 1: "produced"}
    assert replayed(any_url) == list(range(8))
    assert replayed(any_url, 1) == [99]


@pytest.mark.parametrize("is_taken", [False, True])
def test_an_epoch_that_a_failover_takes_while_it_is_opened_keeps_its_number_and_its_id(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """The partitions had it under the id that the server of its manifest lost, so a production ended by an error."""
    with writer_of(any_url, partitions=2, **QUIET) as writer:
        before, lacking = stream_slot(any_client, writer.stream), ["a replica has it"]

        def fail_over(question: Question) -> dict[str, str]:
            if not lacking:
                return {}
            before.restore(any_client)
            if is_taken:
                for partition in writer.stream.partitions:
                    any_client.hdel(partition.roster, "e:0")
                    any_client.delete(partition.state(0))
                open_epoch(any_client, writer.stream)
            return {writer.stream.keys.meta: lacking.pop()}

        monkeypatch.setattr(Question, "lacking", fail_over)
        if is_taken:
            with pytest.raises(StreamConflict, match="number 0 of 't' was given out twice"):
                writer.epoch(sizes=[1])
            return
        epoch = writer.epoch(sizes=[1])
        shard = epoch.shard(0)
        shard.write(sample(7))
        shard.close()
    assert not lacking
    assert replayed(any_url) == [7]


def test_a_feed_goes_on_past_a_number_that_is_in_use(any_url: str, any_client: Client) -> None:
    """A feed loses nothing by that, so its owner gets no message."""
    produce(any_url, "t", 8)
    stream = open_stream(any_client, "t")
    any_client.hset(stream.keys.meta, "next_epoch", 0)
    with writer_of(any_url, **QUIET) as writer:
        writer.write(sample(99))
    assert replayed(any_url, 1) == [99]


def test_a_writer_of_a_forgotten_epoch_leaves_the_one_with_its_number_alone(any_url: str, any_client: Client) -> None:
    """It gave up another writer's epoch when it ended by its error, and that writer's samples with it."""
    with writer_of(any_url, **QUIET) as first, writer_of(any_url, **QUIET) as second:
        forgotten = first.epoch()
        forgotten.write(sample(0))
        forgotten.flush()
        forget_epoch(any_client, 0)
        with second.epoch() as epoch:
            assert epoch.number == 0
            epoch.write(sample(100))
            epoch.flush()
            with pytest.raises(EpochAbandoned, match=r"gone.*another one has its number"), forgotten:
                for number in range(1, 9):
                    forgotten.write(sample(number))
            epoch.write(sample(101))
    assert stored(any_client, "t", 0).total() == 2
    assert replayed(any_url) == [100, 101]


def test_a_production_of_a_forgotten_epoch_leaves_the_one_with_its_number_alone(
    any_url: str, any_client: Client
) -> None:
    """It took that epoch's progress for its own, and gave it up when another part of its split failed."""
    plan = ProductionPlan(stream="t", source=dataset(), spec=SPEC, partitions=1)
    with Production(plan, options_of(any_url), workers=0, notify=lambda _: None) as production:
        looks = production.run()
        next(looks)
        forget_epoch(any_client, 0)
        with writer_of(any_url) as second, second.epoch() as epoch:
            assert epoch.number == 0
            epoch.write(sample(100))
            with pytest.raises(EpochFailed, match="abandoned or removed by someone else"):
                next(looks)
            production.abandon()
            epoch.write(sample(101))
    assert replayed(any_url) == [100, 101]
