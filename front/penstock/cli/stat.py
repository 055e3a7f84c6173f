"""``penstock stat``: the properties of an epoch's samples, and what an expert would notice."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import EPOCH_NUMBER, add_no_lease, add_stream, opened, whole_number
from penstock_common.printable import listed, readable_bytes

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_consumer.replay.samples import SampleReader


SAMPLES = 1000
_CLASSES_SHOWN = 12


EPILOG = (
    "example:\n  penstock stat train\n  penstock stat train --exact --epoch 2 --plots plots/\n"
    "  penstock stat train --json | jq '.tensors[].paste'\n\n"
    "Nothing is delivered or acknowledged: no group is involved. Quantiles of more than 65536 numbers have an\n"
    "error of at most 0.6 percentage points of rank (99.7 %); where integers are few, as in uint8, they are exact."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_stream(parser)
    parser.add_argument("--epoch", type=EPOCH_NUMBER, metavar="N", help="default: the newest that has samples")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--samples", type=whole_number(1), default=SAMPLES, metavar="N", help="drawn at random (default: 1000)"
    )
    how.add_argument("--exact", action="store_true", help="read every sample instead")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of the draw (default: %(default)s)")
    add_no_lease(parser)
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write histograms and class counts there, as PNG")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the statistics. Returns 0, even if there are warnings."""
    from penstock.views.show import class_names
    from penstock_consumer.replay.samples import SampleReader

    with opened(args) as (client, stream):
        names = class_names(stream)
        with SampleReader(client, stream, args.epoch, holds=not args.no_lease) as viewer:
            result = _gathered(viewer, args, names)
    result = {"stream": stream.name, "epoch": viewer.epoch, "state": viewer.manifest.state, **result}
    plots = _plotted(args.plots, result, names) if args.plots else []
    if args.json:
        console.json({**result, "plots": plots})
        return 0
    _print(console, result)
    for path in plots:
        console.notice(f"wrote {path}")
    return 0


def _gathered(viewer: SampleReader, args: argparse.Namespace, names: dict[str, list[str]]) -> dict[str, Any]:
    import numpy as np

    from penstock.views.stat import TensorSummary, as_json

    rng = np.random.default_rng(args.seed)
    summaries = {tensor.name: TensorSummary(tensor, rng) for tensor in viewer.spec}
    total = viewer.committed()
    is_whole = args.exact or total <= args.samples
    chosen = None if is_whole else np.sort(rng.choice(total, args.samples, replace=False))
    read = 0
    for seen in viewer.drawn(chosen):
        read += len(seen.rows)
        for column in seen.block.columns:
            summaries[column.spec.name].add(column, seen.rows, lambda row, seen=seen: str(seen.identity(row)))  # type: ignore[misc]
    missed = viewer.missed
    return {
        "samples_there": total,
        "samples_read": read,
        "exact": chosen is None and not missed.trimmed and not missed.unreadable,
        "seed": None if chosen is None else args.seed,
        "trimmed": missed.trimmed,
        "unreadable": missed.unreadable,
        "why_unreadable": missed.why,
        "tensors": [as_json(summary, names.get(name, ())) for name, summary in summaries.items()],
    }


# --- for people -------------------------------------------------------------------------------------------------------


def _print(console: Console, result: dict[str, Any]) -> None:
    console.line((f"stream {result['stream']}, epoch {result['epoch']}", "bold"), f": {_amount(result)}")
    if result["trimmed"]:
        console.notice(f"{result['trimmed']} samples are left out: retention has removed them")
    if result["unreadable"]:
        why = result["why_unreadable"]
        console.notice(f"{result['unreadable']} samples are left out: their entries cannot be read ({why})")
    for tensor in result["tensors"]:
        console.line()
        _print_tensor(console, tensor)
    warnings = [finding for tensor in result["tensors"] for finding in tensor["findings"]]
    if warnings:
        console.line()
    for finding in warnings:
        console.line(("warning", "yellow"), f": {finding}")


