"""Leases between real processes: who is dead, slow, paused, doubled or leaving, and what becomes of its entries."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock_common.errors import PenstockError
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.groups import presence
from penstock_common.stream.groups.roster import load_roster
from penstock_common.tuning import LEASE_S, Tuning
from penstock_consumer.read.heartbeat import LOOKS_PER_LEASE
from penstock_consumer.read.loader import Loader
from tests.contracts.feed import open_stream, produce
from tests.contracts.processes import child
from tests.journeys.trouble import Lines

COUNT, BATCH, BLOCK = 300, 10, 7


def train(
    url: str, member: str, lease_s: str, step_s: str = "0", slow: str = "-1", wall: str = "", ahead: str = "3000"
) -> None:
    """A trainer: prints each batch before its step, and how it ended. Step number ``slow`` says so and takes 60 s.

    With ``wall`` the local wall clock jumps hours to and fro; ``ahead`` is how many bytes it reads ahead; SIGTERM ends
    it as `sys.exit` would.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if wall:
        jumps = iter(range(1 << 30))
        time.time = lambda: 1e9 + (next(jumps) % 7 - 3) * 3600.0
        time.time_ns = lambda: int(time.time() * 1e9)
    try:
        with Loader(
            "t",
            group="g",
            batch_size=BATCH,
            url=url,
            tuning=Tuning(member=member, lease_s=float(lease_s), prefetch_bytes=int(ahead)),
        ) as loader:
            for step, batch in enumerate(loader):
                print(*batch["y"].tolist(), flush=True)
                if step == int(slow):
                    print("middle", flush=True)
                    time.sleep(60)
                time.sleep(float(step_s))
        print("done", flush=True)
    except PenstockError as error:
        print(f"ended {type(error).__name__}: {error}", flush=True)


def train_elsewhere(*arguments: str) -> None:
    """Train in a process that no other process can see, as on another host or without /proc."""
    presence._PROC = Path("/proc/none")
    train(*arguments)


def numbers(*sides: Lines) -> Counter[int]:
    """Count the samples that any of these processes was given."""
    return Counter(int(w) for side in sides for line in side.lines if line[:1].isdigit() for w in line.split())


def require_acknowledged(url: str) -> None:
    """Require that no sample is lost and none is unacknowledged."""
    with connect(url) as client:
        report = audit_stream(client, "t")
    assert report.is_clean
    assert not report.pending
    assert not report.unread


@contextmanager
def holder(url: str, lease_s: float, run: Callable[..., None] = train) -> Any:
    """A trainer that stands in its third step with a full queue."""
    with child(run, url, "holds", lease_s, 0, 2) as process:
        lines = Lines(process)
        while "middle" not in lines.lines:
            assert process.process.poll() is None, process.errors()
            time.sleep(0.01)
        yield lines


def test_what_a_dead_member_held_is_handed_out_within_a_lease_and_a_look(any_url: str) -> None:
    """The stated time: lease_s since its last sign of life, and a sixth of it until the others look."""
    lease_s = 5.0
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    with holder(any_url, lease_s, train_elsewhere) as dead, child(train, any_url, "lives", lease_s) as process:
        lives = Lines(process)
        lives.until(1)
        dead.child.process.kill()
        began = time.monotonic()
        assert lives.end() == "done", lives.child.errors()
        took = time.monotonic() - began
    # a machine that does much else is slow to read the rest, and two leases would be a fault
    assert lease_s * 0.8 <= took <= lease_s * (1 + 2 / LOOKS_PER_LEASE) + 4, took
    found = numbers(dead, lives)
    assert set(found) == set(range(COUNT))
    assert found.total() - COUNT <= BATCH  # the step it died in
    require_acknowledged(any_url)


def test_a_trainer_that_follows_a_killed_one_on_its_host_has_a_batch_within_five_seconds(
    any_url: str, any_client: Any
) -> None:
    """A user who restarts a training after a crash should not wait for a lease."""
    produce(any_url, "t", 60, block_samples=BLOCK)
    partition = open_stream(any_client, "t").partitions[0]
    with holder(any_url, LEASE_S) as dead:
        dead.child.process.kill()
        with child(train, any_url, "follows", LEASE_S) as process:
            follows = Lines(process)
            while ("g", "follows") not in load_roster(any_client, partition).members:
                assert process.process.poll() is None, process.errors()
                time.sleep(0.01)
            joined = time.monotonic()  # how long Python starts is not the matter here
            follows.until(1)
            took = time.monotonic() - joined
            assert follows.end() == "done", process.errors()
            assert "member 'holds' has ended on this host" in process.errors()
    assert took < 5, took
    found = numbers(dead, follows)
    assert set(found) == set(range(60))
    assert found.total() - 60 <= BATCH  # the step it died in
    require_acknowledged(any_url)


