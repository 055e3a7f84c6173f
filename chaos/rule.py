"""The rule for duplicated samples, as docs/internals/chaos.md promises it: pure, from diaries to a reason.

A sample that one batch held may be in a later batch of the group only if the earlier batch was not certainly
acknowledged when something happened to a trainer. That event frees what the trainer held, or makes the trainer yield
entries that others have claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chaos.lives import FAILED, KILLED, LEFT, Diary, Handed, Life

LAPSES_AFTER = 0.8
"""The part of a lease after which a stopped trainer may have lost its entries. The last renewal before the stop may be
one heartbeat old, and an entry is claimed after 0.9 of a lease.
"""

REPLICATED_NS = 1_000_000_000
"""The time after which a replica that follows has received a write."""

Spans = Sequence[tuple[int, int]]
"""[from, to) in ns."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule for one run, with its lease and the outages of its server."""

    lease_ns: int
    outages: Spans
    """The times when no server answered. No trainer can renew, notice a loss or take over then."""
    failovers: Spans = ()
    """The times in which a master of a cluster was replaced, or may have been. The new one may lack acknowledgements
    that the old one had answered, and knows no heartbeat of that time.
    """

    def excuse(self, first: Diary, before: Handed, second: Diary, after: Handed) -> str:
        """Return why a sample of batch ``before`` may be in batch ``after`` as well; '' if it may not."""
        return (
            self._freed(first, before, after.ns)
            or self._held_too_long(second, before.ns, after.ns)
            or self._forgotten(first, before, after.ns)
        )

    def _forgotten(self, diary: Diary, handed: Handed, by_ns: int) -> str:
        """Return whether a failover may have lost the acknowledgement before ``by_ns``, or what the trainer held."""
        for start, end in self.failovers:
            if start <= by_ns and handed.ns <= end and not diary.is_certain(handed.seq, start - REPLICATED_NS):
                return "a failover"
        return ""

    def _freed(self, diary: Diary, handed: Handed, by_ns: int) -> str:
        """Return what took the earlier batch, or its acknowledgement, from its trainer before ``by_ns``."""
        life = diary.life
        # 1. it died with the step, or the acknowledgement, under way
        if life.ending in (KILLED, FAILED) and life.ended_ns <= by_ns and not self._was_certain(diary, handed):
            return f"its trainer {life.ending}"
        # 2. it left without acknowledging it
        if life.ending == LEFT and life.ended_ns <= by_ns and not diary.is_acknowledged(handed.seq):
            return "handed back"
        # 2b. it was asked to leave while no server answered, and left after two seconds
        has_left = life.ending == LEFT and life.ended_ns <= by_ns
        if has_left and self._is_away(life) and not self._was_certain(diary, handed):
            return "left without a server"
        # 3. another process took its name, and with it what it held
        if life.replaced_ns and life.replaced_ns <= by_ns and not diary.is_certain(handed.seq, life.replaced_ns):
            return "its trainer replaced"
        # 4. it did not renew for a whole lease
        for start, end in self._lapses(diary):
            lapsed_ns = start + int(self.lease_ns * LAPSES_AFTER)
            is_held = not diary.is_certain(handed.seq, start) and handed.ns <= self._finds_out(end)
            if lapsed_ns <= by_ns and is_held:
                return "its trainer stopped"
        return ""

    def _held_too_long(self, diary: Diary, before_ns: int, after_ns: int) -> str:
        """Return why the later batch's trainer had lost it and did not know that yet."""
        life = diary.life
        if life.replaced_ns and before_ns >= life.replaced_ns:
            return "by one replaced"
        for start, end in self._lapses(diary):
            # a trainer that is cut off goes on with what it holds, one that is stopped does not
            if start <= before_ns and start + int(self.lease_ns * LAPSES_AFTER) <= after_ns <= self._finds_out(end):
                return "by one stopped"
        return ""

    @staticmethod
    def _was_certain(diary: Diary, handed: Handed) -> bool:
        return diary.is_certain(handed.seq, diary.life.ended_ns)

    def _is_away(self, life: Life) -> bool:
        return any(start <= life.ended_ns < end for start, end in (*self.outages, *life.cuts))

    def _lapses(self, diary: Diary) -> list[tuple[int, int]]:
        spans = [*diary.life.stops, *diary.stalls, *diary.life.cuts]
        return [(start, end) for start, end in spans if end - start >= self.lease_ns * LAPSES_AFTER]

    def _finds_out(self, continued_ns: int) -> int:
        """Return when a trainer that was stopped has certainly renewed, and so knows its losses."""
        until = continued_ns + self.lease_ns
        for start, end in self.outages:
            if start < until and end > continued_ns:
                until += end - max(start, continued_ns)
        return until
