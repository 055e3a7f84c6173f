"""The report of an audit: counts of samples, findings in words, what no replica confirmed, and the verdict.

This file has values only. `judgement` fills them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock_common.stream.groups.losses import Loss
from penstock_common.stream.manifest import SIZED

MOST_RANGES = 5
"""Ranges of a server without a replica that one line names."""


@dataclass(frozen=True, slots=True)
class MissingRange:
    """The offsets [first, end) of a shard that a complete epoch should hold, and does not or only damaged."""

    shard: int
    first: int
    end: int
    holes: tuple[int, ...] = ()
    """Offsets in it that are known to be bad."""
    entry: str = ""
    """The id of the entry that held it and is gone or damaged, or empty if no index record names one."""
    found: str = ""
    """The id of an entry that exists and holds exactly this, though no index record names it."""


@dataclass(slots=True)
class GroupAudit:
    """The samples of one group in one epoch."""

    delivered: int = 0
    """Acknowledged: trained on."""
    pending: int = 0
    """Given to a member and not acknowledged."""
    unread: int = 0
    """In the stream, and given to no member yet."""
    dead: int = 0
    """In entries that this group could not read, or that an operator gave up."""
    given_up: int = 0
    """Given up by an operator, of those dead."""
    not_offered: int = 0
    """In an epoch before the first that this group could see whole: it came late, or began with a later one."""
    released: int = 0
    """Removed before this group read them, while it held no data because it had left."""
    lost: int = 0
    """In none of these states: they will never be delivered."""
    lost_ranges: list[tuple[int, int, int]] = field(default_factory=list)
    """The triples (shard, first, end) of lost samples."""

    def count(
        self, *, delivered: int = 0, pending: int = 0, unread: int = 0, dead: int = 0, given_up: int = 0,
        not_offered: int = 0, released: int = 0,
    ) -> None:  # fmt: skip
        """Add samples by what became of them."""
        self.delivered += delivered
        self.pending += pending
        self.unread += unread
        self.dead += dead
        self.given_up += given_up
        self.not_offered += not_offered
        self.released += released

    def count_lost(self, shard: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Add samples that will never be delivered."""
        for first, end in ranges:
            self.lost += end - first
            self.lost_ranges.append((shard, first, end))


@dataclass(frozen=True, slots=True)
class UnreplicatedRange:
    """Offsets of one shard that were written with the durability `auto` while their server had no replica."""

    shard: int
    first: int
    end: int
    """The end of the offsets [first, end)."""
    server: str
    """Its address, without a password."""


def said_unreplicated(ranges: Sequence[UnreplicatedRange]) -> Iterator[str]:
    """Yield a sentence for each server that had no replica, with the ranges that were written in that time."""
    for server in dict.fromkeys(one.server for one in ranges):
        found = [f"shard {one.shard} offsets {one.first}-{one.end - 1}" for one in ranges if one.server == server]
        more = f" and {len(found) - MOST_RANGES} more, see --json" if len(found) > MOST_RANGES else ""
        yield f"written while {server} had no replica: {', '.join(found[:MOST_RANGES])}{more}"


@dataclass(slots=True)
class EpochAudit:
    """The samples of one epoch."""

    epoch: int
    state: str
    planned: int | None
    produced: int = 0
    """Committed, without holes."""
    bad: int = 0
    """Holes: samples that the source could not make."""
    duplicate: int = 0
    """Identities in more than one entry."""
    lost: int = 0
    """Identities lost to at least one group. Without any group, those whose payload is gone or never came."""
    trimmed: int = 0
    """Entries that retention removed after every group had acknowledged them."""
    groups: dict[str, GroupAudit] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    is_damaged: bool = False
    """Whether one of its keys holds what another program wrote. A finding names it, and its samples were not counted.
    """
    missing: list[MissingRange] = field(default_factory=list)
    """The ranges that `penstock audit --repair` would put back."""
    server_losses: list[Loss] = field(default_factory=list)
    """The samples that a restarted server had forgotten, as clients noted."""
    unreplicated: list[UnreplicatedRange] = field(default_factory=list)
    """The offsets that were written while their server had no replica, by shard."""
    made_again: list[Loss] = field(default_factory=list)
    """The server losses that the epoch holds again, from a source or a writer that gives the same samples."""
    unseen: int = 0
    """The entries whose payloads were not looked at, because this process cannot see the folder of segments."""

    def count(
        self, *, produced: int = 0, bad: int = 0, duplicate: int = 0, lost: int = 0, trimmed: int = 0, unseen: int = 0
    ) -> None:  # fmt: skip
        """Add samples, or trimmed and unseen entries, by what became of them."""
        self.produced += produced
        self.bad += bad
        self.duplicate += duplicate
        self.lost += lost
        self.trimmed += trimmed
        self.unseen += unseen

    @property
    def is_clean(self) -> bool:
        """True if nothing of it is lost, duplicated or unexplained."""
        return not self.lost and not self.duplicate and not self.findings

    @property
    def unfinished(self) -> str:
        """The part of its plan that is committed, in words, or '' if it has ended or no plan is known."""
        if self.planned is None or self.state != SIZED:
            return ""
        committed = self.produced + self.bad
        fine = "; nothing is wrong with them" if committed and self.is_clean and not self.unseen else ""
        return f"unfinished: {committed} of {self.planned} samples are committed{fine}"

    def add_losses(self, losses: Sequence[Loss], why: str, made_again: Sequence[Loss] = ()) -> None:
        """Add what a restarted server had forgotten, and what of it was made again."""
        self.server_losses.extend(losses)
        self.findings.extend(f"{why}: {loss}" for loss in losses)
        self.made_again.extend(made_again)


