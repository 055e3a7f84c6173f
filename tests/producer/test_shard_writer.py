"""A shard's writer gathers samples: when it sends them, what it counts, and what it says of those that are lost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import BudgetFull, PenstockError, ShardMismatch
from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import load_manifest
from penstock_producer.write import shard as shards
from penstock_producer.write.commit import Committer
from penstock_producer.write.shard import ShardWriter
from tests.contracts.feed import SAMPLE_BYTES, SPEC, open_stream, replayed, sample, stored, writer_of
from tests.producer.test_commit_errors import SIZE, fill, shard_of


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return first and end of each block that was given to a committer."""
    found, commit = list[tuple[int, int]](), Committer.commit

    def noted(self: Committer, block: Any, bad: Any = None) -> None:
        found.append((block.first, block.end))
        commit(self, block, bad)

    monkeypatch.setattr(Committer, "commit", noted)
    return found


def rows(count: int) -> dict[str, Any]:
    """Return samples as columns."""
    return {"x": np.zeros((count, 4), np.float32), "y": np.arange(count)}


def write_one(shard: ShardWriter) -> None:
    """Write one sample."""
    shard.write(sample(shard.position))


def write_rows(shard: ShardWriter) -> None:
    """Write one row."""
    shard.write_batch(rows(1))


@pytest.mark.parametrize("write", [write_one, write_rows])
def test_a_slow_producers_samples_are_sent_before_a_block_is_full(
    any_url: str, monkeypatch: pytest.MonkeyPatch, sent: list[tuple[int, int]], write: Callable[[ShardWriter], None]
) -> None:
    """Trainers wait for the first of them most, and small blocks cost both sides more than large ones."""
    now_s = [100.0]
    monkeypatch.setattr("penstock_producer.write.writer.ShardWriter", partial(ShardWriter, clock=lambda: now_s[0]))
    with writer_of(any_url, spec=SPEC) as writer:
        shard, due_s = writer.epoch(0, sizes=[SIZE]).shard(0), 100.0
        for number, wait_s in enumerate((0.1, 0.2, 0.4, 0.8, 1.0, 1.0)):
            due_s += wait_s
            now_s[0] = due_s - 0.02
            write(shard)
            assert len(sent) == number, "it is not due yet"
            now_s[0] = due_s = due_s + 0.001
            write(shard)
            assert sent[number:] == [(2 * number, 2 * number + 2)]
        shard.abort()


def test_a_flush_without_new_samples_waits_for_nothing(any_url: str, sent: list[tuple[int, int]]) -> None:
    """A program may flush after each step, whether it made something or not."""
    with shard_of(any_url) as (_, shard):
        shard.flush()
        assert sent == []
        fill(shard, 5)
        shard.flush()
        shard.flush()
        assert sent == [(0, 4), (4, 5)]


def test_a_planned_shard_is_over_with_its_last_sample(any_url: str, sent: list[tuple[int, int]]) -> None:
    """Its last samples fill no block, and trainers wait for them at the end of their epoch."""
    with writer_of(any_url, spec=SPEC) as writer:
        epoch = writer.epoch(0, sizes=[6, 6])
        shard = epoch.shard(0)
        assert not shard.is_over
        fill(shard, 5)
        shard.flush()
        assert not shard.is_over
        fill(shard, 6)
        assert sent == [(0, 5), (5, 6)]
        assert shard.is_over
        shard.commit_all()
        shard.abort()
        again = epoch.shard(0)
        assert again.is_over
        with pytest.raises(ShardMismatch, match="6 samples are planned, one more"):
            write_one(again)
        again.close()
        with epoch.shard(1) as other:
            other.write_batch(rows(6))
            assert other.is_over
    assert sent[2:] == [(0, 6)]


def test_the_bytes_of_every_block_are_counted(any_url: str) -> None:
    """A progress line shows them, however the samples were given."""
    with writer_of(any_url, spec=SPEC, block_bytes=4 * SAMPLE_BYTES) as writer:
        epoch = writer.epoch(0, sizes=[SIZE, SIZE])
        shard, other = (epoch.shard(number) for number in (0, 1))
        fill(other, 2)
        block = other._builder.finish(0, [])
        other.abort()
        fill(shard, 6)
        assert shard.bytes_written == 4 * SAMPLE_BYTES
        shard.write_block(block.moved(6), {})
        assert shard.bytes_written == 8 * SAMPLE_BYTES
        with shard.reserve(3) as arrays:
            for name, array in rows(3).items():
                arrays[name][...] = array
        assert shard.bytes_written == 11 * SAMPLE_BYTES
        shard.quarantine("bad")
        shard.flush()
        assert (shard.position, shard.bytes_written) == (12, 11 * SAMPLE_BYTES)
        shard.abort()


