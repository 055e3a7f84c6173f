"""How many rounds the pieces of a run get, so that it ends in time also where the cores are slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class Allowance:
    """So much time for all pieces; a piece is allowed its share, by weight, of what those before it have left."""

    def __init__(self, seconds: float, weights: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        """``weights``: what a round of each piece costs beside the others', in the order in which they come."""
        self._clock, self._ends = clock, clock() + seconds
        self._weights = list(weights)

    def piece(self) -> Piece:
        """The next one."""
        now, whole = self._clock(), sum(self._weights)
        return Piece(now, (self._ends - now) * self._weights.pop(0) / whole, self._clock)


class Piece:
    """One of them."""

    def __init__(self, began: float, seconds: float, clock: Callable[[], float]) -> None:
        self._ends, self._last, self._clock = began + seconds, began, clock

    def has_room_for(self, number: int) -> bool:
        """Asked before round ``number``, from 0: whether it ends in time if it takes as long as the one before.

        The first one always has.
        """
        now = self._clock()
        took, self._last = now - self._last, now
        return number == 0 or now + took <= self._ends
