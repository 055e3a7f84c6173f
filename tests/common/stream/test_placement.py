"""Partitions spread evenly over the servers of a cluster, and stay so when it grows. Simulated, up to 64 masters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from penstock_common.server.slots import SLOTS, slot_of
from penstock_common.stream.placement import LEAST_EACH_BYTES, choose_tags, usual_partitions

STREAMS = [("train", "0123456789ab"), ("photos", "ffeeddccbbaa"), ("v2.text", "a0a0a0a0a0a0")]


def even(masters: int) -> list[list[range]]:
    """A cluster as ``redis-cli --cluster create`` makes it."""
    return [[range(n * SLOTS // masters, (n + 1) * SLOTS // masters)] for n in range(masters)]


def grown(masters: int, later: int) -> dict[int, int]:
    """Slot -> master after growth: each old master gives its lowest slots away, as ``--cluster rebalance`` does."""
    owner: dict[int, int] = {}
    given: list[int] = []
    for number, (slots,) in enumerate(even(masters)):
        stays = SLOTS // later
        given += slots[: len(slots) - stays]
        owner |= dict.fromkeys(slots[len(slots) - stays :], number)
    each = -(-len(given) // (later - masters))
    owner |= {slot: masters + at // each for at, slot in enumerate(given)}
    return owner


def slots_of(name: str, tags: Sequence[str]) -> list[int]:
    """The slot of each partition."""
    return [slot_of(f"penstock:{{{name}.{tag}}}:roster") for tag in tags]


@pytest.mark.parametrize("masters", [2, 3, 5, 16, 64])
@pytest.mark.parametrize(("name", "stream_id"), STREAMS)
def test_each_master_gets_as_many_partitions_as_every_other(masters: int, name: str, stream_id: str) -> None:
    """The fullest master limits the memory and the speed of a stream."""
    servers = even(masters)
    slots = slots_of(name, choose_tags(name, stream_id, 4 * masters, servers))
    held = Counter(slot * masters // SLOTS for slot in slots)
    assert set(held.values()) == {4}
    assert len(held) == masters


@pytest.mark.parametrize(("name", "stream_id"), STREAMS)
def test_the_first_partition_lies_with_the_stream(name: str, stream_id: str) -> None:
    """A stream of one partition then has a single slot, and a failover loses all of its newest writes or none."""
    for count in (1, 3, 12):
        slots = slots_of(name, choose_tags(name, stream_id, count, even(3)))
        assert slots[0] == slot_of(f"penstock:{{{name}}}:meta")


@pytest.mark.parametrize(("masters", "later", "most"), [(3, 6, 2.0), (16, 24, 1.5), (43, 64, 1.5)])
def test_a_cluster_that_grows_stays_nearly_even(masters: int, later: int, most: float) -> None:
    """Evenly spaced partitions would move to one new master together: up to 13 times the mean."""
    owner = grown(masters, later)
    for name, stream_id in STREAMS:
        count = 4 * masters
        held = Counter(owner[slot] for slot in slots_of(name, choose_tags(name, stream_id, count, even(masters))))
        assert max(held.values()) / (count / later) <= most, held


def test_one_server_has_tags_in_equal_ranges_as_ever() -> None:
    """The npm package makes streams with the same tags."""
    for count in (1, 3, 8):
        slots = slots_of("train", choose_tags("train", "0123456789ab", count, []))
        assert [slot * count // SLOTS for slot in slots] == list(range(count))


def test_a_stream_that_names_no_partitions_has_four_a_master() -> None:
    """With one a master, a further master would stay empty."""
    assert usual_partitions(0, 1 << 30) == usual_partitions(1, 1 << 30) == 1
    assert usual_partitions(3, 1 << 30) == 12
    assert usual_partitions(64, 1 << 40) == 256
    assert usual_partitions(3, 5 * LEAST_EACH_BYTES) == 5
    assert usual_partitions(3, 1) == 1
