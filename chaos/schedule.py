"""The plan of faults as a pure function of the seed: what happens, and when.

Each fault's ``pick`` chooses its victim among the live processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

WEIGHTS = {
    "kill a worker": 9,
    "stop a worker": 4,
    "end a worker": 2,
    "kill the dispatcher": 2,
    "stop the dispatcher": 2,
    "kill the workers' host": 1,
    "kill a trainer": 12,
    "stop a trainer briefly": 5,
    "stop a trainer beyond its lease": 5,
    "let a trainer leave": 4,
    "let a trainer join": 3,
    "start a trainer twice": 2,
    "kill the feeder": 2,
    "stop the feeder": 2,
    "cut connections": 8,
    "kill the server": 2,
    "restart the server": 1,
    "stop the server": 2,
}
"""Kind -> its relative frequency."""
NETWORK_WEIGHTS = {
    "lose packets": 3,
    "cut a link": 4,
    "cut a link one way": 4,
    "unplug a host": 3,
    "slow a link": 3,
}
"""The faults of links, in addition, if processes are on hosts of their own."""
CLUSTER_WEIGHTS = {
    "kill a master": 3,
    "stop a master": 3,
    "fail a master over": 2,
    "cut a replica off": 2,
    "tear a master": 2,
    "move a slot": 3,
}
"""The faults of a cluster, instead of those of one server."""
SERVER = ("kill the server", "restart the server", "stop the server")


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault."""

    at_s: float
    """The time after the start."""
    kind: str
    pick: float
    """A number in [0, 1) that chooses the victim."""
    length: float
    """A number in [0, 1) that chooses the length, between the kind's bounds."""
    coin: bool
    """A choice between two variants: the same name or a new one, a gentle end or a kill."""


def faults(
    seed: int,
    seconds: float,
    pause_s: float,
    *,
    server_kills: bool,
    networks: bool = False,
    cluster: bool = False,
) -> Iterator[Fault]:
    """Return faults in order of time, ``pause_s`` apart on average."""
    chance = random.Random(f"faults {seed}")
    of_server = CLUSTER_WEIGHTS if cluster else {kind: WEIGHTS[kind] for kind in SERVER}
    others = {kind: weight for kind, weight in WEIGHTS.items() if kind not in SERVER}
    planned = {**others, **(of_server if server_kills else {}), **(NETWORK_WEIGHTS if networks else {})}
    kinds, weights = list(planned), list(planned.values())
    at_s = 0.0
    while True:
        at_s += chance.expovariate(1 / pause_s)
        if at_s >= seconds:
            return
        kind = chance.choices(kinds, weights)[0]
        yield Fault(at_s, kind, chance.random(), chance.random(), chance.random() < 0.5)
