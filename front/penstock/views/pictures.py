"""Arrays as pictures, ``uint8 [height, width, 3]``, and pictures as lines of a terminal.

Images are drawn as they are, tables as heat maps, series as lines. The choice is a guess by shape and dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.views.statistics import CHANNELS, LEAST_SIDE, real

Rgb = NDArray[np.uint8]

MOST_LINES, LEAST_POINTS = 4, 16
"""A table of at most MOST_LINES columns and at least LEAST_POINTS rows is drawn as lines."""
PAPER, GRID, LOST = (255, 255, 255), (225, 225, 225), (255, 0, 255)
LINES = ((31, 90, 160), (200, 70, 40), (40, 140, 70), (130, 80, 160))
HEAT = np.array([(24, 15, 62), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], dtype=np.float64)
"""The colours from low to high: dark blue, green, yellow."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The picture of one sample, and what was done to its values."""

    rgb: Rgb
    note: str = ""


def picture_of(value: NDArray[Any], side: int = 128) -> Picture | None:
    """Return a picture, or None for a single number or an empty array. Lines are drawn ``side`` pixels wide."""
    if value.ndim == 0 or value.size == 0:
        return None
    array, note = _middle(value)
    if array.ndim == 3:
        return _image(array if _has_channels_last(array.shape) else array.transpose(1, 2, 0), note)
    if array.ndim == 2 and min(array.shape) >= LEAST_SIDE and array.dtype in (np.bool_, np.uint8):
        return _image(array[..., None], note)
    if array.ndim == 1 or (array.shape[1] <= MOST_LINES and array.shape[0] >= LEAST_POINTS):
        return _lines(array.reshape(len(array), -1)[:, :MOST_LINES], side, note)
    return _heat(array, note)


def _middle(array: NDArray[Any]) -> tuple[NDArray[Any], str]:
    """Take the middle of leading axes, such as a film's frame, until an image, a table or a series is left."""
    at: list[int] = []
    while array.ndim > 3 or (array.ndim == 3 and not _is_image(array.shape)):
        at.append(len(array) // 2)
        array = array[at[-1]]
    return array, f"[{', '.join(map(str, at))}] " if at else ""


def _is_image(shape: tuple[int, ...]) -> bool:
    return _has_channels_last(shape) or (shape[0] in CHANNELS and min(shape[1:]) >= LEAST_SIDE)


def _has_channels_last(shape: tuple[int, ...]) -> bool:
    return shape[-1] in CHANNELS and min(shape[:2]) >= LEAST_SIDE


def _image(array: NDArray[Any], note: str) -> Picture:
    if array.dtype == np.uint8:
        pixels = array
    else:
        numbers = real(array)
        low, high = _bounds(numbers)
        if not (low == 0 and high == 1):
            note += f"{low:.3g} to {high:.3g}"
        with np.errstate(over="ignore", invalid="ignore"):
            share = (numbers - low) / ((high - low) or 1.0)
            pixels = np.nan_to_num(255 * share.clip(0, 1)).astype(np.uint8)
        if array.shape[-1] in (1, 3):
            pixels = np.where(np.isfinite(numbers).all(axis=-1, keepdims=True), pixels, np.array(LOST, np.uint8))
    if pixels.shape[-1] == 4:  # on a white background
        alpha = pixels[..., 3:].astype(np.float64) / 255
        pixels = (pixels[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)
    return Picture(np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3))), note.strip())


def _bounds(numbers: NDArray[np.float64]) -> tuple[float, float]:
    """Return the values of black and white.

    They are 0 to 1 or -1 to 1 if all values lie within, else the least and the greatest value.
    """
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    for least, most in ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)):
        if least <= low and high <= most:
            return least, most
    return low, high


