"""The resources that a writer keeps from shard to shard, because new ones cost more than a small shard.

They are a spare connection, the mapped segments, and what the server and the cleaner reported: its memory, the
complete shards, the progress of each, and what is removed. `quota` has the rules for which the server is asked here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from socket import gethostname
from weakref import WeakSet

from penstock_common.errors import ServerUnavailable
from penstock_common.server.channel import Channel
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.losses import LossDetector
from penstock_common.stream.manifest import (
    ABANDONED,
    PRODUCED,
    Manifest,
    begun_shards,
    find_manifest,
    first_unfinished,
    retained_epochs,
)
from penstock_common.stream.payloads import maps_of_stream
from penstock_common.stream.servers.durability import Durability, ReplicaWatch
from penstock_common.stream.servers.suitability import ServerMemory, read_memory
from penstock_common.stream.streams import Stream, read_budget
from penstock_common.waiting import Notify
from penstock_producer.write.cleaner import Cleaner

ASK_EVERY_S = 1.0
"""The longest time between two questions. Other programs may fill the server, or set its maxmemory, at any time."""
ASK_SHARE = 1 / 8
"""The share of the memory left after which the server is asked again, because several writers share that memory."""
ORDER_LOOK_S = 0.1
"""The shortest time between two questions which epochs there are, and whether a waiting shard is the next one now."""
EPOCHS_KNOWN = 1000
"""Pairs of epoch and partition for which the complete shards are remembered."""


class ServerMemoryQuota:
    """The part of the server's memory that one writer may take.

    It asks the server now and then, so that no write meets the maxmemory.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._asked_s = -ASK_EVERY_S
        self._spent = 0
        self.memory = ServerMemory(0, 0, "")
        """The answer to the last question."""

    def left_bytes(self, wanted_bytes: int, *, anew: bool) -> int | None:
        """Return how many more bytes writers may write. It is below 0 if the server already holds too much.

        Args:
            wanted_bytes: Bytes that the writer is about to write.
            anew: Whether to ask the server even if its last answer is recent.

        Returns:
            None if the server has no limit.
        """
        left = self.memory.left_bytes
        is_old = self._clock() - self._asked_s >= ASK_EVERY_S
        is_near = left is not None and self._spent + wanted_bytes > left * ASK_SHARE
        if anew or is_old or is_near:
            self._ask()
            left = self.memory.left_bytes
        return None if left is None else left - self._spent

    def is_used_up(self) -> bool:
        """Ask the server, and return True if it is at its maxmemory. It then refuses every write."""
        self._ask()
        return 0 < self.memory.limit_bytes <= self.memory.used_bytes

    def _ask(self) -> None:
        self.memory, self._asked_s, self._spent = read_memory(self._client), self._clock(), 0

    def spend(self, nbytes: int) -> None:
        """Count bytes that were written since the server was asked."""
        self._spent += nbytes


def unfinished_shards(
    client: Client, stream: Stream, upto: int, states: dict[int, str] | None = None
) -> Iterator[tuple[Manifest, int]]:
    """Yield begun or planned shards that are not complete, in the order of admission.

    Args:
        client: Control connection.
        stream: Stream to look at.
        upto: Last epoch to look at.
        states: States of the epochs as they were a moment ago; None asks the server.
    """
    for epoch, state in (retained_epochs(client, stream) if states is None else states).items():
        if epoch > upto:
            return
        manifest = None if state in (PRODUCED, ABANDONED) else find_manifest(client, stream, epoch)
        if manifest is not None:
            yield from ((manifest, s) for s in begun_shards(client, stream, manifest) if s not in manifest.done)


class AdmissionOrder:
    """The order of admission as one writer knows it.

    The last quarter of a budget is for the lowest unfinished shard of the oldest unfinished epoch. What is known to be
    complete is remembered, because each of many small shards asks.
    """

    def __init__(self, client: Client, stream: Stream, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._stream, self._clock = client, stream, clock
        self._complete: dict[tuple[int, int], int] = {}
        """Epoch and partition number -> a shard of it before which all its shards are complete, and stay so."""
        self._states: dict[int, str] = {}
        """Epoch -> its state, of the epochs that existed at the last question."""
        self._asked_s = -ORDER_LOOK_S

    def is_next(self, epoch: int, shard: int) -> bool:
        """Return True if no earlier shard of its partition, in this or an older epoch, is unfinished."""
        partition = self._stream.partition_of(shard)
        if any(self._stream.partition_of(older) == partition for older in self._older(epoch)):
            return False
        earlier = range(self._first_open(epoch, shard), shard, len(self._stream.partitions))
        first = first_unfinished(self._client, self._stream, epoch, earlier)
        self._note(epoch, shard if first is None else first)
        return first is None

    def end(self, epoch: int, shard: int) -> None:
        """Record that this writer completed the shard."""
        if self._first_open(epoch, shard) == shard:
            self._note(epoch, shard + len(self._stream.partitions))

    def _older(self, epoch: int) -> Iterator[int]:
        if self._clock() - self._asked_s >= ORDER_LOOK_S:
            self._states, self._asked_s = retained_epochs(self._client, self._stream), self._clock()
        return (shard for _, shard in unfinished_shards(self._client, self._stream, epoch - 1, self._states))

    def _first_open(self, epoch: int, shard: int) -> int:
        """Return a shard of the same partition before which all are known to be complete."""
        number = self._stream.partition_of(shard).number
        return self._complete.get((epoch, number), number)

    def _note(self, epoch: int, shard: int) -> None:
        key = epoch, self._stream.partition_of(shard).number
        if key not in self._complete and len(self._complete) >= EPOCHS_KNOWN:
            self._complete.clear()
        self._complete[key] = shard


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
        self.partition_budget = stream.partition_budget
        """The budget of a partition in bytes. It only rises: a smaller one holds for writers that start later."""
        self._stream, self._maps = stream, maps_of_stream(stream)
        self._spare: list[tuple[int, Channel]] = []
        """At most one connection, with the process that opened it. A forked child must not use its parent's."""
        self._used: WeakSet[Channel] = WeakSet()
        """The connections of shards. Some of these shards may never be closed."""

    def read_budget(self) -> None:
        """Take a budget that was raised since."""
        with suppress(ServerUnavailable):  # on a cluster another server may have it
            budget_bytes = read_budget(self.client.impatient(), self._stream)
            self.partition_budget = max(self.partition_budget, budget_bytes // len(self._stream.partitions))

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
