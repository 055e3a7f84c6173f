"""Do one task: open what it needs once in each process, refuse what is no longer planned, report what was made.

This file knows no queue: `queue` has the job around it, and `fill` writes the samples. It also measures the time that a
task needs, and reports this worker's rate to the stream.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from penstock_common.errors import (
    BudgetFull,
    DurabilityLost,
    EpochAbandoned,
    PenstockError,
    SampleError,
    ServerUnavailable,
    ShardMismatch,
    SourceError,
    StreamConflict,
    Unauthorized,
)
from penstock_common.rate_meter import RateMeter
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import index_ends, index_records
from penstock_common.stream.manifest import ABANDONED, PRODUCED, Manifest, find_manifest, size_epoch
from penstock_common.stream.reported_rates import REPORT_EVERY_S, RateReporter, worker_field
from penstock_common.stream.streams import Stream, find_stream, is_released
from penstock_common.tuning import Tuning
from penstock_common.waiting import WAITING, Notify, Outage, to_stderr
from penstock_producer.jobs.fill import (
    BlockFiller,
    EpochSeed,
    FailureLimit,
    FillStopped,
    ItemFiller,
    TooManyBad,
    fill_batches,
    fill_samples,
)
from penstock_producer.jobs.plan import EpochOrder
from penstock_producer.jobs.spec_inference import first_good
from penstock_producer.jobs.task import ShardTask, job_id
from penstock_producer.jobs.watchdog import CrashRecord, CurrentSample, CurrentWait
from penstock_producer.sources.config import parse_config
from penstock_producer.sources.names import changed_files
from penstock_producer.sources.open import open_source
from penstock_producer.sources.protocol import AnySource, IterSource, can_make_again
from penstock_producer.sources.transform import Transform, seen_through
from penstock_producer.write.resources import unfinished_shards
from penstock_producer.write.shard import ShardWriter
from penstock_producer.write.writer import SHARD_SAMPLES, SPREAD_SAMPLES, Writer, WriterHooks

ROOM_WAIT_S = 30.0
"""The length of a lease. A job that waits for quota longer makes way for another."""


class TaskOutdated(PenstockError, RuntimeError):
    """The stream or epoch of a task is gone. Its job ends without having done anything."""


class LoginRefused(Unauthorized):
    """The streams' server refuses this worker's login. Another worker may have a better one."""


class SourceChanged(SourceError):
    """The worker's source is not the one with which the epoch was planned."""


class ShardLost(PenstockError, RuntimeError):
    """The server lost samples of a shard, or its epoch as a whole. The next run of the job makes them again."""

    def __init__(self, loss: PenstockError, committed: int) -> None:
        self.committed = committed
        """The samples of the shard that the server still has."""
        super().__init__(str(loss))


def connect_patiently(url: str, notify: Notify) -> Client:
    """Connect a worker. Its starter has reached the server, so one that is away now is waited for."""
    outage = Outage(notify, doing="connecting")
    while True:
        try:
            return connect(url)
        except ServerUnavailable as error:
            outage.bear(error)


class JobReport:
    """The report of one run of a job: what it made, how far it is, and what it waits for.

    A `TaskRunner` fills it in as it goes, so that it holds also when the run ends early. A queue inherits from it what
    it keeps of a job, and decides whether the job makes place for another.
    """

    def __init__(self, crashes: Mapping[int, CrashRecord] | None = None) -> None:
        self.crashes: Mapping[int, CrashRecord] = crashes or {}
        """Offset in the shard -> what the sample there did to workers that made it in earlier runs."""
        self.good = self.bad = 0
        self.nbytes = 0
        """The bytes of the whole shard, also those that other runs made. Known at the end."""

    def waits(self, text: str) -> None:
        """Report what the run waits for."""
        to_stderr(text)

    def is_at(self, committed: int) -> None:
        """Note, before each sample, how many samples of the shard are committed."""

    def made(self, good: int, bad: int) -> None:
        """Note at the run's end how many samples it made, and how many it could not make."""
        self.good, self.bad = good, bad

    def is_committed(self, nbytes: int) -> None:
        """Note that all samples are committed, and their bytes. The shard is completed after that."""
        self.nbytes = nbytes

    def should_yield(self) -> bool:
        """Return True to end a wait for quota."""
        return False


BUSY, ROOM, IDLE = "busy", "room", "idle"


