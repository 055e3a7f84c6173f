"""Discards in ordered groups: a discarded sample is a hole, filled alike for every rank, and the audit agrees."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_common.errors import EpochIncomplete
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.mending.bad import list_bad
from penstock_common.stream.mending.drop import drop_bad
from tests.contracts.feed import entries, loader_of, numbers, open_stream
from tests.contracts.ordered import expected, plan, rank_of, read_ranks

Client = Any
LOST = frozenset(range(30, 40))


def lose_entry(client: Client) -> bytes:
    """Delete the entry of positions 30 to 39 of an epoch of blocks of 10, and return its id."""
    gone: bytes = entries(client, "t", 0)[3][0]
    client.xdel(open_stream(client, "t").partitions[0].entries(0), gone)
    return gone


def lose_record(client: Client) -> None:
    """Delete the index record of those positions, and the entry with it."""
    lose_entry(client)
    client.xdel(open_stream(client, "t").partitions[0].index(0, 0), "40-0")


@pytest.mark.parametrize("lose", [lose_entry, lose_record])
def test_what_is_given_up_is_filled_alike_for_every_rank_and_the_epoch_closes(
    any_url: str, any_client: Client, lose: Any
) -> None:
    """Without it EpochIncomplete returns at every restart, and only a repair would help."""
    plan(any_url, [70], block_samples=10)
    lose(any_client)
    stream = open_stream(any_client, "t")
    with rank_of(any_url, 0, 2) as loader, pytest.raises(EpochIncomplete, match="penstock bad drop"):
        list(loader)
    (dropped,) = drop_bad(any_client, stream, 0, group="g", reason="the disk is gone")
    assert (dropped.shard, dropped.first, dropped.end, dropped.given_up) == (0, 30, 40, True)
    assert drop_bad(any_client, stream, 0, group="g", reason="again") == []
    for rank, rest in enumerate(read_ranks(any_url, 2, 8)):  # from the position of each rank
        planned = [expected(70, LOST, at, at + 8) for at in range(8 * rank, 80, 16)]
        assert len(rest) >= 3
        assert rest == planned[-len(rest) :]
    report = audit_stream(any_client, "t")
    group = report.epochs[0].groups["g"]
    assert (report.is_clean, report.findings) == (True, [])
    assert (group.delivered, group.dead, group.given_up, group.lost, group.unread) == (60, 10, 10, 0, 0)
    assert [(letter.first, letter.end) for letter in list_bad(any_client, stream).dead] == [(30, 40)]


def test_a_rank_that_is_reading_passes_over_what_was_given_up_meanwhile(any_url: str, any_client: Client) -> None:
    """A trainer that is hours before the gap need not be restarted for it."""
    plan(any_url, [700], block_samples=10)
    found: list[int] = []
    with rank_of(any_url, prefetch_bytes=2000) as loader:
        for batch in loader:
            if not found:
                gone = entries(any_client, "t", 0)[60][0]
                any_client.xdel(open_stream(any_client, "t").partitions[0].entries(0), gone)
                drop_bad(any_client, open_stream(any_client, "t"), 0, group="g", reason="gone")
            found += batch["y"].tolist()
    assert found == expected(700, frozenset(range(600, 610)), 0, 700)


def test_an_entry_that_is_named_is_passed_over_for_every_group(any_url: str, any_client: Client) -> None:
    """Training dies at it, or it is forged: one command makes shared and ordered groups continue without it."""
    plan(any_url, [70], block_samples=10)
    poison = entries(any_client, "t", 0)[3][0]
    with rank_of(any_url):  # the group exists now
        pass
    dropped = drop_bad(any_client, open_stream(any_client, "t"), 0, group="g", reason="poison", entry=poison.decode())
    assert [(letter.first, letter.end) for letter in dropped] == [(30, 40)]
    with rank_of(any_url) as loader:
        assert numbers(loader) == expected(70, LOST, 0, 70)
    assert audit_stream(any_client, "t").is_clean


def test_one_ordered_group_does_not_stop_a_drop_for_all_groups(any_url: str, any_client: Client) -> None:
    """A loss concerns every group of the epoch, in any way of reading."""
    plan(any_url, [70], block_samples=10)
    with rank_of(any_url), loader_of(any_url, "shared"):
        pass
    lose_entry(any_client)
    with loader_of(any_url, "shared") as loader, pytest.raises(EpochIncomplete):
        for _ in range(2):
            list(loader)
    dropped = drop_bad(any_client, open_stream(any_client, "t"), 0, group=None, reason="gone")
    assert sorted(letter.group for letter in dropped) == ["g", "shared"]
    with rank_of(any_url) as loader:
        assert numbers(loader) == expected(70, LOST, 0, 70)
    report = audit_stream(any_client, "t")
    assert report.is_clean, report.findings
    assert {name: group.dead for name, group in report.epochs[0].groups.items()} == {"g": 10, "shared": 10}
