"""What holds a stream up, in one sentence: a pure rule from what everyone says to a cause and what would mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock_common.stream.servers.suitability import readable_bytes
from penstock_producer.jobs.autoscaler import is_tellable

WAITS = 0.1
"""A training loop that waits less of its time than this is not held up; a tenth is what overlap cannot hide."""
IDLE = 0.5
"""Workers that have no job for more of their time than this are not what is slow."""
HELD_UP = 0.5
"""A group that waits for more of its time than this sets no pace, whatever it has yet to read."""
FULL = 0.5
"""Workers that wait for room for more of their time than this are not what is slow either."""
READY_S = 1.0
"""A group that has so many seconds of its own pace before it does not wait for producers."""
TIGHT_SHARE, FULL_SHARE = 0.1, 0.75
"""Writers go on and stop again within the first part of a budget (writing.backpressure); what is held stays below the
second where it is the server's memory, and not the budget, that stops them."""
MANY = 16
"""More worker processes than this are rarely one host's: the sentence then asks for hosts, or a faster transform."""
LEASE_S = 30.0
"""After which a dead member is one for every command; before, `groups drop` would ask for --force."""
ALLOWED = "--allow MODULE --root DIR"
"""Without these, which nobody here can know, a worker starts on its user's own server only."""

Cause = Literal[
    "memory", "folder", "dead member", "absent group", "unacknowledged", "slow group", "trainers", "reading",
    "no workers", "jobs", "producers", "nothing made", "no trainers", "balanced", "done", "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trainers:
    """One group."""

    group: str
    living: int
    """Members that were seen lately."""
    holds: bool
    """Whether what it has not read is kept for it."""
    waits: float | None
    """What part of the last ten seconds its training loops waited for batches; None while nobody has said."""
    lag_samples: int
    lag_bytes: int
    pending: int
    """Entries."""
    demand: float | None = None
    """Samples a second that its members would take if they never waited."""
    is_ordered: bool = False
    missing: tuple[int, ...] = ()
    """Of an ordered group that is behind: ranks that nobody has heard of for so long that they were forgotten."""
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
    folder: str = ""
    """Where its segments lie."""
    waited_s: float = 0.0
    workers: int = 0
    worker_rate: float | None = None
    wished: int | None = None
    """Workers that the fastest group would keep busy."""
    idle: float = 0.0
    """What part of the last ten seconds the workers had no job."""
    room: float = 0.0
    """And waited for room. A wait of less than half a second is not among those that are ``waiting`` now."""
    is_all_made: bool = False
    """Every planned epoch is produced."""
    is_making: bool = False
    """Some epoch is begun and not produced."""
    has_epochs: bool = True
    """Some epoch is there that was not abandoned."""
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
        _unacknowledged,
        _slow_group,
        _slow_trainers,
        _starving,
        _nothing_made,
        _nobody_reads,
        _done,
        _balanced,
    ):
        if (found := rule(now)) is not None:
            return found
    return Verdict("unknown", "not enough is known yet: nobody has said how fast he is")


def _memory(now: Situation) -> Verdict | None:
    left = now.memory_left
    full = left is not None and left <= 0 and not now.folder
    if not (now.waits_for_memory or (full and now.waiting) or (_is_tight(now) and _starved(now))):
        return None
    limit, used = readable_bytes(now.memory_limit), readable_bytes(now.memory_used)
    kept = readable_bytes(now.memory_limit - now.memory_used - (left or 0))
    needed = now.memory_used + max(0, now.budget_bytes - now.held_bytes)
    enough = int(needed * 1.25) + (32 << 20)  # beside the reserve that writers leave (servers.suitability)
    return Verdict(
        "memory",
        f"the server's memory is full: {_writers(now)}; {used} of {limit} are used, "
        f"{readable_bytes(now.held_bytes)} of it by this stream, and writers leave {kept} free: remove what is not "
        "streams' (`penstock doctor` says how much), or raise maxmemory",
        f"redis-cli CONFIG SET maxmemory {-(-enough // (1 << 20))}mb",
    )


