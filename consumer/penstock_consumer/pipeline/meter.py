"""What a reading thread spends its time on, booked by itself a few times for each answer, never for each sample.

What follows from it for a waiting trainer is ``causes``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock_consumer.pipeline.causes import Cause, Spent

LATE_S = 2.0
"""No request waits for producers longer than 1 s: an answer that takes longer than twice that waits for the server."""


class Meter:
    """One thread books; any thread may look at `spent` and `doing`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._since = clock, clock()
        self._is_idle = False
        self._doing: Cause = "reader"
        self.spent = Spent()
        """All that is booked; replaced whole, so that nobody sees half of it."""

    @property
    def doing(self) -> Cause:
        """What the time from the last booking on is for. No answer waits for producers longer than `LATE_S`."""
        return "server" if self._doing == "producers" and self._clock() - self._since > LATE_S else self._doing

    def to(self, doing: Cause) -> None:
        """Books what was done until now; from here on it is something else."""
        now = self._clock()
        if not self._is_idle:
            self.spent = self.spent.plus(self.doing, now - self._since)
        self._since, self._doing, self._is_idle = now, doing, False

    def rest(self) -> None:
        """From here on nothing is done, nor waited for but the trainer: that is booked for nobody."""
        self.to("reader")
        self._is_idle = True

    def received(self, waited_s: float, created_s: float | None) -> None:
        """Books the time since the last booking, in which an answer was received: ``waited_s`` of it in the socket.

        ``created_s`` is when, by this clock, what it brought came into being: until then it was the producers who were
        waited for; None where it brought nothing because there was nothing.
        """
        now = self._clock()
        waited_s = min(waited_s, now - self._since)
        late_s = waited_s if created_s is None else min(max(0.0, created_s - self._since), waited_s)
        late_s = min(late_s, LATE_S)
        own_s = now - self._since - waited_s
        self.spent = self.spent.and_(Spent(producers=late_s, server=waited_s - late_s, reader=own_s))
        self._since, self._doing = now, "reader"
