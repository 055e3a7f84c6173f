"""A pure policy decides what a shared reader requests next."""

from __future__ import annotations

import pytest

from penstock_common.stream.commands import Client
from penstock_consumer.read.fetch_plan import (
    BLOCK_MS,
    BUDGET_SHARE,
    GROUP_ASKS_S,
    MOST_ENTRIES,
    PAUSES_IN_VAIN,
    REFERRED_BYTES,
    REQUEST_BYTES,
    SHORTEST_MS,
    TAKEN_AT_ONCE,
    EntryRhythm,
    FetchPlanner,
    FetchRequest,
)
from tests.contracts.feed import loader_of, numbers, produce

BUDGET = 64 << 20
STREAM = 1 << 30


def given(
    asking: FetchPlanner, entries: int, waited_s: float = 0.0, nbytes: int = 250_000, now_s: float = 0.0
) -> FetchRequest:
    """Send the planned request, and take its answer."""
    request = asking.next_requests(0, is_ended=False)[-1]
    for _ in range(entries):
        asking.received(nbytes)
    asking.answered(request, entries, waited_s, now_s)
    return request


def one_each(seconds: float, partitions: int = 1, stream_bytes: int = STREAM) -> FetchPlanner:
    """Return a planner that has received one entry after another for long."""
    asking = FetchPlanner(partitions, BUDGET, stream_bytes)
    for number in range(50):
        given(asking, 1, now_s=number * seconds)
    return asking


def waits(requests: list[FetchRequest]) -> list[int | None]:
    """Return how long each request may wait."""
    return [request.block_ms for request in requests]


