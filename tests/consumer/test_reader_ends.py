"""The ways out of a reader's thread: an epoch or a group that is gone, a connection that breaks, segments that are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import PenstockError, SegmentsUnseen
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.forgetting import drop_group
from penstock_common.stream.manifest import abandon_epoch
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.waiting import OUTAGE_S, Outage
from penstock_consumer.read import receive
from tests.contracts.feed import loader_of, numbers, open_stream, sample
from tests.contracts.ordered import plan, planned_writer, rank_of

SIZE = 700
FEW = 400
"""Bytes that a loader reads ahead here."""
ABANDONED = "epoch 0 of 't' was abandoned and released while it was read"


@pytest.mark.parametrize("is_ordered", [False, True])
def test_an_epoch_that_was_abandoned_and_released_ends_with_what_was_there(
    any_url: str, any_client: Client, is_ordered: bool
) -> None:
    """The producer gave it up. The training goes on with the next epoch, and its log says why this one was short."""
    said: list[str] = []
    loader_for: Any = rank_of if is_ordered else loader_of
    with planned_writer(any_url, block_samples=10) as writer:
        epoch = writer.epoch(sizes=[2 * SIZE])
        with pytest.raises(ZeroDivisionError), epoch.shard(0) as shard:
            for number in range(SIZE):
                shard.write(sample(number))
            shard.commit_all()
            raise ZeroDivisionError
        with loader_for(any_url, prefetch_bytes=FEW, notify=said.append) as loader:
            batches = iter(loader)
            found = numbers([next(batches)])
            epoch.abandon()
            release_epoch(any_client, writer.stream, 0)
            with writer.epoch(sizes=[20]).shard(0) as shard:
                for number in range(20):
                    shard.write(sample(number))
            found += numbers(batches)
            assert found == list(range(len(found)))
            assert len(found) < SIZE
            assert sum(ABANDONED in line for line in said) == 1, said
            assert numbers(loader) == list(range(20))


def test_an_abandoned_epoch_whose_release_is_under_way_ends_with_what_was_there(
    any_url: str, any_client: Client
) -> None:
    """A rank that meets an entry without its samples would say that they are lost, and end its training."""
    said: list[str] = []
    with planned_writer(any_url, block_samples=10) as writer:
        epoch = writer.epoch(sizes=[SIZE])
        with epoch.shard(0) as shard:
            for number in range(SIZE):
                shard.write(sample(number))
        with rank_of(any_url, prefetch_bytes=FEW, notify=said.append) as loader:
            batches = iter(loader)
            found = numbers([next(batches)])
            abandon_epoch(any_client, writer.stream, 0)
            any_client.unlink(writer.stream.partitions[0].entries(0))
            found += numbers(batches)
    assert found == list(range(len(found)))
    assert len(found) < SIZE
    assert sum(ABANDONED in line for line in said) == 1, said


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_group_that_was_dropped_with_its_epoch_ends_its_training_by_an_error(
    any_url: str, any_client: Client, is_ordered: bool
) -> None:
    """It is no end of an epoch: the samples were there, and this group's progress is gone."""
    said: list[str] = []
    plan(any_url, [SIZE], block_samples=10)
    stream = open_stream(any_client, "t")
    loader_for: Any = rank_of if is_ordered else loader_of
    with loader_for(any_url, prefetch_bytes=FEW, notify=said.append) as loader:
        batches = iter(loader)
        next(batches)
        drop_group(any_client, stream, "g")
        release_epoch(any_client, stream, 0)
        with pytest.raises(PenstockError):
            numbers(batches)
    assert ABANDONED not in said


def test_what_was_asked_for_when_a_connection_broke_is_read_in_its_place(any_url: str, any_client: Client) -> None:
    """An ordered rank asks for several entries ahead, and the order is the promise."""
    plan(any_url, [SIZE], block_samples=3)
    any_client.client_setname("control")
    found: list[int] = []
    with rank_of(any_url, prefetch_bytes=2000) as loader:
        for batch in loader:
            found += numbers([batch])
            if len(found) % 80 == 0:
                for client in any_client.client_list():
                    if client["name"] != "control":
                        any_client.client_kill_filter(_id=client["id"])
    assert found == list(range(SIZE))


@pytest.mark.parametrize("is_ordered", [False, True])
def test_the_times_of_two_outages_do_not_add_up(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch, is_ordered: bool
) -> None:
    """An epoch takes hours. Each outage may last a minute, however long ago the one before was."""
    now_s = [0.0]
    monkeypatch.setattr(receive, "Outage", partial(Outage, clock=lambda: now_s[0]))
    plan(any_url, [SIZE], block_samples=3)
    any_client.client_setname("control")
    found: list[int] = []
    loader_for: Any = rank_of if is_ordered else loader_of
    with loader_for(any_url, prefetch_bytes=FEW) as loader:
        for batch in loader:
            found += numbers([batch])
            if len(found) % 200 == 0:
                now_s[0] += 2 * OUTAGE_S
                for client in any_client.client_list():
                    if client["name"] != "control":
                        any_client.client_kill_filter(_id=client["id"])
    assert sorted(found) == list(range(SIZE))


def test_an_entry_in_a_partition_that_is_not_its_shards_is_a_dead_letter(any_url: str, any_client: Client) -> None:
    """Its samples are counted in another ledger, so they would be read by two members and acknowledged by none."""
    plan(any_url, [20, 20], block_samples=10, partitions=2)
    stream = open_stream(any_client, "t")
    first, second = stream.partitions
    for _, fields in any_client.xrange(first.entries(0)):
        any_client.xadd(second.entries(0), fields)
    said: list[str] = []
    with loader_of(any_url, notify=said.append) as loader:
        assert sorted(numbers(loader)) == list(range(40))
    assert sum("belongs to another partition" in line for line in said) == 2, said


@pytest.mark.parametrize("is_ordered", [False, True])
def test_segments_that_are_gone_are_named(
    any_url: str, any_client: Client, memory_path: Path, is_ordered: bool
) -> None:
    """No sample of the epoch can be read here any more, which is no matter of one entry."""
    plan(any_url, [SIZE], block_samples=10, payload=f"segments:{memory_path}")
    loader_for: Any = rank_of if is_ordered else loader_of
    with loader_for(any_url, prefetch_bytes=FEW) as loader:
        for file in memory_path.rglob("*"):
            if file.is_file():
                file.unlink()
        with pytest.raises(SegmentsUnseen, match=str(memory_path)):
            numbers(loader)
