"""What a loader has running, its member's name, and how all of it ends: at close, or at the end of the program.

Nothing here refers to the loader itself, so that one nobody uses any more can be collected and ended.
"""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from os import getpid
from socket import gethostname

from penstock_common.errors import EpochIncomplete, PenstockError
from penstock_common.stream.commands import Client
from penstock_consumer.group import Place
from penstock_consumer.keeper import Keeper
from penstock_consumer.pipeline.prefetch import Prefetch
from penstock_consumer.shared import EpochReader

JOIN_S = 5.0
"""How long a thread may take to notice that it should end; each looks several times a second."""
LEAVE_S = 2.0
"""How long leaving waits for a server that is away: whoever presses Ctrl-C then should not wait for it."""


@dataclass(slots=True)
class Run:
    """One epoch being read."""

    reader: EpochReader
    queue: Prefetch
    thread: threading.Thread


@dataclass(slots=True)
class Session:
    """What has to be ended with a loader, also one that nobody closed."""

    client: Client
    place: Place | None = None
    keeper: Keeper | None = None
    run: Run | None = None


def end_session(session: Session) -> None:
    """Ends threads, closes epochs that are settled by now, hands back, signs off."""
    if session.run is not None:
        session.run.queue.stop()
        session.run.thread.join(timeout=JOIN_S)
    if session.keeper is not None:
        session.keeper.stop()
    try:
        if session.place is not None:
            session.place.hurry(LEAVE_S)
            with suppress(EpochIncomplete):  # whoever iterates next is told
                for epoch in sorted(session.place.unclosed):
                    session.place.close_epochs(epoch)
            session.place.leave()
    except PenstockError:
        pass  # the server is gone: the leases lapse by themselves
    session.client.close()


def default_member() -> str:
    """Host and process: two processes of a host are two members; a restarted container is the same one."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", gethostname())[:80] or "host"
    return f"{host}-{getpid()}"
