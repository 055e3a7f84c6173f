"""The decisions of an acknowledger: which batches it acknowledges, in which order, and which waits are an error."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import CheckpointOverdue, ServerUnavailable, StateMismatch
from penstock_common.explain.deadlock import OTHER_THREAD_S, PATIENCE_S, BlockedPartition
from penstock_consumer.read.ack import DEADLOCK_LOOK_S, Acknowledge, Acknowledger
from penstock_consumer.stages.batch import Batch
from tests.consumer.test_outstanding import batch_of
from tests.consumer.test_overdue import jam

ROW_BYTES = 10
BUDGET = 100


class Training:
    """A loader's acknowledger with a member of a group, whose requests are noted."""

    def __init__(self, policy: Acknowledge, rank: int | None = None) -> None:
        self.now_s = 1000.0
        self.said: list[str] = []
        self.acknowledged: list[int] = []
        """The position of each batch that was acknowledged."""
        self.calls: list[str] = []
        """The other requests to the server, and to the framework's adapter."""
        self.held: set[int] = set()
        """The epochs with samples that the member holds and has not acknowledged."""
        self.unclosed: set[int] = set()
        self.blocked: Callable[[], list[BlockedPartition]] = list
        self.returned: list[tuple[list[int], list[int]]] = []
        self.reached: list[Batch] = []
        self.idle: Any = None
        self.it = Acknowledger(policy, "t", self.said.append, lambda: self.now_s)
        member: Any = SimpleNamespace(
            rank=rank, claim=self, stream=self.stream, heartbeat=SimpleNamespace(loop=self),
            on_replaced=lambda tell: None,
            return_batches=lambda left, kept: self.returned.append((positions(left), positions(kept))),
        )  # fmt: skip
        self.it.join(member)

    stream = SimpleNamespace(name="t", budget_bytes=BUDGET)

    def acknowledge(self, batch: Batch) -> None:
        """See `Claim.acknowledge`."""
        self.acknowledged.append(batch.position)

    def has_unacknowledged(self, epoch: int) -> bool:
        """See `Claim.has_unacknowledged`."""
        return epoch in self.held

    def close_epochs(self, epoch: int) -> None:
        """See `Claim.close_epochs`."""
        self.calls.append(f"close {epoch}")

    def flush(self) -> None:
        """See `Claim.flush`."""
        self.calls.append("flush")

    def blocked_partitions(self, *, together: bool) -> list[BlockedPartition]:
        """See `Claim.blocked_partitions`."""
        self.calls.append("look at all" if together else "look")
        return self.blocked()

    def tell_idle(self, idle: Any) -> None:
        """See `LoopReport.tell_idle`."""
        self.idle = idle

    def report(self) -> None:
        """See `Adapter.report`."""
        self.calls.append("report")

    def adapted(self) -> Training:
        """Let a framework's adapter, which is this, take the loader over."""
        self.it.take_over(SimpleNamespace(report=self.report, reached=lambda: self.reached))
        return self

    def train(self, *batches: Batch) -> None:
        """Deliver batches to a plain loop, which trains on them."""
        for batch in batches:
            self.it.deliver(batch)


def positions(batches: list[Batch]) -> list[int]:
    """Return the position of each batch."""
    return [batch.position for batch in batches]


def heavy(position: int, rows: int = 4, epoch: int = 7) -> Batch:
    """Return a batch with this many rows of `ROW_BYTES`."""
    spans = batch_of(position, rows, epoch).spans
    return Batch({"x": np.zeros((rows, ROW_BYTES), np.uint8)}, epoch, spans, position)


