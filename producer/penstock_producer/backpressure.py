"""Who may write now: a pure rule from bytes held to yes or no, and the sentence that explains a no.

Waiting is the committer's, making room the janitor's.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock_common.stream.suitability import readable_bytes

ORDINARY_SHARE = 0.75
"""The top quarter is only for the lowest unfinished shard of the oldest unfinished epoch: whatever else fills the
budget, the samples that some group is waiting for still fit (design.md 5.8)."""


@dataclass(frozen=True, slots=True)
class Room:
    """What decides about one block of one shard."""

    held_bytes: int
    block_bytes: int
    budget_bytes: int
    is_next: bool
    """Whether this shard is the lowest unfinished one of the oldest unfinished epoch of its partition."""

    @property
    def mark_bytes(self) -> int:
        """Up to which this shard may fill the budget."""
        return self.budget_bytes if self.is_next else int(self.budget_bytes * ORDINARY_SHARE)

    @property
    def is_enough(self) -> bool:
        """Whether the block may be written."""
        return self.held_bytes + self.block_bytes <= self.mark_bytes

    @property
    def missing_bytes(self) -> int:
        """How much has to go before the block may be written."""
        return max(0, self.held_bytes + self.block_bytes - self.mark_bytes)


def largest_block(budget_bytes: int) -> int:
    """A block above the reserved quarter could wait for ever, so it is refused at the start."""
    return int(budget_bytes * (1 - ORDINARY_SHARE))


def reason_to_wait(stream: str, room: Room, blockers: list[str], has_groups: bool) -> str:
    """Why there is no room, and what helps. ``blockers`` names the groups that still owe what is held."""
    share = f"{readable_bytes(room.held_bytes)} of {readable_bytes(room.budget_bytes)}"
    if not has_groups:
        return (
            f"the budget of {stream!r} is full ({share}) and no group reads it yet: "
            f"start a trainer, or `penstock groups declare {stream} NAME`"
        )
    if blockers:
        return f"the budget of {stream!r} is full ({share}) because of group {', '.join(blockers)}: it has yet to read"
    if not room.is_next:
        return f"the budget of {stream!r} is full ({share}); its last quarter is kept for the oldest unfinished shard"
    return f"the budget of {stream!r} is full ({share}) of epochs that a replay holds"
