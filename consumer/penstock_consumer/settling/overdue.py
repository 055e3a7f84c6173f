"""Whether a training waits for itself: writers wait for room that its own unsettled batches take. A pure rule.

Design.md 5.8: when writers wait for what living members hold, the member is told with numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock_common.errors import CheckpointOverdue, TooLarge
from penstock_common.stream.servers.suitability import readable_bytes
from penstock_common.stream.watching.waiters import Waiter
from penstock_consumer.settling.circle import Circle, Who
from penstock_consumer.settling.handed import Amount
from penstock_consumer.settling.holds import GroupHold

WARN_SHARE = 0.5
"""Of the stream's budget, handed out and not settled: time to say so, while there is still room."""
PATIENCE_S = 3.0
"""A loop that waits so long for a batch, with nobody but itself to settle anything, will wait for ever."""
ELSEWHERE_S = 30.0
"""The same where another thread may be about to settle (a framework's step, a checkpoint being saved, 'manual')."""
SETTLED_MS = 1500
"""A writer that waited so long has seen what the janitor can free."""


@dataclass(frozen=True, slots=True)
class Jam:
    """A partition with writers that wait for room, as one member of one group finds it."""

    waiters: Sequence[Waiter]
    mine_bytes: int
    """Payload bytes of the entries this member holds; an entry goes only as a whole."""
    budget_bytes: int
    """The partition's."""
    has_others: bool
    """Whether another member, group or replay holds something too."""
    group: GroupHold | None = None
    """What all members of this group hold; only asked for after a long wait."""
    circle: Circle | None = None
    """Everyone who reads the partition, where all of them wait; only asked for after a long wait."""
    me: Who = ("", "")


def is_overdue(jam: Jam) -> bool:
    """Whether nothing but this member's settling can let the awaited writer go on.

    Only the lowest unfinished shard's writer counts: the others wait for it, not for us.
    """
    for waiter in jam.waiters:
        if not waiter.is_next or waiter.why == "folder" or waiter.seen_ms - waiter.since_ms < SETTLED_MS:
            continue  # a folder is filled by others too: it waits for a disk, and no larger budget helps
        # 1. what is held here would block it even if everybody else let go
        if jam.mine_bytes + waiter.need_bytes > jam.budget_bytes:
            return True
        # 2. nobody else holds anything, and settling makes room enough
        if not jam.has_others and jam.mine_bytes >= waiter.need_bytes:
            return True
    return False


def is_group_overdue(jam: Jam) -> bool:
    """Whether the members of this group together keep the awaited writer out, and this one no less than most.

    Another member may just be slow, so this is for long waits; and it is for those who hold much, not for one with
    little in hand: where all of them wait for each other, whoever holds most is told.
    """
    group = jam.group
    if group is None or not jam.mine_bytes or jam.mine_bytes * group.members < group.nbytes:
        return False
    for waiter in jam.waiters:
        lacking = waiter.held_bytes + waiter.need_bytes - jam.budget_bytes
        is_due = waiter.is_next and waiter.why == "budget" and waiter.seen_ms - waiter.since_ms >= SETTLED_MS
        if is_due and 0 < lacking <= group.freed_bytes:
            return True
    return False


def is_circle(jam: Jam) -> bool:
    """Whether all readers of the partition wait, what they were given is the room that lacks, and this one is told.

    Nobody else can do anything then, so no wait is too short to be sure; the one told is the same for all who ask.
    """
    circle = jam.circle
    if circle is None or circle.told != jam.me:
        return False
    for waiter in jam.waiters:
        lacking = waiter.held_bytes + waiter.need_bytes - jam.budget_bytes
        is_due = waiter.is_next and waiter.why == "budget" and waiter.seen_ms - waiter.since_ms >= SETTLED_MS
        if is_due and 0 < lacking <= circle.freed_bytes:
            return True
    return False


def warning(held: Amount, budget_bytes: int, stream: str, remedy: str) -> str | None:
    """What to say of so much handed out and not settled; None while it is little."""
    if held.nbytes <= WARN_SHARE * budget_bytes:
        return None
    return f"{_numbers(held, budget_bytes, stream)}: writers will soon have to wait for it; {remedy}"


def overdue(
    jams: Iterable[Jam], held: Amount, budget_bytes: int, stream: str, remedy: str
) -> CheckpointOverdue | TooLarge | None:
    """The error to raise in a loop that waits for a batch; None where others hold the room, or nobody waits for it."""
    found = list(jams)
    circles = [jam.circle for jam in found if jam.circle is not None and is_circle(jam)]
    if not held.batches:
        unfilled = [circle for circle in circles if not circle.handed]
        return _too_large(unfilled[0], budget_bytes, stream) if unfilled else None
    together = [jam.group.nbytes for jam in found if jam.group is not None and is_group_overdue(jam)]
    if not together and not circles and not any(is_overdue(jam) for jam in found):
        return None
    others = f" ({readable_bytes(sum(together))} with the group's other members)" if together else ""
    if circles and not together and len(circles[0].handed) > 1:
        others = f" ({_shares(circles[0].handed)})"
    numbers = _numbers(held, budget_bytes, stream) + others
    text = f"{numbers}; its writers wait for that room, so no batch can come: {remedy}"
    return CheckpointOverdue(text, held.batches, held.samples, held.nbytes, budget_bytes)


def _too_large(circle: Circle, budget_bytes: int, stream: str) -> TooLarge:
    return TooLarge(
        f"the members of {stream!r} have parts of batches in hand ({_shares(circle.held)}), none of which can be "
        f"filled, and they leave no room in a budget of {readable_bytes(budget_bytes)} for what would fill them: take "
        "smaller batches (or shuffle buffers), a smaller prefetch_bytes or fewer members, or a larger budget_bytes"
    )


def _shares(held: Mapping[Who, int]) -> str:
    groups = Counter[str]()
    for (group, _), nbytes in held.items():
        groups[group] += nbytes
    return ", ".join(f"group {group!r} {readable_bytes(nbytes)}" for group, nbytes in sorted(groups.items()))


def remedy_of(held: Amount, budget_bytes: int, call: str) -> str:
    """What helps: an interval that fills half of the budget, or a larger one."""
    often = int(held.samples * WARN_SHARE * budget_bytes / max(1, held.nbytes))
    return f"{call} at least every {max(1, often)} samples, or give the stream a larger budget_bytes"


def _numbers(held: Amount, budget_bytes: int, stream: str) -> str:
    return (
        f"{held.samples} samples of {stream!r} ({readable_bytes(held.nbytes)} in {held.batches} batches) were handed "
        f"out and are not acknowledged, of a budget of {readable_bytes(budget_bytes)}"
    )