def test_a_reader_that_finds_all_it_asks_for_has_the_next_request_under_way() -> None:
    """The server prepares the next reply in parallel. Only one of the two may wait, or an end is seen late."""
    asking = FetchPlanner(1, BUDGET, STREAM)
    for _ in range(5):
        given(asking, MOST_ENTRIES)
    requests = asking.next_requests(0, is_ended=False)
    assert [request.most for request in requests] == [REQUEST_BYTES // 250_000] * 2
    assert sorted(waits(requests), key=str) == [SHORTEST_MS, None]
    assert len(asking.next_requests(1, is_ended=False)) == 1


def test_a_reader_that_found_less_than_it_asked_for_sends_one_request_that_waits() -> None:
    """If more members wait than there are entries, a request that finds none wakes a process for nothing."""
    asking = FetchPlanner(1, BUDGET, STREAM)
    given(asking, 1)
    given(asking, 1)
    requests = asking.next_requests(0, is_ended=False)
    assert waits(requests) == [SHORTEST_MS]
    assert requests[0].most > 1
    assert asking.next_requests(1, is_ended=False) == []


def test_large_entries_that_come_one_by_one_are_waited_for_one_by_one() -> None:
    """A request for a single entry is always answered in full, so an immediate answer shows that more may be there."""
    asking = FetchPlanner(1, BUDGET, STREAM)
    given(asking, 1, nbytes=5_000_000)
    assert len(asking.next_requests(0, is_ended=False)) == 2
    given(asking, 0)
    given(asking, 1, nbytes=5_000_000)
    assert len(asking.next_requests(0, is_ended=False)) == 1


def test_a_request_waits_about_as_long_as_entries_usually_take_and_never_longer_than_a_tenth_of_a_second() -> None:
    """A shorter wait would return empty before each entry, and with a longer one an end would be seen late."""
    asking = FetchPlanner(1, BUDGET, STREAM)
    for _ in range(30):
        given(asking, 1, waited_s=0.03)
    (patience,) = waits(asking.next_requests(0, is_ended=False))
    assert patience is not None
    assert 45 <= patience <= 60
    for _ in range(30):
        given(asking, 1, waited_s=0.5)
    assert waits(asking.next_requests(0, is_ended=False)) == [BLOCK_MS]


def test_waiting_in_several_requests_for_one_entry_counts_together() -> None:
    """Otherwise an entry that comes after a request timed out would look like a quick one."""
    one, several = FetchPlanner(1, BUDGET, STREAM), FetchPlanner(1, BUDGET, STREAM)
    for _ in range(20):
        given(one, 1, waited_s=0.04)
        given(several, 0, waited_s=0.03)
        given(several, 1, waited_s=0.01)
    assert waits(one.next_requests(0, is_ended=False)) == waits(several.next_requests(0, is_ended=False))


def test_who_finds_nothing_waits_longer_and_longer() -> None:
    """A hundred idle members must cost a server little."""
    asking = FetchPlanner(1, BUDGET, STREAM)
    given(asking, 1)
    waited = [given(asking, 0).block_ms for _ in range(6)]
    assert waited == [10, 20, 40, 80, 100, 100]
    asking.restart()
    assert SHORTEST_MS in waits(asking.next_requests(0, is_ended=False))


def test_of_an_epoch_that_has_ended_nothing_is_waited_for() -> None:
    """All its entries exist."""
    for partitions in (1, 4):
        asking = FetchPlanner(partitions, BUDGET, STREAM)
        for _ in range(3 * partitions):
            requests = asking.next_requests(0, is_ended=True)
            assert set(waits(requests)) == {None}
            for request in requests:
                asking.answered(request, 0, 0.0, 0.0)


def test_an_idle_reader_of_several_partitions_asks_all_of_them_at_once_and_waits_at_the_last() -> None:
    """With one request after another, an entry in the last partition would be found late."""
    asking = FetchPlanner(4, BUDGET, STREAM)
    for _ in range(2):
        for request in asking.next_requests(0, is_ended=False):
            assert request.block_ms is None
            asking.answered(request, 0, 0.0, 0.0)
    assert asking.is_idle
    assert asking.ends_sweep
    asking.received(250_000)  # small ones: a sweep may be all partitions
    requests = asking.next_requests(0, is_ended=False)
    assert sorted(request.partition for request in requests) == [0, 1, 2, 3]
    assert waits(requests) == [None, None, None, SHORTEST_MS]
    assert [request.most for request in requests] == [1] * 4
    asking.answered(requests[0], 0, 0.0, 0.0)
    assert not asking.ends_sweep
    assert asking.next_requests(3, is_ended=False) == []


def test_no_request_is_for_more_than_a_share_of_the_prefetch_budget() -> None:
    """Members of a group must share, and the server copies all of an answer at once."""
    small = FetchPlanner(1, 1_000_000, STREAM)
    small.received(1000)
    assert {request.most for request in small.next_requests(0, is_ended=False)} == {MOST_ENTRIES}
    small.received(10_000_000)
    assert {request.most for request in small.next_requests(0, is_ended=False)} == {1}
    assert small.request_bytes == 250_000


def test_one_reader_of_segments_asks_for_more_at_once_because_nothing_is_copied() -> None:
    """A request costs as much CPU as an entry. Members of a group share, so they keep to small requests."""
    asking = FetchPlanner(1, BUDGET, STREAM, is_referred=True)
    asking.received(1_000_000)
    for members, most in ((1, REFERRED_BYTES // 1_000_000), (2, REQUEST_BYTES // 1_000_000)):
        asking.share(members)
        assert {request.most for request in asking.next_requests(0, is_ended=False)} == {most}
    inline, small = FetchPlanner(1, BUDGET, STREAM), FetchPlanner(1, 1_000_000, STREAM, is_referred=True)
    for planner, nbytes in ((inline, REQUEST_BYTES), (small, 250_000)):
        planner.share(1)
        assert planner.request_bytes == nbytes


def test_a_member_among_many_lets_a_few_entries_come_together() -> None:
    """Each entry would wake another process. Members share the entries, and none of them waits for this one."""
    assert one_each(0.01).pause_s(32) == pytest.approx(TAKEN_AT_ONCE * 0.01, rel=0.01)


def test_the_members_of_a_group_rest_so_long_that_one_of_them_asks_all_the_time() -> None:
    """A new entry must reach some member within milliseconds, or writers would wait for space during a mere pause."""
    for members in (3, 8, 20):
        assert one_each(0.8 * members * GROUP_ASKS_S).pause_s(members) == pytest.approx(members * GROUP_ASKS_S)


def test_no_member_rests_for_more_than_a_tenth_of_a_second_or_without_an_entry_to_expect() -> None:
    """It may be the only member left, and an epoch may end. A pause that saves nothing is a wait."""
    assert one_each(0.09).pause_s(1000) == BLOCK_MS / 1000
    assert one_each(0.11).pause_s(1000) == 0
    assert one_each(0.03).pause_s(8) == 0


def test_who_has_rested_and_finds_nothing_hears_it_at_once() -> None:
    """Entries should have come. If none have, the epoch may have ended, and waiting for more would delay that."""
    asking = one_each(0.01)
    assert asking.pause_s(32) > 0
    assert waits(asking.next_requests(0, is_ended=False)) == [None]
    (patience,) = waits(asking.next_requests(0, is_ended=False))
    assert patience is not None


def test_who_was_given_one_entry_so_far_waits_for_the_next_at_the_server() -> None:
    """The length of the pause is not known yet, and repeated requests without a pause wake a process for nothing."""
    asking = FetchPlanner(1, BUDGET, STREAM)
    given(asking, 0)
    given(asking, 1)
    assert asking.pause_s(32) == 0
    (patience,) = waits(asking.next_requests(0, is_ended=False))
    assert patience is not None


def test_who_is_alone_or_may_find_more_at_once_does_not_rest() -> None:
    """No other member asks, and a reader behind its producers has nothing to wait for."""
    assert one_each(0.01).pause_s(1) == 0
    behind = one_each(0.01)
    given(behind, MOST_ENTRIES, now_s=0.51)
    assert behind.pause_s(32) == 0
    assert one_each(0.01, partitions=2).pause_s(32) == 0
    assert one_each(0.001).pause_s(2) == pytest.approx(TAKEN_AT_ONCE * 0.001, rel=0.01), "it is not alone"


def test_who_rested_in_vain_rests_again_before_it_waits_for_a_single_entry() -> None:
    """Another member has just asked, and a member that waits at the server would take each entry alone from it."""
    asking = one_each(0.01)
    for _ in range(PAUSES_IN_VAIN):
        assert asking.pause_s(32) > 0
        assert given(asking, 0).block_ms is None
    assert asking.pause_s(32) > 0
    assert given(asking, 0).block_ms is None
    assert asking.pause_s(32) == 0
    assert given(asking, 0).block_ms is not None
    assert asking.pause_s(32) == 0, "nothing came while it waited, so none is to be expected"
    given(asking, 1, now_s=0.51)
    assert asking.pause_s(32) > 0


def test_nobody_rests_again_where_writers_could_wait_for_it() -> None:
    """With a member that waits at the server, the next block of a small budget is taken at once."""
    needed = 32 * TAKEN_AT_ONCE * 250_000 * BUDGET_SHARE
    for stream_bytes, pauses in ((needed + 1000, True), (needed, True), (needed - 1000, False)):
        asking = one_each(0.01, stream_bytes=stream_bytes)
        assert asking.pause_s(32) > 0
        given(asking, 0)
        assert (asking.pause_s(32) > 0) is pauses


def test_the_rhythm_is_a_mean_of_what_came_recently() -> None:
    """One late entry must not make a reader wait long, and several at once share the time since the last."""
    rhythm = EntryRhythm()
    for came, waits_s, entries, usual_s, each_s in (
        (10.0, [0.1, 0.4], 3, 0.1, 0.0),  # nothing is known of the time before the first
        (12.0, [1.1], 4, 0.3, 0.1),
        (12.5, [], 1, 0.24, 0.18),
        (12.5, [0.24], 1, 0.24, 0.144),
    ):
        for waited_s in waits_s:
            rhythm.waited(waited_s)
        rhythm.came(entries, came)
        assert [rhythm.usual_wait_s, rhythm.each_s] == pytest.approx([usual_s, each_s])


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_reader_knows_which_of_its_answers_brought_nothing(partitions: int) -> None:
    """The manifest is read at the end of a sweep. Earlier would be useless, and later would hide an epoch's end."""
    asking = FetchPlanner(partitions, BUDGET, STREAM)
    request = FetchRequest(0, 1, None)
    assert (asking.is_waiting, asking.is_idle, asking.ends_sweep) == (False, False, False)
    for empty in range(1, 2 * partitions + 2):
        asking.answered(request, 0, 0.0, 0.0)
        found = asking.is_waiting, asking.is_idle, asking.ends_sweep
        assert found == (True, empty >= partitions, empty % partitions == 0)
    asking.answered(request, 1, 0.0, 0.0)
    assert (asking.is_waiting, asking.is_idle, asking.ends_sweep) == (False, False, False)


def test_the_size_of_an_entry_is_a_mean_of_those_that_came_recently() -> None:
    """A request for too many entries would hold back those of other members."""
    asking = FetchPlanner(1, BUDGET, STREAM)
    found = []
    for nbytes in (100_000, 200_000, 100_000, 20_000_000):
        asking.received(nbytes)
        found.append(asking.next_requests(0, is_ended=False)[0].most)
    assert found == [20, 16, 17, 1]
    asking = FetchPlanner(1, BUDGET, STREAM)
    assert asking.next_requests(0, is_ended=False)[0].most == 1, "nothing is known of it yet"


@pytest.mark.parametrize(
    ("partitions", "empty", "sweeps"),
    [
        (1, 0, [[(0, 1, None), (0, 1, 10)], [(0, 1, None), (0, 1, 10)]]),
        (2, 0, [[(0, 1, None), (1, 1, None)], [(0, 1, None), (1, 1, None)]]),
        (2, 2, [[(0, 1, None), (1, 1, 10)], [(0, 1, None), (1, 1, 10)]]),
        (2, 5, [[(0, 1, None)], [(1, 1, 20)]]),  # what is left of a sweep
        (2, 12, [[(0, 1, None), (1, 1, 100)]]),
        (3, 0, [[(0, 1, None), (1, 1, None)], [(2, 1, None), (0, 1, None)]]),
        (3, 3, [[(0, 1, None), (1, 1, None)], [(2, 1, 10), (0, 1, None)]]),  # as many as it would ask for otherwise
        (3, 4, [[(0, 1, None), (1, 1, None)], [(2, 1, 10), (0, 1, None)]]),
    ],
)
def test_requests_take_turns_and_the_last_of_a_sweep_waits(
    partitions: int, empty: int, sweeps: list[list[tuple[int, int, int | None]]]
) -> None:
    """A partition that is left out starves, and a request that waits too early delays entries of the others."""
    asking = FetchPlanner(partitions, BUDGET, STREAM)
    for _ in range(empty):
        asking.answered(FetchRequest(0, 1, 10), 0, 0.0, 0.0)
    assert [asking.next_requests(0, is_ended=False) for _ in sweeps] == sweeps


def test_a_reader_of_small_entries_takes_many_with_one_request(any_url: str, any_client: Client) -> None:
    """It learns their size from those that came. A round trip for each would take more time than the entry."""
    produce(any_url, "t", 600, block_samples=1)
    any_client.config_resetstat()
    with loader_of(any_url, batch_size=50) as loader:
        assert sorted(numbers(loader)) == list(range(600))
    assert any_client.info("commandstats")["cmdstat_xreadgroup"]["calls"] < 100
