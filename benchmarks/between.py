"""``python -m benchmarks.between BEFORE [AFTER]``: the change from one commit to another, or to this working tree.

The packages of a commit are extracted from git into a temporary folder, and this tree's benchmark runs on them. The
same code measures both, on the same payloads, in alternating rounds with separate processes and servers. The results
are ratios of after to before: CPU s/GB of all processes, writer, reader and server, and the rate. Each is the median of
neighbouring rounds, with the lowest and the highest. A single change is ``COMMIT^ COMMIT``. ``--growth AXIS`` compares
instead the cost of a sample at each size of an axis of ``python -m benchmarks.growth``. ``--jpegs`` compares rounds of
``benchmarks.jpegs``. All of these use only public names and the command, which other commits have, too.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import rounds, transport
from benchmarks.arguments import byte_size, whole_number
from benchmarks.cases import CASES, IMAGE, Case
from benchmarks.machine import describe_machine, progress
from benchmarks.photographs import FOLDER, cut_photographs
from benchmarks.rounds import Failed, Round, Stage, set_up, warm_up
from benchmarks.sides import SHARED_MEMORY, Side, ours
from benchmarks.spread import spread, table

ROOT = Path(__file__).parents[1]
PACKAGES = ("common", "producer", "consumer", "front")
HERE = "this tree"
JPEGS = "compare JPEGs that become torch batches, inline and in segments (default: 2000 files)"
CPU: dict[str, Callable[[Round], float]] = {
    "CPU of all": lambda one: one.cpu_s,
    "writer": lambda one: one.writer_cpu_s,
    "reader": lambda one: one.reader_cpu_s,
    "writer and reader": lambda one: one.writer_cpu_s + one.reader_cpu_s,
    "server": lambda one: one.server_cpu_s,
}

Loaded = dict[str, Any]
"""The result of one round of `benchmarks.jpegs`."""
Sizes = dict[str, tuple[float, float]]
"""Size of an axis -> CPU of all processes a sample, or a second of waiting, and its ratio to the smallest size."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if one of the commits could not be measured, and 130 if it was interrupted."""
    args = _parser().parse_args(arguments)
    names = named(args.before), named(args.after) if args.after else HERE
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    print(f"before: {names[0]}\nafter: {names[1]}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        paths = [
            packages(commit, Path(folder) / str(number)) for number, commit in enumerate((args.before, args.after))
        ]
        try:
            compare = _growth if args.growth else _jpegs if args.jpegs else _transport
            found, is_whole = compare(args, paths)
        except KeyboardInterrupt:
            return 130
    if args.json:
        args.json.write_text(json.dumps({"before": names[0], "after": names[1], **found}, indent=1))
        print(f"figures of every round: {args.json}")
    return int(not is_whole)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.between", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="a commit, as git spells it: 61450fe, HEAD~3, v0.1.0")
    parser.add_argument("after", nargs="?", help="another one (default: this tree, with what is not committed)")
    parser.add_argument("--size", action="append", help=f"payloads whose name contains this (default {IMAGE.name!r})")
    parser.add_argument(
        "--side",
        action="append",
        default=[],
        help="sides whose name contains this, inline, segments (default: both) or views",
    )
    parser.add_argument("--rounds", type=whole_number(1), default=5, help="of each side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each side in a round (default: %(default)s)")
    parser.add_argument(
        "--budget", type=byte_size, metavar="SIZE", help="payload between writer and reader (default 1gb, small: 256mb)"
    )
    parser.add_argument("--growth", metavar="AXIS", help="compare an axis of python -m benchmarks.growth: members, ...")
    parser.add_argument("--jpegs", type=whole_number(1), nargs="?", const=2000, metavar="FILES", help=JPEGS)
    parser.add_argument("--json", type=Path, help="write every figure of every round to this file")
    return parser


def named(commit: str) -> str:
    """Return the hash and the subject of a commit.

    For an unknown commit, exits with git's message.
    """
    done = _git("log", "-1", "--format=%h %s", commit, "--")
    if done.returncode:
        raise SystemExit(f"there is no commit {commit}: {done.stderr.decode().strip()}")
    return done.stdout.decode().strip()


