"""A stream at one moment, as the monitor shows it: values only. `onlooker` finds them.

Numbers that count up begin with the first look (made), or with the look that first saw the group (given). Rates come
from two glances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock_common.stream.groups.presence import Liveness, is_returned
from penstock_common.stream.servers.suitability import ServerMemory
from penstock_common.stream.watching.paces import Paces
from penstock_common.stream.watching.waiters import Waiter


@dataclass(frozen=True, slots=True)
class MemberGlance:
    """One member of a group, or under a name that `is_returned` the entries that members returned."""

    name: str
    liveness: Liveness
    pending_entries: int
    waits_s: float | None
    """How long its loop has waited for a batch, or None while it does not wait."""

    @property
    def is_silent(self) -> bool:
        """Return True if the member is dead as far as is known."""
        return self.liveness.is_silent and not is_returned(self.name)

    @property
    def is_live(self) -> bool:
        """Return True if it is a member, and not silent."""
        return not self.liveness.is_silent and not is_returned(self.name)


@dataclass(frozen=True, slots=True)
class GroupGlance:
    """One group, summed over partitions and the epochs that it has not finished."""

    name: str
    kind: str
    declared: bool
    holds: bool
    """Whether the stream keeps for it what it has not read."""
    lag_entries: int
    """Entries that were written and given to no member yet, or above the position of an ordered group's slowest rank.
    """
    lag_samples: int
    lag_bytes: int
    lag_s: float
    """The age of the oldest such entry, or 0 without one."""
    pending_entries: int
    """Entries that were given to a member and not acknowledged."""
    redelivered_entries: int
    """Entries that were given out more than once, of the 100 oldest pending ones of each key."""
    dead_letters: int
    given_samples: int
    given_bytes: int
    members: tuple[MemberGlance, ...]
    world: int = 0
    """The ranks of an ordered group."""


@dataclass(frozen=True, slots=True)
class EpochGlance:
    """One retained epoch."""

    epoch: int
    state: str
    kind: str
    planned: int | None
    """The planned samples, or None while it is open."""
    committed: int
    """The committed samples, with the bad ones."""
    bad: int
    bytes: int
    read: Mapping[str, int]
    """Group -> samples of it that the group was given or is done with, for groups that read it."""


@dataclass(frozen=True, slots=True)
class Glance:
    """One stream."""

    name: str
    id: str
    at_s: float
    """The time on this process's monotonic clock."""
    budget_bytes: int
    held_bytes: int
    next_epoch: int
    final: int | None
    """The planned number of epochs, or None if it is not known."""
    made_entries: int
    made_samples: int
    made_bytes: int
    epochs: tuple[EpochGlance, ...]
    groups: tuple[GroupGlance, ...]
    waiting: Mapping[tuple[int, int], Waiter]
    """(epoch, shard) -> its writer, of those that wait for quota."""
    waited_s: float
    """How long the longest of them has waited."""
    paces: Paces
    memory: ServerMemory
    payload: str = "inline"
    """Where payloads lie: ``inline``, or ``segments:`` and a folder."""
    replays: int = 0
    """The replays that hold an epoch."""


@dataclass(slots=True)
class GroupSums:
    """The sums of a group while it is read."""

    entries: int = 0
    samples: int = 0
    nbytes: int = 0
    oldest_ms: int | None = None
    pending: int = 0
    redelivered: int = 0
    dead: int = 0
    held: dict[str, int] = field(default_factory=dict)
    """Member -> pending entries."""
