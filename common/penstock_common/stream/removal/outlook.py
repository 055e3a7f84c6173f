"""What making room, and tidying, begin with in one round trip: who is there, what is held, which epochs, the time."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import Roster, ms_of, parse_roster
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import parse_states
from penstock_common.stream.streams import Stream


@dataclass(frozen=True, slots=True)
class Outlook:
    """A partition at one moment."""

    roster: Roster
    first: Roster
    """Of the first partition: groups join there first, so it says what is settled and who has joined."""
    now_ms: int
    """Server time."""
    states: dict[int, str]
    """Epoch -> state of its manifest."""


def look_around(client: Client, stream: Stream, partition: PartitionKeys) -> Outlook:
    """Reads it. Raises DamagedKey."""
    begin = stream.partitions[0]
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(stream.keys.epochs)
        pipe.hgetall(partition.roster)
        if partition != begin:
            pipe.hgetall(begin.roster)
        now, states, *rosters = pipe.execute()
    own = parse_roster(client, partition, rosters[0])
    first = own if partition == begin else parse_roster(client, begin, rosters[1])
    return Outlook(own, first, ms_of(now), parse_states(stream, states))


def look_at_rosters(client: Client, stream: Stream) -> tuple[int, list[dict[bytes, bytes]]]:
    """Server time, ms, and then what each partition's roster holds, however many there are."""
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        for partition in stream.partitions:
            pipe.hgetall(partition.roster)
        now, *rosters = pipe.execute()
    return ms_of(now), rosters