def packages(commit: str | None, folder: Path) -> str:
    """Return the PYTHONPATH of a commit's packages, extracted into ``folder``, or of this tree's packages for None."""
    if commit is None:
        return _path(ROOT)
    done = _git("archive", commit, *PACKAGES)
    if done.returncode:
        raise SystemExit(f"{commit} has not the packages {', '.join(PACKAGES)}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return _path(folder)


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)


def _path(root: Path) -> str:
    return os.pathsep.join(str(root / name) for name in PACKAGES)


def _transport(args: argparse.Namespace, paths: list[str]) -> tuple[dict[str, Any], bool]:
    sides = ours(args.side)
    sizes = args.size or [IMAGE.name]
    cases = [case for case in CASES if any(size in case.name for size in sizes)]
    cases = [replace(case, room_bytes=args.budget or case.room_bytes) for case in cases]
    if not sides or not cases:
        raise SystemExit(f"no side or no payload has such a name; payloads: {', '.join(case.name for case in CASES)}")
    found = []
    for case in cases:
        for side in sides:  # one side at a time: only the two commits alternate
            one = measure(case, side, paths, args.rounds, args.seconds)
            print(shown(one, side), flush=True)
            found.append(one)
    return {"transport": [asdict(one) for one in found]}, not any(one.failed for one in found)


def measure(case: Case, side: Side, paths: Sequence[str], count: int, seconds: float) -> transport.Measured:
    """Run rounds of ``before`` and ``after`` in turn, with equally many samples, or note why one of them has none."""
    found = transport.Measured(case)
    stages: dict[str, Stage] = {}
    samples = 0
    with ExitStack() as stack:
        for number in range(-1, count):
            for name in ("before", "after") if number % 2 else ("after", "before"):
                progress(f"{case.name}, {side.name}, round {number + 1} of {count}: {name}")
                try:
                    if number < 0:
                        stages[name] = set_up(stack, replace(side, path=paths[name == "after"]), case)
                        samples = max(samples, warm_up(stages[name], case, seconds))
                    else:
                        found.rounds.setdefault(name, []).append(stages[name].turn(case, samples))
                except Failed as error:
                    found.failed[name] = transport.why(error)
                    return found
    progress("")
    return found


def shown(found: transport.Measured, side: Side) -> str:
    """Return a table of ratios, or the reason why there is none."""
    text = f"### {found.case.name}, {side.name}: {found.count} rounds\n\n"
    if found.failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.failed.items())
        return f"{text}not measured; a commit must have what benchmarks/transports/ours.py calls. {reasons}\n"
    before, after = found.rounds["before"], found.rounds["after"]
    rows = []
    for what, of in CPU.items():
        values = [[of(one) / gigabytes(one) for one in rounds] for rounds in (before, after)]
        rows.append([f"CPU s/GB, {what}".replace("CPU s/GB, CPU", "CPU s/GB"), *_cells(*values)])
    rates = [[one.gb_per_s for one in rounds] for rounds in (before, after)]
    return text + table(("", "before", "after", "after to before"), [*rows, ["GB/s", *_cells(*rates)]]) + "\n"


def gigabytes(one: Round) -> float:
    """Return the gigabytes that readers got."""
    return one.got * one.sample_bytes / 1e9


def _cells(before: Sequence[float], after: Sequence[float]) -> list[str]:
    return [spread(before).shown(""), spread(after).shown(""), _ratio(before, after)]


def _ratio(before: Sequence[float], after: Sequence[float]) -> str:
    """Return the ratio of neighbouring rounds.

    A short round may use less CPU than the kernel's clock can measure.
    """
    ratios = [new / old for old, new in zip(before, after, strict=False) if old]
    return spread(ratios).shown() if ratios else "not measurable"


def _growth(args: argparse.Namespace, paths: list[str]) -> tuple[dict[str, Any], bool]:
    """Run rounds of an axis on both commits in turn, each in a separate process."""
    taken: list[list[Sizes]] = [[], []]
    for number in range(args.rounds):
        for which in (1, 0) if number % 2 else (0, 1):
            progress(f"{args.growth}, round {number + 1} of {args.rounds}: {('before', 'after')[which]}")
            taken[which].append(_axis(args.growth, paths[which]))
    progress("")
    print(f"### {args.growth}: {args.rounds} rounds\n\n{grown(*taken)}\n", flush=True)
    return {"growth": {"before": taken[0], "after": taken[1]}}, True


