"""Committers of one shard, block by block: what each sends, and what it says of blocks that others committed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import pytest

from penstock_common.errors import BudgetFull, EpochAbandoned, PenstockError, ServerUnavailable, StreamDeleted
from penstock_common.server.channel import Channel
from penstock_common.server.connection import open_channel
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.losses import SENT_AGAIN, LossDetector
from penstock_common.stream.manifest import abandon_epoch, open_epoch
from penstock_common.stream.removal.deletion import delete_stream, release_epoch
from penstock_common.stream.servers.durability import MEMORY, Durability, ReplicaWatch
from penstock_common.wire.block import Block, BlockBuilder
from penstock_common.wire.spec import Spec
from penstock_producer.write.commit import Committer, SentBlock, ShardTaken
from penstock_producer.write.payloads import FolderFull, ShardPayloads
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, open_stream, sample, stored, writer_of
from tests.producer.test_commit_errors import once
from tests.torn_slots import partition_slot


def block(first: int, end: int, holes: Sequence[int] = ()) -> Block:
    """Return a block of numbered samples."""
    builder = BlockBuilder(Spec.of(SPEC), 1 << 20, 1000)
    for offset in range(first, end):
        if offset not in holes:
            builder.add(sample(offset))
    return builder.finish(first, holes)


@contextmanager
def two_runs(url: str, size: int) -> Iterator[tuple[Committer, Committer]]:
    """Yield the committers of two runs of one job."""
    with writer_of(url, spec=SPEC) as one, writer_of(url, spec=SPEC) as two:
        shards = [writer.epoch(0, sizes=[size]).shard(0) for writer in (one, two)]
        yield shards[0]._committer, shards[1]._committer
        for shard in shards:
            shard.abort()


def reasons(client: Client) -> dict[int, str]:
    """Return why samples of the epoch's first shard were bad, by offset."""
    noted = client.hgetall(open_stream(client, "t").partitions[0].quarantine(0))
    return {int(name.split(b":")[-1]): json.loads(said)["why"] for name, said in noted.items()}


def test_what_another_run_committed_of_a_block_is_left_out_and_counted(any_url: str, any_client: Client) -> None:
    """A job whose worker seemed dead runs twice, and neither run knows where the other one cuts its blocks."""
    with two_runs(any_url, 24) as (ours, theirs):
        theirs.commit(block(0, 6, [2]), {2: "theirs"})
        theirs.commit_all()
        ours.commit(block(0, 8, [2, 6]), {2: "ours", 6: "ours"})
        ours.commit_all()
        assert (ours.position, ours.left_out) == (8, 6)
        theirs.commit(block(6, 20, [9]), {9: 600 * "t"})
        theirs.commit_all()
        assert (theirs.position, theirs.left_out) == (20, 2)
        ours.commit(block(8, 16, [9]), {9: "ours"})
        ours.commit(block(16, 24))
        ours.commit_all()
        assert (ours.position, ours.left_out) == (24, 6 + 8 + 4)
        for run in (ours, theirs):
            run.require_whole(24)
    assert reasons(any_client) == {2: "theirs", 6: "ours", 9: 499 * "t" + "…"}
    there = [offset for offset in range(24) if offset not in (2, 6, 9)]
    assert stored(any_client, "t", 0) == {(0, offset): 1 for offset in there}


def committer_of(writer: Writer, *, is_feed: bool) -> Committer:
    """Return the committer of a shard that the writer begins: its feed's, or a planned one's."""
    if not is_feed:
        return writer.epoch(0, sizes=[1000]).shard(0)._committer
    writer.write(sample(0))
    feed, writer._feed = writer._feed, None
    assert feed is not None
    feed._is_ended = True
    return feed._committer


