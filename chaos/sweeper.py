"""Remove the files of dead processes at once, for as long as a run with payloads in segments lasts.

It needs an internal part: recycling with hardly any grace period, which no command offers.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from penstock import PenstockError
from penstock_common.stream.client import connect
from penstock_common.stream.streams import load_stream
from penstock_producer.write.cleaner import recycle

EVERY_S = 0.5
GRACE_S = 0.5
"""The grace period, much shorter than normal. So files of writers that have just died are taken, and those of some live
ones.
"""


def sweep(url: str, name: str, grace_s: float) -> None:
    """Remove the files of a stream that nothing refers to."""
    with connect(url, timeout_s=5) as client:
        recycle(client, load_stream(client, name), grace_s=grace_s)


class Sweeper:
    """A thread that sweeps again and again."""

    def __init__(self, url: str, names: tuple[str, ...]) -> None:
        self._url, self._names = url, names
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-sweeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            with suppress(PenstockError):
                for name in self._names:
                    sweep(self._url, name, GRACE_S)

    def close(self) -> None:
        """Stop the thread, and return when it has ended."""
        self._stopping.set()
        self._thread.join(30)
