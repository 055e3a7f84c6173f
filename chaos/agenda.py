"""Actions that are due later: continue a stopped process, start a new one, start the server again."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from itertools import count


class Agenda:
    """Actions in order of time, done by the caller of `do_due`."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Plan an action that many seconds from now."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), action))

    def do_due(self) -> None:
        """Do the actions that are due by now."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def do_all(self) -> None:
        """Do all actions at once, in order."""
        while self._due:
            heapq.heappop(self._due)[2]()
