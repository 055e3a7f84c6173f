"""All printing: results as lines or JSON on stdout, notices and progress on stderr, colours where they are seen."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from penstock_common.printable import printable

if TYPE_CHECKING:
    from penstock.cli.progress import ProgressBars

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class Console:
    """Where a command prints. Thread-safe as far as one line goes; bars and lines never mix.

    Names and reasons may be another program's: no character of theirs commands the terminal.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out, self._err = out, err
        self.progress_shown: ProgressBars | None = None
        """Bars on the terminal now, if any; they step aside while a line is printed."""
        self.is_shared = False
        """Whether a program that was started here prints on the same terminal; see `share`."""

    @property
    def out(self) -> TextIO:
        """For results."""
        return self._out or sys.stdout

    @property
    def err(self) -> TextIO:
        """For everything else."""
        return self._err or sys.stderr

    def line(self, text: str = "") -> None:
        """A line of the result, on stdout, at once."""
        self._print(printable(text, has_colours=self._shows_colours), self.out)

    def lines(self, text: str) -> None:
        """Several lines of the result that nobody but the command wrote."""
        self._print(text, self.out)

    def notice(self, text: str) -> None:
        """A line about what is going on, on stderr."""
        self._print(printable(text), self.err)

    def notices(self, text: str) -> None:
        """Several such lines that nobody but the command wrote."""
        self._print(text, self.err)

    def json(self, value: object) -> None:
        """The whole result for a program, indented, on stdout."""
        text = json.dumps(value, indent=2, ensure_ascii=False)
        self.lines("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))

    def table(self, rows: Sequence[Sequence[object]], head: Sequence[str] = ()) -> None:
        """Aligned columns, numbers to the right."""
        cells = [[printable(str(cell)) for cell in row] for row in ([head] if head else []) + list(rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        numeric = [all(isinstance(cell, int | float) for cell in column) for column in zip(*rows, strict=True)]
        numeric = numeric or [False] * len(widths)
        for index, row in enumerate(cells):
            padded = [f"{c:>{w}}" if n else f"{c:<{w}}" for c, w, n in zip(row, widths, numeric, strict=True)]
            text = "  ".join(padded).rstrip()
            self.line(self.style(text, "bold") if head and index == 0 else text)

    def style(self, text: str, *names: str) -> str:
        """``text`` for stdout in bold, dim, red, green, yellow or cyan, where stdout is a terminal that wants it."""
        if not names or not self._shows_colours:
            return text
        return f"\x1b[{';'.join(_STYLES[name] for name in names)}m{text}\x1b[0m"

    def share(self) -> None:
        """From now on redraw nothing, and print each line on a row of its own: another program prints here, too.

        Nobody knows where its last line ended, so moving the cursor up would erase lines of that program.
        """
        self.is_shared = True

    def row_start(self, stream: TextIO) -> str:
        """Return what moves the cursor to the start of an empty row of a shared terminal.

        A row of spaces ends on the current row if the cursor was at its start, else on the next one.
        """
        return " " * columns_of(stream) + "\r" if self.is_shared and stream.isatty() else ""

    def progress(self, every_s: float = 5.0, clock: Callable[[], float] | None = None) -> ProgressBars:
        """Labelled bars on stderr, redrawn in place on a terminal of our own, else plain lines ``every_s`` seconds."""
        from penstock.cli.progress import ProgressBars

        return ProgressBars(self, every_s, clock)

    @property
    def is_terminal(self) -> bool:
        """Whether somebody looks at stdout."""
        return self.out.isatty()

    @functools.cached_property
    def colours(self) -> str:
        """How a picture may be drawn on stdout: a word of ``penstock.sheet.blocks``."""
        from penstock.sheet.blocks import COLOURS_256, NO_COLOUR, TRUE_COLOUR
        from penstock_common.settings import Settings

        if not self._shows_colours:
            return NO_COLOUR
        return TRUE_COLOUR if Settings.from_environment().colorterm in ("truecolor", "24bit") else COLOURS_256

    def clear(self) -> None:
        """The screen, before it is drawn anew; only where `is_terminal`."""
        print("\x1b[2J\x1b[H", end="", file=self.out)

    @functools.cached_property
    def _shows_colours(self) -> bool:
        if not self.out.isatty():
            return False
        from penstock_common.settings import Settings

        return not Settings.from_environment().no_color

    def _print(self, text: str, stream: TextIO) -> None:
        text = self.row_start(stream) + text
        if self.progress_shown is None:
            print(text, file=stream, flush=True)
        else:
            self.progress_shown.around(lambda: print(text, file=stream, flush=True))


def columns_of(stream: TextIO) -> int:
    """Return the width of the terminal that a stream leads to, or what the environment says of it."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:  # no terminal, or no file at all
        columns = 0
    return columns or shutil.get_terminal_size().columns
