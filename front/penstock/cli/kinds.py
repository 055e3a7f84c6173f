"""Sources of the command line beyond the first four, and the choice of samples that goes with every kind.

The four, and what is said of a production, are ``sources``'s; what any of it means is the producer's.
"""

from __future__ import annotations

import argparse
import difflib
import glob
import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import IMPORT_NAME, Choices, WrongUsage

if TYPE_CHECKING:
    from penstock_producer.sources.config import SourceConfig

EXAMPLES = {
    "tar": "shards/ --resize 224x224 --field x=jpg --field y=cls",
    "arrays": "x=images-*.npy y=labels.npy --balance y",
    "torch": "mydata:dataset --epochs 3",
    "mix": "--part 3 'images photos/ --resize 224' --part 1 'tar shards/ --resize 224' --samples 10000",
    "source": 'NAME --option path=data/ --option columns=\'["a", "b"]\'',
}
Add = Callable[..., argparse.ArgumentParser]
_KINDS_OF_FILES = {".zip": "images", ".tar": "tar", ".npy": "arrays", ".npz": "arrays"}


class Kinds(Choices):
    """The kinds of sources. A path in the place of a kind is answered by the whole command to type."""

    def explain(self, prog: str, words: Sequence[str]) -> str:
        """See `Choices`."""
        return _no_kind(prog, words, self.choices)


def _no_kind(prog: str, words: Sequence[str], kinds: Collection[str]) -> str:
    """Say what the first word is instead of a kind, and how the command is typed."""
    word, rest = words[0], list(words)
    near = difflib.get_close_matches(word, kinds, 1)
    if (kind := kind_of_path(word)) is not None:
        what = f"{word!r} is a path, and the kind of source is missing before it"
    elif word.count(":") == 1 and word.replace(":", "").replace(".", "").isidentifier():
        kind, what = "dataset", f"{word!r} is an import name, and the kind of source is missing before it"
    else:
        what = f"{word!r} is no kind of source; there are {', '.join(kinds)}"
        kind, rest = (near[0], rest[1:]) if near else ("images", ["photos/"])
        what = f"{what}; as an example" if not near else what
    end = ["--", "python", "train.py"] if prog.endswith(" run") and "--" not in rest else []
    return f"{what}: type `{shlex.join([*prog.split(), kind, *rest, *end])}`"


def kind_of_path(text: str) -> str | None:
    """Return the kind of source that reads this path; None: the text is no path."""
    path = Path(text)
    if (kind := _KINDS_OF_FILES.get(path.suffix.lower())) is not None:
        return kind
    if path.is_dir():
        return "tar" if any(path.glob("*.tar")) else "images"
    return "images" if "/" in text and ":" not in text else None


def import_name(parser: argparse.ArgumentParser) -> Callable[[str], str]:
    """Return an argparse type that refuses paths before anything is started."""

    def name(text: str) -> str:
        *before, _ = parser.prog.split()
        if ":" not in text and (kind := kind_of_path(text)) is not None:
            command = shlex.join([*before, kind, text])
            raise argparse.ArgumentTypeError(
                f"{text!r} is a path, expected an import name like mydata:train; to read the path type `{command}`"
            )
        return IMPORT_NAME(text)

    return name


def add_kinds(add: Add, name_help: str, count: Callable[[str], int]) -> list[argparse.ArgumentParser]:
    """The sub-commands, each without the options that all have; the images' options for pixels come later."""
    tar = add("tar", help="tars in webdataset's layout: a folder, a pattern, or one")
    tar.add_argument(
        "path", metavar="DIR", help="folder, file ending in .tar, or a quoted pattern: 'train-{0000..0099}.tar'"
    )
    tar.add_argument(
        "--field", action="append", default=[], metavar="TENSOR=FIELD", help="x=jpg; may be repeated (default: all)"
    )
    arrays = add("arrays", help="rows of .npy or .npz files")
    arrays.add_argument(
        "files", nargs="+", metavar="[TENSOR=]FILE", help="x=images.npy, x='part-*.npy', data.npz; .npy without a name "
        "is called as its file is",
    )  # fmt: skip
    torch = add("torch", help="a torch Dataset, IterableDataset or DataLoader")
    torch.add_argument("name", type=import_name(torch), metavar="NAME", help=name_help)
    torch.add_argument("--limit", type=count, metavar="N", help="end the pass after N items; not for a Dataset")
    add_endless(torch)
    for sub in (tar, arrays, torch):
        sub.add_argument(
            "--transform", type=IMPORT_NAME, metavar="MODULE:FUNCTION", help="applied to each sample: f(sample[, rng])"
        )
    mix = add("mix", help="several sources as one, each with its share of every epoch")
    mix.add_argument(
        "--part", nargs=2, action="append", required=True, metavar=("WEIGHT", "SOURCE"),
        help="a source as this command would be given it, in quotes; once for each",
    )  # fmt: skip
    source = add("source", help="a source that another package brings (entry point penstock.sources)")
    source.add_argument("name", metavar="NAME", help="of the entry point")
    source.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="for the source; JSON, or else a text"
    )
    add_endless(source)
    source.add_argument(
        "--transform", type=IMPORT_NAME, metavar="MODULE:FUNCTION", help="applied to each sample: f(sample[, rng])"
    )
    return [tar, arrays, torch, mix, source]


