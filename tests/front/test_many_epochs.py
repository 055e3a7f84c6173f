"""Commands on a stream of many small epochs: their time and their lines do not grow with the square of the epochs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

import penstock
from penstock.__main__ import main
from penstock_common.stream.audit import AuditReport, audit_stream
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.forgetting import drop_group
from penstock_common.stream.groups.ledger import uncovered
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.mending.bad import list_bad
from penstock_common.stream.streams import Stream, load_stream

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


def test_lists_and_members_read_no_roster_for_each_epoch(stream: Stream, any_client: Client) -> None:
    """A member took a fifth of its time to read one group's record."""
    assert sent(any_client, stream, lambda: list_bad(any_client, stream)) < 2 * FIELDS * 20
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
