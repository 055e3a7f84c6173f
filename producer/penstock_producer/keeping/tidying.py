"""The timer of retention: a light thread beside whoever writes, so that a stream is tidied while nobody waits for room.

What a pass does is the janitor's. Nothing here refers to the writer, so that one nobody uses any more can be collected.
"""

from __future__ import annotations

import threading

from penstock_common.errors import PenstockError, ServerUnavailable, StreamDeleted
from penstock_common.stream.commands import Client
from penstock_common.stream.streams import Stream
from penstock_common.threads import join
from penstock_common.waiting import Notify
from penstock_producer.keeping.janitor import TIDY_EVERY_S, tidy


class Tidying:
    """Passes over a stream at intervals, from `start` to `stop`; it ends by itself with the stream."""

    def __init__(self, client: Client, stream: Stream, notify: Notify, every_s: float | None = None) -> None:
        self._client, self._stream, self._notify = client, stream, notify
        self._every_s = TIDY_EVERY_S if every_s is None else every_s
        self.stopping = threading.Event()
        """Set it to end the thread without waiting for that."""
        self._thread = threading.Thread(target=self._run, name=f"penstock-tidying-{stream.name}", daemon=True)

    def start(self) -> None:
        """The first pass comes after one interval."""
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread uses the connection no more."""
        self.stopping.set()
        join(self._thread, 5)

    def _run(self) -> None:
        while not self.stopping.wait(self._every_s):
            try:
                tidy(self._client, self._stream, self._notify)
            except ServerUnavailable:
                continue  # who writes will say so; the next pass finds it again
            except StreamDeleted:
                return  # as it will meet this
            except PenstockError as error:
                self._notify(f"retention of {self._stream.name!r} stopped: {error}")
                return
