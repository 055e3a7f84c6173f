"""The count of batches between handing out and acknowledgement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from penstock_consumer.read.ack import Acknowledger, OutstandingBatches, UnacknowledgedNotice
from penstock_consumer.stages.batch import Batch, BatchSpan, Lease


def batch_of(position: int, samples: int = 4, epoch: int = 7) -> Batch:
    """Return a batch of one entry."""
    lease = Lease(0, epoch, 0, b"1-0", unacknowledged=100)
    return Batch({}, epoch, [BatchSpan(lease, position, position + samples)], position)


def test_a_batch_is_counted_from_its_training_to_its_acknowledgement() -> None:
    """A loader reports the sums, and shows them to the user at the end."""
    now = [1.0]
    counted = OutstandingBatches(lambda: now[0])
    assert (counted.batches, counted.samples, counted.last, counted.waiting) == (0, 0, None, (0, 0, 0))
    one, two, three = batch_of(4), batch_of(8, samples=3), batch_of(12)
    now[0] = 3.0
    assert counted.quiet_s == 2.0
    counted.pull(one)
    assert counted.quiet_s == 0.0
    assert counted.waiting == (0, 0, 0), "a framework that reads ahead has not trained on it"
    assert counted.arrive(one)
    assert not counted.arrive(one)
    now[0] = 4.0
    counted.train(two)
    assert counted.quiet_s == 0.0
    counted.pull(three)
    assert (counted.batches, counted.samples, counted.waiting) == (2, 7, (2, 7, 0))
    assert counted.last is not None
    assert counted.last.position == 8
    assert [batch.position for batch in counted.trained()] == [4, 8]
    now[0] = 6.0
    assert counted.drop(three)
    assert counted.quiet_s == 2.0, "to return what was not trained on is no work of the loop"
    assert counted.drop(one)
    assert (counted.waiting, counted.quiet_s) == ((1, 3, 0), 0.0)
    assert not counted.drop(one)
    counted.pull(three)
    counted.forget()
    assert counted.waiting == (0, 0, 0)
    assert counted.last is None
    assert counted.trained() == []
    assert not counted.arrive(three)
    assert (counted.batches, counted.samples) == (2, 7)


def test_a_checkpoint_covers_what_was_trained_on_before_its_state_was_taken() -> None:
    """A model has not seen a later batch, so that stays unacknowledged until the next checkpoint."""
    counted = OutstandingBatches()
    batches = [batch_of(4 * number) for number in range(6)]
    for batch in batches[:4]:
        counted.train(batch)
    assert not counted.is_being_saved
    counted.promise(3)
    counted.promise(2)
    assert (counted.promised, counted.is_being_saved) == (3, True)
    assert [batch.position for batch in counted.cover(2)] == [0, 4]
    assert (counted.waiting, counted.is_being_saved) == ((2, 8, 0), True)
    assert counted.cover(1) == []
    assert [batch.position for batch in counted.cover(3)] == [8]
    assert not counted.is_being_saved
    counted.train(batches[4])
    assert [batch.position for batch in counted.cover(None)] == [12, 16]
    assert counted.waiting == (0, 0, 0)
    counted.train(batches[5])
    counted.forget()
    assert counted.cover(6) == []
    for batch in batches[:2]:
        counted.train(batch)
    assert [batch.position for batch in counted.cover(7)] == [0], "what was forgotten counts as covered"


def test_the_amount_that_waits_is_told_in_bytes_too() -> None:
    """A budget that is full of it is a budget in bytes."""
    counted = OutstandingBatches()
    batches = [Batch({"x": np.zeros(size, np.uint8)}, 7, batch_of(size).spans, size) for size in (5, 70)]
    for batch in batches:
        counted.train(batch)
    assert counted.waiting == (2, 8, 75)
    assert counted.drop(batches[0])
    assert counted.waiting == (1, 4, 70)
    counted.cover(None)
    assert counted.waiting == (0, 0, 0)


def test_a_state_counts_what_the_step_is_done_with_and_is_being_saved() -> None:
    """The wait of a loop that saves in the background will end, and a framework reports later than it trains."""
    acknowledger = Acknowledger("on_checkpoint", "t", print)
    assert acknowledger.progress() == {"epoch": None, "batches": 0, "samples": 0}
    acknowledger._outstanding.train(batch_of(4))
    assert not acknowledger._outstanding.is_being_saved
    assert acknowledger.progress() == {"epoch": 7, "batches": 1, "samples": 4}
    assert acknowledger._outstanding.is_being_saved
    reached = [Batch({"x": np.zeros(3, np.uint8)}, epoch, batch_of(3, 3).spans, 3) for epoch in (8, 9)]
    acknowledger.take_over(SimpleNamespace(reached=lambda: reached, report=lambda: None))
    assert acknowledger.progress() == {"epoch": 9, "batches": 3, "samples": 10}
    assert acknowledger._outstanding.promised == 3


def test_the_first_batch_that_is_not_acknowledged_is_so_in_canonical_order() -> None:
    """An ordered group acknowledges by position, so an earlier batch holds up later ones."""
    counted = OutstandingBatches()
    assert counted.first() is None
    trained, pulled, later = batch_of(8), batch_of(12), batch_of(4, epoch=8)
    counted.train(trained)
    counted.pull(later)
    counted.pull(pulled)
    for besides, pulled_only, found in (
        ([], False, (7, 8)),
        ([], True, (7, 12)),
        ([pulled], True, (8, 4)),
        ([pulled, later], True, None),
    ):
        first = counted.first(besides, pulled_only=pulled_only)
        assert (None if first is None else (first.epoch, first.position)) == found


@pytest.mark.parametrize(
    ("policy", "trains", "words"),
    [
        ("on_checkpoint", 2, "8 samples were trained on since the last checkpoint: they are handed out again"),
        ("manual", 2, "8 samples were handed out and not acknowledged: they are handed out again"),
        ("on_next", 2, ""),
        ("manual", 0, ""),
    ],
)
def test_samples_that_come_again_are_named_at_the_end(
    policy: Literal["on_next", "manual", "on_checkpoint"], trains: int, words: str
) -> None:
    """A user sees them twice otherwise without a reason, and a policy without such samples says nothing."""
    said: list[str] = []
    counted = OutstandingBatches()
    notice = UnacknowledgedNotice(policy, counted, said.append)
    for number in range(trains):
        counted.train(batch_of(4 * number))
    notice.tell()
    assert len(said) == (1 if words else 0)
    assert all(words in line for line in said)


def test_what_cannot_be_acknowledged_is_refused_with_what_to_do() -> None:
    """A call that does nothing would leave samples unacknowledged without a word."""
    adapter: Any = None
    manual, together = (Acknowledger(policy, "t", print) for policy in ("manual", "on_checkpoint"))
    with pytest.raises(TypeError, match="got a Batch without identities, expected one that this loader gave"):
        manual.acknowledge(Batch({}))
    with pytest.raises(ValueError, match="leaves acknowledging to you, but a framework's dataset shows no batch"):
        manual.take_over(adapter)
    with pytest.raises(ValueError, match="belongs to acknowledge='on_checkpoint'; this loader has 'manual'"):
        manual.checkpointed(None)
    with pytest.raises(ValueError, match=r"acknowledged together, by loader.checkpointed\(\)"):
        together.acknowledge(batch_of(4))
    with pytest.raises(ValueError, match="acknowledge is 'later', expected one of on_next, manual, on_checkpoint"):
        Acknowledger("later", "t", print)  # type: ignore[arg-type]


def test_a_loader_that_has_not_joined_has_nothing_to_attend_to() -> None:
    """A loader may be closed before its first batch, and the same calls are for its member afterwards."""
    acknowledger, called = Acknowledger("manual", "t", print), list[str]()
    acknowledger.attend()
    acknowledger.flush()
    claim = SimpleNamespace(attend=lambda: called.append("attend"), flush=lambda: called.append("flush"))
    member: Any = SimpleNamespace(claim=claim, on_replaced=lambda tell: None)
    acknowledger.join(member)
    acknowledger.attend()
    acknowledger.flush()
    assert called == ["attend", "flush"]
