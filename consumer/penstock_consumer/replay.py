"""Replay: a retained epoch once more, in its canonical order, without a group: the same bytes every time.

Order comes from the shard indexes; a lease on the roster keeps the epoch while it is read.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import EpochIncomplete, PenstockError, ReplayTruncated, ServerUnavailable
from penstock_common.format.header import Header
from penstock_common.format.spec import Spec
from penstock_common.settings import Settings
from penstock_common.stream.channel import Channel
from penstock_common.stream.commands import Client
from penstock_common.stream.connection import connect, open_channel
from penstock_common.stream.entries import Record, fetch_command, index_records
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest, load_manifest
from penstock_common.stream.payloads import reader_of
from penstock_common.stream.roster import end_replay, hold_for_replay
from penstock_common.stream.streams import Stream, load_stream, require_there
from penstock_common.waiting import Notify, to_stderr
from penstock_consumer.pipeline.arena import Arena
from penstock_consumer.pipeline.batch import Assembler, Batch
from penstock_consumer.pipeline.prefetch import Prefetch, Stopped
from penstock_consumer.receive import Received, Receiver, check_identity, read_by_id
from penstock_consumer.session import AT_ONCE_S
from penstock_consumer.stats import Stats
from penstock_consumer.tally import Tally

PREFETCH_BYTES = 64 << 20
AHEAD = 4
"""Entries asked for before the first of them arrives."""
LEASE_S = 30.0
"""A replay that renews nothing for so long no longer keeps the epoch, and ends with ReplayTruncated."""
RENEWALS_PER_LEASE = 10
POLL_S = 0.5


class Replay:
    """Batches of one retained epoch, in canonical order; may be iterated any number of times. ``len()`` is known.

    Raises EpochNotFound, EpochIncomplete for an epoch that is not produced yet, ReplayTruncated where entries were
    already removed: never a gap.
    """

    def __init__(
        self,
        stream: str,
        *,
        epoch: int,
        batch_size: int,
        url: str | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        lease_s: float = LEASE_S,
        fast: bool | None = None,
        notify: Notify = to_stderr,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        settings = Settings.from_environment()
        self._client: Client = connect(url or settings.url)
        self._fast = fast if fast is not None else (False if settings.plain_redis else None)
        self.epoch, self.batch_size = epoch, batch_size
        self._prefetch_bytes, self._lease_s, self._notify = prefetch_bytes, lease_s, notify
        self.stream: Stream = load_stream(self._client, stream)
        self._manifest = self._produced(load_manifest(self._client, self.stream, epoch))
        self._token = secrets.token_hex(8)
        self._closed = threading.Event()
        self._lost: PenstockError | None = None
        self._tally = Tally()
        self._holder = threading.Thread(target=self._keep_hold, name="penstock-replay-lease", daemon=True)
        try:
            self._hold(renew=False)
            self.samples = sum(record.count for _, record in self._records())
            """Samples in the epoch, bad ones not counted."""
        except PenstockError:
            self.close()
            raise
        self._holder.start()

    def _produced(self, manifest: Manifest) -> Manifest:
        if manifest.state != "produced":
            raise EpochIncomplete(
                f"epoch {self.epoch} of {self.stream.name!r} is {manifest.state}: replay reads produced epochs; "
                "read it with a Loader"
            )
        return manifest

    @property
    def spec(self) -> Spec:
        """The tensors of a sample."""
        assert self.stream.spec is not None
        return self.stream.spec

    def stats(self) -> Stats:
        """The iteration under way, else the last one: as `Loader.stats`, and nobody waits for producers here."""
        return self._tally.stats()

    def __len__(self) -> int:
        """Batches in an iteration."""
        return (self.samples + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        """The epoch from its first sample; the last batch may be smaller."""
        tally = self._tally = Tally()
        queue = Prefetch(self._prefetch_bytes)
        tally.ask()
        tally.begin(self.epoch, queue)
        thread = threading.Thread(target=self._read, args=(queue,), name="penstock-replay", daemon=True)
        thread.start()
        try:
            while True:
                batch = queue.get(POLL_S)
                if self._lost is not None:
                    raise self._lost
                if batch is not None:
                    tally.hand(batch)
                    yield batch
                    tally.ask()
                elif queue.is_over:
                    self._notify(f"{self.stream.name} replay of epoch {self.epoch}: {tally.end()}")
                    return
        finally:
            tally.rest()
            queue.stop()
            thread.join(timeout=AT_ONCE_S)

    # --- the thread ---

    def _read(self, queue: Prefetch) -> None:
        channel: Channel | None = None
        try:
            channel = open_channel(self._client, fast=self._fast)
            self._fetch_all(channel, queue)
            queue.end()
        except Stopped:
            queue.end()
        except ReplayTruncated as error:
            queue.end(self._lasting(error))
        except BaseException as error:
            queue.end(error)
        finally:
            if channel is not None:
                channel.close()

    def _lasting(self, error: PenstockError) -> PenstockError:
        """The same, or what took the whole stream along."""
        try:
            require_there(self._client, self.stream)
        except PenstockError as worse:
            return worse
        return error

    def _fetch_all(self, channel: Channel, queue: Prefetch) -> None:
        sample_bytes = max(1, sum(t.sample_bytes for t in self.spec if not t.is_ragged))
        arena = Arena(keep=self._prefetch_bytes // (sample_bytes * self.batch_size) + 8)
        assembler = Assembler(self.spec, self.batch_size, arena, self.epoch)
        received: list[Received] = []
        where = _Where(self.stream, self._manifest)
        receiver = Receiver(self.spec, assembler, where, 0, received.append, reader_of(self.stream))
        queue.when_less = arena.trim
        records = ((p, record) for p, record in self._records() if record.entry_id)
        asked: list[tuple[PartitionKeys, Record]] = []
        while True:
            while not queue.wait_for_room(sum(record.nbytes for _, record in asked), 0.2):
                pass
            fresh = list(islice(records, AHEAD - len(asked)))
            channel.send([fetch_command(partition, self.epoch, record.entry_id) for partition, record in fresh])
            asked += fresh
            if not asked:
                break
            _, record = asked.pop(0)
            received.clear()
            if read_by_id(channel, receiver, queue.meter) == 0:
                raise ReplayTruncated(self._truncated(record))
            if (error := received[0].error) is not None:
                raise error
            while (batch := assembler.take()) is not None:
                queue.put(batch)
        assembler.flush()
        while (batch := assembler.take()) is not None:
            queue.put(batch)

    def _records(self) -> Iterator[tuple[PartitionKeys, Record]]:
        """The index records of all shards, in canonical order; raises ReplayTruncated where one is missing."""
        for shard in self._manifest.shards():
            partition, end = self.stream.partition_of(shard), 0
            for record in index_records(self._client, partition, self.epoch, shard):
                if record.first != end:
                    raise ReplayTruncated(
                        f"shard {shard} of epoch {self.epoch} has no record of offsets {end}-{record.first - 1}"
                    )
                end = record.end
                yield partition, record
            if end != self._manifest.shard_size(shard):
                raise ReplayTruncated(
                    f"shard {shard} of epoch {self.epoch} ends at {end}, planned are {self._manifest.shard_size(shard)}"
                )

    def _truncated(self, record: Record) -> str:
        return (
            f"epoch {self.epoch} of {self.stream.name!r} is no longer whole: entry {record.entry_id.decode()} was "
            "removed (retention needs its room); replay a later epoch, or give the stream a larger budget"
        )

    # --- the lease ---

    def _hold(self, *, renew: bool) -> None:
        lease_ms = int(self._lease_s * 1000)
        for partition in self.stream.partitions:
            if not hold_for_replay(self._client, partition, self._token, self.epoch, lease_ms, renew=renew):
                require_there(self._client, self.stream)
                what = f"epoch {self.epoch} of {self.stream.name!r}"
                raise ReplayTruncated(
                    f"this replay's lease on {what} lapsed: it renewed nothing for {self._lease_s:g} s, and retention "
                    "may have removed entries; replay it again if it is still there, with a longer lease_s where "
                    "processes or servers stand still, or pin it (`penstock epochs pin`)"
                )

    def _keep_hold(self) -> None:
        beat_s = self._lease_s / RENEWALS_PER_LEASE
        last = time.monotonic()
        while not self._closed.wait(beat_s):
            try:
                self._hold(renew=True)
                last = time.monotonic()
            except ServerUnavailable as error:
                if time.monotonic() - last > self._lease_s:
                    self._lost = error
                    return
            except PenstockError as error:
                self._lost = error
                return

    def close(self) -> None:
        """Gives the epoch free."""
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            self._client.ping()  # a server that is away hears nothing of this, and the thread may be waiting for it
            if self._holder.is_alive():
                self._holder.join(timeout=5)
            for partition in self.stream.partitions:
                end_replay(self._client, partition, self._token)
        finally:
            self._client.close()

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        self._client.hurry(0, AT_ONCE_S)
        with suppress(PenstockError):  # the lease lapses by itself, and the error is what counts
            self.close()


class _Where:
    """What a replay checks identities against: everything in the epoch is wanted."""

    def __init__(self, stream: Stream, manifest: Manifest) -> None:
        self._stream, self._manifest = stream, manifest

    def check(self, header: Header) -> None:
        check_identity(header, self._stream, self._manifest)

    def wanted(self, header: Header) -> NDArray[np.bool_] | None:
        return None
