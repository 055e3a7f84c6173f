"""The view of ``penstock partitions``: where partitions lie, and the commands that would even them out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from penstock.views.servers import cli_of, fix_of
from penstock_common.printable import readable_bytes
from penstock_common.server.nodes import NodeState

MOST_KEY_BYTES: Final = 400_000_000
"""The largest key that is moved by MIGRATE. One of 560 MB blocked its server for 12.9 s, and the move failed."""


@dataclass(frozen=True, slots=True)
class PlacedPartition:
    """A partition and its server."""

    number: int
    slot: int
    server: str
    nbytes: int
    """The payload bytes that it holds."""
    largest_key_bytes: int
    """The bytes of its largest key."""


@dataclass(frozen=True, slots=True)
class SlotMove:
    """A slot that moves to another server, with all partitions in it."""

    slot: int
    partitions: tuple[int, ...]
    source: str
    target: str
    nbytes: int
    largest_key_bytes: int


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """The moves that even the partitions out."""

    moves: tuple[SlotMove, ...]
    too_large: tuple[PlacedPartition, ...] = ()
    """The partitions that have too large a key, if the servers stay uneven because of them."""


@dataclass(frozen=True, slots=True)
class PartitionsView:
    """The places of a stream's partitions, with the commands that would even them out."""

    stream: str
    placed: tuple[PlacedPartition, ...]
    nodes: tuple[NodeState, ...]
    """Every server that may hold partitions."""
    plan: RebalancePlan
    commands: tuple[str, ...]
    """The commands that carry the plan out."""

    def servers(self) -> list[dict[str, Any]]:
        """Return each server with its partitions and bytes."""
        return [
            {
                "server": node.where,
                "partitions": len(mine := [one for one in self.placed if one.server == node.where]),
                "bytes": sum(one.nbytes for one in mine),
                "away": node.failure,
            }
            for node in self.nodes
        ]

    def as_json(self) -> dict[str, Any]:
        """Return all of it. Scripts rely on its keys."""
        return {
            "stream": self.stream,
            "partitions": [
                {
                    "partition": one.number, "slot": one.slot, "server": one.server, "bytes": one.nbytes,
                    "largest_key_bytes": one.largest_key_bytes,
                }
                for one in self.placed
            ],
            "servers": self.servers(),
            "moves": [asdict(move) for move in self.plan.moves],
            "too_large": [one.number for one in self.plan.too_large],
            "commands": list(self.commands),
        }  # fmt: skip

    def explain_large(self) -> str:
        """Return why partitions that should move are left where they are, or ''."""
        if not self.plan.too_large:
            return ""
        named = ", ".join(f"{one.number} ({readable_bytes(one.largest_key_bytes)})" for one in self.plan.too_large)
        return (
            f"not moved: partition {named}. A key is above {MOST_KEY_BYTES // 1_000_000} MB, so MIGRATE would block "
            "its server for seconds and may fail. Wait until its epochs are released. Valkey 9 and Redis 8.4 move it"
        )

    def explain_no_commands(self) -> str:
        """Return why there are moves and no commands for them, or ''."""
        if not self.plan.moves or self.commands:
            return ""
        return "no commands: they name the ids of servers, which this user may not ask for without +cluster|nodes"


def view_partitions(
    stream: str, placed: Sequence[PlacedPartition], nodes: Sequence[NodeState], login: str = ""
) -> PartitionsView:
    """Return the view.

    Args:
        stream: The stream's name.
        placed: Its partitions.
        nodes: Every server that may hold some.
        login: The options of redis-cli that a connection needs, without a password.
    """
    there = [node for node in nodes if not node.failure]
    kind = _kind_of(there)
    plan = plan_moves(placed, [node.where for node in there], MOST_KEY_BYTES if kind == "migrate" else None)
    if len(there) < len(nodes):
        plan = RebalancePlan(())  # slots are not moved while a server is away
    by_address = {node.where: node for node in there}
    if not all(node.id for node in there):
        return PartitionsView(stream, tuple(placed), tuple(nodes), plan, ())  # see `explain_no_commands`
    commands = {"valkey": _by_valkey, "redis": _by_redis, "migrate": _by_key}[kind](plan.moves, by_address, login)
    return PartitionsView(stream, tuple(placed), tuple(nodes), plan, tuple(commands))


def _kind_of(nodes: Sequence[NodeState]) -> str:
    """Return how these servers move a slot: ``valkey`` or ``redis`` in one step each, else ``migrate``."""
    versions = [node.version for node in nodes if node.info is not None]
    for product, least in (("valkey", (9,)), ("redis", (8, 4))):
        if versions and all(name == product and version >= least for name, version in versions):
            return product
    return "migrate"


