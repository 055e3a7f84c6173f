"""The rates of a stream's workers and trainers, which they report every few seconds in one small field each.

`rate_meter` measures them. The producer's autoscaler plans the number of workers from them.
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
from penstock_common.rate_meter import Measured
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Arg, Client, decoded, readable, run_script, server_ms
from penstock_common.stream.keys import is_name
from penstock_common.stream.streams import Stream

_REPORT_RATE = load_script("report_rate")

REPORT_EVERY_S = 2.0
"""The time between two reports of each process."""
RECENT_S = 10.0
"""The time whose shares decide what limits a stream. Two seconds of a full budget may be quiet, so it is longer."""
REPORT_COUNTS_MS = 10_000
"""The time after which a process without a report no longer counts."""
SWEEP_S = 60.0
"""The time between two removals of old reports by each process. The next fleet removes the reports of a killed one."""
GONE_MS = 600_000
"""The time after which a report is removed. Until then the worker is shown as silent, for an operator to notice."""


@dataclass(frozen=True, slots=True)
class ReportedRate:
    """The last report of one process."""

    rate: float | None
    """The samples a second of its work, without waits, or None while it is not known."""
    shares: dict[str, float] = field(default_factory=dict)
    """The parts of its time: for a worker ``busy``, ``room`` (waiting for quota) and ``idle`` (no job)."""
    samples: int = 0
    """The samples made, or trained on, in all."""
    recent_shares: dict[str, float] = field(default_factory=dict)
    """The shares of the last ten seconds alone."""

    @property
    def recent(self) -> dict[str, float]:
        """The shares of the last ten seconds, or all shares if the process does not report them."""
        return self.recent_shares or self.shares

    seen_ms: int = 0
    """The server's time of the report."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The report of a command that adjusts its number of workers to the wished number."""

    most: int
    """The processes that it may have."""
    now: int
    """The processes that it has."""


@dataclass(frozen=True, slots=True)
class ReportedRates:
    """All recent reports on one stream."""

    workers: dict[str, ReportedRate]
    """Worker's name -> its report, for those whose last job was of this stream."""
    trainers: dict[tuple[str, str], ReportedRate]
    """(group, member) -> its report."""
    fleets: dict[str, FleetReport]
    """Name of the fleet -> its report."""
    silent: dict[str, float] = field(default_factory=dict)
    """Workers that did not sign off and have not reported for ten seconds -> seconds since the last report, for ten
    minutes.
    """


def worker_field(name: str) -> str:
    """Return the field of one worker process."""
    return f"w:{name}"


def trainer_field(group: str, member: str) -> str:
    """Return the field of one member of a group."""
    return f"t:{group}:{member}"


def fleet_field(name: str) -> str:
    """Return the field of one fleet that follows the wished number."""
    return f"f:{name}"


class RateReporter:
    """A reporter of one field of one stream, for any thread. It never fails its caller."""

    def __init__(self, client: Client, stream: Stream, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self.stream, self._name, self._clock = client, stream, name, clock
        self._reported_s = self._swept_s = float("-inf")
        self._spent_s = deque[tuple[float, Mapping[str, float]]]([(clock(), {})])
        """(when, seconds spent on each kind by then): the newest that is as old as `RECENT_S`, and all since."""

    def report(self, rate: Measured) -> None:
        """Report the rate, if that is due."""
        if self._clock() - self._reported_s >= REPORT_EVERY_S:
            look = rate.look()
            shares = {kind: round(share, 3) for kind, share in look.shares.items()}
            recent = self._recent_shares(look.spent_s)
            self.send(
                {"rate": look.rate and round(look.rate, 4), "shares": shares, "now": recent, "samples": look.samples}
            )

    def _recent_shares(self, spent_s: Mapping[str, float]) -> dict[str, float]:
        """Return the parts of the last ten seconds."""
        now, past = self._clock(), self._spent_s
        past.append((now, spent_s))
        while past[1][0] <= now - RECENT_S:
            past.popleft()
        lately = {kind: seconds - past[0][1].get(kind, 0.0) for kind, seconds in spent_s.items()}
        total = sum(lately.values())
        return {kind: round(seconds / total, 3) for kind, seconds in lately.items()} if total > 0 else {}

    def send(self, value: Mapping[str, Any]) -> None:
        """Report this now."""
        now = self._clock()
        self._reported_s = now
        sweep = now - self._swept_s >= SWEEP_S
        keys = [self.stream.keys.rates, self.stream.keys.meta]
        args: list[Arg] = [self.stream.id, self._name, json.dumps(value), GONE_MS if sweep else 0]
        with suppress(PenstockError, ResponseError):  # nothing depends on it, and the next report comes soon
            run_script(self._client, _REPORT_RATE, keys, args)
            self._swept_s = now if sweep else self._swept_s

    def leave(self) -> None:
        """Remove the report."""
        with suppress(PenstockError, ResponseError):
            self._client.hdel(self.stream.keys.rates, self._name)


@readable(lambda client, stream: stream.keys.rates)
def load_reported_rates(client: Client, stream: Stream) -> ReportedRates:
    """Return the reports of the last ten seconds, and which workers are silent."""
    found = decoded(client.hgetall(stream.keys.rates))
    now_ms = server_ms(client, stream.keys.rates) if found else 0
    rates = ReportedRates({}, {}, {})
    for name, text in sorted(found.items()):
        said = json.loads(text)
        kind, _, rest = name.partition(":")
        if (ago_ms := now_ms - int(said["seen"])) > REPORT_COUNTS_MS:
            if kind == "w" and ago_ms <= GONE_MS and is_name(rest):
                rates.silent[rest] = ago_ms / 1000
            continue
        if kind == "f":
            rates.fleets[rest] = FleetReport(int(said["most"]), int(said["now"]))
        elif kind == "w":
            rates.workers[rest] = _parsed(said)
        else:
            group, _, member = rest.partition(":")
            rates.trainers[group, member] = _parsed(said)
    return rates


def _parsed(said: dict[str, Any]) -> ReportedRate:
    rate = said.get("rate")
    shares, recent = (_shares(said.get(name)) for name in ("shares", "now"))
    return ReportedRate(
        None if rate is None else float(rate), shares, int(said.get("samples", 0)), recent, int(said["seen"])
    )


def _shares(said: Any) -> dict[str, float]:
    # an empty table of Lua is an empty list in JSON, too
    return {str(kind): float(share) for kind, share in dict(said or {}).items()}
