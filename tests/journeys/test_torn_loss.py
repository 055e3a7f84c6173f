"""A master of a cluster comes back without its newest writes, at each step of an epoch.

Nothing is lost where writes wait for a replica. Elsewhere every lost sample is made again, or named. No step waits for
ever, raises a foreign exception, or leaves a clean audit over a hole.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

import penstock
from penstock_common.errors import (
    EpochAbandoned,
    EpochIncomplete,
    EpochNotFound,
    EpochsReleased,
    PenstockError,
    ServerUnsuitable,
)
from penstock_common.stream.audit import AuditReport, audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.manifest import EpochNumberTaken
from penstock_common.stream.removal.reconcile import reconcile
from penstock_common.stream.servers.embedded import find_servers
from penstock_common.stream.streams import load_stream
from penstock_producer.write.cleaner import clean_up
from penstock_producer.write.retention import parse_policy
from penstock_producer.write.writer import EpochWriter
from tests.clusters import Cluster, started_cluster
from tests.contracts.feed import accounted_bytes, payload_bytes
from tests.torn import TornPair, torn_master_of

PARTITIONS, SHARDS, EACH, BLOCK = 3, 3, 60, 10
SIZE = 8000
SPEC = {"x": ("uint8", (SIZE - 8,)), "y": ("int64", ())}
BUDGET = PARTITIONS * 1_000_000
"""Two epochs do not fit, and the acknowledged half of the first one must go for the second."""
ALL = {(epoch, number) for epoch in (0, 1) for number in range(SHARDS * EACH)}
TORN_S = 1.0
"""The time that a step has before the master dies. A step that waits for the replica goes on afterwards."""
TRIES = 10
"""The number of times that a program that meets errors is started."""
HANG_S = 30.0
"""Far more than a failover and all that waits for it."""


class Life:
    """The life of two epochs, step by step, with a master that is lost in one of the steps."""

    def __init__(self, cluster: Cluster, name: str, durability: str, first: int) -> None:
        """Make the stream. The epochs begin with shard ``first``."""
        self.name, self.url, self._durability = name, cluster.url, durability
        self._order = [(first + number) % SHARDS for number in range(SHARDS)]
        self.errors: list[PenstockError] = []
        self.seen: set[tuple[int, int]] = set()
        self.epochs: dict[int, int] = {}
        """Each number on the server -> the epoch that had it."""
        self._numbers: dict[int, int] = {}
        """Epoch -> its number on the server. A number that the server lost is used no more."""
        self._released: set[int] = set()
        self._writer: penstock.Writer | None = None
        self._loader: penstock.Loader | None = None
        self._batches: Iterator[penstock.Batch] = iter(())
        self._start = "resume"
        self._last: int | None = None
        """The epoch of the last batch of this loader."""
        self._ended: set[int] = set()
        self._begin()

    # --- the parts, each of which may run again ---

    def _begin(self) -> penstock.Writer:
        if self._writer is None:
            tuning = penstock.Tuning(durability=self._durability, block_bytes=BLOCK * SIZE, notify=lambda _: None)
            self._writer = penstock.Writer(
                self.name, url=self.url, spec=SPEC, partitions=PARTITIONS, budget_bytes=BUDGET, tuning=tuning
            )
        return self._writer

    def _open(self, epoch: int) -> EpochWriter:
        """Open an epoch, under the number that it has, or under the next one."""
        opened = self._begin().epoch(self._numbers.get(epoch), sizes=[EACH] * SHARDS, fingerprint="numbers")
        self._numbers[epoch] = opened.number
        self.epochs[opened.number] = epoch
        return opened

    def _write(self, epoch: int, shard: int, end: int = EACH) -> None:
        """Write a shard from where it is, as every run of a job does. A whole shard is ended."""
        try:
            writer = self._open(epoch).shard(shard)
            for offset in range(writer.position, end):
                number = shard * EACH + offset
                writer.write({"x": np.full(SIZE - 8, number, np.uint8), "y": number})
            writer.close() if end == EACH else writer.flush()
        except (EpochNumberTaken, EpochNotFound, EpochAbandoned):
            self._numbers.pop(epoch, None)
            raise

    def _make_again(self, *epochs: int) -> None:
        """Write what the server lost of epochs, as a source does that can make it again."""
        if self._durability == "memory":
            for epoch in {*epochs} - self._released:
                for shard in self._order:
                    self._write(epoch, shard)

    def _join(self) -> None:
        if self._loader is None:
            tuning = penstock.Tuning(notify=lambda _: None, prefetch_bytes=EACH * SIZE, lease_s=10.0)
            self._loader = penstock.Loader(
                self.name,
                group="g",
                batch_size=BLOCK,
                url=self.url,
                start=self._start,
                acknowledge="manual",
                tuning=tuning,
            )
            self._start = "resume"
            self._batches = iter(self._loader)

    def _read(self, epoch: int, count: int) -> None:
        """Train on an epoch until ``count`` of its samples are known, or until it ends."""
        while max(self._ended, default=-1) < epoch and len(self._known(epoch)) < count:
            self._join()
            assert self._loader is not None
            for batch in self._batches:
                assert (batch["x"] == batch["y"].astype(np.uint8)[:, None]).all()
                self._last = self.epochs[batch.epoch]
                self.seen |= {(self._last, int(number)) for number in batch["y"]}
                self._loader.acknowledge(batch)
                if len(self._known(epoch)) >= count or self._last > epoch:
                    return
            if self._last is not None:
                self._ended.add(self._last)
            self._batches = iter(self._loader)

    def _known(self, epoch: int) -> list[int]:
        return [number for of, number in self.seen if of == epoch]

    def restart(self) -> None:
        """End everything, as a program does that met an error."""
        for part in (self._writer, self._loader):
            with suppress(PenstockError):
                if part is not None:
                    part.close()
        self._writer = self._loader = self._last = None

    # --- the steps ---

    def opened(self) -> None:
        """Open an epoch."""
        self._open(0)

    def first_block(self) -> None:
        """Commit the first block."""
        self._write(0, self._order[0], BLOCK)

    def shard_done(self) -> None:
        """End the first shard."""
        self._write(0, self._order[0])

    def produced(self) -> None:
        """End the epoch."""
        for shard in self._order:
            self._write(0, shard)

    def joined(self) -> None:
        """Join a group."""
        self._join()

    def acknowledged(self) -> None:
        """Train on half of the epoch."""
        self._read(0, SHARDS * EACH // 2)

    def trimmed(self) -> None:
        """Write an epoch that has no space without what is acknowledged of the first one."""
        self._make_again(0)
        for shard in self._order:
            self._write(1, shard)

    def released(self) -> None:
        """Release the first epoch after its last sample."""
        self._make_again(0, 1)
        self._read(0, SHARDS * EACH)
        self._read(1, 1)
        with connect(self.url) as client:
            clean_up(client, load_stream(client, self.name), lambda _: None, policy=parse_policy("epochs:0"))
        self._released.add(0)

    def trained(self) -> None:
        """Train on everything."""
        self._make_again(0, 1)
        self._read(0, SHARDS * EACH)
        self._read(1, SHARDS * EACH)

    def __call__(self, step: str) -> None:
        """Take a step. A program that meets an error is started again, and producers make again what is missing."""
        for _ in range(TRIES):
            try:
                getattr(self, step)()
                return
            except PenstockError as error:
                self.errors.append(error)
                if isinstance(error, EpochsReleased):  # which names them, and says how to go on
                    self._start = "remaining"
                self.restart()
                time.sleep(0.2)  # the next replica may not follow yet


AGAIN = ServerUnsuitable
"""The error of a program that starts before a replica follows. Nothing is lost."""
STEPS = ["opened", "first_block", "shard_done", "produced", "joined", "acknowledged", "trimmed", "released"]


class Run(threading.Thread):
    """A call in a thread."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Call, and keep the exception."""
        try:
            self._call()
        except BaseException as error:
            self._error = error

    def end(self, step: str) -> None:
        """Raise what it raised. Raises AssertionError for a hang."""
        self.join(HANG_S)
        assert not self.is_alive(), f"the step {step!r} hangs"
        if self._error is not None:
            raise self._error


