"""An epoch larger than memory, on a disk: ``python -m benchmarks.disk DIR``, against ``cat FILES > /dev/null``.

One producer writes it once into segments. Two processes replay it at the same time, three times each. Then it is
exported, and read from the files without a server. Every pass begins with the files out of the page cache. The resident
memory of the readers is shown. A disk's speed drifts, so each figure has a ``cat`` of the same files, immediately
before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from benchmarks.command import penstock as command

SAMPLE_BYTES, BATCH = 150_528, 64


def dropped(files: list[Path]) -> None:
    """Remove the files from the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cat(files: list[Path]) -> float:
    """Return the bytes a second that cat gets from the disk."""
    dropped(files)
    began = time.perf_counter()
    subprocess.run(["sh", "-c", 'cat "$@" > /dev/null', "sh", *map(str, files)], check=True)
    return sum(path.stat().st_size for path in files) / (time.perf_counter() - began)


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def passes(batches: Callable[[], Iterator[object]], files: list[Path], total: int, rounds: int) -> None:
    """Print speed and memory of each pass, next to the speed of a cat."""
    ratios = []
    before = cat(files)
    for number in range(rounds):
        dropped(files)
        began = time.perf_counter()
        for _ in batches():
            pass
        speed = total / (time.perf_counter() - began)
        after = cat(files)
        ratios.append(speed / statistics.mean([before, after]))
        print(
            f"| {number} | {speed / 1e9:.2f} | {before / 1e9:.2f}, {after / 1e9:.2f} | {ratios[-1]:.2f} | "
            f"{resident() >> 20} |"
        )
        before = after
    print(f"\nmedian of the ratios: {statistics.median(ratios):.2f}\n")


def replaying(url: str, prefetch: int, rounds: int) -> None:
    """Replay in a separate process, and report seconds and memory after each pass."""
    with penstock.Replay(
        "disk", url=url, epoch=0, batch_size=BATCH, tuning=penstock.Tuning(prefetch_bytes=prefetch)
    ) as replay:
        for number in range(rounds):
            began, samples = time.perf_counter(), 0
            for batch in replay:
                samples += batch.size
            told = {"pass": number, "s": time.perf_counter() - began, "samples": samples, "rss": resident()}
            print(json.dumps(told), flush=True)


def at_once(url: str, prefetch: int, files: list[Path], total: int) -> None:
    """Run the processes of two groups at once, three passes each."""
    dropped(files)
    ours = [sys.executable, "-m", "benchmarks.disk", "--replay", url, "--prefetch", str(prefetch), "unused"]
    both = [subprocess.Popen(ours, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    print("| process | pass | GB/s | resident, MB |\n|---|---|---|---|")
    for name, process in enumerate(both):
        for line in process.communicate()[0].splitlines():
            told = json.loads(line)
            print(f"| {name} | {told['pass']} | {total / told['s'] / 1e9:.2f} | {told['rss'] >> 20} |")
        if process.returncode:
            raise SystemExit(process.returncode)


def main() -> None:
    """Print the tables."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("directory", type=Path, help="on the disk to be measured; used and emptied")
    arguments.add_argument("--megabytes", type=int, default=1500)
    arguments.add_argument("--prefetch", type=int, default=64 << 20, help="bytes; the readers' budget")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--replay", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.replay:
        replaying(options.replay, options.prefetch, 3)
        return
    root = options.directory / "penstock-benchmark"
    try:
        measure(root, options.megabytes * 1_000_000, options.prefetch, options.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measure(root: Path, nbytes: int, prefetch: int, rounds: int) -> None:
    """Measure all passes in a folder."""
    steps = nbytes // (SAMPLE_BYTES * BATCH)
    rows = np.random.default_rng(0).integers(0, 255, (BATCH, SAMPLE_BYTES), dtype=np.uint8)
    total = steps * rows.nbytes
    with penstock.EmbeddedServer() as server:
        segments = f"segments:{root / 'segments'}"
        spec = {"x": ("uint8", (SAMPLE_BYTES,))}
        with penstock.Writer(
            "disk", url=server.url, spec=spec, payload=segments, budget_bytes=2 * total, retention="epochs:1"
        ) as writer:
            began = time.perf_counter()
            with writer.epoch() as epoch:
                for _ in range(steps):
                    epoch.write_batch({"x": rows})
            print(f"\nwritten once: {total / 1e9:.1f} GB at {total / (time.perf_counter() - began) / 1e9:.2f} GB/s")
        head = "| pass | GB/s | cat before, after | ratio | resident, MB |\n|---|---|---|---|---|"
        files = sorted(root.glob("segments/*/*.seg"))
        print(f"\nReplay from segments, prefetch {prefetch >> 20} MiB\n\n{head}")
        quiet: dict[str, Any] = {"batch_size": BATCH, "prefetch_bytes": prefetch, "notify": lambda _: None}
        with penstock.Replay("disk", url=server.url, epoch=0, **quiet) as replay:
            passes(lambda: iter(replay), files, total, rounds)
        print(f"Replay, shuffled\n\n{head}")
        with penstock.Replay("disk", url=server.url, epoch=0, shuffle=1, **quiet) as mixed:
            passes(lambda: iter(mixed), files, total, rounds)
        print("Two processes at once, three passes each\n")
        at_once(server.url, prefetch, files, total)
        began = time.perf_counter()
        command("export", "disk", root / "export", "--url", server.url)
        print(f"\nexported at {total / (time.perf_counter() - began) / 1e9:.2f} GB/s")
    files = sorted((root / "export").glob("*.seg"))
    found = penstock.Files(root / "export", **quiet)
    print(f"\nFiles, without a server\n\n{head}")
    passes(lambda: iter(found), files, total, rounds)
    shuffled = penstock.Files(root / "export", shuffle=1, **quiet)
    print(f"Files, shuffled\n\n{head}")
    passes(lambda: iter(shuffled), files, total, rounds)


if __name__ == "__main__":
    main()
