"""Samples made where they are kept, and batches delivered where they lie: no copy on either side, and nothing lost."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import BudgetFull, PenstockError, ShardMismatch, TooLarge
from penstock_common.segments.folder import NOTES, SegmentFolder
from penstock_common.segments.mapping import lies_in_memory
from penstock_common.segments.writer import SegmentWriter
from penstock_common.stream.client import connect
from penstock_common.stream.payloads import registered_segments, segments_of
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.export import export_stream
from penstock_consumer.replay.files import Files
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.cleaner import recycle
from penstock_producer.write.reserve import Reservation
from penstock_producer.write.writer import Writer
from tests.tuned import tuned

SPEC: dict[str, Any] = {"x": ("uint8", (30, 5)), "b": ("bool", (3,)), "y": ("int64", ())}
QUIET: dict[str, Any] = {"notify": lambda _: None}


def writer_of(url: str, payload: str, **settings: Any) -> Writer:
    """Return a writer of a small stream."""
    return Writer(
        "t", url=url, spec=SPEC, payload=payload, **tuned("Writer", {"budget_bytes": 1 << 20, **QUIET, **settings})
    )


def fill(rows: Any, first: int) -> None:
    """With samples that show their number in all their tensors."""
    rows["y"][...] = np.arange(first, first + len(rows["y"]))
    rows["x"][...] = (rows["y"] % 200)[:, None, None]
    rows["b"].view(np.uint8)[...] = (rows["y"] % 3)[:, None]  # a decoder may say 2 for true


def check(batch: Any) -> list[int]:
    """The numbers, after checking that all tensors agree."""
    numbers = batch["y"].tolist()
    assert (batch["x"] == (batch["y"] % 200)[:, None, None]).all()
    assert (batch["b"] == (batch["y"] % 3 > 0)[:, None]).all()
    assert batch["b"].view(np.uint8).max(initial=0) <= 1
    return list(numbers)


@pytest.fixture(params=["inline", "disk", "memory"])
def payload(request: pytest.FixtureRequest, tmp_path: Path, memory_path: Path) -> str:
    """Both planes; files in memory are kept mapped, so that what is written is made in place too."""
    folders = {"disk": tmp_path, "memory": memory_path}
    return "inline" if request.param == "inline" else f"segments:{folders[request.param]}"


def test_reserved_samples_are_committed_with_all_others(any_url: str, payload: str, monkeypatch: Any) -> None:
    """Between written ones, over several blocks and segments; an error in a block forgets that one and no other."""
    in_place: list[str] = []
    dropped: list[Reservation] = []
    whole = SegmentWriter._write

    def write(self: SegmentWriter, *rest: Any) -> None:
        if not rest[-1]:  # the payload is in the file already
            in_place.append(self.name)
        whole(self, *rest)

    monkeypatch.setattr(SegmentWriter, "_write", write)
    with writer_of(any_url, payload) as writer, writer.epoch() as epoch:
        number = 0
        for turn in range(40):
            if turn % 5 == 4:
                epoch.write({"x": np.full((30, 5), number % 200, np.uint8), "b": [number % 3 > 0] * 3, "y": number})
                number += 1
                continue
            if turn % 7 == 3:
                with pytest.raises(ZeroDivisionError), epoch.reserve(16) as rows:
                    fill(rows, 10_000)
                    dropped.append(rows)
                    raise ZeroDivisionError
            with epoch.reserve(16) as rows:
                assert all(rows[name].ctypes.data % 64 == 0 for name in rows if payload != "inline")
                fill(rows, number)
            for stale in dropped:  # a thread of a decoder that does not know of it yet
                fill(stale, 20_000)
            number += 16
    with Replay("t", url=any_url, epoch=0, batch_size=16, **tuned("Replay", QUIET)) as replay:
        assert [n for batch in replay for n in check(batch)] == list(range(number))
    assert len(in_place) == (0 if payload == "inline" else 32 + len(dropped))
    assert len(set(in_place)) <= 2, "what is dropped takes its own place and no more"


def test_a_small_shard_takes_a_small_file(any_url: str, memory_path: Path) -> None:
    """Blocks are made in the file: one that could be large would take space for all that it could be."""
    with writer_of(any_url, f"segments:{memory_path}", budget_bytes=64 << 20) as writer:
        shards = [100, 10, 1]
        epoch = writer.epoch(sizes=shards)
        for shard, size in enumerate(shards):
            with epoch.shard(shard) as rows:
                for number in range(size):
                    rows.write({"x": np.full((30, 5), number % 200, np.uint8), "b": [number % 3 > 0] * 3, "y": number})
        assert writer.stream.block_bytes > 1 << 20
    assert sum(file.stat().st_size for file in memory_path.rglob("*.seg")) < 150_000
    with Replay("t", url=any_url, epoch=0, batch_size=16, **tuned("Replay", QUIET)) as replay:
        assert [n for batch in replay for n in check(batch)] == [n for size in shards for n in range(size)]


def test_what_cannot_be_reserved_is_said(any_url: str, payload: str) -> None:
    """One line, before anything is made."""
    ragged = {"s": ("bytes", ())}
    for name, spec, match in (("r", ragged, "'s' is ragged: use write"), ("n", None, "it has none yet: give spec=")):
        with Writer(name, url=any_url, spec=spec, payload=payload, **tuned("Writer", QUIET)) as writer:
            epoch = writer.epoch()
            with pytest.raises(PenstockError, match=match):
                epoch.reserve(4)
    with writer_of(any_url, payload) as writer:
        epoch = writer.epoch(sizes=[40])
        with epoch.shard(0) as shard:
            with pytest.raises(ValueError, match="1 to 65536"):
                shard.reserve(0)
            with pytest.raises(ShardMismatch):
                shard.reserve(41)
            rows = shard.reserve(20)
            for write in (
                lambda: shard.reserve(1), lambda: shard.write({}), lambda: shard.quarantine("x"), shard.close,
            ):  # fmt: skip
                with pytest.raises(PenstockError, match="20 reserved samples are neither committed nor dropped"):
                    write()
            fill(rows, 0)
            rows.commit()
            with pytest.raises(ValueError, match="read-only"):
                rows["x"][...] = 1
            with pytest.raises(PenstockError, match="committed or dropped already"):
                rows.commit()
            with shard.reserve(20) as rows:
                fill(rows, 20)
        epoch = writer.epoch()
        with pytest.raises(TooLarge):
            epoch.reserve(5000)
    with Replay("t", url=any_url, epoch=0, batch_size=16, **tuned("Replay", QUIET)) as replay:
        assert [n for batch in replay for n in check(batch)] == list(range(40))


def test_a_reservation_waits_for_room_as_a_write_does(any_url: str, payload: str) -> None:
    """Back-pressure also holds for arrays that are filled in place, and committed samples stay."""
    with writer_of(any_url, payload, budget_bytes=200_000, room_wait_s=0.5) as writer:
        epoch, done = writer.epoch(), 0
        with pytest.raises(BudgetFull):
            while True:
                with epoch.reserve(64) as rows:
                    fill(rows, done)
                done += 64
        with Loader(
            "t", group="g", batch_size=64, url=any_url, **tuned("Loader", QUIET, Tuning(timeout_s=20))
        ) as loader:
            batches = iter(loader)
            assert check(next(batches)) == list(range(64))
            assert done < 200_000 // 150


class TestViews:
    """Batches that share the segment's memory."""

    @pytest.fixture(params=["disk", "memory"])
    def made(self, request: pytest.FixtureRequest, any_url: str, tmp_path: Path, memory_path: Path) -> str:
        """The URL of a server with an epoch of 40 blocks of 16 samples, and one of 7."""
        root = tmp_path if request.param == "disk" else memory_path
        with (
            writer_of(any_url, f"segments:{root}", block_bytes=4096) as writer,
            writer.epoch() as epoch,
        ):
            for turn in range(40):
                with epoch.reserve(16) as rows:
                    fill(rows, 16 * turn)
            with epoch.reserve(7) as rows:
                fill(rows, 640)
        return any_url

    def test_all_readers_hand_them_out(self, made: str, tmp_path: Path) -> None:
        """Views hold the same samples as copies, aligned, and are read-only because other readers share the bytes."""
        with connect(made) as client:
            export_stream(client, "t", tmp_path / "out")
        loader: dict[str, Any] = {"group": "g", "url": made, "timeout_s": 20, "batch_size": 16, **QUIET}
        for reader in (
            Replay("t", url=made, epoch=0, batch_size=16, **tuned("Replay", QUIET, Tuning(views=True))),
            Files(tmp_path / "out", batch_size=16, **tuned("Files", QUIET, Tuning(views=True))),
            Loader("t", **tuned("Loader", loader, Tuning(views=True))),
            Loader("t", order="canonical", **tuned("Loader", {**loader, "group": "o"}, Tuning(views=True))),
        ):
            with reader:
                batches = list(reader)
            assert sorted(n for batch in batches for n in check(batch)) == list(range(647))
            seen = [batch for batch in batches if not batch["x"].flags.writeable]
            assert len(seen) == 40
            assert all(array.ctypes.data % 64 == 0 for batch in seen for array in batch.values())
            with pytest.raises(ValueError, match="read-only"):
                seen[0]["x"][...] = 0
        with Replay("t", url=made, epoch=0, batch_size=16, **tuned("Replay", QUIET)) as replay:
            assert all(batch["x"].flags.writeable for batch in replay)
        with Replay("t", url=made, epoch=0, batch_size=10, **tuned("Replay", QUIET, Tuning(views=True))) as replay:
            assert [n for batch in replay for n in check(batch)] == list(range(647))

    def test_a_file_is_not_used_again_while_a_part_of_a_view_lives(self, made: str) -> None:
        """A trainer keeps a batch for its plots: it must be that batch for ever, whatever retention does."""
        with Loader(
            "t", group="g", batch_size=16, url=made, **tuned("Loader", QUIET, Tuning(views=True, timeout_s=20))
        ) as loader:
            kept = next(batch for batch in loader if not batch["x"].flags.writeable)["x"][3:5, 2]
        before = kept.copy()
        with connect(made) as client:
            stream = loader.stream
            folder = segments_of(stream)
            assert isinstance(folder, SegmentFolder)
            assert len(folder.names()) > 2
            client.delete(*list(client.keys("*segments*")))  # as if nothing were needed any more
            assert not registered_segments(client, stream.partitions[0], 0)
            gc.collect()
            recycle(client, stream, grace_s=0)
            left = list(folder.names())
            assert len(left) == 1, "the one that the view lies in"
            assert np.array_equal(kept, before)
            del kept, loader
            gc.collect()
            recycle(client, stream, grace_s=0)
            assert not folder.names()

    def test_a_deleted_stream_leaves_views_as_they_are(self, made: str) -> None:
        """Files are cut short before they are removed, but none that is looked at: that would be a SIGBUS."""
        with Replay("t", url=made, epoch=0, batch_size=16, **tuned("Replay", QUIET, Tuning(views=True))) as replay:
            kept = list(replay)
            folder = segments_of(replay.stream)
        assert folder is not None
        assert folder.remove()
        assert [n for batch in kept for n in check(batch)] == list(range(647))