def _is_tight(now: Situation) -> bool:
    """Whether writers go on only as fast as others make room in the server's memory."""
    if now.memory_left is None or now.folder or not now.is_making:
        return False
    is_near = now.memory_left < TIGHT_SHARE * now.budget_bytes
    return is_near and now.held_bytes + max(0, now.memory_left) < FULL_SHARE * now.budget_bytes


def _starved(now: Situation) -> list[Trainers]:
    return [each for each in now.trainers if each.living and (each.waits or 0.0) > WAITS]


def _writers(now: Situation) -> str:
    if not now.waiting:
        return "writers go on only as room is made"
    return f"{now.waiting} writer{_s(now.waiting)} wait{_es(now.waiting)} ({now.waited_s:.0f} s by now)"


def _folder(now: Situation) -> Verdict | None:
    if not now.waits_for_folder:
        return None
    return Verdict(
        "folder",
        f"the file system of the segments in {now.folder or 'its folder'} is full: {_writers(now)}, and this stream "
        f"holds {readable_bytes(now.held_bytes)} of it: remove other files there, also what deleted streams left",
        f"df -h {now.folder or 'DIR'}; penstock delete --segments {now.folder or 'DIR'}",
    )


def _dead_member(now: Situation) -> Verdict | None:
    for each in now.trainers:
        if each.missing and each.living:
            which = ", ".join(f"rank-{rank}" for rank in each.missing)
            verb = "is" if len(each.missing) == 1 else "are"
            what = "the other ranks cannot go past it: start that rank again"
            return Verdict("dead member", f"{which} of group {each.group} {verb} not there; {what}")
        if each.silent:
            name, age, held = max(each.silent, key=lambda one: one[2])
            since = "is gone" if age is None else f"was not heard of for {age:.0f} s"
            also = f", nor were {len(each.silent) - 1} more" if len(each.silent) > 1 else ""
            what, remedy = _what_of(now, each, name, held)
            is_over = age is None or age > LEASE_S
            return Verdict(
                "dead member", f"member {name} of group {each.group} {since}{also}; {what}", remedy if is_over else ""
            )
    return None


def _what_of(now: Situation, group: Trainers, name: str, held: int) -> tuple[str, str]:
    """What follows from its death, and what helps."""
    if group.is_ordered:
        return "the other ranks cannot go past it: start that rank again", ""
    as_it = f"started again as member={name!r} it has them at once"
    if group.living:
        return (
            f"it holds {_entries(held)}, which others of its group take over when its lease has lapsed (30 s, or what "
            f"lease_s says); {as_it}"
        ), ""
    return (
        f"it holds {_entries(held)} and nobody else reads: start a trainer of that group ({as_it}), or drop the group",
        f"penstock groups drop {now.stream} {group.group}",
    )


def _entries(count: int) -> str:
    return f"{count} entr{'y' if count == 1 else 'ies'}"


def _absent_group(now: Situation) -> Verdict | None:
    absent = [each for each in now.trainers if each.holds and not each.living and each.lag_samples]
    if not _is_full(now) or not absent:
        return None
    most = max(absent, key=lambda each: each.lag_bytes)
    return Verdict(
        "absent group",
        f"producers wait for room, and group {most.group}, which nobody reads now, holds "
        f"{readable_bytes(most.lag_bytes)} of {readable_bytes(now.budget_bytes)}: start its trainer, or drop the group",
        f"penstock groups drop {now.stream} {most.group}",
    )


def _unacknowledged(now: Situation) -> Verdict | None:
    """Both sides wait: what fills the budget was given out, and is neither acknowledged nor worked on."""
    if not _is_full(now) or not _holding(now):
        return None
    slowest = _slowest(now)
    if not slowest.pending or (slowest.waits or 0.0) < HELD_UP:
        return None
    return Verdict(
        "unacknowledged",
        f"producers wait for room while trainers of {slowest.group} wait for samples: {_entries(slowest.pending)} were "
        "given to them and not acknowledged: they have to acknowledge or save a checkpoint, or one of them died a "
        "moment ago",
    )


