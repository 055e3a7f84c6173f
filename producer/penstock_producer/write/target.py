"""The shard that a committer writes to: its name and keys, its connection, and what is known to be committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from penstock_common.errors import ServerUnavailable
from penstock_common.server.channel import Channel, Command, Reply
from penstock_common.server.connection import open_channel
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import IndexRecord, ShardProgress, commit_keys, look_commands, read_look
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.streams import Stream
from penstock_common.waiting import Outage
from penstock_common.wire.block import Block
from penstock_producer.write.resources import SharedResources


@dataclass(frozen=True)
class ShardTarget:
    """A shard of an epoch, as one writer writes to it. As a text it is a name for messages."""

    client: Client
    """The control connection of the writer."""
    stream: Stream
    """The stream as it is now."""
    manifest: Manifest
    """The manifest of the epoch."""
    number: int
    """The number of the shard."""
    token: str = ""
    """The name of a feed's writer. Runs of a planned shard have none, so each continues where another ended."""

    def __str__(self) -> str:
        """Return a text such as ``shard 3 of epoch 0 of 'digits'``."""
        return f"shard {self.number} of epoch {self.epoch} of {self.stream.name!r}"

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self.manifest.epoch

    @cached_property
    def partition(self) -> PartitionKeys:
        """The keys of the partition that has the shard."""
        return self.stream.partition_of(self.number)

    @cached_property
    def commit_keys(self) -> tuple[bytes, ...]:
        """The keys that a commit uses."""
        return commit_keys(self.partition, self.epoch, self.number)

    @property
    def server(self) -> str:
        """The server that holds the partition, as the newest map says."""
        server: str = self.client.node_of(self.partition.roster).server
        return server


class ShardConnection:
    """The data connection of one shard. It is opened again after it broke, and may then lead to another server."""

    def __init__(
        self, target: ShardTarget, resources: SharedResources, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Open nothing yet."""
        self._target, self._resources = target, resources
        self._outage = Outage(resources.notify, doing="writing", clock=clock)
        self._channel: Channel
        self._server = ""
        """The server that it leads to."""

    def open(self) -> ShardProgress:
        """Connect, and return what is committed. It uses the connection of an earlier shard if there is one."""
        client, roster = self._target.client, self._target.partition.roster
        spare = self._resources.take_channel(client.node_of(roster).where)
        if spare is not None:
            with suppress(ServerUnavailable):  # the server may have closed it; a new one shows an outage
                return self._open_on(spare)
        return self._open_on(open_channel(client, roster))

    def _open_on(self, channel: Channel) -> ShardProgress:
        self._channel = channel
        self._resources.use(channel)
        self._server = self._target.server
        try:
            # first, so that lost samples are reported before a writer writes them again
            self._resources.loss_detector.check()
            return self.look()
        except BaseException:
            channel.close()
            raise

    def look(self) -> ShardProgress:
        """Return what is committed. No other answer may be under way."""
        target = self._target
        at = target.partition, target.epoch, target.number
        return read_look(self.ask(look_commands(*at)), target.client, *at)

    @property
    def channel(self) -> Channel:
        """The channel of the connection."""
        return self._channel

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the newest map names another server than the one that this connection leads to."""
        node = self._target.client.node_of(self._target.partition.roster)
        return (node.where, node.server) != (self._channel.where, self._server)

    def ask(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands, and return their replies."""
        self._channel.send(commands)
        return self._channel.read_all(len(commands))

    def bear(self, error: ServerUnavailable) -> None:
        """Wait after a failure until it is time to try again. Raises the error once the outage lasts too long."""
        self._outage.bear(error)

    def over(self) -> None:
        """Note that the server works again: it has committed or confirmed something."""
        self._outage.over()

    def give_back(self) -> None:
        """Keep the connection for the next shard. Nothing may be under way."""
        self._resources.give_channel(self._channel)

    def close(self) -> None:
        """Close it. What was sent and not answered may or may not be committed."""
        self._channel.close()


class KnownProgress:
    """The progress of a shard as one run knows it: the server's last answer, and what the run itself committed."""

    def __init__(self, token: str) -> None:
        """Know nothing yet. ``token`` is the run's, as in `ShardTarget`."""
        self._token = token
        self._last = ShardProgress(0, b"", 0)
        """The shard as the server had it at the last answer."""
        self._found: int | None = None
        """The offset after what earlier runs had committed when this one began."""
        self._own: dict[int, IndexRecord] = {}
        """The records of the blocks that this run committed, by their ends."""
        self._left_out: dict[int, int] = {}
        """First offset of a block -> its samples that another run had committed."""
        self._is_taken = self._was_cut = False
        self.answered = 0
        """The offset after the last sample of this run that the server said to be committed."""

    @property
    def end(self) -> int:
        """The offset below which the server holds all samples."""
        return self._last.end

    @property
    def state(self) -> bytes:
        """The epoch's state in the partition."""
        return self._last.state

    @property
    def held_bytes(self) -> int:
        """The payload bytes that the partition holds."""
        return self._last.held_bytes

    @property
    def is_anothers(self) -> bool:
        """Return whether the shard is another writer's."""
        return self._is_taken or self._last.writer not in (None, self._token)

    @property
    def position(self) -> int:
        """The offset after the last one known to be committed. In another writer's shard it is the offset after this
        run's last sample.
        """
        return self.answered if self.is_anothers else self.end

    @property
    def committed(self) -> int:
        """The offset below which the server once held all samples. It may have lost some since."""
        return max(self.answered, self._found or 0)

    @property
    def left_out(self) -> int:
        """The samples that were not sent, because another run of the shard had committed their offsets."""
        return sum(self._left_out.values())

    def take(self, answer: ShardProgress) -> None:
        """Take what the server says of the shard."""
        self._last = answer
        if self._found is None:
            self._found = 0 if self._token else answer.end

    def note_committed(self, record: IndexRecord) -> None:
        """Note a block that this run committed, after its answer was taken."""
        self.answered = max(self.answered, self.end)
        self._own[record.end] = record

    def note_cut(self) -> None:
        """Note that a connection broke. What was committed before this run sent it may then be its own."""
        self._was_cut = True

    def note_taken(self, *, is_taken: bool) -> None:
        """Note whether the epoch continued without this writer's shard."""
        self._is_taken = is_taken

    def missing_part(self, block: Block) -> Block | None:
        """Return the part of a block that is not committed, or None if all of it is."""
        end = self.end
        if end > block.first and not self._was_cut:  # a broken connection may have committed it unanswered
            self._left_out[block.first] = min(end, block.end) - block.first
        if end >= block.end:
            return None
        return block if end == block.first else block.tail(end)

    def of_others(self, records: Iterable[IndexRecord]) -> list[IndexRecord]:
        """Return the records that this run did not commit."""
        return [record for record in records if self._own.get(record.end) != record]
