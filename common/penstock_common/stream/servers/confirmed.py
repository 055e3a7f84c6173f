"""The order of facts on several servers: one that rests on another server's is written when a replica has that one.

Each server of a cluster loses its newest writes alone. So a fact would outlive what it rests on. On one server the
newest fact is lost first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from redis.exceptions import ResponseError

from penstock_common.errors import ServerUnavailable, Unauthorized
from penstock_common.server.channel import Command
from penstock_common.stream.commands import Client, ask_all
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.servers.durability import (
    Durability,
    ReplicaWatch,
    bear_shortfall,
    touch_command,
    unconfirmed_notice,
)
from penstock_common.stream.streams import Stream
from penstock_common.waiting import Notify, Wait

Answer = TypeVar("Answer")
StreamPart: TypeAlias = PartitionKeys | Stream
"""A part of a stream whose facts one server has: a partition, or the keys of the stream itself."""


class Confirmer:
    """Asks the servers of one stream whether replicas have what was written, as the stream's durability demands.

    It asks nothing where the level is ``memory``, or where it is ``auto`` and no replica follows the server. A user
    without the right to WAIT asks nothing, either.
    """

    def __init__(
        self,
        client: Client,
        stream: Stream,
        notify: Notify,
        *,
        watch: ReplicaWatch | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Ask nothing yet. ``should_stop`` ends a wait that has no end of its own, with DurabilityLost."""
        self._client, self._stream, self._notify, self._should_stop = client, stream, notify, should_stop
        self._watch = watch or ReplicaWatch(client)
        self._durability = Durability.parse(stream.durability)
        self._wait: Wait | None = None
        """The wait of `Question.is_answered`, from its first refusal on."""

    @property
    def everywhere(self) -> Sequence[StreamPart]:
        """The partitions, and the stream's own keys."""
        return [*self._stream.partitions, self._stream]

    def asks(self, parts: Sequence[StreamPart]) -> bool:
        """Return whether any of the servers of these parts is to be asked."""
        return any(self._level(part).commands() for part in parts)

    def are_apart(self, *parts: StreamPart) -> bool:
        """Return whether several servers have these parts. One server loses no fact without those that rest on it."""
        return len(self._client.by_server([_key_of(part) for part in parts])) > 1

    def probe(self, partitions: Sequence[PartitionKeys], limit_ms: int) -> list[Command]:
        """Return the commands that ask the server of these partitions on a connection to it, or nothing.

        They are a write and a WAIT of at most ``limit_ms``. One WAIT cannot answer for partitions that moved apart.
        """
        replicas = 0 if self.are_apart(*partitions) else self._level(partitions[0]).replicas
        return [touch_command(partitions[0].roster), (b"WAIT", b"%d" % replicas, b"%d" % limit_ms)] if replicas else []

    def question(self, parts: Sequence[StreamPart]) -> Question:
        """Return the question whether what is written from now on, or was read since, is on replicas."""
        return Question(self, parts)

    def run(self, parts: Sequence[StreamPart], write: Callable[[], Answer], limit_s: float = math.inf) -> Answer:
        """Write facts of these parts, and return what ``write`` returned once replicas have them.

        ``write`` runs again after each failover. With ``auto`` the wait has a limit of its own. Raises DurabilityLost.
        """
        wait = Wait(self._notify)
        while True:
            question = self.question(parts)
            answer = write()
            if not (lacking := question.lacking()) or wait.seconds >= limit_s:
                return answer
            if not bear_shortfall(wait, self._durability, said(lacking), self._should_stop):
                self._give_up(lacking)
                return answer

    def _level(self, part: StreamPart) -> Durability:
        return self._watch.level(self._durability, _key_of(part))

    def _give_up(self, lacking: dict[str, str]) -> None:
        for key in lacking:
            self._watch.lost(key)
            self._notify(unconfirmed_notice(self._stream.name, self._client.node_of(key).server))

    # --- for a question ---

    def part_at(self, parts: Sequence[StreamPart]) -> dict[str, StreamPart]:
        """Return a part for each server that has some of these now, by its address."""
        found: dict[str, StreamPart] = {}
        for part in parts:
            found.setdefault(self._client.node_of(_key_of(part)).server, part)
        return found

    def lacking_at(self, server: str, part: StreamPart) -> str:
        """Return what the replicas of a server lack, or ''."""
        node, safety = self._client.node_of(_key_of(part)), self._level(part).commands()
        if node.server != server:
            return _moved(server, node.server)
        if not safety:
            return ""
        try:
            commands = [touch_command(_key_of(part)), *safety]
            touched, *replies = ask_all(node.impatient(), commands, raises=False)
            if isinstance(touched, ResponseError):
                return str(touched)
            if node.server != server:  # a new connection led to another one
                return _moved(server, node.server)
            return self._level(part).shortfall(replies, node)
        except ServerUnavailable as error:
            return str(error)
        except (Unauthorized, ResponseError):
            return ""

    def bears(self, lacking: dict[str, str]) -> bool:
        """Return whether to try again later. With ``auto`` that has a limit. It says what is missing."""
        if not lacking:
            self._wait = None
            return False
        self._wait = self._wait or Wait(self._notify)
        if bear_shortfall(self._wait, self._durability, said(lacking)):
            return True
        self._give_up(lacking)
        self._wait = None
        return False


class Question:
    """The question whether replicas have what was written to some servers after it was made.

    A server that has taken over may lack the write, so it does not answer for it.
    """

    def __init__(self, confirmer: Confirmer, parts: Sequence[StreamPart]) -> None:
        self._confirmer = confirmer
        self._parts = confirmer.part_at(parts) if confirmer.asks(parts) else {}

    def lacking(self) -> dict[str, str]:
        """Ask each server once, and return what its replicas lack, by a key of it."""
        found = {_key_of(part): self._confirmer.lacking_at(server, part) for server, part in self._parts.items()}
        return {key: lack for key, lack in found.items() if lack}

    def is_answered(self) -> bool:
        """Return whether replicas have it. If not, the caller leaves the next step for later."""
        return not self._confirmer.bears(self.lacking())


def said(lacking: dict[str, str]) -> str:
    """Return what replicas lack, as one text."""
    return " and ".join(dict.fromkeys(lacking.values()))


def _moved(server: str, successor: str) -> str:
    return f"the keys have moved from {server} to {successor}"


def _key_of(part: StreamPart) -> str:
    return part.keys.meta if isinstance(part, Stream) else part.roster
