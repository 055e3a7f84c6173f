"""Writers of a feed, and a server that comes back a moment older: it gives shards out again. The server is killed, and
the end of its append-only file is cut off, as after a power cut or a failover to a lagging replica.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import redis

from penstock_common.errors import PenstockError, ShardMismatch
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.groups.losses import noted_losses
from penstock_common.stream.manifest import load_manifest, retained_epochs
from penstock_common.stream.servers.durability import ReplicaWatch
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Tuning
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.writer import Writer
from tests.clusters import until
from tests.contracts.feed import SAMPLE_BYTES, SPEC, loader_of, numbers, open_stream, sample
from tests.contracts.processes import child
from tests.tuned import tuned

Fresh = Callable[..., EmbeddedServer]
BLOCK = 10


class Rollback:
    """A server whose newest writes can be removed."""

    def __init__(self, fresh_server: Fresh, folder: Path) -> None:
        self._start, self._folder = fresh_server, folder
        self._server = self._started()
        self._size = 0

    def _started(self, port: int | None = None) -> EmbeddedServer:
        extra = {"appendfsync": "no"}  # a reply leaves after the write to the file, and no disk delays it
        return self._start(appendonly=True, directory=self._folder, port=port, extra=extra)

    @property
    def url(self) -> str:
        """Return the address of the server, which a restart keeps."""
        return self._server.url

    def client(self) -> redis.Redis:
        """Return a raw client of the running server."""
        return redis.Redis.from_url(self.url)

    def mark(self) -> None:
        """Mark the point after which all writes will be lost."""
        self._size = self._log().stat().st_size

    def restart(self) -> None:
        """Crash and lose all writes since the mark. The server comes back at the same address."""
        self._server.kill()
        os.truncate(self._log(), self._size)
        self._server = self._started(self._server.port)

    def _log(self) -> Path:
        (log,) = [path for path in self._folder.rglob("*.aof") if ".base." not in path.name]
        return log


@pytest.fixture
def rollback(fresh_server: Fresh, tmp_path: Path) -> Rollback:
    """Start a server with its own append-only file."""
    return Rollback(fresh_server, tmp_path)


@pytest.fixture(autouse=True)
def full_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no block leave early by the clock: on a slow machine, samples that were not to be sent yet were."""
    for name in ("FIRST_LINGER_S", "LINGER_S"):
        monkeypatch.setattr(f"penstock_producer.write.shard.{name}", 600.0)


def feeder(url: str, payload: str | None = None, **more: Any) -> Writer:
    """Return a quiet writer of 't' with ten samples in a block."""
    settings: dict[str, Any] = {"spec": SPEC, "block_bytes": BLOCK * SAMPLE_BYTES, "payload": payload, **more}
    return Writer("t", url=url, **tuned("Writer", settings, Tuning(notify=lambda _: None)))


def feed(writer: Writer, first: int, count: int) -> None:
    """Write ``count`` numbered samples."""
    for number in range(first, first + count):
        writer.write(sample(number))


def read_all(url: str, client: redis.Redis) -> list[int]:
    """Return the numbers of all samples of all epochs, sorted. Each epoch must be complete."""
    stream, found = open_stream(client, "t"), list[int]()
    for epoch in retained_epochs(client, stream):
        assert load_manifest(client, stream, epoch).state == "produced"
        with Replay("t", url=url, epoch=epoch, batch_size=64) as replay:
            found += numbers(replay)
    return sorted(found)


def require_all(rollback: Rollback, expected: list[int]) -> None:
    """Require that what was written equals what is read, and that the audit finds nothing."""
    with rollback.client() as client:
        assert read_all(rollback.url, client) == expected
        report = audit_stream(client, "t")
        assert report.is_clean, report.findings


