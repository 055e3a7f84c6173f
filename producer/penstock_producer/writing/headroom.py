"""The server's memory as one writer sees it: asked now and then, so that no write ever meets the maxmemory.

What follows from it is ``backpressure``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock_common.stream.commands import Client
from penstock_common.stream.servers.suitability import ServerMemory, read_memory

ASK_EVERY_S = 1.0
"""Others may fill the server, or somebody set its maxmemory, at any time."""
ASK_SHARE = 1 / 8
"""It is asked again once this part of what was left is written: several writers share it."""


class Headroom:
    """What the server has left for one writer."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._asked_s = -ASK_EVERY_S
        self._spent = 0
        self.memory = ServerMemory(0, 0, "")
        """As last told."""

    def left_bytes(self, wanted_bytes: int, *, anew: bool) -> int | None:
        """How much more writers may write; ``anew`` asks in any case. Below 0 if too much is there already."""
        left = self.memory.left_bytes
        is_old = self._clock() - self._asked_s >= ASK_EVERY_S
        is_near = left is not None and self._spent + wanted_bytes > left * ASK_SHARE
        if anew or is_old or is_near:
            self._ask()
            left = self.memory.left_bytes
        return None if left is None else left - self._spent

    def is_used_up(self) -> bool:
        """Ask the server anew, and return whether it is at its maxmemory: it refuses every write then."""
        self._ask()
        return 0 < self.memory.limit_bytes <= self.memory.used_bytes

    def _ask(self) -> None:
        self.memory, self._asked_s, self._spent = read_memory(self._client), self._clock(), 0

    def spend(self, nbytes: int) -> None:
        """So much is written since it was asked."""
        self._spent += nbytes
