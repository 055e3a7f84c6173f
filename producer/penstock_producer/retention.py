"""What may be deleted: pure plans from rosters, manifests and ledgers to epochs to release and entries to drop.

The janitor carries them out. Policy ``budget`` keeps everything until room is needed, then the oldest settled goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_common.stream.entries import Record
from penstock_common.stream.roster import Roster


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """What a partition's roster and a manifest say of one epoch."""

    epoch: int
    state: str
    nbytes: int


def owing_groups(roster: Roster, epoch: int) -> list[str]:
    """Groups for which the epoch is kept: they hold data, read it, and have not settled it."""
    return [
        name
        for name, group in roster.groups.items()
        if group.holds and group.first <= epoch and (name, epoch) not in roster.closed
    ]


def is_settled(roster: Roster, epoch: int) -> bool:
    """Settled by every group of the roster that holds data, and by one at least."""
    return not owing_groups(roster, epoch) and any(closed == epoch for _, closed in roster.closed)


def is_replayed(roster: Roster, epoch: int, now_ms: int) -> bool:
    """Whether a replay's lease holds the epoch."""
    return any(held == epoch and till > now_ms for held, till in roster.replays.values())


def plan_release(facts: Iterable[EpochFacts], roster: Roster, now_ms: int, need_bytes: int) -> list[int]:
    """Whole epochs to release, oldest first, until ``need_bytes`` are free; abandoned ones owe nothing to anyone."""
    plan: list[int] = []
    freed = 0
    for fact in sorted(facts, key=lambda fact: (fact.state != "abandoned", fact.epoch)):
        if freed >= need_bytes:
            break
        free = fact.state == "abandoned" or (fact.state == "produced" and is_settled(roster, fact.epoch))
        if free and not is_replayed(roster, fact.epoch, now_ms):
            plan.append(fact.epoch)
            freed += fact.nbytes
    return plan


def trimming_groups(roster: Roster, epoch: int) -> list[str]:
    """Groups whose ledgers decide which entries of a running epoch may go; empty = none may."""
    holding = [name for name, group in roster.groups.items() if group.holds and group.first <= epoch]
    return [name for name in holding if (name, epoch) not in roster.closed] or holding


def plan_trim(
    records: Iterable[Record], settled: Sequence[NDArray[np.bool_]], need_bytes: int, base: int = 0
) -> list[Record]:
    """Entries that every group has settled, in order, until ``need_bytes`` are free.

    ``settled`` has one array of bits per group, for the offsets from ``base`` on. Holes count as settled.
    """
    plan: list[Record] = []
    freed = 0
    for record in records:
        if freed >= need_bytes:
            break
        if record.entry_id and all(_covers(bits, record, base) for bits in settled):
            plan.append(record)
            freed += record.nbytes
    return plan


def _covers(bits: NDArray[np.bool_], record: Record, base: int) -> bool:
    part = bits[record.first - base : record.end - base]
    if len(part) < record.end - record.first:
        return False
    if record.holes:
        part = part.copy()
        part[np.array(record.holes) - record.first] = True
    return bool(part.all())
