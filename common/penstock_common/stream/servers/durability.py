"""The safety of a write: in the server's memory, on its disk, on replicas, or both.

WAIT and WAITAOF answer only for what their own connection wrote, and for everything written before it. So they follow
a commit on its connection, and `make_safe` writes a hint before it asks.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import ResponseError

from penstock_common.errors import BadOption, DurabilityLost, PenstockError, ServerUnsuitable
from penstock_common.server.channel import Command, Reply
from penstock_common.server.error_translation import server_at, translate_reply
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, ask_all
from penstock_common.stream.streams import AUTO, Stream
from penstock_common.waiting import Notify, Wait

_LOG = logging.getLogger("penstock")
_TOUCH = load_script("touch")

ROUND_MS: Final = 1000
"""The longest time that the server may take for one answer. A shortfall is reported, and the server asked again."""
AUTO_S: Final = 10.0
"""The longest wait with the level `auto` for a replica that followed before. A failover takes less."""
LOOK_S: Final = 5.0
"""Seconds after which a server without a replica is asked again whether one follows."""
SUCCESSOR_S: Final = 30.0
"""Seconds for which a server that took over may still get its first replica, and lose what it has to that one."""
LAG_S: Final = 5
"""A replica that has not answered its primary for this many seconds does not count as following."""
LEVELS = "auto, memory, fsync, replicas=K, fsync+replicas=K"


@dataclass(frozen=True, slots=True)
class Durability:
    """A level of safety that a write must reach."""

    fsync: bool = False
    """Whether it must be on the disk of the server that took it. A payload in a file is on the disk before that."""
    replicas: int = 0
    """The number of replicas that must have it in memory."""
    is_auto: bool = False
    """Whether one replica must have it where a replica follows the server; see `on`."""

    @classmethod
    def parse(cls, text: str) -> Durability:
        """Parse ``auto``, ``memory``, ``fsync``, ``replicas=2`` or ``fsync+replicas=2``. Raises BadOption."""
        if text == AUTO:
            return cls(is_auto=True)
        found = re.fullmatch(r"memory|(fsync)?(?:(?:(?<=c)\+|^)replicas=([1-9]\d{0,2}))?", text)
        if not text or found is None:
            raise BadOption(f"durability is {text!r}, expected one of {LEVELS}")
        return cls(found[1] is not None, int(found[2] or 0))

    def __str__(self) -> str:
        if self.is_auto:
            return AUTO
        parts = ["fsync"] * self.fsync + [f"replicas={self.replicas}"] * bool(self.replicas)
        return "+".join(parts) or "memory"

    @property
    def has_question(self) -> bool:
        """Return whether the server is asked about a write at this level; see `commands`."""
        return self.fsync or self.replicas > 0

    def on(self, replicas: int) -> Durability:
        """Return the level on a server that ``replicas`` follow: `auto` is ``replicas=1`` there, or ``memory``."""
        return (FOLLOWED if replicas else MEMORY) if self.is_auto else self

    def commands(self, limit_ms: int = ROUND_MS) -> list[Command]:
        """Return the commands to send behind a write on its connection. `shortfall` takes as many replies.

        Each holds back its connection until the level is reached, or for ``limit_ms``. `auto` has none; see `on`.
        """
        wait: list[Command] = [(b"WAITAOF", b"1", b"0", b"%d" % limit_ms)] if self.fsync else []
        return [*wait, (b"WAIT", b"%d" % self.replicas, b"%d" % limit_ms)] if self.replicas else wait

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


MEMORY: Final = Durability()
FOLLOWED: Final = Durability(replicas=1)
"""The levels that `auto` means: on a server without a replica, and on one with some."""


def touch_command(key: str) -> Command:
    """Return a harmless write to the server of a hash, for a connection that may have written nothing yet."""
    return (b"EVAL", _TOUCH.encode(), b"1", key.encode())


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


def _online(info: dict[str, Any], lag_s: float = math.inf) -> int:
    """Return the number of replicas that follow, by the server's facts on replication.

    ``lag_s`` is the time for which a replica may not have answered its primary.
    """
    replicas = [one for name, one in info.items() if re.fullmatch(r"slave\d+", name)]
    return sum(one["state"] == "online" and int(one.get("lag", 0)) <= lag_s for one in replicas)


class ReplicaWatch:
    """The servers of one writer that replicas follow, which decides what the level `auto` asks for.

    A server without a replica is asked again every few seconds. One with a replica is not: its answers to WAIT show
    that the replica is gone.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._followed: dict[str, bool] = {}
        self._looked_at: dict[str, float] = {}
        self._servers: dict[str, str] = {}
        """Key -> its server at the last look."""
        self._took_over_at: dict[str, float] = {}
        """Key -> the time at which its server took over from another one."""
        self._given_up: set[str] = set()
        """The servers whose replica did not answer any more. It may still take their place."""

    def level(self, durability: Durability, key: str, *, is_followed: bool = False) -> Durability:
        """Return the level that a write to ``key`` must reach now. Only `auto` depends on the key's server.

        ``is_followed`` means that replicas are expected without a look.
        """
        return durability.on(is_followed or self._is_followed(key)) if durability.is_auto else durability

    def may_be_replaced(self, key: str) -> bool:
        """Return whether a replica that lacks the newest writes may take the place of the key's server.

        By what the last `level` of the key found, the server took over within `SUCCESSOR_S`, or its replica was given
        up.
        """
        if self._servers.get(key) in self._given_up:
            return True
        return key in self._took_over_at and self._clock() - self._took_over_at[key] < SUCCESSOR_S

    def _is_followed(self, key: str) -> bool:
        node, now = self._client.node_of(key), self._clock()
        server = node.server
        if self._servers.setdefault(key, server) != server:
            self._servers[key], self._took_over_at[key] = server, now
        if not self._followed.get(server) and now - self._looked_at.get(server, -math.inf) >= LOOK_S:
            self._looked_at[server] = now
            with suppress(PenstockError, ResponseError):  # a server that is away, or does not say so, has none for now
                is_followed = _online(node.impatient().info("replication"), LAG_S) > 0
                server = node.server  # a new connection may lead to another server
                self._followed[server] = is_followed
                if is_followed:
                    self._given_up.discard(server)
        return self._followed.get(server, False)

    def look(self, durability: Durability, stream: Stream) -> None:
        """Learn which servers of a stream have replicas, and log those without one, for the level `auto`.

        A replica that is cut off later is then waited for.
        """
        alone = {
            self._client.node_of(key).server
            for key in (stream.keys.meta, *(partition.roster for partition in stream.partitions))
            if durability.is_auto and not self._is_followed(key)
        }
        for where in sorted(alone):
            _LOG.info("%s has no replica: what %r writes there is in its memory only", server_at(where), stream.name)

    def lost(self, key: str) -> None:
        """Note that a replica of the key's server did not answer in time: the server counts as one without."""
        server = self._client.node_of(key).server
        self._followed[server], self._looked_at[server] = False, self._clock()
        self._given_up.add(server)