class TestPolicies:
    """Each policy has its own moment at which a batch counts as trained on."""

    def test_a_plain_loop_is_done_with_a_batch_when_it_asks_for_the_next(self) -> None:
        """A batch that came before, and one that was taken back, are not acknowledged then."""
        training = Training("on_next")
        training.train(batch_of(4))
        assert training.acknowledged == []
        training.it.asked_for_next()
        training.it.asked_for_next()
        assert training.acknowledged == [4]
        training.train(batch_of(8))
        training.it.forget()
        training.it.asked_for_next()
        assert training.acknowledged == [4]
        training.train(batch_of(12))
        training.it.close()
        assert (training.acknowledged, training.calls, training.said) == ([4, 12], ["flush"], [])

    def test_a_loop_that_acknowledges_by_hand_is_asked_for_nothing_else(self) -> None:
        """It may hold batches for as long as it likes, and acknowledges each once."""
        training, batches = Training("manual"), [batch_of(4), batch_of(8)]
        training.train(*batches)
        training.it.asked_for_next()
        assert training.acknowledged == []
        training.it.acknowledge(batches[1])
        training.it.acknowledge(batches[1])
        assert training.acknowledged == [8]
        training.it.close()
        assert training.acknowledged == [8]
        assert len(training.said) == 1

    @pytest.mark.parametrize(("policy", "at_once"), [("on_next", [4]), ("on_checkpoint", [])])
    def test_a_framework_is_done_with_a_batch_when_its_step_was_trained(
        self, policy: Acknowledge, at_once: list[int]
    ) -> None:
        """It pulls batches long before. The next request, of its readahead, says nothing."""
        training, batches = Training(policy).adapted(), [batch_of(4), batch_of(8)]
        training.train(*batches)
        training.it.asked_for_next()
        assert training.acknowledged == []
        training.it.trained(batches[0])
        training.it.trained(batches[0])
        assert training.acknowledged == at_once
        if policy == "on_checkpoint":
            training.it.checkpointed(None)
            assert training.calls == ["report", "flush"]
        assert training.acknowledged == [4]

    def test_a_framework_reports_at_the_end_what_it_trained_on(self) -> None:
        """Its last step comes after its last request."""
        training = Training("on_next").adapted()
        training.it.close()
        assert training.calls == ["report", "flush"]

    @pytest.mark.parametrize(("policy", "at_once"), [("on_next", [4]), ("manual", [4]), ("on_checkpoint", [])])
    def test_a_batch_that_the_loop_never_gets_counts_as_trained_on(
        self, policy: Acknowledge, at_once: list[int]
    ) -> None:
        """A filter's rows would keep their epoch open. A checkpoint covers them with the others."""
        training = Training(policy)
        assert training.it.unless_dropped(None) is None
        whole = batch_of(8)
        assert training.it.unless_dropped(whole) is whole
        assert training.it.unless_dropped(Batch({}, 7, batch_of(4).spans, 4, is_dropped=True)) is None
        assert training.acknowledged == at_once
        if policy == "on_checkpoint":
            training.it.checkpointed(None)
            assert training.acknowledged == [4]

    def test_a_checkpoint_covers_as_many_batches_as_its_state_says(self) -> None:
        """A number that this loader cannot have given is of another run."""
        training = Training("on_checkpoint")
        training.train(*map(batch_of, (4, 8, 12)))
        for wrong in (-1, 4):
            with pytest.raises(StateMismatch, match=r"state_dict\(\) returned"):
                training.it.checkpointed(wrong)
        assert (training.acknowledged, training.calls) == ([], [])
        for batches, covered in ((0, []), (2, [4, 8]), (3, [4, 8, 12]), (None, [4, 8, 12])):
            training.it.checkpointed(batches)
            assert training.acknowledged == covered
            assert training.calls.pop() == "flush"


