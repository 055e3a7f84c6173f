"""The view of a production: its rates, the time that is left, and its JSON. Scripts rely on the keys. Pure."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_producer.jobs.progress import EpochProgress, ProductionProgress, ProductionSummary

WINDOW_S = 15.0
"""The time over which rates are measured, and from which the remaining time is estimated."""
STILL_S = 3.0
"""The time without a sample after which no remaining time is shown while writers wait for space."""
MOST_TOLD = 16
"""The most epochs in a line of JSON, the newest ones."""


class CountRate:
    """The rate at which a count grew in the last seconds, from its first growth on.

    An epoch that waits for its turn is not slow.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self._grew_s: float | None = None
        """When the count last grew, or None if it never did."""

    def add(self, now: float, done: int, nbytes: int) -> None:
        """Note how many samples and bytes there are now."""
        has_begun = self._grew_s is not None
        if self._seen and done > self._seen[-1][1]:
            self._grew_s = now
        if not has_begun:
            self._seen.clear()
        self._seen.append((now, done, nbytes))
        while len(self._seen) > 2 and now - self._seen[1][0] > WINDOW_S:
            self._seen.popleft()

    @property
    def rates(self) -> tuple[float, float]:
        """Return samples and bytes a second, or 0 before anything is known."""
        (first_s, first, first_bytes), (last_s, last, last_bytes) = self._seen[0], self._seen[-1]
        seconds = last_s - first_s
        if seconds < 0.5:
            return 0.0, 0.0
        return max(0, last - first) / seconds, max(0, last_bytes - first_bytes) / seconds

    def left_s(self, planned: int | None, *, is_held_up: bool) -> float | None:
        """Return the seconds until all are done, or None if that is unknown, or nothing moves.

        ``is_held_up`` says that writers wait for space. How long that lasts is up to trainers.
        """
        rate, (now, done, _) = self.rates[0], self._seen[-1]
        is_still = is_held_up and now - (self._grew_s or 0.0) >= STILL_S
        return None if planned is None or not rate or is_still else max(0, planned - done) / rate


def progress_record(part: str, look: ProductionProgress, whole: CountRate) -> dict[str, object]:
    """Return the line of a production that runs. ``part`` is the part of a split, ``whole`` the rate of all epochs."""
    rate, bytes_rate = whole.rates
    left_s = whole.left_s(look.samples, is_held_up=look.waiting > 0)
    return {
        "part": part,
        "epochs": [_epoch_record(epoch) for epoch in look.epochs[-MOST_TOLD:]],
        "samples_per_s": round(rate, 1),
        "bytes_per_s": round(bytes_rate),
        "left_s": None if left_s is None else round(left_s, 1),
        "workers": look.workers,
        "waiting_for_room": look.waiting,
        "waits": look.waits,
    }


def _epoch_record(epoch: EpochProgress) -> dict[str, object]:
    names = ("epoch", "state", "samples", "done", "bad", "nbytes")
    return {name: getattr(epoch, name) for name in names}


def summary_json(summary: ProductionSummary) -> dict[str, object]:
    """Return the result for a program."""
    rate, flow = rates_of(summary)
    return dataclasses.asdict(summary) | {"samples_per_s": round(rate, 1), "bytes_per_s": round(flow)}


def rates_of(summary: ProductionSummary) -> tuple[float, float]:
    """Return samples and bytes a second of this run. What earlier runs made is not among the samples."""
    made = summary.samples - summary.made_before
    return (made / summary.seconds, summary.nbytes / summary.seconds) if summary.seconds else (0.0, 0.0)
