"""Follows the wished number of workers: reads what workers and trainers say, and says how many processes to have.

The rule is ``staffing``'s, starting and stopping is ``fleet``'s, which streams the queue works for ``dispatch`` knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from penstock_common.errors import PenstockError, ServerUnavailable
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.streams import find_stream
from penstock_common.stream.watching.paces import Fleet, Paces, Teller, fleet_field, load_paces
from penstock_producer.working.staffing import Load, Staffing, load_of, part_of, together

LOOK_S = 2.0
LEAVE_S = 0.3
REMEMBER_S = 60.0
"""A stream of which no job is seen for so long is none of the queue's any more."""


class Autoscale:
    """One fleet's. Call `look` as often as you like; it asks the server every two seconds."""

    def __init__(
        self,
        url: str,
        name: str,
        most: int,
        streams: Callable[[], Iterable[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``streams`` names those that the fleet's queue has jobs of. Raises ServerUnavailable at once."""
        self._client: Client = connect(url)
        self._name, self._most, self._streams, self._clock = name, most, streams, clock
        self._staffing = Staffing(most=1 << 16)  # of all fleets together; each has its own bound
        self._tellers: dict[str, Teller] = {}
        """Stream id -> what says there how many processes this fleet has."""
        self._known: dict[str, float] = {}
        """Name of a stream -> when a job of it was seen last."""
        self._looked_s = float("-inf")
        self.load = Load()
        """What was said last."""

    def look(self, now: int) -> int:
        """How many processes to have, having ``now``. A server that is away changes nothing."""
        if self._clock() - self._looked_s < LOOK_S:
            return now
        self._looked_s = self._clock()
        try:
            return self._decide(now)
        except ServerUnavailable:
            return now

    def close(self) -> None:
        """The fleet ends, and waits for nobody."""
        self._client.hurry(0.0, LEAVE_S)
        for teller in self._tellers.values():
            teller.leave()
        self._client.close()

    def _decide(self, now: int) -> int:
        heard = [self._hear(name, now) for name in self._current()]
        self.load = together([load_of(paces) for paces in heard])
        fleets = {name: fleet for paces in heard for name, fleet in paces.fleets.items()}
        fleets[self._name] = Fleet(self._most, now)
        following = sum(fleet.now for fleet in fleets.values())
        others = max(0, self.load.workers - following)
        wanted = self._staffing.decide(self._clock(), others + following, self.load)
        return min(self._most, part_of(self._name, wanted, fleets, others))

    def _current(self) -> list[str]:
        now = self._clock()
        self._known |= dict.fromkeys(self._streams(), now)
        self._known = {name: seen for name, seen in self._known.items() if now - seen < REMEMBER_S}
        return sorted(self._known)

    def _hear(self, name: str, now: int) -> Paces:
        try:
            stream = find_stream(self._client, name)
        except ServerUnavailable:
            raise
        except PenstockError:
            stream = None  # not a name, or a damaged key: whoever works on it will say so
        if stream is None:
            return Paces({}, {}, {})
        teller = self._tellers.setdefault(stream.id, Teller(self._client, stream, fleet_field(self._name)))
        teller.say({"most": self._most, "now": now})
        return load_paces(self._client, stream)
