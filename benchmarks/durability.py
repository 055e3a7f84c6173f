"""The rate of a writer and a trainer at each level of durability: ``python -m benchmarks.durability``.

The server has a replica at every level, so that only the waits for it differ. A writer fills an epoch while a trainer
reads it. The result is the samples per second until the trainer has the last one, as a ratio to ``memory`` of the same
round. Both pass an epoch before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from typing import Any

import numpy as np
import redis

from benchmarks.machine import describe_machine
from penstock import EmbeddedServer, Loader, Tuning, Writer

LEVELS = ("memory", "auto", "replicas=1")
SIZES = {"1 kB": 1024, "150 kB": 150_528}
PARTITIONS, SHARDS = 1, 8
BATCH = 64
BYTES, WARM_BYTES = 800_000_000, 150_000_000
MOST_SAMPLES = 200_000
"""The samples of an epoch, so that small ones take no longer than large ones."""
BUDGET_BYTES = 400_000_000
PATIENCE_S = 120.0


def _silent(_: str) -> None:
    """Ignore notices."""


QUIET = Tuning(notify=_silent)


def _sizes(sample_bytes: int) -> list[int]:
    """Return the samples of the epoch before the measured one, and of that one."""
    step = SHARDS * BATCH
    return [max(1, min(MOST_SAMPLES, size // sample_bytes) // step) * step for size in (WARM_BYTES, BYTES)]


def _write(url: str, sample_bytes: int, ready: Any, results: Any) -> None:
    rows = np.random.default_rng(0).integers(0, 255, (BATCH, sample_bytes), dtype=np.uint8)
    with Writer("durable", url=url, tuning=QUIET) as writer:
        for samples in _sizes(sample_bytes):
            ready.wait(PATIENCE_S)
            began_s = time.monotonic()
            with writer.epoch(sizes=[samples // SHARDS] * SHARDS) as epoch:
                for number in range(SHARDS):
                    with epoch.shard(number) as shard:
                        for _ in range(samples // SHARDS // BATCH):
                            shard.write_batch({"x": rows})
    results.put(("began", began_s))


def _read(url: str, sample_bytes: int, ready: Any, results: Any) -> None:
    with Loader("durable", group="g", batch_size=BATCH, url=url, tuning=QUIET) as loader:
        _ = loader.spec  # so it has joined
        for samples in _sizes(sample_bytes):
            ready.wait(PATIENCE_S)
            if (found := sum(len(batch["x"]) for batch in loader)) != samples:
                raise AssertionError(f"{found} of {samples} samples were given out")
    results.put(("ended", time.monotonic()))


def _await_replica(url: str) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    with redis.Redis.from_url(url) as client:
        while client.info("replication").get("slave0", {}).get("state") != "online":
            if time.monotonic() > ends_s:
                raise TimeoutError("the replica does not follow")
            time.sleep(0.1)


def run_round(level: str, sample_bytes: int) -> float:
    """Return the samples per second at a level, on a server with a replica."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with EmbeddedServer() as server:
        follows = {"replicaof": f"127.0.0.1 {server.port}"}
        if server.password:
            follows["masterauth"] = server.password
        with EmbeddedServer(extra=follows):
            _await_replica(server.url)
            spec, tuning = {"x": ("uint8", (sample_bytes,))}, Tuning(durability=level, notify=_silent)
            with Writer(
                "durable", url=server.url, spec=spec, partitions=PARTITIONS, budget_bytes=BUDGET_BYTES, tuning=tuning
            ):
                pass
            ready, results = context.Barrier(2), context.Queue()
            arguments = (server.url, sample_bytes, ready, results)
            processes = [context.Process(target=each, args=arguments, daemon=True) for each in (_write, _read)]
            for process in processes:
                process.start()
            found = dict(results.get(timeout=PATIENCE_S) for _ in processes)
            for process in processes:
                process.join(PATIENCE_S)
    return _sizes(sample_bytes)[1] / float(found["ended"] - found["began"])


def main(argv: list[str] | None = None) -> int:
    """Run the rounds, and print a table or JSON."""
    about = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.durability", description=about)
    parser.add_argument("--rounds", type=int, default=5, help="of each level and size (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    rates: dict[str, dict[str, list[float]]] = {size: {level: [] for level in LEVELS} for size in SIZES}
    for number in range(args.rounds):
        for size, found in rates.items():
            for level in LEVELS:
                found[level].append(run_round(level, SIZES[size]))
                told = f"round {number + 1}, {size}, {level}: {found[level][-1]:,.0f} samples/s"
                print(told, file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({"machine": describe_machine(), "rates": rates}))
        return 0
    print(f"{describe_machine()}\n\n| samples | durability | samples/s | ratio (low to high) |\n|---|---|---|---|")
    for size, found in rates.items():
        for level, each in found.items():
            ratios = [one / base for one, base in zip(each, found[LEVELS[0]], strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {size} | {level} | {statistics.median(each):,.0f} | {spread} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
