"""Snapshots: what is known of a stream, or of one of its partitions, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock_common.server.nodes import ReplicaState
from penstock_common.stream.commands import Client, ask_all, ms_of, readable
from penstock_common.stream.groups.presence import Liveness, is_returned
from penstock_common.stream.groups.roster import Roster, WaitingWriter, parse_roster
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import (
    parse_states,
)
from penstock_common.stream.reported_rates import ReportedRates
from penstock_common.stream.servers.suitability import ServerMemory
from penstock_common.stream.streams import Stream


@readable(lambda client, stream, epoch: stream.partitions[0].roster)
def held_bytes(client: Client, stream: Stream, epoch: int) -> tuple[int, bool]:
    """Return the payload bytes that the server holds of an epoch, and whether some were removed."""
    found = [client.hmget(partition.roster, f"b:{epoch}", f"t:{epoch}") for partition in stream.partitions]
    held = sum(int(nbytes or 0) for nbytes, _ in found)
    return held, not held or any(trimmed is not None for _, trimmed in found)


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """One member of a group, or under a name that `is_returned` the entries that members returned."""

    name: str
    liveness: Liveness
    pending_entries: int

    @property
    def is_silent(self) -> bool:
        """Return True if the member is dead, as far as its heartbeats show."""
        return self.liveness.is_silent and not is_returned(self.name)

    @property
    def is_live(self) -> bool:
        """Return True if it is a member, and not silent."""
        return not self.liveness.is_silent and not is_returned(self.name)


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """One rank of an ordered group in an epoch that the group has not finished."""

    rank: int
    epoch: int
    position: int
    """The position below which the rank is done, without what fills its last step from the epoch's start."""
    planned: int | None
    """The planned positions, or None while the epoch is open."""


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """One group, summed over partitions and the epochs that it has not finished."""

    name: str
    kind: str
    declared: bool
    holds: bool
    """Whether the stream keeps for it what it has not read."""
    lag_entries: int
    """Entries that were written and given to no member yet. In an ordered group, those with a sample that its rank has
    not acknowledged."""
    lag_samples: int
    lag_bytes: int
    lag_s: float
    """The age of the oldest such entry, or 0 without one."""
    pending_entries: int
    """Entries that were given to a member and not acknowledged."""
    redelivered_entries: int
    """Entries that were given out more than once, of the 100 oldest pending ones of each key."""
    dead_letters: int
    given_samples: int
    given_bytes: int
    members: tuple[MemberSnapshot, ...]
    world: int = 0
    """The ranks of an ordered group."""
    first_epoch: int = 0
    """The first epoch that it reads."""
    done_epochs: tuple[int, ...] = ()
    """The retained epochs that it is done with."""
    newest_done: int | None = None
    """The newest epoch that it is done with, retained or released."""
    ranks: tuple[RankSnapshot, ...] = ()
    lost: tuple[int, int] | None = None
    """The first and last epoch of which samples were released before it read them, while it held no data."""


@dataclass(frozen=True, slots=True)
class EpochSnapshot:
    """One retained epoch."""

    epoch: int
    state: str
    kind: str
    planned: int | None
    """The planned samples, or None while it is open."""
    committed: int
    """The committed samples, with the bad ones."""
    bad: int
    bytes: int
    read: Mapping[str, int]
    """Group -> samples of it that the group was given or is done with, for groups that read it."""
    is_trimmed: bool = False
    """Whether retention removed entries of it."""
    is_pinned: bool = False
    """Whether an operator keeps it."""


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """One server that holds keys of streams."""

    where: str
    """Its address without its password."""
    role: str
    """``master`` or ``slave`` in the words of the server, or '' while it does not answer."""
    memory: ServerMemory
    replicas: tuple[ReplicaState, ...]
    partitions: tuple[int, ...]
    """The stream's partitions on this server."""
    held_bytes: int = 0
    """The payload bytes of these partitions."""
    failure: str = ""
    """The reason why nothing else is known of it, or '' if it answered."""
    away_s: float = 0.0
    """The time for which it has not answered, as far as this process looked."""
    refusal: str = ""
    """The words in which it refuses writes because it cannot write its disk, or ''."""


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """One stream."""

    name: str
    id: str
    at_s: float
    """The time on this process's monotonic clock."""
    budget_bytes: int
    held_bytes: int
    next_epoch: int
    final: int | None
    """The planned number of epochs, or None if it is not known."""
    made_entries: int
    made_samples: int
    made_bytes: int
    epochs: tuple[EpochSnapshot, ...]
    groups: tuple[GroupSnapshot, ...]
    waiting: Mapping[tuple[int, int], WaitingWriter]
    """(epoch, shard) -> its writer, of those that wait for quota."""
    waited_s: float
    """The wait of the writer that has waited longest."""
    rates: ReportedRates
    memory: ServerMemory
    payload: str = "inline"
    """The place of payloads: ``inline``, or ``segments:`` and a folder."""
    replays: tuple[tuple[int, float], ...] = ()
    """(epoch, seconds until its lease ends) of each replay that holds an epoch."""
    now_ms: int = 0
    """The server's time."""
    servers: tuple[ServerSnapshot, ...] = ()
    is_deleting: bool = False
    """Whether a deletion of it began and did not end."""
    spare_bytes: int = 0
    """The bytes of spare files in its folder of segments, looked at while a writer waits for the folder."""


@dataclass(frozen=True, slots=True)
class PartitionSnapshot:
    """A partition at one moment."""

    roster: Roster
    first: Roster
    """The roster of the first partition. Groups join there first, so it has all groups and what they are done with."""
    now_ms: int
    """The time of the partition's server."""
    states: dict[int, str]
    """Epoch -> state of its manifest."""


def snapshot_partition(client: Client, stream: Stream, partition: PartitionKeys) -> PartitionSnapshot:
    """Read the facts. Raises DamagedKey."""
    begin = stream.partitions[0]
    commands = [("HGETALL", stream.keys.epochs), ("HGETALL", partition.roster), ("TIME",)]  # of the roster's server
    if partition != begin:
        commands.append(("HGETALL", begin.roster))
    states, roster, now, *others = ask_all(client, commands)
    own = parse_roster(client, partition, roster)
    first = parse_roster(client, begin, others[0]) if others else own
    return PartitionSnapshot(own, first, ms_of(now), parse_states(stream, states))
