"""The roster of each partition: groups, members, epochs, replay leases, bytes; and joining, renewing, leaving.

`forgetting` drops groups and lets them read again. The consumer plans whose leases may be claimed, the producer what
may be deleted.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

from redis.exceptions import ResponseError

from penstock_common.errors import (
    EpochsReleased,
    GroupBusy,
    GroupKindMismatch,
    GroupNotFound,
    MemberReplaced,
    PenstockError,
    ReplayTruncated,
)
from penstock_common.hints import did_you_mean
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import (
    Arg,
    Client,
    ask_all,
    decoded,
    is_script_error,
    ms_of,
    readable,
    run_script,
    run_scripts,
    server_ms,
)
from penstock_common.stream.keys import PartitionKeys, is_name
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.ranges import parse_ranges
from penstock_common.stream.streams import Stream, require_there

_CLOSE_EPOCH_FOR_GROUP = load_script("close_epoch_for_group")
_REOPEN_EPOCH_FOR_GROUP = load_script("reopen_epoch_for_group")
_EXPIRE_SILENT = load_script("expire_silent")
_FORGET_CONSUMERS = load_script("forget_consumers")
_HEARTBEAT = load_script("heartbeat")
_JOIN_GROUP = load_script("join_group")
_LEASE_REPLAY = load_script("lease_replay")
_LEAVE_GROUP = load_script("leave_group")
_RESTORE_GROUP = load_script("restore_group")

SHARED, ORDERED = "shared", "ordered"
QUIET_MS = 5000
"""A member renews every second. After a silence this long, an ordered group may change its ranks."""
UNSEEN_MS = 10_000
"""A member renews at least every two seconds. After a silence this long it is shown as dead. It loses nothing, because
only its lease decides."""

Held = Mapping[int, Sequence[bytes]]
"""Epoch -> ids of the entries that a member holds in one partition."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group as a partition knows it."""

    first: int
    """The first epoch that it reads."""
    declared: bool
    """Whether it was declared. A declared group holds data until it is dropped."""
    holds: bool
    """Whether the stream keeps for it what it has not read."""
    seen_ms: int
    """The server's time of its last heartbeat."""
    read: int
    """The highest epoch that it read and that is released by now, or -1."""
    lost: tuple[int, int] | None
    """Epochs that were released or trimmed before it had read them, while it held no data."""
    kind: str = SHARED
    """The kind, ``shared`` or ``ordered``, which never changes."""
    world: int = 0
    """The ranks of an ordered group, or 0 before the first one joined."""
    batch: int = 0
    """The samples in a rank's batch, in an ordered group."""


@dataclass(frozen=True, slots=True)
class IdleReport:
    """The report of a member whose loop waits for a batch, sent with its last heartbeat."""

    since_ms: int
    """The server's time since which it waits."""
    handed_bytes: int
    """The payload bytes that its loop was given and has not acknowledged."""


