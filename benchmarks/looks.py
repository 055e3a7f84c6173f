"""``python -m benchmarks.looks``: 45 looks of the monitor at each of five prepared situations, counting wrong causes.

The processes are real: a production with workers, trainers, and a private server for each situation. It takes six
minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import redis

import penstock
from benchmarks.streams import paces

STREAM = "looked-at"
SETTLE_S = 15.0
"""The pause before the looks. A verdict is of the last ten seconds, which must not include the time before the
situation.
"""
SAMPLE_BYTES = 50_000
WORKERS = 2
ROW = np.zeros(SAMPLE_BYTES, np.uint8)


@dataclass(frozen=True)
class Prepared:
    """One situation."""

    cause: tuple[str, ...]
    """The cause that the monitor should name."""
    make: str = "quickly"
    budget: str = "16mb"
    trainers: tuple[tuple[str, float], ...] = (("resnet", 0.02),)
    """(group, seconds in each step of four samples)."""
    killed: bool = False
    """Whether the trainers are killed during the situation."""
    foreign_keys: bool = False
    """Whether other keys fill the server's memory."""


SITUATIONS = {
    "slow producers": Prepared(("producers",), make="slowly"),
    "slow trainers": Prepared(("trainers",), trainers=(("resnet", 0.5),)),
    "a slow group beside a fast one": Prepared(("slow group",), trainers=(("resnet", 0.005), ("vit", 0.05))),
    "a dead trainer": Prepared(("dead member",), trainers=(("resnet", 0.5),), killed=True),
    "a full server": Prepared(("memory",), budget="64mb", trainers=(("resnet", 0.02),), foreign_keys=True),
}


def data() -> range:
    """Return the numbers of samples, more than are made in a minute."""
    return range(10_000_000)


def quickly(number: int) -> dict[str, Any]:
    """Return a sample that costs next to nothing."""
    return {"x": ROW, "y": np.int64(number)}


def slowly(number: int) -> dict[str, Any]:
    """Return a sample that takes a worker 50 ms."""
    time.sleep(0.05)
    return quickly(number)


def train(url: str, group: str, step_s: float) -> None:
    """Train without an end."""
    with penstock.Loader(
        STREAM, group=group, batch_size=4, url=url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as loader:
        for _ in loader:
            time.sleep(step_s)


@contextmanager
def command(url: str, *argv: str, **how: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a penstock command in another process during the block."""
    ran = subprocess.Popen(
        [sys.executable, "-m", "penstock", *argv], env={**os.environ, "PENSTOCK_URL": url}, text=True, **how
    )
    try:
        yield ran
    finally:
        ran.terminate()
        ran.wait()


def await_all(url: str, trainers: int) -> None:
    """Wait until all workers and trainers are at work, because their start is not part of a situation."""
    with redis.Redis.from_url(url) as client:
        while (there := paces(client, STREAM))["w"] < WORKERS or there["t"] < trainers:
            time.sleep(0.2)


def looks_at(prepared: Prepared, count: int) -> Counter[str]:
    """Return cause -> the number of looks that named it."""
    context = multiprocessing.get_context("spawn")
    making = [
        "dataset",
        "benchmarks.looks:data",
        "--transform",
        f"benchmarks.looks:{prepared.make}",
        "--workers",
        str(WORKERS),
    ]
    making += ["--budget", prepared.budget, "--stream", STREAM]
    with ExitStack() as stack:
        server = stack.enter_context(penstock.EmbeddedServer(maxmemory_bytes=256 << 20))
        stack.enter_context(command(server.url, "produce", *making, stderr=subprocess.DEVNULL))
        trainers = [context.Process(target=train, args=(server.url, *each), daemon=True) for each in prepared.trainers]
        for trainer in trainers:
            trainer.start()
            stack.callback(trainer.kill)
        await_all(server.url, len(trainers))
        time.sleep(SETTLE_S)
        if prepared.killed:
            for trainer in trainers:
                trainer.kill()
        if prepared.foreign_keys:
            with redis.Redis.from_url(server.url) as raw, suppress(redis.exceptions.OutOfMemoryError):
                for number in range(256):
                    raw.set(f"cache:{number}", os.urandom(1 << 20))
        time.sleep(SETTLE_S)
        monitor = command(server.url, "monitor", STREAM, "--json", "--every", "1", stdout=subprocess.PIPE)
        ran = stack.enter_context(monitor)
        assert ran.stdout is not None
        told = [json.loads(ran.stdout.readline())[0]["bottleneck"] for _ in range(count)]
        print(f"  {told[-1]['text']}", flush=True)
        return Counter(each["cause"] for each in told)


def main() -> int:
    """Run the command. Return 1 if more than two looks of a situation named another cause."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--looks", type=int, default=45)
    parser.add_argument("only", nargs="*", choices=[[], *SITUATIONS])
    args = parser.parse_args()
    worst = 0
    for name in args.only or SITUATIONS:
        found = looks_at(SITUATIONS[name], args.looks)
        wrong = args.looks - sum(found[cause] for cause in SITUATIONS[name].cause)
        worst = max(worst, wrong)
        print(f"{name}: {wrong} of {args.looks} looks named another cause: {dict(found)}", flush=True)
    return int(worst > 2)


if __name__ == "__main__":
    sys.exit(main())
