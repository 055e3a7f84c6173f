"""A watch of a folder: complete files become epochs, each file in one of them, also after a restart.

A pure rule here decides which files are complete. The server knows which are taken
(``stream.watched_files``). `production` makes an epoch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType

from penstock_common.errors import EpochNotFound, PenstockError, ServerUnavailable, SourceError, StreamConflict
from penstock_common.printable import listed
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import PRODUCED, abandon_epoch, find_manifest, take_number
from penstock_common.stream.streams import Stream, find_stream
from penstock_common.stream.watched_files import load_watched, note_made, take_files
from penstock_common.waiting import Notify, Wait, to_stderr
from penstock_common.wire.spec import Spec, TensorSpec
from penstock_producer.jobs.allowlist import PlannedTasks
from penstock_producer.jobs.dispatch import Dispatcher
from penstock_producer.jobs.fleet import TICK_S, Fleet
from penstock_producer.jobs.plan import ProductionPlan, open_writer
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.progress import ProductionProgress
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import ImagesConfig
from penstock_producer.sources.files import SourceFile, shown
from penstock_producer.sources.image_files import images_below

WHOLE_AFTER_S = 3.0
"""A file is complete when its size and time have not changed for this long. A file that is written with longer pauses
should be written elsewhere, or under a hidden name, and then be renamed."""
EMPTY_AFTER_S = 60.0
"""A file that is empty for this long is named, because its program may have failed."""
LIST_EVERY_S = 1.0
"""The time between two listings of the folder. A large folder is listed so rarely that it takes a tenth of the time."""
MOST_FILES = 10_000
"""The most files in one epoch, because each of its jobs names them all."""


class FileSightings:
    """A pure rule for which files are complete: those that look alike for a while.

    The caller passes the files and the time.
    """

    def __init__(self, whole_after_s: float = WHOLE_AFTER_S) -> None:
        self._whole_after_s = whole_after_s
        self._since: dict[SourceFile, float] = {}

    def whole(self, now_s: float, files: Iterable[SourceFile]) -> list[SourceFile]:
        """Return those of ``files``, all that exist now, that have not changed for long enough.

        Empty ones are never complete.
        """
        self._since = {file: self._since.get(file, now_s) for file in files}
        return [file for file, since in self._since.items() if file.size and now_s - since >= self._whole_after_s]

    def empty(self, now_s: float, after_s: float) -> list[SourceFile]:
        """Return those of the files that were last given to `whole` that have been empty for ``after_s``."""
        return [file for file, since in self._since.items() if not file.size and now_s - since >= after_s]


def require_fitting_size(plan: ProductionPlan, stream: Stream, spec: Spec) -> None:
    """Raise StreamConflict if no image could fit the stream's spec.

    Each file would be taken, and be a bad sample for good. Only what the options fix is compared. A transform may
    change it, so nothing is known of its samples.
    """
    from penstock_producer.sources.decode import Decoder  # Pillow is an extra

    if plan.spec is not None and (declared := Spec.of(plan.spec)) != spec:
        raise StreamConflict(
            f"stream {stream.name!r} holds samples of another spec, ({spec}), found ({declared}) in --spec: leave "
            f"--spec out, or write to another stream (--stream NAME)"
        )
    config = plan.source
    assert isinstance(config, ImagesConfig)
    if config.transform or plan.block_transform:
        return
    decoder = Decoder(config)
    shape = (None, None, decoder.channels) if decoder.shape is None else decoder.shape
    found = TensorSpec("x", decoder.dtype, shape)
    known = next((tensor for tensor in spec if tensor.name == "x"), None)
    if known is None or not _may_fit(found, known):
        raise StreamConflict(
            f"stream {stream.name!r} holds samples of ({spec}), but with these options each image is ({found}), so no "
            f"file would fit: give the --resize, --crop and --mode of the stream, or write to another stream "
            f"(--stream NAME)"
        )


def _may_fit(found: TensorSpec, known: TensorSpec) -> bool:
    """Return whether some samples may fit both. A size that is None may be any."""
    if (found.dtype, len(found.shape)) != (known.dtype, len(known.shape)):
        return False
    return all(
        one is None or other is None or one == other for one, other in zip(found.shape, known.shape, strict=True)
    )


SHOWN_EMPTY = 3
"""The most empty files that one line names."""


def _named(paths: list[str]) -> str:
    """Return the first of some paths, and how many there are beyond them."""
    return listed([shown(path) for path in paths], SHOWN_EMPTY)


@dataclass(frozen=True)
class FileBatch:
    """The files of one epoch."""

    epoch: int
    files: tuple[str, ...]
    manifest_id: str | None = None
    """The id of the epoch's manifest, if an earlier watch had opened it."""


