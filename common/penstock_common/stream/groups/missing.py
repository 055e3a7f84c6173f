"""The members that a group waits for: dead ones that hold entries, and ranks that have not joined.

A dead member that holds nothing delays nobody, however long it is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock_common.stream.commands import Client
from penstock_common.stream.entries import pending_members
from penstock_common.stream.groups.presence import Liveness, liveness_of
from penstock_common.stream.groups.roster import ORDERED, Roster, rank_member
from penstock_common.stream.keys import PartitionKeys

Missing = dict[tuple[str, str], Liveness]
"""The members, by (group, member)."""
SHOWN = 4


def missing_members(
    client: Client, partition: PartitionKeys, roster: Roster, groups: Iterable[str], now_ms: int
) -> Missing:
    """Return the missing members of these groups in a partition."""
    found: Missing = {}
    members = liveness_of([roster], now_ms)
    for name in sorted(groups):
        record = roster.groups[name]
        if record.kind == ORDERED:
            ranks = [(name, rank_member(rank)) for rank in range(record.world if record.holds else 0)]
            # an ordered group is done with what its slowest rank has acknowledged: a missing rank holds up all
            found |= {who: one for who in ranks if (one := members.get(who, Liveness())).is_silent}
            continue
        silent = {member: one for (group, member), one in sorted(members.items()) if group == name and one.is_silent}
        keys = [(partition, epoch) for epoch in roster.epochs if silent and (name, epoch) not in roster.closed]
        holding = pending_members(client, keys, name)
        found |= {(name, member): one for member, one in silent.items() if holding.get(member)}
    return found


def told_missing(missing: Missing) -> str:
    """Return the missing members for people; the first few by name."""
    each = [f"{member} of group {group} ({_told(one)})" for (group, member), one in missing.items()]
    return ", ".join(each[:SHOWN]) + (f" and {len(each) - SHOWN} more" if len(each) > SHOWN else "")


def _told(one: Liveness) -> str:
    if one.unseen_s is None:
        return "not there"
    return "its process has ended" if one.has_ended else f"{one.unseen_s:.0f} s ago"
