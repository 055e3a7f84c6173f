"""Who may write now: a pure rule from bytes held to yes or no, and the sentence that explains a no.

Waiting is the committer's, making room the janitor's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock_common.stream.servers.suitability import ORDINARY_SHARE, ServerMemory, readable_bytes

LOW_SHARE = 0.1
"""A writer that had to wait goes on when this part of the budget below its mark is free again: so it writes, and room
is planned for, in stretches and not block by block. As much as the janitor frees beyond what is needed."""
GIVE_WAY_S = 1.0
"""After so long it goes on at the mark itself: what readers have to hold may well lie between the two marks."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.5
"""Between looks for room: short at first, since a fast trainer empties a small budget within a few of them."""


@dataclass(frozen=True, slots=True)
class Room:
    """What decides about one block of one shard."""

    held_bytes: int
    block_bytes: int
    budget_bytes: int
    is_next: bool
    """Whether this shard is the lowest unfinished one of the oldest unfinished epoch of its partition."""
    waited_s: float | None = None
    """How long it has waited since it met its mark; None when it does not wait."""
    partition: int | None = None
    """Whose share of the budget that is; None where there is one partition, so the share is all of it."""
    left_bytes: int | None = None
    """What the server's memory has for writers beyond what is held; None where there is no limit."""

    def told_budget(self, stream: str) -> str:
        """Return what ``budget_bytes`` is, in words."""
        share = "" if self.partition is None else f"partition {self.partition}'s share of "
        return f"{share}the budget of {stream!r}"

    @property
    def is_memory_short(self) -> bool:
        """Whether the block would fit the budget, and only the server's memory is in the way."""
        return not self.is_enough and replace(self, left_bytes=None).is_enough

    @property
    def effective_bytes(self) -> int:
        """The budget, or as much of it as the server's memory allows for."""
        if self.left_bytes is None:
            return self.budget_bytes
        return max(0, min(self.budget_bytes, self.held_bytes + self.left_bytes))

    @property
    def high_bytes(self) -> int:
        """Up to which this shard may fill the budget."""
        return self.effective_bytes if self.is_next else int(self.effective_bytes * ORDINARY_SHARE)

    @property
    def mark_bytes(self) -> int:
        """Up to which it may go now: the high mark, or for a while after having met it the low one."""
        if self.waited_s is None or self.waited_s >= GIVE_WAY_S:
            return self.high_bytes
        return self.high_bytes - int(self.effective_bytes * LOW_SHARE)

    @property
    def is_enough(self) -> bool:
        """Whether the block may be written."""
        return self.held_bytes + self.block_bytes <= self.mark_bytes

    @property
    def missing_bytes(self) -> int:
        """How much has to go before the block may be written."""
        return max(0, self.held_bytes + self.block_bytes - self.mark_bytes)


def pause_s(waited_s: float, last_wait_s: float) -> float:
    """How long to wait before the next look: a few looks in a wait, however long it gets, and as many as last time."""
    return min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, waited_s / 2, last_wait_s / 4))


def reason_to_wait(
    stream: str, room: Room, blockers: list[str], has_groups: bool, unsettled: Mapping[str, int] | None = None,
    gone: str = "", is_kept: bool = True,
) -> str:  # fmt: skip
    """Why there is no room, and what helps. ``blockers`` names the groups that still owe what is held.

    ``unsettled``: payload bytes that groups were given and have not acknowledged, of those that wait for a batch.
    ``gone``: the members that such groups wait for, told. ``is_kept``: pinned, replayed.
    """
    share = f"{readable_bytes(room.held_bytes)} of {readable_bytes(room.budget_bytes)}"
    budget = room.told_budget(stream)
    if not has_groups:
        return (
            f"{budget} is full ({share}) and no group reads it yet: "
            f"start a trainer, or `penstock groups declare {stream} NAME`"
        )
    if gone:
        return (
            f"{budget} is full ({share}), and trainers wait as well, for members last seen a while "
            f"ago: {gone}; start them again under their names; what a member of a shared group holds comes to "
            "others when its lease has lapsed"
        )
    if unsettled:
        each = ", ".join(f"group {name} {readable_bytes(nbytes)}" for name, nbytes in sorted(unsettled.items()))
        return (
            f"{budget} is full ({share}), and trainers wait for samples while they have some that they "
            f"were given and have not acknowledged ({each}): they have to acknowledge, or to save a checkpoint"
        )
    if blockers:
        return f"{budget} is full ({share}) because of group {', '.join(blockers)}: it has yet to read"
    if not room.is_next:
        return f"{budget} is full ({share}); its last quarter is kept for the oldest unfinished shard"
    if not is_kept:
        return f"{budget} is full ({share}) of what trainers were given and have not acknowledged"
    return f"{budget} is full ({share}) of epochs that a replay or a pin holds"


def reason_of_memory(stream: str, room: Room, memory: ServerMemory) -> str:
    """Why there is no room though the budget is not used up: others fill the server."""
    used, limit = readable_bytes(memory.used_bytes), readable_bytes(memory.limit_bytes)
    kept = readable_bytes(memory.limit_bytes - memory.used_bytes - (memory.left_bytes or 0))
    return (
        f"the server uses {used} of its maxmemory {limit}, of which writers leave {kept} free; of "
        f"{room.told_budget(stream)} only {readable_bytes(room.held_bytes)} of {readable_bytes(room.budget_bytes)} are "
        "used: remove other keys, or raise maxmemory"
    )
