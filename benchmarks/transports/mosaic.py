"""mosaicml-streaming, its reading side: StreamingDataset over local MDS shards, StreamingDataLoader with one worker.

The shards are written before the training, and stay in the page cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers import streaming_library
from benchmarks.transports.protocol import Load, Turns, run

streaming: Any = streaming_library.load()
WRITTEN_BYTES = 256 << 20
MOST_SAMPLES = 100_000


def read(load: Load, turns: Turns) -> None:
    """Read as many passes as a turn needs."""
    folder = Path(load.place) / "shards"
    if not (folder / "index.json").exists():
        _write(load, folder)
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(local=str(folder), shuffle=False, batch_size=load.batch)
    loader = streaming.StreamingDataLoader(dataset, batch_size=load.batch, num_workers=1, persistent_workers=True)
    for samples in turns:
        while turns.samples < samples:
            for batch in loader:
                turns.got(batch["x"])
                if turns.samples >= samples:
                    break


def _write(load: Load, folder: Path) -> None:
    most = min(WRITTEN_BYTES // load.sample_bytes, MOST_SAMPLES)
    count = max(most // load.batch, 2) * load.batch
    shape = ",".join(map(str, load.shape))
    with streaming.MDSWriter(out=str(folder), columns={"x": f"ndarray:{load.dtype}:{shape}"}) as out:
        for sample in load.samples(count):
            out.write({"x": sample})


if __name__ == "__main__":
    run({"read": read})
