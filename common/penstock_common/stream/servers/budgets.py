"""The check that the streams' budgets fit the memory of each server: at creation, and when slots have moved.

A partition's budget counts on the server that has its slot. One server has all partitions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from penstock_common.errors import BudgetRefused
from penstock_common.printable import readable_bytes
from penstock_common.stream.commands import Client, readable
from penstock_common.stream.directory import list_streams
from penstock_common.stream.keys import PartitionKeys, StreamKeys
from penstock_common.stream.placement import planned_servers, usual_partitions
from penstock_common.stream.servers.suitability import (
    LEAST_BUDGET_BYTES,
    ServerMemory,
    read_memories,
    require_keeps_samples,
    usable_bytes,
)
from penstock_common.stream.streams import DEFAULT_BUDGET_BYTES, look_at_each
from penstock_common.waiting import Notify, to_stderr

TELL_EVERY_S: Final = 60.0
"""The least time between two warnings that budgets do not fit any more."""
SHRINK = "give another stream less (penstock.Writer(NAME, budget_bytes=BYTES).close() does it)"
REMOVE = "remove a stream that nobody needs (`penstock inspect` lists them, `penstock delete NAME`)"


@dataclass(frozen=True, slots=True)
class StreamBudget:
    """The budget of a stream, and the part of it on each server."""

    name: str
    nbytes: int
    """The bytes of the servers' memory that it may take. Payloads in segments take none."""
    parts: Mapping[str, Fraction]
    """Address -> its part of the partitions."""

    def on(self, where: str) -> int:
        """Return the bytes of one server's memory that it may take."""
        return int(self.nbytes * self.parts.get(where, 0))


@dataclass(frozen=True, slots=True)
class ServerBudgets:
    """The budgets on one server that has a maxmemory."""

    where: str
    limit_bytes: int
    budgets: Mapping[str, int]
    """Stream -> bytes of this server's memory that it may take."""

    @property
    def room_bytes(self) -> int:
        """Return the bytes that all budgets may come to."""
        return usable_bytes(self.limit_bytes)

    @property
    def left_bytes(self) -> int:
        """Return the bytes that no budget takes. It is negative if they do not fit."""
        return self.room_bytes - sum(self.budgets.values())

    def __str__(self) -> str:
        streams = ", ".join(f"{name!r} ({readable_bytes(nbytes)})" for name, nbytes in sorted(self.budgets.items()))
        return (
            f"the budgets on {self.where} come to {readable_bytes(sum(self.budgets.values()))}, and its maxmemory "
            f"{readable_bytes(self.limit_bytes)} leaves space for {readable_bytes(max(self.room_bytes, 0))}: {streams}"
        )


def read_budgets(client: Client, memories: Mapping[str, ServerMemory], but: str = "") -> list[ServerBudgets]:
    """Return the budgets on each server with a maxmemory. A stream whose meta cannot be read is left out.

    Args:
        client: The streams' server.
        memories: Its servers, by address.
        but: A stream that is left out.
    """
    limited = {where: memory.limit_bytes for where, memory in memories.items() if memory.limit_bytes}
    names = [name for name in list_streams(client) if name != but] if limited else []
    streams = look_at_each(names, lambda name: read_budget(client, name))[0]
    return [
        ServerBudgets(where, limit, {one.name: one.on(where) for one in streams if one.on(where)})
        for where, limit in limited.items()
    ]


@readable(lambda client, name: StreamKeys(name).meta)
def read_budget(client: Client, name: str) -> StreamBudget | None:
    """Return the budget of a stream, or None if there is no stream of that name."""
    budget, payload, stored = client.hmget(StreamKeys(name).meta, "budget_bytes", "payload", "tags")
    if stored is None:
        return None
    tags: list[str] = json.loads(stored)
    servers = [client.node_of(PartitionKeys(name, tag, number).roster).where for number, tag in enumerate(tags)]
    nbytes = int(budget or DEFAULT_BUDGET_BYTES) if payload in (None, b"inline") else 0
    return StreamBudget(name, nbytes, _parts(servers))


def _parts(servers: Sequence[str]) -> dict[str, Fraction]:
    return {where: Fraction(servers.count(where), len(servers)) for where in servers}


# --- a new stream, or another budget ---------------------------------------------------------------------------------


def admit_stream(
    client: Client,
    name: str,
    budget_bytes: int | None,
    payload: str | None = None,
    notify: Notify = to_stderr,
    partitions: int | None = None,
) -> int | None:
    """Check that the server can carry stream ``name``, and choose the budget of a new stream.

    Call it before the stream is made or given another budget: a refused stream must not take memory from the others.

    Args:
        client: The streams' server.
        name: The stream.
        budget_bytes: The wanted budget. None keeps that of an existing stream. A new one takes `default_budget`.
        payload: The payload storage of a new stream; see ``Stream.payload``.
        notify: Called with the budget of a new stream that takes less than DEFAULT_BUDGET_BYTES.
        partitions: The partitions of a new stream, or None for the usual number.

    Returns:
        The budget to make the stream with, or None for that of the existing stream.

    Raises:
        ServerUnsuitable: The server may evict samples.
        BudgetRefused: The budgets of all streams do not fit the memory of a server.
    """
    memories = read_memories(client)
    require_keeps_samples(client, memories.values())
    if not any(memory.limit_bytes for memory in memories.values()):
        return budget_bytes
    stored = read_budget(client, name)
    if payload not in (None, "inline") or (stored is not None and not stored.nbytes):
        return budget_bytes
    others = read_budgets(client, memories, but=name)
    if stored is not None:
        _require_room(StreamBudget(name, budget_bytes or stored.nbytes, stored.parts), others)
        return budget_bytes
    chosen = budget_bytes or _share(client, name, others, partitions)
    wanted = StreamBudget(name, chosen, _planned_parts(client, name, partitions, chosen))
    if budget_bytes is None:
        _require_any_room(wanted, others)
    _require_room(wanted, others)
    if budget_bytes is None and chosen < DEFAULT_BUDGET_BYTES:
        # of its servers the one that leaves it the least decides
        one = min(
            (one for one in others if wanted.on(one.where)), key=lambda one: one.left_bytes / wanted.on(one.where)
        )
        part, of = "", "of the server's"
        if len(memories) > 1:
            part, of = f", {readable_bytes(wanted.on(one.where))} of it on {one.where}", "there of"
        notify(
            f"stream {name!r} takes a budget of {readable_bytes(chosen)}{part}, half of what the other streams leave "
            f"{of} maxmemory {readable_bytes(one.limit_bytes)}; budget_bytes (--budget) sets another"
        )
    return chosen


