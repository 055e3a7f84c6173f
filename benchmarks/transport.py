"""From a writer to batches of a trainer's own: every side, every payload, in interleaved rounds."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cases import Case
from benchmarks.machine import progress
from benchmarks.peers.environments import Unavailable
from benchmarks.rounds import Failed, Round, run_round
from benchmarks.sides import INLINE, PLAIN, SEGMENTS, Side
from benchmarks.spread import Spread, median, ratios, table

HEAD = (
    "", "GB/s", "samples/s", "to plain redis-py", "Penstock inline to it", "Penstock segments to it", "CPU s/GB",
    "writer", "reader", "server", "lost",
)  # fmt: skip


@dataclass
class Measured:
    """One payload's rounds."""

    case: Case
    rounds: dict[str, list[Round]]
    """Side -> its rounds, in the order they were run: those of one number are neighbours."""
    failed: dict[str, str] = field(default_factory=dict)
    """Side -> why it has none."""


def measure(case: Case, sides: Sequence[Side], rounds: int, seconds: float) -> Measured:
    """Each round all sides in turn, every other round the other way about; a side that fails is left out."""
    found = Measured(case, {})
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as kept:
        for number in range(rounds):
            for place, side in list(enumerate(sides))[:: 1 if number % 2 else -1]:
                progress(f"{case.name}, round {number + 1} of {rounds}: {side.name}")
                if side.name not in found.failed:
                    _one(found, side, seconds, Path(kept) / str(place))
    progress("")
    for name in found.failed:
        found.rounds.pop(name, None)
    return found


def _one(found: Measured, side: Side, seconds: float, kept: Path) -> None:
    if reason := side.reasons.get(found.case.name):
        found.failed[side.name] = reason
        return
    kept.mkdir(exist_ok=True)
    try:
        found.rounds.setdefault(side.name, []).append(
            run_round(side, found.case, seconds, kept=None if side.has_writer else kept)
        )
    except (Failed, Unavailable) as error:
        found.failed[side.name] = str(error)


def shown(found: Measured, sides: Sequence[Side]) -> str:
    """A heading, the table, and why sides are missing."""
    case = found.case
    text = f"### {case.name}: {case.sample_bytes:,} bytes a sample, batches of {case.batch}\n\n"
    rows = [_row(found, side.name) for side in sides if side.name in found.rounds]
    reasons = [f"- {name}: {reason}" for name, reason in found.failed.items()]
    return text + "\n".join([table(HEAD, rows), *([""] if reasons else []), *reasons]) + "\n"


def _row(found: Measured, name: str) -> list[str]:
    rounds = found.rounds[name]
    gigabyte = 1e9 / found.case.sample_bytes
    lost = median(rounds, lambda one: one.lost)
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
        f"{100 * lost:.1f} %" if lost else "0",
    ]


def _ratio(one: list[Round] | None, other: list[Round] | None) -> str:
    found: Spread | None = ratios(one, other) if one and other else None
    return found.shown() if found else ""
