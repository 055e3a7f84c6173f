"""Texts for people: one way to write bytes, times and lists, in every message."""

from __future__ import annotations

import pytest

from penstock_common.printable import listed, readable_bytes, readable_span


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 KiB"), (1, "1 byte"), (1023, "1023 bytes"), (1024, "1 KiB"), (3 << 19, "1.5 MiB"), (10 << 20, "10 MiB"),
        (1 << 30, "1024 MiB"), (21 << 29, "10.5 GiB"), (1 << 40, "1024.0 GiB"), (21 << 39, "10.5 TiB"),
    ],
)  # fmt: skip
def test_bytes_have_at_least_two_digits_that_count(count: int, text: str) -> None:
    """A budget of half a terabyte as 524288 MiB has to be counted by its digits."""
    assert readable_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (172_799, "48 h"),
        (172_800, "2 days"), (864_000, "10 days"),
    ],
)  # fmt: skip
def test_a_time_is_told_in_the_largest_unit_of_which_there_are_two(seconds: float, text: str) -> None:
    """A member that was last seen 864000 s ago has to be worked out."""
    assert readable_span(seconds) == text


def test_a_long_list_says_how_many_it_leaves_out() -> None:
    """A list that is cut without a word looks complete."""
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(range(7), 5) == "0, 1, 2, 3, 4 and 2 more"
    assert listed([], 5) == ""
