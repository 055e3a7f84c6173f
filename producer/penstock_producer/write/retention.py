"""Retention: a policy as text and as a value, and the pure plans that say what may be removed.

``cleaner`` and ``trimmer`` carry the plans out. The text of a policy is part of the stream's meta.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadOption
from penstock_common.stream.entries import IndexRecord
from penstock_common.stream.groups.roster import Roster

FORMS = (
    "budget (keep all until space is needed), epochs:N (the newest N), time:DURATION as 90m, 24h or 7d, "
    "or bytes:SIZE as 500mb"
)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """A policy for epochs that every group has acknowledged.

    The byte budget comes first, and what a group has not acknowledged always stays.
    """

    text: str
    """The text that is stored. `parse_policy` makes this value of it."""
    epochs: int | None = None
    """The number of newest acknowledged epochs that are kept."""
    age_ms: int | None = None
    """The time for which an acknowledged epoch is kept after it was produced."""
    nbytes: int | None = None
    """The payload bytes of the newest acknowledged epochs that are kept."""


def parse_policy(text: str) -> RetentionPolicy:
    """Return the policy that a text describes.

    Args:
        text: ``budget``, ``epochs:N``, ``time:DURATION`` or ``bytes:SIZE``.

    Raises:
        BadOption: The text has none of these forms.

    Example:
        >>> parse_policy("epochs:3").epochs
        3
    """
    kind, _, amount = text.strip().lower().partition(":")
    if kind == "budget" and not amount:
        return RetentionPolicy("budget")
    if kind == "epochs" and re.fullmatch(r"\d{1,9}", amount):
        return RetentionPolicy(f"epochs:{int(amount)}", epochs=int(amount))
    if kind == "time" and (found := re.fullmatch(r"(\d{1,9})([smhd])", amount)):
        return RetentionPolicy(f"time:{amount}", age_ms=int(found[1]) * _SECONDS[found[2]] * 1000)
    if kind == "bytes" and (found := re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kmgt]?)b?", amount)):
        size = int(float(found[1]) * 1024 ** _POWERS[found[2]])
        return RetentionPolicy(f"bytes:{size}", nbytes=size)
    raise BadOption(f"retention {text!r} is not one of: {FORMS}")


MOST_KEPT = 1000
"""The most acknowledged epochs kept at once, whatever the policy. Each has keys of its own, which the byte budget does
not count.
"""


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """One epoch, as a partition's roster and its manifest describe it."""

    epoch: int
    state: str
    nbytes: int
    ended_ms: int = 0
    """The time when it was produced, by the server's clock. Only a policy of ages uses it."""


def is_acknowledged(roster: Roster, epoch: int) -> bool:
    """Return True if every group that holds data has acknowledged the epoch, and at least one has."""
    return not roster.unacknowledged_by(epoch) and any((name, epoch) in roster.closed for name in roster.groups)


def is_replayed(roster: Roster, epoch: int, now_ms: int) -> bool:
    """Return True if a replay's lease holds the epoch."""
    return any(held == epoch and till > now_ms for held, till in roster.replays.values())


def is_held(roster: Roster, epoch: int, now_ms: int) -> bool:
    """Return True if a pin or a replay's lease keeps the epoch, acknowledged or not."""
    return epoch in roster.pinned or is_replayed(roster, epoch, now_ms)


def is_free(fact: EpochFacts, roster: Roster) -> bool:
    """Return True if no group needs the epoch: all have acknowledged it, or it will never be complete."""
    return fact.state == "abandoned" or (fact.state == "produced" and is_acknowledged(roster, fact.epoch))


def plan_policy(policy: RetentionPolicy, facts: Iterable[EpochFacts], roster: Roster, now_ms: int) -> list[int]:
    """Return the epochs that the policy no longer keeps, oldest first. Held epochs stay, and count as kept."""
    most = MOST_KEPT if policy.epochs is None else min(policy.epochs, MOST_KEPT)
    plan: list[int] = []
    kept_bytes = 0
    newest_first = sorted((fact for fact in facts if is_free(fact, roster)), key=lambda fact: -fact.epoch)
    for newer, fact in enumerate(newest_first):
        kept_bytes += fact.nbytes
        is_old = policy.age_ms is not None and now_ms - fact.ended_ms > policy.age_ms
        is_beyond = policy.nbytes is not None and kept_bytes > policy.nbytes
        if (newer >= most or is_old or is_beyond) and not is_held(roster, fact.epoch, now_ms):
            plan.append(fact.epoch)
    return plan[::-1]


def plan_release(
    facts: Iterable[EpochFacts], roster: Roster, now_ms: int, need_bytes: int, most_bytes: float = math.inf
) -> list[int]:
    """Return the epochs to release, oldest first, until ``need_bytes`` are free. Abandoned epochs come first.

    Args:
        facts: The epochs of a partition.
        roster: The groups that may need them.
        now_ms: The server's time.
        need_bytes: Payload bytes to free.
        most_bytes: Payload bytes of the largest produced epoch that may be released.
    """
    plan: list[int] = []
    freed = 0
    for fact in sorted(facts, key=lambda fact: (fact.state != "abandoned", fact.epoch)):
        if freed >= need_bytes:
            break
        is_larger = fact.state != "abandoned" and fact.nbytes > most_bytes
        if is_free(fact, roster) and not is_larger and not is_held(roster, fact.epoch, now_ms):
            plan.append(fact.epoch)
            freed += fact.nbytes
    return plan


def trimming_groups(roster: Roster, epoch: int) -> list[str]:
    """Return the groups whose ledgers decide which entries of a running epoch may go; if empty, none may."""
    holding = [name for name, group in roster.groups.items() if group.holds and group.first <= epoch]
    return list(roster.unacknowledged_by(epoch)) or holding


def plan_trim(
    records: Iterable[IndexRecord],
    acknowledged: Sequence[NDArray[np.bool_]],
    need_bytes: int,
    base: int = 0,
    *,
    gone: Container[int] = (),
    gone_before: Container[int] | None = None,
) -> list[IndexRecord]:
    """Return entries that every group has acknowledged, in order, until ``need_bytes`` are free.

    Neighbours lie side by side in a server's memory. jemalloc gives 8 MB or more of freed memory in one piece back to
    the kernel at once, by its default settings. The next entries then need new pages, which costs as much as two
    copies. So the plan can leave out each entry whose neighbour goes with it.

    Args:
        records: Index records of one shard, in order.
        acknowledged: One array of bits per group, for the offsets from ``base`` on. Holes count as acknowledged.
        need_bytes: Payload bytes to free.
        base: Offset of the first bit.
        gone: The ends of entries that are removed.
        gone_before: Those ends that were removed long enough ago for other entries to have their memory.
            An entry directly behind any other removed entry then stays. None leaves out none.
    """
    plan: list[IndexRecord] = []
    freed, is_behind = 0, False
    for record in records:
        if freed >= need_bytes:
            break
        if record.end in gone:
            is_behind = gone_before is not None and record.end not in gone_before
        elif record.entry_id and not is_behind and all(_covers(bits, record, base) for bits in acknowledged):
            plan.append(record)
            freed += record.nbytes
            is_behind = gone_before is not None
        else:
            is_behind = False
    return plan


def _covers(bits: NDArray[np.bool_], record: IndexRecord, base: int) -> bool:
    part = bits[record.first - base : record.end - base]
    if len(part) < record.end - record.first:
        return False
    if record.holes:
        part = part.copy()
        part[np.array(record.holes) - record.first] = True
    return bool(part.all())
