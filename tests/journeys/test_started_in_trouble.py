"""A server in trouble at a start: a server that answered once is waited for, and any other gives an error soon.

A replay waits for its server for as long as its lease keeps the epoch.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock_common.errors import ServerUnavailable
from penstock_common.server.connection import GREETING_S
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import join_group, load_roster
from penstock_common.stream.manifest import PRODUCED, retained_epochs
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, numbers, open_stream, produce, sample
from tests.journeys.trouble import CuttingProxy
from tests.tuned import tuned

Fresh = Callable[..., EmbeddedServer]
Door = Callable[[], str]
COUNT = 60
GREETING_BYTES = 60
"""Fewer than the first words of a client."""


@contextmanager
def cutting(server: EmbeddedServer, seed: int) -> Iterator[Door]:
    """Ways to a server on which no connection lives for long, and the first not for its first words."""
    with ExitStack() as stack:
        seeds = count(100 * seed)

        def another() -> str:
            proxy = CuttingProxy(server.url, next(seeds), 2000, GREETING_BYTES)
            stack.callback(proxy.close)
            return proxy.url

        yield another


@pytest.mark.parametrize("seed", [1, 2])
def test_who_starts_while_connections_are_cut_bears_it_as_who_is_running(
    any_server: EmbeddedServer, any_client: Client, seed: int
) -> None:
    """Writer, trainer and replay: from the first word to the last, and each step counts once however often asked."""
    said: list[str] = []
    with cutting(any_server, seed) as url:
        with Writer(
            "t", url=url(), spec=SPEC, tuning=Tuning(block_bytes=4 * SAMPLE_BYTES, notify=said.append)
        ) as writer:
            for _ in range(2):
                with writer.epoch(sizes=[COUNT // 2] * 2) as epoch:
                    for shard in range(2):
                        with epoch.shard(shard) as part:
                            for offset in range(COUNT // 2):
                                part.write(sample(shard * COUNT // 2 + offset))
        stream = open_stream(any_client, "t")
        assert retained_epochs(any_client, stream) == {0: PRODUCED, 1: PRODUCED}
        with Loader("t", group="g", batch_size=7, url=url(), tuning=Tuning(notify=said.append, lease_s=5)) as loader:
            given = [numbers(loader) for _ in range(2)]
        assert [sorted(one) for one in given] == [list(range(COUNT))] * 2
        rank: dict[str, Any] = {"order": "canonical", "rank": 0, "world_size": 1}
        with Loader(
            "t", group="o", batch_size=7, url=url(), **tuned("Loader", rank, Tuning(notify=said.append))
        ) as loader:
            assert numbers(loader) == list(range(COUNT))
        with Replay("t", epoch=1, batch_size=7, url=url(), tuning=Tuning(notify=said.append)) as replay:
            assert numbers(replay) == list(range(COUNT))
            assert sorted(numbers(replay)) == list(range(COUNT))
    greeted = [line for line in said if "while connecting" in line and f"trying again for {GREETING_S:.0f} s" in line]
    assert len(greeted) == 4
    roster = load_roster(any_client, stream.partitions[0])
    assert sorted(roster.groups) == ["g", "o"]
    assert {("g", 0), ("g", 1)} <= roster.closed


STARTS: dict[str, Callable[[str], Loader | Replay | Writer]] = {
    "writer": lambda url: Writer("t", url=url, spec=SPEC, tuning=Tuning(notify=lambda _: None)),
    "loader": lambda url: Loader("t", group="g", batch_size=1, url=url, tuning=Tuning(notify=lambda _: None)),
    "replay": lambda url: Replay("t", epoch=0, batch_size=1, url=url, tuning=Tuning(notify=lambda _: None)),
}


@pytest.mark.parametrize("who", STARTS)
def test_a_server_that_was_never_there_is_told_at_once_and_one_that_hangs_up_soon(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistyped port and a port that needs TLS must not cost a minute of waiting."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = f"redis://127.0.0.1:{probe.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(ServerUnavailable, match=f"no Redis answers at {free} .*penstock server"):
        STARTS[who](free)
    assert time.monotonic() - began < 3
    monkeypatch.setattr("penstock_common.server.connection.GREETING_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as door:

        def slam() -> None:
            with suppress(OSError):
                while True:
                    door.accept()[0].close()

        threading.Thread(target=slam, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(ServerUnavailable, match=r"closed the connection .*rediss:// if it wants TLS"):
            STARTS[who](f"redis://127.0.0.1:{door.getsockname()[1]}")
        assert 1 <= time.monotonic() - began < 10
        door.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("who", STARTS)
def test_a_server_that_is_full_when_somebody_starts_is_waited_for(fresh_server: Fresh, who: str) -> None:
    """It answers, so the address is right, and the program that fills it may end soon."""
    server = fresh_server()
    produce(server.url, "t", 10)
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("maxclients", 1)
        timer = threading.Timer(1.0, lambda: admin.config_set("maxclients", 1000))
        timer.start()
        began = time.monotonic()
        STARTS[who](server.url).close()
        timer.join()
    assert 1 <= time.monotonic() - began < 30


def test_a_full_server_is_told_as_a_refusal_with_the_time_that_is_left(
    fresh_server: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who reads the line again wants to know for how long. Nothing was wrong with the connection."""
    server = fresh_server()
    produce(server.url, "t", 10)
    monkeypatch.setattr("penstock_common.waiting.REPEAT_S", 1.0)
    monkeypatch.setattr("penstock_common.server.connection.OUTAGE_S", 3.0)
    said: list[str] = []
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("maxclients", 1)
        with pytest.raises(ServerUnavailable, match="takes no more clients"):
            Writer("t", url=server.url, spec=SPEC, tuning=Tuning(notify=said.append))
    told = [line.rpartition("; ")[2] for line in said if line.startswith("the server refused while connecting (")]
    assert told[:2] == ["trying again for 3 s", "trying again for 2 s"]


