"""Export and import: a stream to files and back, bit-exact, with both payload settings, and with false files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import penstock
from penstock.__main__ import main
from penstock_common.errors import BadExport, ChecksumMismatch, EpochIncomplete, EpochNotFound, StreamConflict, TooLarge
from penstock_common.segments.exports import ExportFolder
from penstock_common.segments.folder import open_segment
from penstock_common.segments.reader import scan
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import index_records
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.mending.bad import list_bad
from penstock_common.stream.payloads import entry_header
from penstock_common.stream.streams import find_stream, load_stream
from penstock_common.tuning import Tuning
from penstock_common.wire.block import Block
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.export import PART, ExportWriter, export_stream
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.importer import import_stream
from penstock_producer.write.shard import ShardWriter
from penstock_producer.write.writer import Writer
from tests.producer import repaired

SPEC: dict[str, Any] = {
    "f": ("float32", (3,)), "b": ("bool", (2,)), "h": ("bfloat16", (2,)), "r": ("float16", (None, 2)),
    "s": ("bytes", ()),
}  # fmt: skip


def sample(number: int) -> dict[str, Any]:
    """Return every kind of tensor, with NaN payloads and empty strings."""
    rng = np.random.default_rng(number)
    return {
        "f": rng.integers(0, 1 << 32, 3, dtype=np.uint32).view(np.float32),
        "b": rng.integers(0, 2, 2).astype(bool),
        "h": rng.integers(0, 1 << 16, 2, dtype=np.uint16).view(ml_dtypes.bfloat16),
        "r": rng.integers(0, 1 << 16, (number % 4, 2), dtype=np.uint16).view(np.float16),
        "s": rng.bytes(number % 7),
    }


def produce(url: str, name: str, payload: str, *, partitions: int = 2) -> None:
    """Produce two planned epochs of five shards, written out of order, with bad samples and a shard of only bad
    ones.
    """
    with Writer(
        name,
        url=url,
        spec=SPEC,
        payload=payload,
        partitions=partitions,
        tuning=Tuning(block_bytes=400, notify=lambda _: None),
        info={"classes": ["a", "ü"]},
    ) as writer:
        for number in range(2):
            epoch = writer.epoch(sizes=[40, 40, 0, 40, 7], seed=5 + number, fingerprint="src")
            for shard in (3, 0, 4, 2, 1):
                with epoch.shard(shard) as opened:
                    for offset in range(opened._limit):
                        if (offset % 13 == shard) or shard == 4 or (shard == 1 and offset >= 20):
                            opened.quarantine(f"file {offset}: cannot be read")
                        else:
                            opened.write(sample(1000 * number + 100 * shard + offset))


def all_of(url: str, name: str, epoch: int) -> tuple[Any, ...]:
    """Return everything about an epoch except its stream's id."""
    with connect(url) as client:
        stream = load_stream(client, name)
        manifest = load_manifest(client, stream, epoch)
        blocks = [
            (shard, record.first, record.end, record.count, record.nbytes, record.holes,
             getattr(entry_header(client, stream, epoch, shard, record.entry_id), "xxh3", None))
            for shard in manifest.shards()
            for record in index_records(client, stream.partition_of(shard), epoch, shard)
            if record.entry_id
        ]  # fmt: skip
        bad = list_bad(client, stream, epoch=epoch).quarantined
        bad.sort(key=lambda one: (one.shard, one.offset))
        plan = (manifest.sizes, manifest.seed, manifest.fingerprint, manifest.kind, manifest.state)
        return stream.spec, stream.info, len(stream.partitions), plan, blocks, bad


def rows(batches: Any) -> list[Any]:
    """Return identity and bytes of every sample, in order."""
    return [
        (identity, [np.asarray(batch[name][row]).tobytes() for name in SPEC])
        for batch in batches
        for row, identity in enumerate(batch.identities())
    ]


