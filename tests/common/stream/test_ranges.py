"""Ranges of numbers: neighbours become one, and text remembers them."""

from __future__ import annotations

import pytest

from penstock_common.stream.ranges import add_to_ranges, merge_ranges


@pytest.mark.parametrize(
    ("ranges", "joined"),
    [
        ([], []),
        ([(3, 5)], [(3, 5)]),
        ([(4, 6), (0, 2)], [(0, 2), (4, 6)]),
        ([(2, 4), (0, 2)], [(0, 4)]),
        ([(0, 9), (2, 4)], [(0, 9)]),
        ([(0, 5), (3, 8), (9, 10)], [(0, 8), (9, 10)]),
        ([(1, 2), (1, 2)], [(1, 2)]),
    ],
)
def test_ranges_are_joined_where_they_touch_and_nowhere_else(
    ranges: list[tuple[int, int]], joined: list[tuple[int, int]]
) -> None:
    """One bit too many acknowledges a sample that was never trained on. One too few yields a sample again."""
    assert merge_ranges(ranges, gap=0) == joined


def test_numbers_that_follow_each_other_are_one_inclusive_range() -> None:
    """Meta remembers every released epoch, so a long run must stay a short text."""
    assert add_to_ranges("0-2,5", 3) == "0-3,5"
    assert add_to_ranges("0-3,5", 4) == "0-5"
    assert merge_ranges([(5, 6), (0, 1), (2, 2)]) == [(0, 2), (5, 6)]