def _holding(now: Situation) -> list[Trainers]:
    return [each for each in now.trainers if each.living and each.holds]


def _slowest(now: Situation) -> Trainers:
    return max(_holding(now), key=lambda each: ((each.waits or 0.0) < HELD_UP, each.lag_bytes, each.pending))


def _is_full(now: Situation) -> bool:
    """Return True if producers wait for room, rather than trainers for producers."""
    return now.waiting > 0 or now.room > FULL


def _slow_group(now: Situation) -> Verdict | None:
    """One group holds what another one waits for: nothing new is made before the slower one has read the old."""
    if not _is_full(now) or not _holding(now):
        return None
    slowest = _slowest(now)
    waiting = [each for each in _starved(now) if each.group != slowest.group]
    if not waiting:
        return None
    most = max(waiting, key=lambda each: each.waits or 0.0)
    return Verdict(
        "slow group",
        f"{_waiting(most)} for group {slowest.group}, which is slower: the budget is full of what it has yet to read, "
        f"and producers wait for room{_part(now.room)}. A larger budget evens out a while (penstock produce --budget). "
        f"A group that stays slower needs a stream of its own (--stream), or is dropped: penstock groups drop "
        f"{now.stream} {slowest.group}",
    )


def _waiting(group: Trainers) -> str:
    return f"trainers of {group.group} wait{_part(group.waits or 0.0)}"


def _part(share: float) -> str:
    return f" {share:.0%} of their time".replace("%", " %") if share else ""


def _slow_trainers(now: Situation) -> Verdict | None:
    living = _holding(now)
    if not _is_full(now) or not living:
        return None
    slowest = _slowest(now)
    also = f", of {len(living)} groups the one furthest behind" if len(living) > 1 else ""
    return Verdict(
        "trainers",
        f"producers wait for trainers: the budget is full ({readable_bytes(now.held_bytes)} of "
        f"{readable_bytes(now.budget_bytes)}) and group {slowest.group}{also} sets the pace; more workers would change "
        "nothing",
    )


def _starving(now: Situation) -> Verdict | None:
    waiting = _starved(now)
    if not waiting or now.is_all_made:
        return None
    most = max(waiting, key=lambda each: each.waits or 0.0)
    part = _waiting(most)
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
            f"penstock worker --auto {ALLOWED}",
        )
    if now.idle > IDLE:
        idle = f"{now.idle:.0%}".replace("%", " %")
        return Verdict(
            "jobs",
            f"{part}, and workers have no job for {idle} of theirs: plan epochs further ahead, or in smaller shards",
            "penstock produce ... --ahead 2",
        )
    if now.wished is None or not now.worker_rate:
        return Verdict("producers", f"{part} for producers, who have not said yet how fast they are: look again soon")
    more, took = now.wished - now.workers, _milliseconds(1 / now.worker_rate)
    if more <= 0:
        return Verdict("producers", f"{part} for producers, and as many as should do are at work: they may have begun "
                       f"a moment ago, or share too few cores; a sample takes a worker {took}")  # fmt: skip
    if not is_tellable(now.wished, now.workers):
        return Verdict(
            "producers",
            f"{part} for producers: more workers would do, more than can be told (one takes {took} for a sample)",
            f"penstock worker --auto {ALLOWED}",
        )
    if more <= MANY:
        return Verdict(
            "producers", f"{part} for producers: {more} more worker{_s(more)} would do (one takes {took} for a sample)",
            f"penstock worker --processes {more} {ALLOWED}",
        )  # fmt: skip
    return Verdict(
        "producers",
        f"{part} for producers: a sample takes a worker {took}, and {more} more workers would do, on several hosts; or "
        "a faster transform",
        f"penstock worker --auto {ALLOWED}",
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"


def _nothing_made(now: Situation) -> Verdict | None:
    if now.has_epochs or now.is_all_made:
        return None
    return Verdict("nothing made", "it has no epoch that could be read: start a producer",
                   f"penstock produce ... --stream {now.stream}")  # fmt: skip


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
