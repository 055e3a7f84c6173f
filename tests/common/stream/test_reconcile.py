"""One slot comes back older than the others: what the stream's slot and its partitions say of each other is repaired.

Each test is a row of docs/internals/lost-slots.md. The keys of one slot go back, on a real server, and the rest stays.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock_common.errors import EpochsReleased, StreamConflict
from penstock_common.stream.audit import audit_stream, reconciliation
from penstock_common.stream.audit.reconciliation import StepKind, look, plan_reconciliation
from penstock_common.stream.groups.losses import losses_of_lost_epochs, noted_losses
from penstock_common.stream.groups.roster import Membership, close_for_group, expire_silent, join_group, load_roster
from penstock_common.stream.manifest import abandon_epoch, find_manifest, load_manifest, open_epoch, retained_epochs
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.stream.removal.reconcile import reconcile, reopen_lost
from penstock_common.stream.streams import Stream, read_counters
from tests.contracts.feed import accounted_bytes, loader_of, numbers, open_stream, sample, writer_of
from tests.contracts.ordered import plan, planned_writer, write_shard
from tests.torn_slots import partition_slot, stream_slot

SIZES = [20, 20]
"""Two shards, one in each of two partitions."""


def made(url: str, client: Any, *, epochs: int = 1) -> Stream:
    """Produce epochs of two shards in two partitions."""
    plan(url, SIZES, partitions=2, epochs=epochs)
    return open_stream(client, "t")


def kinds(client: Any, stream: Stream) -> list[StepKind]:
    """Return the kinds of steps that are due, in order."""
    return [step.kind for step in plan_reconciliation(look(client, stream))]


def repair(client: Any, stream: Stream) -> list[StepKind]:
    """Reconcile until nothing is left to do, and return the kinds of steps taken."""
    taken, said = list[StepKind](), list[str]()
    while steps := reconcile(client, stream, said.append, settle_s=0):
        taken += [step.kind for step in steps]
        assert len(taken) < 20, said
    return taken


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time have to pass until a process counts as gone."""
    monkeypatch.setattr(reconciliation, "ALIVE_MS", -1)


def test_a_stream_at_rest_and_one_at_work_have_nothing_to_reconcile(any_url: str, any_client: Any) -> None:
    """A step that is not needed would change what a live process has just written."""
    stream = made(any_url, any_client, epochs=2)
    with loader_of(any_url) as loader:
        assert len(numbers(loader)) == 40
        assert kinds(any_client, stream) == []
    with planned_writer(any_url, 2) as writer:
        epoch = writer.epoch(sizes=SIZES)
        write_shard(epoch, 0, SIZES, frozenset())
        assert kinds(any_client, stream) == []
    release_epoch(any_client, stream, 0)
    assert kinds(any_client, stream) == []
    assert audit_stream(any_client, "t").is_clean


def test_a_release_lost_in_a_partition_gives_its_bytes_back(any_url: str, any_client: Any) -> None:
    """They counted against the budget for ever, and the audit was clean."""
    stream = made(any_url, any_client)
    before = partition_slot(any_client, stream, 1)
    release_epoch(any_client, stream, 0)
    before.restore(any_client)
    assert accounted_bytes(any_client, "t")[0] > 0
    assert not audit_stream(any_client, "t").is_clean
    assert repair(any_client, stream) == [StepKind.RETIRE]
    assert accounted_bytes(any_client, "t") == (0, {})
    assert not [key for key in any_client.keys("*") if b":0:" in key]
    assert audit_stream(any_client, "t").is_clean
    assert not losses_of_lost_epochs(any_client, stream)


def test_a_release_lost_in_the_streams_slot_is_completed(any_url: str, any_client: Any) -> None:
    """Trainers waited for its producer for ever."""
    stream = made(any_url, any_client)
    before = stream_slot(any_client, stream)
    release_epoch(any_client, stream, 0)
    before.restore(any_client)
    assert repair(any_client, stream) == [StepKind.RELEASE]
    assert not retained_epochs(any_client, stream)
    assert read_counters(any_client, stream)[2] == "0"
    assert audit_stream(any_client, "t").is_clean


