"""The promises of writer, groups and ledger as dictionaries, simple enough to check by reading."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Identity = tuple[int, int, int]
"""The identity (epoch, shard, offset)."""


@dataclass
class ModelEpoch:
    """One epoch: its expected contents, and its actual ones."""

    sizes: list[int]
    is_planned: bool
    """Whether sizes were given at the start."""
    committed: dict[tuple[int, int], int] = field(default_factory=dict)
    """(shard, offset) -> value."""
    holes: set[tuple[int, int]] = field(default_factory=set)
    ends: dict[int, int] = field(default_factory=dict)
    """Shard -> committed offsets, holes included."""
    finished: set[int] = field(default_factory=set)
    state: str = "open"

    def commit(self, shard: int, offset: int, value: int | None) -> None:
        """Commit a sample, or a hole for None, unless another writer was first."""
        if offset != self.ends.get(shard, 0):
            assert offset < self.ends[shard]
            return
        self.ends[shard] = offset + 1
        if value is None:
            self.holes.add((shard, offset))
        else:
            self.committed[shard, offset] = value

    @property
    def canonical(self) -> list[int]:
        """Return values in the order of a replay."""
        return [value for _, value in sorted(self.committed.items())]


@dataclass
class ModelMember:
    """One member: the samples that it was given and has not acknowledged."""

    name: str
    policy: str
    handed: list[set[Identity]] = field(default_factory=list)


@dataclass
class ModelGroup:
    """One group: its acknowledged samples, and its live members."""

    first: int
    declared: bool
    settled: set[Identity] = field(default_factory=set)
    members: dict[str, ModelMember] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    """The names of members that died. Their samples stay unacknowledged until a member of that name, or another, takes
    them.
    """

    @property
    def holds(self) -> bool:
        """Return whether data is kept for it."""
        return self.declared or bool(self.members or self.dead)


@dataclass
class Model:
    """A stream."""

    epochs: dict[int, ModelEpoch] = field(default_factory=dict)
    groups: dict[str, ModelGroup] = field(default_factory=dict)

    def deliver(self, group: str, member: str, rows: Iterable[tuple[Identity, int]]) -> set[Identity]:
        """Note that a batch was yielded. Raises AssertionError if it should not have been."""
        ours, batch = self.groups[group], dict(rows)
        others = {i for m in ours.members.values() for handed in m.handed for i in handed}
        for identity, value in batch.items():
            epoch, *place = identity
            assert epoch >= ours.first, f"{identity} is before the group's first epoch"
            assert self.epochs[epoch].committed.get((place[0], place[1])) == value, f"{identity} is not {value}"
            assert identity not in ours.settled, f"{identity} was settled"
            assert identity not in others, f"{identity} is in a living member's hands"
        ours.members[member].handed.append(set(batch))
        return set(batch)

    def settle(self, group: str, handed: set[Identity]) -> None:
        """Note that a batch was acknowledged. The ledger of an abandoned epoch is closed."""
        live = {identity for identity in handed if self.epochs[identity[0]].state != "abandoned"}
        self.groups[group].settled |= live

    def owed(self, group: str) -> set[Identity]:
        """Return what the group has not acknowledged."""
        ours = self.groups[group]
        return {
            (number, *place)
            for number, epoch in self.epochs.items()
            if number >= ours.first and epoch.state not in ("abandoned", "released")
            for place in epoch.committed
        } - ours.settled

    def holding(self, epoch: int) -> list[ModelGroup]:
        """Return the groups for which the epoch is kept."""
        return [group for group in self.groups.values() if group.holds and group.first <= epoch]
