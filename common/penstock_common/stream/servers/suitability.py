"""The memory of servers, and the check that they keep the promises: a server must not evict. `budgets` sums budgets.

INFO has all facts. Managed servers often refuse CONFIG, so it is asked only to give advice that works there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from penstock_common.errors import PenstockError, ServerUnsuitable, TooLarge, Unauthorized
from penstock_common.printable import readable_bytes
from penstock_common.stream.commands import Client
from penstock_common.stream.streams import DEFAULT_BLOCK_BYTES, Stream

RESERVE_SHARE = 0.1
RESERVE_BYTES = 16 << 20
"""The memory kept free for acknowledgements, joining groups and job queues. Without memory the server refuses, and rq
dies."""

LEAST_BUDGET_BYTES = 4 * DEFAULT_BLOCK_BYTES
"""The least budget of a stream that names none: a quarter of it holds a block."""

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


def read_memories(client: Client) -> dict[str, ServerMemory]:
    """Ask for the memory of each server that holds keys. Returns address -> memory, in the order of slots."""
    return dict(client.on_each(lambda node: (node.where, memory_of(node.info("memory"), node.memory_bytes))))


def read_memory(client: Client) -> ServerMemory:
    """Ask for the memory of the server. Several servers are as many as the fullest one, because keys spread evenly."""
    return combined_memory(read_memories(client).values())


def combined_memory(memories: Iterable[ServerMemory]) -> ServerMemory:
    """Return the memory of several servers as if each were as full as the fullest one."""
    known = list(memories)
    limits = [memory.limit_bytes for memory in known]
    policies = sorted({memory.policy for memory in known}, key=may_evict, reverse=True)
    return ServerMemory(max(memory.used_bytes for memory in known) * len(known), min(limits) * len(known), policies[0])


def memory_of(info: Mapping[str, Any], named_bytes: int = 0) -> ServerMemory:
    """Return the memory in an answer of INFO. ``named_bytes`` is the limit that counts if the server names none."""
    policy = str(info.get("maxmemory_policy", "noeviction"))
    limit_bytes = int(info.get("maxmemory", 0)) or named_bytes
    return ServerMemory(int(info.get("used_memory", 0)), limit_bytes, policy)


def allocator_settings(client: Client, key: str | None = None) -> dict[str, str]:
    """Return the settings of jemalloc by name, as a server reports them.

    There are none if the server has another allocator, or if this user may not ask.

    Args:
        client: The control connection.
        key: A key of the server that is asked; None asks any one.
    """
    try:
        stats = client.execute_command("MEMORY", "MALLOC-STATS", at=key)
    except (ResponseError, PenstockError):
        return {}
    text = stats.decode(errors="replace") if isinstance(stats, bytes) else str(stats)
    return dict(re.findall(r"opt\.(\w+): (\S+)", text))


def keeps_freed_pages(settings: Mapping[str, str]) -> bool:
    """Return whether jemalloc with these settings keeps freed memory, however much of it lies side by side."""
    return settings.get("dirty_decay_ms") == "-1"


def may_evict(policy: str, *, has_jobs: bool = False) -> bool:
    """Return whether a server of this maxmemory-policy may delete what Penstock keeps there.

    No key of a stream has a time to live, so ``volatile-*`` takes none of them. rq gives one to its keys.
    """
    return policy != "noeviction" and (has_jobs or not policy.startswith("volatile-"))


def require_keeps_samples(client: Client, memories: Iterable[ServerMemory]) -> None:
    """Raise ServerUnsuitable if one of the streams' servers may evict samples."""
    for memory in memories:
        if may_evict(memory.policy):
            raise ServerUnsuitable(_eviction(client, memory.policy, "samples unread"))


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
