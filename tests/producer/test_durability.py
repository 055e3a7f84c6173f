"""Durability levels: what counts as committed is where the level says, or the writer says what lacks, then stops."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.__main__ import main
from penstock_common.errors import BadOption, DurabilityLost, ServerUnsuitable
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.commands import server_ms
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.servers.durability import Durability, ReplicaWatch
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers, server_label
from penstock_common.stream.streams import create_stream
from penstock_common.wire.block import Block
from penstock_producer.write.unconfirmed import UnconfirmedBlocks
from penstock_producer.write.writer import WriterHooks
from tests.clusters import until
from tests.contracts.feed import SAMPLE_BYTES, SPEC, open_stream, replayed, sample, stored, writer_of

Fresh = Callable[..., EmbeddedServer]
COUNT = 40

every_server = pytest.mark.parametrize(
    "executable", find_servers() or [None], ids=lambda e: server_label(e) if e else "none"
)


def durable_writer(url: str, level: str | None, **settings: Any) -> Any:
    """A writer with four samples in a block."""
    return writer_of(url, spec=SPEC, block_bytes=4 * SAMPLE_BYTES, durability=level, **settings)


def calls(server: EmbeddedServer, command: str) -> int:
    """Return how often the server received a command."""
    with redis.Redis.from_url(server.url) as client:
        return int(client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


@contextmanager
def stopped(server: EmbeddedServer) -> Iterator[None]:
    """The server's process stands still."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.fixture
def pair(fresh_server: Fresh, request: pytest.FixtureRequest) -> tuple[EmbeddedServer, EmbeddedServer]:
    """A primary and a replica that follows it, of the executable the test is given."""
    executable = request.node.callspec.params["executable"] if hasattr(request.node, "callspec") else find_servers()[0]
    primary = fresh_server(executable, extra={"repl-diskless-sync": "no"})
    follow = {"replicaof": f"127.0.0.1 {primary.port}", "masterauth": primary.password}
    replica = fresh_server(executable, extra=follow)
    with redis.Redis.from_url(primary.url) as client:
        deadline = time.monotonic() + 30
        while client.info("replication").get("slave0", {}).get("state") != "online":
            assert time.monotonic() < deadline
            time.sleep(0.02)
    return primary, replica


@every_server
def test_fsync_is_kept_where_the_server_can_and_refused_where_it_cannot(fresh_server: Fresh, executable: Path) -> None:
    """A user who requests the disk must get the disk, or an error before the first sample."""
    server = fresh_server(executable, appendonly=True, extra={"appendfsync": "always"})
    with redis.Redis.from_url(server.url) as client:
        can = "waitaof" in client.command()
    if not can:
        with pytest.raises(ServerUnsuitable, match=r"'fsync' cannot be kept .* it has no WAITAOF"):
            durable_writer(server.url, "fsync")
        return
    with durable_writer(server.url, "fsync") as writer, writer.epoch() as epoch:
        for number in range(COUNT):
            epoch.write(sample(number))
    assert calls(server, "waitaof") >= 3  # behind the first block, at the end of the shard, and at the epoch's
    server.kill()
    again = fresh_server(executable, appendonly=True, extra={"appendfsync": "always"})
    with pytest.raises(ServerUnsuitable, match="append-only"):
        durable_writer(fresh_server(executable).url, "fsync")
    again.close()


@every_server
def test_a_committed_block_is_on_the_replica(pair: tuple[EmbeddedServer, EmbeddedServer], executable: Path) -> None:
    """The primary may burn down the moment flush has returned; the end of the epoch counts like a block."""
    primary, replica = pair
    with redis.Redis.from_url(replica.url) as copy, durable_writer(primary.url, "replicas=1") as writer:
        with writer.epoch() as epoch:
            for number in range(COUNT):
                epoch.write(sample(number))
                if number % 8 == 7:
                    epoch.flush()
                    assert stored(copy, "t", 0).total() == number + 1
        assert copy.hget(open_stream(copy, "t").keys.manifest(0), "state") == b"produced"
    assert calls(primary, "wait") >= COUNT / 8 + 1  # at each flush, and at the epoch's end


