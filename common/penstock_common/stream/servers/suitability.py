"""The check that a server can keep the promises: it must not evict, and the streams' budgets must fit its memory.

INFO has all facts. Managed servers often refuse CONFIG, so it is asked only to give advice that works there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from penstock_common.errors import BudgetRefused, ServerUnsuitable, TooLarge, Unauthorized
from penstock_common.printable import readable_bytes
from penstock_common.stream.commands import Client, readable
from penstock_common.stream.directory import list_streams
from penstock_common.stream.keys import StreamKeys
from penstock_common.stream.streams import DEFAULT_BLOCK_BYTES, DEFAULT_BUDGET_BYTES, Stream, look_at_each
from penstock_common.waiting import Notify, to_stderr

RESERVE_SHARE = 0.1
RESERVE_BYTES = 16 << 20
"""The memory kept free for acknowledgements, joining groups and job queues. Without memory the server refuses, and rq
dies."""

LEAST_BUDGET_BYTES = 4 * DEFAULT_BLOCK_BYTES
"""The least budget of a stream that names none: a quarter of it holds a block."""

REMOVE = "remove a stream that nobody needs (`penstock inspect` lists them, `penstock delete NAME`)"

ORDINARY_SHARE = 0.75
"""The share of a budget for all shards. The rest is for the lowest unfinished shard of the oldest unfinished epoch:
whatever else fills the budget, the samples that some group is waiting for still fit."""


def largest_block(budget_bytes: int) -> int:
    """Return the largest block.

    A larger one than the reserved quarter could wait for ever, so it is refused at the start.
    """
    return int(budget_bytes * (1 - ORDINARY_SHARE))


def require_step_fits(stream: Stream, samples: int, kept_steps: int = 0) -> None:
    """Raise TooLarge if readers in canonical order could wait for ever for a step of ``samples`` samples, over all
    ranks.

    The entries of a step have to fit the reserved quarter of one partition's budget, with ``kept_steps`` that are kept
    behind it. That includes a block on either side that is only partly of the step. For ragged tensors, and before the
    stream has a spec, nothing is known.
    """
    if stream.spec is None:
        return
    sample = sum(tensor.sample_bytes for tensor in stream.spec.tensors if not tensor.is_ragged)
    quarter, step = largest_block(stream.partition_budget), samples * sample
    edges = 3 if kept_steps else 2
    needed = (1 + kept_steps) * step + edges * max(sample, min(stream.block_bytes, quarter))
    if needed > quarter:
        enough = ((1 + kept_steps) * step + edges * max(sample, stream.block_bytes)) * 4 * len(stream.partitions)
        raise TooLarge(
            f"a step of {samples} samples is {readable_bytes(step)}, which with the blocks around it takes "
            f"{readable_bytes(needed)}; stream {stream.name!r} has a quarter of its budget, {readable_bytes(quarter)} "
            "a partition, for what all ranks wait for: take smaller batches, or raise budget_bytes to "
            f"{readable_bytes(enough)}"
        )


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """The memory that a server reports."""

    used_bytes: int
    limit_bytes: int
    """The maxmemory, or 0 for none."""
    policy: str

    @property
    def left_bytes(self) -> int | None:
        """The bytes that writers may still take.

        It is negative if others took of the reserve, and None without a limit.
        """
        return usable_bytes(self.limit_bytes) - self.used_bytes if self.limit_bytes else None


def read_memory(client: Client) -> ServerMemory:
    """Ask for the memory of the server. Several servers are as many as the fullest one, because keys spread evenly."""
    told: list[ServerMemory] = client.on_each(lambda node: _memory_of(node.info("memory")))
    limits = [memory.limit_bytes for memory in told]
    policies = sorted({memory.policy for memory in told}, key=may_evict, reverse=True)
    return ServerMemory(max(memory.used_bytes for memory in told) * len(told), min(limits) * len(told), policies[0])


def _memory_of(told: dict[str, Any]) -> ServerMemory:
    policy = str(told.get("maxmemory_policy", "noeviction"))
    return ServerMemory(int(told.get("used_memory", 0)), int(told.get("maxmemory", 0)), policy)


def may_evict(policy: str, *, has_jobs: bool = False) -> bool:
    """Return whether a server of this maxmemory-policy may delete what Penstock keeps there.

    No key of a stream has a time to live, so ``volatile-*`` takes none of them. rq gives one to its keys.
    """
    return policy != "noeviction" and (has_jobs or not policy.startswith("volatile-"))


def require_keeps_jobs(client: Client) -> None:
    """Raise ServerUnsuitable if the queue's server may evict jobs."""
    policy = read_memory(client).policy
    if may_evict(policy, has_jobs=True):
        raise ServerUnsuitable(_eviction(client, policy, "jobs that wait in the queue"))


def takes_config(client: Client) -> bool:
    """Return whether the server lets this user read its settings; managed servers refuse CONFIG altogether."""
    try:
        client.config_get("maxmemory-policy")
    except (ResponseError, Unauthorized):
        return False
    return True