def test_an_outage_longer_than_its_patience_ends_a_start_with_what_to_do(
    fresh_server: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that dies between two steps of a start is waited for, and named in the end."""
    server = fresh_server()
    produce(server.url, "t", 10)

    def join_after_its_death(*args: Any, **settings: Any) -> int:
        server.kill()
        return join_group(*args, **settings)

    monkeypatch.setattr("penstock_consumer.read.loader.OUTAGE_S", 1.5)
    monkeypatch.setattr("penstock_consumer.read.claims.join_group", join_after_its_death)
    said: list[str] = []
    began = time.monotonic()
    with pytest.raises(ServerUnavailable, match=f"no Redis answers at {server.address} .*penstock server"):
        Loader("t", group="g", batch_size=1, url=server.url, tuning=Tuning(notify=said.append))
    assert 1.5 <= time.monotonic() - began < 20
    assert any("trying again for 2 s" in line for line in said)


@pytest.mark.parametrize("shuffle", [None, 3])
def test_a_replay_goes_on_when_its_server_is_back(fresh_server: Fresh, tmp_path: Path, shuffle: int | None) -> None:
    """The batches are the same as without the restart, because unanswered requests are sent again."""
    settings: dict[str, Any] = {"appendonly": True, "directory": tmp_path, "extra": {"appendfsync": "always"}}
    server = fresh_server(**settings)
    produce(server.url, "t", 400, block_samples=2)
    said: list[str] = []
    with Replay(
        "t",
        epoch=0,
        batch_size=4,
        url=server.url,
        tuning=Tuning(prefetch_bytes=500, notify=said.append),
        shuffle=shuffle,
    ) as replay:
        replay.set_pass(0)
        whole = numbers(replay)
        assert sorted(whole) == list(range(400))
        replay.set_pass(0)
        batches = iter(replay)
        begun = numbers(islice(batches, 20))
        server.kill()
        time.sleep(0.5)
        fresh_server(port=server.port, **settings)
        assert begun + numbers(batches) == whole
    assert any("the connection broke while reading" in line for line in said)


def test_a_replay_ends_when_its_server_is_away_for_longer_than_its_lease(fresh_server: Fresh) -> None:
    """After that the epoch is no longer kept, and a replay that leaves does not wait either."""
    server = fresh_server()
    produce(server.url, "t", 400, block_samples=2)
    began = time.monotonic()
    with (
        pytest.raises(ServerUnavailable, match=f"no Redis answers at {server.address}"),
        Replay("t", epoch=0, batch_size=4, url=server.url, tuning=Tuning(prefetch_bytes=500, lease_s=1.5)) as replay,
    ):
        for number, _ in enumerate(replay):
            if number == 10:
                server.kill()
                began = time.monotonic()
    assert 1 <= time.monotonic() - began < 15
