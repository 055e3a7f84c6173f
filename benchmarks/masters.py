"""The CPU time of a writer and a trainer on clusters of several masters: ``python -m benchmarks.masters``.

Clients talk to each master on connections of their own, and a trainer reads each in a thread of its own. The result is
the CPU time of both for a gigabyte, as a ratio to one master of the same round. The number of partitions is the same
for all, so only the number of masters grows. Servers are not counted. Both clients pass an epoch before the clock
starts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import redis

from benchmarks.machine import describe_machine
from chaos.cluster import SLOTS, low_port
from penstock import EmbeddedServer, Loader, Tuning, Writer

MASTERS = (1, 2, 4)
PARTITIONS = 4
SAMPLE_BYTES = 150_528
"""The bytes of an image of 224 x 224 pixels in three colours."""
BATCH = 64
SAMPLES, WARM_SAMPLES = 8192, 1024
BUDGET_BYTES = 600_000_000
"""The budget. It is below what a round writes, so that entries are trimmed during the round, as in a long run."""
SETTINGS = {"cluster-enabled": "yes", "cluster-require-full-coverage": "no"}
PATIENCE_S = 60.0


def _silent(_: str) -> None:
    """Ignore notices."""


QUIET = Tuning(notify=_silent)


@contextmanager
def running_cluster(masters: int) -> Iterator[str]:
    """Start a cluster without replicas, and yield its address."""
    password = secrets.token_hex(8)
    with ExitStack() as stack:
        nodes = [EmbeddedServer(port=low_port(), password=password, extra=SETTINGS) for _ in range(masters)]
        clients = [stack.enter_context(redis.Redis.from_url(stack.enter_context(node).url)) for node in nodes]
        for number, client in enumerate(clients):
            own = range(number * SLOTS // masters, (number + 1) * SLOTS // masters)
            client.execute_command("CLUSTER", "ADDSLOTS", *own)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for client in clients[1:]:
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        ends_s = time.monotonic() + PATIENCE_S
        while not all(_serves(client, masters) for client in clients):
            if time.monotonic() > ends_s:
                raise TimeoutError("the cluster did not come about")
            time.sleep(0.05)
        yield f"redis://:{password}@{','.join(f'127.0.0.1:{node.port}' for node in nodes)}"


def _serves(client: Any, masters: int) -> bool:
    told: bytes = client.execute_command("CLUSTER", "INFO")
    return all(word in told for word in (b"cluster_state:ok", b"cluster_size:%d\r" % masters))


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _write(url: str, joined: Any, results: Any) -> None:
    rows = np.random.default_rng(0).integers(0, 255, (BATCH, SAMPLE_BYTES), dtype=np.uint8)
    with Writer("masters", url=url, tuning=QUIET) as writer:
        joined.wait(PATIENCE_S)
        for samples in (WARM_SAMPLES, SAMPLES):
            before_s = _used_s()
            size = samples // (4 * PARTITIONS)
            with writer.epoch(sizes=[size] * 4 * PARTITIONS) as epoch:
                for number in range(4 * PARTITIONS):
                    with epoch.shard(number) as shard:
                        for _ in range(size // BATCH):
                            shard.write_batch({"x": rows})
    results.put(("writer", _used_s() - before_s))


def _read(url: str, joined: Any, results: Any) -> None:
    with Loader("masters", group="g", batch_size=BATCH, url=url, tuning=QUIET) as loader:
        joined.wait(PATIENCE_S)
        for samples in (WARM_SAMPLES, SAMPLES):
            before_s = _used_s()
            if (found := sum(len(batch["x"]) for batch in loader)) != samples:
                raise AssertionError(f"{found} of {samples} samples were given out")
    results.put(("trainer", _used_s() - before_s))


def run_round(masters: int) -> dict[str, float]:
    """Return the CPU seconds of writer and trainer for a gigabyte."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with running_cluster(masters) as url:
        spec = {"x": ("uint8", (SAMPLE_BYTES,))}
        with Writer("masters", url=url, spec=spec, partitions=PARTITIONS, budget_bytes=BUDGET_BYTES, tuning=QUIET):
            pass
        joined, results = context.Barrier(2), context.Queue()
        processes = [context.Process(target=each, args=(url, joined, results), daemon=True) for each in (_write, _read)]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=PATIENCE_S) for _ in processes)
        for process in processes:
            process.join(PATIENCE_S)
    gigabytes = SAMPLES * SAMPLE_BYTES / 1e9
    found = {role: seconds / gigabytes for role, seconds in found.items()}
    return found | {"both": sum(found.values())}


def main(argv: list[str] | None = None) -> int:
    """Run the rounds, and print a table or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masters", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each number of masters (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    rounds: dict[int, list[dict[str, float]]] = {masters: [] for masters in MASTERS}
    for number in range(args.rounds):
        for masters, found in rounds.items():
            found.append(run_round(masters))
            print(f"round {number + 1}, {masters} masters: {found[-1]['both']:.2f} s/GB", file=sys.stderr, flush=True)
    told = {masters: _summary(found, rounds[MASTERS[0]]) for masters, found in rounds.items()}
    if args.json:
        print(json.dumps({"machine": describe_machine(), "rounds": rounds, "masters": told}))
        return 0
    print(f"{describe_machine()}\n\n| masters | writer | trainer | both | ratio (low to high) |\n|---|---|---|---|---|")
    for masters, one in told.items():
        seconds = " | ".join(f"{one[role]:.2f} s/GB" for role in ("writer", "trainer", "both"))
        print(f"| {masters} | {seconds} | {one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f}) |")
    return 0


def _summary(found: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, float]:
    ratios = [one["both"] / first["both"] for one, first in zip(found, base, strict=True)]
    medians = {role: statistics.median(one[role] for one in found) for role in found[0]}
    return medians | {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


if __name__ == "__main__":
    sys.exit(main())
