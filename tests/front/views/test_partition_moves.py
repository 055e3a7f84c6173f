"""The plan that evens out partitions: few moves, small ones first, and no key that MIGRATE cannot move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from penstock.views.partitions import MOST_KEY_BYTES, PlacedPartition, plan_moves
from penstock_common.stream.placement import choose_tags
from tests.common.stream.test_placement import even, grown, slots_of


def placed(*servers: str, nbytes: Sequence[int] = (), slots: Sequence[int] = ()) -> list[PlacedPartition]:
    """Partitions on these servers, each in a slot of its own."""
    return [
        PlacedPartition(
            number, slots[number] if slots else 100 + number, server, nbytes[number] if nbytes else number,
            nbytes[number] if nbytes else 0,
        )
        for number, server in enumerate(servers)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("partitions", "servers", "moves"),
    [
        (placed("a"), ["a"], []),
        (placed("a"), ["a", "b"], []),  # one more or less is even
        (placed("a", "b", "a"), ["a", "b"], []),
        (placed("a", "a"), ["a", "b"], [(101, "a", "b")]),  # partition 0 stays with the stream's own keys
        (placed("a", "a", "a", "a", nbytes=[1, 9, 3, 2]), ["a", "b"], [(103, "a", "b"), (102, "a", "b")]),
        (placed("a", "a", "a"), ["a", "b", "c"], [(101, "a", "b"), (102, "a", "c")]),
        # both of a slot move together, and neither moves where that makes nothing more even
        (placed("a", "a", "a", "a", slots=[7, 8, 8, 9]), ["a", "b"], [(8, "a", "b")]),
        (placed("a", "a", slots=[8, 8]), ["a", "b"], []),
        (placed("a", "a", "a", "a", slots=[8, 8, 9, 9]), ["a", "b"], [(9, "a", "b")]),
    ],
)
def test_the_plan_names_few_and_small_moves(
    partitions: list[PlacedPartition], servers: list[str], moves: list[tuple[int, str, str]]
) -> None:
    """Each move costs the operator time, and the stream a pause."""
    assert [(one.slot, one.source, one.target) for one in plan_moves(partitions, servers).moves] == moves


def test_a_key_that_migrate_cannot_move_stays_and_is_named() -> None:
    """MIGRATE of 560 MB blocked the server for 12.9 s, and failed."""
    large = MOST_KEY_BYTES + 1
    partitions = placed("a", "a", "a", "a", "b", nbytes=[large, large, large, 5, 5])
    plan = plan_moves(partitions, ["a", "b", "c"], MOST_KEY_BYTES)
    assert [one.slot for one in plan.moves] == [103]
    assert [one.number for one in plan.too_large] == [0, 1, 2]
    free = plan_moves(partitions, ["a", "b", "c"])
    assert len(free.moves) == 2
    assert free.too_large == ()


@pytest.mark.parametrize(("masters", "later"), [(3, 6), (3, 4), (16, 24), (43, 64), (63, 64)])
def test_a_cluster_that_grew_is_even_after_the_moves(masters: int, later: int) -> None:
    """The usual tool leaves a stream's partitions uneven, because only few of all slots matter."""
    owner = grown(masters, later)
    servers = [f"m{number}" for number in range(later)]
    for name, stream_id in (("train", "0123456789ab"), ("photos", "ffeeddccbbaa")):
        count = min(256, 4 * masters)
        slots = slots_of(name, choose_tags(name, stream_id, count, even(masters)))
        partitions = placed(*(f"m{owner[slot]}" for slot in slots), slots=slots)
        before = Counter(dict.fromkeys(servers, 0) | Counter(one.server for one in partitions))
        plan = plan_moves(partitions, servers)
        after = before.copy()
        for move in plan.moves:
            after[move.source] -= len(move.partitions)
            after[move.target] += len(move.partitions)
        assert max(after.values()) - min(after.values()) <= 1
        least = count // later
        needed = max(
            sum(max(0, held - least - 1) for held in before.values()),
            sum(max(0, least - held) for held in before.values()),
        )
        assert len(plan.moves) == needed
