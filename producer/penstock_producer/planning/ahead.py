"""How far a production runs ahead of the trainers when it follows them: a pure rule, and what it is asked with.

Opening epochs is ``production``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.manifest import ABANDONED, retained_epochs
from penstock_common.stream.streams import Stream


def fewest_unread(epochs: Iterable[int], groups: Mapping[str, int], settled: frozenset[tuple[str, int]]) -> int:
    """Epochs that the group which is furthest has not settled, the one it reads included.

    ``groups``: name -> first epoch it reads, of the groups that hold data. By the furthest one, because it must not
    starve for another's sake; what the others have not read is bounded by the budget. Without a group: all epochs.
    """
    there = list(epochs)
    unread = [
        sum(epoch >= first and (group, epoch) not in settled for epoch in there) for group, first in groups.items()
    ]
    return min(unread, default=len(there))


def count_unread(client: Client, stream: Stream) -> int:
    """`fewest_unread` of the epochs that are there now; those that were released were read by everyone."""
    roster = load_roster(client, stream.partitions[0])
    groups = {name: group.first for name, group in roster.groups.items() if group.holds}
    epochs = [epoch for epoch, state in retained_epochs(client, stream).items() if state != ABANDONED]
    return fewest_unread(epochs, groups, roster.closed)
