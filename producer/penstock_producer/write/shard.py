"""The writer of one shard: it numbers samples, packs them into blocks, and reports which offsets had to be dropped.

The committer appends the blocks. A shard that was begun before continues at `position`.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock_common.errors import PenstockError, ShardMismatch, TooLarge
from penstock_common.hints import not_a_sample
from penstock_common.wire.block import Block, BlockFull, builder_of, check_rows, columns_in
from penstock_common.wire.limits import MAX_HOLES, MAX_SHARD_SAMPLES
from penstock_common.wire.spec import Spec, flattened
from penstock_producer.write.commit import Committer, ShardTaken
from penstock_producer.write.reserve import Reservation, require_fixed

FIRST_LINGER_S = 0.1
"""The first block of a shard is sent early, because trainers wait for it; the next one takes twice as long."""
LINGER_S = 1.0
"""A block begun this long ago is sent with the next write, so that trainers do not wait for it to be full. There is no
timer, so a program that pauses calls `flush`."""
MAX_BLOCK_SAMPLES = 1 << 16


class ShardSlot(NamedTuple):
    """A shard that a writer took."""

    committer: Committer
    shard: int
    finish: Callable[[int], None]
    """Call it with the number of samples to declare the shard complete."""


class ShardWriter:
    """A writer of one shard, in order, for one thread."""

    def __init__(
        self,
        committer: Committer,
        spec: Spec,
        *,
        block_bytes: int,
        shard: int,
        size: int | None,
        most: int = MAX_SHARD_SAMPLES,
        finish: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
        take_another: Callable[[], ShardSlot] | None = None,
        lost: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Make a writer. ``most`` limits the samples of a shard whose ``size`` is not planned.

        If the shard turns out to be another writer's, ``take_another`` takes a new shard. Without it, that is an error.
        ``lost`` is called when the program leaves a shard that it neither closed nor aborted. It gets the number of
        samples that were written and not committed.
        """
        self._is_ended = True  # until it is made
        self._committer = committer
        self.spec = spec
        self._block_bytes = block_bytes
        self._builder = builder_of(spec, block_bytes, MAX_BLOCK_SAMPLES, committer.place)
        self._shard = shard
        self._size = size
        self._limit = most if size is None else size
        self.is_over = committer.position >= self._limit
        """Whether no more samples may come."""
        self._is_closed = False
        self._finish = finish
        self._clock = clock
        self._first = committer.position
        """The offset of the first sample in the block being gathered."""
        self._builder.allow(self._limit - self._first)
        self._bad: dict[int, str] = {}
        self._take_another = take_another
        self._uncommitted: deque[tuple[Block, Mapping[int, str]]] = deque()
        """Blocks that are complete, and that the committer refused for lack of quota or of a server. They are kept,
        because the shard would have a gap without them.
        """
        self._linger_s = FIRST_LINGER_S
        self._due = clock() + self._linger_s
        """The time when the block being gathered is sent even if it is not full."""
        self._reserved = 0
        """Samples that are being made in place."""
        self._is_busy = False
        """Whether a thread is inside `write` or `write_batch`, or the last call ended by an error."""
        self._is_broken_off = False
        """Whether the last call ended by an error."""
        self._is_interrupted = False
        """Whether a block is being completed. If it stays so, Ctrl-C came in the middle of that."""
        self.has_failed = False
        """Whether an error ended the last flush, or one is under way."""
        self.bytes_written = 0
        """Payload bytes that this writer passed to the committer."""
        self._lost, self._owner, self._is_ended = lost, os.getpid(), False
        _OPEN.add(self)

    @property
    def position(self) -> int:
        """Offset of the next sample. After a restart, the offset to continue from."""
        return self._first + len(self._builder) + len(self._bad)

    @property
    def sent(self) -> int:
        """Offset after the last sample that was packed into a block."""
        return self._first

    @property
    def committed(self) -> int:
        """Offset after the last sample that is known to be committed."""
        return self._committer.position

    @property
    def left_out(self) -> int:
        """The samples of this writer, at least, whose offsets another run of the shard had committed before."""
        return self._committer.left_out

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add the next sample: name -> array, scalar or bytes. Its arrays may be reused at once.

        A dict among the values is written as tensors named ``y/boxes``. Raises SpecMismatch naming the tensor, what was
        found and what was expected, and ShardMismatch beyond the planned size.
        """
        if self._is_busy:
            self._go_on()
        self._is_busy = True  # a flag, because a lock would cost every row more
        try:
            try:
                is_full = self._builder.add(sample)
            except BlockFull:
                self._make_way(1)
                is_full = self._builder.add(sample)
            except TypeError:
                if isinstance(sample, Mapping):
                    raise
                raise TypeError(not_a_sample(sample, self.spec.names)) from None
            clock = self._clock  # called as an attribute, it costs a row 10 ns more
            if is_full or clock() >= self._due:
                self._flush_added()
        except BaseException:
            self._is_broken_off = True
            raise
        self._is_busy = False

    def write_batch(self, rows: Mapping[str, Any]) -> None:
        """Add n samples: name -> ``[n, *shape]``. Ragged tensors and bytes are sequences of n values."""
        rows = flattened(rows)
        count = check_rows(self.spec, rows)
        if self._is_busy:
            self._go_on()
        self._is_busy = True
        try:
            self._make_way(count)
            start = 0
            while start < count:
                start += self._builder.add_rows(rows, start, count)
                if self._builder.is_full:
                    self._flush_added()
            if self._clock() >= self._due:
                self._flush_added()
        except BaseException:
            self._is_broken_off = True
            raise
        self._is_busy = False

    def _go_on(self) -> None:
        """Go on after an error, such as Ctrl-C, that may have come before a full block was sent."""
        if not self._is_broken_off:
            raise two_threads()
        if self._builder.is_full:
            self.flush()
        self._is_busy = self._is_broken_off = False

    def reserve(self, count: int) -> Reservation:
        """Return arrays for the next ``count`` samples, to be filled in place: see `Reservation`. They are not copied
        later.

        Until they are committed or dropped, nothing else may be written. Raises PenstockError for ragged tensors,
        TooLarge, and ShardMismatch beyond the planned size.
        """
        require_fixed(self.spec)
        if not 1 <= count <= MAX_BLOCK_SAMPLES:
            raise ValueError(f"reserve({count}): a block has 1 to {MAX_BLOCK_SAMPLES} samples")
        if self.position + count > self._limit:
            self._refuse_more()
        self._require_free()
        self.flush()
        columns = columns_in(self.spec, count, self._committer.reserve(self.spec, count))
        arrays = dict(zip(self.spec.names, columns, strict=True))

        def end(block: Block, is_wanted: bool) -> None:
            self._reserved = 0
            self._builder.allow(self._limit - self.position)
            if is_wanted:
                self.write_block(block, {})
            else:
                self._committer.drop_reserved(block)

        self._reserved = count
        self._builder.allow(0)
        return Reservation(self.spec, self.position, arrays, end)

    def _require_free(self) -> None:
        if self._reserved:
            raise PenstockError(
                f"{self._reserved} reserved samples are neither committed nor dropped: leave their with block first"
            )

    def write_block(self, block: Block, bad: Mapping[int, str]) -> None:
        """Add a block that was made before, with its offsets. ``bad`` gives a reason for each of its holes.

        Its arrays must not change any more. Raises ShardMismatch unless its offsets are the next ones.
        """
        self.flush()
        if block.first != self.position:
            raise ShardMismatch(
                f"shard {self._shard} stands at offset {self.position}, this block begins at {block.first}"
            )
        if block.end > self._limit:
            self._refuse_more()
        self._first = block.end
        self.bytes_written += block.nbytes
        self._uncommitted.append((block, dict(bad)))
        self.flush()

    def quarantine(self, reason: str) -> None:
        """Record that the next sample could not be made. Its offset becomes a hole, which no group waits for."""
        self._make_way(1)
        self._bad[self.position] = reason
        self._builder.shorten(self._limit - self.position)
        if len(self._bad) >= MAX_HOLES or self._builder.is_full:
            self.flush()

    def flush(self) -> None:
        """Send the samples gathered so far, so that trainers can read them.

        An error loses nothing: the next flush sends the samples again.
        """
        require_own(self._owner)
        self.has_failed = True
        if self._is_interrupted:
            raise PenstockError(
                f"shard {self._shard} was interrupted, as by Ctrl-C, while it completed a block, so samples may be "
                f"lost: offsets below {self.committed} are committed; end this writer, and go on from there with "
                "another"
            )
        if self.position > self._first:
            self._is_interrupted = True
            block = self._builder.finish(self._first, list(self._bad))
            bad, self._bad, self._first = self._bad, {}, block.end
            self.bytes_written += block.nbytes
            self._uncommitted.append((block, bad))
            self._is_interrupted = False
        self.is_over = self._first >= self._limit
        self._builder.allow(0)
        while self._uncommitted:
            try:
                self._committer.commit(*self._uncommitted[0])
            except ShardTaken as error:
                self._move(error)
            else:
                self._uncommitted.popleft()
        self._builder.allow(0 if self._reserved else self._limit - self._first)
        self._linger_s = min(2 * self._linger_s, LINGER_S)
        self._due = self._clock() + self._linger_s
        self.has_failed = False

    def _flush_added(self) -> None:
        """Flush after a sample was added. If the block is too large, that sample goes alone, or is taken back."""
        try:
            return self.flush()
        except TooLarge:
            if len(self._uncommitted) > 1:
                raise
            (block, bad) = self._uncommitted.pop()
            last = int(block.offsets()[-1])
            parts = block.head(last).moved(block.first), block.tail(last).moved(last)
            self._uncommitted += [(parts[0], bad), (parts[1], {})] if last > block.first else [(block, bad)]
        try:
            self.flush()
        except TooLarge:
            if len(self._uncommitted) == 1:
                (block, _) = self._uncommitted.pop()
                self._first, self.is_over, self.has_failed = block.first, False, False
                self.bytes_written -= block.nbytes
                self._builder.allow(self._limit - self._first)
            raise

    def commit_all(self) -> None:
        """Flush, and return once everything is committed."""
        while True:
            self.flush()
            self.has_failed = True
            try:
                self._committer.commit_all()
            except ShardTaken as error:
                self._move(error)
            else:
                self.has_failed = False
                return

    def _commit_whole(self) -> None:
        """Commit everything, and check once whether the server holds all of the shard."""
        while True:
            self.commit_all()
            try:
                return self._committer.require_whole(self.position)
            except ShardTaken as error:
                self._move(error)

    def _move(self, error: ShardTaken) -> None:
        """Continue in a new shard with what is not committed, under the identities that come next there.

        Raises the error if no other shard may be taken, and ShardMismatch if the server lost samples that it confirmed.
        A move that fails halfway may be tried again.
        """
        if self._take_another is None:
            raise error
        blocks, before = [*self._committer.blocks_to_move(), *self._uncommitted], self._committer
        self._committer, self._shard, self._finish = self._take_another()
        at = self._committer.position
        # it is empty, and its blocks may be made in a segment that is given back
        self._builder = builder_of(self.spec, self._block_bytes, MAX_BLOCK_SAMPLES, self._committer.place)
        self._uncommitted.clear()
        for block, bad in blocks:  # copied, for the same reason
            self._uncommitted.append((block.moved(at), {at + o - block.first: why for o, why in bad.items()}))
            at += block.end - block.first
        self._first, self.is_over = at, False
        before.close()

    def close(self) -> None:
        """Commit the rest and declare the shard complete. Raises ShardMismatch if fewer samples came than planned."""
        self._require_free()
        self._commit_whole()
        if self._size is not None and self.position != self._size:
            raise ShardMismatch(
                f"shard {self._shard} was closed after {self.position} samples, its manifest plans {self._size}: "
                "write or quarantine every one"
            )
        try:
            self._finish(self.position)
        except ShardMismatch:
            self.has_failed = True
            raise
        self._committer.finish()
        self._is_ended = self._is_closed = True
        self._limit = self.position
        self._builder.allow(0)

    def close_as_committed(self) -> None:
        """Declare the shard complete with what is committed, for a writer that ends by an error. The rest is lost."""
        self._is_ended = True
        self._committer.commit_all()
        self._committer.require_whole(self._committer.position)
        self._finish(self._committer.position)
        self._committer.finish()

    def abort(self) -> None:
        """Close the connection without completing the shard. What was committed stays."""
        self._is_ended = True
        self._committer.close()

    def _make_way(self, count: int) -> None:
        """Send what a flush could not send, so that no more than one block waits for the server."""
        require_own(self._owner)
        if self.position + count > self._limit or self._reserved:
            self._refuse_more()
        if self._uncommitted or not self._builder.left:  # a flush that was interrupted leaves none
            self.flush()

    def _refuse_more(self) -> None:
        self._require_free()
        if self._is_closed:
            raise ShardMismatch(f"shard {self._shard} is closed: open the next one, or write inside its `with`")
        raise ShardMismatch(f"shard {self._shard} is full: {self._limit} samples are planned, one more was written")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            if not self._is_closed:
                self.abort()

    def tell_lost(self) -> None:
        """Report, once, the number of uncommitted samples in a shard that no program will close."""
        if not self._is_ended and self._owner == os.getpid():
            self._is_ended = True
            if (count := self.position - self.committed) > 0:
                self._lost(count)

    def __del__(self) -> None:
        self.tell_lost()


_OPEN: weakref.WeakSet[ShardWriter] = weakref.WeakSet()


def require_own(owner: int) -> None:
    """Raise PenstockError unless this process is ``owner``: two processes on one connection would tear the stream."""
    if os.getpid() != owner:
        raise PenstockError(
            f"this writer was made by process {owner}, and a fork copied it: make a penstock.Writer in each process"
        )


def two_threads() -> PenstockError:
    """Return the error for a thread that writes while another one does, because their samples would get lost."""
    return PenstockError(
        "two threads write through one writer at once: make a penstock.Writer in each thread, each with shards of its "
        "own, or let one thread write what the others put into a queue.Queue"
    )


class _Copied(ShardWriter):
    """The copy of a shard that a forked process has. Without it, only complete blocks would reach `require_own`."""

    def write(self, sample: Mapping[str, Any]) -> None:
        require_own(self._owner)


def _hold_back() -> None:
    for shard in _OPEN:
        shard.__class__ = _Copied


def _tell_lost() -> None:
    for shard in list(_OPEN):
        shard.tell_lost()


os.register_at_fork(after_in_child=_hold_back)
atexit.register(_tell_lost)
