"""The JSON of ``penstock inspect``, ``groups list`` and ``epochs list``. Scripts rely on its keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.views.monitor import staffing
from penstock.views.servers import server_json
from penstock_common.explain.details import EpochDetails, StreamDetails
from penstock_common.explain.snapshot import EpochSnapshot, GroupSnapshot


def stream_json(details: StreamDetails) -> dict[str, Any]:
    """Return one stream with its epochs, groups, replays, waiting writers, workers and trainers."""
    stream, seen = details.stream, details.snapshot
    return {
        "name": seen.name,
        "id": seen.id,
        "spec": None if stream.spec is None else stream.spec.as_json(),
        "partitions": len(stream.partitions),
        "budget_bytes": seen.budget_bytes,
        "block_bytes": stream.block_bytes,
        "retention": stream.retention,
        "payload": asdict(details.payload),
        "bytes": seen.held_bytes,
        "entries": sum(epoch.entries for epoch in details.epochs.values()),
        "next_epoch": seen.next_epoch,
        "final": seen.final,
        "released": details.released,
        "deleting": stream.is_deleting,
        "epochs": epochs_json(details),
        "groups": [group_json(group) for group in seen.groups],
        "replays": [{"epoch": epoch, "ends_in_s": round(ends_in_s, 1)} for epoch, ends_in_s in seen.replays],
        "waiting": [
            {
                "epoch": epoch,
                "shard": shard,
                "since_s": round((seen.now_ms - waiter.since_ms) / 1000, 1),
                "need_bytes": waiter.need_bytes,
                "why": waiter.why,
            }
            for (epoch, shard), waiter in sorted(seen.waiting.items(), key=lambda each: each[1].since_ms)
        ],
        "workers": [
            {"name": name, "rate": report.rate}
            | {kind: report.shares.get(kind, 0.0) for kind in ("busy", "room", "idle")}
            for name, report in seen.rates.workers.items()
        ],
        "trainers": [
            {"group": group, "member": member, "rate": report.rate}
            for (group, member), report in seen.rates.trainers.items()
        ],
        "staffing": staffing(seen),
        "servers": [server_json(server) for server in seen.servers],
    }


def epochs_json(details: StreamDetails) -> list[dict[str, Any]]:
    """Return the retained epochs."""
    seen = details.snapshot.epochs
    return [_epoch_json(epoch, details.epochs[epoch.epoch]) for epoch in seen if epoch.epoch in details.epochs]


def _epoch_json(epoch: EpochSnapshot, details: EpochDetails) -> dict[str, Any]:
    return {
        "epoch": epoch.epoch,
        "state": epoch.state,
        "kind": epoch.kind,
        "planned": epoch.planned,
        "committed": epoch.committed,
        "shards_done": details.shards_done,
        "shards": details.shards,
        "bad": epoch.bad,
        "reasons": details.reasons,
        "entries": details.entries,
        "bytes": epoch.bytes,
        "trimmed": epoch.is_trimmed,
        "pinned": epoch.is_pinned,
    }


def group_json(group: GroupSnapshot) -> dict[str, Any]:
    """Return one group."""
    return {
        "name": group.name,
        "kind": group.kind,
        "declared": group.declared,
        "holds": group.holds,
        "first_epoch": group.first_epoch,
        "lag_entries": group.lag_entries,
        "lag_samples": group.lag_samples,
        "pending_entries": group.pending_entries,
        "dead_letters": group.dead_letters,
        "settled_epochs": list(group.done_epochs),
        "members": [
            {
                "name": member.name,
                "seen_s": None if member.liveness.unseen_s is None else round(member.liveness.unseen_s, 1),
                "pending_entries": member.pending_entries,
                "has_ended": member.liveness.has_ended,
                "is_silent": member.is_silent,
            }
            for member in group.members
        ],
        "ranks": [asdict(rank) for rank in group.ranks],
    }
