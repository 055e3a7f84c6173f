"""Whose entries may be taken over: a pure plan from what was seen pending, on the watcher's own clock.

An entry is taken only if the same holder was seen not to renew it for a whole lease; idle times alone prove nothing,
since a stopped server ages all of them at once (design.md 5.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock_common.stream.entries import Pending
from penstock_common.stream.keys import RELEASED

RENEWED_BELOW = 0.5
"""An idle time that grew by less than this part of the time between two looks was reset in between."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """An entry as last seen, and since when it has been seen unrenewed."""

    holder: str
    idle_ms: int
    at_s: float
    since_s: float


Key = tuple[int, int, bytes]
"""(partition, epoch, entry id)."""


def plan_reclaim(
    seen: dict[Key, Sighting], pending: Iterable[tuple[Key, Pending]], me: str, now_s: float, lease_s: float
) -> tuple[dict[Key, Sighting], list[tuple[Key, Pending]]]:
    """(what to remember for the next look, what to claim now). ``pending`` is everything pending of the group."""
    remembered: dict[Key, Sighting] = {}
    claims: list[tuple[Key, Pending]] = []
    for key, entry in pending:
        if entry.member == me:
            continue
        # 1. handed back on purpose: free for anyone at once
        if entry.member == RELEASED:
            claims.append((key, entry))
            continue
        # 2. a new sighting, another holder, or one that renewed: the lease starts anew on this clock
        before = seen.get(key)
        since = now_s
        if before is not None and before.holder == entry.member and not _was_renewed(before, entry, now_s):
            since = before.since_s
        # 3. unrenewed for a whole lease
        if now_s - since >= lease_s:
            claims.append((key, entry))
            continue
        remembered[key] = Sighting(entry.member, entry.idle_ms, now_s, since)
    return remembered, claims


def _was_renewed(before: Sighting, entry: Pending, now_s: float) -> bool:
    elapsed_ms = (now_s - before.at_s) * 1000
    return entry.idle_ms < before.idle_ms + elapsed_ms * RENEWED_BELOW
