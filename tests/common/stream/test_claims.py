"""Claims: several members see the same returned entry, and only one may get it."""

from __future__ import annotations

import redis

from penstock_common.stream.entries import PendingEntry, claim, list_pending
from penstock_common.stream.keys import RELEASED, PartitionKeys
from penstock_common.stream.removal.deletion import release_epoch
from tests.contracts.feed import open_stream, produce


def given_to(holder: str, url: str, client: redis.Redis) -> tuple[PartitionKeys, PendingEntry]:
    """Return one entry, pending under this holder of group 'g', as a member sees it."""
    produce(url, "t", 1)
    partition = open_stream(client, "t").partitions[0]
    client.xgroup_create(partition.entries(0), "g", "0")
    client.xreadgroup("g", holder, {partition.entries(0): ">"})
    (seen,) = list_pending(client, partition, 0, "g")
    return partition, seen


def test_of_two_that_claim_what_was_handed_back_only_the_first_has_it(url: str, client: redis.Redis) -> None:
    """If both members got the returned entry, its samples would be trained on twice although no member died."""
    partition, seen = given_to(RELEASED, url, client)
    assert [claim(client, partition, 0, ("g", member), seen, min_idle_ms=0) for member in ("a", "b")] == [True, False]
    (held,) = list_pending(client, partition, 0, "g")
    assert (held.member, held.deliveries) == ("a", 2)


def test_who_lost_an_entry_does_not_take_it_back_by_a_claim_of_its_own(url: str, client: redis.Redis) -> None:
    """A member asks for an entry that it was given and never received, while another member claims it."""
    partition, seen = given_to("slow", url, client)
    assert claim(client, partition, 0, ("g", "other"), seen, min_idle_ms=0)
    assert not claim(client, partition, 0, ("g", "slow"), seen, min_idle_ms=0)


def test_claiming_what_was_released_just_then_takes_nothing_and_ends_nobody(url: str, client: redis.Redis) -> None:
    """A lease renewer lists the entries of a dead member while another acknowledges them.

    Its thread must survive that.
    """
    partition, seen = given_to("dead", url, client)
    assert release_epoch(client, open_stream(client, "t"), 0)
    assert not claim(client, partition, 0, ("g", "m"), seen, min_idle_ms=0)