class TestOrder:
    """A group in canonical order acknowledges by position, so a batch waits for those before it."""

    def test_a_batch_is_acknowledged_after_those_before_it(self) -> None:
        """A position covers everything before it, and the step may be done in another order."""
        training, batches = Training("on_next", rank=0).adapted(), [*map(batch_of, (4, 8, 12, 16))]
        training.train(*batches)
        for number, acknowledged in ((2, []), (1, []), (0, [4, 8, 12]), (3, [4, 8, 12, 16])):
            training.it.trained(batches[number])
            assert training.acknowledged == acknowledged

    def test_a_checkpoint_that_covers_a_later_batch_acknowledges_it_with_the_earlier_one(self) -> None:
        """Its position would cover a batch that the saved model has not seen."""
        training, batches = Training("on_checkpoint", rank=0).adapted(), [batch_of(4), batch_of(8)]
        training.train(*batches)
        for batch in reversed(batches):
            training.it.trained(batch)
        training.it.checkpointed(1)
        assert training.acknowledged == []
        training.it.checkpointed(2)
        assert training.acknowledged == [4, 8]

    def test_a_shared_group_has_no_order(self) -> None:
        """A batch whose acknowledgement waited for an earlier batch would come again after a crash."""
        training, batches = Training("on_next").adapted(), [batch_of(4), batch_of(8)]
        training.train(*batches)
        training.it.trained(batches[1])
        assert training.acknowledged == [8]

    def test_who_acknowledges_by_hand_decides_alone(self) -> None:
        """Everything up to the batch is acknowledged, as the user says."""
        training, batches = Training("manual", rank=0), [batch_of(4), batch_of(8)]
        training.train(*batches)
        training.it.acknowledge(batches[1])
        assert training.acknowledged == [8]

    @pytest.mark.parametrize("way", ["returned", "forgotten"])
    def test_what_waited_for_a_batch_that_is_read_again_is_not_acknowledged(self, way: str) -> None:
        """It is read again, too, and trained on again."""
        training, batches = Training("on_next", rank=0).adapted(), [*map(batch_of, (4, 8, 12))]
        training.train(*batches)
        training.it.trained(batches[1])
        if way == "returned":
            training.it.return_batches([batches[1], batches[0], batches[2]])
            assert training.returned == [([4, 12], [])]
        else:
            training.it.forget()
        again = batch_of(4)
        training.train(again)
        training.it.trained(again)
        assert training.acknowledged == [4]

    def test_what_waits_for_a_checkpoint_is_not_read_again(self) -> None:
        """The model has seen it."""
        training, batches = Training("on_checkpoint").adapted(), [batch_of(4), batch_of(8)]
        training.train(*batches)
        training.it.trained(batches[0])
        training.it.return_batches(batches[1:])
        assert training.returned == [([8], [4])]

    @pytest.mark.parametrize("policy", ["on_next", "on_checkpoint"])
    @pytest.mark.parametrize(
        ("trained", "reached", "last", "left"),
        [
            ([], [], None, 4),
            ([0], [], 4, None),
            ([1], [], 8, 4),
            ([0, 1], [], 8, None),
            ([], [0], 4, None),
            ([0], [1], 8, None),
            ([0], [2], 12, 8),
            ([2], [0], 12, 8),
            ([0], [1, 2], 12, None),
        ],
    )
    def test_a_state_continues_behind_the_last_step_or_at_what_it_left_out(
        self, policy: Acknowledge, trained: list[int], reached: list[int], last: int | None, left: int | None
    ) -> None:
        """A framework reports steps later than it takes them, and may take them in another order."""
        training, batches = Training(policy, rank=0).adapted(), [*map(batch_of, (4, 8, 12))]
        training.train(*batches)
        for number in trained:
            training.it.trained(batches[number])
        training.reached = [batches[number] for number in reached]
        found = training.it.frontier()
        assert tuple(None if one is None else one.position for one in found) == (last, left)


class TestEpochs:
    """An epoch closes for the group once nothing of it is left."""

    @pytest.mark.parametrize("is_held", [False, True])
    def test_an_epoch_of_which_something_is_not_acknowledged_stays_open(self, *, is_held: bool) -> None:
        """Its samples may be needed again."""
        training = Training("manual")
        training.held = {7} if is_held else set()
        training.idle = "waits"
        training.it.end_epoch(7)
        assert (training.calls, training.unclosed) == (([], {7}) if is_held else (["close 7"], set()))
        assert training.idle is None

    def test_an_epoch_closes_with_the_last_acknowledgement_of_it(self) -> None:
        """No other member would close the epoch. A member closes no epoch that it never read to its end."""
        training, batches = Training("manual"), [batch_of(4), batch_of(8), batch_of(4, epoch=8)]
        training.train(*batches)
        training.held, training.unclosed = {7}, {7}
        training.it.acknowledge(batches[0])
        training.held = set()
        training.it.acknowledge(batches[2])
        assert training.calls == []
        training.it.acknowledge(batches[1])
        assert training.calls == ["close 7"]


