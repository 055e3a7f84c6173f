"""The plan of reclaiming: entries of dead members are taken, those of live ones never, with any clocks."""

from __future__ import annotations

from penstock_common.stream.entries import PendingEntry
from penstock_common.stream.keys import RELEASED
from penstock_consumer.read.leases import Key, LeaseSighting, plan_reclaim

LEASE = 30.0
KEY: Key = (0, 0, b"1-0")


class Watcher:
    """The memory and the clock of one member."""

    def __init__(self) -> None:
        self.seen: dict[Key, LeaseSighting] = {}

    def look(self, now_s: float, idle_ms: int, holder: str = "dead", *keys: Key) -> list[Key]:
        """Return the entries that are claimed if they are pending like this."""
        pending = [(key, PendingEntry(key[2], holder, idle_ms, 1)) for key in keys or (KEY,)]
        self.seen, claims = plan_reclaim(self.seen, pending, "me", now_s, LEASE)
        return [key for key, _ in claims]


def test_an_entry_is_taken_after_a_whole_lease_without_renewal() -> None:
    """Earlier, its holder may be in a long step. Much later, a member waits for it in the meantime."""
    watcher = Watcher()
    assert watcher.look(100, 0) == []
    assert watcher.look(115, 15_000) == []
    assert watcher.look(129.9, 29_900) == []
    assert watcher.look(130, 30_000) == [KEY]


def test_a_huge_idle_time_alone_proves_nothing() -> None:
    """After a stop of the server, or for a new watcher, every lease looks old at once."""
    watcher = Watcher()
    assert watcher.look(100, 10**9) == []
    assert watcher.look(129, 10**9 + 29_000) == []
    assert watcher.look(130, 10**9 + 30_000) == [KEY]


def test_a_renewal_starts_the_lease_anew() -> None:
    """A renewal shows as an idle time that fell, or as one that grew less than the clock."""
    watcher = Watcher()
    for now in range(100, 400, 5):
        assert watcher.look(now, 1000) == []
    watcher = Watcher()
    assert watcher.look(100, 0) == []
    assert watcher.look(120, 20_000) == []
    assert watcher.look(140, 3_000) == []
    assert watcher.look(169, 32_000) == []
    assert watcher.look(170, 33_000) == [KEY]


def test_another_holder_starts_the_lease_anew() -> None:
    """Another member took it over, and has its own lease."""
    watcher = Watcher()
    assert watcher.look(100, 50_000, "dead") == []
    assert watcher.look(129, 79_000, "dead") == []
    assert watcher.look(131, 81_000, "other") == []
    assert watcher.look(160, 110_000, "other") == []
    assert watcher.look(161, 111_000, "other") == [KEY]


def test_a_clock_that_jumps_back_takes_nothing() -> None:
    """Idle times come from the server's wall clock. If it is set back, that looks like a renewal."""
    watcher = Watcher()
    assert watcher.look(100, 500_000) == []
    assert watcher.look(115, 0) == []
    assert watcher.look(144, 29_000) == []
    assert watcher.look(145, 30_000) == [KEY]


def test_a_clock_that_jumps_forward_takes_nothing_before_its_time() -> None:
    """An hour of idle time in a second of the watcher's clock is not a lease."""
    watcher = Watcher()
    assert watcher.look(100, 0) == []
    assert watcher.look(101, 3_600_000) == []
    assert watcher.look(129, 3_628_000) == []


def test_what_was_handed_back_is_free_at_once() -> None:
    """A member that closed in order makes no other member wait."""
    assert Watcher().look(100, 0, RELEASED) == [KEY]


def test_each_entry_is_looked_at_for_itself() -> None:
    """A member that meets one of its own, or takes one, must not stop there."""
    own, returned, left, fresh, last = [(0, 0, b"%d-0" % number) for number in range(5)]
    seen = {key: LeaseSighting("dead", 0, 100, 100) for key in (left, last)}
    holders = {own: "me", returned: RELEASED, left: "dead", fresh: "other", last: "dead"}
    pending = [(key, PendingEntry(key[2], holder, 30_000, 1)) for key, holder in holders.items()]
    seen, claims = plan_reclaim(seen, pending, "me", 130, LEASE)
    assert [key for key, _ in claims] == [returned, left, last]
    assert set(seen) == {fresh}


def test_an_idle_time_that_grew_by_half_of_the_time_was_not_reset() -> None:
    """Two clocks may differ in speed, and a host may be suspended, but not for half of the time."""
    for idle_ms, claimed in ((10_000, [KEY]), (9_999, [])):
        watcher = Watcher()
        assert watcher.look(100, 0) == []
        assert watcher.look(120, idle_ms) == []
        assert watcher.look(130, idle_ms + 10_000) == claimed


def test_my_own_entries_are_none_of_this_plans_business() -> None:
    """They are renewed, or recovered, but never taken from this member."""
    watcher = Watcher()
    assert watcher.look(100, 10**9, "me") == []
    assert watcher.look(1000, 10**9, "me") == []
    assert not watcher.seen


def test_an_entry_that_is_acknowledged_is_forgotten() -> None:
    """Memory is bounded by what is pending now."""
    watcher = Watcher()
    other: Key = (1, 2, b"9-9")
    watcher.look(100, 0, "dead", KEY, other)
    assert set(watcher.seen) == {KEY, other}
    watcher.look(110, 10_000, "dead", other)
    assert set(watcher.seen) == {other}
    assert watcher.look(131, 31_000, "dead", KEY, other) == [other]
