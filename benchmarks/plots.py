"""Curves as SVG, written without a dependency.

    python -m benchmarks.plots FIGURES.json [FIGURES.json ...] FOLDER

draws the figures again that ``python -m benchmarks`` and ``python -m benchmarks.growth`` wrote with ``--json``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.cases import IMAGE
from benchmarks.results import rounds_of
from benchmarks.rounds import Round
from benchmarks.sides import BROADCAST, ONE_READER, PLAIN
from benchmarks.spread import median, ratios

WIDTH, HEIGHT = 940, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 310, 50, 60
COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#555555", "#862e9c", "#c2255c", "#e8a200", "#1864ab", "#5c940d", "#a61e4d",
           "#087f5b", "#999999")  # fmt: skip
Curve = Sequence[tuple[int, float]]
"""Points: the index of the tick, from 0, and the value."""


@dataclass(frozen=True)
class Axis:
    """The axis of values: from 0, or logarithmic between two ends. Values beyond the ends are drawn at the edge."""

    label: str
    marks: Sequence[float]

    @property
    def is_logarithmic(self) -> bool:
        """Return whether it does not begin at 0."""
        return self.marks[0] > 0

    def place(self, value: float) -> float:
        """Return the position of a value from 0 (bottom) to 1 (top)."""
        low, high = self.marks[0], self.marks[-1]
        if self.is_logarithmic:
            return min(1.0, max(0.0, math.log(max(value, 1e-12) / low) / math.log(high / low)))
        return value / high


TELLING = 0.01
"""The share of lost samples below which they may be those under way when a turn ended."""
RATIO = Axis("times plain redis-py", (0.1, 0.2, 0.5, 1, 2, 5, 10, 20))


def from_zero(label: str, most: float) -> Axis:
    """Return an axis with about five marks, up to the largest value."""
    step = _round_step(most / 5)
    return Axis(label, [number * step for number in range(math.ceil(most / step - 1e-9) + 1)])


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def plot(path: Path, title: str, x_label: str, ticks: Sequence[str], axis: Axis, curves: Mapping[str, Curve]) -> None:
    """Draw lines over equally spaced ticks."""
    xs = [LEFT + number * (WIDTH - LEFT - RIGHT) / max(1, len(ticks) - 1) for number in range(len(ticks))]
    parts = [_text(LEFT, 22, title, "start", 16), *_axes(xs, ticks, x_label, axis)]
    for number, (name, curve) in enumerate(curves.items()):
        parts += _curve([(xs[at], _y(axis, value)) for at, value in curve], name, number)
    body = "\n".join(parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)


def _axes(xs: Sequence[float], ticks: Sequence[str], x_label: str, axis: Axis) -> list[str]:
    parts = []
    for mark in axis.marks:
        colour = "#999999" if axis.is_logarithmic and mark == 1 else "#dddddd"
        parts.append(f'<path d="M{LEFT} {_y(axis, mark):.1f}H{WIDTH - RIGHT}" stroke="{colour}"/>')
        parts.append(_text(LEFT - 8, _y(axis, mark) + 4, f"{mark:,g}", "end"))
    for x, name in zip(xs, ticks, strict=True):
        for line, part in enumerate(name.split(", ")):
            parts.append(_text(x, HEIGHT - BOTTOM + 16 + 13 * line, part, "middle", 11))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle"))
    return [*parts, _text(LEFT - 55, TOP - 12, axis.label, "start")]


def _curve(places: Sequence[tuple[float, float]], name: str, number: int) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    width = 3 if name.startswith("Penstock") else 1.5
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>']
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    y = TOP + 12 + 20 * number
    parts.append(f'<path d="M{WIDTH - RIGHT + 20} {y}h20" stroke="{colour}" stroke-width="{width}"/>')
    return [*parts, _text(WIDTH - RIGHT + 47, y + 4, name, "start")]


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def draw(plain: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the curves that a file of figures has, and return the files that were written."""
    found = [*_transport(plain.get("transport", []), folder), *_growth(plain.get("axes", []), folder)]
    return found + [path for one in plain.get("trainers", []) for path in _trainers(one, folder)]


