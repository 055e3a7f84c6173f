"""A server that comes back a moment older: what it had confirmed and forgot is named by the clients that lived through.

The server cannot know: its ledger is as old as its index. So each test cuts the append-only file of a killed server.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.__main__ import main
from penstock_common.errors import EpochNotFound, GroupNotFound, PenstockError, ShardMismatch
from penstock_common.stream.audit import AuditReport, audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Canonical, Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.write.shard import ShardWriter
from penstock_producer.write.writer import EpochWriter, Writer
from tests.clusters import until as await_so
from tests.contracts.feed import SAMPLE_BYTES, SPEC, loader_of, numbers, open_stream, sample

Fresh = Callable[..., EmbeddedServer]


class AgingServer:
    """A server with an append-only file that can be killed, and brought back as it was at a moment before."""

    def __init__(self, fresh: Fresh, folder: Path, **extra: str) -> None:
        self._fresh, self._folder = fresh, folder
        self._settings: dict[str, Any] = {
            "appendonly": True, "directory": folder, "extra": {"requirepass": "secret", **extra},
        }  # fmt: skip
        self._server = fresh(**self._settings)
        self.url = self._server.url
        self._kept = 0

    def url_of(self, user: str, password: str) -> str:
        """The URL for another user."""
        return f"redis://{user}:{password}@127.0.0.1:{self._server.port}"

    def remember(self) -> None:
        """Mark the commands in the file as kept; the server writes each one before it answers."""
        self._kept = self._log().stat().st_size

    def restart(self, *, older: bool) -> None:
        """Kill the server and start it again, from the whole file, or from what ``remember`` found."""
        self._server.kill()
        if older:
            assert self._log().stat().st_size > self._kept
            os.truncate(self._log(), self._kept)
        self._server = self._fresh(port=self._server.port, **self._settings)

    def audit(self) -> AuditReport:
        """Return the report of the audit."""
        with connect(self.url) as client:
            return audit_stream(client, "t")

    def _log(self) -> Path:
        (log,) = [path for path in self._folder.rglob("*.aof") if ".base." not in path.name]
        return log


@pytest.fixture
def aging(fresh_server: Fresh, tmp_path: Path) -> AgingServer:
    """One with the file policy that most servers have."""
    return AgingServer(fresh_server, tmp_path / "aof", appendfsync="everysec")


@contextmanager
def writing(url: str, said: list[str], **epoch: Any) -> Iterator[EpochWriter]:
    """A writer's epoch; whatever the epoch is at the end, it stays so."""
    with Writer("t", url=url, spec=SPEC, tuning=Tuning(block_bytes=10 * SAMPLE_BYTES, notify=said.append)) as writer:
        begun = writer.epoch(**epoch)
        yield begun
        if begun._current is not None:
            begun._current.abort()


def write(epoch: EpochWriter | ShardWriter, first: int, end: int) -> None:
    """Commit these samples."""
    for number in range(first, end):
        epoch.write(sample(number))
    epoch.flush() if isinstance(epoch, EpochWriter) else epoch.commit_all()


def training(url: str, said: list[str], **settings: Any) -> AbstractContextManager[Loader]:
    """A trainer with manual acknowledgement and ten heartbeats a second."""
    return loader_of(url, batch_size=10, lease_s=3, notify=said.append, acknowledge="manual", **settings)


def train(loader: Loader, batches: Iterator[Any], count: int) -> None:
    """Train on ``count`` samples, and acknowledge them."""
    found: list[int] = []
    while len(found) < count:
        batch = next(batches)
        found += numbers([batch])
        loader.acknowledge(batch)
    assert len(set(found)) == count


def until(said: list[str], words: str) -> str:
    """The first line that has these words."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for line in list(said):
            if words in line:
                return line
        time.sleep(0.01)
    raise AssertionError(said)


def test_a_trainer_names_what_it_trained_on_and_the_server_lost(
    aging: AgingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The writer is gone: only the trainer knows that the stream no longer holds what the model has seen."""
    said: list[str] = []
    with training(aging.url, said) as loader:
        with writing(aging.url, []) as epoch:
            write(epoch, 0, 50)
            train(loader, batches := iter(loader), 50)
            aging.remember()
            write(epoch, 50, 90)
        train(loader, batches, 40)
        aging.restart(older=True)
        line = until(said, "newest writes")
    lost = f"shard 0 offsets 50-89: 40 samples that member g/{loader.member} had acknowledged"
    found = re.search(
        rf"of epoch 0 of 't' it lost ({re.escape(lost)}, noticed at \S+ \S+ UTC)\. `penstock audit t` ", line
    )
    assert found, line
    lost = found[1]
    assert aging.audit().findings == [f"epoch 0: the server lost its newest writes: {lost}"]
    assert main(["audit", "t", "--url", aging.url]) == 1
    told = capsys.readouterr().out
    assert f"found: epoch 0: the server lost its newest writes: {lost}" in told
    assert "to do: epoch 0 is not what its trainers were given: produce it again as another epoch" in told
    assert main(["audit", "t", "--json", "--url", aging.url]) == 1
    (told_epoch,) = json.loads(capsys.readouterr().out)["epochs"]
    (loss,) = told_epoch["server_losses"]
    wanted = {"shard": 0, "first": 50, "end": 90, "samples": 40, "was": "acknowledged"}
    assert {name: loss[name] for name in wanted} == wanted


