"""The threads and connections of a loader, and how all of them end: at `close`, or at the end of the program.

Nothing here refers to the loader itself, so that a loader out of use can be collected and ended.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from os import getpid

from penstock_common.errors import PenstockError
from penstock_common.stream.commands import Client
from penstock_common.waiting import AT_ONCE_S, LEAVE_S
from penstock_consumer.read.ack import UnacknowledgedNotice
from penstock_consumer.read.member import Member

JOIN_S = 5.0
"""The time for a thread to notice that it should end. Each looks several times a second."""
CLOSE_SILENCE_S = 2.0
"""The time for which closing waits for an answer of a server that is there. It asks twice, within 5 s."""


@dataclass(slots=True)
class LoaderResources:
    """The threads and connections that end with a loader, also with one that was not closed."""

    client: Client
    unacknowledged: UnacknowledgedNotice
    """The notice to give if the loader is not closed."""
    member: Member | None = None
    """None until the stream was found and joined."""
    is_patient: bool = False
    """Whether the caller closes it, and waits for that."""
    pid: int = field(default_factory=getpid)
    """The process of the loader. A process that was forked later has useless copies of all this."""

    def take_time(self) -> None:
        """Wait for a server that is away, because the caller closes the loader and waits for that."""
        self.is_patient = True

    def hurry(self) -> None:
        """Wait for no server any more, because the caller was interrupted while it closed the loader."""
        self.is_patient = False

    def join(self, member: Member) -> None:
        """Learn what has to be ended, once the loader has joined its group."""
        self.member = member


def end_resources(resources: LoaderResources) -> None:
    """End the threads, close the epochs that are acknowledged by now, return the rest, and leave the group.

    A loader that was not closed is collected in any thread that runs then. In one of its own, which cannot wait for
    itself and may hold a lock that is needed here, a new thread does all this.
    """
    if resources.pid != getpid():
        return
    if not resources.is_patient:
        resources.unacknowledged.tell()
    if resources.member is not None and resources.member.is_current_thread:
        threading.Thread(target=_end, args=(resources,), name="penstock-end", daemon=True).start()
    else:
        _end(resources)


def _end(resources: LoaderResources) -> None:
    patience_s, silence_s = (LEAVE_S, CLOSE_SILENCE_S) if resources.is_patient else (0.0, AT_ONCE_S)
    resources.client.limit_patience(patience_s, silence_s)
    try:
        if resources.member is not None:
            with suppress(PenstockError):  # the server is gone: the leases lapse by themselves
                resources.member.end(JOIN_S if resources.is_patient else AT_ONCE_S, patience_s)
    finally:
        resources.client.close()
