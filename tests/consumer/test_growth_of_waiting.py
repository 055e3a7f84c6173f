"""The server's work for waiting members and heartbeats, counted in commands and answers, not in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from penstock_common.stream.commands import Client
from penstock_common.stream.entries import list_held, list_overdue, pending_members
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.keys import RELEASED
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SPEC, open_stream, produce, sample

PARTITIONS = 8
SWEEPS = 30


def calls(client: Client) -> dict[str, int]:
    """Return command -> calls since the server was started."""
    return {name.removeprefix("cmdstat_"): one["calls"] for name, one in client.info("commandstats").items()}


@contextmanager
def waiting_member(url: str, planned: int, done: int) -> Iterator[None]:
    """Start a member that has read all entries of an epoch whose other shards are not made."""
    with Writer("t", url=url, spec=SPEC, partitions=PARTITIONS) as writer:
        epoch = writer.epoch(sizes=[1] * planned)
        read = threading.Event()

        def train() -> None:
            for count, batch in enumerate(loader, 1):
                assert batch
                if count == done:
                    read.set()

        with Loader("t", group="g", batch_size=1, url=url, tuning=Tuning(notify=lambda _: None)) as loader:
            thread = threading.Thread(target=train)
            thread.start()
            try:
                for number in range(done):
                    with epoch.shard(number) as shard:
                        shard.write(sample(number))
                assert read.wait(60)
                yield
            finally:
                epoch.abandon()
                thread.join(60)


def test_a_waiting_member_asks_all_partitions_at_once_and_reads_no_manifest_whole(
    any_url: str, any_client: Client
) -> None:
    """Hundreds of members may wait for one producer, and an epoch's manifest has a field for each complete shard."""
    with waiting_member(any_url, planned=60, done=40):
        before, deadline = calls(any_client), time.monotonic() + 120
        while True:
            now = calls(any_client)
            if now["xreadgroup"] - before["xreadgroup"] >= SWEEPS * PARTITIONS:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert now["hmget"] - before.get("hmget", 0) >= SWEEPS // 2  # it checks whether the epoch has ended
        assert now["hgetall"] - before["hgetall"] < SWEEPS // 2  # the lease renewer's
        assert now["time"] - before["time"] < SWEEPS * 4  # mostly in scripts: it does not ask for the time once a sweep


def test_what_living_members_hold_is_not_even_listed_to_those_who_look_for_the_dead(
    any_url: str, any_client: Client
) -> None:
    """If each of thirty members listed everything, the server would list it thirty times."""
    produce(any_url, "t", 100)
    stream = open_stream(any_client, "t")
    keys = [(stream.partitions[0], 0)]
    entries = stream.partitions[0].entries(0)
    any_client.xgroup_create(entries, "g", "0")
    given = any_client.xreadgroup("g", "living", {entries: ">"})[0][1]
    assert len(given) > 2
    assert list_overdue(any_client, keys, "g", 60_000) == []
    any_client.xclaim(entries, "g", RELEASED, 0, [given[0][0]], justid=True)
    assert [one.entry_id for _, one in list_overdue(any_client, keys, "g", 60_000)] == [given[0][0]]
    assert len(list_overdue(any_client, keys, "g", 0)) == len(given)
    assert [one.entry_id for _, one in list_held(any_client, keys, "g", "living")] == [one[0] for one in given[1:]]
    assert pending_members(any_client, keys, "g") == {"living": len(given) - 1, RELEASED: 1}
    assert release_epoch(any_client, stream, 0)
    assert pending_members(any_client, keys, "g") == {}
    assert list_overdue(any_client, keys, "g", 0) == []


ENTRIES, GAP_S = 40, 0.03
ROWS = {"x": np.zeros((4, 8), np.float32), "y": np.zeros(4, np.int64)}
SLOW_SPEC = {"x": ("float32", (8,)), "y": ("int64", ())}


def test_a_member_that_waits_for_entry_after_entry_asks_about_once_for_each(any_url: str, any_client: Client) -> None:
    """Among many members each gets one now and then, and a read that finds nothing wakes a process for nothing."""
    silent = threading.Event()
    with (
        Writer("slow", url=any_url, spec=SLOW_SPEC) as writer,
        writer.epoch(sizes=[4 * ENTRIES]) as epoch,
        Loader("slow", group="g", batch_size=4, url=any_url, tuning=Tuning(notify=lambda _: None)) as loader,
        epoch.shard(0) as shard,
    ):
        batches = iter(loader)
        for number in range(ENTRIES):
            if number == ENTRIES // 4:  # by now the usual interval is known
                before = calls(any_client)["xreadgroup"]
            shard.write_batch(ROWS)
            shard.flush()
            assert len(next(batches)["y"]) == 4
            silent.wait(GAP_S)
        asked = calls(any_client)["xreadgroup"] - before
    assert asked <= 1.5 * (ENTRIES - ENTRIES // 4)  # it was two for each, and three among other members


def test_a_member_among_many_is_given_a_few_entries_at_a_time(any_url: str, any_client: Client) -> None:
    """Thirty processes that wake in turns find their caches cold each time, so fewer wake-ups are better."""
    pause = threading.Event()
    with Writer("many", url=any_url, spec=SLOW_SPEC) as writer:
        for number in range(31):  # they hold nothing, and request nothing
            join_group(any_client, Membership(writer.stream, "g", f"silent-{number}", f"{number}"))
        with (
            writer.epoch(sizes=[4 * ENTRIES]) as epoch,
            epoch.shard(0) as shard,
            Loader("many", group="g", batch_size=4, url=any_url, tuning=Tuning(notify=lambda _: None)) as loader,
        ):
            batches = iter(loader)
            shard.write_batch(ROWS)
            shard.flush()
            assert next(batches)
            before = calls(any_client)["xreadgroup"]
            for _ in range(ENTRIES - 1):
                shard.write_batch(ROWS)
                shard.flush()
                pause.wait(GAP_S / 3)
            for _ in range(ENTRIES - 1):
                assert len(next(batches)["y"]) == 4
            asked = calls(any_client)["xreadgroup"] - before
    assert asked <= 0.8 * ENTRIES


KEPT, READ = 40, 5


def test_the_end_of_an_epoch_asks_nothing_about_those_that_follow(any_url: str, any_client: Client) -> None:
    """A new group reads hundreds of kept epochs, and each end would ask about all that are left."""
    with Writer("kept", url=any_url, spec=SLOW_SPEC) as writer:
        for _ in range(KEPT):
            with writer.epoch() as epoch:
                epoch.write_batch(ROWS)
    with Loader("kept", group="g", batch_size=4, url=any_url, tuning=Tuning(notify=lambda _: None)) as loader:
        for number in range(READ + 1):
            assert sum(len(batch["y"]) for batch in loader) == 4
            if not number:  # a new member looks at all of them, to learn where to begin
                before = calls(any_client)["xpending"]
        asked = calls(any_client)["xpending"] - before
    assert asked <= 4 * READ
