"""The time when a batch counts as trained on: what each policy acknowledges, and what waits for a checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import redis

from penstock_common.errors import BudgetFull, CheckpointOverdue, WaitTimeout
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import load_roster
from penstock_common.tuning import Tuning
from penstock_consumer.read.ack import OutstandingBatches
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.stages.batch import Batch
from penstock_producer.write.writer import Writer, WriterHooks
from tests.clusters import until
from tests.consumer.test_positions import Silent
from tests.contracts.feed import SAMPLE_BYTES, SPEC, loader_of, numbers, open_stream, produce, sample
from tests.tuned import tuned

BLOCK = 10 * SAMPLE_BYTES
BUDGET = 40 * BLOCK
OVERDUE_S = 1.0
"""The patience of an impatient loop."""
BEYOND_S = 3 * OVERDUE_S
"""A wait in which a loop that waits for itself would have got its error."""


def delivered(client: Client, group: str = "g") -> int:
    """Return the samples in the group's ledgers."""
    return audit_stream(client, "t").delivered.get(group, 0)


def test_a_shared_group_acknowledges_a_batch_as_soon_as_it_is_trained_on(any_url: str, any_client: Client) -> None:
    """Its batches have no order. One that waited for an earlier one would come again after a crash."""
    produce(any_url, "t", 40)
    with loader_of(any_url, batch_size=4) as loader:
        hooks = hooks_of(loader)
        hooks.take_over(Silent())
        batches = list(islice(loader, 5))
        for number, count in ((3, 4), (0, 8), (4, 12)):
            hooks.trained(batches[number])
            hooks.acknowledger.flush()
            assert delivered(any_client) == count


def test_an_error_that_leaves_with_does_not_acknowledge_the_batch_and_close_does(
    any_url: str, any_client: Client
) -> None:
    """The step raised, so its batch was not trained on. close() cannot know that."""
    produce(any_url, "t", 40)
    with suppress(ValueError), loader_of(any_url, batch_size=4) as loader:
        next(iter(loader))
        raise ValueError
    assert delivered(any_client) == 0
    with suppress(ValueError), loader_of(any_url, batch_size=4) as loader:
        try:
            next(iter(loader))
            raise ValueError
        finally:
            loader.close()
    assert delivered(any_client) == 4


def test_a_loop_that_acknowledges_does_not_wait(any_url: str) -> None:
    """Others would be told that all loops wait, and one of them would end with an error."""
    produce(any_url, "t", 40)
    with loader_of(any_url, batch_size=4, acknowledge="manual") as loader:
        batch, acknowledger = next(iter(loader)), hooks_of(loader).acknowledger
        assert acknowledger.member is not None
        loop = acknowledger.member.heartbeat.loop
        assert loop.said() == {}
        acknowledger.wait_for_next(60.0)
        said = loop.said()
        assert said["handed_bytes"] == batch.nbytes
        loader.acknowledge(batch)
        assert loop.said() == {}


