"""Ordered reading on real servers: the same batches from any writers, equal steps, and no gap without an error."""

from __future__ import annotations

import random
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import EpochIncomplete, OrderNeedsSizes, TooLarge, WaitTimeout
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.mending.bad import retry_dead
from penstock_common.tuning import Canonical, Tuning
from penstock_producer.write.writer import Writer
from tests.contracts.feed import entries, loader_of, numbers, open_stream, produce, replayed, sample
from tests.contracts.ordered import (
    expected,
    interleaved,
    plan,
    planned_writer,
    rank_of,
    read_ranks,
    write_shards,
)

BAD = frozenset(random.Random(3).sample(range(700), 50))
SIZES = (100,) * 7


class TestOrder:
    """Ordered reading gives the same batches, whatever happened before."""

    @pytest.mark.parametrize("partitions", [1, 3, 8])
    def test_batches_are_the_plans_and_not_the_producers(self, url: str, partitions: int) -> None:
        """A run is reproducible only if the order does not depend on which producer was faster."""
        plan(url, SIZES, BAD, partitions=partitions, turn=(3, 0, 6, 4, 2, 1, 5), block_samples=partitions + 5)
        ranks = read_ranks(url, 3, 8)
        assert interleaved(ranks) == expected(700, BAD, 0, 720)
        with rank_of(url, group="alone") as loader:
            assert len(loader) == 88
            assert numbers(loader) == expected(700, BAD, 0, 700)
            assert loader.stats().filled == len(BAD)

    def test_it_is_the_order_of_a_replay(self, any_url: str) -> None:
        """A debugging session must see what training saw."""
        plan(any_url, SIZES, turn=(6, 5, 4, 3, 2, 1, 0), partitions=3)
        with rank_of(any_url) as loader:
            assert numbers(loader) == replayed(any_url) == list(range(700))

    def test_two_producers_at_once_change_nothing(self, any_url: str) -> None:
        """Workers commit in any order, and the canonical order does not depend on it."""
        with planned_writer(any_url, 3) as one, planned_writer(any_url, 3) as two:
            epochs = [writer.epoch(0, sizes=list(SIZES)) for writer in (one, two)]
            threads = [
                threading.Thread(target=write_shards, args=(epoch, shards, SIZES, BAD))
                for epoch, shards in zip(epochs, [(5, 1, 3), (0, 6, 4, 2)], strict=True)
            ]
            with rank_of(any_url, 0, 2) as zero, rank_of(any_url, 1, 2) as other:
                found: list[list[list[int]]] = [[], []]
                readers = [
                    threading.Thread(target=lambda r=rank, one=loader: found[r].extend(b["y"].tolist() for b in one))
                    for rank, loader in enumerate((zero, other))
                ]
                for thread in (*threads, *readers):
                    thread.start()
                for thread in (*threads, *readers):
                    thread.join(60)
        assert interleaved(found) == expected(700, BAD, 0, 704)

    def test_ragged_tensors_keep_their_rows(self, any_url: str) -> None:
        """Rows that are chosen from an entry must be the same rows in every tensor."""
        spec = {"boxes": ("float32", (None, 4)), "name": ("bytes", ()), "y": ("int64", ())}
        with planned_writer(any_url, spec=spec, block_bytes=400) as writer, writer.epoch() as epoch:
            for number in range(70):
                if number % 9 == 4:
                    epoch.quarantine("bad")
                else:
                    boxes = np.full((number % 5, 4), number, np.float32)
                    epoch.write({"boxes": boxes, "name": b"n" * number, "y": number})
        with rank_of(any_url, 1, 2, 5) as loader:
            for batch in loader:
                for y, boxes, name in zip(batch["y"].tolist(), batch["boxes"], batch["name"], strict=True):
                    assert np.array_equal(boxes, np.full((y % 5, 4), y, np.float32))
                    assert name == b"n" * y


