"""What holds a stream up, in one sentence: a pure rule from what everyone says to a cause and what would mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock_common.stream.servers.suitability import readable_bytes

WAITS = 0.1
"""A training loop that waits less of its time than this is not held up; a tenth is what overlap cannot hide."""
IDLE = 0.5
"""Workers that have no job for more of their time than this are not what is slow."""
READY_S = 1.0
"""A group that has so many seconds of its own pace before it does not wait for producers."""

Cause = Literal[
    "memory", "folder", "dead member", "absent group", "trainers", "reading", "no workers", "jobs", "producers",
    "no trainers", "balanced", "done", "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trainers:
    """One group."""

    group: str
    living: int
    """Members that were seen within a lease."""
    holds: bool
    """Whether what it has not read is kept for it."""
    waits: float | None
    """What part of their time its training loops wait for batches; None while nobody has said."""
    lag_samples: int
    lag_bytes: int
    pending: int
    """Entries."""
    demand: float | None = None
    """Samples a second that its members would take if they never waited."""
    is_ordered: bool = False
    silent: tuple[tuple[str, float | None, int], ...] = ()
    """(member, seconds since it was seen, entries it holds) of those that are dead for all that is known."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of a stream and its server."""

    stream: str
    held_bytes: int = 0
    budget_bytes: int = 1
    memory_left: int | None = None
    """Bytes that writers may still take of the server's memory; None where nothing limits it."""
    memory_limit: int = 0
    memory_used: int = 0
    waiting: int = 0
    """Writers that wait for room."""
    waits_for_memory: bool = False
    waits_for_folder: bool = False
    """The file system of its segments is full."""
    waited_s: float = 0.0
    workers: int = 0
    worker_rate: float | None = None
    wished: int | None = None
    """Workers that the fastest group would keep busy."""
    idle: float = 0.0
    """What part of their time the workers have no job."""
    is_all_made: bool = False
    """Every planned epoch is produced."""
    is_making: bool = False
    """Some epoch is begun and not produced."""
    trainers: tuple[Trainers, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holds it up."""

    cause: Cause
    text: str
    """One sentence for people."""
    remedy: str = ""
    """A command that mends it, where one does."""


def judge(now: Situation) -> Verdict:
    """The first of these that holds: what stops everyone comes before what slows somebody."""
    for rule in (
        _memory,
        _folder,
        _dead_member,
        _absent_group,
        _slow_trainers,
        _starving,
        _nobody_reads,
        _done,
        _balanced,
    ):
        if (found := rule(now)) is not None:
            return found
    return Verdict("unknown", "not enough is known yet: nobody has said how fast he is")


def _memory(now: Situation) -> Verdict | None:
    full = now.memory_left is not None and now.memory_left <= 0
    if not now.waits_for_memory and not (full and now.waiting):
        return None
    limit = readable_bytes(now.memory_limit)
    used = readable_bytes(now.memory_used)
    return Verdict(
        "memory",
        f"the server's memory is full: {now.waiting} writer{_s(now.waiting)} wait{_es(now.waiting)} "
        f"({now.waited_s:.0f} s by now); {used} of {limit} are used, and this stream holds "
        f"{readable_bytes(now.held_bytes)} of it",
        "penstock doctor",
    )


def _folder(now: Situation) -> Verdict | None:
    if not now.waits_for_folder:
        return None
    return Verdict(
        "folder",
        f"the file system of the segments is full: {now.waiting} writer{_s(now.waiting)} wait{_es(now.waiting)} "
        f"({now.waited_s:.0f} s by now), and this stream holds {readable_bytes(now.held_bytes)} of it: free some, or "
        "move the stream to a larger one",
        "df -h; penstock delete --segments DIR",
    )


def _dead_member(now: Situation) -> Verdict | None:
    for each in now.trainers:
        if each.silent:
            name, age, held = max(each.silent, key=lambda one: one[2])
            since = "is gone" if age is None else f"was not heard of for {age:.0f} s"
            if each.is_ordered:
                what = "the other ranks cannot go past it: start that rank again"
            elif each.living:
                what = f"it holds {_entries(held)}, which others of its group take over within a lease"
            else:
                what = f"it holds {_entries(held)} and nobody else reads: start a trainer of that group again"
            return Verdict("dead member", f"member {name} of group {each.group} {since}; {what}")
    return None


def _entries(count: int) -> str:
    return f"{count} entr{'y' if count == 1 else 'ies'}"


def _absent_group(now: Situation) -> Verdict | None:
    absent = [each for each in now.trainers if each.holds and not each.living and each.lag_samples]
    if not now.waiting or not absent:
        return None
    most = max(absent, key=lambda each: each.lag_bytes)
    return Verdict(
        "absent group",
        f"producers wait for room, and group {most.group}, which nobody reads now, holds "
        f"{readable_bytes(most.lag_bytes)} of {readable_bytes(now.budget_bytes)}: start its trainer, or drop the group",
        f"penstock groups drop {now.stream} {most.group}",
    )


def _slow_trainers(now: Situation) -> Verdict | None:
    living = [each for each in now.trainers if each.living and each.holds]
    if not now.waiting or not living:
        return None
    slowest = max(living, key=lambda each: (each.lag_bytes, each.pending))
    also = f", of {len(living)} groups the one furthest behind" if len(living) > 1 else ""
    return Verdict(
        "trainers",
        f"producers wait for trainers: the budget is full ({readable_bytes(now.held_bytes)} of "
        f"{readable_bytes(now.budget_bytes)}) and group {slowest.group}{also} sets the pace; more workers would change "
        "nothing",
    )


def _starving(now: Situation) -> Verdict | None:
    waiting = [each for each in now.trainers if each.living and (each.waits or 0.0) > WAITS]
    if not waiting or now.is_all_made:
        return None
    most = max(waiting, key=lambda each: each.waits or 0.0)
    part = f"trainers of {most.group} wait {most.waits or 0.0:.0%} of their time".replace("%", " %")
    if most.lag_samples > READY_S * (most.demand or 0.0):
        return Verdict(
            "reading",
            f"{part} though {most.lag_samples} samples lie ready: their host, its network or its checksums are what is "
            "slow; loader.stats() tells which",
        )
    if not now.is_making:
        return Verdict("jobs", f"{part}, and no epoch is being made: produce more epochs, or further ahead",
                       "penstock produce ... --follow --ahead 2")  # fmt: skip
    return _slow_producers(now, part)


def _slow_producers(now: Situation, part: str) -> Verdict:
    if not now.workers:
        return Verdict(
            "no workers",
            f"{part} for producers, and no worker says that it is at work: start some, unless a Writer of your own "
            "makes the samples",
            "penstock worker --auto",
        )
    if now.idle > IDLE:
        idle = f"{now.idle:.0%}".replace("%", " %")
        return Verdict(
            "jobs",
            f"{part}, and workers have no job for {idle} of theirs: plan epochs further ahead, or in smaller shards",
            "penstock produce ... --ahead 2",
        )
    more = (now.wished or 0) - now.workers
    would = f": {more} more worker{_s(more)} would do" if more > 0 else ""
    return Verdict(
        "producers", f"{part} for producers{would}", f"penstock worker --processes {more}" if more > 0 else ""
    )


def _nobody_reads(now: Situation) -> Verdict | None:
    if any(each.living for each in now.trainers):
        return None
    held = f"{readable_bytes(now.held_bytes)} of {readable_bytes(now.budget_bytes)} lie ready"
    waits = f", {now.waiting} writer{_s(now.waiting)} wait{_es(now.waiting)} for room" if now.waiting else ""
    lag = max((each.lag_samples for each in now.trainers), default=0)
    if now.is_all_made and now.trainers and not lag:
        return None
    return Verdict("no trainers", f"nobody reads: {held}{waits}; start a trainer")


def _done(now: Situation) -> Verdict | None:
    if not now.is_all_made or any(each.lag_samples or each.pending for each in now.trainers if each.holds):
        return None
    return Verdict("done", "every planned epoch is made and read")


def _balanced(now: Situation) -> Verdict | None:
    told = [each for each in now.trainers if each.waits is not None]
    if not told:
        return None
    most = max(told, key=lambda each: each.waits or 0.0)
    part = f"they wait {most.waits or 0.0:.0%} of their time for data".replace("%", " %")
    return Verdict("balanced", f"trainers set the pace: {part}, which is as it should be")


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _es(count: int) -> str:
    return "s" if count == 1 else ""
