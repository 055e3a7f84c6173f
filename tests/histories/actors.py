"""The actors of a history: writers of a feed, workers of planned epochs, and trainers. Each is one life of a process.

They call what the packages call, in one thread.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from penstock_common.errors import PenstockError, ServerUnavailable
from penstock_common.segments.folder import INLINE
from penstock_common.stream.client import connect
from penstock_common.stream.groups.roster import Membership, RankOrder, rank_member
from penstock_common.stream.manifest import SIZED, Manifest, find_manifest, retained_epochs
from penstock_common.stream.streams import load_stream
from penstock_common.tuning import Tuning
from penstock_consumer.read.member import Member, join_as
from penstock_consumer.read.options import LoaderOptions
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.queue import PrefetchQueue, QueueStopped
from penstock_producer.write.writer import Writer, WriterHooks
from tests.histories.step import RANKS

NAME = "h"
"""The stream."""
SPEC = {"y": ("int64", ())}
BLOCK_BYTES = 16
"""Two samples."""
BUDGET_BYTES = 1 << 20
LEASE_S = 600.0
"""Only a death in the history ends a lease: the dead come back under their names."""
FINGERPRINT = "source"
PLANNED = 1_000_000
"""Values from here on are those of planned samples."""


def quiet(_: str) -> None:
    """Ignore a notice."""


def open_writer(url: str, durability: str = "memory", payload: str = INLINE) -> Writer:
    """Return a writer of the stream, which is made if it does not exist."""
    return Writer(
        NAME, url=url, spec=SPEC, partitions=2, budget_bytes=BUDGET_BYTES, payload=payload,
        tuning=Tuning(block_bytes=BLOCK_BYTES, durability=durability, notify=quiet),
    )  # fmt: skip


def planned_value(epoch: int, shard: int, offset: int) -> int:
    """Return the value of a planned sample, the same in every run of its job."""
    return PLANNED * (epoch + 1) + 1000 * shard + offset


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A sample whose commit was confirmed to its writer."""

    value: int
    epoch: int
    run: int
    """The run of the server."""


class Producer:
    """One life of a process that writes."""

    def __init__(self, url: str, durability: str, payload: str) -> None:
        self.writer, self._is_durable = open_writer(url, durability, payload), durability != "memory"
        self.unconfirmed: list[int] = []
        """The values that were written and not confirmed."""
        self.confirmed: list[Confirmed] = []
        self.ending = ""
        """The way it ended: ``died``, ``closed``, or the error that told its user; '' while it lives."""
        self.last_run = 0
        """The last run of the server that it met."""

    def write(self, values: count[int], samples: int, run: int) -> None:
        """Write to the feed, and note what it says to be committed."""
        for _ in range(samples):
            value = next(values)
            self.unconfirmed.append(value)
            self.writer.write({"y": value})
        known = len(self.unconfirmed) - self.writer.uncommitted
        if known and not self._is_durable:  # else a flush says whether a replica has it
            rest, self.unconfirmed = self.unconfirmed[known:], self.unconfirmed[:known]
            self.confirm(self.writer._feed_epoch, run)
            self.unconfirmed = rest

    def flush(self, run: int) -> None:
        """Commit what was written to the feed."""
        self.writer.flush()
        self.confirm(self.writer._feed_epoch, run)

    def fill(self) -> None:
        """Let the segment of the feed's shard be full: the next block goes to another, and the server hears of it."""
        if self.writer._feed is not None:
            self.writer._feed._committer._payloads.close()

    def confirm(self, epoch: int, run: int) -> None:
        """Note that everything written is committed."""
        self.last_run = run
        self.confirmed += [Confirmed(value, epoch, run) for value in self.unconfirmed]
        self.unconfirmed.clear()

    def close(self, run: int) -> None:
        """End the feed's epoch, and the process."""
        has_feed = self.writer._feed is not None
        self.writer.close()
        if has_feed:
            self.confirm(self.writer._feed_epoch, run)
        self.ending = "closed"

    def plan(self, seed: int, sizes: tuple[int, ...], epoch: int | None = None) -> None:
        """Open the next epoch, or this one, with planned shards."""
        self.writer.epoch(epoch, seed=seed, sizes=sizes, fingerprint=FINGERPRINT)

    def run_job(self, choice: int, run: int) -> bool:
        """Run the job of an unfinished shard, or half of it. Return False if there is none."""
        stream = load_stream(self.writer.client, NAME)
        for epoch, state in retained_epochs(self.writer.client, stream).items():
            manifest = find_manifest(self.writer.client, stream, epoch) if state in ("open", SIZED) else None
            if manifest is None or manifest.state != SIZED or manifest.sizes is None:
                continue
            left = [shard for shard in manifest.shards() if shard not in manifest.done]
            if left:
                self._run_shard(manifest, left[choice % len(left)], run, is_half=choice >= 2)
                return True
        return False

    def _run_shard(self, manifest: Manifest, number: int, run: int, *, is_half: bool) -> None:
        shard = WriterHooks(self.writer).open_shard(manifest, number)
        size = manifest.shard_size(number)
        before = self.unconfirmed[:]
        self.unconfirmed.clear()
        try:
            while shard.position < (size + 1) // 2 if is_half else shard.position < size:
                value = planned_value(manifest.epoch, number, shard.position)
                self.unconfirmed.append(value)
                shard.write({"y": value})
            if is_half:
                shard.commit_all()
            else:
                shard.close()
            self.confirm(manifest.epoch, run)
        finally:
            self.unconfirmed = before
            if is_half:
                shard.abort()

    @property
    def partition(self) -> int | None:
        """Return the partition to which its connection for data leads, or None."""
        feed = self.writer._feed
        return None if feed is None else feed._committer._target.partition.number

    def was_gone_by(self, run: int) -> bool:
        """Return whether it ended without meeting this run of the server."""
        return self.last_run < run

    def die(self) -> None:
        """Close all sockets without a word."""
        self.ending = self.ending or "died"
        if self.writer._feed is not None:
            self.writer._feed.abort()
        self.writer._resources.close()
        self.writer.client.connection_pool.disconnect()


