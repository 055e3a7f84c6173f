"""``python -m benchmarks``: transport from writer to numpy batches against plain redis-py + hiredis, in one run.

Rounds of both sides alternate, so that a drifting machine moves both; what is quoted is the median of the ratios of
neighbouring rounds, with their spread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import redis

from benchmarks.cases import CASES, Case
from benchmarks.rounds import SIDES, Round, run_round
from benchmarks.tfdata import measure_tfdata
from penstock_common.stream.servers.embedded import find_servers, server_label

OURS, THEIRS = SIDES
TFDATA = "tf.data / numpy, 150 kB"


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side per payload (default 5)")
    parser.add_argument("--only", default="", help="payloads whose name contains this, such as '150 kB'")
    parser.add_argument("--json", type=Path, help="write every figure of every round to this file")
    args = parser.parse_args()
    environment = describe_machine()
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print(f"ratios: {OURS} / {THEIRS}, median (lowest-highest) of {args.rounds} interleaved rounds, guarantees on\n")
    print(f"{'payload':26}{'ratio':>19}{'GB/s':>7}{'samples/s':>11}   {'CPU s/GB: writer':>17}  reader  server")
    results = []
    for case in CASES:
        if args.only in case.name:
            results.append(measure(case, args.rounds))
            print_case(results[-1])
    if args.only in TFDATA:
        results.append(measure_tfdata(args.rounds))
        print_ratio(results[-1])
    if args.json:
        args.json.write_text(json.dumps({"environment": environment, "cases": results}, indent=1))
        print(f"\nfigures of every round: {args.json}")
    return 0


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Interleaved rounds of both sides; one of each before them is not counted."""
    taken: dict[str, list[Round]] = {OURS: [], THEIRS: []}
    for number in range(rounds + 1):
        for side in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
            found = run_round(side, case)
            if number:
                taken[side].append(found)
        progress(f"{case.name}: round {number} of {rounds}")
    progress("")
    ratios = [theirs.seconds / ours.seconds for ours, theirs in zip(taken[OURS], taken[THEIRS], strict=True)]
    return {
        "case": asdict(case) | {"sample_bytes": case.sample_bytes, "total_bytes": case.total_bytes},
        "ratio": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
        "rounds": {side: [asdict(one) for one in found] for side, found in taken.items()},
        "summary": {side: summary(case, found) for side, found in taken.items()},
    }


def summary(case: Case, rounds: list[Round]) -> dict[str, float]:
    """Medians of one side."""
    gigabytes = case.total_bytes / 1e9

    def median(values: list[float]) -> float:
        return statistics.median(values)

    return {
        "gb_per_s": median([gigabytes / one.seconds for one in rounds]),
        "samples_per_s": median([case.samples / one.seconds for one in rounds]),
        "writer_cpu_s_per_gb": median([one.writer_cpu_s / gigabytes for one in rounds]),
        "reader_cpu_s_per_gb": median([one.reader_cpu_s / gigabytes for one in rounds]),
        "server_cpu_s_per_gb": median([one.server_cpu_s / gigabytes for one in rounds]),
    }


def print_case(result: dict[str, Any]) -> None:
    """One payload: the ratio, then each side's medians."""
    print_ratio(result)
    for side, found in result["summary"].items():
        print(
            f"  {side:24}{'':19}{found['gb_per_s']:7.2f}{found['samples_per_s']:11,.0f}   "
            f"{found['writer_cpu_s_per_gb']:17.2f}{found['reader_cpu_s_per_gb']:8.2f}{found['server_cpu_s_per_gb']:8.2f}"
        )
    sys.stdout.flush()


def print_ratio(result: dict[str, Any]) -> None:
    """The median ratio and its spread."""
    ratio = result["ratio"]
    text = f"{ratio['median']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"
    print(f"{result['case']['name']:26}{text:>19}", flush=True)


def progress(text: str) -> None:
    """What is going on, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def describe_machine() -> dict[str, str]:
    """What the figures depend on."""
    servers = find_servers()
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "redis-py": redis.__version__,
        "server": server_label(servers[0]) if servers else "none",
    }


if __name__ == "__main__":
    sys.exit(main())
