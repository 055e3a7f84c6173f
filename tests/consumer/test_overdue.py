"""The rule that finds a training responsible for a full budget: by numbers, without a server."""

from __future__ import annotations

import pytest

from penstock_common.explain.backlog import GroupBacklog
from penstock_common.explain.deadlock import SETTLED_MS, BlockedPartition, is_group_overdue, is_overdue
from penstock_common.stream.groups.roster import WaitingWriter, Why


def jam(
    *, held: int = 80, need: int = 10, is_next: bool = True, waited: int = SETTLED_MS, others: bool = False,
    why: Why = "budget",
) -> BlockedPartition:  # fmt: skip
    """Return one waiting writer, a budget of 100, and what this member holds of it."""
    writer = WaitingWriter(0, waited, need, held, why, is_next)
    return BlockedPartition([writer], held, 100, others)


@pytest.mark.parametrize(
    ("found", "is_blamed"),
    [
        (jam(), True),
        (jam(is_next=False), False),  # it waits for an earlier shard
        (jam(why="folder"), False),  # it waits for a disk
        (jam(waited=SETTLED_MS - 1), False),  # the cleaner may be about to free acknowledged samples
        (jam(others=True), False),  # another reader's acknowledgement may be enough
        (jam(others=True, held=95), True),  # but not here: what this member alone holds leaves no space
        (jam(held=5), False),  # acknowledging it would not help
        (BlockedPartition([], 100, 100, False), False),  # no writer waits
    ],
)
def test_only_who_alone_can_make_room_is_blamed(found: BlockedPartition, is_blamed: bool) -> None:
    """An error that ends a training must never be a guess."""
    assert is_overdue(found) is is_blamed


def together(
    mine: int, all_bytes: int, freed: int, *, members: int = 2, need: int = 10, is_next: bool = True
) -> BlockedPartition:
    """Return a full budget of 100, and what the group's members hold of it."""
    writer = WaitingWriter(0, SETTLED_MS, need, 100, "budget", is_next)
    return BlockedPartition([writer], mine, 100, True, GroupBacklog(all_bytes, freed, members))


@pytest.mark.parametrize(
    ("found", "is_blamed"),
    [
        (together(50, 100, 100), True),
        (together(50, 100, 10), True),  # other groups hold most of it, too, but what only this group holds is enough
        (together(50, 100, 9), False),  # another group holds the space
        (together(49, 100, 100), False),  # the other member holds more
        (together(0, 0, 0, members=0), False),
        (together(50, 100, 100, is_next=False), False),  # it waits for an earlier shard
        (jam(others=True), False),  # not read yet, because the wait is short
    ],
)
def test_members_that_fill_the_budget_together_are_blamed_and_the_one_with_most_is_told(
    found: BlockedPartition, is_blamed: bool
) -> None:
    """Each alone is below the budget, but only they together can free space."""
    assert is_group_overdue(found) is is_blamed
    assert not is_overdue(found)
