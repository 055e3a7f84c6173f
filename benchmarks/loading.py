"""``python -m benchmarks.loading``: 2,000 JPEGs as torch batches, by Penstock and its peers in one run.

There are three measures. The tax is the CPU time of a worker's jobs compared with that of a bare loop, which decodes
and transforms as many of the same files. Both alternate in one process, in a long run, and for segments also in a run
that has no pages yet. One trainer: two workers, server and trainer against a DataLoader with two workers. Four
trainers: four groups on one stream of two workers against four DataLoaders at once, with one worker each, which is best
for them.

tf.data reads the same way, each trainer for itself: `from_generator` over indices, and as many parallel calls of Python
as the DataLoader has workers.

All make the same samples with the same code, and end with tensors. DataLoaders run both with defaults and tuned: their
worker processes then keep freed memory as Penstock's do (mallopt), which every user could write. Rounds of all sides
alternate. The results are the medians of the ratios of neighbouring rounds, with their spread. The ratios are of rates,
which mean little if other programs use the cores, and of CPU seconds over all processes, including the server. Starts
are left out on all sides: each makes a small epoch first, and whole ones on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.loading_sides import BATCH, Job, Round, run_round
from benchmarks.machine import describe_machine, progress
from benchmarks.parts import take_apart
from benchmarks.photographs import FOLDER, SAMPLE_BYTES, cut_photographs
from benchmarks.tax import Paid, pay

SEGMENTS = "/dev/shm"  # noqa: S108 - the fast lane itself
"""The folder of segments. If it does not exist, segments are left out."""
EPOCHS = 2
"""The timed epochs."""


@dataclass(frozen=True)
class Measure:
    """A measure: Penstock with each payload setting, compared with its peers."""

    name: str
    ours: Job
    theirs: Job
    target: str


MEASURES = (
    Measure("one trainer", Job("penstock", 2, 1, epochs=EPOCHS), Job("torch", 2, 1, epochs=EPOCHS), "at least 0.95x"),
    Measure(
        "four trainers", Job("penstock", 2, 4, epochs=EPOCHS), Job("torch", 1, 4, epochs=EPOCHS),
        "at least 3.5x in sum",
    ),
)  # fmt: skip
PEERS = ("torch", "torch, tuned", "tf.data")
TAX, TAX_TARGET = "tax", "at most 10 %"
LARGER_SAMPLES, LARGER = 8000, "shards of 500"
"""The samples of a larger epoch, and how it is cut by default. 2,000 samples make jobs of 88, which take a tenth of a
second.
"""


def main() -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side per measure (default 5)")
    parser.add_argument("--files", type=int, default=2000, help="JPEGs of 500 x 375 (default 2000)")
    parser.add_argument("--only", default="", help="measures whose name contains this, such as 'four'")
    parser.add_argument("--parts", action="store_true", help="only show where the tax comes from, part by part")
    parser.add_argument("--json", type=Path, help="write every figure of every round to this file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # `timeout` must not leave gigabytes in shared memory
    environment = describe_machine() | {name: version(name) for name in ("torch", "tensorflow", "pillow")}
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print(f"\n{args.files} JPEGs of 500 x 375 -> uint8 [224, 224, 3] ({SAMPLE_BYTES} bytes), batches of {BATCH};")
    print(
        f"median (lowest-highest) of {args.rounds} interleaved rounds; CPU ms a sample, over all processes\n",
        flush=True,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cut_photographs(folder, args.files)
        os.environ[FOLDER] = str(folder)
        planes = {"inline": "inline", **_segments(stack)}
        if args.parts:
            return show_parts(planes, args.rounds)
        results = [measure_tax(planes, args.rounds)] if args.only in TAX else []
        results += [measure(one, planes, args.rounds) for one in MEASURES if args.only in one.name]
    if args.json:
        args.json.write_text(json.dumps({"environment": environment, "measures": results}, indent=1))
        print(f"\nfigures of every round: {args.json}")
    return 0


def _segments(stack: ExitStack) -> dict[str, str]:
    if not Path(SEGMENTS).is_dir():
        return {}
    folder = tempfile.mkdtemp(prefix="penstock-bench-", dir=SEGMENTS)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return {"segments": f"segments:{folder}"}


# --- the tax ----------------------------------------------------------------------------------------------------------


def measure_tax(planes: dict[str, str], rounds: int) -> dict[str, Any]:
    """Run rounds of all payload settings in turn."""
    ways = {plane: partial(pay, payload) for plane, payload in planes.items()}
    ways |= {f"{plane}, {LARGER}": partial(pay, payload, of=LARGER_SAMPLES) for plane, payload in planes.items()}
    if "segments" in planes:
        ways["segments, new"] = partial(pay, planes["segments"], is_new=True)
    taken: dict[str, list[Paid]] = {way: [] for way in ways}
    for number in range(1, rounds + 1):
        for way in in_turn(list(ways), number):
            taken[way].append(ways[way]())
        progress(f"{TAX}: round {number} of {rounds}")
    progress("")
    print(f"**{TAX}**: {TAX_TARGET}\n")
    print("| side | tax | of it outside decode and transform | worker's CPU ms | bare loop's |\n|---|---|---|---|---|")
    summary = {}
    for way, paid in taken.items():
        summary[way] = {"tax": _spread([one.tax for one in paid]), "outside": _spread([one.outside for one in paid])}
        shares = " | ".join(_percent(spread) for spread in summary[way].values())
        ours, bare = (statistics.median(values) for values in ([p.ours for p in paid], [p.bare for p in paid]))
        print(f"| penstock, {way} | {shares} | {ours:.3f} | {bare:.3f} |")
    print(flush=True)
    return {
        "name": TAX,
        "target": TAX_TARGET,
        "summary": summary,
        "rounds": {
            way: [asdict(one) | {"tax": one.tax, "outside": one.outside} for one in paid] for way, paid in taken.items()
        },
    }


def show_parts(planes: dict[str, str], rounds: int) -> int:
    """Print what each part adds to a bare loop, in microseconds of CPU a sample."""
    taken: dict[str, list[tuple[float, dict[str, float]]]] = {plane: [] for plane in planes}
    for number in range(1, rounds + 1):
        for plane in in_turn(list(planes), number):
            taken[plane].append(take_apart(planes[plane]))
        progress(f"parts: round {number} of {rounds}")
    progress("")
    print("| plane | part | µs a sample beyond the bare loop | of it |\n|---|---|---|---|")
    for plane, rounds_of in taken.items():
        for part in rounds_of[0][1]:
            beyond = _spread([1000 * more[part] for _, more in rounds_of])
            share = _spread([more[part] / bare for bare, more in rounds_of])
            spread = f"{beyond['median']:.0f} ({beyond['low']:.0f}-{beyond['high']:.0f})"
            print(f"| penstock, {plane} | {part} | {spread} | {_percent(share)} |")
    return 0


# --- trainers ---------------------------------------------------------------------------------------------------------


def measure(one: Measure, planes: dict[str, str], rounds: int) -> dict[str, Any]:
    """Run interleaved rounds of all sides."""
    ours = {f"penstock, {plane}": replace(one.ours, payload=payload) for plane, payload in planes.items()}
    theirs = {side: replace(one.theirs, side=side) for side in PEERS}
    sides = ours | theirs
    taken: dict[str, list[Round]] = {side: [] for side in sides}
    for number in range(1, rounds + 1):
        for side in in_turn(list(sides), number):
            taken[side].append(run_round(sides[side]))
        progress(f"{one.name}: round {number} of {rounds}")
    progress("")
    print(f"**{one.name}**: {one.target}\n")
    ratios = " | ".join(f"of {peer}" for peer in PEERS)
    print(f"| side | {ratios} | samples/s | cores | CPU ms | {ratios} | by |")
    print("|" + "---|" * (5 + 2 * len(PEERS)))
    summary = {side: _beside(taken[side], {name: taken[name] for name in theirs}) for side in ours}
    for side, found in taken.items():
        _print_side(side, found, summary.get(side))
    print(flush=True)
    return {
        "name": one.name,
        "target": one.target,
        "summary": summary,
        "rounds": {side: [asdict(found) for found in rounds_of] for side, rounds_of in taken.items()},
    }


def in_turn(sides: list[str], number: int) -> list[str]:
    """Return the order of a round: every other one is reversed."""
    return sides if number % 2 else sides[::-1]


def _beside(ours: list[Round], theirs: dict[str, list[Round]]) -> dict[str, Any]:
    return {
        name: {
            "ratio": _spread([our.rate / their.rate for our, their in zip(ours, rounds, strict=True)]),
            "cpu": _spread([our.cpu_ms / their.cpu_ms for our, their in zip(ours, rounds, strict=True)]),
        }
        for name, rounds in theirs.items()
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _shown(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f}x ({spread['low']:.2f}-{spread['high']:.2f})"


def _percent(spread: dict[str, float]) -> str:
    return f"{100 * spread['median']:.1f} % ({100 * spread['low']:.1f}-{100 * spread['high']:.1f})"


def _print_side(name: str, rounds: list[Round], beside: dict[str, Any] | None) -> None:
    roles = []
    for role in rounds[0].cpu_s:
        spent = statistics.median([1000 * one.cpu_s[role] / one.samples for one in rounds])
        roles.append(f"{role} {spent:.2f}")
    rate, total = statistics.median([one.rate for one in rounds]), statistics.median([one.cpu_ms for one in rounds])
    ratios = [_shown(found["ratio"]) for found in beside.values()] if beside else [""] * len(PEERS)
    cpu = [_shown(found["cpu"]) for found in beside.values()] if beside else [""] * len(PEERS)
    cores = f"{statistics.median([one.cores for one in rounds]):.1f}"
    cells = [name, *ratios, f"{rate:,.0f}", cores, f"{total:.2f}", *cpu, ", ".join(roles)]
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
