"""Draw the five figures of the performance page from the stored results: ``python docs/img/figures.py``.

The numbers are in the tables of docs/benchmarks/results.md and docs/internals/profiles.md, and in
docs/benchmarks/figures.json. The results name the command that measures each. The colours are those of Okabe and Ito,
which differ for colour-blind eyes, and no figure tells a thing by its colour alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent
RESULTS = DOCS / "benchmarks" / "results.md"
PROFILES = DOCS / "internals" / "profiles.md"
STORED = DOCS / "benchmarks" / "figures.json"
BLUE, ORANGE, GREEN, PINK, SKY, YELLOW = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"
GREY, LINE, INK = "#767676", "#dddddd", "#222222"
OURS = {"Penstock inline": BLUE, "Penstock segments": ORANGE, "Penstock segments, views": GREEN}
RATIO = re.compile(r"([\d.]+)x(?: \(([\d.]+)-([\d.]+)\))?")


class Canvas:
    """A picture that is drawn part by part. Sizes are in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = width, height
        self._parts: list[str] = []
        self.text(12, 22, title, size=16)

    def text(self, x: float, y: float, text: str, anchor: str = "start", size: int = 12, colour: str = INK) -> None:
        """Draw a line of text. A white edge keeps it legible over lines."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" '
            f'stroke="white" stroke-width="3" paint-order="stroke">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str, edge: str = "none") -> None:
        """Draw a rectangle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}" stroke="{edge}"/>'
        )

    def path(self, path: str, colour: str = LINE, width: float = 1, more: str = "") -> None:
        """Draw a line."""
        self._parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{more}/>')

    def mark(self, x: float, y: float, number: int, colour: str) -> None:
        """Draw a mark of a shape of its own: circle, square, diamond, triangle, or a hollow circle."""
        shapes = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>',
            f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" fill="{colour}"/>',
            f'<path d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z" fill="{colour}"/>',
            f'<path d="M{x:.1f} {y - 5.5:.1f}l5.5 10h-11z" fill="{colour}"/>',
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="white" stroke="{colour}" stroke-width="2"/>',
        )
        self._parts.append(shapes[min(number, 4)])

    def svg(self) -> str:
        """Return the picture as the text of a file."""
        width, height = self._size
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">\n'
            f'<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
        )


class Ratio(NamedTuple):
    """A rate relative to another: the median of the rounds, and the lowest and highest of them."""

    median: float
    lowest: float
    highest: float


def table(page: Path, begin: str) -> list[list[str]]:
    """Return the rows of the first table behind a text of a page, without its head."""
    behind = page.read_text().partition(begin)[2]
    lines = re.search(r"(?:^\|.*\n)+", behind, re.MULTILINE)
    if lines is None:
        raise SystemExit(f"{page}: expected a table behind {begin!r}")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()[2:]]


def stored(name: str) -> dict[str, Any]:
    """Return a part of the stored figures."""
    found: dict[str, Any] = json.loads(STORED.read_text())[name]
    return found


# --- against a DataLoader ---------------------------------------------------------------------------------------------

LABELS = (("1 trainer", ""), ("1 trainer", "tuned DataLoader"), ("4 trainers", ""), ("4 trainers", "tuned DataLoaders"))
"""The names of the table's first rows, in two lines."""


def ratios() -> list[list[Ratio]]:
    """Return the ratios of each row of `LABELS`: inline, then segments."""
    rows = table(RESULTS, "### Photographs as torch batches")[: len(LABELS)]
    found = [[Ratio(*map(float, match)) for match in RATIO.findall(" ".join(row[2:]))] for row in rows]
    if [len(row) for row in found] != [2] * len(LABELS):
        raise SystemExit(f"{RESULTS}: expected {len(LABELS)} rows that end with 2 ratios: {rows}")
    return found


def loading() -> str:
    """Return bars with whiskers: the rate relative to torch's DataLoader."""
    left, right, top, bottom, bar = 50, 750, 80, 290, 52
    canvas = Canvas(760, 340, "Photographs as torch batches: rate relative to torch's DataLoader")
    for x, name, colour in (50.0, "inline, through Redis", BLUE), (280.0, "segments, shared files of one host", ORANGE):
        canvas.box(x, 36, 14, 14, colour)
        canvas.text(x + 20, 48, name, size=13)

    def place(ratio: float) -> float:
        return bottom - ratio / 4 * (bottom - top)

    for mark in range(5):
        canvas.path(f"M{left} {place(mark):.1f}H{right}", *((INK, 1, ' stroke-dasharray="6 4"') if mark == 1 else ()))
        canvas.text(left - 8, place(mark) + 4, f"{mark}x", "end")
    step = (right - left) / len(LABELS)
    for at, (label, row) in enumerate(zip(LABELS, ratios(), strict=True)):
        middle = left + step * (at + 0.5)
        for ratio, colour, x in zip(row, (BLUE, ORANGE), (middle - bar - 2, middle + 2), strict=True):
            canvas.box(x, place(ratio.median), bar, bottom - place(ratio.median), colour)
            canvas.path(
                f"M{x + bar / 2:.1f} {place(ratio.lowest):.1f}V{place(ratio.highest):.1f}"
                + "".join(f"M{x + bar / 2 - 7:.1f} {place(end):.1f}h14" for end in ratio[1:]),
                INK, 1.5,
            )  # fmt: skip
            canvas.text(x + bar / 2, place(ratio.highest) - 7, f"{ratio.median:g}x", "middle")
        for number, line in enumerate(label):
            canvas.text(middle, bottom + 18 + 16 * number, line, "middle", 13)
    return canvas.svg()


