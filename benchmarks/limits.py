"""``python -m benchmarks.limits``: the cost of moving bytes on this machine without any protocol, in CPU s/GB.

It measures bare sockets, one copy, one checksum, and files in shared memory: mapped before or mapped newly, or written
and read by calls. Blocks are as large as Penstock's. No program that uses these can cost less. Their sum is for a
writer that copies a sample once, so that its array may be used again, and for the checksums of both ends. The table has
it next to the cost of Penstock's writer and reader, inline, in the same rounds. Neither includes the server.

For small samples, the cost is one call for each. A bare loop checks an array's dtype and shape and copies it into a
kept map. The table has it next to Penstock's writer in segments. The loop has the cores' caches alone, and does not
hash, send or wait.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from benchmarks.cases import CASES, IMAGE, ONE_BY_ONE, Case
from benchmarks.rounds import Round, warmed_up
from benchmarks.sides import OURS, SEGMENTS, SHARED_MEMORY, here
from benchmarks.spread import spread
from benchmarks.transports.protocol import Load

BLOCK = 6 * 224 * 224 * 3
ROOM = 64 << 20
"""The bytes of the memory, more than a core's caches hold."""


SENDER, RECEIVER, COPY, CHECKSUM = "bare socket, sender", "receiver", "one copy", "one xxh3"
LEAST = f"sum of {SENDER} and {RECEIVER}, {COPY}, two xxh3"
PENSTOCK = "Penstock inline, writer and reader"
TARGET = 0.40
"""CPU s/GB of writer and reader at 150 kB inline, the same as in ``benchmarks.targets``."""
SMALL = (next(case for case in CASES if case.name == "4 kB"), ONE_BY_ONE)
"""The payloads whose samples are written separately."""
SMALL_SAMPLES = 200_000
"""The samples of a turn without Penstock."""
LOOP, BARE, WRITER = "the loop that makes samples", "looked at and copied in a bare loop", "Penstock's writer, segments"


def main() -> None:
    """Print a Markdown table: median, lowest and highest of the rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every figure of every round to this file")
    args = parser.parse_args()
    found: dict[str, list[float]] = {}
    singly: dict[str, dict[str, list[float]]] = {case.name: {} for case in SMALL}
    with ExitStack() as stack:
        turn = warmed_up(stack, OURS[0], IMAGE, seconds=1.0)
        kept = stack.enter_context(used_map())
        segments = [side for side in here(OURS) if side.name == SEGMENTS]
        writers = {case.name: warmed_up(stack, side, case, seconds=1.0) for side in segments for case in SMALL}
        for _ in range(args.rounds):
            note(found, {**bare(), PENSTOCK: turn().client_cpu_s_per_gb})
            for case in SMALL:
                note(singly[case.name], one_by_one(case, kept))
                if case.name in writers:
                    note(singly[case.name], {WRITER: writer_cpu_s_per_gb(writers[case.name]())})
    print(f"{os.cpu_count()} cores, blocks of {BLOCK} bytes; medians (lowest-highest) of {args.rounds} rounds\n")
    print("| what | CPU s/GB |\n|---|---|")
    for name, taken in found.items():
        print(f"| {name} | {spread(taken).shown('')} |")
    print(f"\n{verdict(found)}\n")
    print("| samples one by one | CPU s/GB | µs a sample | to a bare loop |\n|---|---|---|---|")
    for case in SMALL:
        print("\n".join(shown(case, singly[case.name])))
    if args.json:
        args.json.write_text(
            json.dumps({"block_bytes": BLOCK, "cpu_s_per_gb": found, "one_by_one_cpu_s_per_gb": singly}, indent=1)
        )


def note(found: dict[str, list[float]], seconds: dict[str, float]) -> None:
    """Add the figures of a round."""
    for name, one in seconds.items():
        found.setdefault(name, []).append(one)


def bare() -> dict[str, float]:
    """Return operation -> CPU seconds per GB, measured once."""
    source, target = np.ones(ROOM, dtype=np.uint8), np.ones(ROOM, dtype=np.uint8)
    sender, receiver = over_loopback(source, target)
    found = {
        COPY: each_block(lambda at: np.copyto(target[at : at + BLOCK], source[at : at + BLOCK])),
        CHECKSUM: each_block(lambda at: xxhash.xxh3_64(source[at : at + BLOCK].data).digest()),
        SENDER: sender,
        RECEIVER: receiver,
        **by_files(source, target),
    }
    return found | {LEAST: sender + receiver + found[COPY] + 2 * found[CHECKSUM]}


def verdict(found: dict[str, list[float]]) -> str:
    """Return whether a program that does nothing else could reach the target."""
    least = spread(found[LEAST])
    over = spread(ours / one for ours, one in zip(found[PENSTOCK], found[LEAST], strict=True))
    is_possible = "leaves room for" if least.median < TARGET else "does not leave room for"
    return (
        f"Moving bytes alone takes {least.shown('')} CPU s/GB, which {is_possible} a writer and a reader within the "
        f"target of {TARGET:.2f}. Penstock's take {over.shown()} that."
    )


def shown(case: Case, found: dict[str, list[float]]) -> list[str]:
    """Return the table's lines for samples that are written separately."""
    lines = []
    for name, taken in found.items():
        each = spread(one * case.sample_bytes / 1e3 for one in taken)
        over = spread(one / least for one, least in zip(taken, found[BARE], strict=True))
        lines.append(f"| {case.name}: {name} | {spread(taken).shown('')} | {each.shown('')} | {over.shown()} |")
    return lines


