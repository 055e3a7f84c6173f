"""The server stops, restarts, refuses or is cut off while processes write and train: they go on, and all adds up."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.__main__ import main
from penstock.cli.doctor import BAD
from penstock.views.exporter import StreamMetrics
from penstock_common.explain.monitor import StreamMonitor
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers, server_label
from penstock_common.tuning import Tuning
from penstock_producer.write.writer import Writer
from tests.clusters import until
from tests.contracts.feed import produce, stored
from tests.contracts.processes import child
from tests.journeys.trouble import (
    BATCH,
    SPEC,
    CuttingProxy,
    Lines,
    all_samples,
    require_clean,
    train,
    trained,
    write,
)

Fresh = Callable[..., EmbeddedServer]
COUNT = 800
UNANSWERED = 8
"""Batches whose acknowledgement a crash may lose (outbox.UNANSWERED); they are trained on again."""


@contextmanager
def both(url: str, *, count: int = COUNT, epochs: int = 1, lease_s: float = 2) -> Iterator[tuple[Lines, Lines]]:
    """A writer and a trainer, both past their start."""
    with child(write, url, count, 0.004, epochs) as writing, child(train, url, "m", epochs, lease_s) as training:
        writer, trainer = Lines(writing), Lines(training)
        writer.until(10)
        trainer.until(3)
        yield writer, trainer


def require_all(
    url: str, writer: Lines, trainer: Lines, *, epochs: int = 1, count: int = COUNT, crashes: int = 0
) -> None:
    """Both ended well, everything was trained on, and not more of it twice than the crashes allow."""
    assert writer.end() == "done", writer.child.errors()
    assert trainer.end() == "done", trainer.child.errors()
    found = trained(trainer.lines)
    assert set(found) == all_samples(count, epochs)
    assert found.total() - len(found) <= crashes * (UNANSWERED + 1) * BATCH
    require_clean(url)


@pytest.mark.parametrize("sync", ["always", "everysec"])
def test_a_server_killed_twice_and_restarted_with_its_append_only_file_loses_nothing(
    fresh_server: Fresh, tmp_path: Path, sync: str
) -> None:
    """A crash of the server process: what it had acknowledged is in its file, and both sides go on by themselves."""
    settings: dict[str, Any] = {"appendonly": True, "directory": tmp_path, "extra": {"appendfsync": sync}}
    server = fresh_server(**settings)
    url, port = server.url, server.port
    with both(url) as (writer, trainer):
        for _ in range(2):
            server.kill()
            time.sleep(0.5)
            server = fresh_server(port=port, **settings)
            trainer.until(len(trainer.lines) + 20)
        require_all(url, writer, trainer, crashes=2)


def test_a_lost_tail_of_the_append_only_file_is_named_and_a_job_started_again_mends_it(
    fresh_server: Fresh, tmp_path: Path
) -> None:
    """With `everysec` a power cut loses the last second. The gap is always found, and a retried job fills it."""
    settings: dict[str, Any] = {"appendonly": True, "directory": tmp_path, "extra": {"appendfsync": "everysec"}}
    server = fresh_server(**settings)
    url, port = server.url, server.port
    with both(url) as (writer, trainer):
        writer.until(80)
        server.kill()
        (log,) = [path for path in tmp_path.rglob("*.aof") if ".base." not in path.name]
        os.truncate(log, log.stat().st_size - 30_000)  # some twenty blocks, and in the middle of a command
        fresh_server(port=port, **settings)
        last = writer.end()
        assert last.startswith("ended ShardMismatch"), last
        assert "the server lost data" in last
        with child(write, url, COUNT, 0) as again:
            assert Lines(again).end() == "done"
        assert trainer.end() == "done", trainer.child.errors()
        assert set(trained(trainer.lines)) == all_samples(COUNT)
        require_clean(url)


def test_a_server_that_stands_still_longer_than_a_lease_takes_nothing_from_the_living(fresh_server: Fresh) -> None:
    """Every lease ages while the server sleeps, and no member may count as dead for that."""
    server = fresh_server()
    with (
        child(write, server.url, COUNT, 0.02) as writing,
        child(train, server.url, "m", 1, 1) as first,
        child(train, server.url, "other", 1, 1) as second,
    ):
        writer, trainer, other = Lines(writing), Lines(first), Lines(second)
        trainer.until(1)
        other.until(1)
        for _ in range(2):
            os.kill(server.pid, signal.SIGSTOP)
            time.sleep(2.5)
            os.kill(server.pid, signal.SIGCONT)
            time.sleep(0.5)
        assert writer.end() == trainer.end() == other.end() == "done"
        found = trained(trainer.lines + other.lines)
        assert set(found) == all_samples(COUNT)
        assert found.total() == COUNT
        assert "lost" not in trainer.child.errors() + other.child.errors()
        require_clean(server.url)


@pytest.mark.parametrize("seed", [1, 2])
def test_connections_cut_in_the_middle_of_a_payload_lose_and_double_nothing(
    any_server: EmbeddedServer, seed: int
) -> None:
    """Half a command, half an answer, an answer that never comes: again and again, both ways, for every connection."""
    count = 4 * COUNT  # a writer receives far fewer bytes than it sends, so fewer answers are cut than commands
    proxy = CuttingProxy(any_server.url, seed, longest=12_000)
    try:
        with child(write, proxy.url, count, 0) as writing, child(train, proxy.url) as training:
            writer, trainer = Lines(writing), Lines(training)
            assert writer.end() == "done", writer.child.errors()
            trainer.until(count // BATCH * 3 // 4)
            proxy.calm = True  # a connection may die with the last acknowledgement in it, which is then said
            assert trainer.end() == "done", trainer.child.errors()
    finally:
        proxy.close()
    assert min(proxy.cuts.values()) >= 5, proxy.cuts
    found = trained(trainer.lines)
    assert set(found) == all_samples(count)
    assert found.total() == count
    with redis.Redis.from_url(any_server.url) as client:
        assert set(stored(client, "t", 0).values()) == {1}
    require_clean(any_server.url)


def test_every_connection_killed_again_and_again_costs_nothing(any_server: EmbeddedServer) -> None:
    """An operator, a proxy's idle timeout, `timeout 60` in redis.conf: control connections die like those for data."""
    chance = random.Random(3)
    with redis.Redis.from_url(any_server.url) as admin, both(any_server.url, epochs=3, count=400) as (writer, trainer):
        kinds: set[str] = set()
        while not (writer.lines[-1] == "done" and trainer.lines[-1] == "done"):
            for info in admin.client_list():
                if info["id"] != str(admin.client_id()) and chance.random() < 0.3:
                    kinds |= {info["cmd"]} if admin.client_kill_filter(_id=info["id"]) else set()
            time.sleep(0.05)
            assert writer.child.process.poll() in (None, 0), writer.child.errors()
        assert len(kinds) >= 4, kinds
        require_all(any_server.url, writer, trainer, epochs=3, count=400)


