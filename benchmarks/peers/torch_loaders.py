"""PyTorch's DataLoader (``torch``) and torchdata's StatefulDataLoader (``torchdata``): map-style, two workers each.

Ranks share by DistributedSampler. The producers are the loader's worker processes.
"""

from __future__ import annotations

import base64
import pickle
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.peers.protocol import Job, Report, run, sample

WORKERS = 2


class Numbered(Dataset):
    """The samples, each made on demand."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __len__(self) -> int:
        return self.job.samples

    def __getitem__(self, number: int) -> Any:
        time.sleep(self.job.make_s)
        return torch.from_numpy(sample(number))


def read(job: Job, report: Report) -> None:
    """Read one epoch."""
    dataset = Numbered(job)
    settings: dict[str, Any] = {"batch_size": job.batch, "num_workers": WORKERS}
    if job.world > 1:
        settings["sampler"] = DistributedSampler(dataset, job.world, job.rank, shuffle=False)
    if job.mode == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader: Any = StatefulDataLoader(dataset, **settings)
        if job.state:
            loader.load_state_dict(pickle.loads(base64.b64decode(job.state["pickle"])))  # noqa: S301
    else:
        loader = DataLoader(dataset, **settings)
    batches = iter(loader)
    report.say("workers", pids=[worker.pid for worker in getattr(batches, "_workers", ())])
    for rows in batches:
        report.step(rows.numpy(), job.step_s)
        if report.is_checkpoint_due(job):
            state = pickle.dumps(loader.state_dict() if job.mode == "torchdata" else {})
            report.say("checkpoint", state={"pickle": base64.b64encode(state).decode()})


if __name__ == "__main__":
    run({"read": read})
