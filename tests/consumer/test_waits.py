"""Waits explain themselves: a first line within five seconds, another when the reason changes, and a timeout."""

from __future__ import annotations

import pytest

from penstock_common.errors import WaitTimeout
from penstock_common.waiting import Wait


class Clock:
    """A clock whose time passes on request."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the seconds."""
        return self.now


class Waiting:
    """A wait, second by second."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self.clock, self.said, self.asked = Clock(), [], 0  # type: ignore[var-annotated]
        self.wait = Wait(self.said.append, timeout_s, self.clock)

    def turn(self, seconds: float, kind: str = "k") -> list[str]:
        """Return the lines that are reported in the next ``seconds``, in steps of a tenth."""
        before = len(self.said)
        for _ in range(round(seconds * 10)):
            self.clock.now += 0.1
            self.wait.because(kind, lambda: self._spell(kind))
        return self.said[before:]

    def _spell(self, kind: str) -> str:
        self.asked += 1
        return f"for {kind}"


def test_the_first_word_comes_within_five_seconds_and_not_at_once() -> None:
    """Short waits are normal and need no line."""
    waiting = Waiting()
    assert waiting.turn(2.5) == []
    assert waiting.turn(2.5) == ["waiting: for k"]


def test_the_same_reason_is_not_repeated_all_the_time() -> None:
    """A log of a night's wait should have lines, not megabytes, and describing a reason asks the server."""
    waiting = Waiting()
    assert len(waiting.turn(70)) == 3
    assert waiting.asked == 3


def test_another_reason_is_said_when_it_appears() -> None:
    """Progress in a wait is worth a line."""
    waiting = Waiting()
    waiting.turn(5)
    assert waiting.turn(5, "other") == ["waiting: for other"]


def test_reasons_that_alternate_do_not_flood() -> None:
    """There is at most one line in three seconds."""
    waiting = Waiting()
    for number in range(100):
        waiting.turn(0.1, f"{number % 2}")
    assert len(waiting.said) <= 4


def test_a_timeout_ends_the_wait_with_the_same_reason() -> None:
    """The error also says what to do."""
    waiting = Waiting(timeout_s=2)
    with pytest.raises(WaitTimeout, match="gave up after 2 s: for k"):
        waiting.turn(3)
    assert waiting.said == []


def test_a_wait_that_is_over_starts_afresh() -> None:
    """The next wait is another one."""
    waiting = Waiting(timeout_s=5)
    waiting.turn(4)
    waiting.wait.over()
    assert waiting.turn(4) == ["waiting: for k"]
