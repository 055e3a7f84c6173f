"""The note of a writer that waits: readers and operators learn from it for which shard everyone waits, and for what."""

from __future__ import annotations

import pytest

from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import load_roster
from penstock_producer.write.admission import NOTE_AFTER_S, AdmissionControl
from penstock_producer.write.resources import ORDER_LOOK_S, SharedResources
from penstock_producer.write.target import ShardTarget
from tests.contracts.feed import SAMPLE_BYTES, SPEC, writer_of


@pytest.mark.parametrize(("refused", "why"), [("note_full_server", "memory"), ("note_full_folder", "folder")])
def test_of_writers_that_server_or_folder_refused_the_one_that_is_waited_for_is_known(
    any_url: str, any_client: Client, refused: str, why: str
) -> None:
    """Their quota is enough, so the rule never asks whose turn it is; trainers were told to look for a producer."""
    now_s, args = 0.0, ["/full"] if why == "folder" else []
    with writer_of(any_url, spec=SPEC) as writer:
        epoch = writer.epoch(0, sizes=[10, 10])
        resources = SharedResources(any_client, writer.stream, print)
        rooms = [
            AdmissionControl(ShardTarget(any_client, writer.stream, epoch.manifest, shard), lambda: now_s, resources)
            for shard in (0, 1)
        ]
        for _ in range(2):  # refused, and a while later still
            for room in rooms:
                getattr(room, refused)(*args)
                assert not room.admit(100, 0)
            now_s += NOTE_AFTER_S + ORDER_LOOK_S
        waiting = load_roster(any_client, writer.stream.partitions[0]).waiting
        assert {place: (waiter.why, waiter.is_next) for place, waiter in waiting.items()} == {
            (0, 0): (why, True),
            (0, 1): (why, False),
        }
        for room in rooms:
            room.end_wait()
        resources.close()
        epoch.abandon()


@pytest.mark.parametrize("hindered", ["by the rule", "by the server", "by the folder"])
def test_nothing_is_sent_ahead_while_a_writer_waits(any_url: str, any_client: Client, hindered: str) -> None:
    """A block that is sent with the one before it asks nothing. After a refusal each would be sent again."""
    with writer_of(any_url, spec=SPEC, budget_bytes=100 * SAMPLE_BYTES) as writer, writer.epoch() as epoch:
        resources = SharedResources(any_client, writer.stream, lambda _: None)
        target = ShardTarget(any_client, writer.stream, epoch.manifest, 0)
        room = AdmissionControl(target, lambda: 0.0, resources)
        assert room.admit(SAMPLE_BYTES, 0)
        assert room.admit_next(SAMPLE_BYTES, 0), "nothing is in the way"
        if hindered == "by the rule":
            assert not room.admit(SAMPLE_BYTES, 100 * SAMPLE_BYTES)
        elif hindered == "by the server":
            room.note_full_server()
        else:
            room.note_full_folder("/full")
        assert not room.admit_next(SAMPLE_BYTES, 0)
        assert room.admit(SAMPLE_BYTES, 0) == (hindered == "by the rule"), "a refusal costs one more round"
        resources.close()
