"""A trainer whose stream's slots disagree, because the server of one of them came back older."""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Barrier, Event, Thread
from typing import Any

import pytest

from penstock_common.errors import EpochIncomplete, EpochNotFound, GroupKindMismatch, GroupNotFound, MemberReplaced
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.groups import roster
from penstock_common.stream.groups.forgetting import drop_group
from penstock_common.stream.groups.roster import (
    Membership,
    RankOrder,
    Rejoining,
    Roster,
    beat,
    close_for_group,
    join_group,
    leave,
    load_roster,
)
from penstock_common.stream.manifest import retained_epochs
from penstock_common.stream.removal.deletion import release_epoch
from penstock_consumer.read import shared
from penstock_consumer.read.canonical import RowRange
from penstock_consumer.read.claims import Claim
from penstock_consumer.read.member import Member
from penstock_consumer.read.ordered import OrderedReader
from penstock_producer.write.cleaner import clean_up
from penstock_producer.write.retention import parse_policy
from penstock_producer.write.writer import WriterHooks
from tests.clusters import until
from tests.contracts.feed import loader_of, numbers, open_stream, sample, writer_of
from tests.contracts.ordered import interleaved, plan, planned_writer, rank_of, write_shard, write_shards
from tests.torn_slots import partition_slot, stream_slot

SIZES = [20, 20]


@pytest.mark.parametrize("order", ["shared", "canonical"])
def test_a_manifest_that_no_partition_knows_holds_up_no_trainer(any_url: str, any_client: Any, order: str) -> None:
    """Its release was lost with the stream's slot, and no process writes the stream that could complete it."""
    plan(any_url, SIZES, partitions=2, epochs=2)
    stream, open_loader = open_stream(any_client, "t"), loader_of if order == "shared" else rank_of
    with open_loader(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(40))
    before = stream_slot(any_client, stream)
    release_epoch(any_client, stream, 0)
    before.restore(any_client)
    assert list(retained_epochs(any_client, stream)) == [0, 1]
    began_s = time.monotonic()
    with open_loader(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(40))
        assert loader.stats().epoch == 1
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("order", ["shared", "canonical"])
def test_a_loss_is_said_as_a_loss_with_server_partition_time_and_ranges(
    any_url: str, any_client: Any, order: str
) -> None:
    """'Was never given' sent its reader to look for a fault of the trainer."""
    with planned_writer(any_url, 2) as writer:
        epoch = writer.epoch(sizes=SIZES)
        write_shard(epoch, 0, SIZES, frozenset())
        before = partition_slot(any_client, writer.stream, 1)
        write_shard(epoch, 1, SIZES, frozenset())
    before.restore(any_client)
    server = any_client.where
    with (
        pytest.raises(EpochIncomplete, match=r"lost 20 committed samples \(shard 1 offsets 0-19\)") as caught,
        loader_of(any_url) if order == "shared" else rank_of(any_url) as loader,
    ):
        numbers(loader)
    assert f"the server {server}, which has partition 1" in str(caught.value)
    assert "it has nothing of the epoch" in str(caught.value)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("order", ["shared", "canonical"])
def test_an_epoch_that_one_partition_loses_while_it_is_read_ends_with_the_loss(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch, order: str, number: int
) -> None:
    """If it was the first, this was taken for a release: the epoch ended well, with a hole. Else it was not found."""
    monkeypatch.setattr(shared, "LOST_S", 0.3)
    open_loader, sizes = loader_of if order == "shared" else rank_of, [200, 200]
    with planned_writer(any_url, 2) as writer, open_loader(any_url, prefetch_bytes=200) as loader:
        _ = loader.spec  # so it has joined
        before = partition_slot(any_client, writer.stream, number)
        epoch = writer.epoch(sizes=sizes)
        write_shards(epoch, [0, 1], sizes, frozenset())
        batches = iter(loader)
        next(batches)
        before.restore(any_client)
        with pytest.raises(EpochIncomplete, match=rf"lost \d+ committed samples \(shard {number} offsets \d+-199\)"):
            numbers(batches)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("order", ["shared", "canonical"])
