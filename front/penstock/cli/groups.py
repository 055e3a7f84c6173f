"""``penstock groups``: lists groups, declares one before its trainer starts, resets one, or drops some for ever."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli import EPOCH_NUMBER, GROUP_NAME, Actions, add_action, connected
from penstock_common.errors import EpochNotFound, EpochsReleased
from penstock_common.printable import readable_span

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.cli.console import Console
    from penstock_common.explain.snapshot import MemberSnapshot
    from penstock_common.stream.commands import Client
    from penstock_common.stream.streams import Stream


EPILOG = (
    "example:\n  penstock groups list train\n  penstock groups declare train resnet\n"
    "  penstock groups reset train resnet 2\n  penstock groups drop train resnet\n"
    "  penstock groups drop train trial-1 trial-2 --json\n\n"
    "A trainer's group needs no declaring; but what it has not read is kept only while a member is there,\n"
    "and a declared group's until it is dropped. A group is reset only while nobody reads it; until its trainer\n"
    "comes back nothing is kept for it unless it is declared.\n\n"
    "exit codes: 0 done, 1 no such stream or group, or it is being read, 2 wrong usage"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", action=Actions)
    add_action(
        actions, "list", "every group, what it has yet to read, its silent members, and whether data is kept for it"
    )
    declare = add_action(
        actions, "declare", "make a group: all from the first whole epoch on is kept for it until it is dropped"
    )
    drop = add_action(actions, "drop", "forget groups, what they have read, and their claim on data")
    reset = add_action(
        actions, "reset", "have a group read again from an epoch, as if it had acknowledged nothing since"
    )
    for parser_of_one in (declare, reset):
        parser_of_one.add_argument("name", type=GROUP_NAME, help="the group")
    drop.add_argument("names", nargs="+", metavar="name", type=GROUP_NAME, help="a group, or several")
    declare.add_argument(
        "--ordered", action="store_true", help="for Loader(order='canonical'); a group stays what it was made as"
    )
    drop.add_argument(
        "--force", action="store_true", help="also under members that are reading; they stop with an error"
    )
    reset.add_argument("epoch", type=_epoch, help="an epoch, or 'earliest': the first that still has all its samples")


def run(args: argparse.Namespace, console: Console) -> int:
    """Do one of the actions, and print what was done."""
    from penstock_common.stream.streams import load_stream

    with connected(args) as client:
        if args.action == "list":
            _list(client, args, console)  # its snapshot also says which servers are away
        else:
            stream = load_stream(client, args.stream)
            {"declare": _declare, "reset": _reset, "drop": _drop}[args.action](client, stream, args, console)
    return 0


def _list(client: Client, args: argparse.Namespace, console: Console) -> None:
    from penstock.views.inspect import group_json
    from penstock_common.explain.monitor import StreamMonitor

    groups = StreamMonitor(client, args.stream).snapshot().groups
    if args.json:
        console.json([group_json(group) for group in groups])
    elif not groups:
        console.line(f"stream {args.stream!r} has no groups yet")
    else:
        rows = [
            (
                g.name,
                g.kind,
                "yes" if g.declared else "no",
                "yes" if g.holds else "no",
                # without the name that holds returned entries
                sum(not member.name.startswith("~") for member in g.members),
                g.lag_samples,
                g.pending_entries,
                ", ".join(_silent(g.members)),
            )
            for g in groups
        ]
        head = ("group", "kind", "declared", "data is kept", "members", "lag (samples)", "pending (entries)", "silent")
        console.table(rows, head=head)


def _silent(members: Iterable[MemberSnapshot]) -> list[str]:
    """Return the members without a recent heartbeat, with the time since the last one."""
    silent = [(member.name, member.liveness.unseen_s) for member in members if member.is_silent]
    return [f"{name} ({'gone' if unseen_s is None else readable_span(unseen_s)})" for name, unseen_s in silent]


def _declare(client: Client, stream: Stream, args: argparse.Namespace, console: Console) -> None:
    from penstock_common.stream.groups.roster import Membership, RankOrder, find_group, join_group

    name = args.name
    known = find_group(client, stream.partitions[0], name)
    order = RankOrder(0, 0, 0) if args.ordered else None
    first = join_group(client, Membership(stream, name, "", "", order), declared=True)
    if known is not None and known.declared:
        what = f"was declared before; it reads from epoch {first} on"
    else:
        what = "declared" if known is None else "was there and is declared now"
        what += f": all from epoch {first} on is kept for it until it is dropped"
    value = {"stream": stream.name, "group": name, "new": known is None, "first_epoch": first}
    console.answer(value, f"group {name!r} of {stream.name!r} {what}", as_json=args.json)


def _reset(client: Client, stream: Stream, args: argparse.Namespace, console: Console) -> None:
    from penstock_common.stream.groups.forgetting import refuse_living, reset_group
    from penstock_common.stream.groups.roster import require_group

    require_group(client, stream, args.name)
    first = _first_epoch(client, stream, args.epoch)
    refuse_living(client, stream, args.name, "stop it first: it would be handed again what it is training on")
    reset_group(client, stream, args.name, first)
    value = {"stream": stream.name, "group": args.name, "first_epoch": first}
    text = f"group {args.name!r} of {stream.name!r} reads again from epoch {first} on"
    console.answer(value, text, as_json=args.json)


def _first_epoch(client: Client, stream: Stream, epoch: str) -> int:
    from penstock_common.stream.groups.forgetting import first_whole
    from penstock_common.stream.manifest import retained_epochs

    whole = first_whole(client, stream)
    if epoch == "earliest":
        return whole
    there = retained_epochs(client, stream)
    if int(epoch) not in there:
        named = ", ".join(map(str, there)) or "none"
        raise EpochNotFound(
            f"stream {stream.name!r} has no epoch {epoch}; retained epochs: {named}; 'earliest' is {whole}"
        )
    if int(epoch) < whole:
        raise EpochsReleased(
            f"retention has removed entries of epoch {epoch} of {stream.name!r}: the first that can be read whole "
            f"is {whole} ('earliest')"
        )
    return int(epoch)


def _drop(client: Client, stream: Stream, args: argparse.Namespace, console: Console) -> None:
    from penstock_common.stream.groups.forgetting import drop_group, refuse_living
    from penstock_common.stream.groups.roster import require_group

    names = dict.fromkeys(args.names)
    for name in names:  # before the first is dropped, because a wrong name among them may mean another stream
        require_group(client, stream, name)
        if not args.force:
            refuse_living(client, stream, name, "stop it first, or give --force")
    dropped: list[dict[str, object]] = []
    for name in names:
        drop_group(client, stream, name)
        dropped.append({"stream": stream.name, "group": name, "dropped": True})
        if not args.json:
            console.line(f"group {name!r} of {stream.name!r} is dropped: nothing is kept for it any more")
    if args.json:
        console.json(dropped if len(dropped) > 1 else dropped[0])


def _epoch(text: str) -> str:
    return text if text == "earliest" else str(EPOCH_NUMBER(text))
