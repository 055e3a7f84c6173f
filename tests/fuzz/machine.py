"""The state machine: writers, groups, retention, replay and audit driven at random, compared with the model of
``model``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from penstock_common.errors import EpochsReleased, ReplayTruncated, WaitTimeout
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.groups.forgetting import drop_group
from penstock_common.stream.groups.roster import Membership, join_group, load_roster
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.cleaner import Cleaner
from tests.contracts.feed import stored
from tests.fuzz.model import ModelGroup, ModelMember
from tests.fuzz.writing import SIZES, Writing, quiet
from tests.tuned import tuned

LEASE_S = 15.0
"""The lease, longer than any stall of the test itself, so that only the rules decide which member is dead."""
PATIENCE_S = 0.4
MOST_HELD = 23
"""The most batches of what a member holds. Choices may be from more."""
GROUPS = st.sampled_from(["declared", "passing"])


class Machine(Writing):
    """One stream of two partitions. Every rule does one thing and compares what can be compared at once."""

    @initialize(sizes=SIZES, is_planned=st.booleans(), group=GROUPS)
    def begin(self, sizes: list[int], is_planned: bool, group: str) -> None:
        """Open an epoch with a reader, which most faults need."""
        self.open_epoch(sizes, is_planned)
        self.join(group, "a", "manual")

    # --- reading ---

    @rule(group=GROUPS, member=st.sampled_from(["a", "b"]), policy=st.sampled_from(["manual", "on_next"]))
    def join(self, group: str, member: str, policy: str) -> None:
        """Join a new member, or one that died before and comes back under its name."""
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
        """Return a member that is impatient and quiet."""
        return Loader(
            self.name,
            group=group,
            url=self.url,
            batch_size=4,
            acknowledge=policy,
            **tuned("Loader", options, Tuning(member=member, lease_s=LEASE_S, timeout_s=PATIENCE_S, notify=quiet)),
        )

    def first_whole(self) -> int:
        """Return where a group begins: the first retained epoch after all that retention removed entries of."""
        trimmed = max((e for p in self.stream.partitions for e in load_roster(self.client, p).trimmed), default=-1)
        there = (number for number, epoch in self.model.epochs.items() if epoch.state != "released")
        return min((number for number in there if number > trimmed), default=len(self.model.epochs))

    def may_read(self, group: str) -> bool:
        """Return whether a read would bring something, or end an epoch, soon."""
        return bool(self.model.owed(group))

    @precondition(lambda self: self.loaders)
    @rule(data=st.data(), most=st.integers(1, 4))
    def read(self, data: st.DataObject, most: int) -> None:
        """Read a few batches of the group's next epoch."""
        group, member = data.draw(st.sampled_from(sorted(self.loaders)))
        if self.may_read(group):
            self.read_batches(group, member, most)

    def read_batches(self, group: str, member: str, most: int) -> int:
        """Read at most ``most`` batches of one iteration, and return their number."""
        loader, mine = self.loaders[group, member], self.model.groups[group].members[member]
        batches, taken = self.batches[group, member], 0
        iterator = iter(loader)
        while taken < most:
            if mine.policy == "on_next":  # a request for the next batch acknowledges the last
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
        """Count everything that a member was given as trained on."""
        mine = self.model.groups[group].members[member]
        for handed in mine.handed:
            self.model.settle(group, handed)
        mine.handed.clear()
        self.batches[group, member].clear()

    @precondition(lambda self: any(self.batches.values()))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        """Acknowledge all, or some in any order, of what a member with 'manual' holds."""
        able = [key for key in sorted(self.batches) if self.batches[key] and self.policy(key) == "manual"]
        if not able:
            return
        group, member = data.draw(st.sampled_from(able))
        mine, batches = self.model.groups[group].members[member], self.batches[group, member]
        # not by what is held, because a walk may be repeated
        drawn = data.draw(st.sets(st.integers(0, MOST_HELD), min_size=1))
        for position in sorted({place % len(batches) for place in drawn}, reverse=True):
            self.loaders[group, member].acknowledge(batches.pop(position))
            self.model.settle(group, mine.handed.pop(position))

    def policy(self, key: tuple[str, str]) -> str:
        """Return the policy of a member."""
        return self.model.groups[key[0]].members[key[1]].policy

    @precondition(lambda self: self.loaders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """End normally: what was not acknowledged is returned."""
        self.leave_as(*data.draw(st.sampled_from(sorted(self.loaders))))

    def leave_as(self, group: str, member: str) -> None:
        """End this member normally."""
        if self.policy((group, member)) == "on_next":
            self.settle_all(group, member)
        self.loaders.pop((group, member)).close()
        self.batches.pop((group, member))
        del self.model.groups[group].members[member]

    @precondition(lambda self: self.loaders)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """End silently. What it acknowledged has reached the server."""
        self.kill(*data.draw(st.sampled_from(sorted(self.loaders))))

    def kill(self, group: str, member: str) -> None:
        """Return what it was given and had not acknowledged."""
        killed(self.loaders.pop((group, member)))
        self.steps["killed"] += 1
        self.batches.pop((group, member))
        ours = self.model.groups[group]
        del ours.members[member]
        ours.dead.add(member)

    @precondition(lambda self: self.loaders)
    @rule(data=st.data(), settled=st.integers(0, 2))
    def fall_and_rise(self, data: st.DataObject, settled: int) -> None:
        """Die in the middle of its batches, some of them acknowledged, and come back under its name."""
        group, member = key = data.draw(st.sampled_from(sorted(self.loaders)))
        if not self.may_read(group):
            return
        self.read_batches(group, member, 3)
        mine, policy = self.model.groups[group].members[member], self.policy(key)
        if policy == "manual":
            for batch in self.batches[key][:settled]:
                self.loaders[key].acknowledge(batch)
                self.model.settle(group, mine.handed.pop(0))
        self.kill(group, member)
        self.join(group, member, policy)

    @rule(group=GROUPS)
    def drop(self, group: str) -> None:
        """Run `penstock groups drop` for a group without members."""
        ours = self.model.groups.get(group)
        if ours is not None and not ours.members:
            assert drop_group(self.client, self.stream, group)
            del self.model.groups[group]

    # --- retention, replay, audit ---

    @rule(need=st.sampled_from([1, 200, 1 << 40]), partition=st.integers(0, 1))
    def make_room(self, need: int, partition: int) -> None:
        """Free space. Every group that holds data has acknowledged the removed samples, or they were abandoned."""
        stream = self.stream
        if not self.model.groups:
            return
        Cleaner(self.client, stream, quiet).free_bytes(stream.partitions[partition], need)
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
        """Replay a produced epoch, the same and in order, or with an error if retention removed some of it."""
        number = data.draw(st.sampled_from([n for n, e in self.model.epochs.items() if e.state == "produced"]))
        epoch = self.model.epochs[number]
        is_whole = set(stored(self.client, self.name, number)) == set(epoch.committed)
        with Replay(self.name, epoch=number, batch_size=5, url=self.url, tuning=Tuning(notify=quiet)) as replay:
            if is_whole:
                self.steps["replayed"] += 1
                assert [value for batch in replay for value in batch["y"].tolist()] == epoch.canonical
            else:
                with pytest.raises(ReplayTruncated):
                    list(replay)

    @rule()
    def audit(self) -> None:
        """Audit. Nothing that the rules do may look like a loss or a forgery."""
        for loader in self.loaders.values():
            if loader._member is not None:
                loader._member.claim.flush()
        report = audit_stream(self.client, self.name, deep=True)
        assert report.is_clean, [finding for epoch in report.epochs for finding in epoch.findings]
        for found in report.epochs:
            epoch = self.model.epochs[found.epoch]
            assert (found.produced, found.duplicate) == (len(epoch.committed), 0)

    def teardown(self) -> None:
        """Require that, once all is written and read, each group has acknowledged exactly what was committed."""
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
        """Complete epochs, let all members come back, and read to the end."""
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
    """End a loader as its process's death would, once its acknowledgements have arrived."""
    loader._closing.detach()
    if (member := loader._resources.member) is not None:
        member.claim.flush()
        if member.run is not None:
            member.run.queue.inner.stop()
            member.run.thread.join(timeout=10)
        member.heartbeat.stop()
        member.claim.close()
    loader._client.close()
