"""Stored seeds: runs that are repeated after a change, each for what it covers. They are in ``stored.json``.

``faults`` counts the faults that a seed plans in `MINUTES`. If the counts change, the stored runs are other runs.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.options import Options
from chaos.schedule import faults

FILE = Path(__file__).with_name("stored.json")
MINUTES = 2.0
"""The minutes in which a stored run inflicts faults, by default."""
ALL = "stored"


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored seed."""

    seed: int
    covers: str
    options: dict[str, Any]
    """The options that differ from the defaults."""
    faults: dict[str, int]
    """Kind -> the number of planned faults."""

    def run_options(self, minutes: float = MINUTES, node: int = 0) -> Options:
        """Return the options of its run, with ``node`` trainers in Node in each group."""
        return Options(seed=self.seed, minutes=minutes, node=node, **self.options)

    def planned(self) -> dict[str, int]:
        """Count the faults that today's code plans for it."""
        options = self.run_options()
        plan = faults(self.seed, options.seconds, options.pause_s, server_kills=options.server_kills)
        return dict(Counter(fault.kind for fault in plan))


def stored() -> list[Stored]:
    """Return all stored seeds."""
    return [Stored(**one) for one in json.loads(FILE.read_text())]


def chosen(which: str) -> list[Stored]:
    """Return the stored seeds that ``which`` names: ``stored``, or numbers as in ``7,61123``.

    Raises ValueError for a seed that is not stored.
    """
    known = {one.seed: one for one in stored()}
    if which == ALL:
        return list(known.values())
    seeds = [int(word) for word in which.split(",")]
    if missing := [seed for seed in seeds if seed not in known]:
        raise ValueError(f"{missing} are not stored; stored are {', '.join(map(str, known))}")
    return [known[seed] for seed in seeds]
