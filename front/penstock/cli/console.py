"""All printing: results as lines or JSON on stdout, notices and progress on stderr.

On a terminal, rich draws tables, styles and bars, if it is installed. All other output is plain lines. So is progress
on a terminal that the command shares with a program it started. No other file knows an escape code.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, TextIO

from penstock.cli.interrupts import without_terminal
from penstock_common.printable import printable

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.console import RenderableType
    from rich.live import Live
    from rich.table import Table

Styled = tuple[str, str]
"""A text and its style as rich names it, such as ``("bad", "bold red")``."""

_REDRAW_S = 0.1
"""The time between two drawings. Ten a second look smooth and cost nothing."""
_WIDEST, _NARROWEST = 30, 5
"""The columns of a bar. A terminal too narrow for the least width has no bars."""


class Bar(NamedTuple):
    """A cell that rich draws as a bar. In plain lines its column is left out."""

    done: int
    total: int
    width: int


@dataclass(frozen=True, slots=True)
class TextTable:
    """Columns below their heads. A cell is a text or a number, a text with a style, or a `Bar`."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    numbers: Collection[str] = ()
    """The heads of columns that stand to the right. Columns of nothing but numbers do so without being named."""
    wrapped: Collection[str] | None = None
    """The heads of columns whose texts a narrow terminal wraps (None: all)."""

    def without(self, heads: Collection[str]) -> TextTable:
        """Return the table without some columns."""
        kept = [head not in heads for head in self.head]
        rows = [tuple(compress(row, kept)) for row in self.rows]
        return TextTable(tuple(compress(self.head, kept)), rows, self.numbers, self.wrapped)

    def lines(self) -> list[str]:
        """Return the table as plain lines, without its bars."""
        kept = [not any(isinstance(row[at], Bar) for row in self.rows) for at in range(len(self.head))]
        shown = [[head.replace("\n", " ") for head in self.head]] if any(self.head) else []
        cells = [[_text(cell) for cell in compress(row, kept)] for row in (*shown, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        to_right = list(compress(self._to_right(), kept))
        padded = [
            [
                f"{cell:>{width}}" if right else f"{cell:<{width}}"
                for cell, width, right in zip(row, widths, to_right, strict=True)
            ]
            for row in cells
        ]
        return ["  ".join(row).rstrip() for row in padded]

    def drawn(self, head_style: str = "bold") -> Table:
        """Return the table as rich draws it."""
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=head_style, show_header=any(self.head)
        )
        for head, right in zip(self.head, self._to_right(), strict=True):
            table.add_column(
                Text("\n".join(map(printable, head.split("\n")))), justify="right" if right else "left",
                no_wrap=self.wrapped is not None and head not in self.wrapped, overflow="fold",
            )  # fmt: skip
        for row in self.rows:
            table.add_row(*map(_drawn_cell, row))
        return table

    def _to_right(self) -> list[bool]:
        return [
            head in self.numbers or (bool(self.rows) and all(isinstance(row[at], int | float) for row in self.rows))
            for at, head in enumerate(self.head)
        ]


def _text(cell: object) -> str:
    return printable(cell[0] if isinstance(cell, tuple) else str(cell))


def _drawn_cell(cell: object) -> RenderableType:
    from rich.progress_bar import ProgressBar as Drawing
    from rich.text import Text

    if isinstance(cell, Bar):
        return Drawing(cell.total, cell.done, width=cell.width)
    return Text(_text(cell), style=cell[1] if isinstance(cell, tuple) else "")


class Console:
    """The output of a command. Threads may print lines at any time, and bars and lines never mix.

    Names and reasons may come from another program. None of their characters controls the terminal.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        """The stream for results."""
        self.err = err or sys.stderr
        """The stream for everything else."""
        self._progress: ProgressBars | None = None
        """The bars that are on the terminal now, if any. They disappear while a line is printed."""
        self.is_shared = False
        """Whether a program that was started here prints on the same terminal; see `share`."""

    def line(self, *parts: str | Styled) -> None:
        """Print a line of the result on stdout at once. Its parts follow each other without a space."""
        styled = [(printable(part), "") if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts]
        text = "".join(text for text, _ in styled)
        if self.has_colours and any(style for _, style in styled):
            from rich.text import Text

            text = self._rendered(Text.assemble(*styled), is_wrapped=False)
        self._print(text, self.out)

    def lines(self, text: str) -> None:
        """Print several lines of the result, all written by the command itself."""
        self._print(text, self.out)

    def notice(self, text: str) -> None:
        """Print a line about the progress of the work on stderr."""
        self._print(printable(text), self.err)

    def notices(self, text: str) -> None:
        """Print several such lines, all written by the command itself."""
        self._print(text, self.err)

    def json(self, value: object) -> None:
        """Print the whole result for a program, indented, on stdout."""
        is_unicode = (self.out.encoding or "utf-8").lower().startswith("utf")
        text = json.dumps(value, indent=2, ensure_ascii=not is_unicode)
        self.lines("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))

    def answer(self, value: object, text: str, *, as_json: bool) -> None:
        """Print the whole result, as a value for a program or as a line for a person."""
        if as_json:
            self.json(value)
        else:
            self.line(text)

    def table(self, rows: Sequence[Sequence[object]], head: Sequence[str]) -> None:
        """Print aligned columns, numbers to the right. A narrow terminal wraps long texts in their columns."""
        self.show(TextTable(head, rows))

    def show(self, table: TextTable) -> None:
        """Print a table."""
        if self.terminal is None:
            self._print("\n".join(table.lines()), self.out)
        else:
            self.draw(table.drawn("bold" if self.has_colours else ""))

    def draw(self, drawing: RenderableType) -> None:
        """Print what rich draws. Call it only with a `terminal`."""
        self._print(self._rendered(drawing), self.out)

    def share(self) -> None:
        """Redraw nothing from now on, and print each line on a separate row, because another program prints here, too.

        The end of its last line is not known, so moving the cursor up would erase lines of that program.
        """
        self.is_shared = True

    def row_start(self, stream: TextIO) -> str:
        """Return the characters that move the cursor to the start of an empty row of a shared terminal.

        A row of spaces ends on the current row if the cursor was at its start, else on the next one.
        """
        return " " * columns_of(stream) + "\r" if self.is_shared and stream.isatty() else ""

    def progress(self, every_s: float = 5.0, clock: Callable[[], float] | None = None) -> ProgressBars:
        """Return bars on stderr, redrawn in place on an unshared terminal, else lines every ``every_s`` seconds."""
        return ProgressBars(self, every_s, clock)

    def put(self, bars: ProgressBars | None) -> None:
        """Print lines around these bars from now on, or as they are without bars."""
        self._progress = bars

    @property
    def is_terminal(self) -> bool:
        """Return True if stdout is a terminal."""
        return self.out.isatty()

    @functools.cached_property
    def terminal(self) -> Terminal | None:
        """Return the object with which rich draws on stdout, or None if results are plain lines."""
        return terminal_at(self.out)

    @property
    def has_colours(self) -> bool:
        """Return True if rich draws on stdout and the user did not refuse colours."""
        return self.terminal is not None and not self.terminal.no_color

    def _rendered(self, drawing: RenderableType, *, is_wrapped: bool = True) -> str:
        assert self.terminal is not None
        with self.terminal.capture() as drawn:
            self.terminal.print(drawing, soft_wrap=not is_wrapped)
        return "\n".join(line.rstrip() for line in drawn.get().splitlines())

    def _print(self, text: str, stream: TextIO) -> None:
        text = self.row_start(stream) + text
        with without_terminal():
            if self._progress is None:
                print(text, file=stream, flush=True)
            else:
                self._progress.around(lambda: print(text, file=stream, flush=True))


def columns_of(stream: TextIO) -> int:
    """Return the width of a stream's terminal, or the width that the environment names."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:  # no terminal, or no file at all
        columns = 0
    return columns or shutil.get_terminal_size().columns


def terminal_at(stream: TextIO) -> Terminal | None:
    """Return the object with which rich draws on a stream.

    It is None without rich, and if the stream is not a terminal that can redraw.
    """
    if not stream.isatty():
        return None
    try:
        from rich.console import Console as Terminal
    except ModuleNotFoundError:
        return None
    from penstock_common.settings import Settings

    is_plain = Settings.from_environment().no_color
    terminal = Terminal(file=stream, no_color=is_plain, highlight=False, markup=False, emoji=False)
    return terminal if terminal.is_interactive else None


class ProgressBar:
    """One labelled count. With ``total`` None it has no end."""

    def __init__(
        self, bars: ProgressBars, label: str, total: int | None, unit: str, *, is_last: bool = False, done: int = 0
    ) -> None:
        self._bars = bars
        self.is_last = is_last
        """Whether it stays below all others, also those that are added later."""
        self.label, self.total, self.unit = printable(label), total, unit
        self.done = done
        self.note = ""
        """A text after the numbers, such as a rate or a loss."""

    def update(self, done: int, note: str | None = None, total: int | None = None, *, label: str | None = None) -> None:
        """Set the count and, if given, the note, the total and the label."""
        self.label = self.label if label is None else printable(label)
        self._set(done, note, total)
        self._bars.changed()

    def finish(self, done: int, note: str | None = None, total: int | None = None) -> None:
        """Set the last numbers, and write the bar once, above those that continue."""
        self._set(done, note, total)
        self._bars.remove(self)

    def _set(self, done: int, note: str | None, total: int | None) -> None:
        self.done = done
        self.note = self.note if note is None else printable(note)
        self.total = self.total if total is None else total

    @property
    def percent(self) -> str:
        """Return the part that is done, or '' without an end."""
        return f"{100 * self.done // self.total:3d}%" if self.total else ""

    @property
    def count(self) -> str:
        """Return the count, its end and its unit."""
        return f"{self.done:,}{'' if self.total is None else f'/{self.total:,}'} {self.unit}".rstrip()


class ProgressBars:
    """The bars that a command shows, as a context manager. ``add`` may be called from any thread."""

    def __init__(self, console: Console, every_s: float, clock: Callable[[], float] | None = None) -> None:
        self._console = console
        self._clock = clock or time.monotonic
        self._terminal = None if console.is_shared else terminal_at(console.err)
        self._live: Live | None = None
        self._pause_s = _REDRAW_S if self._terminal else every_s
        self._bars: list[ProgressBar] = []
        self._last = 0.0 if self._terminal else self._clock()
        self._lock = threading.RLock()

    def add(
        self, label: str, total: int | None = None, unit: str = "", *, is_last: bool = False, done: int = 0
    ) -> ProgressBar:
        """Add a bar below the others, but above those that are last."""
        bar = ProgressBar(self, label, total, unit, is_last=is_last, done=done)
        with self._lock:
            self._bars = sorted([*self._bars, bar], key=lambda each: each.is_last)
            self.changed()
        return bar

    def remove(self, bar: ProgressBar) -> None:
        """Write a bar above the others, once, because it no longer changes."""
        with self._lock:
            self._write([bar])
            self._bars.remove(bar)
            self._last = self._clock() - (self._pause_s if self._terminal else 0.0)
            self.changed()

    def changed(self) -> None:
        """Show the bars if the last picture is old enough."""
        with self._lock:
            if self._clock() - self._last >= self._pause_s:
                self._show()

    def around(self, action: Callable[[], None]) -> None:
        """Do ``action`` without the bars on the screen. The next drawing shows them again."""
        with self._lock:
            self._erase()
            action()

    def __enter__(self) -> Self:
        self._console.put(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._write(self._bars)  # the last state stays on the screen
            self._show_cursor()
            self._console.put(None)

    @without_terminal()
    def _show(self) -> None:
        self._last = self._clock()
        if self._terminal is None:
            self._write(self._bars)
            return
        if self._live is None:
            from rich.live import Live

            live = Live(
                console=self._terminal, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            live.start()
            self._live = live  # not before: one that an error or a signal kept from starting cannot be stopped
            self._terminal.show_cursor(True)
        self._live.update(self._drawn(self._bars, self._terminal.width), refresh=True)

    def _erase(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @without_terminal()
    def _show_cursor(self) -> None:
        if self._terminal is not None:  # a signal may have come when a drawing had just hidden it
            self._terminal.show_cursor(True)

    @without_terminal()
    def _write(self, bars: Sequence[ProgressBar]) -> None:
        """Write bars that stay where they are."""
        self._erase()
        if self._terminal is not None:
            self._terminal.print(self._drawn(bars, self._terminal.width), end="")
            return
        width, err = self._label_width, self._console.err
        for bar in bars:
            parts = [f"{bar.label:<{width}}", *([bar.percent] if bar.total else []), bar.count, bar.note]
            err.write(f"{self._console.row_start(err)}{'  '.join(parts).rstrip()}\n")
        err.flush()

    @property
    def _label_width(self) -> int:
        return max((len(bar.label) for bar in self._bars), default=0)

    def _drawn(self, bars: Sequence[ProgressBar], columns: int) -> Table:
        """Return a row for each bar. All rows have the widths that the bars in progress need."""
        from rich.progress_bar import ProgressBar as Drawing
        from rich.table import Table
        from rich.text import Text

        numbers = max((len(f"{bar.percent}  {bar.count}  {bar.note}") for bar in self._bars), default=0)
        left = columns - self._label_width - numbers - 6
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=self._label_width)
        for _ in range(3):
            table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for bar in bars:
            has_bar = bar.total and left >= _NARROWEST
            drawing = Drawing(bar.total, bar.done, width=min(_WIDEST, left)) if has_bar else ""
            table.add_row(Text(bar.label), drawing, bar.percent, bar.count, Text(bar.note))
        return table
