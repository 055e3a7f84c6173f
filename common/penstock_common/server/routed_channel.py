"""A channel to a cluster: each command goes to the server that holds its key. Replies come in the order of commands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock_common.server.channel import REPLY_TIMEOUT_S, Channel, Command, EntrySink, Reply
from penstock_common.server.slots import Key, key_of

if TYPE_CHECKING:
    from penstock_common.server.client import ControlClient


class RoutedChannel(Channel):
    """Connections to the servers of a cluster, used by one thread at a time. If one breaks, all are closed.

    A command without a key goes where the command before it went.
    """

    def __init__(self, client: ControlClient, open_one: Callable[[ControlClient, Key], Channel]) -> None:
        """Open no connection yet; ``open_one`` opens the one that leads to a key."""
        self._client, self._open_one, self._where = client, open_one, client.where
        self._channels: dict[str, Channel] = {}
        """Address of a server -> the connection to it."""
        self._due: deque[Channel] = deque()
        """The connections on which replies are due, in order."""
        self.broken = False

    @property
    def waited_s(self) -> float:
        """See Channel."""
        return sum(channel.waited_s for channel in self._channels.values())

    def send(self, commands: Sequence[Command]) -> None:
        """See Channel."""
        self._check()
        try:
            routed: dict[Channel, list[Command]] = {}
            channel = None
            for command in commands:
                key = key_of(command)
                channel = self._leading_to(key) if key is not None or channel is None else channel
                routed.setdefault(channel, []).append(command)
                self._due.append(channel)
            for there, group in routed.items():
                there.send(group)
        except BaseException:
            self.close()
            raise

    def read(self, timeout_s: float | None = REPLY_TIMEOUT_S) -> Reply:
        """See Channel."""
        self._check()
        try:
            return self._due.popleft().read(timeout_s)
        except BaseException:
            self.close()
            raise

    def read_entries(self, sink: EntrySink, timeout_s: float | None = REPLY_TIMEOUT_S) -> int:
        """See Channel."""
        self._check()
        channel = self._due.popleft()
        try:
            return channel.read_entries(sink, timeout_s)
        finally:
            if channel.broken:
                self.close()

    def close(self) -> None:
        """See Channel."""
        self.broken = True
        for channel in self._channels.values():
            channel.close()

    def _leading_to(self, key: Key) -> Channel:
        where = self._client.node_of(key).where
        if where not in self._channels:
            channel = self._open_one(self._client, key)
            return self._channels.setdefault(channel.where, channel)
        return self._channels[where]
