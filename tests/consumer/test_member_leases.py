"""A member renews its leases, returns them, and may be asked about them later."""

from __future__ import annotations

from penstock_consumer.read.leases import REMEMBERED, Leases, acknowledged_entries, plan_acknowledgement
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


def test_what_was_acknowledged_is_not_forgotten_for_batches_that_end_no_entry() -> None:
    """Most batches of large entries end none, and an acknowledgement may be minutes old before it is answered."""
    held = Leases()
    held.add(Lease(0, 7, 3, b"1-0", unacknowledged=1))
    held.remove(0, 7, [b"1-0"])
    for _ in range(REMEMBERED):
        held.remove(0, 7, [])
    assert held.to_renew(0) == {7: [b"1-0"]}
    assert held.is_acknowledging(0, 7, b"1-0")


def test_the_samples_of_each_entry_of_a_batch_are_told_with_their_bounds() -> None:
    """The bounds are compared with a server to find its losses. A shuffled batch has many spans of few entries."""
    first, second = (Lease(0, 7, 3, name, unacknowledged=8) for name in (b"1-0", b"2-0"))
    batch = batch_of((first, 6, 8), (second, 10, 11), (first, 1, 2), (second, 13, 15))
    assert acknowledged_entries(batch) == [(first, 1, 8, 3), (second, 10, 15, 3)]
    assert first.unacknowledged == 8, "it is only told"


def test_an_entry_is_due_with_its_last_batch_and_brings_the_bits_of_the_others() -> None:
    """The server may have lost the earlier bits with its last second, but not the entry."""
    lease = Lease(0, 7, 3, b"1-0", unacknowledged=4)
    first = plan_acknowledgement(batch_of((lease, 0, 1), (lease, 2, 3)))
    assert (first[0].ids, first[0].ranges) == ([], {3: [(0, 1), (2, 3)]})
    last = plan_acknowledgement(batch_of((lease, 1, 2), (lease, 3, 4)))
    assert (last[0].ids, last[0].ranges) == ([b"1-0"], {3: [(1, 2), (3, 4), (0, 1), (2, 3)]})
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
    assert held.of(7) == []


def test_what_is_held_is_told_by_partition_epoch_and_shard() -> None:
    """A renewal of other entries keeps nothing, and a question about another epoch must not find these."""
    held = Leases()
    for partition, epoch, shard, name in ((0, 7, 3, b"1-0"), (0, 7, 4, b"2-0"), (0, 8, 3, b"3-0"), (1, 7, 3, b"1-0")):
        held.add(Lease(partition, epoch, shard, name, unacknowledged=4))
    assert len(held.of(7) + held.of(8)) == 4
    assert held.ids(0) == {7: [b"1-0", b"2-0"], 8: [b"3-0"]}
    assert held.shards(0) == {(7, 3): {b"1-0"}, (7, 4): {b"2-0"}, (8, 3): {b"3-0"}}
    assert (held.shards(1), held.shards(2)) == ({(7, 3): {b"1-0"}}, {})
    assert [held.holds_epoch(epoch) for epoch in (6, 7, 8)] == [False, True, True]
    assert held.holds(1, 7, b"1-0")
    assert not any(held.holds(*other) for other in ((1, 7, b"2-0"), (1, 8, b"1-0"), (2, 7, b"1-0")))
    assert held.lose(0, 8, [b"3-0", b"9-0"]) == 1
    assert held.ids(0) == {7: [b"1-0", b"2-0"]}
    assert not held.holds_epoch(8)
    held.remove(0, 7, [])
    held.remove(0, 7, [b"1-0"])
    assert held.shards(0) == {(7, 4): {b"2-0"}}
    held.remove(0, 7, [b"2-0"])
    held.remove(0, 9, [b"9-0"])
    assert (held.shards(0), held.ids(0), held.ids(1)) == ({}, {}, {7: [b"1-0"]})
    assert held.is_acknowledging(0, 7, b"1-0")
    assert held.is_acknowledging(0, 7, b"2-0")
    assert not any(held.is_acknowledging(*one) for one in ((1, 7, b"1-0"), (0, 8, b"1-0"), (0, 7, b"3-0")))


def test_a_lease_is_given_up_once_and_only_as_long_as_it_counts() -> None:
    """Its entry is received again then, and of two leases that count neither would ever be acknowledged."""
    held = Leases()
    held.add(first := Lease(0, 7, 3, b"1-0", unacknowledged=4))
    held.add(second := Lease(0, 7, 3, b"1-0", unacknowledged=4))
    assert (first.is_lost, second.is_lost) == (True, False)
    assert not held.drop(first)
    assert held.drop(second)
    assert second.is_lost
    assert not held.drop(second)
    assert not held.holds(0, 7, b"1-0")


def test_what_waits_for_a_checkpoint_counts_with_what_is_to_come() -> None:
    """The entry is acknowledged with the last of both, and what waits is not delivered again."""
    held = Leases()
    dropped = Lease(0, 7, 3, b"1-0", unacknowledged=8)
    held.hold_again(dropped, [(0, 2), (4, 5)])
    assert held.kept(0, 7, 3) == [(0, 2), (4, 5)]
    assert (held.kept(0, 7, 4), held.kept(0, 8, 3), held.kept(1, 7, 3)) == ([], [], [])
    waiting = dropped.current()
    assert (waiting is dropped, waiting.unacknowledged, waiting.shard) == (False, 4, 3)
    held.add(again := Lease(0, 7, 3, b"1-0", unacknowledged=5))
    assert (again.unacknowledged, dropped.current() is again, waiting.is_lost) == (8, True, True)
    other = Lease(0, 7, 3, b"2-0", unacknowledged=8)
    held.hold_again(other, [])
    held.add(fresh := Lease(0, 7, 3, b"2-0", unacknowledged=8))
    assert (fresh.unacknowledged, other.current() is other) == (8, True)


def test_what_waits_to_be_received_again_has_no_sample_that_could_be_lost() -> None:
    """The loop has none of it. A notice of a lapsed lease would be wrong if another member got it first."""
    held = Leases()
    for kept, lost in ((list[tuple[int, int]](), 0), ([(0, 2)], 1)):
        held.hold_again(Lease(0, 7, 3, b"1-0", unacknowledged=8), kept)
        assert held.lose(0, 7, [b"1-0"]) == lost


def test_a_batch_of_several_partitions_is_one_request_to_each() -> None:
    """A shuffled batch has single rows of many entries."""
    leases = [Lease(number % 2, 7, number, b"%d-0" % number, unacknowledged=2) for number in range(4)]
    spans = [(lease, offset, offset + 1) for offset in (1, 0) for lease in leases[: 3 if offset else 4]]
    plan = plan_acknowledgement(batch_of(*spans))
    assert {number: (due.ids, due.ranges) for number, due in plan.items()} == {
        0: ([b"0-0", b"2-0"], {0: [(1, 2), (0, 1)], 2: [(1, 2), (0, 1)]}),
        1: ([b"1-0"], {1: [(1, 2), (0, 1)], 3: [(0, 1)]}),
    }
    assert plan[0].entries == [(leases[0], 0, 2, 2), (leases[2], 0, 2, 2)]
    assert [lease.unacknowledged for lease in leases] == [0, 0, 0, 1]
