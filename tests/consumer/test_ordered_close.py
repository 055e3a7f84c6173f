"""The close of an epoch for an ordered group: not before every rank has acknowledged all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from penstock_common.server.client import ControlClient
from penstock_common.stream.client import connect
from penstock_common.stream.groups.positions import known_positions
from penstock_common.stream.groups.roster import Membership, RankOrder, load_roster
from penstock_common.stream.manifest import abandon_epoch
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.tuning import LEASE_S
from penstock_consumer.read.claims import RankClaim
from penstock_consumer.stages.batch import Batch
from tests.contracts.feed import SPEC, open_stream, produce, sample, writer_of

COUNT, BATCH, WORLD = 18, 5, 2
STEP = BATCH * WORLD

RankOf = Callable[[Any, int], RankClaim]


@pytest.fixture
def client(any_url: str) -> Iterator[ControlClient]:
    """Yield a client of a server with one epoch of 18 samples: one full step of both ranks, and one partial step."""
    produce(any_url, "t", COUNT)
    with connect(any_url) as connected:
        yield connected


@pytest.fixture
def rank_of() -> Iterator[RankOf]:
    """Yield a function that returns a rank that has joined, and read nothing. The ranks are closed at the end."""
    with ExitStack() as stack:

        def join(client: Any, rank: int) -> RankClaim:
            order = RankOrder(rank, WORLD, BATCH)
            who = Membership(open_stream(client, "t"), "g", f"rank-{rank}", f"life-{rank}", order)
            claim = stack.enter_context(closing(RankClaim(client, who, LEASE_S, lambda _: None)))
            claim.join("resume")
            return claim

        yield join


def acknowledge(claim: RankClaim, position: int) -> None:
    """Acknowledge all of the rank's own samples up to a position."""
    claim.acknowledge(Batch({}, 0, [], position))


def is_closed(client: Any) -> bool:
    """Return whether the group is done with the epoch."""
    return ("g", 0) in load_roster(client, open_stream(client, "t").partitions[0]).closed


def test_the_last_rank_that_is_through_closes_the_epoch(client: ControlClient, rank_of: RankOf) -> None:
    """If the first rank closed it, the epoch could be released while the others read it."""
    first, second = rank_of(client, 0), rank_of(client, 1)
    for claim in (first, second):
        claim.ended(0, 2 * STEP, COUNT)
    acknowledge(first, 2 * STEP)
    first.close_epochs(0)
    assert not is_closed(client)
    assert first.unclosed == {0}
    acknowledge(second, STEP)
    second.close_epochs(0)
    assert not is_closed(client)
    acknowledge(second, 2 * STEP)
    second.close_epochs(0)
    assert is_closed(client)
    assert second.unclosed == set()
    first.close_epochs(0)
    assert first.unclosed == set()
    assert first.is_end(0, 0)  # and nothing of it is remembered


def test_a_step_that_is_dropped_at_the_end_counts_once_all_before_it_is_acknowledged(
    client: ControlClient, rank_of: RankOf
) -> None:
    """With `remainder="drop"` no rank gets the rest, so without this rule the epoch would never close."""
    first, second = rank_of(client, 0), rank_of(client, 1)
    for claim in (first, second):
        claim.ended(0, STEP, COUNT)
        claim.close_epochs(0)
    positions = known_positions(client, open_stream(client, "t"), 0, "g")
    assert (positions.of(0), positions.of(1)) == (0, 0)
    for claim in (first, second):
        acknowledge(claim, STEP)
        claim.close_epochs(0)
    assert known_positions(client, open_stream(client, "t"), 0, "g").minimum(WORLD) == COUNT
    assert is_closed(client)


def test_an_epoch_that_is_still_written_stays_open(any_url: str, rank_of: RankOf) -> None:
    """Its size is not known yet, so any position would seem to be beyond its end."""
    with writer_of(any_url, spec=SPEC) as writer, connect(any_url) as client:
        epoch = writer.epoch()
        for number in range(STEP):
            epoch.write(sample(number))
        epoch.flush()
        claims = [rank_of(client, rank) for rank in range(WORLD)]
        for claim in claims:
            acknowledge(claim, STEP)
            claim.close_epochs(0)
            assert claim.unclosed == {0}
        assert not is_closed(client)
        epoch.close()
        for claim in claims:
            claim.close_epochs(0)
        assert is_closed(client)


@pytest.mark.parametrize("is_released", [False, True])
def test_an_epoch_that_was_given_up_is_closed_here_and_for_nobody_else(
    client: ControlClient, rank_of: RankOf, is_released: bool
) -> None:
    """No group needs its samples, and the end of the next epoch does not wait for it."""
    claim, stream = rank_of(client, 0), open_stream(client, "t")
    abandon_epoch(client, stream, 0)
    if is_released:
        assert release_epoch(client, stream, 0)
    claim.close_epochs(0)
    assert claim.unclosed == set()
    assert not is_closed(client)


def test_an_epoch_without_a_sample_closes(any_url: str, rank_of: RankOf) -> None:
    """A producer may find nothing. Ranks that wait for a first sample would hold the epoch for ever."""
    with writer_of(any_url, spec=SPEC) as writer, connect(any_url) as client:
        with writer.epoch():
            pass
        claim = rank_of(client, 0)
        claim.close_epochs(0)
        assert claim.unclosed == set()
        assert is_closed(client)