def audited(cluster: Cluster, name: str) -> AuditReport:
    """The report of the audit, with payloads."""
    with connect(cluster.url) as client:
        return audit_stream(client, name, deep=True)


def named(life: Life, report: AuditReport) -> set[tuple[int, int]]:
    """The samples that an error or the audit calls lost."""
    ranges: set[tuple[int, int, int, int]] = set()
    for error in life.errors:
        if isinstance(error, EpochIncomplete):
            ranges |= {
                (epoch, *one) for one in error.missing for epoch in life.epochs if f"epoch {epoch} " in str(error)
            }
    for epoch in report.epochs:
        for group in epoch.groups.values():
            ranges |= {(epoch.epoch, *one) for one in group.lost_ranges}
        ranges |= {(epoch.epoch, loss.shard, loss.first, loss.end) for loss in epoch.server_losses}
        ranges |= {(epoch.epoch, one.shard, one.first, one.end) for one in epoch.missing}
    return {(life.epochs[epoch], shard * EACH + at) for epoch, shard, first, end in ranges for at in range(first, end)}


def replayed(cluster: Cluster, name: str, epoch: int) -> set[int]:
    """The samples of an epoch that are still there."""
    with penstock.Replay(name, url=cluster.url, epoch=epoch, batch_size=BLOCK) as replay:
        return {int(number) for batch in replay for number in batch["y"]}


