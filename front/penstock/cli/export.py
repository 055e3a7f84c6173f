"""``penstock export``: copies a stream's epochs to files that can be imported, or read without a server."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.cli import EPOCH_NUMBER, add_stream, connected
from penstock_common.printable import readable_bytes

if TYPE_CHECKING:
    from penstock.cli.console import Console, ProgressBar, ProgressBars


EPILOG = (
    "example:\n  penstock export train /data/train\n  penstock export train /data/train --epoch 3\n"
    "  python -c \"import penstock; print(len(penstock.Files('/data/train', epoch=3, batch_size=64)))\"\n\n"
    "An epoch counts once all of it is on the disk; what is not complete is named .part. Run again after a break,\n"
    "or with new epochs, it adds what is missing. `penstock import` is the way back."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_stream(parser)
    parser.add_argument("directory", metavar="DIR", help="a new folder, or one with an earlier export of the stream")
    parser.add_argument(
        "--epoch",
        type=EPOCH_NUMBER,
        action="append",
        metavar="N",
        help="this epoch; may be repeated (default: all produced)",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Copy the missing epochs, and print what was copied and what the folder holds."""
    from penstock_consumer.replay.export import export_stream

    with connected(args) as client, console.progress() as bars:
        done = export_stream(client, args.stream, args.directory, epochs=args.epoch, progress=shown(bars, "export"))
    notes = [note for note in done.contents.epochs if note.epoch in (*done.new, *done.kept)]
    samples, nbytes = sum(note.samples for note in notes), sum(note.nbytes for note in notes)
    value = {
        "stream": done.contents.name, "path": str(done.path), "epochs": list(done.new),
        "kept": list(done.kept), "samples": samples, "bytes": nbytes, "bad": sum(len(n.bad) for n in notes),
    }  # fmt: skip
    new = f"{listed(done.new)} of {done.contents.name!r}{there_before(done.kept)}"
    there = done.contents.epochs
    count, everything = f"{len(there)} epoch{'s' * (len(there) != 1)}", sum(note.samples for note in there)
    size = readable_bytes(sum(note.nbytes for note in there))
    text = f"{done.path}: {new}; the folder holds {count}, {everything} samples, {size}"
    console.answer(value, text, as_json=args.json)
    return 0


def listed(epochs: tuple[int, ...]) -> str:
    """Return numbers of epochs as text, such as ``epochs 0-3,5``."""
    from penstock_common.stream.ranges import ranges_of

    return f"epoch{'s' * (len(epochs) != 1)} {ranges_of(epochs)}" if epochs else "nothing new"


def there_before(kept: tuple[int, ...]) -> str:
    """Return the part of the result's line that says what was there before."""
    return f", {listed(kept)} there before" if kept else ""


def shown(bars: ProgressBars, verb: str) -> Callable[[int, int, int], None]:
    """Return a function that draws one bar: the epoch that is copied now, in MB, and how many are done."""
    bar: ProgressBar | None = None
    begun: set[int] = set()

    def show(epoch: int, done: int, total: int) -> None:
        nonlocal bar
        begun.add(epoch)
        count, size = len(begun) - (done < total), max(1, total // 1_000_000)
        label, note = f"{verb} epoch {epoch}", f"{count:,} epoch{'s' * (count != 1)} done"
        bar = bar or bars.add(label, size, "MB")
        bar.update(done // 1_000_000 if done < total else size, note, size, label=label)

    return show