def add_endless(parser: argparse.ArgumentParser) -> None:
    """For iterables."""
    parser.add_argument(
        "--endless", action="store_true", help="feed the stream as it comes, without epochs, until Ctrl-C or SIGTERM"
    )


def add_choice(parser: argparse.ArgumentParser, count: Callable[[str], int], *, is_mix: bool) -> None:
    """Which of a source's samples."""
    add = parser.add_argument_group("choice of samples").add_argument
    if not is_mix:
        add(
            "--balance", nargs="?", const="y", metavar="TENSOR", help="every class equally often (default: by y)"
        )  # fmt: skip
    add(
        "--samples", type=count, metavar="N", help="of one epoch, with --balance or mix (default: as many as there are)"
    )
    add("--split", type=_parts, metavar="NAME:F,...", help="train:0.9,val:0.1: each sample always in the same part")
    add("--only", metavar="PART", help="of --split: only this one (default: each, as stream NAME.PART)")
    add("--split-seed", type=int, default=0, metavar="N", help="another division (default: %(default)s)")


def config_of(args: argparse.Namespace, parse: Callable[[list[str]], SourceConfig]) -> dict[str, Any] | None:
    """The config of one of these kinds; None: it is another one. ``parse`` reads the source of a part."""
    match args.kind:
        case "tar":
            pixels = {name: getattr(args, name) for name in ("mode", "resize", "crop", "random_crop", "flip")}
            fields = dict(_named(text, "--field") for text in args.field) or None
            return {"path": args.path, "fields": fields, "transform": args.transform, **pixels}
        case "arrays":
            return {**_files(args.files), "transform": args.transform}
        case "torch":
            return {"name": args.name, "limit": args.limit, "transform": args.transform, "endless": args.endless}
        case "mix":
            parts = [{"weight": _weight(weight), "source": parse(_words(words))} for weight, words in args.part]
            return {"kind": "weighted", "parts": parts, "samples": args.samples}
        case "source":
            options = dict(_named(text, "--option") for text in args.option)
            values = {name: _json(text) for name, text in options.items()}
            both = {"transform": args.transform, "endless": args.endless}
            return {"kind": "installed", "name": args.name, "options": values, **both}
    return None


def chosen(args: argparse.Namespace, config: SourceConfig) -> dict[str, SourceConfig]:
    """Part -> its source; one without a name where nothing is split."""
    from penstock_producer.sources.config import parse_config, part_of

    if by := getattr(args, "balance", None):
        config = parse_config({"kind": "balanced", "source": config, "by": by, "samples": args.samples})
    elif getattr(args, "samples", None) and args.kind != "mix":
        raise WrongUsage("--samples says how many a choice takes: it goes with --balance or with mix")
    if getattr(args, "split", None) is None:
        return dict.fromkeys(parts_of(args), config)
    return {name: part_of(config, args.split, name, args.split_seed) for name in parts_of(args)}


def parts_of(args: argparse.Namespace) -> list[str]:
    """Return the names of the parts that are asked for; one of no name where nothing is split."""
    if getattr(args, "split", None) is None:
        if getattr(args, "only", None):
            raise WrongUsage(f"--only {args.only} names a part of --split, which is not given")
        return [""]
    return [args.only] if args.only else [name for name, _ in args.split]


def _parts(text: str) -> tuple[tuple[str, float], ...]:
    parts = []
    for word in text.split(","):
        name, _, number = word.partition(":")
        try:
            parts.append((name, float(number)))
        except ValueError:
            name = ""
        if not name or not name.replace("-", "").replace("_", "").isalnum():
            raise argparse.ArgumentTypeError(f"{text!r} is not a split like train:0.9,val:0.1")
        if not 0 < parts[-1][1] <= 1:
            raise argparse.ArgumentTypeError(
                f"{text!r}: {word} takes no fraction above 0 and at most 1 of the samples; write train:0.9,val:0.1"
            )
    return tuple(parts)


def _files(words: list[str]) -> Mapping[str, Any]:
    columns: dict[str, list[str]] = {}
    archives: list[str] = []
    for word in words:
        name, sign, pattern = word.partition("=")
        pattern = pattern if sign else word
        found = sorted(glob.glob(pattern)) or [pattern]  # noqa: PTH207 - one that matches nothing is named as it is
        for path in found:
            if path.endswith(".npz") and not sign:
                archives.append(path)
            else:
                columns.setdefault(name if sign else _stem(path), []).append(path)
    return {"columns": columns, "archives": archives}


def _stem(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".npy")


def _named(text: str, option: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise WrongUsage(f"{option} {text!r}: write NAME=VALUE")
    return name, value


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise WrongUsage(f"--part {text!r}: {error}; quote the source once, as in 'images photos/'") from None


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise WrongUsage(
            f"--part {text!r}: write a weight and then a source, like --part 0.7 'images photos/'"
        ) from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
