"""A trainer whose stream's slots disagree, because the server of one of them came back older."""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import Any

import pytest

from penstock_common.errors import EpochIncomplete, EpochNotFound, GroupNotFound
from penstock_common.stream.groups.forgetting import drop_group
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.manifest import retained_epochs
from penstock_common.stream.removal.deletion import release_epoch
from penstock_consumer.read.canonical import RowRange
from penstock_consumer.read.ordered import OrderedReader
from penstock_producer.write.cleaner import clean_up
from penstock_producer.write.retention import parse_policy
from tests.contracts.feed import loader_of, numbers, open_stream, writer_of
from tests.contracts.ordered import plan, planned_writer, rank_of, write_shard
from tests.torn_slots import partition_slot, stream_slot

SIZES = [20, 20]


@pytest.mark.parametrize("order", ["shared", "canonical"])
def test_a_manifest_that_no_partition_knows_holds_up_no_trainer(any_url: str, any_client: Any, order: str) -> None:
    """Its release was lost with the stream's slot, and no process writes the stream that could complete it."""
    plan(any_url, SIZES, partitions=2, epochs=2)
    stream, open_loader = open_stream(any_client, "t"), loader_of if order == "shared" else rank_of
    with open_loader(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(40))
    before = stream_slot(any_client, stream)
    release_epoch(any_client, stream, 0)
    before.restore(any_client)
    assert list(retained_epochs(any_client, stream)) == [0, 1]
    began_s = time.monotonic()
    with open_loader(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(40))
        assert loader.stats().epoch == 1
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("order", ["shared", "canonical"])
def test_a_loss_is_said_as_a_loss_with_server_partition_time_and_ranges(
    any_url: str, any_client: Any, order: str
) -> None:
    """'Was never given' sent its reader to look for a fault of the trainer."""
    with planned_writer(any_url, 2) as writer:
        epoch = writer.epoch(sizes=SIZES)
        write_shard(epoch, 0, SIZES, frozenset())
        before = partition_slot(any_client, writer.stream, 1)
        write_shard(epoch, 1, SIZES, frozenset())
    before.restore(any_client)
    server = any_client.where
    with (
        pytest.raises(EpochIncomplete, match=r"lost 20 committed samples \(shard 1 offsets 0-19\)") as caught,
        loader_of(any_url) if order == "shared" else rank_of(any_url) as loader,
    ):
        numbers(loader)
    assert f"the server {server}, which has partition 1" in str(caught.value)
    assert "it has nothing of the epoch" in str(caught.value)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_reads_records_again_whose_entries_a_failover_lost_and_the_writer_sends_again(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """Its plan has the ids of the lost entries. It said that samples were missing which were there, or about to be."""
    ask, missing = OrderedReader._ask, OrderedReader._missing
    is_written, was_lost, is_noticed = Event(), Event(), Event()
    with planned_writer(any_url) as writer:
        epoch = writer.epoch(sizes=SIZES)
        write_shard(epoch, 0, SIZES, frozenset())
        with rank_of(any_url) as loader:
            batches = iter(loader)
            found = numbers([next(batches)])
            before = [stream_slot(any_client, writer.stream), partition_slot(any_client, writer.stream, 0)]

            def write_again() -> None:
                assert is_noticed.wait(10)
                write_shard(epoch, 1, SIZES, frozenset())

            writing = Thread(target=write_again)

            def ask_after_the_loss(reader: OrderedReader) -> None:
                todo = reader._plan.todo
                if todo and todo[0].piece.shard == 1 and not was_lost.is_set():
                    assert is_written.wait(10)
                    for state in before:
                        state.restore(any_client)
                    was_lost.set()
                    writing.start() if is_late else write_shard(epoch, 1, SIZES, frozenset())
                ask(reader)

            def notice(reader: OrderedReader, take: RowRange) -> None:
                missing(reader, take)
                is_noticed.set()

            monkeypatch.setattr(OrderedReader, "_ask", ask_after_the_loss)
            monkeypatch.setattr(OrderedReader, "_missing", notice)
            write_shard(epoch, 1, SIZES, frozenset())
            is_written.set()
            found += numbers(batches)
            if is_late:
                writing.join()
    assert is_noticed.is_set()
    assert found == list(range(40))


def test_an_epoch_is_kept_for_a_group_that_one_roster_has_lost(any_url: str, any_client: Any) -> None:
    """The first roster alone decided on releases: a group that it had lost was given nothing of them."""
    plan(any_url, SIZES, partitions=2)
    stream = open_stream(any_client, "t")
    with loader_of(any_url, group="done") as loader:
        assert len(numbers(loader)) == 40
    before = partition_slot(any_client, stream, 0)
    with loader_of(any_url, group="late", start="earliest") as loader:
        next(iter(loader))
        before.restore(any_client)
        clean_up(any_client, stream, lambda _: None, policy=parse_policy("epochs:0"))
        assert list(retained_epochs(any_client, stream)) == [0]


@pytest.mark.parametrize("number", [0, 1])
def test_a_full_budget_frees_nothing_that_a_group_of_another_roster_needs(
    any_url: str, any_client: Any, number: int
) -> None:
    """A writer that waits for quota released whole epochs by the first roster, and trimmed entries by its own."""
    plan(any_url, SIZES, partitions=2)
    stream = open_stream(any_client, "t")
    with loader_of(any_url, group="done") as done, writer_of(any_url) as writer:
        assert len(numbers(done)) == 40
        before = partition_slot(any_client, stream, number)
        with loader_of(any_url, group="late", start="earliest", prefetch_bytes=200) as loader:
            next(iter(loader))
            before.restore(any_client)
            writer._resources.cleaners.of(1).free_bytes(1 << 20)
            assert list(retained_epochs(any_client, stream)) == [0]
            assert any_client.xlen(stream.partitions[1].entries(0)) == 3


def test_a_member_that_one_roster_has_lost_joins_again_and_is_given_everything(any_url: str, any_client: Any) -> None:
    """Its training ended, though the group was dropped by nobody."""
    plan(any_url, [40, 40], partitions=2)
    stream, found = open_stream(any_client, "t"), list[int]()
    before = partition_slot(any_client, stream, 1)
    with loader_of(any_url, prefetch_bytes=400) as loader:
        for number, batch in enumerate(loader):
            found += batch["y"].tolist()
            if number == 0:
                before.restore(any_client)
            time.sleep(0.2)
    assert set(found) == set(range(80))
    assert len(found) - len(set(found)) <= 40, "only what the server forgot comes again"
    assert ("g", 0) in load_roster(any_client, stream.partitions[1]).closed


def test_a_group_that_is_dropped_is_not_brought_back_by_its_members(any_url: str, any_client: Any) -> None:
    """An operator who drops a group with living members wants it gone."""
    plan(any_url, [40, 40], partitions=2)
    stream = open_stream(any_client, "t")
    with pytest.raises((GroupNotFound, EpochNotFound)), loader_of(any_url, prefetch_bytes=400) as loader:
        for _ in loader:
            drop_group(any_client, stream, "g")
            time.sleep(0.5)
    time.sleep(1.5)
    assert [load_roster(any_client, partition).groups for partition in stream.partitions] == [{}, {}]
