"""The cluster of a run: three masters with one replica each, and the faults that hit them.

A node that was killed comes back with its file, and follows the master that took its place.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import redis
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot

from chaos.keys import meta_key, partitions
from penstock import EmbeddedServer

MASTERS = 3
SLOTS = 16_384
PASSWORD = secrets.token_hex(8)
NODE_TIMEOUT_S = 1.5
FAILED_OVER_S = 6 * NODE_TIMEOUT_S
"""The time after which a failover is over, if there is one."""
SETTINGS = {
    "cluster-enabled": "yes",
    "cluster-node-timeout": f"{NODE_TIMEOUT_S * 1000:.0f}",
    "cluster-require-full-coverage": "no",
    "cluster-replica-validity-factor": "0",  # a replica that was cut off takes over all the same
    "masterauth": PASSWORD,
    "repl-ping-replica-period": "1",
    "repl-diskless-sync-delay": "0",
    "auto-aof-rewrite-min-size": "256mb",
}
START_S = 30.0
LARGE_KEYS = 8
"""The keys of one MIGRATE."""

Later = list[tuple[float, Callable[[], None]]]
"""Actions, and the seconds after which each is due."""


class Node:
    """One server of the cluster, always at the same port and with the same folder."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.port = directory, low_port()
        self.is_stopped = False
        self.start()

    def start(self) -> None:
        """Start it, or start it again after its end."""
        self.server = EmbeddedServer(
            directory=self._directory, port=self.port, password=PASSWORD, appendonly=True, extra=SETTINGS
        )

    def restart(self) -> None:
        """Start it again after it was killed."""
        self.server.close()
        self.start()

    def ask(self, *command: Any) -> Any:
        """Return its answer to a command. Raises RedisError."""
        with redis.Redis.from_url(self.server.url, socket_timeout=2, socket_connect_timeout=2) as client:
            return client.execute_command(*command)

    def ask_if_there(self, *command: Any) -> Any:
        """Return its answer, or None if it gives none."""
        if self.is_stopped or not self.server.is_running:
            return None
        try:
            return self.ask(*command)
        except redis.RedisError:
            return None

    def stop(self) -> None:
        """Send SIGSTOP."""
        self.is_stopped = True
        os.kill(self.server.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT."""
        self.is_stopped = False
        with suppress(ProcessLookupError):
            os.kill(self.server.pid, signal.SIGCONT)

    @property
    def id(self) -> str:
        """Return its id in the cluster."""
        return str(self.ask("CLUSTER", "MYID").decode())

    def replication(self) -> dict[str, Any]:
        """Return its state of replication, or nothing if it does not answer."""
        return self.ask_if_there("INFO", "replication") or {}


class ServerCluster:
    """Masters and replicas that serve all slots."""

    def __init__(self, directory: Path) -> None:
        self.nodes: list[Node] = []
        try:
            for number in range(2 * MASTERS):
                self.nodes.append(Node(directory / f"node{number}"))
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        masters, replicas = self.nodes[:MASTERS], self.nodes[MASTERS:]
        for number, node in enumerate(masters):
            node.ask("CLUSTER", "ADDSLOTS", *range(number * SLOTS // MASTERS, (number + 1) * SLOTS // MASTERS))
        # Without epochs of their own, as `redis-cli --cluster create` gives them, masters change them for seconds, and
        # a replica that knows an older one than the other masters is never elected.
        for number, node in enumerate(self.nodes, 1):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number)
        for node in self.nodes[1:]:
            node.ask("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        _until(lambda: all(len(_others(node)) == len(self.nodes) for node in self.nodes))
        for node, master in zip(replicas, masters, strict=True):
            node.ask("CLUSTER", "REPLICATE", master.id)
        _until(self.is_well)

    @property
    def url(self) -> str:
        """Return the address of all nodes."""
        return f"redis://default:{PASSWORD}@{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    def client(self) -> Any:
        """Return redis-py's client of the cluster. Raises one of `chaos.keys.AWAY`."""
        seeds = [ClusterNode("127.0.0.1", node.port) for node in self.nodes]
        return RedisCluster(startup_nodes=seeds, password=PASSWORD, socket_timeout=5, socket_connect_timeout=5)

    def pairs(self) -> list[tuple[Node, Node]]:
        """Return each master that has slots with the replica that follows it."""
        by_port = {node.port: node for node in self.nodes}
        found = []
        for node in self.nodes:
            told = node.replication()
            if told.get("role") == "master" and int(told.get("connected_slaves", 0)):
                follower = by_port[int(told["slave0"]["port"])]
                if follower.replication().get("master_link_status") == "up":
                    found.append((node, follower))
        return found

    def is_well(self) -> bool:
        """Return whether each node serves, and each master is followed by a replica."""
        states = [node.ask_if_there("CLUSTER", "INFO") or b"" for node in self.nodes]
        return all(b"cluster_state:ok" in state for state in states) and len(self.pairs()) == MASTERS

    def close(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.go_on()
            node.server.close()

    def cut_connections(self, pick: float, share: float) -> int:
        """Close some of the clients' connections, and return their number."""
        cut = 0
        for node in self.nodes:
            with suppress(redis.RedisError), redis.Redis.from_url(node.server.url, socket_timeout=2) as client:
                for place, info in enumerate(client.client_list(_type="normal")):
                    if (place * 0.618 + pick) % 1 < share:
                        cut += client.client_kill_filter(_id=info["id"])
        return cut

    # --- faults: each returns what it hit, and what must be done later ---

    def kill_master(self, pick: float, length: float) -> tuple[str, Later]:
        """Kill a master with SIGKILL. It comes back before its failover, or after it."""
        master, _ = self._pick(pick)
        master.server.kill()
        seconds = length * FAILED_OVER_S
        return f"port {master.port} for {seconds:.1f} s", [(seconds, master.restart)]

    def stop_master(self, pick: float, length: float) -> tuple[str, Later]:
        """Stop a master with SIGSTOP. It goes on before its failover, or wakes up after it."""
        master, _ = self._pick(pick)
        master.stop()
        seconds = length * FAILED_OVER_S
        return f"port {master.port} for {seconds:.1f} s", [(seconds, master.go_on)]

    def fail_over(self, pick: float, length: float) -> tuple[str, Later]:
        """Make a replica the master, as an operator does before he takes a host down."""
        master, replica = self._pick(pick)
        replica.ask("CLUSTER", "FAILOVER")
        return f"port {master.port} to {replica.port}", []

    def cut_replica(self, pick: float, length: float) -> tuple[str, Later]:
        """Keep from a replica what its master writes."""
        master, replica = self._pick(pick)
        _cut_apart(master, replica)
        seconds = 1 + length * 8
        return f"port {replica.port} for {seconds:.1f} s", [(seconds, replica.go_on)]

    def tear(self, pick: float, length: float) -> tuple[str, Later]:
        """Cut a replica off, then kill its master, so that the replica takes over without the newest writes."""
        master, replica = self._pick(pick)
        _cut_apart(master, replica)
        seconds = 0.2 + length * 2
        told = f"port {master.port}, whose replica {replica.port} lacks {seconds:.1f} s"
        after_s = seconds + FAILED_OVER_S
        return told, [(seconds, master.server.kill), (seconds, replica.go_on), (after_s, master.restart)]

    def move_slot(self, pick: float, length: float) -> tuple[str, Later]:
        """Begin to move a slot of a stream to another master, key by key, and finish it later."""
        masters = [master for master, _ in self.pairs()]
        slot = self._pick_slot(pick)
        old = next((one for one in masters if slot in _slots_of(one)), None)
        if old is None:
            return "", []
        new = masters[(masters.index(old) + 1) % len(masters)]
        old_id, new_id = old.id, new.id
        new.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
        old.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
        seconds = length * 2
        told = f"slot {slot} from {old.port} to {new.port}, finished after {seconds:.1f} s"
        return told, [(seconds, partial(self._finish_move, slot, old, new, new_id))]

    def _finish_move(self, slot: int, old: Node, new: Node, new_id: str) -> None:
        while keys := old.ask("CLUSTER", "GETKEYSINSLOT", slot, LARGE_KEYS):
            old.ask("MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "AUTH", PASSWORD, "KEYS", *keys)
        for node in (new, old):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", new_id)

    def _pick(self, pick: float) -> tuple[Node, Node]:
        pairs = self.pairs()
        return pairs[int(pick * len(pairs))]

    def _pick_slot(self, pick: float) -> int:
        with self.client() as client:
            streams = sorted({key.decode().split("{")[1].split("}")[0].split(".")[0] for key in _metas(client)})
            keys = [meta_key(stream) for stream in streams]
            keys += [f"{partition}:roster" for stream in streams for partition in partitions(client, stream)]
        return int(key_slot(keys[int(pick * len(keys))].encode()))


def _metas(client: Any) -> Iterator[bytes]:
    yield from client.scan_iter(match="penstock:{*}:meta", count=1000)


def _slots_of(node: Node) -> set[int]:
    """Return the slots that a master says it has."""
    own = next(line for line in _lines(node) if "myself" in line)
    ranges = [word.partition("-") for word in own.split(" ")[8:] if not word.startswith("[")]
    return {slot for first, _, last in ranges for slot in range(int(first), int(last or first) + 1)}


def _others(node: Node) -> list[str]:
    """Return the nodes that a node knows, itself among them."""
    return [line for line in _lines(node) if "handshake" not in line]


def _lines(node: Node) -> list[str]:
    told: bytes = node.ask("CLUSTER", "NODES")
    return told.decode().splitlines()


def _cut_apart(master: Node, replica: Node) -> None:
    replica.stop()
    # the kernel holds what was sent to a stopped process, and delivers it later, unless the connection is closed
    master.ask("CLIENT", "KILL", "TYPE", "replica")


def low_port() -> int:
    """Return a free port with a free port 10,000 above it, which a node takes for its bus."""
    for port in random.sample(range(20_000, 30_000), 100):
        try:
            for taken in (port, port + 10_000):
                socket.create_server(("127.0.0.1", taken)).close()
        except OSError:
            continue
        return port
    raise OSError("no port is free for a node of a cluster")


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("the cluster did not come about")
        time.sleep(0.05)