@pytest.mark.parametrize("is_feed", [False, True])
def test_blocks_that_a_server_lost_are_sent_again_and_told_once(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch, is_feed: bool
) -> None:
    """A replica was promoted that lacks them. An audit of a feed must know that these entries are no loss."""
    follows = [False]
    monkeypatch.setattr(ReplicaWatch, "_is_followed", lambda *_: follows[0])
    said: list[str] = []
    with writer_of(any_url, spec=SPEC, durability="auto", notify=said.append) as writer:
        run, partition = committer_of(writer, is_feed=is_feed), writer.stream.partitions[0]
        follows[0] = True
        run.commit(block(0, 4))
        run._drain()
        promoted = partition_slot(any_client, writer.stream, 0)
        for first in (4, 8, 12):
            run.commit(block(first, first + 4, [first + 1]), {first + 1: "bad"})
        run._drain()
        ids = [entry_id.decode() for entry_id, _ in any_client.xrange(partition.entries(0))]
        promoted.restore(any_client)
        any_client.client_kill_filter(_type="normal", skipme=True)
        run.commit(block(16, 20))
        follows[0] = False
        run.commit_all()
        run.require_whole(20)
        run.finish()
        noted = any_client.hgetall(writer.stream.keys.manifest(0))
    assert [line for line in said if "came back without" in line] == [
        "the server came back without samples 4-15 of shard 0 of epoch 0 of 't': sending them again"
    ]
    assert reasons(any_client) == {5: "bad", 9: "bad", 13: "bad"}
    there = [offset for offset in range(20) if offset not in (5, 9, 13)]
    assert stored(any_client, "t", 0) == {(0, offset): 1 for offset in there}
    again = [json.loads(text) for field, text in noted.items() if field.startswith(SENT_AGAIN.encode())]
    assert again == ([ids[1:]] if is_feed else [])


