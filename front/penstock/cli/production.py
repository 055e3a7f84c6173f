"""A running production on the screen: a bar per epoch, bad samples by name, waits with their reason, the last line.

Shared by `produce` and `run`; the loop itself is the producer's.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock.cli.progress import Bar, Progress
    from penstock_producer.progress import Progress as Look
    from penstock_producer.progress import Summary


class ProductionView:
    """Draws what `Production.run` yields. ``shown`` is the console's open progress, ``part`` of a split."""

    def __init__(self, console: Console, shown: Progress, part: str = "") -> None:
        self._console, self._shown, self._part = console, shown, f"{part} " if part else ""
        self._bars: dict[int, Bar] = {}
        self._began: dict[int, tuple[float, int]] = {}
        self._told = ""

    def update(self, look: Look) -> None:
        """The newest state."""
        now = time.monotonic()
        for epoch in look.epochs:
            if epoch.epoch not in self._bars:
                self._bars[epoch.epoch] = self._shown.add(
                    f"{self._part}{_called(epoch.epoch)}", epoch.samples, "samples"
                )
                self._began[epoch.epoch] = (now, epoch.done)
            bar = self._bars[epoch.epoch]
            if bar.done == epoch.done and epoch.state != "produced":
                continue
            began, first = self._began[epoch.epoch]
            if epoch.done != bar.done:
                bar.update(epoch.done, _note(epoch.done - first, now - began, epoch.bad), epoch.samples)
        for reason in look.new_bad:
            self._console.notice(f"bad sample: {reason}")
        if look.waits and look.waits != self._told:
            self._console.notice(f"waiting: {look.waits}")
            self._told = look.waits


def _note(made: int, seconds: float, bad: int) -> str:
    rate = f"{made / seconds:,.0f}/s" if seconds > 0.5 else ""
    return "  ".join(part for part in (rate, f"{bad} bad" if bad else "") if part)


def _called(epoch: int) -> str:
    return f"epoch {epoch}" if epoch >= 0 else "feed"


def tell(console: Console, summary: Summary, as_json: bool) -> None:
    """The last word."""
    rate = summary.samples / summary.seconds if summary.seconds else 0.0
    if as_json:
        console.json(dataclasses.asdict(summary) | {"samples_per_s": round(rate, 1)})
        return
    count = len(summary.epochs)
    epochs = f"{count} epoch{'s' if count > 1 else ''} of {summary.stream!r}" if count else f"feed {summary.stream!r}"
    console.line(
        f"produced {epochs}: {summary.samples:,} samples, {summary.bad} bad, {size(summary.nbytes)} "
        f"in {summary.seconds:.1f} s ({rate:,.0f} samples/s)"
    )


def size(nbytes: int) -> str:
    """Bytes for people."""
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
