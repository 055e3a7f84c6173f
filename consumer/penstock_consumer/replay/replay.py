"""Replay: a retained epoch once more, without a group, in canonical order or shuffled.

The order comes from the shard indexes. A lease on the roster keeps the epoch while it is read. An outage of the server
is waited for as in a trainer, but no longer than that lease.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from penstock_common.errors import PenstockError, ReplayTruncated, ServerUnavailable
from penstock_common.hints import explained, seconds, whole
from penstock_common.settings import Settings
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import IndexRecord, fetch_command
from penstock_common.stream.payloads import maps_of_stream, reader_of
from penstock_common.stream.streams import Stream, load_stream
from penstock_common.tuning import LEASE_S, Tuning, chosen, takes_old_names, tuning_of
from penstock_common.waiting import AT_ONCE_S, LEAVE_S, Wait, to_stderr
from penstock_common.wire.spec import Spec
from penstock_consumer.read.dead_letters import cause_of
from penstock_consumer.read.receive import ReaderConnection, ReceivedEntry, Receiver, check_identity, read_by_id
from penstock_consumer.read.resources import CLOSE_SILENCE_S
from penstock_consumer.read.waits import await_epoch
from penstock_consumer.replay.passes import Passes, ReadaheadSink, WholeScope, looked_ahead, permuted
from penstock_consumer.replay.retained import RetainedEpoch
from penstock_consumer.stages.queue import PrefetchQueue
from penstock_consumer.stages.shuffle import QueueFeeder, ShuffleOptions
from penstock_consumer.stages.stats import ReaderTimes

AHEAD, AHEAD_HEADERS = 4, 16
"""The entries that are asked for before the first of them arrives; and those of small entries or of segments."""


class Replay(Passes):
    """The batches of one retained epoch, in canonical order. It may be iterated any number of times, and has a length.

    Each iteration gives the same bytes. With ``shuffle=SEED`` each has an order of its own, so that an epoch that was
    made once can be trained on for weeks; see `set_pass` and docs/decode-once.md.

    Args:
        stream: the stream's name.
        epoch: the number of the epoch. An epoch that `penstock run` prepares for this process is waited for.
        batch_size: the samples of a batch.
        url: the server's address. None means PENSTOCK_URL, else this user's own server on this host.
        shuffle: a seed. Blocks are read in a permuted order, and batches are drawn from a window.
        window: the samples of the window. None means as many as ``prefetch_bytes`` hold.
        tuning: rarely changed options: prefetch_bytes, lease_s, views, notify. See `Tuning`.

    Raises:
        EpochNotFound: the epoch does not exist.
        EpochIncomplete: the epoch is not produced yet.
        ReplayTruncated: entries of the epoch were removed.

    Example:
        >>> for batch in penstock.Replay("train", epoch=0, batch_size=64):
        ...     evaluate(batch["x"], batch["y"])
    """

    @takes_old_names
    @explained
    def __init__(
        self,
        stream: str,
        *,
        epoch: int,
        batch_size: int,
        url: str | None = None,
        shuffle: int | None = None,
        window: int | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        tuning = tuning_of("Replay", tuning)
        super().__init__(batch_size, shuffle, window, tuning)
        notify, lease_s = chosen(tuning.notify, to_stderr), chosen(tuning.lease_s, LEASE_S)
        epoch = whole("epoch", epoch, None)
        seconds("lease_s", lease_s)
        settings = Settings.from_environment()
        self._client: Client = connect(url or settings.url, bears_outages=notify)
        self.epoch, self._views = epoch, bool(tuning.views)
        try:
            if stream in settings.awaited:
                await_epoch(self._client, stream, epoch, Wait(notify, server=self._client.where))
            self.stream: Stream = load_stream(self._client, stream)
            self.stream.require_spec()
            self._retained = RetainedEpoch(self._client, self.stream, epoch, lease_s)
        except PenstockError:
            self._client.close()
            raise
        self.samples = self._retained.samples
        self._maps = maps_of_stream(self.stream)

    @property
    def spec(self) -> Spec:
        """Return the tensors of a sample."""
        return self.stream.require_spec()

    @property
    def info(self) -> dict[str, Any]:
        """Return the producer's facts about the stream, such as the names of classes in ``info["classes"]["y"]``."""
        return self.stream.info

    def _name(self) -> str:
        return f"{self.stream.name} replay of epoch {self.epoch}"

    def _check(self) -> None:
        self._retained.lease.raise_lost()

    # --- the thread ---

    def _read(self, queue: PrefetchQueue, feeder: QueueFeeder, shuffle: ShuffleOptions | None) -> None:
        line = ReaderConnection(self._client, queue, self._notify)
        try:
            self._fetch_all(line, queue, feeder, shuffle)
        except ReplayTruncated as error:
            raise cause_of(self._client, self.stream, error) from None
        finally:
            line.close()

    def _fetch_all(
        self, line: ReaderConnection, queue: PrefetchQueue, feeder: QueueFeeder, shuffle: ShuffleOptions | None
    ) -> None:
        received: list[ReceivedEntry] = []
        where = WholeScope(partial(check_identity, stream=self.stream, manifest=self._retained.manifest))
        segments = reader_of(self.stream, gives_views=self._views)
        receiver = Receiver(self.spec, feeder.assembler, where, 0, received.append, segments)
        records = permuted((found for found in self._retained.records() if found[1].entry_id), shuffle)
        look = None if segments is None or segments.lies_in_memory else ReadaheadSink(self.spec, segments)
        ahead = _FetchAhead(line, self.stream, self.epoch, records, AHEAD if segments is None else AHEAD_HEADERS, look)
        while True:
            while not queue.wait_for_space(ahead.nbytes if segments is None else ahead.next_nbytes, 0.2):
                pass
            received.clear()
            if (fetched := ahead.fetch(receiver, queue.reader_times)) is None:
                break
            record, is_there = fetched
            if not is_there:
                raise self._retained.truncated(record)
            if (error := received[0].error) is not None:
                raise error
            feeder.drain()
        feeder.end()

    def close(self) -> None:
        """Release the epoch. Raises ServerUnavailable if the server is away for 2 s. Then the lease lapses."""
        if self._retained.lease.stopping.is_set():
            return
        self._client.limit_patience(LEAVE_S, CLOSE_SILENCE_S)
        try:
            self._retained.lease.let_go()
        finally:
            self._client.close()
            self._maps = None

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        self._client.limit_patience(0, AT_ONCE_S)
        with suppress(PenstockError):  # the lease expires anyway, and the other error matters
            self.close()


