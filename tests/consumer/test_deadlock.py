"""Deadlocks: all readers wait for each other. One that can end the wait gets an error, and none while one is at
work.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import BudgetFull, CheckpointOverdue, PenstockError, TooLarge
from penstock_common.explain.deadlock import (
    SETTLED_MS,
    BlockedPartition,
    Deadlock,
    Releasable,
    find_blocked,
    find_deadlock,
    is_deadlock,
    is_overdue,
)
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.forgetting import drop_group
from penstock_common.stream.groups.presence import MEMBER_SILENT_MS
from penstock_common.stream.groups.roster import Membership, WaitingWriter, beat, join_group, load_roster, note_wait
from penstock_common.tuning import Canonical
from penstock_producer.write.writer import Writer, WriterHooks
from tests.clusters import until
from tests.consumer.test_acknowledge_policies import BLOCK, BUDGET, writing
from tests.contracts.feed import SAMPLE_BYTES, SPEC, loader_of, open_stream, sample, writer_of
from tests.torn_slots import partition_slot
from tests.tuned import tuned

COUNT = 1000
"""The samples of the epoch. The budget holds 400."""
AHEAD = 300
"""The samples of the budget that shards may fill although no reader waits for them."""
PATIENCE_S = 3.0
BEYOND_S = PATIENCE_S + 2
"""A wait in which a loop would have been told, if it could be told."""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the patience, because half a minute is long for a test."""
    monkeypatch.setattr("penstock_consumer.read.ack.OTHER_THREAD_S", PATIENCE_S)
    monkeypatch.setattr("penstock_consumer.read.ack.DEADLOCK_LOOK_S", 0.5)


class Group(threading.Thread):
    """A trainer that acknowledges its first samples at once, and others only when it is asked to, and from then on
    always.
    """

    def __init__(self, url: str, group: str, *, early: int = 0, **settings: Any) -> None:
        super().__init__()
        self._url, self._group, self._early = url, group, early
        self._settings = {"acknowledge": "on_checkpoint", "batch_size": 10, "timeout_s": 60, **settings}
        self.told: list[CheckpointOverdue] = []
        self.seen = Counter[int]()
        self.error: PenstockError | None = None

    def run(self) -> None:
        """Read one epoch."""
        with loader_of(self._url, self._group, **self._settings) as loader:
            while self.count < COUNT and self.error is None:
                try:
                    for batch in loader:
                        self.seen.update(batch["y"].tolist())
                        if self.count <= self._early:
                            loader.checkpointed()
                except CheckpointOverdue as error:
                    self.told.append(error)
                    self._early = COUNT
                    loader.checkpointed()
                except PenstockError as error:
                    self.error = error
            if self._settings["acknowledge"] == "on_checkpoint":
                loader.checkpointed()

    @property
    def count(self) -> int:
        """Return the samples seen."""
        return sum(self.seen.values())


