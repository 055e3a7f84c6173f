"""Steps, histories as text, and random histories. Nothing here uses Redis."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

FEEDERS = ("f0", "f1", "f2")
"""Writers of the endless feed."""
WORKERS = ("w0", "w1")
"""Processes that run the jobs of planned epochs."""
TRAINERS = ("a0", "a1", "b0")
"""Members of the groups ``a`` and ``b``."""
RANKS = ("o0", "o1")
"""The ranks of the ordered group ``o``."""
SLOTS = ("s", "p0", "p1")
"""The slots: that of the stream as a whole, and one for each partition."""
LOSSES = ("s", "s", "s", "p0", "p0", "p1", "p1", "s+p0", "s+p1", "p0+p1", "s+p0+p1")
"""The slots that one server held which came back older."""
PLANS = ((4, 2), (2, 2, 4), (3,))
"""The sizes of the shards of a planned epoch."""
KINDS = (
    "plan", "job", "feed", "pour", "end", "join", "read", "ack", "close", "beat", "leave", "die", "clean", "seal",
    "abandon", "delete", "remake", "mark", "lose", "jump", "cut", "restart", "recycle", "fill",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Theme:
    """The settings that the histories of one theme share, so that their steps meet more often."""

    weights: dict[str, float]
    """Kind of step -> its relative frequency."""
    opening: str = ""
    """The steps that come first."""
    steps: int = 13
    """The steps behind them, losses not counted."""
    gap: float = 3.0
    """The mean number of steps from a mark to its loss."""
    actors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Kind of step -> its actors, where they are others than in `WHO`."""