def test_an_epoch_that_a_partition_lost_is_opened_there_again_and_its_shard_made_again(
    any_url: str, any_client: Any
) -> None:
    """Jobs said that it was released, and ended."""
    with planned_writer(any_url, 2) as writer:
        before = partition_slot(any_client, writer.stream, 1)
        epoch = writer.epoch(sizes=SIZES)
        before.restore(any_client)
        assert not audit_stream(any_client, "t").is_clean
        assert repair(any_client, writer.stream) == [StepKind.OPEN]
        write_shard(epoch, 0, SIZES, frozenset())
        write_shard(epoch, 1, SIZES, frozenset())
    assert audit_stream(any_client, "t").is_clean
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(40))


def test_what_a_roster_lacks_is_never_taken_for_a_release(any_url: str, any_client: Any) -> None:
    """A server that comes back empty has no roster: its samples are lost, and the audit must say so."""
    stream = made(any_url, any_client)
    for number in (0, 1):
        empty = partition_slot(any_client, stream, number)
        type(empty)(empty.tag, {}).restore(any_client)
    assert StepKind.RELEASE not in repair(any_client, stream)
    report = audit_stream(any_client, "t")
    assert not report.is_clean
    assert report.lost == 40
    assert "1" not in read_counters(any_client, stream)[2]


def test_a_number_that_a_partition_has_is_not_given_out_again(any_url: str, any_client: Any) -> None:
    """The writer's error was the server's own, and it met it once for each epoch."""
    stream = made(any_url, any_client)
    before = stream_slot(any_client, stream)
    plan(any_url, SIZES, partitions=2, epochs=3)
    before.restore(any_client)
    assert kinds(any_client, stream)[0] is StepKind.RAISE
    with writer_of(any_url) as writer:
        with pytest.raises(StreamConflict, match="given out twice"):
            writer.epoch()
        with writer.epoch() as epoch:  # at once: no other number is met
            epoch.write(sample(7))
        assert epoch.number == 4
    assert repair(any_client, stream) == [StepKind.RETIRE] * 3
    report = audit_stream(any_client, "t")
    assert not report.is_clean, "the lost epochs are named"
    assert {loss.epoch for epoch in report.epochs for loss in epoch.server_losses} == {1, 2, 3}
    lost = losses_of_lost_epochs(any_client, stream)[1]
    assert [(loss.shard, loss.first, loss.end) for loss in lost] == [(0, 0, 20), (1, 0, 20)]
    assert "127.0.0.1" in lost[0].by or "unix" in lost[0].by


def test_a_group_starts_again_where_only_an_epoch_without_samples_is_removed(any_url: str, any_client: Any) -> None:
    """Otherwise an error reports a release and asks for `start='earliest'`, although nothing was lost."""
    stream = made(any_url, any_client)
    with loader_of(any_url) as loader:
        assert len(numbers(loader)) == 40
    before = stream_slot(any_client, stream)
    open_epoch(any_client, stream, sizes=SIZES)
    before.restore(any_client)
    assert repair(any_client, stream) == [StepKind.RAISE, StepKind.RETIRE]
    plan(any_url, SIZES, partitions=2)
    with loader_of(any_url) as loader:
        assert len(numbers(loader)) == 40
    assert audit_stream(any_client, "t").is_clean


@pytest.mark.parametrize("number", [0, 1])
def test_a_group_that_a_roster_lost_is_put_back_and_skips_nothing(any_url: str, any_client: Any, number: int) -> None:
    """Retention there went by the other groups, and its members ended."""
    stream = made(any_url, any_client)
    before = partition_slot(any_client, stream, number)
    with loader_of(any_url) as loader:
        next(iter(loader))
    before.restore(any_client)
    assert not audit_stream(any_client, "t").is_clean
    assert repair(any_client, stream) == [StepKind.RESTORE]
    assert audit_stream(any_client, "t").is_clean
    records = [load_roster(any_client, partition).groups["g"] for partition in stream.partitions]
    assert records[0].first == records[1].first == 0
    with loader_of(any_url) as loader:
        assert len(set(range(40)) - set(numbers(loader))) <= 8, "at most the batch that was trained on"


