"""The options that name a source, and those that `produce` and `run` share: stream, epochs, workers.

The producer defines their meaning. A command's own options are in its file.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import glob
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import (
    COMPRESSION,
    DURABILITY,
    IMPORT_NAME,
    PART,
    PAYLOAD,
    POLICY,
    STREAM_NAME,
    Actions,
    Parser,
    WrongUsage,
    add_jobs,
    add_url,
    budget_size,
    byte_size,
    of_usage,
    queue_url_of,
    seconds,
    url_of,
    whole_number,
)
from penstock_common.errors import PenstockError

if TYPE_CHECKING:
    from penstock_producer.jobs.plan import ProductionPlan
    from penstock_producer.jobs.worker import WorkerOptions
    from penstock_producer.sources.config import SourceConfig


DEFAULT_STREAM = "train"
_COUNT, _NOT_NEGATIVE = whole_number(1), whole_number(0)
_NAME = "module:attribute; the current folder is importable"
_PIXELS = ("mode", "resize", "crop", "random_crop", "flip")
"""The options that `_add_pixels` adds."""
_EXAMPLES = {
    "images": "photos/ --resize 224x224 --transform augment:flip --epochs 3",
    "dataset": "mydata:train --transform augment:flip",
    "keras": "mydata:batches --epochs 3",
    "generator": "mydata:samples --limit 10000",
    "tar": "shards/ --resize 224x224 --field x=jpg --field y=cls",
    "arrays": "x=images-*.npy y=labels.npy --balance y",
    "torch": "mydata:dataset --epochs 3",
    "mix": "--part 3 'images photos/ --resize 224' --part 1 'tar shards/ --resize 224' --samples 10000",
    "source": 'NAME --option path=data/ --option columns=\'["a", "b"]\'',
}


def add_sources(
    parser: argparse.ArgumentParser, kind: type[Parser], tail: str = "", *, production: bool = True
) -> None:
    """Add one sub-command for each kind of source. An example of the command ends with `tail`.

    Without ``production`` there are only the options that describe the source.
    """
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="SOURCE", parser_class=kind, action=SourceKinds)
    images = kinds.add_parser("images", help="a folder or a zip of images; sub-folders are classes")
    _add_images(images)
    dataset = kinds.add_parser("dataset", help="an object with a length and items, or equally long arrays")
    keras = kinds.add_parser("keras", help="a Keras Sequence or PyDataset")
    generator = kinds.add_parser("generator", help="an iterable, or a function giving one; read by one worker")
    generator.add_argument("name", type=_import_name(generator), metavar="NAME", nargs="?", help=_NAME)
    generator.add_argument(
        "--pair", action="append", metavar="TENSOR=NAME", default=[], help="instead: several, walked in step"
    )
    generator.add_argument("--batched", action="store_true", help="items are batches")
    generator.add_argument("--limit", type=_COUNT, metavar="N", help="end the pass after N items")
    _add_endless(generator)
    tar = kinds.add_parser("tar", help="tars in webdataset's layout: a folder, a pattern, or one")
    tar.add_argument(
        "path", metavar="DIR", help="folder, file ending in .tar, or a quoted pattern: 'train-{0000..0099}.tar'"
    )
    tar.add_argument(
        "--field", action="append", default=[], metavar="TENSOR=FIELD", help="x=jpg; may be repeated (default: all)"
    )
    arrays = kinds.add_parser("arrays", help="rows of .npy or .npz files")
    arrays.add_argument(
        "files", nargs="+", metavar="[TENSOR=]FILE", help="x=images.npy, x='part-*.npy', data.npz, x=data.npz:train; "
        ".npy without a name is called as its file is",
    )  # fmt: skip
    torch = kinds.add_parser("torch", help="a torch Dataset, IterableDataset or DataLoader")
    torch.add_argument("--limit", type=_COUNT, metavar="N", help="end the pass after N items; not for a Dataset")
    _add_endless(torch)
    mix = kinds.add_parser("mix", help="several sources as one, each with its share of every epoch")
    mix.add_argument(
        "--part", nargs=2, action="append", required=True, metavar=("WEIGHT", "SOURCE"),
        help="a source as this command would be given it, in quotes; once for each",
    )  # fmt: skip
    source = kinds.add_parser("source", help="a source that another package brings (entry point penstock.sources)")
    source.add_argument("name", metavar="NAME", help="of the entry point")
    source.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="for the source; JSON, or else a text"
    )
    _add_endless(source)
    for each in (dataset, keras, torch):
        each.add_argument("name", type=_import_name(each), metavar="NAME", help=_NAME)
    for each in (images, dataset, generator, tar, arrays, torch, source):
        each.add_argument(
            "--transform", type=IMPORT_NAME, metavar="MODULE:FUNCTION", help="applied to each sample: f(sample[, rng])"
        )
    _add_pixels(tar)
    indexed = [images, dataset, keras, tar, arrays, torch, mix, source]
    for each in indexed:
        _add_choice(each, is_mix=each is mix)
    for each in [*indexed, generator]:
        if production:
            _add_production(each)
        _add_example(each, tail, has_epochs=production)


def _add_example(parser: argparse.ArgumentParser, tail: str, *, has_epochs: bool) -> None:
    example = _EXAMPLES[parser.prog.split()[-1]]
    example = example if has_epochs else example.replace(" --epochs 3", "")
    parser.epilog = f"example:\n  {parser.prog} {example}{tail}"


def _add_images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DIR", help="folder, or file ending in .zip")
    labels = parser.add_mutually_exclusive_group()
    labels.add_argument(
        "--label", type=IMPORT_NAME, metavar="MODULE:FUNCTION", help="label of a relative path (default: its folder)"
    )
    labels.add_argument("--labels", metavar="FILE", help="labels in CSV, TSV, JSON or JSON lines, by relative path")
    parser.add_argument("--skip-unlabelled", action="store_true", help="leave out images that --labels does not name")
    parser.add_argument("--classes", type=_names, metavar="A,B,...", help="class names in id order (default: sorted)")
    _add_pixels(parser)


def _add_pixels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resize", type=_size, metavar="HxW", help="224x224, or 256 for the shorter side")
    parser.add_argument("--crop", type=_size, metavar="HxW", help="cut from the centre, after resizing")
    parser.add_argument("--random-crop", type=_size, metavar="HxW", help="instead: resize a random part of the image")
    parser.add_argument("--flip", action="store_true", help="mirror half of the images, left to right, at random")
    modes = ("rgb", "gray", "gray16", "encoded")
    parser.add_argument(
        "--mode", choices=modes, default="rgb", help="encoded: files as they are (default: %(default)s)"
    )


def _add_production(parser: argparse.ArgumentParser) -> None:
    production = parser.add_argument_group("production")
    add = production.add_argument
    add("--stream", type=STREAM_NAME, default=DEFAULT_STREAM, help="default: %(default)s")
    add(
        "--epochs", type=_COUNT,
        help="so many in addition to those of the stream, or those that the same command left unfinished (default: 1)",
    )  # fmt: skip
    add(
        "--block-transform",
        type=IMPORT_NAME,
        metavar="MODULE:FUNCTION",
        help="applied to many samples at once: f(block[, rng])",
    )
    add("--block-samples", type=_COUNT, default=64, metavar="N", help="so many at once (default: %(default)s)")
    add("--ahead", type=_COUNT, default=2, metavar="K", help="epochs in work at once (default: %(default)s)")
    add("--follow", action="store_true", help="keep --ahead epochs before the trainers; without --epochs for ever")
    add("--workers", type=_NOT_NEGATIVE, metavar="N", help="local processes (default: one per core; 0: only others)")
    add("--seed", type=_NOT_NEGATIVE, default=0, help="of order and augmentation (default: %(default)s)")
    add("--no-shuffle", action="store_true", help="keep the source's order")
    add("--shard-samples", type=_COUNT, metavar="N", help="samples of one job (default: 8 jobs a worker, at most 4096)")
    what = "bad samples: left out by name up to --max-bad (default), however many, or not at all"
    add("--on-error", choices=("quarantine", "skip", "fail"), default="quarantine", help=what)
    add("--max-bad", type=_max_bad, metavar="N|P%", help="more bad fail an epoch (default: 50%%)")
    add(
        "--sample-limit",
        type=seconds(0),
        default=300.0,
        metavar="S",
        help="longer ones hang (default: 300; 0: no limit)",
    )
    add_spec(add)
    add(
        "--budget",
        type=budget_size,
        metavar="SIZE",
        help="bytes the stream may hold, also an existing one (default: 1gb, less on a small server)",
    )
    add(
        "--retention",
        type=POLICY,
        metavar="POLICY",
        help="of acknowledged epochs: budget (default), epochs:3, time:24h, bytes:500mb",
    )
    add(
        "--durability",
        type=DURABILITY,
        metavar="LEVEL",
        help="of writes: auto (default of a new stream), memory, fsync, replicas=2, fsync+replicas=2",
    )
    where = "where payloads of a new stream lie: inline (default), or segments:DIR, a folder that all trainers see"
    add("--payload", type=PAYLOAD, metavar="WHERE", help=where)
    add(
        "--compression",
        type=COMPRESSION,
        metavar="CODEC",
        help="of blocks: zstd or blosc2, x=zstd,mask=blosc2 for some tensors, or none (default: the stream's)",
    )
    add("--partitions", type=_COUNT, metavar="P", help="of a new stream (default: 1)")
    add_url(production, "a private one for `penstock run`, else ")
    add_queue(parser)


def add_spec(add: Callable[..., argparse.Action]) -> None:
    """Add the option that declares the tensors of a sample."""
    add("--spec", type=_spec, metavar="JSON", help="""e.g. '{"x": ["uint8", [null, null, 3]]}'; null is a free size""")


def add_queue(parser: argparse.ArgumentParser) -> None:
    """Add the options for the queue's server, and for the memory of its workers."""
    add_jobs(parser)
    parser.add_argument(
        "--worker-memory",
        type=byte_size,
        metavar="SIZE",
        help="a worker that holds more is replaced (default: its part of 80%% of memory)",
    )
    parser.add_argument(
        "--server-memory",
        type=byte_size,
        metavar="SIZE",
        help="of the streams' server, if that names no maxmemory, as some managed services do not",
    )