THEMES = {
    "writers": Theme(
        {"pour": 9, "feed": 6, "end": 0.3, "jump": 0.3, "die": 0.3}, "feed f0 1", steps=7, gap=1.0
    ),
    "jobs": Theme({"plan": 4, "job": 8, "join": 3, "read": 5, "ack": 4, "close": 3, "clean": 2, "die": 1}),
    "trainers": Theme({
        "feed": 7, "join": 5, "read": 8, "ack": 8, "close": 2, "beat": 2, "leave": 2, "die": 2, "clean": 2, "end": 2,
        "jump": 1,
    }),
    "ranks": Theme(
        {"plan": 3, "job": 8, "join": 3, "read": 9, "ack": 8, "close": 3, "beat": 1, "leave": 1, "die": 2, "clean": 2},
        "plan; join o0; join o1", actors={"join": RANKS, "die": (*WORKERS, *RANKS)},
    ),
    "segments": Theme(
        {"clean": 5, "recycle": 2, "feed": 3, "fill": 2, "read": 3, "ack": 3, "end": 0.5, "close": 0.5, "die": 0.5},
        "join a0; feed f0 4; fill f0; feed f0 1; read a0; ack a0", steps=6, gap=1.0,
    ),
    "all": Theme({
        "plan": 3, "job": 7, "feed": 9, "pour": 8, "end": 3, "join": 6, "read": 9, "ack": 7, "close": 3, "beat": 2,
        "leave": 2, "die": 3, "clean": 4, "seal": 1, "abandon": 1, "delete": 0.3, "jump": 2,
    }),
}  # fmt: skip
"""Name -> theme. A history has one."""
DRAWN = [name for name in THEMES if name != "segments"]
"""The themes from which a seed chooses one. Payloads in files need a stream of their own."""
WHO = {
    "job": WORKERS, "feed": FEEDERS, "pour": FEEDERS, "end": FEEDERS, "join": TRAINERS, "read": TRAINERS,
    "ack": TRAINERS, "close": TRAINERS, "beat": TRAINERS, "leave": TRAINERS, "die": (*FEEDERS, *WORKERS, *TRAINERS),
    "lose": LOSSES, "jump": SLOTS[1:],
}  # fmt: skip
"""Kind of step -> its actors, or the slots that it is about. The others are the operator's."""
NUMBERS = {"plan": 3, "job": 4, "feed": 5, "pour": 5, "ack": 3, "clean": 4, "seal": 2, "abandon": 2}
"""Kind of step -> how many numbers it may have, from 0 on."""
BRIEF = ("mark", "lose", "jump", "cut", "restart", "die", "fill")
"""Kinds without requests, which nothing can interrupt."""
OPERATOR = "op"
_STEP = re.compile(r"(\w+)(?: ([\w+]+))?(?: (\d+))?(?: \[([^\]]*)\])?")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one actor, with what comes between its requests."""

    kind: str
    who: str = OPERATOR
    number: int = 0
    inner: tuple[tuple[int, Step], ...] = ()
    """(point, step). Point 2n is just before the n-th request, counted from 0, and 2n + 1 just after its answer."""

    def __str__(self) -> str:
        inner = f" [{', '.join(f'{point}: {step}' for point, step in self.inner)}]" if self.inner else ""
        return f"{self.kind} {self.who} {self.number}{inner}"

    @property
    def size(self) -> int:
        """Return the number of steps, inner ones included."""
        return 1 + sum(step.size for _, step in self.inner)


History = tuple[Step, ...]


def written(history: Iterable[Step]) -> str:
    """Return a history as text."""
    return "; ".join(map(str, history))


def parse_history(text: str) -> History:
    """Return the history in a text. Raises ValueError."""
    return tuple(_parsed(part) for part in text.replace("\n", ";").split(";") if part.strip())


def _parsed(text: str) -> Step:
    found = _STEP.fullmatch(text.strip())
    if found is None or found[1] not in KINDS:
        raise ValueError(f"{text.strip()!r} is no step, expected one such as 'feed f0 3' or 'lose s+p0'")
    inner = []
    for part in (found[4] or "").split(","):
        if part.strip():
            point, _, step = part.partition(":")
            inner.append((int(point), _parsed(step)))
    return Step(found[1], found[2] or OPERATOR, int(found[3] or 0), tuple(inner))


def drawn(seed: int, name: str = "") -> History:
    """Return the random history of a seed, of a theme that it chooses or that is named."""
    chance = random.Random(f"history {seed}")
    theme = THEMES[name or chance.choice(DRAWN)]
    actors = {kind: chance.sample(who, min(len(who), chance.choice((2, 3)))) for kind, who in WHO.items()}
    actors |= {kind: [*who] for kind, who in theme.actors.items()}
    actors["pour"] = actors["end"] = actors["fill"] = actors["feed"]
    for kind in ("read", "ack", "close", "beat", "leave"):
        actors[kind] = actors["join"]
    history = [_drawn(chance, theme.weights, actors) for _ in range(theme.steps)]
    for _ in range(chance.choices((0, 1, 2, 3), (1, 6, 2, 1))[0]):
        _add_loss(chance, history, theme.gap)
    return (*parse_history(theme.opening), *history)


def _add_loss(chance: random.Random, history: list[Step], gap: float) -> None:
    """Put a mark somewhere, and a loss some steps behind it, each between two steps or inside one."""
    at = chance.randrange(len(history))
    behind, lose = at + 1 + int(chance.expovariate(1 / gap)), Step("lose", chance.choice(LOSSES))
    if behind < len(history) and chance.random() < 0.3:
        history[behind] = _interrupted(chance, history[behind], lose)
    else:
        history.insert(behind, lose)
    if chance.random() < 0.3:
        history[at] = _interrupted(chance, history[at], Step("mark"))
    else:
        history.insert(at, Step("mark"))


def _interrupted(chance: random.Random, step: Step, inner: Step) -> Step:
    if step.kind in BRIEF:
        return step
    return replace(step, inner=(*step.inner, (min(int(chance.expovariate(1 / 10)), 80), inner)))


def _drawn(chance: random.Random, weights: dict[str, float], actors: dict[str, list[str]]) -> Step:
    kind = chance.choices([*weights], [*weights.values()])[0]
    who = chance.choice(actors[kind]) if kind in actors else OPERATOR
    number = chance.randrange(NUMBERS[kind]) if kind in NUMBERS and chance.random() < 0.6 else 0
    step = Step(kind, who, number)
    if chance.random() < 0.15:
        step = _interrupted(chance, step, Step("die", who))
    elif chance.random() < 0.1:
        step = _interrupted(chance, step, Step("cut"))
    elif chance.random() < 0.15:
        other = chance.choices([*weights], [*weights.values()])[0]
        inner = Step(other, chance.choice(actors[other]) if other in actors else OPERATOR)
        step = _interrupted(chance, step, inner)
    return step
