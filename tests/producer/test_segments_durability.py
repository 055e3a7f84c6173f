"""Promised data is on disk before the entry that refers to it is sent, and a restart continues from there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock_common.stream.servers.durability import Durability
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Tuning
from penstock_consumer.replay.replay import Replay
from penstock_producer.write import cleaner
from penstock_producer.write.commit import Committer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, numbers, open_stream, sample, writer_of
from tests.producer.test_durability import every_server


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the events of files and server in order, on a server that need not keep the levels."""
    seen: list[str] = []

    def record(where: Any, name: str, word: str) -> None:
        real: Callable[..., Any] = getattr(where, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            seen.append(word)
            return real(*args, **kwargs)

        monkeypatch.setattr(where, name, called)

    record(os, "pwritev", "written")
    record(os, "fdatasync", "synced")
    record(os, "fsync", "names synced")
    record(Committer, "_execute", "sent")
    monkeypatch.setattr(Durability, "commands", lambda *_: [(b"PING",)])
    monkeypatch.setattr(Durability, "shortfall", lambda self, replies, where: "")
    monkeypatch.setattr("penstock_producer.write.writer.require_durable", lambda client, level: None)
    return seen


@pytest.mark.parametrize("level", ["fsync", "memory"])
def test_a_payload_is_on_the_disk_before_its_entry_is_sent(
    any_url: str, tmp_path: Path, order: list[str], level: str
) -> None:
    """A power cut in between would leave an entry that refers to nothing."""
    with (
        writer_of(any_url, spec=SPEC, payload=f"segments:{tmp_path}", durability=level,
                  block_bytes=10 * SAMPLE_BYTES, budget_bytes=500_000) as writer,
        writer.epoch() as epoch,
    ):  # fmt: skip
        for number in range(2000):
            epoch.write(sample(number))
    assert order.count("sent") >= 200
    assert order.count("written") >= order.count("sent")
    if level == "memory":
        assert "synced" not in order
        assert "names synced" not in order
        return
    assert order.count("names synced") >= 2, "of each file that was made"
    unsafe = 0
    for word in order:
        unsafe += {"written": 1, "synced": -1}.get(word, 0)
        if word == "sent":
            assert unsafe == 0
    assert order.index("names synced") < order.index("sent")


def test_a_server_that_may_forget_what_was_removed_gets_its_files_kept(
    any_url: str, tmp_path: Path, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fsync a file is used again once the server has on its disk that nothing refers to it; not before."""
    with writer_of(
        any_url, spec=SPEC, payload=f"segments:{tmp_path}", durability="fsync", block_bytes=10 * SAMPLE_BYTES
    ) as writer:
        with writer.epoch() as epoch:
            for number in range(100):
                epoch.write(sample(number))
        from penstock_common.stream.removal.deletion import release_epoch

        assert release_epoch(writer.client, writer.stream, 0)
        monkeypatch.setattr(Durability, "shortfall", lambda self, replies, where: "not yet")
        assert cleaner.recycle(writer.client, writer.stream) == 0
        monkeypatch.setattr(Durability, "shortfall", lambda self, replies, where: "")
        assert cleaner.recycle(writer.client, writer.stream) == 1


@every_server
def test_a_restarted_server_finds_what_its_append_only_file_and_the_folder_hold(
    tmp_path: Path, fresh_server: Callable[..., EmbeddedServer], executable: Path
) -> None:
    """The server went down in an epoch: the writer goes on behind what is committed, readers read it all.

    With durability ``fsync`` on a server that has WAITAOF, files and entries are really on the disk.
    """
    settings: dict[str, Any] = {"appendonly": True, "directory": tmp_path / "server"}
    server = fresh_server(executable, **settings, extra={"appendfsync": "everysec"})
    with redis.Redis.from_url(server.url) as client:
        level = "fsync" if "waitaof" in client.command() else "memory"
        if level == "memory":
            client.config_set("appendfsync", "always")
    writer = writer_of(
        server.url, spec=SPEC, payload=f"segments:{tmp_path / 'disk'}", block_bytes=10 * SAMPLE_BYTES, durability=level
    )
    shard = writer.epoch(0, sizes=[300]).shard(0)
    for number in range(150):
        shard.write(sample(number))
    shard.commit_all()
    server.kill()
    del shard, writer
    again = fresh_server(executable, **settings, extra={"appendfsync": "always"})
    with writer_of(again.url) as writer, writer.epoch(0, sizes=[300]).shard(0) as shard:
        assert shard.position == 150
        for number in range(150, 300):
            shard.write(sample(number))
    with Replay("t", url=again.url, epoch=0, batch_size=16, tuning=Tuning(notify=lambda _: None)) as replay:
        assert numbers(replay) == list(range(300))
    with redis.Redis.from_url(again.url) as client:
        assert open_stream(client, "t").payload.startswith("segments:")
