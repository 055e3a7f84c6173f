"""What an onlooker sees of a stream at one moment: values only. How they are found is ``onlooker``'s.

What counts up counts from the onlooker's first look (made), or the one that first saw the group (given); rates come of
two glances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock_common.stream.servers.suitability import ServerMemory
from penstock_common.stream.watching.paces import Paces
from penstock_common.stream.watching.waiters import Waiter


@dataclass(frozen=True, slots=True)
class MemberGlance:
    """One member of a group, or under a name that begins with ``~`` what members handed back."""

    name: str
    seen_s: float | None
    """Seconds since its last sign of life; None of one that left, or was forgotten, and still has entries."""
    pending_entries: int
    waits_s: float | None
    """For how long its loop has waited for a batch; None while it does not."""
    has_ended: bool = False
    """Whether its process is known to have ended."""


@dataclass(frozen=True, slots=True)
class GroupGlance:
    """One group, summed over partitions and the epochs that it has yet to settle."""

    name: str
    kind: str
    declared: bool
    holds: bool
    """Whether what it has not read is kept for it."""
    lag_entries: int
    """Written, and given to no member yet; of an ordered group: above its slowest rank's position."""
    lag_samples: int
    lag_bytes: int
    lag_s: float
    """Age of the oldest such entry, 0 without one."""
    pending_entries: int
    """Given to a member and not acknowledged."""
    redelivered_entries: int
    """Of the oldest pending ones of each key (100), those that were given out more than once."""
    dead_letters: int
    given_samples: int
    given_bytes: int
    members: tuple[MemberGlance, ...]
    world: int = 0
    """Of an ordered group: how many ranks read it."""


@dataclass(frozen=True, slots=True)
class EpochGlance:
    """One retained epoch."""

    epoch: int
    state: str
    kind: str
    planned: int | None
    """Samples, None while open."""
    committed: int
    """Samples, bad ones included."""
    bad: int
    bytes: int
    read: Mapping[str, int]
    """Group -> samples of it that the group was given, or settled; only of groups that read it."""


@dataclass(frozen=True, slots=True)
class Glance:
    """One stream."""

    name: str
    id: str
    at_s: float
    """On the onlooker's monotonic clock."""
    budget_bytes: int
    held_bytes: int
    next_epoch: int
    final: int | None
    """Planned number of epochs, None if nobody said."""
    made_entries: int
    made_samples: int
    made_bytes: int
    epochs: tuple[EpochGlance, ...]
    groups: tuple[GroupGlance, ...]
    waiting: Mapping[tuple[int, int], Waiter]
    """(epoch, shard) -> its writer, of those that wait for room."""
    waited_s: float
    """How long the longest of them has waited."""
    paces: Paces
    memory: ServerMemory
    payload: str = "inline"
    """Where payloads lie: ``inline``, or ``segments:`` and a folder."""
    replays: int = 0
    """Replays that hold an epoch."""


@dataclass(slots=True)
class GroupSums:
    """A group while it is summed up."""

    entries: int = 0
    samples: int = 0
    nbytes: int = 0
    oldest_ms: int | None = None
    pending: int = 0
    redelivered: int = 0
    dead: int = 0
    held: dict[str, int] = field(default_factory=dict)
    """Member -> pending entries."""