def test_a_writer_names_every_shard_that_a_server_lost_a_part_of(aging: AgingServer) -> None:
    """No trainer lived through it; and shards that were complete have no writer that would stumble over them."""
    said: list[str] = []
    with writing(aging.url, said, sizes=[30, 30, 30]) as epoch:
        with epoch.shard(0) as first:
            write(first, 0, 30)
        begun = epoch.shard(1)
        write(begun, 0, 10)
        aging.remember()
        write(begun, 10, 30)
        begun.close()
        last = epoch.shard(2)
        write(last, 0, 20)
        aging.restart(older=True)
        with pytest.raises(ShardMismatch, match="the server lost data"):
            write(last, 20, 30)
        last.abort()
    line = until(said, "newest writes")
    assert "shard 1 offsets 10-29: 20 samples that writer " in line
    assert "shard 2 offsets 0-19: 20 samples that writer " in line
    assert "shard 0 " not in line
    (epoch_audit,) = aging.audit().epochs
    assert [(loss.shard, loss.first, loss.end, loss.was) for loss in epoch_audit.server_losses] == [
        (1, 10, 30, "committed"),
        (2, 0, 20, "committed"),
    ]
    assert not aging.audit().is_clean


def test_a_writer_that_only_closes_names_what_was_lost_since(aging: AgingServer) -> None:
    """The script confirmed that its epoch is complete, so it writes nothing more that could be refused."""
    said: list[str] = []
    with writing(aging.url, said) as epoch:
        write(epoch, 0, 20)
        aging.remember()
        write(epoch, 20, 30)
        epoch.close()
        aging.restart(older=True)
        epoch.refresh()  # it speaks to the server again
    assert "shard 0 offsets 20-29: 10 samples that writer " in until(said, "newest writes")
    assert not aging.audit().is_clean


def test_a_server_that_comes_back_with_everything_is_not_suspected(aging: AgingServer) -> None:
    """A restart is common: a note where nothing is lost would make every audit useless."""
    said: list[str] = []
    with writing(aging.url, said) as epoch, training(aging.url, said) as loader:
        write(epoch, 0, 50)
        train(loader, batches := iter(loader), 40)
        for _ in range(2):
            aging.restart(older=False)
            write(epoch, 0, 10)
            train(loader, batches, 10)
        epoch.close()
        train(loader, batches, 10)
        assert list(batches) == []
    assert not [line for line in said if "newest writes" in line], said
    report = aging.audit()
    assert report.verdict == "clean: lost 0, duplicate 0, pending 0"
    assert report.epochs[0].server_losses == []


@pytest.mark.parametrize("fingerprint", ["", "of-the-source"])
def test_samples_that_were_made_again_count_only_where_they_are_known_to_be_the_same(
    aging: AgingServer, fingerprint: str
) -> None:
    """Another sample under the same number is no repair; a job of a known source that runs again is one."""
    plan: dict[str, Any] = {"number": 0, "sizes": [50], "fingerprint": fingerprint}
    said: list[str] = []
    with training(aging.url, said) as loader:
        with writing(aging.url, [], **plan) as epoch:
            write(shard := epoch.shard(0), 0, 30)
            train(loader, batches := iter(loader), 30)
            aging.remember()
            write(shard, 30, 40)
            shard.abort()
        train(loader, batches, 10)
        aging.restart(older=True)
        until(said, "shard 0 offsets 30-39: 10 samples")
        assert not aging.audit().is_clean
        with connect(aging.url) as client:  # what is made after the reader came back is new
            await_so(lambda: any(one["cmd"] == "xreadgroup" for one in client.client_list()))
        with writing(aging.url, [], **plan) as epoch, epoch.shard(0) as shard:
            assert shard.position == 30
            write(shard, 30, 50)
        train(loader, batches, 20)
        assert list(batches) == []
    report = aging.audit()
    assert report.is_clean == bool(fingerprint)
    assert len(report.epochs[0].made_again) == bool(fingerprint)
    assert report.lost == report.duplicate == report.pending == 0