def test_a_block_is_sent_before_the_one_ahead_of_it_is_answered(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for each answer would halve the rate. A block of bad samples has no entry, and need not hurry."""
    calls: list[str] = []

    def note(name: str) -> None:
        real = getattr(Channel, name)

        def noted(self: Channel, *what: Any) -> Any:
            calls.append(name)
            return real(self, *what)

        monkeypatch.setattr(Channel, name, noted)

    def said() -> list[str]:
        found = calls[:]
        calls.clear()
        return found

    with writer_of(any_url, spec=SPEC) as writer:
        run = committer_of(writer, is_feed=False)
        for name in ("send", "read_all"):
            note(name)
        run.commit_all()
        assert said() == []
        for end in (1, 2, 3):
            run.commit(block(end - 1, end))
        assert said() == ["send", "send", "read_all", "send", "read_all"]
        run.commit(block(3, 5, [3, 4]), {3: "bad", 4: "bad"})
        assert said() == ["read_all", "send"]
        run.commit_all()
        assert said() == ["read_all"]
        run.commit_all()
        assert said() == []
        monkeypatch.delattr("penstock_producer.write.commit.find_forged")  # its own blocks are not read again
        run.require_whole(5)
        run.close()


class TestOtherServers:
    """The server that has the shard is not the one that the writer began on."""

    def test_an_epoch_that_only_the_partition_lost_is_opened_again(self, any_url: str, any_client: Client) -> None:
        """Every other part of the stream has it."""
        with writer_of(any_url, spec=SPEC) as writer:
            before = partition_slot(any_client, writer.stream, 0)
            run = committer_of(writer, is_feed=False)
            before.restore(any_client)
            run.commit(block(0, 4))
            run.commit(block(4, 8))
            run.commit_all()
            assert run.position == 8
            run.require_whole(8)
            run.finish()
        assert stored(any_client, "t", 0) == {(0, offset): 1 for offset in range(8)}

    @pytest.mark.parametrize("is_lost", [False, True])
    def test_an_abandoned_epoch_is_not(self, any_url: str, any_client: Client, is_lost: bool) -> None:
        """Its samples have no readers."""
        with writer_of(any_url, spec=SPEC) as writer:
            before = partition_slot(any_client, writer.stream, 0)
            run = committer_of(writer, is_feed=False)
            abandon_epoch(any_client, writer.stream, 0)
            if is_lost:
                before.restore(any_client)
            with pytest.raises(EpochAbandoned, match="takes no more samples"):
                for first in (0, 4, 8):
                    run.commit(block(first, first + 4))
            run.close()
        assert not stored(any_client, "t", 0)

    @pytest.mark.parametrize("is_over", [False, True])
    def test_a_feeds_shard_is_taken_again_unless_its_epoch_went_on(
        self, any_url: str, any_client: Client, is_over: bool
    ) -> None:
        """A restarted server may have forgotten the shard's writer. The epoch would be complete without the shard."""
        with writer_of(any_url, spec=SPEC) as writer:
            run, manifest = committer_of(writer, is_feed=True), writer.stream.keys.manifest(0)
            run.commit(block(0, 4))
            run._drain()
            (taken,) = (name for name in any_client.hkeys(manifest) if name.startswith(b"w:"))
            any_client.hdel(manifest, taken)
            if is_over:
                any_client.hset(manifest, "state", "produced")
            any_client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(ShardTaken) if is_over else nullcontext():
                run.commit(block(4, 8))
                run.commit_all()
            assert any_client.hget(manifest, taken) == (None if is_over else b"0")
            assert run.position == (4 if is_over else 8)
            run.close()

    def test_each_connection_is_closed_before_the_next_is_made_or_with_its_writer(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server that restarts for a minute would be left with hundreds of them."""
        made: list[Channel] = []
        compared: list[int] = []

        def opened(*what: Any) -> Channel:
            made.append(open_channel(*what))
            return made[-1]

        monkeypatch.setattr("penstock_producer.write.target.open_channel", opened)
        monkeypatch.setattr(LossDetector, "check", lambda _: compared.append(len(made)))
        with writer_of(any_url, spec=SPEC) as writer:
            once(monkeypatch, "read_all", ServerUnavailable("cut"))
            run = committer_of(writer, is_feed=False)
            run.commit(block(0, 4))
            once(monkeypatch, "read_all", ServerUnavailable("cut"))
            run.commit_all()
            assert len(made) == 3
            assert {*compared} >= {1, 2, 3}, "what a server lost is noted before it is written again"
            for one in made[:2]:
                with pytest.raises(ServerUnavailable):
                    one.send([(b"PING",)])
            run.require_whole(4)
        with pytest.raises(ServerUnavailable):  # it is closed with the writer, though its shard was not closed
            made[2].send([(b"PING",)])

    @pytest.mark.parametrize(
        ("what", "error", "words"),
        [
            ("it is released", EpochAbandoned, r"takes no more samples \(it is released\)"),
            ("it is lost", EpochAbandoned, "is gone: .* before it was opened; start again"),
            ("it is lost, of a feed", ShardTaken, "is gone: .* before it was opened; start again"),
            ("it is opened anew", EpochAbandoned, "is gone: .*; another one has its number since; start again"),
            ("it is opened anew, of a feed", ShardTaken, "is gone: .*; another one has its number since; start again"),
            ("the stream is deleted", StreamDeleted, "'t'"),
        ],
    )
    def test_an_epoch_that_is_not_there_is_told_with_its_cause(
        self, any_url: str, any_client: Client, what: str, error: type[PenstockError], words: str
    ) -> None:
        """A user starts again, or has nothing to do. A feed goes on in the next epoch."""
        with writer_of(any_url, spec=SPEC) as writer:
            stream, before = writer.stream, partition_slot(any_client, writer.stream, 0)
            run = committer_of(writer, is_feed="feed" in what)
            if "released" in what:
                release_epoch(any_client, stream, 0)
            elif "deleted" in what:
                delete_stream(any_client, "t")
            else:
                any_client.delete(stream.keys.manifest(0))
                before.restore(any_client)
                if "anew" in what:
                    open_epoch(any_client, stream, 0)
            with pytest.raises(error, match=words):
                for first in (0, 4, 8):
                    run.commit(block(first, first + 4))
            run.close()
            assert not stored(any_client, "t", 0) if "deleted" not in what else True

    @pytest.mark.parametrize("under_way", ["nothing", "the first", "the last", "a new one"])
    def test_a_shard_that_another_writer_has_is_left_with_all_that_it_lost(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch, under_way: str
    ) -> None:
        """The samples go to the writer's next shard, and the other one's are not its own."""
        follows = [False]
        monkeypatch.setattr(ReplicaWatch, "_is_followed", lambda *_: follows[0])
        with writer_of(any_url, spec=SPEC, durability="auto") as writer:
            partition = writer.stream.partitions[0]
            run, promoted = committer_of(writer, is_feed=True), partition_slot(any_client, writer.stream, 0)
            follows[0] = True
            run.commit(block(0, 4, [2]), {2: "bad"})
            run.commit(block(4, 8))
            run._drain()
            assert run.position == 8
            promoted.restore(any_client)
            any_client.xadd(
                partition.index(0, 0), {"e": "1-1", "f": 0, "n": 9, "b": 9, "h": "[]", "w": "another"}, id="9-0"
            )
            bad = {9: "bad, too"}
            with pytest.raises(ShardTaken, match="is another writer's"):
                run.commit(block(8, 12, [9]), bad)
                run.commit_all()
            assert run.position == 8
            first, last = (SentBlock(*one, 0, 0, "", [], MEMORY, MEMORY) for one in run.blocks_to_move()[:2])
            run._sent = {"nothing": None, "the first": first, "the last": last}.get(under_way, run._sent)
            kept = [(found.first, found.end, why) for found, why in run.blocks_to_move()]
            assert kept == [(0, 4, {2: "bad"}), (4, 8, {}), *[(8, 12, bad)] * (under_way == "a new one")]
            run.close()
            follows[0] = False


class TestConfirmation:
    """A replica followed the server at the last look."""

    @pytest.fixture
    def waits(self, any_client: Client, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
        """Let a replica follow from the next look on, and return a count of the questions to it."""
        monkeypatch.setattr(Durability, "commands", lambda self, *_: [(b"WAIT", b"1", b"1")] if self.replicas else [])
        monkeypatch.setattr("penstock_common.stream.servers.durability._online", lambda *_: 1)
        return lambda: int(any_client.info("commandstats").get("cmdstat_wait", {"calls": 0})["calls"])

    def test_what_a_replica_has_is_not_asked_about_again(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch, waits: Callable[[], int]
    ) -> None:
        """Each question holds back the connection."""
        said: list[str] = []
        monkeypatch.setattr(Durability, "shortfall", lambda *_: "")
        with writer_of(any_url, spec=SPEC, durability="auto", notify=said.append) as writer:
            run = committer_of(writer, is_feed=False)
            run.commit(block(0, 4))
            run._drain()
            before = waits()
            run.commit_all()
            run.commit_all()
            assert waits() - before <= 1
            run.require_whole(4)
            assert run.unreplicated is None
            run.finish()
        assert not any("no replica" in line for line in said)

    def test_a_server_that_lost_its_place_counts_as_one_with_a_replica(
        self, any_url: str, monkeypatch: pytest.MonkeyPatch, waits: Callable[[], int]
    ) -> None:
        """The map names its successor, which was its replica and may lack what is written to it now."""
        monkeypatch.setattr("penstock_common.stream.servers.durability._online", lambda *_: 0)
        monkeypatch.setattr(Durability, "shortfall", lambda *_: "")
        with writer_of(any_url, spec=SPEC, durability="auto") as writer:
            run, before = committer_of(writer, is_feed=False), waits()
            run.commit(block(0, 4))
            run.commit_all()
            assert waits() == before
            run._connection._server = "127.0.0.1:1"  # as before a failover
            run.commit(block(4, 8))
            run.commit_all()
            assert waits() > before
            run.close()

    def test_a_replica_that_does_not_answer_is_given_up_and_told_once(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch, waits: Callable[[], int]
    ) -> None:
        """A writer goes on without it, and an operator learns which samples are in one memory only."""
        said: list[str] = []
        monkeypatch.setattr("penstock_common.stream.servers.durability.AUTO_S", 0.0)
        with writer_of(any_url, spec=SPEC, durability="auto", notify=said.append) as writer:
            run = committer_of(writer, is_feed=False)
            said.clear()
            writer._resources.replicas._followed.clear()
            writer._resources.replicas._looked_at.clear()
            run.commit(block(0, 4))
            run.commit_all()
            assert ["no replica of" in line for line in said] == [True]
            asked = waits()
            run.commit(block(4, 8))
            run.commit_all()
            assert waits() == asked
            assert len(said) == 1
            run.require_whole(8)
            assert run.unreplicated is not None
            run.finish()


PAUSE_S = 0.005


class Admits:
    """The quota of a stream, which has space after some refusals."""

    def __init__(self, now_s: list[float], refusals: int = 0) -> None:
        """Refuse so often, a second after the other."""
        self.now_s, self.refusals = now_s, refusals
        self.asked: list[tuple[int, int]] = []
        self.ends = 0
        self.folders: list[str] = []
        self.full_servers = 0

    def admit(self, nbytes: int, held: int) -> bool:
        """See AdmissionControl."""
        assert len(self.asked) < 20, "it is asked again and again"
        self.asked.append((nbytes, held))
        self.refusals -= 1
        return self.refusals < 0

    def admit_next(self, nbytes: int, held: int) -> bool:
        """See AdmissionControl."""
        return self.refusals <= 0

    def why(self) -> str:
        """See AdmissionControl."""
        return "the budget is full"

    def pause_s(self) -> float:
        """See AdmissionControl."""
        self.now_s[0] += 1
        return PAUSE_S

    def end_wait(self) -> None:
        """See AdmissionControl."""
        self.ends += 1

    def note_full_server(self) -> None:
        """See AdmissionControl."""
        self.full_servers += 1
        self.refusals = 1

    def note_full_folder(self, path: str) -> None:
        """See AdmissionControl."""
        self.folders.append(path)
        self.refusals = 1


class TestWaits:
    """A budget has no space for the next block."""

    @pytest.fixture
    def now_s(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """Return the time, which goes on by the pauses of committers alone."""
        now = [100.0]
        monkeypatch.setattr("penstock_producer.write.writer.Committer", partial(Committer, clock=lambda: now[0]))
        return now

    def test_a_block_is_sent_once_there_is_space(self, any_url: str, any_client: Client, now_s: list[float]) -> None:
        """Each look tells how much others hold by then. Looks without a pause would only keep the server busy."""
        said: list[str] = []
        with writer_of(any_url, spec=SPEC, notify=said.append) as writer:
            run = committer_of(writer, is_feed=False)
            run._admission = admits = cast("Any", Admits(now_s, 12))
            any_client.hincrby(writer.stream.partitions[0].roster, "bytes", 1000)
            began_s = time.monotonic()
            run.commit(block(0, 4))
            assert time.monotonic() - began_s >= 12 * PAUSE_S
            assert admits.asked == [(4 * SAMPLE_BYTES, held) for held in (0, *[1000] * 12)]
            assert admits.ends == 1
            assert now_s == [112.0]
            assert any("the budget is full" in line for line in said)
            run.commit_all()
            any_client.hincrby(writer.stream.partitions[0].roster, "bytes", -1000)
            run.require_whole(4)
            run.close()

    @pytest.mark.parametrize("limit_s", [None, 2.0])
    def test_a_wait_ends_at_its_limit_or_with_its_program(
        self, any_url: str, now_s: list[float], limit_s: float | None
    ) -> None:
        """The block is not lost: it is sent once there is space. A wait for the same block goes on."""
        stopped = [False]
        with writer_of(any_url, spec=SPEC, room_wait_s=limit_s) as writer:
            run = committer_of(writer, is_feed=False)
            run._quota_wait.should_stop = lambda: stopped[0]
            run._admission = admits = cast("Any", Admits(now_s, 1000))
            stopped[0] = limit_s is None
            with pytest.raises(BudgetFull, match="the budget is full"):
                run.commit(block(0, 4))
            assert (len(admits.asked), admits.ends) == ((1, 1) if limit_s is None else (4, 1))
            with pytest.raises(BudgetFull, match="the budget is full"):
                run.commit(block(0, 4))
            assert (len(admits.asked), admits.ends) == ((2, 2) if limit_s is None else (5, 2))
            admits.refusals, admits.asked, stopped[0] = 0, [], False
            run.commit(block(0, 4))
            run.commit_all()
            admits.refusals = 2
            run.commit(block(4, 8))
            run.commit_all()
            assert run.position == 8
            run.close()

    def test_a_place_in_a_folder_without_space_is_waited_for(
        self, any_url: str, monkeypatch: pytest.MonkeyPatch, now_s: list[float]
    ) -> None:
        """A request without a pause would only keep the disk busy. What was sent before is committed first."""
        reserve, tries = ShardPayloads.reserve, list[float]()

        def full(self: ShardPayloads, *what: Any) -> Any:
            tries.append(now_s[0])
            if len(tries) < 3:
                raise FolderFull("/segments")
            return reserve(self, *what)

        monkeypatch.setattr(ShardPayloads, "reserve", full)
        with writer_of(any_url, spec=SPEC) as writer:
            run = committer_of(writer, is_feed=False)
            run.commit(block(0, 4))
            run._admission = admits = cast("Any", Admits(now_s))
            assert run.reserve(Spec.of(SPEC), 4) is not None
            assert tries == [100.0, 101.0, 102.0]
            assert admits.folders == ["/segments"] * 2
            assert run.position == 4
            assert {nbytes for nbytes, _ in admits.asked} == {4 * SAMPLE_BYTES}
            run.close()

    def test_full_files_are_reported_when_nothing_is_under_way(
        self, any_url: str, monkeypatch: pytest.MonkeyPatch, now_s: list[float]
    ) -> None:
        """They may be used again then, which is space for a writer that waits."""
        reports: list[int] = []
        monkeypatch.setattr(ShardPayloads, "seal_now", lambda *_: reports.append(1))
        with writer_of(any_url, spec=SPEC) as writer:
            run = committer_of(writer, is_feed=False)
            run._admission = admits = cast("Any", Admits(now_s, 3))
            run.commit(block(0, 4))
            assert len(reports) == 3
            run.close()
            assert len(reports) == 3, "its block may be under way"
            run = committer_of(writer, is_feed=False)
            run.commit(block(0, 4))
            run.commit_all()
            assert len(reports) == 4
            run.close()
            assert (len(reports), admits.ends) == (5, 1)

    def test_a_block_that_a_full_server_refused_is_sent_again(
        self, any_url: str, any_client: Client, now_s: list[float]
    ) -> None:
        """Other programs fill the server, too."""

        class Freed(Admits):
            """A server that has memory again at the next look."""

            def pause_s(self) -> float:
                any_client.config_set("maxmemory", 0)
                return super().pause_s()

        with writer_of(any_url, spec=SPEC) as writer:
            run = committer_of(writer, is_feed=False)
            run._admission = admits = cast("Any", Freed(now_s))
            try:
                any_client.config_set("maxmemory", 1)
                run.commit(block(0, 4))
                run.commit(block(4, 8))
                run.commit_all()
            finally:
                any_client.config_set("maxmemory", 0)
            assert admits.full_servers > 0
            run.require_whole(8)
            run.close()
        assert stored(any_client, "t", 0) == {(0, offset): 1 for offset in range(8)}


def test_a_server_that_is_away_at_the_end_of_a_shard_is_waited_for(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is committed, and only the last look is missing."""
    away = [True, True, False]

    def opened(*what: Any) -> Any:
        if away and away.pop(0):
            raise ServerUnavailable("it restarts")
        return open_channel(*what)

    with writer_of(any_url, spec=SPEC) as writer:
        run = committer_of(writer, is_feed=False)
        run.commit(block(0, 4))
        run.commit_all()
        monkeypatch.setattr("penstock_producer.write.target.open_channel", opened)
        any_client.client_kill_filter(_type="normal", skipme=True)
        run.require_whole(4)
        assert away == []
        run.close()
