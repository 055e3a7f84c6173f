"""``penstock audit``: proves that no sample is lost or duplicated, or names those that are."""

from __future__ import annotations

import argparse
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from threading import Timer
from typing import TYPE_CHECKING

from penstock.cli import EPOCH_NUMBER, add_stream, connected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cli.console import Console, ProgressBar
    from penstock_common.stream.audit import AuditProgress
    from penstock_common.stream.audit.accounts import AuditReport, EpochAudit
    from penstock_common.stream.commands import Client
    from penstock_producer.sources.config import SourceConfig


SHOWN = 50
"""Findings printed; --json has them all."""
SILENT_S = 4.0
"""The time after which a long audit shows its progress, and the time between two lines of it."""

EPILOG = """\
example:
  penstock audit train
  penstock audit train --epoch 2 --deep
  penstock audit train --repair images photos/ --resize 224x224 --transform augment:flip
  penstock audit train --deep --repair images photos/ --resize 224x224

Counts are samples. produced: committed by producers, without the bad; bad: the source could not make them. Per group:
delivered = acknowledged by training; pending = given out, not acknowledged; unread = not given out yet, or in
canonical order not acknowledged by its rank; dead = in dead letters, or given up by an operator; lost = nobody will
ever deliver them. Not offered: the group begins with a later epoch. duplicate: an identity that stands in two entries.

It ends with 0 only if nothing is lost, nothing is duplicate and nothing is unexplained: every finding is one line.
Pending and unread samples are no fault, also when no member is left: they are given out when the group comes back.
Dead letters, deleted entries and entries that no producer committed are. So are samples that a server confirmed and
then lost in a crash: writers and trainers that lived through it note them. Entries that retention removed after every
group had acknowledged them are not. No group waits for the samples of an abandoned epoch. An unfinished epoch is no
fault: a line says how much of its plan is committed.

By default payloads stay where they are: ids and headers are compared, and files of segments must be there. If this
host does not see their folder, a line says so, and the exit code tells of the rest alone. --deep fetches payloads and
verifies checksums.
It may run while the stream is written and read.

--repair SOURCE... makes again what of a complete epoch is missing, and nothing else: entries that were deleted, the end
of an index that a server lost. With --deep it also replaces the entries whose payload is damaged, dead letters among
them, which their groups are then given. Everything after it names the source, as `penstock produce` was given it; seed
and cut come from the epoch itself, and a source that is not the same is refused. An entry that is there and only lost
its index record gets it back. Groups that had acknowledged the samples are not given them again.

exit codes: 0 nothing is lost, duplicated or unexplained, 1 something is, or an error, 2 wrong usage"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_stream(parser)
    parser.add_argument(
        "--epoch", type=EPOCH_NUMBER, metavar="N", help="only this one (default: all that are retained)"
    )
    parser.add_argument("--deep", action="store_true", help="fetch every payload and verify its checksum")
    parser.add_argument(
        "--repair", nargs=argparse.REMAINDER, metavar="SOURCE",
        help="make missing samples again; comes last: the rest of the line names the source",
    )  # fmt: skip


def run(args: argparse.Namespace, console: Console) -> int:
    """Return 0 if the audit is clean, 1 if not."""
    from penstock.cli.sources import source_in
    from penstock_common.stream.audit import audit_stream

    source = None if args.repair is None else source_in("penstock audit STREAM --repair", args.repair)
    with connected(args) as client:

        def audited() -> AuditReport:
            with nullcontext(lambda done, total: None) if args.json else _progress(console) as progress:
                return audit_stream(client, args.stream, epoch=args.epoch, deep=args.deep, progress=progress)

        report = audited()
        if source is not None and any(epoch.missing for epoch in report.epochs):
            _repair(client, report, source, console, deep=args.deep)
            report = audited()
    if source is not None and not args.deep:
        console.notice(
            "payloads were not verified: with --deep before --repair, damaged ones are found and made again, too"
        )
    if args.json:
        console.json(as_json(report))
    else:
        print_report(report, console)
    return 0 if report.is_clean else 1


@contextmanager
def _progress(console: Console) -> Iterator[AuditProgress]:
    """Yield a function that shows the audited epochs on stderr, once the audit has taken `SILENT_S`."""
    counts: tuple[int, int | None] = 0, None
    shown: list[ProgressBar] = []

    def update(done: int, total: int) -> None:
        nonlocal counts
        counts = done, total
        for bar in shown:
            bar.update(done, total=total)

    with console.progress(SILENT_S) as bars:
        timer = Timer(SILENT_S, lambda: shown.append(bars.add("audit", counts[1], "epochs", done=counts[0])))
        timer.start()
        try:
            yield update
        finally:
            timer.cancel()
            timer.join()


def _repair(client: Client, report: AuditReport, config: SourceConfig, console: Console, *, deep: bool) -> None:
    from penstock_common.stream.streams import load_stream
    from penstock_producer.jobs.repair import repair_epoch
    from penstock_producer.sources.open import open_source

    stream = load_stream(client, report.stream)
    source = open_source(config)
    try:
        for epoch in report.epochs:
            if epoch.missing:
                done = repair_epoch(client, stream, epoch.epoch, source, deep=deep, notify=console.notice)
                bad = f", {done.bad} could not be made" if done.bad else ""
                console.notice(
                    f"epoch {epoch.epoch}: {done.made} samples were made again, {done.found} were there and only lost "
                    f"from the index{bad}"
                )
    finally:
        source.close()


def as_json(report: AuditReport) -> dict[str, object]:
    """Return the totals, the findings and every epoch."""
    totals = {name: getattr(report, name) for name in ("produced", "bad", "delivered", "lost", "duplicate", "pending")}
    return {
        "stream": report.stream, "clean": report.is_clean, "verdict": report.verdict, **totals, "unread": report.unread,
        "dead": report.dead, "findings": report.findings, "released": report.released,
        "unseen": report.unseen, "epochs": [asdict(epoch) for epoch in report.epochs],
    }  # fmt: skip


def print_report(report: AuditReport, console: Console) -> None:
    """Print a table, the findings, and the verdict as the last line."""
    if report.epochs:
        head = (
            "epoch",
            "state",
            "produced",
            "bad",
            "duplicate",
            "group",
            "delivered",
            "pending",
            "unread",
            "dead",
            "lost",
        )
        console.table([row for epoch in report.epochs for row in _rows(epoch)], head=head)
    for finding in report.findings[:SHOWN]:
        console.line(("found", "red"), f": {finding}")
    if len(report.findings) > SHOWN:
        console.line(f"found: {len(report.findings) - SHOWN} more, see --json")
    for epoch in report.epochs:
        for line in _remarks(epoch):
            console.line(f"epoch {epoch.epoch}: {line}")
    for line in _unreplicated(report):
        console.line(line)
    if report.released:
        console.line(
            f"not audited: epochs {report.released} were released: every group that held data was done with them, or "
            "they were abandoned"
        )
    if report.unseen:
        which = "1 entry" if report.unseen == 1 else f"{report.unseen} entries"
        console.line(
            f"not looked at: the payload of {which}. {report.why_unseen}. If the folder is gone on every host, these "
            "samples are lost: produce the stream again"
        )
    for line in _advice(report):
        console.line(line)
    style = "bold yellow" if report.unseen else "bold green"
    console.line((report.verdict, style if report.is_clean else "bold red"))


def _remarks(epoch: EpochAudit) -> Iterator[str]:
    """Yield remarks that are worth knowing and are not faults."""
    if epoch.unfinished:
        yield epoch.unfinished
    if epoch.bad:
        yield f"{epoch.produced:,} produced and {epoch.bad:,} bad are {epoch.produced + epoch.bad:,} samples"
    if epoch.trimmed:
        yield f"{epoch.trimmed} entries were trimmed: every group that held data had acknowledged them"
    for name, group in epoch.groups.items():
        if group.given_up:
            yield f"group {name}: of the dead, {group.given_up} were given up by an operator"
    if epoch.is_clean and (absent := sum(one.end - one.first - len(one.holes) for one in epoch.missing)):
        yield (
            f"{absent} samples are missing. Every group goes on without them; a new group or a replay cannot, so "
            "--repair SOURCE makes them again"
        )
    for loss in epoch.made_again:
        yield f"the server had lost {loss}; they were made again"


def _unreplicated(report: AuditReport) -> Iterator[str]:
    """Yield what was written without a replica, with a line for each server if all of several epochs was.

    A clean report does not name these epochs, because every single server writes so.
    """
    from penstock_common.stream.audit.accounts import said_unreplicated
    from penstock_common.stream.ranges import ranges_of

    whole: dict[str, list[int]] = {}
    for epoch in report.epochs:
        if sum(one.end - one.first for one in epoch.unreplicated) < epoch.produced + epoch.bad:
            for line in said_unreplicated(epoch.unreplicated):
                yield f"epoch {epoch.epoch}: {line}"
        elif not report.is_clean:
            for server in dict.fromkeys(one.server for one in epoch.unreplicated):
                whole.setdefault(server, []).append(epoch.epoch)
    for server, epochs in whole.items():
        yield f"epoch{'s' * (len(epochs) != 1)} {ranges_of(epochs)}: written while {server} had no replica"


def _advice(report: AuditReport) -> Iterator[str]:
    """Yield advice on the findings."""
    name = report.stream
    if report.deletion:
        return  # the finding says what to do
    from penstock_common.stream.ranges import ranges_of

    if lost := ranges_of(epoch.epoch for epoch in report.epochs if epoch.server_losses):
        yield (
            f"to do: epoch {lost} is not what its trainers were given: produce it again as another epoch, "
            f"or train on with what is there; `penstock epochs abandon {name} EPOCH` lets it go, and the note with it"
        )
    if report.disagreements:
        yield (
            f"to do: `penstock trim {name}` makes the parts of the stream agree again, as every writer does within "
            "seconds; what was lost stays named"
        )
    if not report.is_clean:
        number = next((str(epoch.epoch) for epoch in report.epochs if not epoch.is_clean), "EPOCH")
        yield (
            f"to fix: `penstock audit {name} --deep --repair SOURCE...` makes lost and damaged samples again; "
            f"`penstock bad drop {name} {number} --all-groups` goes on without what is lost or a dead letter; "
            f"`penstock bad drop {name} {number} ENTRY --all-groups` deletes an entry that is in no index, once a "
            "group was given it"
        )


def _rows(epoch: EpochAudit) -> list[tuple[object, ...]]:
    first = (epoch.epoch, epoch.state, epoch.produced, epoch.bad, epoch.duplicate)
    if not epoch.groups:
        return [(*first, "(none)", 0, 0, 0, 0, epoch.lost)]
    rows: list[tuple[object, ...]] = []
    for name, group in epoch.groups.items():
        shown = name if not group.released else f"{name} (left; {group.released} released)"
        if group.not_offered:
            shown = f"{name} (came later; {group.not_offered} not offered)"
        rows.append((*first, shown, group.delivered, group.pending, group.unread, group.dead, group.lost))
    return rows