@contextmanager
def two_shards(url: str, partitions: int = 1) -> Iterator[Callable[[], None]]:
    """Write an epoch in two shards: the second begins at once, and the first when the yielded function is called."""
    settings: dict[str, Any] = {"spec": SPEC, "block_bytes": BLOCK, "budget_bytes": BUDGET, "notify": lambda _: None}
    is_over = threading.Event()
    with Writer("t", url=url, partitions=partitions, **tuned("Writer", settings)) as writer:
        writer.epoch(sizes=[COUNT // 2, COUNT // 2])

    def write(shard: int) -> None:
        with Writer("t", url=url, **tuned("Writer", settings)) as writer, suppress(BudgetFull):
            WriterHooks(writer).stop_when(is_over.is_set)
            with writer.epoch(0).shard(shard) as part:
                for number in range(COUNT // 2):
                    part.write(sample(shard * COUNT // 2 + number))

    threads = [threading.Thread(target=write, args=(shard,)) for shard in (0, 1)]
    threads[1].start()
    try:
        yield threads[0].start
    finally:
        is_over.set()
        for thread in threads:
            thread.join(20)


@pytest.mark.usefixtures("soon")
def test_groups_that_leave_no_room_together_are_told_and_what_they_are_told_helps(
    any_url: str, any_client: Client
) -> None:
    """The worst case: the written samples wait for an ordered group, which waits for the first shard.

    The first shard waits for two groups with the same samples in hand, so that neither alone could free space.
    """
    groups = [Group(any_url, "a", early=AHEAD), Group(any_url, "b", early=AHEAD)]
    ordered = Group(any_url, "ranks", acknowledge="on_next", order="canonical")
    with two_shards(any_url) as begin_the_first:
        for group in (*groups, ordered):
            group.start()
        deadline = time.monotonic() + 20
        while any(group.count < AHEAD for group in groups) and time.monotonic() < deadline:
            time.sleep(0.02)
        begin_the_first()
        for group in (*groups, ordered):
            group.join(60)
    assert [group.error for group in (*groups, ordered)] == [None] * 3
    assert all(group.seen == Counter(range(COUNT)) for group in (*groups, ordered))
    assert all(group.told for group in groups)
    said = [str(group.told[0]) for group in groups]
    assert all("call loader.checkpointed() at least every" in text for text in said)
    assert any("group 'a' " in text and "group 'b' " in text for text in said)
    assert not ordered.told
    assert audit_stream(any_client, "t").is_clean


@pytest.mark.usefixtures("soon")
def test_members_whose_batches_together_are_larger_than_the_budget_are_told_so(any_url: str) -> None:
    """Three times 200 samples do not fit into space for 400: every member has a part of a batch, and none a whole
    one.
    """
    members = [
        Group(any_url, "g", member=f"m{n}", acknowledge="on_next", batch_size=200, prefetch_bytes=200 * SAMPLE_BYTES)
        for n in range(3)
    ]
    with writing(any_url, 20 * COUNT):  # some complete batches may come before
        for member in members:
            member.start()
        deadline = time.monotonic() + 45
        while not any(isinstance(member.error, TooLarge) for member in members) and time.monotonic() < deadline:
            time.sleep(0.05)
        errors = [str(member.error) for member in members if isinstance(member.error, TooLarge)]
        for member in members:
            member.join(60)
    assert "hold parts of batches (group 'g' " in errors[0]
    assert "take smaller batches" in errors[0]


@pytest.mark.usefixtures("soon")
def test_nobody_is_told_while_another_partitions_samples_are_still_to_be_made(any_url: str) -> None:
    """Its worker may be starting, or dead and soon replaced, and its samples may lead to the checkpoint."""
    with two_shards(any_url, partitions=2) as begin_the_first:
        group = Group(any_url, "a")
        group.start()
        deadline = time.monotonic() + 20
        while group.count < 200 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(BEYOND_S)
        assert group.count == 200, "the budget of the second shard's partition"
        assert not group.told
        begin_the_first()
        group.join(60)
    assert group.seen == Counter(range(COUNT))
    assert group.told


def deadlock(
    handed: dict[str, int], held: dict[str, int] | None = None, *, freed: int = 20, me: str = "a"
) -> BlockedPartition:
    """Return a full budget of 100 with a writer that needs 10 more."""
    writer = WaitingWriter(0, SETTLED_MS, 10, 100, "budget", is_next=True)
    found = Deadlock(
        Releasable(freed), {(m, m): n for m, n in handed.items()}, {(m, m): n for m, n in (held or {}).items()}
    )
    return BlockedPartition([writer], handed.get(me, 0), 100, has_others=True, deadlock=found, me=(me, me))


@pytest.mark.parametrize(
    ("found", "is_told"),
    [
        (deadlock({"a": 30, "b": 20}), True),
        (deadlock({"a": 20, "b": 30}), False),  # the other reader has more
        (deadlock({"a": 30}, freed=9), False),  # acknowledging would not help, because a missing reader holds the space
        (deadlock({}, {"a": 5, "b": 4}), True),  # no loop was given anything
        (deadlock({}, {"a": 4, "b": 5}), False),
        (deadlock({"b": 1}, {"a": 50}), False),  # who was given something can acknowledge it
        (deadlock({}), False),
        (BlockedPartition([], 0, BUDGET, has_others=True, me=("a", "a")), False),  # a reader is at work
    ],
)
def test_of_all_who_wait_one_is_told(found: BlockedPartition, is_told: bool) -> None:
    """One member acknowledges, and all continue, so no other training must end."""
    assert is_deadlock(found) is is_told


def test_nobody_is_told_by_a_roster_that_has_lost_another_group(any_url: str, any_client: Client) -> None:
    """A server that came back older knows nothing of what the other group holds until that has joined again."""
    with two_shards(any_url, partitions=2) as begin_the_first:
        stream = open_stream(any_client, "t")
        join_group(any_client, Membership(stream, "g", "m", "i"))
        until(lambda: load_roster(any_client, stream.partitions[1]).waiting)  # then it writes no more
        before = partition_slot(any_client, stream, 1)
        join_group(any_client, Membership(stream, "h", "n", "j"))

        def told() -> bool:
            waits: Any = {"waited_s": 9, "need_bytes": 10, "held_bytes": 10, "why": "budget", "is_next": True}
            for number, partition in enumerate(stream.partitions):
                note_wait(any_client, partition, 0, number, **waits)
            found = find_blocked(any_client, stream, ("g", "m"), lambda _: 20, together=True)
            return any(is_overdue(blocked) for blocked in found if blocked.waiters)

        assert not told(), "the other group holds the second shard's samples"
        before.restore(any_client)
        assert not told()
        drop_group(any_client, stream, "h")
        assert told()
        begin_the_first()


def test_a_report_of_before_an_outage_says_nothing_of_a_reader(any_url: str, any_client: Client) -> None:
    """It was idle then, and what the server has for it may fill a batch now."""
    with writing(any_url, 10):
        until(lambda: any_client.exists("penstock:{t}:meta"))
        stream = open_stream(any_client, "t")
        who, (partition,) = Membership(stream, "g", "m", "i"), stream.partitions
        join_group(any_client, who)
        beat(any_client, who, partition, {}, idle_ms=60_000)

        def found() -> Deadlock | None:
            return find_deadlock(any_client, stream, partition, load_roster(any_client, partition))

        assert found() is not None
        told = json.loads(any_client.hget(partition.roster, "m:g:m"))
        told["seen"] -= MEMBER_SILENT_MS + 1000
        any_client.hset(partition.roster, "m:g:m", json.dumps(told))
        assert found() is None


@pytest.mark.usefixtures("soon")
def test_nobody_is_told_while_one_reader_is_at_work(any_url: str) -> None:
    """A step, or a validation, may take minutes. Then that trainer acknowledges, and there is space."""
    with writing(any_url, COUNT), loader_of(any_url, "slow", batch_size=50) as slow:
        steps = iter(slow)
        next(steps)
        waiting = Group(any_url, "a", early=200)
        waiting.start()
        time.sleep(BEYOND_S)
        assert not waiting.told
        for batch in steps:
            assert batch.size
            if waiting.told:
                break
        for _ in steps:
            pass
        waiting.join(60)
    assert waiting.error is None
    assert waiting.seen == Counter(range(COUNT))


@pytest.mark.usefixtures("soon")
def test_a_rank_is_not_told_of_its_step_while_another_group_can_make_space(any_url: str, any_client: Client) -> None:
    """Later steps fill the other partition, and no acknowledgement frees them. They are not what the rank waits for."""
    shared, ordered = (
        Group(any_url, "a"),
        Group(any_url, "ranks", acknowledge="on_next", order="canonical", batch_size=4),
    )
    with two_shards(any_url, partitions=2) as begin_the_first:
        begin_the_first()
        for group in (shared, ordered):
            group.start()
        for group in (shared, ordered):
            group.join(60)
    assert [shared.error, ordered.error] == [None, None]
    assert shared.told
    assert not ordered.told
    assert all(group.seen == Counter(range(COUNT)) for group in (shared, ordered))
    assert audit_stream(any_client, "t").is_clean


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_of_ragged_samples_that_the_budget_cannot_hold_is_told_to_each_rank(any_url: str, ranks: int) -> None:
    """Three steps did not fit, of which two stay for the end of the epoch. All waited for ever, and no error came."""
    seen: list[int] = []

    def write() -> None:
        spec = {"x": ("float32", (None,)), "i": ("int64", ())}
        settings = {"budget_bytes": 1_000_000, "block_bytes": 40_000, "room_wait_s": 30.0}
        with writer_of(any_url, spec=spec, **settings) as writer, writer.epoch() as epoch:
            for i in range(40):
                epoch.write({"x": np.full(8000, i, np.float32), "i": i})

    def read(rank: int) -> str:
        order = Canonical(rank, ranks)
        try:
            with loader_of(any_url, batch_size=16 // ranks, order=order, timeout_s=None) as loader:
                for batch in loader:
                    seen.extend(batch["i"].tolist())
        except TooLarge as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as threads:
        writing = threads.submit(write)
        errors = list(threads.map(read, range(ranks)))
        assert all("a step of 16 samples is about 500 KiB" in error for error in errors), errors
        enough = re.search(r"raise budget_bytes to (\d+)", errors[0])
        assert enough is not None
        writer_of(any_url, budget_bytes=int(enough[1])).close()
        assert not any(threads.map(read, range(ranks)))
        writing.result(30)
    assert set(seen) == set(range(40))