@pytest.mark.parametrize("is_sent_again", [True, False])
def test_samples_that_were_acknowledged_and_sent_again_are_no_loss(
    rollback: Rollback, monkeypatch: pytest.MonkeyPatch, is_sent_again: bool
) -> None:
    """The audit of a feed was not clean, though nothing was lost. Where the writer keeps nothing, it must not be."""
    follows = Event()
    monkeypatch.setattr(ReplicaWatch, "_is_followed", lambda *_: follows.is_set())
    if is_sent_again:
        follows.set()
    with suppress(ShardMismatch), feeder(rollback.url, durability="auto") as writer, rollback.client() as client:
        feed(writer, 0, 40)
        stream = open_stream(client, "t")
        index = stream.partitions[0].index(0, 0)
        until(lambda: client.xlen(index) == 4)
        with loader_of(rollback.url, start="earliest", acknowledge="manual", batch_size=BLOCK) as loader:
            batches = iter(loader)
            loader.acknowledge(next(batches))
            hooks_of(loader).acknowledger.flush()
            rollback.mark()
            feed(writer, 40, 40)  # the answers of all but the last block are read by now
            until(lambda: client.xlen(index) == 8)
            for _ in range(6):
                loader.acknowledge(next(batches))
            hooks_of(loader).acknowledger.flush()
            rollback.restart()
            until(lambda: bool(noted_losses(client, stream, 0)))
            with suppress(ShardMismatch):
                feed(writer, 80, 20)
            follows.clear()
    with rollback.client() as client:
        report = audit_stream(client, "t")
        assert len(report.epochs[0].made_again) == is_sent_again
        assert report.is_clean == is_sent_again, report.findings


@pytest.mark.parametrize("plane", ["inline", "segments"])
def test_a_shard_that_is_given_out_again_keeps_one_writer(rollback: Rollback, memory_path: Path, plane: str) -> None:
    """The second writer took the third one's blocks for its own: 1,300 samples were written, and 700 read."""
    payload = plane if plane == "inline" else f"segments:{memory_path}"
    with feeder(rollback.url, payload) as first:
        feed(first, 0, 30)
        first.flush()
        rollback.mark()
        second = feeder(rollback.url)
        feed(second, 100, BLOCK - 1)  # a shard is taken, and nothing is sent
        rollback.restart()
        with feeder(rollback.url) as third:
            feed(third, 1000, 700)
            third.flush()
            feed(second, 100 + BLOCK - 1, 600)
            second.close()
    require_all(rollback, [*range(30), *range(100, 100 + BLOCK - 1 + 600), *range(1000, 1700)])


def test_a_batch_that_meets_another_writer_goes_on_in_a_new_shard_whole(rollback: Rollback) -> None:
    """The refusal comes in the middle of the batch: its rows before and behind that belong to one shard."""
    with feeder(rollback.url) as first:
        feed(first, 0, 30)
        first.flush()
        rollback.mark()
        second = feeder(rollback.url)
        feed(second, 100, 3)
        second.quarantine("a bad one")
        rollback.restart()
        with feeder(rollback.url) as third:
            feed(third, 1000, 100)
            third.flush()
            ys = np.arange(103, 203)
            second.write_batch({"x": np.repeat(ys[:, None], 4, axis=1).astype(np.float32), "y": ys})
            second.close()
    require_all(rollback, [*range(30), *range(100, 203), *range(1000, 1100)])
    with rollback.client() as client:
        assert audit_stream(client, "t").bad == 1


def test_a_writer_whose_shard_was_forgotten_takes_it_again(rollback: Rollback) -> None:
    """The epoch would be complete without the shard, and every reader would take its samples for strays."""
    first = feeder(rollback.url)
    feed(first, 0, 30)
    first.flush()
    rollback.mark()
    with feeder(rollback.url) as second:
        feed(second, 100, BLOCK - 1)
        rollback.restart()
        feed(second, 100 + BLOCK - 1, 50)
        second.flush()
        first.close()
        feed(second, 200, 50)
    require_all(rollback, [*range(30), *range(100, 100 + BLOCK - 1 + 50), *range(200, 250)])


