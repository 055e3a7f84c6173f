"""Ranks read an index by position: each reads what its own batches need, however many other ranks there are."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.errors import EpochIncomplete
from penstock_common.server.connection import open_channel
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import IndexRecord
from penstock_common.stream.groups.roster import Membership, RankOrder, rank_member
from penstock_common.stream.index import EpochIndexes, IndexPages
from penstock_common.stream.manifest import load_manifest
from penstock_consumer.read.canonical import IndexedPiece, RowRange
from penstock_consumer.read.claims import RankClaim
from penstock_consumer.read.index_walk import IndexWalk, KnownRecords
from penstock_consumer.read.ordered import OrderedReader
from penstock_consumer.stages.batch import ArrayPool
from penstock_consumer.stages.queue import PrefetchQueue
from penstock_producer.write.writer import EpochWriter
from tests.contracts.feed import open_stream, sample
from tests.contracts.ordered import expected, interleaved, plan, planned_writer, rank_of, read_ranks, write_shards


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6))), st.integers(0, 36))
def test_what_was_read_last_of_a_position_holds(added: Sequence[tuple[int, int]], below: int) -> None:
    """A repair during the reading of an epoch replaces all records that it overlaps, whatever its bounds are."""
    known = KnownRecords()
    model: dict[int, int] = {}
    for number, (start, length) in enumerate(added):
        overlapped = {model[p] for p in range(start, start + length) if p in model}
        model = {position: one for position, one in model.items() if one not in overlapped}
        model |= dict.fromkeys(range(start, start + length), number)
        known.add(IndexedPiece(start, 0, IndexRecord(start + length, b"%d-0" % number, start, length, length, ())))
    known.forget(below)
    kept = {one for position, one in model.items() if position >= below}
    for position in range(40):
        found = known.at(position)
        owner = model.get(position)
        assert (None if found is None else int(found.record.entry_id[:-2])) == (owner if owner in kept else None)


class Reads:
    """A count of the records that all walks read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records = self.trips = 0
        self._read = EpochIndexes.read
        monkeypatch.setattr(EpochIndexes, "read", lambda *given: self._counted(*given))

    def _counted(self, *given: Any) -> IndexPages:
        found = self._read(*given)
        self.records += sum(map(len, found.records))
        self.trips += 1
        return found


def test_many_ranks_together_read_little_more_of_the_index_than_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each rank's work for a batch grows with the number of ranks."""
    blocks = 2000
    plan(url, [8 * blocks], block_samples=8)
    reads = Reads(monkeypatch)
    with rank_of(url, group="alone") as loader:
        assert sum(batch.size for batch in loader) == 8 * blocks
    alone, reads.records = (reads.records, reads.trips), 0
    with rank_of(url, 3, 16, group="many") as loader:
        assert [int(batch["y"][0]) for batch in loader] == list(range(8 * 3, 8 * blocks, 8 * 16))
    assert reads.records < alone[0] / 4, "of 2,000 records its batches lie in 125"
    assert alone[1] < 10


