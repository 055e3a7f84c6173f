"""The state of each server at one moment: memory, role, replicas, clock, slots that are half moved.

Every server is asked at once, in one round trip. One that does not answer in time is named, and not waited for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

from penstock_common.errors import WritesRefused
from penstock_common.server.client import ANSWER_S, ControlClient
from penstock_common.server.hosts import is_host

SETTINGS: Final = ("cluster-*", "min-replicas-*")
"""The settings of a node that a thorough look reads. CONFIG GET takes several patterns from Redis 7.0 on only."""
DISK_STATES: Final = ("aof_last_write_status", "rdb_last_bgsave_status")
"""The facts of INFO that are not ``ok`` after a failed write to disk. By its settings a server then refuses writes."""
_REPLICA = re.compile(r"slave\d+")
_ID = re.compile(r"\w+(?= )")
_HALF_MOVED = re.compile(r"\[(\d+)-([<>])-(\w+)\]")


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica, as its master sees it."""

    where: str
    """Its host and port."""
    is_online: bool
    lag_bytes: int
    """The bytes of the replication stream that it has not confirmed."""


@dataclass(frozen=True, slots=True)
class HalfMovedSlot:
    """A slot that an operator's tool began to move to or from a server, and did not finish yet."""

    slot: int
    is_leaving: bool
    other: str
    """The id of the other node."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """A server that holds keys, or one that may hold some."""

    where: str
    """Its address without its password, as in messages."""
    host: str
    port: int
    id: str = ""
    """Its id in a cluster, or '' for a server that is in none."""
    failure: str = ""
    """The reason why nothing else is known of it, or '' if it answered."""
    info: Mapping[str, Any] | None = None
    """The answer of INFO, or None without an answer."""
    config: Mapping[str, str] | None = None
    """Its settings of clusters and of replicas after a thorough look, or None if it did not tell."""
    refusal: str = ""
    """The words in which it refuses writes because it cannot write its disk, or ''."""
    replicas: tuple[ReplicaState, ...] = ()
    half_moved: tuple[HalfMovedSlot, ...] = ()
    clock_ahead_s: float = 0.0
    """The time that its clock is ahead of this host's, half a round trip more or less."""
    round_trip_s: float = 0.0
    others: tuple[NodeState, ...] = ()
    """The masters that it knows and that hold no slot."""

    @property
    def version(self) -> tuple[str, tuple[int, ...]]:
        """Return ``redis`` or ``valkey``, and the version."""
        info = self.info or {}
        product = "valkey" if "valkey_version" in info else "redis"
        text = str(info.get(f"{product}_version", "0"))
        return product, tuple(int(part) for part in text.split(".") if part.isdecimal())


_Answer: TypeAlias = tuple[float, list[Any], float, str]
"""The answer of one server: when it was asked, its replies, when they came, and why it takes no writes, or ''."""


def look_at_nodes(client: ControlClient, *, is_thorough: bool = False) -> list[NodeState]:
    """Return each server that holds keys, in the order of their slots. A thorough look has replicas and settings."""
    found = []
    ask = partial(_ask, is_of_cluster=client.is_spread, is_thorough=is_thorough)
    for node, answer in client.at_once(ask, ANSWER_S, has_replicas=is_thorough):
        settings = node.connection_pool.connection_kwargs
        known = NodeState(node.where, str(settings.get("host", "localhost")), int(settings.get("port", 6379)))
        found.append(_state(known, answer))
    return found


def _ask(node: ControlClient, *, is_of_cluster: bool, is_thorough: bool) -> _Answer:
    begun = time.time()
    with node.pipeline(transaction=False) as pipe:
        pipe.info()
        pipe.time()
        if is_of_cluster:
            pipe.execute_command("CLUSTER", "NODES")
            if is_thorough:
                for names in SETTINGS:
                    pipe.config_get(names)
        replies, ended = pipe.execute(raise_on_error=not is_of_cluster), time.time()
    return begun, replies, ended, _refusal(node, replies[0])


def _refusal(node: ControlClient, info: object) -> str:
    """Return why a server takes no writes if its last write to disk failed, or ''. Its answer to a PING says so."""
    if isinstance(info, dict) and any(info.get(name, "ok") != "ok" for name in DISK_STATES):
        try:
            node.impatient().ping()
        except WritesRefused as error:
            return str(error)
    return ""


def _state(known: NodeState, answer: _Answer | Exception) -> NodeState:
    if isinstance(answer, Exception):
        return replace(known, failure=str(answer))
    begun, (info, now, *nodes), ended, refusal = answer
    if not isinstance(info, dict):
        return replace(known, failure=str(info))
    clock = now[0] + now[1] / 1e6 if isinstance(now, tuple) else (begun + ended) / 2
    settings = [one for one in nodes[1:] if isinstance(one, dict)]
    text = nodes[0].decode() if nodes and isinstance(nodes[0], bytes) else ""
    own = next((line for line in text.splitlines() if "myself" in line), "")
    own_id = _ID.match(own)
    return replace(
        known, id=own_id[0] if own_id else "", info=info, refusal=refusal,
        replicas=tuple(_replicas(info)),
        half_moved=tuple(
            HalfMovedSlot(int(slot), way == ">", other) for slot, way, other in _HALF_MOVED.findall(own)
        ),
        clock_ahead_s=clock - (begun + ended) / 2, round_trip_s=ended - begun,
        config={_text(name): _text(value) for one in settings for name, value in one.items()} if settings else None,
        others=tuple(_without_slots(text, known)),
    )  # fmt: skip


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _replicas(info: Mapping[str, Any]) -> Iterator[ReplicaState]:
    at = int(info.get("master_repl_offset", 0))
    for name, one in info.items():
        if _REPLICA.fullmatch(name) and isinstance(one, dict):
            where = f"{one.get('ip')}:{one.get('port')}"
            yield ReplicaState(where, one.get("state") == "online", max(0, at - int(one.get("offset", 0))))


def _without_slots(text: str, known: NodeState) -> Iterator[NodeState]:
    """Yield the masters of an answer of CLUSTER NODES that are well and hold no slot."""
    for line in text.splitlines():
        node_id, address, flags, _, _, _, link, *slots = line.split(" ")
        if "master" not in flags.split(",") or "fail" in flags or link != "connected" or slots or "myself" in flags:
            continue
        host, _, port = address.partition("@")[0].rpartition(":")
        base, _, _ = known.where.rpartition(f"{known.host}:{known.port}")
        host = host or known.host
        if not is_host(host) or not _ID.match(line):
            continue
        yield NodeState(f"{base}{host}:{port}", host, int(port), id=node_id)