def test_a_group_that_is_put_back_is_not_given_what_it_was_done_with(any_url: str, any_client: Any) -> None:
    """From the first entry on, it would train on every retained epoch again."""
    stream = made(any_url, any_client)
    before = partition_slot(any_client, stream, 1)
    with loader_of(any_url) as loader:
        assert len(numbers(loader)) == 40
    before.restore(any_client)
    assert repair(any_client, stream) == [StepKind.RESTORE]
    plan(any_url, SIZES, partitions=2)
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(40))
        assert loader.stats().samples == 40
    assert all(("g", 0) in load_roster(any_client, partition).closed for partition in stream.partitions)


def test_a_group_that_is_put_back_keeps_the_note_of_what_it_lost(any_url: str, any_client: Any) -> None:
    """It would go on without a word behind epochs that it never read."""
    stream = made(any_url, any_client, epochs=3)
    join_group(any_client, Membership(stream, "g", "", ""))
    for partition in stream.partitions:
        assert expire_silent(any_client, partition, -1000) == ["g"]
    for epoch in (0, 1):
        release_epoch(any_client, stream, epoch)
    first, second = stream.partitions
    any_client.hdel(second.roster, "g:g")
    assert repair(any_client, stream) == [StepKind.RESTORE]
    any_client.hdel(first.roster, "g:g")
    with pytest.raises(EpochsReleased, match="epochs 0-1"):
        join_group(any_client, Membership(stream, "g", "m", "i"))


def test_an_epoch_that_a_group_has_closed_is_closed_where_that_is_lost(any_url: str, any_client: Any) -> None:
    """Otherwise its bytes count in that partition until the stream is deleted."""
    stream = made(any_url, any_client)
    with loader_of(any_url) as loader:
        before = partition_slot(any_client, stream, 1)
        assert len(numbers(loader)) == 40
    before.restore(any_client)
    close_for_group(any_client, Stream(**{**_fields(stream), "partitions": stream.partitions[:1]}), "g", 0)
    assert repair(any_client, stream) == [StepKind.CLOSE]
    assert ("g", 0) in load_roster(any_client, stream.partitions[1]).closed


def _fields(stream: Stream) -> dict[str, Any]:
    return {name: getattr(stream, name) for name in stream.__slots__}


@pytest.mark.usefixtures("quiet")
def test_a_shard_whose_completion_is_lost_is_finished_once_its_writer_is_gone(any_url: str, any_client: Any) -> None:
    """The epoch stayed open, and trainers waited for a producer that had ended."""
    stream = made(any_url, any_client)
    manifest = load_manifest(any_client, stream, 0)
    any_client.hdel(stream.keys.manifest(0), "d:1", "produced_ms")
    any_client.hset(stream.keys.manifest(0), mapping={"state": "sized", "done": 1})
    any_client.hset(stream.keys.epochs, "0", "sized")
    assert repair(any_client, stream) == [StepKind.FINISH]
    assert load_manifest(any_client, stream, 0).done == manifest.done
    assert retained_epochs(any_client, stream) == {0: "produced"}


