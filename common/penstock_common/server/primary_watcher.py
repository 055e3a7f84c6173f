"""A thread that asks now and then whether the servers in use are still primaries: of a service, or of a cluster."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Final, TypeAlias

from redis import exceptions as foreign

Address: TypeAlias = tuple[str, int]
"""The host and port of a server."""

ASK_S: Final = 1.0
"""The silence of one Sentinel, or of one node of a cluster, after which the next one is asked."""
QUICK: Final = {"socket_timeout": ASK_S, "socket_connect_timeout": ASK_S}
"""The options of a connection that opens quickly or not at all."""
LOOK_S: Final = 2.0
"""The time between two looks. A server that is silent, not dead, shows in no other way that it is replaced."""
SOON_S: Final = 0.5
"""The time between two looks while a server owes an answer. Another one may replace it any moment."""


class Watcher:
    """A thread that looks every `LOOK_S`, or every `SOON_S` in urgent times, until it is closed."""

    def __init__(self, name: str) -> None:
        """Begin; ``name`` is the thread's."""
        self._is_over = threading.Event()
        with suppress(RuntimeError):  # the interpreter ends, or no more threads may start: then there is no watch
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def look(self) -> None:
        """Ask for the primaries, and end the connections to a server that is none any more.

        It may raise errors of redis-py.
        """
        raise NotImplementedError

    def is_urgent(self) -> bool:
        """Return whether a server owes an answer."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread soon."""
        self._is_over.set()

    def _run(self) -> None:
        looked_s = time.monotonic()
        while not self._is_over.wait(SOON_S):
            if time.monotonic() - looked_s < LOOK_S and not self.is_urgent():
                continue
            with suppress(foreign.RedisError, OSError):  # the sender of a command to such servers reports it
                self.look()
            looked_s = time.monotonic()
