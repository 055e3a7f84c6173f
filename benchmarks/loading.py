"""``python -m benchmarks.loading``: 2,000 JPEGs as torch batches, by Penstock and by torch's DataLoader, in one run.

Three measures. The tax: CPU time of a worker process beside that of a bare loop which only decodes and transforms the
same files. One trainer: two workers, server and trainer against a DataLoader with two workers. Four trainers: four
groups on one stream of two workers against four DataLoaders at once, with one worker each, which is best for them.
All make the same samples with the same lines, and end with tensors. Rounds of all sides alternate; what is quoted is
the median of the ratios of neighbouring rounds, with their spread: of rates, and of CPU seconds over all processes,
the server's included. Starts are left out on all sides: each makes a small epoch first, and whole ones on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.__main__ import describe_machine, progress
from benchmarks.loading_sides import BATCH, Job, Round, run_round
from benchmarks.photographs import FOLDER, SAMPLE_BYTES, cut_photographs

INLINE = "inline"
SEGMENTS = "/dev/shm"  # noqa: S108 - the fast lane itself
"""Where segments lie, unless this is no folder: then that plane is left out."""


@dataclass(frozen=True)
class Measure:
    """Penstock in each plane, beside somebody else."""

    name: str
    ours: Job
    theirs: Job
    ratio: Callable[[Round, Round], float]
    """Of a round of ours to one of theirs."""
    is_tax: bool
    target: str


def rates(ours: Round, theirs: Round) -> float:
    """How many times as fast we are."""
    return ours.rate / theirs.rate


def tax(ours: Round, theirs: Round) -> float:
    """What a worker uses beyond the bare loop, as a share of what that uses."""
    return (ours.cpu_s["workers"] / ours.samples) / (theirs.cpu_s["workers"] / theirs.samples) - 1


EPOCHS = 2
"""On the trainers' clocks."""

MEASURES = (
    Measure("tax", Job("penstock", 1, 0), Job("bare", 1, 0), tax, True, "at most 10 %"),
    Measure(
        "one trainer", Job("penstock", 2, 1, epochs=EPOCHS), Job("torch", 2, 1, epochs=EPOCHS), rates, False,
        "at least 0.95x",
    ),
    Measure(
        "four trainers", Job("penstock", 2, 4, epochs=EPOCHS), Job("torch", 1, 4, epochs=EPOCHS), rates, False,
        "at least 3.5x in sum",
    ),
)  # fmt: skip


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side per measure (default 5)")
    parser.add_argument("--files", type=int, default=2000, help="JPEGs of 500 x 375 (default 2000)")
    parser.add_argument("--only", default="", help="measures whose name contains this, such as 'four'")
    parser.add_argument("--json", type=Path, help="write every figure of every round to this file")
    args = parser.parse_args()
    environment = describe_machine() | {name: version(name) for name in ("torch", "pillow")}
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print(f"{args.files} JPEGs of 500 x 375 -> uint8 [224, 224, 3] ({SAMPLE_BYTES} bytes), batches of {BATCH}")
    print(f"median (lowest-highest) of {args.rounds} interleaved rounds; CPU ms a sample, over all processes\n")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cut_photographs(folder, args.files)
        os.environ[FOLDER] = str(folder)
        planes = [INLINE, *_segments(stack)]
        results = [measure(one, planes, args.rounds) for one in MEASURES if args.only in one.name]
    if args.json:
        args.json.write_text(json.dumps({"environment": environment, "measures": results}, indent=1))
        print(f"\nfigures of every round: {args.json}")
    return 0


def _segments(stack: ExitStack) -> list[str]:
    if not Path(SEGMENTS).is_dir():
        return []
    folder = tempfile.mkdtemp(prefix="penstock-bench-", dir=SEGMENTS)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return [f"segments:{folder}"]


def measure(one: Measure, planes: list[str], rounds: int) -> dict[str, Any]:
    """Interleaved rounds of all sides."""
    sides = {plane.partition(":")[0]: _in_plane(one.ours, plane) for plane in planes} | {one.theirs.side: one.theirs}
    taken: dict[str, list[Round]] = {side: [] for side in sides}
    for number in range(1, rounds + 1):
        for side in list(sides) if number % 2 else reversed(sides):
            taken[side].append(run_round(sides[side]))
        progress(f"{one.name}: round {number} of {rounds}")
    progress("")
    print(f"{one.name}: {one.target}")
    their = taken[one.theirs.side]
    _print_side(one.theirs.side, their)
    summary = {}
    for plane in list(sides)[:-1]:
        ratios = [one.ratio(ours, theirs) for ours, theirs in zip(taken[plane], their, strict=True)]
        cpu = [ours.cpu_ms / theirs.cpu_ms for ours, theirs in zip(taken[plane], their, strict=True)]
        summary[plane] = {"ratio": _spread(ratios), "cpu": _spread(cpu)}
        _print_side(f"penstock, {plane}", taken[plane], _shown(ratios, one.is_tax), _shown(cpu))
    print(flush=True)
    return {
        "name": one.name,
        "target": one.target,
        "summary": summary,
        "rounds": {side: [asdict(found) for found in rounds_of] for side, rounds_of in taken.items()},
    }


def _in_plane(job: Job, plane: str) -> Job:
    return replace(job, payload=plane)


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _shown(values: list[float], is_share: bool = False) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    if is_share:
        return f"{100 * middle:.1f} % ({100 * low:.1f}-{100 * high:.1f})"
    return f"{middle:.2f}x ({low:.2f}-{high:.2f})"


def _print_side(name: str, rounds: list[Round], ratio: str = "", cpu: str = "") -> None:
    roles = []
    for role in rounds[0].cpu_s:
        spent = statistics.median([1000 * one.cpu_s[role] / one.samples for one in rounds])
        roles.append(f"{role} {spent:.2f}")
    rate, total = statistics.median([one.rate for one in rounds]), statistics.median([one.cpu_ms for one in rounds])
    of_cpu = f"; CPU {cpu}" if cpu else ""
    print(f"  {name:20}{ratio:>22}{rate:8,.0f} samples/s, CPU ms {total:.2f} ({', '.join(roles)}){of_cpu}")


if __name__ == "__main__":
    sys.exit(main())
