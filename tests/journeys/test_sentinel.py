"""Sentinels promote a replica in the middle of an epoch, and the writer and the loader go on with the new primary."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock_common.errors import ServerUnavailable
from penstock_common.server.connection import open_channel
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers, server_label
from tests.clusters import low_port

Fresh = Callable[..., EmbeddedServer]
SERVER_PASSWORD, SENTINEL_PASSWORD = "of-servers", "of-sentinels"
SAMPLES = 400


class Trio:
    """A primary, a replica and three Sentinels that watch them as service ``feed``."""

    def __init__(self, executable: Path, folder: Path, fresh_server: Fresh) -> None:
        login = {"masterauth": SERVER_PASSWORD}
        self.primary = fresh_server(executable, password=SERVER_PASSWORD, extra=login)
        replica_of = {"replicaof": f"127.0.0.1 {self.primary.port}", **login}
        self.replica = fresh_server(executable, password=SERVER_PASSWORD, extra=replica_of)
        with redis.Redis.from_url(self.replica.url) as replica:
            _until(lambda: replica.info("replication")["master_link_status"] == "up")
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ports: list[int] = []
        for number in range(3):
            home = folder / str(number)
            home.mkdir()
            self.ports.append(low_port())
            (home / "sentinel.conf").write_text(
                f"port {self.ports[-1]}\nbind 127.0.0.1\ndir {home}\nrequirepass {SENTINEL_PASSWORD}\n"
                f"sentinel sentinel-pass {SENTINEL_PASSWORD}\n"
                f"sentinel monitor feed 127.0.0.1 {self.primary.port} 2\nsentinel auth-pass feed {SERVER_PASSWORD}\n"
                "sentinel down-after-milliseconds feed 500\nsentinel failover-timeout feed 3000\n"
            )
            command = [str(executable), str(home / "sentinel.conf"), "--sentinel"]
            quiet = subprocess.DEVNULL
            self._processes.append(subprocess.Popen(command, stdout=quiet, stderr=quiet))
            with redis.Redis(port=self.ports[-1], password=SENTINEL_PASSWORD) as sentinel:
                _until(lambda: sentinel.ping())
        for port in self.ports:
            with redis.Redis(port=port, password=SENTINEL_PASSWORD) as sentinel:
                _until(lambda: _knows_all(sentinel))

    @property
    def url(self) -> str:
        """The address of the service, with both logins."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"redis+sentinel://:{SERVER_PASSWORD}@{hosts}/feed?sentinel_password={SENTINEL_PASSWORD}"

    def close(self) -> None:
        """End the Sentinels."""
        for process in self._processes:
            process.kill()
            process.wait()


def _knows_all(sentinel: redis.Redis) -> bool:
    facts: Any = sentinel.sentinel_master("feed")
    return int(facts["num-other-sentinels"]) == 2 and int(facts["num-slaves"]) == 1


def _until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            if is_so():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline, "it took more than 20 s"
        time.sleep(0.05)


@pytest.fixture(params=find_servers(), ids=server_label)
def trio(request: pytest.FixtureRequest, tmp_path: Path, fresh_server: Fresh) -> Iterator[Trio]:
    """A trio of Sentinels of each version found."""
    with closing(Trio(request.param, tmp_path, fresh_server)) as made:
        yield made


def test_a_failover_in_the_middle_of_an_epoch_loses_nothing(trio: Trio) -> None:
    """The address that a user wrote names no server, so the primary may be any."""
    spec = {"x": ("int64", ())}
    with (
        penstock.Writer("train", url=trio.url, spec=spec) as writer,
        writer.epoch(sizes=[SAMPLES, SAMPLES]) as epoch,
    ):
        with epoch.shard(0) as shard:
            for number in range(SAMPLES):
                shard.write({"x": np.int64(number)})
        with penstock.Loader("train", group="g", batch_size=50, url=trio.url) as loader:
            batches = iter(loader)
            read = Counter(next(batches)["x"].tolist())
            with redis.Redis.from_url(trio.primary.url) as primary:
                assert primary.wait(1, 5000) == 1
            trio.primary.kill()
            with epoch.shard(1) as shard:
                for number in range(SAMPLES, 2 * SAMPLES):
                    shard.write({"x": np.int64(number)})
            for batch in batches:
                read.update(batch["x"].tolist())
    assert sorted(read) == list(range(2 * SAMPLES))
    with redis.Redis.from_url(trio.replica.url) as promoted:
        assert promoted.info("replication")["role"] == "master"
    with connect(trio.url) as client:
        assert audit_stream(client, "train").findings == []


def test_messages_name_the_service_and_no_password(trio: Trio) -> None:
    """The address of a server would be out of date after a failover."""
    with connect(trio.url) as client, closing(open_channel(client)) as channel:
        channel.send([[b"PING"]])
        assert channel.read() == b"PONG"
        assert client.where.endswith("/feed")
        assert SERVER_PASSWORD not in client.where + repr(client)
        assert SENTINEL_PASSWORD not in client.where + repr(client)
    with pytest.raises(ServerUnavailable, match=r"knows no service 'absent'.*the last part is the service") as caught:
        connect(trio.url.replace("/feed", "/absent"))
    assert SERVER_PASSWORD not in str(caught.value)
    assert SENTINEL_PASSWORD not in str(caught.value)
