"""Writers, groups and ledger driven by chance on a real server, step by step beside a model of dictionaries.

Long: ``make fuzz TARGET=model SECONDS=600``. What breaks shrinks to a few steps that read as a program.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar

import numpy as np
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from penstock_common.errors import EpochAbandoned, EpochsReleased, ReplayTruncated, ShardMismatch, WaitTimeout
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.connection import connect
from penstock_common.stream.manifest import load_manifest, size_epoch
from penstock_common.stream.roster import Membership, drop_group, join_group, load_roster
from penstock_common.stream.server import EmbeddedServer
from penstock_common.stream.streams import load_stream
from penstock_consumer.loader import Loader
from penstock_consumer.pipeline.batch import Batch
from penstock_consumer.replay import Replay
from penstock_producer.janitor import Janitor
from penstock_producer.shard import ShardWriter
from penstock_producer.writer import EpochWriter, Writer
from tests.contracts.feed import stored
from tests.fuzz.model import Model, ModelEpoch, ModelGroup, ModelMember

SPEC = {"x": ("int64", (3,)), "y": ("int64", ())}
LEASE_S = 15.0
"""Longer than any stall of the test itself, so that only the rules decide who is dead."""
PATIENCE_S = 0.4
MOST_EPOCHS = 4
GROUPS = st.sampled_from(["declared", "passing"])
SHARDS = st.integers(0, 2)
BAD = st.sets(st.integers(0, 11), max_size=2)
SIZES = st.lists(st.sampled_from([0, 5, 13, 20, 20]), min_size=1, max_size=3)


def quiet(_: str) -> None:
    """Says nothing."""


class Machine(RuleBasedStateMachine):
    """One stream of two partitions; every rule does one thing and compares what can be compared at once."""

    url = ""
    names = count()
    steps: ClassVar[Counter[str]] = Counter()
    """What all walks did, to see that they did something."""

    def __init__(self) -> None:
        super().__init__()
        self.name = f"m{next(self.names)}"
        self.client = connect(self.url)
        self.writers = [
            Writer(self.name, url=self.url, spec=SPEC, partitions=2, block_bytes=32 * 3, notify=quiet) for _ in range(2)
        ]
        self.model = Model()
        self.epochs: dict[int, list[EpochWriter]] = {}
        self.shards: dict[tuple[int, int, int], ShardWriter] = {}
        """(writer, epoch, shard)."""
        self.loaders: dict[tuple[str, str], Loader] = {}
        self.batches: dict[tuple[str, str], list[Batch]] = {}
        self.values = count(1)

    @property
    def stream(self) -> Any:
        """The stream as it is now."""
        return load_stream(self.client, self.name)

    def live_epochs(self) -> list[int]:
        """Epochs that may be written."""
        return [n for n, epoch in self.model.epochs.items() if epoch.state == "open"]

    # --- writing ---

    @initialize(sizes=SIZES, is_planned=st.booleans(), group=GROUPS)
    def begin(self, sizes: list[int], is_planned: bool, group: str) -> None:
        """Most of what can go wrong needs an epoch and somebody who reads it."""
        self.open_epoch(sizes, is_planned)
        self.join(group, "a", "manual")

    @precondition(lambda self: len(self.model.epochs) < MOST_EPOCHS)
    @rule(sizes=SIZES, is_planned=st.booleans())
    def open_epoch(self, sizes: list[int], is_planned: bool) -> None:
        """By both writers; shards of an epoch that is not planned have the same sizes, which nobody says yet."""
        number = len(self.model.epochs)
        plan = sizes if is_planned else None
        self.epochs[number] = [writer.epoch(number, sizes=plan) for writer in self.writers]
        self.model.epochs[number] = ModelEpoch(sizes, is_planned)

    def shard_writer(self, which: int, epoch: int, shard: int) -> ShardWriter:
        """Kept open between rules, so that it knows nothing of what the other writer commits meanwhile."""
        key = which, epoch, shard
        if key not in self.shards:
            self.shards[key] = self.epochs[epoch][which].shard(shard)
            assert self.shards[key].position == self.model.epochs[epoch].ends.get(shard, 0)
        return self.shards[key]

    @precondition(lambda self: self.live_epochs())
    @rule(data=st.data(), which=st.integers(0, 1), shard=SHARDS, samples=st.sampled_from([1, 4, 7, 7, 12]), bad=BAD)
    def write(self, data: st.DataObject, which: int, shard: int, samples: int, bad: set[int]) -> None:
        """Some samples, of which a few are bad."""
        number = data.draw(st.sampled_from(self.live_epochs()))
        epoch = self.model.epochs[number]
        if shard >= len(epoch.sizes) or shard in epoch.finished:
            return
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
        writer.settle()
        if samples > epoch.sizes[shard] - start and epoch.is_planned:
            with pytest.raises(ShardMismatch):
                writer.write({"x": np.zeros(3, np.int64), "y": 0})

    @precondition(lambda self: self.live_epochs())
    @rule(data=st.data(), which=st.integers(0, 1), shard=SHARDS)
    def finish_shard(self, data: st.DataObject, which: int, shard: int) -> None:
        """A shard that is full, closed by a writer that comes new to it."""
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
        """Gives up the writers of an epoch, or of one of its shards."""
        for key in [k for k in self.shards if k[1] == epoch and shard in (None, k[2])]:
            self.shards.pop(key).abort()

    @precondition(lambda self: self.live_epochs())
    @rule(data=st.data())
    def finish_epoch(self, data: st.DataObject) -> None:
        """Whatever its shards still lack is written, then it is closed."""
        self.complete(data.draw(st.sampled_from(self.live_epochs())))

    def complete(self, number: int) -> None:
        """Writes and closes what is not."""
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
        """What an epoch's own writer says at its end."""
        manifest = load_manifest(self.client, self.stream, number)
        size_epoch(self.client, self.stream, manifest, self.model.epochs[number].sizes)

    @precondition(lambda self: self.live_epochs())
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """No writer that is still under way may add to it."""
        number = data.draw(st.sampled_from(self.live_epochs()))
        stale = [writer for key, writer in self.shards.items() if key[1] == number]
        self.epochs[number][0].abandon()
        self.model.epochs[number].state = "abandoned"
        for writer in stale:
            with suppress(ShardMismatch), pytest.raises(EpochAbandoned):
                writer.write({"x": np.zeros(3, np.int64), "y": 0})
                writer.settle()
        self.drop_writers(number)

    def compare_manifest(self, number: int) -> None:
        """States and finished shards are the model's."""
        epoch, manifest = self.model.epochs[number], load_manifest(self.client, self.stream, number)
        assert set(manifest.done) == epoch.finished
        assert manifest.state == ("produced" if epoch.state == "produced" else "sized" if epoch.is_planned else "open")

    # --- reading ---

    @rule(group=GROUPS, member=st.sampled_from(["a", "b"]), policy=st.sampled_from(["manual", "on_next"]))
    def join(self, group: str, member: str, policy: str) -> None:
        """A new member, or one that died before and comes back under its name."""
        if (group, member) in self.loaders:
            return
        ours = self.model.groups.get(group)
        if ours is None and group == "declared":
            join_group(self.client, Membership(self.stream, group, "", ""), declared=True)
        try:
            loader = self.loader(group, member, policy)
        except EpochsReleased:
            assert ours is not None
            assert not ours.holds
            ours.settled.clear()
            loader = self.loader(group, member, policy, start="earliest")
            ours.first = self.first_whole()
        if ours is None:
            ours = self.model.groups[group] = ModelGroup(self.first_whole(), declared=group == "declared")
        ours.dead.discard(member)
        ours.members[member] = ModelMember(member, policy)
        self.loaders[group, member], self.batches[group, member] = loader, []

    def loader(self, group: str, member: str, policy: Any, **options: Any) -> Loader:
        """A member, impatient and quiet."""
        return Loader(
            self.name, group=group, member=member, url=self.url, batch_size=4, lease_s=LEASE_S, timeout_s=PATIENCE_S,
            acknowledge=policy, notify=quiet, **options,
        )  # fmt: skip

    def first_whole(self) -> int:
        """Where a new group must begin: behind everything that retention has touched."""
        touched = [number for number, epoch in self.model.epochs.items() if epoch.state == "released"]
        for partition in self.stream.partitions:
            touched += load_roster(self.client, partition).trimmed
        return max(touched, default=-1) + 1

    def may_read(self, group: str) -> bool:
        """Whether a read would bring something, or end an epoch, soon."""
        return bool(self.model.owed(group))

    @precondition(lambda self: self.loaders)
    @rule(data=st.data(), most=st.integers(1, 4))
    def read(self, data: st.DataObject, most: int) -> None:
        """A few batches of the group's next epoch."""
        group, member = data.draw(st.sampled_from(sorted(self.loaders)))
        if self.may_read(group):
            self.read_batches(group, member, most)

    def read_batches(self, group: str, member: str, most: int) -> int:
        """Reads one iteration, at most so many batches; how many came."""
        loader, mine = self.loaders[group, member], self.model.groups[group].members[member]
        batches, taken = self.batches[group, member], 0
        iterator = iter(loader)
        while taken < most:
            if mine.policy == "on_next":  # to ask for the next is to acknowledge the last
                self.settle_all(group, member)
            try:
                batch = next(iterator)
            except (StopIteration, WaitTimeout):
                break
            assert (np.repeat(batch["y"][:, None], 3, axis=1) == batch["x"]).all()
            self.model.deliver(group, member, zip(batch.identities(), batch["y"].tolist(), strict=True))
            batches.append(batch)
            taken += 1
            self.steps["delivered"] += batch.size
        iterator.close()  # type: ignore[attr-defined]  # a generator, which goes on where it was at the next iteration
        return taken

    def settle_all(self, group: str, member: str) -> None:
        """Everything a member was handed counts as trained on."""
        mine = self.model.groups[group].members[member]
        for handed in mine.handed:
            self.model.settle(group, handed)
        mine.handed.clear()
        self.batches[group, member].clear()

    @precondition(lambda self: any(self.batches.values()))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        """All, or in any order some, of what a member with 'manual' holds."""
        able = [key for key in sorted(self.batches) if self.batches[key] and self.policy(key) == "manual"]
        if not able:
            return
        group, member = data.draw(st.sampled_from(able))
        mine, batches = self.model.groups[group].members[member], self.batches[group, member]
        for position in sorted(data.draw(st.sets(st.integers(0, len(batches) - 1), min_size=1)), reverse=True):
            self.loaders[group, member].acknowledge(batches.pop(position))
            self.model.settle(group, mine.handed.pop(position))

    def policy(self, key: tuple[str, str]) -> str:
        """When a member acknowledges."""
        return self.model.groups[key[0]].members[key[1]].policy

    @precondition(lambda self: self.loaders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A normal end: what was not acknowledged is handed back."""
        self.leave_as(*data.draw(st.sampled_from(sorted(self.loaders))))

    def leave_as(self, group: str, member: str) -> None:
        """A normal end of this member."""
        if self.policy((group, member)) == "on_next":
            self.settle_all(group, member)
        self.loaders.pop((group, member)).close()
        self.batches.pop((group, member))
        del self.model.groups[group].members[member]

    @precondition(lambda self: self.loaders)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Ends without a word; what it acknowledged has reached the server."""
        group, member = data.draw(st.sampled_from(sorted(self.loaders)))
        killed(self.loaders.pop((group, member)))
        self.steps["killed"] += 1
        self.batches.pop((group, member))
        ours = self.model.groups[group]
        del ours.members[member]
        ours.dead.add(member)

    @rule(group=GROUPS)
    def drop(self, group: str) -> None:
        """An operator drops a group without members."""
        ours = self.model.groups.get(group)
        if ours is not None and not ours.members:
            assert drop_group(self.client, self.stream, group)
            del self.model.groups[group]

    # --- retention, replay, audit ---

    @rule(need=st.sampled_from([1, 200, 1 << 40]), partition=st.integers(0, 1))
    def make_room(self, need: int, partition: int) -> None:
        """What is removed was settled by every group that holds data, or abandoned."""
        stream = self.stream
        if not self.model.groups:
            return
        Janitor(self.client, stream, stream.partitions[partition], quiet).make_room(need)
        retained = load_roster(self.client, stream.partitions[0]).epochs
        for number, epoch in self.model.epochs.items():
            if epoch.state == "released":
                continue
            there = stored(self.client, self.name, number) if number in retained else {}
            self.steps["removed"] += len(epoch.committed) - len(there)
            gone = {(number, *place) for place in epoch.committed if place not in there}
            if epoch.state != "abandoned":
                assert all(gone <= group.settled for group in self.model.holding(number))
            if number not in retained:
                assert epoch.state in ("produced", "abandoned")
                epoch.state = "released"

    @precondition(lambda self: any(epoch.state == "produced" for epoch in self.model.epochs.values()))
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        """A produced epoch again, the same and in order, or an error where retention removed some of it."""
        number = data.draw(st.sampled_from([n for n, e in self.model.epochs.items() if e.state == "produced"]))
        epoch = self.model.epochs[number]
        is_whole = set(stored(self.client, self.name, number)) == set(epoch.committed)
        with Replay(self.name, epoch=number, batch_size=5, url=self.url, notify=quiet) as replay:
            if is_whole:
                self.steps["replayed"] += 1
                assert [value for batch in replay for value in batch["y"].tolist()] == epoch.canonical
            else:
                with pytest.raises(ReplayTruncated):
                    list(replay)

    @rule()
    def audit(self) -> None:
        """Nothing the rules do may look like a loss or a forgery."""
        for loader in self.loaders.values():
            if loader._reading is not None:
                loader._reading.place.flush()
        report = audit_stream(self.client, self.name, deep=True)
        assert report.is_clean, [finding for epoch in report.epochs for finding in epoch.findings]
        for found in report.epochs:
            epoch = self.model.epochs[found.epoch]
            assert (found.produced, found.duplicate) == (len(epoch.committed), 0)

    def teardown(self) -> None:
        """Whatever happened: once all is written and read, each group has settled exactly what was committed."""
        try:
            self.end()
        finally:
            for loader in self.loaders.values():
                killed(loader)
            for shard in self.shards.values():
                shard.abort()
            for writer in self.writers:
                writer.close()
            self.client.close()

    def end(self) -> None:
        """Completes epochs, lets everybody come back, and reads to the end."""
        for number in self.live_epochs():
            self.complete(number)
        for group, ours in self.model.groups.items():
            for member in [*ours.members]:
                self.leave_as(group, member)
            for member in [*ours.dead] or ["a"]:
                self.join(group, member, "manual")
            while self.model.owed(group):
                before = self.model.owed(group)
                for member in ours.members:
                    while self.read_batches(group, member, 100):
                        pass
                    for batch in self.batches[group, member]:
                        self.loaders[group, member].acknowledge(batch)
                    self.settle_all(group, member)
                assert self.model.owed(group) < before, f"{group} is never given {before}"
        self.audit()


def killed(loader: Loader) -> None:
    """Ends a loader as its process's death would, once its acknowledgements have arrived."""
    loader._closing.detach()
    if (reading := loader._session.reading) is not None:
        reading.place.flush()
        if reading.run is not None:
            reading.run.queue.stop()
            reading.run.thread.join(timeout=10)
        reading.keeper.stop()
        outbox: Any = reading.place
        outbox._outbox.close()
    loader._client.close()


def test_whatever_writers_and_trainers_do_each_group_settles_exactly_what_was_committed(
    any_server: EmbeddedServer, any_client: redis.Redis
) -> None:
    """The promises hold in every order of steps, not only in those somebody thought of."""
    Machine.url = any_server.url
    Machine.steps.clear()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=12, stateful_step_count=30, deadline=None, derandomize=True, database=None, print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    assert all(Machine.steps[done] for done in ("written", "delivered", "killed", "removed", "replayed")), Machine.steps
