"""Sets of numbers as text, ``0-4,6``. So meta remembers released epochs in little space."""

from __future__ import annotations

from collections.abc import Iterable


def parse_ranges(text: str) -> list[tuple[int, int]]:
    """Return the inclusive ranges, rising."""
    parts = [part.partition("-") for part in text.split(",") if part]
    return [(int(low), int(high or low)) for low, _, high in parts]


def format_ranges(ranges: list[tuple[int, int]]) -> str:
    """Return the text that `parse_ranges` reads."""
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def ranges_of(numbers: Iterable[int]) -> str:
    """Return numbers, in any order, as text."""
    return format_ranges(merge_ranges((number, number) for number in numbers))


def add_to_ranges(text: str, number: int) -> str:
    """Return the text with one more number in it."""
    return format_ranges(merge_ranges([*parse_ranges(text), (number, number)]))


def merge_ranges(ranges: Iterable[tuple[int, int]], *, gap: int = 1) -> list[tuple[int, int]]:
    """Return the ranges, rising, with neighbours as one.

    Args:
        ranges: the ranges, in any order. They may overlap.
        gap: the distance of an end to the next start at which two ranges are neighbours: 1 for inclusive ends, 0 for
            exclusive ends.
    """
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged
