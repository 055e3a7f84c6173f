"""The writing half of the state machine: epochs, shards and two writers, one of them always outdated, compared with the
model.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from penstock_common.errors import EpochAbandoned, ShardMismatch
from penstock_common.stream.client import connect
from penstock_common.stream.manifest import load_manifest, size_epoch
from penstock_common.stream.streams import load_stream
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.stages.batch import Batch
from penstock_producer.write.shard import ShardWriter
from penstock_producer.write.writer import EpochWriter, Writer
from tests.fuzz.model import Model, ModelEpoch

SPEC = {"x": ("int64", (3,)), "y": ("int64", ())}
MOST_EPOCHS = 4
SHARDS = st.integers(0, 2)
BAD = st.sets(st.integers(0, 11), max_size=2)
SIZES = st.lists(st.sampled_from([0, 5, 13, 20, 20]), min_size=1, max_size=3)


def quiet(_: str) -> None:
    """Ignore a notice."""


class Writing(RuleBasedStateMachine):
    """One stream of two partitions. Every rule does one thing and compares what can be compared at once."""

    url = ""
    names = count()
    steps: ClassVar[Counter[str]] = Counter()
    """The steps of all walks, to see that they did something."""

    def __init__(self) -> None:
        super().__init__()
        self.name = f"m{next(self.names)}"
        self.client = connect(self.url)
        self.writers = [
            Writer(self.name, url=self.url, spec=SPEC, partitions=2, tuning=Tuning(block_bytes=32 * 3, notify=quiet))
            for _ in range(2)
        ]
        self.model = Model()
        self.epochs: dict[int, list[EpochWriter]] = {}
        self.shards: dict[tuple[int, int, int], ShardWriter] = {}
        """(writer, epoch, shard) -> the open shard."""
        self.loaders: dict[tuple[str, str], Loader] = {}
        self.batches: dict[tuple[str, str], list[Batch]] = {}
        self.values = count(1)

    @property
    def stream(self) -> Any:
        """Return the stream as it is now."""
        return load_stream(self.client, self.name)

    def live_epochs(self) -> list[int]:
        """Return the epochs that may be written."""
        return [n for n, epoch in self.model.epochs.items() if epoch.state == "open"]

    # --- writing ---

    @precondition(lambda self: len(self.model.epochs) < MOST_EPOCHS)
    @rule(sizes=SIZES, is_planned=st.booleans())
    def open_epoch(self, sizes: list[int], is_planned: bool) -> None:
        """Open an epoch by both writers.

        Shards of an unplanned epoch have the same sizes, which are not announced yet.
        """
        number = len(self.model.epochs)
        plan = sizes if is_planned else None
        self.epochs[number] = [writer.epoch(number, sizes=plan) for writer in self.writers]
        self.model.epochs[number] = ModelEpoch(sizes, is_planned)

    def shard_writer(self, which: int, epoch: int, shard: int) -> ShardWriter:
        """Return a writer that is kept open between rules, so that it does not know what the other writer commits."""
        key = which, epoch, shard
        if key not in self.shards:
            self.shards[key] = self.epochs[epoch][which].shard(shard)
            assert self.shards[key].position == self.model.epochs[epoch].ends.get(shard, 0)
        return self.shards[key]

    @precondition(lambda self: self.live_epochs())
    @rule(data=st.data(), which=st.integers(0, 1), shard=SHARDS, samples=st.sampled_from([1, 4, 7, 7, 12]), bad=BAD)
    def write(self, data: st.DataObject, which: int, shard: int, samples: int, bad: set[int]) -> None:
        """Write some samples, of which a few are bad."""
        number = data.draw(st.sampled_from(self.live_epochs()))
        if self.is_writable(number, shard):
            self.put(which, number, shard, samples, bad)

    @precondition(lambda self: self.live_epochs())
    @rule(
        data=st.data(),
        shard=SHARDS,
        first=st.integers(0, 1),
        samples=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    )
    def race(self, data: st.DataObject, shard: int, first: int, samples: list[int]) -> None:
        """Let two writers of one shard, which do not know of each other, take turns."""
        number = data.draw(st.sampled_from(self.live_epochs()))
        if self.is_writable(number, shard):
            for which in (0, 1):
                self.shard_writer(which, number, shard)
            for turn, count_ in enumerate(samples):
                self.put((first + turn) % 2, number, shard, count_, set())

    def is_writable(self, number: int, shard: int) -> bool:
        """Return whether the epoch has the shard, and it is not finished."""
        return shard < len(self.model.epochs[number].sizes) and shard not in self.model.epochs[number].finished

    def put(self, which: int, number: int, shard: int, samples: int, bad: set[int]) -> None:
        """Write and commit. Beyond the plan a writer refuses."""
        epoch = self.model.epochs[number]
        writer = self.shard_writer(which, number, shard)
        start = writer.position
        for position in range(min(samples, epoch.sizes[shard] - start)):
            value = None if position in bad else next(self.values)
            if value is None:
                writer.quarantine("bad")
            else:
                writer.write({"x": np.full(3, value), "y": value})
            epoch.commit(shard, writer.position - 1, value)
            self.steps["written"] += 1
        writer.commit_all()
        if samples > epoch.sizes[shard] - start and epoch.is_planned:
            with pytest.raises(ShardMismatch):
                writer.write({"x": np.zeros(3, np.int64), "y": 0})

    @precondition(lambda self: self.live_epochs())
    @rule(data=st.data(), which=st.integers(0, 1), shard=SHARDS)
    def finish_shard(self, data: st.DataObject, which: int, shard: int) -> None:
        """Finish a full shard by a writer that opens it for that."""
        number = data.draw(st.sampled_from(self.live_epochs()))
        epoch = self.model.epochs[number]
        if shard < len(epoch.sizes) and epoch.ends.get(shard, 0) == epoch.sizes[shard] and shard not in epoch.finished:
            self.drop_writers(number, shard)
            self.shard_writer(which, number, shard).close()
            self.drop_writers(number, shard)
            epoch.finished.add(shard)
            if epoch.is_planned and len(epoch.finished) == len(epoch.sizes):
                epoch.state = "produced"
            self.compare_manifest(number)

    def drop_writers(self, epoch: int, shard: int | None = None) -> None:
        """Drop the writers of an epoch, or of one of its shards."""
        for key in [k for k in self.shards if k[1] == epoch and shard in (None, k[2])]:
            self.shards.pop(key).abort()

    @precondition(lambda self: self.live_epochs())
    @rule(data=st.data())
    def finish_epoch(self, data: st.DataObject) -> None:
        """Write whatever its shards still lack, and close it."""
        self.complete(data.draw(st.sampled_from(self.live_epochs())))

    def complete(self, number: int) -> None:
        """Write and close what is not complete."""
        epoch = self.model.epochs[number]
        self.drop_writers(number)
        for shard, size in enumerate(epoch.sizes):
            if shard in epoch.finished:
                continue
            with self.epochs[number][0].shard(shard) as writer:
                while writer.position < size:
                    value = next(self.values)
                    writer.write({"x": np.full(3, value), "y": value})
                    epoch.commit(shard, writer.position - 1, value)
            epoch.finished.add(shard)
        if not epoch.is_planned:
            self.size(number)
        epoch.state = "produced"
        self.compare_manifest(number)

    def size(self, number: int) -> None:
        """Size an epoch, as its own writer does at its end."""
        manifest = load_manifest(self.client, self.stream, number)
        size_epoch(self.client, self.stream, manifest, self.model.epochs[number].sizes)

    @precondition(lambda self: self.live_epochs())
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """Abandon an epoch. No writer that is still under way may add to it."""
        number = data.draw(st.sampled_from(self.live_epochs()))
        epoch = self.model.epochs[number]
        self.epochs[number][0].abandon()
        epoch.state = "abandoned"
        for (_, of, shard), writer in self.shards.items():
            # a sample that another writer has committed is skipped, and needs no live epoch
            if of == number and writer.position == epoch.ends.get(shard, 0) < epoch.sizes[shard]:
                with pytest.raises(EpochAbandoned):
                    writer.write({"x": np.zeros(3, np.int64), "y": 0})
                    writer.commit_all()
        self.drop_writers(number)

    def compare_manifest(self, number: int) -> None:
        """Compare states and finished shards with the model's."""
        epoch, manifest = self.model.epochs[number], load_manifest(self.client, self.stream, number)
        assert set(manifest.done) == epoch.finished
        assert manifest.state == ("produced" if epoch.state == "produced" else "sized" if epoch.is_planned else "open")
