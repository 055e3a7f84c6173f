"""The thread that reads one epoch in canonical order for one rank, by the shard indexes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import (
    BadEntry,
    EpochIncomplete,
    EpochNotFound,
    PenstockError,
    SegmentsUnseen,
    ServerUnavailable,
    UnsupportedVersion,
)
from penstock_common.explain.sentences import why_no_room
from penstock_common.server.channel import SKIP, Skip
from penstock_common.stream.entries import fetch_command
from penstock_common.stream.groups.dead_notes import DeadNote, skipped
from penstock_common.stream.groups.ledger import bury
from penstock_common.stream.groups.positions import HEAD_STEPS
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import ABANDONED, Manifest, load_manifest, renewed
from penstock_common.stream.payloads import reader_of
from penstock_common.stream.servers.suitability import require_step_fits
from penstock_common.stream.streams import Stream
from penstock_common.waiting import Notify
from penstock_common.wire.header import Header
from penstock_consumer.read.canonical import EpochSteps, IndexedPiece, NoGoodSample, RowRange, joined, resolve
from penstock_consumer.read.claims import RankClaim
from penstock_consumer.read.dead_letters import cause_of, is_removed, too_old
from penstock_consumer.read.fetch_plan import StepPlanner
from penstock_consumer.read.index_walk import IndexWalk, shards_in_order
from penstock_consumer.read.receive import ReaderConnection, ReceivedEntry, Receiver, check_identity, read_by_id
from penstock_consumer.stages.batch import Assembler
from penstock_consumer.stages.buffers import ArrayPool
from penstock_consumer.stages.queue import PrefetchQueue, QueueStopped


@dataclass(slots=True)
class ExpectedEntry:
    """The next entry as the index describes it."""

    stream: Stream
    manifest: Manifest
    take: RowRange | None = None

    def renew(self, manifest: Manifest) -> None:
        """Check against a newer manifest from now on."""
        self.manifest = manifest

    def expect(self, take: RowRange) -> None:
        """Expect this entry, and want these rows of it."""
        self.take = take

    def check(self, header: Header) -> None:
        """Raise BadEntry if the entry is another one than the index says."""
        check_identity(header, self.stream, self.manifest)
        assert self.take is not None
        shard, record = self.take.piece.shard, self.take.piece.record
        if (header.shard, header.first, header.end, tuple(header.holes)) != (
            shard, record.first, record.end, record.holes,
        ):  # fmt: skip
            raise BadEntry(
                f"entry of shard {header.shard} offsets {header.first}-{header.end - 1}, where the index has shard "
                f"{shard} offsets {record.first}-{record.end - 1}"
            )

    def wanted(self, header: Header) -> NDArray[np.int64] | None:
        """Return the rows that were planned."""
        assert self.take is not None
        return None if self.take.is_whole else self.take.rows


class DiscardSink:
    """A sink for entries that are not wanted after all."""

    def begin(self, entry_id: bytes) -> None:
        """Note that an entry starts."""

    def target(self, name: bytes, nbytes: int) -> Sequence[memoryview] | Skip | None:
        """Read the field and drop it."""
        return SKIP

    def value(self, name: bytes, data: bytes) -> None:
        """Do nothing: no value is asked for."""

    def end(self) -> None:
        """Note that the entry is complete."""

    def missing(self, entry_id: bytes) -> None:
        """Note that the entry is gone."""


AHEAD_BYTES = 4_000_000
"""The payload that is asked for before the first of it arrives, which hides round trips."""
AHEAD_ENTRIES = 32
PLANNED = 64
"""The fetches that are planned at once, because indexes are read so far ahead of payloads."""
BLOCK_MS, END_MS = 100, 10
"""The length of a wait for the next block, which is finite because an epoch may end without one; and of a wait for the
end alone."""


class NotCommittedYet(Exception):
    """Raised when the next positions are not committed yet."""


class OrderedReader:
    """A reader of one epoch, from where a rank stands, into a prefetch queue."""

    def __init__(
        self,
        claim: RankClaim,
        epoch: int,
        queue: PrefetchQueue,
        pool: ArrayPool,
        *,
        remainder: str,
        start: int,
        notify: Notify,
        share: tuple[int, int] = (0, 1),
        views: bool = False,
    ) -> None:
        """``start`` is where the rank's first step begins; of its steps this reader takes a share (`EpochSteps.share`).

        Raises OrderNeedsSizes, TooLarge.
        """
        self.claim, self.epoch, self.queue = claim, epoch, queue
        self._notify = notify
        self._connection = ReaderConnection(claim.client, queue, notify)
        self.bad_entries = 0
        self.filled = 0
        """The rows that replace bad samples."""
        order, spec = claim.order, claim.stream.spec
        assert spec is not None
        self._require_room()
        self._manifest = load_manifest(claim.client, claim.stream, epoch)
        claim.learn(self._manifest)
        begun = shards_in_order(claim.client, claim.stream, self._manifest)
        self.steps = EpochSteps(start, order.rank, order.world, order.batch, remainder, share)
        self._unusable, self._dropped = self._skipped()
        self._walk = IndexWalk(claim.client, claim.stream, self._manifest, begun, self.steps.start, self._dropped)
        self._head: IndexWalk | None = None
        """A walk from the first position of the epoch, for what runs on beyond its end."""
        self._planned = self._received_rows = self._emitted = 0
        """The rows planned, the rows received, and the batches put into the queue."""
        self._todo: deque[RowRange] = deque()
        self._asked: deque[RowRange] = deque()
        self._assembler = Assembler(spec, order.batch, pool, epoch)
        self._answers: list[ReceivedEntry] = []
        self._expected = ExpectedEntry(claim.stream, self._manifest)
        self._segments = reader_of(claim.stream, gives_views=views)
        self._receivers = [
            Receiver(spec, self._assembler, self._expected, partition.number, self._answers.append, self._segments)
            for partition in claim.stream.partitions
        ]
        self._step_planner = StepPlanner(order.world, self.steps.size * share[1], claim.stream.budget_bytes)
        self._is_dry = False
        """Whether the last look for more found less than the next step needs."""
        self._broken_off: int | None = None
        """The end of an abandoned epoch."""
        self._refresh(self._manifest)

    def _require_room(self) -> None:
        """Raise TooLarge for a step that the budget cannot hold, because it would never be committed as a whole."""
        order = self.claim.order
        require_step_fits(self.claim.stream, order.world * order.batch, HEAD_STEPS)

    def _skipped(self) -> tuple[set[tuple[int, bytes]], list[DeadNote]]:
        """Return entries by partition, and ranges, that another rank or an operator gave up."""
        entries, ranges = set(), []
        for partition in self.claim.stream.partitions:
            known, dropped = skipped(self.claim.client, partition, self.epoch, self.claim.who.group)
            entries |= {(partition.number, entry_id) for entry_id in known}
            ranges += dropped
        return entries, ranges

    def run(self) -> None:
        """Run the thread. Everything ends in the queue, errors too."""
        try:
            self._read()
            self.queue.end()
        except QueueStopped:
            self.queue.end()
        except EpochNotFound as error:
            self._end_released(error)
        except SegmentsUnseen as error:
            self.queue.end(cause_of(self.claim.client, self.claim.stream, error))
        except BaseException as error:
            self.queue.end(error)
        finally:
            self._connection.close()

    def why_waiting(self, seconds: float) -> str:
        """Return why there is no batch, in words for the training loop's user."""
        name, total = self.claim.stream.name, self._total
        step = self._planned // self.steps.batch
        if total is not None and self._is_planned_out(total):
            return (
                f"the word that epoch {self.epoch} of {name!r} is complete: all {total} samples are there, but its "
                f"producer has not said so. If it died: `penstock epochs close {name} {self.epoch}`"
            )
        if full := why_no_room(self.claim.client, self.claim.stream):
            where = self._walk.where()
            return f"{where} of epoch {self.epoch} of {name!r}; none came for {seconds:.0f} s: {full}"
        return (
            f"{self._walk.where()} of epoch {self.epoch} of {name!r}, which is next in order (step {step} ends at "
            f"position {self.steps.end_of(step)}); none came for {seconds:.0f} s. Is a producer running "
            f"(`penstock inspect {name}`)? If none will: `penstock epochs close {name} {self.epoch}`"
        )

    # --- the loop ---

    def _read(self) -> None:
        while True:
            self.claim.heartbeat.raise_error()  # nothing may be handed out under a name that another process took
            try:
                if self._turn():
                    break
            except ServerUnavailable as error:
                self._reconnect(error)
        self._assembler.flush()
        self._emit()
        self.claim.ended(self.epoch, self.steps.end_of(self._emitted - 1), self._total or 0)

    def _turn(self) -> bool:
        """Do one round. Returns whether the epoch is read to its end."""
        self._plan()
        self._ask()
        if self._asked:
            self._take_answer()
        elif self._todo:
            self.queue.wait_for_room(0, 0.2)
        elif self._is_over():
            return True
        else:
            self._await_more()
        return False

    def is_last(self, position: int) -> bool:
        """Return whether no step begins there or beyond."""
        total = self._total
        return total is not None and position >= self.steps.end_of(self.steps.count(total) - 1)

    @property
    def _total(self) -> int | None:
        """The positions in the epoch, as far as they are known."""
        return self._broken_off if self._broken_off is not None else self._manifest.samples

    def _is_over(self) -> bool:
        """Return whether everything is planned, and so received.

        A producer that has not closed its epoch is waited for.
        """
        total = self._total
        return total is not None and self._manifest.is_ended and self._is_planned_out(total)

    def _is_planned_out(self, total: int) -> bool:
        step, done = divmod(self._planned, self.steps.batch)
        lo, hi = self.steps.mine(step, total)
        return step >= self.steps.count(total) or done >= hi - lo  # a smaller last batch, with 'keep'

    def _await_more(self) -> None:
        self.queue.wait_for_room(0, 0)  # raises QueueStopped
        # a bad entry that lies there for ever, of no step of this rank or of an unknown shard, must not hide the notice
        self.queue.reader_times.to("producers")
        self._is_dry = False
        step, total = self._planned // self.steps.batch, self._total
        is_end_due, last = total is not None and self._is_planned_out(total), step + self._step_planner.steps() - 1
        needed = self.steps.needed(last, total)
        block_ms = END_MS if is_end_due else BLOCK_MS
        if not self._walk.wait(self._connection.open(), block_ms, needed, self.steps.coming(step, total, needed)):
            self._refresh(renewed(self.claim.client, self.claim.stream, self._manifest))
        self._step_planner.reached(self._walk.end, time.monotonic())
        self.queue.reader_times.to("reader")

    def _refresh(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._expected.renew(manifest)
        begun = shards_in_order(self.claim.client, self.claim.stream, manifest)
        for walk in (self._walk, self._head):
            if walk is not None:
                walk.now(manifest, begun)
        if manifest.state == ABANDONED and self._broken_off is None:  # it ends with what is there
            self._broken_off = self._walk.to_the_end()

    # --- planning ---

    def _plan(self) -> None:
        """Plan steps that are committed, as long as few fetches are planned."""
        while len(self._todo) + len(self._asked) < PLANNED:
            step, done = divmod(self._planned, self.steps.batch)
            total = self._total
            if total is not None and self._is_planned_out(total):
                return
            if not self._is_committed(step):
                return
            self._walk.prepare(self.steps.coming(step, total, self._walk.end))
            lo, hi = self.steps.mine(step, total)
            try:
                takes = list(resolve(self._pieces(lo + done), lo + done, hi, self._planned, total, self._is_unusable))
            except NotCommittedYet:
                return
            except NoGoodSample:
                raise EpochIncomplete(
                    f"epoch {self.epoch} of {self.claim.stream.name!r} has no sample that could be handed out: see "
                    f"`penstock audit {self.claim.stream.name}`"
                ) from None
            self._planned += sum(len(take.rows) for take in takes)
            last = [self._todo.pop()] if self._todo else []
            self._todo.extend(joined([*last, *takes]))

    def _is_committed(self, step: int) -> bool:
        """Return whether a step may be handed out. The server is asked again when nothing else is left to do."""
        needed = self.steps.needed(step, self._total)
        if self._walk.end < needed and not self._is_dry:
            self._is_dry = not self._walk.reach(needed)
        return self._walk.end >= needed

    def _is_unusable(self, piece: IndexedPiece) -> bool:
        return bool(self._unusable) and (self._number(piece), piece.record.entry_id) in self._unusable

    def _pieces(self, lo: int) -> Iterator[IndexedPiece]:
        """Yield the pieces from ``lo`` on, cyclically. Raises NotCommittedYet at positions that are not committed."""
        total = self._total
        for piece in self._walk.pieces(lo):
            yield piece
            lo = piece.end
        if total is None or lo < total:
            raise NotCommittedYet
        if self._head is None:
            begun = shards_in_order(self.claim.client, self.claim.stream, self._manifest)
            self._head = IndexWalk(self.claim.client, self.claim.stream, self._manifest, begun, 0, self._dropped)
        laps = total
        while True:
            for piece in self._head.pieces(0):
                yield piece.later(laps)
            laps += total

    # --- fetching ---

    def _ask(self) -> None:
        """Ask for planned entries, as far as the prefetch budget allows."""
        commands = []
        pending = sum(take.piece.record.nbytes for take in self._asked)
        ahead = min(AHEAD_BYTES, self.queue.budget_bytes // 4)
        while self._todo and len(self._asked) < AHEAD_ENTRIES and (pending < ahead or not self._asked):
            if not self.queue.wait_for_room(pending, 0):
                break
            take = self._todo.popleft()
            self._asked.append(take)
            pending += take.piece.record.nbytes
            commands.append(fetch_command(self._partition(take), self.epoch, take.piece.record.entry_id))
        if commands:
            self._connection.open().send(commands)

    def _take_answer(self) -> None:
        take = self._asked[0]
        self._answers.clear()
        self._expected.expect(take)
        partition = self._partition(take)
        receiver = self._receivers[partition.number]
        found = read_by_id(self._connection, receiver, self.queue.reader_times, partition.entries(self.epoch))
        if found == 0 or self._answers[0].is_missing:
            self._missing(take)
        elif (error := self._answers[0].error) is not None:
            is_gone = is_removed(
                self.claim.client, self._partition(take), self.epoch, take.piece.record.entry_id, error
            )
            self._missing(take) if is_gone else self._bury(take, error)
        else:
            self._asked.popleft()
            self._connection.answered()
            self._step_planner.received(take.piece.record.nbytes, take.piece.record.count)
            self._received_rows += len(take.rows)
            self.filled += take.filled
            self._emit()
            self._walk.forget(self.steps.mine(self._received_rows // self.steps.batch, None)[0])

    def _emit(self) -> None:
        while (batch := self._assembler.take(self.steps.end_of(self._emitted))) is not None:
            self._emitted += 1
            self.queue.put(batch)

    def _bury(self, take: RowRange, error: BadEntry) -> None:
        """Write a dead letter of the group, for every rank that meets the entry. Its samples are bad from now on."""
        entry_id, reason = take.piece.record.entry_id, f"{type(error).__name__}: {error}"
        if isinstance(error, UnsupportedVersion):
            raise too_old(self.claim.who, self.epoch, entry_id, error)
        self.bad_entries += 1
        self._notify(f"entry {entry_id.decode()} of epoch {self.epoch} is a dead letter: {reason[:300]}")
        bury(self.claim.client, self._partition(take), self._manifest, self.claim.who.group, entry_id, reason[:500])
        self._leave_out(take)

    def _missing(self, take: RowRange) -> None:
        """Deal with an entry that is in the index and not in the stream."""
        manifest = load_manifest(self.claim.client, self.claim.stream, self.epoch)
        total, record, name = self._total, take.piece.record, self.claim.stream.name
        if manifest.state == ABANDONED:
            raise EpochNotFound(f"epoch {self.epoch} of {name!r} was abandoned")
        self._unusable |= self._skipped()[0]  # an operator may have given it up since this epoch was begun
        if (total is None or take.piece.start < total) and not self._is_unusable(take.piece):
            raise EpochIncomplete(
                f"epoch {self.epoch} of {name!r}: shard {take.piece.shard} offsets {record.first}-{record.end - 1} "
                f"(entry {record.entry_id.decode()}) are in the index and not in the stream, though group "
                f"{self.claim.who.group!r} has not settled them: "
                f"`penstock audit {name} --repair SOURCE...` makes them again, `penstock bad drop {name} {self.epoch} "
                f"--group {self.claim.who.group}` goes on without",
                [(take.piece.shard, record.first, record.end)],
            )
        self._leave_out(take)  # acknowledged and removed: another sample pads the last step

    def _leave_out(self, take: RowRange) -> None:
        """Plan again from the first row that was to come from this entry."""
        self._unusable.add((self._number(take.piece), take.piece.record.entry_id))
        self._planned, under_way, discard = take.first, len(self._asked) - 1, DiscardSink()
        self._todo.clear()
        self._asked.clear()
        for _ in range(under_way):
            self._connection.open().read_entries(discard)

    # --- parts ---

    def _number(self, piece: IndexedPiece) -> int:
        return self.claim.stream.partition_of(piece.shard).number

    def _partition(self, take: RowRange) -> PartitionKeys:
        return self.claim.stream.partition_of(take.piece.shard)

    def _reconnect(self, error: ServerUnavailable) -> None:
        """Ask again for what was asked for: reading by id leaves no trace on the server."""
        self._todo.extendleft(reversed(self._asked))
        self._asked.clear()
        self._connection.reopen(error)

    def _end_released(self, error: EpochNotFound) -> None:
        """End an epoch with what was there. An epoch that this group still holds can only go if it was abandoned."""
        try:
            roster = load_roster(self.claim.client, self.claim.stream.partitions[0])
        except PenstockError:
            self.queue.end(error)
            return
        if self.claim.who.group not in roster.groups:
            self.queue.end(error)
            return
        self._notify(f"epoch {self.epoch} of {self.claim.stream.name!r} was abandoned and released while it was read")
        self.queue.end()
