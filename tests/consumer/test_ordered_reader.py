"""The parts of an ordered reader, each alone with a real server: what it asks for, its waits, and its ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock_common.errors import BadEntry, EpochIncomplete, EpochNotFound, PenstockError
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import IndexRecord
from penstock_common.stream.groups.forgetting import drop_group
from penstock_common.stream.groups.roster import Membership, RankOrder, note_wait, rank_member
from penstock_common.stream.index import EpochIndexes
from penstock_common.stream.manifest import abandon_epoch, load_manifest
from penstock_common.stream.removal.deletion import release_epoch
from penstock_consumer.read import ordered
from penstock_consumer.read.canonical import IndexedPiece, RowRange
from penstock_consumer.read.claims import RankClaim
from penstock_consumer.read.fetch_plan import StepPlanner
from penstock_consumer.read.index_walk import CanonicalIndex, IndexWalk
from penstock_consumer.read.ordered import BLOCK_MS, END_MS, ExpectedEntry, OrderedReader, RowPlan
from penstock_consumer.stages.batch import ArrayPool, Batch
from penstock_consumer.stages.queue import PrefetchQueue, QueueStopped
from tests.contracts.feed import SAMPLE_BYTES, entries, numbers, open_stream, sample
from tests.contracts.ordered import expected, plan, planned_writer

BLOCK, SIZE = 4, 16


class Ranks:
    """Ranks of a group, and their readers of the first epoch, which run in no thread."""

    def __init__(self, client: Client, stack: ExitStack) -> None:
        self.client, self._stack = client, stack
        self.queue = PrefetchQueue(1 << 20)
        self.said: list[str] = []

    def reader(self, world: int = 1, batch: int = BLOCK, start: int = 0, **settings: Any) -> OrderedReader:
        """Return a reader of rank 0."""
        who = Membership(open_stream(self.client, "t"), "g", rank_member(0), "life", RankOrder(0, world, batch))
        claim = self._stack.enter_context(closing(RankClaim(self.client, who, 10.0, self.said.append)))
        claim.join("resume")
        settings = {"remainder": "pad", **settings}
        return OrderedReader(claim, 0, self.queue, ArrayPool(4), start=start, views=False, **settings)

    def batches(self) -> list[Batch]:
        """Return the batches that wait in the queue."""
        found = list[Batch]()
        while self.queue.holds_batches:
            batch = self.queue.get(0)
            assert batch is not None
            found.append(batch)
        return found

    def numbers(self) -> list[int]:
        """Return their samples."""
        return numbers(self.batches())


@pytest.fixture
def ranks(any_client: Client) -> Iterator[Ranks]:
    """Yield the ranks of a group that reads a stream, which a test writes."""
    with ExitStack() as stack:
        yield Ranks(any_client, stack)


def write_some(writer: Any, count: int, **settings: Any) -> Any:
    """Commit samples of the first shard of an epoch. Return the shard."""
    shard = writer.epoch(**settings).shard(0)
    for number in range(count):
        shard.write(sample(number))
    shard.commit_all()
    return shard


class TestAsking:
    """Entries are asked for ahead of time, and in no larger amount than the loop has a place for."""

    @pytest.mark.parametrize(("entries_of_budget", "count"), [(8, 2), (10, 3), (1, 1)])
    def test_what_is_asked_for_ahead_is_a_quarter_of_the_budget(
        self, any_url: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, entries_of_budget: int, count: int
    ) -> None:
        """One entry is always asked for, however large it is. The queue decides on each."""
        plan(any_url, [SIZE] * 2, block_samples=BLOCK)
        entry_bytes, asked = BLOCK * SAMPLE_BYTES, list[tuple[int, float]]()
        ranks.queue = PrefetchQueue(entries_of_budget * entry_bytes)
        reader = ranks.reader()

        def wait_for_space(pending_bytes: int, timeout_s: float) -> bool:
            asked.append((pending_bytes, timeout_s))
            return True

        monkeypatch.setattr(ranks.queue, "wait_for_space", wait_for_space)
        reader._plan.extend(0)
        reader._ask()
        assert asked == [(number * entry_bytes, 0) for number in range(count)]
        assert [take.piece.start for take in reader._asked] == [number * BLOCK for number in range(count)]
        reader._ask()
        assert len(asked) == count

    def test_no_more_entries_are_asked_for_than_wait_for_an_answer(
        self, any_url: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A connection that breaks costs all of them."""
        plan(any_url, [SIZE] * 2, block_samples=BLOCK)
        monkeypatch.setattr(ordered, "AHEAD_ENTRIES", 2)
        reader = ranks.reader()
        reader._plan.extend(0)
        reader._ask()
        assert len(reader._asked) == 2

    def test_a_full_queue_is_asked_for_nothing(self, any_url: str, ranks: Ranks) -> None:
        """The loop has the processor."""
        plan(any_url, [SIZE] * 2, block_samples=BLOCK)
        ranks.queue = PrefetchQueue(1)
        reader = ranks.reader()
        for _ in range(3):
            reader._turn()
        assert ranks.queue.holds_batches
        assert not reader._asked
        assert reader._plan.todo

    def test_a_step_that_is_not_committed_is_looked_for_once(
        self, any_url: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Then it is waited for at the server. A round trip in each turn would be a busy loop."""
        looks, reach = list[int](), IndexWalk.reach

        def counted(walk: IndexWalk, position: int) -> bool:
            looks.append(position)
            return reach(walk, position)

        monkeypatch.setattr(IndexWalk, "reach", counted)
        with planned_writer(any_url, block_samples=BLOCK) as writer:
            write_some(writer, 2 * BLOCK, sizes=[SIZE])
            reader = ranks.reader()
            for _ in range(2):
                reader._plan.extend(0)
            assert looks == [BLOCK, 3 * BLOCK], "the second step was seen with the first"
            assert [take.piece.start for take in reader._plan.todo] == [0, BLOCK]
            reader._plan.wait(reader._connection)
            reader._plan.extend(0)
            assert looks == [BLOCK, 3 * BLOCK, 3 * BLOCK]

    def test_records_of_several_steps_are_read_together(
        self, any_url: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The records of a rank's batches lie apart. One round trip for each would take longer than the training."""
        plan(any_url, [16 * SIZE], block_samples=BLOCK)
        trips, read = list[int](), EpochIndexes.read

        def counted(*given: Any) -> Any:
            trips.append(1)
            return read(*given)

        monkeypatch.setattr(EpochIndexes, "read", counted)
        reader = ranks.reader(world=8)
        reader._plan.extend(0)
        assert len(reader._plan.todo) == 8
        assert len(trips) < 4

    def test_a_plan_by_an_index_that_is_read_again_begins_at_once(self, any_url: str, ranks: Ranks) -> None:
        """The entries are there, under other ids."""
        with planned_writer(any_url, block_samples=BLOCK) as writer:
            write_some(writer, 3 * BLOCK, sizes=[SIZE])
            reader = ranks.reader()
            reader._plan.extend(0)
            take = reader._plan.todo[1]
            reader._plan.go_by(reader._index(reader._plan.index.manifest, BLOCK, []), take)
            assert not reader._plan.todo
            reader._plan.extend(0)
            assert [take.piece.start for take in reader._plan.todo] == [BLOCK, 2 * BLOCK]


class TestWaiting:
    """A rank waits for its own next steps, or for news of the epoch."""

    @pytest.fixture
    def waits(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Return the waits of an index, which find something while there is a True among them."""
        asked = list[Any]()

        def wait(walk: IndexWalk, channel: Any, block_ms: int, needed: int, coming: Any) -> bool:
            asked.append((block_ms, needed, list(coming)))
            return len(asked) == 1

        monkeypatch.setattr(IndexWalk, "wait", wait)
        return asked

    def test_several_steps_are_waited_for_together(
        self, any_url: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, waits: list[Any]
    ) -> None:
        """The manifest is read again where nothing came, because an epoch may end without another step."""
        renewed, reached = list[int](), list[int]()
        monkeypatch.setattr(StepPlanner, "steps", lambda _: 3)
        monkeypatch.setattr(StepPlanner, "reached", lambda _, position, now_s: reached.append(position))
        monkeypatch.setattr(CanonicalIndex, "renew", lambda _: renewed.append(len(waits)))
        with planned_writer(any_url, block_samples=BLOCK) as writer:
            write_some(writer, 3 * BLOCK, sizes=[100])
            reader = ranks.reader(world=2)
            reader._plan.extend(0)
            for _ in range(2):
                reader._plan.wait(reader._connection)
        steps = [(number, number + BLOCK) for number in (8, 16, 24)]
        assert waits == [(BLOCK_MS, 32, steps)] * 2
        assert renewed == [2]
        assert reached == [12, 12]

    def test_the_end_alone_is_waited_for_in_short_turns(self, any_url: str, ranks: Ranks, waits: list[Any]) -> None:
        """Only the producer's last message is missing."""
        with planned_writer(any_url, block_samples=BLOCK) as writer:
            write_some(writer, SIZE, sizes=[SIZE])
            reader = ranks.reader()
            reader._plan.extend(0)
            reader._plan.wait(reader._connection)
            assert not reader._plan.is_over
        assert [block_ms for block_ms, *_ in waits] == [END_MS]

    def test_producers_are_waited_for_and_then_the_reader_works(
        self, any_url: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A wrong cause would send the user of the loop to the wrong place."""
        plan(any_url, [SIZE], block_samples=BLOCK)
        ranks.queue = PrefetchQueue(1)
        reader, doing, began_s = ranks.reader(), list[str](), time.monotonic()
        ranks.queue.put(Batch({"y": np.arange(9)}, 0, []))
        monkeypatch.setattr(RowPlan, "wait", lambda *_: doing.append(ranks.queue.reader_times.doing))
        reader._await_more()
        assert [*doing, ranks.queue.reader_times.doing] == ["producers", "reader"]
        assert time.monotonic() - began_s < 0.9, "it waits for no space"
        ranks.queue.stop()
        with pytest.raises(QueueStopped):
            reader._await_more()
        assert len(doing) == 1

    def test_a_reader_of_a_share_plans_by_the_distance_of_its_own_steps(
        self, any_url: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The steps between belong to other workers. A reader that planned them would wait for them without end."""
        plan(any_url, [SIZE], block_samples=BLOCK)
        made = list[Any]()
        monkeypatch.setattr(ordered, "StepPlanner", lambda *given: made.append(given))
        ranks.reader(world=2)
        ranks.reader(world=2, share=(1, 3))
        assert [given[:2] for given in made] == [(2, 2 * BLOCK), (2, 6 * BLOCK)]

    def test_a_rank_says_what_it_waits_for(self, any_url: str, any_client: Client, ranks: Ranks) -> None:
        """The line sends its reader to the producer of a shard, or to the quota."""
        told = list[str]()
        with planned_writer(any_url, block_samples=BLOCK) as writer:
            shard = write_some(writer, BLOCK, sizes=[SIZE])
            reader = ranks.reader(world=2)
            reader._plan.extend(0)
            told.append(reader.why_waiting(3))
            note_wait(
                any_client, writer.stream.partitions[0], 0, 0, waited_s=9, need_bytes=1, held_bytes=1, why="budget",
                is_next=True,
            )  # fmt: skip
            told.append(reader.why_waiting(3))
            for number in range(BLOCK, SIZE):
                shard.write(sample(number))
            shard.commit_all()
            reader = ranks.reader(world=2)
            reader._plan.extend(0)
            told.append(reader.why_waiting(3))
        awaited = "shard 0 from offset 4 of 16 of epoch 0 of 't'"
        assert [line.partition(" If ")[0].partition(" (")[0] for line in told] == [
            f"{awaited}, which is next in order",
            f"{awaited}; none came for 3 s: its writer waits for space",
            "the word that epoch 0 of 't' is complete: all 16 samples are there, but its producer has not said so.",
        ]
        assert "(step 0 ends at position 8); none came for 3 s. Is a producer running" in told[0]


class TestSteps:
    """The end of an epoch is the same for each rank."""

    def test_the_last_step_is_known_with_the_size_of_the_epoch(self, any_url: str, ranks: Ranks) -> None:
        """A loop over an endless feed has none."""
        with planned_writer(any_url, block_samples=BLOCK) as writer:
            write_some(writer, 10, sizes=[10])
            reader = ranks.reader(world=2)
            assert [reader.is_last(position) for position in (8, 15, 16, 17)] == [False, False, True, True]

    def test_a_feed_without_an_end_has_no_last_step(self, any_url: str, ranks: Ranks) -> None:
        """A loop that waits for it would skip its next batch."""
        with planned_writer(any_url, block_samples=BLOCK) as writer:
            write_some(writer, 10)
            reader = ranks.reader()
            assert not any(reader.is_last(position) for position in (0, 8, 16))

    @pytest.mark.parametrize(
        ("remainder", "size", "end", "sizes"),
        [
            ("pad", 0, 0, []),
            ("pad", 10, 12, [4, 4, 4]),
            ("pad", 12, 12, [4, 4, 4]),
            ("keep", 10, 12, [4, 4, 2]),
            ("keep", 12, 12, [4, 4, 4]),
            ("drop", 10, 8, [4, 4]),
        ],
    )
    def test_a_rank_that_has_read_an_epoch_knows_where_it_ends(
        self,
        any_url: str,
        ranks: Ranks,
        monkeypatch: pytest.MonkeyPatch,
        remainder: str,
        size: int,
        end: int,
        sizes: list[int],
    ) -> None:
        """It closes once all up to the last step is acknowledged. A batch has the position where its step ends."""
        plan(any_url, [size], block_samples=BLOCK)
        ended = list[tuple[int, int, int]]()
        monkeypatch.setattr(RankClaim, "ended", lambda _, *given: ended.append(given))
        reader = ranks.reader(remainder=remainder)
        reader.run()
        assert ended == [(0, end, size)]
        assert ranks.queue.is_ended
        batches = ranks.batches()
        assert [batch.size for batch in batches] == sizes
        assert [batch.position for batch in batches] == [BLOCK * number for number in range(1, len(sizes) + 1)]
        assert numbers(batches) == expected(size, frozenset(), 0, sum(sizes))
        assert reader._connection._channel is None, "a connection is left"
        assert (reader.filled, reader.bad_entries, reader.loss) == (0, 0, "")

    def test_records_that_were_read_are_forgotten(self, any_url: str, ranks: Ranks) -> None:
        """An epoch of a billion samples has millions of them."""
        plan(any_url, [SIZE], block_samples=BLOCK)
        reader = ranks.reader(batch=2 * BLOCK)
        known = reader._plan.index.walk._known
        for number, is_known in ((1, True), (2, False)):  # a record is half of a batch
            while reader._plan._received < number * BLOCK:
                reader._turn()
            assert (known.at(0) is not None) is is_known


class TestMissingEntries:
    """An entry that is in the index and not in the stream is a loss, unless it is not needed."""

    def lose(self, client: Client) -> None:
        """Remove the first entry."""
        client.xdel(open_stream(client, "t").partitions[0].entries(0), entries(client, "t", 0)[0][0])

    def test_one_that_would_pad_the_last_step_is_replaced(self, any_url: str, any_client: Client, ranks: Ranks) -> None:
        """All ranks have acknowledged it, and it was removed for that."""
        plan(any_url, [SIZE], block_samples=BLOCK)
        reader = ranks.reader(start=SIZE - 1)
        self.lose(any_client)
        reader.run()
        assert ranks.numbers() == expected(SIZE, frozenset(range(BLOCK)), SIZE - 1, SIZE + 3)

    def test_one_that_its_writer_sent_again_is_read_by_its_new_id(
        self, any_url: str, any_client: Client, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server came back older, and the plan is by records that it has no more."""
        plan(any_url, [SIZE], block_samples=BLOCK)
        monkeypatch.setattr(ordered, "AHEAD_ENTRIES", 1)
        (partition,), reader = open_stream(any_client, "t").partitions, ranks.reader()
        reader._plan.extend(0)
        reader._ask()
        reader._take_answer()
        whole, records = entries(any_client, "t", 0), any_client.xrange(partition.index(0, 0))
        any_client.delete(partition.entries(0), partition.index(0, 0))
        again = {entry_id: any_client.xadd(partition.entries(0), fields) for entry_id, fields in whole}
        for record_id, fields in records:
            any_client.xadd(partition.index(0, 0), fields | {b"e": again[fields[b"e"]]}, id=record_id)
        monkeypatch.setattr(ordered, "AHEAD_ENTRIES", 3)
        reader.run()
        assert ranks.numbers() == list(range(SIZE))
        assert ranks.said == []

    def test_one_of_an_epoch_without_an_end_is_named(self, any_url: str, any_client: Client, ranks: Ranks) -> None:
        """Replaced by others, it would be lost without a word."""
        with planned_writer(any_url, block_samples=BLOCK) as writer:
            write_some(writer, 2 * BLOCK)
            reader = ranks.reader()
            self.lose(any_client)
            reader.run()
        with pytest.raises(EpochIncomplete, match="shard 0 offsets 0-3") as caught:
            ranks.queue.get(0)
        assert caught.value.missing == [(0, 0, BLOCK)]

    def test_one_that_cannot_be_read_is_counted_told_and_replaced(
        self, any_url: str, any_client: Client, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The entries that were requested or planned behind it are read in its place, once."""
        monkeypatch.setattr(ordered, "AHEAD_ENTRIES", 2)
        plan(any_url, [SIZE], block_samples=BLOCK)
        partition = open_stream(any_client, "t").partitions[0]
        whole = dict(entries(any_client, "t", 0))
        bad = list(whole)[1]
        any_client.delete(partition.entries(0))
        for entry_id, fields in whole.items():
            broken = {**fields, b"x": bytes(len(fields[b"x"]))} if entry_id == bad else fields
            any_client.xadd(partition.entries(0), broken, id=entry_id)
        reader = ranks.reader()
        reader.run()
        assert ranks.numbers() == expected(SIZE, frozenset(range(BLOCK, 2 * BLOCK)), 0, SIZE)
        assert (reader.bad_entries, reader.filled) == (1, BLOCK)
        assert any_client.hkeys(partition.dead(0, "g")) == [bad]
        (line,) = ranks.said
        assert line.startswith(f"entry {bad.decode()} of epoch 0 is a dead letter: ")
        ranks.queue = PrefetchQueue(1 << 20)
        other = ranks.reader()
        other.run()
        assert ranks.numbers() == expected(SIZE, frozenset(range(BLOCK, 2 * BLOCK)), 0, SIZE)
        assert (other.bad_entries, other.filled) == (0, BLOCK), "the group has given it up"


def test_an_entry_that_is_not_the_one_of_the_index_is_refused(any_url: str, any_client: Client) -> None:
    """Its rows would be delivered as those of others."""
    plan(any_url, [SIZE], block_samples=BLOCK)
    stream = open_stream(any_client, "t")
    manifest = load_manifest(any_client, stream, 0)
    awaited = ExpectedEntry(stream, manifest)
    piece = IndexedPiece(4, 0, IndexRecord(8, b"1-0", 4, 3, 96, (5,)))
    right = {"stream": stream.id, "epoch": 0, "shard": 0, "first": 4, "end": 8, "holes": [5]}
    for rows, wanted in ((np.arange(3), None), (np.arange(2), [0, 1])):
        awaited.expect(RowRange(piece, rows, 0, 0), manifest)
        header = cast(Any, SimpleNamespace(**right))
        awaited.check(header)
        found = awaited.wanted(header, b"1-0")
        assert wanted is None if found is None else found.tolist() == wanted
    for wrong in ({"stream": "other"}, {"epoch": 1}, {"shard": 1}, {"first": 5}, {"end": 9}, {"holes": [6]}):
        with pytest.raises(BadEntry):
            awaited.check(cast(Any, SimpleNamespace(**right | wrong)))


class TestEpochThatIsGone:
    """A rank whose epoch is gone ends it with what was there, or by an error."""

    @pytest.fixture
    def ended(self, any_url: str, ranks: Ranks) -> Callable[[], str]:
        """Return a function that lets a reader meet the end of its epoch, and returns its error."""
        plan(any_url, [SIZE], block_samples=BLOCK)
        reader = ranks.reader()

        def end() -> str:
            reader._end_released(EpochNotFound("gone"))
            assert ranks.queue.is_ended
            try:
                return str(ranks.queue.get(0) or "")
            except PenstockError as error:
                return str(error)

        return end

    def test_one_that_was_given_up_is_told(self, ended: Callable[[], str], ranks: Ranks, any_client: Client) -> None:
        """The training has seen less than the epoch had."""
        abandon_epoch(any_client, open_stream(any_client, "t"), 0)
        assert release_epoch(any_client, open_stream(any_client, "t"), 0)
        assert ended() == ""
        assert ranks.said == ["epoch 0 of 't' was abandoned and released while it was read"]

    def test_one_that_its_server_lost_is_told_by_its_loader(
        self, ended: Callable[[], str], ranks: Ranks, any_client: Client
    ) -> None:
        """It may come back, and is read again then."""
        any_client.delete(open_stream(any_client, "t").keys.manifest(0))
        assert ended() == ""
        assert ranks.said == []

    def test_a_group_that_is_gone_is_an_error(self, ended: Callable[[], str], ranks: Ranks, any_client: Client) -> None:
        """It is no end of an epoch: the samples were there, and this group's progress is gone."""
        drop_group(any_client, open_stream(any_client, "t"), "g")
        assert ended() == "gone"
        assert ranks.said == []
