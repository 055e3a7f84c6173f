"""The Writer, on real servers: what is written is stored, exactly that, and what does not fit is refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import redis

from penstock_common.errors import (
    BudgetRefused,
    EpochAbandoned,
    EpochNotFound,
    PenstockError,
    ServerUnsuitable,
    ShardMismatch,
    SpecMismatch,
    StreamConflict,
    TooLarge,
)
from penstock_common.stream import manifest
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_common.stream.feeds import close_epoch
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.streams import load_stream
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.writer import Writer
from tests.contracts.feed import (
    SAMPLE_BYTES,
    SPEC,
    accounted_bytes,
    entries,
    index_spans,
    is_contiguous,
    no_connection_left,
    numbers,
    open_stream,
    payload_bytes,
    produce,
    replayed,
    sample,
    stored,
    writer_of,
)
from tests.torn_slots import partition_slot, stream_slot


def test_samples_come_back_in_the_order_they_were_written(url: str) -> None:
    """The canonical order of an unplanned epoch is the order of writing."""
    with writer_of(url, block_bytes=700) as writer, writer.epoch() as epoch:
        for number in range(100):
            epoch.write(sample(number))
    with Replay("t", url=url, epoch=0, batch_size=7) as replay:
        assert numbers(replay) == list(range(100))


def test_a_missing_spec_is_inferred_said_and_fixed(any_url: str, any_client: Client) -> None:
    """A user need not write a spec to begin, but must learn which one was inferred."""
    said: list[str] = []
    with Writer("t", url=any_url, tuning=Tuning(notify=said.append)) as writer, writer.epoch() as epoch:
        epoch.write({"image": np.zeros((8, 8, 3), np.uint8), "name": b"a.png", "weight": 0.5})
        with pytest.raises(SpecMismatch):
            epoch.write({"image": np.zeros((8, 9, 3), np.uint8), "name": b"b.png", "weight": 0.5})
    assert any("image: uint8[8, 8, 3]" in line and "name: bytes" in line for line in said)
    assert str(open_stream(any_client, "t").spec) == "image: uint8[8, 8, 3], name: bytes, weight: float64"


DETECTION: dict[str, Any] = {"image": np.zeros((2, 3), np.uint8), "y": {"boxes": np.ones((2, 4)), "about": {"id": 7}}}


def detections(count: int) -> dict[str, Any]:
    """Make ``count`` rows like DETECTION."""
    boxes, about = np.ones((count, 2, 4)), {"id": np.full(count, 7)}
    return {"image": np.zeros((count, 2, 3), np.uint8), "y": {"boxes": boxes, "about": about}}


DETECTION_SPEC: Any = {"image": ("uint8", (2, 3)), "y/boxes": ("float64", (None, 4)), "y/about/id": ("int64", ())}


@pytest.mark.parametrize("spec", [None, DETECTION_SPEC])
def test_a_dict_in_a_sample_is_written_as_tensors_below_its_name(any_url: str, spec: Any) -> None:
    """Detection targets are dicts, and readers give them back with nested=True."""
    with writer_of(any_url, spec=spec) as writer:
        with writer.epoch() as epoch:
            for _ in range(3):
                epoch.write(DETECTION)
            epoch.write({"image": DETECTION["image"], "y/boxes": np.ones((2, 4)), "y": {"about": {"id": 7}}})
            epoch.write_batch(detections(3))
        writer.write(DETECTION)
        writer.write_batch(detections(1))
        assert writer.stream.spec is not None
        assert writer.stream.spec.names == ("image", "y/boxes", "y/about/id")
    for epoch_number, count in ((0, 7), (1, 2)):
        with Replay("t", url=any_url, epoch=epoch_number, batch_size=9) as replay:
            (batch,) = replay
        assert batch["y/about/id"].tolist() == [7] * count
        assert [boxes.tolist() for boxes in batch["y/boxes"]] == [[[1.0] * 4] * 2] * count


def test_a_single_tensor_in_a_dict_takes_the_fast_path_of_one_tensor(any_url: str) -> None:
    """Streams of one small tensor have a builder of their own, which must take nested samples as well."""
    with writer_of(any_url) as writer, writer.epoch() as epoch:
        for number in range(5):
            epoch.write({"y": {"boxes": np.full(4, number)}})
    with Replay("t", url=any_url, epoch=0, batch_size=9) as replay:
        (batch,) = replay
    assert batch["y/boxes"].tolist() == [[number] * 4 for number in range(5)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"x": np.zeros(4, np.float32), "y": {"boxes": 1}}, "tensor 'y': found a dict of boxes, expected int64"),
        ({"x": np.zeros(4, np.float32), "y": {}}, "tensor 'y': found a dict of nothing, expected int64"),
        ({"x": np.zeros(4, np.float32), "y": 1, "z": {"a": 2}}, "tensor 'z/a': found a tensor, expected none"),
        ({"x": np.zeros(4, np.float32), "y/a": 1, "y": {"a": 2}}, "tensor 'y/a': found two of that name"),
    ],
)
def test_a_dict_that_does_not_fit_is_refused_by_its_tensors_names(any_url: str, bad: Any, message: str) -> None:
    """The spec has the names below the dict, so the message must use these names."""
    with writer_of(any_url, spec=SPEC) as writer, writer.epoch() as epoch:
        epoch.write(sample(0))
        with pytest.raises(SpecMismatch, match=message):
            epoch.write(bad)
        epoch.write(sample(1))
    assert replayed(any_url) == [0, 1]


@pytest.mark.parametrize(
    ("bad", "tensor", "found", "expected"),
    [
        ({"x": np.zeros(5, np.float32), "y": 1}, "x", "(5,)", "(4,)"),
        ({"x": np.zeros(4, np.float64), "y": 1}, "x", "float64", "float32"),
        ({"x": np.zeros(4, np.float32), "y": 1.5}, "y", "float", "int64"),
        ({"x": np.zeros(4, np.float32)}, "y", "", ""),
        ({"x": np.zeros(4, np.float32), "y": 1, "z": 2}, "z", "", ""),
    ],
)
def test_a_sample_that_does_not_fit_is_named_and_leaves_nothing_behind(
    any_url: str, any_client: Client, bad: dict[str, Any], tensor: str, found: str, expected: str
) -> None:
    """Half a sample in a stream would shift every later one; the message must say which tensor to look at."""
    with writer_of(any_url, spec=SPEC) as writer, writer.epoch() as epoch:
        epoch.write(sample(0))
        with pytest.raises(SpecMismatch) as caught:
            epoch.write(bad)
        with pytest.raises(SpecMismatch):
            epoch.write_batch({name: np.asarray(value)[None] for name, value in bad.items()})
        epoch.write(sample(1))
    assert caught.value.tensor == tensor
    assert found in caught.value.found
    assert expected in caught.value.expected
    assert f"'{tensor}'" in str(caught.value)
    assert replayed(any_url) == [0, 1]
    assert stored(any_client, "t", 0).total() == 2


def test_another_spec_for_a_known_stream_is_refused(any_url: str) -> None:
    """Two programs that disagree must hear of it when they start, not from a trainer."""
    produce(any_url, "t", 3)
    with pytest.raises(StreamConflict, match="x: float32"):
        writer_of(any_url, spec={"x": ("float64", (4,)), "y": ("int64", ())})


def test_a_buffer_may_be_reused_as_soon_as_write_returns(url: str) -> None:
    """Producers fill the same array again and again."""
    buffer = np.empty(4, np.float32)
    rows: dict[str, Any] = {"x": np.empty((16, 4), np.float32), "y": np.empty(16, np.int64)}
    with writer_of(url, spec=SPEC, block_bytes=10 * SAMPLE_BYTES) as writer, writer.epoch() as epoch:
        for number in range(64):
            buffer[:] = number
            epoch.write({"x": buffer, "y": number})
            buffer[:] = -1
        for start in range(64, 512, 16):
            rows["y"][:] = np.arange(start, start + 16)
            rows["x"][:] = rows["y"][:, None]
            epoch.write_batch(rows)
            rows["x"][:] = -1
            rows["y"][:] = -1
    assert replayed(url) == list(range(512))


def test_blocks_are_packed_to_their_target_size(any_url: str, any_client: Client) -> None:
    """Per-entry costs rule small samples, so writers must fill entries, and never beyond what was asked for."""
    produce(any_url, "t", 1005, block_samples=100)
    sizes = [sum(map(len, fields.values())) - len(fields[b"meta"]) for _, fields in entries(any_client, "t", 0)]
    assert sizes == [100 * SAMPLE_BYTES] * 10 + [5 * SAMPLE_BYTES]


def test_write_batch_stores_what_single_writes_would(any_url: str) -> None:
    """One call for n rows is the fast way in, ragged tensors and bytes included."""
    spec = {"y": ("int64", ()), "boxes": ("float32", (None, 4)), "name": ("bytes", ())}
    boxes = [np.full((number % 4, 4), number, np.float32) for number in range(50)]
    names = [b"n%d" % number for number in range(50)]
    with writer_of(any_url, spec=spec, block_bytes=300) as writer, writer.epoch() as epoch:
        epoch.write_batch({"y": np.arange(25), "boxes": boxes[:25], "name": names[:25]})
        for number in range(25, 50):
            epoch.write({"y": number, "boxes": boxes[number], "name": names[number]})
    with Replay("t", url=any_url, epoch=0, batch_size=8) as replay:
        batches = list(replay)
    assert [number for batch in batches for number in batch["y"].tolist()] == list(range(50))
    assert [name for batch in batches for name in batch["name"]] == names
    for got, want in zip((box for batch in batches for box in batch["boxes"]), boxes, strict=True):
        assert np.array_equal(got, want)


def test_an_epoch_is_spread_over_the_partitions(any_url: str, any_client: Client) -> None:
    """With several servers every one of them has to carry its part."""
    with writer_of(any_url, spec=SPEC, partitions=3) as writer, writer.epoch() as epoch:
        rows = {"x": np.repeat(np.arange(10_000, dtype=np.float32)[:, None], 4, axis=1), "y": np.arange(10_000)}
        epoch.write_batch(rows)
    stream = open_stream(any_client, "t")
    assert all(any_client.xlen(partition.entries(0)) for partition in stream.partitions)
    assert replayed(any_url, batch_size=512) == list(range(10_000))
    with pytest.raises(StreamConflict, match="3 partitions"):
        writer_of(any_url, partitions=2)


def test_epochs_are_numbered_from_zero_and_only_rise(any_url: str) -> None:
    """A number names an epoch for ever, so it is never given twice."""
    with writer_of(any_url, spec=SPEC) as writer:
        for want in range(3):
            with writer.epoch() as epoch:
                assert epoch.number == want
                epoch.write(sample(want))
        with writer.epoch(7) as planned:
            planned.write(sample(7))
        assert writer.epoch().number == 8
        with pytest.raises(EpochNotFound):
            writer.epoch(-1)


def test_an_epoch_nobody_opened_may_still_be_opened_by_number(any_url: str) -> None:
    """The process that reserved a number may have died before it used it, and a restart must be able to continue."""
    with writer_of(any_url, spec=SPEC) as writer:
        writer.epoch(3, sizes=[1])
        with writer.epoch(1, sizes=[1]).shard(0) as shard:
            shard.write(sample(1))
    assert replayed(any_url, epoch=1) == [1]


def test_an_epoch_that_its_server_forgets_while_it_is_opened_is_opened_again(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover between two steps ended the writer with `EpochNotFound`."""
    with Writer("train", url=any_url, spec=SPEC) as writer:
        before = [stream_slot(any_client, writer.stream), partition_slot(any_client, writer.stream, 0)]

        def fail_over(*_: Any) -> None:
            monkeypatch.undo()
            for state in before:
                state.restore(any_client)

        monkeypatch.setattr(manifest, "announce", fail_over)
        with writer.epoch() as epoch:
            epoch.write(sample(0))
        assert epoch.number == 0
    assert audit_stream(any_client, "train").is_clean


