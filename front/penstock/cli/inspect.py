"""``penstock inspect``: what streams there are, how full, who reads them and how far everyone is."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.cli import STREAM_NAME, add_json, add_url, url_of

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_common.explain.snapshot import EpochView, GroupView, StreamView
    from penstock_producer.jobs.autoscaler import StreamLoad

NAME = "inspect"
HELP = "show streams, or one stream's epochs, groups, lag and bytes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument("stream", nargs="?", type=STREAM_NAME, help="left out: a table of all streams")
    add_url(parser)
    add_json(parser)
    parser.epilog = (
        "example:\n  penstock inspect\n  penstock inspect train\n  penstock inspect train --json | jq .groups\n\n"
        "from is the first epoch that a group reads, lag what no member of it was given yet (samples, and the entries\n"
        "that hold them); pending was given and is not acknowledged. Workers wished: what the fastest group would\n"
        "take if it never waited, over what one worker makes; docs/fleet.md. Payload: where samples lie, and with\n"
        "segments (docs/segments.md) what the files take: more than the bytes held.\n\n"
        "exit codes: 0 shown, 1 an error, such as a damaged stream; the others are shown, 2 wrong usage"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the streams, or one of them. It changes nothing."""
    from penstock_common.explain.snapshot import inspect_stream, inspect_streams
    from penstock_common.stream.client import connect

    with connect(url_of(args)) as client:
        if args.stream is None:
            views, damaged = inspect_streams(client)
            return _show_all(views, {name: str(error) for name, error in damaged.items()}, args, console)
        view = inspect_stream(client, args.stream)
        if args.json:
            console.json(asdict(view) | {"staffing": _staffing(view)})
        else:
            _print_stream(view, console)
    return 0


def _show_all(views: list[StreamView], damaged: dict[str, str], args: argparse.Namespace, console: Console) -> int:
    """Print all streams, and return the exit code: 1 where one is damaged."""
    if args.json:
        healthy = [asdict(view) | {"staffing": _staffing(view)} for view in views]
        console.json([*healthy, *({"name": name, "error": why} for name, why in damaged.items())])
    elif views or not damaged:
        _print_streams(views, console)
    for name, why in damaged.items():
        console.notice(f"penstock: stream {name!r} cannot be read: {why}")
    return 1 if damaged else 0


def _print_streams(views: list[StreamView], console: Console) -> None:
    if not views:
        console.line("no streams yet: start a producer (`penstock produce`, or penstock.Writer)")
        return
    rows = [
        (
            v.name,
            len(v.epochs),
            v.entries,
            _of(v.bytes, v.budget_bytes),
            len(v.groups),
            sum(g.lag_samples for g in v.groups),
        )
        for v in views
    ]
    console.table(rows, head=("stream", "epochs", "entries", "bytes", "groups", "lag (samples)"))


def _print_stream(view: StreamView, console: Console) -> None:
    final = "" if view.final is None else f" of {view.final} planned"
    released = f"; released: {view.released}" if view.released else ""
    console.line(console.style(f"stream {view.name}", "bold") + f" (id {view.id})")
    console.line(f"  spec        {_spec(view)}")
    console.line(f"  partitions  {view.partitions}")
    console.line(f"  held        {view.entries} entries, {_of(view.bytes, view.budget_bytes)} of payload")
    console.line(f"  payload     {_plane(view)}")
    console.line(f"  retention   {view.retention}")
    console.line(f"  epochs      {view.next_epoch} begun{final}, {len(view.epochs)} retained{released}")
    if view.epochs:
        console.line()
        head = ("epoch", "state", "samples", "bad", "shards done", "entries", "bytes", "")
        console.table([_epoch_row(epoch) for epoch in view.epochs], head=head)
        _print_reasons(view, console)
    console.line()
    if view.groups:
        head = ("group", "from", "lag samples", "entries", "pending", "dead", "settled", "")
        console.table([_group_row(group) for group in view.groups], head=head)
    else:
        console.line(f"no group reads it yet: start a trainer, or `penstock groups declare {view.name} NAME`")
    members = [row for group in view.groups for row in _member_rows(group)]
    if members:
        console.line()
        console.table(members, head=("group", "member", "last seen", "pending"))
    if view.waiting:
        console.line(_waiting(view))
    if view.workers or any(trainer["rate"] for trainer in view.trainers):
        console.line()
        console.line(_workers(view))
    ranks = [row for group in view.groups for row in _rank_rows(group)]
    if ranks:
        console.line()
        console.table(ranks, head=("group", "rank", "epoch", "position"))
    if view.groups:
        console.line()
        console.line(console.style(f"what holds it up, and what helps: penstock monitor {view.name}", "dim"))
    for replay in view.replays:
        console.line(f"a replay holds epoch {replay['epoch']} for {replay['ends_in_s']:.0f} s more")