def plans_of(args: argparse.Namespace) -> dict[str, ProductionPlan]:
    """Return the plan of each part of a split, or one without a name if nothing is split."""
    _require_feeder(args)
    with of_usage():
        return {part: _plan(args, part, source) for part, source in chosen(args, _source(args)).items()}


def check_source(args: argparse.Namespace) -> None:
    """Raise SourceError for an invalid source, by the command line alone."""
    _require_feeder(args)
    chosen(args, _source(args))


def _require_feeder(args: argparse.Namespace) -> None:
    """Raise WrongUsage for an endless feed without a process here: no other process has the iterable."""
    if getattr(args, "endless", False) and args.workers == 0:
        raise WrongUsage("--workers 0 leaves the work to others, but one process here writes an endless feed: omit it")


def streams_of(args: argparse.Namespace) -> list[str]:
    """Return the names of the streams that the options name, without opening the source."""
    return [_stream(args, part) for part in parts_of(args)]


def _stream(args: argparse.Namespace, part: str) -> str:
    return f"{args.stream}.{part}" if part else str(args.stream)


def workers_of(args: argparse.Namespace) -> dict[str, int]:
    """Return the local workers of each part of a split: each has its share, and at least one."""
    count, parts = worker_count(args), getattr(args, "split", None) or (("", 1.0),)
    return {name: max(min(1, count), round(count * fraction)) for name, fraction in parts}


