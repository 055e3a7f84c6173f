"""The committer: appends a shard's blocks exactly once, whatever happens to it or to another run of the same job.

One block is being committed while the next is packed and sent. Before every EXEC it looks, under WATCH, at what is
committed (design.md 5.1); nothing is ever sent again without looking.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import (
    BudgetFull,
    EpochAbandoned,
    PenstockError,
    SegmentsUnseen,
    ServerUnavailable,
    ShardMismatch,
)
from penstock_common.format.block import Block
from penstock_common.format.spec import Spec
from penstock_common.format.wire import Fields, encode, meta_bytes
from penstock_common.segments.writing import SegmentWriter
from penstock_common.stream.entries import (
    Progress,
    is_out_of_memory,
    is_sealed,
    look_commands,
    payload_commands,
    raise_errors,
    read_look,
    record_commands,
)
from penstock_common.stream.link.channel import Channel
from penstock_common.stream.link.commands import Client
from penstock_common.stream.link.connection import open_channel
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.registry import seal_segments
from penstock_common.stream.servers.durability import Durability, await_safety, touch_command
from penstock_common.stream.streams import Stream, require_there
from penstock_common.waiting import Notify, Outage, Wait, to_stderr
from penstock_producer.keeping.janitor import Janitor
from penstock_producer.writing.lane import open_lane
from penstock_producer.writing.reserve import sizes_of
from penstock_producer.writing.room import RoomKeeper


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
        should_stop: Callable[[], bool] = lambda: False,
        janitor: Janitor | None = None,
    ) -> None:
        """``janitor`` is of the shard's partition; whoever writes many shards gives the same one again."""
        self._client, self._stream, self._manifest, self._shard = client, stream, manifest, shard
        self._partition = stream.partition_of(shard)
        self._checksum, self._fast, self._notify, self._clock = checksum, fast, notify, clock
        self._room = RoomKeeper(client, stream, manifest, shard, notify, clock, janitor)
        self._room_wait_s, self._should_stop = room_wait_s, should_stop
        self._sent: Sent | None = None
        self._wait: Wait | None = None
        """For room; lasts until a block is committed, also over blocks that the server refused."""
        self._lane = open_lane(client, stream, manifest, shard)
        self._kept: tuple[Block, Fields, str] | None = None
        """The block whose payload was put into a segment last, its entry's fields, and the segment."""
        self._durability = Durability.parse(stream.durability)
        self._safety = self._durability.commands()
        self._lacking = ""
        """What is committed and not yet as safe as it must be, said for people."""
        self._outage = Outage(notify, doing="writing", clock=clock)
        try:
            self._begin()
        except ServerUnavailable as error:
            self._come_back(error)
        self._lacking = ""

    @property
    def position(self) -> int:
        """The offset after the last committed one, as last seen."""
        return self._progress.end

    def reserve(self, spec: Spec, count: int) -> list[NDArray[np.uint8]]:
        """Buffers for so many samples' tensors, to be filled and committed as the next block; waits for room.

        With segments they lie in one. Raises TooLarge, and what `commit` may.
        """
        sizes = sizes_of(spec, count)
        is_full = False
        while True:
            # asked once: a folder's refusal is told by the next answer only
            if is_full or not self._room.has_room(sum(sizes), self._progress.held_bytes):
                self.settle()  # a wait looks at the server, which owes no other answers then
                self._wait_for_room(sum(sizes))
            if self._lane is None:
                return [np.empty(size, dtype=np.uint8) for size in sizes]
            try:
                return self._lane.reserve(meta_bytes(spec, count), sizes)
            except OSError as error:
                self._bear_full(self._lane, error)
                is_full = True

    def drop_reserved(self, block: Block) -> None:
        """What was reserved will not be committed: its place in the segment is taken for good, and in no index."""
        if self._lane is not None:
            epoch = self._manifest.epoch
            self._lane.append(encode(block, stream=self._stream.id, epoch=epoch, shard=self._shard, checksum=False))

    def commit(self, block: Block, bad: Mapping[int, str] | None = None) -> None:
        """Sends the block once what was sent before is committed; ``bad`` gives a reason for each of its holes.

        Raises EpochAbandoned, ShardMismatch where the shard has lost what was committed, BudgetFull after waiting
        ``room_wait_s`` for room, ServerUnavailable when the server does not come back.
        """
        before = self._sent
        is_next = before is not None and block.count > 0 and block.first == before.block.end
        if before is not None and is_next and self._follow(before, block, bad or {}):
            return
        self.settle()
        self._send(block, bad or {})

    def _follow(self, before: Sent, block: Block, bad: Mapping[int, str]) -> bool:
        """Sends the block's payload while the server commits the one before; EXEC follows once that has gone well.

        The payload of a transaction does nothing until EXEC, so it may travel before its WATCH was looked at. False
        where the long way has to be taken: the block before is then committed, or sent again.
        """
        is_committed = False
        fields = self._stored(block)
        if fields is None:
            return False
        try:
            self._channel.send(payload_commands(self._partition, self._manifest.epoch, fields))
            is_committed = self._collect(before)
            if is_committed:
                self._has_committed()
                if not self._lacking and self._may_follow(block):
                    self._execute(block, bad, queued=2)
                    self._seal()  # what is full holds nothing of this block: all of it is committed
                    return True
            self._discard()
        except ServerUnavailable as error:
            self._reconnect(error)
            self._sent = None  # its answers will not come; what is committed was looked at
        except BaseException:
            self._channel.close()  # in the middle of a transaction: of no use to anyone
            raise
        if not is_committed:
            self._send(before.block, before.bad)
        return False

    def _may_follow(self, block: Block) -> bool:
        """Whether the block is what comes next and there is room for it now."""
        progress = self._progress
        is_next = progress.end == block.first and progress.state == self._manifest.live_state.encode()
        return is_next and self._room.has_room(block.nbytes, progress.held_bytes)

    def _discard(self) -> None:
        """Takes back a payload that was sent ahead; DISCARD also ends the WATCH, so it looks anew."""
        look = look_commands(self._partition, self._manifest.epoch, self._shard)
        self._channel.send([(b"DISCARD",), *look])
        for _ in range(3):  # MULTI, XADD, DISCARD
            self._channel.read()
        self._progress = read_look([self._channel.read() for _ in look], self._client)

    def settle(self) -> None:
        """Waits until everything sent is committed, mending what can be mended."""
        while self._sent is not None:
            sent = self._sent
            try:
                if self._collect(sent):
                    self._has_committed()
                    break
            except ServerUnavailable as error:
                self._reconnect(error)
            self._send(sent.block, sent.bad)
        self._seal()
        self._await_safety()

    def _seal(self) -> None:
        """Says of segments that are full, with all their blocks committed, that they may go once those are settled."""
        if self._lane is not None and self._lane.full:
            seal_segments(self._client, self._partition, self._manifest, self._lane.full)
            self._lane.full.clear()

    def _has_committed(self) -> None:
        self._sent = self._wait = None
        self._outage.over()

    def close(self) -> None:
        """Gives the connection back; what was sent and not settled may or may not be committed."""
        self._channel.close()
        if self._lane is not None:
            self._lane.close()
            if self._sent is None:  # else the janitor finds out
                with suppress(PenstockError):
                    self._seal()

    def _send(self, block: Block, bad: Mapping[int, str]) -> None:
        """Sends what of the block is not committed yet, after waiting for room."""
        while True:
            rest = self._missing_part(block)
            if rest is None:
                self._sent = None
                return
            try:
                self._wait_for_room(rest.nbytes)
                rest = self._missing_part(block)  # another run may have gone on while this one waited
                fields = [] if rest is None else self._stored(rest)
                if fields is None:  # the disk is full: one more round of waiting
                    continue
                if rest is not None:
                    payload = payload_commands(self._partition, self._manifest.epoch, fields)
                    self._channel.send(payload)
                    self._execute(rest, {o: why for o, why in bad.items() if o >= rest.first}, queued=len(payload))
                    return
            except ServerUnavailable as error:
                self._reconnect(error)

    def _missing_part(self, block: Block) -> Block | None:
        end = self._progress.end
        if self._progress.state != self._manifest.live_state.encode():
            require_there(self._client, self._stream)
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

    def _stored(self, block: Block) -> Fields | None:
        """The entry's fields; with segments the payload is in one of them then. None where the disk is full."""
        if self._kept is not None and self._kept[0] is block:  # it is sent again
            return self._kept[1]
        self._kept = None
        if not block.count:
            return []
        epoch = self._manifest.epoch
        fields = encode(block, stream=self._stream.id, epoch=epoch, shard=self._shard, checksum=self._checksum)
        if self._lane is None:
            return fields
        try:
            fields, segment = self._lane.append(fields)
        except OSError as error:
            self._bear_full(self._lane, error)
            return None
        self._kept = block, fields, segment
        return fields

    def _bear_full(self, lane: SegmentWriter, error: OSError) -> None:
        """A disk that is full is waited for; anything else it says is raised."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            require_there(self._client, self._stream)  # deleted, it has no folder any more
            raise SegmentsUnseen(f"{lane.folder.path} takes no more segments: {error}") from error
        self._room.full_folder = str(lane.folder.path)

    def _execute(self, block: Block, bad: Mapping[int, str], queued: int) -> None:
        """Completes the transaction whose first ``queued`` commands were sent, and looks ahead to the next."""
        epoch = self._manifest.epoch
        reasons = {offset: json.dumps({"why": why[:500]}) for offset, why in bad.items()}
        segment = self._kept[2] if self._kept is not None and self._kept[0] is block else ""
        commands = record_commands(self._partition, epoch, self._shard, block, reasons, segment)
        self._sent = Sent(block, bad, queued + len(commands))
        self._channel.send([*commands, *self._safety, *look_commands(self._partition, epoch, self._shard)])

    def _collect(self, sent: Sent) -> bool:
        """Reads the answers; False where the block has to be sent again (someone else committed, or no memory)."""
        due, sent.replies = sent.replies, 0
        if not due:  # answered before, in vain, and sending it again was interrupted: no answers will come
            return False
        replies = [self._channel.read() for _ in range(due)]
        safety = [self._channel.read() for _ in self._safety]
        self._progress = read_look([self._channel.read() for _ in range(4)], self._client)
        outcome = replies[-1]
        if isinstance(outcome, list):
            if any(is_sealed(reply) for reply in outcome):
                self._leave_segment()
                return False
            raise_errors(outcome, self._client)
            self._lacking = self._durability.shortfall(safety, self._client)
            return True
        if outcome is None:  # WATCH saw another run of this shard, or the epoch's end
            return False
        if any(is_out_of_memory(reply) for reply in replies):
            self._room.server_is_full = True
            return False
        raise_errors(replies, self._client)
        raise PenstockError(f"EXEC answered {outcome!r:.80}, expected a list")

    def _leave_segment(self) -> None:
        """Somebody took this writer for dead: what it has not committed goes into another segment."""
        self._kept = None
        if self._lane is not None:
            self._lane.close()

    def _look(self) -> Progress:
        self._channel.send(look_commands(self._partition, self._manifest.epoch, self._shard))
        return read_look([self._channel.read() for _ in range(4)], self._client)

    def _wait_for_room(self, nbytes: int) -> None:
        try:
            while not self._room.has_room(nbytes, self._progress.held_bytes):
                self._wait = wait = self._wait or Wait(self._notify, clock=self._clock)
                wait.because("room", self._room.why)
                is_over = self._room_wait_s is not None and wait.seconds > self._room_wait_s
                if is_over or self._should_stop():
                    raise BudgetFull(self._room.why())
                time.sleep(self._room.pause_s())
                self._progress = self._look()
        finally:
            self._room.end_wait()

    def _connect(self) -> Channel:
        return open_channel(self._client, fast=self._fast)

    def _reconnect(self, error: ServerUnavailable) -> None:
        self._channel.close()
        self._come_back(error)

    def _begin(self) -> None:
        """Opens a connection and looks at what is committed."""
        self._channel = self._connect()
        try:
            self._progress = self._look()
        except BaseException:
            self._channel.close()
            raise

    def _come_back(self, error: ServerUnavailable) -> None:
        """Begins anew as soon as the server answers again; the outage lasts until a commit."""
        while True:
            self._outage.bear(error)
            try:
                self._begin()
                break
            except ServerUnavailable as again:
                error = again
        if self._safety:  # this connection has written nothing: its WAIT would answer for nothing
            self._lacking = "the connection broke before the server said so"

    def _await_safety(self) -> None:
        """Returns once what is committed is as safe as the stream's durability says; raises DurabilityLost."""
        wait = Wait(self._notify, clock=self._clock)
        while self._lacking:
            await_safety(wait, self._durability, self._lacking)
            try:
                self._channel.send([touch_command(self._stream), *self._safety])
                replies = [self._channel.read() for _ in range(1 + len(self._safety))]
                self._lacking = self._durability.shortfall(replies[1:], self._client)
                self._outage.over()
            except ServerUnavailable as error:
                self._reconnect(error)
