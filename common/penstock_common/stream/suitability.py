"""Whether a server can keep the promises: it must not evict, and the streams' budgets must fit under its memory.

Only INFO is asked: CONFIG is often forbidden on managed servers.
"""

from __future__ import annotations

from penstock_common.errors import BudgetRefused, ServerUnsuitable
from penstock_common.stream.commands import Client
from penstock_common.stream.keys import StreamKeys
from penstock_common.stream.streams import DEFAULT_BUDGET_BYTES, list_streams

RESERVE_SHARE = 0.1
RESERVE_BYTES = 16 << 20
"""Memory kept free for acknowledgements, joining groups and job queues: under OOM the server refuses, and rq dies."""


def require_suitable(client: Client, name: str, budget_bytes: int | None) -> None:
    """Raises ServerUnsuitable if the server may evict, BudgetRefused if the budgets of all streams do not fit.

    To be asked before stream ``name`` is made or given another budget (None = its own, or the default): a refused
    stream must not take room from the others.
    """
    memory = client.info("memory")
    policy, limit = str(memory.get("maxmemory_policy", "noeviction")), int(memory.get("maxmemory", 0))
    if policy != "noeviction":
        raise ServerUnsuitable(
            f"the server's maxmemory-policy is {policy}, which may delete samples unread: "
            "set it with `redis-cli CONFIG SET maxmemory-policy noeviction`"
        )
    if limit:
        _require_room(client, name, budget_bytes or _budget(client, name), limit)


def _require_room(client: Client, name: str, budget_bytes: int, limit: int) -> None:
    others = sum(_budget(client, other) for other in list_streams(client) if other != name)
    room = int(limit * (1 - RESERVE_SHARE)) - RESERVE_BYTES
    if budget_bytes + others > room:
        left = room - others
        advice = (
            f"give a budget of at most {readable_bytes(left)}, or raise maxmemory" if left > 0 else "raise maxmemory"
        )
        raise BudgetRefused(
            f"stream {name!r} has a budget of {readable_bytes(budget_bytes)}, the other streams "
            f"{readable_bytes(others)}; the server's maxmemory {readable_bytes(limit)} leaves room for "
            f"{readable_bytes(max(room, 0))} in all: {advice}"
        )


def _budget(client: Client, name: str) -> int:
    return int(client.hget(StreamKeys(name).meta, "budget_bytes") or DEFAULT_BUDGET_BYTES)


def readable_bytes(count: int) -> str:
    """Bytes for people."""
    if count < 1 << 20:
        return f"{count / 1024:.0f} KiB"
    return f"{count / (1 << 20):.0f} MiB" if count >= 10 << 20 else f"{count / (1 << 20):.1f} MiB"
