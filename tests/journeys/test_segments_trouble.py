"""Segments in trouble: late commits, full and vanished folders, and hosts that do not see them are named and fixed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from penstock.__main__ import main
from penstock_common.errors import (
    BudgetRefused,
    EpochIncomplete,
    SegmentGone,
    SegmentsUnseen,
    StreamDeleted,
    TooManyDeadLetters,
    WaitTimeout,
)
from penstock_common.explain.sentences import why_no_room
from penstock_common.segments.folder import SegmentFolder, open_segment
from penstock_common.stream.client import connect
from penstock_common.stream.entries import commit_commands, commit_keys
from penstock_common.stream.groups.roster import Membership, join_group, load_roster
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.payloads import registered_segments, seal_segments, segments_of
from penstock_common.stream.removal.deletion import delete_stream
from penstock_common.tuning import Tuning
from penstock_common.wire.block import BlockBuilder
from penstock_common.wire.codec import encode
from penstock_common.wire.spec import Spec
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.cleaner import recycle
from penstock_producer.write.payloads import open_segment_writer
from penstock_producer.write.target import ShardTarget
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, loader_of, numbers, produce, sample, writer_of
from tests.producer import repaired

MIB = 1 << 20


@pytest.fixture
def plane(tmp_path: Path) -> str:
    """A payload setting."""
    return f"segments:{tmp_path / 'segments'}"


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """Give file systems of a given size: real ones if this user may mount, else refusals as of a full one."""
    mounted: list[Path] = []
    real = os.posix_fallocate

    def make(nbytes: int) -> Path:
        root = Path(tempfile.mkdtemp(prefix="penstock-small-"))
        mounted.append(root)
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "penstock-test", str(root)]
        with suppress(OSError):
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return root

        def fallocate(fd: int, offset: int, length: int) -> None:
            if sum(p.stat().st_size for p in root.rglob("*") if p.is_file()) + length > nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd, offset, length)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        return root

    yield make
    for root in mounted:
        # an array in this process may still be in a map of a file there
        subprocess.run(["umount", "--lazy", str(root)], capture_output=True, check=False)
        shutil.rmtree(root)


def read_all(url: str, name: str = "t", epoch: int = 0) -> list[int]:
    """The epoch once more."""
    with Replay(name, url=url, epoch=epoch, batch_size=8, tuning=Tuning(notify=lambda _: None)) as replay:
        return numbers(replay)


def test_spare_files_that_an_operator_removes_are_missed_by_nobody(any_url: str, tmp_path: Path, plane: str) -> None:
    """docs/housekeeping.md says so: a stream that was larger once gives its space back."""
    with writer_of(any_url, spec=SPEC, payload=plane, retention="epochs:1") as writer:
        for _ in range(3):
            with writer.epoch() as epoch:
                epoch.write(sample(1))
        with loader_of(any_url) as loader:
            assert [numbers(loader) for _ in range(3)] == [[1]] * 3
        assert main(["trim", "t", "--url", any_url]) == 0
        spare = list(tmp_path.glob("segments/t.*/free-*.seg"))
        assert len(spare) == 2
        for path in spare:
            path.unlink()
        with writer.epoch() as epoch:
            epoch.write(sample(2))
    assert [read_all(any_url, epoch=number) for number in (2, 3)] == [[1], [2]]
    assert main(["audit", "t", "--url", any_url]) == 0


def test_a_commit_that_comes_after_its_file_was_used_again_is_refused(any_url: str, plane: str) -> None:
    """A writer is killed while the server is stopped, and a buffered commit must not name another writer's file."""
    writer = writer_of(any_url, spec=SPEC, payload=plane, block_bytes=10 * SAMPLE_BYTES)
    epoch = writer.epoch(0, sizes=[20])
    client, stream, manifest = writer.client, writer.stream, load_manifest(writer.client, writer.stream, 0)
    builder = BlockBuilder(Spec.of(SPEC), 1 << 20, 10)
    for number in range(10):
        builder.add(sample(number))
    block = builder.finish(0)
    segment_writer = open_segment_writer(ShardTarget(client, stream, manifest, 0))
    assert segment_writer is not None
    fields, name = segment_writer.append(encode(block, stream=stream.id, epoch=0, shard=0))
    segment_writer.close()  # as the kernel does for the dead
    partition, folder = stream.partitions[0], segments_of(stream)
    with redis.Redis.from_url(any_url) as raw:
        connection = raw.connection_pool.get_connection()
        commands = commit_commands(commit_keys(partition, manifest.epoch, 0), manifest, 0, block, fields, segment=name)
        for command in commands[:-1]:
            connection.send_command(*command)
            connection.read_response()
        assert recycle(client, stream, grace_s=0.0) == 1
        assert folder is not None
        assert name not in folder.names()
        connection.send_command(*commands[-1])
        outcome = connection.read_response()
        assert any("its segment is sealed" in str(one) for one in outcome)
        connection.disconnect()
        assert raw.xlen(partition.entries(0)) == 0
        assert not raw.exists(partition.index(0, 0))
    assert load_roster(client, partition).bytes == 0
    with epoch.shard(0) as shard:
        assert shard.position == 0
        for number in range(20):
            shard.write(sample(number))
    writer.close()
    assert read_all(any_url) == list(range(20))


