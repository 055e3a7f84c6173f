"""Replay: a retained epoch once more, in canonical order, with the same bytes every time, or an error, but never a
gap.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import redis

from penstock_common.errors import (
    BadEntry,
    EpochIncomplete,
    EpochNotFound,
    ReplayTruncated,
    ShardMismatch,
    StreamNotFound,
)
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.streams import set_field, set_plan
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.writer import Writer
from tests.consumer.test_loader_troubles import our_threads
from tests.contracts.feed import SAMPLE_BYTES, SPEC, entries, numbers, open_stream, produce, sample


def test_what_penstock_run_prepares_is_waited_for_until_it_is_whole(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts the trainer together with the production, so a validation's epoch may be half made, or missing."""
    with pytest.raises(StreamNotFound):
        Replay("t", url=any_url, epoch=0, batch_size=8)
    said: list[str] = []
    monkeypatch.setattr("penstock_common.waiting.FIRST_WORD_S", 0.0)
    monkeypatch.setattr("penstock_consumer.read.waits.FIRST_WORD_S", 0.0)
    monkeypatch.setattr("penstock_consumer.read.waits.EVENT_MS", 20)

    def prepare() -> None:
        await_line("no stream 't'")
        with Writer("t", url=any_url, spec=SPEC) as writer, redis.Redis.from_url(any_url) as client:
            set_field(client, writer.stream, "next_epoch", 1)  # its number is taken, and its manifest not written
            time.sleep(0.3)  # several looks
            set_field(client, writer.stream, "next_epoch", 0)
            prepare_epoch(writer)

    def prepare_epoch(writer: Writer) -> None:
        with writer.epoch(0, sizes=[4, 4]) as epoch:
            for number in range(2):
                await_line("epoch 0 of 't' is not produced yet")
                with epoch.shard(number) as shard:
                    for offset in range(4):
                        shard.write(sample(4 * number + offset))

    def await_line(line: str) -> None:
        while not any(line in each for each in said):
            time.sleep(0.01)

    monkeypatch.setenv("PENSTOCK_AWAITED", "other,t")
    preparing = threading.Thread(target=prepare, daemon=True)
    preparing.start()
    with Replay("t", url=any_url, epoch=0, batch_size=8, tuning=Tuning(notify=said.append)) as replay:
        assert numbers(replay) == list(range(8))
    preparing.join()


