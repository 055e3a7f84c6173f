"""The Writer: the only way by which samples enter a stream. It opens streams, epochs, shards and the endless feed.

``shard`` packs samples into blocks, and ``commit`` appends them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, NoReturn, TypeVar

from penstock_common.errors import EpochNotFound, PenstockError, ServerUnavailable, ShardMismatch, SpecMismatch
from penstock_common.hints import (
    an,
    answering,
    callable_of,
    explained,
    require_json,
    require_one_sample,
    seconds,
    whole,
)
from penstock_common.settings import Settings
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.feeds import finish_feed_shard, is_sealed, join_feed, retake_shard
from penstock_common.stream.keys import checked_name
from penstock_common.stream.manifest import (
    Manifest,
    abandon_epoch,
    finish_shard,
    load_manifest,
    open_epoch,
    reserve_shard,
    size_epoch,
)
from penstock_common.stream.rights import WRITER, require_rights
from penstock_common.stream.servers.budgets import admit_stream
from penstock_common.stream.servers.confirmed import Confirmer
from penstock_common.stream.servers.durability import Durability, make_safe, require_durable
from penstock_common.stream.servers.suitability import largest_block, require_takes_blocks
from penstock_common.stream.streams import Stream, create_stream, find_stream, fix_spec, load_stream
from penstock_common.tuning import Tuning, chosen, takes_old_names, tuning_of
from penstock_common.waiting import to_stderr
from penstock_common.wire.compression import Compression
from penstock_common.wire.spec import Spec, SpecLike, flattened
from penstock_producer.write.cleaner import CleanupTimer
from penstock_producer.write.commit import Committer
from penstock_producer.write.payloads import prepare_folder, require_capacity
from penstock_producer.write.reserve import Reservation
from penstock_producer.write.resources import SharedResources
from penstock_producer.write.retention import parse_policy
from penstock_producer.write.shard import ShardSlot, ShardWriter, require_own, two_threads
from penstock_producer.write.target import ShardTarget

SHARD_SAMPLES = 1 << 20
"""The most samples of a shard. With one partition, an unplanned epoch needs no second shard."""
SPREAD_SAMPLES = 1 << 12
"""With several partitions, an unplanned epoch changes its shard, and so its partition, after this many samples."""
FEED_SHARE = 1 / 8
"""An endless feed starts a new epoch after this share of the budget, so that old epochs can be released."""
SEAL_CHECK = 64
SEAL_CHECK_S = 1.0
"""A feed checks after this many samples or seconds, once a block at most, whether another writer sealed its epoch."""
ROWS = (
    "; if its {0} rows are {0} samples, `penstock delete` the stream and write them with write_batch(), "
    "or produce them with --batched"
)
"""The notice on a first sample that looks like a batch."""


Answer = TypeVar("Answer")


@answering
class Writer:
    """A writer of samples: ``with writer.epoch() as epoch: epoch.write(sample)``, or ``write`` for a feed without end.

    Arrays may be reused as soon as a write returns. A writer belongs to one thread.

    Example:
        >>> with penstock.Writer("train") as writer, writer.epoch() as epoch:
        ...     epoch.write({"x": image, "y": 3})
    """

    @takes_old_names
    @explained
    def __init__(
        self,
        stream: str,
        *,
        url: str | None = None,
        spec: SpecLike | Spec | None = None,
        partitions: int | None = None,
        budget_bytes: int | None = None,
        retention: str | None = None,
        payload: str | None = None,
        info: Mapping[str, Any] | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        """Open the stream, and make it if it does not exist.

        For an existing stream, None keeps its value. ``budget_bytes``, ``retention`` and the tuning's ``durability``
        and ``compression`` change those of an existing stream. A notice tells that the budget has changed.

        Args:
            stream: the stream's name.
            url: the server's address. None means PENSTOCK_URL, else this user's own server on this host.
            spec: the tensors of a sample. None means that the first sample decides.
            partitions: the number of partitions of a new stream.
            budget_bytes: the payload bytes that the stream may hold. For a new stream None means 1 GiB, or half of what
                the other streams leave of the server's maxmemory if that is less.
            retention: which acknowledged epochs are kept: ``budget``, ``epochs:3``, ``time:24h`` or ``bytes:500mb``.
            payload: where payloads are, which cannot change later: ``inline``, or ``segments:/dev/shm/penstock``, a
                folder that all readers see.
            info: facts about the stream that JSON can hold, for its readers.
            tuning: rarely changed options: block_bytes, checksum, compression, durability, room_wait_s,
                notify. See `Tuning`.

        Raises:
            ServerUnavailable: the server does not answer.
            ServerUnsuitable: the server cannot keep the stream's promises, such as its durability.
            BudgetRefused: the server has not enough memory for the budget.
            BadOption: the budget is too small for one sample.
            StreamConflict: the stream exists with another spec or other partitions.
            MissingExtra: the package of a codec is not installed.
        """
        tuning = tuning_of("Writer", tuning)
        block_bytes, room_wait_s, notify = tuning.block_bytes, tuning.room_wait_s, chosen(tuning.notify, to_stderr)
        for name, value in (("partitions", partitions), ("budget_bytes", budget_bytes), ("block_bytes", block_bytes)):
            if value is not None:
                whole(name, value)
        if room_wait_s is not None:
            seconds("room_wait_s", room_wait_s)
        callable_of("notify", notify, "print")
        require_json("info", info)
        settings = Settings.from_environment()
        self._client: Client = connect(url or settings.url, bears_outages=notify)
        require_rights(self._client, WRITER, checked_name("stream", stream))
        self._checksum, self._room_wait_s, self._notify = chosen(tuning.checksum, True), room_wait_s, notify
        policy = None if retention is None else parse_policy(retention).text
        durability = tuning.durability
        found = find_stream(self._client, stream)
        stored = Durability() if found is None else Durability.parse(found.durability)
        level = stored if durability is None else Durability.parse(durability)
        # a stream with the level waits for its replicas: after a failover they are away for a while
        require_durable(self._client, replace(level, replicas=0) if level == stored else level)
        wanted = spec if spec is None or isinstance(spec, Spec) else Spec.of(spec)
        packed = None if tuning.compression is None else Compression.parse(tuning.compression)
        if packed is not None:
            packed.require(wanted)
        budget_bytes = admit_stream(self._client, stream, budget_bytes, payload, notify, partitions)
        require_capacity(self._client, stream, payload, budget_bytes)
        require_takes_blocks(self._client, stream, block_bytes, payload, notify)
        self.stream: Stream = create_stream(
            self._client, stream, spec=wanted, partitions=partitions, budget_bytes=budget_bytes,
            block_bytes=block_bytes, retention=policy, durability=durability and str(level), payload=payload,
            compression=packed, info=info, notify=notify,
        )  # fmt: skip
        self.stream.compression.require(self.stream.spec)
        prepare_folder(self._client, self.stream)
        # a writer waits for a server that is away
        self._cleanup_timer = CleanupTimer(self._client.impatient(), self.stream, notify)
        weakref.finalize(self, self._cleanup_timer.stopping.set)
        self._cleanup_timer.start()
        self._should_stop: Callable[[], bool] = lambda: False
        """Asked while a shard that was opened from now on waits for quota. True ends the wait with BudgetFull."""
        self._resources = SharedResources(self._client, self.stream, notify)
        self._is_closed = self._is_opening = False
        self._owner = os.getpid()
        self._epochs: weakref.WeakSet[EpochWriter] = weakref.WeakSet()
        self._feed: ShardWriter | None = None
        self._feed_epoch = self._ended_bytes = 0
        self._feed_count = 0
        """The samples written to the feed since the last check whether its epoch is sealed."""
        self._feed_shard_bytes = 0.0
        """The payload after which the feed's epoch ends."""
        self._looked_at = self._looked_bytes = 0
        """The end of what the feed's shard had sent at the last check, and its bytes."""
        self._check_due_s = 0.0

    def __repr__(self) -> str:
        spec = "spec not known yet" if self.stream.spec is None else f"{self.stream.spec}"
        return f"<Writer of {self.stream.name!r} at {self._client.where}: {spec}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Writer cannot go to another process: make one there, each with shards of its own")

    def __iter__(self) -> NoReturn:
        raise TypeError("a Writer gives no samples: penstock.Loader or penstock.Replay reads what it wrote")

    def make_safe(self) -> None:
        """Return once everything written is as safe as the stream's durability promises.

        Raises DurabilityLost if a job must stop first.
        """
        level, watch = Durability.parse(self.stream.durability), self._resources.replicas
        make_safe(self._client, self.stream, level, self._notify, watch, self._should_stop)

    def _confirmer(self) -> Confirmer:
        """Return what says whether replicas have the facts that this writer notes."""
        watch = self._resources.replicas
        return Confirmer(self._client, self.stream, self._notify, watch=watch, should_stop=self._should_stop)

    def _on_replicas(self, write: Callable[[], Answer]) -> Answer:
        """Write facts of the stream's own keys, again after a failover, and return once replicas have them."""
        return self._confirmer().run([self.stream], write)

    # --- epochs ---

    def epoch(
        self, number: int | None = None, *, seed: int = 0, sizes: Sequence[int] | None = None, fingerprint: str = ""
    ) -> EpochWriter:  # fmt: skip
        """Open the next epoch.

        Args:
            number: the number of the epoch, whether it exists or not. None means the next one.
            seed: the seed of the order and of the samples, if there is one. The manifest keeps it.
            sizes: the samples of each shard, if they are planned.
            fingerprint: a text that identifies the source and its order. Writers of another may not share the epoch.

        Returns:
            The writer of the epoch. Use it in a ``with`` block, whose end completes the epoch.

        Raises:
            StreamConflict: the epoch exists with other sizes, or with another seed or fingerprint.
            EpochAbandoned: the epoch was abandoned, so it takes no more samples.

        Example:
            >>> with writer.epoch() as epoch:
            ...     epoch.write({"x": image, "y": 3})
        """
        self._require_open()
        number = None if number is None else whole("number", number, None)
        sizes = None if sizes is None else _checked_sizes(sizes)
        manifest = self._opened(None, number, seed=seed, sizes=sizes, fingerprint=fingerprint)
        epoch = EpochWriter(self, manifest, owns=number is None)
        self._epochs.add(epoch)
        return epoch

    def _opened(self, opened: Manifest | None, number: int | None, **plan: Any) -> Manifest:
        """Open an epoch. ``opened`` is the manifest that an earlier call returned, which the server has lost."""

        def open_there() -> Manifest:
            nonlocal opened  # opened again after a failover, it has the same number and the same id
            wanted = number if opened is None else opened.epoch
            try:
                opened = open_epoch(self._client, self.stream, wanted, again=opened, **plan)
            except EpochNotFound:  # a server that comes back older forgets it between two steps
                opened = open_epoch(self._client, self.stream, wanted, again=opened, **plan)
            return opened

        confirmer = self._confirmer()
        return confirmer.run(confirmer.everywhere, open_there)

    # --- the endless feed ---

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample to the stream's endless feed, exactly once in this writer's life; see `EpochWriter.write`.

        Args:
            sample: name -> array, number or bytes, as the spec says.
        """
        feed = self._feed
        if feed is None or self._feed_count >= SEAL_CHECK or feed.bytes_written > self._looked_bytes:
            feed = self._feeding(sample)
        feed.write(sample)
        self._feed_count += 1

    def write_batch(self, rows: Mapping[str, Any]) -> None:
        """Add n samples to the endless feed; see `EpochWriter.write_batch`.

        Args:
            rows: name -> array of shape ``[n, *shape]``. Ragged tensors and bytes are sequences of n values.
        """
        rows = flattened(rows)
        count = _count(rows)
        first = {name: values[0] for name, values in rows.items() if len(values)}
        if first:
            self._feeding(first).write_batch(rows)
            self._feed_count += count

    def quarantine(self, reason: str) -> None:
        """Record in the endless feed that the next sample could not be made; see `EpochWriter.quarantine`.

        Args:
            reason: why, for people.
        """
        if self.stream.spec is None:
            raise PenstockError("the first sample of a stream without spec cannot be a bad one: give spec=")
        self._feeding({}).quarantine(reason)
        self._feed_count += 1

    @property
    def uncommitted(self) -> int:
        """The samples of the endless feed that are not known to be committed yet."""
        return 0 if self._feed is None else self._feed.position - self._feed.committed

    def _feeding(self, sample: Mapping[str, Any]) -> ShardWriter:
        if self._is_opening:
            raise two_threads()
        self._is_opening = True
        try:
            if self._feed is not None and self._is_feed_shard_over(self._feed):
                self._end_feed()
            if self._feed is None:
                self._require_open()
                self._tell_mistaken()
                self._require_spec(sample)
                self._feed = self._shard_writer(self._take_slot(), None, SHARD_SAMPLES, take_another=self._take_another)
                self._feed_shard_bytes = self.stream.partition_budget * FEED_SHARE
        finally:
            self._is_opening = False
        return self._feed

    def _take_slot(self) -> ShardSlot:
        """Take the next shard of the feed."""
        manifest, shard, token = join_feed(self._client, self.stream)
        confirmer = self._confirmer()
        # one server loses the shard with its blocks, and no longer wait protects them
        is_apart = confirmer.are_apart(self.stream, self.stream.partition_of(shard))
        if is_apart and confirmer.asks([self.stream]):
            retake = partial(retake_shard, self._client, self.stream, manifest, shard, token)
            if not confirmer.run([self.stream], retake):
                return self._take_slot()
        committer = self._committer(manifest, shard, token)
        self._feed_epoch, self._feed_count, self._looked_at, self._looked_bytes = manifest.epoch, 0, 0, 0
        self._check_due_s = monotonic() + SEAL_CHECK_S

        def finish(size: int) -> None:
            end = partial(finish_feed_shard, self._client, self.stream, manifest, shard, size, committer.unreplicated)
            self._on_replicas(end)

        return ShardSlot(committer, shard, finish)

    def _take_another(self) -> ShardSlot:
        """Take another shard of the feed after the server gave this one to another writer."""
        slot = self._take_slot()
        self._notify(
            f"the server of {self.stream.name!r} came back from before this writer took its shard, and another writer "
            f"has that now: this one goes on in shard {slot.shard} of epoch {self._feed_epoch}"
        )
        return slot

    def _is_feed_shard_over(self, feed: ShardWriter) -> bool:
        if feed.position >= SHARD_SAMPLES - MAX_STEP or feed.bytes_written > self._feed_shard_bytes:
            return True
        if self._feed_count < SEAL_CHECK and (feed.sent == self._looked_at or monotonic() < self._check_due_s):
            return False
        looked_at, self._looked_at, self._looked_bytes = self._looked_at, feed.sent, feed.bytes_written
        self._feed_count, self._check_due_s = 0, monotonic() + SEAL_CHECK_S
        return feed.sent > looked_at and is_sealed(self._client, self.stream, self._feed_epoch)

    def _end_feed(self) -> None:
        if self._feed is not None:
            self._feed.close()  # if it fails, the feed stays, or its epoch would never end
            self._ended_bytes += self._feed.bytes_written
            self._feed = None

    def _tell_mistaken(self) -> None:
        """Say that an open epoch stays empty, because a call of the writer's own `write` probably means the epoch."""
        for epoch in self._epochs:
            if epoch._is_untouched:
                self._notify(
                    f"writer.write() goes to the endless feed of {self.stream.name!r}, and epoch {epoch.number}, which "
                    "is open, stays empty: to write into it call the write() of what writer.epoch() returned"
                )

    def _tell_lost(self, count: int) -> None:
        self._notify(
            f"{count} sample{'s' if count > 1 else ''} of {self.stream.name!r} may be lost, because nothing closed "
            "the epoch or its writer: write in `with penstock.Writer(...) as writer`, an epoch in "
            "`with writer.epoch() as epoch`, or call close()"
        )

    def _require_open(self) -> None:
        require_own(self._owner)
        if self._is_closed:
            raise PenstockError(f"this writer of {self.stream.name!r} is closed: make another, or write in its `with`")

    # --- used by the parts ---

    def _renew(self, stream: Stream) -> None:
        self.stream = stream

    def _stop_when(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop

    def _require_spec(self, sample: Mapping[str, Any] | Spec) -> Spec:
        """Return the stream's spec. If it has none, infer it from this sample, report it and store it."""
        if self.stream.spec is None:
            self.stream = load_stream(self._client, self.stream.name)
        if self.stream.spec is None:
            found = sample if isinstance(sample, Spec) else Spec.infer(sample)
            self.stream.compression.require(found)
            spec = fix_spec(self._client, self.stream, found)
            rows = "" if isinstance(sample, Spec) or not found.rows else ROWS.format(found.rows)
            self._notify(f"the spec of {self.stream.name!r} is taken from its first sample: {spec}{rows}")
            self.stream = load_stream(self._client, self.stream.name)
        return self.stream.require_spec()

    def _open_shard(self, manifest: Manifest, shard: int, most: int = SHARD_SAMPLES) -> ShardWriter:
        """Return the writer of one shard, at its progress. The stream must have a spec.

        Args:
            manifest: the manifest of the epoch.
            shard: the number of the shard.
            most: the most samples of the shard, unless its size is planned.
        """
        shard = whole("shard", shard, 0)
        self._require_open()
        if manifest.sizes is not None and shard >= len(manifest.sizes):
            raise ShardMismatch(f"epoch {manifest.epoch} is planned in {len(manifest.sizes)} shards, found {shard}")
        size = None if manifest.sizes is None else manifest.shard_size(shard)
        if manifest.sizes is None:
            reserve_shard(self._client, self.stream, manifest, shard)

        committer = self._committer(manifest, shard)

        def finish(size: int) -> None:
            where = self._client, self.stream, manifest, shard
            self._on_replicas(lambda: finish_shard(*where, size, unreplicated=committer.unreplicated))
            self._resources.order.end(manifest.epoch, shard)

        return self._shard_writer(ShardSlot(committer, shard, finish), size, most)

    def _committer(self, manifest: Manifest, shard: int, token: str = "") -> Committer:
        return Committer(
            ShardTarget(self._client, self.stream, manifest, shard, token), self._resources, checksum=self._checksum,
            room_wait_s=self._room_wait_s, should_stop=self._should_stop,
        )  # fmt: skip

    def _shard_writer(
        self, slot: ShardSlot, size: int | None, most: int, *, take_another: Callable[[], ShardSlot] | None = None
    ) -> ShardWriter:
        block_bytes = min(self.stream.block_bytes, largest_block(self.stream.partition_budget))
        return ShardWriter(
            slot.committer, self.stream.require_spec(), block_bytes=block_bytes, shard=slot.shard, size=size, most=most,
            finish=slot.finish, take_another=take_another, lost=self._tell_lost,
        )  # fmt: skip

    @property
    def client(self) -> Client:
        """The connection for control commands."""
        return self._client

    def flush(self) -> None:
        """Return once everything written to the endless feed and by `EpochWriter.write` to open epochs is committed.

        A shard that `EpochWriter.shard` returned has a ``flush`` of its own.
        """
        for epoch in list(self._epochs):  # another thread may open one
            epoch.flush()
        if self._feed is not None:
            self._feed.commit_all()

    def close(self) -> None:
        """End the feed's epoch, if one was begun, and close the connection.

        An epoch that was not closed stays open. What was written to it is committed. A second call does nothing.
        """
        if self._is_closed:
            return
        for epoch in [each for each in self._epochs if each._is_left]:
            epoch.flush()
            self._notify(
                f"epoch {epoch.number} of {self.stream.name!r} stays open, and trainers wait for its end: call its "
                "close() before the writer's, or write in `with writer.epoch() as epoch`; "
                f"`penstock epochs close {self.stream.name} {epoch.number}` ends it now"
            )
        self._end_feed()
        self._release()

    def _release(self) -> None:
        self._is_closed = True
        self._client.patience.last(0)  # there is nothing to wait for
        with suppress(ServerUnavailable):
            self._resources.loss_detector.check()
        self._cleanup_timer.stop()
        self._resources.close()
        self._client.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and self._feed is not None:
            feed, self._feed = self._feed, None
            try:  # what was written stays, and its epoch must end, because trainers would wait for it
                _end_somehow(feed)
            except PenstockError:
                feed.abort()
        try:
            self.close()
        except PenstockError:
            if self._feed is not None:
                self._feed.abort()
            self._release()
            raise
        require_one_sample(error)


class WriterHooks:
    """The inner side of a writer, for jobs and imports."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    @property
    def bytes_fed(self) -> int:
        """The payload bytes that were committed to the endless feed."""
        writer = self._writer
        return writer._ended_bytes + (0 if writer._feed is None else writer._feed.bytes_written)

    def stop_when(self, should_stop: Callable[[], bool]) -> None:
        """Ask ``should_stop`` while a shard that is opened from now on waits for quota. True ends the wait."""
        self._writer._stop_when(should_stop)

    def renew(self, stream: Stream) -> None:
        """Write to the stream as it is now: its budget may have changed since the writer was made."""
        self._writer._renew(stream)

    def require_spec(self, sample: Mapping[str, Any] | Spec) -> Spec:
        """Return the stream's spec. If it has none, infer it from this sample, report it and store it."""
        return self._writer._require_spec(sample)

    def open_again(self, lost: Manifest) -> Manifest:
        """Open an epoch that the server lost as a whole once more, with its number and its id. Its shards are empty.

        Raises EpochNumberTaken if another writer has the number since.
        """
        plan = {"seed": lost.seed, "sizes": lost.sizes, "fingerprint": lost.fingerprint}
        return self._writer._opened(lost, lost.epoch, **plan)

    def open_shard(self, manifest: Manifest, shard: int) -> ShardWriter:
        """Return the writer of one shard, at its progress. The stream must have a spec."""
        return self._writer._open_shard(manifest, shard)


def _end_somehow(feed: ShardWriter) -> None:
    """End a feed with everything written, or with what is committed if nothing more can be committed now."""
    try:
        feed.close()
    except PenstockError:
        feed.close_as_committed()


def _checked_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the sizes as ints. Raises TypeError before an epoch is opened for them."""
    if not hasattr(sizes, "__len__"):
        raise TypeError(f"sizes is {sizes!r:.40}, {an(sizes)}; expected the samples of each shard, sizes=[100, 100]")
    return [whole("sizes", size, None) for size in sizes]


def _count(rows: Mapping[str, Any]) -> int:
    """Return the number of samples in ``rows``. Raises SpecMismatch for a value without rows."""
    for name, values in rows.items():
        if not hasattr(values, "__len__"):
            raise SpecMismatch(name, an(values), "n rows, an array [n, *shape]")
    return len(next(iter(rows.values()), ()))


MAX_STEP = 1 << 16
"""The samples of a feed that may come at once between two checks of its length."""


@answering
class EpochWriter:
    """The writer of one epoch. Leaving its ``with`` block closes the manifest, and an error abandons the epoch.

    Example:
        >>> with penstock.Writer("train") as writer, writer.epoch() as epoch:
        ...     epoch.write_batch({"x": images, "y": labels})
    """

    def __init__(self, writer: Writer, manifest: Manifest, *, owns: bool) -> None:
        self._writer, self._manifest, self._owns = writer, manifest, owns
        self._current: ShardWriter | None = None
        self._shard_limit = SHARD_SAMPLES if len(writer.stream.partitions) == 1 else SPREAD_SAMPLES
        """The most samples of a shard that is not planned."""
        self._sizes: list[int] = []
        self._is_closed = self._is_opening = False

    def __repr__(self) -> str:
        sizes = self._manifest.sizes
        plan = "of any size" if sizes is None else f"{sum(sizes)} samples in {len(sizes)} shards"
        return f"<EpochWriter of epoch {self.number} of {self._writer.stream.name!r}: {plan}>"

    @property
    def _is_untouched(self) -> bool:
        """Return whether the epoch takes samples, is not planned in shards, and got no sample."""
        return not (self._is_closed or self._sizes or self._manifest.sizes) and self._current is None

    @property
    def _is_left(self) -> bool:
        """Return whether samples were written without an error and the epoch is not closed."""
        return not self._is_closed and self._current is not None and not self._current.has_failed

    @property
    def number(self) -> int:
        """The number of the epoch."""
        return self._manifest.epoch

    @property
    def manifest(self) -> Manifest:
        """The manifest as it was when the epoch was opened here."""
        return self._manifest

    def shard(self, shard: int, *, like: Mapping[str, Any] | None = None) -> ShardWriter:
        """Return the writer of one shard, positioned after what is committed.

        Args:
            shard: the number of the shard.
            like: a sample to infer a spec from.
        """
        if self._writer.stream.spec is None:
            if like is None:
                raise PenstockError(f"stream {self._writer.stream.name!r} has no spec yet: give spec= or like=")
            self._writer._require_spec(like)
        return self._writer._open_shard(self._manifest, shard)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample.

        A dict among the values becomes tensors below its name: ``{"y": {"boxes": ...}}`` is ``y/boxes``.

        Args:
            sample: name -> array, number or bytes, as the spec says.

        Raises:
            SpecMismatch: the sample does not fit the spec. Nothing is written.
            TooLarge: the sample is larger than the budget or the wire format allows.
            PenstockError: the epoch or the writer is closed.

        Example:
            >>> epoch.write({"x": image, "y": 3})
        """
        current = self._current
        if current is None or current.is_over:
            current = self._next_shard(sample, current)
        current.write(sample)

    def write_batch(self, rows: Mapping[str, Any]) -> None:
        """Add n samples.

        Args:
            rows: name -> array of shape ``[n, *shape]``. Ragged tensors and bytes are sequences of n values.

        Raises:
            SpecMismatch: the rows do not fit the spec.

        Example:
            >>> epoch.write_batch({"x": images, "y": labels})
        """
        rows = flattened(rows)
        count = _count(rows)
        start = 0
        while start < count:
            if self._current is None or self._current.is_over:
                self._next_shard({name: values[start] for name, values in rows.items()}, self._current)
            assert self._current is not None
            stop = min(count, start + self._shard_limit - self._current.position)
            whole = start == 0 and stop == count
            self._current.write_batch(rows if whole else {name: values[start:stop] for name, values in rows.items()})
            start = stop

    def reserve(self, count: int) -> Reservation:
        """Return arrays for the next samples, to be filled in place instead of copied. Needs a spec.

        Until they are committed or dropped, nothing else may be written to this epoch.

        Args:
            count: the number of samples.

        Returns:
            The arrays, with ``commit`` and ``drop``.

        Raises:
            PenstockError: the stream has no spec, or has ragged tensors.
            TooLarge: the samples are larger than a block may be.
        """
        return self._shard_for(count, "reserve() makes arrays of the stream's spec, and it has none yet").reserve(count)

    def quarantine(self, reason: str) -> None:
        """Record in the sample's place that it could not be made.

        Args:
            reason: why, for people.
        """
        why = "the first sample of a stream without spec cannot be a bad one"
        self._shard_for(1, why).quarantine(reason)

    def _shard_for(self, count: int, why: str) -> ShardWriter:
        """Return the shard writer for the next ``count`` samples.

        Raises PenstockError, saying ``why``, while the stream has no spec.
        """
        if self._current is not None and self._current.position + count <= self._shard_limit:
            return self._current
        if self._writer.stream.spec is None:
            raise PenstockError(f"{why}: give spec=")
        return self._next_shard({}, self._current)

    def _next_shard(self, sample: Mapping[str, Any], before: ShardWriter | None) -> ShardWriter:
        """Return the writer of the next shard, after the shard ``before``. Raises PenstockError in a second thread."""
        if self._is_closed:
            raise PenstockError(f"epoch {self.number} is closed: writer.epoch() opens the next one")
        if self._manifest.sizes is not None:
            raise PenstockError(f"epoch {self.number} is planned in shards: write with .shard(n)")
        if self._is_opening or self._current is not before:
            raise two_threads()
        self._is_opening = True
        try:
            if self._writer.stream.spec is None:
                self._writer._require_spec(sample)
            self._end_shard()
            self._current = self._writer._open_shard(self._manifest, len(self._sizes), self._shard_limit)
        finally:
            self._is_opening = False
        return self._current

    def _end_shard(self) -> None:
        if self._current is not None:
            self._current.close()
            self._sizes.append(self._current.position)
            shard, self._current = self._current, None
            if shard.left_out:
                raise ShardMismatch(
                    f"epoch {self.number} of {self._writer.stream.name!r}: {shard.left_out} samples or more of this "
                    "program were left out, because another program wrote the same shard: give each shards of its own "
                    f"(writer.epoch({self.number}, sizes=[...]) and .shard(n)) or an epoch of its own (writer.epoch())"
                )

    def flush(self) -> None:
        """Return once all samples written before are committed."""
        if self._current is not None:
            self._current.commit_all()

    def close(self) -> None:
        """Complete the epoch. Shards that are written by number are complete when their jobs close them."""
        if self._manifest.sizes is None and (self._owns or self._current is not None or self._sizes):
            self._end_shard()
            writer, manifest, sizes = self._writer, self._manifest, self._written_sizes()
            writer._on_replicas(lambda: size_epoch(writer.client, writer.stream, manifest, sizes))
        self._is_closed = True

    def _written_sizes(self) -> list[int]:
        """Return the size of every shard up to the last.

        Raises ShardMismatch if a shard written by number is not complete.
        """
        done = {**self.refresh().done, **dict(enumerate(self._sizes))}
        missing = [shard for shard in range(max(done, default=-1) + 1) if shard not in done]
        if missing:
            raise ShardMismatch(f"shards {missing[:10]} of epoch {self.number} are not complete: write and close them")
        return list(dict(sorted(done.items())).values())

    def abandon(self) -> None:
        """Declare that the epoch will never be complete. Trainers end it with the samples that it has."""
        if self._current is not None:
            self._current.abort()
            self._current = None
        self._is_closed = True
        abandon_epoch(self._writer.client, self._writer.stream, self.number, self._manifest.id)
        self._writer.make_safe()

    def refresh(self) -> Manifest:
        """Read the manifest again, and return it."""
        self._manifest = load_manifest(self._writer.client, self._writer.stream, self.number)
        return self._manifest

    def __enter__(self) -> EpochWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if kind is None:
                self.close()
            elif self._owns:
                self.abandon()
        finally:
            if self._current is not None:
                self._current.abort()
        require_one_sample(error)
