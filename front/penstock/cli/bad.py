"""``penstock bad``: lists bad samples and dead letters, shows one, gives one to its group again, or discards one."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.cli import EPOCH_NUMBER, Actions, add_action, opened
from penstock_common.printable import shortened, spaced

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_common.stream.commands import Client
    from penstock_common.stream.mending.bad import BadReport, DeadLetter
    from penstock_common.stream.streams import Stream


EPILOG = """\
example:
  penstock bad list train
  penstock bad show train 3 1700000000000-0
  penstock bad retry train --group resnet
  penstock bad drop train 3 --group resnet --reason "the disk is gone"

Two kinds of bad things are kept, by identity (epoch, shard, offset) and reason, until their epoch is released:

quarantined: a sample that its source could not make. It is a hole in the epoch, done for every group and for ever:
fix the source, and the next epoch has the sample. It cannot be retried.

dead letter: an entry that one group could not read (damaged, forged, of a newer version). That group's epoch closes
without it; other groups are not concerned. `retry` gives it to the group again, e.g. after an update.

`drop` is your word that a group goes on without: with an entry's id, without that entry, be it a dead letter or pending
(one on which training dies); without, all that is dead or lost to the group, such as what EpochIncomplete names. The
samples count as dead, not as lost, and the epoch closes. `penstock audit --repair` makes lost samples again instead."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", action=Actions)
    listing = add_action(actions, "list", "quarantined samples and dead letters, with their reasons")
    show = add_action(actions, "show", "one entry's header and sizes; no payload is fetched")
    retry = add_action(actions, "retry", "give dead letters to their groups again")
    drop = add_action(actions, "drop", "go on without what is dead or lost, or without one entry")
    for one in (listing, retry):
        one.add_argument(
            "--epoch", type=EPOCH_NUMBER, metavar="N", help="only of this epoch (default: all that are retained)"
        )
        one.add_argument("--group", help="only of this group (default: all)")
    for one in (show, drop):
        one.add_argument("epoch", type=EPOCH_NUMBER, help="its number, as `penstock epochs list` shows it")
    show.add_argument("entry", type=_entry, help="the entry's id, as `penstock bad list` shows it")
    retry.add_argument("entry", nargs="?", type=_entry, help="only this entry")
    drop.add_argument("entry", nargs="?", type=_entry, help="only this entry (default: all that is dead or lost)")
    who = drop.add_mutually_exclusive_group(required=True)
    who.add_argument("--group", help="for this group")
    who.add_argument("--all-groups", action="store_true", help="for every group; forged entries are then deleted")
    drop.add_argument("--reason", default="dropped by an operator", help="kept with the identity")


def run(args: argparse.Namespace, console: Console) -> int:
    """Do one of the four actions, and print what was done."""
    with opened(args) as (client, stream):
        {"list": _list, "show": _show, "retry": _retry, "drop": _drop}[args.action](client, stream, args, console)
    return 0


def _list(client: Client, stream: Stream, args: argparse.Namespace, console: Console) -> None:
    from penstock_common.stream.mending.bad import list_bad

    bad = list_bad(client, stream, epoch=args.epoch, group=args.group)
    if args.json:
        console.json(asdict(bad))
    elif not bad.quarantined and not bad.dead:
        console.line(f"nothing of {stream.name!r} is quarantined, and no group has a dead letter")
    else:
        _print(bad, console)


def _print(bad: BadReport, console: Console) -> None:
    if bad.quarantined:
        rows = [(q.epoch, q.shard, q.offset, _shown(q.why)) for q in bad.quarantined]
        console.line(f"quarantined samples: {len(rows)}")
        console.table(rows, head=("epoch", "shard", "offset", "why"))
    if bad.dead:
        rows_of_dead = [
            (d.epoch, d.group, d.entry or "(none)", _where(d), _ago(d.since_ms), "given up" if d.given_up else "dead",
             _shown(d.why))
            for d in bad.dead
        ]  # fmt: skip
        console.line(f"dead letters: {len(rows_of_dead)}")
        console.table(rows_of_dead, head=("epoch", "group", "entry", "samples", "since", "is", "why"))


def _show(client: Client, stream: Stream, args: argparse.Namespace, console: Console) -> None:
    from penstock_common.stream.mending.bad import show_entry

    view = show_entry(client, stream, args.epoch, args.entry)
    if args.json:
        console.json(asdict(view))
        return
    where = (
        f"shard {view.shard} offsets {view.first}-{view.end - 1}" if view.shard is not None else "in no shard's index"
    )
    console.line(f"entry {view.entry} of epoch {view.epoch} of {stream.name!r}: {where}")
    for letter in view.dead_for:
        console.line(f"dead for group {letter.group!r}: {_shown(letter.why)}")
    console.line(f"header: {view.header or '(none)'}")
    if view.problem:
        console.line(f"the header cannot be read: {_shown(view.problem)}")
    console.table([(name, nbytes) for name, nbytes in view.fields], head=("field", "bytes"))


def _retry(client: Client, stream: Stream, args: argparse.Namespace, console: Console) -> None:
    from penstock_common.stream.mending.bad import retry_dead

    done = retry_dead(client, stream, epoch=args.epoch, group=args.group, entry=args.entry)
    _tell(done, "is pending again: the next free member of its group takes it", args, console)


def _drop(client: Client, stream: Stream, args: argparse.Namespace, console: Console) -> None:
    from penstock_common.stream.mending.drop import drop_bad

    done = drop_bad(client, stream, args.epoch, group=args.group, reason=args.reason, entry=args.entry)
    _tell(done, "is given up: the group waits for none of its samples", args, console)


def _tell(done: list[DeadLetter], what: str, args: argparse.Namespace, console: Console) -> None:
    if args.json:
        console.json([asdict(letter) for letter in done])
    elif not done:
        console.line(f"nothing to {args.action}: no group has a dead letter or a loss there")
    for letter in () if args.json else done:
        entry = f"entry {letter.entry} ({_where(letter)})" if letter.entry else _where(letter)
        console.line(f"epoch {letter.epoch}, group {letter.group!r}: {entry} {what}")


def _where(letter: DeadLetter) -> str:
    if letter.shard is None:
        return "in no index"
    return f"shard {letter.shard} offsets {letter.first}-{letter.end - 1}"


def _ago(since_ms: int) -> str:
    if not since_ms:
        return "?"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since_ms / 1000))


def _shown(text: str) -> str:
    """Return one line without control characters, because a reason may quote a forged text."""
    return shortened(spaced(text), 200)


def _entry(text: str) -> str:
    if not re.fullmatch(r"\d+-\d+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no entry's id: they look like 1700000000000-0")
    return text