def writer_cpu_s_per_gb(one: Round) -> float:
    """Return the CPU s/GB of the writing process alone."""
    return one.writer_cpu_s / (one.samples * one.sample_bytes) * 1e9


def used_map() -> mmap.mmap:
    """Return a map of a file in shared memory whose pages exist, as large as the space between writer and reader."""
    with tempfile.TemporaryFile(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as file:
        os.ftruncate(file.fileno(), ONE_BY_ONE.room_bytes)
        kept = mmap.mmap(file.fileno(), ONE_BY_ONE.room_bytes)
    np.frombuffer(kept, np.uint8)[:] = 1
    return kept


def one_by_one(case: Case, kept: mmap.mmap) -> dict[str, float]:
    """Return operation -> CPU seconds per GB, measured once, for samples that are made as for Penstock's writer."""
    load = Load("write", "", case.shape, case.dtype, case.batch)
    like, gigabytes = load.pool()[0], SMALL_SAMPLES * case.sample_bytes / 1e9
    found = {}
    for name, work in ((LOOP, only_made), (BARE, partial(copied, like=like, kept=kept))):
        began = time.thread_time()
        work(load.samples(SMALL_SAMPLES))
        found[name] = (time.thread_time() - began) / gigabytes
    return found


def only_made(samples: Iterable[NDArray[Any]]) -> None:
    """Run the benchmark's own loop, whose cost is in the others, too."""
    for sample in samples:
        {"x": sample}  # noqa: B018 - as it is given to `write`


def copied(samples: Iterable[NDArray[Any]], like: NDArray[Any], kept: mmap.mmap) -> None:
    """Copy samples of the dtype and shape of ``like`` into the map, one after another. Raises TypeError."""
    dtype, shape, size, begin = like.dtype, like.shape, like.nbytes, 0
    for sample in samples:
        value = {"x": sample}["x"]
        if type(value) is not np.ndarray or value.dtype is not dtype or value.shape != shape:
            raise TypeError(f"{value!r:.40} is no {dtype} {shape}")
        end = begin + size
        kept[begin:end] = value  # type: ignore[call-overload]  # any contiguous memory
        begin = end if end + size <= len(kept) else 0


def each_block(work: Callable[[int], object]) -> float:
    """Return the CPU seconds per GB of doing ``work`` to every block of the memory."""
    starts = range(0, ROOM - BLOCK, BLOCK)
    began = time.thread_time()
    for start in starts:
        work(start)
    return (time.thread_time() - began) / (len(starts) * BLOCK) * 1e9


def by_files(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> dict[str, float]:
    """Measure files in shared memory, or in the folder of temporary files if there is none."""
    with tempfile.TemporaryFile(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as file:
        number = file.fileno()

        def write(at: int) -> int:
            return os.pwritev(number, [source[at : at + BLOCK].data], at)

        def read(at: int) -> int:
            return os.preadv(number, [target[at : at + BLOCK].data], at)

        os.ftruncate(number, ROOM)
        found = {"file, pwritev to a new one": each_block(write), "pwritev to a used one": each_block(write)}
        found["preadv"] = each_block(read)
        view = np.frombuffer(mmap.mmap(number, ROOM), np.uint8)
        for name in ("from a fresh map", "from a kept map"):
            found[name] = each_block(lambda at: np.copyto(target[at : at + BLOCK], view[at : at + BLOCK]))
        for _ in range(2):  # the first write to a page that was only read costs more
            into = each_block(lambda at: np.copyto(view[at : at + BLOCK], source[at : at + BLOCK]))
        return found | {"into a kept map": into}


def over_loopback(
    source: np.ndarray[Any, Any], target: np.ndarray[Any, Any], blocks: int = 1000
) -> tuple[float, float]:
    """Return CPU seconds per GB of the sender, and of the receiver in place, over TCP on this host."""
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
