"""The resources that a writer keeps from shard to shard, because new ones cost more than a small shard.

They are a spare connection, the mapped segments, and what the server and the cleaner reported: its memory, the
complete shards, the progress of each, and what is removed.
"""

from __future__ import annotations

import os
from socket import gethostname
from weakref import WeakSet

from penstock_common.server.channel import Channel
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.losses import LossDetector
from penstock_common.stream.payloads import maps_of_stream
from penstock_common.stream.servers.durability import Durability, ReplicaWatch
from penstock_common.stream.streams import Stream
from penstock_common.waiting import Notify
from penstock_producer.write.cleaner import Cleaner
from penstock_producer.write.quota import AdmissionOrder, ServerMemoryQuota


class SharedResources:
    """The resources of one writer, whose shards may be open at once."""

    def __init__(self, client: Client, stream: Stream, notify: Notify) -> None:
        self.client, self.notify = client, notify
        """The control connection, and the function that is called with lines for the user."""
        self.cleaner = Cleaner(client, stream, notify)
        self.server_memory = ServerMemoryQuota(client)
        self.order = AdmissionOrder(client, stream)
        self.replicas = ReplicaWatch(client)
        self.replicas.look(Durability.parse(stream.durability), stream)
        self.loss_detector = LossDetector(client, stream, f"writer {gethostname()}-{os.getpid()}", notify)
        self._maps = maps_of_stream(stream)
        self._spare: list[tuple[int, Channel]] = []
        """At most one connection, with the process that opened it. A forked child must not use its parent's."""
        self._used: WeakSet[Channel] = WeakSet()
        """The connections of shards. Some of these shards may never be closed."""

    def take_channel(self, where: str | None = None) -> Channel | None:
        """Return a connection to this server that an earlier shard gave back, or None. It may be closed by now.

        Without a server, any connection will do.
        """
        try:
            pid, channel = self._spare.pop()
        except IndexError:
            return None
        if pid == os.getpid() and where not in (None, channel.where):
            channel.close()
            return None
        return channel if pid == os.getpid() else None

    def give_channel(self, channel: Channel) -> None:
        """Keep the connection of ``channel``, which has no open request, for the next shard, and close ``channel``."""
        if self._spare or channel.broken:
            channel.close()
        else:
            self._spare.append((os.getpid(), channel.hand_over()))

    def use(self, channel: Channel) -> None:
        """Close this connection of a shard with the writer, if the shard is never closed."""
        self._used.add(channel)

    def close(self) -> None:
        """Close the connections and drop the mapped segments."""
        self._maps = None
        for channel in (self.take_channel(), *self._used):
            if channel is not None:
                channel.close()
