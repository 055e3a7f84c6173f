"""Budgets: the rule for quota as a pure function, and writers on real servers that wait, say why, and go on."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis

from penstock_common.errors import BudgetFull, TooLarge
from penstock_common.explain.monitor import StreamMonitor
from penstock_common.explain.sentences import why_no_room
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client, ms_of
from penstock_common.stream.groups.forgetting import drop_group
from penstock_common.stream.groups.roster import (
    STALE_MS,
    Membership,
    WaitingWriter,
    expire_silent,
    join_group,
    load_roster,
)
from penstock_common.stream.manifest import abandon_epoch, retained_epochs
from penstock_common.stream.removal.deletion import delete_stream, release_epoch
from penstock_common.stream.servers.suitability import largest_block, require_step_fits
from penstock_common.stream.streams import Stream, find_stream, load_stream
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.write.cleaner import SLACK_SHARE
from penstock_producer.write.explain import explain_quota
from penstock_producer.write.quota import GIVE_WAY_S, LOW_SHARE, QuotaState, pause_s
from penstock_producer.write.writer import Writer
from tests.clusters import until
from tests.contracts.feed import accounted_bytes, payload_bytes, stored
from tests.tuned import tuned

WIDE = {"x": ("uint8", (1000,))}
BUDGET = 100_000


class TestTheRule:
    """Quota: who may write now."""

    def test_the_top_quarter_is_only_for_the_shard_everyone_waits_for(self) -> None:
        """Otherwise shards that are ahead could fill the budget with samples that no group can use yet."""
        assert QuotaState(74, 1, 100, is_next=False).is_enough
        assert not QuotaState(75, 1, 100, is_next=False).is_enough
        assert QuotaState(99, 1, 100, is_next=True).is_enough
        assert not QuotaState(100, 1, 100, is_next=True).is_enough

    def test_what_is_missing_is_exactly_what_must_go(self) -> None:
        """The cleaner frees by this number: too little would loop, too much would delete."""
        room = QuotaState(90, 20, 100, is_next=True)
        assert room.missing_bytes == 10
        assert QuotaState(90 - room.missing_bytes, 20, 100, is_next=True).is_enough
        assert QuotaState(0, 1, 100, is_next=False).missing_bytes == 0

    def test_the_largest_block_always_fits_the_reserve(self) -> None:
        """A block above the reserved quarter might wait for ever."""
        assert QuotaState(75, largest_block(100), 100, is_next=True).is_enough

    def test_who_had_to_wait_goes_on_at_the_low_mark_or_after_a_second(self) -> None:
        """Quota is planned for in stretches; and what readers must hold may lie between the marks."""
        waiting = QuotaState(850, 40, 1000, is_next=True, waited_s=0.1)
        assert waiting.is_enough
        assert not replace(waiting, held_bytes=870).is_enough
        assert replace(waiting, held_bytes=870, waited_s=None).is_enough
        assert replace(waiting, held_bytes=960, waited_s=GIVE_WAY_S).is_enough
        assert not replace(waiting, held_bytes=961, waited_s=GIVE_WAY_S).is_enough

    def test_the_servers_memory_bounds_the_budget_and_keeps_the_same_quarter(self) -> None:
        """Memory that others took must not go to shards that are ahead either."""
        assert QuotaState(60, 10, 1000, is_next=True, left_bytes=40).is_enough
        ahead = QuotaState(60, 16, 1000, is_next=False, left_bytes=40)
        assert not ahead.is_enough
        assert ahead.is_memory_short
        assert ahead.missing_bytes == 1
        assert QuotaState(60, 1, 1000, is_next=True, left_bytes=-500).missing_bytes == 61
        assert not QuotaState(1000, 1, 1000, is_next=True, left_bytes=5000).is_memory_short

    def test_a_long_wait_takes_few_looks_and_the_next_one_no_more(self) -> None:
        """A waiting writer may cost next to nothing, and must not start afresh after every block."""

        def looks(length_s: float, last_s: float) -> int:
            waited, count = 0.0, 0
            while waited < length_s:
                waited, count = waited + pause_s(waited, last_s), count + 1
            return count

        assert looks(0.3, 0.0) < 15
        assert looks(0.3, 0.3) <= 5
        assert looks(60, 0.0) < 140

    def test_the_cleaner_frees_down_to_the_low_mark(self) -> None:
        """With less, a writer would wait for ever. With more, replays would lose data without need."""
        assert LOW_SHARE == SLACK_SHARE

    @pytest.mark.parametrize(
        ("blockers", "has_groups", "is_next", "words"),
        [
            ([], False, True, "no group reads it: start a trainer"),
            (["resnet"], True, True, "because of group resnet"),
            ([], True, False, "last quarter"),
            ([], True, True, "replay"),
        ],
    )
    def test_every_reason_to_wait_has_a_sentence(
        self, blockers: list[str], has_groups: bool, is_next: bool, words: str
    ) -> None:
        """A wait that is not explained looks like a hang."""
        sentence = explain_quota("train", QuotaState(90 << 20, 20 << 20, 100 << 20, is_next), blockers, has_groups)
        assert words in sentence
        assert ("`penstock epochs abandon train EPOCH --force`" in sentence) == (not has_groups)
        assert "is full (90 MiB of 100 MiB, and the next block takes 20 MiB)" in sentence

    @pytest.mark.parametrize(
        ("held", "is_next", "why"),
        [
            (15, False, "; its last quarter is kept for the oldest unfinished shard)"),
            (13, False, "; writers that waited fill only 13 MiB)"),
            (18, True, "; writers that waited fill only 18 MiB)"),
            (20, True, "(20 MiB of 20 MiB)"),
        ],
    )
    def test_a_full_budget_says_why_its_free_bytes_do_not_suffice(self, held: int, is_next: bool, why: str) -> None:
        """Of 20 MiB 5 were free, and the next block took one."""
        state = QuotaState(held << 20, 1 << 20, 20 << 20, is_next, waited_s=0.1)
        for blockers in (["resnet"], []):
            sentence = explain_quota("train", state, blockers, True)
            assert why in sentence
            assert sentence.count("last quarter") == (held == 15)

    def test_what_dead_members_hold_is_told_by_their_names(self) -> None:
        """Without the names, users that wait for a dead trainer look for a pin that was never set."""
        room = QuotaState(90 << 20, 20 << 20, 100 << 20, is_next=True)
        sentence = explain_quota("train", room, [], True, gone="rank-1 of group resnet (42 s ago)", is_kept=False)
        assert "members last seen a while ago: rank-1 of group resnet (42 s ago); start them again" in sentence
        assert "not acknowledged" in explain_quota("train", room, [], True, is_kept=False)


def block(number: int) -> dict[str, Any]:
    """One sample of 1000 bytes."""
    return {"x": np.full(1000, number % 256, np.uint8)}


class Producing:
    """A writer in a thread of its own: 1000-byte samples, ten to an entry, into one epoch."""

    def __init__(self, url: str, count: int, *, paused: bool = False, **settings: Any) -> None:
        self.said: list[str] = []
        self.error: BaseException | None = None
        self.heard = threading.Event()
        self.is_open = threading.Event()
        self.go_on = threading.Event()
        if not paused:
            self.go_on.set()
        self._count = count
        self._settings = {"spec": WIDE, "block_bytes": 10_000, "budget_bytes": BUDGET, **settings}
        self._url = url
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _hear(self, text: str) -> None:
        self.said.append(text)
        self.heard.set()

    def _run(self) -> None:
        try:
            with (
                Writer("t", url=self._url, **tuned("Writer", self._settings, Tuning(notify=self._hear))) as writer,
                writer.epoch() as epoch,
            ):
                epoch.write(block(0))
                epoch.flush()
                self.is_open.set()
                self.go_on.wait(20)
                for number in range(1, self._count):
                    epoch.write(block(number))
        except BaseException as error:
            self.error = error

    def finish(self, timeout_s: float = 20) -> None:
        """Waits for the end and raises what went wrong."""
        self.thread.join(timeout_s)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


@contextmanager
def loader_of(url: str, group: str, **settings: Any) -> Iterator[Loader]:
    """A quiet loader of the stream 't'."""
    with Loader(
        "t",
        group=group,
        batch_size=10,
        url=url,
        **tuned("Loader", {"notify": lambda _: None, "timeout_s": 20, **settings}),
    ) as loader:
        yield loader


def test_without_a_group_a_full_budget_is_explained_and_the_first_trainer_frees_it(
    any_url: str, any_client: Client
) -> None:
    """Starting the producer first is normal. It must wait, name the group, and continue without help."""
    producing = Producing(any_url, 300)
    assert producing.heard.wait(5)
    assert "no group reads it: start a trainer" in producing.said[-1]
    assert accounted_bytes(any_client, "t")[0] <= BUDGET
    with loader_of(any_url, "g") as loader:
        assert sum(batch.size for batch in loader) == 300
    producing.finish()
    total, by_epoch = accounted_bytes(any_client, "t")
    assert total == by_epoch[0] == payload_bytes(any_client, "t", 0) <= BUDGET


def test_a_group_that_has_left_is_not_said_to_owe_acknowledgements(any_url: str) -> None:
    """It was given nothing of what fills the budget. The budget waits for a reader."""
    with (
        Writer("t", url=any_url, spec=WIDE, budget_bytes=BUDGET, tuning=Tuning(notify=lambda _: None)) as writer,
        writer.epoch() as epoch,
    ):
        epoch.write(block(0))
    with loader_of(any_url, "gone") as loader:
        assert sum(batch.size for batch in loader) == 1
    producing = Producing(any_url, 300)
    assert producing.heard.wait(5)
    assert "no group reads it: start a trainer" in producing.said[-1]
    with loader_of(any_url, "g", start=1) as loader:
        assert sum(batch.size for batch in loader) == 300
    producing.finish()


def test_a_stream_that_is_only_replayed_goes_on_once_an_old_epoch_is_given_up(any_url: str, any_client: Client) -> None:
    """No group reads it, so no retention releases anything, and the wait must name the only way out."""
    tuning = Tuning(notify=lambda _: None)
    with (
        Writer("t", url=any_url, spec=WIDE, budget_bytes=BUDGET, retention="epochs:1", tuning=tuning) as writer,
        writer.epoch() as epoch,
    ):
        for number in range(60):
            epoch.write(block(number))
    producing = Producing(any_url, 60)
    assert producing.heard.wait(5)
    assert "`penstock epochs abandon t EPOCH --force`" in producing.said[-1]
    abandon_epoch(any_client, writer.stream, 0)
    producing.finish()
    assert [*retained_epochs(any_client, writer.stream)] == [1]


def test_a_slow_group_is_named_within_five_seconds(any_url: str) -> None:
    """A user who watches the producer must learn which trainer makes it wait."""
    with Writer("t", url=any_url, spec=WIDE, budget_bytes=BUDGET, tuning=Tuning(notify=lambda _: None)):
        pass
    with loader_of(any_url, "quick") as quick, loader_of(any_url, "slow", prefetch_bytes=1) as slow:
        producing = Producing(any_url, 300)
        feeding = threading.Thread(target=lambda: [None for _ in quick], daemon=True)
        feeding.start()
        slowly = iter(slow)
        next(slowly)
        assert producing.heard.wait(5)
        assert "because of group slow" in producing.said[-1]
        assert "quick" not in producing.said[-1]
        assert 10 + sum(batch.size for batch in slowly) == 300
        producing.finish()
        feeding.join(10)


def test_a_waiting_trainer_is_told_of_the_group_without_a_trainer_that_fills_the_budget(any_url: str) -> None:
    """Only its own group was named, which had a few entries in hand."""
    with Writer("t", url=any_url, spec=WIDE, budget_bytes=BUDGET, tuning=Tuning(notify=lambda _: None)):
        pass
    with connect(any_url) as client:
        stream = load_stream(client, "t")
        join_group(client, Membership(stream, "slow", "", ""), declared=True)
        with loader_of(any_url, "fast", prefetch_bytes=1) as loader:
            producing = Producing(any_url, 300)
            batches = iter(loader)
            seen = sum(next(batches).size for _ in range(5))
            until, told = time.monotonic() + 20, ""
            while not told and time.monotonic() < until:
                told = why_no_room(client, stream)
            assert re.search(
                r"is held; group 'slow' without a trainer has yet to read [0-9.]+ KiB; group 'fast' has ", told
            ), told
            drop_group(client, stream, "slow")
            assert seen + sum(batch.size for batch in batches) == 300
            producing.finish()


def test_a_wait_that_may_not_last_ends_with_budget_full(any_url: str, any_client: Client) -> None:
    """A job must give its worker back rather than hold it; what it committed stands."""
    began = time.monotonic()
    producing = Producing(any_url, 300, room_wait_s=0.3)
    with pytest.raises(BudgetFull, match="no group reads it: start a trainer"):
        producing.finish()
    assert 0.3 <= time.monotonic() - began < 5
    assert stored(any_client, "t", 0).total() == 91


def test_a_waiting_writer_takes_a_budget_that_was_raised(any_url: str, any_client: Client) -> None:
    """Its messages advise a larger budget, which only a writer that was started again took."""
    producing = Producing(any_url, 300)
    assert producing.is_open.wait(20)
    until(lambda: load_roster(any_client, load_stream(any_client, "t").partitions[0]).waiting)
    Writer("t", url=any_url, budget_bytes=20 * BUDGET, tuning=Tuning(notify=lambda _: None)).close()
    producing.finish()
    assert stored(any_client, "t", 0).total() == 300


def test_who_goes_on_without_room_is_refused_and_what_waits_stays_as_it_was(any_url: str) -> None:
    """A third block would be gathered in the arrays of the first, which waits yet: other samples in their place."""
    settings: dict[str, Any] = {"spec": WIDE, "block_bytes": 10_000, "budget_bytes": BUDGET, "notify": lambda _: None}
    found: list[int] = []
    with (
        Writer("t", url=any_url, **tuned("Writer", settings, Tuning(room_wait_s=0.05))) as writer,
        loader_of(any_url, "g") as loader,
    ):
        epoch = writer.epoch(sizes=[300])
        shard = epoch.shard(0)
        with pytest.raises(BudgetFull):
            for number in range(300):
                shard.write(block(number))
        given = shard.position
        for number in range(200, 240):
            with pytest.raises(BudgetFull):
                shard.write(block(number))
        assert shard.position == given

        def read() -> None:
            found.extend(int(row) for batch in loader for row in batch["x"][:, 0])

        reading = threading.Thread(target=read)
        reading.start()
        while shard.committed < given:
            with suppress(BudgetFull):
                shard.commit_all()
        shard.abort()
        epoch.abandon()
        reading.join(20)
    assert found == list(range(given))


def test_shards_that_are_ahead_leave_room_for_the_one_awaited(any_url: str, any_client: Client) -> None:
    """With the budget full of later shards, the one that trainers wait for would never come."""
    settings: dict[str, Any] = {"spec": WIDE, "block_bytes": 10_000, "budget_bytes": BUDGET, "notify": lambda _: None}
    with Writer("t", url=any_url, **tuned("Writer", settings, Tuning(room_wait_s=0.05))) as writer:
        epoch = writer.epoch(sizes=[100, 100])
        ahead = epoch.shard(1)
        with pytest.raises(BudgetFull):
            for number in range(100):
                ahead.write(block(number))
        ahead.abort()
        assert accounted_bytes(any_client, "t")[0] == 70_000
        first = epoch.shard(0)
        for number in range(30):
            first.write(block(number))
        first.commit_all()
        first.abort()
        assert accounted_bytes(any_client, "t")[0] == 100_000


def test_a_server_filled_by_others_makes_writers_wait_and_nobody_fail(fresh_server: Any) -> None:
    """With foreign keys at maxmemory, writers wait with a message, trainers continue, and writers finish later."""
    server = fresh_server(maxmemory_bytes=200 << 20)
    settings: dict[str, Any] = {"spec": WIDE, "block_bytes": 10_000, "budget_bytes": 20 << 20}
    with (
        Writer("t", url=server.url, **tuned("Writer", settings, Tuning(notify=lambda _: None))) as writer,
        writer.epoch() as epoch,
    ):
        for number in range(200):
            epoch.write(block(number))
    with redis.Redis.from_url(server.url) as client, loader_of(server.url, "g", lease_s=0.6) as loader:
        batches = iter(loader)
        seen = next(batches).size
        producing = Producing(server.url, 50, paused=True, **settings)
        assert producing.is_open.wait(5)
        client.set("foreign", bytes(40 << 20))
        client.config_set("maxmemory", 30 << 20)
        producing.go_on.set()
        seen += next(batches).size
        assert producing.heard.wait(5), producing.error
        assert "maxmemory" in producing.said[-1]
        seen += sum(batch.size for batch in batches)  # leases renewed, batches acknowledged, the epoch closed
        assert seen == 200
        assert producing.thread.is_alive()
        with loader_of(server.url, "late"):  # joining works too
            pass
        client.delete("foreign")
        producing.finish()
        assert sum(batch.size for batch in loader) == 50


class TestSteps:
    """A step of all ranks together must fit the quota that is kept for the shard they wait for."""

    def stream(self, client: Client, url: str, spec: Any = WIDE, **settings: Any) -> Stream:
        """A stream of 1000-byte samples."""
        settings = {"budget_bytes": 1_000_000, "block_bytes": 10_000, **settings}
        with Writer("t", url=url, spec=spec, **tuned("Writer", settings, Tuning(notify=lambda _: None))):
            return load_stream(client, "t")

    def test_a_step_beyond_the_reserved_quarter_is_refused_with_the_budget_it_needs(
        self, any_url: str, any_client: Client
    ) -> None:
        """Found at the start, not after hours, and with the number that helps."""
        stream = self.stream(any_client, any_url)
        require_step_fits(stream, 230)
        with pytest.raises(TooLarge, match=r"a step of 231 samples is 226 KiB.*raise budget_bytes to 1004000"):
            require_step_fits(stream, 231)

    def test_the_budget_that_is_named_is_enough(self, any_url: str, any_client: Client) -> None:
        """A rounded one was refused with the same words."""
        settings: dict[str, Any] = {"spec": {"y": ("int64", ())}, "block_bytes": 1_000_000, "budget_bytes": 4_000_000}
        with pytest.raises(
            TooLarge,
            match=r"a step of 32 samples is 256 bytes, .* blocks around it \(3 of up to 977 KiB\) takes 2.9 MiB",
        ) as refused:
            require_step_fits(self.stream(any_client, any_url, **settings), 32, 2)
        advice = r": raise budget_bytes to (\d+), or make the stream again with block_bytes=(\d+) or less"
        found = re.search(advice, str(refused.value))
        assert found is not None
        assert "smaller batches" not in str(refused.value)
        enough, block = map(int, found.groups())
        assert str(refused.value).endswith(f"; penstock.Writer('t', budget_bytes={enough}).close() raises it")
        require_step_fits(self.stream(any_client, any_url, **settings | {"budget_bytes": enough}), 32, 2)
        with pytest.raises(TooLarge):
            require_step_fits(self.stream(any_client, any_url, **settings | {"budget_bytes": enough - 4}), 32, 2)
        delete_stream(any_client, "t")
        require_step_fits(self.stream(any_client, any_url, **settings | {"block_bytes": block}), 32, 2)

    def test_each_partition_has_its_own_part(self, any_url: str, any_client: Client) -> None:
        """A whole step may be in one partition."""
        stream = self.stream(any_client, any_url, partitions=2)
        require_step_fits(stream, 105)
        with pytest.raises(TooLarge, match=r"122 KiB.*a partition.*raise budget_bytes"):
            require_step_fits(stream, 106)

    def test_of_ragged_samples_nothing_is_known(self, any_url: str, any_client: Client) -> None:
        """Their sizes show only when they are made."""
        require_step_fits(self.stream(any_client, any_url, spec={"x": ("uint8", (None,))}), 1 << 30)


def test_a_sample_beyond_the_reserved_quarter_is_refused_at_its_first_write(any_url: str) -> None:
    """It might wait for ever: the error says which budget is too small."""
    with (
        Writer("t", url=any_url, budget_bytes=3999, tuning=Tuning(notify=lambda _: None)) as writer,
        pytest.raises(TooLarge, match=r"a quarter of the budget.*raise budget_bytes"),
        writer.epoch() as epoch,
    ):
        epoch.write(block(0))


class TestTheNote:
    """Writers that wait are seen by trainers and operators: a field of the roster while the wait lasts."""

    def test_a_writer_that_waits_says_so_in_its_roster_until_it_goes_on(self, url: str, client: Client) -> None:
        """A trainer that blocks its writers must learn that one waits, since when, and for how many bytes."""
        producing = Producing(url, 300)
        place, waiter = _awaited_waiter(client)
        assert place == (0, 0)
        assert (waiter.need_bytes, waiter.held_bytes, waiter.why, waiter.is_next) == (10_000, 91_000, "budget", True)
        assert list(StreamMonitor(client, "t").snapshot().waiting) == [(0, 0)]
        seen, since = waiter.seen_ms, waiter.since_ms
        while (waiter := _awaited_waiter(client)[1]).seen_ms == seen:
            assert ms_of(client.time()) - seen < 5000, "not renewed"
        assert abs(waiter.since_ms - since) < 200
        with loader_of(url, "g") as loader:
            assert sum(batch.size for batch in loader) == 300
        producing.finish()
        assert not _waiting_fields(client)

    def test_a_writer_that_gives_up_takes_its_note_away(self, any_url: str, any_client: Client) -> None:
        """Otherwise trainers would be warned of a writer that went home."""
        producing = Producing(any_url, 300, room_wait_s=1.2)
        _awaited_waiter(any_client)
        with pytest.raises(BudgetFull):
            producing.finish()
        assert not _waiting_fields(any_client)

    def test_the_note_of_a_dead_writer_counts_for_nothing_and_is_swept(self, any_url: str, any_client: Client) -> None:
        """Kill -9 takes no note away; a server that stood still makes all of them old."""
        with (
            Writer("t", url=any_url, spec=WIDE, tuning=Tuning(notify=lambda _: None)) as writer,
            writer.epoch() as epoch,
        ):
            epoch.write(block(0))
            roster = writer.stream.partitions[0].roster
            now = ms_of(any_client.time())
            note = {"since": 0, "seen": now, "need": 1, "held": 1, "why": "budget", "next": True}
            any_client.hset(roster, "w:0:0", json.dumps(note))
            any_client.hset(roster, "w:0:1", json.dumps({**note, "seen": now - STALE_MS - 1}))
            assert list(load_roster(any_client, writer.stream.partitions[0]).waiting) == [(0, 0)]
            expire_silent(any_client, writer.stream.partitions[0], 0)
            assert _waiting_fields(any_client) == {b"w:0:0"}
        assert release_epoch(any_client, writer.stream, 0)
        assert not _waiting_fields(any_client)


def _waiting_fields(client: Client) -> set[bytes]:
    (roster,) = (partition.roster for partition in load_stream(client, "t").partitions)
    return {field for field in client.hkeys(roster) if field.startswith(b"w:")}


def _awaited_waiter(client: Client) -> tuple[tuple[int, int], WaitingWriter]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        stream = find_stream(client, "t")
        waiting = load_roster(client, stream.partitions[0]).waiting if stream is not None else {}
        if waiting:
            return next(iter(waiting.items()))
        time.sleep(0.02)
    raise AssertionError("no writer says that it waits")


def test_a_share_of_the_budget_is_told_as_the_share_of_its_partition(any_url: str) -> None:
    """A user who gave 1 MB and reads of 262 kB that are full looks for another setting."""
    told: list[str] = []
    with (
        Writer(
            "t",
            url=any_url,
            spec={"x": ("uint8", (1000,))},
            partitions=4,
            budget_bytes=1 << 20,
            tuning=Tuning(block_bytes=10_000, room_wait_s=0.2, notify=told.append),
        ) as writer,
        pytest.raises(BudgetFull) as full,
        writer.epoch() as epoch,
    ):
        for _ in range(1000):
            epoch.write({"x": np.zeros(1000, np.uint8)})
    share = re.search(r"partition 0's share of the budget of 't' is full \((\d+) KiB of 256 KiB", str(full.value))
    assert share, str(full.value)
    one = QuotaState(90, 20, 100, is_next=True)
    assert explain_quota("t", one, ["g"], True).startswith("the budget of 't' is full")
