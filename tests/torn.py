"""Torn loss made by force: a master dies, and its replica takes over without the newest writes.

On a cluster the other masters keep theirs, so the slots disagree afterwards.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis

from penstock_common.stream.servers.embedded import EmbeddedServer
from tests.clusters import Cluster, until
from tests.sentinels import Service


class TornPair:
    """A master and its replica, which are first cut apart, and then take each other's place."""

    def __init__(
        self, master: EmbeddedServer, replica: EmbeddedServer, promote: Callable[[], None] | None = None
    ) -> None:
        """Take a pair.

        Args:
            master: The server that will die.
            replica: The server that will take over.
            promote: Makes the replica a master that everybody knows, and returns then (default: REPLICAOF NO ONE).
        """
        self.master, self.replica = master, replica
        self._promote = promote or self._promote_alone

    def cut_off(self) -> None:
        """Keep from the replica all that is written from now on. It has everything that was written before the call."""
        end = _asked(self.master, "INFO", "replication")["master_repl_offset"]
        until(lambda: _asked(self.replica, "INFO", "replication")["slave_repl_offset"] >= end)
        os.kill(self.replica.pid, signal.SIGSTOP)
        # the kernel holds what was sent to a stopped process, and delivers it later, unless the connection is closed
        _asked(self.master, "CLIENT", "KILL", "TYPE", "replica")
        until(lambda: _asked(self.master, "INFO", "replication")["connected_slaves"] == 0)

    def fail_over(self) -> None:
        """Kill the master with -9, let the replica take over as it is, and return once it serves."""
        self.master.kill()
        self.go_on()
        self._promote()
        until(lambda: _asked(self.replica, "ROLE")[0] == b"master")

    def go_on(self) -> None:
        """Let the replica run again, if it was stopped."""
        with suppress(ProcessLookupError):
            os.kill(self.replica.pid, signal.SIGCONT)

    def _promote_alone(self) -> None:
        _asked(self.replica, "REPLICAOF", "NO", "ONE")


@contextmanager
def torn_pair(master: EmbeddedServer, replica: EmbeddedServer) -> Iterator[TornPair]:
    """Yield a pair of plain servers. The replica runs again at the end."""
    yield from _running(TornPair(master, replica))


@contextmanager
def torn_service(service: Service) -> Iterator[TornPair]:
    """Yield the primary and the replica of a service, whose Sentinels promote. The replica runs again at the end."""
    primary = service.primary()
    replica = next(server for server in service.servers if server is not primary)
    yield from _running(TornPair(primary, replica, lambda: until(lambda: service.primary() is replica)))


@contextmanager
def torn_master_of(cluster: Cluster, key: str) -> Iterator[TornPair]:
    """Yield the master and the replica of a key's slot. The replica runs again at the end."""
    master = cluster.master_of(key)
    place = cluster.masters.index(master)
    replica = cluster.replica_of(master)

    def promote() -> None:
        cluster.asked(replica, "CLUSTER", "FAILOVER", "TAKEOVER")
        cluster.masters[place] = replica
        cluster.replicas.remove(replica)
        until(lambda: all(_names(cluster, node, replica) for node in cluster.masters))

    yield from _running(TornPair(master, replica, promote))


def _running(pair: TornPair) -> Iterator[TornPair]:
    try:
        yield pair
    finally:
        pair.go_on()


def _names(cluster: Cluster, node: EmbeddedServer, master: EmbeddedServer) -> bool:
    """Whether a node serves, and knows that another one is a master with slots."""
    named = {found[2][1] for found in cluster.asked(node, "CLUSTER", "SLOTS")}
    return b"cluster_state:ok" in cluster.asked(node, "CLUSTER", "INFO") and master.port in named


def _asked(server: EmbeddedServer, *command: Any) -> Any:
    with redis.Redis.from_url(server.url, socket_timeout=5) as client:
        return client.execute_command(*command)