class TestWaits:
    """A loop that waits for a batch says so, and a wait that only it can end is an error."""

    def test_a_wait_counts_from_the_last_batch_and_ends_with_the_next(self) -> None:
        """Others would blame a loop that is at work."""
        training = Training("manual")
        training.train(heavy(4))
        training.now_s += 5.0
        training.it.wait_for_next(3.0)
        assert (training.idle.since_s, training.idle.handed_bytes) == (training.now_s - 3.0, 4 * ROW_BYTES)
        training.it.wait_for_next(60.0)
        assert training.idle.since_s == training.now_s - 5.0
        batch = heavy(8)
        training.train(batch)
        assert training.idle is None
        training.it.wait_for_next(60.0)
        training.it.acknowledge(batch)
        assert training.idle is None

    @pytest.mark.parametrize(
        ("policy", "is_adapted", "is_saved", "patience_s"),
        [
            ("on_checkpoint", False, False, PATIENCE_S),
            ("on_checkpoint", False, True, OTHER_THREAD_S),
            ("on_checkpoint", True, False, OTHER_THREAD_S),
            ("manual", False, False, OTHER_THREAD_S),
        ],
    )
    def test_a_loop_that_only_itself_could_end_its_wait_gets_an_error(
        self, policy: Acknowledge, patience_s: float, *, is_adapted: bool, is_saved: bool
    ) -> None:
        """Another thread may be about to acknowledge, except where a plain loop waits for its own checkpoint."""
        training, batch = Training(policy), heavy(4)
        training.blocked = lambda: [jam()]
        training.train(batch)
        if is_adapted:
            training.adapted()
        if is_saved:
            training.it.progress()
        training.now_s += 100.0
        training.it.raise_if_overdue(patience_s - 0.01)
        assert training.calls == []
        assert training.idle.since_s == training.now_s - (patience_s - 0.01)
        with pytest.raises(CheckpointOverdue, match="4 samples of 't'") as caught:
            training.it.raise_if_overdue(patience_s)
        call = "call loader.checkpointed()" if policy == "on_checkpoint" else "acknowledge"
        assert f": {call} at least every 5 samples" in str(caught.value)
        assert training.calls == ["look at all" if patience_s == OTHER_THREAD_S else "look"]

    def test_a_wait_that_others_may_end_is_no_error(self) -> None:
        """Nor is one before the group is joined, one that began a moment ago, or one of a server that is away."""
        alone = Acknowledger("on_checkpoint", "t", print)
        alone.wait_for_next(OTHER_THREAD_S)
        alone.raise_if_overdue(OTHER_THREAD_S)
        training = Training("on_checkpoint")
        training.train(heavy(4))
        training.blocked = lambda: [jam()]
        training.it.raise_if_overdue(OTHER_THREAD_S)
        assert training.calls == []
        training.now_s += OTHER_THREAD_S
        training.blocked = list
        training.it.raise_if_overdue(OTHER_THREAD_S)

        def away() -> list[BlockedPartition]:
            raise ServerUnavailable("it is away")

        training.blocked = away
        training.it.raise_if_overdue(OTHER_THREAD_S)
        assert training.calls == ["look at all", "look"]

    def test_what_all_readers_hold_is_read_now_and_then(self) -> None:
        """It takes a look at every index, and a loop that waits asks many times a second."""
        training = Training("on_checkpoint")
        training.now_s += OTHER_THREAD_S
        looks = []
        for pause_s in (0.0, 0.25, DEADLOCK_LOOK_S - 0.5, 0.25, 0.25):
            training.now_s += pause_s
            training.it.raise_if_overdue(OTHER_THREAD_S)
            looks.append(training.calls.pop())
        assert looks == ["look at all", "look", "look", "look at all", "look"]

    def test_a_loop_is_warned_once_for_each_checkpoint(self) -> None:
        """Writers wait soon, and a line for each batch would hide it."""
        training = Training("on_checkpoint")
        training.train(heavy(4, 3))
        assert training.said == []
        training.train(heavy(8, 3), heavy(12, 3))
        assert len(training.said) == 1
        assert "writers will soon have to wait for it; call loader.checkpointed()" in training.said[0]
        training.it.checkpointed(None)
        training.train(heavy(16, 6))
        assert len(training.said) == 2

    def test_a_framework_is_warned_of_what_its_step_was_trained_on(self) -> None:
        """Batches that a framework reads ahead do not wait for a checkpoint."""
        training, batch = Training("on_checkpoint").adapted(), heavy(4, 9)
        training.train(batch)
        assert training.said == []
        training.it.trained(batch)
        assert len(training.said) == 1
