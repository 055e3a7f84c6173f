"""How many steps a rank waits for together. Pure: waiting, and what comes, is ``reader``'s.

Every rank is woken by every step, and a process that is woken among many finds its caches cold: so a rank that waits
for producers takes a few steps at a time, where they come soon enough (decision 23).
"""

from __future__ import annotations

STEPS_AT_ONCE = 3
WITHIN_S = 0.1
"""So long the first of them lies there at most."""
BUDGET_SHARE = 8
"""They are at most this part of the stream's budget, 1 / 8: its writers are to go on meanwhile."""


class Gathering:
    """Of one rank, which tells it what came."""

    def __init__(self, world: int, step_positions: int, budget_bytes: int) -> None:
        """``step_positions`` from one of its steps to the next: of a share of them more than a step has."""
        self._world, self._step, self._budget_bytes = world, step_positions, budget_bytes
        self._sample_bytes = self._each_s = 0.0
        """Of a sample, and from one step to the next, as of late; 0 while they are not known."""
        self._last: tuple[int, float] | None = None

    def received(self, nbytes: int, samples: int) -> None:
        """One entry."""
        self._sample_bytes = nbytes / max(samples, 1)

    def reached(self, position: int, now_s: float) -> None:
        """All below a position is committed now."""
        if self._last is not None and position > self._last[0]:
            each_s = (now_s - self._last[1]) * self._step / (position - self._last[0])
            self._each_s = each_s if not self._each_s else (self._each_s + each_s) / 2
        if self._last is None or position > self._last[0]:
            self._last = position, now_s

    def steps(self) -> int:
        """How many to wait for now: alone, or before anything is known, one."""
        if self._world == 1 or not self._sample_bytes or not self._each_s:
            return 1
        room = int(self._budget_bytes / BUDGET_SHARE / (self._step * self._sample_bytes))
        return max(1, min(STEPS_AT_ONCE, room, int(WITHIN_S / self._each_s)))
