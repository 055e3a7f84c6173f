"""``penstock trim``: one pass of retention now, by the stream's own policy or another one, with what has to stay."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli import add_stream, byte_size, opened, whole_number
from penstock_common.printable import readable_bytes

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_common.stream.commands import Client
    from penstock_common.stream.streams import Stream
    from penstock_producer.write.retention import RetentionPolicy


SHOWN = 5


EPILOG = (
    "example:\n  penstock trim train\n  penstock trim train --keep 2\n  penstock trim train --bytes 500mb\n\n"
    "Without an option it goes by the stream's retention (`penstock epochs retain`), as writers and workers do by\n"
    "themselves every 10 seconds. What some group has not acknowledged, what is pinned and what a replay holds is\n"
    "never released: it says which epochs stay, and for whom.\n\n"
    "exit codes: 0 done, also where nothing could go; 1 no such stream or no server, 2 wrong usage"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_stream(parser)
    less = parser.add_mutually_exclusive_group()
    less.add_argument(
        "--keep",
        type=whole_number(0),
        metavar="EPOCHS",
        help="this once: only the newest so many acknowledged epochs (0: none)",
    )
    less.add_argument(
        "--bytes", type=byte_size, metavar="SIZE", help="this once: acknowledged epochs up to so many bytes, as 500mb"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Run one pass, and print what it did and what it had to leave."""
    from penstock_common.stream.payloads import plane_of
    from penstock_common.stream.ranges import ranges_of
    from penstock_common.stream.removal.reconcile import reconcile
    from penstock_producer.write.cleaner import clean_up, shrink_to_budget

    policy = _policy(args)
    with opened(args) as (client, stream):
        reconcile(client, stream, console.notice)
        done = clean_up(client, stream, console.notice, policy=policy)
        freed = done.freed_bytes + shrink_to_budget(client, stream, console.notice)
        stays, files = _stays(client, stream), plane_of(stream)
    by = f"retention {stream.retention}" if policy is None else f"{policy.text}, this once"
    if args.json:
        result = {"released_epochs": done.released, "freed_bytes": freed, "expired_groups": done.expired}
        kept = [{"epoch": epoch, "because": why} for epoch, why in stays.items()]
        console.json({"stream": stream.name, "retention": stream.retention, **result, "kept": kept})
        return 0
    one = len(done.released) == 1
    which = f"epoch{'' if one else 's'} {ranges_of(done.released)}" if done.released else "no whole epoch"
    console.line(f"released {which} of {stream.name!r} ({by}): {readable_bytes(freed)} freed")
    if files.spare_files:
        console.line(
            f"that space is free for the stream's next samples: its spare files in {files.folder} "
            f"({readable_bytes(files.spare_bytes)}) stay until a writer uses them again"
        )
    elif not files.is_seen:
        console.line(f"its files in {files.folder} stay until a writer runs: this process does not see them")
    for epoch, why in list(stays.items())[:SHOWN]:
        console.line(f"epoch {epoch} stays: {', '.join(why)}")
    if len(stays) > SHOWN:
        console.line(f"and {len(stays) - SHOWN} more; `penstock inspect {stream.name}` shows all")
    return 0


def _policy(args: argparse.Namespace) -> RetentionPolicy | None:
    from penstock_producer.write.retention import parse_policy

    if args.keep is not None:
        return parse_policy(f"epochs:{args.keep}")
    return None if args.bytes is None else parse_policy(f"bytes:{args.bytes}")


def _stays(client: Client, stream: Stream) -> dict[int, list[str]]:
    """Return, for each existing epoch, the reasons why it must stay."""
    from penstock_common.stream.commands import server_ms
    from penstock_common.stream.groups.ledger import unacknowledged_samples
    from penstock_common.stream.groups.roster import load_roster
    from penstock_common.stream.manifest import ABANDONED, find_manifest
    from penstock_producer.write.retention import is_acknowledged, is_replayed

    first = stream.partitions[0]
    roster, now_ms = load_roster(client, first), server_ms(client, first.roster)
    found: dict[int, list[str]] = {}
    for epoch in roster.epochs:
        manifest = find_manifest(client, stream, epoch)
        if manifest is None or manifest.state == ABANDONED:
            continue
        groups = roster.unacknowledged_by(epoch)
        counts = unacknowledged_samples(client, stream, manifest, groups)
        why = [f"group {name} has not acknowledged {count} samples" for name, count in sorted(counts.items()) if count]
        why += ["it is not complete yet"] if not manifest.is_ended else []
        why += ["it is pinned (`penstock epochs unpin`)"] if epoch in roster.pinned else []
        why += ["a replay reads it"] if is_replayed(roster, epoch, now_ms) else []
        if manifest.is_ended and not (groups or is_acknowledged(roster, epoch)):
            give_up = f"penstock epochs abandon {stream.name} {epoch} --force"
            why.append(f"no group has read it (`{give_up}` gives it up)")
        if why:
            found[epoch] = why
    return found
