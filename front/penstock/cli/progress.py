"""Progress bars: several, labelled, redrawn in place on a terminal of our own, and plain lines anywhere else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from penstock.cli.console import columns_of
from penstock_common.printable import printable

if TYPE_CHECKING:
    from penstock.cli.console import Console

_REDRAW_S = 0.1
"""Ten pictures a second look smooth and cost nothing."""
_WIDEST, _NARROWEST = 30, 5
_CLEAR_LINE = "\x1b[2K"
_UP = "\x1b[{}A"


class Bar:
    """One labelled count. ``total`` None: it counts without an end."""

    def __init__(
        self, progress: ProgressBars, label: str, total: int | None, unit: str, *, is_last: bool = False
    ) -> None:
        self._progress = progress
        self.is_last = is_last
        """Stands below all others, also those that come later."""
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self.note = ""
        """Free text after the numbers, e.g. a rate or a loss."""

    def update(self, done: int, note: str | None = None, total: int | None = None) -> None:
        """Set the count, and where given the note and the total."""
        self.done = done
        self.note = self.note if note is None else note
        self.total = self.total if total is None else total
        self._progress.changed()

    def text(self, label_width: int, bar_width: int) -> str:
        """One line without colours."""
        count = f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"
        parts = [f"{self.label:<{label_width}}"]
        if self.total and bar_width:
            filled = min(bar_width, bar_width * self.done // self.total)
            parts.append("█" * filled + "░" * (bar_width - filled))
        if self.total:
            parts.append(f"{100 * self.done // self.total:3d}%")
        return printable("  ".join([*parts, f"{count} {self.unit}".rstrip(), self.note]).rstrip())


class ProgressBars:
    """A context manager that shows its bars; ``add`` may be called at any time, from any thread."""

    def __init__(self, console: Console, every_s: float, clock: Callable[[], float] | None = None) -> None:
        self._console = console
        self._clock = clock or time.monotonic
        self._redraws = console.err.isatty() and not console.is_shared
        self._pause_s = _REDRAW_S if self._redraws else every_s
        self._bars: list[Bar] = []
        self._drawn_lines = 0
        self._last = 0.0 if self._redraws else self._clock()
        self._lock = threading.RLock()

    def add(self, label: str, total: int | None = None, unit: str = "", *, is_last: bool = False) -> Bar:
        """A new bar below the others, but for those that are last."""
        bar = Bar(self, label, total, unit, is_last=is_last)
        with self._lock:
            self._bars = sorted([*self._bars, bar], key=lambda each: each.is_last)
            self.changed()
        return bar

    def finish(self, bar: Bar) -> None:
        """It will not change any more: it is written once, above what goes on, and not redrawn."""
        with self._lock:
            if bar in self._bars:
                self._erase()
                self._write(bar)
                self._bars.remove(bar)
                self._last = self._clock() - (self._pause_s if self._redraws else 0.0)
                self.changed()

    def changed(self) -> None:
        """Show the bars if the last picture is old enough."""
        with self._lock:
            if self._clock() - self._last >= self._pause_s:
                self._show()

    def around(self, action: Callable[[], None]) -> None:
        """Do ``action`` with the bars out of the way; the next picture brings them back."""
        with self._lock:
            self._erase()
            action()

    def __enter__(self) -> Self:
        self._console.progress_shown = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._show()  # the last word stays on the screen
            self._console.progress_shown = None

    def _show(self) -> None:
        self._last = self._clock()
        self._erase()
        for bar in self._bars:
            self._write(bar)
        self._drawn_lines = len(self._bars) if self._redraws else 0
        self._console.err.flush()

    def _write(self, bar: Bar) -> None:
        columns = columns_of(self._console.err)
        label_width = max((len(each.label) for each in self._bars), default=0)
        numbers = max(len(each.text(label_width, 0)) for each in {*self._bars, bar})
        left = columns - numbers - 3
        bar_width = min(_WIDEST, left) if self._redraws and left >= _NARROWEST else 0
        text = bar.text(label_width, bar_width)
        text = text[: columns - 1] if self._redraws else self._console.row_start(self._console.err) + text
        self._console.err.write(text + "\n")

    def _erase(self) -> None:
        if self._drawn_lines:
            lines = f"{_CLEAR_LINE}\n" * self._drawn_lines
            up = _UP.format(self._drawn_lines)
            self._console.err.write(f"{up}{lines}{up}")
            self._drawn_lines = 0
