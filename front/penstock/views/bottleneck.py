"""The limit of a stream in one sentence: a pure rule from all reports to a cause and a remedy."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from penstock.views.servers import cli_of
from penstock_common.explain.sentences import explain_spare
from penstock_common.printable import readable_bytes
from penstock_common.stream.groups.presence import ALIVE_MS
from penstock_common.stream.servers.suitability import ServerMemory
from penstock_common.stream.streams import said_deleting
from penstock_common.tuning import LEASE_S
from penstock_producer.jobs.autoscaler import is_tellable

WAITS = 0.1
"""A training loop that waits a smaller part of its time is not limited. Overlap cannot hide a tenth."""
IDLE = 0.5
"""Workers that have no job for a larger part of their time are not slow."""
HELD_UP = 0.5
"""A group that waits for a larger part of its time limits no other, however much it still has to read."""
FULL = 0.5
"""Workers that wait for quota for a larger part of their time are not slow, either."""
READY_S = 1.0
"""A group with unread samples for this many seconds at its own rate does not wait for producers."""
TIGHT_SHARE, FULL_SHARE = 0.1, 0.75
"""Writers stop and continue within the first share of a budget (write.quota). If the server's memory stops them, and
not the budget, the bytes held stay below the second."""
MANY = 16
"""More worker processes are rarely on one host: the sentence then asks for hosts, or a faster transform."""
ALLOWED = "--allow MODULE --root DIR"
"""The options without which a worker starts only on its user's own server. Their values are not known here."""

