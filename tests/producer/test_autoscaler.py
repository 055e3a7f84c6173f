"""The rule for the number of workers is tested alone, and over eleven simulated, noisy minutes."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from penstock_common.rate_meter import RateMeter, RateReading
from penstock_common.stream.reported_rates import FleetReport, ReportedRate, ReportedRates
from penstock_producer.jobs.autoscaler import StreamLoad, WorkerTarget, load_of, part_of, shown, wished_number

STEADY_S, AFTER_S = 60.0, 600.0
LOOK_S = 2.0
STARTING_S = 1.5
BATCH = 16
LUMP = 4
"""Samples of a block: workers count them as they are committed."""


@dataclass
class World:
    """Workers and trainers about one budget, event by event, under a clock of their own; all durations are noisy."""

    sample_s: float
    steps_s: dict[str, float]
    """Group -> seconds of one step."""
    room: int
    """Samples that the budget holds."""
    seed: int = 0
    now: float = 0.0
    made: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    paces: dict[str, RateMeter] = field(default_factory=dict)
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    count: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)
    hungry: list[Callable[[], None]] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        for group in self.steps_s:
            self.positions[group] = 0
            self.paces[group] = RateMeter(clock=lambda: self.now)
            self.paces[group].enter("wait")
            self._ask(group)

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Does it later."""
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.count, action))

    def noisy(self, seconds: float) -> float:
        """About as long."""
        return seconds * self.random.lognormvariate(-0.045, 0.3)

    def resize(self, workers: int) -> None:
        """Starts some, which takes a moment, or ends some at once."""
        while len(self.alive) > workers:
            self.paces.pop(f"w{self.alive.pop()}", None)
        while len(self.alive) < workers:
            self.count += 1
            self.alive.append(self.count)
            self.at(STARTING_S, lambda name=self.count: self._start(name))  # type: ignore[misc]

    def _start(self, name: int) -> None:
        if name in self.alive:
            pace = self.paces[f"w{name}"] = RateMeter("busy", clock=lambda: self.now)
            self._make(name, pace, 0)

    def _make(self, name: int, pace: RateMeter, held: int) -> None:
        if name not in self.alive:
            return
        if held == LUMP:
            if self.made + LUMP - min(self.positions.values()) > self.room:
                pace.enter("room")
                self.waiting.append(lambda: self._make(name, pace, held))
                return
            self.made, held = self.made + LUMP, 0
            pace.count(LUMP)
            self._wake(self.hungry)
        pace.enter("busy")
        self.at(self.noisy(self.sample_s), lambda: self._make(name, pace, held + 1))

    def _ask(self, group: str) -> None:
        if self.made - self.positions[group] < BATCH:
            self.hungry.append(lambda: self._ask(group))
            return
        self.positions[group] += BATCH
        self._wake(self.waiting)
        self.paces[group].enter("work")
        self.at(self.noisy(self.steps_s[group]), lambda: self._stepped(group))

    def _stepped(self, group: str) -> None:
        self.paces[group].count(BATCH)
        self.paces[group].enter("wait")
        self._ask(group)

    def _wake(self, waiting: list[Callable[[], None]]) -> None:
        for action in waiting:
            self.at(0.0, action)
        waiting.clear()

    def load(self) -> StreamLoad:
        """Return what all workers and trainers would report now."""
        looks: dict[str, RateReading] = {name: pace.look() for name, pace in self.paces.items()}
        told = {name: ReportedRate(look.rate, look.shares, look.samples) for name, look in looks.items()}
        groups = {(name, "one"): one for name, one in told.items() if name in self.steps_s}
        return load_of(ReportedRates({n: one for n, one in told.items() if n not in self.steps_s}, groups, {}))

    def follow(self, target: WorkerTarget, until_s: float) -> list[tuple[float, int]]:
        """(when, how many) of each look."""
        history = []
        while self.now < until_s:
            look = self.now + LOOK_S
            while self.events and self.events[0][0] <= look:
                self.now, _, action = heapq.heappop(self.events)
                action()
            self.now = look
            workers = target.decide(self.now, len(self.alive), self.load())
            self.resize(workers)
            history.append((self.now, workers))
        return history


def require_steady(history: list[tuple[float, int]], since_s: float, right: int) -> None:
    """The two promises."""
    after = [workers for when, workers in history if when >= since_s + STEADY_S]
    assert all(abs(workers - right) <= 1 for workers in after), (right, after)
    changes = sum(a != b for a, b in pairwise(after))
    assert changes <= 2, (right, after)


def right_number(sample_s: float, step_s: float) -> int:
    """Return the rate of the trainer divided by the rate of one worker."""
    return max(1, math.ceil(BATCH / step_s * sample_s))


CASES = {
    # seconds of a sample, of a step
    "20 ms samples, a slow trainer": (0.020, 0.40),
    "35 ms samples": (0.035, 0.18),
    "50 ms samples": (0.050, 0.10),
    "exactly five": (0.050, 0.16),
    "a hair above seven": (0.0441, 0.1),
    "many": (0.050, 0.04),
    "steps of seconds": (0.500, 2.5),
}