def test_a_replica_that_stands_still_is_waited_for_and_named(pair: tuple[EmbeddedServer, EmbeddedServer]) -> None:
    """Within five seconds the writer says what it waits for, and goes on when it has come."""
    primary, replica = pair
    said: list[str] = []
    with durable_writer(primary.url, "replicas=1", notify=said.append) as writer, writer.epoch() as epoch:
        for number in range(8):
            epoch.write(sample(number))
        epoch.flush()
        with stopped(replica):
            write = threading.Thread(target=lambda: [epoch.write(sample(n)) for n in range(8, 16)] and epoch.flush())
            write.start()
            deadline = time.monotonic() + 5
            while not any("0 of 1 replicas have it" in line for line in said):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert write.is_alive()
        write.join(20)
        assert not write.is_alive()
    assert replayed(primary.url) == list(range(16))
    with redis.Redis.from_url(replica.url) as copy:
        assert stored(copy, "t", 0).total() == 16


def test_an_explicit_level_keeps_no_more_unconfirmed_blocks_than_it_could_send_again(
    pair: tuple[EmbeddedServer, EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover loses what the replicas lack, and the writer must have all of it."""
    monkeypatch.setattr("penstock_producer.write.unconfirmed.UNCONFIRMED_BYTES", 16 * SAMPLE_BYTES)
    primary, replica = pair
    said: list[str] = []
    with durable_writer(primary.url, "replicas=1", notify=said.append) as writer, writer.epoch() as epoch:
        for number in range(4):
            epoch.write(sample(number))
        epoch.flush()
        with stopped(replica), redis.Redis.from_url(primary.url) as admin:
            write = threading.Thread(target=lambda: [epoch.write(sample(n)) for n in range(4, 60)] and epoch.flush())
            write.start()
            deadline = time.monotonic() + 20
            while not any("0 of 1 replicas have it" in line for line in said):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert 4 + 12 <= stored(admin, "t", 0).total() <= 4 + 20  # several blocks, and not all of them
        write.join(20)
        assert not write.is_alive()
    assert replayed(primary.url) == list(range(60))


def test_auto_never_waits_for_a_replica_while_it_writes(
    pair: tuple[EmbeddedServer, EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that stands still costs an answer of 20 ms a second, and the end of a shard one limited wait."""
    monkeypatch.setattr("penstock_producer.write.unconfirmed.UNCONFIRMED_BYTES", 8 * SAMPLE_BYTES)
    monkeypatch.setattr("penstock_common.stream.servers.durability.AUTO_S", 1.5)
    primary, replica = pair
    said: list[str] = []
    with durable_writer(primary.url, "auto", notify=said.append) as writer, writer.epoch() as epoch:
        for number in range(4):
            epoch.write(sample(number))
        epoch.flush()
        with stopped(replica):
            began = time.monotonic()
            for number in range(4, 200):
                epoch.write(sample(number))
            assert time.monotonic() - began < 1
            epoch.flush()
            assert 1.5 <= time.monotonic() - began < 6
            assert sum("no replica of" in line for line in said) == 1
            assert f"127.0.0.1:{primary.port}" in "".join(said)
            began = time.monotonic()
            epoch.write(sample(200))
            epoch.flush()
            assert time.monotonic() - began < 1
    assert replayed(primary.url) == list(range(201))


class ChosenLevel(ReplicaWatch):
    """A watch that reports that replicas follow, until ``is_followed`` is False."""

    def __init__(self) -> None:
        self.is_followed = True

    def level(self, durability: Durability, key: str, *, is_followed: bool = False) -> Durability:
        """See ReplicaWatch."""
        return durability.on(is_followed or self.is_followed)

    def may_be_replaced(self, key: str) -> bool:
        """The server is no successor, and no replica was given up."""
        return False


def test_blocks_that_are_still_to_be_sent_again_are_kept_where_no_replica_follows() -> None:
    """After a failover the only replica is gone, and each block is sent separately to a server that has none."""
    watch = ChosenLevel()
    kept = UnconfirmedBlocks(Durability.parse("auto"), watch, "key", time.monotonic)
    blocks = [Block(first, 10, []) for first in range(0, 30, 10)]
    for block in blocks:
        kept.committed(block, {}, kept.level())
    watch.is_followed = False
    kept.committed(blocks[0], {}, kept.level())
    assert [one.block for one in kept.all()] == blocks[1:]
    kept.committed(blocks[2], {}, kept.level())
    assert kept.all() == []


def test_a_block_is_kept_whose_answer_comes_after_its_server_was_replaced() -> None:
    """Until its replica answers, the successor has no replica. It may lack the block, which must be sent again then."""
    watch = ChosenLevel()
    kept = UnconfirmedBlocks(Durability.parse("auto"), watch, "key", time.monotonic)
    block, sent_at = Block(0, 10, []), kept.level()
    watch.is_followed = False
    kept.committed(block, {}, sent_at)
    assert [one.block for one in kept.all()] == [block]


def test_a_replica_that_does_not_come_back_is_waited_for_until_the_job_must_stop(
    pair: tuple[EmbeddedServer, EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failover a pair has no replica for a while, which must not end every writer with a level."""
    monkeypatch.setattr("penstock_common.waiting.REPEAT_S", 1.0)
    monkeypatch.setattr("penstock_common.waiting.FIRST_WORD_S", 0.5)
    primary, replica = pair
    said: list[str] = []
    with durable_writer(primary.url, "replicas=1", notify=said.append) as writer:
        stopping = threading.Event()
        WriterHooks(writer).stop_when(stopping.is_set)
        epoch = writer.epoch()
        epoch.write(sample(0))
        epoch.flush()
        with stopped(replica):
            threading.Timer(4, stopping.set).start()
            with pytest.raises(DurabilityLost, match=r"stopped after . s .*'replicas=1': 0 of 1 replicas have it"):
                epoch.close()
            assert sum("0 of 1 replicas have it" in line for line in said) >= 2
        stopping.clear()
        second = writer.epoch()
        second.write(sample(0))
        with stopped(replica):
            stopping.set()
            with pytest.raises(DurabilityLost, match="0 of 1 replicas"):
                second.flush()


def test_a_new_connection_does_not_answer_for_what_the_broken_one_wrote(
    pair: tuple[EmbeddedServer, EmbeddedServer],
) -> None:
    """WAIT is documented to count its own connection's writes: a fresh one must not say yes to all that was before."""
    primary, replica = pair
    with durable_writer(primary.url, "replicas=1") as writer, writer.epoch() as epoch:
        for number in range(4):
            epoch.write(sample(number))
        epoch.flush()
        with stopped(replica), redis.Redis.from_url(primary.url) as admin:
            flush = threading.Thread(target=lambda: [epoch.write(sample(n)) for n in range(4, 8)] and epoch.flush())
            flush.start()
            while stored(admin, "t", 0).total() < 8:
                time.sleep(0.01)
            assert admin.client_kill_filter(_type="normal", skipme=True) > 0
            flush.join(1.5)
            assert flush.is_alive()
        flush.join(20)
        assert not flush.is_alive()


def test_fewer_replicas_than_asked_for_are_refused_at_opening(any_url: str, any_client: Any) -> None:
    """An error after an hour of work would come too late; the stream is left as it was."""
    with pytest.raises(ServerUnsuitable, match=r"needs 2 replicas, .* has 0 that follow"):
        durable_writer(any_url, "replicas=2")
    assert any_client.keys() == []


def test_a_writer_of_a_stream_with_replicas_starts_without_them_and_waits(
    pair: tuple[EmbeddedServer, EmbeddedServer], fresh_server: Fresh
) -> None:
    """After the failover of a pair no replica follows, and jobs that are begun then must not fail."""
    primary, replica = pair
    with durable_writer(primary.url, "replicas=1"):
        pass
    replica.kill()
    with redis.Redis.from_url(primary.url) as admin:
        until(lambda: admin.info("replication")["connected_slaves"] == 0)
    said: list[str] = []
    with durable_writer(primary.url, "replicas=1", notify=said.append) as writer:

        def write() -> None:
            with writer.epoch() as epoch:
                epoch.write(sample(0))

        thread = threading.Thread(target=write)
        thread.start()
        until(lambda: any("0 of 1 replicas have it" in line for line in said))
        assert thread.is_alive()
        fresh_server(extra={"replicaof": f"127.0.0.1 {primary.port}", "masterauth": primary.password})
        thread.join(20)
        assert not thread.is_alive()
    assert replayed(primary.url) == [0]


def test_the_level_is_the_streams_and_holds_for_every_writer(pair: tuple[EmbeddedServer, EmbeddedServer]) -> None:
    """Jobs open the stream by its name, and its promise must not depend on the writer."""
    primary, _replica = pair
    with durable_writer(primary.url, "replicas=1"):
        pass
    before = calls(primary, "wait")
    with durable_writer(primary.url, None) as writer, writer.epoch() as epoch:
        epoch.write(sample(0))
    assert calls(primary, "wait") >= before + 2
    with durable_writer(primary.url, "memory") as writer, writer.epoch() as epoch:
        now = calls(primary, "wait")
        epoch.write(sample(0))
    assert calls(primary, "wait") == now


@pytest.mark.parametrize(
    ("text", "fsync", "replicas"),
    [
        ("memory", False, 0),
        ("fsync", True, 0),
        ("replicas=2", False, 2),
        ("fsync+replicas=12", True, 12),
    ],
)
def test_levels_are_read_and_written_alike(text: str, fsync: bool, replicas: int) -> None:
    """The stream must store exactly the level that was typed."""
    assert Durability.parse(text) == Durability(fsync, replicas)
    assert str(Durability(fsync, replicas)) == text


def test_auto_asks_for_one_replica_where_one_follows() -> None:
    """It must not ask for more than a failover of one server needs, nor for a replica that is not there."""
    auto = Durability.parse("auto")
    assert str(auto) == "auto"
    assert (auto.on(0), auto.on(1), auto.on(3)) == (Durability(), Durability(replicas=1), Durability(replicas=1))
    explicit = Durability.parse("fsync+replicas=2")
    assert explicit.on(0) == explicit


def test_a_new_stream_is_auto_and_earlier_versions_read_memory(any_url: str, any_client: Any) -> None:
    """An earlier version refuses a level that it does not know. It writes to the same streams during an upgrade."""
    with durable_writer(any_url, None) as writer:
        assert writer.stream.durability == "auto"
    assert any_client.hget("penstock:{t}:meta", "durability") == b"memory"
    for level in ("replicas=1", "memory", "auto", "fsync"):
        create_stream(connect(any_url), "t", durability=level)
        assert open_stream(any_client, "t").durability == level
        stored = any_client.hget("penstock:{t}:meta", "durability").decode()
        assert stored == ("memory" if level == "auto" else level)


def test_a_stream_of_an_earlier_version_keeps_its_level(any_url: str, any_client: Any) -> None:
    """An upgrade must not change what an operator measured."""
    with durable_writer(any_url, None):
        any_client.hdel("penstock:{t}:meta", "replicas")
    with durable_writer(any_url, None) as writer:
        assert writer.stream.durability == "memory"


def test_auto_without_a_replica_costs_no_command(fresh_server: Fresh) -> None:
    """Most streams are on one server, and must not pay for a replica that does not exist."""
    server = fresh_server(find_servers()[0])
    with durable_writer(server.url, "auto") as writer:
        for _ in range(3):
            with writer.epoch() as epoch:
                for number in range(COUNT):
                    epoch.write(sample(number))
    assert calls(server, "wait") == 0


@pytest.mark.parametrize("text", ["", "disk", "replicas", "replicas=0", "replicas=-1", "+replicas=1", "memory+fsync"])
def test_an_unknown_level_is_refused_with_those_there_are(any_url: str, text: str) -> None:
    """A typo must not mean `memory`."""
    with pytest.raises(BadOption, match=r"expected one of auto, memory, fsync, replicas=K, fsync\+replicas=K"):
        durable_writer(any_url, text)


def test_the_manifest_and_the_audit_say_what_was_written_without_a_replica(
    fresh_server: Fresh, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a loss an operator asks which samples no other server had."""
    caplog.set_level("INFO", logger="penstock")
    server = fresh_server(find_servers()[0])
    client = connect(server.url)
    with durable_writer(server.url, "auto") as writer:
        with writer.epoch(sizes=[COUNT, COUNT]) as epoch:
            for number in (1, 0):
                with epoch.shard(number) as shard:
                    for offset in range(COUNT):
                        shard.write(sample(offset))
        assert sum(f"127.0.0.1:{server.port}" in line and "no replica" in line for line in caplog.messages) == 1
        for number in range(COUNT):
            writer.write(sample(number))
    for found, ends in zip(audit_stream(client, "t").epochs, ([COUNT, COUNT], [COUNT]), strict=True):
        assert [(one.shard, one.first, one.end) for one in found.unreplicated] == [
            (shard, 0, end) for shard, end in enumerate(ends)
        ]
        assert all(f":{server.port}" in one.server for one in found.unreplicated)
    assert main(["audit", "t", "--url", server.url]) == 0
    assert main(["epochs", "list", "t", "--url", server.url]) == 0
    assert "no replica" not in capsys.readouterr().out  # all of it, as on every single server
    with durable_writer(server.url, "memory") as writer, writer.epoch() as epoch:
        epoch.write(sample(0))
    assert audit_stream(client, "t").epochs[-1].unreplicated == []


def test_bad_samples_are_no_reason_to_warn_of_a_server_without_a_replica(
    any_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record of bad samples alone has no entry, at the end of a shard or as the whole of one."""
    with durable_writer(any_url, "auto", partitions=2) as writer, writer.epoch(sizes=[5, 1, 4]) as epoch:
        for number, bad in enumerate(((4,), (0,), ())):
            with epoch.shard(number) as shard:
                for offset in range(4 if not bad else bad[0]):
                    shard.write(sample(offset))
                shard.commit_all()
                for _ in bad:
                    shard.quarantine("truncated")
    for command in (["audit", "t"], ["epochs", "list", "t"]):
        assert main([*command, "--url", any_url]) == 0
        assert "no replica" not in capsys.readouterr().out
    assert main(["audit", "t", "--url", any_url, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["epochs"]
    assert [(one["shard"], one["first"], one["end"]) for one in found["unreplicated"]] == [
        (0, 0, 5),
        (1, 0, 1),
        (2, 0, 4),
    ]
    assert len({one["server"] for one in found["unreplicated"]}) == 1


def is_past(client: Any, key: str, at_ms: int) -> bool:
    """Return whether the server of a key has another time than this one."""
    return server_ms(client, key) > at_ms


def test_the_last_block_that_a_replica_confirmed_is_not_noted(any_url: str, any_client: Any) -> None:
    """An operator would write samples again that a replica has."""
    with durable_writer(any_url, "auto") as writer, writer.epoch(sizes=[12]).shard(0) as shard:
        ids: list[bytes] = []
        for number in range(12):
            shard.write(sample(number))
            if number % 4 == 3:
                shard.commit_all()
                entries = any_client.xrange(writer.stream.partitions[0].entries(0))
                ids = [entry_id for entry_id, _ in entries]
                newest = int(ids[-1].partition(b"-")[0])
                until(partial(is_past, any_client, writer.stream.keys.meta, newest))
        shard._committer._unconfirmed.answered(8, is_confirmed=True)
    (written,) = load_manifest(any_client, writer.stream, 0).unreplicated
    assert written.first_ms == written.last_ms == int(ids[2].partition(b"-")[0])


def test_only_what_the_replica_missed_is_noted(
    pair: tuple[EmbeddedServer, EmbeddedServer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples that were confirmed before the replica stopped survive a failover."""
    monkeypatch.setattr("penstock_common.stream.servers.durability.AUTO_S", 1.0)
    primary, replica = pair
    with durable_writer(primary.url, "auto") as writer:
        epoch = writer.epoch(sizes=[2 * COUNT])
        shard = epoch.shard(0)
        for number in range(COUNT):
            shard.write(sample(number))
        shard.commit_all()
        time.sleep(0.01)  # the ids of entries have milliseconds
        with stopped(replica):
            for number in range(COUNT, 2 * COUNT):
                shard.write(sample(number))
            shard.close()
    assert main(["audit", "t", "--url", primary.url]) == 0
    said = capsys.readouterr().out
    assert f"had no replica: shard 0 offsets {COUNT}-{2 * COUNT - 1}\n" in said
    assert str(primary.port) in said
    assert main(["epochs", "list", "t", "--url", primary.url]) == 0
    assert f"had no replica: shard 0 offsets {COUNT}-{2 * COUNT - 1}\n" in capsys.readouterr().out
    assert main(["epochs", "list", "t", "--json", "--url", primary.url]) == 0
    (epoch,) = json.loads(capsys.readouterr().out)
    (written,) = epoch["unreplicated"]
    assert (written["shard"], written["first"], written["end"]) == (0, COUNT, 2 * COUNT)
    assert f":{primary.port}" in written["server"]
