"""The view of ``penstock partitions``: where partitions lie, and the commands that would even them out. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock_common.printable import readable_bytes
from penstock_common.server.nodes import NodeState
from penstock_common.stream.rebalance import MOST_KEY_BYTES, PlacedPartition, RebalancePlan, SlotMove, plan_moves


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
    return f"redis-cli -h {shlex.quote(node.host)} -p {node.port}{login}"


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
            f"redis-cli{login} --cluster fix {source.host}:{source.port}",
        ]
    return commands