class TestOnCheckpoint:
    """The data and the model return to the same point."""

    def test_nothing_is_acknowledged_before_the_checkpoint_and_all_of_it_then(
        self, any_url: str, any_client: Client
    ) -> None:
        """A model restored from a checkpoint has forgotten later samples, so none of them may be acknowledged."""
        produce(any_url, "t", 100)
        with loader_of(any_url, acknowledge="on_checkpoint") as loader:
            batches = iter(loader)
            for handed in (5, 10):
                for _ in range(5):
                    next(batches)
                    assert delivered(any_client) == (handed - 5) * 8
                loader.checkpointed()
                assert delivered(any_client) == handed * 8

    def test_epochs_close_at_the_checkpoint_that_covers_them(self, any_url: str, any_client: Client) -> None:
        """If epochs are short, checkpoints are rarer than epochs, and reading continues between them."""
        produce(any_url, "t", 50, epochs=3)
        partition = open_stream(any_client, "t").partitions[0]
        with loader_of(any_url, acknowledge="on_checkpoint") as loader:
            for epoch in range(3):
                assert {batch.epoch for batch in loader} == {epoch}
            assert not load_roster(any_client, partition).closed
            loader.checkpointed()
            assert load_roster(any_client, partition).closed == {("g", 0), ("g", 1), ("g", 2)}
        assert audit_stream(any_client, "t").is_clean
        assert delivered(any_client) == 150

    def test_a_state_taken_earlier_covers_what_was_handed_out_until_then(
        self, any_url: str, any_client: Client
    ) -> None:
        """Large models are saved in the background, while training continues."""
        produce(any_url, "t", 100, epochs=2)
        with loader_of(any_url, acknowledge="on_checkpoint") as loader:
            batches = iter(loader)
            early = [next(batches) for _ in range(4)]
            state = loader.state_dict()
            late = [*batches, *loader]
            loader.checkpointed(state)
            assert delivered(any_client) == len(numbers(early)) == 32
            loader.checkpointed(state)
            assert delivered(any_client) == 32
            assert len(numbers(late)) == 168
        with loader_of(any_url, member="other", acknowledge="on_checkpoint") as loader:
            again = [*loader, *loader]
        assert sorted(i for b in again for i in b.identities()) == sorted(i for b in late for i in b.identities())

    def test_closing_hands_back_at_once_what_no_checkpoint_covers(self, any_url: str, any_client: Client) -> None:
        """The end of a script is not a checkpoint, and the next process need not wait for a lease."""
        produce(any_url, "t", 100)
        said: list[str] = []
        with loader_of(any_url, acknowledge="on_checkpoint", notify=said.append, lease_s=600) as loader:
            batches = iter(loader)
            for _ in range(3):
                next(batches)
            loader.checkpointed()
            lost = [next(batches) for _ in range(2)]
        assert any("16 samples were trained on since the last checkpoint" in line for line in said)
        assert delivered(any_client) == 24
        began = time.monotonic()
        with loader_of(any_url, member="other", lease_s=600) as loader:
            again = numbers(loader)
        assert time.monotonic() - began < 5
        assert len(again) == 76
        assert set(numbers(lost)) <= set(again)

    def test_what_waits_for_a_checkpoint_is_not_given_to_others(self, any_url: str, any_client: Client) -> None:
        """Two checkpoints may be hours apart, and a lease is half a minute."""
        produce(any_url, "t", 40)
        settings: dict[str, Any] = {"acknowledge": "on_checkpoint", "lease_s": 0.6}
        with loader_of(any_url, member="one", **settings) as one, loader_of(any_url, member="two", **settings) as two:
            found = numbers(one)
            deadline = time.monotonic() + 2
            with pytest.raises(WaitTimeout):
                two._options = replace(two._options, timeout_s=2)
                list(two)
            assert time.monotonic() > deadline - 0.5
            one.checkpointed()
        assert sorted(found) == list(range(40))
        assert delivered(any_client) == 40

    def test_batches_that_wait_for_a_checkpoint_keep_no_memory(self, any_url: str) -> None:
        """Only the identities of a batch are kept, because gigabytes may be trained on between two checkpoints."""
        with Writer("t", url=any_url, spec={"x": ("uint8", (50_000,))}) as writer, writer.epoch() as epoch:
            for number in range(400):
                epoch.write({"x": bytearray([number % 256]) * 50_000})
        with loader_of(any_url, batch_size=4, prefetch_bytes=400_000, acknowledge="on_checkpoint") as loader:
            addresses = [batch["x"].ctypes.data for batch in loader]
            loader.checkpointed()
        assert len(addresses) == 100
        assert len(set(addresses)) < 40


class TestWords:
    """Each policy has its own method. A method of another policy raises an error that names the right one."""

    def test_single_batches_are_not_acknowledged_where_checkpoints_do_it(self, any_url: str) -> None:
        """A script that was changed to on_checkpoint only in part must not acknowledge in two ways."""
        produce(any_url, "t", 20)
        with loader_of(any_url, acknowledge="on_checkpoint") as loader:
            batch = next(iter(loader))
            with pytest.raises(ValueError, match=r"loader\.checkpointed\(\)"):
                loader.acknowledge(batch)

    @pytest.mark.parametrize("policy", ["on_next", "manual"])
    def test_a_checkpoint_acknowledges_nothing_where_the_loop_does(self, any_url: str, policy: Any) -> None:
        """A user who believes that checkpoints count would lose what was trained on since."""
        with (
            loader_of(any_url, acknowledge=policy) as loader,
            pytest.raises(ValueError, match=f"'on_checkpoint'; this loader has '{policy}'"),
        ):
            loader.checkpointed()

    def test_an_unknown_policy_is_answered_with_those_there_are(self, any_url: str) -> None:
        """A typo must not become another policy."""
        with pytest.raises(ValueError, match="on_next, manual, on_checkpoint"):
            loader_of(any_url, acknowledge="at_checkpoint").__enter__()

    def test_acknowledging_a_batch_twice_is_the_same_as_once(self, any_url: str, any_client: Client) -> None:
        """Entries span batches: a batch counted twice must not acknowledge its neighbour's half of an entry."""
        produce(any_url, "t", 40, block_samples=20)
        with loader_of(any_url, acknowledge="manual") as loader:
            batches = iter(loader)
            first, second = next(batches), next(batches)
            for _ in range(3):
                loader.acknowledge(first)
            hooks_of(loader).acknowledger.flush()
            assert delivered(any_client) == 8
        with loader_of(any_url) as loader:
            assert set(numbers([second])) <= set(numbers(loader))
        assert audit_stream(any_client, "t").is_clean


