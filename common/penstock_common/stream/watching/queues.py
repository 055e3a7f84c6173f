"""The queue's server as an onlooker sees it: how many jobs wait, run and have failed. Read by RQ's keys, without RQ.

Only counts are read, which a server makes itself: nothing that another program wrote there is parsed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock_common.stream.link.commands import Client
from penstock_common.stream.servers.suitability import ServerMemory, read_memory

KEYS = {"waiting": ("llen", "rq:queue:"), "running": ("zcard", "rq:wip:"), "failed": ("zcard", "rq:failed:")}
"""What is counted -> the command that counts it, and the start of RQ's key, which the queue's name ends."""


@dataclass(frozen=True, slots=True)
class QueuesGlance:
    """A queue's server at one moment."""

    memory: ServerMemory
    queues: dict[str, dict[str, int]]
    """Queue -> jobs of each kind in KEYS; one whose key is no list or no sorted set is left out."""


def queue_names(queue: str, streams: Iterable[str]) -> list[str]:
    """Return the queue, and one for each part of a split: the jobs of stream ``NAME.PART`` are in ``QUEUE.PART``."""
    parts = {stream.rpartition(".")[2] for stream in streams if "." in stream}
    return [queue, *(f"{queue}.{part}" for part in sorted(parts))]


def look_at_queues(client: Client, names: Iterable[str]) -> QueuesGlance:
    """Count the jobs of these queues.

    Raises:
        ServerUnavailable: The queue's server does not answer.
    """
    asked = [(name, kind) for name in names for kind in KEYS]
    with client.pipeline(transaction=False) as pipe:
        for name, kind in asked:
            command, start = KEYS[kind]
            getattr(pipe, command)(start + name)
        replies = pipe.execute(raise_on_error=False)
    queues: dict[str, dict[str, int]] = {}
    for (name, kind), reply in zip(asked, replies, strict=True):
        if isinstance(reply, int):
            queues.setdefault(name, {})[kind] = reply
    return QueuesGlance(read_memory(client), queues)
