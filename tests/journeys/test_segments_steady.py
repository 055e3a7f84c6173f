"""The space of segments: the same files are used again after the first budget's worth, and little of one is unused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_common.segments.folder import SegmentFolder
from penstock_common.stream.groups.roster import load_roster
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import Writer

MIB = 1 << 20
SAMPLE_BYTES = 20_000
SAMPLES = 2000
"""Ten times the budget."""
SPEC = {"x": ("uint8", (SAMPLE_BYTES,)), "n": ("int64", ())}


def test_in_the_steady_state_no_new_file_is_made(any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New files are new pages, which the kernel has to find and clear: that costs as much as the copy itself."""
    root = tmp_path / "plane"
    read: list[int] = []
    new_of_each_budget = [0] * 10
    number, real = 0, SegmentFolder._make_new

    def counted(*args: Any) -> Any:
        new_of_each_budget[number * 10 // SAMPLES] += 1
        return real(*args)

    monkeypatch.setattr(SegmentFolder, "_make_new", counted)

    def train() -> None:
        with Loader(
            "t", group="g", batch_size=10, url=any_url, tuning=Tuning(timeout_s=60, notify=lambda _: None)
        ) as loader:
            while len(read) < SAMPLES:
                for batch in loader:
                    read.extend(batch["n"].tolist())

    with Writer(
        "t",
        url=any_url,
        spec=SPEC,
        payload=f"segments:{root}",
        budget_bytes=4 * MIB,
        tuning=Tuning(block_bytes=100_000, notify=lambda _: None),
    ) as writer:
        trainer = threading.Thread(target=train)
        trainer.start()
        with writer.epoch() as epoch:
            for number in range(SAMPLES):
                epoch.write({"x": np.full(SAMPLE_BYTES, number % 251, np.uint8), "n": number})
        trainer.join(60)
        assert sorted(read) == list(range(SAMPLES))
        nbytes = sum(path.stat().st_size for path in root.rglob("*.seg"))
    assert new_of_each_budget[0] > 0
    assert sum(new_of_each_budget[3:]) == 0, new_of_each_budget
    assert nbytes < 8 * MIB


@pytest.mark.parametrize("kind", ["ragged", "compressed", "planned"])
def test_the_files_of_shards_take_hardly_more_than_their_payload(any_url: str, tmp_path: Path, kind: str) -> None:
    """Files of ragged shards took four times the budget, and a folder was full with a third of it."""
    shape: tuple[int | None, ...] = (None,) if kind == "ragged" else (SAMPLE_BYTES,)
    with Writer(
        "t", url=any_url, spec={"x": ("uint8", shape)}, payload=f"segments:{tmp_path}", budget_bytes=64 * MIB,
        tuning=Tuning(compression="zstd" if kind == "compressed" else "none", notify=lambda _: None),
    ) as writer:  # fmt: skip
        shards, samples = (5, 220) if kind == "planned" else (20, 50)  # of a file and a bit, or of a fifth of one
        for _ in range(2):
            epoch = writer.epoch(sizes=[samples] * shards)
            for number in range(shards):
                with epoch.shard(number) as shard:
                    for at in range(samples):
                        shard.write({"x": np.random.default_rng(at).integers(0, 50, SAMPLE_BYTES, np.uint8)})
            epoch.close()
        held = load_roster(writer.client, writer.stream.partitions[0]).bytes
    files = [path.stat().st_size for path in tmp_path.rglob("*.seg")]
    assert held > 8 * MIB
    assert sum(files) < 1.3 * held, sorted(files)
