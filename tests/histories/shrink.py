"""Shrinking: the shortest history that still breaks the same promise. It knows steps, and asks for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.histories.step import History, Step


def shrunk(history: History, fails: Callable[[History], bool]) -> History:
    """Return a history from which nothing can be left out. ``fails`` tells whether a history still fails."""
    size = max(1, len(history) // 2)
    while size:
        start, is_shorter = 0, False
        while start < len(history):
            shorter = history[:start] + history[start + size :]
            if shorter and fails(shorter):
                history, is_shorter = shorter, True
            else:
                start += size
        size = size if is_shorter and size == 1 else size // 2
    while (simpler := next((one for one in _simpler(history) if fails(one)), None)) is not None:
        history = simpler
    return history


def _simpler(history: History) -> Iterator[History]:
    """Yield the histories that differ from this one in one smaller part."""
    for at, step in enumerate(history):
        if len(history) > 1:
            yield history[:at] + history[at + 1 :]
        for one in _simpler_step(step):
            yield (*history[:at], one, *history[at + 1 :])


def _simpler_step(step: Step) -> Iterator[Step]:
    for at in range(len(step.inner)):
        yield replace(step, inner=step.inner[:at] + step.inner[at + 1 :])
    for at, (point, inner) in enumerate(step.inner):
        for less in _less(point):
            yield replace(step, inner=(*step.inner[:at], (less, inner), *step.inner[at + 1 :]))
        for one in _simpler_step(inner):
            yield replace(step, inner=(*step.inner[:at], (point, one), *step.inner[at + 1 :]))
    for less in _less(step.number):
        yield replace(step, number=less)
    slots = step.who.split("+")
    if len(slots) > 1:
        for slot in slots:
            yield replace(step, who="+".join(one for one in slots if one != slot))


def _less(number: int) -> Iterator[int]:
    """Yield smaller numbers, the smallest first."""
    for less in (0, number // 2, number - 1):
        if 0 <= less < number:
            yield less