class TaskRunner:
    """A runner of a worker's tasks. It keeps the writer and the source open from job to job.

    It measures its own rate, and reports it to the stream that it works for.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        room_wait_s: float = ROOM_WAIT_S,
        current: CurrentSample | None = None,
        waiting: CurrentWait | None = None,
        tell: Notify = lambda text: None,
    ) -> None:
        """Make a runner. ``tell`` is told what the report of a run is told, but no wait, which ``waiting`` notes."""
        self._url, self._should_stop, self._room_wait_s, self._tell_also = url, should_stop, room_wait_s, tell
        self._name = name
        self._writer: Writer | None = None
        self._source: tuple[str, AnySource] | None = None
        self._order: tuple[object, AnySource, EpochOrder] | None = None
        """The order of the last epoch: to sort a million samples takes a tenth of a second."""
        self._report = JobReport()
        self._current, self._waiting = current or CurrentSample(), waiting or CurrentWait()
        self._stream_name = ""
        """The stream of the task in hand."""
        self._waits_at: int | None = None
        """The committed samples at the first look after a wait was noted."""
        self.meter = RateMeter(BUSY)
        self._stream: Stream | None = None
        """The stream that it last worked for."""
        self._seen: int | None = None
        """The samples of the shard that were committed at the last look, or None before the first look of a run."""
        self._counted = 0
        """The samples of this run that the rate has counted."""
        self._ending = threading.Event()
        self._reporting: threading.Thread | None = None

    @property
    def is_stopping(self) -> bool:
        """Return whether this process was asked to end."""
        return self._should_stop()

    def produce(self, task: ShardTask, report: JobReport) -> None:
        """Write what is missing of the task's shard, and fill in the report.

        There is nothing to do if trainers have read the epoch and it was released. Then this job's last worker died, or
        was slow, after it completed the shard and before it said so.

        Raises TaskOutdated, SourceChanged, LoginRefused, ShardLost, TooManyBad, SpecMismatch, BudgetFull, FillStopped
        and what the writer raises.
        """
        self._report, self._stream_name, self._waits_at = report, task.stream, None
        self._seen, self._counted = None, 0
        self.meter.enter(BUSY)
        try:
            writer, manifest = self._planned(task)
            if manifest is None:
                return
            for file in changed_files():
                self._tell_also(f"{file} changed since this worker imported it: restart the worker to use the new code")
            self._current.open()  # not before: a worker that a server refuses has begun no shard
            WriterHooks(writer).stop_when(lambda: self._should_stop() or self._should_yield())
            source = self._open_source(task)
            watch = FailureLimit(
                self._should_stop, task.on_error, task.max_bad, manifest.samples, task.spec_is_declared,
                current=self._current, crashes=report.crashes, sample_limit_s=task.sample_limit_s,
            )  # fmt: skip
            run = self._run_items if source.unit == "item" else self._run_sized
            try:
                run(writer, manifest, task, source, watch)  # type: ignore[arg-type]
            finally:
                report.made(watch.good, watch.bad)
            self._waiting.end()
        except (BudgetFull, DurabilityLost) as error:
            self._waiting.explain(task.stream, f"{WAITING}{error}")  # the next job most likely waits for the same
            raise
        except (TooManyBad, SampleError, SourceChanged):
            raise
        except BaseException as error:
            try:
                lost = self._lost(task, error)
            finally:
                self.close()  # an open connection or file may be the cause
            if lost is not None:
                raise lost from error
            raise
        finally:
            if (rest := report.good + report.bad - self._counted) > 0:
                self.meter.enter(BUSY)
                self.meter.count(rest)

    def earlier_jobs(self, task: ShardTask) -> list[str]:
        """Return the ids of jobs whose shards come earlier and are not complete, in the order of admission."""
        if self._writer is None:
            return []
        unfinished = unfinished_shards(self._writer.client, self._writer.stream, task.epoch)
        return [job_id(manifest.id, s) for manifest, s in unfinished if (manifest.epoch, s) < (task.epoch, task.shard)]

    def close(self) -> None:
        """Close connections and files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._source is not None:
            self._source[1].close()
            self._source = self._order = None

    def _planned(self, task: ShardTask) -> tuple[Writer, Manifest | None]:
        """Return the writer and the manifest, if both are the planned ones.

        The manifest is None if the epoch was released.
        """
        writer = self._writer
        if writer is None or writer.stream.name != task.stream:
            try:
                client = connect_patiently(self._url, self._tell)
            except Unauthorized as error:
                raise LoginRefused(str(error)) from error
            try:
                found = find_stream(client, task.stream)
            finally:
                client.close()
            if found is None:
                raise TaskOutdated(
                    f"stream {task.stream!r} was deleted, or is on another server than this worker's: then give --url "
                    "as the producer has it"
                )
            if writer is not None:
                writer.close()
            writer = Writer(task.stream, url=self._url, tuning=Tuning(room_wait_s=self._room_wait_s, notify=self._tell))
            self._writer = writer
        else:
            found = find_stream(writer.client, task.stream)
        if found is None or found.id != task.stream_id or writer.stream.id != task.stream_id:
            self._writer = None
            writer.close()
            raise TaskOutdated(f"stream {task.stream!r} was deleted and made again since this job was planned")
        WriterHooks(writer).renew(found)
        manifest = find_manifest(writer.client, writer.stream, task.epoch)
        if manifest is None and is_released(writer.client, writer.stream, task.epoch):
            return writer, None
        if manifest is None or manifest.id != task.manifest_id:
            raise TaskOutdated(f"epoch {task.epoch} of {task.stream!r} is not the one this job was planned for")
        return writer, manifest

    def _lost(self, task: ShardTask, error: BaseException) -> ShardLost | None:
        """Return the error for a loss that the next run makes good, or None if this error is none."""
        if self._source is not None and not can_make_again(self._source[1]):
            return None
        if isinstance(error, ShardMismatch) and error.lost:
            return ShardLost(error, error.lost[0])
        if not isinstance(error, EpochAbandoned | TaskOutdated) or self._writer is None:
            return None
        client, stream = self._writer.client, self._writer.stream
        found = find_manifest(client, stream, task.epoch)  # the production opens a lost epoch again, or did so already
        is_there = found is not None and found.id == task.manifest_id and found.state != ABANDONED
        is_lost = found is None and not is_released(client, stream, task.epoch)
        return ShardLost(error, 0) if is_there or is_lost else None

    def _tell(self, text: str) -> None:
        if text.startswith(WAITING):  # each of many workers would repeat it, so its supervisor tells it
            self._waiting.explain(self._stream_name, text)
        else:
            self._tell_also(text)
        self._report.waits(text)  # afterwards: its server may be the one that is away

    def _at(self, committed: int) -> None:
        if committed == self._seen and self.meter.kind == BUSY:
            return  # true before nearly every sample
        self.meter.enter(BUSY)
        if self._seen is None:
            self._seen = committed
            self._begin_telling()
        elif committed > self._seen:
            self.meter.count(committed - self._seen)
            self._counted += committed - self._seen
            self._seen = committed
        self._report.is_at(committed)

    def _should_yield(self) -> bool:
        """Return whether to make way. It is asked only while the run waits for quota."""
        self.meter.enter(ROOM)
        self._waiting.begin(self._stream_name)
        return self._report.should_yield()

    def _look_at_wait(self, filled: ShardWriter | ItemFiller) -> None:
        """End the note of a wait once more samples are committed."""
        if not self._waiting.is_noted:
            return
        committed = filled.committed
        if self._waits_at is not None and committed > self._waits_at:
            self._waiting.end()
            self._waits_at = None
        elif self._waits_at is None:
            self._waits_at = committed

    def _open_source(self, task: ShardTask) -> AnySource:
        key = json.dumps(task.source, sort_keys=True)
        if self._source is not None and (self._source[0] != key or self._source[1].fingerprint != task.fingerprint):
            self._source[1].close()  # of another job, or its files changed since it was opened
            self._source = None
        if self._source is None:
            self._source = (key, open_source(parse_config(task.source)))
        source = self._source[1]
        if source.fingerprint != task.fingerprint:
            raise SourceChanged(
                "this worker's source differs from the one that was planned: the files changed meanwhile, its copy has "
                "other names, sizes or times, or the code of the dataset changed since this worker imported it; leave "
                "them alone while an epoch is made, restart `penstock worker` if code changed, and run the same "
                "command again for a new epoch"
            )
        return source

    def _order_of(self, task: ShardTask, source: Any, manifest: Manifest) -> EpochOrder:
        """Return the order of the task's epoch, the same for all of its shards. Raises StreamConflict."""
        wanted = (manifest.id, manifest.sizes, task.seed, task.shuffle)
        if self._order is not None and self._order[0] == wanted and self._order[1] is source:
            return self._order[2]
        order = EpochOrder(source, seed=task.seed, epoch=task.epoch, shuffle=task.shuffle, planned=manifest.sizes)
        if manifest.sizes != tuple(order.sizes):
            raise StreamConflict(f"epoch {task.epoch} of {task.stream!r} is cut otherwise than this source: it changed")
        self._order = wanted, source, order
        return order

    def _run_sized(
        self,
        writer: Writer,
        manifest: Manifest,
        task: ShardTask,
        source: Any,
        watch: FailureLimit,
    ) -> None:
        if manifest.state in (PRODUCED, ABANDONED) or task.shard in manifest.done:
            return
        if manifest.sizes is None:  # opening takes two steps, and a job of a lost epoch may come between them
            raise TaskOutdated(f"epoch {task.epoch} of {task.stream!r} is being opened again and has no sizes yet")
        order = self._order_of(task, source, manifest)
        items, seed = order.items(task.shard), EpochSeed(task.seed, task.epoch)
        if writer.stream.spec is None:
            WriterHooks(writer).require_spec(
                first_good(seen_through(source, task.block_transform), items, seed, task.shard, watch)
            )
        shard = WriterHooks(writer).open_shard(manifest, task.shard)
        is_all_ours = shard.position == 0
        try:
            self._at(shard.committed)

            def looked() -> bool:
                self._at(shard.committed)
                self._look_at_wait(shard)
                return self._should_stop()

            watch.stop_when(looked)
            if task.block_transform:
                transform = Transform.load(task.block_transform)
                BlockFiller(source, items, shard, task.shard, seed, watch, transform, task.block_samples).fill()
            else:
                fill = fill_batches if source.unit == "batch" else fill_samples
                fill(source, items, shard, task.shard, seed, watch)
            shard.commit_all()
            # other jobs have committed theirs: the last shard's job sees every bad sample before it ends the epoch
            watch.require_few(_bad_samples(writer, manifest), manifest.samples)
            self._report.is_committed(
                shard.bytes_written if is_all_ours else _committed_bytes(writer, manifest, task.shard)
            )
            shard.close()
        except FillStopped:
            shard.commit_all()  # keeps what was made; the worker interrupts this if there is no quota
            raise
        finally:
            shard.abort()

    def _run_items(
        self,
        writer: Writer,
        manifest: Manifest,
        task: ShardTask,
        source: IterSource,
        watch: FailureLimit,
    ) -> None:
        if manifest.state in (PRODUCED, ABANDONED):
            return

        def opened(number: int, like: Mapping[str, Any]) -> ShardWriter:
            WriterHooks(writer).require_spec(like)
            return WriterHooks(writer).open_shard(manifest, number)

        limit = SHARD_SAMPLES if len(writer.stream.partitions) == 1 else SPREAD_SAMPLES
        done = [manifest.done[n] for n in range(len(manifest.done))]
        is_begun = index_ends(writer.client, writer.stream, manifest.epoch, [len(done)])[len(done)] > 0
        current = WriterHooks(writer).open_shard(manifest, len(done)) if is_begun else None
        filler = ItemFiller(source, opened, limit, watch, done, current)
        skip = sum(done) + (current.position if current else 0)
        self._at(skip)

        def looked() -> bool:
            self._look_at_wait(filler)
            return self._should_stop()

        watch.stop_when(looked)
        if skip:
            self._tell(f"{skip} samples are committed; the iterator begins again and skips as many")
        try:
            filler.fill(EpochSeed(task.seed, task.epoch), skip)
            watch.require_few(_bad_samples(writer, manifest), skip + watch.good + watch.bad)
            self._report.is_committed(
                sum(_committed_bytes(writer, manifest, shard) for shard in range(len(filler.sizes) + 1))
            )
            filler.close()
            size_epoch(writer.client, writer.stream, manifest, filler.sizes)
        except FillStopped:
            filler.commit_all()
            raise
        finally:
            filler.abort()

    # --- its rate ---

    def idle(self) -> None:
        """Note that there is no job."""
        self._waiting.end()
        if self._stream is not None:
            self.meter.enter(IDLE)

    def leave(self) -> None:
        """Note that the worker ends, so that its rate is no longer reported."""
        self._ending.set()
        if self._reporting is not None:
            self._reporting.join(timeout=REPORT_EVERY_S)

    def _begin_telling(self) -> None:
        assert self._writer is not None
        self._stream = self._writer.stream
        if self._reporting is None:
            self._reporting = threading.Thread(target=self._report_on, name="penstock-rate", daemon=True)
            self._reporting.start()

    def _report_on(self) -> None:
        """Report on a connection of its own, because the writer's may wait for a server or be closed."""
        reporter: RateReporter | None = None
        client: Client | None = None
        while not self._ending.wait(REPORT_EVERY_S):
            stream = self._stream
            assert stream is not None
            try:
                client = client or connect(self._url)
            except PenstockError:
                continue  # a worker with a job will report it
            if reporter is None or reporter.stream.id != stream.id:
                if reporter is not None:
                    reporter.leave()
                reporter = RateReporter(client, stream, worker_field(self._name))
            reporter.report(self.meter)
        if reporter is not None:
            reporter.leave()
        if client is not None:
            client.close()


def _bad_samples(writer: Writer, manifest: Manifest) -> int:
    with writer.client.pipeline(transaction=False) as pipe:
        for partition in writer.stream.partitions:
            pipe.hlen(partition.quarantine(manifest.epoch))
        return sum(map(int, pipe.execute()))


def _committed_bytes(writer: Writer, manifest: Manifest, shard: int) -> int:
    records = index_records(writer.client, writer.stream.partition_of(shard), manifest.epoch, shard)
    return sum(record.nbytes for record in records)
