"""A channel to a cluster: each command goes to the server that holds its key. Replies come in the order of commands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock_common.errors import ServerUnavailable
from penstock_common.server.channel import REPLY_TIMEOUT_S, Channel, Command, EntrySink, Reply
from penstock_common.server.slots import Key, key_of

if TYPE_CHECKING:
    from penstock_common.server.client import ControlClient


class RoutedChannel(Channel):
    """Connections to the servers of a cluster, used by one thread at a time.

    A command without a key goes where the command before it went. If a connection breaks, the replies before the ones
    that are due on it can still be read. Then all are closed.
    """

    def __init__(self, client: ControlClient, open_one: Callable[[ControlClient, Key], Channel]) -> None:
        """Open no connection yet; ``open_one`` opens the one that leads to a key."""
        self._client, self._open_one, self._where = client, open_one, client.where
        self._channels: dict[str, Channel] = {}
        """Address of a server -> the connection to it."""
        self._due: deque[Channel | ServerUnavailable] = deque()
        """The connections on which replies are due, in order, or why there is none."""
        self.broken = False

    @property
    def waited_s(self) -> float:
        """See Channel."""
        return sum(channel.waited_s for channel in self._channels.values())

    @property
    def is_cut(self) -> bool:
        """See Channel."""
        return self.broken or any(channel.is_cut for channel in self._channels.values())

    def send(self, commands: Sequence[Command]) -> None:
        """See Channel."""
        self._check()
        chosen: list[Channel | ServerUnavailable] = []
        routed: dict[Channel, list[Command]] = {}
        failed: dict[Channel | str, ServerUnavailable] = {}
        try:
            for command in commands:
                key = key_of(command)
                if key is not None or not chosen:
                    chosen.append(self._leading_to(key, failed))
                else:
                    chosen.append(chosen[-1])
                if isinstance(channel := chosen[-1], Channel):
                    routed.setdefault(channel, []).append(command)
            for there, group in routed.items():
                try:
                    there.send(group)
                except ServerUnavailable as error:
                    failed[there] = error
            if failed and all(one in failed for one in routed):  # no reply is due
                raise next(iter(failed.values()))
        except BaseException:
            self.close()
            raise
        self._due.extend(failed.get(one, one) if isinstance(one, Channel) else one for one in chosen)

    def read(self, timeout_s: float | None = REPLY_TIMEOUT_S) -> Reply:
        """See Channel."""
        self._check()
        try:
            return self._next().read(timeout_s)
        except BaseException:
            self.close()
            raise

    def read_entries(self, sink: EntrySink, timeout_s: float | None = REPLY_TIMEOUT_S) -> int:
        """See Channel."""
        self._check()
        channel = self._next()
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

    def _next(self) -> Channel:
        """Return the connection on which the next reply is due. Raises why there is none."""
        due = self._due.popleft()
        if isinstance(due, ServerUnavailable):
            self.close()
            raise due
        return due

    def _leading_to(self, key: Key, failed: dict[Channel | str, ServerUnavailable]) -> Channel | ServerUnavailable:
        """Return the connection that leads to a key, or why it cannot be made, which ``failed`` learns."""
        where = self._client.node_of(key).where
        if where in failed:
            return failed[where]
        if where not in self._channels:
            try:
                channel = self._open_one(self._client, key)
            except ServerUnavailable as error:
                return failed.setdefault(where, error)
            return self._channels.setdefault(channel.where, channel)
        return self._channels[where]
