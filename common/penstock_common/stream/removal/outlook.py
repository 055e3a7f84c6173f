"""The facts for admission and cleaning, in one round trip: groups, bytes held, epochs, the time."""

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
    """The roster of the first partition. Groups join there first, so it has all groups and what they are done with."""
    now_ms: int
    """The server's time."""
    states: dict[int, str]
    """Epoch -> state of its manifest."""


def look_around(client: Client, stream: Stream, partition: PartitionKeys) -> Outlook:
    """Read the facts. Raises DamagedKey."""
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
    """Return the server's time in ms, and the roster of each partition, in one round trip."""
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        for partition in stream.partitions:
            pipe.hgetall(partition.roster)
        now, *rosters = pipe.execute()
    return ms_of(now), rosters