def test_a_server_that_is_a_read_only_replica_for_a_while_is_waited_for(fresh_server: Fresh) -> None:
    """In the middle of a failover the address still leads to the old primary, which takes no writes."""
    server = fresh_server()
    with redis.Redis.from_url(server.url) as admin, both(server.url) as (writer, trainer):
        admin.replicaof("127.0.0.1", 1)
        time.sleep(3)
        admin.replicaof("NO", "ONE")
        require_all(server.url, writer, trainer)
        for side in (writer, trainer):
            assert "is a read-only replica: connect to its primary); trying again" in side.child.errors()


def test_a_script_that_keeps_the_server_busy_is_waited_for(fresh_server: Fresh) -> None:
    """Another client's long script makes the server answer BUSY to everyone."""
    server = fresh_server(extra={"lua-time-limit": "50"})
    with redis.Redis.from_url(server.url, socket_timeout=30) as other, both(server.url) as (writer, trainer):
        stop = threading.Timer(2, lambda: redis.Redis.from_url(server.url).script_kill())
        stop.start()
        with pytest.raises(redis.ResponseError, match=r"(?i)killed by user"):
            other.eval("while true do end", 0)
        require_all(server.url, writer, trainer)
        assert "kept busy by a script" in writer.child.errors() + trainer.child.errors()


def test_a_server_that_loads_for_longer_than_an_outage_lasts_is_waited_for(fresh_server: Fresh, tmp_path: Path) -> None:
    """Reading a large append-only file takes minutes; the server says so, and that is not counted."""
    settings: dict[str, Any] = {"appendonly": True, "directory": tmp_path}
    server = fresh_server(extra={"appendfsync": "no"}, **settings)
    url, port = server.url, server.port
    with (
        child(write, url, COUNT, 0.01, 1, 2) as writing,
        child(train, url, "m", 1, 2, 2) as training,
    ):
        writer, trainer = Lines(writing), Lines(training)
        with redis.Redis.from_url(url) as admin, admin.pipeline(transaction=False) as pipe:
            for _ in range(20_000):
                pipe.incr("filler")
            pipe.execute()
        trainer.until(20)
        server.kill()
        slow = {"key-load-delay": "200"}  # us for each command; it answers after every thousand
        server = fresh_server(port=port, extra=slow, **settings)  # returns once it has loaded
        require_all(url, writer, trainer, crashes=1)
        for side in (writer, trainer):
            assert "is still loading its data" in side.child.errors()


