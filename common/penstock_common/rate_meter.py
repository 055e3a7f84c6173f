"""The rate of a process at work: samples for each second of recent work, without the seconds of waiting.

Pure except for the clock that it is given. Producers measure their workers with it, consumers their training loops.
``stream.reported_rates`` reports it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp2
from typing import Protocol

HALF_LIFE_S = 10.0
"""The age at which work counts half. It evens out blocks and steps, and still shows a change of the load within half a
minute."""


@dataclass(frozen=True, slots=True)
class RateReading:
    """The rate at one moment."""

    rate: float | None
    """Samples a second of work; None before the first one was counted."""
    shares: dict[str, float]
    """The parts of the recent time for work and for each kind of waiting. It is empty at first."""
    samples: int
    """All samples that were counted."""
    spent_s: dict[str, float] = field(default_factory=dict)
    """Seconds of work and of each kind of waiting, since the process began."""


class Measured(Protocol):
    """A process whose rate is measured."""

    def look(self) -> RateReading:
        """Return the rate at this moment. Any thread may call it."""


class RateMeter:
    """The rate meter of one process, for any thread. `enter` sets what it does now, `count` adds what it has done.

    `add` is for a process that measures its own times.
    """

    def __init__(self, work: str = "work", clock: Callable[[], float] = time.monotonic) -> None:
        self._work, self._clock = work, clock
        self._lock = threading.Lock()
        self.kind: str | None = None
        """The current kind of work or waiting."""
        self._since = 0.0
        self._uncounted_s = 0.0
        """Work since the last count. Many samples are counted at once, and their seconds with them."""
        self._worked_s = self._weight = 0.0
        self._spent: dict[str, float] = {}
        self._ever: dict[str, float] = {}
        self._samples = 0

    def enter(self, kind: str | None) -> None:
        """Set what the process does now: work, a kind of waiting by its name, or None for what does not count."""
        if kind == self.kind:  # a frequent call; the next reading or change adds the time that has passed
            return
        with self._lock:
            self._pass()
            if kind is None:
                self._uncounted_s = 0.0
            self.kind = kind

    def count(self, samples: int, then: str | None = None) -> None:
        """Count samples that are done. The work since the last count went into them.

        ``then`` is what the process does now.
        """
        with self._lock:
            self._pass()
            self.kind = then or self.kind
            self._count(samples, self._uncounted_s)
            self._uncounted_s = 0.0

    def add(self, spent_s: Mapping[str, float], samples: int, worked_s: float) -> None:
        """Add the seconds of each kind, the samples that are done, and the seconds of work that went into them."""
        with self._lock:
            for kind, seconds in spent_s.items():
                self._spend(kind, seconds)
            self._count(samples, worked_s)

    def look(self) -> RateReading:
        """Return the rate at this moment."""
        with self._lock:
            self._pass()
            total = sum(self._spent.values())
            return RateReading(
                rate=self._weight / self._worked_s if self._weight and self._worked_s > 0 else None,
                shares={kind: spent / total for kind, spent in self._spent.items()} if total > 0 else {},
                samples=self._samples,
                spent_s=dict(self._ever),
            )

    def _pass(self) -> None:
        now = self._clock()
        gone, self._since = max(0.0, now - self._since), now
        if self.kind is None:
            return
        if self.kind == self._work:
            self._uncounted_s += gone
        self._spend(self.kind, gone)

    def _spend(self, kind: str, seconds: float) -> None:
        fade = exp2(-seconds / HALF_LIFE_S)
        for other in self._spent:
            self._spent[other] *= fade
        self._spent[kind] = self._spent.get(kind, 0.0) + seconds
        self._ever[kind] = self._ever.get(kind, 0.0) + seconds

    def _count(self, samples: int, worked_s: float) -> None:
        fade = exp2(-worked_s / HALF_LIFE_S)
        self._worked_s = self._worked_s * fade + worked_s
        self._weight = self._weight * fade + samples
        self._samples += samples
