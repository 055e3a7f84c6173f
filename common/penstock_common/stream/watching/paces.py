"""How fast a stream's workers and trainers are, as they say themselves every few seconds: one small field for each.

What they measure is ``pace``'s; how many workers that asks for is the producer's plan (``autoscaler``).
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ResponseError

from penstock_common.errors import PenstockError
from penstock_common.pace import Pace
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Arg, Client, decoded, readable, run_script
from penstock_common.stream.groups.roster import server_ms
from penstock_common.stream.keys import is_name
from penstock_common.stream.streams import Stream

_REPORT_RATE = load_script("report_rate")

TELL_S = 2.0
"""How often each says how fast it is."""
LATELY_S = 10.0
"""What holds a stream up is judged by the shares of this time: the last two seconds of a full budget may be quiet."""
SILENT_MS = 10_000
"""Who has said nothing for so long counts no more."""
SWEEP_S = 60.0
"""How often each forgets those who are gone; what a fleet that was killed leaves behind goes with the next one."""
GONE_MS = 600_000
"""Who has said nothing for so long is forgotten. Until then workers are told of as silent: somebody may look."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one of them said last."""

    rate: float | None
    """Samples a second of its work, waiting left out; None while it does not know."""
    shares: dict[str, float] = field(default_factory=dict)
    """Where its time goes: of a worker ``busy``, ``room`` (waiting for room in the budget) and ``idle`` (no job)."""
    samples: int = 0
    """Made, or trained on, in all."""
    now: dict[str, float] = field(default_factory=dict)
    """The shares of the last ten seconds alone."""

    @property
    def lately(self) -> dict[str, float]:
        """Where its time went in the last ten seconds; as of late, where it does not say that."""
        return self.now or self.shares

    seen_ms: int = 0
    """Server time at which it spoke."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """A command that starts and stops worker processes by what is wished."""

    most: int
    """Processes it may have."""
    now: int
    """Processes it has."""


@dataclass(frozen=True, slots=True)
class Paces:
    """Of one stream, of all who were heard of lately."""

    workers: dict[str, Told]
    """Worker's name -> what it said. Only those whose last job was of this stream."""
    trainers: dict[tuple[str, str], Told]
    """(group, member) -> what it said."""
    fleets: dict[str, FleetReport]
    """Name -> what it said."""
    silent: dict[str, float] = field(default_factory=dict)
    """Workers that said nothing for ten seconds, and did not sign off -> seconds since they did; for ten minutes."""


def worker_field(name: str) -> str:
    """Of one worker process."""
    return f"w:{name}"


def trainer_field(group: str, member: str) -> str:
    """Of one member of a group."""
    return f"t:{group}:{member}"


def fleet_field(name: str) -> str:
    """Of one fleet that follows the wish."""
    return f"f:{name}"


class Teller:
    """Says one field of one stream again and again, from whatever thread; it never fails whoever calls it."""

    def __init__(self, client: Client, stream: Stream, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self.stream, self._name, self._clock = client, stream, name, clock
        self._told_s = self._swept_s = float("-inf")
        self._spent_s = deque[tuple[float, Mapping[str, float]]]([(clock(), {})])
        """(when, seconds spent on what by then): the newest that is as old as `LATELY_S`, and all since."""

    def tell(self, pace: Pace) -> None:
        """Says how fast it is, if that is due."""
        if self._clock() - self._told_s >= TELL_S:
            look = pace.look()
            shares = {kind: round(share, 3) for kind, share in look.shares.items()}
            now = self._shares_lately(look.spent_s)
            self.say({"rate": look.rate and round(look.rate, 4), "shares": shares, "now": now, "samples": look.samples})

    def _shares_lately(self, spent_s: Mapping[str, float]) -> dict[str, float]:
        """Return what part of the last ten seconds went into what."""
        now, past = self._clock(), self._spent_s
        past.append((now, spent_s))
        while past[1][0] <= now - LATELY_S:
            past.popleft()
        lately = {kind: seconds - past[0][1].get(kind, 0.0) for kind, seconds in spent_s.items()}
        total = sum(lately.values())
        return {kind: round(seconds / total, 3) for kind, seconds in lately.items()} if total > 0 else {}

    def say(self, value: Mapping[str, Any]) -> None:
        """Says this now."""
        now = self._clock()
        self._told_s = now
        sweep = now - self._swept_s >= SWEEP_S
        keys = [self.stream.keys.paces, self.stream.keys.meta]
        args: list[Arg] = [self.stream.id, self._name, json.dumps(value), GONE_MS if sweep else 0]
        with suppress(PenstockError, ResponseError):  # nothing depends on it, and it is said again
            run_script(self._client, _REPORT_RATE, keys, args)
            self._swept_s = now if sweep else self._swept_s

    def leave(self) -> None:
        """It is heard of no more."""
        with suppress(PenstockError, ResponseError):
            self._client.hdel(self.stream.keys.paces, self._name)


@readable(lambda client, stream: stream.keys.paces)
def load_paces(client: Client, stream: Stream) -> Paces:
    """Return everyone's last word, of those who were heard of within ten seconds, and which workers are silent."""
    found = decoded(client.hgetall(stream.keys.paces))
    now_ms = server_ms(client) if found else 0
    paces = Paces({}, {}, {})
    for name, text in sorted(found.items()):
        said = json.loads(text)
        kind, _, rest = name.partition(":")
        if (ago_ms := now_ms - int(said["seen"])) > SILENT_MS:
            if kind == "w" and ago_ms <= GONE_MS and is_name(rest):
                paces.silent[rest] = ago_ms / 1000
            continue
        if kind == "f":
            paces.fleets[rest] = FleetReport(int(said["most"]), int(said["now"]))
        elif kind == "w":
            paces.workers[rest] = _told(said)
        else:
            group, _, member = rest.partition(":")
            paces.trainers[group, member] = _told(said)
    return paces


def _told(said: dict[str, Any]) -> Told:
    rate = said.get("rate")
    shares, now = (_shares(said.get(name)) for name in ("shares", "now"))
    return Told(None if rate is None else float(rate), shares, int(said.get("samples", 0)), now, int(said["seen"]))


def _shares(said: Any) -> dict[str, float]:
    # an empty table of Lua's is an empty list in JSON as well
    return {str(kind): float(share) for kind, share in dict(said or {}).items()}
