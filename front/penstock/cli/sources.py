"""The options that `produce` and `run` share: which source, which stream, how many epochs and workers.

What they mean is the producer's; a command's own options are in its file.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.cli import (
    DURABILITY,
    IMPORT_NAME,
    PAYLOAD,
    POLICY,
    SERVER_URL,
    STREAM_NAME,
    Parser,
    WrongUsage,
    byte_size,
    of_usage,
    whole_number,
)
from penstock.cli.kinds import (
    EXAMPLES,
    Kinds,
    add_choice,
    add_endless,
    add_kinds,
    chosen,
    config_of,
    import_name,
    parts_of,
)
from penstock_common.errors import PenstockError

if TYPE_CHECKING:
    from penstock_producer.jobs.plan import ProductionPlan
    from penstock_producer.jobs.worker import WorkerOptions
    from penstock_producer.sources.config import SourceConfig

DEFAULT_STREAM = "train"
_COUNT, _NOT_NEGATIVE = whole_number(1), whole_number(0)
_NAME = "module:attribute; the current folder is importable"
_EXAMPLES = {
    "images": "photos/ --resize 224x224 --transform augment:flip --epochs 3",
    "dataset": "mydata:train --transform augment:flip",
    "keras": "mydata:batches --epochs 3",
    "generator": "mydata:samples --limit 10000",
    **EXAMPLES,
}


def add_sources(
    parser: argparse.ArgumentParser, kind: type[Parser], tail: str = "", *, production: bool = True
) -> None:
    """One sub-command per kind of source; `tail` is what an example of the command ends with.

    Without ``production`` there are only the options that say which source it is.
    """
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="SOURCE", parser_class=kind, action=Kinds)
    images = kinds.add_parser("images", help="a folder or a zip of images; sub-folders are classes")
    _add_images(images)
    dataset = kinds.add_parser("dataset", help="an object with a length and items, or equally long arrays")
    dataset.add_argument("name", type=import_name(dataset), metavar="NAME", help=_NAME)
    keras = kinds.add_parser("keras", help="a Keras Sequence or PyDataset")
    keras.add_argument("name", type=import_name(keras), metavar="NAME", help=_NAME)
    generator = kinds.add_parser("generator", help="an iterable, or a function giving one; read by one worker")
    generator.add_argument("name", type=import_name(generator), metavar="NAME", nargs="?", help=_NAME)
    generator.add_argument(
        "--pair", action="append", metavar="TENSOR=NAME", default=[], help="instead: several, walked in step"
    )
    generator.add_argument("--batched", action="store_true", help="items are batches")
    generator.add_argument("--limit", type=_COUNT, metavar="N", help="end the pass after N items")
    add_endless(generator)
    for sub in (images, dataset, generator):
        sub.add_argument(
            "--transform", type=IMPORT_NAME, metavar="MODULE:FUNCTION", help="applied to each sample: f(sample[, rng])"
        )
    others = add_kinds(kinds.add_parser, _NAME, _COUNT)
    _add_pixels(others[0])
    indexed: list[argparse.ArgumentParser] = [images, dataset, keras, *others]
    for each in indexed:
        add_choice(each, _COUNT, is_mix=each.prog.endswith(" mix"))
    for each in [*indexed, generator]:
        example = _EXAMPLES[each.prog.split()[-1]]
        if production:
            _add_production(each)
        else:
            example = example.replace(" --epochs 3", "")
        each.epilog = f"example:\n  {each.prog} {example}{tail}"


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
    add = parser.add_argument_group("production").add_argument
    add("--stream", type=STREAM_NAME, default=DEFAULT_STREAM, help="default: %(default)s")
    add("--epochs", type=_COUNT, help="default: 1")
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
        "--sample-limit", type=_seconds, default=300.0, metavar="S", help="longer ones hang (default: 300; 0: no limit)"
    )
    add_spec(add)
    add(
        "--budget",
        type=byte_size,
        metavar="SIZE",
        help="bytes the stream may hold (default: 1gb, less on a small server)",
    )
    add(
        "--retention",
        type=POLICY,
        metavar="POLICY",
        help="of settled epochs: budget (default), epochs:3, time:24h, bytes:500mb",
    )
    add(
        "--durability",
        type=DURABILITY,
        metavar="LEVEL",
        help="of writes: memory (default), fsync, replicas=2, fsync+replicas=2",
    )
    where = "where payloads of a new stream lie: inline (default), or segments:DIR, a folder that all trainers see"
    add("--payload", type=PAYLOAD, metavar="WHERE", help=where)
    add("--partitions", type=_COUNT, metavar="P", help="of a new stream (default: 1)")
    add(
        "--url",
        type=SERVER_URL,
        help="the streams' server (default: PENSTOCK_URL, else your `penstock server`, else localhost:6379)",
    )
    add_queue(parser)


def add_spec(add: Callable[..., argparse.Action]) -> None:
    """Add what declares the tensors of a sample."""
    add("--spec", type=_spec, metavar="JSON", help="""e.g. '{"x": ["uint8", [null, null, 3]]}'; null is a free size""")


def add_queue(parser: argparse.ArgumentParser) -> None:
    """Where jobs are, and what their workers may hold."""
    parser.add_argument(
        "--queue-url",
        type=SERVER_URL,
        help="the server that holds the jobs (default: PENSTOCK_QUEUE_URL, else the same)",
    )
    parser.add_argument("--queue", default="penstock", metavar="NAME", help="of jobs (default: %(default)s)")
    parser.add_argument(
        "--worker-memory",
        type=byte_size,
        metavar="SIZE",
        help="a worker that holds more is replaced (default: its part of 80%% of memory)",
    )


def plans_of(args: argparse.Namespace) -> dict[str, ProductionPlan]:
    """What the options ask for, by the part of a split; one without a name where nothing is split."""
    with of_usage():
        return {part: _plan(args, part, source) for part, source in chosen(args, _source(args)).items()}


def check_source(args: argparse.Namespace) -> None:
    """Raise SourceError for a source that means nothing, by what the command line says of it alone."""
    chosen(args, _source(args))


def streams_of(args: argparse.Namespace) -> list[str]:
    """Return the names of the streams that the options ask for, without a look at the source."""
    return [_stream(args, part) for part in parts_of(args)]


def _stream(args: argparse.Namespace, part: str) -> str:
    return f"{args.stream}.{part}" if part else str(args.stream)


def workers_of(args: argparse.Namespace) -> dict[str, int]:
    """Local workers asked for, by the part of a split: each has its share of them, and at least one."""
    split = getattr(args, "split", None)
    if split is None:
        return {"": worker_count(args)}
    count = worker_count(args)
    return {name: max(min(1, count), round(count * fraction)) for name, fraction in split}


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
    )


def options_of(args: argparse.Namespace) -> WorkerOptions:
    """Where streams and jobs are."""
    from penstock_common.settings import Settings
    from penstock_producer.jobs.worker import WorkerOptions

    settings = Settings.from_environment()
    url = args.url or settings.url
    queue_url = args.queue_url or settings.named_queue_url or url
    return WorkerOptions(url=url, queue_url=queue_url, queue=args.queue, memory_bytes=args.worker_memory)


def worker_count(args: argparse.Namespace) -> int:
    """Local workers asked for."""
    return args.workers if args.workers is not None else os.cpu_count() or 1


def source_of(args: argparse.Namespace) -> SourceConfig:
    """The one source that the options name."""
    with of_usage():
        sources = chosen(args, _source(args))
    if len(sources) > 1:
        raise WrongUsage(f"--split gives {len(sources)} sources; say which one is meant: --only {next(iter(sources))}")
    return next(iter(sources.values()))


def _part_of(words: list[str]) -> SourceConfig:
    """A source within an option of another."""
    parser = Parser(prog="--part WEIGHT")
    add_sources(parser, Parser, production=False)
    return source_of(parser.parse_args(words))


def _source(args: argparse.Namespace) -> SourceConfig:
    """Before anything is chosen of it."""
    from penstock_producer.sources.config import parse_config

    config: dict[str, Any] = {"kind": args.kind}
    if (other := config_of(args, _part_of)) is not None:
        return parse_config(config | other)
    if args.kind == "images":
        names: tuple[str, ...] = ("path", "label", "labels", "classes", "mode", "transform")
        names += ("resize", "crop", "random_crop", "flip")
        if args.skip_unlabelled and not args.labels:
            raise WrongUsage("--skip-unlabelled says what is done with images that a table does not name: add --labels")
        config["unlabelled"] = "skip" if args.skip_unlabelled else "refuse"
    elif args.kind == "generator":
        names = ("name", "batched", "limit", "transform", "endless")
        config["pairs"] = dict(_pair(text) for text in args.pair) or None
    else:
        names = ("name", "transform") if args.kind == "dataset" else ("name",)
    return parse_config(config | {name: getattr(args, name) for name in names})


def _pair(text: str) -> tuple[str, str]:
    tensor, sign, name = text.partition("=")
    if not sign:
        raise WrongUsage(f"--pair {text!r}: write TENSOR=module:attribute")
    return tensor, name


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _size(text: str) -> int | tuple[int, int]:
    numbers = [int(part) if part.isdecimal() else 0 for part in text.lower().split("x")]
    if not 1 <= len(numbers) <= 2 or 0 in numbers:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 224x224 (height x width) or 224")
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, like 60 or 0.5; 0 is no limit")
    return seconds


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
