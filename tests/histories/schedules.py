"""The schedules of the chaos suite as histories: the same faults of a seed, between steps instead of at times.

A run of the suite depends on which process is where at a fault. A history does not, so a seed that fails fails again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from chaos.options import Options
from chaos.schedule import Fault, faults
from chaos.stored import MINUTES
from tests.histories.step import FEEDERS, PLANS, TRAINERS, WORKERS, History, Step

STEPS_A_SECOND = 1.0
"""The steps of work between two faults that are a second apart."""
LAST_POINT = 40
"""A fault inside a step comes at its points up to this one."""
WORK = ("feed", "job", "read", "ack", "read", "ack", "close", "clean", "beat")


def scheduled(seed: int) -> History:
    """Return the history of a seed of the chaos suite: the faults of its usual run, with work in between."""
    chance, at_s, options = random.Random(f"work {seed}"), 0.0, Options(seed, MINUTES)
    history = [Step("plan", number=0), *(Step("join", name) for name in TRAINERS)]
    for fault in faults(seed, options.seconds, options.pause_s, server_kills=options.server_kills):
        for _ in range(1 + round((fault.at_s - at_s) * STEPS_A_SECOND)):
            history += _work(chance)
        history += _fault(fault)
        at_s = fault.at_s
    return tuple(history)


def _work(chance: random.Random) -> Iterator[Step]:
    kind = chance.choice(WORK)
    if kind == "feed":
        yield Step(kind, chance.choice(FEEDERS), chance.randrange(4))
    elif kind == "job":
        if chance.random() < 0.3:
            yield Step("plan", number=chance.randrange(len(PLANS)))
        yield Step(kind, chance.choice(WORKERS), chance.randrange(4))
    elif kind == "clean":
        yield Step(kind, number=chance.randrange(4))
    else:
        yield Step(kind, chance.choice(TRAINERS))


def _fault(fault: Fault) -> Iterator[Step]:
    """Yield the steps that a fault of the suite is here. A process that is stopped briefly does nothing, as others."""
    point, trainer = int(fault.length * LAST_POINT), TRAINERS[int(fault.pick * len(TRAINERS))]
    worker, feeder = WORKERS[int(fault.pick * len(WORKERS))], FEEDERS[int(fault.pick * len(FEEDERS))]
    match fault.kind:
        case "kill a worker":
            yield Step("job", worker, inner=((point, Step("die", worker)),))
        case "end a worker" | "kill the workers' host":
            yield Step("die", worker)
        case "kill the dispatcher":
            yield Step("plan", inner=((point, Step("die")),))
        case "kill a trainer":
            yield Step("read" if fault.coin else "ack", trainer, inner=((point, Step("die", trainer)),))
            yield Step("join", trainer)
        case "let a trainer leave":
            yield Step("leave", trainer)
        case "let a trainer join":
            yield Step("join", trainer)
        case "kill the feeder":
            yield Step("feed", feeder, inner=((point, Step("die", feeder)),))
        case "cut connections":
            yield Step(
                "feed" if fault.coin else "read", feeder if fault.coin else trainer, inner=((point, Step("cut")),)
            )
        case "kill the server" | "restart the server":
            yield Step("job", worker, inner=((point, Step("restart")),))
