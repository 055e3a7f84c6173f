"""From a writer to batches in a trainer's own memory: every side, every payload, in interleaved rounds."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.allowance import Piece
from benchmarks.cases import Case
from benchmarks.machine import progress
from benchmarks.rounds import Round, run_round, warmed_up
from benchmarks.sides import INLINE, PLAIN, SEGMENTS, Side
from benchmarks.spread import Spread, median, ratios, table

HEAD = (
    "", "GB/s", "samples/s", "to plain redis-py", "Penstock inline to it", "Penstock segments to it", "CPU s/GB",
    "writer", "reader", "server", "lost, or why not",
)  # fmt: skip
REASON_CHARACTERS = 120
"""The longest reason in a table, for a side without figures. The file of figures has the whole reason."""


@dataclass
class Measured:
    """The rounds of one payload."""

    case: Case
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    """Side -> its rounds, in the order they were run. Rounds of one number are neighbours."""
    failed: dict[str, str] = field(default_factory=dict)
    """Side -> the reason why it has no rounds, or no more."""

    @property
    def count(self) -> int:
        """Return the most rounds of any side."""
        return max(map(len, self.rounds.values()), default=0)


def measure(
    found: Measured, sides: Sequence[Side], rounds: int, seconds: float, piece: Piece, keep: Callable[[], None],
    is_lasting: bool = False,
) -> None:  # fmt: skip
    """Run rounds of all sides in turn, every other round in reverse order. A side that fails is left out from then on.

    Fills ``found`` as it goes, and calls ``keep`` after each side. Ends early when ``piece`` has no more time. With
    ``is_lasting``, a side's processes are started once for all rounds, and wait while others have their turn. For a few
    sides, that takes a third of the time.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as kept, ExitStack() as stack:
        turns: dict[str, Callable[[], Round]] = {}
        for place, side in enumerate(sides):
            folder = Path(kept) / str(place)
            folder.mkdir()
            what = side, found.case, seconds, 1, 0.0, None if side.has_writer else folder
            turns[side.name] = partial(run_round, *what)
            if is_lasting:
                progress(f"{found.case.name}, warming up: {side.name}")
                _try(found, side, partial(_warm_up, turns, stack, what))
        for number in range(rounds):
            if not piece.has_room_for(number):
                break
            for side in sides[:: 1 if number % 2 else -1]:
                progress(f"{found.case.name}, round {number + 1} of {rounds}: {side.name}")
                if (one := _try(found, side, turns[side.name])) is not None:
                    found.rounds.setdefault(side.name, []).append(one)
                keep()
    progress("")


def _warm_up(turns: dict[str, Callable[[], Round]], stack: ExitStack, what: Any) -> None:
    turns[what[0].name] = warmed_up(stack, *what)


def _try(found: Measured, side: Side, work: Callable[[], Round | None]) -> Round | None:
    if reason := side.reasons.get(found.case.name):
        found.failed[side.name] = reason
    if side.name in found.failed:
        return None
    try:
        return work()
    except Exception as error:  # the failure of one side is shown in its row, and does not end another side
        found.failed[side.name] = why(error)
        return None


def why(error: Exception) -> str:
    """Return the reason in one line."""
    text = str(error) or type(error).__name__
    return " ".join(text.split())


def shown(found: Measured, sides: Sequence[Side]) -> str:
    """Return a heading and the table, with a row for each side, also those without figures."""
    case = found.case
    text = f"### {case.name}: {case.sample_bytes:,} bytes a sample, batches of {case.batch}"
    text += f"; {found.count} round{'s' * (found.count != 1)}\n\n"
    rows = [_row(found, side.name) for side in sides if side.name in found.rounds or side.name in found.failed]
    return text + table(HEAD, rows) + "\n"


def _row(found: Measured, name: str) -> list[str]:
    rounds, reason = found.rounds.get(name), found.failed.get(name, "")
    if not rounds:
        return [name, *["-"] * (len(HEAD) - 2), told(reason)]
    gigabyte = 1e9 / found.case.sample_bytes
    return [
        name,
        f"{median(rounds, lambda one: one.gb_per_s):.2f}",
        f"{median(rounds, lambda one: one.samples_per_s):,.0f}",
        "1" if name == PLAIN else _ratio(rounds, found.rounds.get(PLAIN)),
        "1" if name == INLINE else _ratio(found.rounds.get(INLINE), rounds),
        "1" if name == SEGMENTS else _ratio(found.rounds.get(SEGMENTS), rounds),
        f"{median(rounds, lambda one: one.cpu_s_per_gb):.2f}",
        f"{median(rounds, lambda one: one.writer_cpu_s / one.got * gigabyte):.2f}",
        f"{median(rounds, lambda one: one.reader_cpu_s / one.got * gigabyte):.2f}",
        f"{median(rounds, lambda one: one.server_cpu_s / one.got * gigabyte):.2f}",
        lost_by(rounds) + (f"; no more rounds: {told(reason)}" if reason else ""),
    ]


def lost_by(rounds: list[Round]) -> str:
    """Return what did not arrive, as a table cell."""
    lost = median(rounds, lambda one: one.lost)
    return f"{100 * lost:.1f} %" if lost else "0"


def told(reason: str) -> str:
    """Return the reason as a table cell."""
    return textwrap.shorten(reason.replace("|", "/"), REASON_CHARACTERS, placeholder=" ...")


def _ratio(one: list[Round] | None, other: list[Round] | None) -> str:
    found: Spread | None = ratios(one, other) if one and other else None
    return found.shown() if found else ""