def test_a_writer_that_is_closed_before_its_epoch_commits_what_that_was_given(any_url: str, any_client: Client) -> None:
    """The samples were gone, and the message said that nobody had closed the writer."""
    said: list[str] = []
    writer = Writer("t", url=any_url, spec={"y": ("int64", ())}, tuning=Tuning(notify=said.append))
    epoch = writer.epoch()
    for number in range(5):
        epoch.write({"y": number})
    writer.close()
    (line,) = said
    assert line.startswith("epoch 0 of 't' stays open, and trainers wait for its end: call its close() before the ")
    assert line.endswith("; `penstock epochs close t 0` ends it now")
    assert close_epoch(any_client, load_stream(any_client, "t"), 0) == 5


def test_a_flush_of_the_writer_commits_what_its_open_epochs_were_given(any_url: str, any_client: Client) -> None:
    """It looked at the feed alone, so a writer that was killed later lost what it had flushed."""
    with writer_of(any_url, spec=SPEC) as writer:
        with writer.epoch() as first, writer.epoch() as second:
            first.write(sample(0))
            second.write(sample(1))
            writer.flush()
            for epoch in (first, second):
                assert epoch.shard(0).position == 1
        writer.flush()


def test_an_error_inside_the_block_abandons_the_epoch(any_url: str) -> None:
    """An epoch that will never be complete must not look as if it could be."""
    with writer_of(any_url, spec=SPEC) as writer:
        with pytest.raises(ZeroDivisionError), writer.epoch() as epoch:
            epoch.write(sample(0))
            raise ZeroDivisionError
        assert load_manifest(writer.client, writer.stream, 0).state == "abandoned"
        with pytest.raises(EpochAbandoned, match="epoch 0"):
            writer.epoch(0)
        with writer.epoch() as following:
            following.write(sample(1))
    assert replayed(any_url, epoch=1) == [1]


