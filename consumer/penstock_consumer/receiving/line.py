"""A reader's connection to the server: opened when it is first needed, and again after an outage, which is borne.

What has to be asked for anew then is the reader's.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock_common.errors import ServerUnavailable
from penstock_common.server.channel import Channel
from penstock_common.server.connection import open_channel
from penstock_common.stream.commands import Client
from penstock_common.waiting import Notify, Outage
from penstock_consumer.stages.queue import Prefetch


class Line:
    """Used by one thread."""

    def __init__(self, client: Client, queue: Prefetch, notify: Notify) -> None:
        self._client, self._queue = client, queue
        self._channel: Channel | None = None
        self._outage = Outage(notify, doing="reading")

    @property
    def client(self) -> Client:
        """The control connection to the same server."""
        return self._client

    def open(self) -> Channel:
        """The connection; raises ServerUnavailable."""
        if self._channel is None:
            self._channel = open_channel(self._client)
        return self._channel

    def reopen(self, error: ServerUnavailable, then: Callable[[], object] = lambda: None) -> None:
        """A new connection as soon as the server answers, and ``then`` done on top; raises what lasts too long.

        Whoever wants no more batches does not wait for a server.
        """
        self.close()
        self._queue.meter.to("server")
        while True:
            if self._queue.is_stopped:
                raise error
            self._queue.trouble = str(error)
            self._outage.bear(error)
            try:
                self.open()
                then()
                self._queue.trouble = ""
                return
            except ServerUnavailable as again:
                error = again

    def answered(self) -> None:
        """The server does what it is asked: the next outage is another one."""
        self._outage.over()

    def close(self) -> None:
        """Gives the connection back; again is harmless."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None
