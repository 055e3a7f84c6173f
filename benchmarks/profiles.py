"""``python -m benchmarks.profiles``: the CPU time of writer, reader and server by purpose, in the transport's own
rounds.

The processes are those of ``python -m benchmarks transport``: a filled budget, guarantees on. They take three turns.
One runs without a sampler, for CPU s/GB and for the server's own count of its commands. One is for py-spy, which counts
Python lines by module in the time that a process holds the interpreter's lock. One is for perf, which divides all of a
process's CPU into kernel, interpreter, copies and checksums. A sampler slows the processes that it samples, so its turn
gives shares only. A missing tool is reported, and the other turns run.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redis

from benchmarks import sampling
from benchmarks.cases import BY_BATCH, CASES, IMAGE, Case
from benchmarks.machine import describe_machine, progress
from benchmarks.rounds import Stage, set_up, warm_up
from benchmarks.sides import Side, ours
from benchmarks.spread import table

SIZES = (BY_BATCH.name, IMAGE.name, "10 MB")
LEAST_SHARE = 2.0
"""In percent. Smaller shares are shown together."""
LEAST_MICROSECONDS = 1.0
"""Microseconds for an entry. Smaller costs of a server's command are shown together."""
ROLES = ("writer", "reader", "server")

Shares = dict[str, dict[str, float]]
"""Process -> purpose -> percent."""


@dataclass
class Profile:
    """The profile of one side and payload."""

    case: str
    side: str
    cpu_s_per_gb: dict[str, float]
    """Process -> CPU s/GB."""
    faults_per_gb: dict[str, float]
    """Writer and reader -> pages that the kernel had to supply."""
    entries: int
    commands: dict[str, tuple[float, float]]
    """Command -> calls for an entry, microseconds for an entry, by the server's own count."""
    python: Shares = field(default_factory=dict)
    purposes: Shares = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 130 if it was interrupted."""
    args = _parser().parse_args(arguments)
    wanted = args.size or SIZES
    cases = [case for case in CASES if any(size in case.name for size in wanted)]
    sides = ours(args.side)
    if not cases or not sides:
        raise SystemExit(f"no side or no payload has such a name; payloads: {', '.join(case.name for case in CASES)}")
    environment = describe_machine()
    print(", ".join(f"{name} {value}" for name, value in environment.items()) + "\n", flush=True)
    found: list[Profile] = []
    try:
        for case in cases:
            for side in sides:
                found.append(taken(side, case, args.seconds))
                print(shown(found[-1]), flush=True)
    except KeyboardInterrupt:
        return 130
    finally:
        if args.json:
            args.json.write_text(
                json.dumps({"environment": environment, "profiles": [asdict(one) for one in found]}, indent=1)
            )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profiles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", action="append", help=f"payloads whose name contains this (default {', '.join(map(repr, SIZES))})"
    )
    parser.add_argument(
        "--side", action="append", default=[], help="sides whose name contains this: inline, segments, views"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn, about (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write every figure to this file, small shares too")
    return parser


def taken(side: Side, case: Case, seconds: float) -> Profile:
    """Take one profile."""
    with ExitStack() as stack:
        progress(f"{case.name}, {side.name}: warming up")
        stage = set_up(stack, side, case)
        samples = warm_up(stage, case, seconds)
        progress(f"{case.name}, {side.name}: {seconds:g} s each of nothing, py-spy and perf")
        found = _counted(stage, side, case, samples)
        pids = dict(zip(ROLES, (stage.writers[0].pid, stage.readers[0].pid, stage.servers[0]), strict=True))
        clients = {role: pids[role] for role in ROLES[:2]}
        turn = partial(stage.turn, case, samples)
        found.python = _sampled(sampling.python_lines, clients, turn)
        found.purposes = _sampled(sampling.symbols, pids, turn)
    progress("")
    return found


def _counted(stage: Stage, side: Side, case: Case, samples: int) -> Profile:
    """Take a turn without a sampler."""
    with redis.Redis.from_url(stage.place) as client:
        client.config_resetstat()
        one = stage.turn(case, samples)
        told: dict[str, Any] = client.info("commandstats")
    gigabytes = one.got * one.sample_bytes / 1e9
    seconds = dict(zip(ROLES, (one.writer_cpu_s, one.reader_cpu_s, one.server_cpu_s), strict=True))
    entries = int(told["cmdstat_xadd"]["calls"])
    commands = {
        name.removeprefix("cmdstat_"): (stats["calls"] / entries, stats["usec"] / entries)
        for name, stats in told.items()
    }
    faults = {"writer": one.writer_faults / gigabytes, "reader": one.reader_faults / gigabytes}
    cpu = {role: used / gigabytes for role, used in seconds.items()}
    return Profile(case.name, side.name, cpu, faults, entries, commands)


def _sampled(
    sampler: Callable[[Sequence[int]], AbstractContextManager[dict[int, Counter[str]]]], pids: dict[str, int],
    turn: Callable[[], object],
) -> Shares:  # fmt: skip
    """Return the shares of a turn under a sampler, or nothing if the sampler cannot be used, which is reported."""
    try:
        with sampler(list(pids.values())) as counts:
            turn()
    except sampling.Unsampled as reason:
        print(f"left out: {reason}", file=sys.stderr, flush=True)
        return {}
    return {role: sampling.shares(counts.get(pid, Counter())) for role, pid in pids.items()}


def shown(found: Profile) -> str:
    """Return the profile as Markdown."""
    cpu = ", ".join(f"{role} {figure:.2f}" for role, figure in found.cpu_s_per_gb.items())
    faults = ", ".join(f"{role} {count:,.0f}" for role, count in found.faults_per_gb.items())
    parts = [
        f"### {found.case}, {found.side}\n\nCPU s/GB: {cpu}; page faults a GB: {faults}; {found.entries:,} entries."
    ]
    if found.purposes:
        parts.append("All CPU, in percent (perf):\n\n" + _table(found.purposes, ROLES))
    if found.python:
        parts.append("Python, in percent of the lines that held its lock (py-spy):\n\n" + _lists(found.python))
    rows = [
        [name.replace("|", " "), f"{calls:.2f}", f"{microseconds:.1f}"]
        for name, (calls, microseconds) in sorted(found.commands.items(), key=lambda item: -item[1][1])
        if microseconds >= LEAST_MICROSECONDS
    ]
    head = "command of the server", "calls for an entry", "microseconds for an entry, with what it calls"
    return "\n\n".join([*parts, table(head, rows)]) + "\n"


def _table(shares: Shares, roles: Sequence[str]) -> str:
    """Return a row for each purpose that is large in any process."""
    order = sorted({what for one in shares.values() for what in one})
    rows = [[what, *(f"{shares[role].get(what, 0.0):.0f}" for role in roles)] for what in order]
    large = [row for row, what in zip(rows, order, strict=True) if _most(shares, what) >= LEAST_SHARE]
    return table(("", *roles), large)


def _most(shares: Shares, what: str) -> float:
    return max(one.get(what, 0.0) for one in shares.values())


def _lists(shares: Shares) -> str:
    """Return a line for each process: its modules, the largest first."""
    lines = []
    for role, found in shares.items():
        large = [f"`{name}` {share:.0f}" for name, share in found.items() if share >= LEAST_SHARE]
        lines.append(f"- {role}: {', '.join(large)}, others {sum(s for s in found.values() if s < LEAST_SHARE):.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
