"""``penstock epochs``: lists epochs, closes, abandons or pins one, and sets how many acknowledged ones are kept."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.cli import EPOCH_NUMBER, POLICY, Actions, add_action, connected
from penstock_common.errors import PenstockError, StreamConflict

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_common.stream.commands import Client
    from penstock_common.stream.manifest import Manifest
    from penstock_common.stream.streams import Stream


EPILOG = (
    "example:\n  penstock epochs list train\n  penstock epochs close train 3\n  penstock epochs abandon train 3\n"
    "  penstock epochs pin train 2\n  penstock epochs retain train epochs:3\n\n"
    "Stop the producers before closing: what they commit afterwards is not part of the epoch."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", action=Actions)
    texts = {
        "list": "every retained epoch and how far it is",
        "close": "declare that no more will come: trainers end the epoch when they have read what was committed",
        "abandon": "give the epoch up: producers stop, trainers end it at once, its data may go",
        "pin": "keep the epoch whole, whatever retention says, until it is unpinned; it counts against the budget",
        "unpin": "leave a pinned epoch to retention again",
        "retain": "what is kept of epochs that every group has acknowledged: budget (all, until space is needed), "
        "epochs:N, time:24h, bytes:500mb",
    }
    for name, text in texts.items():
        action = add_action(actions, name, text)
        if name == "retain":
            action.add_argument("policy", type=POLICY, metavar="POLICY", help="e.g. epochs:3")
        elif name != "list":
            action.add_argument("epoch", type=EPOCH_NUMBER, help="its number, as `penstock epochs list` shows it")
        if name == "abandon":
            action.add_argument("--force", action="store_true", help="also an epoch that is complete")


def run(args: argparse.Namespace, console: Console) -> int:
    """Do one of these actions, and print what was done."""
    from penstock_common.stream.streams import load_stream

    actions = {"close": _close, "abandon": _abandon, "pin": _pin, "unpin": _pin, "retain": _retain}
    with connected(args) as client:
        if args.action == "list":
            _list(client, args, console)  # its snapshot also says which servers are away
        else:
            actions[args.action](client, load_stream(client, args.stream), args, console)
    return 0


def _list(client: Client, args: argparse.Namespace, console: Console) -> None:
    from penstock.views.inspect import epochs_json
    from penstock_common.explain.details import read_details
    from penstock_common.stream.audit import find_unreplicated
    from penstock_common.stream.audit.accounts import said_unreplicated
    from penstock_common.stream.streams import said_deleting

    details = read_details(client, args.stream)
    ranges = {one: find_unreplicated(client, details.stream, one) for one in details.epochs}
    epochs = [{**one, "unreplicated": list(map(asdict, ranges[one["epoch"]]))} for one in epochs_json(details)]
    if details.stream.is_deleting:
        console.notice(f"penstock: stream {args.stream!r}: {said_deleting(args.stream)}")
    if args.json:
        console.json(epochs)
    elif not epochs:
        gone = f" (released: {details.released})" if details.released else ""
        console.line(f"stream {args.stream!r} has no retained epochs{gone}")
    else:
        rows = [
            (
                epoch["epoch"],
                epoch["state"],
                f"{epoch['committed']} of {'?' if epoch['planned'] is None else epoch['planned']}",
                epoch["bad"],
                f"{epoch['shards_done']} of {epoch['shards']}",
                ", ".join(word for word in ("pinned", "trimmed") if epoch[word]),
            )
            for epoch in epochs
        ]
        console.table(rows, head=("epoch", "state", "samples", "bad", "shards done", ""))
        for epoch in epochs:
            some = ranges[epoch["epoch"]]
            if sum(one.end - one.first for one in some) < epoch["committed"]:  # else like every single server
                for line in said_unreplicated(some):
                    console.line(f"epoch {epoch['epoch']}: {line}")


def _pin(client: Client, stream: Stream, args: argparse.Namespace, console: Console) -> None:
    from penstock_common.stream.groups.roster import pin_epoch, unpin_epoch

    is_pin = args.action == "pin"
    changed = (pin_epoch if is_pin else unpin_epoch)(client, stream, args.epoch)
    if is_pin:
        what = f"pinned{'' if changed else ' (it was before)'}: it is kept whole until it is unpinned"
    else:
        what = "left to retention again" if changed else "not pinned"
    value = {"stream": stream.name, "epoch": args.epoch, "pinned": is_pin, "changed": changed}
    console.answer(value, f"epoch {args.epoch} of {stream.name!r} is {what}", as_json=args.json)


def _retain(client: Client, stream: Stream, args: argparse.Namespace, console: Console) -> None:
    from penstock_common.stream.streams import set_field
    from penstock_producer.write.retention import parse_policy

    policy = parse_policy(args.policy)
    set_field(client, stream, "retention", policy.text)
    value = {"stream": stream.name, "retention": policy.text, "before": stream.retention}
    text = (
        f"retention of {stream.name!r} is {policy.text} (it was {stream.retention}): writers keep to it within 10 s; "
        f"without any, `penstock trim {stream.name}` does"
    )
    console.answer(value, text, as_json=args.json)


def _last_written(client: Client, stream: Stream, manifest: Manifest) -> str:
    """Return the shards of an epoch that are not ended, with their ages, or '' if there is none."""
    from penstock_common.stream.feeds import said_open_shards

    with suppress(PenstockError):  # a hint neither fails nor repairs
        return said_open_shards(client, stream, manifest)
    return ""


def _close(client: Client, stream: Stream, args: argparse.Namespace, console: Console) -> None:
    from penstock_common.stream.feeds import close_epoch
    from penstock_common.stream.manifest import load_manifest

    before = load_manifest(client, stream, args.epoch)
    if not before.is_ended and (shards := _last_written(client, stream, before)):
        console.notice(
            f"epoch {args.epoch} of {stream.name!r} has open shards: {shards}. A writer that still runs "
            "ends with ShardMismatch, and its later samples are not part of the epoch"
        )
    samples = close_epoch(client, stream, args.epoch)
    if before.is_ended:
        what = f"was produced already, with {samples} samples"
    else:
        planned = "" if before.samples is None else f" of {before.samples} planned"
        what = f"is closed as it stands; samples committed: {samples}{planned}"
    value = {"stream": stream.name, "epoch": args.epoch, "closed": not before.is_ended, "samples": samples}
    console.answer(value, f"epoch {args.epoch} of {stream.name!r} {what}", as_json=args.json)


def _abandon(client: Client, stream: Stream, args: argparse.Namespace, console: Console) -> None:
    from penstock_common.stream.manifest import ABANDONED, PRODUCED, abandon_epoch, load_manifest

    before = load_manifest(client, stream, args.epoch)
    if before.state == PRODUCED and not args.force:
        raise StreamConflict(
            f"epoch {args.epoch} of {stream.name!r} is complete, with {before.samples} samples: give --force to "
            "abandon it all the same; groups that have not read it never will"
        )
    what = "was abandoned before"
    if before.state != ABANDONED:
        abandon_epoch(client, stream, args.epoch)
        what = "is abandoned: it takes no more samples, and its data may go"
    value = {"stream": stream.name, "epoch": args.epoch, "abandoned": before.state != ABANDONED}
    console.answer(value, f"epoch {args.epoch} of {stream.name!r} {what}", as_json=args.json)