def test_a_server_that_takes_no_more_clients_is_waited_for(fresh_server: Fresh) -> None:
    """A process whose connection broke at that moment must not die of it."""
    server = fresh_server()
    with redis.Redis.from_url(server.url) as admin, both(server.url) as (writer, trainer):
        admin.config_set("maxclients", 1)
        admin.client_kill_filter(_type="normal", skipme=True)
        time.sleep(2)
        admin.config_set("maxclients", 1000)
        require_all(server.url, writer, trainer)


@pytest.mark.parametrize("executable", find_servers(), ids=server_label)
def test_a_server_that_cannot_write_its_disk_is_looked_at_and_named(
    fresh_server: Fresh, tmp_path: Path, capsys: pytest.CaptureFixture[str], executable: Path
) -> None:
    """It refuses a PING like a write. That is when an operator needs the commands that only read."""
    server = fresh_server(executable, directory=tmp_path / "data", extra={"save": "3600 1"})
    produce(server.url, "t", 20)
    (tmp_path / "data").rmdir()  # no snapshot can be written, also as root
    with redis.Redis.from_url(server.url) as admin:
        admin.bgsave()
        until(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err")
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            admin.ping()
    refusal = f"Redis at {server.address} takes no writes now (MISCONF"

    def ran(*argv: str) -> tuple[int, str, str]:
        status = main([*argv, "--url", server.url])
        return status, *capsys.readouterr()

    for argv in (
        ["inspect"], ["inspect", "t"], ["stat", "t", "--no-lease"], ["show", "t", "--no-lease"],
        ["epochs", "list", "t"], ["partitions", "t"], ["audit", "t"], ["tail", "t", "--once"],
        ["groups", "list", "t"], ["bad", "list", "t"],
    ):  # fmt: skip
        status, out, err = ran(*argv)
        assert (status, bool(out)) == (0, True), (argv, err)
        assert err.startswith(f"penstock: {refusal}") if argv[0] == "inspect" else not err, argv
    _, out, _ = ran("monitor", "t", "--once", "--json")
    (seen,) = json.loads(out)
    assert seen["bottleneck"]["cause"] == "writes refused"
    assert seen["bottleneck"]["text"].startswith(refusal)
    assert "see whether its disk is full, and its log" in seen["bottleneck"]["text"]
    status, out, _ = ran("doctor", "--all")
    assert status == BAD
    assert "server, persistence: the last write of the snapshot failed" in out
    assert "server, throughput: not measured: the server takes no writes now" in out
    assert "server, login: needs a password" in out
    for argv in (["delete", "t", "--yes"], ["export", "t", str(tmp_path / "out")], ["epochs", "pin", "t", "0"]):
        status, _, err = ran(*argv)
        assert (status, all(words in err for words in refusal.split("MISCONF"))) == (1, True), (argv, err)
    metrics = StreamMetrics(has_queue=False)
    with connect(server.url) as client:
        metrics.take({}, StreamMonitor(client, "t").snapshot().servers)
    values = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    assert (values["penstock_node_up"], values["penstock_node_takes_writes"]) == (1, 0)


def test_an_epoch_opened_at_maxmemory_waits_and_says_so(fresh_server: Fresh) -> None:
    """If other keys fill the server for a while, opening an epoch waits as a block does."""
    server = fresh_server(maxmemory_bytes=100 << 20)
    said: list[str] = []
    opened: list[int] = []
    with (
        redis.Redis.from_url(server.url) as admin,
        Writer("t", url=server.url, spec=SPEC, budget_bytes=16 << 20, tuning=Tuning(notify=said.append)) as writer,
    ):
        admin.config_set("maxmemory", 1)
        opening = threading.Thread(target=lambda: opened.append(writer.epoch().number))
        opening.start()
        opening.join(1)
        assert not opened
        assert any("is above its maxmemory and takes no writes: raise maxmemory" in line for line in said)
        admin.config_set("maxmemory", 100 << 20)
        opening.join(20)
    assert opened == [0]
