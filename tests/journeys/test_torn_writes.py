"""A primary dies whose replica lacks the newest blocks, and writers send again what no replica had confirmed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from chaos.cluster import low_port
from penstock_common.errors import ShardMismatch
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, open_stream, replayed, sample, writer_of
from tests.contracts.processes import child
from tests.journeys.test_producing_outage import (
    await_committed,
    command,
    committed,
    produce_words,
    require_exactly_once,
)
from tests.sentinels import SERVER_PASSWORD, Service, started_service, until
from tests.torn import TornPair, torn_service
from tests.torn_slots import partition_slot

FIRST, CUT, ALL = 100, 200, 300
"""Samples that the replica has, samples at the failover, and samples in the end."""
levels = pytest.mark.parametrize("level", ["auto", "replicas=1"])


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A primary, a replica, and Sentinels."""
    with started_service(find_servers()[0], tmp_path) as made:
        yield made


@contextmanager
def failed_over(service: Service, pair: TornPair) -> Iterator[None]:
    """The replica has taken over, and another replica follows it."""
    pair.fail_over()
    follow = {"replicaof": f"127.0.0.1 {pair.replica.port}", "masterauth": SERVER_PASSWORD}
    with EmbeddedServer(find_servers()[0], port=low_port(), password=SERVER_PASSWORD, extra=follow):
        with redis.Redis.from_url(pair.replica.url) as admin:
            until(lambda: admin.info("replication").get("slave0", {}).get("state") == "online")
        yield


def torn_writer(service: Service, level: str, said: list[str], **settings: Any) -> Writer:
    """A writer with four samples in a block."""
    settings = {"block_bytes": 4 * SAMPLE_BYTES, "durability": level, "notify": said.append, **settings}
    return writer_of(service.url, spec=SPEC, **settings)


def require_all(service: Service, count: int) -> None:
    """Require that each sample is there once, and that the audit agrees."""
    assert replayed(service.url) == list(range(count))
    with connect(service.url) as client:
        assert audit_stream(client, "t").findings == []


def write_samples(target: Any, first: int, end: int) -> None:
    """Write consecutive samples by a writer, an epoch or a shard."""
    for number in range(first, end):
        target.write(sample(number))


def write_torn(target: Any, pair: TornPair) -> None:
    """Write `FIRST` samples that the replica has, and then samples up to `CUT` that it lacks."""
    write_samples(target, 0, FIRST)
    target.flush()
    pair.cut_off()
    write_samples(target, FIRST, CUT)


@levels
def test_an_epoch_loses_nothing_that_no_replica_had(service: Service, level: str) -> None:
    """The epoch would otherwise be abandoned for the last blocks of a dead server."""
    said: list[str] = []
    with torn_writer(service, level, said) as writer, torn_service(service) as pair:
        epoch = writer.epoch()
        write_torn(epoch, pair)
        with failed_over(service, pair):
            write_samples(epoch, CUT, ALL)
            epoch.close()
            require_all(service, ALL)
    assert sum("sending them again" in line for line in said) == 1


@levels
@pytest.mark.parametrize("begins_cut", [False, True], ids=["shard-replicated", "epoch-lost"])
def test_a_feed_loses_nothing_that_no_replica_had(service: Service, level: str, begins_cut: bool) -> None:
    """A feed cannot be made again. If its epoch is lost as a whole, its samples go into the next one."""
    said: list[str] = []
    with torn_writer(service, level, said) as writer, torn_service(service) as pair:
        if begins_cut:
            pair.cut_off()
            write_samples(writer, 0, CUT)
        else:
            write_torn(writer, pair)
        with failed_over(service, pair):
            write_samples(writer, CUT, ALL)
            writer.close()
            require_all(service, ALL)