@pytest.mark.parametrize("there", ["inline", "segments"])
@pytest.mark.parametrize("here", ["inline", "segments"])
def test_a_stream_goes_to_files_and_back_bit_exact(any_url: str, tmp_path: Path, here: str, there: str) -> None:
    """Weeks of work must outlive the server unchanged: samples, holes, reasons, checksums, plan."""
    where = {"inline": "inline", "segments": f"segments:{tmp_path / 'segments'}"}
    produce(any_url, "t", where[here])
    with connect(any_url) as client:
        done = export_stream(client, "t", tmp_path / "out", file_bytes=4096)
    assert done.new == (0, 1)
    assert len(done.contents.epochs[0].files) > 1
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.endswith(PART)]
    imported = import_stream(tmp_path / "out", "u", url=any_url, payload=where[there], notify=lambda _: None)
    assert imported.new == (0, 1)
    for epoch in (0, 1):
        assert all_of(any_url, "u", epoch) == all_of(any_url, "t", epoch)
        with Replay("t", url=any_url, epoch=epoch, batch_size=8, tuning=Tuning(notify=lambda _: None)) as replay:
            before = rows(replay)
            assert before
            files = penstock.Files(
                tmp_path / "out", epoch=epoch, batch_size=8, tuning=penstock.Tuning(notify=lambda _: None)
            )
            assert (len(files), files.samples, files.spec) == (len(replay), replay.samples, replay.spec)
            assert rows(files) == rows(files) == before
        with Replay("u", url=any_url, epoch=epoch, batch_size=8, tuning=Tuning(notify=lambda _: None)) as replay:
            assert rows(replay) == before
    with Loader(
        "u", group="g", batch_size=9, url=any_url, tuning=Tuning(timeout_s=20, notify=lambda _: None)
    ) as loader:
        assert sorted(rows(loader)) == rows(penstock.Files(tmp_path / "out", epoch=0, batch_size=1))


