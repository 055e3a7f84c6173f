"""Processes that write, read and recycle segments, each told where it is to be killed; and a look at what is left.

Samples follow from their number, so identities are verified from payloads.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock_common.errors import PenstockError
from penstock_common.segments import reader as readers
from penstock_common.segments.folder import OpenSegment, SegmentFolder
from penstock_common.segments.writer import SegmentWriter
from penstock_common.stream.client import connect
from penstock_common.stream.streams import load_stream
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.write import cleaner, payloads
from penstock_producer.write.commit import Committer
from penstock_producer.write.payloads import ShardPayloads
from penstock_producer.write.writer import Writer

SPEC = {"x": ("uint32", (500,)), "y": ("int64", ())}
SAMPLE_BYTES = 2008
BLOCK_BYTES = 8 * SAMPLE_BYTES
BUDGET_BYTES = 40 * BLOCK_BYTES
SAMPLES = 4000
"""Twelve times the budget: every file is used several times."""


def payload(number: int) -> np.ndarray:
    """The values by which a sample is known."""
    return np.random.default_rng(number).integers(0, 1 << 32, 500, dtype=np.uint32)


def die() -> None:
    """Die as by kill -9, after printing a line."""
    os.write(1, b"dies\n")
    os.kill(os.getpid(), signal.SIGKILL)


# --- where a process may be killed: a point's name -> (object, attribute, when) ---

BEFORE, AFTER, HALF = "before", "after", "half"
WRITING: dict[str, tuple[Any, str, str, int]] = {
    "in the middle of writing a block": (os, "pwritev", HALF, 9),
    "before its transaction": (SegmentWriter, "append", AFTER, 9),
    "after its transaction was sent": (Committer, "_execute", AFTER, 9),
    "before a full segment is said to be full": (payloads, "seal_command", BEFORE, 3),
    "after it was said, behind a block, and not answered": (ShardPayloads, "sealed", BEFORE, 3),
    "while a new file has no name": (os, "posix_fallocate", AFTER, 2),
    "before a file that is used again has its new name": (SegmentFolder, "_locked", BEFORE, 3),
}
RECYCLING: dict[str, tuple[Any, str, str, int]] = {
    "after sealing for the dead": (cleaner, "seal_segments", AFTER, 3),
    "before a freed file is given back": (cleaner, "free_segments", AFTER, 3),
    "in the middle of removing": (os, "ftruncate", AFTER, 2),
    "before giving back": (SegmentFolder, "give_back", BEFORE, 2),
}


def deadly(points: dict[str, tuple[Any, str, str, int]], point: str) -> None:
    """Has this process killed there; nowhere for ''."""
    if not point:
        return
    where, name, when, turn = points[point]
    real, calls = getattr(where, name), [0]

    def called(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] < turn:
            return real(*args, **kwargs)
        if when == HALF:
            fd, parts, at = args
            whole = b"".join(bytes(part) for part in parts)
            os.pwrite(fd, whole[: len(whole) // 2], at)
        elif when == AFTER:
            real(*args, **kwargs)
        die()
        return None

    setattr(where, name, called)


# --- processes ---


def write(url: str, point: str = "", pause_s: str = "0") -> None:
    """Goes on with the one shard of epoch 0; prints how it ended."""
    deadly(WRITING, point)
    try:
        with Writer("t", url=url) as writer, writer.epoch(0, sizes=[SAMPLES]).shard(0) as shard:
            while (number := shard.position) < SAMPLES:
                shard.write({"x": payload(number), "y": number})
                time.sleep(float(pause_s))
        print("done", flush=True)
    except PenstockError as error:
        print(f"ended {type(error).__name__}: {error}", flush=True)


def recycle(url: str, point: str = "") -> None:
    """Pass over the folder without end, and count a writer that closed a file as dead at once."""
    deadly(RECYCLING, point)
    if "removing" in point:
        cleaner.FOLDER_SHARE = 0
    with connect(url) as client:
        stream = load_stream(client, "t")
        print("begun", flush=True)
        while True:
            cleaner.recycle(client, stream, grace_s=0.0)
            time.sleep(0.003)


def train(url: str, member: str, deadly_read: str = "0") -> None:
    """Prints the numbers of each batch after its step; killed in the middle of that read, its file locked."""
    if int(deadly_read):
        _die_reading(int(deadly_read))
    try:
        with Loader(
            "t",
            group="g",
            batch_size=16,
            url=url,
            tuning=Tuning(member=member, lease_s=1, prefetch_bytes=100_000),
        ) as loader:
            for batch in loader:
                for row, number in enumerate(batch["y"].tolist()):
                    assert np.array_equal(batch["x"][row], payload(number)), number
                print(*batch["y"].tolist(), flush=True)
        print("done", flush=True)
    except PenstockError as error:
        print(f"ended {type(error).__name__}: {error}", flush=True)


def _die_reading(turn: int) -> None:

    real, calls = readers._require_same, [0]

    def require(segment: OpenSegment) -> None:
        calls[0] += 1
        if calls[0] == turn:
            die()
        real(segment)

    readers._require_same = require


# --- what is left ---


def folder_bytes(root: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