def test_a_step_longer_than_a_lease_loses_nothing(any_url: str) -> None:
    """A trainer that evaluates for minutes between two batches lives, and a separate thread renews its leases."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    with child(train, any_url, "slow", 0.4, 0.8, -1, "", 1000) as first:  # it holds five batches: five long steps
        slow = Lines(first)
        slow.until(1)
        with child(train, any_url, "quick", 0.4) as second:
            quick = Lines(second)
            assert slow.end() == quick.end() == "done"
            assert "lost" not in first.errors()
    assert numbers(slow, quick) == Counter(range(COUNT))
    require_acknowledged(any_url)


def test_a_member_paused_for_longer_than_a_lease_hands_out_nothing_that_is_anothers(any_url: str) -> None:
    """SIGSTOP, a frozen container, a laptop's lid: twice is at most the step in hand, and it says what it lost."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    with child(train, any_url, "paused", 1, 0.3) as first:
        paused = Lines(first)
        paused.until(3)
        first.process.send_signal(signal.SIGSTOP)
        with child(train, any_url, "lives", 1, 0.02) as second:
            lives = Lines(second)
            before = len(paused.lines)
            while not set(range(before * BATCH)) <= set(numbers(paused, lives)) or len(numbers(lives)) < COUNT - 150:
                time.sleep(0.01)
            time.sleep(2.5)  # more than a lease and a look
            first.process.send_signal(signal.SIGCONT)
            assert lives.end() == "done", second.errors()
            assert paused.end() == "done", first.errors()
            assert "member 'paused' lost" in first.errors()
    found = numbers(paused, lives)
    assert set(found) == set(range(COUNT))
    assert found.total() - COUNT <= BATCH
    require_acknowledged(any_url)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_member_that_is_stopped_in_order_hands_back_at_once(any_url: str, how: signal.Signals) -> None:
    """Scaling down costs no lease: not the 600 s that it would have here."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    with holder(any_url, 600) as leaves, redis.Redis.from_url(any_url) as admin:
        entries = open_stream(admin, "t").partitions[0].entries(0)
        leaves.child.process.send_signal(how)
        began = time.monotonic()
        while {b"holds"} & {one["name"] for one in admin.xpending(entries, "g")["consumers"]}:
            assert time.monotonic() - began < 1  # what docs/internals/trouble.md promises
            time.sleep(0.002)
        print(f"handed back in {time.monotonic() - began:.3f} s")
        with child(train, any_url, "goes.on", 600) as process:
            goes_on = Lines(process)
            assert goes_on.end(60) == "done", process.errors()
        found = numbers(leaves, goes_on)
    assert set(found) == set(range(COUNT))
    assert found.total() - COUNT <= BATCH
    require_acknowledged(any_url)


def test_a_server_clock_that_jumps_takes_nothing_from_the_living(any_url: str, any_client: Any) -> None:
    """An idle time is the difference of two readings of the server's clock; after a step all are huge."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    entries = open_stream(any_client, "t").partitions[0].entries(0)
    with child(train, any_url, "one", 1, 0.3) as first, child(train, any_url, "two", 1, 0.3) as second:
        one, two = Lines(first), Lines(second)
        one.until(1)
        two.until(1)
        for _ in range(20):
            for entry in any_client.xpending_range(entries, "g", "-", "+", 1000):
                holder_is = entry["consumer"].decode()
                any_client.xclaim(entries, "g", holder_is, 0, [entry["message_id"]], idle=10**9, justid=True)
            time.sleep(0.1)
        assert one.end() == two.end() == "done"
        assert "lost" not in first.errors() + second.errors()
    assert numbers(one, two) == Counter(range(COUNT))


def test_a_local_wall_clock_that_jumps_has_no_influence(any_url: str) -> None:
    """NTP, a suspended laptop, a wrong time zone: leases are counted on clocks that only go on."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    with (  # thirty steps that last until both are there, also where starting takes seconds
        child(train, any_url, "one", 1, 0.3, -1, "jumps") as first,
        child(train, any_url, "two", 1, 0.3, -1, "jumps") as second,
    ):
        one, two = Lines(first), Lines(second)
        assert one.end() == two.end() == "done", first.errors() + second.errors()
        assert "lost" not in first.errors() + second.errors()
    assert numbers(one, two) == Counter(range(COUNT))
    require_acknowledged(any_url)


@pytest.mark.parametrize("stands_still", [False, True])
def test_of_two_processes_with_one_member_name_the_older_stops_by_name(any_url: str, stands_still: bool) -> None:
    """A container that was thought dead: the newer one goes on with what the older held, and may have left already."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    with child(train, any_url, "same", 1, 0.5) as first:
        older = Lines(first)
        older.until(3)
        if stands_still:
            first.process.send_signal(signal.SIGSTOP)
        with child(train, any_url, "same", 1) as second:
            newer = Lines(second)
            assert newer.end() == "done", second.errors()
            first.process.send_signal(signal.SIGCONT)
            assert older.end().startswith("ended MemberReplaced: another process joined group 'g' as member 'same'")
    found = numbers(older, newer)
    assert set(found) == set(range(COUNT))
    require_acknowledged(any_url)