def test_a_flush_does_not_let_others_in_beside_reserved_samples(any_url: str, payload: str) -> None:
    """Their offsets are given: whatever is written before they are committed would take them."""
    with writer_of(any_url, payload) as writer, writer.epoch() as epoch:
        with epoch.reserve(4) as rows:
            fill(rows, 0)
            epoch.flush()
            for write in (epoch.write, epoch.write_batch):
                with pytest.raises(PenstockError, match="neither committed nor dropped"):
                    write({name: rows[name][:1] if write == epoch.write_batch else rows[name][0] for name in rows})
        epoch.write({name: value[0] for name, value in rows.items()})
    with Replay("t", url=any_url, epoch=0, batch_size=5, **tuned("Replay", QUIET)) as replay:
        assert [n for batch in replay for n in check(batch)] == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("views", [True, False])
def test_the_first_reader_of_a_host_verifies_a_block_for_all(any_url: str, memory_path: Path, views: bool) -> None:
    """Only one of several trainers on a host hashes each byte. Without its notes, every reader does."""
    if not lies_in_memory(memory_path):
        pytest.skip("no memory file system here")

    def read() -> list[int]:
        with Replay("t", epoch=0, url=any_url, batch_size=20, **tuned("Replay", {"views": views, **QUIET})) as replay:
            return [number for batch in replay for number in batch["y"].tolist()]

    with writer_of(any_url, f"segments:{memory_path}") as writer:
        with writer.epoch() as epoch, epoch.reserve(20) as rows:
            fill(rows, 0)
        folder = segments_of(writer.stream)
        assert folder is not None
        assert read() == list(range(20))
        [name] = folder.names()
        path = folder.path / name
        content, row = path.read_bytes(), np.arange(20, dtype=np.int64).tobytes()
        assert content.count(row) == 1
        with path.open("r+b") as file:
            file.seek(content.index(row))
            file.write(b"\x63")
        assert read() == [99, *range(1, 20)]
        (folder.path / NOTES).unlink()
        with pytest.raises(PenstockError, match="xxh3"):
            read()
