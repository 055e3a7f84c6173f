"""Replays of payloads in segments on a disk: the same promises as from memory, and the disk is asked in time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_common.segments.reader import AHEAD_BYTES
from penstock_common.stream import streams
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Tuning
from penstock_consumer.replay.replay import Replay
from penstock_producer.write import writer as writing
from tests.common.segments.test_ahead import cached, eventually, forget
from tests.consumer import test_passes, test_replay
from tests.planes.taking import taken

SLOW = {"test_a_replay_goes_on_beside_production", "test_a_replay_keeps_its_epoch"}
ROW_BYTES, ROWS = 150_000, 640


@pytest.fixture
def server(any_server: EmbeddedServer) -> EmbeddedServer:
    """One version is enough."""
    return any_server


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Streams that are made without a word about payloads get them in segments there."""
    real = streams.create_stream

    def create(*args: Any, payload: str | None = None, **settings: Any) -> Any:
        return real(*args, payload=payload or f"segments:{tmp_path / 'segments'}", **settings)

    monkeypatch.setattr(writing, "create_stream", create)


for _module in (test_replay, test_passes):
    globals().update(taken(_module, SLOW))


@pytest.fixture
def files(any_url: str, tmp_path: Path) -> Iterator[list[int]]:
    """Yield the open files of an epoch of 96 MB. The page cache holds none of them."""
    with writing.Writer("t", url=any_url, spec={"x": ("uint8", (ROW_BYTES,))}) as writer, writer.epoch() as epoch:
        for _ in range(ROWS // 64):
            epoch.write_batch({"x": np.ones((64, ROW_BYTES), np.uint8)})
    opened = [os.open(path, os.O_RDWR) for path in (tmp_path / "segments").glob("*/*.seg")]
    for fd in opened:
        forget(fd)
    yield opened
    for fd in opened:
        os.close(fd)


@pytest.mark.parametrize("shuffle", [None, 1])
def test_while_a_batch_is_trained_on_the_disk_fetches_those_after_it(
    any_url: str, files: list[int], shuffle: int | None
) -> None:
    """Across the ends of files and in any order, the reader reads ahead the stated number of bytes in little memory."""

    def fetched() -> float:
        return sum(cached(fd) * os.fstat(fd).st_size for fd in files)

    with Replay(
        "t", url=any_url, epoch=0, batch_size=8, shuffle=shuffle, tuning=Tuning(prefetch_bytes=1 << 20)
    ) as replay:
        next(iter(replay))
        assert eventually(lambda: fetched() > 0.9 * AHEAD_BYTES)
