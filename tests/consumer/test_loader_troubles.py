"""The Loader when something is missing, bad or gone: no silent wait, no trusted entry, no delayed end."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from penstock_common.errors import (
    EpochIncomplete,
    EpochNotFound,
    GroupFinished,
    MemberReplaced,
    PenstockError,
    ServerUnavailable,
    StreamNotFound,
    WaitTimeout,
)
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.ledger import uncovered
from penstock_common.stream.groups.roster import Membership, RankOrder, join_group, load_roster
from penstock_common.stream.manifest import abandon_epoch
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import set_plan
from penstock_common.tuning import Tuning
from penstock_common.waiting import Wait
from penstock_consumer.read.claims import LeaseClaim, RankClaim
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.member import Member
from penstock_consumer.read.waits import await_stream
from penstock_producer.write.writer import Writer
from tests.clusters import until
from tests.contracts.feed import (
    SAMPLE_BYTES,
    SPEC,
    entries,
    loader_of,
    no_connection_left,
    numbers,
    open_stream,
    produce,
    sample,
    writer_of,
)
from tests.contracts.ordered import plan, planned_writer
from tests.tuned import tuned


def our_threads() -> set[threading.Thread]:
    """Return the threads that a loader starts, without those of frameworks and the stall detector."""
    return {
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("penstock-") and thread.name != "penstock-stall-detector"
    }


def pending(client: Client) -> int:
    """Return the entries of 't' that group 'g' was given and has not acknowledged."""
    return int(client.xpending(open_stream(client, "t").partitions[0].entries(0), "g")["pending"])


class TestWaits:
    """No wait is silent."""

    def test_an_unknown_stream_is_named_in_time(self, any_url: str) -> None:
        """A typo never hangs, and the similar name is shown."""
        produce(any_url, "train", 1)
        said: list[str] = []
        heard = threading.Event()

        def hear(text: str) -> None:
            said.append(text)
            heard.set()

        began = time.monotonic()
        missing = pytest.raises(StreamNotFound, match="no stream 't'; streams there: train")
        with loader_of(any_url, notify=hear, timeout_s=4) as loader, missing:
            list(loader)
        assert 3.5 < time.monotonic() - began < 5
        assert "no stream 't'" in said[0]

    def test_a_misspelt_stream_is_named_at_the_first_look(self, any_url: str, any_client: Client) -> None:
        """After a second a user can still see the mistake before looking elsewhere, and the wait continues."""
        produce(any_url, "train", 1)
        said: list[str] = []

        def hear(text: str) -> None:
            said.append(text)
            produce(any_url, "trian", 1)  # a producer that came late, so nothing was misspelt

        ticks = itertools.count(0, 0.1)  # three seconds, after which any wait reports something, never pass
        wait = Wait(hear, timeout_s=1, clock=lambda: next(ticks))
        assert await_stream(any_client, "trian", wait).name == "trian"
        assert said == ["waiting: no stream 'trian'; streams there: train; did you mean 'train'?"]

    def test_who_does_not_wait_for_a_stream_is_told_at_once(self, any_url: str) -> None:
        """A test, or a job of a batch queue, has no producer that may still come.

        An existing stream is read as usual.
        """
        produce(any_url, "train", 10)
        with pytest.raises(StreamNotFound, match=r"^no stream 't'; streams there: train"):
            Loader("t", group="g", batch_size=8, url=any_url, wait=False)
        produce(any_url, "t", 10)
        with loader_of(any_url, wait=False) as loader:
            assert sorted(numbers(loader)) == list(range(10))

    def test_what_penstock_run_prepares_is_waited_for_without_limit(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It starts the trainer before it opens the source, which may be a large folder on a slow disk."""
        monkeypatch.setattr("penstock_consumer.read.loader.STARTUP_S", 0.0)
        with loader_of(any_url, timeout_s=None) as loader, pytest.raises(StreamNotFound):
            list(loader)

        def prepare() -> None:
            while not any("b" in each["flags"] for each in any_client.client_list()):  # blocked: the loader waits
                time.sleep(0.01)
            produce(any_url, "t", 3)

        monkeypatch.setenv("PENSTOCK_AWAITED", "other,t")
        preparing = threading.Thread(target=prepare, daemon=True)
        preparing.start()
        with loader_of(any_url, timeout_s=None, wait=False) as loader:
            assert numbers(loader) == [0, 1, 2]
        preparing.join()

    def test_no_producer_is_said(self, any_url: str) -> None:
        """It is the usual reason why a trainer does not start."""
        with Writer("t", url=any_url, spec=SPEC):
            pass
        with loader_of(any_url, timeout_s=0.1) as loader, pytest.raises(WaitTimeout, match="producer"):
            list(loader)

    def test_a_producer_that_stopped_in_the_middle_is_said(self, any_url: str) -> None:
        """A trainer that waits for samples that will not come must name the epoch, and where to look."""
        with Writer("t", url=any_url, spec=SPEC) as writer:
            with writer.epoch(sizes=[2, 2]).shard(0) as shard:
                shard.write(sample(0))
                shard.write(sample(1))
            with loader_of(any_url, batch_size=2, timeout_s=0.7) as loader:
                batches = iter(loader)
                next(batches)
                with pytest.raises(WaitTimeout, match=r"epoch 0 .*1 of 2 shards.*penstock inspect t"):
                    next(batches)

    def test_a_finished_group_is_told_so(self, any_url: str, any_client: Client) -> None:
        """A training that is started twice by mistake must not wait for epochs that will never come."""
        produce(any_url, "t", 10, epochs=2)
        set_plan(any_client, open_stream(any_client, "t"), 2)
        said: list[str] = []
        with loader_of(any_url, notify=said.append) as loader:
            assert [len(list(loader)) for _ in range(2)] == [2, 2]
            assert list(loader) == []
            assert "read epochs 0-1" in said[-1]
            with pytest.raises(GroupFinished):
                list(loader)
        with loader_of(any_url) as loader, pytest.raises(GroupFinished, match=r"epochs 0-1.*start='earliest'"):
            list(loader)

    def test_a_member_that_comes_too_late_is_told_who_holds_the_samples(self, any_url: str, any_client: Client) -> None:
        """It read that its group had read the epoch, of which ten samples were acknowledged."""
        produce(any_url, "t", 30)
        set_plan(any_client, open_stream(any_client, "t"), 1)
        with loader_of(any_url, member="a", batch_size=10) as first, loader_of(any_url, member="b") as late:
            batches = iter(first)
            next(batches)
            next(batches)
            said = r"has read epoch 0 .*samples held and not acknowledged: \d by member 'a'. A new loader of the group"
            with pytest.raises(GroupFinished, match=said):
                list(late)

    def test_a_finished_learner_of_a_feed_is_told_of_writers(self, any_url: str) -> None:
        """`penstock produce` would write other samples into the stream of the actors."""
        with Writer("t", url=any_url, spec=SPEC) as writer:
            writer.write(sample(0))
        with (
            loader_of(any_url, batch_size=1, timeout_s=0.3) as loader,
            pytest.raises(WaitTimeout, match=r"there is no other: a `penstock.Writer` makes one.*is a producer"),
        ):
            list(loader)

    def test_an_abandoned_epoch_ends_with_what_there_is(self, any_url: str) -> None:
        """A producer that abandoned its epoch must not leave trainers waiting."""
        said: list[str] = []
        with Writer("t", url=any_url, spec=SPEC, tuning=Tuning(block_bytes=SAMPLE_BYTES)) as writer:
            epoch = writer.epoch()
            for number in range(6):
                epoch.write(sample(number))
            epoch.flush()
            with loader_of(any_url, batch_size=2, notify=said.append) as loader:
                batches = iter(loader)
                next(batches)
                epoch.abandon()
                assert sum(batch.size for batch in batches) == 4
        assert any("abandoned" in line for line in said)

    def test_who_finds_no_epoch_is_told_the_true_reason(self, any_url: str, any_client: Client) -> None:
        """`not yet` for a stream whose only epoch was abandoned sends users after the wrong cause."""
        with Writer("t", url=any_url, spec=SPEC) as writer:
            writer.epoch().abandon()
        set_plan(any_client, open_stream(any_client, "t"), 1)
        for start, reason in (("resume", "has no other epoch"), (77, "of which 1 were begun")):
            with loader_of(any_url, start=start) as loader, pytest.raises(GroupFinished, match=reason):
                list(loader)
                list(loader)

    def test_a_group_that_begins_with_the_next_epoch_waits_for_it_while_one_is_planned(
        self, any_url: str, any_client: Client
    ) -> None:
        """A learner that starts with the newest samples comes before them."""
        produce(any_url, "t", 10, epochs=2)
        stream = open_stream(any_client, "t")
        reason = r"to begin with epoch 2 of 't', of which 2 were begun .*; `penstock produce` makes epoch 2 next"
        set_plan(any_client, stream, 2)
        with loader_of(any_url, start=2) as loader, pytest.raises(GroupFinished, match=reason):
            list(loader)
        for final in (3, None):
            set_plan(any_client, stream, final)
            with (
                loader_of(any_url, start=2, timeout_s=0.3) as loader,
                pytest.raises(WaitTimeout, match=reason),
            ):
                list(loader)
        with loader_of(any_url, start=2) as loader:
            produce(any_url, "t", 10, epochs=1)
            assert {batch.epoch for batch in loader} == {2}

    def test_an_abandoned_epoch_that_was_released_ends_too(self, any_url: str) -> None:
        """The space of an abandoned epoch is freed first, with or without readers."""
        settings: dict[str, Any] = {"spec": SPEC, "block_bytes": 480, "budget_bytes": 20_000, "notify": lambda _: None}
        with Writer("t", url=any_url, **tuned("Writer", settings)) as writer:
            epoch = writer.epoch()
            for number in range(400):
                epoch.write(sample(number))
            epoch.flush()
            with loader_of(any_url, batch_size=2, prefetch_bytes=1) as loader:
                batches = iter(loader)
                next(batches)
                epoch.abandon()
                with writer.epoch() as following:
                    for number in range(600):
                        following.write(sample(number))
                assert all(batch.epoch == 0 for batch in batches)
                assert sorted(numbers(loader)) == list(range(600))

    def test_an_epoch_that_is_released_just_while_it_is_being_closed_misses_nothing(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another member closes it, a writer needs quota, and the ledgers are gone: that must not look like a loss."""
        produce(any_url, "t", 40)

        def released(*arguments: Any) -> Any:
            release_epoch(any_client, open_stream(any_client, "t"), 0)
            return uncovered(*arguments)

        monkeypatch.setattr("penstock_consumer.read.claims.uncovered", released)
        with loader_of(any_url) as loader:
            assert sorted(numbers(loader)) == list(range(40))

    def test_an_epoch_that_is_released_between_finding_and_beginning_it_is_passed(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A slow member finds an epoch, and the others acknowledge it before the member reads its manifest."""
        produce(any_url, "t", 40, epochs=2)
        find = Member.next_epoch
        is_first = True

        def found(member: Member) -> int | None:
            nonlocal is_first
            epoch = find(member)
            if is_first:
                is_first = False
                with loader_of(any_url, member="other") as other:
                    assert sorted(numbers(other)) == list(range(40))
                release_epoch(any_client, open_stream(any_client, "t"), 0)
            return epoch

        monkeypatch.setattr(Member, "next_epoch", found)
        with loader_of(any_url, member="slow") as loader:
            batches = list(loader)
        assert {batch.epoch for batch in batches} == {1}
        assert sum(batch.size for batch in batches) == 40

    def test_an_acknowledgement_lost_with_its_connection_is_sent_again_while_the_loop_waits(
        self, any_url: str, any_client: Client
    ) -> None:
        """Otherwise it would be missing until the next batch comes, and other members would train on the same
        samples.
        """
        with (
            writer_of(any_url, spec=SPEC, block_bytes=5 * SAMPLE_BYTES) as writer,
            writer.epoch(sizes=[20]).shard(0) as shard,
            loader_of(any_url, batch_size=5, timeout_s=60) as loader,
        ):
            for number in range(10):
                shard.write(sample(number))
            shard.commit_all()
            batches = iter(loader)
            for _ in range(2):
                next(batches)
            for info in any_client.client_list():
                if info["cmd"] == "evalsha":
                    any_client.client_kill_filter(_id=info["id"])
            waiting = threading.Thread(target=lambda: next(batches))
            waiting.start()
            until = time.monotonic() + 20
            while pending(any_client) and time.monotonic() < until:
                time.sleep(0.05)
            assert pending(any_client) == 0
            for number in range(10, 20):
                shard.write(sample(number))
            shard.commit_all()
            waiting.join(30)

    def test_a_wait_for_the_server_is_not_blamed_on_a_producer(self, fresh_server: Callable[..., Any]) -> None:
        """The server accepts no more connections, for example, and only the reader's one broke, so all else looks
        well.
        """
        server = fresh_server()
        with (
            redis.Redis.from_url(server.url) as admin,
            writer_of(server.url, spec=SPEC, block_bytes=5 * SAMPLE_BYTES) as writer,
            writer.epoch(sizes=[15]).shard(0) as shard,
            loader_of(server.url, batch_size=5, timeout_s=3) as loader,
        ):
            for number in range(10):
                shard.write(sample(number))
            shard.commit_all()
            batches = iter(loader)
            found = [*next(batches)["y"], *next(batches)["y"]]  # from here on, acknowledging has its own connection
            admin.config_set("maxclients", len(admin.client_list()) - 1)
            for info in admin.client_list():
                if info["cmd"] == "xreadgroup":
                    admin.client_kill_filter(_id=info["id"])
            with pytest.raises(WaitTimeout, match=r"the server, to read on: .*max number of clients"):
                next(batches)
            admin.config_set("maxclients", 1000)
            for number in range(10, 15):
                shard.write(sample(number))
            shard.commit_all()
            found += [*next(iter(loader))["y"]]
        assert found == list(range(15))


class TestBadEntries:
    """A loader does not trust the contents of a stream."""

    def test_an_entry_that_vanished_is_named_not_waited_for(self, any_url: str, any_client: Client) -> None:
        """After a foreign XDEL, the trainer must learn which samples it did not get."""
        produce(any_url, "t", 50, block_samples=10)
        stream = open_stream(any_client, "t")
        any_client.xdel(stream.partitions[0].entries(0), entries(any_client, "t", 0)[2][0])
        with loader_of(any_url) as loader:
            found: list[int] = []
            with pytest.raises(EpochIncomplete, match="shard 0 offsets 20-29") as caught:
                for batch in loader:
                    found += batch["y"].tolist()
        assert caught.value.missing == [(0, 20, 30)]
        assert sorted(found) == [n for n in range(50) if not 20 <= n < 30]

    @pytest.mark.parametrize("kept", [0, 3])
    @pytest.mark.parametrize("is_feed", [False, True])
    def test_an_epoch_whose_newest_entries_were_deleted_ends_with_their_ranges(
        self, any_url: str, any_client: Client, is_feed: bool, kept: int
    ) -> None:
        """After an XTRIM the loader read the same epoch again and again, silently and past its timeout."""
        with writer_of(any_url, spec=SPEC, block_bytes=10 * SAMPLE_BYTES) as writer:
            epoch = None if is_feed else writer.epoch()
            for number in range(50):
                (writer if epoch is None else epoch).write(sample(number))
            writer.flush() if epoch is None else epoch.close()
        for entry_id, _ in entries(any_client, "t", 0)[kept:]:
            any_client.xdel(open_stream(any_client, "t").partitions[0].entries(0), entry_id)
        found: list[int] = []
        ends: list[EpochIncomplete] = []

        def train() -> None:
            try:
                with loader_of(any_url, timeout_s=1.5) as loader:
                    for batch in loader:
                        found.extend(batch["y"].tolist())
            except EpochIncomplete as error:
                ends.append(error)

        trainer = threading.Thread(target=train, daemon=True)
        trainer.start()
        trainer.join(10)
        assert not trainer.is_alive()
        assert sorted(found) == list(range(10 * kept))
        (error,) = ends
        assert error.missing == [(0, 10 * kept, 50)]
        assert "penstock audit t --repair" in str(error)

    def test_a_hostile_entry_is_named_and_the_epoch_goes_on(self, url: str, client: Client) -> None:
        """A client that can write to a stream can at most waste a trainer's time."""
        with Writer("t", url=url, spec=SPEC, tuning=Tuning(block_bytes=240)) as writer, writer.epoch() as epoch:
            for number in range(50):
                epoch.write(sample(number))
            epoch.flush()
            stream = open_stream(client, "t")
            key = stream.partitions[0].entries(0)
            true = entries(client, "t", 0)[0][1]
            meta = json.loads(true[b"meta"])
            forged: list[dict[Any, Any]] = [
                {b"garbage": b"x" * 1000},
                {b"meta": b"{" * 5000},
                {**true, b"meta": json.dumps({**meta, "first": 1 << 40}).encode()},
                {**true, b"meta": json.dumps({**meta, "first": (1 << 20) - 5}).encode()},
                {**true, b"meta": json.dumps({**meta, "epoch": 7}).encode()},
                {**true, b"meta": json.dumps({**meta, "stream": "other"}).encode()},
                {**true, b"x": bytes(len(true[b"x"]))},
                {b"meta": true[b"meta"], b"x": true[b"x"]},
                {b"meta": true[b"meta"], b"x": true[b"x"][:-1], b"y": true[b"y"]},
                {**true, b"z": b"more"},
            ]
            for fields in forged:
                client.xadd(key, fields)
            for number in range(50, 100):
                epoch.write(sample(number))
        said: list[str] = []
        with loader_of(url, notify=said.append) as loader:
            assert sorted(numbers(loader)) == list(range(100))
            assert loader.stats().bad_entries == len(forged)
        dead = [line for line in said if "is a dead letter" in line]
        assert len(dead) == len(forged)
        assert any("ChecksumMismatch" in line for line in dead)
        assert client.hlen(stream.partitions[0].dead(0, "g")) == len(forged)
        assert client.xpending(key, "g")["pending"] == 0
        assert client.strlen(stream.partitions[0].ledger(0, "g", 0)) <= 13


class TestMembers:
    """Names, takeovers and ends of members."""

    def test_of_two_processes_with_one_name_the_older_stops(self, any_url: str) -> None:
        """A name belongs to one incarnation. With two, leases would mean nothing."""
        produce(any_url, "t", 400, block_samples=2)
        settings: dict[str, Any] = {"member": "m", "lease_s": 1.0, "prefetch_bytes": 200}
        with loader_of(any_url, **settings) as newer_later:
            found: list[int] = []
            older = iter(newer_later)
            found += next(older)["y"].tolist()
            with loader_of(any_url, **settings) as newer:
                with pytest.raises(MemberReplaced, match="'m'"):
                    for batch in older:
                        found += batch["y"].tolist()
                        time.sleep(0.05)
                rest = numbers(newer)
        assert set(found) | set(rest) == set(range(400))

    def test_a_member_that_leaves_well_owes_nothing(self, any_url: str, any_client: Client) -> None:
        """No entry is pending, no member is on the roster, and an undeclared group no longer holds data."""
        produce(any_url, "t", 40)
        with loader_of(any_url) as loader:
            assert len(numbers(loader)) == 40
        stream = open_stream(any_client, "t")
        roster = load_roster(any_client, stream.partitions[0])
        assert not roster.members
        assert roster.closed == {("g", 0)}
        assert not roster.groups["g"].holds
        assert any_client.xpending(stream.partitions[0].entries(0), "g")["pending"] == 0

    def test_a_closed_loader_leaves_no_thread_and_no_connection(self, any_url: str, any_client: Client) -> None:
        """Notebooks make dozens of loaders in one process."""
        produce(any_url, "t", 400, block_samples=2)
        before = our_threads()
        with no_connection_left(any_client):
            for policy in ("on_next", "manual"):
                with loader_of(any_url, policy, acknowledge=policy, prefetch_bytes=100) as loader:
                    next(iter(loader))
            assert our_threads() == before

    def test_a_loader_nobody_closed_ends_with_its_last_reference(self, any_url: str) -> None:
        """Few users close what they iterate over."""
        produce(any_url, "t", 400, block_samples=2)
        before = our_threads()
        loader = Loader(
            "t", group="g", batch_size=8, url=any_url, tuning=Tuning(notify=lambda _: None, prefetch_bytes=100)
        )
        next(iter(loader))
        del loader
        gc.collect()
        assert our_threads() == before

    def test_epochs_abandoned_before_they_are_read_are_passed_over(self, any_url: str, any_client: Client) -> None:
        """An iteration that has yielded nothing continues with the next epoch."""
        produce(any_url, "t", 5)
        stream = open_stream(any_client, "t")
        with Writer("t", url=any_url) as writer:
            empty = writer.epoch()
            abandon_epoch(any_client, stream, empty.number)
            with writer.epoch() as last:
                last.write(sample(9))
        with loader_of(any_url) as loader:
            assert numbers(loader) == list(range(5))
            assert numbers(loader) == [9]

    def test_a_server_that_is_gone_does_not_hold_up_the_end(
        self, fresh_server: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An orderly end reports what could not be acknowledged.

        After an error, or Ctrl-C, nothing waits for the server.
        """
        monkeypatch.setattr("penstock_common.stream.groups.outbox.OUTAGE_S", 0.5)
        server = fresh_server()
        produce(server.url, "t", 400, block_samples=2)
        said: list[str] = []
        settings: dict[str, Any] = {"notify": said.append, "prefetch_bytes": 100}
        before = our_threads()
        closed, broken = (loader_of(server.url, group, **settings) for group in "ab")
        with pytest.raises(ServerUnavailable), closed as in_order:
            kept = iter(in_order)
            next(kept)
            next(kept)
            with pytest.raises(ZeroDivisionError), broken as in_error:
                batches = iter(in_error)
                next(batches)
                next(batches)
                server.close()
                began = time.monotonic()
                raise ZeroDivisionError
            assert time.monotonic() - began < 4
        assert any("connection broke while acknowledging" in line for line in said)
        assert our_threads() == before


def test_a_group_that_is_gone_while_it_reads_is_told_with_all_its_causes(any_url: str, any_client: Client) -> None:
    """A server that restarts without its newest writes may have lost the group, although it was never dropped."""
    with writer_of(any_url) as writer, loader_of(any_url, batch_size=1, timeout_s=20) as loader:
        writer.write(sample(0))
        writer.flush()
        batches = iter(loader)
        next(batches)
        any_client.xgroup_destroy(open_stream(any_client, "t").partitions[0].entries(0), "g")
        with pytest.raises(EpochNotFound, match="was released, or its group dropped, or the server came back without"):
            next(batches)


@pytest.mark.parametrize("order", [None, "canonical"])
def test_why_a_loop_waits_is_told_without_a_server(fresh_server: Callable[..., EmbeddedServer], order: Any) -> None:
    """The explanation waited for the server for a minute, and its error ended the training."""
    server, said = fresh_server(), list[str]()
    produce(server.url, "t", 20)
    with suppress(PenstockError), loader_of(server.url, batch_size=10, order=order) as loader:  # its group is gone
        next(iter(loader))
        member = loader._joined()
        run = member.run
        assert run is not None
        server.kill()
        began_s = time.monotonic()
        said.append(run.reader.why_waiting(3.0))
        assert time.monotonic() - began_s < 10
        fresh_server(port=server.port, password=urlsplit(server.url).password)
        member.stop()  # the loader would not wait for a thread that waits for the server
    assert "epoch 0 of 't'" in said[0]


@pytest.mark.parametrize(("released", "start", "first"), [(0, "resume", 0), (2, "resume", 2), (2, 5, 5)])
def test_a_late_group_begins_behind_what_was_released(
    any_url: str, any_client: Any, released: int, start: str | int, first: int
) -> None:
    """The group would wait for epochs that never come. Where no epoch is retained, nothing else says so."""
    with planned_writer(any_url) as writer:
        for number in range(released):
            writer.epoch(sizes=[1]).abandon()
            assert release_epoch(any_client, writer.stream, number)
        for order in (None, RankOrder(0, 1, 4)):
            who = Membership(writer.stream, "g" if order is None else "h", "rank-0", "i", order)
            claim = (LeaseClaim if order is None else RankClaim)(any_client, who, 30.0, lambda _: None)
            if start == "resume":
                claim.join(start)
                assert claim.first == first
            assert claim._floor(start) == first
            claim.close()


def test_a_late_group_begins_where_every_partition_is_whole(any_url: str, any_client: Any) -> None:
    """Retention removes entries of one partition after the other, and part of an epoch would look like all of it."""
    plan(any_url, [8] * 4, epochs=2, partitions=2)
    stream = open_stream(any_client, "t")
    any_client.hset(stream.partitions[1].roster, "t:0", "1")
    assert join_group(any_client, Membership(stream, "g", "m", "i")) == 1
    assert [load_roster(any_client, partition).groups["g"].first for partition in stream.partitions] == [1, 1]


def test_a_reader_whose_request_is_open_waits_for_the_producers(any_url: str) -> None:
    """A loop books its wait by this until the answer comes, and would name the training's own process."""
    with writer_of(any_url, spec=SPEC, partitions=2) as writer, loader_of(any_url, batch_size=1) as loader:
        writer.write(sample(0))
        writer.flush()
        next(iter(loader))
        run = loader._joined().run
        assert run is not None
        times = run.queue.inner.reader_times
        until(lambda: times.doing == "producers")


@pytest.mark.parametrize("is_killed", [False, True])
def test_time_without_a_server_counts_for_the_server_and_its_return_is_told(
    fresh_server: Callable[..., EmbeddedServer], tmp_path: Path, is_killed: bool
) -> None:
    """The loop waits for the answers to its acknowledgements. Its line sent the user to the trainer's own code."""
    settings: dict[str, Any] = {"appendonly": True, "directory": tmp_path}
    server, said = fresh_server(**settings), list[str]()
    away_s = 2.0
    produce(server.url, "t", 400)
    with loader_of(server.url, batch_size=10, notify=said.append) as loader:

        def bring_back() -> None:
            if is_killed:
                fresh_server(port=server.port, **settings)
            else:
                os.kill(server.pid, signal.SIGCONT)

        batches = iter(loader)
        next(batches)
        if is_killed:
            server.kill()
        else:
            os.kill(server.pid, signal.SIGSTOP)
        timer = threading.Timer(away_s, bring_back)
        timer.start()
        assert sum(batch.size for batch in batches) == 390
        timer.join()
        stats = loader.stats()
    assert stats.cause == "server"
    assert stats.server_s > 0.9 * away_s
    # the stall detector tells the end of a silence, perhaps after the end of this epoch
    assert not is_killed or any(re.fullmatch(r"the server answers again, after \d s \(.*\)", line) for line in said), (
        said
    )


def test_a_batch_whose_lease_was_not_renewed_in_time_is_given_by_the_next_loop(
    fresh_server: Callable[..., EmbeddedServer],
) -> None:
    """It was taken from the queue before its loop gave up. No loop got it, and the epoch never closed."""
    server = fresh_server()
    produce(server.url, "t", 40)
    with loader_of(server.url, batch_size=4, acknowledge="manual", lease_s=0.5, timeout_s=2.0) as loader:
        first = next(iter(loader))
        loader.acknowledge(first)
        run = loader._joined().run
        assert run is not None
        until(lambda: run.queue.holds_batches)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            time.sleep(1)  # the lease ends
            with pytest.raises(WaitTimeout):
                next(iter(loader))
        finally:
            os.kill(server.pid, signal.SIGCONT)
        seen = numbers([first])
        for batch in loader:
            seen += numbers([batch])
            loader.acknowledge(batch)
    assert sorted(seen) == [*range(40)]
