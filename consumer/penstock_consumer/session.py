"""What a loader has running, its member's name, and how all of it ends: at close, or at the end of the program.

Nothing here refers to the loader itself, so that one nobody uses any more can be collected and ended.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from os import getpid
from socket import gethostname

from penstock_common.errors import EpochIncomplete, PenstockError
from penstock_common.stream.commands import Client
from penstock_consumer.reading import Reading

JOIN_S = 5.0
"""How long a thread may take to notice that it should end; each looks several times a second."""
LEAVE_S = 2.0
"""How long leaving waits for a server that is away: whoever presses Ctrl-C then should not wait for it."""


@dataclass(slots=True)
class Session:
    """What has to be ended with a loader, also one that nobody closed."""

    client: Client
    reading: Reading | None = None
    """None until the stream was found and joined."""
    pid: int = field(default_factory=getpid)
    """A process forked later (a framework's worker) has copies of all this, and no part in it."""


def end_session(session: Session) -> None:
    """Ends threads, closes epochs that are settled by now, hands back, signs off."""
    if session.pid != getpid():
        return
    session.client.patience.seconds = min(session.client.patience.seconds, LEAVE_S)
    if session.reading is not None:
        with suppress(PenstockError):  # the server is gone: the leases lapse by themselves
            _end_reading(session.reading)
    session.client.close()


def _end_reading(reading: Reading) -> None:
    if (run := reading.run) is not None:
        run.queue.stop()
        run.thread.join(timeout=JOIN_S)
        reading.run = None
    reading.keeper.stop()
    place = reading.place
    place.hurry(LEAVE_S)
    with suppress(EpochIncomplete):  # whoever iterates next is told
        for epoch in sorted(place.unclosed):
            place.close_epochs(epoch)
    place.leave()


def default_member() -> str:
    """Host and process: two processes of a host are two members; a restarted container is the same one."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", gethostname())[:80] or "host"
    return f"{host}-{getpid()}"
