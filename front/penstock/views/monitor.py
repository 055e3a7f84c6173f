"""Rates from two snapshots, and the record that the monitor shows, also as JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.views.bottleneck import FullServer, GroupSituation, StreamSituation, judge
from penstock.views.servers import is_worth_showing, server_json
from penstock_common.explain.snapshot import GroupSnapshot, StreamSnapshot
from penstock_common.stream.feeds import FEED
from penstock_common.stream.groups.roster import ORDERED, rank_member
from penstock_common.stream.manifest import OPEN, SIZED
from penstock_common.stream.reported_rates import ReportedRate
from penstock_producer.jobs.autoscaler import load_of, shown


def rate(before: float, now: float, seconds: float) -> float | None:
    """Return the rate of a counter, or None if no time has passed or the counter restarted."""
    return (now - before) / seconds if seconds > 0 and now >= before else None


def seen(before: StreamSnapshot | None, now: StreamSnapshot) -> dict[str, Any]:
    """Return one stream: rates between two snapshots (None without an earlier one), and the verdict."""
    if before is not None and before.id != now.id:
        before = None
    seconds = now.at_s - before.at_s if before is not None else 0.0
    earlier = {group.name: group for group in before.groups} if before is not None else {}
    groups = [_group(now, group, earlier.get(group.name), seconds) for group in now.groups]
    record: dict[str, Any] = {
        "stream": now.name,
        "id": now.id,
        "held_bytes": now.held_bytes,
        "budget_bytes": now.budget_bytes,
        "in": {
            "samples_per_s": before and rate(before.made_samples, now.made_samples, seconds),
            "bytes_per_s": before and rate(before.made_bytes, now.made_bytes, seconds),
            "entries_per_s": before and rate(before.made_entries, now.made_entries, seconds),
        },
        "epochs": [
            {**asdict(epoch), "read": dict(epoch.read)} for epoch in now.epochs
        ],
        "final": now.final,
        "groups": groups,
        "workers": hosts(now),
        "silent_workers": silent_hosts(now),
        "staffing": staffing(now),
        "waiting": {
            "writers": len(now.waiting), "longest_s": round(now.waited_s, 1),
            "why": sorted({waiter.why for waiter in now.waiting.values()}),
        },
        "replays": len(now.replays),
        "server": {"used_bytes": now.memory.used_bytes, "limit_bytes": now.memory.limit_bytes},
        "servers": [server_json(server) for server in now.servers] if is_worth_showing(now.servers) else [],
    }  # fmt: skip
    found = judge(situation(now))
    record["bottleneck"] = {"cause": found.cause, "text": found.text, "remedy": found.remedy}
    return record


def staffing(now: StreamSnapshot) -> dict[str, Any]:
    """Return the facts behind the wished number of workers. Rates are samples a second, or None while unknown."""
    load = load_of(now.rates)
    return {
        "workers": load.workers, "wished": shown(load), "worker_rate": load.rate, "group_rates": load.demand,
        "busy": load.busy if load.workers else None, "room": load.room, "idle": load.idle,
    }  # fmt: skip


def _group(now: StreamSnapshot, group: GroupSnapshot, before: GroupSnapshot | None, seconds: float) -> dict[str, Any]:
    reports = {member: pace for (name, member), pace in now.rates.trainers.items() if name == group.name}
    return {
        "name": group.name, "kind": group.kind, "declared": group.declared, "holds": group.holds,
        "out": {
            "samples_per_s": before and rate(before.given_samples, group.given_samples, seconds),
            "bytes_per_s": before and rate(before.given_bytes, group.given_bytes, seconds),
        },
        "lag_entries": group.lag_entries, "lag_samples": group.lag_samples, "lag_bytes": group.lag_bytes,
        "lag_s": round(group.lag_s, 1),
        "pending_entries": group.pending_entries, "redelivered_entries": group.redelivered_entries,
        "bad_entries": group.dead_letters,
        "members": [
            {
                "name": member.name,
                "seen_s": None if (age := member.liveness.unseen_s) is None else round(age, 1),
                "is_silent": member.is_silent,
                "pending_entries": member.pending_entries,
                "rate": reports[member.name].rate if member.name in reports else None,
                "waits": waits(reports.get(member.name)),
            }
            for member in group.members
        ],
    }  # fmt: skip


def waits(report: ReportedRate | None) -> float | None:
    """Return the part of the last ten seconds in which a training loop waited for batches, or None without a report."""
    return round(1.0 - report.recent.get("training", 0.0), 3) if report is not None and report.recent else None


def hosts(now: StreamSnapshot) -> list[dict[str, Any]]:
    """Return the worker processes by host: a worker's name is ``host.token``."""
    hosts: dict[str, list[ReportedRate]] = {}
    for name, report in now.rates.workers.items():
        hosts.setdefault(_host_of(name), []).append(report)
    found = []
    for host, workers in sorted(hosts.items()):
        rates = [report.rate * report.shares.get("busy", 1.0) for report in workers if report.rate is not None]
        shares = {
            kind: round(sum(report.shares.get(kind, 0.0) for report in workers) / len(workers), 3)
            for kind in ("busy", "room", "idle")
        }
        found.append({"host": host, "workers": len(workers), "samples_per_s": sum(rates) if rates else None, **shares})
    return found


