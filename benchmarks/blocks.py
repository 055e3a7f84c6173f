"""``python -m benchmarks.blocks``: the rate by block size, on a server of Penstock's and on a stock server.

A stock server has its distribution's settings of the memory allocator, as a managed server has. Penstock's own server
keeps freed pages. Each side has a writer, a reader and a server of its own, and rounds of all sides alternate. The
ratios are to the loop that most people write first, on a server of the same kind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import linear_regression

from benchmarks.allowance import Allowance
from benchmarks.cases import CASES, IMAGE, Case
from benchmarks.machine import describe_machine
from benchmarks.rounds import Round
from benchmarks.sides import BASELINE, INLINE, NAIVE, Side
from benchmarks.spread import Spread, median, ratios, table
from benchmarks.transport import Measured, measure

SIZES = {"256 kB": 256_000, "512 kB": 512_000, "1 MB": 1_000_000, "4 MB": 4_000_000}
"""Name -> bytes of a block."""
KINDS = {"Penstock's": False, "stock": True}
"""The kind of server -> whether it is a stock server."""
PARTS = ("writer", "reader", "server")
HEAD = (
    "", "server", "GB/s", "to the naive loop", "to blocks of 1 MB", "CPU s/GB", "writer", "reader", "server's",
    "server's new pages a GB",
)  # fmt: skip


def sides(sizes: Sequence[str] = tuple(SIZES), kinds: Sequence[str] = tuple(KINDS)) -> list[Side]:
    """Return the naive loop, well-written redis-py, and Penstock with each size of block, on each kind of server."""
    ours = [Side(f"{INLINE}, {size}", "ours", "penstock", f"inline {SIZES[size]}", has_server=True) for size in sizes]
    every = [NAIVE, BASELINE, *ours]
    return [replace(side, name=_name(side.name, kind), is_stock=KINDS[kind]) for kind in kinds for side in every]


def shown(found: Measured, measured: Sequence[Side]) -> str:
    """Return the results as a table."""
    rows = []
    for side in measured:
        name, kind = side.name.rsplit(" on ", 1)
        if (rounds := found.rounds.get(side.name)) is None:
            rows.append([name, kind, found.failed.get(side.name, ""), *[""] * (len(HEAD) - 3)])
            continue
        naive, megabyte = _name(NAIVE.name, kind), _name(f"{INLINE}, 1 MB", kind)
        costs = [
            median(rounds, lambda one: one.cpu_s_per_gb),
            *(median(rounds, lambda one, part=part: _per_gb(one, part)) for part in PARTS),  # type: ignore[misc]
        ]
        rows.append([
            name, kind, f"{median(rounds, lambda one: one.gb_per_s):.2f}",
            _ratio(rounds, found.rounds.get(naive)), _ratio(rounds, found.rounds.get(megabyte)),
            *(f"{cost:.2f}" for cost in costs),
            f"{median(rounds, lambda one: one.server_faults / (one.got * one.sample_bytes / 1e9)):,.0f}",
        ])  # fmt: skip
    return table(HEAD, rows)


def block_costs(found: Measured, kind: str) -> str:
    """Return the CPU time that a block costs each part beyond its bytes, on a kind of server, as a sentence.

    It is the slope of a straight line through the costs of a GB, by the number of its blocks.
    """
    costs = {}
    for part in PARTS:
        blocks, took = [], []
        for name, size in SIZES.items():
            if (rounds := found.rounds.get(_name(f"{INLINE}, {name}", kind))) is None:
                return ""
            blocks.append(1e9 / (max(1, size // found.case.sample_bytes) * found.case.sample_bytes))
            took.append(median(rounds, lambda one, part=part: _per_gb(one, part)))  # type: ignore[misc]
        costs[part] = 1e6 * linear_regression(blocks, took).slope
    each = ", ".join(f"its {part} {cost:.0f} µs" for part, cost in costs.items())
    return f"A block costs {each} of CPU beyond its bytes ({kind} server)."


def _name(side: str, kind: str) -> str:
    return f"{side} on {kind}"


def _per_gb(one: Round, part: str) -> float:
    return float(getattr(one, f"{part}_cpu_s")) / (one.got * one.sample_bytes / 1e9)


def _ratio(one: list[Round], other: list[Round] | None) -> str:
    found: Spread | None = ratios(one, other) if other else None
    return found.shown() if found else ""


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description=__doc__)
    parser.add_argument("--size", default=IMAGE.name, help="payload whose name contains this (default %(default)s)")
    parser.add_argument("--side", default="", help="sides whose name contains this, such as '1 MB' or 'stock'")
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each side in a round (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="at most about (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write every figure of every round to this file")
    args = parser.parse_args()
    cases: list[Case] = [case for case in CASES if args.size in case.name]
    if not cases:
        parser.error(f"no payload {args.size!r}: there are {', '.join(case.name for case in CASES)}")
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()), flush=True)
    every, found = [side for side in sides() if args.side in side.name], Measured(cases[0])
    if not every:
        parser.error(f"no side {args.side!r}: there are {', '.join(side.name for side in sides())}")
    measure(found, every, args.rounds, args.seconds, Allowance(60 * args.minutes, [1.0]).piece(), lambda: None)
    print(f"### {cases[0].name}, {found.count} rounds\n\n{shown(found, every)}\n")
    print("\n".join(sentence for kind in KINDS if (sentence := block_costs(found, kind))))
    if args.json:
        args.json.write_text(json.dumps({name: list(map(asdict, rounds)) for name, rounds in found.rounds.items()}))


if __name__ == "__main__":
    main()
