"""Whether a server can keep the promises: it must not evict, and the streams' budgets must fit under its memory.

Only INFO is asked: CONFIG is often forbidden on managed servers.
"""

from __future__ import annotations

from penstock_common.errors import BudgetRefused, ServerUnsuitable
from penstock_common.stream.commands import Client
from penstock_common.stream.keys import StreamKeys
from penstock_common.stream.streams import DEFAULT_BUDGET_BYTES, Stream, list_streams

RESERVE_SHARE = 0.1
RESERVE_BYTES = 16 << 20
"""Memory kept free for acknowledgements, joining groups and job queues: under OOM the server refuses, and rq dies."""


def require_suitable(client: Client, stream: Stream) -> None:
    """Raises ServerUnsuitable if the server may evict, BudgetRefused if the budgets of all streams do not fit."""
    memory = client.info("memory")
    policy, limit = str(memory.get("maxmemory_policy", "noeviction")), int(memory.get("maxmemory", 0))
    if policy != "noeviction":
        raise ServerUnsuitable(
            f"the server's maxmemory-policy is {policy}, which may delete samples unread: "
            "set it with `redis-cli CONFIG SET maxmemory-policy noeviction`"
        )
    if limit:
        _require_room(client, stream, limit)


def _require_room(client: Client, stream: Stream, limit: int) -> None:
    budgets = {name: _budget(client, name) for name in list_streams(client)} | {stream.name: stream.budget_bytes}
    room = int(limit * (1 - RESERVE_SHARE)) - RESERVE_BYTES
    total = sum(budgets.values())
    if total > room:
        others = total - stream.budget_bytes
        raise BudgetRefused(
            f"stream {stream.name!r} has a budget of {mebibytes(stream.budget_bytes)}, the other streams "
            f"{mebibytes(others)}; the server's maxmemory {mebibytes(limit)} leaves room for {mebibytes(max(room, 0))} "
            f"in all: give a budget of at most {mebibytes(max(room - others, 0))}, or raise maxmemory"
        )


def _budget(client: Client, name: str) -> int:
    return int(client.hget(StreamKeys(name).meta, "budget_bytes") or DEFAULT_BUDGET_BYTES)


def mebibytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / (1 << 20):.0f} MiB" if count >= 10 << 20 else f"{count / (1 << 20):.1f} MiB"
