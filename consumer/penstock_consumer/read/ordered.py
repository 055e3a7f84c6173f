"""The thread that reads one epoch in canonical order for one rank, by the shard indexes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
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
from penstock_common.explain.sentences import producer_hint, why_no_room
from penstock_common.printable import shortened
from penstock_common.stream.entries import fetch_command, is_indexed
from penstock_common.stream.groups.dead_notes import DeadLetterNote, skipped
from penstock_common.stream.groups.ledger import add_dead_letter
from penstock_common.stream.groups.positions import HEAD_STEPS
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import ABANDONED, Manifest, load_manifest
from penstock_common.stream.payloads import reader_of
from penstock_common.stream.servers.suitability import require_step_fits
from penstock_common.stream.streams import Stream
from penstock_common.wire.header import Header
from penstock_consumer.read.canonical import EpochSteps, IndexedPiece, NoGoodSample, RowRange, joined, resolve
from penstock_consumer.read.claims import RankClaim
from penstock_consumer.read.dead_letters import cause_of, is_removed, too_old
from penstock_consumer.read.fetch_plan import StepPlanner
from penstock_consumer.read.index_walk import CanonicalIndex, NotCommittedYet
from penstock_consumer.read.receive import ReaderConnection, ReceivedEntry, Receiver, check_identity, read_by_id
from penstock_consumer.stages.batch import ArrayPool, Assembler
from penstock_consumer.stages.queue import PrefetchQueue, QueueStopped


@dataclass(slots=True)
class ExpectedEntry:
    """The next entry as the index describes it, and the entry that came."""

    stream: Stream
    manifest: Manifest
    take: RowRange | None = None
    received: ReceivedEntry | None = None

    def expect(self, take: RowRange, manifest: Manifest) -> None:
        """Expect this entry, and want these rows of it."""
        self.take, self.manifest, self.received = take, manifest, None

    def receive(self, received: ReceivedEntry) -> None:
        """Note what came."""
        self.received = received

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

    def wanted(self, header: Header, entry_id: bytes) -> NDArray[np.int64] | None:
        """Return the rows that were planned."""
        assert self.take is not None
        return None if self.take.is_whole else self.take.rows


AHEAD_BYTES = 4_000_000
"""The payload that is asked for before the first of it arrives, which hides round trips."""
AHEAD_ENTRIES = 32
PLANNED = 64
"""The fetches that are planned at once. Indexes are read this far ahead of payloads."""
BLOCK_MS, END_MS = 100, 10
"""The length of a wait for the next block, which is finite because an epoch may end without one; and of a wait for the
end alone."""


class RowPlan:
    """The rows that a rank takes of an epoch: which are planned, which were received, and which are in batches."""

    def __init__(
        self,
        stream: Stream,
        index: CanonicalIndex,
        steps: EpochSteps,
        step_planner: StepPlanner,
        unusable: set[tuple[int, bytes]],
    ) -> None:
        """``unusable`` are the entries, by partition, that the group gave up. Other samples replace theirs."""
        self.index, self.steps = index, steps
        self.todo: deque[RowRange] = deque()
        """The fetches that are planned and not asked for."""
        self._stream, self._step_planner, self._unusable = stream, step_planner, unusable
        self._planned = self._received = self._emitted = 0
        """The rows planned, the rows received, and the batches made of them."""
        self._is_dry = False
        """Whether the last look for more found less than the next step needs."""

    # --- where the rank stands ---

    @property
    def step(self) -> int:
        """Return the step whose rows are planned next."""
        return self._planned // self.steps.batch

    @property
    def next_end(self) -> int:
        """Return the position where the step of the next batch ends."""
        return self.steps.end_of(self._emitted)

    @property
    def last_end(self) -> int:
        """Return the position where the step of the last batch ends."""
        return self.steps.end_of(self._emitted - 1)

    @property
    def is_over(self) -> bool:
        """Return whether everything is planned, and so received.

        A producer that has not closed its epoch is waited for.
        """
        total = self.index.total
        return total is not None and self.index.manifest.is_ended and self.is_planned_out(total)

    def is_planned_out(self, total: int) -> bool:
        """Return whether all rows of an epoch of this many positions are planned."""
        step, done = divmod(self._planned, self.steps.batch)
        lo, hi = self.steps.mine(step, total)
        return step >= self.steps.count(total) or done >= hi - lo  # a smaller last batch, with 'keep'

    def is_last(self, position: int) -> bool:
        """Return whether no step begins there or beyond."""
        total = self.index.total
        return total is not None and position >= self.steps.end_of(self.steps.count(total) - 1)

    # --- planning ---

    def extend(self, under_way: int) -> None:
        """Plan steps that are committed, as long as few fetches are planned or under way. Raises EpochIncomplete."""
        while len(self.todo) + under_way < PLANNED:
            step, done = divmod(self._planned, self.steps.batch)
            total = self.index.total
            if total is not None and self.is_planned_out(total):
                return
            if not self._is_committed(step):
                return
            self.index.walk.prepare(self.steps.coming(step, total, self.index.walk.end))
            lo, hi = self.steps.mine(step, total)
            lo += done
            try:
                takes = list(resolve(self.index.pieces(lo), lo, hi, self._planned, total, self.is_unusable))
            except NotCommittedYet:
                return
            except NoGoodSample:
                raise EpochIncomplete(
                    f"epoch {self.index.manifest.epoch} of {self._stream.name!r} has no sample that could be handed "
                    f"out: see `penstock audit {self._stream.name}`"
                ) from None
            self._planned += sum(len(take.rows) for take in takes)
            last = [self.todo.pop()] if self.todo else []
            self.todo.extend(joined([*last, *takes]))

    def _is_committed(self, step: int) -> bool:
        """Return whether a step may be delivered. The server is asked again when nothing else is left to do."""
        needed, walk = self.steps.needed(step, self.index.total), self.index.walk
        if walk.end < needed and not self._is_dry:
            self._is_dry = not walk.reach(needed)
        return walk.end >= needed

    def wait(self, connection: ReaderConnection) -> None:
        """Wait a moment until the next steps are committed, or until there is news of the epoch."""
        self._is_dry = False
        step, total = self.step, self.index.total
        is_end_due, last = total is not None and self.is_planned_out(total), step + self._step_planner.steps() - 1
        needed = self.steps.needed(last, total)
        block_ms = END_MS if is_end_due else BLOCK_MS
        if not self.index.walk.wait(connection.open(), block_ms, needed, self.steps.coming(step, total, needed)):
            self.index.renew()
        self._step_planner.reached(self.index.walk.end, time.monotonic())

    # --- what came ---

    def received(self, take: RowRange) -> None:
        """Note that an entry came."""
        self._step_planner.received(take.piece.record.nbytes, take.piece.record.count)
        self._received += len(take.rows)
        self.index.walk.forget(self.steps.mine(self._received // self.steps.batch, None)[0])

    def emitted(self) -> None:
        """Note that a batch is complete."""
        self._emitted += 1

    def is_unusable(self, piece: IndexedPiece) -> bool:
        """Return whether the group gave an entry up."""
        return bool(self._unusable) and (self._number(piece), piece.record.entry_id) in self._unusable

    def skip(self, entries: set[tuple[int, bytes]]) -> None:
        """Take nothing of these entries, by partition, from now on."""
        self._unusable |= entries

    def leave_out(self, take: RowRange) -> None:
        """Plan again from the first row that was to come from this entry."""
        self._unusable.add((self._number(take.piece), take.piece.record.entry_id))
        self._plan_from(take)

    def begin_of(self, take: RowRange) -> int:
        """Return the position where the batch of a range's first row begins, within the epoch."""
        begin, total = self.steps.mine(take.first // self.steps.batch, None)[0], self.index.total
        return begin if total is None else min(begin, total)

    def go_by(self, index: CanonicalIndex, take: RowRange) -> None:
        """Plan again from the first row of a range, by an index that was read again."""
        self.index, self._is_dry = index, False
        self._plan_from(take)

    def _plan_from(self, take: RowRange) -> None:
        self._planned = take.first
        self.todo.clear()

    def _number(self, piece: IndexedPiece) -> int:
        return self._stream.partition_of(piece.shard).number


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
        share: tuple[int, int] = (0, 1),
        views: bool,
    ) -> None:
        """``start`` is where the rank's first step begins; of its steps this reader takes a share (`EpochSteps.share`).

        Raises OrderNeedsSizes, TooLarge.
        """
        self.claim, self.epoch, self.queue = claim, epoch, queue
        self._connection = ReaderConnection(claim.client, queue, claim.notify)
        self.bad_entries = 0
        """The number of entries that could not be read."""
        self.loss = ""
        """A notice, if a server lost the epoch as a whole."""
        self.filled = 0
        """The rows that replace bad samples."""
        order, stream, spec = claim.order, claim.stream, claim.stream.require_spec()
        # a step that the budget cannot hold would never be committed as a whole
        require_step_fits(stream, order.world * order.batch, HEAD_STEPS)
        manifest = load_manifest(claim.client, stream, epoch)
        claim.note_manifest(epoch, manifest.id)
        steps = EpochSteps(start, order.rank, order.world, order.batch, remainder, share)
        unusable, dropped = self._skipped()
        index = self._index(manifest, start, dropped)
        step_planner = StepPlanner(order.world, steps.size * share[1], stream.budget_bytes)
        self._plan = RowPlan(stream, index, steps, step_planner, unusable)
        self._asked: deque[RowRange] = deque()
        """The fetches under way."""
        self._assembler = Assembler(spec, order.batch, pool, epoch)
        self._expected = ExpectedEntry(stream, manifest)
        segments = reader_of(stream, gives_views=views)
        self._receivers = [
            Receiver(spec, self._assembler, self._expected, partition.number, self._expected.receive, segments)
            for partition in stream.partitions
        ]

    def _index(self, manifest: Manifest, position: int, dropped: Sequence[DeadLetterNote]) -> CanonicalIndex:
        """Return the index of the epoch from a position on. Raises OrderNeedsSizes."""
        return CanonicalIndex(self.claim.client, self.claim.stream, manifest, position, dropped)

    def _skipped(self) -> tuple[set[tuple[int, bytes]], list[DeadLetterNote]]:
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
        name, plan = self.claim.stream.name, self._plan
        total, step = plan.index.total, plan.step
        if total is not None and plan.is_planned_out(total):
            return (
                f"the word that epoch {self.epoch} of {name!r} is complete: all {total} samples are there, but its "
                f"producer has not said so. If it died: `penstock epochs close {name} {self.epoch}`"
            )
        where = plan.index.walk.where()
        if full := why_no_room(self.claim.client.impatient(), self.claim.stream):
            return f"{where} of epoch {self.epoch} of {name!r}; none came for {seconds:.0f} s: {full}"
        return (
            f"{where} of epoch {self.epoch} of {name!r}, which is next in order (step {step} ends at "
            f"position {plan.steps.end_of(step)}); none came for {seconds:.0f} s. "
            f"{producer_hint(name, self.epoch, seconds)}"
        )

    def is_last(self, position: int) -> bool:
        """Return whether no step begins there or beyond."""
        return self._plan.is_last(position)

    # --- the loop ---

    def _read(self) -> None:
        while True:
            self.claim.heartbeat.raise_error()  # nothing may be delivered under a name that another process took
            try:
                if self._turn():
                    break
            except ServerUnavailable as error:
                self._reconnect(error)
        self._assembler.flush()
        self._emit()
        self.claim.ended(self.epoch, self._plan.last_end, self._plan.index.total or 0)

    def _turn(self) -> bool:
        """Do one round. Returns whether the epoch is read to its end."""
        self._plan.extend(len(self._asked))
        self._ask()
        if self._asked:
            self._take_answer()
        elif self._plan.todo:
            self.queue.wait_for_space(0, 0.2)
        elif self._plan.is_over:
            return True
        else:
            self._await_more()
        return False

    def _await_more(self) -> None:
        self.queue.wait_for_space(0, 0)  # raises QueueStopped
        # a bad entry that stays there, of no step of this rank or of an unknown shard, must not hide the notice
        self.queue.reader_times.to("producers")
        self._plan.wait(self._connection)
        self._connection.answered()  # else a later outage would seem to last since the first one of this wait
        self.queue.reader_times.to("reader")

    # --- fetching ---

    def _ask(self) -> None:
        """Ask for planned entries, as far as the prefetch budget allows."""
        commands = []
        pending = sum(take.piece.record.nbytes for take in self._asked)
        ahead = min(AHEAD_BYTES, self.queue.budget_bytes // 4)
        todo = self._plan.todo
        while todo and len(self._asked) < AHEAD_ENTRIES and (pending < ahead or not self._asked):
            if not self.queue.wait_for_space(pending, 0):
                break
            take = todo.popleft()
            self._asked.append(take)
            pending += take.piece.record.nbytes
            commands.append(fetch_command(self._partition(take), self.epoch, take.piece.record.entry_id))
        if commands:
            self._connection.open().send(commands)

    def _take_answer(self) -> None:
        take = self._asked[0]
        self._expected.expect(take, self._plan.index.manifest)
        partition = self._partition(take)
        receiver = self._receivers[partition.number]
        read_by_id(self._connection, receiver, self.queue.reader_times, partition.entries(self.epoch))
        received = self._expected.received
        if received is None:
            self._missing(take)
        elif (error := received.error) is not None:
            is_gone = is_removed(self.claim.client, partition, self.epoch, take.piece.record.entry_id, error)
            self._missing(take) if is_gone else self._dead_letter(take, error)
        else:
            self._asked.popleft()
            self._connection.answered()
            self.filled += take.filled
            self._plan.received(take)
            self._emit()

    def _emit(self) -> None:
        while (batch := self._assembler.take(self._plan.next_end)) is not None:
            self._plan.emitted()
            self.queue.put(batch)

    def _dead_letter(self, take: RowRange, error: BadEntry) -> None:
        """Write a dead letter of the group, for every rank that meets the entry. Its samples are bad from now on."""
        entry_id, reason = take.piece.record.entry_id, f"{type(error).__name__}: {error}"
        if isinstance(error, UnsupportedVersion):
            raise too_old(self.claim.who, self.epoch, entry_id, error)
        self.bad_entries += 1
        self.claim.notify(f"entry {entry_id.decode()} of epoch {self.epoch} is a dead letter: {reason[:300]}")
        add_dead_letter(
            self.claim.client,
            self._partition(take),
            self._plan.index.manifest,
            self.claim.who.group,
            entry_id,
            shortened(reason, 500),
        )
        self._leave_out(take)

    def _missing(self, take: RowRange) -> None:
        """Deal with an entry that is in the index and not in the stream."""
        manifest = load_manifest(self.claim.client, self.claim.stream, self.epoch)
        total, record, name = self._plan.index.total, take.piece.record, self.claim.stream.name
        if manifest.state == ABANDONED:
            raise EpochNotFound(f"epoch {self.epoch} of {name!r} was abandoned")
        unusable, dropped = self._skipped()
        self._plan.skip(unusable)  # an operator may have given it up since this epoch was begun
        where = self._partition(take), self.epoch, take.piece.shard
        if not is_indexed(self.claim.client, *where, record.end, record.entry_id):
            # the server came back older, and its writer sends the entry again, which then has another id
            self._plan.go_by(self._index(manifest, self._plan.begin_of(take), dropped), take)
            self._discard_asked()
            return
        if (total is None or take.piece.start < total) and not self._plan.is_unusable(take.piece):
            raise EpochIncomplete(
                f"epoch {self.epoch} of {name!r}: shard {take.piece.shard} offsets {record.first}-{record.end - 1} "
                f"(entry {record.entry_id.decode()}) are in the index and not in the stream, though group "
                f"{self.claim.who.group!r} has not acknowledged them: "
                f"`penstock audit {name} --repair SOURCE...` makes them again, `penstock bad drop {name} {self.epoch} "
                f"--group {self.claim.who.group}` goes on without",
                [(take.piece.shard, record.first, record.end)],
            )
        self._leave_out(take)  # acknowledged and removed: another sample pads the last step

    def _leave_out(self, take: RowRange) -> None:
        """Plan again from the first row that was to come from this entry."""
        self._plan.leave_out(take)
        self._discard_asked()

    def _discard_asked(self) -> None:
        """Take nothing of what is under way: it ends with its connection, and the next request opens another."""
        self._asked.clear()
        self._connection.close()

    # --- parts ---

    def _partition(self, take: RowRange) -> PartitionKeys:
        return self.claim.stream.partition_of(take.piece.shard)

    def _reconnect(self, error: ServerUnavailable) -> None:
        """Ask again for what was asked for: reading by id leaves no trace on the server."""
        self._plan.todo.extendleft(reversed(self._asked))
        self._asked.clear()
        self._connection.reopen(error)

    def _end_released(self, error: EpochNotFound) -> None:
        """End an epoch with what was there. An epoch that this group still holds goes if it was abandoned, or lost."""
        try:
            roster = load_roster(self.claim.client, self.claim.stream.partitions[0])
            self.loss = self.claim.loss_of(self.epoch)
        except PenstockError:
            self.queue.end(error)
            return
        if self.claim.who.group not in roster.groups:
            self.queue.end(error)
            return
        if not self.loss:
            self.claim.notify(
                f"epoch {self.epoch} of {self.claim.stream.name!r} was abandoned and released while it was read"
            )
        self.queue.end()
