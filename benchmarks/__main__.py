"""``python -m benchmarks``: Penstock and its peers, from writer to batches, in one run. ``make bench``.

It measures transport at 256 B to 100 MB a sample, everything to each of several trainers, tf.data against numpy, and
the targets. Rounds of all sides alternate, so that a drifting machine affects all of them. The results are the median
of the ratios of neighbouring rounds, with the lowest and the highest, and CPU seconds over all processes. The tables
are Markdown. Peers from the package index are installed into separate environments at their first use. A side's
processes live for all rounds of a payload, if there is memory for all sides at once. While waiting, all twelve took 3 %
of two cores. ``--clean`` starts them for each round. ``--quick`` (``make bench-quick``) is for measuring before and
after a change. It has plain redis-py as the only peer, and takes less than 3 minutes. On slow cores there are fewer
rounds, so that a run ends in ``--minutes``. Each table has the number of its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import fanout, targets, transport
from benchmarks.allowance import Allowance
from benchmarks.arguments import byte_size, whole_number
from benchmarks.cases import CASES, IMAGE, ONE_BY_ONE, Case, asked_for
from benchmarks.machine import describe_machine, describe_more, progress
from benchmarks.plots import draw
from benchmarks.results import Results, compared
from benchmarks.sides import BASELINE, BROADCAST, INLINE, ONE_READER, OURS, SEGMENTS, TOGETHER, Side, here
from benchmarks.spread import Spread

__all__ = ["describe_machine", "main", "progress"]

PARTS = ("transport", "trainers", "tf.data")
QUICK = (ONE_BY_ONE.name, "256 B rows, write_batch", "4 kB", IMAGE.name, "10 MB")
MINUTES, QUICK_MINUTES = 36.0, 2.3
"""The time for measuring, less than the promised time, because the last round of each piece may be longer than those
before.
"""
QUICK_PAIRS = ((INLINE, 1), (SEGMENTS, 8))
MAKING = (1, 8)
"""The numbers of trainers for samples that take time to make."""


@dataclass
class Plan:
    """The plan of a run."""

    minutes: float
    rounds: int
    trainers_rounds: int
    seconds: float
    """The approximate time of each side on the clock in a round."""
    trainers_seconds: float | None
    """The time of several trainers. None means longer for more trainers."""
    cases: list[Case]
    fanned: list[Case]
    """The payloads that go to each of several trainers."""
    sides: list[Side]
    broadcast: list[Side]
    trainers: dict[float, Sequence[int]]
    """CPU seconds that a sample costs -> numbers of trainers."""
    parts: Sequence[str]
    is_quick: bool
    is_clean: bool
    """Whether a side's processes are started for each round, even if they could stay."""

    def pairs(self, cost: float) -> list[tuple[Side, int]]:
        """Return the sides and the numbers of trainers for samples of this cost.

        A quick run has only those of the targets.
        """
        every = [(side, count) for count in self.trainers[cost] for side in self.broadcast]
        return [pair for pair in every if not self.is_quick or (pair[0].name, pair[1]) in QUICK_PAIRS]

    def seconds_of(self, trainers: int) -> float:
        """Return the time on the clock. Each trainer maps every segment once, which would dominate a short turn."""
        return self.trainers_seconds or 1.5 + trainers / 2

    def is_lasting(self, case: Case) -> bool:
        """Return whether processes stay for all rounds of a payload, and wait in between.

        They do if all fit into memory.
        """
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return not self.is_clean and len(self.sides) * 2 * case.room_bytes <= memory / 3

    def weights(self) -> list[float]:
        """Return about how many seconds each piece takes on two idle cores, to divide the time among them."""
        once, again = 4.0 + (self.seconds + 0.4) * self.rounds, (4.0 + self.seconds) * self.rounds
        found = [len(self.sides) * (once if self.is_lasting(case) else again) for case in self.cases]
        found = found if "transport" in self.parts else []
        if "trainers" in self.parts:
            for cost in list(self.trainers) * len(self.fanned):
                pairs = [(side.package == "tensorflow" and not cost, count) for side, count in self.pairs(cost)]
                # importing TensorFlow takes one core for 5 s
                a_round = sum(
                    3.0 + self.seconds_of(count) + count * (5 if is_slow else 0.5) for is_slow, count in pairs
                )
                found.append(a_round * self.trainers_rounds)
        return found + ([10.0 + 12.0 * (self.rounds + 1)] if "tf.data" in self.parts else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if Penstock could not carry something, and 130 if it was interrupted."""
    args, began = _parser().parse_args(arguments), time.monotonic()
    plan = _planned(args)
    environment = describe_machine() | describe_more([*plan.sides, *plan.broadcast]) | {"budget": _budgets(plan.cases)}
    results = Results(environment)
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print(
        f"medians (lowest-highest) of up to {plan.rounds} interleaved rounds, about {plan.seconds:g} s each, trainers "
        f"{plan.trainers_rounds} of {plan.seconds_of(1):g} to {plan.seconds_of(8):g} s; guarantees on; at most some "
        f"{plan.minutes:g} minutes"
    )
    if not any(side.name == SEGMENTS for side in plan.sides):
        print("no segments: there is no /dev/shm, or they were not asked for")
    print(flush=True)
    is_interrupted = False
    try:
        _run(plan, results, lambda: results.save(args.json) if args.json else None)
    except KeyboardInterrupt:
        is_interrupted = True
    _tell(args, results)
    print(f"{'interrupted' if is_interrupted else 'done'} after {time.monotonic() - began:.0f} s")
    return 130 if is_interrupted else int(not results.is_whole)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer payloads, peers and rounds: under 3 minutes")
    parser.add_argument(
        "--minutes", type=float, help=f"at most about so long (default {MINUTES:g}, quick {QUICK_MINUTES:g})"
    )
    parser.add_argument(
        "--rounds", type=int, help="of each side, if there is time (default 3, quick 5; trainers 2, quick 1)"
    )
    parser.add_argument(
        "--seconds", type=float, help="of each side in a round (default 1, quick 0.5; trainers 2 to 5.5)"
    )
    parser.add_argument("--size", default="", help="payloads whose name contains this, such as '150 kB'")
    parser.add_argument(
        "--payload",
        action="append",
        default=[],
        metavar="SAMPLE",
        help="a payload of your own: bytes a sample, as 64kb, or dtype:shape, as float32:3,96,96; repeatable",
    )
    parser.add_argument("--batch", type=whole_number(1), help="samples in a batch of --payload (default: some 10 MB)")
    parser.add_argument("--rows", action="store_true", help="write --payload many samples at once, by write_batch")
    parser.add_argument(
        "--side", action="append", help="sides whose name contains this, such as 'tensorcom'; repeatable"
    )
    parser.add_argument(
        "--budget", type=byte_size, metavar="SIZE",
        help="payload that may lie between writer and reader, such as 1gb (default 1gb, for rows and 4 kB 256mb)",
    )  # fmt: skip
    parser.add_argument("--clean", action="store_true", help="start every process for each round: thrice the time")
    parser.add_argument("--json", type=Path, help="write every figure to this file, anew after every round")
    parser.add_argument("--against", type=Path, help="compare with a file that --json wrote before a change")
    parser.add_argument("--plots", type=Path, help="write the curves as SVG into this folder")
    return parser


def _planned(args: argparse.Namespace) -> Plan:
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    quick = args.quick
    one, many = (*OURS, BASELINE) if quick else ONE_READER, OURS if quick else BROADCAST
    one = (*one, TOGETHER) if TOGETHER.name in (args.side or ()) else one

    def wanted(sides: tuple[Side, ...]) -> list[Side]:
        return [side for side in here(sides) if not args.side or any(part in side.name for part in args.side)]

    def with_room(cases: list[Case]) -> list[Case]:
        return [replace(case, room_bytes=args.budget or case.room_bytes) for case in cases]

    cases = [case for case in CASES if args.size in case.name and (args.size or not quick or case.name in QUICK)]
    if args.payload:
        cases = [_case(text, args) for text in args.payload]
    if not cases:
        raise SystemExit(f"no payload {args.size!r}: there are {', '.join(case.name for case in CASES)}, or --payload")
    for part in args.side or ():
        if not any(part in side.name for side in (*one, *many)):
            raise SystemExit(f"no side {part!r}: there are {', '.join({side.name: 0 for side in (*one, *many)})}")
    return Plan(
        minutes=args.minutes or (QUICK_MINUTES if quick else MINUTES),
        rounds=args.rounds or (5 if quick else 3),
        trainers_rounds=args.rounds or (1 if quick else 2),
        seconds=args.seconds or (0.5 if quick else 1.0),
        trainers_seconds=args.seconds,
        cases=with_room(cases),
        fanned=with_room(cases if args.payload else [IMAGE]),
        sides=wanted(one),
        broadcast=wanted(many),
        trainers={0.0: (1, 8)} if quick else {0.0: fanout.TRAINERS, fanout.MAKE_S: MAKING},
        parts=args.parts or (PARTS[:2] if quick else PARTS),
        is_quick=quick,
        is_clean=args.clean,
    )


def _case(text: str, args: argparse.Namespace) -> Case:
    try:
        return asked_for(text, args.batch, args.rows)
    except (argparse.ArgumentTypeError, TypeError, ValueError):
        raise SystemExit(f"--payload {text}: not bytes a sample, as 64kb, or dtype:shape, as float32:3,96,96") from None


def _budgets(cases: Sequence[Case]) -> str:
    found: dict[int, list[str]] = {}
    for case in cases:
        found.setdefault(case.room_bytes, []).append(case.name)
    most = max(found, key=lambda room: len(found[room]), default=0)
    others = [f" ({', '.join(names)}: {room >> 20} MiB)" for room, names in found.items() if room != most]
    return f"{most >> 20} MiB" + "".join(others)


def _run(plan: Plan, found: Results, keep: Callable[[], None]) -> None:
    """Run all pieces. Each is shown when it ends, also by an interruption."""
    allowance = Allowance(60 * plan.minutes, plan.weights())
    for case in plan.cases if "transport" in plan.parts else ():
        measured = transport.Measured(case)
        found.transport.append(measured)
        try:
            transport.measure(
                measured, plan.sides, plan.rounds, plan.seconds, allowance.piece(), keep, plan.is_lasting(case)
            )
        finally:
            if measured.rounds or measured.failed:
                print(transport.shown(measured, plan.sides), flush=True)
    parts = [(case, *one) for case in plan.fanned for one in plan.trainers.items()]
    for case, cost, counts in parts if "trainers" in plan.parts else ():
        fanned = fanout.Fanned(cost, case=case)
        found.fanned.append(fanned)
        try:
            fanout.measure(fanned, plan.pairs(cost), plan.trainers_rounds, plan.seconds_of, allowance.piece(), keep)
        finally:
            if fanned.rounds or fanned.failed:
                print(fanout.shown(fanned, plan.broadcast, counts), flush=True)
    if "tf.data" in plan.parts:
        found.tfdata = _tfdata(plan.rounds)
        keep()


def _tfdata(rounds: int) -> dict[str, Spread] | str:
    progress("tf.data")
    try:
        from benchmarks import tfdata

        found = tfdata.measure(rounds)
    except Exception as error:  # as in transport
        print(f"### tf.data\n\nnot measured: {transport.why(error)}\n", flush=True)
        return transport.why(error)
    finally:
        progress("")
    return found


def _tell(args: argparse.Namespace, results: Results) -> None:
    """Show what follows from the figures."""
    if reached := results.targets():
        print(targets.shown(reached), flush=True)
    if args.against:
        print(compared(results.transport, json.loads(args.against.read_text())))
    if args.json:
        results.save(args.json)
        print(f"figures of every round: {args.json}")
    if args.plots:
        print(f"plots: {', '.join(map(str, draw(results.plain(), args.plots)))}")


if __name__ == "__main__":
    # SIGTERM ends the run like Ctrl-C: results are shown, and segments in memory are removed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
