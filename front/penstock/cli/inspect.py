"""``penstock inspect``: the streams, how full they are, their readers, and the progress of each reader."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli import STREAM_NAME, add_json, add_url, connected
from penstock_common.printable import readable_bytes, readable_span, shortened, spaced

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_common.explain.details import EpochDetails, StreamDetails
    from penstock_common.explain.snapshot import EpochSnapshot, GroupSnapshot, StreamSnapshot
    from penstock_common.stream.payloads import PayloadStorage
    from penstock_common.stream.streams import Stream


EPILOG = (
    "example:\n  penstock inspect\n  penstock inspect train\n  penstock inspect train --json | jq .groups\n\n"
    "from is the first epoch that a group reads, lag what no member of it was given yet (samples, and the entries\n"
    "that hold them), or in canonical order what its rank has not acknowledged; pending was given and is not\n"
    "acknowledged. Newest done is the newest epoch that the group acknowledged as a whole, released or not.\n"
    "Workers wished: what the fastest group would take if it never waited, over what one worker makes;\n"
    "docs/fleet.md. Payload: where samples lie, and with segments (docs/segments.md) what the files take: more\n"
    "than the bytes held.\n\n"
    "exit codes: 0 shown, 1 an error, such as a damaged stream; the others are shown, 2 wrong usage"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument("stream", nargs="?", type=STREAM_NAME, help="left out: a table of all streams")
    add_url(parser)
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the streams, or one of them. It changes nothing."""
    from penstock.cli.monitor_screen import NO_STREAMS
    from penstock.views.inspect import stream_json
    from penstock_common.explain.details import read_all_details, read_details
    from penstock_common.stream.directory import StreamLister, why_empty

    with connected(args) as client:
        if args.stream is None:
            lister = StreamLister(client)
            streams, damaged = read_all_details(client, lister.names())
            reasons = {name: str(error) for name, error in damaged.items()} | lister.unseen
            if not streams and not reasons and not args.json:
                console.line(why_empty(client) or NO_STREAMS)
                return 0
            return _show_all(streams, reasons, args, console)
        details = read_details(client, args.stream)
        if args.json:
            console.json(stream_json(details))
        else:
            _print_stream(details, console)
        _tell_states([details], console)
    return 0


def _tell_states(streams: list[StreamDetails], console: Console) -> None:
    """Print which deletions did not end, and why servers of these streams take no writes now, each once."""
    from penstock_common.stream.streams import said_deleting

    for each in streams:
        if each.stream.is_deleting:
            console.notice(f"penstock: stream {each.stream.name!r}: {said_deleting(each.stream.name)}")
    for refusal in dict.fromkeys(server.refusal for each in streams for server in each.snapshot.servers):
        if refusal:
            console.notice(f"penstock: {refusal}")


def _show_all(streams: list[StreamDetails], damaged: dict[str, str], args: argparse.Namespace, console: Console) -> int:
    """Print all streams, and return the exit code: 1 if one is damaged."""
    from penstock.views.inspect import stream_json

    if args.json:
        console.json([*map(stream_json, streams), *({"name": name, "error": why} for name, why in damaged.items())])
    elif streams:
        _print_streams(streams, console)
    _tell_states(streams, console)
    for name, why in damaged.items():
        console.notice(f"penstock: stream {name!r} cannot be read: {why}")
    return 1 if damaged else 0


def _print_streams(streams: list[StreamDetails], console: Console) -> None:
    rows = [
        (
            each.snapshot.name,
            len(each.epochs),
            sum(epoch.entries for epoch in each.epochs.values()),
            _of(each.snapshot.held_bytes, each.snapshot.budget_bytes),
            len(each.snapshot.groups),
            sum(group.lag_samples for group in each.snapshot.groups),
        )
        for each in streams
    ]
    console.table(rows, head=("stream", "epochs", "entries", "bytes", "groups", "lag (samples)"))


