"""The other members of a group, as far as the end of an epoch depends on them: who holds entries, and who lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock_common.stream.entries import pending_members
from penstock_common.stream.groups.roster import UNSEEN_MS, Roster, load_roster

if TYPE_CHECKING:
    from penstock_consumer.shared.place import Place


def holders(place: Place, epoch: int) -> set[str]:
    """Names of other members that hold entries of an epoch."""
    keys = [(partition, epoch) for partition in place.stream.partitions]
    return {*pending_members(place.client, keys, place.who.group)} - {place.who.member}


def living(place: Place, since_ms: int) -> set[str]:
    """Names of members that gave a sign of life after a moment of the server's clock."""
    roster = load_roster(place.client, place.stream.partitions[0])
    return {name for (group, name), seen in roster.members.items() if group == place.who.group and seen > since_ms}


def count_living(roster: Roster, group: str) -> int:
    """Members of a group that were seen about as lately as the one seen last; at least one."""
    seen = [at for (name, _), at in roster.members.items() if name == group]
    return max(1, sum(at > max(seen) - UNSEEN_MS for at in seen))
