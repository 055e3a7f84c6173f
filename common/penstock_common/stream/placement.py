"""Chooses the hash tags of partitions, such that each server of a cluster gets as many as every other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock_common.server.slots import SLOTS, slot_of

PARTITIONS_EACH: Final = 4
"""The partitions of a new stream for each of several servers, so that a server more or less changes shares little."""
LEAST_EACH_BYTES: Final = 16 << 20
"""The least budget of a partition that is not asked for: a quarter of it holds some blocks."""
MOST: Final = 256
"""The most partitions that are not asked for. Each costs a reader a request now and then."""
_GOLDEN: Final = (5**0.5 - 1) / 2

Slots = Sequence[range]
"""The slots of one server, as ranges in rising order."""


def usual_partitions(servers: int, budget_bytes: int) -> int:
    """Return the number of partitions of a stream that names none: one for one server."""
    return max(1, min(MOST, PARTITIONS_EACH * servers, budget_bytes // LEAST_EACH_BYTES)) if servers > 1 else 1


def choose_tags(name: str, stream_id: str, count: int, servers: Sequence[Slots]) -> list[str]:
    """Return the hash tag of each partition of a new stream.

    With several servers, partition 0 is in the stream's own slot, so that what both hold is lost together or not at
    all. The others go to the servers in turn. A server's slot for partition p is at the fraction ``frac((p + 1) *
    0.618)`` of its slots: a tool that moves the lowest slots to a new server would take evenly spaced ones together.
    With one server, partition p hashes into the p-th of ``count`` equal ranges.

    Args:
        name: The stream.
        stream_id: Its random id, with which each tag begins.
        count: The number of partitions.
        servers: The slots of each server.
    """
    if len(servers) < 2:
        return _spread_evenly(name, stream_id, count)
    chosen = planned_servers(name, count, servers)
    wanted = [slot_of(f"{{{name}}}")] + [
        _at_share(servers[chosen[partition]], (partition + 1) * _GOLDEN % 1) for partition in range(1, count)
    ]
    return _search(name, stream_id, wanted)


def planned_servers(name: str, count: int, servers: Sequence[Slots]) -> list[int]:
    """Return the server of each partition of a new stream, by number: all in turn, from that of the stream's slot."""
    own = slot_of(f"{{{name}}}")
    first = next((at for at, slots in enumerate(servers) if any(own in some for some in slots)), 0)
    return [(first + partition) % max(1, len(servers)) for partition in range(count)]


def _at_share(slots: Slots, share: float) -> int:
    """Return the slot below which a server has this share of its slots."""
    left = int(share * sum(len(some) for some in slots))
    for some in slots:
        if left < len(some):
            return some[left]
        left -= len(some)
    raise ValueError(f"a server without slots: {slots}")


def _spread_evenly(name: str, stream_id: str, count: int) -> list[str]:
    """Return tags in the order of numbers. Consecutive numbers alone would put all keys on few nodes of a cluster."""
    tags: list[str] = []
    number = 0
    while len(tags) < count:
        tag = f"{stream_id}.{number}"
        if slot_of(f"{name}.{tag}") * count // SLOTS == len(tags):
            tags.append(tag)
        number += 1
    return tags


def _search(name: str, stream_id: str, wanted: Sequence[int]) -> list[str]:
    """Return a tag for each slot. Numbers are tried until every partition has one, 16,384 times the logarithm."""
    missing: dict[int, list[int]] = {}
    for partition, slot in enumerate(wanted):
        missing.setdefault(slot, []).append(partition)
    tags: dict[int, str] = {}
    number = 0
    while missing:
        slot = slot_of(f"{name}.{stream_id}.{number}")
        if slot in missing:
            tags[missing[slot].pop(0)] = f"{stream_id}.{number}"
            if not missing[slot]:
                del missing[slot]
        number += 1
    return [tags[partition] for partition in range(len(wanted))]
