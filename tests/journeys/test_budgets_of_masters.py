"""The budgets of streams count on the master that has the partition, when a stream is made and when slots move."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count

import pytest

import penstock
from penstock_common.errors import BudgetRefused
from penstock_common.stream.client import connect
from penstock_common.stream.servers.budgets import TELL_EVERY_S, BudgetWatch, default_budget
from penstock_common.stream.servers.embedded import find_servers
from penstock_common.stream.streams import load_stream
from penstock_producer.write.cleaner import CleanupTimer
from tests.clusters import Cluster, started_cluster, until

MIB = 1 << 20
MAXMEMORY = 100 * MIB  # streams may have 74 MiB of it


@pytest.fixture(scope="module")
def lasting() -> Iterator[Cluster]:
    """A cluster whose masters have a maxmemory."""
    with started_cluster(find_servers()[0], settings={"maxmemory": str(MAXMEMORY)}) as started:
        yield started


@pytest.fixture
def cluster(lasting: Cluster) -> Cluster:
    """Return the module's cluster, without keys."""
    lasting.empty()
    return lasting


def names_on(cluster: Cluster, number: int) -> Iterator[str]:
    """Yield names of streams whose own slot is on this master."""
    for at in count():
        if cluster.master_of(f"penstock:{{s{at}}}:meta") is cluster.masters[number]:
            yield f"s{at}"


def made(cluster: Cluster, name: str, budget: int | None, partitions: int = 1) -> list[str]:
    """Make a stream, and return the notices."""
    said: list[str] = []
    tuning = penstock.Tuning(notify=said.append)
    with penstock.Writer(name, url=cluster.url, budget_bytes=budget, partitions=partitions, tuning=tuning):
        return said


def test_a_stream_is_refused_where_a_master_has_no_room(cluster: Cluster) -> None:
    """The sum over all masters would fit, and the full one would make all its writers wait for ever."""
    here, there = names_on(cluster, 0), names_on(cluster, 1)
    made(cluster, next(here), 60 * MIB)
    made(cluster, next(there), 60 * MIB)
    where = f"redis://127.0.0.1:{cluster.masters[0].port}"
    with pytest.raises(BudgetRefused, match=rf"60 MiB of it on {where}, the other streams 60 MiB there; {where}'s"):
        made(cluster, next(here), 60 * MIB)
    with pytest.raises(BudgetRefused, match=r"of 90 MiB, 30 MiB of it on .*give a budget of at most 42 MiB"):
        made(cluster, next(here), 90 * MIB, partitions=3)
    made(cluster, next(here), 42 * MIB, partitions=3)
    with connect(cluster.url) as client, pytest.raises(BudgetRefused, match="no memory for stream"):
        assert default_budget(client, next(here), partitions=3) == 4_000_000
        made(cluster, next(here), None, partitions=3)


def test_a_stream_that_names_no_budget_leaves_half_on_each_master(cluster: Cluster) -> None:
    """Streams spread over the masters, so together they have the memory of all."""
    said = made(cluster, "a", None, partitions=3)
    with connect(cluster.url) as client:
        assert load_stream(client, "a").budget_bytes // MIB == 3 * 74 // 2
    told = re.search(
        r"takes a budget of 111 MiB, 37 MiB of it on redis://127\.0\.0\.1:(\d+), half of what the other streams leave "
        "there of maxmemory 100 MiB; budget_bytes",
        said[0],
    )
    assert told, said[0]
    assert int(told[1]) in {node.port for node in cluster.masters}


def test_a_moved_slot_that_overfills_a_master_is_said_once_a_minute(cluster: Cluster) -> None:
    """A move of slots checks no budget, and the writers on the overfilled master begin to wait."""
    mine, other = next(names_on(cluster, 0)), next(names_on(cluster, 1))
    made(cluster, mine, 60 * MIB)
    made(cluster, other, 50 * MIB)
    said: list[str] = []
    now = [0.0]
    with connect(cluster.url) as client:
        stream = load_stream(client, mine)
        watch = BudgetWatch(client, mine, said.append, clock=lambda: now[0])
        bystander = BudgetWatch(client, "elsewhere", said.append)
        timer_said: list[str] = []
        timer = CleanupTimer(client.impatient(), stream, timer_said.append, every_s=0.05)
        timer.start()
        watch.check()
        assert said == []
        cluster.move_slot_of(stream.keys.meta)  # to the second master
        client.look_around()
        for each in (watch, bystander):
            each.check()
        (line,) = said
        where = f"redis://127.0.0.1:{cluster.masters[1].port}"
        assert f"slots have moved: the budgets on {where} come to 110 MiB, and its maxmemory 100 MiB" in line
        assert f"'{mine}' (60 MiB)" in line
        assert f"'{other}' (50 MiB)" in line
        assert f"`penstock partitions {mine}` says how" in line
        cluster.move_slot_of("some other key")
        client.look_around()
        now[0] = TELL_EVERY_S - 1
        watch.check()
        assert len(said) == 1
        now[0] = TELL_EVERY_S
        watch.check()
        assert len(said) == 2
        until(lambda: timer_said)
        timer.stop()
        assert timer_said[0] == line