def _heat(array: NDArray[Any], note: str) -> Picture:
    numbers = real(array)
    finite = np.isfinite(numbers)
    low, high = (float(numbers[finite].min()), float(numbers[finite].max())) if finite.any() else (0.0, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        share = np.nan_to_num((numbers - low) / ((high - low) or 1.0), posinf=0, neginf=0).clip(0, 1)
    steps = share * (len(HEAT) - 1)
    lower = np.minimum(steps.astype(np.int64), len(HEAT) - 2)
    part = (steps - lower)[..., None]
    rgb = (HEAT[lower] * (1 - part) + HEAT[lower + 1] * part).astype(np.uint8)
    rgb[~finite] = LOST
    return Picture(rgb, f"{note}{low:.3g} to {high:.3g}")


def _lines(series: NDArray[Any], side: int, note: str) -> Picture:
    """Draw points ``[n, k]`` as k lines from left to right. A number that is not finite leaves a gap."""
    numbers = real(series)
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    rgb = np.full((side, side, 3), PAPER, dtype=np.uint8)
    rgb[[0, side // 2, side - 1]] = GRID
    with np.errstate(over="ignore", invalid="ignore"):
        share = (numbers - low) / ((high - low) or 1.0)
    for number in range(numbers.shape[1]):
        _draw_line(rgb, share[:, number], LINES[number])
    return Picture(rgb, f"{note}{low:.3g} to {high:.3g}")


def _draw_line(rgb: Rgb, share: NDArray[np.float64], colour: tuple[int, int, int]) -> None:
    side, before = len(rgb), None
    edges = np.linspace(0, len(share), side + 1)
    for x in range(side):
        first = min(int(edges[x]), len(share) - 1)
        points = share[first : max(first + 1, int(edges[x + 1]))]
        points = points[np.isfinite(points)]
        if not len(points):
            before = None
            continue
        top, bottom = (round((1 - float(one)) * (side - 1)) for one in (points.max(), points.min()))
        reach = (top, bottom) if before is None else (min(top, before), max(bottom, before))
        rgb[reach[0] : reach[1] + 1, x] = colour
        before = round((1 - float(points[-1])) * (side - 1))


def resized(rgb: Rgb, height: int, width: int) -> Rgb:
    """Return the picture in another size: a smaller one has means of pixels, a larger one repeats them."""
    return _along(_along(rgb, height, 0), width, 1)


def _along(rgb: Rgb, size: int, axis: int) -> Rgb:
    length = rgb.shape[axis]
    if size >= length:
        repeated: Rgb = np.take(rgb, np.arange(size) * length // size, axis=axis)
        return repeated
    edges = np.linspace(0, length, size + 1).astype(np.int64)
    sums = np.add.reduceat(rgb.astype(np.uint32), edges[:-1], axis=axis)
    counts = np.diff(edges).reshape([-1 if one == axis else 1 for one in range(3)])
    means: Rgb = (sums // counts).astype(np.uint8)
    return means


def fitted(rgb: Rgb, height: int, width: int) -> Rgb:
    """Return the whole picture within ``height`` and ``width`` pixels, with its proportions."""
    scale = min(height / rgb.shape[0], width / rgb.shape[1])
    return resized(rgb, max(1, round(rgb.shape[0] * scale)), max(1, round(rgb.shape[1] * scale)))


UPPER = "▀"
RAMP = " .:-=+*#%@"
"""The characters from dark to light, for light letters on a dark background."""


def lines_of(rgb: Rgb, *, has_colours: bool) -> list[list[str | tuple[str, str]]]:
    """Return the parts of a line for each two rows of pixels.

    With colours they are upper half blocks, each with a style of rich: the colour of one row on that of the other.
    Without, each letter shows the brightness, from dark to light.
    """
    if len(rgb) % 2:
        rgb = np.concatenate([rgb, np.zeros_like(rgb[:1])])
    if not has_colours:
        grey = rgb.astype(np.float64).mean(axis=-1)
        pairs = (grey[::2] + grey[1::2]) / 2
        return [["".join(RAMP[int(value * (len(RAMP) - 1) / 255)] for value in row)] for row in pairs.tolist()]
    return [
        [(UPPER, f"#{bytes(up).hex()} on #{bytes(low).hex()}") for up, low in zip(upper, lower, strict=True)]
        for upper, lower in zip(rgb[::2].tolist(), rgb[1::2].tolist(), strict=True)
    ]


def spark(counts: list[float], width: int = 40) -> str:
    """Return a histogram in one line. A bin that is not empty is always visible."""
    bars = " ▁▂▃▄▅▆▇█"
    top = max(counts, default=0)
    if not top:
        return ""
    return "".join(bars[max(1, round(count / top * 8)) if count else 0] for count in counts[:width])
