"""``penstock partitions``: where each partition lies, and the commands that would even them out."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli import LOGIN_HINT, add_stream, connected, login_options
from penstock_common.printable import readable_bytes

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock.views.partitions import PartitionsView
    from penstock_common.stream.commands import Client


EPILOG = (
    "example:\n  penstock partitions train\n  penstock partitions train --json | jq -r '.commands[]'\n\n"
    "It changes nothing. The commands that it prints are for the operator of a cluster. They move single slots,\n"
    "so that each master has as many partitions of the stream. Writers and trainers go on meanwhile.\n\n"
    "exit codes: 0 shown, 1 no such stream or no server, 2 wrong usage"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_stream(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the partitions, the servers and the commands."""
    with connected(args) as client:
        view = _view(client, args.stream)
        has_password = bool(client.connection_pool.connection_kwargs.get("password"))
    if args.json:
        console.json(view.as_json())
    else:
        _print(view, console, has_password=has_password)
    return 0


def _view(client: Client, name: str) -> PartitionsView:
    from penstock.views.partitions import PlacedPartition, view_partitions
    from penstock_common.server.nodes import look_at_nodes
    from penstock_common.server.slots import slot_of
    from penstock_common.stream.groups.roster import load_roster
    from penstock_common.stream.streams import load_stream

    stream = load_stream(client, name)
    placed = []
    for partition in stream.partitions:
        roster = load_roster(client, partition)
        largest = max(roster.epoch_bytes.values(), default=0) if stream.payload == "inline" else 0
        where = client.node_of(partition.roster).where
        placed.append(PlacedPartition(partition.number, slot_of(partition.roster), where, roster.bytes, largest))
    nodes = look_at_nodes(client)
    spare = {other.where: other for node in nodes for other in node.others}
    return view_partitions(name, placed, [*nodes, *spare.values()], login_options(client))


def _print(view: PartitionsView, console: Console, *, has_password: bool) -> None:
    rows = [(one.number, one.slot, one.server, readable_bytes(one.nbytes)) for one in view.placed]
    console.table(rows, head=("partition", "slot", "server", "bytes"))
    console.line()
    servers = [(one["server"], one["partitions"], readable_bytes(one["bytes"]), one["away"]) for one in view.servers()]
    console.table(servers, head=("server", "partitions", "bytes", ""))
    for node in view.nodes:
        if node.failure:
            console.line(f"{node.where} does not answer, so no move is proposed")
    if large := view.explain_large():
        console.line(large)
    if why := view.explain_no_commands():
        console.line(why)
    if not view.commands:
        return
    moved = sum(len(move.partitions) for move in view.plan.moves)
    nbytes = sum(move.nbytes for move in view.plan.moves)
    console.line()
    console.line(f"to even them out, move {moved} of {len(view.placed)} partitions ({readable_bytes(nbytes)}):")
    if has_password:
        console.line(f"  {LOGIN_HINT}")
    for command in view.commands:
        console.line(f"  {command}")