def _transport(measured: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw the ratios to plain redis-py, payload by payload."""
    curves: dict[str, list[tuple[int, float]]] = {}
    lost: dict[str, float] = {}
    for at, one in enumerate(measured):
        rounds = rounds_of(one)
        for name, taken in rounds.items():
            if name != PLAIN and (ratio := ratios(taken, rounds.get(PLAIN, []))):
                curves.setdefault(name, []).append((at, ratio.median))
                lost[name] = max(lost.get(name, 0.0), median(taken, lambda each: each.lost))
    ticks = [one["case"]["name"].replace(" rows", "") for one in measured]
    title = "From writer to batches, one reader; what is below 0.1 lies at the edge"
    return _drawn(folder / "transport.svg", title, "a sample", ticks, RATIO, _named(curves, lost))


def _trainers(fanned: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what all trainers get together."""
    counts = sorted({one["trainers"] for one in fanned["rounds"]})
    curves: dict[str, list[tuple[int, float]]] = {}
    lost: dict[str, float] = {}
    for one in sorted(fanned["rounds"], key=lambda one: int(one["trainers"])):
        taken, name = [Round(**each) for each in one["rounds"]], one["side"]
        rate = median(taken, lambda each: each.samples_per_s)
        curves.setdefault(name, []).append((counts.index(one["trainers"]), rate))
        lost[name] = max(lost.get(name, 0.0), median(taken, lambda each: each.lost))
    payload = fanned.get("payload", IMAGE.name)
    title = f"{payload} samples, everything to each trainer{', 1 ms of Python a sample' if fanned['make_s'] else ''}"
    stem = "trainers" + "-making" * bool(fanned["make_s"])
    stem += f"-{re.sub(r'[^a-z0-9]+', '-', payload)}" if payload != IMAGE.name else ""
    most = max((rate for curve in curves.values() for _, rate in curve), default=1.0)
    return _drawn(
        folder / f"{stem}.svg", title, "trainers",
        list(map(str, counts)), from_zero("samples/s in sum", most), _named(curves, lost),
    )  # fmt: skip


def _named(curves: Mapping[str, Curve], lost: Mapping[str, float]) -> dict[str, Curve]:
    """Return the curves in the tables' order, so that a side keeps its colour. A side that loses samples is marked."""
    order = [side.name for side in (*ONE_READER, *BROADCAST)]
    names = sorted(curves, key=lambda name: order.index(name) if name in order else len(order))
    return {
        name + (f" (loses up to {100 * lost[name]:.0f} %)" if lost[name] > TELLING else ""): curves[name]
        for name in names
    }


def _growth(axes: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw the cost of a sample relative to that of the smallest size, axis by axis."""
    curves = {}
    for one in axes:
        if not one["is_waiting"]:
            sizes = [name.removeprefix("ordered, ").split(" ")[0] for name in one["sizes"]]
            values = [each["ratio"]["median"] for each in one["sizes"].values()]
            curves[f"{one['axis']}: {' - '.join(sizes)}"] = list(enumerate(values))
    most = max((value for curve in curves.values() for _, value in curve), default=1.0)
    ticks = ["smallest", "middle", "largest"]
    axis = from_zero("CPU a sample, times the smallest's", most)
    return _drawn(folder / "growth.svg", "What a sample costs as one thing grows", "size", ticks, axis, curves)


def _drawn(
    path: Path, title: str, x_label: str, ticks: Sequence[str], axis: Axis, curves: Mapping[str, Curve]
) -> list[Path]:
    if not curves:
        return []
    plot(path, title, x_label, ticks, axis, curves)
    return [path]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", nargs="+", type=Path, help="what --json wrote")
    parser.add_argument("folder", type=Path, help="where the plots go")
    args = parser.parse_args()
    for figures in args.figures:
        for path in draw(json.loads(figures.read_text()), args.folder):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