@dataclass(frozen=True, slots=True)
class Roster:
    """A partition's roster at one moment."""

    generation: str
    """A number that changes when a group joins or leaves. A trim that was planned for an older number is refused."""
    groups: dict[str, GroupRecord] = field(default_factory=dict)
    members: dict[tuple[str, str], int] = field(default_factory=dict)
    """(group, member) -> the server's time of its last renewal, in ms."""
    incarnations: dict[tuple[str, str], str] = field(default_factory=dict)
    """(group, member) -> the process that has the name; see `presence`."""
    idle: dict[tuple[str, str], IdleReport] = field(default_factory=dict)
    """(group, member) -> the report of a member whose loop waits for a batch."""
    epochs: dict[int, str] = field(default_factory=dict)
    """Epoch -> id of its manifest."""
    trimmed: frozenset[int] = frozenset()
    """Epochs with entries that were trimmed."""
    retiring: dict[int, str] = field(default_factory=dict)
    """Epochs whose release has begun. Their keys must be unlinked."""
    retired: tuple[tuple[int, int], ...] = ()
    """Ranges of the epochs whose release took them off this roster. An epoch that the server lost is in none."""
    closed: frozenset[tuple[str, int]] = frozenset()
    """Pairs (group, epoch) of groups that are done with the epoch."""
    pinned: frozenset[int] = frozenset()
    """Epochs that an operator keeps."""
    replays: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Replay token -> (epoch, the server's time when its lease ends, in ms)."""
    epoch_bytes: dict[int, int] = field(default_factory=dict)
    bytes: int = 0
    """The payload bytes that the partition holds."""
    waiting: dict[tuple[int, int], WaitingWriter] = field(default_factory=dict)
    """(epoch, shard) -> its writer, if it waits for quota."""

    def unacknowledged_by(self, epoch: int) -> dict[str, GroupRecord]:
        """Return the groups that hold data, read the epoch, and have not acknowledged all of it."""
        return {
            name: group
            for name, group in self.groups.items()
            if group.holds and group.first <= epoch and (name, epoch) not in self.closed
        }


def merge_rosters(rosters: Sequence[Roster]) -> Roster:
    """Return the first partition's roster with the groups, pins and replays of all: what no partition forgot.

    A group has closed an epoch only if it has on each roster that has both.
    """
    groups: dict[str, GroupRecord] = {}
    for roster in rosters:
        for name, group in roster.groups.items():
            groups[name] = group if name not in groups or group.holds else groups[name]
    closed = {
        (name, epoch)
        for name, epoch in {pair for roster in rosters for pair in roster.closed}
        if all((name, epoch) in roster.closed for roster in rosters if name in roster.groups and epoch in roster.epochs)
    }
    return replace(
        rosters[0],
        groups=groups,
        closed=frozenset(closed),
        pinned=frozenset(epoch for roster in rosters for epoch in roster.pinned),
        replays={token: held for roster in rosters for token, held in roster.replays.items()},
    )


def load_roster(client: Client, partition: PartitionKeys) -> Roster:
    """Read the roster of a partition."""
    return parse_roster(client, partition, client.hgetall(partition.roster))


@readable(lambda client, partition, group: partition.roster)
def find_group(client: Client, partition: PartitionKeys, group: str) -> GroupRecord | None:
    """Return a group's record, or None if the roster does not have it. The rest of the roster is not read."""
    record: bytes | None = client.hget(partition.roster, f"g:{group}")
    return None if record is None else _group(record.decode())


def fetch_rosters(client: Client, stream: Stream) -> tuple[int, list[dict[bytes, bytes]]]:
    """Return the server's time in ms, and the roster of each partition, in one round trip."""
    rosters = [("HGETALL", partition.roster) for partition in stream.partitions]
    now, *replies = ask_all(client, [("TIME",), *rosters])
    return ms_of(now), replies


def known_groups(client: Client, stream: Stream) -> list[str]:
    """Return the names of the groups that any roster knows. A server that came back older may have lost some."""
    _, replies = fetch_rosters(client, stream)
    rosters = [parse_roster(client, *one) for one in zip(stream.partitions, replies, strict=True)]
    return sorted({name for roster in rosters for name in roster.groups})


@readable(lambda client, partition, reply: partition.roster)
def parse_roster(client: Client, partition: PartitionKeys, reply: dict[bytes, bytes]) -> Roster:
    """Return the roster of a partition from the fields of its key, by their one-letter kinds."""
    kinds: defaultdict[bytes, dict[bytes, bytes]] = defaultdict(dict)
    for name, value in reply.items():  # most have numbers of retained epochs, which need no decoding
        kinds[name[:2]][name[2:]] = value
    members = {
        (name.partition(":")[0], name.partition(":")[2]): json.loads(value)
        for name, value in decoded(kinds[b"m:"]).items()
    }
    groups = decoded(kinds[b"g:"])
    for named in (*groups, *(part for who in members for part in who)):
        if not is_name(named):  # names are in commands that people paste
            raise ValueError(f"{named!r:.80} is no name of a group or member")
    closed = (name.rpartition(b":") for name in kinds[b"d:"])
    waiting = decoded(kinds[b"w:"])
    return Roster(
        generation=reply.get(b"gen", b"0").decode(),
        groups={name: _group(value) for name, value in sorted(groups.items())},
        members={who: int(value["seen"]) for who, value in members.items()},
        incarnations={who: str(value.get("inc", "")) for who, value in members.items()},
        idle={who: IdleReport(int(v["idle"]), int(v["handed"])) for who, v in members.items() if "idle" in v},
        epochs=dict(sorted((int(name), value.decode()) for name, value in kinds[b"e:"].items())),
        trimmed=frozenset(map(int, kinds[b"t:"])),
        retiring={int(name): value.decode() for name, value in kinds[b"x:"].items()},
        retired=tuple(parse_ranges(reply.get(b"retired", b"").decode())),
        closed=frozenset((name.decode(), int(epoch)) for name, _, epoch in closed),
        pinned=frozenset(map(int, kinds[b"p:"])),
        replays={name: _replay(value) for name, value in decoded(kinds[b"r:"]).items()},
        epoch_bytes={int(name): int(value) for name, value in kinds[b"b:"].items()},
        bytes=int(reply.get(b"bytes", 0)),
        waiting=parse_waiting(waiting, server_ms(client, partition.roster)) if waiting else {},
    )


def _group(text: str) -> GroupRecord:
    value = json.loads(text)
    lost = value.get("lost")
    return GroupRecord(
        first=int(value["first"]),
        declared=bool(value["declared"]),
        holds=bool(value["holds"]),
        seen_ms=int(value["seen"]),
        read=int(value.get("read", -1)),
        lost=(int(lost[0]), int(lost[1])) if lost else None,
        kind=value["kind"],
        world=int(value.get("world", 0)),
        batch=int(value.get("batch", 0)),
    )


def _replay(text: str) -> tuple[int, int]:
    value = json.loads(text)
    return int(value["epoch"]), int(value["till"])


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The settings that make a member one rank of an ordered group."""

    rank: int
    world: int
    """The number of ranks. 0 declares an ordered group, whose first rank sets it."""
    batch: int
    """The samples in a rank's batch."""


_NO_ORDER = RankOrder(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Membership:
    """A member of a group, with all that a script on rosters needs to know. With member '' it is the group alone."""

    stream: Stream
    group: str
    member: str
    incarnation: str
    order: RankOrder | None = None
    """The settings of a rank, or None in a shared group."""
    is_succeeded: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)
    """Whether another loader of this process has taken the member's name, or is taking it now."""

    @property
    def kind(self) -> str:
        """The kind of the group, or '' if it is only declared and may be of any kind."""
        return ORDERED if self.order is not None else SHARED if self.member else ""


def rank_member(rank: int) -> str:
    """Return the member name of a rank."""
    return f"rank-{rank}"


def join_group(
    client: Client,
    who: Membership,
    *,
    first: int = 0,
    declared: bool = False,
    force: bool = False,
    quiet_ms: int = QUIET_MS,
) -> int:
    """Write group and member on every partition's roster. Returns the first epoch that the group reads.

    A late group starts at the first epoch that is still whole in every partition. Raises EpochsReleased if it comes
    back after it lost epochs, unless ``force``; GroupKindMismatch; GroupBusy if an ordered group of another world size
    has members that were seen within ``quiet_ms``. After an error no roster has changed.
    """
    if len(who.stream.partitions) > 1:  # a server that came back older may know another group of this name
        args = _join_args(who, first, [declared, False, force], quiet_ms)
        looks = [([partition.roster], [*args, 1]) for partition in who.stream.partitions]
        for answer, *facts in run_scripts(client, _JOIN_GROUP, looks):
            if answer != b"joined":
                raise _refusal(who, answer, facts)
    answers = [_join(client, who, p, first, [declared, False, force], quiet_ms) for p in who.stream.partitions]
    highest = max(answers)
    if min(answers) < highest:
        for partition in who.stream.partitions:
            _join(client, who, partition, highest, [declared, True, force], quiet_ms)
    require_there(client, who.stream, [partition.roster for partition in who.stream.partitions])
    return highest


def _join(
    client: Client, who: Membership, partition: PartitionKeys, first: int, flags: list[bool], quiet_ms: int
) -> int:
    args = _join_args(who, first, flags, quiet_ms)
    while True:
        epochs = load_roster(client, partition).epochs
        keys = [partition.roster]
        if who.order is None:
            keys += [partition.entries(epoch) for epoch in epochs]
        else:
            keys += [partition.positions(epoch, who.group) for epoch in epochs]
        answer, *facts = run_script(client, _JOIN_GROUP, keys, [*args, 0, *map(str, epochs)])
        if answer == b"joined":
            return int(facts[0])
        if answer != b"epochs":
            raise _refusal(who, answer, facts)


def _join_args(who: Membership, first: int, flags: list[bool], quiet_ms: int) -> list[Arg]:
    declared, settle, force = map(int, flags)
    order = who.order or _NO_ORDER
    return [
        who.group, who.member, who.incarnation, declared, first, settle, force, who.kind, order.world, order.batch,
        quiet_ms,
    ]  # fmt: skip


def _refusal(who: Membership, answer: bytes, facts: list[Any]) -> PenstockError:
    """Return why a group could not be joined."""
    group, stream, order = who.group, who.stream.name, who.order or _NO_ORDER
    other = f"use another group name, or give this one up with `penstock groups drop {stream} {group}`"
    if answer == b"lost":
        return EpochsReleased(
            f"group {group!r} had stopped holding data and epochs {facts[0]}-{facts[1]} of {stream!r} "
            "were released before it read them: give start='remaining' to go on without them, start='earliest' or an "
            "epoch to read again, or use a new group"
        )
    if answer == b"kind":
        return GroupKindMismatch(
            f"group {group!r} of {stream!r} is {facts[0].decode()}, and a group stays what it was made as; this "
            f"trainer would read it {who.kind}: {other}{_declared_for(who)}"
        )
    if answer == b"batch":
        steps, rest = divmod(order.batch, facts[0])
        same = "" if rest else f" (gradients accumulated over {steps} batches keep the global batch)"
        return GroupKindMismatch(
            f"group {group!r} of {stream!r} is read in batches of {facts[0]}, this trainer's batch_size is "
            f"{order.batch}: positions count whole batches, so give batch_size={facts[0]}{same}; or {other}. Another "
            "group begins at the start of an epoch"
        )
    named = ", ".join(name.decode() for name in facts[1:])
    return GroupBusy(
        f"group {group!r} of {stream!r} is read by {facts[0]} ranks, of which {named} are alive; world_size="
        f"{order.world} can only take over from there when they have stopped"
    )


def _declared_for(who: Membership) -> str:
    """Return how to declare a group for ranks, which is forgotten easily."""
    if who.order is None:
        return ""
    return f"; `penstock groups declare {who.stream.name} {who.group} --ordered` then declares one for ranks"


def restore_group(
    client: Client, partition: PartitionKeys, group: str, record: GroupRecord, closed: Iterable[int],
    member: str = "", incarnation: str = "", before: bytes = b"",
) -> bool:  # fmt: skip
    """Put a group, and a member of it, back on a roster that lost it, as the rosters of other partitions have it.

    Args:
        client: Control connection.
        partition: The partition that lost the group.
        group: The group's name.
        record: The group's record in another partition.
        closed: Epochs that the group has acknowledged as a whole.
        member: The member to restore, or '' for none.
        incarnation: Its incarnation.
        before: The roster's record of the member, which is replaced, or nothing.

    Returns:
        False if that record has changed, because another process has the name and lives.
    """
    fields: dict[str, Any] = {
        "kind": record.kind, "first": record.first, "declared": record.declared, "holds": record.holds,
    }  # fmt: skip
    fields |= {"read": record.read} if record.read >= 0 else {}
    fields |= {"lost": list(record.lost)} if record.lost else {}
    fields |= {"world": record.world, "batch": record.batch} if record.world else {}
    done = [str(epoch) for epoch in sorted(closed)]
    answer = 0
    while not answer:
        epochs = load_roster(client, partition).epochs
        keys = [partition.roster, *(partition.entries(epoch) for epoch in epochs)]
        args: list[Arg] = [group, json.dumps(fields), member, incarnation, before, len(done), *done, *map(str, epochs)]
        answer = run_script(client, _RESTORE_GROUP, keys, args)
    return answer > 0


REJOIN_SETTLE_S = 1.0
"""The time between two looks at the other rosters. One who drops a group is through with all of them by then."""
REJOIN_QUIET_S = QUIET_MS / 1000
"""The longer `REJOIN_SETTLE_S` if the roster names another process. A live one gives a heartbeat in this time."""
REJOIN_LOOK_S = 0.25
REJOIN_ALIVE_MS = 2500
"""A rank of another number of ranks that was seen more recently is at work. A member renews every two seconds."""


class Rejoining:
    """Puts a member back on rosters that lost it, or that name a process which had its name before.

    A server that came back older does that. At two looks another partition's roster must know this process as the
    member: a group that was dropped is on no roster, and a process that took over the name is on all. A process that
    the roster names must give no heartbeat between the looks. Of two that live, the one that a lower partition names
    goes on.

    If every server is known to be another one than at the join, all may have lost the process. Then it joins again if
    the roster still has its group. Of two processes that live, the one that the roster names goes on.

    A roster may be of before the number of ranks changed. It takes the new number if its server is known to be another
    one than at the join, and no rank that it names lives.
    """

    def __init__(
        self,
        client: Client,
        who: Membership,
        clock: Callable[[], float] = time.monotonic,
        is_replaced: Callable[[PartitionKeys], bool] = lambda _: False,
    ) -> None:
        """``is_replaced`` tells whether the server of a partition is another run than at the join."""
        self._client, self._who, self._clock, self._is_replaced = client, who, clock, is_replaced
        self._looked: dict[int, tuple[bytes, float]] = {}
        """Partition -> the record of the member that its roster had at the first look, and when that was."""

    def is_back(self, partition: PartitionKeys) -> bool | None:
        """Return whether the member is on a partition's roster again, or None if another look is due."""
        who = self._who
        rosters = {one.number: load_roster(self._client, one) for one in who.stream.partitions if one != partition}
        records = {number: roster.groups[who.group] for number, roster in rosters.items() if self._is_known(roster)}
        if not (is_known := bool(records)):
            records = self._own_record(partition)
        if not records:
            self._looked.pop(partition.number, None)
            return False
        record = records[min(records)]
        if (is_older := self._has_other_ranks(partition, record)) and not self._is_replaced(partition):
            return False
        named: bytes = self._client.hget(partition.roster, f"m:{who.group}:{who.member}") or b""
        before, since_s = self._looked.get(partition.number, (None, 0.0))
        is_back = bool(named) and json.loads(named)["inc"] == who.incarnation  # another thread was first
        has_changed = before is not None and named != before
        lives = has_changed and bool(named)  # else another rank that joined again has removed it
        is_first_look = before is None or (has_changed and not named)
        if not is_back and (is_first_look or (lives and min(records) < partition.number)):
            self._looked[partition.number] = named, self._clock()
            return None
        quiet_s = REJOIN_QUIET_S if named or is_older else REJOIN_SETTLE_S
        if not (is_back or lives) and self._clock() - since_s < quiet_s:
            return None
        self._looked.pop(partition.number, None)
        if is_older and (lives or not self._change_ranks(partition, record)):
            return None if min(records) < partition.number else False
        closed = {epoch for roster in rosters.values() for group, epoch in roster.closed if group == who.group}
        seen = before or b""
        if not restore_group(self._client, partition, who.group, record, closed, who.member, who.incarnation, seen):
            return False
        # In an older roster the group may have stopped holding data.
        _join(self._client, who, partition, record.first, [False, False, is_known], REJOIN_ALIVE_MS)
        return True

    def _own_record(self, partition: PartitionKeys) -> dict[int, GroupRecord]:
        """Return the group on this partition's own roster, if every server is another one than at the join."""
        record = self._group_of(load_roster(self._client, partition))
        if record is None or not all(map(self._is_replaced, self._who.stream.partitions)):
            return {}
        return {partition.number: record}

    def _is_known(self, roster: Roster) -> bool:
        """Return whether a roster knows this process as the member, and its number of ranks."""
        is_mine = roster.incarnations.get((self._who.group, self._who.member)) == self._who.incarnation
        return is_mine and self._group_of(roster) is not None

    def _group_of(self, roster: Roster) -> GroupRecord | None:
        """Return the group of this kind and number of ranks, or None."""
        record, order = roster.groups.get(self._who.group), self._who.order
        is_same = (
            record is not None and record.kind == self._who.kind and (order is None or order.world == record.world)
        )
        return record if is_same else None

    def _has_other_ranks(self, partition: PartitionKeys, record: GroupRecord) -> bool:
        here = load_roster(self._client, partition).groups.get(self._who.group)
        return here is not None and here.world not in (0, record.world)

    def _change_ranks(self, partition: PartitionKeys, record: GroupRecord) -> bool:
        """Join with this number of ranks, as at the first time. Return False if a rank of the others lives."""
        try:
            _join(self._client, self._who, partition, record.first, [False, False, True], REJOIN_ALIVE_MS)
        except GroupBusy:
            return False
        return True


def rejoin(
    client: Client,
    who: Membership,
    partition: PartitionKeys,
    is_replaced: Callable[[PartitionKeys], bool] = lambda _: False,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Put a member back on a roster that lost it, and wait for that. Returns False if it must end; see `Rejoining`."""
    rejoining = Rejoining(client, who, is_replaced=is_replaced)
    while (is_back := rejoining.is_back(partition)) is None:
        sleep(REJOIN_LOOK_S)
    return is_back


def beat(
    client: Client, who: Membership, partition: PartitionKeys, held: Held, *, idle_ms: int = -1, handed_bytes: int = 0
) -> dict[int, list[bytes]]:
    """Send a heartbeat: renew group, member and the given entries. Returns, by epoch, the ids that it no longer holds.

    ``idle_ms`` is how long the member's loop has waited for a batch, and ``handed_bytes`` what it was given and has not
    acknowledged. -1 means that it does not wait.

    Raises MemberReplaced if another loader took the name, GroupNotFound if the group was dropped or flushed.
    """
    return beat_each(client, who, [(partition, held)], idle_ms=idle_ms, handed_bytes=handed_bytes)[0]


def beat_each(
    client: Client,
    who: Membership,
    held: Sequence[tuple[PartitionKeys, Held]],
    *,
    idle_ms: int = -1,
    handed_bytes: int = 0,
) -> list[dict[int, list[bytes]]]:
    """Send the heartbeats of several partitions, in one round trip to each server. See `beat`."""
    calls = [_with_ids(who, partition, ids, [idle_ms, handed_bytes]) for partition, ids in held]
    try:
        answers = run_scripts(client, _HEARTBEAT, calls)
    except ResponseError as error:
        if is_script_error(error, "replaced"):
            raise replaced(who) from None
        if is_script_error(error, "gone"):
            require_there(client, who.stream)
            raise GroupNotFound(
                f"group {who.group!r}, or its member {who.member!r}, is no longer on the roster of "
                f"{who.stream.name!r}: it was dropped, not heard of for 10 minutes, or the server lost its data; "
                "start again"
            ) from None
        raise
    return [dict(zip(ids, lost, strict=True)) for (_, ids), lost in zip(held, answers, strict=True)]


def replaced(who: Membership) -> MemberReplaced:
    """Return the error of a member whose name another loader took, in this process or in another one."""
    is_here = who.is_succeeded.is_set()
    what = "another loader of this process joined group" if is_here else "another process joined group"
    named, advice = f"member {who.member!r}", "give each process its own member name"
    if who.order is not None:
        named = repr(who.member)
        advice = (
            "a rank is one loader, so close the older one first"
            if is_here
            else "each rank is one process; if another notebook or job uses this group by mistake, give it another one"
        )
    elif is_here:
        advice = (
            "to share the group's batches, make each loader in the thread that reads it, or give each a name of its "
            "own (tuning=penstock.Tuning(member=...))"
        )
    return MemberReplaced(f"{what} {who.group!r} as {named}: this one stops; {advice}")


def leave(client: Client, who: Membership, partition: PartitionKeys, held: Held) -> bool:
    """Return the given entries to the group and leave. Nothing of the member stays behind.

    Returns False if another process has the name, or no process.
    """
    keys, args = _with_ids(who, partition, held)
    was_there = bool(run_script(client, _LEAVE_GROUP, keys, args))
    forget_consumers(client, partition, who.group, who.member)
    return was_there


def forget_consumers(client: Client, partition: PartitionKeys, group: str, member: str) -> None:
    """Remove the Redis consumer of a member that is gone, unless it still holds entries, which others will claim."""
    entries = [partition.entries(epoch) for epoch in load_roster(client, partition).epochs]
    if entries:
        run_script(client, _FORGET_CONSUMERS, entries, [group, member])


def _with_ids(
    who: Membership, partition: PartitionKeys, held: Held, said: Sequence[Arg] = ()
) -> tuple[list[str], list[Arg]]:
    args: list[Arg] = [who.group, who.member, who.incarnation, *said]
    for ids in held.values():
        args += [len(ids), *ids]
    return [partition.roster, *(partition.entries(epoch) for epoch in held)], args


def close_for_group(client: Client, stream: Stream, group: str, epoch: int) -> None:
    """Note in every partition that the group is done with the epoch."""
    for partition in stream.partitions:
        run_script(client, _CLOSE_EPOCH_FOR_GROUP, [partition.roster], [group, epoch])


def reopen_for_group(client: Client, stream: Stream, group: str, epoch: int) -> None:
    """Note in every partition that the group is not done with the epoch any more."""
    for partition in stream.partitions:
        run_script(client, _REOPEN_EPOCH_FOR_GROUP, [partition.roster], [group, epoch])


@readable(lambda partition, reply, before_ms: partition.roster)
def find_silent(partition: PartitionKeys, reply: Mapping[bytes, bytes], before_ms: int) -> dict[bytes, bytes]:
    """Return the roster's fields of members, replays and undeclared groups that were not seen since that server time.

    The clock may have jumped: a field that is the same at a second look, some heartbeats later, is really silent.
    """
    found = {}
    for name, value in reply.items():
        if name[:2] in (b"m:", b"o:", b"r:"):
            is_silent = int(json.loads(value)["till" if name[:2] == b"r:" else "seen"]) < before_ms
        elif name[:2] == b"g:":
            group = _group(value.decode())
            is_silent = group.holds and not group.declared and group.seen_ms < before_ms
        else:
            continue
        if is_silent:
            found[name] = value
    return found


def expire_silent(
    client: Client, partition: PartitionKeys, silent_ms: int, looked: Mapping[bytes, bytes] | None = None
) -> list[str]:
    """Remove members and replays that were not seen for ``silent_ms``, and notes of waiting writers that died.
    ``looked`` is what `find_silent` found before: a field that changed since belongs to a live process. None means
    one look only. A server that was down saw no heartbeats, so nothing expires until it was up for that long. Returns
    the undeclared groups that stop holding data.
    """
    if int(client.info("server", at=partition.roster)["uptime_in_seconds"]) * 1000 < silent_ms:
        return []
    args: list[Arg] = [silent_ms, STALE_MS, int(looked is not None)]
    args += [part for field in (looked or {}).items() for part in field]
    return [name.decode() for name in run_script(client, _EXPIRE_SILENT, [partition.roster], args)]


def hold_for_replay(
    client: Client, partition: PartitionKeys, token: str, epoch: int, ttl_ms: int, *, renew: bool
) -> bool:
    """Take or renew a replay's lease on an epoch. False if the epoch is gone, or the lease had lapsed."""
    return bool(run_script(client, _LEASE_REPLAY, [partition.roster], [token, epoch, ttl_ms, int(renew)]))


def end_replay(client: Client, partition: PartitionKeys, token: str) -> None:
    """End a replay's lease."""
    client.hdel(partition.roster, f"r:{token}")


def require_group(client: Client, stream: Stream, group: str) -> GroupRecord:
    """Return the group's record in the first partition. Raises GroupNotFound, which names the existing groups."""
    roster = load_roster(client, stream.partitions[0])
    if group not in roster.groups:
        raise unknown_group(stream.name, group, roster.groups)
    return roster.groups[group]


def unknown_group(stream: str, group: str, groups: Iterable[str]) -> GroupNotFound:
    """Return the error for a missing group, which names the existing ones."""
    there = ", ".join(groups) or "none"
    return GroupNotFound(
        f"stream {stream!r} has no group {group!r}; groups there: {there}{did_you_mean(group, groups)}"
    )


_NOTE_WAIT = load_script("note_wait")

RENEW_S = 1.0
"""The time between two renewals of a waiting writer's note."""
STALE_MS = 10_000
"""A note that is older belongs to a writer that died, or to a server that stood still. It does not count."""

Why = Literal["budget", "memory", "folder"]
"""The cause of a wait: a full budget, server memory that keys of others take, or a full folder of segments."""
WHYS: Final[tuple[Why, ...]] = get_args(Why)


@dataclass(frozen=True, slots=True)
class WaitingWriter:
    """One writer that waits for quota."""

    since_ms: int
    """The server's time when the wait began."""
    seen_ms: int
    """The server's time of its last note."""
    need_bytes: int
    """The payload bytes of the block that waits."""
    held_bytes: int
    """The payload bytes that the partition held at its last look."""
    why: Why
    is_next: bool
    """Whether it has the lowest unfinished shard of its partition: then only readers can free quota."""


def note_wait(
    client: Client, partition: PartitionKeys, epoch: int, shard: int, *, waited_s: float, need_bytes: int,
    held_bytes: int, why: Why, is_next: bool,
) -> None:  # fmt: skip
    """Note, or note again, that the writer of that shard waits for quota, and since when."""
    args = [epoch, shard, int(waited_s * 1000), need_bytes, held_bytes, why, int(is_next)]
    run_script(client, _NOTE_WAIT, [partition.roster], args)


def end_wait(client: Client, partition: PartitionKeys, epoch: int, shard: int) -> None:
    """Remove the note: the writer continues, or has stopped waiting."""
    client.hdel(partition.roster, f"w:{epoch}:{shard}")


def parse_waiting(notes: Mapping[str, str], now_ms: int) -> dict[tuple[int, int], WaitingWriter]:
    """Return (epoch, shard) -> writer, of the roster's notes that are not stale."""
    waiters: dict[tuple[int, int], WaitingWriter] = {}
    for name, text in notes.items():
        epoch, _, shard = name.partition(":")
        value = json.loads(text)
        if now_ms - int(value["seen"]) <= STALE_MS:
            waiters[int(epoch), int(shard)] = WaitingWriter(
                since_ms=int(value["since"]),
                seen_ms=int(value["seen"]),
                need_bytes=int(value["need"]),
                held_bytes=int(value["held"]),
                why=value["why"],
                is_next=bool(value["next"]),
            )
    return waiters


# --- pins -------------------------------------------------------------------------------------------------------------


_PIN_EPOCH = load_script("pin_epoch")


def pin_epoch(client: Client, stream: Stream, epoch: int) -> bool:
    """Keep the epoch from release and trimming until it is unpinned. False if it was pinned before.

    Raises EpochNotFound, and ReplayTruncated if retention already removed entries of it, so that the epoch is no longer
    complete.
    """
    load_manifest(client, stream, epoch)
    made: list[PartitionKeys] = []
    for partition in stream.partitions:
        answer: bytes = run_script(client, _PIN_EPOCH, [partition.roster], [epoch])
        if answer in (b"gone", b"trimmed"):
            for one in made:
                client.hdel(one.roster, f"p:{epoch}")
            done = "released" if answer == b"gone" else "trimmed"
            raise ReplayTruncated(
                f"epoch {epoch} of {stream.name!r} is {done} already, so there is nothing whole to pin; pin an epoch "
                "before every group has read it, or while there is space"
            )
        if answer == b"pinned":
            made.append(partition)
    return bool(made)


def unpin_epoch(client: Client, stream: Stream, epoch: int) -> bool:
    """Leave the epoch to retention again. Returns whether it was pinned."""
    load_manifest(client, stream, epoch)
    return sum(int(client.hdel(partition.roster, f"p:{epoch}")) for partition in stream.partitions) > 0
