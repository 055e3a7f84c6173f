"""Decode once, train many: everything to each of 1, 2, 4 and 8 trainers, and what they get in sum.

Twice: samples that are there (what the transport itself gives), and samples that cost a millisecond of Python each,
which whoever broadcasts spends once and a loader for each trainer as often as there are trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.cases import IMAGE
from benchmarks.machine import progress
from benchmarks.peers.environments import Unavailable
from benchmarks.rounds import Failed, Round, run_round
from benchmarks.sides import INLINE, Side
from benchmarks.spread import median, ratios, table

TRAINERS = (1, 2, 4, 8)
MAKE_S = 0.001
GRAPH_ONLY = "its workers run graphs, no Python"


@dataclass
class Fanned:
    """One cost of a sample."""

    make_s: float
    rounds: dict[tuple[str, int], list[Round]]
    """Side and trainers -> its rounds; those of one number are neighbours."""
    failed: dict[tuple[str, int], str] = field(default_factory=dict)


def measure(sides: Sequence[Side], trainers: Sequence[int], rounds: int, seconds: float, make_s: float) -> Fanned:
    """Each round all sides with all numbers of trainers."""
    found = Fanned(make_s, {})
    wanted = [(side, count) for count in trainers for side in sides]
    for number in range(rounds):
        for side, count in wanted[:: 1 if number % 2 else -1]:
            key = side.name, count
            progress(f"trainers, round {number + 1} of {rounds}: {count} of {side.name}")
            if make_s and side.module == "tfdata_service":
                found.failed[key] = GRAPH_ONLY
            if key in found.failed:
                continue
            try:
                found.rounds.setdefault(key, []).append(run_round(side, IMAGE, seconds, count, make_s))
            except (Failed, Unavailable) as error:
                found.failed[key] = str(error)
    progress("")
    for key in found.failed:
        found.rounds.pop(key, None)
    return found


def shown(found: Fanned, trainers: Sequence[int]) -> str:
    """A heading, the table, and why figures are missing."""
    cost = f"{1000 * found.make_s:.0f} ms of Python a sample" if found.make_s else "samples that are there"
    head = ["", *(f"{count} trainer{'s' * (count > 1)}" for count in trainers)]
    head += [f"{trainers[-1]} in sum, to one inline", "CPU ms a sample made", f"lost by {trainers[-1]}"]
    names = list(dict.fromkeys(name for name, _ in (*found.rounds, *found.failed)))
    order = sorted(names, key=lambda name: not name.startswith("Penstock"))
    reasons = dict.fromkeys(f"- {name}, {count}: {reason}" for (name, count), reason in found.failed.items())
    rows = [_row(found, name, trainers) for name in order]
    text = f"### Everything to each trainer: {IMAGE.name}, {cost}; samples/s of all together\n\n"
    return text + "\n".join([table(head, rows), *([""] if reasons else []), *reasons]) + "\n"


def _row(found: Fanned, name: str, trainers: Sequence[int]) -> list[str]:
    def rate(count: int) -> str:
        rounds = found.rounds.get((name, count))
        return f"{median(rounds, lambda one: one.samples_per_s):,.0f}" if rounds else "-"

    most = found.rounds.get((name, trainers[-1]))
    one_inline = found.rounds.get((INLINE, 1))
    ratio = ratios(most, one_inline) if most and one_inline else None
    lost = median(most, lambda one: one.lost) if most else 0.0
    cpu = f"{1000 * median(most, lambda one: one.cpu_s / one.samples):.2f}" if most else "-"
    return [name, *map(rate, trainers), ratio.shown() if ratio else "-", cpu, f"{100 * lost:.1f} %" if lost else "0"]
