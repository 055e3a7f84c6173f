"""A member renews its leases, returns them, and may be asked about them later."""

from __future__ import annotations

from penstock_consumer.read.leases import Leases, plan_acknowledgement
from penstock_consumer.stages.batch import Batch, BatchSpan, Lease


def test_what_was_acknowledged_just_now_is_renewed_until_the_server_must_have_heard_of_it() -> None:
    """An acknowledgement may be lost with its connection, and the pending entry must then stay this member's."""
    held = Leases()
    for number in range(2):
        held.add(Lease(0, 7, 3, b"%d-0" % number, unacknowledged=1))
    held.remove(0, 7, [b"0-0"])
    assert held.to_renew(0) == {7: [b"1-0", b"0-0"]}
    assert held.to_renew(1) == {}
    assert held.ids(0) == {7: [b"1-0"]}
    assert held.lose(0, 7, [b"0-0"]) == 0


def batch_of(*spans: tuple[Lease, int, int]) -> Batch:
    """Return a batch of these samples."""
    return Batch({}, 7, [BatchSpan(*span) for span in spans])


def test_an_entry_is_due_with_its_last_batch_and_brings_the_bits_of_the_others() -> None:
    """The server may have lost the earlier bits with its last second, but not the entry."""
    lease = Lease(0, 7, 3, b"1-0", unacknowledged=4)
    first = plan_acknowledgement(batch_of((lease, 0, 1), (lease, 2, 3)))
    assert (first[0].ids, first[0].ranges) == ([], {3: [(0, 1), (2, 3)]})
    last = plan_acknowledgement(batch_of((lease, 1, 2), (lease, 3, 4)))
    assert (last[0].ids, last[0].ranges) == ([b"1-0"], {3: [(0, 4)]})
    assert (first[0].entries, last[0].entries) == ([(lease, 0, 3, 2)], [(lease, 1, 4, 2)])


def test_what_was_handed_out_before_an_entry_came_again_counts_for_the_entry_as_it_is_now() -> None:
    """A part waits for its checkpoint while the rest is returned. Otherwise the entry would never be acknowledged."""
    held = Leases()
    held.add(lease := Lease(0, 7, 3, b"1-0", unacknowledged=4))
    assert held.drop(lease)
    held.hold_again(lease, [(0, 2)])
    held.add(again := Lease(0, 7, 3, b"1-0", unacknowledged=2))
    assert plan_acknowledgement(batch_of((again, 2, 4)))[0].ids == []
    assert plan_acknowledgement(batch_of((lease, 0, 2)))[0].ids == [b"1-0"]


def test_what_waits_to_be_handed_out_is_dropped_once_its_entry_was_received_again() -> None:
    """The entry's samples are in later batches now. Yielded from both leases, they would be trained on twice."""
    held = Leases()
    held.add(lease := Lease(0, 7, 3, b"1-0", unacknowledged=4))
    waiting = batch_of((lease, 0, 4))
    assert waiting.without_lost() is waiting
    held.add(again := Lease(0, 7, 3, b"1-0", unacknowledged=4))
    assert waiting.without_lost() is None
    assert not again.is_lost


def test_an_entry_whose_last_acknowledgement_is_under_way_is_not_reported_lost() -> None:
    """The server no longer lists it because it is acknowledged, so a notice of a lapsed lease would be wrong."""
    held = Leases()
    held.add(acknowledged := Lease(0, 7, 3, b"1-0", unacknowledged=4))
    held.add(lapsed := Lease(0, 7, 3, b"2-0", unacknowledged=4))
    assert plan_acknowledgement(batch_of((acknowledged, 0, 4)))[0].ids == [b"1-0"]
    assert held.lose(0, 7, [b"1-0", b"2-0"]) == 1
    assert (acknowledged.is_lost, lapsed.is_lost) == (False, True)
    assert len(held) == 0
