"""The memory of servers, and the checks that they keep the promises. `budgets` sums budgets.

A server must not evict, and it must take commands as large as a block. INFO has all facts on memory. Managed servers
often refuse CONFIG, so it is asked only to give advice that works there. Some of them limit the size of a request.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, Literal

from redis.exceptions import NoPermissionError, ResponseError

from penstock_common.errors import PenstockError, ServerUnavailable, ServerUnsuitable, TooLarge, Unauthorized
from penstock_common.printable import readable_bytes
from penstock_common.server.connection import open_channel
from penstock_common.server.error_translation import may_pass, server_at
from penstock_common.stream.commands import Client
from penstock_common.stream.keys import StreamKeys, scratch_key
from penstock_common.stream.streams import DEFAULT_BLOCK_BYTES, Stream
from penstock_common.waiting import Notify

RESERVE_SHARE = 0.1
RESERVE_BYTES = 16 << 20
"""The memory kept free for acknowledgements, joining groups and job queues. Without memory the server refuses, and rq
dies."""

MOST_BACKLOG_BYTES = 1 << 30
"""The largest replication backlog that is advised: a second of writes at 1 GB/s."""

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

    Ragged tensors count nothing, because their sizes are not known before samples come. Nor is anything before the
    stream has a spec.
    """
    if stream.spec is None:
        return
    sample = sum(tensor.sample_bytes for tensor in stream.spec.tensors if not tensor.is_ragged)
    if _needed_for_step(stream, samples, kept_steps, sample)[0] > largest_block(stream.partition_budget):
        raise step_too_large(stream, samples, kept_steps, sample, is_mean=False)


def step_too_large(stream: Stream, samples: int, kept_steps: int, sample_bytes: int, *, is_mean: bool) -> TooLarge:
    """Return the error for a step in canonical order that a stream's budget cannot hold.

    Args:
        stream: The stream.
        samples: The samples of a step of all ranks.
        kept_steps: The further steps that are kept for it.
        sample_bytes: The payload bytes of a sample, without its ragged tensors unless it is a mean.
        is_mean: Whether ``sample_bytes`` is the mean of the samples that have come.
    """
    is_ragged = any(tensor.is_ragged for tensor in stream.require_spec().tensors)
    roughly = "about " if is_mean else "at least " if is_ragged else ""
    quarter, step = largest_block(stream.partition_budget), samples * sample_bytes
    needed, edges, block_bytes = _needed_for_step(stream, samples, kept_steps, sample_bytes)
    steps = (1 + kept_steps) * step
    around, block = edges * max(sample_bytes, stream.block_bytes), (quarter - steps) // edges
    # a mean says little of the largest samples
    enough = max((steps + around) * 4 * len(stream.partitions), 2 * stream.budget_bytes if is_mean else 0)
    advice = f"take smaller batches, or raise budget_bytes to {enough}"
    if around > steps and block >= sample_bytes and not is_mean:
        advice = f"raise budget_bytes to {enough}, or make the stream again with block_bytes={block} or less"
    return TooLarge(
        f"a step of {samples} samples is {roughly}{readable_bytes(step)}, which with the blocks around it ({edges} of "
        f"up to {readable_bytes(block_bytes)}) takes {readable_bytes(needed)}; stream {stream.name!r} has "
        f"a quarter of its budget, {readable_bytes(quarter)} a partition, for what all ranks wait for: {advice}; "
        f"penstock.Writer({stream.name!r}, budget_bytes={enough}).close() raises it"
    )


def _needed_for_step(stream: Stream, samples: int, kept_steps: int, sample_bytes: int) -> tuple[int, int, int]:
    """Return the bytes that a step needs, how many blocks are only partly of it, and the bytes of one.

    The entries of a step have to fit the reserved quarter of one partition's budget, with ``kept_steps`` that are kept
    behind it. That includes a block on either side that is only partly of the step.
    """
    edges = 3 if kept_steps else 2
    block_bytes = max(sample_bytes, min(stream.block_bytes, largest_block(stream.partition_budget)))
    return (1 + kept_steps) * samples * sample_bytes + edges * block_bytes, edges, block_bytes


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """The memory that a server reports."""

    used_bytes: int
    limit_bytes: int
    """The maxmemory, or 0 for none."""
    policy: str
    backlog_bytes: int = 0
    """The part of the used bytes that the replication backlog and the buffers of replicas take."""

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
    return ServerMemory(
        max(memory.used_bytes for memory in known) * len(known), min(limits) * len(known), policies[0],
        sum(memory.backlog_bytes for memory in known),
    )  # fmt: skip


def memory_of(info: Mapping[str, Any], named_bytes: int = 0) -> ServerMemory:
    """Return the memory in an answer of INFO. ``named_bytes`` is the limit that counts if the server names none."""
    policy = str(info.get("maxmemory_policy", "noeviction"))
    limit_bytes = int(info.get("maxmemory", 0)) or named_bytes
    # the backlog shares its blocks with the replicas' buffers from Redis 7 on: the two fields count each block once
    backlog_bytes = int(info.get("mem_replication_backlog", 0)) + int(info.get("mem_clients_slaves", 0))
    return ServerMemory(int(info.get("used_memory", 0)), limit_bytes, policy, backlog_bytes)


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


