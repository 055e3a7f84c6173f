"""The committer: appends a shard's blocks exactly once, whatever happens to it or to another run of the same job.

One block is in flight while the next is packed. Before every append it looks, under WATCH, at what is committed
(design.md 5.1); nothing is ever sent again without looking.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock_common.errors import BudgetFull, EpochAbandoned, PenstockError, ServerUnavailable, ShardMismatch
from penstock_common.format.block import Block
from penstock_common.format.wire import encode
from penstock_common.stream.channel import Channel
from penstock_common.stream.commands import Client
from penstock_common.stream.connection import open_channel
from penstock_common.stream.entries import (
    Progress,
    commit_commands,
    is_out_of_memory,
    look_commands,
    raise_errors,
    read_look,
)
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.streams import Stream
from penstock_common.waiting import Notify, Wait, to_stderr
from penstock_producer.room import RoomKeeper

RECONNECT_S = 30.0
"""How long a broken connection is tried again before the writer gives up; one lease."""
PAUSES_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Between looks for room: short at first, since a fast trainer empties a small budget within a few of them."""


@dataclass(slots=True)
class Sent:
    """A block whose transaction was sent and not yet answered."""

    block: Block
    bad: Mapping[int, str]
    replies: int
    """How many replies its transaction has before those of the look that follows it."""


class Committer:
    """Appends to one shard of one epoch."""

    def __init__(
        self,
        client: Client,
        stream: Stream,
        manifest: Manifest,
        shard: int,
        *,
        checksum: bool = True,
        room_wait_s: float | None = None,
        fast: bool | None = None,
        notify: Notify = to_stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._stream, self._manifest, self._shard = client, stream, manifest, shard
        self._partition = stream.partition_of(shard)
        self._checksum, self._fast, self._notify, self._clock = checksum, fast, notify, clock
        self._room = RoomKeeper(client, stream, manifest, shard, notify)
        self._room_wait_s = room_wait_s
        self._sent: Sent | None = None
        self._sent_replies = 0
        self._wait: Wait | None = None
        """For room; lasts until a block is committed, also over blocks that the server refused."""
        self._turn = 0
        self._channel = self._connect()
        self._progress = self._look()

    @property
    def position(self) -> int:
        """The offset after the last committed one, as last seen."""
        return self._progress.end

    def commit(self, block: Block, bad: Mapping[int, str] | None = None) -> None:
        """Sends the block once what was sent before is committed; ``bad`` gives a reason for each of its holes.

        Raises EpochAbandoned, ShardMismatch where the shard has lost what was committed, BudgetFull after waiting
        ``room_wait_s`` for room, ServerUnavailable when the server does not come back.
        """
        self.settle()
        self._send(block, bad or {})

    def settle(self) -> None:
        """Waits until everything sent is committed, mending what can be mended."""
        while self._sent is not None:
            sent = self._sent
            try:
                if self._collect(sent):
                    self._sent = self._wait = None
                    self._turn = 0
                    return
            except ServerUnavailable as error:
                self._reconnect(error)
            self._send(sent.block, sent.bad)

    def close(self) -> None:
        """Gives the connection back; what was sent and not settled may or may not be committed."""
        self._channel.close()

    def _send(self, block: Block, bad: Mapping[int, str]) -> None:
        """Sends what of the block is not committed yet, after waiting for room."""
        while True:
            rest = self._missing_part(block)
            if rest is None:
                self._sent = None
                return
            try:
                self._wait_for_room(rest)
                rest = self._missing_part(block)  # another run may have gone on while this one waited
                if rest is not None:
                    self._transmit(rest, {o: why for o, why in bad.items() if o >= rest.first})
                    self._sent = Sent(block, bad, self._sent_replies)
                    return
            except ServerUnavailable as error:
                self._reconnect(error)

    def _missing_part(self, block: Block) -> Block | None:
        end = self._progress.end
        if self._progress.state != self._manifest.live_state.encode():
            raise EpochAbandoned(
                f"epoch {self._manifest.epoch} of {self._stream.name!r} takes no more samples "
                f"(it is {self._progress.state.decode().partition(':')[0] or 'released'})"
            )
        if end < block.first:
            raise ShardMismatch(
                f"shard {self._shard} of epoch {self._manifest.epoch} is committed up to {end}, the next block "
                f"starts at {block.first}: the server lost data; abandon the epoch and produce it again"
            )
        if end >= block.end:
            return None
        return block if end == block.first else block.tail(end)

    def _transmit(self, block: Block, bad: Mapping[int, str]) -> None:
        epoch = self._manifest.epoch
        fields = (
            encode(block, stream=self._stream.id, epoch=epoch, shard=self._shard, checksum=self._checksum)
            if block.count
            else []
        )
        reasons = {offset: json.dumps({"why": why[:500]}) for offset, why in bad.items()}
        commands = commit_commands(self._partition, epoch, self._shard, block, fields, reasons)
        self._sent_replies = len(commands)
        self._channel.send([*commands, *look_commands(self._partition, epoch, self._shard)])

    def _collect(self, sent: Sent) -> bool:
        """Reads the answers; False where the block has to be sent again (someone else committed, or no memory)."""
        replies = [self._channel.read() for _ in range(sent.replies)]
        self._progress = read_look([self._channel.read() for _ in range(4)])
        outcome = replies[-1]
        if isinstance(outcome, list):
            raise_errors(outcome)
            return True
        if outcome is None:  # WATCH saw another run of this shard, or the epoch's end
            return False
        if any(is_out_of_memory(reply) for reply in replies):
            self._room.server_is_full = True
            return False
        raise_errors(replies)
        raise PenstockError(f"EXEC answered {outcome!r:.80}, expected a list")

    def _look(self) -> Progress:
        self._channel.send(look_commands(self._partition, self._manifest.epoch, self._shard))
        return read_look([self._channel.read() for _ in range(4)])

    def _wait_for_room(self, block: Block) -> None:
        while not self._room.has_room(block.nbytes, self._progress.held_bytes):
            self._wait = wait = self._wait or Wait(self._notify, clock=self._clock)
            wait.because("room", self._room.why)
            if self._room_wait_s is not None and wait.seconds > self._room_wait_s:
                raise BudgetFull(self._room.why())
            time.sleep(PAUSES_S[min(self._turn, len(PAUSES_S) - 1)])
            self._turn += 1
            self._progress = self._look()

    def _connect(self) -> Channel:
        return open_channel(self._client, fast=self._fast)

    def _reconnect(self, error: ServerUnavailable) -> None:
        """Tries until the server answers again, then looks at what is committed."""
        self._channel.close()
        began, turn = self._clock(), 0
        self._notify(f"the connection broke while writing ({error}); trying again for {RECONNECT_S:.0f} s")
        while True:
            try:
                self._channel = self._connect()
                self._progress = self._look()
                return
            except ServerUnavailable as again:
                if self._clock() - began > RECONNECT_S:
                    raise again from error
            time.sleep(PAUSES_S[min(turn, len(PAUSES_S) - 1)])
            turn += 1
