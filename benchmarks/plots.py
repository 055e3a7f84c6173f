"""Curves as SVG, written by hand: a plot needs no more, and no dependency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 260, 40, 50
COLOURS = ("#0b6e99", "#d9480f", "#555555", "#2b8a3e", "#862e9c", "#c2255c", "#e8a200", "#1864ab", "#5c940d", "#a61e4d",
           "#087f5b", "#999999")  # fmt: skip
Curve = Sequence[tuple[float, float]]


def plot(
    path: Path, title: str, x_label: str, y_label: str, ticks: Mapping[float, str], curves: Mapping[str, Curve]
) -> None:
    """Lines over a logarithmic x and a y from 0. ``ticks``: x -> what is written there; points are (x, y)."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return
    frame = _Frame(list(ticks), max(y for _, y in points))
    parts = [_text(LEFT, 22, title, "start", 16), *_axes(frame, ticks, x_label, y_label)]
    for number, (name, curve) in enumerate(curves.items()):
        parts += _curve(frame, name, curve, number)
    body = "\n".join(parts)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


class _Frame:
    """From values to places."""

    def __init__(self, xs: Sequence[float], most: float) -> None:
        self._low, self._high = math.log(min(xs)), math.log(max(xs))
        self.step = _round_step(most / 5)
        self.most = math.ceil(most / self.step) * self.step

    def x(self, value: float) -> float:
        share = (math.log(value) - self._low) / (self._high - self._low or 1)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.most * (HEIGHT - TOP - BOTTOM)


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _axes(frame: _Frame, ticks: Mapping[float, str], x_label: str, y_label: str) -> list[str]:
    parts = []
    for number in range(round(frame.most / frame.step) + 1):
        value, y = number * frame.step, frame.y(number * frame.step)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:,g}", "end"))
    for value, name in ticks.items():
        parts.append(_text(frame.x(value), HEIGHT - BOTTOM + 18, name, "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, "middle"))
    parts.append(_text(LEFT - 55, TOP - 4, y_label, "start"))
    return parts


def _curve(frame: _Frame, name: str, curve: Curve, number: int) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    line = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in curve)
    width = 3 if name.startswith("Penstock") else 1.5
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>']
    parts += [f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" fill="{colour}"/>' for x, y in curve]
    y = TOP + 12 + 20 * number
    parts.append(f'<path d="M{WIDTH - RIGHT + 15} {y}h20" stroke="{colour}" stroke-width="{width}"/>')
    return [*parts, _text(WIDTH - RIGHT + 42, y + 4, name, "start")]


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
