"""``python -m benchmarks.limits``: what moving bytes costs on this machine with no protocol at all, in CPU s/GB.

Bare sockets, one copy, one checksum, in blocks as large as Penstock's: nothing that uses them can cost less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

BLOCK = 6 * 224 * 224 * 3
ROOM = 64 << 20
"""Larger than what a core keeps in its caches."""


def main() -> None:
    """Prints a Markdown table: median and lowest of the rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every figure of every round to this file")
    args = parser.parse_args()
    source, target = np.ones(ROOM, dtype=np.uint8), np.ones(ROOM, dtype=np.uint8)
    found: dict[str, list[float]] = {"one copy": [], "one xxh3": [], "bare socket, sender": [], "receiver": []}
    for _ in range(args.rounds):
        found["one copy"].append(each_block(lambda at: np.copyto(target[at : at + BLOCK], source[at : at + BLOCK])))
        found["one xxh3"].append(each_block(lambda at: xxhash.xxh3_64(source[at : at + BLOCK].data).digest()))
        sender, receiver = over_loopback(source, target)
        found["bare socket, sender"].append(sender)
        found["receiver"].append(receiver)
    print(f"{os.cpu_count()} cores, blocks of {BLOCK} bytes\n\n| what | CPU s/GB | lowest |\n|---|---|---|")
    for name, taken in found.items():
        print(f"| {name} | {statistics.median(taken):.3f} | {min(taken):.3f} |")
    if args.json:
        args.json.write_text(json.dumps({"block_bytes": BLOCK, "cpu_s_per_gb": found}, indent=1))


def each_block(work: Callable[[int], object]) -> float:
    """Seconds per GB of doing this to every block of the memory."""
    starts = range(0, ROOM - BLOCK, BLOCK)
    began = time.perf_counter()
    for start in starts:
        work(start)
    return (time.perf_counter() - began) / (len(starts) * BLOCK) * 1e9


def over_loopback(
    source: np.ndarray[Any, Any], target: np.ndarray[Any, Any], blocks: int = 1000
) -> tuple[float, float]:
    """CPU seconds per GB of who sends and of who receives in place, over TCP on this host."""
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as server:
        answers = context.Queue()
        sender = context.Process(target=_send, args=(server.getsockname(), source, blocks, answers), daemon=True)
        sender.start()
        connection, _ = server.accept()
    with connection:
        began, view = _own_cpu(), target.data
        for number in range(blocks):
            at = number * BLOCK % (ROOM - BLOCK)
            if connection.recv_into(view[at : at + BLOCK], BLOCK, socket.MSG_WAITALL) != BLOCK:
                raise ConnectionError("the sender ended early")
        used = _own_cpu() - began
    sent: float = answers.get(timeout=60)
    sender.join(60)
    gigabytes = blocks * BLOCK / 1e9
    return sent / gigabytes, used / gigabytes


def _send(address: tuple[str, int], source: np.ndarray[Any, Any], blocks: int, answers: Any) -> None:
    began, view = _own_cpu(), source.data
    with socket.create_connection(address) as connection:
        for number in range(blocks):
            at = number * BLOCK % (ROOM - BLOCK)
            connection.sendall(view[at : at + BLOCK])
    answers.put(_own_cpu() - began)


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
