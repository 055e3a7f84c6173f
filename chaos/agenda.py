"""What is due later: continue a stopped process, start a new one, bring the server back."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from itertools import count


class Agenda:
    """Things to do, by time; done by whoever calls `do_due`."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Does it that much later."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), action))

    def do_due(self) -> None:
        """Does what is due by now."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def do_all(self) -> None:
        """Does everything at once, in order."""
        while self._due:
            heapq.heappop(self._due)[2]()
