"""Members whose process has ended, if this host can tell: by boot, pid namespace, pid and start time.

A member's incarnation names its process. Only a process of the same boot and pid namespace can judge it. All others,
and all members whose incarnation names none, are judged by their leases alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_common.stream.groups.roster import UNSEEN_MS, Roster

MEMBER_SILENT_MS = 2500
"""A member renews every two seconds at least. A member that was seen more recently is alive, even if this host does not
know its pid, because hosts restored from one snapshot share boot and namespace."""
MOST_THREADS = 1
"""A process whose main thread has ended is a zombie, too, but lives while it has other threads."""

ALIVE_MS = 30_000
"""One lease: a process with a heartbeat within it may be at work, and `groups drop` asks for --force."""
GONE_AFTER = f"one that has ended counts as gone at most {ALIVE_MS // 1000} s after it was last seen"
"""The end of a message that names who is at work: after a kill or Ctrl-C no fact on the server shows the end."""

_PROC = Path("/proc")
_NAMED = re.compile(r"[^@]{1,100}@([0-9a-f]{16})\.([1-9][0-9]{0,6})\.([1-9][0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
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


def process_of(incarnation: str) -> ProcessIdentity | None:
    """Return the process that an incarnation names; None where it names none, or nonsense."""
    found = _NAMED.fullmatch(incarnation)
    return ProcessIdentity(found[1], int(found[2]), int(found[3])) if found else None


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
        roster: the roster of one partition.
        now_ms: the server's time.
        here: digest of boot and namespace of the judging process, by default this one. '' finds no member.
        started: returns a pid's start time, as `start_time` does.

    Returns:
        (group, member) to its incarnation.
    """
    here = _here() if here is None else here
    found = {}
    for who, incarnation in roster.incarnations.items():
        process = process_of(incarnation)
        if process is None or process.where != here or now_ms - roster.members[who] < MEMBER_SILENT_MS:
            continue
        if (at := started(process.pid)) is not None and at != process.started:
            found[who] = incarnation
    return found


@dataclass(frozen=True, slots=True)
class Liveness:
    """A member's process as the roster and this host show it at one moment."""

    unseen_ms: int | None = None
    """Time since its last heartbeat by the server's clock, or None if it left, was forgotten, or never came."""
    has_ended: bool = False
    """Whether `ended_members` names it."""

    @property
    def is_silent(self) -> bool:
        """Return True if the member is dead, as far as its heartbeats show. It loses nothing by that."""
        return self.has_ended or self.unseen_ms is None or self.unseen_ms > UNSEEN_MS

    @property
    def may_be_at_work(self) -> bool:
        """Return True if the member gave a heartbeat within a lease, and is not known to have ended."""
        return not self.has_ended and self.unseen_ms is not None and self.unseen_ms < ALIVE_MS

    @property
    def unseen_s(self) -> float | None:
        """Return the time since its last heartbeat in seconds."""
        return None if self.unseen_ms is None else self.unseen_ms / 1000


def is_returned(member: str) -> bool:
    """Return True if the name stands for entries that members returned, not for a process."""
    return member.startswith("~")


def liveness_of(rosters: Sequence[Roster], now_ms: int) -> dict[tuple[str, str], Liveness]:
    """Return (group, member) -> its liveness, of the members that any of a stream's rosters names.

    Args:
        rosters: The rosters of one partition or more. The first decides whether a process has ended.
        now_ms: The server's clock.
    """
    seen: dict[tuple[str, str], int] = {}
    for roster in rosters:
        for who, at in roster.members.items():
            seen[who] = max(seen.get(who, 0), at)
    ended = ended_members(rosters[0], now_ms)
    return {who: Liveness(now_ms - at, who in ended) for who, at in seen.items()}


def count_live(roster: Roster, group: str) -> int:
    """Return how many members of a group were seen about as lately as the last one, at least 1."""
    seen = [at for (name, _), at in roster.members.items() if name == group]
    return max(1, sum(at > max(seen) - UNSEEN_MS for at in seen))


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