def _plan(args: argparse.Namespace, part: str, source: SourceConfig) -> ProductionPlan:
    from penstock_producer.jobs.plan import ProductionPlan

    return ProductionPlan(
        stream=_stream(args, part),
        source=source,
        epochs=args.epochs or 1,
        seed=args.seed,
        shuffle=not args.no_shuffle,
        shard_samples=args.shard_samples,
        on_error=args.on_error,
        max_bad=args.max_bad or "50%",
        ahead=args.ahead,
        follow=args.follow,
        is_endless=args.follow and args.epochs is None,
        sample_limit_s=args.sample_limit,
        block_transform=args.block_transform,
        block_samples=args.block_samples,
        spec=args.spec,
        partitions=args.partitions,
        budget_bytes=args.budget,
        retention=args.retention,
        durability=args.durability,
        payload=args.payload,
        compression=args.compression,
    )


def options_of(args: argparse.Namespace) -> WorkerOptions:
    """Return the servers of streams and jobs."""
    from penstock_common.server.connection import with_memory
    from penstock_producer.jobs.worker import WorkerOptions

    url = url_of(args)
    return WorkerOptions(
        url=with_memory(url, args.server_memory),
        queue_url=queue_url_of(args) or url,
        queue=args.queue,
        memory_bytes=args.worker_memory,
    )


def worker_count(args: argparse.Namespace) -> int:
    """Return the wanted number of local workers."""
    from penstock_producer.jobs.fleet import usable_cores

    return args.workers if args.workers is not None else usable_cores()


def source_of(args: argparse.Namespace) -> SourceConfig:
    """Return the one source that the options name."""
    with of_usage():
        sources = chosen(args, _source(args))
    if len(sources) > 1:
        raise WrongUsage(f"--split gives {len(sources)} sources; say which one is meant: --only {next(iter(sources))}")
    return next(iter(sources.values()))


