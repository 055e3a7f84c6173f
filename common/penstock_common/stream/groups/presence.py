"""Members whose process has ended, if this host can tell: by boot, pid namespace, pid and start time.

A member's incarnation names its process. Only a process of the same boot and pid namespace can judge it. All others,
and all members whose incarnation names none, are judged by their leases alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock_common.stream.groups.roster import UNSEEN_MS, Roster

SILENT_MS = 2500
"""A member renews every two seconds at least. One that was seen more recently lives, whatever this host knows of its
pid: hosts restored from one snapshot share boot and namespace."""
MOST_THREADS = 1
"""A process whose main thread has ended is a zombie, too, but lives while it has other threads."""

_PROC = Path("/proc")
_NAMED = re.compile(r"[^@]{1,100}@([0-9a-f]{16})\.([1-9][0-9]{0,6})\.([1-9][0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class Process:
    """A process as its own host knows it."""

    where: str
    """The digest of boot id and pid namespace, 16 hex digits."""
    pid: int
    started: int
    """The clock ticks from the boot to its start."""


def new_incarnation() -> str:
    """Return a random name for one incarnation of a member, followed by the process where the host can tell it."""
    name, where = secrets.token_hex(8), _here()
    started = start_time(os.getpid()) if where else None
    return f"{name}@{where}.{os.getpid()}.{started}" if started else name


def process_of(incarnation: str) -> Process | None:
    """Return the process that an incarnation names; None where it names none, or nonsense."""
    found = _NAMED.fullmatch(incarnation)
    return Process(found[1], int(found[2]), int(found[3])) if found else None


def start_time(pid: int) -> int | None:
    """Return when a process of this pid namespace started, in clock ticks; 0 if there is none, None if unknown.

    A zombie has ended. A stopped process has not.
    """
    try:
        os.kill(pid, 0)  # /proc may hide other users' processes, the kernel does not
    except ProcessLookupError:
        return 0
    except OSError:
        pass  # the process is another user's
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        has_ended = fields[0] in "ZX" and int(fields[17]) <= MOST_THREADS
        return 0 if has_ended else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def ended_members(
    roster: Roster, now_ms: int, *, here: str | None = None, started: Callable[[int], int | None] = start_time
) -> dict[tuple[str, str], str]:
    """Return the members whose processes have ended for certain.

    Args:
        roster: of one partition.
        now_ms: the server's time.
        here: digest of boot and namespace of the judge, by default this process's; '' judges nobody.
        started: tells a pid's start time, as `start_time` does.

    Returns:
        (group, member) to its incarnation.
    """
    here = _here() if here is None else here
    found = {}
    for who, incarnation in roster.incarnations.items():
        process = process_of(incarnation)
        if process is None or process.where != here or now_ms - roster.members[who] < SILENT_MS:
            continue
        if (at := started(process.pid)) is not None and at != process.started:
            found[who] = incarnation
    return found


def is_silent(member: str, unseen_ms: float | None, *, has_ended: bool) -> bool:
    """Return True if a member is dead, as far as is known. Nobody holds what members returned.

    Args:
        member: its name, or one with ``~`` for what members returned.
        unseen_ms: time since its last heartbeat, or None for one that is gone and still holds entries.
        has_ended: whether `ended_members` names it.
    """
    return not member.startswith("~") and (has_ended or unseen_ms is None or unseen_ms > UNSEEN_MS)


def _here() -> str:
    """Return the digest of this process's boot id and pid namespace, or '' if /proc does not show its own."""
    try:
        if str((_PROC / "self").readlink()) != str(os.getpid()):
            return ""
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").readlink()
        return hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=8).hexdigest()
    except OSError:
        return ""
