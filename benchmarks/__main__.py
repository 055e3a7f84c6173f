"""``python -m benchmarks``: Penstock beside its peers, from writer to batches, in one run. ``make bench``.

Transport at 256 B to 100 MB a sample, everything to each of several trainers, tf.data against numpy, and the targets.
Rounds of all sides alternate, so that a drifting machine moves all; what is quoted is the median of the ratios of
neighbouring rounds, with the lowest and the highest, and CPU seconds over all processes. The tables are Markdown.
Peers from the package index are installed into environments of their own the first time.
``--quick`` (``make bench-quick``) is for before and after a change: plain redis-py as the only peer, under 3 minutes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import fanout, targets, transport
from benchmarks.cases import CASES, IMAGE, ONE_BY_ONE, Case
from benchmarks.machine import describe_machine, describe_more, progress
from benchmarks.plots import plot
from benchmarks.rounds import Round
from benchmarks.sides import BASELINE, BROADCAST, INLINE, ONE_READER, OURS, PLAIN, SEGMENTS, Side, here
from benchmarks.spread import Spread, median, ratios, table

__all__ = ["describe_machine", "main", "progress"]

PARTS = ("transport", "trainers", "tf.data")
QUICK = (ONE_BY_ONE.name, "256 B rows, write_batch", "4 kB", IMAGE.name, "10 MB")


@dataclass
class Plan:
    """What a run measures."""

    rounds: int
    seconds: float
    """About so long each side is on the clock in a round."""
    cases: list[Case]
    sides: list[Side]
    broadcast: list[Side]
    trainers: Sequence[int]
    costs: Sequence[float]
    """Of making a sample for trainers, CPU seconds."""
    parts: Sequence[str]


@dataclass
class Results:
    """What it found."""

    transport: list[transport.Measured] = field(default_factory=list)
    fanned: list[fanout.Fanned] = field(default_factory=list)
    tfdata: Spread | None = None

    @property
    def is_whole(self) -> bool:
        """Whether Penstock carried everything."""
        failed = [name for one in self.transport for name in one.failed]
        failed += [name for one in self.fanned for name, _ in one.failed]
        return not any(name in (INLINE, SEGMENTS) for name in failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if Penstock could not carry something."""
    args = _parser().parse_args(arguments)
    plan = _planned(args)
    environment = describe_machine() | describe_more([*plan.sides, *plan.broadcast])
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print(f"medians (lowest-highest) of {plan.rounds} interleaved rounds, about {plan.seconds:g} s each; guarantees on")
    if not any(side.name == SEGMENTS for side in plan.sides):
        print("no segments: there is no /dev/shm, or they were not asked for")
    print(flush=True)
    results = _run(plan)
    reached = targets.targets(results.transport, results.fanned, results.tfdata)
    if reached:
        print(targets.shown(reached), flush=True)
    if args.against:
        print(compared(results.transport, json.loads(args.against.read_text())))
    if args.json:
        args.json.write_text(json.dumps(_plain(results, environment, reached), indent=1))
        print(f"figures of every round: {args.json}")
    if args.plots:
        _plots(results, args.plots)
    return int(not results.is_whole)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer payloads, peers and rounds: under 3 minutes")
    parser.add_argument("--rounds", type=int, help="of each side (default 5, quick 3)")
    parser.add_argument("--seconds", type=float, help="of each side in a round (default 1.5, quick 0.5)")
    parser.add_argument("--size", default="", help="payloads whose name contains this, such as '150 kB'")
    parser.add_argument(
        "--side", action="append", help="sides whose name contains this, such as 'tensorcom'; repeatable"
    )
    parser.add_argument("--json", type=Path, help="write every figure of every round to this file")
    parser.add_argument("--against", type=Path, help="compare with a file that --json wrote before a change")
    parser.add_argument("--plots", type=Path, help="write the curves as SVG into this folder")
    return parser


def _planned(args: argparse.Namespace) -> Plan:
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    quick = args.quick
    one, many = (*OURS, BASELINE) if quick else ONE_READER, OURS if quick else BROADCAST

    def wanted(sides: tuple[Side, ...]) -> list[Side]:
        return [side for side in here(sides) if not args.side or any(part in side.name for part in args.side)]

    return Plan(
        rounds=args.rounds or (3 if quick else 5),
        seconds=args.seconds or (0.5 if quick else 1.5),
        cases=[case for case in CASES if args.size in case.name and (args.size or not quick or case.name in QUICK)],
        sides=wanted(one),
        broadcast=wanted(many),
        trainers=(1, 8) if quick else fanout.TRAINERS,
        costs=(0.0,) if quick else (0.0, fanout.MAKE_S),
        parts=args.parts or (PARTS[:2] if quick else PARTS),
    )


