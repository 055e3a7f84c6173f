"""The cost of waking one process among many, with a plain redis-py ``GET``, the least request of a client.

A process that runs again after others had the core finds its caches cold. Only the ``GET`` itself is counted, by the
CPU clock of its thread, without the passing on and the sleeping between.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from typing import Any

import redis

from penstock import EmbeddedServer

PROCESSES = 32
CALLS = 1600
"""The calls of each mode in a round."""
PAUSE_S = 0.03
PAUSED_CALLS = 100


def measure(rounds: int) -> dict[str, list[float]]:
    """Return mode -> median microseconds of CPU for a ``GET``, of each round."""
    found: dict[str, list[float]] = {}
    with EmbeddedServer() as server:
        for _ in range(rounds):
            for name, processes, pause_s in (
                ("one process, back to back", 1, 0.0),
                (f"{PROCESSES} processes in turns", PROCESSES, 0.0),
                (f"one process, each {1000 * PAUSE_S:.0f} ms", 1, PAUSE_S),
            ):
                found.setdefault(name, []).append(_ring(server.url, processes, pause_s))
    return found


def shown(found: dict[str, list[float]]) -> str:
    """Return the results as a table."""
    text = "\n| a plain redis-py `GET` | CPU of the client, us |\n|---|---|\n"
    return text + "".join(
        f"| {name} | {statistics.median(taken):.0f} ({min(taken):.0f}-{max(taken):.0f}) |\n"
        for name, taken in found.items()
    )


def _ring(url: str, processes: int, pause_s: float) -> float:
    """Pass a byte around from process to process. The process that has it sends one request."""
    context = multiprocessing.get_context("fork")
    pipes, results = [os.pipe() for _ in range(processes)], context.SimpleQueue()
    calls = PAUSED_CALLS if pause_s else CALLS // processes
    children = [
        context.Process(target=_ask, args=(url, pipes, number, calls, pause_s, results), daemon=True)
        for number in range(processes)
    ]
    for child in children:
        child.start()
    os.write(pipes[0][1], b"x")
    taken: list[float] = [one for _ in children for one in results.get()]
    for child in children:
        child.join()
    for ends in pipes:
        for end in ends:
            os.close(end)
    return statistics.median(taken)


def _ask(url: str, pipes: list[tuple[int, int]], number: int, calls: int, pause_s: float, results: Any) -> None:
    mine, following = pipes[number][0], pipes[(number + 1) % len(pipes)][1]
    client, taken = redis.Redis.from_url(url), []
    client.get("nothing")
    for _ in range(calls):
        os.read(mine, 1)
        time.sleep(pause_s)
        before = time.thread_time()
        client.get("nothing")
        taken.append((time.thread_time() - before) * 1e6)
        os.write(following, b"x")
    results.put(taken)
