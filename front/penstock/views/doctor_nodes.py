"""The rules for the nodes of a cluster together: clocks, replicas, slots, and memory by master. From facts to findings.

`doctor_server` has the rules for a single master.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from penstock.views.doctor import Finding, ok
from penstock.views.servers import cli_of, fix_of
from penstock_common.printable import readable_bytes
from penstock_common.server.nodes import NodeState
from penstock_common.stream.servers.budgets import ServerBudgets
from penstock_common.stream.servers.suitability import may_evict, memory_of
from penstock_common.tuning import LEASE_S

TIMEOUTS_A_LEASE: Final = 4
"""A failover begins after one node timeout, and a member must be able to renew its leases after it."""
CLOCKS_S: Final = 1.0
"""Clocks that differ by less are as good as equal: leases and heartbeats are compared in tenths of a lease."""

Findings = Iterator[tuple[str, Finding]]
"""The subject of each finding, and the finding."""


def check_nodes(nodes: Sequence[NodeState], budgets: Sequence[ServerBudgets]) -> list[tuple[str, Finding]]:
    """Return the findings on all nodes of a cluster."""
    found = [each for node in nodes for each in _check_node(node, nodes)]
    found += [
        (_of(node), Finding("budgets", "error", str(one), f"{_cli(node)} INFO memory"))
        for one in budgets
        for node in nodes
        if one.where == node.where and one.left_bytes < 0
    ]
    return [*found, ("cluster", _clocks(nodes))]


def _of(node: NodeState) -> str:
    return f"server {node.where}"


def _cli(node: NodeState) -> str:
    return cli_of(node.host, node.port)


def _set(node: NodeState, name: str, value: object) -> str:
    return f"{_cli(node)} CONFIG SET {name} {value}"


def _check_node(node: NodeState, nodes: Sequence[NodeState]) -> Findings:
    if node.info is None:
        yield _of(node), Finding("reachable", "error", node.failure, f"{_cli(node)} PING")
        return
    rules = [_full_coverage(node), _node_timeout(node), _half_moved(node, nodes)]
    rules += [_replicas(node)] if node.info.get("role") == "master" else [
        _copy(node, nodes), _least_replicas(node, nodes), _eviction(node),
    ]  # fmt: skip
    for finding in rules:
        yield _of(node), finding


def _replicas(node: NodeState) -> Finding:
    """Check that a master has a replica."""
    online = [one for one in node.replicas if one.is_online]
    if online:
        lag = max(one.lag_bytes for one in online)
        return ok("replicas", f"{len(online)}, the last one {readable_bytes(lag)} behind")
    what = "none is in step" if node.replicas else "none"
    return Finding(
        "replicas", "warning", f"{what}: if the server is lost, its partitions are lost with it",
        f"redis-cli --cluster add-node HOST:PORT {shlex.quote(f'{node.host}:{node.port}')} --cluster-slave "
        f"--cluster-master-id {node.id}",
    )  # fmt: skip


def _master_of(node: NodeState, nodes: Sequence[NodeState]) -> tuple[str, NodeState | None]:
    """Return the place of a replica's master, and its state if it answered."""
    info = node.info or {}
    where = f"{info.get('master_host')}:{info.get('master_port')}"
    return where, next((one for one in nodes if f"{one.host}:{one.port}" == where and one.info is not None), None)


def _copy(node: NodeState, nodes: Sequence[NodeState]) -> Finding:
    """Check that a replica follows its master, and has as much memory."""
    info, (where, master) = node.info or {}, _master_of(node, nodes)
    if info.get("master_link_status") != "up":
        return Finding(
            "replication", "warning", f"it does not follow its master {where}: a failover now loses what it lacks",
            f"{_cli(node)} INFO replication",
        )  # fmt: skip
    mine, its = (int((one.info or {}).get("maxmemory", 0)) if one is not None else 0 for one in (node, master))
    if mine and (mine < its or not its) and master is not None:
        return Finding(
            "memory", "warning",
            f"its maxmemory is {readable_bytes(mine)}, that of its master {where} "
            f"{readable_bytes(its) if its else 'has no limit'}: after a failover the budgets may not fit",
            _set(node, "maxmemory", its),
        )  # fmt: skip
    if not mine and its:
        return Finding(
            "memory", "warning", f"it has no maxmemory, its master {where} has {readable_bytes(its)}",
            _set(node, "maxmemory", its),
        )  # fmt: skip
    return ok("replication", f"follows {where}")