class TestShards:
    """Planned shards: what a job writes."""

    def test_shards_may_be_written_in_any_order(self, any_url: str, any_client: Client) -> None:
        """Jobs finish when they finish; the epoch is produced with the last of them, in the planned order."""
        with writer_of(any_url, spec=SPEC, partitions=2) as writer:
            epoch = writer.epoch(sizes=[3, 4, 5], seed=9, fingerprint="f")
            for number, start, size in ((2, 7, 5), (0, 0, 3), (1, 3, 4)):
                assert epoch.refresh().state == "sized"
                with epoch.shard(number) as shard:
                    for offset in range(size):
                        shard.write(sample(start + offset))
            assert epoch.refresh().state == "produced"
            assert (epoch.manifest.seed, epoch.manifest.fingerprint) == (9, "f")
        assert replayed(any_url) == list(range(12))

    def test_a_begun_shard_goes_on_where_it_was_committed(self, any_url: str, any_client: Client) -> None:
        """A retried job must neither make nor send committed samples again."""
        with writer_of(any_url, spec=SPEC, block_bytes=2 * SAMPLE_BYTES) as writer:
            epoch = writer.epoch(sizes=[10])
            first = epoch.shard(0)
            for number in range(5):
                first.write(sample(number))
            first.commit_all()
            first.abort()
            with epoch.shard(0) as again:
                assert again.position == 5
                for number in range(5, 10):
                    again.write(sample(number))
        assert replayed(any_url) == list(range(10))
        assert is_contiguous(index_spans(any_client, "t", 0, 0), 10)

    def test_more_samples_than_planned_are_refused(self, any_url: str) -> None:
        """A source that grew after planning would make unplanned identities."""
        with writer_of(any_url, spec=SPEC) as writer:
            shard = writer.epoch(sizes=[2]).shard(0)
            shard.write_batch({"x": np.zeros((2, 4), np.float32), "y": np.zeros(2, np.int64)})
            with pytest.raises(ShardMismatch, match="2 samples are planned"):
                shard.write(sample(0))
            with pytest.raises(ShardMismatch):
                shard.quarantine("no room for this one either")
            shard.abort()

    def test_fewer_samples_than_planned_do_not_complete_a_shard(self, any_url: str) -> None:
        """A job that ended early must fail, or trainers would wait for its epoch for ever."""
        with writer_of(any_url, spec=SPEC) as writer:
            epoch = writer.epoch(sizes=[2])
            with pytest.raises(ShardMismatch, match="plans 2"), epoch.shard(0) as shard:
                shard.write(sample(0))
            assert epoch.refresh().state == "sized"

    def test_an_epoch_with_other_sizes_is_refused(self, any_url: str) -> None:
        """Two plans of one epoch cannot both be right."""
        with writer_of(any_url, spec=SPEC) as writer:
            writer.epoch(0, sizes=[2, 2])
            assert writer.epoch(0, sizes=[2, 2]).number == 0
            with pytest.raises(StreamConflict, match="4 samples in 2"):
                writer.epoch(0, sizes=[2, 3])

    def test_shards_written_by_number_complete_an_epoch_without_a_plan(self, any_url: str) -> None:
        """Leaving the block well promises that what was written can be read."""
        with writer_of(any_url, spec=SPEC) as writer, writer.epoch() as epoch:
            for number in range(2):
                with epoch.shard(number) as shard:
                    shard.write(sample(number))
        assert replayed(any_url) == [0, 1]

    def test_a_shard_of_a_stream_without_spec_says_what_it_needs(self, any_url: str) -> None:
        """A job knows what it will write; the stream does not yet."""
        with writer_of(any_url) as writer:
            with pytest.raises(PenstockError, match="spec="):
                writer.epoch(sizes=[1]).shard(0)
            with writer.epoch(0).shard(0, like=sample(0)) as shard:
                shard.write(sample(0))
        assert replayed(any_url) == [0]


