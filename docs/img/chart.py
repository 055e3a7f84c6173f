"""Draw the chart of the landing page from a table of the benchmark results: ``python docs/img/chart.py``.

It writes loading.svg. The table is in docs/benchmarks/results.md, which names the command that measures it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results.md"
CHART = HERE / "loading.svg"
HEADING = "### Photographs as torch batches"
LABELS = (
    ("1 trainer", ""),
    ("1 trainer", "tuned DataLoader"),
    ("4 trainers", ""),
    ("4 trainers", "tuned DataLoaders"),
)
"""The names of the table's first rows, in two lines."""
SERIES = (("inline, through Redis", "#0b6e99"), ("segments, shared files of one host", "#d9480f"))
"""The table's last columns and their colours, which differ for colour-blind eyes, too."""
RATIO = re.compile(r"([\d.]+)x \(([\d.]+)-([\d.]+)\)")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 50, 10, 80, 50
BAR, MOST = 52, 4


class Ratio(NamedTuple):
    """A rate relative to DataLoaders: the median of the rounds, and the lowest and highest of them."""

    median: float
    lowest: float
    highest: float


def ratios() -> list[list[Ratio]]:
    """Return the ratios of each row of `LABELS`, in the order of `SERIES`."""
    section = RESULTS.read_text().partition(HEADING)[2].partition("\n###")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2 : 2 + len(LABELS)]
    found = [[Ratio(*map(float, match)) for match in RATIO.findall(row)] for row in rows]
    if [len(row) for row in found] != [len(SERIES)] * len(LABELS):
        raise SystemExit(f"{RESULTS} under {HEADING!r}: expected {len(LABELS)} rows that end with 2 ratios: {rows}")
    return found


def chart() -> str:
    """Return the chart as SVG: bars with whiskers, and a line at the rate of the DataLoaders."""
    parts = [_text(LEFT, 22, "Photographs as torch batches: rate relative to torch's DataLoader", "start", 16)]
    for number, (name, colour) in enumerate(SERIES):
        x = LEFT + 230 * number
        parts.append(f'<rect x="{x}" y="36" width="14" height="14" fill="{colour}"/>')
        parts.append(_text(x + 20, 48, name, "start", 13))
    for mark in range(MOST + 1):
        line = 'stroke="#333333" stroke-dasharray="6 4"' if mark == 1 else 'stroke="#dddddd"'
        parts.append(f'<path d="M{LEFT} {_y(mark):.1f}H{WIDTH - RIGHT}" {line}/>')
        parts.append(_text(LEFT - 8, _y(mark) + 4, f"{mark}x", "end"))
    step = (WIDTH - LEFT - RIGHT) / len(LABELS)
    for place, (label, row) in enumerate(zip(LABELS, ratios(), strict=True)):
        middle = LEFT + step * (place + 0.5)
        for number, ratio in enumerate(row):
            parts += _bar(middle + (number - 1) * (BAR + 4) + 2, ratio, SERIES[number][1])
        parts += [_text(middle, HEIGHT - BOTTOM + 18 + 16 * at, line, "middle", 13) for at, line in enumerate(label)]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _bar(x: float, ratio: Ratio, colour: str) -> list[str]:
    top, low, high = _y(ratio.median), _y(ratio.lowest), _y(ratio.highest)
    middle = x + BAR / 2
    whisker = f"M{middle:.1f} {low:.1f}V{high:.1f}M{middle - 7:.1f} {low:.1f}h14M{middle - 7:.1f} {high:.1f}h14"
    return [
        f'<rect x="{x:.1f}" y="{top:.1f}" width="{BAR}" height="{_y(0) - top:.1f}" fill="{colour}"/>',
        f'<path d="{whisker}" stroke="#111111" stroke-width="1.5"/>',
        _text(middle, high - 7, f"{ratio.median:g}x", "middle"),
    ]


def _y(ratio: float) -> float:
    return HEIGHT - BOTTOM - ratio / MOST * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{text}</text>'


if __name__ == "__main__":
    CHART.write_text(chart())
