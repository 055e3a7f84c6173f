"""The queue's server for people and tools: its jobs, and workers of other programs.

RQ's keys are read without RQ. Nothing that another program wrote there is parsed: the server counts, and names are
texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from penstock_common.server.hosts import is_host
from penstock_common.stream.commands import Client, ask_all
from penstock_common.stream.servers.suitability import ServerMemory, read_memory

KEYS = {"waiting": ("LLEN", "rq:queue:"), "running": ("ZCARD", "rq:wip:"), "failed": ("ZCARD", "rq:failed:")}
"""The kind that is counted -> the command that counts it, and the start of RQ's key, which the queue's name ends."""

OWN_WORKER = re.compile(r".+\.[0-9a-f]{8}")
"""The names of Penstock's workers: a host and eight random digits (`WorkerOptions.named`)."""
_WORKER = "rq:worker:"
_PID = re.compile(r"[1-9][0-9]{0,9}")
"""The id of one process. 0 and negative numbers would end a whole group of processes."""
_SHOWN = 80
"""The characters that are shown of what others wrote."""
SAMPLED = 8
"""The jobs that are read from either end of a queue, to learn for which streams it has jobs."""
_DESCRIBED = re.compile(rb"shard \d+ of epoch \d+ of '([A-Za-z0-9._-]{1,100})'")
"""The description that Penstock gives a job."""


@dataclass(frozen=True, slots=True)
class ForeignWorker:
    """A worker of another program, such as `rq worker`, that takes jobs of a queue of Penstock's."""

    queue: str
    name: str
    host: str
    """Its host, or ``?`` if what it says is none."""
    pid: str
    """Its process id, or ``?`` if what it says is none."""
    failed: str
    """The number of jobs that it took and failed, by its own count."""


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The jobs of a queue's server at one moment."""

    memory: ServerMemory
    queues: dict[str, dict[str, int]]
    """Queue -> jobs of each kind in KEYS. A queue whose key is no list or no sorted set is left out."""


def queue_names(queue: str, streams: Iterable[str]) -> list[str]:
    """Return the queue, and one for each part of a split: the jobs of stream ``NAME.PART`` are in ``QUEUE.PART``."""
    parts = {stream.rpartition(".")[2] for stream in streams if "." in stream}
    return [queue, *(f"{queue}.{part}" for part in sorted(parts))]


def snapshot_queues(client: Client, names: Iterable[str]) -> QueueSnapshot:
    """Count the jobs of these queues.

    Raises:
        ServerUnavailable: The queue's server does not answer.
    """
    asked = [(name, kind) for name in names for kind in KEYS]
    replies = ask_all(client, [(KEYS[kind][0], KEYS[kind][1] + name) for name, kind in asked], raises=False)
    queues: dict[str, dict[str, int]] = {}
    for (name, kind), reply in zip(asked, replies, strict=True):
        if isinstance(reply, int):
            queues.setdefault(name, {})[kind] = reply
    return QueueSnapshot(read_memory(client), queues)


def find_foreign_workers(client: Client, names: Iterable[str]) -> list[ForeignWorker]:
    """Return the workers of these queues that are not Penstock's.

    Raises:
        ServerUnavailable: The queue's server does not answer.
        ResponseError: It refuses to say, or another program wrote over the list of workers.
    """
    found: list[ForeignWorker] = []
    for queue in names:
        keys = [key.decode("utf-8", "replace") for key in client.smembers(f"rq:workers:{queue}")]
        others = sorted(key for key in keys if not OWN_WORKER.fullmatch(key.removeprefix(_WORKER)))
        commands = [("HMGET", key, "hostname", "pid", "failed_job_count") for key in others]
        replies = ask_all(client, commands, raises=False)
        for key, reply in zip(others, replies, strict=True):
            if isinstance(reply, list) and any(reply):  # otherwise it is gone, or its record is no hash
                host, pid, failed = ((value or b"?")[:_SHOWN].decode("utf-8", "replace") for value in reply)
                pid = pid if _PID.fullmatch(pid) else "?"
                name = key.removeprefix(_WORKER)[:_SHOWN]
                found.append(ForeignWorker(queue, name, host if is_host(host) else "?", pid, failed))
    return found


def find_queued_streams(client: Client, names: Iterable[str]) -> dict[str, set[str]]:
    """Return queue -> the streams of its first and last jobs.

    Raises:
        ServerUnavailable: The queue's server does not answer.
    """
    found: dict[str, set[str]] = {}
    for queue in names:
        ends = [("LRANGE", f"rq:queue:{queue}", *end) for end in ((0, SAMPLED - 1), (-SAMPLED, -1))]
        replies = ask_all(client, ends, raises=False)
        jobs = {job for reply in replies if isinstance(reply, list) for job in reply}
        texts = ask_all(client, [("HGET", b"rq:job:" + job, "description") for job in jobs], raises=False)
        streams = [_DESCRIBED.fullmatch(text) for text in texts if isinstance(text, bytes)]
        found[queue] = {match[1].decode() for match in streams if match}
    return found
