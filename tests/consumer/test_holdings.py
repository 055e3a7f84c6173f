"""What a member holds: what it renews, what it gives back, and what it may still be asked for."""

from __future__ import annotations

from penstock_consumer.pipeline.batch import Lease
from penstock_consumer.shared.holdings import Holdings


def test_what_was_settled_just_now_is_renewed_until_the_server_must_have_heard_of_it() -> None:
    """An acknowledgement may be lost with its connection: the entry, still pending, must then stay this member's."""
    held = Holdings()
    for number in range(2):
        held.add(Lease(0, 7, 3, b"%d-0" % number, owed=1))
    held.remove(0, 7, [b"0-0"])
    assert held.to_renew(0) == {7: [b"1-0", b"0-0"]}
    assert held.to_renew(1) == {}
    assert held.ids(0) == {7: [b"1-0"]}
    assert held.lose(0, 7, [b"0-0"]) == 0
