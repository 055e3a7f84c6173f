"""A workbench that knows how fast it is: what goes into making samples, into waiting for room, into waiting for jobs.

It says so every two seconds, in the paces of the stream it works for. What follows from it is ``staffing``'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from penstock_common.errors import PenstockError
from penstock_common.pace import Pace
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.streams import Stream
from penstock_common.stream.watching.paces import TELL_S, Teller, worker_field
from penstock_common.waiting import Notify
from penstock_producer.working.task import ShardTask
from penstock_producer.working.workbench import Made, Workbench

BUSY, ROOM, IDLE = "busy", "room", "idle"


class PacedBench(Workbench):
    """A worker's workbench, and its pace."""

    def __init__(self, url: str, name: str, **how: Any) -> None:
        super().__init__(url, **how)
        self._name = name
        self.pace = Pace(BUSY)
        self._stream: Stream | None = None
        """The one it last worked for."""
        self._ending = threading.Event()
        self._teller: threading.Thread | None = None

    def produce(
        self,
        task: ShardTask,
        made: Made,
        notify: Notify,
        before_finish: Callable[[], None],
        should_yield: Callable[[], bool] = lambda: False,
        is_at: Callable[[int], None] = lambda committed: None,
    ) -> None:
        """See Workbench."""
        began: int | None = None
        """What was committed when this run began."""
        seen = 0
        """And at the last sample."""

        def at(committed: int) -> None:
            nonlocal began, seen
            if committed == seen and began is not None and self.pace.kind == BUSY:
                return  # as before nearly every sample
            self.pace.enter(BUSY)
            if began is None:
                began = seen = committed
                self._begin_telling()
            elif committed > seen:
                self.pace.count(committed - seen)
                seen = committed
            is_at(committed)

        def asked_in_vain() -> bool:  # asked while it waits for room, and only then
            self.pace.enter(ROOM)
            return should_yield()

        self.pace.enter(BUSY)
        try:
            super().produce(task, made, notify, before_finish, asked_in_vain, at)
        finally:
            counted = seen - (began or 0)
            if (rest := made.good + made.bad - counted) > 0:
                self.pace.enter(BUSY)
                self.pace.count(rest)

    def rest(self) -> None:
        """There is no job."""
        if self._stream is not None:
            self.pace.enter(IDLE)

    def leave(self) -> None:
        """The worker ends: it is heard of no more."""
        self._ending.set()
        if self._teller is not None:
            self._teller.join(timeout=TELL_S)

    def _begin_telling(self) -> None:
        assert self._writer is not None
        self._stream = self._writer.stream
        if self._teller is None:
            self._teller = threading.Thread(target=self._tell_on, name="penstock-pace", daemon=True)
            self._teller.start()

    def _tell_on(self) -> None:
        """On a connection of its own: the writer's may wait for a server, or be closed."""
        teller: Teller | None = None
        client: Client | None = None
        while not self._ending.wait(TELL_S):
            stream = self._stream
            assert stream is not None
            try:
                client = client or connect(self._url)
            except PenstockError:
                continue  # who works will say so
            if teller is None or teller.stream.id != stream.id:
                if teller is not None:
                    teller.leave()
                teller = Teller(client, stream, worker_field(self._name))
            teller.tell(self.pace)
        if teller is not None:
            teller.leave()
        if client is not None:
            client.close()
