"""Findings of `penstock doctor`, and the rules for a stream and for a queue of jobs: from facts to findings. Pure.

`doctor_server` has the rules for a server.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.views.bottleneck import ALLOWED, judge
from penstock.views.monitor import silent_hosts, situation
from penstock_common.explain.queues import ForeignWorker
from penstock_common.explain.snapshot import StreamSnapshot
from penstock_common.printable import readable_bytes
from penstock_common.stream.groups.roster import ORDERED
from penstock_common.stream.servers.durability import Durability
from penstock_common.stream.streams import said_deleting
from penstock_common.tuning import LEASE_S

Severity = Literal["error", "warning", "note", "ok"]
ORDER: tuple[Severity, ...] = ("error", "warning", "note", "ok")
LONG_WAIT_S = 30.0
"""One lease: a worker's job that waits longer makes way for another."""
SLOW = ("open epoch", "slow group", "producers", "no workers", "jobs", "reading", "memory")
"""Causes that no other rule here reports."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding."""

    check: str
    severity: Severity
    """``error``: data or runs will be lost, or nothing works. ``warning``: it will cause trouble. ``note``:
    information.
    """
    found: str
    fix: str = ""
    """The exact command or setting, or empty if nothing is to be done."""


def ok(check: str, found: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(check, "ok", found)


# --- a stream --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """The facts about one stream, and about its server as far as its promises need them."""

    snapshot: StreamSnapshot
    durability: str
    payload: str
    """The setting ``inline``, or ``segments:`` and a folder."""
    is_aof: bool
    has_waitaof: bool
    replicas: int
    """The replicas that follow."""
    segments_seen: bool | None = None
    """Whether this host sees the folder of its segments, or None if it has none."""
    segments_free: int = 0
    """The bytes that are free there."""
    segments_trouble: str = ""
    """The reason why this host does not see the folder, or may not trust it."""
    is_compressed: bool = False
    """Whether writers compress tensors of it."""


def deletion(facts: StreamFacts) -> Finding:
    """Check for a deletion that was interrupted: no process can use the stream, and it still takes memory."""
    name = facts.snapshot.name
    if facts.snapshot.is_deleting:
        return Finding("deletion", "error", said_deleting(name), f"penstock delete {name}")
    return ok("deletion", "none was begun")


def durability(facts: StreamFacts) -> Finding:
    """Check the durability: a level that the server cannot keep ends the writer in the middle of a run."""
    wanted = Durability.parse(facts.durability)
    if wanted.fsync and not facts.has_waitaof:
        return Finding(
            "durability", "error", f"the stream wants {facts.durability}, and the server has no WAITAOF",
            "install Redis 7.2 or Valkey; or make the stream with the durability memory",
        )  # fmt: skip
    if wanted.fsync and not facts.is_aof:
        return Finding(
            "durability", "error", f"the stream wants {facts.durability}, and the server writes no append-only file",
            "redis-cli CONFIG SET appendonly yes",
        )  # fmt: skip
    if wanted.replicas > facts.replicas:
        return Finding(
            "durability", "error", f"the stream wants {facts.durability}, and {facts.replicas} replicas follow",
            "redis-cli -h REPLICA REPLICAOF HOST PORT",
        )  # fmt: skip
    if wanted.is_auto:
        follow = "a replica confirms writes" if facts.replicas else "no replica follows, so writes count as with memory"
        return ok("durability", f"{facts.durability}: {follow}")
    return ok("durability", facts.durability)


def segments(facts: StreamFacts) -> Finding:
    """Check the folder of segments: a host that does not see it can neither write nor read a payload."""
    if facts.segments_seen is None:
        return ok("segments", "payloads travel in the entries")
    folder = facts.payload.partition(":")[2]
    if not facts.segments_seen:
        return Finding(
            "segments", "warning",
            f"this host can neither write nor read the stream's segments in {folder}: {facts.segments_trouble}",
            f"ls -ld {shlex.quote(folder)}; export PENSTOCK_SEGMENTS=/where/it/is/mounted",
        )  # fmt: skip
    lacking = facts.snapshot.budget_bytes - facts.snapshot.held_bytes - facts.segments_free
    if lacking > 0:
        return Finding(
            "segments", "error", f"{folder} has {readable_bytes(facts.segments_free)} left, and the budget allows "
            f"{readable_bytes(facts.snapshot.budget_bytes - facts.snapshot.held_bytes)} more: writers will wait",
            f"df -h {shlex.quote(folder)}; mount -o remount,size=... {shlex.quote(folder)}",
        )  # fmt: skip
    return ok("segments", f"{folder}, {readable_bytes(facts.segments_free)} free")


def absent_groups(facts: StreamFacts) -> Finding:
    """Check for groups without members: they hold the budget for a trainer that may never come.

    A killed trainer that is started again goes on where it was, and a drop would lose that.
    """
    snapshot = facts.snapshot
    absent = [
        group for group in snapshot.groups
        if group.holds and group.lag_samples and not any(one.is_live for one in group.members)
    ]  # fmt: skip
    if not absent:
        return ok("absent groups", "none holds data")
    most = max(absent, key=lambda group: group.lag_bytes)
    return Finding(
        "absent groups", "error" if snapshot.waiting else "warning",
        f"{', '.join(group.name for group in absent)}: nobody reads, and {readable_bytes(most.lag_bytes)} are kept for "
        f"{most.name}" + ("; writers wait for that space" if snapshot.waiting else ""),
        f"start the trainer of {most.name} again; only if it never comes back: "
        f"penstock groups drop {snapshot.name} {most.name}",
    )  # fmt: skip


def silent_members(facts: StreamFacts) -> Finding:
    """Check for silent members: their entries go to others of their group, if there are any."""
    silent = [(group.name, one) for group in facts.snapshot.groups for one in group.members if one.is_silent]
    behind = {group.name for group in facts.snapshot.groups if group.kind == ORDERED and group.lag_samples}
    ranks = [f"{one.name} of {name}" for name, one in silent if name in behind]
    if ranks:
        return Finding(
            "silent members", "warning", f"not heard of for 10 s or more, and the other ranks wait: {', '.join(ranks)}",
            "start those ranks again",
        )  # fmt: skip
    holding = [(name, one) for name, one in silent if one.pending_entries]
    if holding:
        named = ", ".join(f"{one.name} of {name} ({one.pending_entries} entries)" for name, one in holding)
        return Finding(
            "silent members", "warning", f"not heard of for 10 s or more, and holding entries: {named}",
            "start a trainer of the group: it takes them over when their lease has lapsed "
            f"({LEASE_S:g} s, or what Tuning(lease_s=) says)",
        )  # fmt: skip
    return ok("silent members", f"{len(silent)} were not heard of for 10 s" if silent else "all were heard of")


def waiting_writers(facts: StreamFacts) -> Finding:
    """Check for waiting writers. A short wait is normal while a trainer reads.

    A worker's job that waited for `LONG_WAIT_S` makes way, and waits anew. So a wait that no trainer ends is told at
    once.
    """
    snapshot = facts.snapshot
    is_read = any(member.is_live for group in snapshot.groups for member in group.members)
    if not snapshot.waiting or (is_read and snapshot.waited_s < LONG_WAIT_S):
        return ok("waiting writers", f"{len(snapshot.waiting)}")
    verdict, found = judge(situation(snapshot)), ""
    if snapshot.waited_s >= LONG_WAIT_S:
        count = len(snapshot.waiting)
        found = f"{count} wait{'s' if count == 1 else ''} for space, the longest for {snapshot.waited_s:.0f} s: "
    return Finding(
        "waiting writers", "warning", f"{found}{verdict.text}",
        verdict.remedy or f"penstock monitor {snapshot.name}",
    )  # fmt: skip


def pace(facts: StreamFacts) -> Finding:
    """Check the rate: a training job that waits for its data is slow, even if all else is well."""
    verdict = judge(situation(facts.snapshot))
    if verdict.cause not in SLOW:
        return ok("pace", verdict.text)
    return Finding("pace", "note", verdict.text, verdict.remedy or f"penstock monitor {facts.snapshot.name}")


def idle_workers(facts: StreamFacts) -> Finding:
    """Check for idle workers: they exist, and have no jobs, while epochs are not made."""
    workers = facts.snapshot.rates.workers
    idle = [name for name, report in workers.items() if report.shares.get("idle", 0.0) > 0.9]
    unmade = [epoch.epoch for epoch in facts.snapshot.epochs if epoch.state in ("open", "sized")]
    if idle and unmade and len(idle) == len(workers):
        return Finding(
            "workers", "warning",
            f"all {len(idle)} workers have no jobs, and epochs {', '.join(map(str, unmade))} are not made: "
            "their production ended?", f"penstock produce ... --stream {facts.snapshot.name}",
        )  # fmt: skip
    return ok("workers", f"{len(workers)} at work")


def silent_workers(facts: StreamFacts) -> Finding:
    """Check for silent hosts: a host that lost its power reports nothing, and other workers have its jobs."""
    silent = silent_hosts(facts.snapshot)
    if not silent:
        return ok("silent workers", "none")
    named = ", ".join(f"{one['workers']} of {one['host']} ({one['seen_s']:.0f} s)" for one in silent)
    return Finding(
        "silent workers", "warning", f"not heard of for 10 s or more, and not signed off: {named}",
        f"penstock worker --auto {ALLOWED}",
    )  # fmt: skip


def bad_samples(facts: StreamFacts) -> Finding:
    """Check for bad samples, which training goes without."""
    bad = sum(epoch.bad for epoch in facts.snapshot.epochs)
    dead = sum(group.dead_letters for group in facts.snapshot.groups)
    if dead:
        return Finding("bad samples", "warning", f"{dead} entries could not be read, {bad} samples not made",
                       f"penstock bad list {facts.snapshot.name}")  # fmt: skip
    if bad:
        return Finding("bad samples", "note", f"{bad} samples could not be made",
                       f"penstock bad list {facts.snapshot.name}")  # fmt: skip
    return ok("bad samples", "none")


RULES: tuple[Callable[[StreamFacts], Finding], ...] = (
    deletion, durability, segments, absent_groups, silent_members, waiting_writers, pace, idle_workers,
    silent_workers, bad_samples,
)  # fmt: skip


def check_stream(facts: StreamFacts) -> list[Finding]:
    """Return every rule's finding."""
    return [rule(facts) for rule in RULES]


# --- a queue ---------------------------------------------------------------------------------------------------------


def only_own_workers(found: Sequence[ForeignWorker]) -> list[Finding]:
    """Return a finding for each plain `rq worker`, which can do no job, and delays each job that it takes."""
    if not found:
        return [ok("workers", "no other program takes jobs")]
    return [
        Finding(
            "workers", "warning",
            f"worker {one.name!r} (process {one.pid} on {one.host}) takes jobs of queue {one.queue!r} and can do none: "
            f"{one.failed} failed so far; it is a plain `rq worker`",
            f"kill {one.pid} on {one.host}, and start `penstock worker --allow NAME --root DIR` as `penstock produce` "
            "says",
        )
        for one in found
    ]  # fmt: skip


def jobs_without_stream(gone: Mapping[str, Collection[str]], where: str) -> list[Finding]:
    """Return a finding for each queue with jobs of streams that are gone. A shell expands ``where`` to its address."""
    return [
        Finding(
            "jobs", "note",
            f"queue {queue!r} has jobs of {', '.join(sorted(streams))}, which this server does not have: it was "
            "deleted, and the jobs stay until a worker refuses them, or it is on another server",
            f"if no production uses the queue: rq empty --url {where} {queue}",
        )
        for queue, streams in gone.items()
        if streams
    ]  # fmt: skip