def grown(before: Sequence[Sizes], after: Sequence[Sizes]) -> str:
    """Return a table with a row for each size, from rounds."""
    rows = []
    for name in before[0]:
        cpu, relative = ([[one[name][what] for one in rounds] for rounds in (before, after)] for what in (0, 1))
        rows.append([name, *_cells(*cpu), *(spread(values).shown() for values in relative)])
    head = (
        "CPU us/sample of all",
        "before",
        "after",
        "after to before",
        "before, to the smallest",
        "after, to the smallest",
    )
    return table(head, rows)


def _jpegs(args: argparse.Namespace, paths: list[str]) -> tuple[dict[str, Any], bool]:
    """Run rounds of both payload settings on both commits in turn, each in a separate process, on the same files."""
    taken: dict[str, list[list[Loaded]]] = {side.name: [[], []] for side in ours(args.side)}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        cut_photographs(Path(folder), args.jpegs)
        for number in range(args.rounds):
            for name, planes in taken.items():
                for which in (1, 0) if number % 2 else (0, 1):
                    progress(f"JPEGs, {name}, round {number + 1} of {args.rounds}: {('before', 'after')[which]}")
                    planes[which].append(_loaded("segments" in name, Path(folder), paths[which]))
    progress("")
    for name, (before, after) in taken.items():
        print(f"### {args.jpegs} JPEGs, {name}: {args.rounds} rounds\n\n{loaded(before, after)}\n", flush=True)
    return {"jpegs": {name: {"before": planes[0], "after": planes[1]} for name, planes in taken.items()}}, True


def loaded(before: Sequence[Loaded], after: Sequence[Loaded]) -> str:
    """Return a table of the rate and of the CPU of each role, from rounds."""
    parts: dict[str, Callable[[Loaded], float]] = {
        "CPU ms/sample of all": lambda one: 1000 * sum(one["cpu_s"].values()) / one["samples"],
        **{f"CPU ms/sample, {role}": partial(_of_role, role) for role in before[0]["cpu_s"]},
        "samples/s": lambda one: one["samples"] / one["seconds"],
    }
    rows = [[name, *_cells(*([of(one) for one in rounds] for rounds in (before, after)))] for name, of in parts.items()]
    return table(("", "before", "after", "after to before"), rows)


def _of_role(role: str, one: Loaded) -> float:
    return float(1000 * one["cpu_s"][role] / one["samples"])


def _loaded(in_segments: bool, photographs: Path, path: str) -> Loaded:
    """Run one round. If it fails, exits with its last output."""
    folder = tempfile.mkdtemp(prefix="penstock-bench-", dir=SHARED_MEMORY) if in_segments else ""
    try:
        command = [sys.executable, "-m", "benchmarks.jpegs", f"segments:{folder}" if folder else "inline"]
        environment = {**os.environ, "PYTHONPATH": path, FOLDER: str(photographs)}
        done = subprocess.run(command, cwd=rounds.ROOT, env=environment, capture_output=True, text=True, check=False)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    if done.returncode:
        words = "".join(done.stderr.strip().splitlines()[-1:])
        raise SystemExit(f"one of the commits has not what benchmarks/jpegs.py calls: {words}")
    found: Loaded = json.loads(done.stdout)
    return found


def _axis(axis: str, path: str) -> Sizes:
    """Run one round. If it fails, exits with its last output."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        file = Path(folder) / "growth.json"
        command = [sys.executable, "-m", "benchmarks.growth", "--only", axis, "--rounds", "1", "--json", str(file)]
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, cwd=rounds.ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            words = "".join(done.stderr.strip().splitlines()[-1:])
            raise SystemExit(f"one of the commits has not what benchmarks/growth_rounds.py calls: {words}")
        axes = json.loads(file.read_text())["axes"]
    sizes = [item for one in axes for item in one["sizes"].items()]
    return {name: (size["median"]["all"], size["ratio"]["median"]) for name, size in sizes}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