def test_a_writer_whose_epoch_went_on_without_it_writes_in_the_next(rollback: Rollback) -> None:
    """It was silent while the others completed the epoch, so none of its samples may enter a shard without readers."""
    first = feeder(rollback.url)
    feed(first, 0, 30)
    first.flush()
    rollback.mark()
    with feeder(rollback.url) as second:
        feed(second, 100, BLOCK - 1)
        rollback.restart()
        first.close()
        feed(second, 100 + BLOCK - 1, 50)
    require_all(rollback, [*range(30), *range(100, 100 + BLOCK - 1 + 50)])


def test_a_writer_whose_epoch_was_forgotten_writes_in_the_next(rollback: Rollback) -> None:
    """The epoch's number is given out again: another writer's samples have the identities."""
    with feeder(rollback.url) as first:
        rollback.mark()
        feed(first, 0, BLOCK - 1)
        rollback.restart()
        with feeder(rollback.url) as second:
            feed(second, 100, 50)
            second.flush()
            feed(first, BLOCK - 1, 50)
            first.flush()
    require_all(rollback, [*range(BLOCK - 1 + 50), *range(100, 150)])


def test_a_writer_that_lost_confirmed_samples_ends_by_an_error_and_harms_nobody(rollback: Rollback) -> None:
    """It had been told that they are safe; and the shard, which is another writer's, is not its to complete."""
    with feeder(rollback.url) as first:
        feed(first, 0, 30)
        first.flush()
        rollback.mark()
        second = feeder(rollback.url)
        feed(second, 100, 40)
        second.flush()
        rollback.restart()
        with feeder(rollback.url) as third:
            feed(third, 1000, 70)
            third.flush()
            with pytest.raises(ShardMismatch, match="lost data, and with it 40 samples that it had confirmed"), second:
                feed(second, 140, 60)
            feed(third, 1070, 70)
    with rollback.client() as client:
        assert read_all(rollback.url, client) == [*range(30), *range(1000, 1140)]
        assert any("40 samples that writer" in finding for finding in audit_stream(client, "t").findings)


def feed_in_two_parts(url: str, first: str, before: str, after: str, go_on: str) -> None:
    """A writer of its own process: samples, committed if they fill a block; and more once a file is there."""
    said = "done"
    try:
        with feeder(url) as writer:
            feed(writer, int(first), int(before))
            if int(before) >= BLOCK:
                writer.flush()
            print("waits")
            while not Path(go_on).exists():
                time.sleep(0.01)
            feed(writer, int(first) + int(before), int(after))
    except PenstockError as error:
        said = f"ended {type(error).__name__}: {error}"
    print(said)


@pytest.mark.parametrize("before", [BLOCK - 1, 600])
def test_two_writers_and_a_restart_that_loses_a_second_lose_nothing_in_silence(
    rollback: Rollback, tmp_path: Path, before: int
) -> None:
    """Processes, as they run: what is read is what was written, or who lost gets an error and the audit says so."""
    go_on, at_once = tmp_path / "go on", tmp_path
    with child(feed_in_two_parts, rollback.url, 0, 600, 600, go_on) as one:
        assert one.line() == "waits"
        rollback.mark()
        with child(feed_in_two_parts, rollback.url, 10_000, before, 600, go_on) as two:
            assert two.line() == "waits"
            os.kill(two.process.pid, signal.SIGSTOP)  # it must not be the first to come back
            rollback.restart()
            with child(feed_in_two_parts, rollback.url, 20_000, 700, 700, at_once) as three:
                assert three.rest() == ["waits", "done"]
            os.kill(two.process.pid, signal.SIGCONT)
            go_on.touch()
            (said,) = two.finish()
            assert one.rest() == ["done"]
    kept = [*range(1200), *range(20_000, 21_400)]
    with rollback.client() as client:
        found, report = read_all(rollback.url, client), audit_stream(client, "t")
    if before >= BLOCK:
        assert said.startswith("ended ShardMismatch"), said
        assert found == kept
        assert any(f"{before} samples that writer" in finding for finding in report.findings), report.findings
        (lost,) = [finding for finding in report.findings if "the server lost its newest writes" in finding]
        assert "600 samples that writer" in lost
    else:
        assert said == "done"
        assert found == sorted([*kept, *range(10_000, 10_000 + before + 600)])
        assert report.is_clean, report.findings
