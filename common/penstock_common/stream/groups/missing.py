"""The members that a group waits for: dead ones that hold entries, and ranks that have not joined.

A dead member that holds nothing delays nobody, however long it is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock_common.stream.commands import Client
from penstock_common.stream.entries import pending_members
from penstock_common.stream.groups.roster import ORDERED, UNSEEN_MS, Roster, rank_member
from penstock_common.stream.keys import PartitionKeys

Missing = dict[tuple[str, str], int | None]
"""(group, member) -> ms since it was seen, or None for one that left or never came."""
SHOWN = 4


def missing_members(
    client: Client, partition: PartitionKeys, roster: Roster, groups: Iterable[str], now_ms: int
) -> Missing:
    """Return the missing members of these groups in a partition."""
    found: Missing = {}
    for name in sorted(groups):
        record = roster.groups[name]
        if record.kind == ORDERED:
            found |= _missing_ranks(roster, name, record.world if record.holds else 0, now_ms)
            continue
        silent = {member: now_ms - seen for (group, member), seen in roster.members.items() if group == name}
        silent = {member: ms for member, ms in sorted(silent.items()) if ms > UNSEEN_MS}
        keys = [(partition, epoch) for epoch in roster.epochs if silent and (name, epoch) not in roster.closed]
        holding = pending_members(client, keys, name)
        found |= {(name, member): ms for member, ms in silent.items() if holding.get(member)}
    return found


def _missing_ranks(roster: Roster, group: str, world: int, now_ms: int) -> Missing:
    """Return the missing ranks: an ordered group waits for its slowest rank, so a missing one delays all."""
    seen = {rank_member(rank): roster.members.get((group, rank_member(rank))) for rank in range(world)}
    ages = {member: None if at is None else now_ms - at for member, at in seen.items()}
    return {(group, member): ms for member, ms in ages.items() if ms is None or ms > UNSEEN_MS}


def told_missing(missing: Missing) -> str:
    """Return the missing members for people; the first few by name."""
    each = [
        f"{member} of group {group} ({'not there' if ms is None else f'{ms / 1000:.0f} s ago'})"
        for (group, member), ms in missing.items()
    ]
    return ", ".join(each[:SHOWN]) + (f" and {len(each) - SHOWN} more" if len(each) > SHOWN else "")
