"""What an audit reports: counts of samples per group and epoch, findings in words, and the verdict.

Values only; ``judgement`` fills them, ``audit`` is what callers ask.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_common.stream.losses import Loss


@dataclass(frozen=True, slots=True)
class MissingRange:
    """Offsets [first, end) of a shard that a complete epoch should hold and does not."""

    shard: int
    first: int
    end: int
    holes: tuple[int, ...] = ()
    """Offsets in it that are known to be bad."""
    entry: str = ""
    """Id of the entry that held it and is gone; empty where no index record names one."""
    found: str = ""
    """Id of an entry that is there and holds just this, though no index record names it."""


@dataclass(slots=True)
class GroupAudit:
    """One group in one epoch, in samples."""

    delivered: int = 0
    """Acknowledged: trained on."""
    pending: int = 0
    """Given to a member and not acknowledged."""
    unread: int = 0
    """In the stream, not given to anyone yet."""
    dead: int = 0
    """In entries this group could not read, or that an operator gave up."""
    given_up: int = 0
    """Of those dead, what an operator gave up."""
    not_offered: int = 0
    """Of an epoch before the first that this group could see whole: it came late, or began with a later one."""
    released: int = 0
    """Removed before this group read them, while it held no data: it had left."""
    lost: int = 0
    """None of these: nobody will ever deliver them."""
    lost_ranges: list[tuple[int, int, int]] = field(default_factory=list)
    """(shard, first, end) of what is lost."""


@dataclass(slots=True)
class EpochAudit:
    """One epoch, in samples."""

    epoch: int
    state: str
    planned: int | None
    produced: int = 0
    """Committed, holes not counted."""
    bad: int = 0
    """Holes: samples that the source could not make."""
    duplicate: int = 0
    """Identities that stand in more than one entry."""
    lost: int = 0
    """Identities lost to a group at least; without any group, those whose payload is gone or never came."""
    trimmed: int = 0
    """Entries that retention removed after every group had settled them."""
    groups: dict[str, GroupAudit] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    is_damaged: bool = False
    """Whether a key of it holds what another program wrote, which a finding names: its samples were not counted."""
    missing: list[MissingRange] = field(default_factory=list)
    """What `penstock audit --repair` would put back."""
    server_losses: list[Loss] = field(default_factory=list)
    """What clients noted that a restarted server had forgotten."""
    made_again: list[Loss] = field(default_factory=list)
    """Of those, what the epoch holds again, from a source that is known to give the same samples."""


@dataclass(slots=True)
class AuditReport:
    """A whole stream, or one epoch of it."""

    stream: str
    epochs: list[EpochAudit]
    released: str
    """Ranges of epochs that were settled, released, and cannot be audited any more; empty if none."""
    damage: list[str] = field(default_factory=list)
    """Keys of the stream itself that another program wrote: what they should say of epochs was not audited."""

    @property
    def produced(self) -> int:
        """Samples committed."""
        return sum(epoch.produced for epoch in self.epochs)

    @property
    def bad(self) -> int:
        """Samples that the source could not make."""
        return sum(epoch.bad for epoch in self.epochs)

    @property
    def lost(self) -> int:
        """Samples that some group will never be given."""
        return sum(epoch.lost for epoch in self.epochs)

    @property
    def duplicate(self) -> int:
        """Samples that stand in the stream twice."""
        return sum(epoch.duplicate for epoch in self.epochs)

    @property
    def delivered(self) -> dict[str, int]:
        """Group -> samples it acknowledged."""
        return self._by_group("delivered")

    @property
    def pending(self) -> int:
        """Samples given out and not acknowledged, over all groups."""
        return sum(self._by_group("pending").values())

    @property
    def unread(self) -> int:
        """Samples not yet given out, over all groups."""
        return sum(self._by_group("unread").values())

    @property
    def dead(self) -> int:
        """Samples in dead letters, over all groups."""
        return sum(self._by_group("dead").values())

    @property
    def findings(self) -> list[str]:
        """Everything that is not as it should be, one line each."""
        return [*self.damage, *(f"epoch {epoch.epoch}: {text}" for epoch in self.epochs for text in epoch.findings)]

    @property
    def is_clean(self) -> bool:
        """Nothing lost, nothing twice, nothing unexplained; pending and unread samples are still to come."""
        return not self.lost and not self.duplicate and not self.findings

    @property
    def verdict(self) -> str:
        """One line."""
        numbers = f"lost {self.lost}, duplicate {self.duplicate}, pending {self.pending}"
        if not self.is_clean:
            found = f"{len(self.findings)} {'finding' if len(self.findings) == 1 else 'findings'}"
            is_partial = self.damage or any(epoch.is_damaged for epoch in self.epochs)
            unknown = "; what damaged keys should tell was not counted" if is_partial else ""
            return f"NOT CLEAN: {numbers}, {found}{unknown}"
        if not self.epochs:
            return f"nothing to audit: no epoch of {self.stream!r} is retained"
        owed = [f"{count} {what}" for what, count in (("pending", self.pending), ("unread", self.unread)) if count]
        return f"clean: {numbers}" + (f" ({' and '.join(owed)} samples are still to be trained on)" if owed else "")

    def _by_group(self, what: str) -> dict[str, int]:
        totals: dict[str, int] = {}
        for epoch in self.epochs:
            for name, group in epoch.groups.items():
                totals[name] = totals.get(name, 0) + getattr(group, what)
        return totals