def test_a_primary_that_just_took_over_may_lose_what_it_wrote_without_a_replica(service: Service) -> None:
    """It has no replica for a moment. One that comes then may take its place in the middle of a block."""
    said: list[str] = []
    with torn_writer(service, "auto", said) as writer:
        epoch = writer.epoch()
        write_samples(epoch, 0, FIRST)
        epoch.flush()
        former = service.fail("kill")
        until(lambda: service.primary() is not former)
        write_samples(epoch, FIRST, FIRST + 8)
        epoch.flush()
        with connect(service.url) as client:
            older = partition_slot(client, open_stream(client, "t"), 0)
            write_samples(epoch, FIRST + 8, CUT)
            epoch.flush()
            older.restore(client)
            client.client_kill_filter(_type="normal", skipme=True)
        write_samples(epoch, CUT, ALL)
        epoch.close()
        require_all(service, ALL)
    assert sum("sending them again" in line for line in said) == 1


def test_a_replica_that_was_given_up_may_take_over(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `auto` the writer waits for it, and goes on after 10 s. What it writes then is kept while space lasts."""
    monkeypatch.setattr("penstock_common.stream.servers.durability.AUTO_S", 1.0)
    said: list[str] = []
    with torn_writer(service, "auto", said) as writer, torn_service(service) as pair:
        epoch = writer.epoch(sizes=[ALL])
        shard = epoch.shard(0)
        write_torn(shard, pair)
        shard.commit_all()
        assert any("no replica of" in line for line in said)
        write_samples(shard, CUT, CUT + 20)
        shard.flush()
        with failed_over(service, pair):
            write_samples(shard, CUT + 20, ALL)
            shard.close()
            require_all(service, ALL)
    assert sum("sending them again" in line for line in said) == 1


@pytest.mark.parametrize("level", ["auto", "replicas=1", "memory"])
def test_jobs_lose_nothing_in_silence(
    service: Service,
    fresh_server: Callable[..., EmbeddedServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    level: str,
) -> None:
    """A worker sends again what no replica had. With `memory` its job makes again what is lost."""
    hold = tmp_path / "hold"
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(hold))
    produced = produce_words(service.url, fresh_server().url, 2, "held_up")
    words = [*produced, "--no-shuffle", "--durability", level]
    # the production must not end before the master dies: with `memory` no worker would be left to make samples again
    hold.write_text("60")
    with torn_service(service) as pair, child(command, 60, *words) as process:
        await_committed(service.url, 20, process)
        pair.cut_off()
        hold.write_text("100")
        await_committed(service.url, committed(service.url) + 4, process)
        with failed_over(service, pair):
            hold.unlink()
            process.rest(120)
            require_exactly_once(pair.replica.url)


@levels
def test_a_shard_that_waits_at_its_end_is_sent_again(service: Service, level: str) -> None:
    """The end of a shard is the last moment at which its blocks can be sent again."""
    said: list[str] = []
    with torn_writer(service, level, said) as writer, torn_service(service) as pair:
        epoch = writer.epoch(sizes=[CUT])
        shard = epoch.shard(0)
        write_torn(shard, pair)
        close = threading.Thread(target=shard.close)
        close.start()
        until(lambda: any("0 of 1 replicas have it" in line for line in said))
        with failed_over(service, pair):
            close.join(20)
            assert not close.is_alive()
            assert shard.position == CUT
            require_all(service, CUT)


def test_more_than_is_kept_ends_the_epoch_by_name(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `auto` the oldest blocks are dropped where a replica stays away. A hole must never look complete."""
    monkeypatch.setattr("penstock_producer.write.unconfirmed.UNCONFIRMED_BYTES", 20 * SAMPLE_BYTES)
    said: list[str] = []
    with torn_writer(service, "auto", said) as writer, torn_service(service) as pair:
        epoch = writer.epoch()
        write_torn(epoch, pair)
        with failed_over(service, pair), pytest.raises(ShardMismatch, match="the server lost data"):
            write_samples(epoch, CUT, ALL)
            epoch.close()


def test_memory_names_what_is_lost(service: Service) -> None:
    """With `memory` nothing is kept, and the loss must be an error."""
    said: list[str] = []
    with torn_writer(service, "memory", said) as writer, torn_service(service) as pair:
        epoch = writer.epoch()
        write_torn(epoch, pair)
        pair.fail_over()
        with pytest.raises(ShardMismatch, match="the server lost data"):
            write_samples(epoch, CUT, ALL)
            epoch.close()
    assert any(f"offsets {FIRST}-" in line for line in said), said