def _run(plan: Plan) -> Results:
    found = Results()
    if "transport" in plan.parts:
        for case in plan.cases:
            found.transport.append(transport.measure(case, plan.sides, plan.rounds, plan.seconds))
            print(transport.shown(found.transport[-1], plan.sides), flush=True)
    if "trainers" in plan.parts:
        for cost in plan.costs:
            one = fanout.measure(plan.broadcast, plan.trainers, plan.rounds, plan.seconds, cost)
            found.fanned.append(one)
            print(fanout.shown(one, plan.trainers), flush=True)
    if "tf.data" in plan.parts:
        from benchmarks import tfdata

        found.tfdata = tfdata.measure(plan.rounds)
    return found


def _plain(results: Results, environment: dict[str, str], reached: list[targets.Target]) -> dict[str, Any]:
    return {
        "environment": environment,
        "transport": [asdict(one) for one in results.transport],
        "trainers": [
            {
                "make_s": one.make_s,
                "rounds": [
                    {"side": side, "trainers": count, "rounds": [asdict(each) for each in rounds]}
                    for (side, count), rounds in one.rounds.items()
                ],
                "failed": {f"{side}, {count}": reason for (side, count), reason in one.failed.items()},
            }
            for one in results.fanned
        ],
        "tf.data": asdict(results.tfdata) if results.tfdata else None,
        "targets": [one.plain() for one in reached],
    }


def compared(now: list[transport.Measured], before: dict[str, Any]) -> str:
    """Ratios to plain redis-py, which a machine that has become slower moves less than times."""
    then = {one["case"]["name"]: one["rounds"] for one in before["transport"]}
    rows = []
    for measured in now:
        for name in (INLINE, SEGMENTS):
            pair = _to_plain(measured.rounds), _to_plain(_rounds(then.get(measured.case.name, {})))
            new, old = pair[0].get(name), pair[1].get(name)
            if new and old:
                rows.append([measured.case.name, name, old.shown(), new.shown(), f"{new.median / old.median:.2f}x"])
    return (
        "### Against before, as ratios to plain redis-py\n\n" + table(("", "", "before", "now", "change"), rows) + "\n"
    )


def _rounds(plain: dict[str, Any]) -> dict[str, list[Round]]:
    return {side: [Round(**one) for one in rounds] for side, rounds in plain.items()}


def _to_plain(rounds: dict[str, list[Round]]) -> dict[str, Spread | None]:
    return {name: ratios(rounds[name], rounds.get(PLAIN, [])) for name in (INLINE, SEGMENTS) if name in rounds}


def _plots(results: Results, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    measured = [one for one in results.transport if not one.case.by_batch]
    if measured:
        ticks = {float(one.case.sample_bytes): one.case.name.split(",")[0].removesuffix(" rows") for one in measured}
        curves: dict[str, list[tuple[float, float]]] = {}
        for one in measured:
            for name, rounds in one.rounds.items():
                rate = median(rounds, lambda each: each.gb_per_s)
                curves.setdefault(name, []).append((one.case.sample_bytes, rate))
        plot(folder / "transport.svg", "From writer to batches", "bytes a sample", "GB/s", ticks, curves)
    for fanned in results.fanned:
        counts = sorted({count for _, count in fanned.rounds})
        sums: dict[str, list[tuple[float, float]]] = {}
        for (name, count), rounds in sorted(fanned.rounds.items()):
            sums.setdefault(name, []).append((count, median(rounds, lambda each: each.samples_per_s)))
        name = "trainers-decoding" if fanned.make_s else "trainers"
        title = "Everything to each trainer, in sum" + (", 1 ms of Python a sample" if fanned.make_s else "")
        labels = {float(count): str(count) for count in counts}
        plot(folder / f"{name}.svg", title, "trainers", "samples/s", labels, sums)
    print(f"plots: {folder}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what lies in memory is removed on the way out
    sys.exit(main())
