"""Decode once, train many: everything to each of 1, 2, 4, 8 and 16 trainers, and what they get together.

It runs with ready samples (the limit of the transport itself), and with samples that cost a millisecond of Python each.
A broadcasting side spends that once, and a loader for each trainer spends it as often as there are trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.allowance import Piece
from benchmarks.cases import IMAGE, Case
from benchmarks.machine import progress
from benchmarks.rounds import Round, run_round
from benchmarks.sides import INLINE, Side
from benchmarks.spread import median, ratios, table
from benchmarks.transport import lost_by, told, why

TRAINERS = (1, 2, 4, 8, 16)
MAKE_S = 0.001
GRAPH_ONLY = "its workers run graphs, no Python"


@dataclass
class Fanned:
    """The results for one cost of a sample."""

    make_s: float
    rounds: dict[tuple[str, int], list[Round]] = field(default_factory=dict)
    """(side, trainers) -> its rounds. Rounds of one number are neighbours."""
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    """(side, trainers) -> the reason why it has no rounds, or no more."""
    case: Case = IMAGE


def measure(
    found: Fanned, pairs: Sequence[tuple[Side, int]], rounds: int, seconds_of: Callable[[int], float],
    piece: Piece, keep: Callable[[], None],
) -> None:  # fmt: skip
    """Run a round of all pairs of a side and a number of trainers in turn, as ``transport.measure`` does.

    ``seconds_of`` returns the approximate time on the clock for a number of trainers.
    """
    for number in range(rounds):
        if not piece.has_room_for(number):
            break
        for side, count in pairs[:: 1 if number % 2 else -1]:
            key = side.name, count
            progress(f"trainers, round {number + 1} of {rounds}: {count} of {side.name}")
            if found.make_s and side.module == "tfdata_service":
                found.failed[key] = GRAPH_ONLY
            if key in found.failed:
                continue
            try:
                one = run_round(side, found.case, seconds_of(count), count, found.make_s)
                found.rounds.setdefault(key, []).append(one)
            except Exception as error:  # as in transport
                found.failed[key] = why(error)
            keep()
    progress("")


def shown(found: Fanned, sides: Sequence[Side], trainers: Sequence[int]) -> str:
    """Return a heading and the table, with a row for each side, also those without figures."""
    cost = f"{1000 * found.make_s:.0f} ms of Python a sample" if found.make_s else "samples that are there"
    head = ["", *(f"{count} trainer{'s' * (count > 1)}" for count in trainers)]
    head += [f"{trainers[-1]} in sum, to one inline", "CPU ms a sample made", f"lost by {trainers[-1]}, or why not"]
    names = {name for name, _ in (*found.rounds, *found.failed)}
    rows = [_row(found, side.name, trainers) for side in sides if side.name in names]
    count = max(map(len, found.rounds.values()), default=0)
    text = f"### Everything to each trainer: {found.case.name}, {cost}; samples/s of all together"
    return f"{text}; {count} round{'s' * (count != 1)}\n\n{table(head, rows)}\n"


def _row(found: Fanned, name: str, trainers: Sequence[int]) -> list[str]:
    def rate(count: int) -> str:
        rounds = found.rounds.get((name, count))
        return f"{median(rounds, lambda one: one.samples_per_s):,.0f}" if rounds else "-"

    most = found.rounds.get((name, trainers[-1]))
    one_inline = found.rounds.get((INLINE, 1))
    ratio = ratios(most, one_inline) if most and one_inline else None
    lost = lost_by(most) if most else ""
    cpu = f"{1000 * median(most, lambda one: one.cpu_s / one.samples):.2f}" if most else "-"
    reasons: dict[str, list[str]] = {}
    for count in trainers:
        if reason := found.failed.get((name, count)):
            reasons.setdefault(told(reason), []).append(str(count))
    last = [*([lost] if lost else []), *(f"{', '.join(counts)}: {reason}" for reason, counts in reasons.items())]
    return [name, *map(rate, trainers), ratio.shown() if ratio else "-", cpu, "; ".join(last)]