class StepQueue(PrefetchQueue):
    """A prefetch queue of a reader that runs in the trainer's thread, and ends once nothing more comes."""

    def __init__(self, patience: int) -> None:
        """``patience`` is the number of looks that bring nothing before the reader ends."""
        super().__init__(1 << 30)
        self.taken: list[Batch] = []
        self.error: BaseException | None = None
        self.was_stopped = False
        self._patience, self._vain = patience, 0

    def put(self, batch: Batch) -> None:
        """Take a batch at once."""
        self.taken.append(batch)
        self._vain = 0

    def wait_for_space(self, pending_bytes: int, timeout_s: float, times: object = None) -> bool:
        """There is always space, until the patience ends."""
        if self.is_stopped:
            raise QueueStopped
        return True

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Every batch was taken."""
        return True

    @property
    def is_stopped(self) -> bool:
        """Return whether the patience has ended."""
        self._vain += 1
        self.was_stopped = self.was_stopped or self._vain > self._patience
        return self.was_stopped

    def end(self, error: BaseException | None = None) -> None:
        """Note how the reader ended. A loop that has stopped its reader does not hear that the server is away."""
        if not (self.was_stopped and isinstance(error, ServerUnavailable)):
            self.error = error


class Trainer:
    """One life of a member of a shared group, or of a rank of an ordered one."""

    def __init__(self, url: str, name: str, incarnation: str, start: str = "resume") -> None:
        self.group, self.name, self.ending = name[0], name, ""
        self.client = connect(url, bears_outages=quiet)
        self.stream = load_stream(self.client, NAME)
        order = RankOrder(RANKS.index(name), len(RANKS), 1) if name in RANKS else None
        member = name if order is None else rank_member(order.rank)
        who = Membership(self.stream, self.group, member, incarnation, order)
        options = LoaderOptions(start, 1, 1 << 20, LEASE_S, quiet, order=order)
        try:
            self.member: Member = join_as(self.client, who, options)
        except BaseException:
            self.client.connection_pool.disconnect()
            raise
        self.held: list[Batch] = []
        """The batches that were given to the training and not acknowledged."""
        self.passed = -1

    def read(self) -> list[Batch]:
        """Read what there is of the next epoch, and return it."""
        member = self.member
        member.claim.attend()  # as a loop does that waits for a batch
        epoch = member.next_epoch()
        if epoch is None:
            return []
        manifest = find_manifest(self.client, self.stream, epoch)
        queue = StepQueue(patience=30 if manifest is not None and manifest.is_ended else 3)
        member.heartbeat.read_epoch(epoch)
        reader = member._reader_of(epoch, queue)
        reader.run()
        found = [batch for batch in queue.taken if batch.without_lost() is not None]
        self.held += found
        if queue.error is not None:
            raise queue.error
        if reader.loss:
            member.claim.forget(epoch)
        elif not queue.was_stopped:
            member.passed(epoch)
            member._read_again(member.claim.take_returned())
            member.claim.unclosed.add(epoch)
        return found

    def acknowledge(self, number: int) -> None:
        """Acknowledge what is held: all, the first, or the last."""
        chosen = [self.held[:], self.held[:1], self.held[-1:]][number]
        for batch in chosen:
            self.held.remove(batch)
            self.member.claim.acknowledge(batch)

    def close_epochs(self) -> None:
        """Close what the group has acknowledged."""
        claim = self.member.claim
        for epoch in sorted(claim.unclosed):
            claim.close_epochs(epoch)
        if claim.unclosed:
            self.member.take_up(max(claim.unclosed))

    def beat(self) -> None:
        """Give one heartbeat, and do what the thread does behind it."""
        for one in self.member.heartbeat._each:
            try:
                one._beat()
            finally:
                one._compare_losses()
            one._after_beat()

    def leave(self) -> None:
        """Acknowledge what is held, and leave the group."""
        self.acknowledge(0)
        self.member.end(1, 1)
        self.ending = "closed"
        self.client.connection_pool.disconnect()

    def die(self) -> None:
        """Close all sockets without a word."""
        self.ending = self.ending or "died"
        with suppress(PenstockError):
            self.member.claim.close()
        self.client.connection_pool.disconnect()