def test_an_epoch_that_penstock_run_will_not_make_is_not_waited_for(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation on the fourth of three epochs would wait for ever."""
    produce(any_url, "t", 8, epochs=3)
    set_plan(any_client, open_stream(any_client, "t"), 3)
    monkeypatch.setenv("PENSTOCK_AWAITED", "t")
    with pytest.raises(EpochNotFound, match="has no epoch 3"):
        Replay("t", url=any_url, epoch=3, batch_size=8)


@pytest.mark.parametrize("partitions", [1, 3])
def test_shards_written_in_any_order_replay_in_the_planned_one(url: str, partitions: int) -> None:
    """The seeded permutation made the order random once, and every reader must then see the same."""
    with Writer("t", url=url, spec=SPEC, tuning=Tuning(block_bytes=7 * SAMPLE_BYTES), partitions=partitions) as writer:
        epoch = writer.epoch(sizes=[20] * 5)
        for number in (3, 0, 4, 2, 1):
            with epoch.shard(number) as shard:
                for offset in range(20):
                    shard.write(sample(20 * number + offset))
    with Replay("t", url=url, epoch=0, batch_size=8) as replay:
        assert (len(replay), replay.samples) == (13, 100)
        batches = list(replay)
        assert [batch.size for batch in batches] == [8] * 12 + [4]
        assert numbers(batches) == list(range(100))
        identities = [identity for batch in batches for identity in batch.identities()]
        assert identities == [(0, number // 20, number % 20) for number in range(100)]
        assert numbers(replay) == list(range(100))


def test_a_replay_is_bit_exact_for_every_kind_of_tensor(any_url: str) -> None:
    """NaNs with payloads, negative zeros, empty boxes and empty strings included."""
    rng = np.random.default_rng(5)
    spec = {
        "f": ("float32", (3,)),
        "b": ("bool", (2,)),
        "h": ("bfloat16", (2,)),
        "r": ("float16", (None, 2)),
        "s": ("bytes", ()),
    }
    samples: list[dict[str, Any]] = [
        {
            "f": rng.integers(0, 1 << 32, 3, dtype=np.uint32).view(np.float32),
            "b": rng.integers(0, 2, 2).astype(bool),
            "h": rng.integers(0, 1 << 16, 2, dtype=np.uint16).view(ml_dtypes.bfloat16),
            "r": rng.integers(0, 1 << 16, (number % 4, 2), dtype=np.uint16).view(np.float16),
            "s": rng.bytes(number % 7),
        }
        for number in range(200)
    ]
    with Writer("t", url=any_url, spec=spec, tuning=Tuning(block_bytes=500)) as writer, writer.epoch() as epoch:
        for one in samples:
            epoch.write(one)
    with Replay("t", url=any_url, epoch=0, batch_size=32) as replay:
        rows = [{name: batch[name][row] for name in spec} for batch in replay for row in range(batch.size)]
    for got, want in zip(rows, samples, strict=True):
        assert got["s"] == want["s"]
        for name in "fbhr":
            assert got[name].tobytes() == want[name].tobytes()
            assert got[name].shape == want[name].shape


def test_a_replay_is_what_a_group_was_given(any_url: str) -> None:
    """A debugging session over last night's epoch must see last night's samples, acknowledged or not."""
    produce(any_url, "t", 100, epochs=2)
    with Loader("t", group="g", batch_size=9, url=any_url, tuning=Tuning(timeout_s=10)) as loader:
        given = {
            identity: row for batch in loader for identity, row in zip(batch.identities(), batch["x"], strict=True)
        }
    with Replay("t", url=any_url, epoch=0, batch_size=9) as replay:
        for batch in replay:
            for identity, row in zip(batch.identities(), batch["x"], strict=True):
                assert np.array_equal(given.pop(identity), row)
    assert not given


def test_samples_behind_the_end_of_a_closed_epoch_are_no_part_of_it(any_url: str, any_client: Client) -> None:
    """A second writer of the same epoch goes on after the first one closed it. The epoch must stay readable."""
    said: list[str] = []
    quiet = Tuning(notify=said.append)
    spec = {"x": ("int32", ())}
    with Writer("t", url=any_url, spec=spec, tuning=quiet) as one, Writer("t", url=any_url, tuning=quiet) as other:
        first, second = one.epoch(0), other.epoch(0)
        first.write_batch({"x": np.arange(50, dtype=np.int32)})
        first.flush()
        second.write({"x": 1000})
        first.close()
        second.write_batch({"x": np.arange(1001, 1050, dtype=np.int32)})
        with pytest.raises(ShardMismatch, match=r"another writer of the epoch or .* closed"):
            second.close()
    with Replay("t", epoch=0, batch_size=8, url=any_url, tuning=quiet) as replay:
        assert np.concatenate([batch["x"] for batch in replay]).tolist() == list(range(50))
    assert not [line for line in said if "stays open" in line]
    audit = audit_stream(any_client, "t")
    assert [one for one in audit.findings if "offsets 50-99 came after the epoch was closed, and readers" in one]


def test_a_replay_goes_on_beside_production(any_url: str) -> None:
    """Samples that are written later never enter a complete epoch."""
    produce(any_url, "t", 500, block_samples=3)
    producing = threading.Thread(target=produce, args=(any_url, "t", 500), kwargs={"epochs": 3})
    with Replay("t", url=any_url, epoch=0, batch_size=10, tuning=Tuning(prefetch_bytes=500)) as replay:
        producing.start()
        assert numbers(replay) == list(range(500))
        producing.join()
        assert numbers(replay) == list(range(500))


def test_an_iteration_that_is_left_early_ends_its_thread(any_url: str) -> None:
    """Replays are often used to look at the first batch."""
    produce(any_url, "t", 500, block_samples=3)
    with Replay("t", url=any_url, epoch=0, batch_size=10, tuning=Tuning(prefetch_bytes=500)) as replay:
        before = our_threads()
        for batch in replay:
            assert batch["y"][0] == 0
            break
        deadline = time.monotonic() + 5
        while not our_threads() <= before and time.monotonic() < deadline:  # one of an earlier test may still end
            time.sleep(0.01)
        assert our_threads() <= before


class TestRefusals:
    """An epoch that cannot be replayed is refused at once."""

    def test_an_epoch_that_is_still_written(self, any_url: str) -> None:
        """Its end is not known, and therefore neither its order nor its length."""
        with Writer("t", url=any_url, spec=SPEC) as writer:
            writer.epoch().write(sample(0))
            with pytest.raises(EpochIncomplete, match=r"epoch 0 .* open.*Loader"):
                Replay("t", url=any_url, epoch=0, batch_size=1)
            abandoned = writer.epoch()
            abandoned.abandon()
            with pytest.raises(EpochIncomplete, match="abandoned"):
                Replay("t", url=any_url, epoch=1, batch_size=1)

    def test_an_epoch_or_stream_that_is_not_there(self, any_url: str) -> None:
        """The message has the names of those that exist."""
        produce(any_url, "train", 1, epochs=2)
        with pytest.raises(EpochNotFound, match="no epoch 7; retained epochs: 0, 1"):
            Replay("train", url=any_url, epoch=7, batch_size=1)
        with pytest.raises(StreamNotFound, match="did you mean 'train'"):
            Replay("trian", url=any_url, epoch=0, batch_size=1)
        with pytest.raises(ValueError, match="batch_size"):
            Replay("train", url=any_url, epoch=0, batch_size=0)

    def test_an_entry_that_is_gone_is_an_error_not_a_gap(self, url: str, client: Client) -> None:
        """Silently shorter epochs make experiments irreproducible."""
        produce(url, "t", 100)
        key = open_stream(client, "t").partitions[0].entries(0)
        client.xdel(key, entries(client, "t", 0)[5][0])
        found: list[int] = []
        truncated = pytest.raises(ReplayTruncated, match="no longer whole")
        with Replay("t", url=url, epoch=0, batch_size=10) as replay, truncated as raised:
            for batch in replay:
                found += numbers([batch])
        assert found == list(range(len(found)))
        assert len(found) <= 50
        assert "was deleted, and not by retention" in str(raised.value)
        assert "`penstock audit t --repair SOURCE...` makes it again" in str(raised.value)

    def test_an_entry_that_retention_may_have_removed_is_told_apart_from_a_deleted_one(
        self, url: str, client: Client
    ) -> None:
        """A larger budget helps against retention only. Retention marks the epoch on the roster."""
        produce(url, "t", 100)
        partition = open_stream(client, "t").partitions[0]
        client.hset(partition.roster, "t:0", "1")
        client.xdel(partition.entries(0), entries(client, "t", 0)[5][0])
        truncated = pytest.raises(ReplayTruncated, match=r"retention needs its bytes.*`penstock audit t` says so")
        with Replay("t", url=url, epoch=0, batch_size=10) as replay, truncated:
            list(replay)

    def test_an_entry_that_was_changed_is_an_error(self, any_url: str, any_client: Client) -> None:
        """The checksum is verified again each time."""
        produce(any_url, "t", 20)
        key = open_stream(any_client, "t").partitions[0].entries(0)
        *_, (last, fields) = entries(any_client, "t", 0)
        any_client.delete(key)
        first = f"{int(last.split(b'-')[0]) - 10**6}-0"
        any_client.xadd(key, fields, id=first)
        any_client.xadd(key, {**fields, b"x": bytes(160)}, id=last)
        index = open_stream(any_client, "t").partitions[0].index(0, 0)
        any_client.delete(index)
        any_client.xadd(index, {"e": last, "f": 0, "n": 20, "b": 480, "h": "[]"}, id="20-0")
        with Replay("t", url=any_url, epoch=0, batch_size=10) as replay, pytest.raises(BadEntry):
            list(replay)

    def test_an_index_with_a_gap(self, any_url: str, any_client: Client) -> None:
        """A replay cannot find samples that the index does not have."""
        produce(any_url, "t", 100)
        index = open_stream(any_client, "t").partitions[0].index(0, 0)
        any_client.xdel(index, "30-0")
        with pytest.raises(ReplayTruncated, match="no record of offsets 20-29"):
            Replay("t", url=any_url, epoch=0, batch_size=10)
        assert not load_roster(any_client, open_stream(any_client, "t").partitions[0]).replays


def test_a_replay_holds_its_epoch_until_it_is_closed(any_url: str, any_client: Client) -> None:
    """Its lease is on the roster, where retention looks, and ends with it."""
    produce(any_url, "t", 100)
    partition = open_stream(any_client, "t").partitions[0]
    with Replay("t", url=any_url, epoch=0, batch_size=10) as replay:
        assert [epoch for epoch, _ in load_roster(any_client, partition).replays.values()] == [0]
        replay.close()
    assert not load_roster(any_client, partition).replays