def test_the_command_says_what_it_did_and_goes_on_where_it_was(
    any_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users and scripts run it: a second run adds what is new and writes nothing twice."""
    produce(any_url, "t", "inline")
    out = str(tmp_path / "out")
    assert main(["export", "t", out, "--epoch", "1", "--url", any_url, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["epochs"], first["kept"], first["bad"] > 0) == ([1], [], True)
    assert main(["export", "t", out, "--url", any_url]) == 0
    assert "epoch 0 of 't', epoch 1 there before" in capsys.readouterr().out
    assert main(["export", "t", out, "--epoch", "1", "--url", any_url]) == 0
    everything = sum(note.samples for note in ExportFolder(out).contents.epochs)
    there = f"nothing new of 't', epoch 1 there before; the folder holds 2 epochs, {everything} samples, "
    assert there in capsys.readouterr().out, "epochs that this run did not ask for are counted, too"
    assert main(["import", out, "u", "--url", any_url, "--epoch", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"] == [1]
    assert main(["import", out, "u", "--url", any_url]) == 0
    assert "epoch 0, epoch 1 there before" in capsys.readouterr().out
    assert all_of(any_url, "u", 0) == all_of(any_url, "t", 0)
    assert main(["import", str(tmp_path), "u", "--url", any_url]) == 1
    assert "is no export: it has no export.json" in capsys.readouterr().err


def test_files_are_read_where_there_is_no_server_at_all(any_url: str, tmp_path: Path) -> None:
    """A folder on a laptop is enough, without any connection."""
    produce(any_url, "t", "inline")
    with connect(any_url) as client:
        export_stream(client, "t", tmp_path / "out", epochs=[0])
    code = (
        "import sys, penstock\n"
        f"files = penstock.Files({str(tmp_path / 'out')!r}, batch_size=16, shuffle=3, notify=lambda _: None)\n"
        "print(len(files), sum(batch.size for batch in files), files.info['classes'][1])\n"
    )
    environment = {**os.environ, "PENSTOCK_URL": "redis://localhost:1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    files = penstock.Files(tmp_path / "out", batch_size=16)
    assert done.stdout.split() == [str(len(files)), str(files.samples), "ü"]


class TestBrokenOff:
    """Killed, disconnected, full: what is finished stays, and the rest is begun again."""

    def test_an_export(self, any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file that is not complete has another name, and an epoch that is not complete does not exist."""
        produce(any_url, "t", "inline")
        whole, calls = ExportWriter.append, []

        def failing(self: ExportWriter, fields: Any) -> None:
            calls.append(self._epoch)
            if calls.count(1) == 6:
                raise OSError(28, "No space left on device")
            whole(self, fields)

        monkeypatch.setattr(ExportWriter, "append", failing)
        with connect(any_url) as client:
            with pytest.raises(BadExport, match=r"out cannot be exported to: No space left.*what is finished stands"):
                export_stream(client, "t", tmp_path / "out", file_bytes=4096)
            names = [path.name for path in (tmp_path / "out").iterdir()]
            assert any(name.endswith(PART) for name in names)
            assert [note.epoch for note in ExportFolder(tmp_path / "out").contents.epochs] == [0]
            done = export_stream(client, "t", tmp_path / "out", file_bytes=4096)
        named = {note.name for epoch in done.contents.epochs for note in epoch.files}
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"export.json", *named}
        assert penstock.Files(tmp_path / "out", epoch=1, batch_size=8).samples

    def test_an_import(self, any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Started again, it writes what is missing, once."""
        produce(any_url, "t", "inline")
        with connect(any_url) as client:
            export_stream(client, "t", tmp_path / "out")
        whole, calls = ShardWriter.write_block, []

        def failing(self: ShardWriter, block: Block, bad: Any) -> None:
            calls.append(1)
            if len(calls) == 20:
                raise KeyboardInterrupt
            whole(self, block, bad)

        monkeypatch.setattr(ShardWriter, "write_block", failing)
        with pytest.raises(KeyboardInterrupt):
            import_stream(tmp_path / "out", "u", url=any_url, notify=lambda _: None)
        assert import_stream(tmp_path / "out", "u", url=any_url, notify=lambda _: None).new[-1] == 1
        for epoch in (0, 1):
            assert all_of(any_url, "u", epoch) == all_of(any_url, "t", epoch)


def test_killed_half_way_and_run_again_both_end_with_the_very_epoch(any_url: str, tmp_path: Path) -> None:
    """SIGKILL at any point: nothing half-written is taken for complete, and nothing is written twice."""
    spec = {"x": ("uint8", (50_000,)), "y": ("int64", ())}
    with (
        Writer("t", url=any_url, spec=spec, tuning=Tuning(block_bytes=100_000, notify=lambda _: None)) as writer,
        writer.epoch() as epoch,
    ):
        for number in range(1000):
            epoch.write({"x": np.full(50_000, number % 251, np.uint8), "y": number})
    out = tmp_path / "out"

    def part() -> int:
        return max((path.stat().st_size for path in out.glob(f"*.seg{PART}")), default=0) if out.exists() else 0

    def committed() -> int:
        with connect(any_url) as client:
            stream = find_stream(client, "u")
            if stream is None:
                return 0
            index = stream.partitions[0].index(0, 0)
            return int(client.xlen(index)) * 100_000

    for words, progress in (
        (["export", "t", str(out)], part),
        (["import", str(out), "u", "--payload", f"segments:{tmp_path}"], committed),
    ):
        assert killed_at(["--url", any_url, *words], progress, 10_000_000)
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *words, "--url", any_url], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert sorted(path.suffix for path in out.iterdir()) == [".json", ".seg"]
    assert all_of(any_url, "u", 0)[3:] == all_of(any_url, "t", 0)[3:]
    files = penstock.Files(out, batch_size=50, tuning=penstock.Tuning(notify=lambda _: None))
    with Replay("u", url=any_url, epoch=0, batch_size=50, tuning=Tuning(notify=lambda _: None)) as replay:
        for one, other in zip(replay, files, strict=True):
            assert np.array_equal(one["x"], other["x"])
            assert np.array_equal(one["y"], other["y"])


def killed_at(words: list[str], progress: Callable[[], int], wanted: int) -> bool:
    """Run the command and kill it at a given progress. Return whether it had not ended before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", words[2], *words[3:], *words[:2]],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while process.poll() is None and progress() < wanted:
            time.sleep(0.001)
    finally:
        process.kill()
    return process.wait() < 0


def test_an_import_never_mixes_two_datasets(any_url: str, tmp_path: Path) -> None:
    """Other samples with the same numbers, plan and seed are found by their checksums."""
    for name, base in (("t", 0), ("other", 500)):
        with (
            Writer(name, url=any_url, spec=SPEC, tuning=Tuning(notify=lambda _: None)) as writer,
            writer.epoch() as epoch,
        ):
            for number in range(20):
                epoch.write({**sample(number), "f": np.full(3, base + number, np.float32)})
    with connect(any_url) as client:
        export_stream(client, "t", tmp_path / "out")
    with pytest.raises(
        StreamConflict, match=r"epoch 0 of 'other' is not the one in .*: offsets 0-.* of shard 0 differ"
    ):
        import_stream(tmp_path / "out", "other", url=any_url, notify=lambda _: None)
    produce(any_url, "planned", "inline")
    with pytest.raises(StreamConflict, match="it has another plan"):
        import_stream(tmp_path / "out", "planned", url=any_url, notify=lambda _: None)
    with Writer("spec", url=any_url, spec={"x": ("uint8", ())}) as writer, pytest.raises(StreamConflict, match="spec"):
        import_stream(tmp_path / "out", "spec", url=any_url, notify=lambda _: None)


def test_a_small_server_takes_an_import(any_url: str, fresh_server: Callable[..., Any], tmp_path: Path) -> None:
    """An export of some kB must not ask a server for the default budget of 1 GiB."""
    produce(any_url, "t", "inline")
    with connect(any_url) as client:
        export_stream(client, "t", tmp_path / "out")
    small = fresh_server(maxmemory_bytes=100 << 20)
    import_stream(tmp_path / "out", "back", url=small.url, notify=lambda _: None)
    with connect(small.url) as client:
        assert load_stream(client, "back").budget_bytes == 37 << 20


@pytest.fixture
def large(any_url: str, tmp_path: Path) -> Path:
    """Export an epoch of 12 MiB in blocks of 1 MiB, all in the first of two partitions."""
    spec = {"x": ("uint8", (1 << 20,))}
    with (
        Writer("large", url=any_url, spec=spec, partitions=2) as writer,
        writer.epoch(sizes=[12]) as epoch,
        epoch.shard(0) as part,
    ):
        for number in range(12):
            part.write({"x": np.full(1 << 20, number, np.uint8)})
    with connect(any_url) as client:
        export_stream(client, "large", tmp_path / "large")
    return tmp_path / "large"


def test_an_import_that_would_wait_for_ever_is_refused_before_anything_is_made(
    any_url: str, any_client: Client, large: Path
) -> None:
    """Nobody reads the stream, so no advice about trainers helps, and the command knows the budget that it needs."""
    needed = 2 * (12 << 20)  # the partition without samples has its part of the budget, too
    said = rf"'back' needs a budget of .* for all of {large}, because no group reads it; .*\(--budget\) to {needed}$"
    with pytest.raises(TooLarge, match=said):
        import_stream(large, "back", url=any_url, budget_bytes=needed - 1)
    assert find_stream(any_client, "back") is None
    assert import_stream(large, "back", url=any_url, budget_bytes=needed).new == (0,)
    assert import_stream(large, "chosen", url=any_url).new == (0,)
    with Writer("less", url=any_url, spec={"x": ("uint8", (1 << 20,))}, partitions=1, budget_bytes=8 << 20):
        pass
    with pytest.raises(TooLarge, match=f"to {12 << 20}$"):
        import_stream(large, "less", url=any_url)
    join_group(any_client, Membership(load_stream(any_client, "less"), "night", "", ""), declared=True)
    with Loader("less", group="night", url=any_url, batch_size=1) as loader, ThreadPoolExecutor(1) as pool:
        importing = pool.submit(import_stream, large, "less", url=any_url)
        assert sum(batch.size for batch in loader) == 12
        assert importing.result().new == (0,)


def test_a_budget_that_the_blocks_do_not_fit_changes_nothing(any_url: str, any_client: Client, large: Path) -> None:
    """A refused import leaves neither a new stream nor another budget, also where it would copy nothing."""
    whole = load_stream(any_client, "large").budget_bytes
    blocks = f"needs a budget of .* for the blocks in {large}; found 1,048,576: .* to {2 * 4 << 20}$"
    for name, before, said in (("new", None, "no group reads it"), ("large", whole, blocks)):
        with pytest.raises(TooLarge, match=said):
            import_stream(large, name, url=any_url, budget_bytes=1 << 20)
        stream = find_stream(any_client, name)
        assert (stream and stream.budget_bytes) == before
    assert import_stream(large, "large", url=any_url, budget_bytes=8 << 20).kept == (0,)


def test_an_import_into_a_small_file_system_takes_a_budget_that_fits_it(
    any_url: str, any_client: Client, large: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of 1 GiB is no wish of the user."""
    usage = shutil.disk_usage(memory_path)._replace(total=64 << 20, free=60 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert import_stream(large, "small", url=any_url, payload=f"segments:{memory_path}").new == (0,)
    assert load_stream(any_client, "small").budget_bytes == int(1.3 * (24 << 20))


def test_a_damaged_or_lost_description_says_what_helps(any_url: str, any_client: Client, tmp_path: Path) -> None:
    """The user is left with the folder: every message names it, and a way that works."""
    produce(any_url, "t", "inline")
    out = tmp_path / "out"
    export_stream(any_client, "t", out)
    (out / "export.json").write_text("{")
    fix = "copy that file again, or delete the folder and export again"
    for read in (lambda: ExportFolder(out), lambda: export_stream(any_client, "t", out)):
        with pytest.raises(BadExport, match=rf"^{out}/export.json is not JSON: .*; {fix}$"):
            read()
    (out / "export.json").unlink()
    with pytest.raises(BadExport, match=rf"^{out} is not empty.*copy its export.json again, or delete it and export"):
        export_stream(any_client, "t", out)
    shutil.rmtree(out)
    assert export_stream(any_client, "t", out).new == (0, 1)


def test_a_damaged_entry_is_named_with_its_samples_and_the_way_to_repair_it(
    any_url: str, any_client: Client, tmp_path: Path
) -> None:
    """Whoever copies a stream for the archive learns which samples are damaged, and what makes them again."""
    repaired.produce(any_url)
    lost = repaired.damage_entry(any_client, 1, 2)
    entry = repaired.records(any_client, 1)[2][1][b"e"].decode()
    with pytest.raises(ChecksumMismatch, match="payload has xxh3") as told:
        export_stream(any_client, "t", tmp_path / "out")
    where = f"entry {entry} of stream 't' (epoch 0, shard 1, offsets {lost.start}-{lost.stop - 1}) cannot be exported: "
    assert str(told.value).startswith(where)
    assert "; `penstock audit t --deep --repair SOURCE...` makes damaged samples again" in str(told.value)
    repaired.repair(any_url, deep=True)
    assert export_stream(any_client, "t", tmp_path / "out").new == (0,)


def test_what_cannot_be_exported_is_said(any_url: str, any_client: Client, tmp_path: Path) -> None:
    """A running epoch, a foreign folder, a missing stream."""
    with (
        Writer("t", url=any_url, spec=SPEC, tuning=Tuning(notify=lambda _: None)) as writer,
        connect(any_url) as client,
    ):
        with writer.epoch() as epoch:
            epoch.write(sample(0))
            with pytest.raises(EpochIncomplete, match=r"no produced epoch to export; epochs there: 0 \(open\)"):
                export_stream(client, "t", tmp_path / "out")
            with pytest.raises(EpochIncomplete):
                export_stream(client, "t", tmp_path / "out", epochs=[0])
        with pytest.raises(EpochNotFound):
            export_stream(client, "t", tmp_path / "above" / "out", epochs=[7])
        assert not (tmp_path / "above").exists(), "an export of nothing leaves no folder"
        (tmp_path / "empty").mkdir()
        with pytest.raises(EpochNotFound):
            export_stream(client, "t", tmp_path / "empty", epochs=[7])
        assert not list((tmp_path / "empty").iterdir())
        export_stream(client, "t", tmp_path / "out", epochs=[0])
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} <= {0o640, 0o600}
        with pytest.raises(EpochNotFound):
            export_stream(client, "t", tmp_path / "out", epochs=[7])
        assert penstock.Files(tmp_path / "out", batch_size=1).epoch == 0
        contents = json.loads((tmp_path / "out" / "export.json").read_text())
        (tmp_path / "out" / "export.json").write_text(json.dumps({**contents, "epochs": []}))
        with pytest.raises(BadExport, match="has no finished epoch"):
            penstock.Files(tmp_path / "out", batch_size=1)
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").write_text("")
        with pytest.raises(BadExport, match="not empty and no export"):
            export_stream(client, "t", tmp_path / "mine")
        with pytest.raises(BadExport, match="cannot be exported to"):
            export_stream(client, "t", tmp_path / "mine" / "thesis.tex")


class TestFilesThatLie:
    """Any user may make an export. It can waste our time, and do no more."""

    @pytest.fixture
    def out(self, any_url: str, tmp_path: Path) -> Path:
        """Make a small export."""
        produce(any_url, "t", "inline")
        with connect(any_url) as client:
            export_stream(client, "t", tmp_path / "out", file_bytes=4096)
        return tmp_path / "out"

    def test_damaged_ones(self, out: Path, any_url: str) -> None:
        """A flipped bit, a cut, a missing file, a file of another epoch: named, and never yielded."""
        names = sorted(path.name for path in out.glob("0-*.seg"))
        whole = {name: (out / name).read_bytes() for name in names}
        flipped = bytearray(whole[names[0]])
        ref = next(scan(open_segment(out, names[0]))).header.ref
        assert ref is not None
        flipped[ref.at] ^= 1
        for data, match in (
            (whole[names[0]][:-64], "cut short"),
            (bytes(flipped), "xxh3"),
            (whole[names[0]].replace(b"PSRC", b"PSRX"), "records"),
            (whole[names[0]].replace(b'"first":', b'"furst":'), "meta is damaged"),
            (whole[names[1]], "used again"),
            (b"", "does not begin like a segment"),
        ):
            (out / names[0]).write_bytes(data)
            with pytest.raises(BadExport, match=match):
                rows(penstock.Files(out, epoch=0, batch_size=8, tuning=penstock.Tuning(notify=lambda _: None)))
            with pytest.raises(BadExport, match=match):
                import_stream(out, f"u{match[:2].strip()}", url=any_url, epochs=[0], notify=lambda _: None)
        (out / names[0]).unlink()
        os.mkfifo(out / names[0])
        with pytest.raises(BadExport, match="no file"):
            penstock.Files(out, epoch=0, batch_size=8)
        (out / names[0]).unlink()
        (out / names[0]).symlink_to(out / names[1])
        with pytest.raises(BadExport, match="cannot be read"):
            penstock.Files(out, epoch=0, batch_size=8)

    @pytest.mark.parametrize("damage", ["missing", "cut", "bytes"])
    def test_exporting_again_repairs_an_epoch(self, out: Path, any_url: str, damage: str) -> None:
        """The message advises it, so it must help, and leave no file of the earlier copy."""
        quiet = penstock.Tuning(notify=lambda _: None)
        before = rows(penstock.Files(out, epoch=0, batch_size=8, tuning=quiet))
        name = min(path.name for path in out.glob("0-*.seg"))
        data = bytearray((out / name).read_bytes())
        ref = next(scan(open_segment(out, name))).header.ref
        assert ref is not None
        data[ref.at] ^= 1
        (out / name).unlink()
        if damage != "missing":
            (out / name).write_bytes(data[:-64] if damage == "cut" else data)
        with pytest.raises(BadExport, match=f"{name}.*export again") as told:
            rows(penstock.Files(out, epoch=0, batch_size=8, tuning=quiet))
        if damage == "bytes":
            assert f"{out / name} at {ref.at}: " in str(told.value)
            assert str(told.value).endswith("copy the file again, or delete it and export again")
            (out / name).unlink()
        with connect(any_url) as client:
            done = export_stream(client, "t", out, file_bytes=4096)
        assert (done.new, done.kept) == ((0,), (1,))
        assert rows(penstock.Files(out, epoch=0, batch_size=8, tuning=quiet)) == before
        named = {note.name for epoch in done.contents.epochs for note in epoch.files}
        assert {path.name for path in out.iterdir()} == {"export.json", *named}

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            (["v"], 2), (["format"], "x"), (["stream"], "../x"), (["spec"], {"x": ["object", []]}), (["info"], []),
            (["epochs", 0, "sizes", 0], 1 << 40), (["epochs", 0, "sizes", 0], 39), (["epochs", 0, "sizes", 0], 41),
            (["epochs", 0, "files", 0, 0], "../../etc/passwd"), (["epochs", 0, "files", 0, 0], "/etc/passwd"),
            (["epochs", 0, "files", 0, 1], -1), (["epochs", 0, "files", 0], ["a"]), (["epochs", 0, "files"], []),
            (["epochs", 0, "bad", 0], [99, 0, "x"]), (["epochs", 0, "bad"], []), (["epochs", 0, "samples"], 1),
            (["epochs", 0, "seed"], "0"), (["epochs", 0, "epoch"], 7), (["epochs"], "x"), (["partitions"], 1 << 30),
        ],
    )  # fmt: skip
    def test_contents_that_lie(self, out: Path, any_url: str, path: list[Any], value: object) -> None:
        """Names that lead elsewhere, sizes beyond all bounds, unexplained holes."""
        contents = json.loads((out / "export.json").read_text())
        at = contents
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        (out / "export.json").write_text(json.dumps(contents))
        with pytest.raises(BadExport):
            penstock.Files(out, epoch=0, batch_size=8)
        with pytest.raises(BadExport):
            import_stream(out, "u", url=any_url, notify=lambda _: None)

    def test_files_of_another_export(self, out: Path, any_url: str, tmp_path: Path) -> None:
        """Two folders copied over each other."""
        shutil.copytree(out, tmp_path / "both")
        produce(any_url, "v", "inline")
        with connect(any_url) as client, pytest.raises(BadExport, match="has an export of 't'"):
            export_stream(client, "v", tmp_path / "both")
