"""The number of rounds for the pieces of a run, so that it ends in time even on slow cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class Allowance:
    """A time for all pieces. Each piece gets a share of the time that the earlier pieces have left, by its weight."""

    def __init__(self, seconds: float, weights: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        """Make an allowance. ``weights`` are the relative costs of a round of each piece, in their order."""
        self._clock, self._ends = clock, clock() + seconds
        self._weights = list(weights)

    def piece(self) -> Piece:
        """Return the next piece."""
        now, whole = self._clock(), sum(self._weights)
        return Piece(now, (self._ends - now) * self._weights.pop(0) / whole, self._clock)


class Piece:
    """The time of one piece."""

    def __init__(self, began: float, seconds: float, clock: Callable[[], float]) -> None:
        self._ends, self._last, self._clock = began + seconds, began, clock

    def has_room_for(self, number: int) -> bool:
        """Return whether round ``number``, from 0, ends in time if it takes as long as the round before.

        The first round is always allowed.
        """
        now = self._clock()
        took, self._last = now - self._last, now
        return number == 0 or now + took <= self._ends
