"""When an entry came into being, by this process's clock: entry ids are the server's clock.

So a blocking read can tell how long there was nothing to read from how long it took to arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock_common.stream.groups.roster import server_ms
from penstock_common.stream.commands import Client
from penstock_consumer.receiving.receive import Received

COMPARE_S = 10.0
"""Two clocks drift by a second in some hours, and a server may be another one after an outage."""


class Arrivals:
    """Two clocks compared, now and then when somebody has time for it."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.perf_counter) -> None:
        self._client, self._clock = client, clock
        self._ahead_s = 0.0
        """So far the server's clock is ahead of this one."""
        self._compared_s = float("-inf")

    def compare(self) -> None:
        """One question to the server, if that is due. Raises ServerUnavailable."""
        asked = self._clock()
        if asked - self._compared_s < COMPARE_S:
            return
        told = server_ms(self._client) / 1000
        self._ahead_s, self._compared_s = told - (asked + self._clock()) / 2, asked

    def created_s(self, received: Sequence[Received]) -> float | None:
        """When the newest of an answer's entries was appended; None if there is none."""
        if not received:
            return None
        return int(received[-1].entry_id.partition(b"-")[0] or 0) / 1000 - self._ahead_s