class FolderWatch(AbstractContextManager["FolderWatch"]):
    """A running watch. Use it in a ``with`` block, and iterate over `run`. It ends only after ``epochs``, if given.

    Files in folders that are no class yet when the watch of a stream begins are left out and reported: their number
    would change what the others mean. Raises StreamConflict if no image could fit the stream's spec.
    """

    def __init__(
        self,
        plan: ProductionPlan,
        options: WorkerOptions,
        *,
        workers: int,
        epochs: int | None = None,
        notify: Notify = to_stderr,
        whole_after_s: float = WHOLE_AFTER_S,
    ) -> None:
        assert isinstance(plan.source, ImagesConfig)
        self._plan, self._options, self._config, self._notify = plan, options, plan.source, notify
        self._left, self.epochs, self.files = epochs, 0, 0
        self._sightings = FileSightings(whole_after_s)
        self._reported: set[str] = set()
        self._whole: dict[str, SourceFile] = {}
        """The files that may be taken now, by path."""
        self._as_taken: dict[str, SourceFile] = {}
        """The files that this watch took, as they were then, until one was found changed."""
        self._absence: Wait | None = None
        """The wait for the folder, while it is not there."""
        self._folders: tuple[str, ...] = ()
        """The sub-folders that hold images now."""
        images_below(self._config.path)  # raises for a missing folder before anything is made
        self._dispatcher = Dispatcher(options.queue_url, options.queue, notify)
        self._planned_tasks = PlannedTasks()
        self._fleet = Fleet(
            replace(options, owner=os.getpid()),
            workers,
            restart="spawn",
            on_death=self._dispatcher.return_jobs,
            planned_tasks=self._planned_tasks,
        )
        try:
            self._client: Client = connect(options.url, bears_outages=notify)
            self._stream = self._open_stream()
            if self._stream.spec is not None:
                require_fitting_size(plan, self._stream, self._stream.spec)
            self._watched = load_watched(self._client, self._stream)
        except BaseException:
            self._fleet.stop()
            self._dispatcher.close()
            raise

    def _open_stream(self) -> Stream:
        plan = self._plan
        found = find_stream(self._client, plan.stream)
        if found is not None:
            return found
        with open_writer(plan, self._options.url, self._notify) as writer:
            return writer.stream

    def run(self) -> Iterator[ProductionProgress | None]:
        """Yield the progress of the epoch in work, several times a second, or None while there is none."""
        for due in [self._due(epoch) for epoch in self._watched.due]:
            yield from self._make(due)
        looked_s, pause_s = float("-inf"), LIST_EVERY_S
        while self._left is None or self.epochs < self._left:
            self._fleet.poll()
            began = time.monotonic()
            if began - looked_s >= pause_s:
                new = self._new_files()
                looked_s = time.monotonic()
                pause_s = max(LIST_EVERY_S, 10 * (looked_s - began))
                if new and (batch := self._take(new[:MOST_FILES])) is not None:
                    yield from self._make(batch)
                    looked_s = float("-inf")
                    continue
            yield None
            time.sleep(TICK_S)

    # --- files ---

    def _new_files(self) -> list[str]:
        known = self._watched.epochs
        try:
            there, others = images_below(self._config.path)
        except SourceError:  # it was there at the start: a mount may be away for a while
            path = shown(self._config.path)
            self._absence = self._absence or Wait(self._notify)
            self._absence.because("folder", lambda: f"the watched folder {path} is not there: mount or make it again")
            return []
        self._absence = None
        for suffix in others:
            self._tell_once(suffix, f"files ending in {shown(suffix)} are passed over: they are not read as images")
        self._folders = tuple(sorted({file.path.partition("/")[0] for file in there if "/" in file.path}))
        fresh = [file for file in there if file.path not in known and self._is_wanted(file.path)]
        now_s = time.monotonic()
        self._whole = {file.path: file for file in self._sightings.whole(now_s, fresh)}
        self._tell_of_changed(there)
        self._tell_of_empty(sorted(file.path for file in self._sightings.empty(now_s, EMPTY_AFTER_S)))
        return sorted(self._whole)

    def _tell_of_changed(self, there: Iterable[SourceFile]) -> None:
        """Name the first file that changed after this watch took it."""
        changed = next((file for file in there if self._as_taken.get(file.path, file) != file), None)
        if changed is not None:
            self._as_taken.clear()
            self._tell_once(
                "changed", f"{shown(changed.path)} was changed after epoch {self._watched.epochs[changed.path]} took "
                "it, and is not read again, nor is any other file: give a new file a name of its own"
            )  # fmt: skip

    def _tell_of_empty(self, paths: list[str]) -> None:
        """Name each path once, on one line for all that are new."""
        new = [path for path in paths if path not in self._reported]
        if new:
            self._reported.update(new)
            what, it = (f"{shown(new[0])} has", "it is") if len(new) == 1 else (f"{_named(new)} have", "each is")
            self._notify(f"{what} been empty for {EMPTY_AFTER_S:g} s: {it} taken once it has content")

    def _is_wanted(self, path: str) -> bool:
        try:
            path.encode()
        except UnicodeEncodeError:
            self._tell_once("names that are no UTF-8", "some files have names that are no UTF-8: rename them")
            return False
        if self._config.label:
            return True
        classes = self._classes
        folder, slash, _ = path.partition("/")
        if (folder in classes) if slash and classes else not (slash or classes):
            return True
        where = f"folder {folder}" if slash else "the folder itself"
        known = f"classes {', '.join(classes)}" if classes else "no classes"
        self._tell_once(where, f"images in {where} are left out: stream {self._plan.stream!r} has {known}")
        return False

    def _tell_once(self, what: str, text: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            self._notify(text)

    @property
    def _classes(self) -> tuple[str, ...]:
        """Return the stream's classes, once its first epoch has fixed them, otherwise the sub-folders. () if there are
        none.
        """
        if self._config.classes is not None:
            return self._config.classes
        info = self._stream.info
        if "classes" in info:
            return tuple(info["classes"].get("y", ()))
        return () if self._config.label else self._folders

    def _take(self, files: list[str]) -> FileBatch | None:
        """Claim these files on the server, before anything is made of them."""
        batch = FileBatch(take_number(self._client, self._stream), tuple(files))
        if not take_files(self._client, self._stream, batch.epoch, batch.files):
            self._watched = load_watched(self._client, self._stream)  # another watcher was faster
            return None
        self._watched.epochs.update(dict.fromkeys(batch.files, batch.epoch))
        if "changed" not in self._reported:
            self._as_taken.update((path, self._whole[path]) for path in batch.files)
        return batch

    def _due(self, epoch: int) -> FileBatch:
        manifest = find_manifest(self._client, self._stream, epoch)
        return FileBatch(epoch, self._watched.files(epoch), None if manifest is None else manifest.id)

    # --- epochs ---

    def _make(self, batch: FileBatch) -> Iterator[ProductionProgress]:
        """Make one epoch. What cannot be made at all is reported and left: the watch continues."""
        try:
            with Production(
                self._plan_of(batch), self._options, workers=0, notify=self._notify, planned_tasks=self._planned_tasks
            ) as production:
                try:
                    for look in production.run():
                        self._fleet.poll()
                        yield replace(look, pids=tuple(self._fleet.pids))
                except PenstockError as error:
                    if not isinstance(error, ServerUnavailable | EpochNotFound):
                        production.abandon()
                    raise
        except ServerUnavailable:
            raise
        except EpochNotFound:
            pass  # it was made, read by all groups and released, before an earlier watcher could note that
        except PenstockError as error:
            self._give_up(batch, error)
        self.epochs, self.files = self.epochs + 1, self.files + len(batch.files)  # before any reader sees it noted
        note_made(self._client, self._stream, batch.epoch)
        self._stream = find_stream(self._client, self._plan.stream) or self._stream

    def _plan_of(self, batch: FileBatch) -> ProductionPlan:
        spec = self._plan.spec
        if spec is None and self._stream.spec is not None:
            spec = {name: tuple(tensor) for name, tensor in self._stream.spec.as_json().items()}
        config = self._config.model_copy(update={"files": batch.files, "classes": self._classes or None})
        update: Mapping[str, object] = {
            "source": config, "spec": spec, "numbers": (batch.epoch,), "is_endless": True, "epochs": 1,
        }  # fmt: skip
        return self._plan.model_copy(update=dict(update))

    def _give_up(self, batch: FileBatch, error: Exception) -> None:
        count = len(batch.files)
        self._notify(f"epoch {batch.epoch} ({count} file{'s' if count > 1 else ''}) cannot be made: {error}")
        manifest = find_manifest(self._client, self._stream, batch.epoch)
        if manifest is not None and manifest.id == batch.manifest_id and manifest.state != PRODUCED:
            abandon_epoch(self._client, self._stream, batch.epoch, manifest.id)

    # --- the end ---

    def close(self) -> None:
        """End the workers. What is committed stays; the same command continues from there."""
        self._dispatcher.limit_patience(0)
        self._fleet.stop()
        self._dispatcher.close()
        self._client.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
