"""The files of segments that a process keeps locked: none after the end of a shard or of an epoch.

A file that is locked is not used again. A writer makes a new one then, beyond the budget.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import Loader, Tuning, Writer
from penstock_common.segments.folder import SegmentFolder
from penstock_common.stream.payloads import segments_of
from tests.clusters import until

SPEC = {"x": ("uint8", (1 << 16,))}
SIZE, BUDGET_BYTES = 64, 8 << 20


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """A training step may take longer than an epoch's samples, without any garbage collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def locked(folder: SegmentFolder) -> list[str]:
    """Return the files that a process has locked."""
    return [name for name in (*folder.names(), *folder.spare()) if not folder.is_unused(name)]


@pytest.mark.parametrize("views", [False, True])
def test_no_file_is_locked_after_an_epoch(any_url: str, memory_path: Path, views: bool) -> None:
    """Each epoch left a file locked, and files took 1.4 times the budget."""
    quiet, payload = Tuning(notify=lambda _: None, block_bytes=8 << 16), f"segments:{memory_path / 'segments'}"
    with (
        Writer("t", url=any_url, spec=SPEC, budget_bytes=BUDGET_BYTES, payload=payload, tuning=quiet) as writer,
        Loader("t", group="g", batch_size=8, url=any_url, tuning=Tuning(notify=lambda _: None, views=views)) as loader,
    ):
        segments = segments_of(writer.stream)
        assert segments is not None
        for _ in range(8):
            with writer.epoch(sizes=[SIZE]) as epoch, epoch.shard(0) as shard:
                for number in range(SIZE):
                    shard.write({"x": np.full(1 << 16, number, np.uint8)})
            assert locked(segments) == []
            for batch in loader:
                assert batch["x"].shape == (8, 1 << 16)
            del batch
            until(lambda: locked(segments) == [])  # the reader's thread ends behind its last batch