def test_reserved_samples_are_the_next_ones_or_none(any_url: str, any_client: Client) -> None:
    """A decoder that fails leaves the shard as it was, and the next sample has the offset."""
    with shard_of(any_url) as (_, shard):
        fill(shard, 2)
        for _ in range(2):
            arrays = shard.reserve(3)
            with pytest.raises(PenstockError, match="3 reserved samples are neither committed nor dropped"):
                write_one(shard)
            shard.flush()
            with pytest.raises(PenstockError, match="3 reserved samples are neither committed nor dropped"):
                write_one(shard)
            arrays.drop()
            assert shard.position == 2
        write_one(shard)
        fill(shard, SIZE - 2)
        with pytest.raises(ShardMismatch, match=f"{SIZE} samples are planned"):
            shard.reserve(3)
        with shard.reserve(2) as last:
            last["x"][...], last["y"][...] = np.full((2, 4), 7), 7
        assert shard.is_over
    assert replayed(any_url) == [*range(SIZE - 2), 7, 7]


@pytest.mark.parametrize("how", ["closed", "aborted", "copied", "dropped"])
def test_only_samples_that_no_program_ended_are_told_as_lost(any_url: str, how: str) -> None:
    """A warning after an orderly end would be a false alarm, and silence after another one a hole."""
    said: list[str] = []
    with writer_of(any_url, spec=SPEC, notify=said.append) as writer:
        shard = writer.epoch(0, sizes=[3]).shard(0)
        fill(shard, 3 if how == "closed" else 2)
        if how == "closed":
            shard.close()
        elif how == "aborted":
            shard.abort()
        elif how == "copied":
            shard._owner += 1  # as in a forked process, whose parent still has the samples
        del shard
        gc.collect()
        assert [line[:9] for line in said if "may be lost" in line] == (["2 samples"] if how == "dropped" else [])


def test_samples_of_a_program_that_ends_are_told_as_lost(any_url: str) -> None:
    """No other message says that its last block was not full, and so not sent."""
    said: list[str] = []
    with writer_of(any_url, spec=SPEC, notify=said.append) as writer:
        shard = writer.epoch(0, sizes=[3]).shard(0)
        fill(shard, 1)
        shards._tell_lost()
        assert ["1 sample of 't' may be lost" in line for line in said] == [True]
        shard.abort()


class TestFeedsEnd:
    """A feed ends with what is committed if nothing more can be."""

    def test_what_is_committed_of_a_feed_is_complete_though_the_rest_finds_no_space(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Groups would wait for the end of its shard for ever."""
        said: list[str] = []
        with (
            pytest.raises(ZeroDivisionError),
            writer_of(any_url, spec=SPEC, block_bytes=4 * SAMPLE_BYTES, notify=said.append) as writer,
        ):
            for number in range(9):
                writer.write(sample(number))
            feed = writer._feed
            assert feed is not None
            feed._committer.commit_all()

            def full(*_: Any) -> None:
                raise BudgetFull("no space")

            monkeypatch.setattr(Committer, "commit", full)
            raise ZeroDivisionError
        stream = open_stream(any_client, "t")
        assert load_manifest(any_client, stream, 0).done == {0: 8}
        assert sorted(stored(any_client, "t", 0)) == [(0, offset) for offset in range(8)]
        del feed
        gc.collect()
        assert not any("may be lost" in line for line in said), "its end was said"

    def test_its_blocks_under_way_are_waited_for(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are on the server a moment later, behind the end that was declared."""
        with writer_of(any_url, spec=SPEC, block_bytes=4 * SAMPLE_BYTES) as writer:
            for number in range(8):
                writer.write(sample(number))
            assert writer._feed is not None
            writer._feed.close_as_committed()
            assert load_manifest(any_client, writer.stream, 0).done == {0: 8}
            monkeypatch.setattr(writer, "_feed", None)

    def test_a_shard_that_lost_records_is_not_declared_complete(self, any_url: str, any_client: Client) -> None:
        """Readers by position would stop at the hole."""
        with writer_of(any_url, spec=SPEC, block_bytes=4 * SAMPLE_BYTES) as writer:
            for number in range(12):
                writer.write(sample(number))
            feed = writer._feed
            assert feed is not None
            feed._committer.commit_all()
            any_client.xdel(writer.stream.partitions[0].index(0, 0), "8-0")
            with pytest.raises(ShardMismatch, match="12-0 does not follow the offset 4"):
                feed.close_as_committed()
            assert load_manifest(any_client, writer.stream, 0).done == {}
            feed.abort()
            writer._feed = None