def test_steps_over_many_small_shards_are_followed_while_they_are_written(url: str) -> None:
    """A step may need a dozen shards, some of them empty, and holes at a step's end need a look beyond it."""
    sizes = [3, 0, 5, 1] * 30
    total = sum(sizes)
    bad = frozenset(range(30, 36)) | {total - 1}
    with planned_writer(url, 3, block_samples=2) as writer:
        epoch = writer.epoch(sizes=sizes)
        thread = threading.Thread(target=write_shards, args=(epoch, range(len(sizes)), sizes, bad))
        thread.start()
        ranks = read_ranks(url, 4, 8)
        thread.join()
    steps = -(-total // 32)
    assert interleaved(ranks) == expected(total, bad, 0, 32 * steps)


class Waiting:
    """A walk through a planned epoch of four shards of eight samples, with the positions at which it has waited."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = open_stream(client, "t")
        manifest = load_manifest(client, stream, 0)
        self._client, self._await_more = client, EpochIndexes.await_more
        self.at: list[tuple[int, int]] = []
        """(shard, offset beyond which there must be a record)."""
        self.walk = IndexWalk(client, stream, manifest, 0)
        monkeypatch.setattr(EpochIndexes, "await_more", lambda *given: self._noted(*given))

    def _noted(self, indexes: EpochIndexes, channel: Any, shard: int, after: int, *rest: Any) -> IndexPages:
        self.at.append((shard, after))
        return self._await_more(indexes, channel, shard, after, *rest)

    def until(self, position: int) -> bool:
        """Return whether there were new records."""
        with closing(open_channel(self._client)) as channel:
            return self.walk.wait(channel, 20_000, position, [])


@contextmanager
def four_shards(url: str) -> Iterator[EpochWriter]:
    """Open an epoch without any samples."""
    with planned_writer(url, block_samples=2) as writer:
        yield writer.epoch(sizes=[8] * 4)


def test_a_step_over_several_shards_wakes_a_rank_once(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wake-up among many finds cold caches, and the end of a shard on the way completes no batch."""
    with four_shards(url) as epoch:
        waiting = Waiting(client, monkeypatch)
        thread = threading.Thread(target=write_shards, args=(epoch, range(4), [8] * 4, frozenset()))
        thread.start()
        assert waiting.until(30)
        thread.join()
    assert waiting.walk.end >= 30
    assert waiting.at == [(3, 5)]


def test_shards_that_are_written_in_any_order_are_waited_for_one_after_the_other(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several producers, waiting at an existing shard would be constant asking, or sleeping."""
    with four_shards(url) as epoch:
        waiting = Waiting(client, monkeypatch)
        write_shards(epoch, [3], [8] * 4, frozenset())
        assert not waiting.until(32)
        write_shards(epoch, [1, 2], [8] * 4, frozenset())
        assert not waiting.until(32)
        assert waiting.walk.end == 0
        write_shards(epoch, [0], [8] * 4, frozenset())
        assert waiting.until(32)
    assert waiting.walk.end == 32
    assert waiting.at == [(3, 7), (2, 7), (0, 7)]


def test_a_rank_whose_batches_lie_in_a_gap_names_it(any_url: str, any_client: Client) -> None:
    """It does not read before its batch, but must see that no record covers it."""
    plan(any_url, [80], block_samples=10)
    any_client.xdel(open_stream(any_client, "t").partitions[0].index(0, 0), "30-0")
    with rank_of(any_url, 1, 2, 10) as loader:
        batches = iter(loader)
        assert next(batches)["y"].tolist() == list(range(10, 20))
    with rank_of(any_url, 0, 2, 10) as loader, pytest.raises(EpochIncomplete, match="no record of offsets 20-29"):
        list(loader)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_rank_that_plans_again_begins_with_a_whole_batch_of_its_epoch(
    any_url: str, any_client: Client, is_whole: bool
) -> None:
    """A server that came back older has other entries. Rows that fill the last step lie behind the epoch's end."""
    with planned_writer(any_url, block_samples=4) as writer:
        epoch = writer.epoch(sizes=[16]) if is_whole else writer.epoch()
        with epoch.shard(0) as shard:
            for number in range(16):
                shard.write(sample(number))
        who = Membership(open_stream(any_client, "t"), "g", rank_member(0), "life", RankOrder(0, 2, 2))
        with closing(RankClaim(any_client, who, 10.0, print)) as rank:
            rank.join("resume")
            reader = OrderedReader(rank, 0, PrefetchQueue(1000), ArrayPool(4), remainder="pad", start=0, views=False)
            piece = IndexedPiece(0, 0, IndexRecord(4, b"1-0", 0, 4, 96, ()))
            begins = [reader._plan.begin_of(RowRange(piece, np.arange(1), first, 0)) for first in (0, 1, 2, 7, 8, 10)]
        assert begins == [0, 0, 4, 12, 16, 16 if is_whole else 20]