class _FetchAhead:
    """The entries that are asked for by id, some before they are needed.

    After an outage the unanswered ones are asked again.

    At most ``most`` are under way. With ``look`` each is asked for twice, first to be looked at.
    """

    def __init__(
        self,
        line: ReaderConnection,
        stream: Stream,
        epoch: int,
        records: Iterator[tuple[int, IndexRecord]],
        most: int,
        look: ReadaheadSink | None,
    ) -> None:
        self._connection, self._stream, self._epoch, self._most, self._look = line, stream, epoch, most, look
        self._due: Iterator[tuple[tuple[int, IndexRecord], bool]] = (
            ((found, True) for found in records)
            if look is None
            else looked_ahead(records, lambda found: found[1].nbytes)
        )
        self._todo: deque[tuple[tuple[int, IndexRecord], bool]] = deque()
        self._asked: deque[tuple[tuple[int, IndexRecord], bool]] = deque()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all blocks under way."""
        return sum(record.nbytes for (_, record), is_due in self._asked if is_due)

    @property
    def next_nbytes(self) -> int:
        """Return the bytes of the next block under way, which an entry without a payload brings."""
        return next((record.nbytes for (_, record), is_due in self._asked if is_due), 0)

    def fetch(self, receiver: Receiver, reader_times: ReaderTimes) -> tuple[IndexRecord, bool] | None:
        """Receive the next entry. Returns its record, and whether the entry is still there, or None after the last."""
        while True:
            if len(self._asked) <= self._most // 2:  # several at a time: each sending may cost the core
                self._todo.extend(islice(self._due, self._most - len(self._todo) - len(self._asked)))
            if not self._todo and not self._asked:
                return None
            try:
                self._ask()
                (shard, _), is_due = self._asked[0]
                sink = receiver if is_due or self._look is None else self._look
                found = read_by_id(
                    self._connection, sink, reader_times, self._stream.partition_of(shard).entries(self._epoch)
                )
            except ServerUnavailable as error:
                self._todo.extendleft(reversed(self._asked))
                self._asked.clear()
                self._connection.reopen(error)
                continue
            self._connection.answered()
            (_, record), is_due = self._asked.popleft()
            if is_due:
                return record, found > 0

    def _ask(self) -> None:
        if not self._todo:
            return
        partition_of = self._stream.partition_of
        commands = [
            fetch_command(partition_of(shard), self._epoch, record.entry_id) for (shard, record), _ in self._todo
        ]
        self._asked.extend(self._todo)
        self._todo.clear()
        self._connection.open().send(commands)