def test_a_writer_that_was_taken_for_dead_goes_on_in_another_file(any_url: str, plane: str) -> None:
    """Locks that another host does not see: its recycler costs the writer a block's repetition, and no sample."""
    with writer_of(any_url, spec=SPEC, payload=plane, block_bytes=10 * SAMPLE_BYTES) as writer:
        manifest = writer.epoch(0, sizes=[100])
        with manifest.shard(0) as shard:
            for number in range(100):
                shard.write(sample(number))
                if number % 30 == 25:
                    shard.flush()
                    known = registered_segments(writer.client, writer.stream.partitions[0], 0)
                    seal_segments(
                        writer.client, writer.stream.partitions[0], load_manifest(writer.client, writer.stream, 0),
                        known, for_the_dead=True,
                    )  # fmt: skip
        assert len(registered_segments(writer.client, writer.stream.partitions[0], 0)) >= 4
    assert read_all(any_url) == list(range(100))


@pytest.mark.parametrize("how", ["write", "reserve"])
def test_a_full_folder_holds_the_writer_back_until_there_is_room(
    any_url: str, small_disk: Callable[[int], Path], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If other files fill the disk, the writer waits with a message, and continues without a gap."""
    root = small_disk(4 * MIB)
    filler = root / "somebody-elses"
    filler.write_bytes(bytes(4 * MIB - 200_000))
    said: list[str] = []
    tries: list[float] = []
    real = SegmentFolder.take

    def take(*args: Any) -> Any:
        tries.append(time.monotonic())
        return real(*args)

    monkeypatch.setattr(SegmentFolder, "take", take)

    def write() -> None:
        with writer_of(any_url, spec=SPEC, payload=f"segments:{root}", budget_bytes=3 * MIB, block_bytes=20_000,
                       notify=said.append) as writer, writer.epoch() as epoch:  # fmt: skip
            for number in range(50_000 if how == "write" else 0):
                epoch.write(sample(number))
            for first in range(0, 50_000 if how == "reserve" else 0, 500):
                with epoch.reserve(500) as rows:
                    rows["y"][:] = np.arange(first, first + 500)
                    rows["x"][:] = rows["y"][:, None]

    thread = threading.Thread(target=write)
    thread.start()
    deadline = time.monotonic() + 60
    while not any("no space left in" in line and "budget_bytes" in line for line in said):
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
    assert thread.is_alive()
    with connect(any_url) as client:  # and a reader that waits for samples gets the same reason
        while "waits for space in the full folder" not in why_no_room(client, repaired.stream_of(client)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert sum(at > time.monotonic() - 2 for at in tries) < 50, "it waits, and does not try without a pause"
    filler.unlink()
    thread.join(60)
    assert not thread.is_alive()
    assert read_all(any_url) == list(range(50_000))


def test_a_folder_full_of_views_that_a_trainer_keeps_is_explained(
    any_url: str, small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The stream holds nothing, and other files are not there: the trainer's own arrays keep the files."""
    root = small_disk(4 * MIB)
    spec = {"x": ("uint8", (20_000,))}
    said: list[str] = []
    kept: list[Any] = []
    keeps = threading.Event()
    keeps.set()

    def read() -> None:
        with loader_of(any_url, batch_size=1, views=True, timeout_s=60) as loader:
            kept.extend(batch["x"] for batch in loader if keeps.is_set())

    def write() -> None:
        with writer_of(any_url, spec=spec, payload=f"segments:{root}", budget_bytes=2 * MIB, block_bytes=20_000,
                       notify=said.append) as writer, writer.epoch() as epoch:  # fmt: skip
            reader.start()
            for _ in range(500):
                epoch.write({"x": np.zeros(20_000, np.uint8)})

    reader, writing = threading.Thread(target=read), threading.Thread(target=write)
    writing.start()
    why = r"[34]\.\d MiB are spare files that a process has open: a loader with views=True holds them"
    deadline = time.monotonic() + 60
    while not any(re.search(f"no space left in .*{why}", line) for line in said):
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
    with connect(any_url) as client:
        while not re.search(f"full folder .*{why}", why_no_room(client, repaired.stream_of(client))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    screen = _told(capsys, "monitor", "t", "--once", "--url", any_url)
    assert re.search(rf"{why}.* Otherwise remove other files", " ".join(screen.split())), screen
    keeps.clear()
    kept.clear()
    writing.join(60)
    reader.join(60)
    assert not writing.is_alive()
    assert not reader.is_alive()


def test_a_folder_that_could_never_hold_the_budget_is_refused_at_once(
    any_url: str, small_disk: Callable[[int], Path]
) -> None:
    """A container's /dev/shm has 64 MB: better told before the first sample than when it is full."""
    root = small_disk(MIB)
    if os.path.ismount(root):
        with pytest.raises(BudgetRefused, match=r"1024 KiB in all|1\.0 MiB in all|1 MiB in all"):
            writer_of(any_url, spec=SPEC, payload=f"segments:{root}", budget_bytes=2 * MIB)
    total = shutil.disk_usage(root).total
    with pytest.raises(BudgetRefused, match="--shm-size"):
        writer_of(any_url, spec=SPEC, payload=f"segments:{root}", budget_bytes=2 * total)


@pytest.mark.parametrize("trouble", ["gone", "short"])
def test_a_vanished_file_is_a_dead_letter_the_audit_names_it_and_a_repair_makes_it_again(
    any_url: str, plane: str, tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a mistaken cleanup, lost samples are named, the rest is read, and nothing stays lost."""
    real = Writer
    monkeypatch.setattr(repaired, "Writer", lambda *args, **kwargs: real(*args, payload=plane, **kwargs))
    repaired.produce(any_url)
    with connect(any_url) as client:
        stream = repaired.stream_of(client)
        join_group(client, Membership(stream, "had", "", ""), declared=True)
        join_group(client, Membership(stream, "lacks", "", ""), declared=True)
        folder = segments_of(stream)
        assert folder is not None
        before = delivered(any_url, "had")
        victim = min(registered_segments(client, stream.partitions[0], 0))
        if trouble == "gone":
            (folder.path / victim).unlink()
        else:
            os.truncate(folder.path / victim, 5000)
        found = repaired.audit(any_url, deep=False)
        assert not found.is_clean
        assert any(victim in line and "no payload any more" in line for line in found.epochs[0].findings)
        said: list[str] = []
        rest = delivered(any_url, "lacks", said)
        assert rest < before
        assert any("SegmentGone" in line and victim in line for line in said)
        with pytest.raises(SegmentGone, match=victim), Replay("t", url=any_url, epoch=0, batch_size=8) as replay:
            list(replay)
        done = repaired.repair(any_url)
        assert done.made == sum(lost.end - lost.first - len(lost.holes) for lost in found.epochs[0].missing) > 0
        assert delivered(any_url, "lacks") == before - rest
        assert repaired.audit(any_url).is_clean
        with Replay("t", url=any_url, epoch=0, batch_size=8) as replay:
            assert sum(len(batch["x"]) for batch in replay) == len(before)


@pytest.mark.parametrize("left", [0, 1])
def test_payloads_that_are_gone_are_named_at_the_end_of_the_epoch(
    any_url: str, plane: str, left: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer that got 10 of 50 samples must not report a usual epoch, nor doubt its version if it got none."""
    with connect(any_url) as client:
        with writer_of(any_url, spec=SPEC, payload=plane, block_bytes=10 * SAMPLE_BYTES) as writer:
            manifest = writer.epoch(0, sizes=[10] * 5)
            for number in range(5):
                with manifest.shard(number) as shard:
                    for offset in range(10):
                        shard.write(sample(10 * number + offset))
        folder = segments_of(repaired.stream_of(client))
        assert folder is not None
        for name in sorted(folder.names())[left:]:
            (folder.path / name).unlink()
        said: list[str] = []
        if left:
            assert len(delivered(any_url, "g", said)) == 10
            assert "t/g epoch 0: 10 samples and 4 dead letters in " in said[-1]
            return
        told = r"SegmentGone: .*files of payloads are gone.*`penstock audit t --repair SOURCE...`"
        with pytest.raises(TooManyDeadLetters, match=told) as caught, loader_of(any_url) as loader:
            list(loader)
        assert "version" not in str(caught.value)
        dropped = _told(capsys, "bad", "drop", "t", "0", "--group", "g", "--url", any_url)
        assert dropped.count("is given up") == 5, "it goes on without them"


def delivered(url: str, group: str, said: list[str] | None = None) -> set[tuple[int, ...]]:
    """Return the samples of the epoch that the group is given."""
    notify = (said if said is not None else []).append
    found: set[tuple[int, ...]] = set()
    with suppress(EpochIncomplete), loader_of(url, group, notify=notify) as loader:
        for batch in loader:
            found.update(batch.identities())
    return found


def test_who_does_not_see_the_folder_is_told_in_one_sentence(
    any_url: str, plane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer, a replay, an audit and a writer on another host: each at once, none goes on with half of it."""
    produce(any_url, "t", 50, payload=plane)
    monkeypatch.setenv("PENSTOCK_SEGMENTS", str(tmp_path / "elsewhere"))
    sentence = r"keeps its payloads in .*elsewhere.*, which this process does not see .*PENSTOCK_SEGMENTS"
    with pytest.raises(SegmentsUnseen, match=sentence), loader_of(any_url) as loader:
        list(loader)
    with pytest.raises(SegmentsUnseen, match=sentence):
        read_all(any_url)
    with pytest.raises(SegmentsUnseen, match=sentence):
        writer_of(any_url)
    assert not (tmp_path / "elsewhere").exists(), "a writer there would have written for nobody"
    capsys.readouterr()
    assert main(["audit", "t", "--deep", "--url", any_url]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["audit", "t", "--url", any_url]) == 0
    told = capsys.readouterr().out
    entries = json.loads(_told(capsys, "audit", "t", "--json", "--url", any_url))["unseen"]
    assert re.search(rf"not looked at: the payload of {entries} entr.*{sentence}.*gone on every host", told)
    assert re.match(rf"{entries} payloads? NOT LOOKED AT, the rest is clean: lost 0, dup", told.splitlines()[-1])
    assert main(["inspect", "t", "--url", any_url]) == 0
    assert re.search(f"  payload     stream 't' {sentence}", capsys.readouterr().out)
    shutil.move(tmp_path / "segments", tmp_path / "elsewhere")
    assert read_all(any_url) == list(range(50)), "mounted elsewhere"


def test_a_writer_whose_folder_is_removed_says_that_it_is_gone(any_url: str, plane: str, tmp_path: Path) -> None:
    """An error number tells nobody what happened to a folder, and what to do."""
    with (
        pytest.raises(SegmentsUnseen, match=r"segments/t\.\w+ is gone, .*Mount it again, or run `penstock delete t`"),
        writer_of(any_url, spec=SPEC, payload=plane, block_bytes=20_000) as writer,
        writer.epoch() as epoch,
    ):
        for number in range(50_000):
            epoch.write(sample(number))
            if number == 1000:
                shutil.rmtree(tmp_path / "segments")


def _told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command prints."""
    capsys.readouterr()
    main(list(words))
    return capsys.readouterr().out


def test_a_deleted_stream_leaves_nothing_in_its_folder(any_url: str, plane: str, tmp_path: Path) -> None:
    """Neither files nor the folder, also while a writer goes on until it finds out."""
    with writer_of(any_url, spec=SPEC, payload=plane, block_bytes=10 * SAMPLE_BYTES) as writer:
        shard = writer.epoch(0, sizes=[1000]).shard(0)
        for number in range(100):
            shard.write(sample(number))
        shard.flush()
        with connect(any_url) as client:
            gone = delete_stream(client, "t")
        assert not gone.left
        with pytest.raises(StreamDeleted):
            for number in range(100, 1000):
                shard.write(sample(number))
                shard.flush()
    assert not list((tmp_path / "segments").iterdir())


def test_a_reader_that_stood_still_makes_no_dead_letter_of_what_others_acknowledged(
    any_url: str, plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of an entry that it was given is used again: no dead letter, since the group has every sample."""
    produce(any_url, "t", 40, payload=plane)
    with connect(any_url) as client:
        stream = repaired.stream_of(client)
        manifest = load_manifest(client, stream, 0)
        from penstock_common.stream.groups.ledger import acknowledge

        folder = segments_of(stream)
        assert folder is not None
        turned: list[int] = []

        def slow(path: Path, name: str) -> Any:
            """Between header and payload the others acknowledge everything, and retention takes the file."""
            if not turned:
                turned.append(1)
                ids = [entry_id for entry_id, _ in client.xrange(stream.partitions[0].entries(0))]
                acknowledge(client, stream.partitions[0], manifest, "g", ids, {0: [(0, 40)]})
                for file in folder.names():
                    folder.give_back(file, keep=False)
            return open_segment(path, name)

        monkeypatch.setattr("penstock_common.segments.reader.open_segment", slow)
        with pytest.raises(WaitTimeout), loader_of(any_url, timeout_s=3) as loader:
            assert list(loader) == []
        assert turned
        assert not client.hlen(stream.partitions[0].dead(0, "g"))