class TestSteps:
    """Every rank has the same number of steps, or distributed training hangs."""

    @pytest.mark.parametrize("remainder", ["pad", "drop"])
    def test_ranks_have_equal_steps_whatever_is_bad(self, any_url: str, any_client: Client, remainder: str) -> None:
        """10,007 samples, 7 % of them bad, 3 ranks and batches of 32: no number divides another."""
        total = 10_007
        bad = frozenset(random.Random(7).sample(range(total), total * 7 // 100))
        plan(any_url, [3000, 3000, 3000, 1007], bad, block_samples=50, partitions=3)
        steps = -(-total // 96) if remainder == "pad" else total // 96
        ranks = read_ranks(any_url, 3, 32, remainder=remainder)
        assert [len(batches) for batches in ranks] == [steps] * 3
        assert {len(batch) for batches in ranks for batch in batches} == {32}
        assert interleaved(ranks) == expected(total, bad, 0, steps * 96)
        report = audit_stream(any_client, "t")
        assert report.is_clean, report.findings
        assert (report.unread, report.delivered) == (0, {"g": total - len(bad)})

    @pytest.mark.parametrize("drop_last", [False, True])
    def test_a_last_step_repeats_the_first_samples_or_is_left_out(
        self, any_url: str, any_client: Client, drop_last: bool
    ) -> None:
        """The page on PyTorch says so in its section on DDP. Either way the group has acknowledged every sample."""
        plan(any_url, [30, 13])
        ranks = []
        for rank in range(2):
            order = Canonical(rank=rank, world_size=2, drop_last=drop_last)
            with loader_of(any_url, order=order, batch_size=8) as loader:
                ranks.append([batch["y"].tolist() for batch in loader])
        assert interleaved(ranks) == (list(range(32)) if drop_last else [*range(43), *range(5)])
        assert audit_stream(any_client, "t").delivered == {"g": 43}

    def test_one_rank_may_end_with_a_smaller_batch(self, any_url: str) -> None:
        """A single trainer wants every sample once."""
        plan(any_url, [30, 13])
        with rank_of(any_url) as loader:
            batches = list(loader)
            assert [batch.size for batch in batches] == [8] * 5 + [3]
            assert (len(loader), numbers(batches)) == (6, list(range(43)))
        with rank_of(any_url, group="padded", remainder="pad") as loader:
            assert numbers(loader) == [*range(43), *range(5)]

    def test_an_epoch_of_whole_steps_has_no_step_more_or_less(self, any_url: str) -> None:
        """Frameworks plan their learning rates by the length."""
        plan(any_url, [32])
        with rank_of(any_url, 0, 2, remainder="drop") as loader:
            batches = iter(loader)
            next(batches)
            assert len(loader) == 2
            assert len(list(batches)) == 1

    def test_an_epoch_too_small_for_a_step_does_not_hold_up_the_next(self, any_url: str) -> None:
        """With 'drop' an epoch may have no step at all."""
        plan(any_url, [5], epochs=1)
        plan(any_url, [20], epochs=1)
        assert [len(batches) for batches in read_ranks(any_url, 2, 8, remainder="drop")] == [1, 1]

    @pytest.mark.parametrize("size", [10, 3])
    def test_a_bad_entry_is_filled_alike_for_every_rank(self, any_url: str, any_client: Client, size: int) -> None:
        """One corrupted block must not make ranks unequal, nor end training. A small one is inside of a batch."""
        plan(any_url, [70, 70], block_samples=size)
        partition = open_stream(any_client, "t").partitions[0]
        whole = dict(entries(any_client, "t", 0))
        broken, fields = list(whole.items())[1]
        any_client.delete(partition.entries(0))
        for entry_id, entry in {**whole, broken: {**fields, b"x": bytes(len(fields[b"x"]))}}.items():
            any_client.xadd(partition.entries(0), entry, id=entry_id)
        any_client.xgroup_create(partition.entries(0), "_last", "$")
        bad = frozenset(range(size, 2 * size))
        ranks = read_ranks(any_url, 3, 8)
        assert interleaved(ranks) == expected(140, bad, 0, 144)
        report = audit_stream(any_client, "t")
        assert (report.dead, report.lost, report.delivered) == (size, 0, {"g": 140 - size})
        assert retry_dead(any_client, open_stream(any_client, "t")) == []
        assert load_roster(any_client, partition).closed == {("g", 0)}

    def test_an_epoch_of_bad_samples_alone_is_said(self, any_url: str) -> None:
        """No sample can stand in for them, and a rank that looked for one would never end."""
        plan(any_url, [8], frozenset(range(8)))
        with rank_of(any_url) as loader, pytest.raises(EpochIncomplete, match="epoch 0 of 't' has no sample that"):
            list(loader)


class TestWaits:
    """A live stream is read while it is produced."""

    def test_a_step_is_handed_out_as_soon_as_it_is_committed(self, any_url: str) -> None:
        """Training begins with the first samples, not after the last ones."""
        said: list[str] = []
        with planned_writer(any_url, partitions=2) as writer:
            epoch = writer.epoch(sizes=[20, 20])
            with epoch.shard(1) as shard:
                for number in range(20, 40):
                    shard.write(sample(number))
            first = epoch.shard(0)
            for number in range(17):
                first.write(sample(number))
            first.commit_all()
            with rank_of(any_url, timeout_s=6, notify=said.append) as loader:
                batches = iter(loader)
                assert numbers([next(batches), next(batches)]) == list(range(16))
                with pytest.raises(WaitTimeout, match=r"shard 0 from offset 17 of 20 .* position 24"):
                    next(batches)
                assert any("shard 0 from offset 17" in line for line in said)
            first.abort()

    def test_a_producer_that_dies_before_its_last_word_is_said(self, any_url: str, any_client: Client) -> None:
        """All samples are trained on, but the epoch must not end as if no more could come."""
        plan(any_url, [40])
        any_client.hset(open_stream(any_client, "t").keys.manifest(0), "state", "sized")
        found: list[int] = []
        with (
            rank_of(any_url, timeout_s=1) as loader,
            pytest.raises(WaitTimeout, match=r"all 40 samples are there.*penstock epochs close t 0"),
        ):
            for batch in loader:
                found += batch["y"].tolist()
        assert found == list(range(40))

    def test_an_endless_feed_of_one_writer_has_an_order(self, any_url: str) -> None:
        """A simulator's stream is a sequence, and its trainer may need it in that order."""
        with planned_writer(any_url) as writer, rank_of(any_url) as loader:
            batches = iter(loader)
            for start in range(0, 80, 8):
                for number in range(start, start + 8):
                    writer.write(sample(number))
                writer.flush()
                assert next(batches)["y"].tolist() == list(range(start, start + 8))

    def test_ranks_that_never_came_are_named_at_the_end_of_an_epoch(self, any_url: str) -> None:
        """One process of two trains on half of each epoch, and its loss does not show it."""
        plan(any_url, [48])
        told: list[str] = []
        with rank_of(any_url, 0, 3, notify=told.append) as zero:
            list(zero)
            absent = [line for line in told if "did not come" in line]
            assert [line.partition(":")[2][:38] for line in absent] == [" 2/3 of its samples wait for them. If "]
            assert "ranks 1, 2 of the 3 ranks of group" in absent[0]
        told.clear()
        with rank_of(any_url, 1, 3, notify=told.append) as one:  # rank 0 left, and has acknowledged its share
            list(one)
        assert ["rank 2 of the 3 ranks" in line for line in told if "did not come" in line] == [True]

    def test_an_epoch_without_a_sample_waits_for_no_rank(self, any_url: str) -> None:
        """The ranks of an abandoned epoch have nothing to read, so their absence is no mistake."""
        with planned_writer(any_url) as writer:
            writer.epoch(sizes=[563]).abandon()
        produce(any_url, "t", 48)
        told: list[str] = []
        with rank_of(any_url, 0, 3, notify=told.append) as zero:
            list(zero)
        assert [line[:20] for line in told if "did not come" in line] == ["epoch 1 ended here, "]

    def test_an_order_that_nobody_knows_is_refused_at_once(self, any_url: str) -> None:
        """Two writers of an unplanned epoch race, so any order read from them would be an accident."""
        with planned_writer(any_url) as one, planned_writer(any_url) as two:
            for writer in (one, two):
                writer.write(sample(1))
                writer.flush()
            with (
                rank_of(any_url) as loader,
                pytest.raises(OrderNeedsSizes, match=r"2 shards at once.*Loader without order"),
            ):
                next(iter(loader))

    def test_an_abandoned_epoch_ends_with_what_there_is(self, any_url: str) -> None:
        """Every rank finds the same end, because nothing is committed after it."""
        with planned_writer(any_url, partitions=2) as writer:
            epoch = writer.epoch(sizes=[30, 30])
            for number, count in ((0, 30), (1, 5)):
                shard = epoch.shard(number)
                for position in range(count):
                    shard.write(sample(30 * number + position))
                shard.commit_all()
                shard.abort()
            epoch.abandon()
        assert interleaved(read_ranks(any_url, 2, 8)) == [*range(35), *range(13)]

    def test_the_length_of_an_abandoned_epoch_is_what_there_is(self, any_url: str) -> None:
        """Frameworks plan their steps by the length."""
        with planned_writer(any_url) as writer:
            epoch = writer.epoch(sizes=[30, 30])
            shard = epoch.shard(0)
            for number in range(19):
                shard.write(sample(number))
            shard.commit_all()
            shard.abort()
            epoch.abandon()
        with rank_of(any_url) as loader:
            assert len(loader) == 3
            assert len(list(loader)) == 3

    def test_the_length_is_that_of_the_epoch_that_an_iteration_reads(self, any_url: str) -> None:
        """An iteration passes over an abandoned epoch without a sample."""
        with planned_writer(any_url) as writer:
            for sizes in ([563], [99]):
                writer.epoch(sizes=sizes).abandon()
        produce(any_url, "t", 43)
        with rank_of(any_url) as loader:
            assert len(loader) == 6
            assert len(list(loader)) == 6


class TestErrors:
    """An error, never a gap."""

    def test_an_entry_that_vanished_is_named(self, any_url: str, any_client: Client) -> None:
        """A sample that is only in the index is lost, and training on fewer samples is not an option."""
        plan(any_url, [70], block_samples=10)
        gone = entries(any_client, "t", 0)[3][0]
        any_client.xdel(open_stream(any_client, "t").partitions[0].entries(0), gone)
        found: list[int] = []
        with rank_of(any_url) as loader, pytest.raises(EpochIncomplete, match="shard 0 offsets 30-39") as caught:
            for batch in loader:
                found += batch["y"].tolist()
        assert caught.value.missing == [(0, 30, 40)]
        assert found == list(range(24))

    def test_a_gap_in_the_index_is_named(self, any_url: str, any_client: Client) -> None:
        """Samples that no record names cannot be found, and must not be skipped silently."""
        plan(any_url, [70], block_samples=10)
        any_client.xdel(open_stream(any_client, "t").partitions[0].index(0, 0), "30-0")
        with rank_of(any_url) as loader, pytest.raises(EpochIncomplete, match="no record of offsets 20-29"):
            list(loader)

    def test_a_step_that_the_budget_cannot_hold_is_refused(self, any_url: str) -> None:
        """A wait for it would never end, because writers stop before it is complete."""
        with planned_writer(any_url, budget_bytes=24_000) as writer, writer.epoch() as epoch:
            epoch.write(sample(0))
        with rank_of(any_url, 0, 2, 100) as loader, pytest.raises(TooLarge, match="raise budget_bytes"):
            list(loader)

    def test_arguments_that_make_no_order_are_refused(self, any_url: str) -> None:
        """A wrong rank would read another rank's samples."""
        produce(any_url, "t", 1)
        wrong: list[dict[str, Any]] = [
            {"rank": 2, "world": 2}, {"rank": -1}, {"world": 2, "remainder": "keep"}, {"remainder": "some"},
            {"member": "me"}, {"world": 0},
        ]  # fmt: skip
        for settings in wrong:
            with pytest.raises(ValueError, match=r"rank|remainder|member|order"), rank_of(any_url, **settings):
                pass
        with pytest.raises(ValueError, match=r"rank is 2 of world_size 2"), loader_of(any_url, order=Canonical(2, 2)):
            pass
        with pytest.raises(ValueError, match="order is 'random'"), loader_of(any_url, order="random"):
            pass


def test_what_waits_to_be_trained_on_is_bounded(any_url: str) -> None:
    """An epoch of 40 MB passes through a prefetch budget of 1 MB, for ranks that skip most of every entry too."""
    spec = {"x": ("uint8", (10_000,)), "y": ("int64", ())}
    with Writer("t", url=any_url, spec=spec, tuning=Tuning(block_bytes=200_000, notify=lambda _: None)) as writer:
        epoch = writer.epoch(sizes=[4000])
        with epoch.shard(0) as shard:
            for number in range(4000):
                shard.write({"x": np.zeros(10_000, np.uint8), "y": number})
    tracemalloc.start()
    try:
        with rank_of(any_url, 1, 4, 10, prefetch_bytes=1_000_000) as loader:
            assert sum(batch.size for batch in loader) == 1000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000


def test_shared_groups_read_the_same_stream_beside(any_url: str) -> None:
    """Ordered reading changes no consumer group, and consumer groups change no position."""
    plan(any_url, [100, 100], partitions=2)
    with rank_of(any_url) as ordered, loader_of(any_url, "shared") as shared:
        assert numbers(ordered) == list(range(200))
        assert sorted(numbers(shared)) == list(range(200))
