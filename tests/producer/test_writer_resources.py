"""A writer keeps one connection from shard to shard, reopens it when it was closed, and keeps no more than one."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest

from penstock_common.errors import EpochAbandoned, ServerUnavailable
from penstock_common.server.connection import open_channel
from penstock_common.stream.commands import Client
from penstock_producer.write.resources import SharedResources
from tests.clusters import until
from tests.contracts.feed import SPEC, replayed, sample, stored, writer_of

SHARDS = 60


def test_small_shards_share_a_connection(url: str, client: Client) -> None:
    """A thousand shards in an epoch must not mean a thousand logins."""
    with writer_of(url, spec=SPEC) as writer:
        epoch = writer.epoch(0, sizes=[1] * SHARDS)
        before = client.info("stats")["total_connections_received"]
        asked = client.info("commandstats").get("cmdstat_info", {"calls": 0})["calls"]
        for number in range(SHARDS):
            with epoch.shard(number) as shard:
                shard.write(sample(number))
        assert client.info("stats")["total_connections_received"] - before <= 2
        assert client.info("commandstats")["cmdstat_info"]["calls"] - asked <= SHARDS / 4
    assert replayed(url) == list(range(SHARDS))


def test_a_connection_that_was_closed_between_two_shards_is_replaced_without_a_word(url: str, client: Client) -> None:
    """A server may close idle connections, without a message and without a wait."""
    said: list[str] = []
    with writer_of(url, spec=SPEC, notify=said.append) as writer:
        epoch = writer.epoch(0, sizes=[1] * 4)
        for number in range(4):
            with epoch.shard(number) as shard:
                shard.write(sample(number))
            client.client_kill_filter(_type="normal", skipme=True)
    assert said == []
    assert replayed(url) == list(range(4))


def test_shards_that_are_open_at_once_have_connections_of_their_own(url: str, client: Client) -> None:
    """This holds also in threads, because the commands of two shards on one connection would be mixed."""
    with writer_of(url, spec=SPEC) as writer:
        epoch = writer.epoch(0, sizes=[20] * 8)
        with epoch.shard(7) as shard:  # leaves a connection to be fought for
            for number in range(20):
                shard.write(sample(number))

        def run(number: int) -> None:
            with epoch.shard(number) as shard:
                for offset in range(20):
                    shard.write(sample(offset))
                    shard.flush()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert epoch.refresh().state == "produced"
    assert stored(client, "t", 0) == {(shard, offset): 1 for shard in range(8) for offset in range(20)}


def test_a_shard_that_ended_badly_leaves_no_connection_behind(url: str, client: Client) -> None:
    """Answers may be under way on it: the next shard would take them for its own."""
    with writer_of(url, spec=SPEC) as writer:
        epoch = writer.epoch(0, sizes=[2, 2])
        with pytest.raises(KeyError), epoch.shard(0) as shard:
            shard.write(sample(0))
            shard.flush()
            ended, count = shard, len(client.client_list())
            raise KeyError
        until(lambda: len(client.client_list()) == count - 1)
        for number in range(2):
            with epoch.shard(number) as shard:
                while shard.position < 2:
                    shard.write(sample(shard.position))
        assert ended.committed < 2
    assert stored(client, "t", 0) == {(shard, offset): 1 for shard in range(2) for offset in range(2)}


def test_what_was_handed_over_is_closed_to_who_had_it(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that speak on one connection tear it; so would a forked child and its parent."""
    with writer_of(url, spec=SPEC) as writer:
        resources, first = SharedResources(writer.client, writer.stream, lambda _: None), open_channel(writer.client)
        resources.give_channel(first)
        with pytest.raises(ServerUnavailable, match="closed"):
            first.send([(b"PING",)])
        first.close()
        second = resources.take_channel()
        assert second is not None
        second.send([(b"PING",)])
        assert second.read() == b"PONG"
        resources.give_channel(second)
        forked = os.getpid() + 1
        monkeypatch.setattr(os, "getpid", lambda: forked)
        assert resources.take_channel() is None


@pytest.mark.parametrize("payload", ["inline", "segments"])
def test_a_shard_that_nobody_has_any_more_is_gone_at_once(any_url: str, memory_path: Path, payload: str) -> None:
    """Its arrays, its connection and its lock on a file would else wait for a collection of garbage."""
    settings = {} if payload == "inline" else {"payload": f"segments:{memory_path}"}
    with writer_of(any_url, spec=SPEC, **settings) as writer:
        epoch = writer.epoch(sizes=[20])
        shard = epoch.shard(0)
        for number in range(10):
            shard.write(sample(number))
        shard.commit_all()
        shard.abort()
        watched = weakref.ref(shard)
        gc.disable()
        try:
            del shard
            assert watched() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("trouble", ["script flush", "client kill"])
def test_a_shard_is_declared_complete_though_its_connection_or_the_script_is_gone(
    url: str, client: Client, trouble: str
) -> None:
    """The shard's own connection sends it, and may have been closed while the last samples were made."""
    said: list[str] = []
    with writer_of(url, spec=SPEC, notify=said.append) as writer:
        epoch = writer.epoch(0, sizes=[1] * 3)
        for number in range(3):
            with epoch.shard(number) as shard:
                shard.write(sample(number))
                shard.commit_all()
                if trouble == "script flush":
                    client.script_flush()
                else:
                    client.client_kill_filter(_type="normal", skipme=True)
        assert epoch.refresh().state == "produced"
        assert epoch.refresh().done == {0: 1, 1: 1, 2: 1}
    assert said == []
    assert replayed(url) == list(range(3))


def test_what_is_refused_as_a_shard_is_declared_complete_is_named(url: str, client: Client) -> None:
    """Its epoch may have been removed while it was made: that must not look like a broken connection."""
    with writer_of(url, spec=SPEC) as writer:
        epoch = writer.epoch(0, sizes=[1])
        shard = epoch.shard(0)
        shard.write(sample(0))
        shard.commit_all()
        client.hset(writer.stream.keys.manifest(0), "id", "another")
        with pytest.raises(EpochAbandoned, match=r"epoch 0 of .* was released, or removed and made again"):
            shard.close()
        shard.abort()
