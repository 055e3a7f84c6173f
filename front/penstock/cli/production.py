"""A running production on the screen: a bar for each epoch, bad samples by name, waits with their reason, the last
line.

`produce` and `run` share it. The loop itself is the producer's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from penstock.views.production import CountRate, progress_record, rates_of
from penstock_common.printable import readable_bytes

if TYPE_CHECKING:
    from penstock.cli.console import Console, ProgressBar, ProgressBars
    from penstock_producer.jobs.progress import EpochProgress, ProductionProgress, ProductionSummary


JSON_S = 5.0
"""The time between two lines for a program."""
CLASSES_NAMED = 10
"""The most class names of a tensor in the line at the start."""


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
        self._running: dict[int, tuple[ProgressBar, CountRate]] = {}
        self._whole = CountRate()
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
            self._running[epoch.epoch] = bar, CountRate()
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
            f"{readable_bytes(round(nbytes))}/s" if nbytes else "",
            waiting,
            f"{look.bad} bad" if look.bad else "",
            f"{duration(left_s)} left in all" if left_s is not None else "",
        )
        self._fleet.update(look.workers, "  ".join(part for part in parts if part))

    def _tell_json(self, look: ProductionProgress, now: float) -> None:
        if now - self._printed_s < JSON_S:
            return
        self._printed_s = now
        record = progress_record(self._part, look, self._whole)
        self._console.notice(json.dumps({"progress": record}))


def _note(epoch: EpochProgress, pace: CountRate, left_s: float | None) -> str:
    parts = (
        f"{pace.rates[0]:,.0f}/s" if pace.rates[0] else "",
        readable_bytes(epoch.nbytes) if epoch.nbytes else "",
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


def summary_line(summary: ProductionSummary) -> str:
    """Return the result for a person."""
    rate, _ = rates_of(summary)
    count = len(summary.epochs)
    epochs = f"{count} epoch{'s' if count > 1 else ''} of {summary.stream!r}" if count else f"feed {summary.stream!r}"
    bad = f"{summary.bad:,} of them bad" if summary.bad else "0 bad"
    before = f"{summary.made_before:,} of them made before, " if summary.made_before else ""
    return (
        f"produced {epochs}: {summary.samples:,} samples, {bad}, {before}{readable_bytes(summary.nbytes)} "
        f"in {summary.seconds:.1f} s ({rate:,.0f} samples/s)"
    )