def test_a_lost_end_of_a_shard_is_noted_and_taken_back_by_who_has_the_source(any_url: str, any_client: Any) -> None:
    """Otherwise the epoch counts as produced, and no worker makes the samples again."""
    with planned_writer(any_url, 2) as writer:
        stream = writer.stream
        epoch = writer.epoch(sizes=SIZES, fingerprint="files")
        write_shard(epoch, 0, SIZES, frozenset())
        with epoch.shard(1) as shard:
            for position in range(20, 34):
                shard.write(sample(position))
            before = partition_slot(any_client, stream, 1)
            for position in range(34, 40):
                shard.write(sample(position))
        assert load_manifest(any_client, stream, 0).state == "produced"
        before.restore(any_client)
        had = load_manifest(any_client, stream, 0)
        assert repair(any_client, stream) == [StepKind.REOPEN]
        assert load_manifest(any_client, stream, 0).state == "produced", (
            "a writer without the source takes nothing back"
        )
        (loss,) = noted_losses(any_client, stream, 0)
        assert (loss.shard, loss.end) == (1, 20)
        assert not audit_stream(any_client, "t").is_clean
        assert reopen_lost(any_client, stream, {had.id}, settle_s=0) == {0: [1]}
        assert load_manifest(any_client, stream, 0).state == "sized"
        assert reopen_lost(any_client, stream, {had.id}, settle_s=0) == {}
    with planned_writer(any_url, 2) as writer:
        write_shard(writer.epoch(0, sizes=SIZES, fingerprint="files"), 1, SIZES, frozenset())
    assert load_manifest(any_client, stream, 0).state == "produced"
    assert audit_stream(any_client, "t").is_clean
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(40))


def test_lost_samples_that_cannot_be_made_again_are_named_once(any_url: str, any_client: Any) -> None:
    """A feed, or a program with a `Writer` of its own, has no source to make lost samples from."""
    with planned_writer(any_url, 2) as writer:
        epoch = writer.epoch(sizes=SIZES)
        before = partition_slot(any_client, writer.stream, 1)
        write_shard(epoch, 0, SIZES, frozenset())
        write_shard(epoch, 1, SIZES, frozenset())
        stream = writer.stream
    before.restore(any_client)
    assert repair(any_client, stream) == [StepKind.NAME]
    (loss,) = noted_losses(any_client, stream, 0)
    assert (loss.shard, loss.first, loss.end, loss.samples) == (1, 0, 20, 20)
    assert "the server" in str(loss)
    report = audit_stream(any_client, "t")
    assert report.lost == 20
    assert not report.is_clean


def test_an_epoch_that_was_abandoned_is_abandoned_wherever_that_is_lost(any_url: str, any_client: Any) -> None:
    """Trainers waited for an epoch that no writer can go on with."""
    with planned_writer(any_url, 2) as writer:
        stream = writer.stream
        writer.epoch(sizes=SIZES)
        before = stream_slot(any_client, stream)
        abandon_epoch(any_client, stream, 0)
        before.restore(any_client)
        assert repair(any_client, stream) == [StepKind.ABANDON]
        assert load_manifest(any_client, stream, 0).state == "abandoned"


@pytest.mark.usefixtures("quiet")
def test_a_manifest_that_no_partition_knows_is_forgotten(any_url: str, any_client: Any) -> None:
    """Its opener died, or its release is known nowhere: trainers waited for it for ever."""
    with planned_writer(any_url, 2) as writer:
        stream = writer.stream
        before = [partition_slot(any_client, stream, number) for number in (0, 1)]
        open_epoch(any_client, stream, sizes=SIZES)
        for state in before:
            state.restore(any_client)
        assert repair(any_client, stream) == [StepKind.FORGET]
        assert find_manifest(any_client, stream, 0) is None
        assert not retained_epochs(any_client, stream)
        with writer.epoch(sizes=SIZES) as epoch:
            write_shard(epoch, 0, SIZES, frozenset())
            write_shard(epoch, 1, SIZES, frozenset())
        assert epoch.number == 1


def test_the_roster_remembers_which_epochs_were_released(any_url: str, any_client: Any) -> None:
    """Without the note, a release could not be told from a loss."""
    stream = made(any_url, any_client, epochs=4)
    for epoch in (0, 1, 3):
        release_epoch(any_client, stream, epoch)
    assert load_roster(any_client, stream.partitions[1]).retired == ((0, 1), (3, 3))
