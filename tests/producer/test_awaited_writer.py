"""The note of a writer that waits: readers and operators learn from it for which shard everyone waits, and for what."""

from __future__ import annotations

import pytest

from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.link.commands import Client
from penstock_producer.writing.lasting import Lasting
from penstock_producer.writing.room import NOTE_AFTER_S, RoomKeeper
from penstock_producer.writing.turns import LOOK_EVERY_S
from tests.contracts.feed import SPEC, writer_of


@pytest.mark.parametrize(("refused", "why"), [("server_is_full", "memory"), ("full_folder", "folder")])
def test_of_writers_that_server_or_folder_refused_the_one_that_is_waited_for_is_known(
    any_url: str, any_client: Client, refused: str, why: str
) -> None:
    """Their budget has room, so the rule never asks whose turn it is; trainers were told to look for a producer."""
    now_s = 0.0
    with writer_of(any_url, spec=SPEC) as writer:
        epoch = writer.epoch(0, sizes=[10, 10])
        lasting = Lasting(any_client, writer.stream, print)
        rooms = [
            RoomKeeper(any_client, writer.stream, epoch.manifest, shard, lambda: now_s, lasting) for shard in (0, 1)
        ]
        for _ in range(2):  # refused, and a while later still
            for room in rooms:
                setattr(room, refused, "/full")
                assert not room.has_room(100, 0)
            now_s += NOTE_AFTER_S + LOOK_EVERY_S
        waiting = load_roster(any_client, writer.stream.partitions[0]).waiting
        assert {place: (waiter.why, waiter.is_next) for place, waiter in waiting.items()} == {
            (0, 0): (why, True),
            (0, 1): (why, False),
        }
        for room in rooms:
            room.end_wait()
        lasting.close()
        epoch.abandon()