def _print_stream(details: StreamDetails, console: Console) -> None:
    from penstock.views.servers import HEAD, is_worth_showing, server_json, server_row

    stream, seen = details.stream, details.snapshot
    final = "" if seen.final is None else f" of {seen.final} planned"
    released = f"; released: {details.released}" if details.released else ""
    entries = sum(epoch.entries for epoch in details.epochs.values())
    console.line((f"stream {seen.name}", "bold"), f" (id {seen.id})")
    console.line(f"  spec        {_spec(stream)}")
    console.line(f"  partitions  {len(stream.partitions)}")
    console.line(f"  held        {entries} entries, {_of(seen.held_bytes, seen.budget_bytes)} of payload")
    console.line(f"  payload     {_plane(details.payload)}")
    console.line(f"  retention   {stream.retention}")
    console.line(f"  epochs      {seen.next_epoch} begun{final}, {len(details.epochs)} retained{released}")
    if details.epochs:
        console.line()
        head = ("epoch", "state", "samples", "bad", "shards done", "entries", "bytes", "")
        rows = [
            _epoch_row(epoch, details.epochs[epoch.epoch]) for epoch in seen.epochs if epoch.epoch in details.epochs
        ]
        console.table(rows, head=head)
        _print_reasons(details, console)
    console.line()
    if seen.groups:
        head = ("group", "from", "lag samples", "entries", "pending", "dead", "newest done", "")
        console.table([_group_row(group) for group in seen.groups], head=head)
    else:
        console.line(f"no group reads it yet: start a trainer, or `penstock groups declare {seen.name} NAME`")
    if is_worth_showing(seen.servers):
        console.line()
        console.table([server_row(server_json(server)) for server in seen.servers], head=HEAD)
    members = [row for group in seen.groups for row in _member_rows(group)]
    if members:
        console.line()
        console.table(members, head=("group", "member", "last seen", "pending"))
    if seen.waiting:
        console.line(_waiting(seen))
    if seen.rates.workers or any(trainer.rate for trainer in seen.rates.trainers.values()):
        console.line()
        console.line(_workers(seen))
    ranks = [
        (group.name, one.rank, one.epoch, f"{one.position} of {'?' if one.planned is None else one.planned}")
        for group in seen.groups
        for one in group.ranks
    ]
    if ranks:
        console.line()
        console.table(ranks, head=("group", "rank", "epoch", "position"))
    if seen.groups:
        console.line()
        console.line((f"what holds it up, and what helps: penstock monitor {seen.name}", "dim"))
    for epoch, ends_in_s in seen.replays:
        console.line(f"a replay holds epoch {epoch} for {ends_in_s:.0f} s more")


def _plane(found: PayloadStorage) -> str:
    if found.folder is None:
        return "in the entries, on the server"
    if not found.is_seen:
        return found.why_unseen
    spare = f", {found.spare_files} spare ({readable_bytes(found.spare_bytes)})" if found.spare_files else ""
    files = f"{found.files} file{'' if found.files == 1 else 's'}"
    return f"segments in {found.folder}: {files} ({readable_bytes(found.file_bytes)}){spare}"


def _print_reasons(details: StreamDetails, console: Console) -> None:
    """Print the reasons of the newest epoch with bad samples, because those of other epochs are mostly the same."""
    for number, epoch in reversed(details.epochs.items()):
        for kind in epoch.reasons:
            console.line(f"  bad in epoch {number}: {kind['samples']} like {shortened(spaced(kind['such_as']), 200)}")
        if epoch.reasons:
            console.line(f"  all of them: penstock bad list {details.snapshot.name} --epoch {number}")
            return


def _workers(seen: StreamSnapshot) -> str:
    from penstock_producer.jobs.autoscaler import is_tellable, load_of, shown

    load = load_of(seen.rates)
    if not load.workers:
        return f"no worker says that it is at work: {load}"
    wished = shown(load)
    count = f"{load.workers} worker{'' if load.workers == 1 else 's'}"
    number = (
        "not known yet" if wished is None else wished if is_tellable(wished, load.workers) else "more than can be told"
    )
    return f"{count}, wished {number}: {load}"


def _waiting(seen: StreamSnapshot) -> str:
    count = len(seen.waiting)
    (epoch, shard), first = min(seen.waiting.items(), key=lambda each: each[1].since_ms)
    full = {"memory": "the server's memory is full", "folder": "the folder of segments is full"}.get(
        first.why, "the budget is full"
    )
    return (
        f"{count} writer{' waits' if count == 1 else 's wait'} for space ({full}), the longest for "
        f"{seen.waited_s:.0f} s: shard {shard} of epoch {epoch}"
    )


def _epoch_row(epoch: EpochSnapshot, details: EpochDetails) -> tuple[object, ...]:
    samples = f"{epoch.committed} of {'?' if epoch.planned is None else epoch.planned}"
    shards = f"{details.shards_done} of {details.shards}"
    words = (("feed", epoch.kind == "feed"), ("trimmed", epoch.is_trimmed), ("pinned", epoch.is_pinned))
    notes = ", ".join(word for word, is_so in words if is_so)
    return epoch.epoch, epoch.state, samples, epoch.bad, shards, details.entries, readable_bytes(epoch.bytes), notes


def _group_row(group: GroupSnapshot) -> tuple[object, ...]:
    hold = "declared" if group.declared else "holds data" if group.holds else "left: holds no data"
    return (
        group.name, group.first_epoch, group.lag_samples, group.lag_entries, group.pending_entries, group.dead_letters,
        "none" if group.newest_done is None else group.newest_done, f"{group.kind}, {hold}",
    )  # fmt: skip


def _member_rows(group: GroupSnapshot) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for member in group.members:
        age = "gone" if member.liveness.unseen_s is None else f"{readable_span(member.liveness.unseen_s)} ago"
        name = "(returned)" if member.name.startswith("~") else member.name
        rows.append((group.name, name, age, member.pending_entries))
    return rows


def _spec(stream: Stream) -> str:
    if stream.spec is None:
        return "not known before the first sample"
    return ", ".join(f"{name}: {dtype} {list(shape)}" for name, (dtype, shape) in stream.spec.as_json().items())


def _of(used: int, budget: int) -> str:
    return f"{readable_bytes(used)} of {readable_bytes(budget)} ({100 * used / budget:.0f}%)"
