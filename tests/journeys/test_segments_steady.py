"""Segments that turn over: after the first budget's worth nothing new is made, the same files are used again."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np

from penstock_consumer.loader import Loader
from penstock_producer.writing.writer import Writer

MIB = 1 << 20
SAMPLE_BYTES = 20_000
SAMPLES = 2000
"""Ten times the budget."""
SPEC = {"x": ("uint8", (SAMPLE_BYTES,)), "n": ("int64", ())}


def files_in(root: Path) -> set[int]:
    """The files there are, by inode: a name means one content, a file has many of them one after the other."""
    return {entry.inode() for folder in os.scandir(root) for entry in os.scandir(folder) if entry.name.endswith(".seg")}


def test_in_the_steady_state_no_new_file_is_made(any_url: str, tmp_path: Path) -> None:
    """New files are new pages, which the kernel has to find and clear: that costs as much as the copy itself."""
    root, read = tmp_path / "plane", []

    def train() -> None:
        with Loader("t", group="g", batch_size=10, url=any_url, timeout_s=60, notify=lambda _: None) as loader:
            while len(read) < SAMPLES:
                for batch in loader:
                    read.extend(batch["n"].tolist())

    with Writer(
        "t", url=any_url, spec=SPEC, payload=f"segments:{root}", budget_bytes=4 * MIB, block_bytes=100_000,
        notify=lambda _: None,
    ) as writer:  # fmt: skip
        trainer = threading.Thread(target=train)
        trainer.start()
        seen: set[int] = set()
        new_of_each_budget = [0] * 10
        with writer.epoch() as epoch:
            for number in range(SAMPLES):
                epoch.write({"x": np.full(SAMPLE_BYTES, number % 251, np.uint8), "n": number})
                if number % 5 == 0:
                    new_of_each_budget[number * 10 // SAMPLES] += len(files_in(root) - seen)
                    seen |= files_in(root)
        trainer.join(60)
        assert sorted(read) == list(range(SAMPLES))
        nbytes = sum(path.stat().st_size for path in root.rglob("*.seg"))
    assert new_of_each_budget[0] > 0
    assert sum(new_of_each_budget[3:]) == 0, new_of_each_budget
    assert nbytes < 8 * MIB
