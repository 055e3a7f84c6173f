"""The autoscaler: a pure rule from rates to a number of workers, and the object that applies it to one fleet.

Workers and trainers report the rates. `fleet` starts and stops workers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from penstock_common.errors import PenstockError, ServerUnavailable
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.reported_rates import (
    FleetReport,
    RateReporter,
    ReportedRates,
    fleet_field,
    load_reported_rates,
)
from penstock_common.stream.streams import find_stream
from penstock_common.waiting import AT_ONCE_S
from penstock_producer.sources.order import apportion

RATES_EVERY_S = 2.0
REMEMBER_S = 60.0
"""A stream that had no job for this long no longer belongs to the queue's streams."""


class Autoscaler:
    """The autoscaler of one fleet. `look` may be called at any rate; it asks the server every two seconds."""

    def __init__(
        self,
        url: str,
        name: str,
        most: int,
        streams: Callable[[], Iterable[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an autoscaler. ``streams`` names those that the fleet's queue has jobs of.

        Raises ServerUnavailable at once.
        """
        self._client: Client = connect(url)
        self._name, self._most, self._streams, self._clock = name, most, streams, clock
        self._target = WorkerTarget(most=1 << 16)  # for all fleets together; each has its own limit
        self._reporters: dict[str, RateReporter] = {}
        """Stream id -> what reports there how many processes this fleet has."""
        self._known: dict[str, float] = {}
        """Name of a stream -> when a job of it was seen last."""
        self._looked_s = float("-inf")
        self.load = StreamLoad()
        """The rates of the last look."""

    def look(self, now: int) -> int:
        """Return how many processes to have, given that there are ``now``. A server that is away changes nothing."""
        if self._clock() - self._looked_s < RATES_EVERY_S:
            return now
        self._looked_s = self._clock()
        try:
            return self._decide(now)
        except ServerUnavailable:
            return now

    def close(self) -> None:
        """End the fleet's reports without waiting for a server."""
        self._client.limit_patience(0.0, AT_ONCE_S)
        for reporter in self._reporters.values():
            reporter.leave()
        self._client.close()

    def _decide(self, now: int) -> int:
        heard = [self._hear(name, now) for name in self._current()]
        self.load = together([load_of(reported) for reported in heard])
        fleets = {name: fleet for reported in heard for name, fleet in reported.fleets.items()}
        fleets[self._name] = FleetReport(self._most, now)
        following = sum(fleet.now for fleet in fleets.values())
        others = max(0, self.load.workers - following)
        wanted = self._target.decide(self._clock(), others + following, self.load)
        return min(self._most, part_of(self._name, wanted, fleets, others))

    def _current(self) -> list[str]:
        now = self._clock()
        self._known |= dict.fromkeys(self._streams(), now)
        self._known = {name: seen for name, seen in self._known.items() if now - seen < REMEMBER_S}
        return sorted(self._known)

    def _hear(self, name: str, now: int) -> ReportedRates:
        try:
            stream = find_stream(self._client, name)
        except ServerUnavailable:
            raise
        except PenstockError:
            stream = None  # no name, or a damaged key: the process that works on the stream reports it
        if stream is None:
            return ReportedRates({}, {}, {})
        reporter = self._reporters.setdefault(stream.id, RateReporter(self._client, stream, fleet_field(self._name)))
        reporter.send({"most": self._most, "now": now})
        return load_reported_rates(self._client, stream)


HELD_UP_SHARE = 0.02
"""The share of time above which workers wait for quota or jobs and cannot be faster: more of them would wait, too."""
SPARE = 1.05
"""The factor above the working part, when workers wait. Some waiting must stay, because it shows the limit."""
GROW_AFTER_S = 8.0
SHRINK_AFTER_S = 16.0
"""The time for which the wished number must stay above, or below, the number of workers. A starving trainer costs more
than a waiting worker."""
NEARLY_AFTER_S = 40.0
"""The time for which it must stay there if it differs by one worker only, which is noise."""
REST_S = 10.0
"""The pause after a change, until new workers have shown their rate and their waits."""
LEAP = 4.0
"""The largest factor of one step: the rates are those of the present number of workers on the present cores."""
LATEST = 3
"""A step goes to the mean of this many wished numbers. Earlier ones may belong to another load."""
TELLABLE = 100
"""A wished number above this multiple of the working workers is not shown. It comes from a loop that works for less
than a hundredth of its time, as one without a training step does. There an error of a millisecond doubles it."""
ABOVE, BELOW = 0.1, 1.5
"""The distances of the wished number above and below the number of workers that change nothing."""


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """The last rates that all workers and trainers of a stream, or of a queue's streams, reported."""

    workers: int = 0
    rate: float | None = None
    """The samples that one worker makes in a second of work, or None while no worker has reported."""
    busy: float = 1.0
    """The part of the workers' time in which they work."""
    room: float = 0.0
    """The part of their time in which they wait for quota."""
    idle: float = 0.0
    """The part of their time in which they wait for jobs."""
    demand: dict[str, float] = field(default_factory=dict)
    """Group -> the samples a second that its members would take if they never waited."""
    streams: int = 1
    """The number of streams. For several streams, rate and demand count in workers."""

    @property
    def wanted(self) -> float | None:
        """The samples a second that the fastest group would take: each group gets every sample."""
        return max(self.demand.values(), default=None)

    def __str__(self) -> str:
        """Return one line for people."""
        parts = []
        if self.wanted is not None and self.streams == 1:
            parts.append(f"trainers would take {self.wanted:,.0f} samples/s")
        if self.rate is not None and self.streams == 1:
            parts.append(f"one worker makes {self.rate:,.3g}/s")
        shares = (("space", self.room), ("jobs", self.idle))
        if waits := [f"for {what} {100 * share:.0f} %" for what, share in shares if share > HELD_UP_SHARE]:
            parts.append(f"workers wait {' and '.join(waits)} of their time")
        return ", ".join(parts) or f"{self.streams} streams are served"


def load_of(reported: ReportedRates) -> StreamLoad:
    """Add up what all workers and trainers reported."""
    demand: dict[str, float] = {}
    for (group, _), one in reported.trainers.items():
        if one.rate is not None:
            demand[group] = demand.get(group, 0.0) + one.rate
    rates = [one.rate for one in reported.workers.values() if one.rate is not None]
    shares = [one.shares for one in reported.workers.values() if one.shares]

    def mean(kind: str, otherwise: float) -> float:
        return fmean(share.get(kind, 0.0) for share in shares) if shares else otherwise

    return StreamLoad(
        workers=len(reported.workers),
        rate=fmean(rates) if rates else None,
        busy=mean("busy", 1.0),
        room=mean("room", 0.0),
        idle=mean("idle", 0.0),
        demand=demand,
    )


def together(loads: Sequence[StreamLoad]) -> StreamLoad:
    """Return the load of all streams that the same workers serve: the workers that each stream needs are added up."""
    known = [load for load in loads if load.rate is not None]
    if len(known) < 2:
        return known[0] if known else StreamLoad(sum(load.workers for load in loads))
    workers = sum(load.workers for load in loads)
    parts = [(load.workers / workers if workers else 1 / len(known), load) for load in known]
    return StreamLoad(
        workers=workers,
        rate=1.0,
        busy=sum(part * load.busy for part, load in parts),
        room=sum(part * load.room for part, load in parts),
        idle=sum(part * load.idle for part, load in parts),
        streams=len(known),
        demand={"all": sum((load.wanted or 0.0) / (load.rate or 1.0) for load in known)},
    )


def wished_number(load: StreamLoad) -> float | None:
    """Return the number of workers wanted, unrounded, or None while it is not known.

    It is the consumption over the rate of one worker, as in tf.data service (its AutoScaler: the sum of consumption
    rates over the mean worker throughput). That formula asks what trainers would take if they never waited. If workers
    wait nevertheless, for quota or jobs, something else limits the rate, such as a slower group or an evaluation. Then
    the working part of the workers is what is needed.
    """
    if load.rate is None:
        return None
    needed = None if load.wanted is None else load.wanted / load.rate
    waiting = load.room + load.idle
    if waiting <= HELD_UP_SHARE or not load.workers:
        return needed
    working = load.workers * load.busy * SPARE
    return working if needed is None else min(needed, max(working, 1.0))


def shown(load: StreamLoad) -> int | None:
    """Return the wished number in whole workers."""
    wanted = wished_number(load)
    return None if wanted is None else max(1, math.ceil(wanted - ABOVE))


def is_tellable(wished: int, workers: int) -> bool:
    """Return whether the wished number is known well enough to be shown."""
    return wished <= TELLABLE * max(1, workers)


class WorkerTarget:
    """The number of workers over time. It follows the wished number only if the two differ for a while."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._since_s: float | None = None
        """The time since which the wished number has been above, or below, the number of workers."""
        self._side = 0
        self._rests_until_s = float("-inf")
        self._heard: list[float] = []
        """The wished numbers since then."""

    def decide(self, now_s: float, workers: int, load: StreamLoad) -> int:
        """Return how many workers there should be, given how many there are. Ask it every second or two."""
        wanted = wished_number(load)
        if wanted is None or now_s < self._rests_until_s:
            return self._bounded(workers)
        side = (wanted > workers + ABOVE * max(1.0, workers / 10)) - (wanted <= workers - BELOW)
        side = 0 if self._bounded(workers + side) == workers else side
        if side != self._side:
            self._side, self._since_s = side, now_s
            self._heard.clear()
        self._heard.append(wanted)
        patience_s = GROW_AFTER_S if side > 0 else SHRINK_AFTER_S
        if workers - 2 < wanted <= workers + 1 and workers > 1:
            patience_s = NEARLY_AFTER_S
        if side == 0 or self._since_s is None or now_s - self._since_s < patience_s:
            return self._bounded(workers)
        target = math.ceil(fmean(self._heard[-LATEST:]) - ABOVE)
        target = self._bounded(min(max(target, workers + 1), math.ceil(workers * LEAP)) if side > 0 else target)
        self._rests_until_s, self._side, self._since_s = now_s + REST_S, 0, None
        self._heard.clear()
        return target

    def _bounded(self, workers: int) -> int:
        return min(self._most, max(1, workers))


def part_of(name: str, wanted: int, fleets: Mapping[str, FleetReport], others: int) -> int:
    """Return this fleet's part of the ``wanted`` workers, which all fleets share.

    ``others`` workers exist whatever is wished. Each fleet gets a part like its share of all possible workers, and at
    least one. The larger remainders, then the earlier names, get what is left.
    """
    due = max(0, wanted - others)
    names = sorted(fleets)
    mosts = [fleets[each].most for each in names]
    parts = dict(zip(names, apportion(due, mosts), strict=True)) if sum(mosts) else {}
    mine = parts.get(name, due)
    return max(1, min(mine, fleets[name].most if name in fleets else mine))
