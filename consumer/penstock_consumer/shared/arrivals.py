"""When an entry came into being, by this process's clock: entry ids are the server's clock.

So a blocking read can tell how long there was nothing to read from how long it took to arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock_common.stream.link.commands import Client
from penstock_common.stream.groups.roster import server_ms
from penstock_consumer.receiving.receive import Received


class Arrivals:
    """Two clocks compared, as often as somebody has time for it: they drift by a second in some hours."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.perf_counter) -> None:
        self._client, self._clock = client, clock
        self._ahead_s = 0.0
        """So far the server's clock is ahead of this one."""

    def compare(self) -> None:
        """One question to the server. Raises ServerUnavailable."""
        asked = self._clock()
        told = server_ms(self._client) / 1000
        self._ahead_s = told - (asked + self._clock()) / 2

    def created_s(self, received: Sequence[Received]) -> float | None:
        """When the newest of an answer's entries was appended; None if there is none."""
        if not received:
            return None
        return int(received[-1].entry_id.partition(b"-")[0] or 0) / 1000 - self._ahead_s