Cause = Literal[
    "deletion", "writes refused", "memory", "folder", "dead member", "open epoch", "absent group", "unacknowledged",
    "slow group", "trainers", "reading", "no workers", "jobs", "producers", "nothing made", "no trainers",
    "balanced", "done", "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupSituation:
    """The trainers of one group."""

    group: str
    live: int
    """The members that were seen lately."""
    holds: bool
    """Whether the stream keeps for it what it has not read."""
    waits: float | None
    """The part of the last ten seconds in which its training loops waited for batches, or None without a report."""
    lag_samples: int
    lag_bytes: int
    pending: int
    """The pending entries."""
    demand: float | None = None
    """The samples a second that its members would take if they never waited."""
    is_ordered: bool = False
    missing: tuple[int, ...] = ()
    """The missing ranks of an ordered group that is behind. They were forgotten after a long silence."""
    silent: tuple[tuple[str, float | None, int], ...] = ()
    """(member, seconds since it was seen, entries it holds) of members that are dead, as far as is known."""
    lost: tuple[int, int] | None = None
    """The first and last epoch of which samples were released before it read them, because it had left."""
    ready_samples: int = 0
    """The unread samples of the epoch that it reads now. Those of later epochs come after it."""
    open_epoch: int | None = None
    """The open epoch without an unread sample that it reads now, if later epochs have more: no writer has ended it."""


@dataclass(frozen=True, slots=True)
class FullServer:
    """The server of a cluster with partitions of the stream on which writers may take the least memory."""

    where: str
    """Its address."""
    memory: ServerMemory
    budget_bytes: int
    """The part of the stream's budget on it."""
    held_bytes: int
    """The payload bytes of the stream on it."""


@dataclass(frozen=True, slots=True)
class StreamSituation:
    """The facts about a stream and its server."""

    stream: str
    is_deleting: bool = False
    """Whether a deletion of it began and did not end."""
    held_bytes: int = 0
    budget_bytes: int = 1
    memory_left: int | None = None
    """The bytes that writers may still take of the server's memory, or None without a limit."""
    memory_limit: int = 0
    memory_used: int = 0
    refusal: str = ""
    """The words in which a server of its partitions refuses writes because it cannot write its disk, or ''."""
    full: FullServer | None = None
    """The fullest server of a cluster, or None for one server, of which the facts above tell."""
    backlog_bytes: int = 0
    """The part of the used memory that the replication backlog and the buffers of replicas take."""
    waiting: int = 0
    """The writers that wait for quota."""
    waits_for_memory: bool = False
    waits_for_folder: bool = False
    """Whether the file system of its segments is full."""
    folder: str = ""
    """The folder of its segments."""
    spare_bytes: int = 0
    """The bytes of spare files in it."""
    waited_s: float = 0.0
    workers: int = 0
    worker_rate: float | None = None
    wished: int | None = None
    """The workers that the fastest group would keep busy."""
    idle: float = 0.0
    """The part of the last ten seconds in which the workers had no job."""
    room: float = 0.0
    """The part in which they waited for quota. A wait of less than half a second is not among those ``waiting`` now."""
    is_all_made: bool = False
    """Whether every planned epoch is produced."""
    is_making: bool = False
    """Whether some epoch is begun and not produced."""
    has_epochs: bool = True
    """Whether there is an epoch that was not abandoned."""
    trainers: tuple[GroupSituation, ...] = ()
    open_epoch: int | None = None
    """The open epoch without a sample that a new group would begin with, if later epochs have samples."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The limit of a stream, and what to do about it."""

    cause: Cause
    text: str
    """One sentence for people."""
    remedy: str = ""
    """The command that helps, if one does."""


def judge(now: StreamSituation) -> Bottleneck:
    """Return the first verdict that holds. Causes that stop all processes come before causes that slow some."""
    for rule in (
        _deletion,
        _refused,
        _memory,
        _folder,
        _dead_member,
        _open_epoch,
        _absent_group,
        _full,
        _starving,
        _nothing_made,
        _nobody_reads,
        _done,
        _balanced,
    ):
        if (found := rule(now)) is not None:
            return found
    return Bottleneck("unknown", "not enough is known yet: workers and trainers have not reported their rates")


def _deletion(now: StreamSituation) -> Bottleneck | None:
    if not now.is_deleting:
        return None
    return Bottleneck("deletion", said_deleting(now.stream), f"penstock delete {now.stream}")


def _refused(now: StreamSituation) -> Bottleneck | None:
    if not now.refusal:
        return None
    return Bottleneck("writes refused", f"{now.refusal}; while it does, writers wait and nothing is acknowledged")


def _memory(now: StreamSituation) -> Bottleneck | None:
    left = now.memory_left
    full = left is not None and left <= 0 and not now.folder
    if not (now.waits_for_memory or (full and now.waiting) or (_is_tight(now) and _starved(now))):
        return None
    what, cli, held_bytes, budget_bytes = "the server's memory", "redis-cli", now.held_bytes, now.budget_bytes
    memory = ServerMemory(now.memory_used, now.memory_limit, "", now.backlog_bytes)
    if now.full is not None:
        at = urlsplit(now.full.where)
        what, cli = f"the memory of {now.full.where}", cli_of(at.hostname or "", at.port or 0)
        memory, held_bytes, budget_bytes = now.full.memory, now.full.held_bytes, now.full.budget_bytes
        left = memory.left_bytes
    kept = readable_bytes(memory.limit_bytes - memory.used_bytes - (left or 0))
    of_replicas = f"{readable_bytes(memory.backlog_bytes)} by the replication backlog and the buffers of replicas, "
    needed = memory.used_bytes + max(0, budget_bytes - held_bytes)
    enough = int(needed * 1.25) + (32 << 20)  # with the reserve that writers leave (servers.suitability)
    return Bottleneck(
        "memory",
        f"{what} is full: {_writers(now)}; {readable_bytes(memory.used_bytes)} of {readable_bytes(memory.limit_bytes)} "
        f"are used, {readable_bytes(held_bytes)} of it by this stream, {of_replicas if memory.backlog_bytes else ''}"
        f"and writers leave {kept} free: remove what is not streams' (`penstock doctor` says how much), or raise "
        "maxmemory",
        f"{cli} CONFIG SET maxmemory {-(-enough // (1 << 20))}mb",
    )


def _is_tight(now: StreamSituation) -> bool:
    """Return whether writers continue only as fast as others free the server's memory."""
    if now.memory_left is None or now.folder or not now.is_making:
        return False
    is_near = now.memory_left < TIGHT_SHARE * now.budget_bytes
    return is_near and now.held_bytes + max(0, now.memory_left) < FULL_SHARE * now.budget_bytes


def _starved(now: StreamSituation) -> list[GroupSituation]:
    return [each for each in now.trainers if each.live and (each.waits or 0.0) > WAITS]


def _writers(now: StreamSituation) -> str:
    if not now.waiting:
        return "writers go on only as space is made"
    return f"{now.waiting} writer{_s(now.waiting)} wait{_es(now.waiting)} ({now.waited_s:.0f} s by now)"


def _folder(now: StreamSituation) -> Bottleneck | None:
    if not now.waits_for_folder:
        return None
    folder = shlex.quote(now.folder or "DIR")
    spare = explain_spare(now.spare_bytes)
    advice = "remove other files there, also what deleted streams left"
    return Bottleneck(
        "folder",
        f"the file system of the segments in {now.folder or 'its folder'} is full: {_writers(now)}, and this stream "
        f"holds {readable_bytes(now.held_bytes)} of it{f'. {spare}. Otherwise ' if spare else ': '}{advice}",
        f"df -h {folder}; penstock delete --segments {folder}",
    )


def _dead_member(now: StreamSituation) -> Bottleneck | None:
    for each in now.trainers:
        if each.missing and each.live:
            which = ", ".join(f"rank-{rank}" for rank in each.missing)
            verb = "is" if len(each.missing) == 1 else "are"
            what = "the other ranks cannot go past it: start that rank again"
            return Bottleneck("dead member", f"{which} of group {each.group} {verb} not there; {what}")
        if each.silent:
            name, age, held = max(each.silent, key=lambda one: one[2])
            since = "is gone" if age is None else f"was not heard of for {age:.0f} s"
            also = f", nor were {len(each.silent) - 1} more" if len(each.silent) > 1 else ""
            what, remedy = _what_of(now, each, name, held)
            is_over = age is None or age * 1000 >= ALIVE_MS
            return Bottleneck(
                "dead member", f"member {name} of group {each.group} {since}{also}; {what}", remedy if is_over else ""
            )
    return None


def _what_of(now: StreamSituation, group: GroupSituation, name: str, held: int) -> tuple[str, str]:
    """Return the consequence of a member's death, and what helps."""
    if group.is_ordered:
        return "the other ranks cannot go past it: start that rank again", ""
    as_it = f"started again with Tuning(member={name!r}) it has them at once"
    if group.live:
        return (
            f"it holds {_entries(held)}, which others of its group take over when its lease has lapsed "
            f"({LEASE_S:g} s, or what Tuning(lease_s=) says); {as_it}"
        ), ""
    return (
        f"it holds {_entries(held)} and nobody else reads: start a trainer of that group ({as_it}), or drop the group",
        f"penstock groups drop {now.stream} {group.group}",
    )


def _entries(count: int) -> str:
    return f"{count} entr{'y' if count == 1 else 'ies'}"


def _open_epoch(now: StreamSituation) -> Bottleneck | None:
    epoch: int | None
    if held_up := [each for each in _starved(now) if each.open_epoch is not None]:
        most = max(held_up, key=lambda each: each.waits or 0.0)
        who, epoch, ready = _waiting(most), most.open_epoch, f"{most.lag_samples} samples"
    elif not any(each.live for each in now.trainers):
        epochs = [each.open_epoch for each in now.trainers] or [now.open_epoch]
        who, epoch, ready = "nobody reads, and a trainer would wait", epochs[0], "samples"
        if None in epochs:
            return None
    else:
        return None
    return Bottleneck(
        "open epoch",
        f"{who} for the end of epoch {epoch}, which has no unread sample, while {ready} of later epochs lie ready: a "
        "writer of that epoch pauses, or died. If it died, end the epoch. A writer that still runs ends with "
        "ShardMismatch then",
        f"penstock epochs close {now.stream} {epoch}",
    )


def _absent_group(now: StreamSituation) -> Bottleneck | None:
    absent = [each for each in now.trainers if each.holds and not each.live and each.lag_samples]
    if not _is_full(now) or not absent:
        return None
    most = max(absent, key=lambda each: each.lag_bytes)
    return Bottleneck(
        "absent group",
        f"producers wait for space, and group {most.group}, which nobody reads now, holds "
        f"{readable_bytes(most.lag_bytes)} of {readable_bytes(now.budget_bytes)}: start its trainer, or drop the group",
        f"penstock groups drop {now.stream} {most.group}",
    )


def _holding(now: StreamSituation) -> list[GroupSituation]:
    return [each for each in now.trainers if each.live and each.holds]


def _is_full(now: StreamSituation) -> bool:
    """Return True if producers wait for quota, rather than trainers for producers.

    A writer waits in short pieces, so that a look may miss all of them. Workers report their part. Without workers,
    what a group has yet to read tells.
    """
    unread = max((each.lag_bytes for each in _holding(now)), default=0)
    is_filled = now.is_making and not now.workers and unread > FULL_SHARE * now.budget_bytes
    return now.waiting > 0 or now.room > FULL or is_filled


def _full(now: StreamSituation) -> Bottleneck | None:
    """Return a verdict if producers wait for quota: the slowest group holds the bytes that fill the budget."""
    live = _holding(now)
    if not _is_full(now) or not live:
        return None
    slowest = max(live, key=lambda each: ((each.waits or 0.0) < HELD_UP, each.lag_bytes, each.pending))
    if slowest.pending and (slowest.waits or 0.0) >= HELD_UP:  # it was given them, and does not work on them
        return Bottleneck(
            "unacknowledged",
            f"producers wait for space while trainers of {slowest.group} wait for samples: {_entries(slowest.pending)} "
            "were given to them and not acknowledged: they have to acknowledge or save a checkpoint, or one of them "
            "died a moment ago",
        )
    waiting = [each for each in _starved(now) if each.group != slowest.group]
    if waiting:  # new samples come for them once the slowest group has read the old ones
        most = max(waiting, key=lambda each: each.waits or 0.0)
        return Bottleneck(
            "slow group",
            f"{_waiting(most)} for group {slowest.group}, which is slower: the budget is full of what it has yet to "
            f"read, and producers wait for space{_part(now.room)}. A larger budget evens out a while (penstock produce "
            f"--budget). A group that stays slower needs a stream of its own (--stream), or is dropped: penstock "
            f"groups drop {now.stream} {slowest.group}",
        )
    also = f", of {len(live)} groups the one furthest behind" if len(live) > 1 else ""
    return Bottleneck(
        "trainers",
        f"producers wait for trainers: the budget is full ({readable_bytes(now.held_bytes)} of "
        f"{readable_bytes(now.budget_bytes)}) and group {slowest.group}{also} sets the pace; more workers would change "
        "nothing",
    )


def _waiting(group: GroupSituation) -> str:
    return f"trainers of {group.group} wait{_part(group.waits or 0.0)}"


def _part(share: float) -> str:
    return f" {share:.0%} of their time".replace("%", " %") if share else ""


def _starving(now: StreamSituation) -> Bottleneck | None:
    waiting = _starved(now)
    if not waiting or now.is_all_made:
        return None
    most = max(waiting, key=lambda each: each.waits or 0.0)
    part = _waiting(most)
    if most.ready_samples > READY_S * (most.demand or 0.0):
        return Bottleneck(
            "reading",
            f"{part} though {most.ready_samples} samples lie ready: their host, its network or its checksums are what "
            "is slow; loader.stats() tells which",
        )
    if not now.is_making:
        return Bottleneck("jobs", f"{part}, and no epoch is being made: produce more epochs, or further ahead",
                       "penstock produce ... --follow --ahead 2")  # fmt: skip
    return _slow_producers(now, part)


def _slow_producers(now: StreamSituation, part: str) -> Bottleneck:
    if not now.workers:
        return Bottleneck(
            "no workers",
            f"{part} for producers, and no worker says that it is at work: start some, and run a `penstock produce` "
            "that was stopped again, unless a Writer of your own makes the samples",
            f"penstock worker --auto {ALLOWED}",
        )
    if now.idle > IDLE:
        idle = f"{now.idle:.0%}".replace("%", " %")
        return Bottleneck(
            "jobs",
            f"{part}, and workers have no job for {idle} of theirs: plan epochs further ahead, or in smaller shards",
            "penstock produce ... --ahead 2",
        )
    if now.wished is None or not now.worker_rate:
        return Bottleneck(
            "producers", f"{part} for producers, who have not said yet how fast they are: look again soon"
        )
    more, took = now.wished - now.workers, _milliseconds(1 / now.worker_rate)
    if more <= 0:
        return Bottleneck(
            "producers",
            f"{part} for producers, and as many as should do are at work: they may have begun a moment ago, or share "
            f"too few cores; a sample takes a worker {took}",
        )
    if not is_tellable(now.wished, now.workers):
        return Bottleneck(
            "producers",
            f"{part} for producers: more workers would do, more than can be told (one takes {took} for a sample)",
            f"penstock worker --auto {ALLOWED}",
        )
    if more <= MANY:
        return Bottleneck(
            "producers", f"{part} for producers: {more} more worker{_s(more)} would do (one takes {took} for a sample)",
            f"penstock worker --processes {more} {ALLOWED}",
        )  # fmt: skip
    return Bottleneck(
        "producers",
        f"{part} for producers: a sample takes a worker {took}, and {more} more workers would do, on several hosts; or "
        "a faster transform",
        f"penstock worker --auto {ALLOWED}",
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"


def _nothing_made(now: StreamSituation) -> Bottleneck | None:
    if now.has_epochs or now.is_all_made:
        return None
    return Bottleneck("nothing made", "it has no epoch that could be read: start a producer",
                   f"penstock produce ... --stream {now.stream}")  # fmt: skip


def _nobody_reads(now: StreamSituation) -> Bottleneck | None:
    if any(each.live for each in now.trainers):
        return None
    most = max(now.trainers, key=lambda each: each.lag_bytes, default=None)
    ready = now.held_bytes if most is None else most.lag_bytes
    lie = f"{readable_bytes(ready)} of {readable_bytes(now.budget_bytes)} lie ready"
    if most is not None and most.lag_bytes and not most.holds:
        lie += f" for group {most.group}, which left, so nothing is kept for it"
    if pending := max((each.pending for each in now.trainers), default=0):
        lie += f", and {_entries(pending)} to be given out again"
    waits = f", {now.waiting} writer{_s(now.waiting)} wait{_es(now.waiting)} for space" if now.waiting else ""
    lag = max((each.lag_samples for each in now.trainers), default=0)
    if now.is_all_made and now.trainers and not lag:
        return None
    if now.trainers and not (lag or pending or waits):
        return Bottleneck("no trainers", f"nobody reads now, and every sample that there is was read{_losses(now)}")
    return Bottleneck("no trainers", f"nobody reads: {lie}{waits}; start a trainer{_losses(now)}")


def _done(now: StreamSituation) -> Bottleneck | None:
    if not now.is_all_made or any(each.lag_samples or each.pending for each in now.trainers if each.holds):
        return None
    left = sum(each.pending for each in now.trainers)
    if left:
        what = f"every planned epoch is made, and groups that left did not acknowledge {_entries(left)}"
        return Bottleneck("done", f"{what}{_losses(now)}")
    return Bottleneck("done", f"every planned epoch is made and read{_losses(now)}")


def _losses(now: StreamSituation) -> str:
    """Return what groups lost because they had left, and how their trainers go on."""
    return "".join(
        f"; group {each.group} left before it had read epochs {each.lost[0]}-{each.lost[1]}, and samples of them were "
        "released: its trainer needs start='remaining'"
        for each in now.trainers
        if each.lost is not None
    )


def _balanced(now: StreamSituation) -> Bottleneck | None:
    reporting = [each for each in now.trainers if each.waits is not None]
    if not reporting:
        return None
    most = max(reporting, key=lambda each: each.waits or 0.0)
    part = f"they wait {most.waits or 0.0:.0%} of their time for data".replace("%", " %")
    return Bottleneck("balanced", f"trainers set the pace: {part}, which is as it should be")


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _es(count: int) -> str:
    return "s" if count == 1 else ""
