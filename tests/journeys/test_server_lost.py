"""If the server lost everything, or never comes back, each process stops with a named error."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis

from penstock_common.errors import StreamDeleted
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import Writer
from tests.contracts.processes import child
from tests.journeys.trouble import BATCH, SPEC, Lines, payload, train, write

Fresh = Callable[..., EmbeddedServer]
COUNT = 100_000
"""More than is ever written here."""


@contextmanager
def both(url: str, outage_s: float = 60) -> Iterator[tuple[Lines, Lines]]:
    """A writer and a trainer in the middle of an epoch, who bear an outage so long."""
    with (
        child(write, url, COUNT, 0.004, 1, outage_s) as writing,
        child(train, url, "m", 1, 2, outage_s) as training,
    ):
        writer, trainer = Lines(writing), Lines(training)
        writer.until(10)
        trainer.until(3)
        yield writer, trainer


def require_named(writer: Lines, trainer: Lines, error: str, words: str, timeout_s: float = 30) -> None:
    """Both ended with this error and these words."""
    for side in (writer, trainer):
        last = side.end(timeout_s)
        assert last.startswith(f"ended {error}: "), (last, side.child.errors())
        assert words in last


def test_a_server_restarted_without_its_data_stops_writer_and_trainer_by_name(fresh_server: Fresh) -> None:
    """Continuing would leave an epoch with a part that never existed."""
    server = fresh_server()
    with both(server.url) as sides:
        server.kill()
        time.sleep(0.3)
        fresh_server(port=server.port, password=server.password)
        require_named(*sides, "StreamDeleted", "the server lost its data")


@pytest.mark.parametrize("again", [False, True])
def test_a_flushed_server_stops_writer_and_trainer_by_name(fresh_server: Fresh, again: bool) -> None:
    """FLUSHALL in the wrong window; another stream made under the name at once must not be taken for the old one."""
    server = fresh_server()
    with redis.Redis.from_url(server.url) as admin, both(server.url) as sides:
        admin.flushall()
        if again:
            with child(write, server.url, 8) as anew:
                require_named(*sides, "StreamDeleted", "the server lost its data")
                assert Lines(anew).end() == "done"
        else:
            require_named(*sides, "StreamDeleted", "the server lost its data")
            assert admin.keys() == []  # and no process leaves half a stream behind


def test_a_trainer_of_a_flushed_server_shows_one_error(url: str) -> None:
    """A traceback that begins with another error sends its reader to the wrong cause."""
    with Writer("t", url=url, spec=SPEC) as writer:
        shard = writer.epoch(0, sizes=[BATCH + 1]).shard(0)
        for number in range(BATCH):
            shard.write({"x": payload(0, number), "epoch": 0, "y": number})
        shard.commit_all()
        with Loader("t", group="g", batch_size=BATCH, url=url) as loader, redis.Redis.from_url(url) as admin:
            batches = iter(loader)
            next(batches)
            admin.flushall()
            with pytest.raises(StreamDeleted) as told:
                next(batches)
        shard.abort()
    assert "EpochNotFound" not in "".join(traceback.format_exception(told.value))


def test_a_read_only_replica_that_is_never_promoted_ends_both_with_what_to_do(fresh_server: Fresh) -> None:
    """After a failover the URL leads to the wrong server: the message says so, first as a wait, then as an error."""
    server = fresh_server()
    with redis.Redis.from_url(server.url) as admin, both(server.url, outage_s=3) as sides:
        admin.replicaof("127.0.0.1", 1)
        require_named(*sides, "WritesRefused", "is a read-only replica: connect to its primary")
        for side in sides:
            assert "trying again for 3 s" in side.child.errors()


def test_a_server_that_never_comes_back_ends_both_after_the_stated_time(fresh_server: Fresh) -> None:
    """It must not be at once, because servers restart, and it must come at some time."""
    server = fresh_server()
    with both(server.url, outage_s=3) as sides:
        server.kill()
        began = time.monotonic()
        require_named(*sides, "ServerUnavailable", f"no Redis answers at {server.address}")
        assert time.monotonic() - began >= 3