def test_an_ordered_rank_names_what_it_trained_on_and_the_server_lost(aging: AgingServer) -> None:
    """It has a position and no ledger: the position says nothing about what lay below it."""
    said: list[str] = []
    with training(aging.url, said, order="canonical") as loader:
        with writing(aging.url, [], sizes=[60]) as epoch:
            write(shard := epoch.shard(0), 0, 20)
            train(loader, batches := iter(loader), 10)
            aging.remember()
            write(shard, 20, 40)
            train(loader, batches, 20)
            shard.abort()
        aging.restart(older=True)
        until(said, "shard 0 offsets 20-29: 10 samples that member g/rank-0 had acknowledged")
    assert not aging.audit().is_clean


def test_an_epoch_that_the_server_lost_whole_is_named_until_its_number_is_released(aging: AgingServer) -> None:
    """Its manifest went with it, so the stream keeps the note; and its number is given to another epoch."""
    said: list[str] = []
    with writing(aging.url, said) as first:
        write(first, 0, 10)
        first.close()
        aging.remember()
        with writing(aging.url, said) as second:
            write(second, 0, 20)
            aging.restart(older=True)
            with pytest.raises(PenstockError):
                write(second, 20, 30)
    until(said, "of epoch 1 of 't' it lost shard 0 offsets 0-19: 20 samples that writer ")
    report = aging.audit()
    assert [(epoch.epoch, epoch.state) for epoch in report.epochs] == [(0, "produced"), (1, "lost")]
    assert not report.is_clean
    with writing(aging.url, []) as again:
        assert again.number == 1
        write(again, 0, 10)
        again.close()
        assert "the server lost this epoch as it was" in aging.audit().findings[0]
        with connect(aging.url) as client:
            stream = open_stream(client, "t")
            assert [field for field in client.hkeys(stream.keys.meta) if field.startswith(b"lost:")]
            assert release_epoch(client, stream, 1)
            assert not [field for field in client.hkeys(stream.keys.meta) if field.startswith(b"lost:")]
    assert aging.audit().is_clean


def test_a_trainer_whose_group_is_lost_too_names_its_samples_before_it_ends(aging: AgingServer) -> None:
    """It joined in the lost second, so it cannot go on; what it trained on is as lost as anybody else's."""
    said: list[str] = []
    with writing(aging.url, []) as epoch:
        write(epoch, 0, 10)
        aging.remember()
        write(epoch, 10, 30)
    with pytest.raises((GroupNotFound, EpochNotFound)), training(aging.url, said) as loader:
        train(loader, batches := iter(loader), 30)
        aging.restart(older=True)
        until(said, "shard 0 offsets 10-29: 20 samples")
        next(batches)
    assert not aging.audit().is_clean


@pytest.mark.parametrize("order", ["shared", "canonical"])
def test_a_member_that_a_server_lost_with_its_group_is_told_the_server_and_the_time(
    aging: AgingServer, order: str
) -> None:
    """The error looked like the work of another process, or of an operator."""
    settings = {"member": "m"} if order == "shared" else {"order": Canonical()}
    with writing(aging.url, []) as epoch:
        write(epoch, 0, 10)
        aging.remember()
        with (
            pytest.raises((GroupNotFound, EpochNotFound)) as caught,
            training(aging.url, [], **settings) as loader,
        ):
            train(loader, batches := iter(loader), 10)
            aging.restart(older=True)
            next(batches)
    where = re.escape(re.sub("//.*@", "//", aging.url))
    assert re.search(
        rf"\. The server {where}, which has partition 0 of 't', was restarted or replaced since this process joined "
        r"\(noticed at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\), and may have lost its newest writes$",
        str(caught.value),
    ), caught.value


def test_a_user_who_may_not_ask_for_the_run_is_told_all_the_same(fresh_server: Fresh, tmp_path: Path) -> None:
    """INFO is a right that an operator may withhold from trainers: then each reconnection compares."""
    aging = AgingServer(fresh_server, tmp_path / "aof", user="limited on >word ~* &* +@all -info")
    said: list[str] = []
    with training(aging.url_of("limited", "word"), said) as loader:
        with writing(aging.url, []) as epoch:
            write(epoch, 0, 50)
            train(loader, batches := iter(loader), 40)
            aging.remember()
            write(epoch, 50, 60)
        train(loader, batches, 20)
        aging.restart(older=True)
        until(said, "shard 0 offsets 50-59: 10 samples")
    assert not aging.audit().is_clean