def _eviction(client: Client, policy: str, what: str) -> str:
    advice = (
        'set it with `redis-cli -u "$PENSTOCK_URL" CONFIG SET maxmemory-policy noeviction`'
        if takes_config(client)
        else "set it to noeviction where the server is managed, because it refuses CONFIG"
    )
    return f"the server's maxmemory-policy is {policy}, which may delete {what}: {advice}"


def usable_bytes(limit_bytes: int) -> int:
    """Return what writers may fill of a server's maxmemory: all but the reserve."""
    return int(limit_bytes * (1 - RESERVE_SHARE)) - RESERVE_BYTES


def admit_stream(
    client: Client, name: str, budget_bytes: int | None, payload: str | None = None, notify: Notify = to_stderr
) -> int | None:
    """Check that the server can carry stream ``name``, and choose the budget of a new stream.

    Call it before the stream is made or given another budget: a refused stream must not take memory from the others.

    Args:
        client: The streams' server.
        name: The stream.
        budget_bytes: The wanted budget. None keeps that of an existing stream. A new one takes `default_budget`.
        payload: The payload storage of a new stream; see ``Stream.payload``.
        notify: Called with the budget of a new stream that takes less than DEFAULT_BUDGET_BYTES.

    Returns:
        The budget to make the stream with, or None for that of the existing stream.

    Raises:
        ServerUnsuitable: The server may evict samples.
        BudgetRefused: The budgets of all streams do not fit the server's memory.
    """
    memory = read_memory(client)
    if may_evict(memory.policy):
        raise ServerUnsuitable(_eviction(client, memory.policy, "samples unread"))
    stored, stored_payload = client.hmget(StreamKeys(name).meta, "budget_bytes", "payload")
    kept = payload or (stored_payload or b"inline").decode("utf-8", "replace")
    if not memory.limit_bytes or kept != "inline":
        return budget_bytes
    others = _budget_of_others(client, name)
    if budget_bytes is None and stored is None:
        budget_bytes = _share(memory.limit_bytes, others)
        if others and usable_bytes(memory.limit_bytes) - others < LEAST_BUDGET_BYTES:
            raise BudgetRefused(
                f"no memory for stream {name!r}: the other streams' budgets take {readable_bytes(others)} of the "
                f"{readable_bytes(usable_bytes(memory.limit_bytes))} that streams may have of the server's maxmemory "
                f"{readable_bytes(memory.limit_bytes)}: {REMOVE}, give one of them less by --budget (budget_bytes=), "
                "or raise maxmemory"
            )
        _require_room(name, budget_bytes, others, memory.limit_bytes)
        if budget_bytes < DEFAULT_BUDGET_BYTES:
            notify(
                f"stream {name!r} takes a budget of {readable_bytes(budget_bytes)}, half of what the other streams "
                f"leave of the server's maxmemory {readable_bytes(memory.limit_bytes)}; budget_bytes (--budget) sets "
                "another"
            )
    _require_room(name, budget_bytes or _budget(client, name), others, memory.limit_bytes)
    return budget_bytes


def default_budget(client: Client, name: str, payload: str | None = None) -> int:
    """Return the budget of a new stream that names none.

    It is DEFAULT_BUDGET_BYTES, or half of what the other streams leave of the server's memory if that is less. So there
    is always space for a further stream.
    """
    limit = read_memory(client).limit_bytes
    if not limit or payload not in (None, "inline"):
        return DEFAULT_BUDGET_BYTES
    return _share(limit, _budget_of_others(client, name))


def _share(limit: int, others: int) -> int:
    return max(LEAST_BUDGET_BYTES, min(DEFAULT_BUDGET_BYTES, (usable_bytes(limit) - others) // 2))


def _budget_of_others(client: Client, name: str) -> int:
    """Return the sum of the other streams' budgets. A stream whose meta cannot be read is left out."""
    others = [other for other in list_streams(client) if other != name]
    return sum(look_at_each(others, lambda other: _budget(client, other))[0])


def _require_room(name: str, budget_bytes: int, others: int, limit: int) -> None:
    room = usable_bytes(limit)
    if budget_bytes + others > room:
        left = room - others
        ways = [f"give a budget of at most {readable_bytes(left)}"] if left > 0 else []
        ways.append("raise maxmemory")
        if others:
            ways.append(REMOVE)
        raise BudgetRefused(
            f"stream {name!r} has a budget of {readable_bytes(budget_bytes)}, the other streams "
            f"{readable_bytes(others)}; the server's maxmemory {readable_bytes(limit)} leaves room for "
            f"{readable_bytes(max(room, 0))} in all: {', or '.join(ways)}"
        )


@readable(lambda client, name: StreamKeys(name).meta)
def _budget(client: Client, name: str) -> int:
    """Return the budget that a stream takes of the server's memory. Payloads in segments take none."""
    budget, payload = client.hmget(StreamKeys(name).meta, "budget_bytes", "payload")
    return int(budget or DEFAULT_BUDGET_BYTES) if payload in (None, b"inline") else 0