def config_refusal(client: Client) -> Literal["server", "right"] | None:
    """Return what refuses CONFIG: the server, as managed ones do, or a right that this user lacks. None: nothing."""
    try:
        client.config_get("maxmemory-policy")
    except (NoPermissionError, Unauthorized):
        return "right"
    except ResponseError:
        return "server"
    return None


def _eviction(client: Client, policy: str, what: str) -> str:
    advice = {
        None: 'set it with `redis-cli -u "$PENSTOCK_URL" CONFIG SET maxmemory-policy noeviction`',
        "server": "set it to noeviction where the server is managed, because it refuses CONFIG",
        "right": "this user may not use CONFIG, so as an administrator run `CONFIG SET maxmemory-policy noeviction`, "
        "or set it where the server is managed",
    }
    return f"the server's maxmemory-policy is {policy}, which may delete {what}: {advice[config_refusal(client)]}"


def usable_bytes(limit_bytes: int) -> int:
    """Return what writers may fill of a server's maxmemory: all but the reserve."""
    return int(limit_bytes * (1 - RESERVE_SHARE)) - RESERVE_BYTES


def fitting_backlog(limit_bytes: int, host_bytes: int = 0) -> int:
    """Return the replication backlog that a server should have: 1 GiB, or less if its memory is small.

    A backlog counts in the server's used memory, so it must stay within the reserve.

    Args:
        limit_bytes: The server's maxmemory, or 0 for none.
        host_bytes: The memory of its host, or 0 if that is not known.
    """
    most = limit_bytes // 20 if limit_bytes else host_bytes // 16
    return min(MOST_BACKLOG_BYTES, most) if most else MOST_BACKLOG_BYTES


# --- the size of a command --------------------------------------------------------------------------------------------

PROBE_BYTES: Final = 2_000_000
"""Twice the usual block, because a block may end with a sample that makes it larger."""
AROUND_BYTES: Final = 40_000
"""The bytes of a command that are not payload, at most, for usual blocks."""
SMALLER: Final = (1_000_000, 500_000, 250_000, 125_000, 60_000)
"""The blocks that are tried once the probe is refused."""


def require_takes_blocks(
    client: Client, name: str, block_bytes: int | None, payload: str | None, notify: Notify
) -> None:
    """Send a server whose limits cannot be read a command of 2 MB, or of the block if that is larger.

    Call it before the stream is made. ``notify`` gets a smaller limit that the block keeps to.

    Args:
        client: The streams' server.
        name: The stream.
        block_bytes: The wanted block. None is that of the stream, or the default.
        payload: The payload storage of a new stream. A server gets no payloads that are in segments.
        notify: Called with a line.

    Raises:
        ServerUnsuitable: The server takes no command as large as a block. It says which block it takes.
    """
    # without a refusal its own limit of 512 MB holds, or one that an operator of the server chose
    if config_refusal(client) is None:
        return
    stored, kept = client.hmget(StreamKeys(name).meta, "block_bytes", "payload")
    if (payload or (kept or b"inline").decode("utf-8", "replace")) != "inline":
        return
    block = int(block_bytes or stored or DEFAULT_BLOCK_BYTES)
    probe = max(PROBE_BYTES, block + AROUND_BYTES)
    if not (refusal := _refusal(client, probe)):
        return
    taken = next((size for size in SMALLER if not _refusal(client, size + AROUND_BYTES)), 0)
    start = f"{server_at(client.where)} refuses a command of {readable_bytes(probe)} ({refusal})"
    if block <= taken:
        notify(f"{start}: blocks of {taken} bytes fit, and a sample that is larger cannot be written")
        return
    instead = (
        f"set block_bytes={taken} (penstock.Tuning(block_bytes={taken})), and make no larger samples"
        if taken
        else "take another server, because it refuses small ones, too"
    )
    raise ServerUnsuitable(f"{start}, and a block of stream {name!r} has {block} bytes: {instead}")


def _refusal(client: Client, nbytes: int) -> str:
    """Return why the server refuses a command of this size, or ''. Another reason to refuse it tells nothing."""
    key = scratch_key(secrets.token_hex(6)).encode()
    with closing(open_channel(client, key)) as channel:
        try:
            channel.send([(b"SET", key, bytes(nbytes), b"EX", b"1"), (b"UNLINK", key)])
            answer = channel.read()
            if not isinstance(answer, ResponseError):
                channel.read()
                return ""
        except ServerUnavailable as error:
            client.ping()  # raises if the server is away
            return str(error.__cause__ or error)
    return "" if may_pass(answer) or isinstance(answer, NoPermissionError) else str(answer)
