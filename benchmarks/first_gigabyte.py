"""``python -m benchmarks.first_gigabyte``: the CPU time of a stream's first gigabyte, to that of its later ones.

A new stream finds its memory while it is filled for the first time: on the server, or in segments in shared memory. The
kernel clears each page before a program gets it. So the table has next to it the cost of the new pages alone, measured
in the same rounds by a bare copy into memory that was never used and into memory that was. Both copies move as much as
a turn does.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.cases import IMAGE
from benchmarks.machine import describe_machine, progress
from benchmarks.rounds import Round, set_up
from benchmarks.sides import OURS, SEGMENTS, SHARED_MEMORY, here
from benchmarks.spread import spread, table

SAMPLES = 6592
"""The samples of a turn, which are 0.99 GB, and less than a stream's budget."""
TURNS = 4
"""The turns of each side in a round. The second one fills the rest of the budget, and does not count."""
COPY_BYTES = 1 << 20
"""The bytes of one copy, as in a block."""
HEAD = ("", "CPU s of the first GB", "CPU s of a later GB", "first to later", "new pages alone", "without them")


def run_turns(samples: int = SAMPLES, turns: int = TURNS) -> dict[str, list[Round]]:
    """Return side -> its turns, each with new processes and a new server."""
    found = {}
    for side in here(OURS):
        with ExitStack() as stack:
            stage = set_up(stack, side, IMAGE)
            stage.turn(IMAGE, 2 * IMAGE.unit)  # late imports happen now
            found[side.name] = [stage.turn(IMAGE, samples) for _ in range(turns)]
    return found


def new_pages_s(nbytes: int, memory: Callable[[int], mmap.mmap]) -> float:
    """Return the CPU seconds that copying into new memory takes beyond copying into memory that was used."""
    kept = memory(nbytes)
    target, source = np.frombuffer(kept, np.uint8), np.ones(COPY_BYTES, np.uint8)
    took = []
    for _ in range(2):
        began = time.thread_time()
        for at in range(0, nbytes - COPY_BYTES + 1, COPY_BYTES):
            target[at : at + COPY_BYTES] = source
        took.append(time.thread_time() - began)
    return took[0] - took[1]


def anonymous(nbytes: int) -> mmap.mmap:
    """Return new memory of a process, as a server's."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def shared(nbytes: int) -> mmap.mmap:
    """Return the memory of a new file, as a segment's."""
    with tempfile.TemporaryFile(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as file:
        os.ftruncate(file.fileno(), nbytes)
        return mmap.mmap(file.fileno(), nbytes)


def shown(rounds: list[dict[str, list[Round]]], pages: list[dict[str, float]]) -> str:
    """Return the results as a table. Ratios are of one side in one round."""
    rows = []
    for side in rounds[0]:
        first = [one[side][0].cpu_s_per_gb for one in rounds]
        later = [fmean(turn.cpu_s_per_gb for turn in one[side][2:]) for one in rounds]
        bare = [each[side] for each in pages]
        rows.append([
            side, spread(first).shown(""), spread(later).shown(""),
            spread(a / b for a, b in zip(first, later, strict=True)).shown(),
            spread(bare).shown(""),
            spread((a - c) / b for a, b, c in zip(first, later, bare, strict=True)).shown(),
        ])  # fmt: skip
    return table(HEAD, rows)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_gigabyte", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of 150 kB in a turn (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write every figure of every round to this file")
    args = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()), flush=True)
    nbytes = args.samples * IMAGE.sample_bytes
    rounds, pages = [], []
    for number in range(args.rounds):
        progress(f"round {number + 1} of {args.rounds}")
        rounds.append(run_turns(args.samples))
        alone = {side: shared if side == SEGMENTS else anonymous for side in rounds[-1]}
        pages.append({side: new_pages_s(nbytes, memory) / nbytes * 1e9 for side, memory in alone.items()})
    print(f"\n{shown(rounds, pages)}")
    if args.json:
        turns = [{side: list(map(asdict, one)) for side, one in each.items()} for each in rounds]
        args.json.write_text(json.dumps({"rounds": turns, "new_pages_s_per_gb": pages}))


if __name__ == "__main__":
    main()