def torn_life(cluster: Cluster, durability: str, place: str, torn: str) -> tuple[Life, AuditReport]:
    """Live through all steps, lose a master's newest writes in one of them, and return what became of it."""
    life = Life(cluster, f"{torn}.{place}.{durability[:8]}", durability, first=0 if place == "stream" else 1)
    with connect(cluster.url) as client:
        stream = load_stream(client, life.name)
    key = stream.keys.meta if place == "stream" else stream.partitions[1].roster
    assert cluster.master_of(stream.keys.meta) is not cluster.master_of(stream.partitions[1].roster)
    with torn_master_of(cluster, key) as pair:
        for step in [*STEPS, "trained"]:
            if step == torn:
                tear(cluster, life, step, pair)
                report = audited(cluster, life.name)
                state = {one.epoch: one.state for one in report.epochs}
                for number in (number for number, found in state.items() if report.is_clean and found == "produced"):
                    if not any(epoch.trimmed for epoch in report.epochs if epoch.epoch == number):
                        assert len(replayed(cluster, life.name, number)) == SHARDS * EACH, "a clean audit over a hole"
            else:
                Run(lambda step=step: life(step)).end(step)  # type: ignore[misc]
    life.restart()
    with connect(cluster.url) as client:
        reconcile(client, load_stream(client, life.name), lambda _: None)  # `penstock trim` does so
    return life, audited(cluster, life.name)


def tear(cluster: Cluster, life: Life, step: str, pair: TornPair) -> None:
    """Take a step whose writes to one master are lost."""
    pair.cut_off()
    run = Run(lambda: life(step))
    run.join(TORN_S)
    pair.fail_over()
    cluster.add_replica(pair.replica)
    run.end(step)


@pytest.fixture(scope="module")
def lasting() -> Iterator[Cluster]:
    """Three masters, each with a replica."""
    with started_cluster(find_servers()[0], replicas=1) as cluster:
        yield cluster


@pytest.fixture
def cluster(lasting: Cluster) -> Cluster:
    """Return the module's cluster, without keys. Each master has a replica, also after a test that failed."""
    lasting.empty()
    for master in lasting.masters:
        if not lasting.has_replica(master):
            lasting.add_replica(master)
    return lasting


@pytest.fixture(autouse=True)
def _quick_cleaner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cleaners run often, and take a writer that was silent for a second for one that has ended."""
    monkeypatch.setattr("penstock_producer.write.cleaner.CLEAN_UP_EVERY_S", 0.5)
    monkeypatch.setattr("penstock_common.stream.audit.reconciliation.ALIVE_MS", 1000)


def _cases() -> list[tuple[str, str, str]]:
    """Every step, place and level, or in the suite one place of each step and of two levels."""
    every = itertools.product(STEPS, ["stream", "partition"], ["memory", "auto", "replicas=1"])
    return [one for one in every if "PENSTOCK_TEST_EVERY_TORN" in os.environ or one[1:] in SUITE]


SUITE = [("partition", "memory"), ("stream", "auto")]
"""The cases that `make test` runs. `make torn` runs all, in four minutes."""


@pytest.mark.parametrize(("torn", "place", "durability"), _cases())
def test_what_a_master_lost_at_a_step_is_made_again_or_named(
    cluster: Cluster, torn: str, place: str, durability: str
) -> None:
    """One slot that is older than the others has led to epochs with holes, to leaked bytes and to endless waits."""
    life, report = torn_life(cluster, durability, place, torn)
    lost = ALL - life.seen
    if durability != "memory":
        assert all(isinstance(error, AGAIN) for error in life.errors), life.errors
        assert lost == set()
        assert report.findings == []
    assert lost <= named(life, report), life.errors
    with connect(cluster.url) as client:
        _, by_epoch = accounted_bytes(client, life.name)
        assert by_epoch == {
            one.epoch: payload_bytes(client, life.name, one.epoch) for one in report.epochs if one.produced
        }