def _cli(node: NodeState, login: str) -> str:
    return f"{cli_of(node.host, node.port)}{login}"


def _pairs(moves: Sequence[SlotMove]) -> dict[tuple[str, str], list[int]]:
    pairs: dict[tuple[str, str], list[int]] = {}
    for move in moves:
        pairs.setdefault((move.source, move.target), []).append(move.slot)
    return {pair: sorted(slots) for pair, slots in sorted(pairs.items())}


def _by_valkey(moves: Sequence[SlotMove], nodes: Mapping[str, NodeState], login: str) -> list[str]:
    return [
        f"{_cli(nodes[source], login)} CLUSTER MIGRATESLOTS SLOTSRANGE "
        f"{' '.join(f'{slot} {slot}' for slot in slots)} NODE {nodes[target].id}"
        for (source, target), slots in _pairs(moves).items()
    ]


def _by_redis(moves: Sequence[SlotMove], nodes: Mapping[str, NodeState], login: str) -> list[str]:
    return [
        f"{_cli(nodes[target], login)} CLUSTER MIGRATION IMPORT {' '.join(f'{slot} {slot}' for slot in slots)}"
        for (_, target), slots in _pairs(moves).items()
    ]


def _by_key(moves: Sequence[SlotMove], nodes: Mapping[str, NodeState], login: str) -> list[str]:
    """Return three commands a slot. ``--cluster reshard`` takes no number of a slot, and ``fix`` ends a begun move."""
    commands = []
    for move in moves:
        source, target = nodes[move.source], nodes[move.target]
        commands += [
            f"{_cli(target, login)} CLUSTER SETSLOT {move.slot} IMPORTING {source.id}",
            f"{_cli(source, login)} CLUSTER SETSLOT {move.slot} MIGRATING {target.id}",
            fix_of(source.host, source.port, login),
        ]
    return commands


def plan_moves(
    placed: Sequence[PlacedPartition], servers: Sequence[str], most_key_bytes: int | None = None
) -> RebalancePlan:
    """Return as few moves as possible, of those partitions that hold the fewest bytes.

    Partitions of one slot move together. The stream's own slot has partition 0 and moves last.

    Args:
        placed: Every partition of the stream.
        servers: Every server that may hold partitions, also those without one.
        most_key_bytes: The largest key that may move, or None for any.
    """
    slots: dict[int, list[PlacedPartition]] = {}
    for one in placed:
        slots.setdefault(one.slot, []).append(one)
    counts = dict.fromkeys(servers, 0)
    held: dict[str, list[SlotMove]] = {server: [] for server in servers}
    for slot, together in slots.items():
        server = together[0].server
        counts[server] = counts.get(server, 0) + len(together)
        held.setdefault(server, []).append(
            SlotMove(
                slot, tuple(one.number for one in together), server, server, sum(one.nbytes for one in together),
                max(one.largest_key_bytes for one in together),
            )
        )  # fmt: skip
    moves: list[SlotMove] = []
    while (move := _next(counts, held, most_key_bytes)) is not None:
        held[move.source] = [one for one in held[move.source] if one.slot != move.slot]
        counts[move.source] -= len(move.partitions)
        counts[move.target] += len(move.partitions)
        moves.append(move)
    is_even = max(counts.values(), default=0) - min(counts.values(), default=0) <= 1
    large = [one for one in placed if most_key_bytes is not None and one.largest_key_bytes > most_key_bytes]
    fullest = max(counts.values(), default=0)
    return RebalancePlan(tuple(moves), () if is_even else tuple(one for one in large if counts[one.server] == fullest))


def _next(counts: dict[str, int], held: dict[str, list[SlotMove]], most_key_bytes: int | None) -> SlotMove | None:
    """Return a move from the fullest server to the emptiest, or None if none makes them more even."""
    target = min(counts, key=lambda server: counts[server], default="")
    for source in sorted(counts, key=lambda server: -counts[server]):
        surplus = counts[source] - counts[target]
        fitting = [
            one
            for one in held[source]
            if len(one.partitions) < surplus and (most_key_bytes is None or one.largest_key_bytes <= most_key_bytes)
        ]
        if fitting:
            best = min(fitting, key=partial(_cost, surplus))
            return replace(best, source=source, target=target)
    return None


def _cost(surplus: int, move: SlotMove) -> tuple[int, bool, int, int]:
    """Return what is least for the best move: how uneven it leaves the two servers, and then what it moves."""
    return abs(surplus - 2 * len(move.partitions)), 0 in move.partitions, move.nbytes, move.slot
