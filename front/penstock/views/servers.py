"""The servers of a stream for people and as JSON: memory, replicas, partitions. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from penstock_common.explain.snapshot import ServerSnapshot
from penstock_common.printable import listed, readable_bytes
from penstock_common.stream.servers.suitability import usable_bytes

HEAD = ("server", "role", "partitions", "memory", "replicas", "replica lag")
SHOWN = 8
"""The partitions of a server that a table names."""


def cli_of(host: str, port: int) -> str:
    """Return the start of a redis-cli line for one server of a cluster."""
    return f"redis-cli -h {shlex.quote(host)} -p {port}"


def fix_of(host: str, port: int, login: str = "") -> str:
    """Return the redis-cli line that ends half moved slots of a cluster, by one of its servers."""
    return f"redis-cli{login} --cluster fix {shlex.quote(f'{host}:{port}')}"


def server_json(server: ServerSnapshot) -> dict[str, Any]:
    """Return one server."""
    memory = server.memory
    return {
        "server": server.where,
        "role": server.role,
        "partitions": list(server.partitions),
        "used_bytes": memory.used_bytes,
        "limit_bytes": memory.limit_bytes,
        "usable_bytes": usable_bytes(memory.limit_bytes) if memory.limit_bytes else None,
        "replicas": [
            {"replica": one.where, "is_online": one.is_online, "lag_bytes": one.lag_bytes} for one in server.replicas
        ],
        "away": server.failure,
        "away_s": round(server.away_s, 1),
        "refusal": server.refusal,
    }


def is_worth_showing(servers: Sequence[ServerSnapshot]) -> bool:
    """Return whether there is more to tell than the memory of one server."""
    return len(servers) > 1 or any(server.replicas for server in servers)


def server_row(server: dict[str, Any]) -> tuple[object, ...]:
    """Return the row of a table under `HEAD`, from `server_json`."""
    numbers = server["partitions"]
    shown = listed(numbers, SHOWN)
    if server["away"]:
        away = f"away for {server['away_s']:.0f} s" if server["away_s"] >= 1 else "away"
        return server["server"], away, shown, "", "", ""
    usable = "" if server["usable_bytes"] is None else f" of {readable_bytes(max(0, server['usable_bytes']))}"
    online = [one for one in server["replicas"] if one["is_online"]]
    copying = len(server["replicas"]) - len(online)
    lag = max((one["lag_bytes"] for one in online), default=None)
    return (
        server["server"], server["role"], shown, f"{readable_bytes(server['used_bytes'])}{usable}",
        f"{len(online)}" + (f", {copying} not in step" if copying else ""), "" if lag is None else readable_bytes(lag),
    )  # fmt: skip
