"""Commands on a stream of many small epochs: their time and their lines do not grow with the square of the epochs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from penstock.__main__ import main
from penstock_common.segments.exports import ExportContents, dump_contents
from penstock_common.stream.audit import AuditReport, audit_stream
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.forgetting import drop_group
from penstock_common.stream.groups.ledger import uncovered
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.mending.bad import list_bad
from penstock_common.stream.streams import Stream, load_stream
from penstock_consumer.replay import export
from penstock_consumer.replay.export import ExportWriter, export_stream

EPOCHS, SAMPLES = 12, 20
FIELDS = 5000
"""The fields of other epochs on the roster, which are more than 100 kB."""


@pytest.fixture
def stream(any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """Yield a stream of small epochs that a group has read."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    with penstock.Writer("t", url=any_url, spec={"x": ("uint8", ())}) as writer:
        for _ in range(EPOCHS):
            with writer.epoch(sizes=[SAMPLES]) as epoch, epoch.shard(0) as shard:
                for number in range(SAMPLES):
                    shard.write({"x": number})
        with penstock.Loader("t", group="net", batch_size=SAMPLES, url=any_url) as loader:
            for _ in range(EPOCHS):
                assert sum(batch.size for batch in loader) == SAMPLES
        yield load_stream(any_client, "t")


def sent(client: Client, stream: Stream, action: Callable[[], object]) -> int:
    """Return the bytes that the server sends while a roster has fields of many other epochs."""
    roster = stream.partitions[0].roster
    others = {f"d:net:{10_000 + number}": "1" for number in range(FIELDS)}
    client.hset(roster, mapping=others)
    before = client.info("stats")["total_net_output_bytes"]
    action()
    moved: int = client.info("stats")["total_net_output_bytes"] - before
    client.hdel(roster, *others)
    return moved


def test_an_audit_reads_no_roster_for_each_epoch(stream: Stream, any_client: Client) -> None:
    """An audit of 1,486 epochs took 55 s."""
    assert sent(any_client, stream, lambda: audit_stream(any_client, "t")) < 5 * FIELDS * 20


def test_lists_exports_and_members_read_no_roster_for_each_epoch(
    stream: Stream, any_client: Client, tmp_path: Path
) -> None:
    """An export of 1,486 epochs took 63 s, and a member took a fifth of its time to read one group's record."""
    assert sent(any_client, stream, lambda: list_bad(any_client, stream)) < 2 * FIELDS * 20
    assert sent(any_client, stream, lambda: export_stream(any_client, "t", tmp_path / "out")) < FIELDS * 20
    manifest = load_manifest(any_client, stream, 0)
    assert sent(any_client, stream, lambda: uncovered(any_client, stream, manifest, "net")) < FIELDS * 20


def test_an_audit_knows_the_groups_of_each_moment(stream: Stream, any_client: Client) -> None:
    """A group that joins or goes while an audit runs counts from then on, and loses nothing."""

    def change(done: int, _: int) -> None:
        if done == 4:
            join_group(any_client, Membership(stream, "late", "", ""), first=0, force=True)
        if done == 8:
            drop_group(any_client, stream, "net")

    report: AuditReport = audit_stream(any_client, "t", progress=change)
    assert report.is_clean
    assert [sorted(epoch.groups) for epoch in report.epochs] == [["net"]] * 4 + [["late", "net"]] * 4 + [["late"]] * 4


def test_a_long_audit_shows_its_progress(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was silent for a minute. A short one and one for a program say nothing but the result."""
    assert main(["audit", "t"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("penstock.cli.audit.SILENT_S", 0.0)
    assert main(["audit", "t"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"audit  100%  {EPOCHS}/{EPOCHS} epochs"
    assert main(["audit", "t", "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_findings_do_not_stand_between_lines_of_every_epoch(
    stream: Stream, any_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each epoch had a line on its server without a replica."""
    (partition,) = stream.partitions
    any_client.xtrim(partition.entries(3), maxlen=0)
    assert main(["audit", "t"]) == 1
    said = [line for line in capsys.readouterr().out.splitlines() if "had no replica" in line]
    assert len(said) == 1
    assert re.fullmatch(rf"epochs 0-{EPOCHS - 1}: written while \S+ had no replica", said[0])


def test_lists_of_epochs_are_ranges(stream: Stream, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line had 1,486 numbers."""
    out = str(tmp_path / "out")
    assert main(["export", "t", out, "--epoch", "1"]) == 0
    assert main(["export", "t", out]) == 0
    last = EPOCHS - 1
    assert f"epochs 0,2-{last} of 't', epoch 1 there before" in capsys.readouterr().out
    assert main(["import", out, "copy"]) == 0
    assert f"stream 'copy': epochs 0-{last}; in all" in capsys.readouterr().out
    assert main(["trim", "t", "--keep", "1"]) == 0
    assert f"released epochs 0-{last - 1} of 't' (epochs:1, this once)" in capsys.readouterr().out
    assert main(["audit", "t"]) == 0
    assert f"not audited: epochs 0-{last - 1} were released: every group that held data was done" in (
        capsys.readouterr().out
    )


def test_a_copy_has_one_line_of_progress(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line of progress showed all epochs from the first one, 10,635 lines in all."""
    out = str(tmp_path / "out")
    for words, verb in (["export", "t", out], "export"), (["import", out, "copy"], "import"):
        capsys.readouterr()
        assert main(words) == 0
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{verb} epoch")]
        assert line.split() == [verb, "epoch", str(EPOCHS - 1), "100%", "1/1", "MB", str(EPOCHS), "epochs", "done"]


def test_small_epochs_are_named_together_and_none_is_forgotten(
    stream: Stream, any_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``export.json`` names all epochs, and was written for each. An error keeps those that were finished."""
    written: list[int] = []
    path = tmp_path / "out"

    def noted(contents: ExportContents) -> bytes:
        written.append(len(contents.epochs))
        return dump_contents(contents)

    monkeypatch.setattr(export, "dump_contents", noted)
    monkeypatch.setattr(export, "NAMED_EVERY_S", 60.0)
    begin = ExportWriter.begin

    def interrupted(writer: ExportWriter, epoch: int) -> None:
        if epoch == 7:
            raise KeyboardInterrupt
        begin(writer, epoch)

    monkeypatch.setattr(ExportWriter, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_stream(any_client, "t", path)
    assert written == [0, 1, 7]
    assert len(json.loads((path / "export.json").read_bytes())["epochs"]) == 7
    monkeypatch.setattr(ExportWriter, "begin", begin)
    done = export_stream(any_client, "t", path)
    assert (done.kept, done.new) == (tuple(range(7)), tuple(range(7, EPOCHS)))
    assert len(list(path.glob("*.seg"))) == EPOCHS
