"""What the two ways of reading have in common: a place in the group, a reader of an epoch, a keeper of the member.

Shared reading's are in ``shared``, ordered reading's in ``ordered``; ``reading`` puts them together.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from penstock_common.pace import Pace
from penstock_common.stream.streams import Stream
from penstock_consumer.settling.overdue import Jam
from penstock_consumer.stages.batch import Batch


@dataclass(frozen=True, slots=True)
class Idleness:
    """A loop that waits for a batch."""

    since_s: float
    """By the monotonic clock."""
    handed_bytes: int
    """Payload bytes it was given and has not settled."""

    @property
    def milliseconds(self) -> int:
        """How long it has waited."""
        return max(0, int((time.monotonic() - self.since_s) * 1000))


def said_of(idle: Idleness | None) -> dict[str, int]:
    """As `roster.beat` wants it."""
    return {} if idle is None else {"idle_ms": idle.milliseconds, "handed_bytes": idle.handed_bytes}


class AnyPlace(Protocol):
    """A member's place in its group, asked from the training loop's thread: ``group.Place`` where reading is shared."""

    unclosed: set[int]
    """Epochs iterated here that were not fully settled yet."""

    @property
    def stream(self) -> Stream:
        """The stream read."""

    def join(self, start: str | int) -> None:
        """Puts group and member on the roster."""

    def next_epoch(self, after: int) -> int | None:
        """The group's lowest unsettled epoch above ``after``; None if there is none yet. Raises GroupFinished."""

    def finished(self, after: int) -> str:
        """One sentence on a group for which there is no epoch to read now."""

    def acknowledge(self, batch: Batch) -> None:
        """Settles a batch; it need not be on the server when this returns."""

    def owes(self, epoch: int) -> bool:
        """Whether this member still holds something of an epoch."""

    def flush(self) -> None:
        """Returns once every acknowledgement is on the server."""

    def close_epochs(self, ended: int) -> None:
        """Closes for the group what is settled by now; raises EpochIncomplete."""

    def jams(self, *, together: bool = False) -> list[Jam]:
        """The partitions where writers wait for room, and what this member holds of them; ``together``: all others."""

    def hurry(self, patience_s: float) -> None:
        """From now on a server that went away is not waited for longer than this."""

    def leave(self) -> None:
        """Hands back what is held and signs off."""


class AnyReader(Protocol):
    """Reads one epoch into a prefetch queue, in a thread of its own: ``shared.EpochReader``."""

    epoch: int
    bad_entries: int
    filled: int
    """Samples that stand in for bad ones; always 0 where reading is shared."""

    def run(self) -> None:
        """The thread's body: everything ends in the queue, errors too."""

    def why_waiting(self, seconds: float) -> str:
        """Why there is no batch."""


class AnyKeeper(Protocol):
    """Keeps this member alive in its group, in a thread of its own: ``keeper.Keeper``."""

    horizon: int
    """The epoch being read here."""
    idle: Idleness | None
    """Set while the loop waits for a batch: the roster tells it to everyone."""
    pace: Pace | None
    """Of the training loop, once it is set: told to whoever starts workers."""
    error: Exception | None
    """Why it ended by itself: the loop raises it."""

    def start(self) -> None:
        """Begins to give signs of life."""

    def stop(self, patience_s: float = 5.0) -> None:
        """Ends the thread. Without patience it is only told."""

    @property
    def is_current_thread(self) -> bool:
        """Return whether the caller is the keeper's thread."""

    def recover(self) -> None:
        """Takes up what an earlier process of this member's name had been given."""
