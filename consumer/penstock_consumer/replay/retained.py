"""Read the index records of a retained epoch in canonical order, for readers without a group.

A lease on the roster keeps the epoch during the read. ``replay`` and ``export`` use the records.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Iterator

from penstock_common.errors import EpochIncomplete, PenstockError, ReplayTruncated, ServerUnavailable
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import IndexRecord, index_records
from penstock_common.stream.groups.roster import end_replay, hold_for_replay, load_roster
from penstock_common.stream.manifest import PRODUCED, load_manifest
from penstock_common.stream.streams import Stream, require_there
from penstock_common.waiting import BETWEEN_TRIES_S, join

RENEWALS_PER_LEASE = 10


class RetainedEpoch:
    """One produced epoch. Raises EpochNotFound, EpochIncomplete, or ReplayTruncated if parts of it were removed."""

    def __init__(self, client: Client, stream: Stream, epoch: int, lease_s: float) -> None:
        self._client, self.stream, self.epoch = client, stream, epoch
        self.manifest = load_manifest(client, stream, epoch)
        if self.manifest.state != PRODUCED:
            raise EpochIncomplete(
                f"epoch {epoch} of {stream.name!r} is {self.manifest.state}: replay reads produced epochs; "
                "read it with a Loader"
            )
        self.lease = ReplayLease(client, stream, epoch, lease_s)
        """The lease that keeps the epoch. The reader ends it."""
        weakref.finalize(self, self.lease.stopping.set).atexit = False
        try:
            self.lease.take()
            self.samples = self.nbytes = 0
            for _, record in self.records():
                self.samples += record.count
                self.nbytes += record.nbytes
        except PenstockError:
            self.lease.let_go()
            raise
        except BaseException:  # Ctrl-C; a notebook keeps the traceback, and this object with it
            self.lease.stopping.set()
            raise

    def records(self) -> Iterator[tuple[int, IndexRecord]]:
        """Yield (shard, index record) of all shards, in canonical order. Raises ReplayTruncated if one is missing."""
        for shard in self.manifest.shards():
            partition, end, size = self.stream.partition_of(shard), 0, self.manifest.shard_size(shard)
            for record in index_records(self._client, partition, self.epoch, shard):
                if record.first >= size:  # of a writer that went on after the epoch was closed
                    break
                if record.first != end:
                    raise ReplayTruncated(
                        f"shard {shard} of epoch {self.epoch} has no record of offsets {end}-{record.first - 1}"
                    )
                end = record.end
                yield shard, record
            if end != size:
                raise ReplayTruncated(f"shard {shard} of epoch {self.epoch} ends at {end}, planned are {size}")

    def truncated(self, record: IndexRecord) -> ReplayTruncated:
        """Return the error for an entry that was removed.

        Retention marks the epoch on the roster before it removes anything.
        """
        name, rosters = self.stream.name, [load_roster(self._client, one) for one in self.stream.partitions]
        if any(self.epoch in roster.trimmed for roster in rosters):
            how = (
                "was removed (retention needs its bytes); replay a later epoch, or give the stream a larger budget. If "
                f"another program deleted it, `penstock audit {name}` says so"
            )
        else:
            how = (
                "was deleted, and not by retention: another program deleted it, or the server lost it; `penstock audit "
                f"{name}` names all that is missing, and `penstock audit {name} --repair SOURCE...` makes it again"
            )
        what = f"epoch {self.epoch} of {name!r} is no longer whole: entry {record.entry_id.decode()}"
        return ReplayTruncated(f"{what} {how}")


class ReplayLease:
    """A lease on an epoch, which a thread of its own renews.

    Nothing here refers to the reader. A replay that was never closed can therefore be collected, which ends the lease.
    """

    def __init__(self, client: Client, stream: Stream, epoch: int, lease_s: float) -> None:
        self._client, self._stream, self._epoch, self._lease_s = client, stream, epoch, lease_s
        self._token = secrets.token_hex(8)
        self.stopping = threading.Event()
        """An event that ends the thread once it is set. Without `let_go` the lease then expires."""
        self._lost: PenstockError | None = None
        """The error that ended the lease."""
        self.thread = threading.Thread(target=self._run, name="penstock-replay-lease", daemon=True)

    def take(self) -> None:
        """Take the lease, and renew it from now on. Raises ReplayTruncated."""
        self._ask(self._client, renew=False)
        self.thread.start()

    def raise_lost(self) -> None:
        """Raise the error that ended the lease, if it ended."""
        if self._lost is not None:
            raise self._lost

    def _ask(self, client: Client, *, renew: bool) -> None:
        lease_ms = int(self._lease_s * 1000)
        for partition in self._stream.partitions:
            if not hold_for_replay(client, partition, self._token, self._epoch, lease_ms, renew=renew):
                require_there(client, self._stream)
                what = f"epoch {self._epoch} of {self._stream.name!r}"
                raise ReplayTruncated(
                    f"this replay's lease on {what} lapsed: it renewed nothing for {self._lease_s:g} s, and retention "
                    "may have removed entries; replay it again if it is still there, with a longer lease_s where "
                    "processes or servers stand still, or pin it (`penstock epochs pin`)"
                )

    def _run(self) -> None:
        beat_s = self._lease_s / RENEWALS_PER_LEASE
        client, last = self._client.impatient(), time.monotonic()  # this loop handles a failure, not the client
        pause_s = beat_s
        while not self.stopping.wait(pause_s):
            try:
                self._ask(client, renew=True)
                last, pause_s = time.monotonic(), beat_s
            except ServerUnavailable as error:
                pause_s = min(beat_s, BETWEEN_TRIES_S)
                if time.monotonic() - last > self._lease_s:
                    self._lost = error
                    return
            except PenstockError as error:
                self._lost = error
                return

    def let_go(self) -> None:
        """End the lease."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        self._client.ping()  # fail here if the server is away, because the thread may be waiting for it
        join(self.thread, 5)
        for partition in self._stream.partitions:
            end_replay(self._client, partition, self._token)