# --- by payload -------------------------------------------------------------------------------------------------------


def payloads() -> str:
    """Return a panel for each payload: the rate of each system relative to plain redis-py."""
    found = stored("transport")
    systems, sizes = found["systems"], found["payloads"]
    left, panel, row, low, high = 186, 172, 20, 0.1, 20
    height = 62 + row * len(systems)
    canvas = Canvas(
        left + 4 * panel + 10,
        20 + 2 * height,
        "From writer to batches, by size of a sample: rate relative to plain redis-py",
    )
    for at, size in enumerate(sizes):
        x0, y0 = left + panel * (at % 4), 52 + height * (at // 4)

        def place(ratio: float, x0: float = x0) -> float:
            return x0 + 8 + (panel - 58) * math.log(min(max(ratio, low), high) / low) / math.log(high / low)

        canvas.text(place(low), y0, size, size=14)
        for mark in (0.1, 1, 10):
            colour = GREY if mark == 1 else LINE
            canvas.path(f"M{place(mark):.1f} {y0 + 8}v{row * len(systems)}", colour)
            canvas.text(place(mark), y0 + row * len(systems) + 22, f"{mark:g}x", "middle", 12, GREY)
        for number, (name, rates) in enumerate(systems.items()):
            y = y0 + 17 + row * number
            ratio = rates[at]
            if at % 4 == 0:
                canvas.text(left - 8, y + 4, name, "end", 13, OURS.get(name, INK))
            colour = OURS.get(name, GREY)
            if ratio is None or ratio > high:  # beyond the axis: an arrow at its end
                end = place(low if ratio is None else high)
                canvas.path(
                    f"M{end:.1f} {y - 5}l{-7 if ratio is None else 7} 5l{7 if ratio is None else -7} 5z", colour, 2
                )
                text, x = ("< 0.1x", end + 6) if ratio is None else (f"{ratio:g}x", end + 9)
            else:
                canvas.mark(place(ratio), y, list(OURS).index(name) if name in OURS else 4, colour)
                text, x = f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x", place(ratio) + 9
            canvas.text(x, y + 4, text, size=12, colour=colour)
    x, y = left + 3 * panel + 10, 52 + height
    for number, line in enumerate((
        "Right of 1x is faster than", "plain redis-py.", "", "An arrow is a value", "beyond the axis.", "",
        "tensorcom PUB/SUB lost", "up to a third of its samples.",
    )):  # fmt: skip
        canvas.text(x, y + 20 + 18 * number, line, colour=GREY)
    return canvas.svg()


# --- several trainers -------------------------------------------------------------------------------------------------


def trainers() -> str:
    """Return lines: the aggregate rate of 1 to 8 trainers, relative to one trainer inline."""
    rows = table(RESULTS, "![samples a second in sum]")
    counts = (1, 2, 4, 8)
    left, right, top, bottom, most = 50, 520, 60, 380, 12
    canvas = Canvas(820, 430, "All samples to each trainer, 150 kB: aggregate rate relative to one trainer inline")

    def place(ratio: float) -> float:
        return bottom - ratio / most * (bottom - top)

    xs = [left + 20 + (right - left - 20) * number / 3 for number in range(len(counts))]
    for mark in range(0, most + 1, 2):
        canvas.path(f"M{left} {place(mark):.1f}H{right}")
        canvas.text(left - 8, place(mark) + 4, f"{mark}x", "end")
    for x, count in zip(xs, counts, strict=True):
        canvas.text(x, bottom + 20, str(count), "middle")
    canvas.text((left + right) / 2, bottom + 40, "trainers", "middle")
    ends = []
    for number, (name, *cells) in enumerate(rows):
        rates = [float(cell.rstrip("x")) for cell in cells[:4]]
        colour = OURS.get(name, GREY)
        dashes = "" if name in OURS else f' stroke-dasharray="{2 + 2 * number} 4"'
        points = [f"{x:.1f} {place(rate):.1f}" for x, rate in zip(xs, rates, strict=True)]
        canvas.path("M" + "L".join(points), colour, 3 if name in OURS else 2, dashes)
        for x, rate in zip(xs, rates, strict=True):
            canvas.mark(x, place(rate), number, colour)
        lost = "" if cells[5] == "0" else f", loses {cells[5]}"
        ends.append((place(rates[-1]), f"{rates[-1]:g}x {name}{lost}", colour))
    ends.sort(reverse=True)
    floor = bottom + 16.0
    for y, text, colour in ends:
        floor = min(y, floor - 16)
        canvas.path(f"M{right + 8} {y:.1f}L{right + 18} {floor:.1f}", colour)
        canvas.text(right + 22, floor + 4, text, colour=colour)
    return canvas.svg()


# --- where the CPU goes -----------------------------------------------------------------------------------------------

PARTS = (
    ("kernel", BLUE),
    ("interpreter", YELLOW),
    ("copies", GREEN),
    ("checksums", PINK),
    ("server's code", SKY),
    ("rest", "#c8c8c8"),
)
OF_CLIENTS, OF_SERVER = (1, 0, 2, 3), (0, 2, 4)
"""The parts to which the numbers of a cell belong: places in `PARTS`."""


def cpu() -> str:
    """Return stacked bars: CPU seconds for a GB of samples of 150 kB, by process and kind of work."""
    rows = [row for row in table(PROFILES, "The rest to 100 is numpy") if row[0] != "payload"]
    at = next(number for number, row in enumerate(rows) if row[0] == "150 kB, inline")
    left, scale, bar = 150, 800, 24
    canvas = Canvas(760, 280, "Where the CPU goes at 150 kB a sample: CPU seconds for a GB")
    for number, (name, colour) in enumerate(PARTS):
        canvas.box(12 + 122 * number, 36, 14, 14, colour)
        canvas.text(32 + 122 * number, 48, name)
    y = 66.0
    for mode, cells in zip(("inline", "segments"), rows[at : at + 2], strict=True):
        for process, cell in zip(("writer", "reader", "server"), cells[1:], strict=True):
            total, *shares = map(float, re.findall(r"[\d.]+", cell))
            canvas.text(left - 8, y + 16, f"{mode}, {process}", "end")
            widths = dict(zip(OF_SERVER if process == "server" else OF_CLIENTS, shares, strict=True))
            widths[len(PARTS) - 1] = 100 - sum(shares)
            x = float(left)
            for part, (_, colour) in enumerate(PARTS):
                width = total * widths.get(part, 0) / 100 * scale
                canvas.box(x, y, width, bar, colour)
                if width > 24:
                    canvas.text(x + width / 2, y + 16, f"{widths[part]:g} %", "middle", 11)
                x += width
            canvas.text(x + 6, y + 16, f"{total:g} s/GB")
            y += 32
        y += 12
    return canvas.svg()


# --- lost and repeated ------------------------------------------------------------------------------------------------


def losses() -> str:
    """Return a heat map: samples lost and trained on again when processes die."""
    found = stored("losses")
    left, top, cell, row = 240, 84, 72, 26
    width = left + 8 * cell + 20
    canvas = Canvas(
        width,
        top + row * len(found["systems"]) + 40,
        "Samples of 2,000 that are lost, and trained on again, after kill -9",
    )
    for at, question in enumerate(found["questions"]):
        canvas.text(left + cell * (2 * at + 1), 54, question, "middle")
        for side, name in enumerate(("lost", "again")):
            canvas.text(left + cell * (2 * at + side + 0.5), 74, name, "middle", 11, GREY)
    for number, (name, answers) in enumerate(found["systems"].items()):
        y = top + row * number
        canvas.text(left - 10, y + 17, name, "end", 12, BLUE if name.startswith("Penstock") else INK)
        for at, answer in enumerate(answers):
            x = left + cell * 2 * at
            if isinstance(answer, str):
                canvas.box(x, y, 2 * cell, row, "#f2f2f2", "white")
                canvas.text(x + cell, y + 17, answer, "middle", 11, GREY)
                continue
            for side, count in enumerate(answer):
                canvas.box(x + cell * side, y, cell, row, _heat(count), "white")
                canvas.text(x + cell * (side + 0.5), y + 17, f"{count:,}", "middle")
    y = top + row * len(found["systems"]) + 14
    for number, count in enumerate((0, 1, 10, 100, 1000)):
        canvas.box(left + 60 * number, y, 14, 14, _heat(count), GREY)
        canvas.text(left + 60 * number + 20, y + 12, f"{count:,}", colour=GREY)
    return canvas.svg()


def _heat(count: int) -> str:
    """Return a colour from white for none to dark orange for all, by the logarithm."""
    share = math.log10(1 + count) / math.log10(2001)
    return "#" + "".join(f"{round(255 + (end - 255) * share):02x}" for end in (0xE6, 0x7A, 0x2E))


FIGURES: dict[str, Callable[[], str]] = {
    "loading.svg": loading,
    "payloads.svg": payloads,
    "trainers.svg": trainers,
    "cpu.svg": cpu,
    "losses.svg": losses,
}


def main() -> None:
    """Write the figures to the folder of this file."""
    for name, draw in FIGURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
