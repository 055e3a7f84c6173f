"""A wait names the members that it waits for: members with leases, and ranks, but no members that died long ago."""

from __future__ import annotations

import pytest

from penstock_common.explain.backlog import Missing, missing_members
from penstock_common.explain.sentences import SHOWN, explain_missing
from penstock_common.stream.commands import Client, ms_of
from penstock_common.stream.groups.presence import Liveness
from penstock_common.stream.groups.roster import ORDERED, Roster, load_roster, rank_member
from penstock_common.tuning import Canonical, Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SPEC, loader_of, sample

LATER_MS = 60_000


def written(url: str, count: int = 40) -> Writer:
    """Write the first samples of an open epoch, and yield its writer."""
    writer = Writer("t", url=url, spec=SPEC, tuning=Tuning(block_bytes=240, notify=lambda _: None))
    shard = writer.epoch(0, sizes=[100]).shard(0)
    for number in range(count):
        shard.write(sample(number))
    shard.flush()
    return writer


def look(writer: Writer, client: Client) -> tuple[Roster, Missing]:
    """Return the explanation a minute from now, with no heartbeat until then."""
    partition = writer.stream.partitions[0]
    roster = load_roster(client, partition)
    return roster, missing_members(client, partition, roster, roster.groups, ms_of(client.time()) + LATER_MS)


def test_a_dead_member_is_spoken_of_while_it_holds_something(any_url: str, any_client: Client) -> None:
    """Sixteen members that had died long ago, and held nothing, hid the one rank that all others waited for."""
    with written(any_url) as writer, loader_of(any_url, "g", member="idle") as idle:
        with loader_of(any_url, "g", member="holder", acknowledge="manual") as holder:
            next(iter(holder))
            roster, found = look(writer, any_client)
            assert {member for _, member in roster.members} == {"idle", "holder"}
            assert list(found) == [("g", "holder")]
            assert explain_missing(found).startswith("holder of group g (")
        assert idle.stats().samples == 0


def test_a_rank_that_is_not_there_is_named(any_url: str, any_client: Client) -> None:
    """An ordered group acknowledges nothing without its slowest rank. A rank that left is on no list of members."""
    first = Loader(
        "t", group="o", url=any_url, batch_size=5, order=Canonical(rank=0, world_size=2), tuning=Tuning(timeout_s=20)
    )
    with written(any_url) as writer, first:
        next(iter(first))
        roster, found = look(writer, any_client)
        assert roster.groups["o"].kind == ORDERED
        assert found["o", rank_member(1)] == Liveness()
        assert "rank-1 of group o (not there)" in explain_missing(found)


@pytest.mark.parametrize("count", [3, 9])
def test_many_are_told_in_a_line(count: int) -> None:
    """The reason of a wait is one line of a log."""
    told = explain_missing({("g", f"m{number}"): Liveness(1000 * number) for number in range(count)})
    assert told.count(" of group g (") == min(count, SHOWN)
    assert ("and 5 more" in told) == (count == 9)