@dataclass(slots=True)
class AuditReport:
    """The report on a whole stream, or on one epoch of it."""

    stream: str
    epochs: list[EpochAudit]
    released: str
    """Ranges of epochs that were acknowledged and released, and can no longer be audited. Empty if there are none."""
    damage: list[str] = field(default_factory=list)
    """Keys of the stream itself that another program wrote. What they should say of epochs was not audited."""
    disagreements: list[str] = field(default_factory=list)
    """The disagreements of the stream's slot and its partitions, after the server of one of them came back older."""
    deletion: str = ""
    """The words for a deletion that did not end, or ''. What it left was not audited."""
    why_unseen: str = ""
    """Why payloads were not looked at, and what helps, or '' if all were."""

    @property
    def produced(self) -> int:
        """The committed samples."""
        return sum(epoch.produced for epoch in self.epochs)

    @property
    def bad(self) -> int:
        """The samples that the source could not make."""
        return sum(epoch.bad for epoch in self.epochs)

    @property
    def lost(self) -> int:
        """The samples that some group will never get."""
        return sum(epoch.lost for epoch in self.epochs)

    @property
    def duplicate(self) -> int:
        """The samples that are in the stream more than once."""
        return sum(epoch.duplicate for epoch in self.epochs)

    @property
    def delivered(self) -> dict[str, int]:
        """Group -> the samples that it acknowledged."""
        return self._by_group("delivered")

    @property
    def pending(self) -> int:
        """The samples given out and not acknowledged, over all groups."""
        return sum(self._by_group("pending").values())

    @property
    def unread(self) -> int:
        """The samples not yet given out, over all groups."""
        return sum(self._by_group("unread").values())

    @property
    def dead(self) -> int:
        """The samples in dead letters, over all groups."""
        return sum(self._by_group("dead").values())

    @property
    def unseen(self) -> int:
        """The entries whose payloads were not looked at."""
        return sum(epoch.unseen for epoch in self.epochs)

    @property
    def findings(self) -> list[str]:
        """Everything that is wrong, one line each."""
        return [
            *filter(None, [self.deletion]),
            *self.damage,
            *self.disagreements,
            *(f"epoch {epoch.epoch}: {text}" for epoch in self.epochs for text in epoch.findings),
        ]

    @property
    def is_clean(self) -> bool:
        """True if nothing is lost, duplicated or unexplained. Pending and unread samples are still to come."""
        return not (self.deletion or self.damage or self.disagreements) and all(epoch.is_clean for epoch in self.epochs)

    @property
    def verdict(self) -> str:
        """The verdict in one line."""
        numbers = f"lost {self.lost}, duplicate {self.duplicate}, pending {self.pending}"
        if not self.is_clean:
            found = f"{len(self.findings)} {'finding' if len(self.findings) == 1 else 'findings'}"
            is_partial = self.damage or any(epoch.is_damaged for epoch in self.epochs)
            unknown = "; what damaged keys should tell was not counted" if is_partial else ""
            return f"NOT CLEAN: {numbers}, {found}{unknown}"
        if not self.epochs:
            return f"nothing to audit: no epoch of {self.stream!r} is retained"
        waiting = [f"{count} {what}" for what, count in (("pending", self.pending), ("unread", self.unread)) if count]
        payloads = f"payload{'' if self.unseen == 1 else 's'}"
        clean = f"{self.unseen} {payloads} NOT LOOKED AT, the rest is clean" if self.unseen else "clean"
        return f"{clean}: {numbers}" + (
            f" ({' and '.join(waiting)} samples are still to be trained on)" if waiting else ""
        )

    def _by_group(self, what: str) -> dict[str, int]:
        totals: dict[str, int] = {}
        for epoch in self.epochs:
            for name, group in epoch.groups.items():
                totals[name] = totals.get(name, 0) + getattr(group, what)
        return totals
