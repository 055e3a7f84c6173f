"""The safety of a write before it counts as committed: in the server's memory, on its disk, on replicas, or both.

WAIT and WAITAOF answer only for what their own connection wrote, and for everything written before it. So they follow
each commit on its connection, and `make_safe` writes a hint before it asks. The committer waits for the answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import ResponseError

from penstock_common.errors import BadOption, DurabilityLost, ServerUnsuitable, WaitTimeout
from penstock_common.server.channel import Command, Reply
from penstock_common.server.error_translation import address, server_at, translate_reply
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.streams import Stream
from penstock_common.waiting import Notify, Wait

_TOUCH = load_script("touch")
_TOUCH_PARTITION = load_script("touch_partition")

ROUND_MS: Final = 1000
"""The longest time that the server may take for one answer. A shortfall is reported, and the server asked again."""
SAFE_S: Final = 30.0
"""The longest wait for missing replicas, or for a disk that is too slow."""
LEVELS = "memory, fsync, replicas=K, fsync+replicas=K"


@dataclass(frozen=True, slots=True)
class Durability:
    """A level of safety that a write must reach."""

    fsync: bool = False
    """Whether it must be on the disk of the server that took it."""
    replicas: int = 0
    """The number of replicas that must have it in memory."""

    @classmethod
    def parse(cls, text: str) -> Durability:
        """Parse ``memory``, ``fsync``, ``replicas=2`` or ``fsync+replicas=2``. Raises BadOption."""
        found = re.fullmatch(r"memory|(fsync)?(?:(?:(?<=c)\+|^)replicas=([1-9]\d{0,2}))?", text)
        if not text or found is None:
            raise BadOption(f"durability is {text!r}, expected one of {LEVELS}")
        return cls(found[1] is not None, int(found[2] or 0))

    def __str__(self) -> str:
        parts = ["fsync"] * self.fsync + [f"replicas={self.replicas}"] * bool(self.replicas)
        return "+".join(parts) or "memory"

    @property
    def is_synced(self) -> bool:
        """Return whether a payload in a file must be on the disk before the entry that refers to it is sent."""
        return self.fsync

    def commands(self) -> list[Command]:
        """Return the commands to send behind a write on its connection. `shortfall` takes as many replies."""
        wait: list[Command] = [(b"WAITAOF", b"1", b"0", b"%d" % ROUND_MS)] if self.fsync else []
        return [*wait, (b"WAIT", b"%d" % self.replicas, b"%d" % ROUND_MS)] if self.replicas else wait

    def shortfall(self, replies: Sequence[Reply], where: Client) -> str:
        """Return what is missing, by the replies to `commands`, or ''. Raises the first refusal among them."""
        lacking, answers = [], list(replies)
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise translate_reply(answer, where)
        if self.fsync:
            local: Any = answers.pop(0)
            lacking += [] if int(local[0]) else ["the server has not written it to its disk"]
        if self.replicas:
            found: Any = answers.pop(0)
            lacking += [] if int(found) >= self.replicas else [f"{found} of {self.replicas} replicas have it"]
        return " and ".join(lacking)


def touch_command(stream: Stream) -> Command:
    """Return a harmless write for a connection that has written nothing yet."""
    return (b"EVAL", _TOUCH.encode(), b"2", stream.keys.meta.encode(), stream.keys.events.encode())


def touch_partition(partition: PartitionKeys) -> Command:
    """Return a harmless write to the server of a partition."""
    return (b"EVAL", _TOUCH_PARTITION.encode(), b"1", partition.roster.encode())


def require_durable(client: Client, durability: Durability) -> None:
    """Raise ServerUnsuitable if the server cannot keep the level. It is asked, because versions do not show it."""
    if durability.fsync:
        try:
            client.execute_command("WAITAOF", 1, 0, 1)
        except ResponseError as error:
            raise ServerUnsuitable(_no_fsync(str(error), client, durability)) from None
    if durability.replicas:
        for where, online in client.on_each(lambda node: (node.where, _online(node.info("replication")))):
            if online < durability.replicas:
                raise ServerUnsuitable(
                    f"durability {str(durability)!r} needs {durability.replicas} replicas, {server_at(where)} has "
                    f"{online} that follow: connect replicas, or choose a lower level"
                )


def _online(told: dict[str, Any]) -> int:
    """Return the number of replicas that follow, by the server's facts on replication."""
    return sum(bool(re.fullmatch(r"slave\d+", name)) and one["state"] == "online" for name, one in told.items())


def _no_fsync(text: str, client: Client, durability: Durability) -> str:
    start = f"durability {str(durability)!r} cannot be kept by {server_at(address(client))}"
    if "unknown command" in text:
        return f"{start}: it has no WAITAOF (Redis 7.2, Valkey and newer have it); choose memory or replicas=K"
    if "appendonly" in text:
        return f"{start}: it writes no append-only file; start it with `appendonly yes` (`penstock server --aof DIR`)"
    return f"{start} ({text})"


def await_safety(wait: Wait, durability: Durability, lacking: str) -> None:
    """Report the reason of a write's wait. Raises DurabilityLost after `SAFE_S`."""
    try:
        wait.because("durability", lambda: f"durability {str(durability)!r}: {lacking}", SAFE_S)
    except WaitTimeout as error:
        raise DurabilityLost(
            f"{error}. It is committed, and not as safe as promised: see the server's replicas and disk, then start "
            "again; what is committed is not written twice"
        ) from None


def is_safe(client: Client, stream: Stream, durability: Durability) -> bool:
    """Wait for one round, and return whether everything written is as safe as the level demands."""
    return not _lacking(client, stream, durability)


def _lacking(client: Client, stream: Stream, durability: Durability) -> str:
    """Return what is missing on the servers of the stream and of its partitions, which may be one."""
    touches = {client.node_of(part.roster).where: touch_partition(part) for part in stream.partitions}
    touches[client.node_of(stream.keys.meta).where] = touch_command(stream)
    safety = durability.commands()
    with client.pipeline(transaction=False) as pipe:
        for touch in touches.values():
            for command in (touch, *safety):
                pipe.execute_command(*command)
        replies = pipe.execute(raise_on_error=False)
    size = 1 + len(safety)
    answers = [replies[start + 1 : start + size] for start in range(0, len(replies), size)]
    return " and ".join(filter(None, (durability.shortfall(answer, client) for answer in answers)))


def make_safe(client: Client, stream: Stream, durability: Durability, notify: Notify) -> None:
    """Return once everything written, on any connection, is as safe as the level demands."""
    wait = Wait(notify)
    while durability.commands() and (lacking := _lacking(client, stream, durability)):
        await_safety(wait, durability, lacking)
