"""The cost of a sample as everything grows: ``python -m benchmarks.growth``.

One thing grows at a time: samples, partitions, members, groups, shards, retained epochs, ranks of an ordered group. The
result is the CPU time of all processes (writer, members, server) for each sample that was yielded, as a ratio to the
smallest size of the same round. So other work on the machine's cores has little influence. Rounds of one axis
alternate. Members are processes with one training loop each, forked from one that has imported everything. They join
and read a smaller epoch before the clock starts, and leave after it stops. So the comparison has only the costs that
last as long as a training. The initial cost of a process is shown separately, with that epoch's samples. ``waiting`` is
the cost of a member while no samples come. ``wakeups`` is the cost of waking without Penstock: a plain redis-py GET
among 32 processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import wakeups
from benchmarks.growth_rounds import BATCH, SAMPLE_BYTES, Cost, Size, run_round, run_waiting
from benchmarks.machine import describe_machine

WAKEUPS = "wakeups"
TARGET = 1.3
"""The ratio to the smallest size's cost up to which a cost counts as flat."""
SMALL_SHARDS = 128
"""A shard must fit into its partition's part of the budget. Otherwise its writer waits in the middle of each."""
WHOLE_BLOCKS = 32 * 76 * BATCH
"""A number of samples in which the batches of ranks are whole blocks, which one rank each fetches."""
WHOLE_SHARDS = 1000 * 2 * BATCH
"""A number of samples in which each shard is whole blocks, at least two. Ten shards then have as many blocks as a
thousand. If the end of a shard is less than a block, as with 300 samples a shard, there are 1.7 times as many. That is
shown separately."""


@dataclass(frozen=True)
class Axis:
    """A dimension that grows."""

    name: str
    sizes: dict[str, Size]
    """Name -> size of the round. The first is the smallest."""
    is_waiting: bool = False


