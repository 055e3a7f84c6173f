"""Real clusters for the tests, made of the servers that are found here."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import redis

from chaos.cluster import low_port
from penstock_common.errors import ServerUnavailable
from penstock_common.server.slots import SLOTS, slot_of
from penstock_common.stream.servers.embedded import EmbeddedServer

PASSWORD = "of-nodes"
NODE_TIMEOUT_MS = 1000
TRIES = 3


class Cluster:
    """Masters, each with some replicas, that serve all slots."""

    def __init__(
        self,
        masters: Sequence[EmbeddedServer],
        replicas: Sequence[EmbeddedServer],
        start: Callable[[], EmbeddedServer],
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        """Take the nodes, what starts another one that belongs to none yet, and the certificate and key of all."""
        self.masters, self.replicas, self._start = list(masters), list(replicas), start
        self._certificate = certificate

    @property
    def url(self) -> str:
        """The address of all masters, with the certificate of a client where they speak TLS."""
        if self._certificate:
            files = dict(zip(("ssl_certfile", "ssl_keyfile"), self._certificate, strict=True))
            return f"{self.tls_url}&{urlencode(files)}"
        return f"redis://:{PASSWORD}@{','.join(f'127.0.0.1:{node.port}' for node in self.masters)}"

    @property
    def tls_url(self) -> str:
        """The address of all masters by TLS, without a certificate of the client."""
        assert self._certificate
        hosts = ",".join(f"127.0.0.1:{self.tls_port(node)}" for node in self.masters)
        return f"rediss://:{PASSWORD}@{hosts}?{urlencode({'ssl_ca_certs': self._certificate[0]})}"

    def tls_port(self, node: EmbeddedServer) -> int:
        """A node's port for TLS."""
        with redis.Redis.from_url(node.url) as client:
            return int(client.config_get("tls-port")["tls-port"])

    def asked(self, node: EmbeddedServer, *command: Any) -> Any:
        """A node's answer to a command."""
        with redis.Redis.from_url(node.url) as client:
            return client.execute_command(*command)

    def asked_pid(self, node: EmbeddedServer) -> int:
        """A node's process."""
        return int(self.asked(node, "INFO", "server")["process_id"])

    def replica_of(self, master: EmbeddedServer) -> EmbeddedServer:
        """A replica that follows a master."""
        ports = {int(one["port"]) for one in _following(self, master)}
        return next(node for node in self.replicas if node.port in ports)

    def has_replica(self, master: EmbeddedServer) -> bool:
        """Whether a replica follows a master."""
        return bool(_following(self, master))

    def add_replica(self, master: EmbeddedServer) -> None:
        """Start another replica of a master, and return once it follows and every running node knows it."""
        node = self._start()
        own, its = (self.asked(one, "CLUSTER", "MYID").decode() for one in (master, node))
        others = [one for one in (*self.masters, *self.replicas) if one.is_running]
        for other in others:
            self.asked(node, "CLUSTER", "MEET", "127.0.0.1", other.port)
        until(lambda: any(line.startswith(own) for line in _known(self, node)))
        self.asked(node, "CLUSTER", "REPLICATE", own)
        until(lambda: node.port in {int(one["port"]) for one in _following(self, master)})
        for other in others:
            until(lambda other=other: any(f"{its} " in line and own in line for line in _known(self, other)))  # type: ignore[misc]
        self.replicas.append(node)

    def add_master(self) -> EmbeddedServer:
        """Start another master, without slots, and return it once every node knows it and it takes keys."""
        node = self._start()
        others = [*self.masters, *self.replicas]
        for other in others:
            self.asked(node, "CLUSTER", "MEET", "127.0.0.1", other.port)
        until(lambda: all(len(_known(self, one)) == len(others) + 1 for one in (node, *others)))
        until(lambda: b"cluster_state:ok" in self.asked(node, "CLUSTER", "INFO"))
        self.masters.append(node)
        return node

    def empty(self) -> None:
        """Delete all keys."""
        for node in self.masters:
            self.asked(node, "FLUSHALL")

    def lose_master_of(self, key: str, fault: str, *others: str) -> None:
        """Kill the master of a key's slot with -9, or stop it, once its replica has all that was written so far.

        ``others`` are keys whose masters are lost at the same time.
        """
        nodes = {self.master_of(each): each for each in (key, *others)}
        for node, each in nodes.items():
            self._await_replica(node, each)
        for node in nodes:
            if fault == "kill":
                node.kill()
            else:
                os.kill(node.pid, signal.SIGSTOP)

    def _await_replica(self, node: EmbeddedServer, key: str) -> None:
        with redis.Redis.from_url(node.url, single_connection_client=True) as client:
            client.set(f"{key}:probe", 1)  # WAIT answers for what its connection wrote, and for all before that
            assert client.wait(1, 5000) == 1
            client.delete(f"{key}:probe")
            assert client.wait(1, 5000) == 1

    def move_slot_of(self, key: str) -> None:
        """Move a key's slot to the next master, key by key, as ``redis-cli --cluster reshard`` does."""
        self.half_move_slot_of(key)()

    def half_move_slot_of(
        self, key: str, to: EmbeddedServer | None = None, keys_at_most: float = math.inf
    ) -> Callable[[], None]:
        """Begin to move a key's slot, by default to the next master. Return what finishes that.

        Its keys are moved, all of them or so many, and no node knows of it.
        """
        slot, old = slot_of(key), self.master_of(key)
        new = to or self.masters[(self.masters.index(old) + 1) % len(self.masters)]
        ids = {node: self.id_of(node) for node in (old, new)}
        self.asked(new, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[old])
        self.asked(old, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[new])

        def move(at_most: float) -> None:
            moved = 0
            while moved < at_most and (keys := self.asked(old, "CLUSTER", "GETKEYSINSLOT", slot, min(10, at_most))):
                self.asked(old, "MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "AUTH", PASSWORD, "KEYS", *keys)
                moved += len(keys)

        def finish() -> None:
            move(math.inf)
            for node in (new, old, *self.masters):
                self.asked(node, "CLUSTER", "SETSLOT", slot, "NODE", ids[new])

        move(keys_at_most)
        return finish

    def move_at_once(self, keys: Sequence[str], to: EmbeddedServer) -> None:
        """Move the slots of some keys by atomic moves, which Valkey has from 9.0 on, and return at their end."""
        slots: dict[EmbeddedServer, set[int]] = {}
        for key in keys:
            slots.setdefault(self.master_of(key), set()).add(slot_of(key))
        for old, some in slots.items():
            pairs = [number for slot in sorted(some) for number in (slot, slot)]
            self.asked(old, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", *pairs, "NODE", self.id_of(to))
        until(lambda: {self.master_of(key) for key in keys} == {to})

    def id_of(self, node: EmbeddedServer) -> str:
        """A node's id."""
        return str(self.asked(node, "CLUSTER", "MYID").decode())

    def master_of(self, key: str) -> EmbeddedServer:
        """The master that a node names for a key's slot."""
        slot = slot_of(key)
        for node in self.masters:
            for first, last, master, *_ in self.asked(node, "CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    return next(one for one in [*self.masters, *self.replicas] if one.port == master[1])
        raise AssertionError(f"no master has slot {slot}")


class Promotion:
    """The time at which the replica of a key's master takes over."""

    def __init__(self, cluster: Cluster, key: str) -> None:
        """Look for it from now on, in a thread."""
        master = cluster.master_of(key)
        self._cluster, self._replica = cluster, cluster.replicas[cluster.masters.index(master)]
        self._at_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        until(lambda: self._cluster.asked(self._replica, "ROLE")[0] == b"master", 60)
        self._at_s = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether it has not happened yet."""
        return self._thread.is_alive()

    @property
    def at_s(self) -> float:
        """The time. It is waited for."""
        self._thread.join()
        return self._at_s


@contextmanager
def started_cluster(
    executable: Path,
    masters: int = 3,
    replicas: int = 0,
    settings: dict[str, str] | None = None,
    certificate: tuple[Path, Path] | None = None,
) -> Iterator[Cluster]:
    """Start a cluster, and end it. With a certificate and its key all nodes speak TLS, and ask clients for one."""
    extra = {
        "cluster-enabled": "yes",
        "cluster-node-timeout": str(NODE_TIMEOUT_MS),
        "cluster-require-full-coverage": "no",
        "masterauth": PASSWORD,
        "repl-ping-replica-period": "1",
        "repl-diskless-sync-delay": "0",
        **(settings or {}),
    }
    with ExitStack() as stack:

        def start() -> EmbeddedServer:
            tls = tls_of_a_node(*certificate) if certificate else {}
            for _ in range(TRIES):
                with suppress(ServerUnavailable):  # another test run took the port a moment before
                    node = EmbeddedServer(executable, port=low_port(), password=PASSWORD, extra={**extra, **tls})
                    return stack.enter_context(node)
            raise AssertionError(f"no node started in {TRIES} tries")

        nodes = [start() for _ in range(masters * (1 + replicas))]
        cluster = Cluster(nodes[:masters], nodes[masters:], start, certificate)
        for number, node in enumerate(cluster.masters):
            own = range(number * SLOTS // masters, (number + 1) * SLOTS // masters)
            cluster.asked(node, "CLUSTER", "ADDSLOTS", *own)
        # Without epochs of their own, as `redis-cli --cluster create` gives them, masters change them for seconds, and
        # a replica that knows an older one than the other masters is never elected.
        for number, node in enumerate(nodes, 1):
            cluster.asked(node, "CLUSTER", "SET-CONFIG-EPOCH", number)
        bus = cluster.tls_port(nodes[0]) if certificate else nodes[0].port
        met = nodes[0].port, bus + 10_000
        for node in nodes[1:]:
            cluster.asked(node, "CLUSTER", "MEET", "127.0.0.1", *met)
        until(lambda: all(len(_known(cluster, node)) == len(nodes) for node in nodes))
        for number, node in enumerate(cluster.replicas):
            master = cluster.masters[number % masters]
            cluster.asked(node, "CLUSTER", "REPLICATE", cluster.asked(master, "CLUSTER", "MYID"))
        until(lambda: all(b"cluster_state:ok" in cluster.asked(node, "CLUSTER", "INFO") for node in nodes))
        until(lambda: len({_epochs(cluster, node) for node in nodes}) == 1)
        for node in cluster.masters if replicas else ():
            until(lambda node=node: len(_following(cluster, node)) == replicas)  # type: ignore[misc]
        for node in cluster.replicas:
            until(lambda node=node: cluster.asked(node, "INFO", "replication").get("master_link_status") == "up")  # type: ignore[misc]
        yield cluster


def tls_of_a_node(certificate: Path, key: Path) -> dict[str, str]:
    """Settings of a node that speaks TLS with clients, replicas and nodes, and asks clients for a certificate."""
    files = {"tls-cert-file": str(certificate), "tls-key-file": str(key), "tls-ca-cert-file": str(certificate)}
    yes = dict.fromkeys(("tls-auth-clients", "tls-replication", "tls-cluster"), "yes")
    return {"tls-port": str(low_port()), **files, **yes}


def _following(cluster: Cluster, node: EmbeddedServer) -> list[dict[str, Any]]:
    """Return the replicas that a master counts, which may be later than the replica's own word."""
    told: dict[str, Any] = cluster.asked(node, "INFO", "replication")
    return [
        one
        for name, one in told.items()
        if name.startswith("slave") and name[5:].isdigit() and one["state"] == "online"
    ]


def _known(cluster: Cluster, node: EmbeddedServer) -> list[str]:
    told: bytes = cluster.asked(node, "CLUSTER", "NODES")
    return [line for line in told.decode().splitlines() if "handshake" not in line]


def _epochs(cluster: Cluster, node: EmbeddedServer) -> frozenset[tuple[str, str]]:
    """Return the epoch of the configuration of each node that a node knows."""
    return frozenset((line.split()[0], line.split()[6]) for line in _known(cluster, node))


def until(is_so: Callable[[], object], seconds: float = 20) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
