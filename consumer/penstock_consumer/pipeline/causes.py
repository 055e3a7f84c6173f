"""Whom a wait was for: the rule from times to a cause. Pure: no clock, no thread, no queue.

Times are taken by ``meter`` (the reader's thread) and ``prefetch`` (the training loop's end of the queue).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Cause = Literal["producers", "server", "reader"]
"""What was waited for: samples that were not written yet; the server and the way to it; this process's own work."""

NOTICEABLE = 0.05
"""A share of waiting below this is the ordinary cost of asking, and has no cause worth a word."""
MOSTLY = 0.5
"""A cause of more than this part of the waiting is named alone."""


class Spent(NamedTuple):
    """Seconds by cause."""

    producers: float = 0.0
    server: float = 0.0
    reader: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all causes."""
        return self.producers + self.server + self.reader

    def plus(self, cause: Cause, seconds: float) -> Spent:
        """With so much more of one cause."""
        producers, server, reader = self
        if cause == "producers":
            return Spent(producers + seconds, server, reader)
        return (
            Spent(producers, server + seconds, reader)
            if cause == "server"
            else Spent(producers, server, reader + seconds)
        )

    def and_(self, other: Spent) -> Spent:
        """Both together."""
        return Spent(self.producers + other.producers, self.server + other.server, self.reader + other.reader)

    def since(self, before: Spent) -> Spent:
        """What came after ``before``."""
        return Spent(self.producers - before.producers, self.server - before.server, self.reader - before.reader)

    def times(self, factor: float) -> Spent:
        """So much of each."""
        return Spent(self.producers * factor, self.server * factor, self.reader * factor)


def attribute(seconds: float, booked: Spent, doing: Cause) -> Spent:
    """One stretch of waiting, by cause.

    ``booked`` is what the reader's thread has booked in it. 1. More than the stretch is long: some of it began before,
    and only its proportions count. 2. Less: the rest is what the thread is still at.
    """
    if booked.total > seconds:
        return booked.times(seconds / booked.total)
    return booked.plus(doing, seconds - booked.total)


def verdict(spent: Spent, elapsed_s: float) -> Cause | None:
    """The cause of most of the waiting; None where there was no waiting to speak of."""
    if spent.total < NOTICEABLE * elapsed_s or spent.total <= 0:
        return None
    found: tuple[Cause, ...] = ("producers", "server", "reader")
    return max(found, key=lambda cause: float(getattr(spent, cause)))
