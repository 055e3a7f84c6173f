"""``penstock show``: samples of a stream as they are, as a contact sheet in the terminal or in a PNG."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import EPOCH_NUMBER, add_no_lease, add_stream, opened, seconds, whole_number

if TYPE_CHECKING:
    from penstock.cli.console import Console, Styled
    from penstock.views.show import ShownSample
    from penstock_common.stream.commands import Client
    from penstock_common.stream.streams import Stream
    from penstock_consumer.replay.samples import Identity, Sample, SampleReader


COUNT, LIVE_S, LOOKED_AT = 36, 2.0, 4096
"""The samples that are shown, the pause of --live, and the samples that are drawn at random in search of a class."""
_TILE = 24
"""The characters of a picture in the terminal."""


def _png(text: str) -> Path:
    """Return the path of a PNG. Raises ArgumentTypeError for another ending."""
    if Path(text).suffix.lower() not in (".png", ""):
        raise argparse.ArgumentTypeError(f"{text!r}: a PNG is written, so give a name that ends in .png")
    return Path(text)


EPILOG = (
    "example:\n  penstock show train\n  penstock show train --out sheet.png --count 64 --seed 1\n"
    "  penstock show train --class cat\n  penstock show train --id 3/7/20\n"
    "  penstock show train --live --out now.png\n\n"
    "Nothing is delivered or acknowledged: no group is involved. Pictures need a terminal with colours; with\n"
    "NO_COLOR they are drawn in letters, and into a pipe only identities and labels are printed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_stream(parser)
    parser.add_argument("--epoch", type=EPOCH_NUMBER, metavar="N", help="default: the newest that has samples")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--id", type=_identity, action="append", metavar="E/S/O", help="this sample: epoch/shard/offset; repeatable"
    )
    which.add_argument("--class", dest="label", metavar="NAME", help="only of this class, by name or number")
    which.add_argument("--live", action="store_true", help="the newest samples, as they come; Ctrl-C ends it")
    parser.add_argument(
        "--count", type=whole_number(1, 10_000), default=COUNT, metavar="N", help="so many (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=whole_number(0), metavar="N", help="draw at random (default: the first in order)"
    )
    parser.add_argument("--tensor", metavar="NAME", help="what to draw (default: the first that is no single number)")
    parser.add_argument("--out", type=_png, metavar="FILE", help="write a PNG instead of printing")
    parser.add_argument(
        "--interval",
        type=seconds(0.05, 3600),
        default=LIVE_S,
        metavar="S",
        help="of --live: look every S seconds (default: 2)",
    )
    add_no_lease(parser)
    parser.add_argument("--updates", type=whole_number(1, 10_000), metavar="N", help="of --live: end after N pictures")


def run(args: argparse.Namespace, console: Console) -> int:
    """Show the samples and return 0; Ctrl-C ends --live with 130."""
    with opened(args) as (client, stream):
        if args.live:
            _follow(client, stream, args, console)
        else:
            samples, choice = _chosen(client, stream, args)
            _present(stream, samples, choice, args, console)
    return 0


# --- which samples ----------------------------------------------------------------------------------------------------


def _chosen(client: Client, stream: Stream, args: argparse.Namespace) -> tuple[list[Sample], str]:
    """Return the samples, and a description of them."""
    from penstock_consumer.replay.samples import SampleReader

    if args.id:
        return _named(client, stream, args), f"{len(args.id)} by identity"
    with SampleReader(client, stream, args.epoch, holds=not args.no_lease) as viewer:
        label = "" if args.label is None else f" of class {args.label}"
        samples = _found(viewer, stream, args)
        lost = viewer.missed.trimmed + viewer.missed.unreadable
        left_out = f"; {lost} left out, trimmed or unreadable" if lost else ""
        return samples, f"epoch {viewer.epoch}, {len(samples)} samples{label}{left_out}"


def _named(client: Client, stream: Stream, args: argparse.Namespace) -> list[Sample]:
    from penstock_consumer.replay.samples import SampleReader

    wanted: list[Identity] = args.id
    samples = []
    for epoch in dict.fromkeys(identity.epoch for identity in wanted):
        with SampleReader(client, stream, epoch, holds=not args.no_lease) as viewer:
            samples += [viewer.sample(identity) for identity in wanted if identity.epoch == epoch]
    return samples


def _found(viewer: SampleReader, stream: Stream, args: argparse.Namespace) -> list[Sample]:
    """Return the first samples in canonical order, or random ones, of one class if a class is given."""
    import numpy as np

    from penstock.views.show import class_names, class_of, is_of
    from penstock_consumer.replay.samples import samples_of

    label = None if args.label is None else class_of(class_names(stream), viewer.spec, args.label)
    chosen = np.arange(args.count) if label is None else None
    if args.seed is not None:
        total = viewer.committed()
        drawn = np.random.default_rng(args.seed).choice(
            total, min(total, args.count if label is None else LOOKED_AT), replace=False
        )
        chosen = np.sort(drawn)
    samples: list[Sample] = []
    for seen in viewer.drawn(chosen):
        wanted = seen
        if label is not None:
            values = next(column.values for column in seen.block.columns if column.spec.name == label[0])
            wanted = replace(seen, rows=seen.rows[is_of(values[seen.rows], label[1])])
        samples += samples_of(wanted)
        if len(samples) >= args.count:
            break
    return samples[: args.count]


# --- showing them -----------------------------------------------------------------------------------------------------


def _present(stream: Stream, samples: list[Sample], choice: str, args: argparse.Namespace, console: Console) -> None:
    from penstock.views.show import shown_of

    shown = shown_of(stream, samples, args.tensor)
    title = f"{stream.name}: {choice}"
    if args.json:
        console.json({"stream": stream.name, "samples": [one.as_json() for one in shown]})
    if args.out is not None:
        _write(shown, title, args.out)
        console.notice(f"wrote {args.out} ({choice})")
    elif not args.json:
        _print(shown, title, console)


def _write(shown: Sequence[ShownSample], title: str, path: Path) -> None:
    from penstock.views.png import SheetTile, contact_sheet, decode, save

    tiles = [SheetTile(one.picture(decode), one.words(), one.captions()) for one in shown]
    save(contact_sheet(tiles, title), path)


def _print(shown: Sequence[ShownSample], title: str, console: Console) -> None:
    from penstock.views.show import image_decoder

    console.line((title, "bold"))
    if not console.is_terminal:
        for one in shown:
            console.line("  ".join([*one.captions(), *one.words()[:1]]))
        return
    across = max(1, (shutil.get_terminal_size().columns + 2) // (_TILE + 2))
    decode = image_decoder() if console.has_colours else None
    for start in range(0, len(shown), across):
        row = [_tile(one, decode, has_colours=console.has_colours) for one in shown[start : start + across]]
        for lines in zip(*row, strict=True):
            console.line(*chain.from_iterable(["  " * (at > 0), *line] for at, line in enumerate(lines)))
        console.line()


def _tile(one: ShownSample, decode: Any, *, has_colours: bool) -> list[list[str | Styled]]:
    """Return lines of equal width: the picture on a dark background, then three captions."""
    import numpy as np

    from penstock.views.pictures import fitted, lines_of

    def padded(text: str) -> list[str | Styled]:
        return [text[:_TILE].ljust(_TILE)]

    rgb = one.picture(decode)
    if rgb is None:
        words = one.words()[: _TILE // 2]
        drawn = [padded(word) for word in [*words, *[""] * (_TILE // 2 - len(words))]]
    else:
        fit = fitted(rgb, _TILE, _TILE)
        canvas = np.zeros((_TILE, _TILE, 3), np.uint8)
        top, left = (_TILE - fit.shape[0]) // 2, (_TILE - fit.shape[1]) // 2
        canvas[top : top + fit.shape[0], left : left + fit.shape[1]] = fit
        drawn = lines_of(canvas, has_colours=has_colours)
    return drawn + [padded(caption) for caption in [*one.captions(), "", ""][:3]]


# --- live -------------------------------------------------------------------------------------------------------------


def _follow(client: Client, stream: Stream, args: argparse.Namespace, console: Console) -> None:
    """Show the newest samples whenever new ones arrive, the newest first."""
    from penstock_common.stream.streams import require_there
    from penstock_consumer.replay.samples import SampleReader, newest_epoch

    newest: list[Sample] = []
    last: dict[int, bytes] = {}
    before, shown = -1, 0
    while args.updates is None or shown < args.updates:
        epoch = args.epoch if args.epoch is not None else newest_epoch(client, stream, running=True)
        if epoch != before:
            before, last = epoch, {}
        with SampleReader(client, stream, epoch, holds=False) as viewer:
            fresh, last = viewer.newest(args.count, last)
        if fresh:
            newest = (fresh + newest)[: args.count]
            shown += 1
            if console.terminal is not None and args.out is None and not args.json:
                console.terminal.clear()
            _present(stream, newest, f"epoch {epoch}, the newest {len(newest)} samples", args, console)
        else:
            require_there(client, stream)
        if args.updates is None or shown < args.updates:
            time.sleep(args.interval)


# --- arguments --------------------------------------------------------------------------------------------------------


def _identity(text: str) -> Identity:
    from penstock_consumer.replay.samples import Identity

    parts = text.split("/")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not epoch/shard/offset, like 3/7/20")
    return Identity(*map(int, parts))