AXES = (
    Axis(
        "samples", {f"{n:,} samples": Size(samples=n, shards=max(1, n // 10_000)) for n in (10_000, 100_000, 1_000_000)}
    ),
    Axis("partitions", {f"{n} partitions": Size(partitions=n, shards=SMALL_SHARDS) for n in (1, 8, 32)}),
    Axis("members", {f"{n} members": Size(members=n, samples=WHOLE_BLOCKS) for n in (1, 8, 32)}),
    Axis("groups", {f"{n} groups": Size(groups=n) for n in (1, 4, 16)}),
    Axis("shards", {f"{n:,} shards": Size(shards=n, samples=WHOLE_SHARDS) for n in (10, 100, 1000)}),
    Axis("small shards", {f"{n:,} shards with a rest": Size(shards=n) for n in (10, 100, 1000)}),
    Axis("epochs", {f"{n} retained epochs": Size(retained=n) for n in (1, 10, 100)}),
    Axis("ranks", {f"{n} ranks": Size(members=n, samples=WHOLE_BLOCKS, is_ordered=True) for n in (1, 8, 32)}),
    Axis(
        "ordered partitions",
        {f"ordered, {n} partitions": Size(partitions=n, shards=SMALL_SHARDS, is_ordered=True) for n in (1, 8, 32)},
    ),
    Axis(
        "waiting",
        {
            "1 member": Size(),
            "32 members": Size(members=32),
            "8 members, 32 partitions": Size(members=8, partitions=32),
            "8 members, 100 epochs": Size(members=8, retained=100),
            "8 members, 1,000 shards": Size(members=8, shards=1000),
        },
        is_waiting=True,
    ),
)


def per_sample(cost: Cost, size: Size) -> dict[str, float]:
    """Return microseconds of CPU for each sample that was yielded, and commands for a thousand of them."""
    parts = {"writer": cost.writer_cpu_s, "members": cost.readers_cpu_s, "server": cost.server_cpu_s}
    found = {name: seconds / size.delivered * 1e6 for name, seconds in parts.items()}
    count = size.groups * size.members
    return {
        **found, "all": sum(found.values()), "commands": cost.calls / size.delivered * 1e3,
        "joining_ms": cost.joining_cpu_s / count * 1e3,
    }  # fmt: skip


def per_second(cost: Cost, size: Size) -> dict[str, float]:
    """Return milliseconds of CPU, and commands, for each second that a member waits."""
    waited = cost.seconds * size.groups * size.members
    found = {"members": cost.readers_cpu_s / waited * 1e3, "server": cost.server_cpu_s / waited * 1e3}
    return {**found, "all": sum(found.values()), "commands": cost.calls / waited}


def measure(axis: Axis, rounds: int) -> dict[str, Any]:
    """Run all sizes in turn, ``rounds`` times. Ratios are of sizes of the same round."""
    told = per_second if axis.is_waiting else per_sample
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in axis.sizes}
    calls: dict[str, dict[str, int]] = {}
    for number in range(rounds):
        for name, size in axis.sizes.items():
            print(f"{axis.name}: {name}, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            cost = run_waiting(size) if axis.is_waiting else run_round(size)
            taken[name].append(told(cost, size))
            calls[name] = {command: count for command, count in cost.commands.items() if count}
    first = next(iter(axis.sizes))
    sizes = {}
    for name, found in taken.items():
        ratios = [one["all"] / base["all"] for one, base in zip(found, taken[first], strict=True)]
        sizes[name] = {
            "size": asdict(axis.sizes[name]),
            "median": {key: statistics.median(one[key] for one in found) for key in found[0]},
            "ratio": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
            "rounds": found,
            "calls_by_command": calls[name],
        }
    return {"axis": axis.name, "is_waiting": axis.is_waiting, "sizes": sizes}


def print_axis(result: dict[str, Any]) -> None:
    """Print the rows of an axis."""
    for name, one in result["sizes"].items():
        median, ratio = one["median"], one["ratio"]
        text = f"{ratio['median']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"
        if result["is_waiting"]:
            cells = [f"{median[key]:.2f}" for key in ("members", "server")]
            print(f"| {name} | {' | '.join(cells)} | {text} | {median['commands']:.0f} |", flush=True)
        else:
            cells = [f"{median[key]:.2f}" for key in ("writer", "members", "server", "all")]
            line = f"| {name} | {' | '.join(cells)} | {text} | {median['commands']:.0f} | {median['joining_ms']:.0f} |"
            print(line, flush=True)


def print_head(is_waiting: bool) -> None:
    """Print the head of the table."""
    if is_waiting:
        print("\n| waiting | members, CPU ms/s each | server | relative | commands/s each |\n|---|---|---|---|---|")
    else:
        print("\n| | writer, us/sample | members | server | all | relative | commands/1,000 | once for a member, ms |")
        print("|---|---|---|---|---|---|---|---|")


def run(axes: Iterable[Axis], rounds: int) -> list[dict[str, Any]]:
    """Measure and print."""
    results: list[dict[str, Any]] = []
    for axis in axes:
        found = measure(axis, rounds)
        if not results or results[-1]["is_waiting"] != axis.is_waiting:
            print_head(axis.is_waiting)
        print_axis(found)
        results.append(found)
    return results


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join([*(axis.name for axis in AXES), WAKEUPS])
    parser.add_argument("--only", default="", metavar="AXIS", help=f"axes whose name contains this: {names}")
    parser.add_argument("--rounds", type=int, default=3, help="of each axis (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write every figure of every round to this file")
    args = parser.parse_args()
    chosen = [axis for axis in AXES if args.only.lower() in axis.name]
    is_woken = args.only.lower() in WAKEUPS
    if not chosen and not is_woken:
        parser.error(f"no axis contains {args.only!r}; there are: {names}")
    environment = describe_machine()
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print(
        f"samples of {SAMPLE_BYTES} B in batches and blocks of {BATCH}; CPU of all processes for a sample handed out; "
        f"relative: median (lowest-highest) of {args.rounds} interleaved rounds, flat up to {TARGET}x"
    )
    whole: dict[str, Any] = {"environment": environment, "axes": run(chosen, args.rounds)}
    if is_woken:
        whole[WAKEUPS] = wakeups.measure(args.rounds)
        print(wakeups.shown(whole[WAKEUPS]))
    if args.json:
        args.json.write_text(json.dumps(whole, indent=1))
        print(f"\nfigures of every round: {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