def source_in(prog: str, words: list[str]) -> SourceConfig:
    """Return the source that these words name, by the options of `penstock produce`. Errors begin with ``prog``."""
    parser = Parser(prog=prog)
    add_sources(parser, Parser, production=False)
    return source_of(parser.parse_args(words))


def _source(args: argparse.Namespace) -> SourceConfig:
    """Return the source before any of its samples are chosen."""
    from penstock_producer.sources.config import parse_config

    return parse_config({"kind": args.kind, **_values(args)})


def _values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a source's config. Where a kind has another name in configs, it is among them."""

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(args, name) for name in names}

    match args.kind:
        case "images":
            values = given("path", "label", "labels", "classes", "transform", *_PIXELS)
            return {**values, "unlabelled": _unlabelled(args)}
        case "dataset":
            return given("name", "transform")
        case "generator":
            pairs = _named_once(args.pair, "--pair", "TENSOR=module:attribute") or None
            return {**given("name", "batched", "limit", "transform", "endless"), "pairs": pairs}
        case "tar":
            fields = _named_once(args.field, "--field") or None
            return {**given("path", "transform", *_PIXELS), "fields": fields}
        case "arrays":
            return {**given("transform"), **_files(args.files)}
        case "torch":
            return given("name", "limit", "transform", "endless")
        case "mix":
            parts = [
                {"weight": _weight(weight), "source": source_in(PART, _words(words))} for weight, words in args.part
            ]
            return {**given("samples"), "kind": "weighted", "parts": parts}
        case "source":
            values = {name: _json(text) for name, text in _named_once(args.option, "--option").items()}
            return {**given("name", "transform", "endless"), "kind": "installed", "options": values}
        case _:  # keras
            return given("name")


def _unlabelled(args: argparse.Namespace) -> str:
    if args.skip_unlabelled and not args.labels:
        raise WrongUsage("--skip-unlabelled says what is done with images that a table does not name: add --labels")
    return "skip" if args.skip_unlabelled else "refuse"


