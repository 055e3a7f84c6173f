"""A picture as lines of a terminal: two pixels a character, the upper half block in the one's colour on the other's.

Where colours are not wanted, a ramp of characters from light to dark ground. Pure: strings, no printing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.sheet.pictures import Rgb

UPPER = "▀"
RAMP = " .:-=+*#%@"
"""From dark to light, for light letters on a dark ground."""
TRUE_COLOUR, COLOURS_256, NO_COLOUR = "true colour", "256 colours", "no colour"


def lines_of(rgb: Rgb, colours: str) -> list[str]:
    """One string for two rows of pixels; each ends without a colour of its own."""
    if len(rgb) % 2:
        rgb = np.concatenate([rgb, np.zeros_like(rgb[:1])])
    if colours == NO_COLOUR:
        grey = rgb.astype(np.float64).mean(axis=-1)
        pairs = (grey[::2] + grey[1::2]) / 2
        return ["".join(RAMP[int(value * (len(RAMP) - 1) / 255)] for value in row) for row in pairs.tolist()]
    code = _true_colour if colours == TRUE_COLOUR else _of_256
    return [
        "".join(_cell(code(up), code(low)) for up, low in zip(upper, lower, strict=True)) + "\x1b[0m"
        for upper, lower in zip(rgb[::2], rgb[1::2], strict=True)
    ]


def _cell(upper: str, lower: str) -> str:
    return f"\x1b[38;{upper};48;{lower}m{UPPER}"


def _true_colour(pixel: NDArray[np.uint8]) -> str:
    return "2;" + ";".join(map(str, pixel.tolist()))


def _of_256(pixel: NDArray[np.uint8]) -> str:
    """The nearest of the cube of 6 x 6 x 6 colours, or of the 24 greys where it is grey."""
    red, green, blue = pixel.tolist()
    if max(red, green, blue) - min(red, green, blue) < 10 and 8 <= red < 248:
        return f"5;{232 + min(23, (red - 8) // 10)}"
    return f"5;{16 + 36 * _of_6(red) + 6 * _of_6(green) + _of_6(blue)}"


def _of_6(value: int) -> int:
    return 0 if value < 48 else 1 if value < 115 else (value - 35) // 40


def spark(counts: list[float], width: int = 40) -> str:
    """A histogram in one line; a bin that is not empty is always seen."""
    bars = " ▁▂▃▄▅▆▇█"
    top = max(counts, default=0)
    if not top:
        return ""
    return "".join(bars[max(1, round(count / top * 8)) if count else 0] for count in counts[:width])
