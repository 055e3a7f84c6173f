"""A cleaner plans by a look at the roster, and is refused where the roster has changed since.

Each promise that a script makes to another client between the two must hold: a group that joined reads from there on, a
pin keeps, a replay goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, ms_of, run_script
from penstock_common.stream.entries import index_records
from penstock_common.stream.groups.forgetting import reset_group
from penstock_common.stream.groups.roster import Membership, beat, hold_for_replay, join_group, load_roster, pin_epoch
from penstock_common.stream.manifest import open_epoch, retained_epochs
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.stream.streams import Stream, load_stream
from penstock_producer.write import cleaner
from penstock_producer.write.cleaner import Cleaner, clean_up
from penstock_producer.write.retention import parse_policy
from tests.contracts.between import between
from tests.producer.repaired import lose_entry, produce, repair
from tests.producer.test_retention import BYTES, loader_of, read, write_epoch, writer_of

Act = Callable[[Client, Stream], object]


def join(client: Client, stream: Stream) -> None:
    """A new group, to which the script promises all epochs from the first one."""
    assert join_group(client, Membership(stream, "late", "m", "1")) == 0


def replay(client: Client, stream: Stream) -> None:
    """A replay, to which the script promises that the epoch stays while it reads."""
    assert hold_for_replay(client, stream.partitions[0], "token", 0, 60_000, renew=False)


def start_again(client: Client, stream: Stream) -> None:
    """The group that had acknowledged everything reads it again."""
    reset_group(client, stream, "g", 0)


def reopen(client: Client, stream: Stream) -> None:
    """An operator returned an entry that the group had received only in part."""
    assert run_script(client, load_script("reopen_epoch_for_group"), [stream.partitions[0].roster], ["g", 0]) == 1


ACTS: dict[str, Act] = {
    "a group joins": join,
    "a pin": lambda client, stream: pin_epoch(client, stream, 0),
    "a replay begins": replay,
    "its group starts again": start_again,
    "the epoch is opened again": reopen,
}


@pytest.fixture(params=ACTS)
def act(request: pytest.FixtureRequest) -> Act:
    """Return what happens between the plan and its execution."""
    return ACTS[request.param]


@contextmanager
def acknowledged(url: str) -> Iterator[Stream]:
    """A stream of two epochs that its one group has read."""
    with writer_of(url) as writer, loader_of(url, "g") as loader:
        for _ in range(2):
            write_epoch(writer, 20)
            read(loader)
        yield writer.stream


def test_a_pass_of_retention_releases_nothing_that_was_promised_meanwhile(
    any_url: str, any_client: Client, act: Act
) -> None:
    """Its plan is as old as its look at all partitions, which takes a while where there are many."""
    with acknowledged(any_url) as stream:
        with between(
            "penstock_producer.write.cleaner.fetch_rosters",
            load_script("retire_epoch"),
            lambda: act(any_client, stream),
        ):
            done = clean_up(any_client, stream, lambda _: None, policy=parse_policy("epochs:1"))
        assert done.released == []
        assert list(retained_epochs(any_client, stream)) == [0, 1]
        assert len(list(index_records(any_client, stream.partitions[0], 0, 0))) == 2


def test_making_room_releases_nothing_that_was_promised_meanwhile(any_url: str, any_client: Client, act: Act) -> None:
    """A writer that waits is no reason to break a promise to a reader."""
    with acknowledged(any_url) as stream:
        worker = Cleaner(any_client, stream, lambda _: None)
        with between(
            "penstock_producer.write.cleaner.snapshot_partition",
            load_script("retire_epoch"),
            lambda: act(any_client, stream),
        ):
            worker.free_bytes(stream.partitions[0], 1)
        assert 0 in retained_epochs(any_client, stream)
        assert any_client.xlen(stream.partitions[0].entries(0)) == 2


def test_making_room_trims_nothing_that_was_promised_meanwhile(any_url: str, any_client: Client, act: Act) -> None:
    """Such a plan also removes single entries of a running epoch."""
    with (
        writer_of(any_url) as writer,
        writer.epoch() as epoch,
        loader_of(any_url, "g", acknowledge="on_checkpoint") as loader,
    ):
        for number in range(30):
            epoch.write({"x": np.full(BYTES - 8, number, np.uint8), "y": number})
        epoch.flush()
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        loader.checkpointed()
        stream, entries = writer.stream, writer.stream.partitions[0].entries(0)
        worker = Cleaner(any_client, stream, lambda _: None)
        with between(
            "penstock_producer.write.cleaner.snapshot_partition", load_script("trim"), lambda: act(any_client, stream)
        ):
            assert worker.free_bytes(stream.partitions[0], 1) == 0
        assert any_client.xlen(entries) == 3


def test_a_member_that_shows_itself_between_two_looks_is_not_forgotten(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's clock that jumps makes everybody look silent."""
    monkeypatch.setattr(cleaner, "LOOK_AGAIN_S", 0)
    with writer_of(any_url) as writer:
        stream, who = writer.stream, Membership(writer.stream, "g", "m", "1")
        join_group(any_client, who)
        joined_ms = ms_of(any_client.time())
        while ms_of(any_client.time()) == joined_ms:  # a heartbeat in the same millisecond would change nothing
            pass
        with between(
            "penstock_producer.write.cleaner.fetch_rosters",
            load_script("expire_silent"),
            lambda: beat(any_client, who, stream.partitions[0], {}),
        ):
            done = clean_up(any_client, stream, lambda _: None, silent_ms=-1)
        assert done.expired == []
        assert load_roster(any_client, stream.partitions[0]).groups["g"].holds
        assert clean_up(any_client, stream, lambda _: None, silent_ms=-1).expired == ["g"]


