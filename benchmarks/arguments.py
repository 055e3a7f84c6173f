"""Types of command-line arguments that several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole_number(least: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number from ``least`` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least}")
        return int(text)

    return number


def byte_size(text: str) -> int:
    """Parse ``2gb``, ``500mb``, ``64kb`` (powers of 1024) or plain bytes, as an argparse type."""
    number = text.strip().lower().removesuffix("b")
    power = "kmgt".find(number[-1:]) + 1 if number[-1:].isalpha() else 0
    try:
        size = int(float(number[:-1] if power else number) * 1024**power)
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 2gb, 500mb or 1048576")
    return size
