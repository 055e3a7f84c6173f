"""The producer's main loop: it opens epochs, has their shards made, and ends when all are produced or one failed.

Several productions run side by side for the parts of a split, and one may follow its trainers. `dispatch` has the jobs,
`fleet` the processes.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from socket import gethostname
from types import TracebackType
from typing import Any, Self

from penstock_common.errors import EpochFailed, PenstockError, ServerUnavailable, SourceError, StreamConflict
from penstock_common.printable import listed, printable, readable_bytes
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.directory import list_streams
from penstock_common.stream.events import await_event, last_event
from penstock_common.stream.groups.losses import COMMITTED, Loss, note_loss, utc
from penstock_common.stream.groups.roster import Roster, load_roster
from penstock_common.stream.manifest import (
    ABANDONED,
    PRODUCED,
    Manifest,
    abandon_epoch,
    find_manifest,
    retained_epochs,
)
from penstock_common.stream.removal.reconcile import ReconcileWindow, reopen_lost
from penstock_common.stream.reported_rates import RateReporter, worker_field
from penstock_common.stream.rights import WRITER, require_rights
from penstock_common.stream.streams import (
    Stream,
    find_stream,
    is_released,
    load_stream,
    read_counters,
    require_there,
    set_plan,
)
from penstock_common.waiting import LEAVE_S, Notify, Outage, to_stderr, told_if_long
from penstock_common.wire.spec import Spec
from penstock_producer.jobs.allowlist import PlannedTasks, names_code
from penstock_producer.jobs.dispatch import WORKER_SILENCE_S, Dispatcher, limit_patience
from penstock_producer.jobs.endless import EndlessProduction
from penstock_producer.jobs.fill import HOPELESS, EpochSeed, FailureLimit, bad_limit
from penstock_producer.jobs.fleet import Fleet, advise, usable_cores
from penstock_producer.jobs.plan import (
    EpochOrder,
    PlannedSource,
    ProductionPlan,
    begun_otherwise,
    find_epochs,
    ids_of_source,
    is_same,
    open_writer,
    unfinished_of_others,
)
from penstock_producer.jobs.progress import (
    EpochProgress,
    ProductionProgress,
    ProductionSummary,
    ProgressDetails,
    bad_reasons,
    look,
)
from penstock_producer.jobs.spec_inference import first_good, infer_spec
from penstock_producer.jobs.task import ShardTask
from penstock_producer.jobs.watchdog import WorkerDeath
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.generator import GAVE_NOTHING
from penstock_producer.sources.image_files import passed_over
from penstock_producer.sources.keras import KerasSource
from penstock_producer.sources.protocol import can_make_again
from penstock_producer.write.writer import WriterHooks

TICK_MS = 200
CARE_S = 5.0
"""The time between two checks for lost jobs."""
GATE_S = 0.5
"""The time between two questions whether trainers are far enough for the next epoch."""


class EpochStage(Enum):
    """The stage of an epoch in a production."""

    OPENING = auto()
    """Its jobs are being queued. Some may be in the queue already if this is interrupted."""
    IN_WORK = auto()
    FINISHED = auto()


@dataclass
class PlannedEpoch:
    """An epoch of this run: its manifest as this run opened it, its jobs, and the last look at it.

    Another epoch may have the number later.
    """

    manifest: Manifest
    tasks: list[ShardTask]
    seen: EpochProgress
    made_before: int = 0
    """The samples that earlier runs had committed."""
    stage: EpochStage = EpochStage.OPENING

    @classmethod
    def of(cls, manifest: Manifest, tasks: list[ShardTask], made_before: int) -> Self:
        """Return an epoch whose progress was not looked at yet."""
        return cls(manifest, tasks, EpochProgress(manifest.epoch, manifest.state, manifest.samples), made_before)

    def begin(self) -> None:
        """Count the epoch as in work: all its jobs are queued, or lost ones will be."""
        self.stage = EpochStage.IN_WORK

    def see(self, seen: EpochProgress) -> None:
        """Note a look at it. One that shows it produced is the last."""
        self.seen = seen
        if seen.state == PRODUCED:
            self.stage = EpochStage.FINISHED


class EpochGate:
    """Holds the next epoch of a plan back until trainers are far enough, if the plan follows them."""

    def __init__(self, plan: ProductionPlan, client: Client, stream: Stream) -> None:
        self._plan, self._client, self._stream = plan, client, stream
        self._asked_s = float("-inf")
        self.reason = ""
        """The reason why the next epoch is held back, or ''."""

    def is_open(self, epoch: int) -> bool:
        """Return whether this epoch may begin. An unfinished one may always continue."""
        if not self._plan.follow or epoch < read_counters(self._client, self._stream)[0]:
            return True
        if time.monotonic() - self._asked_s < GATE_S:
            return False
        unread = count_unread(self._client, self._stream)
        if unread < self._plan.ahead:
            self.reason = ""
            return True
        self._asked_s = time.monotonic()
        self.reason = f"trainers have {unread} epochs to read, and --ahead is {self._plan.ahead}"
        return False


class Production(AbstractContextManager["Production"]):
    """One run over a plan's epochs. Use it in a ``with`` block, and iterate over `run` to the end.

    ``workers`` local processes take part; 0 leaves all work to `penstock worker` elsewhere. Raises SourceError at once
    for a source that cannot be read.
    """

    def __init__(
        self,
        plan: ProductionPlan,
        options: WorkerOptions,
        *,
        workers: int,
        notify: Notify = to_stderr,
        planned_tasks: PlannedTasks | None = None,
        server_stays: bool = True,
    ) -> None:
        """Prepare a run.

        With ``planned_tasks``, workers of the caller learn the tasks, too; its own always do. ``server_stays`` is False
        if the server ends with this run, and its streams with it.
        """
        self._planned_tasks = planned_tasks or PlannedTasks()
        self._plan, self._notify, self._began = plan, notify, time.monotonic()
        self._server_stays = server_stays
        self._runs: dict[int, PlannedEpoch] = {}
        """The epochs that this run opened, by number."""
        has_own_workers = workers > 0 or planned_tasks is not None
        key = options.key if has_own_workers else None  # workers elsewhere know no key
        self._dispatcher = Dispatcher(options.queue_url, options.queue, notify, key)
        # Forked while this process has neither threads nor frameworks, so it takes milliseconds. Replacements come
        # later, and start in a new interpreter, unless only a fork has the objects they need.
        self._fleet = Fleet(
            replace(options, owner=os.getpid()),
            workers,
            restart="fork" if plan.source.kind == "local" else "spawn",
            on_death=self._on_death,
            planned_tasks=self._planned_tasks,
        )
        with ExitStack() as unfinished:
            unfinished.callback(self._dispatcher.close)
            unfinished.callback(self._fleet.stop)
            _hurry(unfinished, self._dispatcher.limit_patience)
            self._prepare(plan, options, workers, unfinished)
            unfinished.pop_all()

    def _prepare(self, plan: ProductionPlan, options: WorkerOptions, workers: int, unfinished: ExitStack) -> None:
        # workers were forked before, so they open it again (docs/decisions/0015)
        again = ", and each worker does that once more" if workers and plan.source.kind != "local" else ""
        with told_if_long(self._notify, f"the source of {plan.stream!r} is being opened{again}"):
            self._planned = PlannedSource(plan)
        unfinished.callback(self._planned.source.close)
        source, spec = self._planned.source, self._planned.transformed.spec
        if others := passed_over(source.info):
            self._notify(others)
        if source.unit == "item" and plan.shuffle:
            self._notify(
                f"samples of {plan.stream!r} come in the order in which the iterable gives them: only a source with a "
                "length is shuffled; Loader.shuffle(samples=N) mixes them as they are read, and --no-shuffle "
                "(shuffle=False) omits this line"
            )
        with connect(options.url) as client:
            if "split" in source.info and "name" in source.info:
                refuse_another_name(client, plan.stream, source.info)
            stream = find_stream(client, plan.stream)
        info, self._makes_stream = source.info, stream is None
        if stream is not None:
            info = with_classes_of(stream, info, takes_classes="classes" in type(plan.source).model_fields)
        is_inferred = plan.spec is None and spec is None and source.unit != "item"
        first = None
        if self._makes_stream and is_inferred:  # a stream that never gets a sample would keep its budget
            first = self._first_sample(plan.numbers[0] if plan.numbers else 0)
        self._writer = open_writer(plan, options.url, self._notify, spec=spec, info=info)
        unfinished.callback(self._writer.close)
        self._client, stream, fingerprint = self._writer.client, self._writer.stream, self._planned.fingerprint
        _hurry(unfinished, partial(limit_patience, self._client))
        self._window, self._gate = ReconcileWindow(self._client), EpochGate(plan, self._client, stream)
        if can_make_again(source):
            made = ids_of_source(self._client, stream, fingerprint, plan.seed)
            self._tell_reopened(reopen_lost(self._client, stream, made))
        self._todo, earlier = find_epochs(self._client, stream, fingerprint, plan)
        self._final_before: int | None = None
        """The end that was announced before this run announced its own."""
        self._has_announced = False
        """Whether this run announced an end."""
        self._tell_of_others(stream)
        self.epochs = tuple(self._todo)
        """The numbers of the epochs that this run produces."""
        if earlier is not None and plan.numbers is None:
            self._tell_of_earlier(stream, earlier)
        self._shard_samples = self._planned.shard_samples(earlier, workers or usable_cores())
        self._cared = time.monotonic()
        self._details = ProgressDetails(self._dispatcher, self._client, plan, options.queue)
        if stream.spec is None and source.unit != "item":
            WriterHooks(self._writer).require_spec(self._first_sample(self.epochs[0]) if first is None else first)

    def _tell_of_earlier(self, stream: Stream, earlier: Manifest) -> None:
        """Say which epochs another run has begun, and what becomes of the samples that it made."""
        going = f"going on with epoch{_ranges(self._todo)} of {stream.name!r}"
        if self._dispatcher.is_at_work(earlier.id):
            self._notify(
                f"{going}, of which another run made a part in the last {WORKER_SILENCE_S:.0f} s. If that run still "
                "lives, this one helps it and adds no epochs"
            )
            return
        kept = look(self._client, stream, earlier).done if earlier.epoch in self._todo else 0
        stays = (
            f". Its {kept:,} samples of epoch {earlier.epoch} stay as they are. If your code changed since, stop, and "
            f"`penstock epochs abandon {stream.name} {earlier.epoch}`: the next run makes a new epoch"
        )
        is_code = names_code(self._plan.source, self._plan.block_transform)
        self._notify(f"{going}, which an earlier run left unfinished{stays if kept and is_code else ''}")

    def _tell_of_others(self, stream: Stream) -> None:
        """Name the epochs that this run does not complete, because another source or seed began them.

        Raises StreamConflict if their production is at work, and will open an epoch that this run would open, too.
        """
        following, final, _ = read_counters(self._client, stream)
        # without a final number the other one is endless
        ahead = (epoch for epoch in self._todo if epoch >= following and (final is None or epoch < final))
        contested = next(ahead, None)
        for manifest in unfinished_of_others(self._client, stream, self._planned.fingerprint, self._plan.seed):
            done, epoch = sum(manifest.done.values()), manifest.epoch
            if contested is not None and self._dispatcher.is_at_work(manifest.id):
                raise StreamConflict(
                    f"another production is making epoch {epoch} of {stream.name!r}, and will make epoch {contested}: "
                    "wait for its end, stop it, or write another stream"
                )
            of = "" if manifest.samples is None else f" of {manifest.samples:,}"
            self._notify(
                f"epoch {epoch} of {stream.name!r} is unfinished, {done:,}{of} samples of whole shards, and began "
                f"{begun_otherwise(self._plan)}: `penstock epochs close {stream.name} {epoch}`"
            )

    @property
    def samples_per_epoch(self) -> int | None:
        """The samples of an epoch, or None if only reading the source can tell."""
        return self._planned.samples_per_epoch

    # --- going through it ---

    def run(self) -> Iterator[ProductionProgress]:
        """Yield the progress several times a second, until all epochs are produced.

        A server that goes away is waited for. If it does not come back in time, ServerUnavailable is raised, and
        another run continues where this one was. Raises EpochFailed after it has abandoned the epoch.
        """
        outage = Outage(self._notify, doing="producing")
        try:
            self._announce()
            while True:
                try:
                    event = last_event(self._client, self._writer.stream.keys)
                    self._open_epochs(self._plan.ahead)
                    progress = self._look()
                    yield progress
                    if not self._in_work() and not self._todo:
                        self._reopen_lost()  # a server may have lost a part of the last shard as that was completed
                        if not self._in_work():
                            return
                    self._check_failures(progress)
                    self._care()
                    await_event(self._client, self._writer.stream.keys, event, TICK_MS)
                    outage.over()
                except ServerUnavailable as error:  # for requests that the clients do not repeat themselves
                    outage.bear(error)
        except ServerUnavailable as error:
            raise advise(error) from error.__cause__
        except (EpochFailed, StreamConflict) as failure:
            try:
                if isinstance(failure, StreamConflict):
                    self._give_way()
                else:
                    self.abandon()
            except PenstockError as error:
                self._notify(f"what is unfinished could not be abandoned: {error}")
            self.tell_of_kept_budget()
            raise

    def tell_of_kept_budget(self) -> None:
        """Say how to give the budget back, if this run made the stream, completed no epoch of it, and leaves it."""
        if self._server_stays and self._makes_stream and not self._finished():
            budget, name = readable_bytes(self._writer.stream.budget_bytes), self._plan.stream
            self._notify(
                f"this run made stream {name!r}, which keeps its budget of {budget} for the next run; `penstock "
                f"delete {name}` gives it back"
            )

    def enqueue_all(self) -> None:
        """Open all epochs and queue all jobs for workers elsewhere. No process watches over them then."""
        self._announce()
        self._open_epochs(len(self._todo), is_gated=False)

    def _announce(self) -> None:
        """Tell trainers which epoch is the last, or that it is not known."""
        final, before = self._final, read_counters(self._client, self._writer.stream)[1]
        if final != before:
            self._final_before, self._has_announced = before, True
            set_plan(self._client, self._writer.stream, final)

    @property
    def _final(self) -> int | None:
        """The number behind the last epoch, or None if it is not known."""
        return None if self._plan.is_endless else self.epochs[-1] + 1

    def summary(self) -> ProductionSummary:
        """Return what was made, after `run`."""
        self._dispatcher.forget(self._live_jobs())
        reports, finished = self._dispatcher.reports(self._dispatcher.job_ids), self._finished()
        return ProductionSummary(
            stream=self._plan.stream,
            epochs=self.epochs,
            samples=sum(run.seen.done for run in finished),
            bad=sum(run.seen.bad for run in finished),
            nbytes=reports.nbytes,
            seconds=time.monotonic() - self._began,
            workers=tuple(sorted(reports.workers)),
            made_before=sum(run.made_before for run in finished),
        )

    def _give_way(self) -> None:
        """Leave the stream to the production that has the number of the next epoch, and abandon what is open here.

        A run of the same source that cut the epoch otherwise goes on with what is open.
        """
        taken = find_manifest(self._client, self._writer.stream, self._todo[0]) if self._todo else None
        if taken is None or is_same(taken, self._planned.fingerprint, self._plan.seed):
            return
        self._abandon_open()
        if self._has_announced and read_counters(self._client, self._writer.stream)[1] == self._final:
            set_plan(self._client, self._writer.stream, self._final_before)

    def abandon(self) -> None:
        """Declare that what is unfinished will not come, so that trainers end."""
        self._abandon_open()
        if not self._plan.is_endless:
            set_plan(self._client, self._writer.stream, self._todo[0] if self._todo else self._final)

    def _abandon_open(self) -> None:
        states = retained_epochs(self._client, self._writer.stream)
        for epoch, run in self._runs.items():
            if states.get(epoch) not in (PRODUCED, ABANDONED, None):
                abandon_epoch(self._client, self._writer.stream, epoch, run.manifest.id)

    def close(self) -> None:
        """End the workers, and remove unfinished jobs from the queue.

        What is committed stays; a later run continues.
        """
        jobs: set[str] = set()
        with ExitStack() as steps:  # each step is done whatever happens to the others; the last one comes first
            steps.callback(self._writer.close)
            steps.callback(self._planned.source.close)
            steps.callback(self._dispatcher.close)
            steps.callback(self._dispatcher.cancel, jobs)  # once more, because a worker that is stopped returns its own
            steps.callback(self._forget_jobs)
            steps.callback(self._fleet.stop)
            steps.callback(self._dispatcher.cancel, jobs)
            # also those of an epoch that an operator closed, and that nobody needs any more
            steps.callback(lambda: jobs.update(self._dispatcher.job_ids, self._live_jobs()))
            steps.callback(self._forget_jobs)

    def _forget_jobs(self) -> None:
        with suppress(ServerUnavailable):
            self._dispatcher.forget()

    def leave(self) -> None:
        """Do what `close` does, but leave the jobs in the queue."""
        self._runs.clear()
        self._dispatcher.job_ids.clear()
        self.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        patience_s = _patience_after(error)
        self._dispatcher.limit_patience(patience_s)
        limit_patience(self._client, patience_s)
        with suppress(PenstockError):  # the first reason is the one to report
            self.close()

    # --- opening ---

    def _first_sample(self, epoch: int) -> Mapping[str, Any] | Spec:
        """Return the first good sample of an epoch, or its spec.

        A broken transform shows at once, and workers need not agree on a spec.
        """
        source, plan, seed = self._planned.source, self._plan, EpochSeed(self._plan.seed, epoch)
        assert source.unit != "item"  # such a source is read by one worker
        items = EpochOrder(source, seed=plan.seed, epoch=epoch, shuffle=plan.shuffle).first(HOPELESS)
        if source.unit == "batch":  # a framework's, which may not survive a fork
            own = source.unseeded() if isinstance(source, KerasSource) else source
            return first_good(own, items, replace(seed, sets_globals=False), 0, FailureLimit(lambda: False))
        return infer_spec(self._planned.transformed, items, seed, plan.sample_limit_s, self._notify)

    def _on_death(self, death: WorkerDeath) -> None:
        self._dispatcher.return_jobs(death)
        if self._runs:  # else the stream may not be open, and no worker had a job of it
            RateReporter(self._client, self._writer.stream, worker_field(death.worker)).leave()

    # --- what a server lost ---

    def _reopen_lost(self) -> None:
        """Take up again what a server lost of the epochs of this run, for a while after another server came."""
        if not self._window.is_open() or not can_make_again(self._planned.source):
            return
        for run in self._finished():
            epoch = run.manifest.epoch
            manifest = self._find(epoch)
            if manifest is not None and manifest.sizes is not None and not manifest.is_ended:
                self._notify(f"the server lost the end of epoch {epoch} of {self._plan.stream!r}: making it again")
                self._take_up(manifest)
            elif manifest is None and not is_released(self._client, self._writer.stream, epoch):
                self._take_up(self._open_again(epoch))
        opened = {run.manifest.id for run in self._runs.values()}
        reopened = reopen_lost(self._client, self._writer.stream, opened)
        self._tell_reopened(reopened)
        for epoch in reopened:
            self._take_up(self._find(epoch))

    def _take_up(self, manifest: Manifest | None) -> None:
        """Have the shards made of an epoch that was produced before, unless it is gone or is being made."""
        if manifest is None or manifest.sizes is None or self._runs[manifest.epoch].stage is EpochStage.IN_WORK:
            return
        before = self._runs[manifest.epoch]
        run = PlannedEpoch.of(
            before.manifest, self._planned.tasks(self._writer.stream.id, manifest), before.made_before
        )
        run.begin()
        self._runs[manifest.epoch] = run
        self._dispatcher.track(run.tasks)

    def _open_again(self, epoch: int) -> Manifest | None:
        """Open an epoch again that the server lost as a whole. None if it cannot be made again, or its number is taken.

        Trainers learn again which epoch is the last.
        """
        stream = self._writer.stream
        if not can_make_again(self._planned.source) or find_manifest(self._client, stream, epoch) is not None:
            return None
        self._notify(f"the server lost epoch {epoch} of {stream.name!r} as a whole: making it again")
        manifest = WriterHooks(self._writer).open_again(self._runs[epoch].manifest)
        self._announce()
        return manifest

    def _tell_reopened(self, reopened: Mapping[int, list[int]]) -> None:
        for epoch, shards in reopened.items():
            name = self._plan.stream
            self._notify(f"a server lost a part of epoch {epoch} of {name!r}: making shard {listed(shards, 10)} again")

    def _open_epochs(self, ahead: int, *, is_gated: bool = True) -> None:
        stream = self._writer.stream
        while self._todo and len(self._in_work()) < ahead and (not is_gated or self._gate.is_open(self._todo[0])):
            epoch = self._todo[0]  # popped once all of it is done, because the server may go away before that
            earlier = find_manifest(self._client, stream, epoch)
            sizes = self._planned.shard_sizes(epoch, self._shard_samples, earlier)
            manifest = self._writer.epoch(
                epoch, seed=self._plan.seed, sizes=sizes, fingerprint=self._planned.fingerprint
            ).manifest
            made_before = 0 if earlier is None else look(self._client, stream, earlier).done
            run = PlannedEpoch.of(manifest, self._planned.tasks(stream.id, manifest), made_before)
            self._runs[epoch] = run
            for task in run.tasks[:1]:  # none if an operator ended the epoch just now
                self._planned_tasks.give(task)
            known = self._dispatcher.known()
            self._dispatcher.enqueue(t for t in run.tasks if t.shard not in manifest.done and t.job_id not in known)
            run.begin()
            self._dispatcher.track(run.tasks)
            self._todo.pop(0)
            self.epochs = tuple(sorted({*self.epochs, epoch}))
            if self._plan.is_endless and self._plan.numbers is None and not self._todo:
                self._todo.append(epoch + 1)

    # --- watching ---

    def _look(self) -> ProductionProgress:
        for run in self._in_work():
            run.see(self._look_at(run))
        begun = [run.seen for run in self._runs.values() if run.stage is not EpochStage.OPENING]
        each = self._planned.samples_per_epoch
        progress = ProductionProgress(
            epochs=tuple(sorted(begun, key=lambda seen: seen.epoch)),
            samples=None if each is None else each * len(self.epochs),
            pids=tuple(self._fleet.pids),
        )
        return self._details.explained(progress, self._writer.stream, self._live_jobs(), self._gate.reason)

    def _look_at(self, run: PlannedEpoch) -> EpochProgress:
        """Return how far an epoch in work is. Raises EpochFailed if it is gone."""
        stream, epoch = self._writer.stream, run.manifest.epoch
        manifest = self._find(epoch)
        if manifest is None:
            require_there(self._client, stream)
            if is_released(self._client, stream, epoch):  # trainers had read it before it was looked at again
                return replace(run.seen, state=PRODUCED, done=run.seen.samples or run.seen.done)
            manifest = self._open_again(epoch)
        if manifest is None or manifest.state == ABANDONED:
            raise self._gone(run)
        return look(self._client, stream, manifest, run.seen)

    def _gone(self, run: PlannedEpoch) -> EpochFailed:
        """Return the error for an epoch that cannot go on. What a server lost of it is noted."""
        stream, opened, seen, epoch = self._writer.stream, run.manifest, run.seen, run.manifest.epoch
        if find_manifest(self._client, stream, epoch) is not None or is_released(self._client, stream, epoch):
            return EpochFailed(f"epoch {epoch} of {stream.name!r} was abandoned or removed by someone else")
        at_ms = time.time_ns() // 1_000_000
        if seen.done:  # an iterator has one shard
            by = f"producer {gethostname()}-{os.getpid()}"
            note_loss(self._client, stream, Loss(epoch, opened.id, 0, 0, seen.done, seen.done, COMMITTED, by, at_ms))
        what = f"{seen.done} samples that it had confirmed (shard 0 offsets 0-{seen.done - 1})"
        return EpochFailed(
            f"the server {self._client.node_of(stream.keys.meta).where} lost epoch {epoch} of {stream.name!r} as a "
            f"whole, and with it {what if seen.done else 'no sample that it had confirmed'}, noticed at {utc(at_ms)}: "
            "an iterator cannot give the same samples again, so produce another epoch"
        )

    def _find(self, epoch: int) -> Manifest | None:
        """Return the manifest of an epoch in work, or None if it is gone, even if another epoch has its number."""
        found = find_manifest(self._client, self._writer.stream, epoch)
        return found if found is not None and found.id == self._runs[epoch].manifest.id else None

    def _in_work(self) -> list[PlannedEpoch]:
        return [run for run in self._runs.values() if run.stage is EpochStage.IN_WORK]

    def _finished(self) -> list[PlannedEpoch]:
        return [run for run in self._runs.values() if run.stage is EpochStage.FINISHED]

    def _live_jobs(self) -> list[str]:
        live = (run for run in self._runs.values() if run.stage is not EpochStage.FINISHED)
        return [task.job_id for run in live for task in run.tasks]

    def _check_failures(self, progress: ProductionProgress) -> None:
        planned = [task for run in self._in_work() for task in run.tasks]
        if self._planned_tasks.has_met_others():
            self._dispatcher.remove_forged(planned)
        # a failed run of a complete shard does no harm: its worker died before it could report
        failed = self._dispatcher.failure(planned)
        if failed:
            # the epoch stays open for a run with the right
            require_rights(self._client, WRITER, self._plan.stream)
            what, why = failed
            if self._planned.source.unit == "item" and GAVE_NOTHING not in why:
                why += (
                    "; the whole epoch is abandoned, with the samples that the iterable gave (`penstock produce "
                    "--endless` keeps them)"
                )
            raise EpochFailed(f"{what}: {why}")
        for seen in progress.epochs:
            limit = None if self._plan.on_error == "skip" else bad_limit(self._plan.max_bad, seen.samples)
            if limit is not None and seen.bad > limit:
                reasons = bad_reasons(self._client, self._writer.stream, seen.epoch, 1)
                raise EpochFailed(
                    f"epoch {seen.epoch} of {self._plan.stream!r}: {seen.bad} of {seen.samples or 'its'} samples are "
                    f"bad, --max-bad {self._plan.max_bad} allows {limit}; "
                    f"e.g. {reasons[0] if reasons else 'unknown'}"
                )

    def _care(self) -> None:
        self._fleet.poll()
        if time.monotonic() - self._cared < CARE_S:
            return
        self._cared = time.monotonic()
        self._dispatcher.clean()
        self._reopen_lost()
        self._dispatcher.forget(self._live_jobs())
        for run in self._in_work():
            known = self._dispatcher.known()
            manifest = self._find(run.manifest.epoch)
            if manifest is not None:
                self._dispatcher.requeue_lost((t for t in run.tasks if t.shard not in manifest.done), known)


def _patience_after(error: BaseException | None) -> float:
    """Return the time for which a cleanup after an error waits for a server. An outage was already waited for."""
    return 0.0 if isinstance(error, ServerUnavailable) else LEAVE_S


def _hurry(steps: ExitStack, limit: Callable[[float], None]) -> None:
    """Have an error limit the patience of the steps that were pushed before."""
    steps.push(lambda kind, error, at: limit(_patience_after(error)))


def refuse_another_name(client: Client, stream: str, info: Mapping[str, Any]) -> None:
    """Raise SourceError if another part of this split was made of a dataset of another name.

    The part of a sample depends on its name, ``module:attribute[12]``. Two names divide differently and share samples.
    """
    part, name = info["split"], info["name"]
    base = stream.removesuffix(part)
    for other in list_streams(client) if base.endswith(".") else []:
        if other == stream or not other.startswith(base):
            continue
        try:
            made = load_stream(client, other).info
        except PenstockError:  # damaged, or deleted since
            continue
        if made.get("split") == other.removeprefix(base) and made.get("name", name) != name:
            raise SourceError(
                f"{other!r} is a part of {made['name']}, {stream!r} would be one of {name}: a sample's part goes by "
                f"its dataset's name, so the two would share samples; make all parts of {made['name']}, with "
                f"--transform for the one to augment, or give each --stream without --split"
            )


SHOWN_CLASSES = 20
"""The most class names of a command in a message."""


def with_classes_of(stream: Stream, info: dict[str, Any], *, takes_classes: bool) -> dict[str, Any]:
    """Return the info of a source, with the class names that only earlier epochs of the stream have.

    Labels are numbers, and a stream has one list of their names. So all of its epochs number the classes alike.

    Args:
        stream: The stream.
        info: The info of the source. ``classes`` is tensor -> names in the order of their numbers.
        takes_classes: Whether the source has the option ``classes``.

    Raises:
        StreamConflict: A class has another number in the stream.
    """
    known, mine = stream.info.get("classes"), info.get("classes")
    if not isinstance(known, Mapping) or not isinstance(mine, Mapping):
        return info
    merged = {**known, **mine}
    for tensor, names in mine.items():
        if not isinstance(made := known.get(tensor), list):
            continue
        for number, (there, here) in enumerate(zip(made, names, strict=False)):
            if there != here:
                wanted = [*map(str, made), *(name for name in names if name not in made)]
                few = ",".join(wanted) if len(wanted) <= SHOWN_CLASSES else "NAMES, the stream's first,"
                keep = f"keep its numbers with --classes {shlex.quote(printable(few))}, or " if takes_classes else ""
                raise StreamConflict(
                    f"class {number} is {there!r} in stream {stream.name!r}, and {here!r} in this source, so the "
                    f"labels of its epochs would contradict each other: {keep}write another stream (--stream NAME)"
                )
        merged[tensor] = max(made, names, key=len)
    return {**info, "classes": merged}


def refuse_path(dataset: object) -> None:
    """Refuse a string, which has a length and items and is no dataset."""
    if isinstance(dataset, str | os.PathLike):
        raise SourceError(
            f"{str(dataset)!r} is a name, not a dataset: for a folder of images use `penstock produce images DIR`, "
            "for an import name `penstock produce dataset module:attribute`"
        )


def _ranges(epochs: list[int]) -> str:
    return f" {epochs[0]}" if len(epochs) == 1 else f"s {epochs[0]}-{epochs[-1]}"


def fewest_unread(epochs: Iterable[int], roster: Roster) -> int:
    """Return how many epochs the group that has read most has not acknowledged, with the one that it reads.

    The group that has read most must not starve for another's sake, and the budget limits what the others have not
    read. Without a group that holds data: all epochs.
    """
    there = list(epochs)
    unread = Counter(name for epoch in there for name in roster.unacknowledged_by(epoch))
    return min((unread[name] for name, group in roster.groups.items() if group.holds), default=len(there))


def count_unread(client: Client, stream: Stream) -> int:
    """Return `fewest_unread` of the epochs that exist now. Every group has read those that were released."""
    roster = load_roster(client, stream.partitions[0])
    epochs = [epoch for epoch, state in retained_epochs(client, stream).items() if state != ABANDONED]
    return fewest_unread(epochs, roster)


class SplitProduction(AbstractContextManager["SplitProduction"]):
    """The productions of a split's parts. Without a split it is one, named ''.

    Use it in a ``with`` block, and iterate over `run` to the end.
    """

    def __init__(
        self,
        plans: Mapping[str, ProductionPlan],
        options: WorkerOptions,
        *,
        workers: Mapping[str, int],
        notify: Notify = to_stderr,
        server_stays: bool = True,
    ) -> None:
        """Prepare the runs. ``server_stays`` is as in `Production`."""
        self._streams = {part: plan.stream for part, plan in plans.items()}
        self.parts: dict[str, Production | EndlessProduction] = {}
        """Name of the part -> its production."""
        with ExitStack() as unfinished:
            for part, plan in plans.items():
                own = replace(options, queue=f"{options.queue}.{part}") if part else options
                made: Production | EndlessProduction
                if getattr(plan.source, "endless", False):
                    made = EndlessProduction(plan, own, notify=notify)
                else:
                    made = Production(plan, own, workers=workers[part], notify=notify, server_stays=server_stays)
                unfinished.push(made)
                self.parts[part] = made
            self._stack = unfinished.pop_all()

    @property
    def samples_per_epoch(self) -> int | None:
        """The samples of an epoch, of all parts, or None if only reading the source can tell."""
        each = [production.samples_per_epoch for production in self.parts.values()]
        known = [samples for samples in each if samples is not None]
        return sum(known) if len(known) == len(each) else None

    def run(self) -> Iterator[tuple[str, ProductionProgress]]:
        """Yield each part's progress in turn, until all are produced. If one fails, the others are abandoned, too."""
        running = {part: production.run() for part, production in self.parts.items()}
        while running:
            for part in list(running):
                try:
                    look = next(running[part])
                except StopIteration:
                    del running[part]
                except EpochFailed:
                    self._abandon_but(part)
                    raise
                else:
                    yield part, look

    def _abandon_but(self, failed: str) -> None:
        """Abandon the other parts: their trainers would never hear that this one failed.

        The streams that they made are named, as the failed one is.
        """
        for part, production in self.parts.items():
            if part != failed:
                with suppress(PenstockError):
                    production.abandon()
                if isinstance(production, Production):
                    production.tell_of_kept_budget()

    def summaries(self) -> list[ProductionSummary]:
        """Return what was made, part by part, after `run`."""
        return [production.summary() for production in self.parts.values()]

    def enqueue_all(self) -> dict[str, list[int]]:
        """Return stream -> epochs that were opened and queued for workers elsewhere."""
        queued: dict[str, list[int]] = {}
        for part, production in self.parts.items():
            if isinstance(production, EndlessProduction):  # no other process has the iterable
                raise PenstockError("an endless feed is written by this command itself: leave --no-workers out")
            production.enqueue_all()
            queued[self._streams[part]] = list(production.epochs)
            production.leave()
        return queued

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)