def _names(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if again := next((name for name in names if names.count(name) > 1), None):
        raise argparse.ArgumentTypeError(f"{text!r} names {again!r} twice; each class once, in the order of their ids")
    return tuple(names)


def _size(text: str) -> int | tuple[int, int]:
    numbers = [int(part) if part.isdecimal() else 0 for part in text.lower().split("x")]
    if not 1 <= len(numbers) <= 2 or 0 in numbers:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 224x224 (height x width) or 224")
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _max_bad(text: str) -> str:
    number = text.removesuffix("%")
    if not number.isdecimal() or not number.isascii() or len(number) > 9 or (number != text and int(number) > 100):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of samples like 20 nor a share like 5%")
    return f"{int(number)}%" if number != text else number


def _spec(text: str) -> dict[str, Any]:
    from penstock_common.wire.spec import Spec

    try:
        found = json.loads(text)
        spec = {str(name): (dtype, tuple(shape)) for name, (dtype, shape) in found.items()}
        Spec.of(spec)
    except PenstockError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except (ValueError, AttributeError, TypeError):
        raise argparse.ArgumentTypeError(f'{text!r} is not a spec like {{"x": ["uint8", [28, 28, 1]]}}') from None
    return spec


_KINDS_OF_FILES = {".zip": "images", ".tar": "tar", ".npy": "arrays", ".npz": "arrays"}


_OTHER_KINDS = {
    **dict.fromkeys(("webdataset", "wds", "tars"), "tar"),
    **dict.fromkeys(("imagefolder", "image-folder", "folder", "jpg", "jpeg", "png"), "images"),
    **dict.fromkeys(("numpy", "npy", "npz"), "arrays"),
    **dict.fromkeys(("pytorch", "dataloader"), "torch"),
    **dict.fromkeys(("tf.data", "tfdata", "tensorflow"), "generator"),
}
"""Name of a kind of source in other libraries -> its name here."""


class SourceKinds(Actions):
    """The kinds of sources.

    For a path in the place of a kind, the error gives the whole command to type.
    """

    def explain(self, prog: str, words: Sequence[str]) -> str:
        """See `Actions`."""
        word, rest = words[0], list(words)
        other = _OTHER_KINDS.get(word.casefold())
        near = [other] if other else difflib.get_close_matches(word, self.choices, 1)
        if (kind := _kind_of_path(word)) is not None:
            what = f"{word!r} is a path, and the kind of source is missing before it"
        elif word.count(":") == 1 and word.replace(":", "").replace(".", "").isidentifier():
            kind, what = "dataset", f"{word!r} is an import name, and the kind of source is missing before it"
        else:
            what = f"{word!r} is no kind of source; there are {', '.join(self.choices)}"
            kind, rest = (near[0], rest[1:]) if near else ("images", ["photos/"])
            what = f"{what}; as an example" if not near else what
        end = ["--", "python", "train.py"] if prog.endswith(" run") and "--" not in rest else []
        return f"{what}: type `{shlex.join([*prog.split(), kind, *rest, *end])}`"


def _kind_of_path(text: str) -> str | None:
    """Return the kind of source that reads this path, or None if the text is not a path."""
    path = Path(text)
    if (kind := _KINDS_OF_FILES.get(path.suffix.lower())) is not None:
        return kind
    if path.is_dir():
        return "tar" if any(path.glob("*.tar")) else "images"
    return "images" if "/" in text and ":" not in text else None


def _import_name(parser: argparse.ArgumentParser) -> Callable[[str], str]:
    """Return an argparse type that refuses paths before anything is started."""

    def name(text: str) -> str:
        *before, _ = parser.prog.split()
        if ":" not in text and (kind := _kind_of_path(text)) is not None:
            command = shlex.join([*before, kind, text])
            raise argparse.ArgumentTypeError(
                f"{text!r} is a path, expected an import name like mydata:train; to read the path type `{command}`"
            )
        return IMPORT_NAME(text)

    return name


def _add_endless(parser: argparse.ArgumentParser) -> None:
    """Add the option for iterables."""
    parser.add_argument(
        "--endless", action="store_true", help="feed the stream as it comes, without epochs, until Ctrl-C or SIGTERM"
    )


def _add_choice(parser: argparse.ArgumentParser, *, is_mix: bool) -> None:
    """Add the options that choose some of a source's samples."""
    add = parser.add_argument_group("choice of samples").add_argument
    if not is_mix:
        add(
            "--balance", nargs="?", const="y", metavar="TENSOR", help="every class equally often (default: by y)"
        )  # fmt: skip
    add(
        "--samples",
        type=_COUNT,
        metavar="N",
        help="of one epoch, with --balance or mix (default: as many as there are)",
    )
    add("--split", type=_parts, metavar="NAME:F,...", help="train:0.9,val:0.1: each sample always in the same part")
    add("--only", metavar="PART", help="of --split: only this one (default: each, as stream NAME.PART)")
    add("--split-seed", type=int, default=0, metavar="N", help="another division (default: %(default)s)")


def chosen(args: argparse.Namespace, config: SourceConfig) -> dict[str, SourceConfig]:
    """Return the source of each part, or one without a name if nothing is split."""
    from penstock_producer.sources.config import parse_config, part_of

    if by := getattr(args, "balance", None):
        config = parse_config({"kind": "balanced", "source": config, "by": by, "samples": args.samples})
    elif getattr(args, "samples", None) and args.kind != "mix":
        raise WrongUsage("--samples says how many a choice takes: it goes with --balance or with mix")
    if getattr(args, "split", None) is None:
        return dict.fromkeys(parts_of(args), config)
    return {name: part_of(config, args.split, name, args.split_seed) for name in parts_of(args)}


def parts_of(args: argparse.Namespace) -> list[str]:
    """Return the names of the wanted parts, or one empty name if nothing is split."""
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
        # a file that matches nothing, or FILE.npz:ARRAY, is named as it is
        found = sorted(glob.glob(pattern)) or [pattern]  # noqa: PTH207
        for path in found:
            if path.endswith(".npz") and not sign:
                archives.append(path)
            else:
                columns.setdefault(name if sign else _stem(path), []).append(path)
    return {"columns": columns, "archives": archives}


def _stem(path: str) -> str:
    return path.rpartition(".npz:" if ".npz:" in path else "/")[2].removesuffix(".npy")


def _named_once(texts: Sequence[str], option: str, form: str = "NAME=VALUE") -> dict[str, str]:
    """Return name -> value. A name with two values is refused, because the last one would win silently."""
    found: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise WrongUsage(f"{option} {text!r}: write {form}")
        if found.setdefault(name, value) != value:
            raise WrongUsage(f"{option} {name} is given twice, with {found[name]!r} and {value!r}: once is enough")
    return found


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise WrongUsage(f"--part {text!r}: {error}; quote the source once, as in 'images photos/'") from None


def _weight(text: str) -> float:
    weight = 0.0
    with contextlib.suppress(ValueError):
        weight = float(text)
    if not 0 < weight < 1e12:  # the bounds of the config, and not a number
        raise WrongUsage(f"--part {text!r}: write a weight above 0 and then a source, like --part 0.7 'images photos/'")
    return weight


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
