"""Penstock's targets, with the results of a run: pure, from rounds to rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cases import BY_BATCH, IMAGE, ONE_BY_ONE
from benchmarks.fanout import Fanned
from benchmarks.rounds import Round
from benchmarks.sides import INLINE, IPC, PLAIN, SEGMENTS, TFDATA, VIEWS
from benchmarks.spread import Spread, median, ratios, spread, table
from benchmarks.transport import Measured

LEAST_BYTES = 4096
"""The smallest payload of the curve that should be flat."""

IN_MEMORY = {SEGMENTS: "segments", VIEWS: "segments with views"}


@dataclass(frozen=True)
class Target:
    """One target."""

    what: str
    wanted: float
    is_most: bool
    """Whether the value is an upper limit. Otherwise it is a lower one."""
    found: Spread
    unit: str = "x"

    @property
    def is_met(self) -> bool:
        """Return whether the median reaches the target."""
        return self.found.median <= self.wanted if self.is_most else self.found.median >= self.wanted

    def row(self) -> list[str]:
        """Return a row of the table."""
        wanted = spread([self.wanted]).shown(self.unit)
        return [
            self.what,
            f"at {'most' if self.is_most else 'least'} {wanted}",
            self.found.shown(self.unit),
            "yes" if self.is_met else "no",
        ]

    def plain(self) -> dict[str, Any]:
        """Return the target for JSON."""
        return asdict(self) | {"is_met": self.is_met}


def targets(transport: Sequence[Measured], fanned: Sequence[Fanned], tfdata: Mapping[str, Spread]) -> list[Target]:
    """Return the targets for which the run has figures."""
    by_case = {one.case.name: one.rounds for one in transport}
    found = [*_images(by_case.get(IMAGE.name, {})), *_rows(by_case)]
    found += [Target(f"tf.data dataset, {what}, to the numpy path", 0.9, False, one) for what, one in tfdata.items()]
    found += [target for plane in (INLINE, SEGMENTS) for target in _flat(plane, transport)]
    return found + [
        target for one in fanned if one.case.name == IMAGE.name and not one.make_s for target in _fanned(one)
    ]


def shown(found: Sequence[Target]) -> str:
    """Return the targets as a table."""
    return "### Targets\n\n" + table(("", "wanted", "found", "reached"), [one.row() for one in found]) + "\n"


def _images(rounds: dict[str, list[Round]]) -> list[Target]:
    inline = rounds.get(INLINE, [])
    found = []
    if (plain := ratios(inline, rounds.get(PLAIN, []))) is not None:
        found.append(Target("150 kB, inline, to plain redis-py + hiredis (floor 1.8)", 2.2, False, plain))
    if (service := ratios(inline, rounds.get(TFDATA, []))) is not None:
        found.append(Target("150 kB, inline, to tf.data service", 1.3, False, service))
    if inline:
        cpu = spread(one.client_cpu_s_per_gb for one in inline)
        found.append(Target("150 kB, inline, CPU s/GB of writer and reader", 0.40, True, cpu, ""))
    carriers = [rounds[name] for name in IPC if name in rounds]
    for side, name in IN_MEMORY.items():
        if carriers and side in rounds:
            best = max(carriers, key=lambda one: median(one, lambda each: each.gb_per_s))
            if (ratio := ratios(rounds[side], best)) is not None:
                found.append(Target(f"150 kB, {name}, to the faster tensorcom over IPC", 1.5, False, ratio))
    return found


def _rows(by_case: dict[str, dict[str, list[Round]]]) -> list[Target]:
    found = []
    for case, wanted in ((ONE_BY_ONE, 300_000), (BY_BATCH, 3_000_000)):
        if inline := by_case.get(case.name, {}).get(INLINE):
            rate = spread(one.samples_per_s for one in inline)
            found.append(Target(f"{case.name}, inline", wanted, False, rate, "/s"))
    return found


def _flat(plane: str, transport: Sequence[Measured]) -> list[Target]:
    rates = [
        median(one.rounds[plane], lambda each: each.gb_per_s)
        for one in transport
        if one.case.sample_bytes >= LEAST_BYTES and plane in one.rounds
    ]
    if len(rates) < 2:
        return []
    return [Target(f"{plane}: best size to worst, from 4 kB on", 2.0, True, spread([max(rates) / min(rates)]))]


def _fanned(one: Fanned) -> list[Target]:
    found = []
    for side, name in IN_MEMORY.items():
        ratio = ratios(one.rounds.get((side, 8), []), one.rounds.get((INLINE, 1), []))
        found += [Target(f"150 kB, 8 trainers on {name} in sum, to one inline", 5.0, False, ratio)] if ratio else []
    return found