def test_an_epoch_that_one_partition_loses_while_it_is_read_is_read_on_once_its_writer_opens_it_again(
    any_url: str, any_client: Any, order: str, number: int
) -> None:
    """A trainer noticed the loss before the writer did, and ended."""
    open_loader, other, said = loader_of if order == "shared" else rank_of, 1 - number, list[str]()
    with planned_writer(any_url, 2) as writer, open_loader(any_url, notify=said.append) as loader:
        _ = loader.spec  # so it has joined
        before = partition_slot(any_client, writer.stream, number)
        epoch = writer.epoch(sizes=SIZES)
        write_shard(epoch, other, SIZES, frozenset())
        batches = iter(loader)
        found = numbers([next(batches)]) if order == "shared" or other == 0 else []
        before.restore(any_client)

        def write_on() -> None:
            while order == "shared" and not any("came back without epoch 0" in line for line in said):
                time.sleep(0.01)
            write_shard(epoch, number, SIZES, frozenset())

        writing = Thread(target=write_on, daemon=True)
        writing.start()
        found += numbers(batches)
        writing.join()
    assert sorted(found) == list(range(40))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_reads_records_again_whose_entries_a_failover_lost_and_the_writer_sends_again(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """Its plan has the ids of the lost entries. It said that samples were missing which were there, or about to be."""
    ask, missing = OrderedReader._ask, OrderedReader._missing
    is_written, was_lost, is_noticed = Event(), Event(), Event()
    with planned_writer(any_url) as writer:
        epoch = writer.epoch(sizes=SIZES)
        write_shard(epoch, 0, SIZES, frozenset())
        with rank_of(any_url) as loader:
            batches = iter(loader)
            found = numbers([next(batches)])
            before = [stream_slot(any_client, writer.stream), partition_slot(any_client, writer.stream, 0)]

            def write_again() -> None:
                assert is_noticed.wait(10)
                write_shard(epoch, 1, SIZES, frozenset())

            writing = Thread(target=write_again)

            def ask_after_the_loss(reader: OrderedReader) -> None:
                todo = reader._plan.todo
                if any(one.piece.shard == 1 for one in todo) and not was_lost.is_set():
                    assert is_written.wait(10)
                    for state in before:
                        state.restore(any_client)
                    was_lost.set()
                    writing.start() if is_late else write_shard(epoch, 1, SIZES, frozenset())
                ask(reader)

            def notice(reader: OrderedReader, take: RowRange) -> None:
                missing(reader, take)
                is_noticed.set()

            monkeypatch.setattr(OrderedReader, "_ask", ask_after_the_loss)
            monkeypatch.setattr(OrderedReader, "_missing", notice)
            write_shard(epoch, 1, SIZES, frozenset())
            is_written.set()
            found += numbers(batches)
            if is_late:
                writing.join()
    assert is_noticed.is_set()
    assert found == list(range(40))


@pytest.mark.parametrize("lost", [[], [0], [0, 1]])
@pytest.mark.parametrize("order", ["shared", "canonical"])
def test_an_epoch_that_is_lost_and_opened_again_is_read_in_the_same_pass(
    any_url: str, any_client: Any, order: str, lost: list[int]
) -> None:
    """It would pass for an abandoned and released one. No member would read its rest, and no message would say so."""
    said = list[str]()
    open_loader = loader_of if order == "shared" else rank_of
    with planned_writer(any_url, 2) as writer, open_loader(any_url, notify=said.append) as loader:
        _ = loader.spec  # so it has joined
        numbers_of = [partition_slot(any_client, writer.stream, number) for number in lost]
        before = [stream_slot(any_client, writer.stream), *numbers_of]
        epoch = writer.epoch(sizes=SIZES)
        write_shard(epoch, 0, SIZES, frozenset())
        batches = iter(loader)
        found = numbers([next(batches)])
        for state in before:
            state.restore(any_client)

        def open_again() -> None:
            while not any("is gone, and nobody released it" in line for line in said):
                time.sleep(0.01)
            again = WriterHooks(writer).open_again(epoch.manifest)
            for number in (0, 1):
                with WriterHooks(writer).open_shard(again, number) as shard:
                    for position in range(number * 20 + shard.position, number * 20 + 20):
                        shard.write(sample(position))

        writing = Thread(target=open_again, daemon=True)
        writing.start()
        found += numbers(batches)
        writing.join()
        assert loader.stats().epoch == 0
    assert set(found) == set(range(40))
    assert audit_stream(any_client, "t").is_clean


def test_an_epoch_is_kept_for_a_group_that_one_roster_has_lost(any_url: str, any_client: Any) -> None:
    """The first roster alone decided on releases: a group that it had lost was given nothing of them."""
    plan(any_url, SIZES, partitions=2)
    stream = open_stream(any_client, "t")
    with loader_of(any_url, group="done") as loader:
        assert len(numbers(loader)) == 40
    before = partition_slot(any_client, stream, 0)
    with loader_of(any_url, group="late", start="earliest") as loader:
        next(iter(loader))
        before.restore(any_client)
        clean_up(any_client, stream, lambda _: None, policy=parse_policy("epochs:0"))
        assert list(retained_epochs(any_client, stream)) == [0]


@pytest.mark.parametrize("number", [0, 1])
def test_a_full_budget_frees_nothing_that_a_group_of_another_roster_needs(
    any_url: str, any_client: Any, number: int
) -> None:
    """A writer that waits for quota released whole epochs by the first roster, and trimmed entries by its own."""
    plan(any_url, SIZES, partitions=2)
    stream = open_stream(any_client, "t")
    with loader_of(any_url, group="done") as done, writer_of(any_url) as writer:
        assert len(numbers(done)) == 40
        before = partition_slot(any_client, stream, number)
        with loader_of(any_url, group="late", start="earliest", prefetch_bytes=200) as loader:
            next(iter(loader))
            before.restore(any_client)
            writer._resources.cleaner.free_bytes(writer.stream.partitions[1], 1 << 20)
            assert list(retained_epochs(any_client, stream)) == [0]
            assert any_client.xlen(stream.partitions[1].entries(0)) == 3


def test_a_member_that_one_roster_has_lost_joins_again_and_is_given_everything(any_url: str, any_client: Any) -> None:
    """Its training would end, although the group was never dropped."""
    plan(any_url, [40, 40], partitions=2)
    stream, found = open_stream(any_client, "t"), list[int]()
    before = partition_slot(any_client, stream, 1)
    with loader_of(any_url, prefetch_bytes=400) as loader:
        for number, batch in enumerate(loader):
            found += batch["y"].tolist()
            if number == 0:
                before.restore(any_client)
            time.sleep(0.2)
    assert set(found) == set(range(80))
    assert len(found) - len(set(found)) <= 40, "only what the server forgot comes again"
    assert ("g", 0) in load_roster(any_client, stream.partitions[1]).closed


@pytest.mark.parametrize("is_taken", [False, True])
def test_entries_that_a_server_no_longer_gave_out_are_read_again_in_the_same_pass(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch, *, is_taken: bool
) -> None:
    """Their reader has ended. Their batches would be dropped and never given out, and the pass would end silently.

    Another member may take them first. Then the pass ends, and does not run on into the next epoch.
    """
    plan(any_url, SIZES, partitions=2, epochs=2)
    stream, said = open_stream(any_client, "t"), list[str]()
    with loader_of(any_url, notify=said.append) as loader, loader_of(any_url, member="other", timeout_s=5) as other:
        _ = loader.spec, other.spec  # so they have joined
        before = partition_slot(any_client, stream, 1)
        batches = iter(loader)
        found = numbers([next(batches)])
        thread = loader._member.run.thread  # type: ignore[union-attr]
        thread.join(10)
        before.restore(any_client)
        until(lambda: any("lost" in line for line in said), 10)
        take_up, others = Member.take_up, list[int]()

        def take_up_late(member: Member, epoch: int) -> None:
            take_up(member, epoch)
            others.extend(numbers(other) if is_taken and member is loader._member else [])

        monkeypatch.setattr(Member, "take_up", take_up_late)
        found += numbers(batches)
        assert loader.stats().epoch == 0
    assert sorted({*found, *others}) == list(range(40))
    assert len(found) + len(others) - 40 <= 5, "only the batch in hand may come again"
    (line,) = [line for line in said if "lost" in line]
    assert "came back as it was before it gave them out, and gives them out again" in line


def test_a_member_that_a_roster_loses_again_and_again_in_one_epoch_joins_again_each_time(
    any_url: str, any_client: Any
) -> None:
    """A feed is one epoch for as long as it lasts. The second loss ended its trainer."""
    plan(any_url, [60, 60], partitions=2)
    stream, found, losses = open_stream(any_client, "t"), list[int](), 0
    before = partition_slot(any_client, stream, 1)
    with loader_of(any_url, prefetch_bytes=400) as loader:
        for batch in loader:
            if losses < 3 and "g" in load_roster(any_client, stream.partitions[1]).groups:
                before.restore(any_client)
                losses += 1
            found += batch["y"].tolist()
            time.sleep(0.1)
    assert losses == 3
    assert set(found) == set(range(120))


def test_a_member_that_a_partition_lost_with_the_epoch_joins_again_and_waits_for_it(
    any_url: str, any_client: Any
) -> None:
    """Without its group the partition was not waited for."""
    said = list[str]()
    with planned_writer(any_url, 2) as writer:
        before = partition_slot(any_client, writer.stream, 1)
        with loader_of(any_url, notify=said.append) as loader:
            _ = loader.spec  # so it has joined
            epoch = writer.epoch(sizes=SIZES)
            write_shard(epoch, 0, SIZES, frozenset())
            batches = iter(loader)
            found = numbers([next(batches)])
            before.restore(any_client)

            def write_on() -> None:
                while not any("came back without epoch 0" in line for line in said):
                    time.sleep(0.01)
                write_shard(epoch, 1, SIZES, frozenset())

            writing = Thread(target=write_on, daemon=True)
            writing.start()
            found += numbers(batches)
            writing.join()
    assert sorted(found) == list(range(40))


def test_a_group_that_is_dropped_is_not_brought_back_by_its_members(any_url: str, any_client: Any) -> None:
    """An operator who drops a group with live members wants it gone."""
    plan(any_url, [40, 40], partitions=2)
    stream = open_stream(any_client, "t")
    with pytest.raises((GroupNotFound, EpochNotFound)), loader_of(any_url, prefetch_bytes=400) as loader:
        for _ in loader:
            drop_group(any_client, stream, "g")
            time.sleep(0.5)
    time.sleep(1.5)
    assert [load_roster(any_client, partition).groups for partition in stream.partitions] == [{}, {}]


def test_a_rank_that_the_first_roster_has_lost_joins_again(any_url: str, any_client: Any) -> None:
    """Its next report of a position was refused, and its training ended, though every other roster knew it."""
    plan(any_url, SIZES, partitions=2)
    stream, found = open_stream(any_client, "t"), list[int]()
    before = partition_slot(any_client, stream, 0)
    with rank_of(any_url, batch=4) as loader:
        for number, batch in enumerate(loader):
            found += batch["y"].tolist()
            if number == 1:
                before.restore(any_client)
    assert found == list(range(40))
    assert all(("g", 0) in load_roster(any_client, partition).closed for partition in stream.partitions)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("order", [None, RankOrder(0, 1, 4)])
def test_the_newest_process_of_a_name_takes_its_place_back(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch, order: RankOrder | None, number: int
) -> None:
    """A roster that came back older names the process before it, which has ended. The newest one ended, too."""
    monkeypatch.setattr(roster, "REJOIN_QUIET_S", 0.3)
    plan(any_url, SIZES, partitions=2)
    stream, found = open_stream(any_client, "t"), list[int]()
    name = "m" if order is None else "rank-0"
    join_group(any_client, Membership(stream, "g", name, "older", order))
    before = partition_slot(any_client, stream, number)
    with loader_of(any_url, member=name, prefetch_bytes=200) if order is None else rank_of(any_url, batch=4) as loader:
        for at, batch in enumerate(loader):
            found += batch["y"].tolist()
            if at == 1:
                before.restore(any_client)
            time.sleep(0.15)
    assert set(found) == set(range(40))
    assert all(("g", 0) in load_roster(any_client, partition).closed for partition in stream.partitions)


@pytest.mark.parametrize("torn", ["while it reads", "before it keeps its claim"])
@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("before_it", ["left", "was killed"])
@pytest.mark.parametrize("order", [None, RankOrder(0, 1, 4)])
def test_a_member_that_no_roster_knows_joins_again_where_every_server_is_another_run(
    any_url: str,
    any_client: Any,
    monkeypatch: pytest.MonkeyPatch,
    order: RankOrder | None,
    before_it: str,
    partitions: int,
    torn: str,
) -> None:
    """A server was torn just after the trainer had started again. It ended, and asked to be started once more.

    One that is torn just after the join was taken for the one that had been joined.
    """
    monkeypatch.setattr(roster, "REJOIN_QUIET_S", 0.3)
    plan(any_url, SIZES, partitions=partitions)
    stream, found = open_stream(any_client, "t"), list[int]()
    name = "m" if order is None else "rank-0"
    older = Membership(stream, "g", name, "older", order)
    join_group(any_client, older)

    def is_back(known: Roster) -> bool:
        return known.incarnations.get(("g", name), "older") != "older" and known.groups["g"].holds

    if before_it == "left":
        assert all(leave(any_client, older, partition, {}) for partition in stream.partitions)
    slots, keep = [partition_slot(any_client, stream, number) for number in range(partitions)], Claim.keep

    def tear() -> None:
        monkeypatch.setattr("penstock_common.stream.groups.losses.read_run_id", lambda *_: "another run")
        for slot in slots:
            slot.restore(any_client)

    def keep_late(claim: Claim) -> None:
        tear()
        keep(claim)

    if torn == "before it keeps its claim":
        monkeypatch.setattr(Claim, "keep", keep_late)
    with loader_of(any_url, member="m", prefetch_bytes=200) if order is None else rank_of(any_url, batch=4) as loader:
        for at, batch in enumerate(loader):
            found += batch["y"].tolist()
            if at == 1:
                if torn == "while it reads":
                    tear()
                until(lambda: all(is_back(load_roster(any_client, one)) for one in stream.partitions))
    assert set(found) == set(range(40))
    assert all(("g", 0) in load_roster(any_client, partition).closed for partition in stream.partitions)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_member_that_no_roster_knows_ends_if_its_group_was_dropped_or_a_server_went_on(
    any_client: Any, any_url: str, is_dropped: bool
) -> None:
    """Such a server would know a member that was never dropped."""
    plan(any_url, SIZES, partitions=2)
    stream, now = open_stream(any_client, "t"), [0.0]
    who, first = Membership(stream, "g", "m", "i"), stream.partitions[0]
    join_group(any_client, Membership(stream, "g", "", ""), declared=True)
    rejoining = Rejoining(any_client, who, lambda: now[0], lambda partition: is_dropped or partition == first)
    if is_dropped:
        drop_group(any_client, stream, "g")
    assert rejoining.is_back(first) is False


@pytest.mark.parametrize("who_lives", ["newer", "older", "both"])
def test_of_two_processes_with_one_name_only_one_goes_on(any_url: str, any_client: Any, who_lives: str) -> None:
    """Each of them is named by a roster after the server of one came back older."""
    plan(any_url, SIZES, partitions=2)
    stream, now = open_stream(any_client, "t"), [0.0]
    older, newer = (Membership(stream, "g", "m", one) for one in ("older", "newer"))
    join_group(any_client, older)
    before = partition_slot(any_client, stream, 1)
    join_group(any_client, newer)
    before.restore(any_client)
    first, second = stream.partitions
    all_of_them = [
        (one, mine, other, Rejoining(any_client, one, lambda: now[0]))
        for one, mine, other in ((older, second, first), (newer, first, second))
    ]
    living = [one for one in all_of_them if who_lives in (one[0].incarnation, "both")]
    for _ in range(3):
        for one in living[:]:
            who, mine, other, rejoining = one
            beat(any_client, who, mine, {})
            with suppress(MemberReplaced):
                beat(any_client, who, other, {})
                continue
            if rejoining.is_back(other) is False:
                living.remove(one)
        now[0] += roster.REJOIN_QUIET_S + 1
    assert [who.incarnation for who, *_ in living] == ["newer" if who_lives == "both" else who_lives]
    for partition in stream.partitions:
        beat(any_client, living[0][0], partition, {})


class NewerRank(Thread):
    """A rank of two. After its first batch it waits until ``goes_on`` is set, and so do the others at ``begun``."""

    def __init__(self, url: str, rank: int, begun: Barrier, goes_on: Event) -> None:
        super().__init__()
        self._url, self._rank, self._begun, self._goes_on = url, rank, begun, goes_on
        self.found: list[list[int]] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Read slowly, so that heartbeats come between batches."""
        try:
            with rank_of(self._url, self._rank, 2, 4, lease_s=3.0) as loader:
                for batch in loader:
                    self.found.append(batch["y"].tolist())
                    if len(self.found) == 1:
                        self._begun.wait(20)
                        self._goes_on.wait(20)
                    time.sleep(0.5)
        except (MemberReplaced, GroupNotFound) as error:
            self.error = error


@pytest.mark.parametrize(
    ("number", "who_lives"), [(0, "newer"), (1, "newer"), (0, "older"), (1, "older"), (0, "nobody knows")]
)
def test_a_roster_of_before_the_number_of_ranks_changed_takes_the_new_one(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch, number: int, who_lives: str
) -> None:
    """The newer ranks ended, or one of them was not counted, so that its samples could be released unread."""
    monkeypatch.setattr(roster, "REJOIN_QUIET_S", 1.0)
    monkeypatch.setattr(roster, "REJOIN_ALIVE_MS", 5000 if (number, who_lives) == (0, "older") else 800)
    plan(any_url, SIZES, partitions=2)
    stream = open_stream(any_client, "t")
    older, partition = Membership(stream, "g", "rank-0", "older", RankOrder(0, 1, 4)), stream.partitions[number]
    join_group(any_client, older)
    before, begun, goes_on = partition_slot(any_client, stream, number), Barrier(3), Event()
    ranks = [NewerRank(any_url, rank, begun, goes_on) for rank in (0, 1)]
    begun.wait(20)
    if who_lives != "nobody knows":  # that the server of the partition was replaced
        monkeypatch.setattr("penstock_common.stream.groups.losses.read_run_id", lambda *_: "another run")
    before.restore(any_client)
    goes_on.set()
    ends_s = time.monotonic() + (30 if number == 0 else 2)  # the first partition does not know it, so it ends
    while who_lives == "older" and any(rank.is_alive() for rank in ranks) and time.monotonic() < ends_s:
        beat(any_client, older, partition, {})
        time.sleep(0.1)
    for rank in ranks:
        rank.join(30)
    rosters = [load_roster(any_client, one) for one in stream.partitions]
    if who_lives == "newer" or (who_lives, number) == ("older", 1):
        assert [rank.error for rank in ranks] == [None, None]
        assert interleaved([rank.found for rank in ranks]) == list(range(40))
    if who_lives == "newer":
        assert [(one.groups["g"].world, ("g", 0) in one.closed) for one in rosters] == [(2, True)] * 2
    if number == 0 and who_lives != "newer":
        assert all(rank.error for rank in ranks)
        assert rosters[0].groups["g"].world == 1


@pytest.mark.parametrize(("number", "answer"), [(0, False), (1, None), (2, None)])
def test_of_two_numbers_of_ranks_that_live_the_one_that_a_lower_partition_names_goes_on(
    any_url: str, any_client: Any, number: int, answer: bool | None
) -> None:
    """Ranks of both numbers would end, or both would read the same samples."""
    plan(any_url, [20] * 3, partitions=3)
    stream, now_s = open_stream(any_client, "t"), [0.0]
    older = Membership(stream, "g", "rank-0", "older", RankOrder(0, 1, 4))
    newer = Membership(stream, "g", "rank-1", "newer", RankOrder(1, 2, 4))
    join_group(any_client, older)
    partition, before = stream.partitions[number], partition_slot(any_client, stream, number)
    join_group(any_client, newer, quiet_ms=-1000)
    before.restore(any_client)
    rejoining = Rejoining(any_client, newer, lambda: now_s[0], lambda _: True)
    assert rejoining.is_back(partition) is None
    now_s[0] = roster.REJOIN_QUIET_S
    beat(any_client, older, partition, {})
    assert rejoining.is_back(partition) is answer
    assert load_roster(any_client, partition).groups["g"].world == 1


def test_a_group_that_joins_again_is_done_only_with_its_own_epochs(any_url: str, any_client: Any) -> None:
    """An epoch that another group has read would be passed over, and released unread."""
    plan(any_url, SIZES, partitions=2, epochs=2)
    stream, now_s = open_stream(any_client, "t"), [0.0]
    before, who = partition_slot(any_client, stream, 1), Membership(stream, "g", "m", "i")
    join_group(any_client, who)
    join_group(any_client, Membership(stream, "other", "m", "i"))
    for epoch, group in enumerate(("g", "other")):
        close_for_group(any_client, stream, group, epoch)
    before.restore(any_client)
    rejoining = Rejoining(any_client, who, lambda: now_s[0])
    assert rejoining.is_back(stream.partitions[1]) is None
    now_s[0] = roster.REJOIN_SETTLE_S
    assert rejoining.is_back(stream.partitions[1])
    assert load_roster(any_client, stream.partitions[1]).closed == {("g", 0)}


def test_a_process_that_a_roster_names_has_the_time_of_a_heartbeat_to_show_that_it_lives(
    any_url: str, any_client: Any
) -> None:
    """Two processes would read under one name, or the newer one would wait for a dead one for long."""
    plan(any_url, SIZES, partitions=2)
    stream, now_s = open_stream(any_client, "t"), [0.0]
    older, newer = (Membership(stream, "g", "m", one) for one in ("older", "newer"))
    join_group(any_client, older)
    partition, before = stream.partitions[1], partition_slot(any_client, stream, 1)
    join_group(any_client, newer)
    before.restore(any_client)
    rejoining = Rejoining(any_client, newer, lambda: now_s[0])
    answers = []
    for now_s[0] in (100.0, 104.999, 105.0):
        answers.append(rejoining.is_back(partition))
    assert answers == [None, None, True]


@pytest.mark.parametrize("number", [0, 1])
def test_a_member_whose_dead_predecessor_is_signed_off_joins_again(any_url: str, any_client: Any, number: int) -> None:
    """It took the record's end for a heartbeat, and its training ended with GroupNotFound."""
    plan(any_url, SIZES, partitions=2)
    stream, now = open_stream(any_client, "t"), [0.0]
    older, newer = (Membership(stream, "g", "m", one) for one in ("older", "newer"))
    join_group(any_client, older)
    partition, before = stream.partitions[number], partition_slot(any_client, stream, number)
    join_group(any_client, newer)
    before.restore(any_client)
    rejoining = Rejoining(any_client, newer, lambda: now[0])
    assert rejoining.is_back(partition) is None
    assert leave(any_client, older, partition, {})
    now[0] = 1.0
    assert rejoining.is_back(partition) is None
    now[0] += roster.REJOIN_SETTLE_S
    assert rejoining.is_back(partition)
    beat(any_client, newer, partition, {})


def test_two_threads_of_a_member_may_join_again_at_once(any_url: str, any_client: Any) -> None:
    """The one that was late took the heartbeats of its own process for those of another one, and waited for ever."""
    plan(any_url, SIZES, partitions=2)
    stream, now = open_stream(any_client, "t"), [0.0]
    before, who = partition_slot(any_client, stream, 1), Membership(stream, "g", "m", "i")
    join_group(any_client, who)
    before.restore(any_client)
    first, late = (Rejoining(any_client, who, lambda: now[0]) for _ in range(2))
    assert [one.is_back(stream.partitions[1]) for one in (first, late)] == [None, None]
    now[0] = roster.REJOIN_SETTLE_S
    assert first.is_back(stream.partitions[1])
    beat(any_client, who, stream.partitions[1], {})
    assert late.is_back(stream.partitions[1])


def test_a_group_that_the_first_roster_has_lost_is_joined_and_not_made(any_url: str, any_client: Any) -> None:
    """The program ended with GroupNotFound, though every other roster knew the group."""
    plan(any_url, SIZES, partitions=2)
    stream = open_stream(any_client, "t")
    before = partition_slot(any_client, stream, 0)
    join_group(any_client, Membership(stream, "g", "", ""))
    before.restore(any_client)
    with loader_of(any_url, create=False) as loader:
        assert sorted(numbers(loader)) == list(range(40))
    unknown = pytest.raises(GroupNotFound, match="no group 'h'; groups there: g")
    with unknown, loader_of(any_url, group="h", create=False) as loader:
        numbers(loader)


def test_a_refused_join_changes_no_roster(any_url: str, any_client: Any) -> None:
    """The first roster had lost the group, so it took a rank of that name, and each kind was refused somewhere."""
    plan(any_url, SIZES, partitions=2)
    stream = open_stream(any_client, "t")
    before = partition_slot(any_client, stream, 0)
    join_group(any_client, Membership(stream, "g", "m", "i"))
    before.restore(any_client)
    with pytest.raises(GroupKindMismatch):
        join_group(any_client, Membership(stream, "g", "rank-0", "j", RankOrder(0, 1, 4)))
    assert load_roster(any_client, stream.partitions[0]).groups == {}
