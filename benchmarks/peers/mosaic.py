"""mosaicml-streaming: StreamingDataset and StreamingDataLoader over local MDS shards, ``state_dict`` at checkpoints.

The shards are written before the training. Nothing is produced during it.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

import numpy as np

from benchmarks.peers.protocol import SAMPLE_BYTES, Job, Report, run, sample
from benchmarks.peers.streaming_library import load

streaming: Any = load()


def prepare(job: Job, report: Report) -> None:
    """Write the shards."""
    with streaming.MDSWriter(out=job.place, columns={"x": f"ndarray:uint8:{SAMPLE_BYTES}"}, size_limit=1 << 20) as out:
        for number in range(job.samples):
            out.write({"x": sample(number)})


def read(job: Job, report: Report) -> None:
    """Read one epoch."""
    os.environ |= {"RANK": str(job.rank), "WORLD_SIZE": str(job.world), "LOCAL_WORLD_SIZE": str(job.world)}
    os.environ |= {"LOCAL_RANK": str(job.rank), "MASTER_ADDR": "127.0.0.1", **job.extra}
    if job.world > 1:  # before StreamingDataset, which otherwise makes a temporary group
        importlib.import_module("torch.distributed").init_process_group("gloo")
    streaming.base.util.clean_stale_shared_memory()  # as its documentation asks after a kill, in every rank
    dataset = streaming.StreamingDataset(local=job.place, shuffle=False, batch_size=job.batch)
    loader = streaming.StreamingDataLoader(dataset, batch_size=job.batch, num_workers=0, collate_fn=stacked)
    if job.state:
        loader.load_state_dict(job.state)
    for rows in loader:
        time.sleep(job.make_s * len(rows))
        report.step(rows, job.step_s)
        if report.is_checkpoint_due(job):
            report.say("checkpoint", state=loader.state_dict())


def stacked(samples: list[Any]) -> Any:
    """Return a batch as a tensor.

    With arrays, the loader counts every number as a sample, also in its state.
    """
    return importlib.import_module("torch").from_numpy(np.stack([one["x"] for one in samples]))


if __name__ == "__main__":
    run({"prepare": prepare, "read": read})