def _least_replicas(node: NodeState, nodes: Sequence[NodeState]) -> Finding:
    """Check that a replica keeps its master's setting after a failover. `doctor_server` has the rule for masters."""
    name, (where, master) = "min-replicas-to-write", _master_of(node, nodes)
    mine, its = (int((one.config or {}).get(name, 0)) if one is not None else 0 for one in (node, master))
    if mine < its:
        return Finding(
            "min replicas", "warning",
            f"{name} is {mine}, that of its master {where} {its}: a failover loses that setting",
            _set(node, name, its),
        )  # fmt: skip
    return ok("min replicas", f"writes would need {mine}" if mine else "as its master")


def _eviction(node: NodeState) -> Finding:
    """Check that a replica would not delete samples after a failover."""
    policy = memory_of(node.info or {}).policy
    if may_evict(policy):
        return Finding(
            "eviction", "error", f"maxmemory-policy is {policy}: after a failover it may delete samples unread",
            _set(node, "maxmemory-policy", "noeviction"),
        )  # fmt: skip
    return ok("eviction", policy)


def _full_coverage(node: NodeState) -> Finding:
    """Check that one lost master does not stop all others."""
    if (node.config or {}).get("cluster-require-full-coverage") == "yes":
        return Finding(
            "coverage", "warning", "cluster-require-full-coverage is yes: while one master is down, all others refuse",
            _set(node, "cluster-require-full-coverage", "no"),
        )  # fmt: skip
    return ok("coverage", "the others serve while one master is down" if node.config else "it does not tell")


def _node_timeout(node: NodeState) -> Finding:
    """Check that a failover is over before leases expire."""
    timeout_s = int((node.config or {}).get("cluster-node-timeout", 0)) / 1000
    if timeout_s * TIMEOUTS_A_LEASE >= LEASE_S:
        best = int(LEASE_S / TIMEOUTS_A_LEASE / 1.5) * 1000
        return Finding(
            "node timeout", "warning",
            f"cluster-node-timeout is {timeout_s:g} s: with a lease of {LEASE_S:.0f} s a failover may outlast leases, "
            "and entries are given to other members", _set(node, "cluster-node-timeout", best),
        )  # fmt: skip
    return ok("node timeout", f"{timeout_s:g} s" if timeout_s else "it does not tell")


def _half_moved(node: NodeState, nodes: Sequence[NodeState]) -> Finding:
    """Check for slots that a tool began to move, and left when it ended."""
    if not node.half_moved:
        return ok("moving slots", "none")
    addresses = {one.id: f"{one.host}:{one.port}" for one in nodes}
    slots = ", ".join(
        f"{half.slot} {'to' if half.is_leaving else 'from'} {addresses.get(half.other, half.other)}"
        for half in node.half_moved
    )
    return Finding(
        "moving slots", "error", f"half moved: slot {slots}. If no tool is at it now, requests there fail for ever",
        fix_of(node.host, node.port),
    )  # fmt: skip


def _clocks(nodes: Sequence[NodeState]) -> Finding:
    """Compare the clocks. A failover to a server whose clock is behind makes everybody look alive for longer."""
    known = sorted((node for node in nodes if node.info is not None), key=lambda node: node.clock_ahead_s)
    if len(known) < 2:
        return ok("clocks", "nothing to compare")
    slow, fast = known[0], known[-1]
    apart = fast.clock_ahead_s - slow.clock_ahead_s - (fast.round_trip_s + slow.round_trip_s) / 2
    if apart > CLOCKS_S:
        return Finding(
            "clocks", "warning",
            f"the clock of {fast.where} is {apart:.1f} s ahead of that of {slow.where}: after a failover members look "
            "dead, or alive, for that time",
            f"chronyc makestep on {shlex.quote(fast.host)} and on {shlex.quote(slow.host)}",
        )  # fmt: skip
    return ok("clocks", f"all within {CLOCKS_S:g} s of each other")
