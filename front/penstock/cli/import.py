"""``penstock import``: brings the epochs of an export back into a stream."""  # noqa: N999 - a command has the file of its name

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli import EPOCH_NUMBER, PAYLOAD, POLICY, add_json, add_url, budget_size, url_of
from penstock.cli.export import listed, shown, there_before
from penstock_common.printable import readable_bytes

if TYPE_CHECKING:
    from penstock.cli.console import Console


EPILOG = (
    "example:\n  penstock import /data/train train\n"
    "  penstock import /data/train train --payload segments:/mnt/nvme/penstock --retention epochs:1\n\n"
    "Epochs keep their numbers. Run again after a break, it goes on where it was; what is there is not written\n"
    "again, and another epoch under the same number is an error. Files are checked before they are believed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument("directory", metavar="DIR", help="what `penstock export` made")
    parser.add_argument("stream", help="a new stream, or one with the same spec")
    parser.add_argument(
        "--epoch", type=EPOCH_NUMBER, action="append", metavar="N", help="this epoch; may be repeated (default: all)"
    )
    parser.add_argument(
        "--payload",
        type=PAYLOAD,
        metavar="WHERE",
        help="where a new stream keeps payloads: inline, or segments:/a/folder",
    )
    parser.add_argument(
        "--budget", type=budget_size, metavar="SIZE", help="payload bytes the stream may hold (new: all of it fits)"
    )
    parser.add_argument(
        "--retention", type=POLICY, metavar="POLICY", help="what is kept of acknowledged epochs, e.g. epochs:1"
    )
    add_url(parser)
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Write the missing epochs, and print all epochs of the export."""
    from penstock_producer.write.importer import import_stream

    with console.progress() as bars:
        done = import_stream(
            args.directory, args.stream, url=url_of(args), epochs=args.epoch, payload=args.payload,
            budget_bytes=args.budget, retention=args.retention, notify=console.notice,
            progress=shown(bars, "import"),
        )  # fmt: skip
    value = {
        "stream": done.stream, "epochs": list(done.new), "kept": list(done.kept), "samples": done.samples,
        "bytes": done.nbytes,
    }  # fmt: skip
    size = f"{done.samples} samples, {readable_bytes(done.nbytes)}"
    text = f"stream {done.stream!r}: {listed(done.new)}{there_before(done.kept)}; in all {size}"
    console.answer(value, text, as_json=args.json)
    return 0
