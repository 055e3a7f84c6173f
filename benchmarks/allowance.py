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
        self._began, self._seconds, self._clock = began, seconds, clock

    def has_room_for(self, number: int) -> bool:
        """Whether round ``number``, from 0, is likely to end in time, by those before it. The first one always is."""
        return number == 0 or (self._clock() - self._began) / number * (number + 1) <= self._seconds
