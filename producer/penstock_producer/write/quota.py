"""Quotas: the values and the pure rules that decide whether a block may be written now.

``admission`` asks them for one shard, and waits. ``explain`` has the sentences for a wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from penstock_common.stream.groups.roster import Why
from penstock_common.stream.servers.suitability import ORDINARY_SHARE

LOW_SHARE = 0.1
"""A writer that waited continues when this share of the budget below its mark is free. So it writes many blocks between
two waits. The cleaner frees as much beyond what is needed (`cleaner.SLACK_SHARE`)."""
GIVE_WAY_S = 1.0
"""After this wait it continues at the mark itself, because readers may have to hold what lies between the two marks."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.5
"""Pauses between looks for space. The first are short, because a fast trainer soon empties a small budget."""


@dataclass(frozen=True, slots=True)
class QuotaState:
    """The plain values that decide about one block of one shard."""

    held_bytes: int
    block_bytes: int
    budget_bytes: int
    is_next: bool
    """Whether this shard is the lowest unfinished one of the oldest unfinished epoch of its partition."""
    waited_s: float | None = None
    """The time since its mark made it wait. None: it does not wait."""
    partition: int | None = None
    """The partition whose share ``budget_bytes`` is. None: the stream has one partition, which has the whole budget."""
    left_bytes: int | None = None
    """The bytes of the server's memory that writers may still use. None: it has no limit."""

    def named_budget(self, stream: str) -> str:
        """Return what ``budget_bytes`` is, in words."""
        share = "" if self.partition is None else f"partition {self.partition}'s share of "
        return f"{share}the budget of {stream!r}"

    @property
    def is_memory_short(self) -> bool:
        """Return True if the block fits the budget, and only the server's memory is in the way."""
        return not self.is_enough and replace(self, left_bytes=None).is_enough

    @property
    def effective_bytes(self) -> int:
        """Return the budget, or as much of it as the server's memory allows."""
        if self.left_bytes is None:
            return self.budget_bytes
        return max(0, min(self.budget_bytes, self.held_bytes + self.left_bytes))

    @property
    def high_bytes(self) -> int:
        """Return up to how many bytes this shard may fill the budget."""
        return self.effective_bytes if self.is_next else int(self.effective_bytes * ORDINARY_SHARE)

    @property
    def mark_bytes(self) -> int:
        """Return up to how many bytes this shard may fill the budget now.

        That is the high mark. For a while after a shard met it, it is the low mark.
        """
        if self.waited_s is None or self.waited_s >= GIVE_WAY_S:
            return self.high_bytes
        return self.high_bytes - int(self.effective_bytes * LOW_SHARE)

    @property
    def is_enough(self) -> bool:
        """Return True if the block may be written."""
        return self.held_bytes + self.block_bytes <= self.mark_bytes

    @property
    def missing_bytes(self) -> int:
        """Return how many bytes have to be freed before the block may be written."""
        return max(0, self.held_bytes + self.block_bytes - self.mark_bytes)


class Admission(Enum):
    """The decision about one block: it is admitted, or why it has to wait."""

    ADMITTED = "admitted"
    FOLDER_FULL = "the folder of segments has no space"
    SERVER_FULL = "the server refused a write at its maxmemory"
    MEMORY_SHORT = "the block fits the budget, and not what the server's memory leaves to writers"
    RESERVED = "what is free is reserved for an earlier shard"
    BUDGET_FULL = "the partition's budget is full"


LACKING: Final[Mapping[Admission, Why]] = {
    Admission.FOLDER_FULL: "folder",
    Admission.SERVER_FULL: "memory",
    Admission.MEMORY_SHORT: "memory",
    Admission.RESERVED: "budget",
    Admission.BUDGET_FULL: "budget",
}
"""The word for each reason to wait in a note on the roster."""


def find_refusal(full_folder: str, *, is_server_full: bool) -> Admission | None:
    """Return why the last try was refused, whatever the budget says; None if it was not. A folder comes first."""
    if full_folder:
        return Admission.FOLDER_FULL
    return Admission.SERVER_FULL if is_server_full else None


def decide_admission(state: QuotaState, refusal: Admission | None = None) -> Admission:
    """Decide about one block.

    Args:
        state: Budget, bytes held, the server's memory, whose turn it is, and how long the shard has waited.
        refusal: What refused the last try. A refused block waits one round, even if the quota would admit it.

    Returns:
        ``Admission.ADMITTED``, or the reason to wait.
    """
    if refusal is not None:
        return refusal
    if state.is_enough:
        return Admission.ADMITTED
    if state.is_memory_short:
        return Admission.MEMORY_SHORT
    return Admission.RESERVED if replace(state, is_next=True).is_enough else Admission.BUDGET_FULL


@dataclass(frozen=True, slots=True)
class AdmissionWait:
    """The time that a shard has waited. Each method returns the value after one step."""

    waits_since_s: float | None = None
    """When the shard began to wait; None once a block was admitted."""
    refused_s: float | None = None
    """When server or folder began to refuse one try after another. Each try looks like the end of a wait."""
    last_wait_s: float = 0.0
    """Length of the wait before, in seconds."""
    was_admitted: bool = False
    """Whether the last decision admitted a block. The server or the folder may refuse it."""

    @property
    def is_waiting(self) -> bool:
        """Return True if the shard waits, or its tries are refused."""
        return self.waits_since_s is not None or self.refused_s is not None

    def waited_s(self, now_s: float) -> float | None:
        """Return the seconds since the wait, or a series of refused tries, began; None if there is neither."""
        began = [at for at in (self.waits_since_s, self.refused_s) if at is not None]
        return now_s - min(began) if began else None

    def begun(self, now_s: float, *, is_refused: bool) -> AdmissionWait:
        """Return the value as a decision begins; a try that was not refused ends a series of refused ones."""
        refused_s = None if self.was_admitted and not is_refused else self.refused_s
        if is_refused and refused_s is None:
            refused_s = now_s
        return replace(self, refused_s=refused_s, was_admitted=False)

    def delayed(self, now_s: float) -> AdmissionWait:
        """Return the value after a block was not admitted."""
        return self if self.waits_since_s is not None else replace(self, waits_since_s=now_s)

    def admitted(self, now_s: float) -> AdmissionWait:
        """Return the value after a block was admitted."""
        waited = self.waited_s(now_s)
        if waited is None:
            return self if self.was_admitted else replace(self, was_admitted=True)
        return replace(self, waits_since_s=None, last_wait_s=waited, was_admitted=True)


def pause_s(waited_s: float, last_wait_s: float) -> float:
    """Return the seconds to wait before the next look.

    A wait takes few looks, however long it gets, and the next wait takes no more of them.
    """
    return min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, waited_s / 2, last_wait_s / 4))
