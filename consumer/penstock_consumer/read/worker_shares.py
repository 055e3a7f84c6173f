"""Lets a framework's worker processes read one rank's batches. Each process reads every n-th step.

The loader's own process stays the rank. It says where a pass begins, takes what arrives and acknowledges. Readers
belong to no group, hold no lease and share no connection. What they read ahead is lost with them and read again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from penstock_common.errors import StateMismatch
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import Membership, RankOrder, rank_member
from penstock_common.stream.streams import load_stream
from penstock_common.waiting import Notify, Wait, join, to_stderr
from penstock_consumer.read.canonical import EpochSteps
from penstock_consumer.read.claims import RankClaim
from penstock_consumer.read.loader import LoaderHooks
from penstock_consumer.read.options import State
from penstock_consumer.read.ordered import OrderedReader
from penstock_consumer.stages.batch import Batch, BatchSpan, Lease, pool_for
from penstock_consumer.stages.queue import POLL_S, PrefetchQueue


@dataclass(frozen=True, slots=True)
class EpochPart:
    """The part of an epoch that one pass reads, as values that can go to another process."""

    url: str
    stream: str
    stream_id: str
    group: str
    order: RankOrder
    epoch: int
    start: int
    """The position where the rank's first step begins."""
    remainder: str
    prefetch_bytes: int
    lease_s: float
    timeout_s: float | None

    def is_end(self, position: int, samples: int | None) -> bool:
        """Return whether no batch of the rank begins at or behind this position, in an epoch of this many samples."""
        if samples is None:
            return False
        steps = EpochSteps(self.start, self.order.rank, self.order.world, self.order.batch, self.remainder)
        return position >= steps.end_of(steps.count(samples) - 1)

    def after(self, steps: int) -> EpochPart:
        """Return the part without that many first steps of the rank."""
        return replace(self, start=self.start + steps * self.order.world * self.order.batch)


# --- in the process that reads ----------------------------------------------------------------------------------------


def read_share(part: EpochPart, share: tuple[int, int]) -> Iterator[Batch]:
    """Yield every n-th batch of the part, beginning with the i-th, where ``share`` is (i, n). It uses a new connection.

    Raises WaitTimeout, and the errors of a reader in canonical order.
    """
    notify: Notify = to_stderr if share[0] == 0 else lambda _: None  # all of them wait for the same
    client = connect(part.url, bears_outages=notify)
    try:
        yield from _batches(part, share, client, notify)
    finally:
        client.close()


