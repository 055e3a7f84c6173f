"""``python -m benchmarks.further``: the CPU time of one more trainer on views, in its process and in the server.

All trainers read an epoch in segments, and a batch is one block of it. The cost of a further trainer is what
several trainers cost more than one, divided by their number less one. One trainer has read the epoch before, so that
its checksums are checked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.cpu import running_seconds
from benchmarks.machine import describe_machine, progress
from benchmarks.sides import SHARED_MEMORY
from benchmarks.spread import spread, table
from benchmarks.trainers import Trainers
from penstock import EmbeddedServer, Loader, Tuning, Writer

SAMPLE_BYTES = 150_528
BATCHES = (7, 70)
"""The samples of a batch, which are 1 MB and 10 MB."""
PERIODS_S = (0.0, 0.02)
"""The time in which acknowledgements are sent together. 0: each batch has its own."""


def measure(trainers: int, rounds: int, gigabytes: float) -> dict[tuple[int, float], list[float]]:
    """Return (samples of a batch, period of acknowledgements) -> CPU s/GB of a further trainer, of each round."""
    found: dict[tuple[int, float], list[float]] = {}
    for batch in BATCHES:
        folder = SHARED_MEMORY / f"further-{os.getpid()}"
        try:
            with EmbeddedServer() as server:
                _write(server.url, folder, batch, int(gigabytes * 1e9) // SAMPLE_BYTES)
                _read(server, 1, batch, 0.0, "first")
                for number in range(rounds):
                    for every_s in PERIODS_S[:: 1 if number % 2 else -1]:
                        progress(f"round {number + 1} of {rounds}: batches of {batch}, {every_s:g} s")
                        name = f"{number}-{every_s}"
                        one = _read(server, 1, batch, every_s, f"one-{name}")
                        many = _read(server, trainers, batch, every_s, f"many-{name}")
                        found.setdefault((batch, every_s), []).append((many - one) / (trainers - 1))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _write(url: str, folder: Path, batch: int, samples: int) -> None:
    tuning = Tuning(block_bytes=batch * SAMPLE_BYTES, notify=lambda _: None)
    spec = {"x": ("uint8", (SAMPLE_BYTES,))}
    budget_bytes = 2 * samples * SAMPLE_BYTES
    with Writer(
        "t", url=url, spec=spec, payload=f"segments:{folder}", budget_bytes=budget_bytes, tuning=tuning
    ) as writer:
        with Loader("t", url=url, group="keeper", batch_size=batch):  # it keeps the epoch, and reads nothing
            pass
        with writer.epoch() as epoch:
            for number in range(samples):
                epoch.write({"x": np.full(SAMPLE_BYTES, number % 251, np.uint8)})


def _read(server: EmbeddedServer, trainers: int, batch: int, every_s: float, groups: str) -> float:
    """Return the CPU s/GB of all trainers and of the server, for the bytes that one trainer reads."""

    def course(number: int) -> Iterator[tuple[float, int]]:
        tuning = Tuning(views=True, acknowledge_every_s=every_s, notify=lambda _: None)
        with Loader("t", url=server.url, group=f"{groups}-{number}", batch_size=batch, tuning=tuning) as loader:
            batches = iter(loader)
            next(batches)
            yield 0.0, 0
            began_s, nbytes = time.process_time(), 0
            for one in batches:
                nbytes += one["x"].nbytes
            yield time.process_time() - began_s, nbytes

    running = Trainers(trainers, course)
    running.begin()
    running.end()
    began_s = running_seconds([server.pid])
    running.begin()
    _, found = running.end()
    served_s = running_seconds([server.pid]) - began_s
    running.close()
    client_s = sum(cpu_s for cpu_s, _ in found)
    return float((client_s + served_s) * 1e9 / found[0][1])


def shown(found: dict[tuple[int, float], list[float]], trainers: int) -> str:
    """Return the results as a table."""
    rows = [
        (
            f"{batch * SAMPLE_BYTES / 1e6:.0f} MB",
            f"{1000 * every_s:.0f} ms together" if every_s else "each batch",
            spread(costs).shown(" s"),
        )
        for (batch, every_s), costs in sorted(found.items())
    ]
    return table(("batch", "acknowledged", f"CPU s/GB of each of {trainers - 1} further trainers"), rows)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.further", description=__doc__)
    parser.add_argument("--trainers", type=int, default=16, help="that read together (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--gigabytes", type=float, default=1.2, help="of the epoch, in memory (default %(default)s)")
    args = parser.parse_args()
    if args.trainers < 2 or not SHARED_MEMORY.is_dir():
        parser.error("it takes two trainers or more, and /dev/shm")
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    print(shown(measure(args.trainers, args.rounds, args.gigabytes), args.trainers))


if __name__ == "__main__":
    main()
