"""Sets of numbers as text, ``0-4,6``. So meta remembers released epochs in little space."""

from __future__ import annotations


def parse_ranges(text: str) -> list[tuple[int, int]]:
    """Return the inclusive ranges, rising."""
    parts = [part.partition("-") for part in text.split(",") if part]
    return [(int(low), int(high or low)) for low, _, high in parts]


def format_ranges(ranges: list[tuple[int, int]]) -> str:
    """Return the text that `parse_ranges` reads."""
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def add_to_ranges(text: str, number: int) -> str:
    """Return the text with one more number in it."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted([*parse_ranges(text), (number, number)]):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return format_ranges(merged)
