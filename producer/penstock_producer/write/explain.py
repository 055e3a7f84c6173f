"""The sentences of a writer that waits for quota or for memory of the server: what is held, by whom, and what helps.

``penstock_common.explain.sentences`` has those of a dispatcher, and what the groups hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock_common.printable import readable_bytes
from penstock_common.stream.servers.suitability import ORDINARY_SHARE, ServerMemory
from penstock_producer.write.quota import QuotaState

QUARTER = "its last quarter is kept for the oldest unfinished shard"


def explain_quota(
    stream: str, state: QuotaState, blockers: list[str], has_groups: bool,
    unacknowledged: Mapping[str, int] | None = None, gone: str = "", is_kept: bool = True,
) -> str:  # fmt: skip
    """Return the sentence that says why the quota does not admit a block, and what helps.

    Args:
        stream: Name of the stream.
        state: Values that decided.
        blockers: Groups that have not acknowledged most of what is held.
        has_groups: Whether any group holds data of the stream. One that has left holds none.
        unacknowledged: Payload bytes that waiting groups were given and have not acknowledged, by group.
        gone: Members that such groups wait for, in words.
        is_kept: Whether an epoch is pinned or replayed.
    """
    held, whole = readable_bytes(state.held_bytes), readable_bytes(state.budget_bytes)
    share, why_kept = f"{held} of {whole}", ""
    if held != whole:  # it looks as if there were space
        why_kept = _why_kept_free(state)
        share += f", and the next block takes {readable_bytes(state.block_bytes)}{why_kept}"
    budget = state.named_budget(stream)
    if not has_groups:
        return (
            f"{budget} is full ({share}) and no group reads it: "
            f"start a trainer, or `penstock groups declare {stream} NAME`; an old epoch that no group will read "
            f"is given up with `penstock epochs abandon {stream} EPOCH --force`"
        )
    if gone:
        return (
            f"{budget} is full ({share}), and trainers wait as well, for members last seen a while "
            f"ago: {gone}; start them again under their names; what a member of a shared group holds comes to "
            "others when its lease has lapsed"
        )
    if unacknowledged:
        each = ", ".join(f"group {name} {readable_bytes(nbytes)}" for name, nbytes in sorted(unacknowledged.items()))
        return (
            f"{budget} is full ({share}), and trainers wait for samples while they have some that they "
            f"were given and have not acknowledged ({each}): they have to acknowledge, or to save a checkpoint"
        )
    if blockers:
        return f"{budget} is full ({share}) because of group {', '.join(blockers)}: it has yet to read"
    if not state.is_next:
        return f"{budget} is full ({share})" if why_kept else f"{budget} is full ({share}); {QUARTER}"
    if not is_kept:
        return f"{budget} is full ({share}) of what trainers were given and have not acknowledged"
    return f"{budget} is full ({share}) of epochs that a replay or a pin holds"


def _why_kept_free(state: QuotaState) -> str:
    """Return why a block that the budget could hold has to wait, or '' for one that it could not."""
    with_block = state.held_bytes + state.block_bytes
    if with_block > state.budget_bytes:
        return ""
    if not state.is_next and with_block > int(state.budget_bytes * ORDINARY_SHARE):
        return f"; {QUARTER}"
    return f"; writers that waited fill only {readable_bytes(state.mark_bytes)}"


def explain_memory(stream: str, state: QuotaState, memory: ServerMemory) -> str:
    """Return the sentence for a wait on the server's memory, which others fill."""
    used, limit = readable_bytes(memory.used_bytes), readable_bytes(memory.limit_bytes)
    kept = readable_bytes(memory.limit_bytes - memory.used_bytes - (memory.left_bytes or 0))
    return (
        f"the server uses {used} of its maxmemory {limit}, of which writers leave {kept} free; of "
        f"{state.named_budget(stream)} only {readable_bytes(state.held_bytes)} of {readable_bytes(state.budget_bytes)} "
        "are used: remove other keys, or raise maxmemory"
    )
