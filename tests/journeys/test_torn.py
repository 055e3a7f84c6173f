"""The tool that makes torn losses: what was written since the cut is gone on one server, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers, server_label
from tests import sentinels
from tests.clusters import Cluster, started_cluster
from tests.sentinels import asked, started_service
from tests.torn import torn_master_of, torn_pair, torn_service

KEYS = ["a", "b", "c"]
"""Their slots are 15495, 3300 and 7365: one on each of three masters."""
BIG = b"x" * 200_000
"""More than the buffers of a connection between two processes take after a moment."""


def put(cluster: Cluster, key: str, field: str, value: bytes = b"1") -> None:
    """Write a field at the master of a key."""
    cluster.asked(cluster.master_of(key), "HSET", key, field, value)


def fields_of(cluster: Cluster, key: str) -> set[bytes]:
    """Read the fields of a key at its master."""
    return set(cluster.asked(cluster.master_of(key), "HKEYS", key))


def a_pair(fresh_server: Callable[..., EmbeddedServer]) -> tuple[EmbeddedServer, EmbeddedServer]:
    """A server, and one that follows it."""
    master = fresh_server(extra={"repl-diskless-sync-delay": "0"})
    replica = fresh_server(extra={"replicaof": f"127.0.0.1 {master.port}", "masterauth": master.password})
    sentinels.until(lambda: asked(replica, "INFO", "replication")["master_link_status"] == "up")
    return master, replica


@pytest.mark.parametrize("executable", find_servers(), ids=server_label)
def test_one_master_of_a_cluster_comes_back_older(executable: Path) -> None:
    """A loss on all masters at once would leave the slots in agreement, and prove nothing."""
    with started_cluster(executable, replicas=1) as cluster:
        assert len({cluster.master_of(key).port for key in KEYS}) == len(KEYS)
        for key in KEYS:
            put(cluster, key, "before")
        lost = cluster.master_of("a")
        with torn_master_of(cluster, "a") as pair:
            pair.cut_off()
            for number in range(50):
                for key in KEYS:
                    put(cluster, key, f"after{number}", BIG)
            pair.fail_over()
        assert not lost.is_running
        assert cluster.master_of("a") is pair.replica
        assert fields_of(cluster, "a") == {b"before"}
        for key in KEYS[1:]:
            assert len(fields_of(cluster, key)) == 51
        put(cluster, "a", "again")
        assert fields_of(cluster, "a") == {b"before", b"again"}
        cluster.add_replica(pair.replica)
        with redis.Redis.from_url(pair.replica.url, single_connection_client=True) as client:
            client.hset("a", "safe", "1")
            assert client.wait(1, 5000) == 1


def test_a_plain_pair_is_torn(fresh_server: Callable[..., EmbeddedServer]) -> None:
    """Without a cluster, an operator promotes the replica manually."""
    master, replica = a_pair(fresh_server)
    with torn_pair(master, replica) as pair:
        asked(master, "SET", "before", 1)
        pair.cut_off()
        for number in range(50):
            asked(master, "SET", f"after{number}", BIG)
        pair.fail_over()
    assert asked(replica, "KEYS", "*") == [b"before"]
    assert asked(replica, "SET", "again", 1)


def test_a_service_of_sentinels_is_torn(tmp_path: Path) -> None:
    """The Sentinels find the replica that runs again, and promote it."""
    with started_service(find_servers()[0], tmp_path) as service, torn_service(service) as pair:
        asked(pair.master, "SET", "before", 1)
        pair.cut_off()
        asked(pair.master, "SET", "after", 1)
        pair.fail_over()
        assert service.primary() is pair.replica
        assert asked(pair.replica, "KEYS", "*") == [b"before"]


def test_a_test_that_fails_leaves_no_stopped_server(fresh_server: Callable[..., EmbeddedServer]) -> None:
    """A stopped server would not end with its test."""
    master, replica = a_pair(fresh_server)
    with pytest.raises(ZeroDivisionError), torn_pair(master, replica) as pair:
        pair.cut_off()
        raise ZeroDivisionError
    assert asked(replica, "PING")