def default_budget(client: Client, name: str, payload: str | None = None, partitions: int | None = None) -> int:
    """Return the budget of a new stream that names none.

    It is DEFAULT_BUDGET_BYTES, or half of what the other streams leave of the servers' memory if that is less. A new
    stream is refused once they leave less than LEAST_BUDGET_BYTES, whatever they hold: budgets are promises.
    """
    if payload not in (None, "inline"):
        return DEFAULT_BUDGET_BYTES
    return _share(client, name, read_budgets(client, read_memories(client), but=name), partitions)


def _share(client: Client, name: str, others: Sequence[ServerBudgets], partitions: int | None) -> int:
    chosen = DEFAULT_BUDGET_BYTES
    while True:  # a smaller budget has fewer partitions, and a server may have a larger part of them
        parts = _planned_parts(client, name, partitions, chosen)
        half = [int(one.left_bytes // 2 / parts[one.where]) for one in others if one.where in parts]
        found = max(LEAST_BUDGET_BYTES, min(chosen, *half, DEFAULT_BUDGET_BYTES))
        if found >= chosen:
            return found
        chosen = found


def _planned_parts(client: Client, name: str, partitions: int | None, budget_bytes: int) -> dict[str, Fraction]:
    """Return the part of a new stream's partitions that each server gets; see `choose_tags`."""
    slots = client.slots()
    count = partitions or usual_partitions(len(slots), budget_bytes)
    addresses = client.on_each(lambda node: node.where)
    return _parts([addresses[at] for at in planned_servers(name, count, slots)])


def _require_any_room(wanted: StreamBudget, others: Sequence[ServerBudgets]) -> None:
    for one in others:
        taken = sum(one.budgets.values())
        if taken and wanted.on(one.where) and one.left_bytes < LEAST_BUDGET_BYTES * wanted.parts[one.where]:
            raise BudgetRefused(
                f"no memory for stream {wanted.name!r}: the other streams' budgets take {readable_bytes(taken)} of the "
                f"{readable_bytes(one.room_bytes)} that streams may have of {_named(one, others)} maxmemory "
                f"{readable_bytes(one.limit_bytes)}: {SHRINK}, and each small stream a small one from the start "
                f"(budget_bytes=BYTES, --budget), {REMOVE}, or raise maxmemory"
            )


def _require_room(wanted: StreamBudget, others: Sequence[ServerBudgets]) -> None:
    for one in others:
        here, taken = wanted.on(one.where), sum(one.budgets.values())
        if here <= one.left_bytes:
            continue
        left = int(one.left_bytes / wanted.parts[one.where]) if here else 0
        ways = [f"give a budget of at most {readable_bytes(left)}"] if left > 0 else []
        ways.append("raise maxmemory")
        if taken:
            ways += [SHRINK, REMOVE]
        part = f", {readable_bytes(here)} of it on {one.where}" if len(others) > 1 else ""
        raise BudgetRefused(
            f"stream {wanted.name!r} has a budget of {readable_bytes(wanted.nbytes)}{part}, the other streams "
            f"{readable_bytes(taken)}{' there' if part else ''}; {_named(one, others)} maxmemory "
            f"{readable_bytes(one.limit_bytes)} leaves space for {readable_bytes(max(one.room_bytes, 0))} in all: "
            f"{', or '.join(ways)}"
        )


def _named(one: ServerBudgets, others: Sequence[ServerBudgets]) -> str:
    return f"{one.where}'s" if len(others) > 1 else "the server's"


# --- slots that move -------------------------------------------------------------------------------------------------


class BudgetWatch:
    """Warns when slots have moved and a server has more budgets of a stream and its neighbours than memory.

    It costs nothing while no slot moves, as on one server.
    """

    def __init__(
        self, client: Client, stream: str, notify: Notify, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._stream, self._notify, self._clock = client, stream, notify, clock
        self._slots = client.slots()
        self._notified_s: float | None = None

    def check(self) -> None:
        """Compare, if slots have moved since the last comparison. It warns once a `TELL_EVERY_S` at most."""
        slots, now = self._client.slots(), self._clock()
        if slots == self._slots or (self._notified_s is not None and now < self._notified_s + TELL_EVERY_S):
            return
        self._slots = slots
        for one in read_budgets(self._client, read_memories(self._client)):
            if one.left_bytes < 0 and self._stream in one.budgets:
                self._notified_s = now
                self._notify(
                    f"slots have moved: {one}. Writers will wait for its memory: raise its maxmemory, give a stream "
                    f"less by --budget, or move partitions (`penstock partitions {self._stream}` says how)"
                )