def _batches(part: EpochPart, share: tuple[int, int], client: Client, notify: Notify) -> Iterator[Batch]:
    stream = load_stream(client, part.stream)
    if stream.id != part.stream_id:
        raise StateMismatch("stream_id", stream.id, part.stream_id, "the stream was deleted and made again meanwhile")
    who = Membership(stream, part.group, rank_member(part.order.rank), "", part.order)
    limit = max(1, part.prefetch_bytes // share[1])
    pool = pool_for(stream.require_spec(), part.order.batch, limit)
    queue = PrefetchQueue(limit, pool.trim)
    reader = OrderedReader(  # the claim of one that never joined: only the rank itself reports and sends heartbeats
        RankClaim(client, who, part.lease_s, notify), part.epoch, queue, pool,
        start=part.start, remainder=part.remainder, share=share, views=False,
    )  # fmt: skip
    thread = threading.Thread(target=reader.run, name="penstock-share", daemon=True)
    thread.start()
    try:
        yield from _taken(queue, reader, notify, part.timeout_s)
    finally:
        queue.stop()
        join(thread, 5)


def _taken(queue: PrefetchQueue, reader: OrderedReader, notify: Notify, timeout_s: float | None) -> Iterator[Batch]:
    while True:
        wait = Wait(notify, timeout_s, server=reader.claim.client.where)
        while (batch := queue.get(POLL_S)) is None:
            if queue.is_over:
                return
            wait.because("batch", lambda: reader.why_waiting(wait.seconds))  # noqa: B023  called at once
        yield batch


# --- in the process that trains ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class RemoteBatch:
    """A batch that another process has read."""

    element: Any
    """The batch as the framework has it."""
    epoch: int
    position: int
    size: int
    nbytes: int


class WorkerShares:
    """The rank's side of reading by shares: a loader that learns of batches instead of reading them."""

    def __init__(self, hooks: LoaderHooks) -> None:
        """Make the rank's side. Raises ValueError for a loader of a shared group."""
        if hooks.order is None:
            raise ValueError(
                "worker processes cannot read for a member of a shared group: what it was given is its own, and could "
                "not be acknowledged from here; use num_workers=0, which is the fast way (batches arrive decoded, and "
                "the loader reads ahead in a thread), or a Loader with order='canonical'"
            )
        self._hooks = hooks

    @property
    def identity(self) -> State:
        """Return what a state of this loader is compared by."""
        return self._hooks.identity()

    @property
    def step(self) -> int:
        """Return the positions from one batch of the rank to its next."""
        order = self._hooks.order
        assert order is not None
        return order.world * order.batch

    @property
    def _rank(self) -> RankClaim:
        rank = self._hooks.member.rank
        assert rank is not None
        return rank

    def begin(self, *, is_first: bool) -> EpochPart | None:
        """Return the next pass: the rest of a broken-off epoch or the next one, waited for. None if there is none."""
        hooks, member = self._hooks, self._hooks.member
        if hooks.options.stages:
            raise ValueError("worker processes read what is in the stream; filter() and the like need num_workers=0")
        self.flush()
        member.stop()
        with hooks.counter.waiting_for("producers"):
            epoch = hooks.await_epoch(is_first=is_first)
        if epoch is None:
            hooks.counter.pause()
            return None
        hooks.counter.begin(epoch)
        last, _ = hooks.acknowledger.frontier()
        start = self._rank.take_start(epoch)
        if last is not None and last.epoch == epoch:
            start = last.position  # trained on, though perhaps not acknowledged yet
        return self.part(epoch, start)

    def part(self, epoch: int, start: int) -> EpochPart:
        """Return the rest of an epoch."""
        hooks, options = self._hooks, self._hooks.options
        assert options.order is not None
        return EpochPart(
            url=options.url, stream=hooks.loader.name, stream_id=hooks.loader.stream.id, group=hooks.loader.group,
            order=options.order, epoch=epoch, start=start, remainder=options.remainder,
            prefetch_bytes=options.prefetch_bytes, lease_s=options.lease_s, timeout_s=options.timeout_s,
        )  # fmt: skip

    def take(self, part: EpochPart, carried: RemoteBatch) -> Batch:
        """Return a batch for the framework that was read elsewhere, as if it had been read here."""
        self._rank.heartbeat.raise_error()
        lease = Lease(0, part.epoch, 0, b"", carried.size)
        batch = Batch({"": carried}, carried.epoch, [BatchSpan(lease, 0, carried.size)], carried.position)
        self._hooks.acknowledger.deliver(batch)
        self._hooks.counter.deliver(batch)
        return batch

    def flush(self) -> None:
        """Send acknowledgements again before a wait: one lost with its connection would keep its entry from others."""
        self._hooks.counter.ask()
        self._hooks.acknowledger.flush()

    def end(self, part: EpochPart, last: int) -> bool:
        """End a pass that was read to its end. Return whether it goes on into the next one, as in a feed.

        Args:
            part: the pass.
            last: the position of the last batch.
        """
        hooks = self._hooks
        manifest = hooks.manifest_of(part.epoch)
        self._rank.ended(part.epoch, last, (manifest.samples if manifest is not None else None) or 0)
        hooks.member.passed(part.epoch)
        is_feed = hooks.runs_on(part.epoch)
        hooks.end_epoch(part.epoch, is_feed=is_feed)
        hooks.counter.pause()
        return is_feed