class TestQuarantine:
    """Samples that could not be made keep their place."""

    def test_a_bad_sample_leaves_a_hole_and_its_reason(self, any_url: str, any_client: Client) -> None:
        """Identities must not shift because one image is broken, and someone will ask which."""
        with writer_of(any_url, spec=SPEC, block_bytes=4 * SAMPLE_BYTES) as writer, writer.epoch() as epoch:
            for number in range(20):
                if number in (0, 7, 19):
                    epoch.quarantine(f"image {number} is truncated")
                else:
                    epoch.write(sample(number))
        good = [number for number in range(20) if number not in (0, 7, 19)]
        assert replayed(any_url) == good
        assert sorted(stored(any_client, "t", 0)) == [(0, number) for number in good]
        reasons = any_client.hgetall(open_stream(any_client, "t").partitions[0].quarantine(0))
        assert set(reasons) == {b"0:0", b"0:7", b"0:19"}
        assert b"image 7 is truncated" in reasons[b"0:7"]
        with Loader("t", group="g", batch_size=4, url=any_url, tuning=Tuning(notify=lambda _: None)) as loader:
            assert sorted(numbers(loader)) == good

    def test_a_block_has_no_more_holes_than_its_header_may(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reader would refuse the entry."""
        monkeypatch.setattr("penstock_producer.write.shard.MAX_HOLES", 3)
        with writer_of(any_url, spec=SPEC) as writer, writer.epoch(sizes=[7]).shard(0) as shard:
            for _ in range(7):
                shard.quarantine("bad")
        assert index_spans(any_client, "t", 0, 0) == [(0, 3), (3, 6), (6, 7)]

    def test_an_epoch_of_bad_samples_only_adds_up(self, any_url: str, any_client: Client) -> None:
        """More holes than one header may carry, and nothing else: still an epoch that ends."""
        with writer_of(any_url, spec=SPEC) as writer, writer.epoch() as epoch:
            for _ in range(10_000):
                epoch.quarantine("bad")
        assert not entries(any_client, "t", 0)
        assert is_contiguous(index_spans(any_client, "t", 0, 0), 10_000)
        assert replayed(any_url) == []
        said: list[str] = []
        with Loader(
            "t", group="g", batch_size=4, url=any_url, tuning=Tuning(timeout_s=0.5, notify=said.append)
        ) as loader:
            with pytest.raises(TimeoutError):
                list(loader)  # nothing in it to hand out, so it waits for the next
            assert load_manifest(any_client, loader.stream, 0).state == "produced"


class TestRefusals:
    """A writer refuses to begin in these cases."""

    def test_a_server_that_may_evict_is_refused_and_left_as_it_was(self, fresh_server: Any) -> None:
        """Eviction deletes samples unread; nothing may be written there, not even a stream's name."""
        server = fresh_server(maxmemory_bytes=100 << 20, extra={"maxmemory-policy": "allkeys-lru"})
        with pytest.raises(ServerUnsuitable, match=r'allkeys-lru.*redis-cli -u "\$PENSTOCK_URL" CONFIG .* noeviction'):
            writer_of(server.url, budget_bytes=1 << 20)
        with redis.Redis.from_url(server.url) as client:
            assert not client.keys("penstock:*")

    def test_a_budget_beyond_the_servers_memory_is_refused(self, fresh_server: Any) -> None:
        """The refusal says what would fit, and a refused stream takes nothing from the others."""
        server = fresh_server(maxmemory_bytes=100 << 20)
        with pytest.raises(BudgetRefused, match=r"1024 MiB.*maxmemory 100 MiB.*at most 74 MiB"):
            writer_of(server.url, budget_bytes=1 << 30)
        with Writer("other", url=server.url, budget_bytes=50 << 20):
            pass
        with pytest.raises(
            BudgetRefused, match=r"other streams 50 MiB.*give another stream less \(.*or remove a stream"
        ):
            writer_of(server.url, budget_bytes=50 << 20)
        Writer("other", url=server.url, budget_bytes=20 << 20).close()  # as the line says
        with writer_of(server.url, budget_bytes=50 << 20):
            pass
        Writer("t", url=server.url, budget_bytes=20 << 20).close()
        with writer_of(server.url, budget_bytes=20 << 20):
            pass

    def test_streams_without_a_budget_share_what_a_small_server_has(self, fresh_server: Any) -> None:
        """A newcomer's first and second stream must open on a server with less memory than the default budget."""
        server, said = fresh_server(maxmemory_bytes=200 << 20), list[str]()
        taken = {}
        for name in ("train", "val", "test"):
            with Writer(name, url=server.url, tuning=Tuning(notify=said.append)) as writer:
                taken[name] = writer.stream.budget_bytes >> 20
        assert taken == {"train": 82, "val": 41, "test": 20}
        assert said[1] == (
            "stream 'val' takes a budget of 41 MiB, half of what the other streams leave of the server's maxmemory "
            "200 MiB; budget_bytes (--budget) sets another"
        )
        with Writer("train", url=server.url, tuning=Tuning(notify=said.append)) as writer:
            assert writer.stream.budget_bytes >> 20 == 82
        assert len(said) == 3

    def test_a_damaged_stream_refuses_no_other_one(self, fresh_server: Any) -> None:
        """Its budget cannot be read; a new stream must not pay for what another program wrote there."""
        server = fresh_server(maxmemory_bytes=200 << 20)
        with Writer("damaged", url=server.url, budget_bytes=50 << 20) as writer:
            writer.client.hset(writer.stream.keys.meta, "budget_bytes", "much")
        with Writer("other", url=server.url, budget_bytes=90 << 20):
            pass
        with pytest.raises(BudgetRefused, match="other streams 90 MiB"):
            writer_of(server.url, budget_bytes=90 << 20)

    def test_a_full_server_refuses_a_stream_without_a_budget(self, fresh_server: Any) -> None:
        """A share that holds no block is no share."""
        server = fresh_server(maxmemory_bytes=100 << 20)
        with Writer("other", url=server.url, budget_bytes=73 << 20):
            pass
        said: list[str] = []
        with pytest.raises(
            BudgetRefused,
            match=r"no memory for .*budgets take 73 MiB of the 74 MiB .*: give another stream less \(penstock\.Writer\("
            r"NAME, budget_bytes=BYTES\)\.close\(\) does it\), and each small stream a small one from the start "
            r"\(budget_bytes=BYTES, --budget\), remove .*penstock delete NAME",
        ):
            writer_of(server.url, notify=said.append)
        assert said == []  # it takes nothing, so nothing is announced
        Writer("other", url=server.url, budget_bytes=40 << 20).close()
        with writer_of(server.url) as writer:
            assert writer.stream.budget_bytes >> 20 == 17

    def test_a_sample_larger_than_a_quarter_of_the_budget_is_refused(self, any_url: str) -> None:
        """It might wait for budget for ever, so an error with numbers comes at once."""
        with writer_of(any_url, budget_bytes=1_000_000, partitions=2) as writer, writer.epoch() as epoch:
            with pytest.raises(TooLarge, match=r"293 KiB.*quarter.*raise budget_bytes \(--budget\) to 2400000, or"):
                epoch.write({"x": np.zeros(300_000, np.uint8)})
            epoch.abandon()


def test_the_bytes_on_the_roster_are_those_in_the_entries(url: str, client: Client) -> None:
    """The budget is kept by these counters, so they must be exact, ragged tensors and holes included."""
    spec = {"x": ("float32", (3,)), "r": ("uint8", (None, 2)), "s": ("bytes", ())}
    with writer_of(url, spec=spec, partitions=2, block_bytes=500) as writer:
        epoch = writer.epoch(sizes=[100, 100])
        for number in range(2):
            with epoch.shard(number) as shard:
                for offset in range(100):
                    if offset % 9 == 0:
                        shard.quarantine("bad")
                        continue
                    shard.write(
                        {"x": np.zeros(3, np.float32), "r": np.zeros((offset % 5, 2), np.uint8), "s": b"q" * offset}
                    )
    total, by_epoch = accounted_bytes(client, "t")
    assert total == by_epoch[0] == payload_bytes(client, "t", 0)


def test_a_writer_that_is_closed_leaves_no_connection(any_url: str, any_client: Client) -> None:
    """Workers open thousands of shards in their life."""
    with no_connection_left(any_client):
        produce(any_url, "t", 10, epochs=3)