def test_a_group_that_joins_while_an_epoch_is_opened_reads_it(any_url: str, any_client: Client) -> None:
    """The second process makes its consumer group, and neither may rely on the other."""
    with writer_of(any_url) as writer:
        write_epoch(writer, 10)
        stream = writer.stream
        who = Membership(stream, "g", "m", "1")
        look = "penstock_common.stream.groups.roster.load_roster"
        with between(look, load_script("join_group"), lambda: open_epoch(any_client, stream)):
            assert join_group(any_client, who) == 0
        for epoch in (0, 1):
            groups = [info["name"] for info in any_client.xinfo_groups(stream.partitions[0].entries(epoch))]
            assert b"g" in groups


def test_a_member_joins_while_an_epoch_of_its_group_is_released(any_url: str, any_client: Client) -> None:
    """The epoch's entries were gone, and the trainer ended with DamagedKey, which told its user to make them again."""
    with writer_of(any_url) as writer:
        write_epoch(writer, 10)
        stream = writer.stream
        assert join_group(any_client, Membership(stream, "g", "m", "1")) == 0
        look = "penstock_common.stream.groups.roster.load_roster"
        with between(look, load_script("join_group"), lambda: release_epoch(any_client, stream, 0)):
            assert join_group(any_client, Membership(stream, "g", "other", "2")) == 0
        assert ("g", "other") in load_roster(any_client, stream.partitions[0]).members


def test_bytes_that_move_while_they_are_counted_are_left_to_who_moves_them(any_url: str, any_client: Client) -> None:
    """A writer commits between a repair's count and its correction: corrected, the budget would be wrong for ever."""
    produce(any_url)
    stream = load_stream(any_client, "t")
    roster = stream.partitions[0].roster
    lose_entry(any_client, 0, 0)

    def commit() -> None:
        for field in ("bytes", "b:0"):
            any_client.hincrby(roster, field, 1000)

    before = load_roster(any_client, stream.partitions[0]).bytes
    with between("penstock_common.stream.mending.repairs.survey_epoch", load_script("correct_bytes"), commit):
        repair(any_url)
    after = load_roster(any_client, stream.partitions[0])
    assert after.bytes == sum(after.epoch_bytes.values())
    assert after.bytes > before + 1000  # what was put back is counted twice until the next repair, and never too low
