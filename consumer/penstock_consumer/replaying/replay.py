"""Replay: a retained epoch once more, without a group: in its canonical order, the same bytes every time, or shuffled.

Order comes from the shard indexes; a lease on the roster keeps the epoch while it is read.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import PenstockError, ReplayTruncated
from penstock_common.format.header import Header
from penstock_common.format.spec import Spec
from penstock_common.settings import Settings
from penstock_common.stream.entries import Record, fetch_command
from penstock_common.stream.link.channel import Channel
from penstock_common.stream.link.commands import Client
from penstock_common.stream.link.connection import connect, open_channel
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.payloads import maps_of_stream, reader_of
from penstock_common.stream.streams import Stream, load_stream
from penstock_common.waiting import Notify, to_stderr
from penstock_consumer.membership.session import AT_ONCE_S
from penstock_consumer.pipeline.again import Shuffle
from penstock_consumer.pipeline.prefetch import Prefetch
from penstock_consumer.receiving.receive import Received, Receiver, check_identity, read_by_id
from penstock_consumer.replaying.passes import PREFETCH_BYTES, Passes, permuted
from penstock_consumer.replaying.retained import Retained

AHEAD = 4
"""Entries asked for before the first of them arrives."""
LEASE_S = 30.0
"""A replay that renews nothing for so long no longer keeps the epoch, and ends with ReplayTruncated."""


class Replay(Passes):
    """Batches of one retained epoch, in canonical order; may be iterated any number of times. ``len()`` is known.

    With ``shuffle=SEED`` each iteration has an order of its own, so that an epoch made once is trained on for weeks:
    blocks are read in a permuted order, batches drawn from a window of ``window`` samples (None: as many as
    ``prefetch_bytes`` hold). Seed and the iteration's number decide it: see `set_pass`, and docs/decode-once.md.

    With ``views`` a batch that is one block of a stream in segments is not copied: its arrays are read-only and lie in
    the file, which is not used again while they live.

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
        shuffle: int | None = None,
        window: int | None = None,
        views: bool = False,
        prefetch_bytes: int = PREFETCH_BYTES,
        lease_s: float = LEASE_S,
        fast: bool | None = None,
        notify: Notify = to_stderr,
    ) -> None:
        super().__init__(batch_size, prefetch_bytes, shuffle, window, notify)
        settings = Settings.from_environment()
        self._client: Client = connect(url or settings.url)
        self._fast = fast if fast is not None else (False if settings.plain_redis else None)
        self.epoch, self._views = epoch, views
        try:
            self.stream: Stream = load_stream(self._client, stream)
            self._retained = Retained(self._client, self.stream, epoch, lease_s)
        except PenstockError:
            self._client.close()
            raise
        self.samples = self._retained.samples
        self._maps = maps_of_stream(self.stream)

    @property
    def spec(self) -> Spec:
        """The tensors of a sample."""
        assert self.stream.spec is not None
        return self.stream.spec

    def _name(self) -> str:
        return f"{self.stream.name} replay of epoch {self.epoch}"

    def _check(self) -> None:
        self._retained.raise_lost()

    # --- the thread ---

    def _read(self, queue: Prefetch, shuffle: Shuffle | None) -> None:
        channel: Channel | None = None
        try:
            channel = open_channel(self._client, fast=self._fast)
            self._fetch_all(channel, queue, shuffle)
        except ReplayTruncated as error:
            raise self._retained.lasting(error) from None
        finally:
            if channel is not None:
                channel.close()

    def _fetch_all(self, channel: Channel, queue: Prefetch, shuffle: Shuffle | None) -> None:
        assembler, outlet = self._outlet(queue, shuffle)
        received: list[Received] = []
        where = _Where(self.stream, self._retained.manifest)
        segments = reader_of(self.stream, gives_views=self._views)
        receiver = Receiver(self.spec, assembler, where, 0, received.append, segments)
        records = permuted((found for found in self._retained.records() if found[1].entry_id), shuffle)
        asked: list[tuple[int, Record]] = []
        while True:
            while not queue.wait_for_room(sum(record.nbytes for _, record in asked), 0.2):
                pass
            fresh = list(islice(records, AHEAD - len(asked)))
            partition_of, epoch = self.stream.partition_of, self.epoch
            channel.send([fetch_command(partition_of(shard), epoch, record.entry_id) for shard, record in fresh])
            asked += fresh
            if not asked:
                break
            _, record = asked.pop(0)
            received.clear()
            if read_by_id(channel, receiver, queue.meter) == 0:
                raise self._retained.truncated(record)
            if (error := received[0].error) is not None:
                raise error
            outlet.drain()
        outlet.end()

    def close(self) -> None:
        """Gives the epoch free."""
        if self._retained.is_let_go:
            return
        try:
            self._retained.let_go()
        finally:
            self._client.close()
            self._maps = None

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
