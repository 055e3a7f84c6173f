"""A running production on the screen: a bar for each epoch, bad samples by name, waits with their reason, the last
line.

`produce` and `run` share it. The loop itself is the producer's.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.cli.console import Console, ProgressBar, ProgressBars
    from penstock_producer.jobs.progress import EpochProgress, ProductionProgress, ProductionSummary


WINDOW_S = 15.0
"""The time over which rates are measured, and from which the remaining time is estimated."""
STILL_S = 3.0
"""The time without a sample after which no remaining time is shown while writers wait for space."""
JSON_S = 5.0
"""The time between two lines for a program."""
CLASSES_NAMED = 10
"""The most class names of a tensor in the line at the start."""
MOST_TOLD = 16
"""The most epochs in such a line, the newest ones."""


class _CountRate:
    """The rate at which a count grew in the last seconds, from its first growth on.

    An epoch that waits for its turn is not slow.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self._grew_s: float | None = None
        """When the count last grew, or None if it never did."""

    def add(self, now: float, done: int, nbytes: int) -> None:
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


class ProductionView:
    """The view of a production: it draws each state that `Production.run` yields.

    ``shown`` is the console's open progress, ``part`` the name of a part of a split.

    With ``as_json`` there are no bars, but a line of JSON on stderr every five seconds.
    """

    def __init__(
        self,
        console: Console,
        shown: ProgressBars,
        part: str = "",
        *,
        as_json: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._shown, self._as_json, self._clock = console, shown, as_json, clock
        self._part = part
        self._running: dict[int, tuple[ProgressBar, _CountRate]] = {}
        self._whole = _CountRate()
        self._ended: set[int] = set()
        self._fleet: ProgressBar | None = None
        self._waits, self._printed_s = "", clock()

    def update(self, look: ProductionProgress) -> None:
        """Draw the newest state."""
        now = self._clock()
        self._whole.add(now, look.done, sum(epoch.nbytes for epoch in look.epochs))
        if self._as_json:
            self._tell_json(look, now)
        else:
            for epoch in look.epochs:
                if epoch.epoch not in self._ended:
                    self._draw(epoch, now, is_held_up=look.waiting > 0)
            self._draw_fleet(look)
        for reason in look.new_bad:
            self._console.notice(f"bad sample: {reason}")
        if look.more_bad:
            self._console.notice(f"more bad samples: `{look.more_bad}`")
        if look.waits and look.waits != self._waits:
            self._console.notice(f"waiting: {look.waits}" if look.is_wait else look.waits)
            self._waits = look.waits

    def _draw(self, epoch: EpochProgress, now: float, *, is_held_up: bool) -> None:
        if epoch.epoch not in self._running:
            name = f"epoch {epoch.epoch}" if epoch.epoch >= 0 else "feed"
            bar = self._shown.add(f"{self._part} {name}".strip(), epoch.samples, "samples")
            self._running[epoch.epoch] = bar, _CountRate()
        bar, pace = self._running[epoch.epoch]
        pace.add(now, epoch.done, epoch.nbytes)
        note = _note(epoch, pace, pace.left_s(epoch.samples, is_held_up=is_held_up))
        if epoch.state != "produced":
            bar.update(epoch.done, note, epoch.samples)
            return
        self._ended.add(epoch.epoch)
        bar.finish(epoch.done, note, epoch.samples)
        del self._running[epoch.epoch]

    def _draw_fleet(self, look: ProductionProgress) -> None:
        if self._fleet is None:
            self._fleet = self._shown.add(f"{self._part} workers".strip(), is_last=True)
        nbytes = self._whole.rates[1]
        left_s = self._whole.left_s(look.samples, is_held_up=look.waiting > 0)
        waiting = f"{look.waiting} wait{'s' if look.waiting == 1 else ''} for space" if look.waiting else ""
        parts = (
            f"{size(round(nbytes))}/s" if nbytes else "",
            waiting,
            f"{look.bad} bad" if look.bad else "",
            f"{duration(left_s)} left in all" if left_s is not None else "",
        )
        self._fleet.update(look.workers, "  ".join(part for part in parts if part))

    def _tell_json(self, look: ProductionProgress, now: float) -> None:
        if now - self._printed_s < JSON_S:
            return
        self._printed_s = now
        rate, bytes_rate = self._whole.rates
        left_s = self._whole.left_s(look.samples, is_held_up=look.waiting > 0)
        record = {
            "part": self._part,
            "epochs": [_record(epoch) for epoch in look.epochs[-MOST_TOLD:]],
            "samples_per_s": round(rate, 1),
            "bytes_per_s": round(bytes_rate),
            "left_s": None if left_s is None else round(left_s, 1),
            "workers": look.workers,
            "waiting_for_room": look.waiting,
            "waits": look.waits,
        }
        self._console.notice(json.dumps({"progress": record}))


def _record(epoch: EpochProgress) -> dict[str, object]:
    names = ("epoch", "state", "samples", "done", "bad", "nbytes")
    return {name: getattr(epoch, name) for name in names}


def _note(epoch: EpochProgress, pace: _CountRate, left_s: float | None) -> str:
    parts = (
        f"{pace.rates[0]:,.0f}/s" if pace.rates[0] else "",
        size(epoch.nbytes) if epoch.nbytes else "",
        f"{duration(left_s)} left" if left_s else "",
        f"{epoch.bad} bad" if epoch.bad else "",
    )
    return "  ".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """Return a duration as text, such as ``0:07``, ``12:05`` or ``3:00:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def tell_classes(console: Console, url: str, streams: Iterable[str]) -> None:
    """Print the class names of each label tensor, because a misspelt text is a class of its own."""
    from penstock_common.stream.client import connect
    from penstock_common.stream.streams import find_stream

    with connect(url) as client:
        found = [stream.info.get("classes") for name in streams if (stream := find_stream(client, name))]
    lines: dict[str, None] = {}
    for tensor, names in (pair for classes in found if isinstance(classes, Mapping) for pair in classes.items()):
        if not isinstance(names, list):  # a user's Writer may say anything
            continue
        shown = [name if name == name.strip() else repr(name) for name in map(str, names[:CLASSES_NAMED])]
        some = ", ".join(shown) + (", ..." if len(names) > CLASSES_NAMED else "")
        lines[f"{tensor}: {len(names)} class{'es' if len(names) > 1 else ''}: {some}"] = None
    for line in lines:  # the parts of a split have the same
        console.notice(line)


def summary_json(summary: ProductionSummary) -> dict[str, object]:
    """Return the result for a program."""
    rate, flow = _rates(summary)
    return dataclasses.asdict(summary) | {"samples_per_s": round(rate, 1), "bytes_per_s": round(flow)}


def summary_line(summary: ProductionSummary) -> str:
    """Return the result for a person."""
    rate, _ = _rates(summary)
    count = len(summary.epochs)
    epochs = f"{count} epoch{'s' if count > 1 else ''} of {summary.stream!r}" if count else f"feed {summary.stream!r}"
    bad = f"{summary.bad:,} of them bad" if summary.bad else "0 bad"
    before = f"{summary.made_before:,} of them made before, " if summary.made_before else ""
    return (
        f"produced {epochs}: {summary.samples:,} samples, {bad}, {before}{size(summary.nbytes)} "
        f"in {summary.seconds:.1f} s ({rate:,.0f} samples/s)"
    )


def _rates(summary: ProductionSummary) -> tuple[float, float]:
    """Return samples and bytes a second of this run. What earlier runs made is not among the samples."""
    made = summary.samples - summary.made_before
    return (made / summary.seconds, summary.nbytes / summary.seconds) if summary.seconds else (0.0, 0.0)


def size(nbytes: int) -> str:
    """Return a number of bytes for people."""
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
