"""Ratios of neighbouring rounds, and what is shown of them: the median with the lowest and the highest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.rounds import Round


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the rounds of a run."""

    median: float
    low: float
    high: float

    def shown(self, unit: str = "x") -> str:
        """As in a table: with digits enough to compare, whatever the size."""
        if self.low == self.high:
            return f"{_digits(self.median)}{unit}"
        return f"{_digits(self.median)}{unit} ({_digits(self.low)}-{_digits(self.high)})"


def spread(values: Iterable[float]) -> Spread:
    """At least one."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


def ratios(ours: Sequence[Round], theirs: Sequence[Round]) -> Spread | None:
    """Of what readers got a second, round by round; None if they have no round together."""
    pairs = [(one.gb_per_s, other.gb_per_s) for one, other in zip(ours, theirs, strict=False)]
    return spread(one / other for one, other in pairs) if pairs and all(other for _, other in pairs) else None


def median(rounds: Sequence[Round], of: Callable[[Round], float]) -> float:
    """Over rounds."""
    return statistics.median(of(one) for one in rounds)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """As Markdown, the columns aligned so that it reads well as it is."""
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