@pytest.mark.parametrize(
    ("case", "room", "began"),
    [
        ("20 ms samples, a slow trainer", 64, 1),
        ("20 ms samples, a slow trainer", 100_000, 40),
        ("35 ms samples", 100_000, 1),
        ("50 ms samples", 64, 1),
        ("exactly five", 64, 40),
        ("a hair above seven", 100_000, 1),
        ("many", 64, 40),
        ("many", 100_000, 1),
        ("steps of seconds", 64, 1),
    ],
)
def test_within_a_minute_the_number_is_right_and_stays(case: str, room: int, began: int) -> None:
    """Too few starve the trainer, too many cost hosts, and one that trembles costs both: whatever the budget hides."""
    sample_s, step_s = CASES[case]
    world = World(sample_s, {"resnet": step_s}, room)
    world.resize(began)
    history = world.follow(WorkerTarget(most=40), STEADY_S + AFTER_S)
    require_steady(history, 0.0, right_number(sample_s, step_s))


def test_a_load_that_changes_is_followed() -> None:
    """A trainer that begins to train twice as fast, or half as fast, is given workers within the minute again."""
    world = World(0.03, {"resnet": 0.1}, 100_000)
    world.resize(1)
    target = WorkerTarget(most=40)
    history = world.follow(target, 200)
    for began, step_s in ((200.0, 0.05), (600.0, 0.16)):
        world.steps_s["resnet"] = step_s
        changed = world.follow(target, began + 400)
        require_steady(changed, began, right_number(0.03, step_s))
    require_steady(history, 0.0, right_number(0.03, 0.1))


def test_a_slow_group_that_holds_the_budget_sets_the_pace() -> None:
    """Each group is given every sample, and a full budget waits for the slowest: more workers would only wait."""
    world = World(0.04, {"fast": 0.05, "slow": 0.20}, room=400)
    world.resize(1)
    history = world.follow(WorkerTarget(most=40), STEADY_S + AFTER_S)
    require_steady(history, 0.0, right_number(0.04, 0.20))


def test_several_groups_of_different_speed_are_served_by_the_fastest_ones_need() -> None:
    """While there is space no trainer should starve for another one's sake."""
    load = StreamLoad(2, rate=20.0, demand={"a": 100.0, "b": 60.0})
    assert wished_number(load) == 5.0


def test_nothing_known_changes_nothing() -> None:
    """Before the first sample, and without trainers, a fleet stays as it is."""
    assert WorkerTarget(most=8).decide(100.0, 3, StreamLoad()) == 3
    assert WorkerTarget(most=8).decide(100.0, 3, StreamLoad(3, rate=10.0)) == 3
    assert wished_number(StreamLoad(demand={"a": 5.0})) is None
    assert shown(StreamLoad(2, rate=10.0, demand={"a": 41.0})) == 4  # not a fifth one for a fortieth part
    assert WorkerTarget(most=8).decide(100.0, 30, StreamLoad()) == 8


def test_fleets_on_several_hosts_share_the_wished_number() -> None:
    """Each follows the target alone, and their sum must reach it."""
    fleets = {"a": FleetReport(8, 1), "b": FleetReport(8, 3), "c": FleetReport(16, 2)}
    for wanted in range(3, 40):
        parts = {name: part_of(name, wanted, fleets, others=0) for name in fleets}
        assert sum(parts.values()) == min(max(wanted, 3), 32) or min(parts.values()) == 1, parts
        assert all(parts[name] <= fleet.most for name, fleet in fleets.items())
    assert part_of("a", 10, {"a": FleetReport(20, 1)}, others=4) == 6
    assert part_of("a", 3, {"a": FleetReport(20, 1)}, others=4) == 1
    assert part_of("a", 7, {}, others=0) == 7


@pytest.mark.parametrize(
    ("room", "idle", "told"),
    [(0.25, 0.0, "for space 25 %"), (0.0, 0.67, "for jobs 67 %"), (0.25, 0.5, "for space 25 % and for jobs 50 %")],
)
def test_a_load_says_who_waits(room: float, idle: float, told: str) -> None:
    """A share of time alone does not say whose time it is."""
    load = StreamLoad(workers=1, rate=103.0, room=room, idle=idle)
    assert str(load) == f"one worker makes 103/s, workers wait {told} of their time"


def test_a_pace_leaves_waiting_out() -> None:
    """A rate that sank with waiting would make a starving trainer look as if it needed nothing."""
    now = 0.0
    pace = RateMeter("busy", clock=lambda: now)
    assert pace.look() == RateReading(None, {}, 0)
    for _ in range(20):
        pace.enter("busy")
        now += 0.5
        pace.count(10)
        pace.enter("room")
        now += 1.5
    look = pace.look()
    assert look.rate == pytest.approx(20.0)
    assert look.shares["room"] == pytest.approx(0.75, abs=0.02)
    assert look.samples == 200
    pace.enter(None)
    now += 100.0
    assert pace.look().shares == look.shares