def _amount(result: dict[str, Any]) -> str:
    there = result["samples_there"]
    running = "" if result["state"] == "produced" else f" so far ({result['state']})"
    if result["seed"] is None:
        return f"all {result['samples_read']} samples{running}"
    return f"{result['samples_read']} of {there} samples{running}, drawn with seed {result['seed']}; --exact reads all"


def _print_tensor(console: Console, one: dict[str, Any]) -> None:
    from penstock.views.pictures import spark

    sizes = ", ".join("?" if dim is None else str(dim) for dim in one["shape"])
    of = "" if one["of"] == "value" else f", {one['of']}s"
    console.line((one["tensor"], "bold"), f"  {one['dtype']} [{sizes}]{of}, {readable_bytes(one['bytes'])}")
    if one["shapes_seen"] and one["of"] != "length":
        console.line(f"  shapes      {one['shapes_seen']['least']} to {one['shapes_seen']['greatest']}")
    console.line("  " + "  ".join(f"{what} {_short(one[what])}" for what in ("min", "max", "mean", "std")))
    quantiles = ", ".join(f"{float(q) * 100:g}% {_short(value)}" for q, value in one["quantiles"].items())
    console.line(f"  quantiles   {quantiles}")
    if one["histogram"]["counts"]:
        bars = spark(one["histogram"]["counts"])
        console.line(f"  histogram   {_short(one['min'])} {bars} {_short(one['max'])}")
    if one["nan"] or one["infinite"]:
        console.line(f"  not finite  {one['nan']} NaN, {one['infinite']} infinite of {one['numbers']}")
    if one["classes"]:
        console.line(f"  classes     {_classes(one['classes'])}")
    console.line(f"  compressed  {_ratios(one['compression'])}")
    for framework, line in one["paste"].items():
        console.line(f"  {framework:<11} {line}")


def _ratios(result: dict[str, Any]) -> str:
    if not result["bytes"]:
        return "nothing to compress"
    each = [f"{codec} {f'{ratio:.1f}x' if ratio else 'is not installed'}" for codec, ratio in result["ratios"].items()]
    return f"{', '.join(each)} (estimated on {readable_bytes(result['bytes'])})"


def _classes(classes: list[dict[str, Any]]) -> str:
    return listed([f"{_class(one)} {one['samples']}" for one in classes], _CLASSES_SHOWN)


def _class(one: dict[str, Any]) -> str:
    return one["name"] if one["name"] is not None else str(one["class"])


def _short(value: float | None) -> str:
    return "?" if value is None else f"{value:.5g}"


# --- plots ------------------------------------------------------------------------------------------------------------


def _plotted(folder: Path, result: dict[str, Any], names: dict[str, list[str]]) -> list[str]:
    """Draw a histogram of each tensor, and the counts of classes if there are few."""
    from penstock.views.png import bars, make_folder, save

    paths: list[str] = []
    make_folder(folder)

    def write(name: str, title: str, counts: list[float], labels: list[str]) -> None:
        path = folder / f"{name.replace('/', '_')}.png"
        save(bars(f"{result['stream']} epoch {result['epoch']}: {title}", counts, labels), path)
        paths.append(str(path))

    for one in result["tensors"]:
        if one["histogram"]["counts"]:
            edges = one["histogram"]["edges"]
            ends = [edges[round(part * (len(edges) - 1) / 4)] for part in range(4)]
            title = f"{one['of']}s of {one['tensor']}, {one['samples']} samples"
            write(f"{one['tensor']}.histogram", title, one["histogram"]["counts"], [_short(edge) for edge in ends])
        if one["classes"] and len(one["classes"]) <= max(64, len(names.get(one["tensor"], ()))):
            counts = [each["samples"] for each in one["classes"]]
            labels = [_class(each) for each in one["classes"]] if len(counts) <= _CLASSES_SHOWN else []
            write(f"{one['tensor']}.classes", f"samples of each class of {one['tensor']}", counts, labels)
    return paths