def _no_fsync(text: str, client: Client, durability: Durability) -> str:
    start = f"durability {str(durability)!r} cannot be kept by {server_at(client.where)}"
    if "unknown command" in text:
        return f"{start}: it has no WAITAOF (Redis 7.2, Valkey and newer have it); choose memory or replicas=K"
    if "appendonly" in text:
        return f"{start}: it writes no append-only file; start it with `appendonly yes` (`penstock server --aof DIR`)"
    return f"{start} ({text})"


def bear_shortfall(
    wait: Wait, durability: Durability, lacking: str, should_stop: Callable[[], bool] = lambda: False
) -> bool:
    """Report why a write waits, and return whether to wait on: with `auto` for `AUTO_S`, else without end.

    Args:
        wait: The wait, which reports its reason every few seconds.
        durability: The level of the stream.
        lacking: What is missing, as `Durability.shortfall` says it.
        should_stop: True ends a wait that has no end of its own.

    Raises:
        DurabilityLost: The caller should stop. The write is committed, and not as safe as its level promises.
    """
    if durability.is_auto and wait.seconds >= AUTO_S:
        return False
    wait.because("durability", lambda: f"durability {str(durability)!r}: {lacking}")
    if should_stop():
        raise DurabilityLost(
            f"stopped after {wait.seconds:.0f} s of waiting for durability {str(durability)!r}: {lacking}. It is "
            "committed, and not as safe as promised: see the server's replicas and disk, then start again; what is "
            "committed is not written twice"
        )
    return True


def _lacking(client: Client, stream: Stream, durability: Durability, watch: ReplicaWatch) -> dict[str, str]:
    """Return what is missing on the servers of the stream and of its partitions, by a key of each server."""
    keys = {client.node_of(key).where: key for key in (*(part.roster for part in stream.partitions), stream.keys.meta)}
    asked = {key: level for key in keys.values() if (level := watch.level(durability, key)).commands()}
    commands: list[Command] = []
    for key, level in asked.items():
        commands += [touch_command(key), *level.commands()]
    replies = iter(ask_all(client, commands, raises=False))
    lacking = {}
    for key, level in asked.items():
        next(replies)
        lacking[key] = level.shortfall([next(replies) for _ in level.commands()], client)
    return {key: what for key, what in lacking.items() if what}


def make_safe(
    client: Client,
    stream: Stream,
    durability: Durability,
    notify: Notify,
    watch: ReplicaWatch | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Return once everything written, on any connection, is as safe as the level demands.

    `auto` waits for a limited time, and then counts the servers as ones without a replica. The other levels wait
    without end. Raises DurabilityLost if the caller ``should_stop``.
    """
    wait, watch = Wait(notify), watch or ReplicaWatch(client)
    while lacking := _lacking(client, stream, durability, watch):
        if not bear_shortfall(wait, durability, " and ".join(lacking.values()), should_stop):
            for key in lacking:
                watch.lost(key)
                notify(unconfirmed_notice(stream.name, client.node_of(key).server))


def unconfirmed_notice(name: str, where: str) -> str:
    """Return the notice on a server whose replica does not answer any more, for the level `auto`."""
    return (
        f"no replica of {server_at(where)} has confirmed the newest writes to {name!r} for {AUTO_S:.0f} s: they are "
        "in the memory of that server only, like all writes until a replica follows it again"
    )