@contextmanager
def writing(url: str, count: int) -> Iterator[threading.Thread]:
    """Write one epoch of ``count`` samples into a small budget in a thread, and stop it at the end if it waits."""
    is_over = threading.Event()

    def write() -> None:
        settings: dict[str, Any] = {"spec": SPEC, "block_bytes": BLOCK, "budget_bytes": BUDGET}
        with (
            Writer("t", url=url, **tuned("Writer", settings, Tuning(notify=lambda _: None))) as writer,
            suppress(BudgetFull),
        ):
            WriterHooks(writer).stop_when(is_over.is_set)
            epoch = writer.epoch()
            for number in range(count):
                epoch.write(sample(number))
            epoch.close()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield thread
    finally:
        is_over.set()
        thread.join(20)


class TestQuiet:
    """The time that a loop waited before its last batch, or its last acknowledgement, does not count."""

    @pytest.mark.parametrize("policy", ["on_next", "on_checkpoint"])
    def test_a_loop_that_gets_a_batch_waits_no_more(self, any_url: str, policy: Any) -> None:
        """Other members would stop waiting for the loop, or blame it for a full budget."""
        produce(any_url, "t", 40)
        with loader_of(any_url, acknowledge=policy) as loader:
            batches, hooks = iter(loader), hooks_of(loader)
            next(batches)
            hooks.acknowledger.wait_for_next(1000.0)
            idle = hooks.member.heartbeat.loop.idle
            assert idle is not None
            assert idle.milliseconds < 900_000, "it had a batch a moment ago"
            next(batches)
            assert hooks.member.heartbeat.loop.idle is None

    def test_an_acknowledgement_is_work_of_the_loop(self) -> None:
        """A loop that acknowledged a moment ago is not stuck."""
        now = [0.0]
        outstanding, batch = OutstandingBatches(lambda: now[0]), Batch({}, 0, [], 8)
        now[0] = 1.0
        outstanding.train(batch)
        now[0] = 5.0
        assert outstanding.quiet_s == 4.0
        assert outstanding.drop(batch)
        assert outstanding.quiet_s == 0.0

    def test_a_long_wait_before_the_last_batch_is_no_reason_to_end_a_training(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its samples fill the budget, and it is at work: a checkpoint may follow at once."""
        monkeypatch.setattr("penstock_consumer.read.ack.PATIENCE_S", 100.0)
        monkeypatch.setattr("penstock_common.explain.deadlock.SETTLED_MS", 0)
        with writing(any_url, 1000), loader_of(any_url, acknowledge="on_checkpoint") as loader:
            batches, acknowledger = iter(loader), hooks_of(loader).acknowledger
            for _ in range(45):  # of 50 that fit
                next(batches)
            until(lambda: bool(load_roster(any_client, open_stream(any_client, "t").partitions[0]).waiting))
            acknowledger.raise_if_overdue(1000.0)
            monkeypatch.setattr("penstock_consumer.read.ack.PATIENCE_S", 0.0)
            with pytest.raises(CheckpointOverdue):
                acknowledger.raise_if_overdue(1000.0)


class TestOverdue:
    """A training that waits for itself gets an error, and no other training does."""

    @pytest.fixture
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Shorten the patience, because seconds of real waits add up."""
        monkeypatch.setattr("penstock_consumer.read.ack.PATIENCE_S", OVERDUE_S)
        monkeypatch.setattr("penstock_common.explain.deadlock.SETTLED_MS", 500)

    @pytest.mark.usefixtures("impatient")
    @pytest.mark.parametrize("order", [None, "canonical"])
    def test_a_checkpoint_that_the_loop_can_never_reach_is_an_error_with_numbers(
        self, order: Any, any_url: str
    ) -> None:
        """Its own samples fill the budget, so writers wait, so no batch comes, so it never reaches a checkpoint."""
        said: list[str] = []
        handed: list[int] = []
        began = time.monotonic()
        advice = r"call loader\.checkpointed\(\) at least every 200 samples"
        with (
            writing(any_url, 1000),
            loader_of(any_url, acknowledge="on_checkpoint", notify=said.append, timeout_s=60, order=order) as loader,
            pytest.raises(CheckpointOverdue, match=advice) as caught,
        ):
            for batch in loader:
                handed += batch["y"].tolist()
        assert time.monotonic() - began < 15
        error = caught.value
        assert error.samples == len(handed) == error.nbytes // SAMPLE_BYTES
        assert 380 < error.samples <= 400
        assert error.budget_bytes == BUDGET
        (warned,) = [line for line in said if "writers will soon have to wait" in line]
        assert "208 samples" in warned

    @pytest.mark.parametrize("order", [None, "canonical"])
    def test_checkpoints_often_enough_let_an_epoch_pass_that_is_larger_than_the_budget(
        self, order: Any, any_url: str, any_client: Client
    ) -> None:
        """The advice in the error must work."""
        with writing(any_url, 1500), loader_of(any_url, acknowledge="on_checkpoint", order=order) as loader:
            count = 0
            for number, batch in enumerate(loader, 1):
                count += batch.size
                if number % 25 == 0:  # 200 samples: half of the budget
                    loader.checkpointed()
            loader.checkpointed()
            assert count == 1500
            assert ("g", 0) in load_roster(any_client, open_stream(any_client, "t").partitions[0]).closed

    @pytest.mark.usefixtures("impatient")
    def test_who_acknowledges_by_hand_and_forgets_it_is_told_too(
        self, any_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The deadlock is the same, but it gets more time, because another thread might be about to acknowledge."""
        monkeypatch.setattr("penstock_consumer.read.ack.OTHER_THREAD_S", 2 * OVERDUE_S)
        began = time.monotonic()
        with (
            writing(any_url, 1000),
            loader_of(any_url, acknowledge="manual", timeout_s=60) as loader,
            pytest.raises(CheckpointOverdue, match="acknowledge at least every 200 samples"),
        ):
            list(loader)
        assert time.monotonic() - began > 2 * OVERDUE_S

    @pytest.mark.usefixtures("impatient")
    def test_a_checkpoint_that_is_being_saved_is_waited_for(self, any_url: str) -> None:
        """Its state was taken, and the saving thread will report when it is durable."""
        savers: list[threading.Timer] = []
        with writing(any_url, 600), loader_of(any_url, acknowledge="on_checkpoint", timeout_s=30) as loader:
            count = 0
            for batch in loader:
                count += batch.size
                if count in (304, 600):
                    arguments = (loader.state_dict(),)
                    savers.append(threading.Timer(BEYOND_S if count == 304 else 0, loader.checkpointed, arguments))
                    savers[-1].start()
            for saver in savers:
                saver.join()
        assert count == 600
        assert len(savers) == 2

    @pytest.mark.usefixtures("impatient")
    @pytest.mark.parametrize("who", ["another group", "another member"])
    def test_where_others_hold_the_room_it_is_a_wait_and_no_error(self, any_url: str, who: str) -> None:
        """A trainer with few samples in hand must not end because of another group's samples."""
        settings: dict[str, Any] = {"acknowledge": "on_checkpoint", "prefetch_bytes": 100, "batch_size": 5}
        group, count = ("h", 5) if who == "another group" else ("g", 250)
        with writing(any_url, 1000), ExitStack() as stack:
            stack.enter_context(loader_of(any_url, "g", member="first"))  # both groups exist from the start
            other = iter(stack.enter_context(loader_of(any_url, group, member="other", **settings)))
            while count > 0:
                count -= next(other).size
            loader = stack.enter_context(loader_of(any_url, "g", member="me", timeout_s=BEYOND_S, **settings))
            handed = 0
            with pytest.raises(WaitTimeout):
                for batch in loader:
                    handed += batch.size
                    if handed == 250:
                        loader.checkpointed()
            assert handed >= (350 if group == "h" else 50)

    def test_members_that_fill_the_budget_together_are_told(
        self, any_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each waits for batches before its checkpoint, and what all of them hold leaves no space for any."""
        monkeypatch.setattr("penstock_consumer.read.ack.OTHER_THREAD_S", 4.0)
        caught: list[CheckpointOverdue] = []
        said: list[str] = []

        def train(member: str) -> None:
            settings: dict[str, Any] = {"acknowledge": "on_checkpoint", "prefetch_bytes": 100, "notify": said.append}
            with loader_of(any_url, member=member, batch_size=5, timeout_s=15, **settings) as loader:
                try:
                    for number, _ in enumerate(loader):
                        if number < 10:
                            together.wait()
                except CheckpointOverdue as error:
                    caught.append(error)
                    over.wait(10)  # leaving would give everything to the other
                except WaitTimeout:
                    pass

        over = threading.Event()
        together = threading.Barrier(2, timeout=30)  # else the first one could take all before the other joins
        with writing(any_url, 1000):
            members = [threading.Thread(target=train, args=(name,)) for name in ("one", "two")]
            for member in members:
                member.start()
            for _ in range(200):
                if caught:
                    break
                time.sleep(0.05)
            over.set()
            for member in members:
                member.join(30)
        assert caught
        assert caught[0].nbytes < BUDGET * 0.9, "alone it is below the budget"
        assert "with the group's other members); its writers wait for that space" in str(caught[0])
        assert any("its writer waits for space (" in line and "group 'g' has " in line for line in said)

    @pytest.mark.usefixtures("impatient")
    def test_a_rank_that_waits_for_a_slower_one_is_not_blamed(self, any_url: str) -> None:
        """An ordered group holds the samples that its slowest rank has not acknowledged."""
        settings: dict[str, Any] = {"acknowledge": "on_checkpoint", "order": "canonical", "world_size": 2}
        with writing(any_url, 1000), loader_of(any_url, rank=1, **settings) as slow:
            next(iter(slow))
            with loader_of(any_url, rank=0, timeout_s=BEYOND_S, **settings) as loader, pytest.raises(WaitTimeout):
                for number, _ in enumerate(loader, 1):
                    if number == 10:
                        loader.checkpointed()
            assert number > 15


@contextmanager
def kept_full(url: str) -> Iterator[list[float]]:
    """Keep a server at its maxmemory with foreign keys, filling freed memory at once. Return the times of refusals."""
    is_over, is_full = threading.Event(), threading.Event()
    refused: list[float] = []

    def fill() -> None:
        with redis.Redis.from_url(url) as client:
            sizes, number = [1 << 18, 1 << 12, 16], 0
            while not is_over.is_set():
                try:
                    client.set(f"foreign:{number}", b"x" * sizes[0])
                    number += 1
                except redis.exceptions.OutOfMemoryError:
                    sizes = sizes[1:] or sizes
                    if len(sizes) == 1:
                        refused.append(time.monotonic())
                        is_full.set()
                        is_over.wait(0.001)

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        assert is_full.wait(20)
        yield refused
    finally:
        is_over.set()
        filler.join(5)


@pytest.mark.parametrize("policy", ["on_next", "manual", "on_checkpoint"])
def test_trainers_drain_a_server_that_somebody_else_has_filled(policy: Any, fresh_server: Any) -> None:
    """At maxmemory Redis refuses writes, and only acknowledging frees memory, so it must be possible then."""
    server = fresh_server(maxmemory_bytes=48 << 20)
    produce(server.url, "t", 2000, epochs=2, budget_bytes=4 << 20)
    with kept_full(server.url) as refused, loader_of(server.url, acknowledge=policy) as loader:
        began = time.monotonic()
        for _ in range(2):
            for batch in loader:
                if policy == "manual":
                    loader.acknowledge(batch)
            if policy == "on_checkpoint":
                loader.checkpointed()
        assert any(moment > began for moment in refused)  # the server stayed full
        with redis.Redis.from_url(server.url) as client:
            roster = load_roster(client, open_stream(client, "t").partitions[0])
            assert roster.closed == {("g", 0), ("g", 1)}
            assert delivered(client) == 4000
            assert audit_stream(client, "t").is_clean
