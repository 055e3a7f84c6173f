"""Each rule of the doctor for streams, on a table of situations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.views import doctor as stream
from penstock.views.doctor import Finding, StreamFacts
from penstock_common.explain.snapshot import EpochSnapshot, GroupSnapshot, MemberSnapshot, StreamSnapshot
from penstock_common.stream.groups.presence import Liveness
from penstock_common.stream.groups.roster import WaitingWriter
from penstock_common.stream.reported_rates import ReportedRate, ReportedRates
from penstock_common.stream.servers.suitability import ServerMemory

GB, MB = 1 << 30, 1 << 20
GROUP = GroupSnapshot(
    "resnet", "shared", False, True, 0, 0, 0, 0.0, 0, 0, 0, 0, 0, (MemberSnapshot("gpu-0", Liveness(1000), 0),)
)  # fmt: skip
SNAPSHOT = StreamSnapshot(
    "train", "id", 0.0, budget_bytes=GB, held_bytes=MB, next_epoch=1, final=None, made_entries=0, made_samples=0,
    made_bytes=0, epochs=(EpochSnapshot(0, "sized", "epoch", 10, 5, 0, MB, {}),), groups=(GROUP,),
    waiting={}, waited_s=0.0,
    rates=ReportedRates({"host.1": ReportedRate(10.0, {"busy": 1.0})}, {}, {}), memory=ServerMemory(0, 0, "noeviction"),
)  # fmt: skip
FINE = StreamFacts(SNAPSHOT, "memory", "inline", is_aof=False, has_waitaof=True, replicas=0)
WAITS = {(0, 0): WaitingWriter(0, 0, 1, 1, "budget", is_next=True)}


def snapshot(**changes: Any) -> StreamFacts:
    """Return a stream with other values."""
    return replace(FINE, snapshot=replace(SNAPSHOT, **changes))


def test_a_stream_as_it_should_be_has_none_either() -> None:
    """A healthy stream has no findings, like a healthy server."""
    assert [finding for finding in stream.check_stream(FINE) if finding.severity != "ok"] == []


@pytest.mark.parametrize(
    ("rule", "facts", "severity", "found", "fix"),
    [
        (
            stream.silent_workers,
            snapshot(rates=replace(SNAPSHOT.rates, silent={"gpu-7.1": 34.0, "gpu-7.2": 35.0, "host.2": 40.0})),
            "warning",
            "not signed off: 2 of gpu-7 (34 s)",
            "penstock worker --auto",
        ),
        (stream.durability, replace(FINE, durability="fsync"), "error", "no append-only file", "appendonly yes"),
        (
            stream.durability,
            replace(FINE, durability="fsync", has_waitaof=False),
            "error",
            "no WAITAOF",
            "install Redis 7.2",
        ),
        (
            stream.durability,
            replace(FINE, durability="replicas=2", replicas=1),
            "error",
            "1 replicas follow",
            "REPLICAOF",
        ),
        (stream.durability, replace(FINE, durability="fsync", is_aof=True), "ok", "fsync", ""),
        (
            stream.segments,
            replace(FINE, payload="segments:/dev/shm/p", segments_seen=False, segments_trouble="belongs to bob"),
            "warning",
            "/dev/shm/p: belongs to bob",
            "PENSTOCK_SEGMENTS",
        ),
        (
            stream.segments,
            replace(FINE, payload="segments:/dev/shm/p", segments_seen=True, segments_free=MB),
            "error",
            "more: writers will wait",
            "df -h /dev/shm/p",
        ),
        (stream.segments, replace(FINE, payload="segments:/d", segments_seen=True, segments_free=GB), "ok", "/d", ""),
        (
            stream.absent_groups,
            snapshot(groups=(replace(GROUP, members=(), lag_samples=5, lag_bytes=MB),)),
            "warning",
            "1.0 MiB are kept for resnet",
            "start the trainer of resnet again; only if it never comes back: penstock groups drop train resnet",
        ),
        (
            stream.absent_groups,
            snapshot(groups=(replace(GROUP, members=(), lag_samples=5),), waiting=WAITS),
            "error",
            "writers wait for that space",
            "groups drop",
        ),
        (
            stream.absent_groups,
            snapshot(groups=(replace(GROUP, members=(), lag_samples=5, holds=False),)),
            "ok",
            "none",
            "",
        ),
        (
            stream.silent_members,
            snapshot(groups=(replace(GROUP, members=(MemberSnapshot("gpu-1", Liveness(50_000), 3),)),)),
            "warning",
            "gpu-1 of resnet (3 entries)",
            "start a trainer",
        ),
        (
            stream.silent_members,
            snapshot(
                groups=(
                    replace(
                        GROUP,
                        kind="ordered",
                        lag_samples=9,
                        members=(MemberSnapshot("rank-1", Liveness(50_000), 0),),
                    ),
                )
            ),
            "warning",
            "the other ranks wait: rank-1 of resnet",
            "start those ranks again",
        ),
        (
            stream.pace,
            snapshot(
                rates=ReportedRates(
                    {"host.1": ReportedRate(20.0, {"busy": 1.0})},
                    {("resnet", "gpu-0"): ReportedRate(100.0, {"training": 0.3, "asking": 0.7})},
                    {},
                )
            ),
            "note",
            "trainers of resnet wait 70 % of their time for producers: 4 more workers would do",
            "penstock worker --processes 4",
        ),
        (
            stream.waiting_writers,
            snapshot(waiting=WAITS, waited_s=45.0),
            "warning",
            "the longest for 45 s",
            "penstock monitor train",
        ),
        (stream.waiting_writers, snapshot(waiting=WAITS, waited_s=5.0), "ok", "1", ""),
        (
            stream.waiting_writers,
            snapshot(waiting=WAITS, waited_s=5.0, groups=()),
            "warning",
            "nobody reads: 1.0 MiB of 1024 MiB lie ready, 1 writer waits for space; start a trainer",
            "penstock monitor train",
        ),
        (
            stream.idle_workers,
            snapshot(rates=ReportedRates({"h.1": ReportedRate(1.0, {"idle": 0.99})}, {}, {})),
            "warning",
            "epochs 0 are not made",
            "penstock produce",
        ),
        (
            stream.bad_samples,
            snapshot(epochs=(EpochSnapshot(0, "produced", "epoch", 10, 5, 2, MB, {}),)),
            "note",
            "2 samples could not be made",
            "penstock bad list train",
        ),
        (
            stream.bad_samples,
            snapshot(groups=(replace(GROUP, dead_letters=1),)),
            "warning",
            "1 entries could not be read",
            "penstock bad list train",
        ),
    ],
)
def test_what_is_wrong_with_a_stream_is_named_with_its_command(
    rule: Callable[[StreamFacts], Finding], facts: StreamFacts, severity: str, found: str, fix: str
) -> None:
    """Each finding about a stream carries its command, like each finding about a server."""
    finding = rule(facts)
    assert finding.severity == severity
    assert found in finding.found
    assert fix in finding.fix
    assert bool(finding.fix) == (severity != "ok")