def _plane(view: StreamView) -> str:
    found = view.payload
    if found.folder is None:
        return "in the entries, on the server"
    if not found.is_seen:
        return f"segments in {found.folder}, which is not seen from here (PENSTOCK_SEGMENTS says where it is mounted)"
    spare = f", {found.spare_files} spare ({_size(found.spare_bytes)})" if found.spare_files else ""
    files = f"{found.files} file{'' if found.files == 1 else 's'}"
    return f"segments in {found.folder}: {files} ({_size(found.file_bytes)}){spare}"


def _print_reasons(view: StreamView, console: Console) -> None:
    """Print the reasons of the newest epoch that has bad samples; those of others are mostly the same."""
    for epoch in reversed(view.epochs):
        for kind in epoch.reasons:
            such_as = "".join(c if c.isprintable() else " " for c in kind["such_as"])[:200]
            console.line(f"  bad in epoch {epoch.epoch}: {kind['samples']} like {such_as}")
        if epoch.reasons:
            console.line(f"  all of them: penstock bad list {view.name} --epoch {epoch.epoch}")
            return


def _load(view: StreamView) -> StreamLoad:
    from penstock_common.stream.reported_rates import ReportedRate, ReportedRates
    from penstock_producer.jobs.autoscaler import load_of

    def told(of: dict[str, Any]) -> ReportedRate:
        return ReportedRate(of["rate"], {kind: of[kind] for kind in ("busy", "room", "idle") if kind in of})

    trainers = {(one["group"], one["member"]): told(one) for one in view.trainers}
    return load_of(ReportedRates({one["name"]: told(one) for one in view.workers}, trainers, {}))


def _staffing(view: StreamView) -> dict[str, Any]:
    """Return the facts behind the wished number of workers. Rates are samples a second, or None while unknown."""
    from penstock_producer.jobs.autoscaler import shown

    load = _load(view)
    return {
        "workers": load.workers,
        "wished": shown(load),
        "worker_rate": load.rate,
        "group_rates": load.demand,
        "busy": load.busy if load.workers else None,
        "room": load.room,
        "idle": load.idle,
    }


def _workers(view: StreamView) -> str:
    from penstock_producer.jobs.autoscaler import is_tellable, shown

    load = _load(view)
    if not load.workers:
        return f"no worker says that it is at work: {load}"
    wished = shown(load)
    count = f"{load.workers} worker{'' if load.workers == 1 else 's'}"
    told = (
        "not known yet" if wished is None else wished if is_tellable(wished, load.workers) else "more than can be told"
    )
    return f"{count}, wished {told}: {load}"


def _waiting(view: StreamView) -> str:
    count, first = len(view.waiting), view.waiting[0]
    full = {"memory": "the server's memory is full", "folder": "the folder of segments is full"}.get(
        first["why"], "the budget is full"
    )
    return (
        f"{count} writer{' waits' if count == 1 else 's wait'} for room ({full}), the longest for "
        f"{first['since_s']:.0f} s: shard {first['shard']} of epoch {first['epoch']}"
    )


def _epoch_row(epoch: EpochView) -> tuple[object, ...]:
    samples = f"{epoch.committed} of {'?' if epoch.planned is None else epoch.planned}"
    shards = f"{epoch.shards_done} of {epoch.shards}"
    words = (("feed", epoch.kind == "feed"), ("trimmed", epoch.trimmed), ("pinned", epoch.pinned))
    notes = ", ".join(word for word, is_so in words if is_so)
    return epoch.epoch, epoch.state, samples, epoch.bad, shards, epoch.entries, _size(epoch.bytes), notes


def _group_row(group: GroupView) -> tuple[object, ...]:
    hold = "declared" if group.declared else "holds data" if group.holds else "left: holds no data"
    settled = len(group.settled_epochs)
    return (
        group.name, group.first_epoch, group.lag_samples, group.lag_entries, group.pending_entries, group.dead_letters,
        settled, f"{group.kind}, {hold}",
    )  # fmt: skip


def _member_rows(group: GroupView) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for member in group.members:
        age = "gone" if member["seen_s"] is None else f"{member['seen_s']:.0f} s ago"
        name = "(handed back)" if member["name"].startswith("~") else member["name"]
        rows.append((group.name, name, age, member["pending_entries"]))
    return rows


def _rank_rows(group: GroupView) -> list[tuple[object, ...]]:
    return [
        (
            group.name,
            one["rank"],
            one["epoch"],
            f"{one['position']} of {'?' if one['planned'] is None else one['planned']}",
        )
        for one in group.ranks
    ]


def _spec(view: StreamView) -> str:
    if view.spec is None:
        return "not known before the first sample"
    return ", ".join(f"{name}: {dtype} {list(shape)}" for name, (dtype, shape) in view.spec.items())


def _of(used: int, budget: int) -> str:
    return f"{_size(used)} of {_size(budget)} ({100 * used / budget:.0f}%)"


def _size(count: int) -> str:
    from penstock_common.stream.servers.suitability import readable_bytes

    return readable_bytes(count)
