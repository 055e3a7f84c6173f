"""Ratios of neighbouring rounds, shown as the median with the lowest and the highest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.rounds import Round


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of one figure over the rounds of a run."""

    median: float
    low: float
    high: float

    def shown(self, unit: str = "x") -> str:
        """Return the text for a table, with enough digits to compare at any size."""
        if self.low == self.high:
            return f"{_digits(self.median)}{unit}"
        return f"{_digits(self.median)}{unit} ({_digits(self.low)}-{_digits(self.high)})"


def spread(values: Iterable[float]) -> Spread:
    """Return the spread of at least one value."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


def ratios(ours: Sequence[Round], theirs: Sequence[Round]) -> Spread | None:
    """Return the ratios of what readers got a second, round by round, or None without a common round."""
    pairs = [(one.gb_per_s, other.gb_per_s) for one, other in zip(ours, theirs, strict=False)]
    return spread(one / other for one, other in pairs) if pairs and all(other for _, other in pairs) else None


def median(rounds: Sequence[Round], of: Callable[[Round], float]) -> float:
    """Return the median of a figure over rounds."""
    return statistics.median(of(one) for one in rounds)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns, which is readable as plain text."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _digits(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"
