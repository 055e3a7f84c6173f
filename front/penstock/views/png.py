"""PNG files by Pillow: contact sheets and bar charts. No other file of the command knows Pillow.

Pillow is imported only for a file, because a trainer's host need not have it, and the terminal does not need it.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.views.pictures import Rgb, fitted
from penstock_common.errors import PenstockError
from penstock_common.extras import needed

with needed("PIL", "drawing pictures"):
    from PIL import Image, ImageDraw, ImageFont

    from penstock_producer.sources.decode import opened

MARGIN, GAP, LINE = 12, 8, 14
INK, FAINT, GROUND, EMPTY = (20, 20, 20), (120, 120, 120), (250, 250, 250), (236, 236, 236)
BAR = (31, 90, 160)
MOST_PIXELS = 64_000_000
"""The largest encoded image that is decoded for showing. A larger one would take half of a small machine's memory."""


@dataclass(frozen=True, slots=True)
class SheetTile:
    """One picture of a contact sheet, with its captions."""

    rgb: Rgb | None
    text: Sequence[str]
    """The text in place of a missing picture."""
    captions: Sequence[str]


def decode(data: bytes) -> Rgb | None:
    """Return the pixels of an encoded image, or None if it is invalid, too large or damaged.

    It may have the formats that sources read. Pillow's others include PostScript, which starts Ghostscript.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with opened(data) as image:
                if image.width * image.height > MOST_PIXELS:
                    return None
                return np.asarray(image.convert("RGB"))
    except Exception:  # with damaged files, decoders raise errors of any class
        return None


def contact_sheet(
    tiles: Sequence[SheetTile], title: str, *, side: int = 128, columns: int | None = None
) -> Image.Image:
    """Draw rows of tiles under a title, each with its captions below."""
    columns = columns or max(1, min(len(tiles), round(math.sqrt(len(tiles) * 1.5))))
    lines = max((len(tile.captions) for tile in tiles), default=0)
    high = side + 4 + lines * LINE + GAP
    rows = -(-len(tiles) // columns)
    width = max(2 * MARGIN + columns * (side + GAP) - GAP, 2 * MARGIN + 7 * len(title))
    sheet = Image.new("RGB", (width, 2 * MARGIN + LINE + GAP + rows * high), GROUND)
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, MARGIN), title, fill=INK, font=_font())
    for number, tile in enumerate(tiles):
        left = MARGIN + number % columns * (side + GAP)
        top = MARGIN + LINE + GAP + number // columns * high
        pen.rectangle((left, top, left + side - 1, top + side - 1), fill=EMPTY)
        if tile.rgb is not None:
            fit = fitted(tile.rgb, side, side)
            at = (left + (side - fit.shape[1]) // 2, top + (side - fit.shape[0]) // 2)
            sheet.paste(Image.fromarray(fit), at)
        for line, text in enumerate(tile.text[: side // LINE] if tile.rgb is None else ()):
            pen.text((left + 4, top + 2 + line * LINE), _cut(text, side - 8), fill=INK, font=_font())
        for line, text in enumerate(tile.captions):
            shade = INK if line == 0 else FAINT
            pen.text((left, top + side + 2 + line * LINE), _cut(text, side), fill=shade, font=_font())
    return sheet


def bars(
    title: str, counts: Sequence[float], labels: Sequence[str], *, width: int = 640, height: int = 320
) -> Image.Image:
    """Draw a bar for each count. The labels are spread below: one for each bar, or fewer."""
    chart = Image.new("RGB", (width, height), GROUND)
    pen = ImageDraw.Draw(chart)
    pen.text((MARGIN, MARGIN), _cut(title, width - 2 * MARGIN), fill=INK, font=_font())
    top, bottom = MARGIN + LINE + GAP, height - MARGIN - LINE - 4
    most, step = max(counts, default=0) or 1, (width - 2 * MARGIN) / max(1, len(counts))
    for number, count in enumerate(counts):
        left = MARGIN + number * step
        peak = bottom - (bottom - top) * count / most
        if count:
            pen.rectangle((left, min(peak, bottom - 1), left + max(1.0, step - 1) - 1, bottom), fill=BAR)
    pen.line((MARGIN, bottom + 1, width - MARGIN, bottom + 1), fill=INK)
    greatest = f"most: {most:,.0f}"
    pen.text((width - MARGIN - _font().getlength(greatest), MARGIN), greatest, fill=FAINT, font=_font())
    width_each = (width - 2 * MARGIN) / max(1, len(labels))
    for number, label in enumerate(labels):
        pen.text((MARGIN + number * width_each, bottom + 4), _cut(label, width_each - 4), fill=INK, font=_font())
    return chart


def make_folder(path: Path) -> None:
    """Make a folder in one that exists. Raises PenstockError."""
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise PenstockError(f"cannot make the folder {str(path)!r}: {error.strerror or error}") from None


def save(image: Image.Image, path: Path) -> None:
    """Write a PNG atomically, so that no program shows half of it. Raises PenstockError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        image.save(part, format="PNG")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        if not path.parent.exists():  # a mistyped path should not become a tree of folders
            raise PenstockError(f"there is no folder {str(path.parent)!r} to write {path.name!r} in") from None
        raise PenstockError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(11)


def _cut(text: str, width: float) -> str:
    """Return as much of a text as fits into ``width`` pixels."""
    font = _font()
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "..") > width:
        text = text[:-1]
    return text + ".."