def silent_hosts(now: StreamSnapshot) -> list[dict[str, Any]]:
    """Return the hosts without a recent report of any worker, though none signed off.

    A single dead worker is left out, because its fleet replaces it. No other process reports a host that is gone.
    """
    live = {host["host"] for host in hosts(now)}
    silent: dict[str, list[float]] = {}
    for name, seen_s in now.rates.silent.items():
        silent.setdefault(_host_of(name), []).append(seen_s)
    return [
        {"host": host, "workers": len(ages), "seen_s": round(min(ages), 1)}
        for host, ages in sorted(silent.items())
        if host not in live
    ]


def _host_of(worker: str) -> str:
    return worker.rpartition(".")[0] or worker


def situation(now: StreamSnapshot) -> StreamSituation:
    """Return the few facts that the rule uses."""
    load = load_of(now.rates)
    return StreamSituation(
        stream=now.name,
        is_deleting=now.is_deleting,
        held_bytes=now.held_bytes,
        budget_bytes=now.budget_bytes,
        memory_left=now.memory.left_bytes,
        memory_limit=now.memory.limit_bytes,
        memory_used=now.memory.used_bytes,
        refusal=next((server.refusal for server in now.servers if server.refusal and server.partitions), ""),
        full=_fullest(now),
        backlog_bytes=now.memory.backlog_bytes,
        waiting=len(now.waiting),
        waits_for_memory=any(waiter.why == "memory" for waiter in now.waiting.values()),
        waits_for_folder=any(waiter.why == "folder" for waiter in now.waiting.values()),
        folder=now.payload.partition(":")[2],
        spare_bytes=now.spare_bytes,
        waited_s=now.waited_s,
        workers=load.workers,
        worker_rate=load.rate,
        wished=shown(load),
        idle=_share(now, "idle"),
        room=_share(now, "room"),
        is_all_made=_is_all_made(now),
        is_making=any(epoch.state in ("open", "sized") for epoch in now.epochs),
        has_epochs=any(epoch.state != "abandoned" for epoch in now.epochs),
        trainers=tuple(_trainers(now, group) for group in now.groups),
        open_epoch=_current(now, None)[1],
    )


def _fullest(now: StreamSnapshot) -> FullServer | None:
    """Return the server of a cluster with the least memory for writers of this stream, or None for one server."""
    known = [
        (left, server)
        for server in now.servers
        if not server.failure and server.partitions and (left := server.memory.left_bytes) is not None
    ]
    if len(now.servers) < 2 or not known:
        return None
    server = min(known, key=lambda each: each[0])[1]
    partitions = sum(len(one.partitions) for one in now.servers)
    return FullServer(
        server.where, server.memory, now.budget_bytes * len(server.partitions) // partitions, server.held_bytes
    )


def _share(now: StreamSnapshot, kind: str) -> float:
    """Return the mean part of the workers' last ten seconds that they spent in this kind of waiting."""
    recent = [one.recent for one in now.rates.workers.values() if one.recent]
    return sum(each.get(kind, 0.0) for each in recent) / len(recent) if recent else 0.0


def _is_all_made(now: StreamSnapshot) -> bool:
    ended = all(epoch.state in ("produced", "abandoned") for epoch in now.epochs)
    return ended and now.final is not None and now.next_epoch >= now.final


def _trainers(now: StreamSnapshot, group: GroupSnapshot) -> GroupSituation:
    mine = [report for (name, _), report in now.rates.trainers.items() if name == group.name]
    waiting = [part for report in mine if (part := waits(report)) is not None]
    is_ordered = group.kind == ORDERED
    there = {member.name for member in group.members}
    silent = [
        member
        for member in group.members
        if member.is_silent and (member.pending_entries or (is_ordered and group.lag_samples))
    ]
    ready_samples, open_epoch = _current(now, group.name)
    return GroupSituation(
        group=group.name,
        live=sum(one.is_live for one in group.members),
        holds=group.holds,
        waits=sum(waiting) / len(waiting) if waiting else None,
        lag_samples=group.lag_samples,
        lag_bytes=group.lag_bytes,
        pending=group.pending_entries,
        demand=load_of(now.rates).demand.get(group.name),
        is_ordered=is_ordered,
        missing=tuple(rank for rank in range(group.world) if rank_member(rank) not in there and group.lag_samples),
        silent=tuple((one.name, one.liveness.unseen_s, one.pending_entries) for one in silent),
        lost=group.lost,
        ready_samples=ready_samples,
        open_epoch=open_epoch,
    )


def _current(now: StreamSnapshot, group: str | None) -> tuple[int, int | None]:
    """Return the unread samples of the epoch that a group reads now, and the epoch's number if it holds the group up.

    The number is None unless the epoch is open, has no unread sample, and later epochs have some. While workers make
    an epoch that is no feed, the group waits for them. The group None is a new one.
    """
    readable = [epoch for epoch in now.epochs if group is None or group in epoch.read]
    unread = [(epoch, epoch.committed - (epoch.read[group] if group else 0)) for epoch in readable]
    due = [(epoch, left) for epoch, left in unread if left or epoch.state in (OPEN, SIZED)]
    if not due:
        return 0, None
    (first, ready), *later = due
    holds_up = first.state == OPEN and (first.kind == FEED or not now.rates.workers)
    return ready, first.epoch if holds_up and not ready and any(left for _, left in later) else None
